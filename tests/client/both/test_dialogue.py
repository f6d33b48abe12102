"""Request and reply, against both servers: Python asks and Python or Java replies, and the other way round."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from drivers import Session as JavaSession

from client.inbox import DEADLINE_S
from client.plain import create_topic
from skylark.client import sync
from skylark.client.errors import BrokerError, ClientClosed, InvalidMessage, RequestTimeout
from skylark.client.message import Message
from skylark.client.producer import Producer
from skylark.client.push_consumer import PushConsumer
from skylark.client.session import Session

Respond = Callable[[Producer, Message], Awaitable[object]]


async def answer(producer: Producer, message: Message) -> None:
    await producer.reply(message, b"re: " + message.body, properties={"by": "python"}, timeout_s=DEADLINE_S)


@asynccontextmanager
async def responder(namesrv: str, group: str, topic: str, respond: Respond = answer) -> AsyncIterator[None]:
    async with Session(namesrv) as session, Producer(session=session, group="responders") as producer:
        await create_topic(session, topic, 2)
        consumer = PushConsumer(session=session, group=group, from_where="first")
        consumer.subscribe(topic)

        @consumer.listen
        async def handle(message: Message) -> None:
            await respond(producer, message)

        async with consumer:
            yield


@pytest.fixture
def reply_topic() -> str:
    return "DefaultCluster_REPLY_TOPIC"


def test_python_asks_python(namesrv: str, topic: str, group: str, reply_topic: str) -> None:
    async def run() -> None:
        async with responder(namesrv, group, topic), Producer(namesrv, group="askers") as producer:
            replies = await asyncio.gather(
                *(producer.request(topic, b"%d" % n, tag="t", timeout_s=DEADLINE_S) for n in range(20))
            )
            assert [reply.body for reply in replies] == [b"re: %d" % n for n in range(20)]
            reply = replies[0]
            assert (reply.topic, reply.properties["by"]) == (reply_topic, "python")
            assert reply.properties["MSG_TYPE"] == "reply"
            assert reply.properties["TTL"] == str(round(DEADLINE_S * 1000))
            assert int(reply.properties["PUSH_REPLY_TIME"]) <= int(reply.properties["ARRIVE_TIME"])
            large = await producer.request(topic, b"x" * 10_000, timeout_s=DEADLINE_S)
            assert large.body == b"re: " + b"x" * 10_000

    asyncio.run(run())


def test_the_blocking_twin_asks(namesrv: str, topic: str, group: str) -> None:
    async def run() -> None:
        async with responder(namesrv, group, topic):
            assert await asyncio.to_thread(ask) == b"re: hello"

    def ask() -> bytes:
        with sync.Producer(namesrv, group="askers") as producer:
            return producer.request(topic, b"hello", timeout_s=DEADLINE_S).body

    asyncio.run(run())


def test_python_asks_java(namesrv: str, topic: str, group: str, java_session: JavaSession) -> None:
    async def run() -> None:
        async with Session(namesrv) as session, Producer(session=session, group="askers") as producer:
            await create_topic(session, topic, 2)
            java = await asyncio.to_thread(java_session.responder, group, topic)
            reply = await producer.request(topic, "grüß dich".encode(), timeout_s=DEADLINE_S)
            assert reply.body.decode() == "re: grüß dich"
            (event,) = await asyncio.to_thread(java.take, 1)
            assert event["reply"] == "SEND_OK"

    asyncio.run(run())


def test_java_asks_python(namesrv: str, topic: str, group: str, java_session: JavaSession, reply_topic: str) -> None:
    async def run() -> None:
        async with responder(namesrv, group, topic):
            requester = await asyncio.to_thread(java_session.requester, group)
            got = await asyncio.to_thread(lambda: requester.call("request", topic=topic, body="hello"))
            assert (got["body"], got["topic"]) == ("re: hello", reply_topic)
            assert got["properties"]["by"] == "python"

    asyncio.run(run())


async def ask_in_vain(producer: Producer, topic: str) -> float:
    """Asks where nobody replies, and how long it waited; longer, if asking took all the time."""
    for timeout_s in (0.5, 5.0, 50.0):
        with pytest.raises(RequestTimeout) as failure:
            await producer.request(topic, b"hello", timeout_s=timeout_s)
        if f"no reply came within {timeout_s:g} s" in str(failure.value):
            return timeout_s
    raise failure.value


def test_nobody_replies_in_time_and_a_late_reply_goes_nowhere(namesrv: str, topic: str, group: str) -> None:
    async def run() -> None:
        requests: asyncio.Queue[Message] = asyncio.Queue()

        async def keep(_: Producer, message: Message) -> None:
            requests.put_nowait(message)

        async with responder(namesrv, group, topic, keep), Producer(namesrv, group="askers") as producer:
            timeout_s = await ask_in_vain(producer, topic)
            while (late := await requests.get()).properties["TTL"] != str(round(timeout_s * 1000)):
                pass
            await producer.reply(late, b"too late")  # delivered, and dropped there
            waiting = asyncio.create_task(producer.request(topic, b"again", timeout_s=DEADLINE_S))
            request = await requests.get()
            await producer.reply(late, b"for the other one")
            for body in (b"first", b"second"):
                await producer.reply(request, body)
            assert (await waiting).body == b"first"

    asyncio.run(run())


def test_the_requester_is_gone(namesrv: str, topic: str, group: str) -> None:
    async def run() -> None:
        requests: asyncio.Queue[Message] = asyncio.Queue()

        async def keep(_: Producer, message: Message) -> None:
            requests.put_nowait(message)

        async with responder(namesrv, group, topic, keep), Producer(namesrv, group="responders") as responding:
            async with Producer(namesrv, group="askers") as producer:
                waiting = asyncio.create_task(producer.request(topic, b"hello", timeout_s=DEADLINE_S))
                request = await requests.get()
            with pytest.raises(ClientClosed):
                await waiting
            with pytest.raises(BrokerError, match=r"channel of <.*> not found"):
                await responding.reply(request, b"anybody there?", timeout_s=DEADLINE_S)
            del request.properties["CORRELATION_ID"]
            with pytest.raises(InvalidMessage, match="is no request"):
                await responding.reply(request, b"to whom?")

    asyncio.run(run())
