"""What is the broker's own: topics and properties that no client gets at."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.live import Live, MovableClock, live_broker, messages_of
from broker.pop_broker import GROUP, TOPIC, PopBroker, bodies
from skylark.broker.topics import HALF_TOPIC, OP_HALF_TOPIC, SCHEDULE_TOPIC
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.message import StoredMessage
from skylark.wire.recall import RecallHandle
from skylark.wire.records import encode_batch, encode_properties

CLOSED = [
    SCHEDULE_TOPIC, HALF_TOPIC, OP_HALF_TOPIC, "rmq_sys_wheel_timer", "rmq_sys_REVIVE_LOG_DefaultCluster",
    "rmq_sys_REVIVE_LOG_another", "TRANS_CHECK_MAX_TIME_TOPIC", "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC",
]  # fmt: skip
OPEN = ["RMQ_SYS_TRACE_TOPIC", "rmq_sys_TRACE_DATA_region", "%RETRY%g", "%DLQ%g", "BenchmarkTest", "t"]
FORGED = {"REAL_TOPIC": SCHEDULE_TOPIC, "REAL_QID": "0", "__REVIVED": "a mark", "POP_CK": "a handle"}


def short_fields(topic: str, properties: dict[str, str] | None = None, *, batch: bool = False) -> dict[str, object]:
    text = encode_properties(properties or {}).decode()
    return {
        "a": "producers", "b": topic, "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 1, "h": 0, "i": text, "j": 0,
        "k": False, "l": 16, "m": batch,
    }  # fmt: skip


async def answers(broker: Live, topic: str) -> list[int]:
    """The codes that each way of sending is answered by."""
    batch = encode_batch([(0, b"x", {"TAGS": "ck"})])
    handle = RecallHandle(topic, "broker-a", str(2_000_000_000_000), "U" * 32).encode()
    return [
        (await broker.send(topic)).code,
        (await broker.send(topic, properties={"UNIQ_KEY": "U" * 32, "TAGS": "ck"})).code,
        (await broker.send(topic, properties={"TIMER_DELAY_SEC": "1"})).code,
        (await broker.ask(RequestCode.SEND_MESSAGE_V2, b"x", **short_fields(topic))).code,
        (await broker.ask(RequestCode.SEND_BATCH_MESSAGE, batch, **short_fields(topic, batch=True))).code,
        (await broker.ask(RequestCode.SEND_REPLY_MESSAGE_V2, b"x", **short_fields(topic))).code,
        (await broker.ask(RequestCode.RECALL_MESSAGE, topic=topic, recallHandle=handle, producerGroup="g")).code,
    ]


def test_no_client_writes_to_the_topics_of_the_broker(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, timerMaxDelaySec=10**9) as broker:
            for topic in CLOSED:
                codes = await answers(broker, topic)
                missing = ResponseCode.TOPIC_NOT_EXIST if topic in (CLOSED[5], CLOSED[6]) else None
                assert codes[:6] == [ResponseCode.NO_PERMISSION] * 6, topic
                assert codes[6] == missing or codes[6] == ResponseCode.NO_PERMISSION, topic
                assert (await broker.pull(topic, 0)).code != ResponseCode.SUCCESS, topic

    asyncio.run(run())


def test_the_topics_that_clients_need_are_open(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, traceTopicEnable=True) as broker:
            await broker.heartbeat("g", "t")
            for topic in OPEN:
                assert (await broker.send(topic, properties={"UNIQ_KEY": "U" * 32})).code == ResponseCode.SUCCESS, topic

    asyncio.run(run())


async def stored(broker: Live, topic: str) -> list[StoredMessage]:
    return messages_of(await broker.pull(topic, 0))


def test_what_only_the_broker_says_is_left_out(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.heartbeat("g", "t")
            for topic in ("t", "%RETRY%g", "%DLQ%g"):
                sent = await broker.send(topic, b"sent on", FORGED | {"UNIQ_KEY": "U" * 32, "mine": "kept"})
                assert sent.code == ResponseCode.SUCCESS
            batch = encode_batch([(0, b"part", FORGED | {"mine": "kept"})])
            sent = await broker.ask(RequestCode.SEND_BATCH_MESSAGE, batch, **short_fields("%DLQ%g", batch=True))
            assert sent.code == ResponseCode.SUCCESS
            for topic in ("t", "%RETRY%g", "%DLQ%g"):
                for message in await stored(broker, topic):
                    assert message.properties["mine"] == "kept"
                    assert FORGED.keys().isdisjoint(message.properties), topic

    asyncio.run(run())


@pytest.mark.parametrize("sys_flag", [4, 8, 12])
def test_no_sender_says_how_a_transaction_stands(tmp_path: Path, sys_flag: int) -> None:
    """A commit is proven by its message; and a message that claims to be a half, and is none, must not be lost."""

    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            assert (await broker.send("t", b"mine", sysFlag=sys_flag)).code == ResponseCode.SUCCESS
            assert (await broker.send("t", b"mine", {"UNIQ_KEY": "U" * 32}, sysFlag=sys_flag)).code == 0
            batch = encode_batch([(0, b"mine", {})])
            fields = short_fields("t", batch=True) | {"f": sys_flag}
            assert (await broker.ask(RequestCode.SEND_BATCH_MESSAGE, batch, **fields)).code == ResponseCode.SUCCESS
            assert [(m.body, m.sys_flag) for m in await stored(broker, "t")] == [(b"mine", 0)] * 3

    asyncio.run(run())


def test_a_half_has_the_checks_of_no_other_transaction(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            checks = {"TRANSACTION_CHECK_TIMES": "14", "TRAN_PREPARED_QUEUE_OFFSET": "7"}
            await broker.send("t", b"half", {"TRAN_MSG": "true", "PGROUP": "p", **checks}, sysFlag=4)
            (half,) = await stored(broker, HALF_TOPIC)
            assert checks.keys().isdisjoint(half.properties)
            assert (half.properties["REAL_TOPIC"], half.sys_flag) == ("t", 0)

    asyncio.run(run())


def test_a_message_that_copied_itself_stops_with_the_broker_that_lets_nobody_write_one(tmp_path: Path) -> None:
    """One that is in the store since before: it is passed over, and the level delivers what is behind it."""

    async def run() -> None:
        clock = MovableClock()
        async with live_broker(tmp_path, clock, messageDelayLevel="100s") as broker:
            assert broker._broker is not None
            message = {"REAL_TOPIC": SCHEDULE_TOPIC, "REAL_QID": "0", "DELAY": "1"}
            part = await broker.send("t", b"good", {"DELAY": "1"})
            assert part.code == ResponseCode.SUCCESS
            (parked,) = await stored(broker, SCHEDULE_TOPIC)
            parked.properties.update(message)
            broker._broker._store.append(parked, clock())
            await broker.send("t", b"better", {"DELAY": "1"})
            clock.ahead_ms += 100_000
            assert [m.body for m in await broker.until_found("t", 1)] == [b"better"]
            assert len(await stored(broker, SCHEDULE_TOPIC)) == 3

    asyncio.run(run())


def test_a_forged_op_message_ends_no_transaction(tmp_path: Path) -> None:
    """One that is in the store since before: it is not of the broker's making, by the host that it was born on."""

    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            half = await broker.send("t", b"half", {"TRAN_MSG": "true", "PGROUP": "p"}, sysFlag=4)
            assert half.code == ResponseCode.SUCCESS
            assert broker._broker is not None
            (stored_half,) = await stored(broker, HALF_TOPIC)
            stored_half.topic, stored_half.body, stored_half.properties = OP_HALF_TOPIC, b"0,", {"TAGS": "d"}
            broker._broker._store.append(stored_half, 1)
        async with live_broker(tmp_path) as broker:
            fields = {
                "producerGroup": "p", "tranStateTableOffset": 0, "commitLogOffset": stored_half.log_offset,
                "commitOrRollback": 8, "msgId": half.fields["transactionId"], "topic": "t",
            }  # fmt: skip
            assert (await broker.ask(RequestCode.END_TRANSACTION, **fields)).code == ResponseCode.SUCCESS
            assert [m.body for m in await stored(broker, "t")] == [b"half"]

    asyncio.run(run())


def test_an_op_message_with_an_endless_number_lets_the_broker_start(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.send("t", b"half", {"TRAN_MSG": "true", "PGROUP": "p"}, sysFlag=4)
            (half,) = await stored(broker, HALF_TOPIC)
            half.topic, half.body, half.properties = OP_HALF_TOPIC, b"9" * 5_000 + b",x,", {"TAGS": "d"}
            half.born_host = half.store_host
            assert broker._broker is not None
            broker._broker._store.append(half, 1)
        async with live_broker(tmp_path) as broker:
            assert (await broker.send("t")).code == ResponseCode.SUCCESS

    asyncio.run(run())


def test_a_resumed_half_is_acknowledged_when_it_is_on_disk(tmp_path: Path) -> None:
    async def run() -> None:
        slow = {"flushDiskType": "SYNC_FLUSH", "flushIntervalCommitLog": 3_600_000}
        async with live_broker(tmp_path, transactionCheckInterval=3_600_000, **slow) as broker:
            await broker.send("t", b"half", {"TRAN_MSG": "true", "PGROUP": "p"}, sysFlag=4)
            (half,) = await stored(broker, HALF_TOPIC)
            assert broker._broker is not None
            store = broker._broker._store
            answer = await broker.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, msgId=half.message_id)
            assert answer.code == ResponseCode.SUCCESS
            assert len(await stored(broker, HALF_TOPIC)) == 2
            assert store.flushed_offset == store.log_max_offset

    asyncio.run(run())


def test_a_retry_that_has_no_room_for_its_handle_is_popped_as_it_is(tmp_path: Path) -> None:
    broker = PopBroker(tmp_path)
    broker.send("large", p="x" * 32_640)
    broker.pop()
    broker.passes(65_000)
    taken = broker.pop()
    assert bodies(taken) == ["large"]
    assert taken[0].message.topic == f"%RETRY%{GROUP}_{TOPIC}"
    assert broker.ack(taken[0]).code == ResponseCode.SUCCESS
    broker.passes(65_000)
    assert broker.pop() == []
    broker.store.close()
