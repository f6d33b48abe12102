"""Kinds of messages: where a priority leads, and what a topic's type refuses when it is checked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.live import Live, live_broker, messages_of
from skylark.broker.message_types import type_of_message
from skylark.store.tables import TopicTable, load
from skylark.wire.bodies import decode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import SendMessageV2
from skylark.wire.records import encode_batch, encode_properties
from skylark.wire.tables import TopicConfig
from skylark.wire.typed import encode_header

PRIORITY = "_SYS_MSG_PRIORITY_"


async def create(broker: Live, topic: str, attributes: str = "", queues: int = 4) -> Frame:
    return await broker.ask(
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        topic=topic,
        defaultTopic="TBW102",
        readQueueNums=queues,
        writeQueueNums=queues,
        perm=6,
        topicFilterType="SINGLE_TAG",
        topicSysFlag=0,
        order=False,
        attributes=attributes,
    )


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({}, "NORMAL"),
        ({"TRAN_MSG": "false"}, "NORMAL"),
        ({"TRAN_MSG": "TRUE", "DELAY": "1"}, "TRANSACTION"),
        ({"DELAY": "0", "__SHARDINGKEY": "a"}, "DELAY"),
        ({"TIMER_DELIVER_MS": "1"}, "DELAY"),
        ({"__SHARDINGKEY": "a", PRIORITY: "1"}, "FIFO"),
        ({PRIORITY: "1", "__LITE_TOPIC": "l"}, "PRIORITY"),
        ({"__LITE_TOPIC": "l"}, "LITE"),
    ],
)
def test_the_kinds_exclude_each_other(properties: dict[str, str], expected: str) -> None:
    assert type_of_message(properties) == expected


@pytest.mark.parametrize(
    ("priority", "queue"), [("0", 0), ("3", 3), ("9", 3), ("+2", 2), ("-1", 1), ("high", 1), ("2147483648", 1)]
)
def test_a_priority_leads_to_the_queue_of_its_number(tmp_path: Path, priority: str, queue: int) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            answer = await broker.send("t", b"m", {PRIORITY: priority}, queueId=1)
            assert (answer.code, answer.fields["queueId"]) == (ResponseCode.SUCCESS, str(queue))
            (stored,) = messages_of(await broker.pull("t", 0, queueId=queue))
            assert stored.properties[PRIORITY] == priority

    asyncio.run(run())


def test_a_message_of_another_kind_loses_its_priority(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            answer = await broker.send("t", b"m", {PRIORITY: "3", "__SHARDINGKEY": "k"}, queueId=1)
            assert answer.fields["queueId"] == "1"
            (stored,) = messages_of(await broker.pull("t", 0, queueId=1))
            assert PRIORITY not in stored.properties

    asyncio.run(run())


KINDS = {
    "NORMAL": {},
    "FIFO": {"__SHARDINGKEY": "k"},
    "DELAY": {"DELAY": "1"},
    "PRIORITY": {PRIORITY: "1"},
}


def test_types_are_checked_when_that_is_switched_on(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, enableTopicMessageTypeCheck=True, enableMixedMessageType=True) as broker:
            for kind in KINDS:
                assert (await create(broker, kind, f"+message.type={kind}")).code == ResponseCode.SUCCESS
            assert (await create(broker, "all", "+message.type=MIXED")).code == ResponseCode.SUCCESS
            for kind, properties in KINDS.items():
                assert (await broker.send("all", b"m", dict(properties))).code == ResponseCode.SUCCESS
                assert (await broker.send("%RETRY%g", b"m", dict(properties))).code == ResponseCode.SUCCESS
                for expected in KINDS:
                    answer = await broker.send(expected, b"m", dict(properties))
                    if expected == kind:
                        assert answer.code == ResponseCode.SUCCESS
                    else:
                        assert answer.code == ResponseCode.MESSAGE_ILLEGAL
                        assert answer.remark == (
                            "TopicMessageType validate failed, "
                            f"the expected type is {expected}, but actual type is {kind}"
                        )
            header = SendMessageV2("producers", "NORMAL", "TBW102", 4, 0, 0, 0, 0, batch=True)
            batch = encode_batch([(0, b"a", {}), (0, b"b", KINDS["FIFO"])])
            refused = await broker.ask(RequestCode.SEND_BATCH_MESSAGE, batch, **encode_header(header))
            assert refused.code == ResponseCode.MESSAGE_ILLEGAL
            assert len(messages_of(await broker.pull("NORMAL", 0))) == 1, "nothing of the batch is stored"

    asyncio.run(run())


def test_no_type_is_checked_otherwise(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            assert (await create(broker, "t", "+message.type=FIFO")).code == ResponseCode.SUCCESS
            assert (await broker.send("t", b"m")).code == ResponseCode.SUCCESS

    asyncio.run(run())


@pytest.mark.parametrize(
    ("attributes", "code", "remark"),
    [
        ("+message.type=MIXED", ResponseCode.INVALID_PARAMETER, "MIXED message type is not supported."),
        ("+message.type=ODD", ResponseCode.SYSTEM_ERROR, "value is not in set"),
        ("+cleanup.policy=COMPACTION", ResponseCode.INVALID_PARAMETER, "cleanup.policy=COMPACTION is not supported"),
        ("+queue.type=OtherCQ", ResponseCode.SYSTEM_ERROR, "value is not in set: [SimpleCQ, BatchCQ]"),
        ("+nonsense=1", ResponseCode.SYSTEM_ERROR, "unsupported key: nonsense"),
    ],
)
def test_attributes_that_a_topic_can_not_have(tmp_path: Path, attributes: str, code: int, remark: str) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            answer = await create(broker, "t", attributes)
            assert answer.code == code
            assert answer.remark is not None
            assert remark in answer.remark
            missing = await broker.ask(RequestCode.GET_TOPIC_CONFIG, topic="t")
            assert missing.code == ResponseCode.TOPIC_NOT_EXIST
            assert (await create(broker, "u", "+cleanup.policy=DELETE,+queue.type=SimpleCQ")).code == 0

    asyncio.run(run())


def test_a_topic_of_batches_has_them_message_by_message(tmp_path: Path) -> None:
    async def attributes(broker: Live) -> list[dict[str, str]]:
        one = decode_body(TopicConfig, (await broker.ask(RequestCode.GET_TOPIC_CONFIG, topic="t")).body)
        table = decode_body(TopicTable, (await broker.ask(RequestCode.GET_ALL_TOPIC_CONFIG)).body).topic_config_table
        return [one.attributes, table["t"].attributes]

    async def run() -> None:
        given = {"queue.type": "BatchCQ", "message.type": "NORMAL"}
        async with live_broker(tmp_path) as broker:
            assert (await create(broker, "t", "+queue.type=BatchCQ,+message.type=NORMAL")).code == ResponseCode.SUCCESS
            properties = encode_properties({"UNIQ_KEY": "U"}).decode()
            header = SendMessageV2("producers", "t", "TBW102", 4, 0, 0, 0, 0, properties, batch=True)
            batch = encode_batch([(0, b"a", {"UNIQ_KEY": "A"}), (0, b"b", {"UNIQ_KEY": "B"})])
            answer = await broker.ask(RequestCode.SEND_BATCH_MESSAGE, batch, **encode_header(header))
            assert (answer.code, answer.fields["queueOffset"]) == (ResponseCode.SUCCESS, "0")
            assert await attributes(broker) == [given, given]
            refused = await create(broker, "t", "+queue.type=SimpleCQ")
            assert refused.remark == "attempt to update an unchangeable attribute. key: queue.type"
        async with live_broker(tmp_path) as broker:
            found = messages_of(await broker.pull("t", 0))
            assert [(m.body, m.queue_offset, m.unique_key) for m in found] == [(b"a", 0, "A"), (b"b", 1, "B")]
            assert await attributes(broker) == [given, given]
        # Apache's broker starts with queues of the usual kind only if the table does not call them others.
        table = load(tmp_path / "config" / "topics.json", TopicTable)
        assert table is not None
        assert "queue.type" not in table.topic_config_table["t"].attributes
        assert (tmp_path / "consumequeue" / "t" / "0").is_dir()
        assert not (tmp_path / "batchconsumequeue").exists()

    asyncio.run(run())
