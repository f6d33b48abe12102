"""Reading by queue and offset, on a cluster in this process."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from client.plain import send
from skylark.client.errors import ClientClosed, InvalidMessage, NotReachable, RouteNotFound
from skylark.client.message import MessageQueue
from skylark.client.pull_consumer import PullConsumer, PullStatus, time_ms
from skylark.client.session import Session
from skylark.testing import LocalCluster
from skylark.wire.message import SYS_COMPRESSED


def test_unreadable_messages_are_named() -> None:
    async def main() -> None:
        async with (
            LocalCluster(topics={"orders": 1}) as cluster,
            Session(cluster.name_servers) as session,
            PullConsumer(group="audit", session=session) as consumer,
        ):
            (queue,) = await consumer.queues("orders")
            await send(session, queue, b"fine")
            await send(session, queue, b"not zlib", sys_flag=SYS_COMPRESSED)
            pulled = await consumer.pull(queue, 0)
            assert [message.body for message in pulled.messages] == [b"fine", b"not zlib"]
            assert list(pulled.unreadable) == [1]

    asyncio.run(main())


def test_a_wait_ends_when_a_message_comes() -> None:
    async def main() -> None:
        async with (
            LocalCluster(topics={"orders": 1}) as cluster,
            Session(cluster.name_servers) as session,
            PullConsumer(group="audit", session=session) as consumer,
        ):
            (queue,) = await consumer.queues("orders")
            waiting = asyncio.create_task(consumer.pull(queue, 0, wait_s=60))
            while (await consumer.pull(queue, 0)).status is not PullStatus.NO_NEW_MESSAGE:
                pass
            assert not waiting.done()
            await send(session, queue, b"at last")
            assert [message.body for message in (await waiting).messages] == [b"at last"]

    asyncio.run(main())


def test_what_can_not_be_is_said() -> None:
    async def main() -> None:
        queue = MessageQueue("broker-a", 0, "orders")
        async with LocalCluster(topics={"orders": 1}) as cluster:
            consumer = PullConsumer(cluster.name_servers, group="audit")
            with pytest.raises(ClientClosed, match="async with"):
                await consumer.queues("orders")
            async with consumer:
                with pytest.raises(InvalidMessage, match="1 to 1024 messages, not 0"):
                    await consumer.pull(queue, 0, 0)
                with pytest.raises(InvalidMessage, match="0 or more, not -1"):
                    await consumer.pull(queue, -1)
                with pytest.raises(InvalidMessage, match="names no tag"):
                    await consumer.pull(queue, 0, tag=" || ")
                with pytest.raises(RouteNotFound, match="topic 'absent': it does not exist, or its broker is down"):
                    await consumer.queues("absent")
                with pytest.raises(NotReachable, match="broker-z"):
                    await consumer.pull(MessageQueue("broker-z", 0, "orders"), 0)
            with pytest.raises(ClientClosed):
                await consumer.committed(queue)

    asyncio.run(main())


def test_a_time_may_be_given_in_two_ways() -> None:
    assert time_ms(1_700_000_000_123) == 1_700_000_000_123
    assert time_ms(datetime.fromtimestamp(1_700_000_000.123, UTC)) == 1_700_000_000_123
