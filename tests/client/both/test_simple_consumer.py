"""Simple consumers against Skylark and against Apache RocketMQ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from client.inbox import DEADLINE_S, numbered
from client.plain import create_topic, send, until_readable
from skylark.client.errors import BrokerError, ClientClosed, InvalidMessage, RouteNotFound
from skylark.client.message import Message
from skylark.client.session import Session
from skylark.client.simple_consumer import SimpleConsumer
from skylark.wire.codes import ResponseCode

if TYPE_CHECKING:
    from client.both.conftest import SecondBroker

LONG_S = 300.0  # what is hidden for so long stays so for the whole test


@asynccontextmanager
async def simple(namesrv: str, group: str, topic: str, **options: Any) -> AsyncIterator[SimpleConsumer]:
    subscription = {name: options.pop(name) for name in ("tag", "sql") if name in options}
    options.setdefault("from_where", "first")
    consumer = SimpleConsumer(namesrv, group, **options)
    consumer.subscribe(topic, **subscription)
    async with consumer:
        yield consumer


async def receive(consumer: SimpleConsumer, count: int, **options: Any) -> list[Message]:
    """Receives until so many came, and no more."""
    messages: list[Message] = []
    async with asyncio.timeout(DEADLINE_S):
        while len(messages) < count:
            messages += await consumer.receive(**{"max_messages": min(count - len(messages), 32), **options})
    return messages


def bodies(messages: list[Message]) -> list[bytes]:
    return sorted(message.body for message in messages)


def test_what_is_acknowledged_does_not_come_again_and_the_rest_does(namesrv: str, topic: str, group: str) -> None:
    async def main() -> None:
        async with Session(namesrv) as session:
            queues = await create_topic(session, topic, 4)
            for number, body in enumerate(numbered(12)):
                await send(session, queues[number % 4], body, tag="a")
            async with simple(namesrv, group, topic) as consumer:
                kept = await receive(consumer, 11, invisible_s=LONG_S)
                [left] = await receive(consumer, 1, invisible_s=1)
                assert bodies([*kept, left]) == sorted(numbered(12))
                assert {(each.topic, each.tag, each.reconsume_times) for each in (*kept, left)} == {(topic, "a", 0)}
                await consumer.ack(kept[0])
                await consumer.ack(kept[1:])
                [again] = await receive(consumer, 1, invisible_s=LONG_S)
                assert (again.body, again.topic, again.reconsume_times) == (left.body, topic, 1)
                await consumer.ack(again)
                assert await consumer.receive(wait_s=0) == []

    asyncio.run(main())


def test_time_is_extended_and_cut_short(namesrv: str, topic: str, group: str) -> None:
    async def main() -> None:
        async with Session(namesrv) as session:
            [queue] = await create_topic(session, topic, 1)
            await send(session, queue, b"slow", b"left")
            await until_readable(session, queue, 2)
            async with simple(namesrv, group, topic) as consumer:
                message, left = await consumer.receive(invisible_s=3)
                first_handle = message.receipt_handle
                await consumer.extend(message, LONG_S)
                assert message.receipt_handle != first_handle
                # When the other one comes again, the time that both had is over.
                [again] = await receive(consumer, 1)
                assert again.body == left.body
                await consumer.ack(again)
                assert await consumer.receive(wait_s=0.5) == []
                await consumer.extend(message, 1)
                [again] = await receive(consumer, 1)
                assert (again.body, again.reconsume_times, again.topic) == (b"slow", 1, topic)
                await consumer.ack(again)

    asyncio.run(main())


def test_messages_arrive_while_a_receive_waits_at_several_topics(namesrv: str, topic: str, group: str) -> None:
    async def main() -> None:
        async with Session(namesrv) as session:
            other = f"{topic}_other"
            [queue] = await create_topic(session, topic, 1)
            [other_queue] = await create_topic(session, other, 1)
            async with simple(namesrv, group, topic) as consumer:
                consumer.subscribe(other)
                assert await consumer.receive(wait_s=0) == []
                for where, body in ((queue, b"here"), (other_queue, b"there"), (queue, b"here again")):
                    waiting = asyncio.create_task(receive(consumer, 1, wait_s=60))
                    await asyncio.sleep(0)
                    await send(session, where, body)
                    [message] = await waiting
                    assert (message.topic, message.body) == (where.topic, body)
                    await consumer.ack(message)

    asyncio.run(main())


def test_a_broker_that_is_down_does_not_hold_up_the_others(
    namesrv: str, topic: str, group: str, second_broker: SecondBroker
) -> None:
    async def main() -> None:
        async with Session(namesrv) as session:
            queues = await create_topic(session, topic, 1)
            first, second = sorted(queues, key=lambda queue: queue.broker_name == second_broker.name)
            async with simple(namesrv, group, topic) as consumer:
                await send(session, second, b"from the second")
                [message] = await receive(consumer, 1, wait_s=60)
                assert message.broker == second.broker_name
                await consumer.ack(message)
                second_broker.kill()
                for number in range(3):
                    await send(session, first, b"%d" % number)
                    async with asyncio.timeout(DEADLINE_S):
                        [message] = await consumer.receive(wait_s=2 * DEADLINE_S)
                    assert message.body == b"%d" % number
                    await consumer.ack(message)

    asyncio.run(main())


def test_tags_are_told_from_those_that_share_their_hash_code(namesrv: str, topic: str, group: str) -> None:
    async def main() -> None:
        async with Session(namesrv) as session:
            [queue] = await create_topic(session, topic, 1)
            for tag in ("Aa", "BB", "c", "Aa"):
                await send(session, queue, tag.encode(), tag=tag)
            async with simple(namesrv, group, topic, tag="Aa || d") as consumer:
                messages = await receive(consumer, 2)
                assert [each.tag for each in messages] == ["Aa", "Aa"]
                await consumer.ack(messages)

    asyncio.run(main())


def test_in_order_a_queue_waits_for_what_it_gave(namesrv: str, topic: str, group: str) -> None:
    async def main() -> None:
        async with Session(namesrv) as session:
            [queue] = await create_topic(session, topic, 1)
            for body in numbered(4):
                await send(session, queue, body)
            await until_readable(session, queue, 4)
            async with simple(namesrv, group, topic, fifo=True) as consumer:
                first, second = await receive(consumer, 2, invisible_s=LONG_S)
                assert [first.body, second.body] == [b"m0", b"m1"]
                assert await consumer.receive(wait_s=1) == []
                await consumer.ack(first)
                await consumer.extend(second, 1)
                [again] = await receive(consumer, 1, max_messages=1)
                assert (again.body, again.reconsume_times) == (b"m1", 1)
                await consumer.ack(again)
                for body in (b"m2", b"m3"):
                    [message] = await receive(consumer, 1, max_messages=1)
                    assert message.body == body
                    await consumer.ack(message)

    asyncio.run(main())


def test_a_message_that_comes_too_often_becomes_a_dead_letter(namesrv: str, topic: str, group: str) -> None:
    async def main() -> None:
        async with Session(namesrv) as session:
            [queue] = await create_topic(session, topic, 1)
            await send(session, queue, b"doomed", tag="a")
            async with simple(namesrv, group, topic, max_reconsume_times=1) as consumer:
                for times in range(2):
                    [message] = await receive(consumer, 1)
                    assert message.reconsume_times == times
                    await consumer.extend(message, 0)
                letters = asyncio.create_task(first_letter(namesrv, group))
                while not letters.done():
                    assert await consumer.receive(wait_s=1) == []
                letter = await letters
            assert (letter.body, letter.tag) == (b"doomed", "a")

    async def first_letter(namesrv: str, group: str) -> Message:
        consumer = SimpleConsumer(namesrv, f"{group}_undertaker", from_where="first")
        consumer.subscribe(f"%DLQ%{group}")
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    async with consumer:
                        return (await receive(consumer, 1))[0]
                except RouteNotFound:
                    consumer = SimpleConsumer(namesrv, f"{group}_undertaker", from_where="first")
                    consumer.subscribe(f"%DLQ%{group}")
                    await asyncio.sleep(0.2)

    asyncio.run(main())


def test_iteration_gives_one_message_after_the_other(namesrv: str, topic: str, group: str) -> None:
    async def main() -> None:
        async with Session(namesrv) as session:
            queues = await create_topic(session, topic, 2)
            for number, body in enumerate(numbered(20)):
                await send(session, queues[number % 2], body)
            got = []
            async with simple(namesrv, group, topic) as consumer:
                async for message in consumer:
                    got.append(message.body)
                    await consumer.ack(message)
                    if len(got) == 20:
                        break
            assert sorted(got) == sorted(numbered(20))

    asyncio.run(main())


def test_bad_input_is_answered_clearly(namesrv: str, topic: str, group: str) -> None:
    async def main() -> None:
        async with Session(namesrv) as session:
            [queue] = await create_topic(session, topic, 1)
            await send(session, queue, b"x")
            consumer = SimpleConsumer(namesrv, group, from_where="first")
            with pytest.raises(ClientClosed):
                await consumer.receive()
            consumer.subscribe(f"{topic}_missing")
            with pytest.raises(RouteNotFound, match="_missing"):
                await consumer.start()
            async with simple(namesrv, group, topic) as consumer:
                [message] = await receive(consumer, 1)
                for options in ({"invisible_s": 0}, {"invisible_s": 1e6}, {"max_messages": 0}, {"max_messages": 33}):
                    with pytest.raises(InvalidMessage, match=r"must be between|gives 1 to 32"):
                        await consumer.receive(**options)
                with pytest.raises(InvalidMessage, match="must be between 0 and 43200"):
                    await consumer.extend(message, -1)
                for handle in ("", "garbage", "1 2 3 4 5 6 7 8", "0 0 0 0 0 broker 0"):
                    with pytest.raises(InvalidMessage, match="handle"):
                        await consumer.ack(msgspec.structs.replace(message, receipt_handle=handle))
                parts = message.receipt_handle.split(" ")
                forged = msgspec.structs.replace(message, receipt_handle=" ".join([*parts[:7], "4711"]))
                with pytest.raises(BrokerError) as refused:
                    await consumer.ack(forged)
                assert refused.value.code == ResponseCode.NO_MESSAGE
                with pytest.raises(BrokerError) as refused:
                    await consumer.extend(forged, 10)
                assert refused.value.code == ResponseCode.NO_MESSAGE
                elsewhere = msgspec.structs.replace(message, receipt_handle=" ".join([*parts[:6], "77", "0"]))
                with pytest.raises(BrokerError, match="queueId") as refused:
                    await consumer.ack(elsewhere)
                assert refused.value.code == ResponseCode.MESSAGE_ILLEGAL
                await consumer.ack(message)

    asyncio.run(main())
