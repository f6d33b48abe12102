"""Offsets move: in the broker's own table, through the members of a group, and from group to group."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.small_broker import START_MS, SmallBroker, queue
from skylark.broker.turns import ITEMS_PER_TURN
from skylark.wire import fastjson
from skylark.wire.bodies import ResetOffsets
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame

RESET = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[SmallBroker]:
    """Topic T with 4 messages a second apart in each of 2 queues; group G has consumed 3 and 4 of them."""
    broker = SmallBroker(tmp_path / "store")
    broker.topic("T")
    broker.group("G")
    for _ in range(4):
        now_ms = broker.now_ms
        broker.send("T", 0)
        broker.now_ms = now_ms
        broker.send("T", 1)
    broker.offsets.commit("G", "T", 0, 3, "test")
    broker.offsets.commit("G", "T", 1, 4, "test")
    yield broker
    broker.store.close()


def reset(broker: SmallBroker, **fields: object) -> Frame:
    return broker.ask(RESET, **({"group": "G", "topic": "T", "timestamp": 0, "isForce": True} | fields))


def moved(answer: Frame) -> dict[int, int]:
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    table = fastjson.decode(answer.body, ResetOffsets).offset_table
    return {q.queue_id: offset for q, offset in table.items()}


@pytest.mark.parametrize(
    ("timestamp", "offset"),
    [(START_MS + 1_000, 1), (START_MS - 1, 0), (START_MS + 60_000, 4), (-1, 4)],
)
def test_by_time_with_the_group_offline(broker: SmallBroker, timestamp: int, offset: int) -> None:
    answer = reset(broker, timestamp=timestamp)
    assert moved(answer) == {0: offset, 1: offset}
    assert broker.offsets.query("G", "T", 0) == offset
    assert broker.offsets.take_reset("G", "T", 0) == offset


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_of_a_topic_that_is_deleted_in_the_middle_nothing_is_left(
    broker: SmallBroker, monkeypatch: pytest.MonkeyPatch, is_made_anew: bool
) -> None:
    broker.topic("W", queues=2 * ITEMS_PER_TURN)
    broker.send("W", 2 * ITEMS_PER_TURN - 1)
    really = broker.offsets.reset

    def delete() -> None:
        broker.topics.table.delete("W")
        broker.offsets.remove_topics(["W"])
        broker.store.delete_topic("W")
        if is_made_anew:
            broker.topic("W", queues=2 * ITEMS_PER_TURN)

    def reset_and_delete(group: str, topic: str, queue_id: int, offset: int) -> None:
        if queue_id == 0:
            asyncio.get_running_loop().call_soon(delete)
        really(group, topic, queue_id, offset)

    monkeypatch.setattr(broker.offsets, "reset", reset_and_delete)
    answer = reset(broker, topic="W", timestamp=-1)
    assert (answer.code, answer.remark) == (ResponseCode.TOPIC_NOT_EXIST, "Topic W was deleted meanwhile")
    assert broker.offsets.of("G", "W") == {}
    assert not broker.offsets.has_reset("G", "W", 2 * ITEMS_PER_TURN - 1)


def test_the_answer_is_a_table_by_queue(broker: SmallBroker) -> None:
    answer = reset(broker, timestamp=-1, queueId=1)
    assert answer.body == b'{"offsetTable":{{"brokerName":"broker-a","queueId":1,"topic":"T"}:4}}'


def test_one_queue_by_time_leaves_the_other(broker: SmallBroker) -> None:
    assert moved(reset(broker, timestamp=START_MS + 2_000, queueId=0)) == {0: 2}
    assert broker.offsets.take_reset("G", "T", 1) is None
    assert broker.offsets.query("G", "T", 1) == 4


def test_one_queue_to_an_offset(broker: SmallBroker) -> None:
    assert moved(reset(broker, queueId=1, offset=2)) == {1: 2}
    assert broker.offsets.query("G", "T", 1) == 2


def test_an_offset_outside_of_the_queue(broker: SmallBroker) -> None:
    answer = reset(broker, queueId=1, offset=6)
    assert (answer.code, answer.remark) == (1, "Target offset 6 not in consume queue range [0-4]")
    assert broker.offsets.query("G", "T", 1) == 4


def test_no_such_topic_or_group(broker: SmallBroker) -> None:
    answer = reset(broker, topic="no")
    assert (answer.code, answer.remark) == (ResponseCode.TOPIC_NOT_EXIST, "Topic no does not exist")
    answer = reset(broker, group="no")
    assert (answer.code, answer.remark) == (ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "Group no does not exist")


@pytest.fixture
def old_way(broker: SmallBroker) -> SmallBroker:
    broker.config.use_server_side_reset_offset = False
    return broker


def test_the_members_of_the_group_are_told(old_way: SmallBroker) -> None:
    members = [old_way.join("G", "T"), old_way.join("G", "T")]
    for member in members:
        member.sent.clear()
    answer = reset(old_way, timestamp=START_MS + 1_000)
    assert moved(answer) == {0: 1, 1: 1}
    for member in members:
        (told,) = member.sent
        assert told.code == RequestCode.RESET_CONSUMER_CLIENT_OFFSET
        assert told.fields["topic"] == "T"
        assert told.fields["group"] == "G"
        assert fastjson.decode(told.body, ResetOffsets).offset_table == {queue("T", 0): 1, queue("T", 1): 1}
    # They commit the new offsets themselves.
    assert old_way.offsets.query("G", "T", 0) == 3


def test_a_member_that_reads_again_is_told(old_way: SmallBroker) -> None:
    member = old_way.join("G", "T")
    member.is_deaf = True
    assert moved(reset(old_way, timestamp=START_MS + 1_000)) == {0: 1, 1: 1}
    assert len(member.sent) == 1


def test_the_answer_names_who_does_not_read(old_way: SmallBroker) -> None:
    member, deaf = old_way.join("G", "T"), old_way.join("G", "T")
    member.sent.clear()
    deaf.is_deaf = deaf.is_deaf_later = True
    answer = reset(old_way, timestamp=START_MS + 1_000)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "1 members of G do not read" in (answer.remark or "")
    assert "client@G" in (answer.remark or "")
    assert ([frame.code for frame in member.sent], deaf.sent) == ([RequestCode.RESET_CONSUMER_CLIENT_OFFSET], [])


def test_without_force_nobody_goes_forward(old_way: SmallBroker) -> None:
    old_way.join("G", "T")
    assert moved(reset(old_way, timestamp=-1, isForce=False)) == {0: 3, 1: 4}
    assert moved(reset(old_way, timestamp=-1)) == {0: 4, 1: 4}


def test_an_offline_group_cannot_be_told(old_way: SmallBroker) -> None:
    answer = reset(old_way, timestamp=5)
    assert (answer.code, answer.remark) == (
        ResponseCode.CONSUMER_NOT_ONLINE,
        "Consumer not online, so can not reset offset, Group: G Topic: T Timestamp: 5",
    )


def test_a_group_without_offsets_cannot_be_told(old_way: SmallBroker) -> None:
    answer = reset(old_way, group="H")
    assert (answer.code, answer.remark) == (1, "THe consumer group <H> not exist")
    answer = reset(old_way, topic="no")
    assert answer.code == ResponseCode.TOPIC_NOT_EXIST


def clone(broker: SmallBroker, **fields: object) -> None:
    answer = broker.ask(RequestCode.CLONE_GROUP_OFFSET, **({"srcGroup": "G", "destGroup": "H"} | fields))
    assert answer.code == ResponseCode.SUCCESS


def test_offsets_are_copied_to_another_group(broker: SmallBroker) -> None:
    broker.topic("U")
    broker.offsets.commit("G", "U", 0, 9, "test")
    broker.offsets.commit("G", "gone", 0, 1, "test")
    clone(broker, topic="T")
    assert dict(broker.offsets.of("H", "T")) == {0: 3, 1: 4}
    assert broker.offsets.topics_of("H") == {"T"}
    clone(broker)
    assert broker.offsets.topics_of("H") == {"T", "U"}


def test_offsets_are_not_copied_under_a_name_that_no_group_can_have(broker: SmallBroker) -> None:
    for name in ("x" * 1_000, "a b"):
        answer = broker.ask(RequestCode.CLONE_GROUP_OFFSET, srcGroup="G", destGroup=name, topic="T")
        assert answer.code == ResponseCode.INVALID_PARAMETER
    assert broker.offsets.groups_of("T") == {"G"}


def test_topics_that_an_online_group_has_left_are_not_copied(broker: SmallBroker) -> None:
    broker.topic("U")
    broker.join("G", "U")
    clone(broker, topic="T")
    assert broker.offsets.topics_of("H") == set()
    clone(broker, topic="T", offline=True)
    assert broker.offsets.topics_of("H") == {"T"}


def test_a_queue_that_the_topic_does_not_have(broker: SmallBroker) -> None:
    answer = reset(broker, queueId=2, offset=0)
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "Topic T has no queue 2, only 0 to 1")


@pytest.mark.parametrize(
    ("fields", "code", "remark"),
    [
        ({"srcGroup": "no"}, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "Group no does not exist"),
        ({"topic": "no"}, ResponseCode.TOPIC_NOT_EXIST, "Topic no does not exist"),
    ],
)
def test_what_cannot_be_copied(broker: SmallBroker, fields: dict[str, object], code: int, remark: str) -> None:
    answer = broker.ask(RequestCode.CLONE_GROUP_OFFSET, **({"srcGroup": "G", "destGroup": "H"} | fields))
    assert (answer.code, answer.remark) == (code, remark)


def test_the_brokers_own_offsets_stay_as_they_are(broker: SmallBroker) -> None:
    own = "CID_RMQ_SYS_TRANS"
    broker.group(own)
    broker.offsets.commit(own, "T", 0, 1, "the broker itself")
    assert reset(broker, group=own, timestamp=-1).code == ResponseCode.NO_PERMISSION
    copied = broker.ask(RequestCode.CLONE_GROUP_OFFSET, srcGroup="G", destGroup=own, topic="T", offline=True)
    assert copied.code == ResponseCode.NO_PERMISSION
    assert broker.offsets.query(own, "T", 0) == 1


def test_the_broker_itself_goes_on_after_a_reset(broker: SmallBroker) -> None:
    """One that was made before such were refused."""
    broker.offsets.reset("CID_RMQ_SYS_TRANS", "T", 0, 4)
    broker.offsets.commit("CID_RMQ_SYS_TRANS", "T", 0, 1, "the broker itself")
    assert broker.offsets.of("CID_RMQ_SYS_TRANS", "T")[0] == 1
