"""What the answer to a pop comes to, and what is done with receipt handles."""

from __future__ import annotations

import pytest

from skylark.client.errors import BrokerError, InvalidMessage
from skylark.client.message import Message
from skylark.client.popping import handle_of, read_popped
from skylark.client.reading import read_messages
from skylark.client.subscriptions import build_subscription
from skylark.wire.bodies import MessageQueue
from skylark.wire.codes import ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import SYS_COMPRESSED, SYS_INNER_BATCH, SYS_NEED_UNWRAP
from skylark.wire.message import Message as Record
from skylark.wire.records import encode_batch, encode_record

QUEUE = MessageQueue("broker-a", -1, "t")
ALL = build_subscription("t", version=1)
HEADER = {"popTime": "1700", "invisibleTime": "60000", "reviveQid": "3", "restNum": "5"}


def record(topic: str, queue_id: int, offset: int, body: bytes = b"x", sys_flag: int = 0, **properties: str) -> bytes:
    given = Record(topic=topic, queue_id=queue_id, body=body, properties=properties, sys_flag=sys_flag)
    return encode_record(given, queue_offset=offset, log_offset=offset, store_timestamp_ms=0, store_host=bytes(8))


def found(*records: bytes, **fields: str) -> Frame:
    return Frame(ResponseCode.SUCCESS, HEADER | fields, b"".join(records))


def test_handles_are_derived_from_the_header() -> None:
    answer = found(
        record("t", 0, 7),
        record("t", 0, 9),
        record("%RETRY%g_t", 0, 2),
        startOffsetInfo="0 0 6;1 0 2",
        msgOffsetInfo="0 0 7,9;1 0 2",
    )
    popped = read_popped(answer, QUEUE, ALL, "t")
    assert [each.receipt_handle for each in popped.messages] == [
        "6 1700 60000 3 0 broker-a 0 7",
        "6 1700 60000 3 0 broker-a 0 9",
        "2 1700 60000 3 1 broker-a 0 2",
    ]
    assert {each.topic for each in popped.messages} == {"t"}
    assert {each.properties["1ST_POP_TIME"] for each in popped.messages} == {"1700"}
    assert popped.rest == 5


def test_a_handle_that_came_along_is_kept() -> None:
    handle = "1 2 3 4 1 broker-a 0 1"
    popped = read_popped(found(record("t", 0, 1, POP_CK=handle), startOffsetInfo="1 0 1"), QUEUE, ALL, "t")
    assert [each.receipt_handle for each in popped.messages] == [handle]


def test_in_order_the_tries_are_told_by_the_header() -> None:
    answer = found(record("t", 0, 7), record("t", 0, 8), startOffsetInfo="0 0 7", orderCountInfo="0 0 2;0 qo0%8 4")
    popped = read_popped(answer, QUEUE, ALL, "t")
    assert [each.reconsume_times for each in popped.messages] == [2, 4]


def test_what_is_not_wanted_or_not_readable_is_told_apart() -> None:
    answer = found(
        record("t", 0, 1, TAGS="Aa"),
        record("t", 0, 2, TAGS="BB"),
        record("t", 0, 3, b"not zlib", SYS_COMPRESSED, TAGS="Aa"),
        startOffsetInfo="0 0 1",
    )
    popped = read_popped(answer, QUEUE, build_subscription("t", tag="Aa", version=1), "t")
    assert [each.queue_offset for each in popped.messages] == [1]
    assert [each.queue_offset for each in popped.unwanted] == [2]
    assert [each.queue_offset for each, _ in popped.unreadable] == [3]
    assert popped.count == 3


@pytest.mark.parametrize("code", [ResponseCode.POLLING_TIMEOUT, ResponseCode.PULL_NOT_FOUND, ResponseCode.POLLING_FULL])
def test_nothing_is_no_error(code: int) -> None:
    popped = read_popped(Frame(code, dict(HEADER)), QUEUE, ALL, "t")
    assert popped.count == 0
    assert popped.is_refused == (code == ResponseCode.POLLING_FULL)


@pytest.mark.parametrize(
    "answer",
    [
        Frame(ResponseCode.NO_PERMISSION, remark="forbidden"),
        Frame(ResponseCode.SUCCESS, {}),
        found(b"damaged"),
        found(record("t", 0, 1), startOffsetInfo="nonsense"),
    ],
)
def test_other_answers_are_errors_of_the_broker(answer: Frame) -> None:
    with pytest.raises(BrokerError):
        read_popped(answer, QUEUE, ALL, "t")


@pytest.mark.parametrize("handle", ["", "x", "1 2 3", "a 2 3 4 0 b 0 1", "1 2 3 4 7 b 0 1", "1 2 3 4 0 b 0"])
def test_a_bad_handle_is_refused_before_anything_is_sent(handle: str) -> None:
    with pytest.raises(InvalidMessage, match="handle"):
        handle_of(Message(topic="t", body=b"", receipt_handle=handle))


WRAPPED = SYS_INNER_BATCH | SYS_NEED_UNWRAP


def test_an_inner_batch_is_unwrapped() -> None:
    body = encode_batch([(1, b"one", {"TAGS": "a"}), (2, b"two", {"TAGS": "b", "UNIQ_KEY": "u"})])
    read, is_whole = read_messages(record("t", 3, 40, body, WRAPPED, INNER_NUM="2") + record("t", 3, 42), "broker-a")
    assert is_whole
    assert [reason for _, reason in read] == [None, None, None]
    one, two, plain = (message for message, _ in read)
    assert [(each.queue_offset, each.body, each.flag, each.tag) for each in (one, two)] == [
        (40, b"one", 1, "a"),
        (41, b"two", 2, "b"),
    ]
    assert (two.msg_id, two.queue_id, two.log_offset, two.properties) == ("u", 3, 40, {"TAGS": "b", "UNIQ_KEY": "u"})
    assert plain.body == b"x"


def test_a_damaged_inner_batch_does_not_hide_the_others() -> None:
    read, is_whole = read_messages(record("t", 0, 1, b"\x00", WRAPPED) + record("t", 0, 2), "broker-a")
    assert is_whole
    assert [(message.queue_offset, reason is None) for message, reason in read] == [(1, False), (2, True)]
