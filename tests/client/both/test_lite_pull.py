"""Messages on request, against both servers: alone, in a group, and from places of one's own."""

from __future__ import annotations

import asyncio
from collections import Counter

from client.inbox import DEADLINE_S
from client.plain import create_topic
from skylark.client.lite_pull_consumer import LitePullConsumer
from skylark.client.producer import Producer


async def take(consumer: LitePullConsumer, count: int) -> list[bytes]:
    bodies: list[bytes] = []
    async for message in consumer:
        bodies.append(message.body)
        if len(bodies) == count:
            break
    return bodies


async def until_it_owns(consumer: LitePullConsumer, count: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while len(consumer.assignment()) != count:
            await consumer.poll(timeout_s=0.05)


def test_a_group_goes_on_where_it_was(namesrv: str, topic: str, group: str) -> None:
    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), Producer(namesrv, timeout_s=DEADLINE_S) as producer:
            await create_topic(producer.session, topic)
            sent = [b"%d" % number for number in range(20)]
            for body in sent:
                await producer.send(topic, body)
            got: list[bytes] = []
            for count in (12, 8):
                consumer = LitePullConsumer(namesrv, group=group, from_where="first")
                consumer.subscribe(topic)
                async with consumer:
                    got += await take(consumer, count)
            assert sorted(got) == sorted(sent)

    asyncio.run(run())


def test_members_share_the_queues(namesrv: str, topic: str, group: str) -> None:
    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), Producer(namesrv, timeout_s=DEADLINE_S) as producer:
            queues = await create_topic(producer.session, topic, 4)
            one, two = (LitePullConsumer(namesrv, group=group, from_where="first") for _ in range(2))
            one.subscribe(topic)
            two.subscribe(topic)
            async with one:
                await until_it_owns(one, 4)
                assert one.assignment() == queues
                async with two:
                    await until_it_owns(one, 2)
                    await until_it_owns(two, 2)
                    assert set(one.assignment()) | set(two.assignment()) == set(queues)
                    for queue in queues:
                        await producer.send(topic, b"x", queue=queue)
                    assert len(await take(one, 2) + await take(two, 2)) == 4
                await until_it_owns(one, 4)
                await producer.send(topic, b"y", queue=queues[3])
                assert await take(one, 1) == [b"y"]

    asyncio.run(run())


def test_seek_pause_and_commit(namesrv: str, topic: str, group: str) -> None:
    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), Producer(namesrv, timeout_s=DEADLINE_S) as producer:
            first, second = await create_topic(producer.session, topic, 2)
            for body in (b"a", b"b", b"c"):
                await producer.send(topic, body, queue=first)
            await producer.send(topic, b"other", queue=second)
            async with LitePullConsumer(namesrv, group=group, from_where="first", auto_commit=False) as consumer:
                consumer.assign([first, second])
                consumer.pause([second])
                assert await take(consumer, 3) == [b"a", b"b", b"c"]
                assert (consumer.position(first), await consumer.poll(0.2)) == (3, [])
                await consumer.seek(first, 1)
                assert await take(consumer, 2) == [b"b", b"c"]
                await consumer.seek_to_end(first)
                await producer.send(topic, b"d", queue=first)
                assert await take(consumer, 1) == [b"d"]
                await consumer.seek_to_begin(first)
                assert await take(consumer, 1) == [b"a"]
                consumer.pause([first])
                consumer.resume([second])
                assert await take(consumer, 1) == [b"other"]
                assert await consumer.committed(second) in (None, 0)
                await consumer.commit()
                assert (await consumer.committed(first), await consumer.committed(second)) == (1, 1)
                stored_ms = (await consumer.poll(0.1)) or await consumer.offset_for_time(first, 0)
                assert stored_ms == 0

    asyncio.run(run())


def test_only_some_tags(namesrv: str, topic: str, group: str) -> None:
    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), Producer(namesrv, timeout_s=DEADLINE_S) as producer:
            await create_topic(producer.session, topic, 2)
            for number in range(40):
                await producer.send(topic, b"%d" % number, tag=("new", "paid", "gone", "lost")[number % 4])
            consumer = LitePullConsumer(namesrv, group=group, from_where="first")
            consumer.subscribe(topic, tag="new || paid")
            async with consumer:
                got = Counter(await take(consumer, 20))
            assert got == Counter(b"%d" % number for number in range(40) if number % 4 < 2)

    asyncio.run(run())


def test_a_topic_that_comes_later(namesrv: str, topic: str, group: str) -> None:
    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), Producer(namesrv, timeout_s=DEADLINE_S) as producer:
            consumer = LitePullConsumer(namesrv, group=group, from_where="first")
            consumer.subscribe(topic)
            async with consumer:
                assert consumer.assignment() == []
                await create_topic(producer.session, topic)
                await producer.send(topic, b"at last")
                assert await take(consumer, 1) == [b"at last"]

    asyncio.run(run())
