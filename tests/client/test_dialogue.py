"""Request and reply among several brokers, and replies that make no sense."""

from __future__ import annotations

import asyncio

import pytest

from client.scripted import scripted_cluster
from skylark.client import dialogue
from skylark.client.dialogue import Dialogue
from skylark.client.errors import ClientClosed, RequestTimeout, RocketMQError, UnreadableMessage
from skylark.client.message import Message
from skylark.client.producer import Producer
from skylark.client.push_consumer import PushConsumer
from skylark.client.session import Session
from skylark.net.connection import RequestFailed
from skylark.testing import LocalCluster
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from skylark.wire.headers import PushReply
from skylark.wire.records import encode_properties
from skylark.wire.typed import encode_header


def pushed(correlation_id: str, body: bytes = b"answer", sys_flag: int = 0) -> Frame:
    header = PushReply(
        "g", "REPLY_TOPIC", "TBW102", 4, 0, sys_flag, 1, 0, "10.0.0.1:5", "broker-a:10911", 2,
        encode_properties({"CORRELATION_ID": correlation_id}).decode(),
    )  # fmt: skip
    return Frame(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, encode_header(header), body)


def test_a_reply_goes_to_the_broker_that_the_request_came_from() -> None:
    async def run(cluster: LocalCluster) -> None:
        async with Session(cluster.name_servers) as session, Producer(session=session, group="g") as responding:
            consumer = PushConsumer(session=session, group="g", from_where="first")
            consumer.subscribe("t")
            replied: list[tuple[str, str]] = []

            @consumer.listen
            async def answer(message: Message) -> None:
                receipt = await responding.reply(message, message.body)
                replied.append((message.broker, receipt.queue.broker_name))

            async with consumer, Producer(cluster.name_servers, group="askers") as producer:
                queues = await producer.queues("t")
                for queue in queues:
                    await producer.request("t", b"?", queue=queue, timeout_s=30)
            assert sorted(replied) == [("broker-a", "broker-a"), ("broker-b", "broker-b")]

    with LocalCluster(brokers=2, topics={"t": 1}) as cluster:
        asyncio.run(run(cluster))


def test_the_first_reply_counts() -> None:
    async def run() -> None:
        waiting = Dialogue()
        with waiting.expect("c") as reply:
            for body in (b"first", b"second"):
                assert waiting.receive(pushed("c", body), None).code == 0  # type: ignore[arg-type]
            message = await reply
            assert (message.body, message.born_host) == (b"first", "10.0.0.1:5")
            assert "ARRIVE_TIME" in message.properties
        for correlation_id in ("c", "unknown", ""):
            assert waiting.receive(pushed(correlation_id), None).code == 0  # type: ignore[arg-type]

    asyncio.run(run())


def test_a_reply_that_cannot_be_read_fails_the_request() -> None:
    async def run() -> None:
        waiting = Dialogue()
        with waiting.expect("c") as reply:
            with pytest.raises(RequestFailed, match="process reply message fail"):
                waiting.receive(pushed("c", b"not zlib", sys_flag=1), None)  # type: ignore[arg-type]
            with pytest.raises(UnreadableMessage):
                await reply

    asyncio.run(run())


def test_what_waits_is_bounded_and_ends_with_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialogue, "MAX_WAITING", 1)

    async def run() -> None:
        waiting = Dialogue()
        with waiting.expect("a") as reply:
            with pytest.raises(RocketMQError, match="wait for their reply already"), waiting.expect("b"):
                pass
            waiting.close()
            with pytest.raises(ClientClosed):
                await reply

    asyncio.run(run())


def test_a_request_that_is_not_stored_fails_at_once() -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster, Producer(cluster.namesrv, retries=0) as producer:
            cluster.brokers[0].answer = lambda request: request.reply(13, "too long")
            with pytest.raises(RocketMQError, match="too long"):
                await producer.request("orders", b"x", timeout_s=30)
            cluster.brokers[0].answer = lambda request: None
            with pytest.raises(RequestTimeout):
                await producer.request("orders", b"x", timeout_s=0.05)

    asyncio.run(run())
