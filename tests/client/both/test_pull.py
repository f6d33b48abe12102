"""Reading by queue and offset, against both servers."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from client.inbox import DEADLINE_S
from client.plain import create_topic, until_readable
from skylark.client.producer import Producer
from skylark.client.pull_consumer import PullConsumer, PullStatus


def test_messages_come_by_queue_and_offset(namesrv: str, topic: str, group: str) -> None:
    async def run() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S) as producer:
            await create_topic(producer.session, topic, 2)
            async with PullConsumer(group=group, session=producer.session) as consumer:
                queue, empty = await consumer.queues(topic)
                for number in range(5):
                    tag = "even" if number % 2 == 0 else "odd"
                    await producer.send(topic, b"%d" % number, tag=tag, queue=queue)
                await until_readable(producer.session, queue, 5)
                pulled = await consumer.pull(queue, 0, 3)
                assert [message.body for message in pulled.messages] == [b"0", b"1", b"2"]
                assert (pulled.status, pulled.next_offset) == (PullStatus.FOUND, 3)
                pulled = await consumer.pull(queue, 3)
                assert [message.body for message in pulled.messages] == [b"3", b"4"]
                pulled = await consumer.pull(queue, 0, tag="odd")
                assert [message.body for message in pulled.messages] == [b"1", b"3"]
                pulled = await consumer.pull(queue, 0, tag="none of these")
                assert (pulled.status, pulled.messages) == (PullStatus.NO_MATCHED_MESSAGE, [])
                pulled = await consumer.pull(queue, 5)
                assert (pulled.status, pulled.next_offset) == (PullStatus.NO_NEW_MESSAGE, 5)
                pulled = await consumer.pull(queue, 99)
                assert (pulled.status, pulled.next_offset) == (PullStatus.OFFSET_ILLEGAL, 5)
                assert await consumer.max_offset(empty) == 0

    asyncio.run(run())


def test_places_by_offset_and_time(namesrv: str, topic: str, group: str) -> None:
    async def run() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S) as producer:
            (queue,) = await create_topic(producer.session, topic, 1)
            async with PullConsumer(group=group, session=producer.session) as consumer:
                for body in (b"a", b"b"):
                    await producer.send(topic, body, queue=queue)
                await until_readable(producer.session, queue, 2)
                first = (await consumer.pull(queue, 0)).messages[0]
                assert (await consumer.min_offset(queue), await consumer.max_offset(queue)) == (0, 2)
                assert await consumer.offset_for_time(queue, first.store_timestamp_ms) == 0
                assert await consumer.offset_for_time(queue, first.stored_at - timedelta(hours=1)) == 0
                assert await consumer.offset_for_time(queue, datetime.now(UTC) + timedelta(hours=1)) == 2

    asyncio.run(run())


def test_offsets_are_kept_for_the_group(namesrv: str, topic: str, group: str) -> None:
    async def run() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S) as producer:
            (queue,) = await create_topic(producer.session, topic, 1)
            async with PullConsumer(group=group, session=producer.session) as consumer:
                await producer.send(topic, b"a", queue=queue)
                await consumer.pull(queue, 0, wait_s=10)  # the broker knows a group when it has read something
                await consumer.commit(queue, 1)
                assert await consumer.committed(queue) == 1
            async with PullConsumer(namesrv, group=group) as another:
                await another.queues(topic)
                assert await another.committed(queue) == 1

    asyncio.run(run())
