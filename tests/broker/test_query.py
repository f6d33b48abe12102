"""Messages and offsets are found by id, key, position and time, and what is not found is answered as Apache does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.small_broker import START_MS, SmallBroker
from skylark.broker.query import join_within
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.records import decode_record, decode_records, java_hash, parse_message_id
from skylark.wire.stats import ConsumeQueue

FOREVER_MS = 2**63 - 1


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[SmallBroker]:
    broker = SmallBroker(tmp_path / "store")
    yield broker
    broker.store.close()


def test_a_message_by_its_id(broker: SmallBroker) -> None:
    broker.send("T", body=b"first")
    second = broker.send("T", body=b"second")
    _, offset = parse_message_id(second.message_id)
    answer = broker.ask(RequestCode.VIEW_MESSAGE_BY_ID, offset=offset, topic="T")
    assert answer.code == ResponseCode.SUCCESS
    message = decode_record(answer.body)
    assert (message.body, message.queue_offset, message.log_offset) == (b"second", 1, offset)


@pytest.mark.parametrize("offset", [-1, 1, 17, 1 << 40])
def test_no_message_at_that_offset(broker: SmallBroker, offset: int) -> None:
    broker.send("T")
    answer = broker.ask(RequestCode.VIEW_MESSAGE_BY_ID, offset=offset)
    assert (answer.code, answer.remark) == (1, f"can not find message by the offset, {offset}")


def by_key(broker: SmallBroker, key: str, **more: object) -> list[bytes]:
    fields = {"topic": "T", "key": key, "maxNum": 10, "beginTimestamp": 0, "endTimestamp": FOREVER_MS} | more
    answer = broker.ask(RequestCode.QUERY_MESSAGE, **fields)
    if answer.code == ResponseCode.QUERY_NOT_FOUND:
        assert answer.remark == "can not find message, maybe time range not correct"
        return []
    assert answer.code == ResponseCode.SUCCESS
    return [message.body for message in decode_records(answer.body)]


def test_messages_by_key(broker: SmallBroker) -> None:
    broker.send("T", body=b"1", KEYS="order-1 order-2")
    broker.send("T", body=b"2", KEYS="order-2")
    broker.send("U", body=b"3", KEYS="order-2")
    assert by_key(broker, "order-1") == [b"1"]
    assert by_key(broker, "order-2") == [b"1", b"2"]
    assert by_key(broker, "order-3") == []
    assert by_key(broker, "order-2", maxNum=1) == [b"2"]
    assert by_key(broker, "order-2", endTimestamp=START_MS - 1_000) == []


def test_an_answer_to_a_key_says_how_far_the_index_is(broker: SmallBroker) -> None:
    appended = broker.send("T", KEYS="k")
    answer = broker.ask(
        RequestCode.QUERY_MESSAGE, topic="T", key="k", maxNum=1, beginTimestamp=0, endTimestamp=FOREVER_MS
    )
    assert answer.fields == {
        "indexLastUpdateTimestamp": str(START_MS),
        "indexLastUpdatePhyoffset": str(appended.log_offset),
    }


def test_a_message_by_its_unique_key_is_looked_for_among_more(broker: SmallBroker) -> None:
    for n in range(3):
        broker.send("T", body=str(n).encode(), UNIQ_KEY="C0A8000100002A9F")
    assert by_key(broker, "C0A8000100002A9F", maxNum=1) == [b"2"]
    assert by_key(broker, "C0A8000100002A9F", maxNum=1, _UNIQUE_KEY_QUERY=True) == [b"0", b"1", b"2"]


def test_messages_by_tag(broker: SmallBroker) -> None:
    broker.send("T", body=b"a", TAGS="TagA")
    assert by_key(broker, "TagA", indexType="T") == [b"a"]
    assert by_key(broker, "TagA", indexType="K") == []


def test_the_ends_of_a_queue(broker: SmallBroker) -> None:
    for _ in range(3):
        broker.send("T", queue_id=1)
    assert broker.ask(RequestCode.GET_MAX_OFFSET, topic="T", queueId=1).fields == {"offset": "3"}
    assert broker.ask(RequestCode.GET_MIN_OFFSET, topic="T", queueId=1).fields == {"offset": "0"}
    assert broker.ask(RequestCode.GET_MAX_OFFSET, topic="T", queueId=5).fields == {"offset": "0"}


@pytest.mark.parametrize(
    ("boundary", "at_ms", "offset"),
    [(None, 1_000, 1), ("LOWER", 1_500, 2), ("UPPER", 1_500, 1), ("upper", 1_000, 1), ("LOWER", 9_000, 3)],
)
def test_an_offset_by_time(broker: SmallBroker, boundary: str | None, at_ms: int, offset: int) -> None:
    for _ in range(3):
        broker.send("T")
    fields: dict[str, object] = {"topic": "T", "queueId": 0, "timestamp": START_MS + at_ms}
    if boundary is not None:
        fields["boundaryType"] = boundary
    assert broker.ask(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, **fields).fields == {"offset": str(offset)}


def test_the_earliest_store_time(broker: SmallBroker) -> None:
    broker.send("T")
    ask = RequestCode.GET_EARLIEST_MSG_STORETIME
    assert broker.ask(ask, topic="T", queueId=0).fields == {"timestamp": str(START_MS)}
    assert broker.ask(ask, topic="T", queueId=1).fields == {"timestamp": "-1"}


def test_the_entries_of_a_queue(broker: SmallBroker) -> None:
    sent = [broker.send("T", TAGS="TagA") for _ in range(3)]
    answer = broker.ask_for(ConsumeQueue, RequestCode.QUERY_CONSUME_QUEUE, topic="T", queueId=0, index=1, count=10)
    assert (answer.min_queue_index, answer.max_queue_index) == (0, 3)
    assert [entry.physic_offset for entry in answer.queue_data] == [sent[1].log_offset, sent[2].log_offset]
    assert {entry.tags_code for entry in answer.queue_data} == {java_hash("TagA")}
    assert answer.subscription_data is None


def test_the_entries_of_a_queue_with_a_groups_subscription(broker: SmallBroker) -> None:
    broker.send("T")
    ask = {"topic": "T", "queueId": 0, "index": 0, "count": 1, "consumerGroup": "G"}
    offline = broker.ask_for(ConsumeQueue, RequestCode.QUERY_CONSUME_QUEUE, **ask)
    assert offline.filter_data == "G@T is not online!"
    broker.topic("T")
    broker.join("G", "T")
    online = broker.ask_for(ConsumeQueue, RequestCode.QUERY_CONSUME_QUEUE, **ask)
    assert online.subscription_data is not None
    assert online.subscription_data.topic == "T"


def test_entries_that_are_not_there(broker: SmallBroker) -> None:
    broker.send("T")
    ask = RequestCode.QUERY_CONSUME_QUEUE
    answer = broker.ask(ask, topic="T", queueId=3, index=0, count=1)
    assert (answer.code, answer.remark) == (1, "3@T is not exist!")
    answer = broker.ask(ask, topic="T", queueId=0, index=1, count=1)
    assert (answer.code, answer.remark, answer.body) == (0, "Index 1 of 0@T is not exist!", b"")


def test_an_answer_stays_below_the_largest_frame() -> None:
    records = [memoryview(bytes([n]) * 40) for n in range(5)]
    assert len(join_within(records, 100)) == 80
    assert len(join_within(records, 10)) == 40
    assert join_within([], 10) == b""
