"""Sends to a running broker: what is stored, what is answered, what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.live import Live, live_broker, messages_of
from skylark.broker import topics
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Encoding
from skylark.wire.headers import SendMessageV2
from skylark.wire.records import encode_batch, encode_properties, parse_message_id
from skylark.wire.typed import encode_header


def v2(topic: str, **more: object) -> dict[str, str]:
    header = SendMessageV2("producers", topic, "TBW102", 4, 0, 0, 1_700_000_000_000, 0)
    for name, value in more.items():
        setattr(header, name, value)
    return encode_header(header)


@pytest.mark.parametrize("encoding", list(Encoding))
@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_a_message_is_acknowledged_and_read_back(tmp_path: Path, encoding: Encoding, flush: str) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, flushDiskType=flush) as broker:
            properties = {"TAGS": "a", "KEYS": "k1 k2", "UNIQ_KEY": "0" * 32, "mine": "ümlaut"}
            answer = await broker.send("t", b"body", properties, encoding=encoding, flag=7, queueId=2)
            assert answer.code == ResponseCode.SUCCESS
            assert answer.encoding == encoding
            assert answer.fields["queueId"] == "2"
            assert answer.fields["queueOffset"] == "0"
            assert answer.fields["transactionId"] == "0" * 32
            (stored,) = messages_of(await broker.pull("t", 0, queueId=2))
            assert stored.body == b"body"
            assert stored.flag == 7
            assert stored.born_timestamp_ms == 1_700_000_000_000
            added = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true", "CLUSTER": "DefaultCluster"}
            assert stored.properties == properties | added
            host, offset = parse_message_id(answer.fields["msgId"])
            assert (host, offset) == (stored.store_host, stored.log_offset)

    asyncio.run(run())


def test_the_short_header_is_the_long_one(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            answer = await broker.ask(RequestCode.SEND_MESSAGE_V2, b"one", **v2("t", queue_id=1, flag=3))
            assert answer.fields["queueId"] == "1"
            (stored,) = messages_of(await broker.pull("t", 0, queueId=1))
            assert (stored.body, stored.flag) == (b"one", 3)
            assert len(stored.properties["UNIQ_KEY"]) == 32, "a broker gives a unique key to a message that has none"

    asyncio.run(run())


def test_a_batch_is_stored_message_by_message(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            body = encode_batch([(i, b"m%d" % i, {"TAGS": f"tag{i}"}) for i in range(3)])
            fields = v2("t", batch=True, properties=encode_properties({"UNIQ_KEY": "B" * 32}).decode())
            answer = await broker.ask(RequestCode.SEND_BATCH_MESSAGE, body, **fields)
            assert answer.code == ResponseCode.SUCCESS
            assert answer.fields["queueOffset"] == "0"
            ids = answer.fields["msgId"].split(",")
            stored = messages_of(await broker.pull("t", 0))
            assert [m.body for m in stored] == [b"m0", b"m1", b"m2"]
            assert [m.flag for m in stored] == [0, 1, 2]
            assert [m.queue_offset for m in stored] == [0, 1, 2]
            assert [parse_message_id(i)[1] for i in ids] == [m.log_offset for m in stored]
            assert [m.properties for m in stored] == [{"TAGS": "tag0"}, {"TAGS": "tag1"}, {"TAGS": "tag2"}]
            assert answer.fields["transactionId"] == "B" * 32
            (one,) = messages_of(await broker.pull("t", 0, tags="tag1"))
            assert one.body == b"m1"

    asyncio.run(run())


@pytest.mark.parametrize("body", [b"", b"\0\0\0\x05", b"\0\0\0\x7fgarbage"])
def test_a_batch_that_cannot_be_read_stores_nothing(tmp_path: Path, body: bytes) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            answer = await broker.ask(RequestCode.SEND_BATCH_MESSAGE, body, **v2("t", batch=True))
            assert answer.code == ResponseCode.MESSAGE_ILLEGAL
            assert (await broker.pull("t", 0)).code == ResponseCode.PULL_NOT_FOUND

    asyncio.run(run())


def test_senders_of_one_host_do_not_make_all_topics_that_there_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            assert broker._broker is not None
            known = broker._broker._topics
            monkeypatch.setattr(topics, "MAX_AUTO_CREATED_TOPICS", len(known) + 6)
            answers = await asyncio.gather(*(broker.send(f"t{number}") for number in range(6)))
            assert sorted(answer.code for answer in answers) == [0] * 3 + [ResponseCode.TOPIC_NOT_EXIST] * 3
            refused = [answer.remark or "" for answer in answers if answer.code]
            assert all("clients of 127.0.0.1 have made 3 topics" in remark for remark in refused)
            assert known.has_room_for_senders("10.0.0.2")

    asyncio.run(run())


TOO_LARGE_BATCH = encode_batch([(0, bytes(1024 * 1024), {})] * 5)


async def refusals(broker: Live) -> dict[str, tuple[int, str]]:
    cases = {
        "path": broker.send("../../x"),
        "long": broker.send("x" * 128),
        "blank": broker.send("a b"),
        "system": broker.send("SCHEDULE_TOPIC_XXXX"),
        "queue": broker.send("TBW102", queueId=99),
        "large": broker.send("t", bytes(4 * 1024 * 1024 + 1)),
        "batch": broker.ask(RequestCode.SEND_BATCH_MESSAGE, TOO_LARGE_BATCH, **v2("t", batch=True)),
        "properties": broker.send("t", properties={"p": "x" * 33_000}),
        "timer": broker.send("t", properties={"TIMER_DELAY_SEC": "259201"}),
        "delayed transaction": broker.send("t", properties={"TRAN_MSG": "true", "DELAY": "3"}),
        "level": broker.send("t", properties={"DELAY": "soon"}),
        "number": broker.send("t", queueId="two"),
        "missing": broker.ask(RequestCode.SEND_MESSAGE, b"", topic="t"),
    }
    answers = await asyncio.gather(*cases.values())
    return {name: (answer.code, answer.remark or "") for name, answer in zip(cases, answers, strict=True)}


def test_bad_sends_are_refused_with_a_reason_and_cost_nothing_else(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            seen = await refusals(broker)
            assert {name: code for name, (code, _) in seen.items()} == {
                "path": ResponseCode.INVALID_PARAMETER,
                "long": ResponseCode.INVALID_PARAMETER,
                "blank": ResponseCode.INVALID_PARAMETER,
                "system": ResponseCode.NO_PERMISSION,
                "queue": ResponseCode.INVALID_PARAMETER,
                "large": ResponseCode.MESSAGE_ILLEGAL,
                "batch": ResponseCode.MESSAGE_ILLEGAL,
                "properties": ResponseCode.MESSAGE_ILLEGAL,
                "timer": ResponseCode.MESSAGE_ILLEGAL,
                "delayed transaction": ResponseCode.MESSAGE_ILLEGAL,
                "level": ResponseCode.MESSAGE_ILLEGAL,
                "number": ResponseCode.SYSTEM_ERROR,
                "missing": ResponseCode.SYSTEM_ERROR,
            }
            assert all(remark for _, remark in seen.values())
            assert (await broker.send("t")).fields["queueOffset"] == "0", "nothing refused was stored"

    asyncio.run(run())


def test_topics_are_not_created_when_that_is_off(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, autoCreateTopicEnable=False) as broker:
            answer = await broker.send("t")
            assert answer.code == ResponseCode.TOPIC_NOT_EXIST
            assert (answer.remark or "").startswith("topic[t] not exist, apply first please!")

    asyncio.run(run())


def test_what_was_sent_survives_a_restart(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            for number in range(5):
                await broker.send("t", b"%d" % number)
        async with live_broker(tmp_path) as broker:
            assert [m.body for m in messages_of(await broker.pull("t", 0))] == [b"0", b"1", b"2", b"3", b"4"]
            assert (await broker.send("t")).fields["queueOffset"] == "5"

    asyncio.run(run())
