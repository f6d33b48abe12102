"""Apache's Java client on one side and ours on the other, both ways round, at both servers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from drivers import Client, bodies, numbered
from drivers import Session as JavaSession
from servers import ApacheServer, Server

from client.inbox import DEADLINE_S, Inbox
from client.plain import create_topic
from skylark.client.listening import Suspend
from skylark.client.message import Message, OutgoingMessage
from skylark.client.producer import Producer
from skylark.client.pull_consumer import PullConsumer
from skylark.client.push_consumer import PushConsumer
from skylark.client.session import Session
from skylark.client.simple_consumer import SimpleConsumer
from skylark.wire.bodies import encode_body
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from skylark.wire.message import SYS_COMPRESSED, SYS_COMPRESSION_LZ4, SYS_COMPRESSION_ZLIB, SYS_COMPRESSION_ZSTD
from skylark.wire.pop import SetMessageRequestMode

BATCHED = 0xC0  # an inner batch that needs unwrapping
SHORT_S = 5.0


async def make(namesrv: str, topic: str, queues: int) -> None:
    async with Session(namesrv) as session:
        await create_topic(session, topic, queues)


async def read_all(namesrv: str, topic: str, count: int) -> list[Message]:
    async with PullConsumer(namesrv, "readers") as consumer, asyncio.timeout(DEADLINE_S):
        messages: list[Message] = []
        [queue] = await consumer.queues(topic)
        while len(messages) < count:  # Apache's broker files what it has stored a moment later
            pulled = await consumer.pull(queue, len(messages), wait_s=1)
            assert not pulled.unreadable
            messages += pulled.messages
        assert len(messages) == count
        return messages


@pytest.mark.parametrize(
    ("codec", "flag"),
    [("ZLIB", SYS_COMPRESSION_ZLIB), ("LZ4", SYS_COMPRESSION_LZ4), ("ZSTD", SYS_COMPRESSION_ZSTD)],
)
def test_what_java_compresses_is_inflated(
    namesrv: str, topic: str, group: str, java_session: JavaSession, codec: str, flag: int
) -> None:
    asyncio.run(make(namesrv, topic, 1))
    java_session.producer(group, compressType=codec).send(topic, "big", size=50_000)
    [message] = asyncio.run(read_all(namesrv, topic, 1))
    assert message.body == b"big" + b"x" * 49_997
    assert message.sys_flag & (SYS_COMPRESSED | 0x700) == SYS_COMPRESSED | flag
    assert message.size_bytes < 10_000


def test_a_batch_of_javas_comes_message_by_message(
    namesrv: str, topic: str, group: str, java_session: JavaSession
) -> None:
    asyncio.run(make(namesrv, topic, 1))
    java_session.producer(group).send(topic, "b", count=5, keys="k", tags="t", mode="batch")
    messages = asyncio.run(read_all(namesrv, topic, 5))
    assert [message.body.decode() for message in messages] == numbered("b", 5)
    assert [message.keys for message in messages] == [[key] for key in numbered("k", 5)]
    assert len({message.msg_id for message in messages}) == 5


def test_an_inner_batch_is_unwrapped(
    server: Server, namesrv: str, topic: str, group: str, java_session: JavaSession
) -> None:
    async def create() -> None:
        async with Session(namesrv) as session:
            await create_topic(session, topic, 1, "+queue.type=BatchCQ")

    asyncio.run(create())
    java_session.producer(group).send(topic, "b", count=5, keys="k", tags="odd,even", mode="batch")

    async def consume() -> list[Message]:
        inbox = Inbox()
        consumer = PushConsumer(namesrv, group, listener=inbox, from_where="first")
        consumer.subscribe(topic)
        async with consumer:
            return list(await inbox.wait(5))

    messages = asyncio.run(read_all(namesrv, topic, 5))
    assert [message.body.decode() for message in messages] == numbered("b", 5)
    assert [message.queue_offset for message in messages] == [*range(5)]
    if isinstance(server, ApacheServer):
        assert {message.sys_flag & BATCHED for message in messages} == {BATCHED}
        assert {message.log_offset for message in messages} == {messages[0].log_offset}
    assert sorted(message.body.decode() for message in asyncio.run(consume())) == numbered("b", 5)

    async def from_the_middle() -> list[int]:
        async with PullConsumer(namesrv, "readers") as consumer:
            [queue] = await consumer.queues(topic)
            return [message.queue_offset for message in (await consumer.pull(queue, 3)).messages]

    assert asyncio.run(from_the_middle()) == [3, 4]


def test_javas_ordered_messages_are_consumed_in_order_with_retries(
    namesrv: str, topic: str, group: str, java_session: JavaSession
) -> None:
    asyncio.run(make(namesrv, topic, 2))
    java_session.producer(group).send(topic, "m", count=8, mode="ordered", shards=2)

    def refuse_first(message: Message) -> object:
        return Suspend(0.02) if message.reconsume_times == 0 else None

    async def consume() -> Inbox:
        inbox = Inbox(refuse_first)
        consumer = PushConsumer(namesrv, group, listener=inbox, orderly=True, from_where="first")
        consumer.subscribe(topic)
        async with consumer:
            await inbox.wait(16)
        return inbox

    inbox = asyncio.run(consume())
    for queue_id in range(2):
        wanted = [body.encode() for body in numbered("m", 8)[queue_id::2] for _ in range(2)]
        assert inbox.in_queue(queue_id) == wanted


def test_java_consumes_ordered_messages_in_order_with_retries(
    namesrv: str, topic: str, group: str, java_session: JavaSession
) -> None:
    async def produce() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S) as producer:
            await create_topic(producer.session, topic, 2)
            queues = await producer.queues(topic)
            for number, body in enumerate(numbered("m", 8)):
                await producer.send(topic, body.encode(), queue=queues[number % 2])

    asyncio.run(produce())
    events = java_session.consumer(group, topic, from_="first", mode="orderly", fail=1, suspendMs=20).take(16)
    for queue_id in range(2):
        wanted = [body for body in numbered("m", 8)[queue_id::2] for _ in range(2)]
        assert bodies(event for event in events if event["queue"] == queue_id) == wanted


def test_broadcast_both_ways_round(
    namesrv: str, topic: str, group: str, java_session: JavaSession, tmp_path: Path
) -> None:
    async def main() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S) as producer, AsyncExitStack() as stack:
            await create_topic(producer.session, topic, 2)
            inboxes = [Inbox(), Inbox()]
            for number, inbox in enumerate(inboxes):
                consumer = PushConsumer(
                    listener=inbox,
                    group=group,
                    session=Session(namesrv, instance=f"{group}-{number}"),
                    model="broadcasting",
                    from_where="first",
                    offsets_directory=tmp_path,
                )
                consumer.subscribe(topic)
                await stack.enter_async_context(consumer)
            theirs = [java_session.consumer(group, topic, from_="first", model="broadcasting") for _ in range(2)]
            java_session.producer(f"{group}_java").send(topic, "java", count=4)
            await producer.send_batch(topic, [OutgoingMessage(body.encode()) for body in numbered("python", 4)])
            everything = sorted(numbered("java", 4) + numbered("python", 4))
            for inbox in inboxes:
                assert sorted(each.body.decode() for each in await inbox.wait(8)) == everything
            for consumer in theirs:
                assert sorted(bodies(await asyncio.to_thread(consumer.take, 8))) == everything

    asyncio.run(main())


def test_members_of_both_languages_pop_in_one_group(
    namesrv: str, topic: str, group: str, java_session: JavaSession
) -> None:
    async def main() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S) as producer, AsyncExitStack() as stack:
            [queue, *_] = await create_topic(producer.session, topic, 4)
            mode = encode_body(SetMessageRequestMode(group, "POP", 0, topic))
            request = Frame(RequestCode.SET_MESSAGE_REQUEST_MODE, {}, mode)
            assert (await producer.session.ask_broker(queue.broker_name, request)).code == 0
            inbox = Inbox()
            pushed = PushConsumer(namesrv, group, listener=inbox, mode="broker", from_where="first")
            pushed.subscribe(topic)
            await stack.enter_async_context(pushed)
            simple = SimpleConsumer(namesrv, group, from_where="first")
            simple.subscribe(topic)
            await stack.enter_async_context(simple)
            java = java_session.consumer(group, topic, from_="first", popInvisibleMs=60_000)
            java_producer = java_session.producer(f"{group}_java")
            received: list[str] = []
            consumed: list[str] = []
            for turn in range(100):
                await asyncio.to_thread(java_producer.send, topic, f"java-{turn}", count=4)
                await producer.send_batch(topic, [body.encode() for body in numbered(f"python-{turn}", 4)])
                messages = await simple.receive(wait_s=0)
                await simple.ack(messages)
                received += [message.body.decode() for message in messages]
                consumed += bodies(java.seen())
                if received and consumed and inbox.messages and turn >= 4:
                    break
            sent = sorted(
                body for at in range(turn + 1) for name in ("java", "python") for body in numbered(f"{name}-{at}", 4)
            )
            async with asyncio.timeout(DEADLINE_S):
                while len(received) + len(consumed) + len(inbox.messages) < len(sent):
                    messages = await simple.receive(wait_s=0.2)
                    await simple.ack(messages)
                    received += [message.body.decode() for message in messages]
                    consumed += bodies(java.seen())
            assert sorted(received + consumed + [body.decode() for body in inbox.bodies]) == sent

    asyncio.run(main())


def test_handles_are_good_in_both_languages(
    server: Server, namesrv: str, topic: str, group: str, java_session: JavaSession
) -> None:
    async def main() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S) as producer:
            [queue] = await create_topic(producer.session, topic, 1)
            await producer.send_batch(topic, [b"one", b"two"])
            popper = Client(java_session, java_session._open("popper", {"group": f"{group}_popper"}))
            place = {"broker": server.broker_addr, "brokerName": queue.broker_name, "group": group, "topic": topic}
            consumer = SimpleConsumer(namesrv, group, from_where="first")
            consumer.subscribe(topic)
            async with consumer:
                [one] = await consumer.receive(max_messages=1, invisible_s=SHORT_S)
                await asyncio.to_thread(popper.call, "popper.ack", **place, handle=one.receipt_handle)
                invisible_ms = round(SHORT_S * 1000)
                answer = await asyncio.to_thread(popper.call, "popper.pop", **place, max=1, invisibleMs=invisible_ms)
                [two] = answer["messages"]
                assert two["body"] == "two"
                mine = Message(topic=topic, body=b"", broker=queue.broker_name, receipt_handle=two["handle"])
                await consumer.ack(mine)
                await producer.send(topic, b"three")
                # When one that is not acknowledged comes again, the time of the others is over.
                for _ in range(2):
                    [three] = await consumer.receive(invisible_s=SHORT_S, wait_s=DEADLINE_S)
                    assert three.body == b"three"
                await consumer.ack(three)
                assert await consumer.receive(wait_s=1) == []

    asyncio.run(main())
