"""Messages on request: reading ahead, places, sharing queues; on a cluster in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from client.inbox import DEADLINE_S
from client.plain import send
from skylark.client.errors import ClientClosed, InvalidMessage, RocketMQError
from skylark.client.lite_pull_consumer import LitePullConsumer
from skylark.client.message import MessageQueue
from skylark.client.pulling import Limits
from skylark.client.session import Session
from skylark.net.connection import RequestFailed
from skylark.testing import LocalCluster


@asynccontextmanager
async def orders(queues: int = 1) -> AsyncIterator[tuple[Session, LocalCluster, list[MessageQueue]]]:
    async with LocalCluster(topics={"orders": queues}) as cluster, Session(cluster.name_servers) as session:
        yield session, cluster, (await session.routes.get("orders")).read_queues


async def drain(consumer: LitePullConsumer, count: int) -> list[bytes]:
    bodies: list[bytes] = []
    while len(bodies) < count:
        messages = await consumer.poll(timeout_s=DEADLINE_S, max_count=7)
        assert messages, f"only {len(bodies)} of {count} messages came"
        bodies += [message.body for message in messages]
    return bodies


def test_reading_ahead_has_a_bound() -> None:
    async def main() -> None:
        async with orders() as (session, cluster, (queue,)):
            sent = [b"%d" % number for number in range(60)]
            await send(session, queue, *sent)
            consumer = LitePullConsumer(
                cluster.name_servers,
                group="slow",
                from_where="first",
                pull_batch_size=4,
                limits=Limits(messages=10),
                max_cached_messages=10,
            )
            async with consumer:
                consumer.assign([queue])
                got: list[bytes] = []
                async for message in consumer:
                    got.append(message.body)
                    assert sum(info["cachedMsgCount"] for info in consumer.running_info()["mqTable"].values()) < 14  # type: ignore[attr-defined]
                    if len(got) == 60:
                        break
                assert got == sent

    asyncio.run(main())


def test_leaving_by_an_error_commits_only_what_was_done() -> None:
    async def main() -> None:
        async with orders() as (session, cluster, (queue,)):
            await send(session, queue, b"a", b"b", b"c")

            async def fail_at_b() -> None:
                async with LitePullConsumer(cluster.name_servers, group="g", from_where="first") as consumer:
                    consumer.assign([queue])
                    async for message in consumer:
                        if message.body == b"b":
                            raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await fail_at_b()
            async with LitePullConsumer(cluster.name_servers, group="g", from_where="first") as consumer:
                assert await consumer.committed(queue) == 1
                consumer.assign([queue])
                assert await drain(consumer, 2) == [b"b", b"c"]
            async with LitePullConsumer(cluster.name_servers, group="g") as consumer:
                assert await consumer.committed(queue) == 3

    asyncio.run(main())


def test_without_auto_commit_nothing_is() -> None:
    async def main() -> None:
        async with orders() as (session, cluster, (queue,)):
            await send(session, queue, b"a", b"b")
            settings = {"group": "g", "from_where": "first", "auto_commit": False}
            async with LitePullConsumer(cluster.name_servers, **settings) as consumer:  # type: ignore[arg-type]
                consumer.assign([queue])
                await drain(consumer, 2)
            async with LitePullConsumer(cluster.name_servers, **settings) as consumer:  # type: ignore[arg-type]
                assert await consumer.committed(queue) is None
                consumer.assign([queue])
                await drain(consumer, 2)
                await consumer.commit()
                assert await consumer.committed(queue) == 2
                await consumer.commit({queue: 1})
                assert await consumer.committed(queue) == 1

    asyncio.run(main())


def test_an_operator_moves_the_group() -> None:
    async def main() -> None:
        async with orders() as (session, cluster, (queue,)):
            await send(session, queue, b"a", b"b", b"c")
            async with LitePullConsumer(cluster.name_servers, group="g", from_where="first") as consumer:
                consumer.subscribe("orders")
                await drain(consumer, 3)
                consumer.reset_offsets("orders", {queue: 1})
                assert consumer.positions("orders") == {queue: 1}
                assert await drain(consumer, 2) == [b"b", b"c"]
                with pytest.raises(RequestFailed, match="no listener"):
                    await consumer.consume_directly(await drain_one(session, queue))

    asyncio.run(main())


async def drain_one(session: Session, queue: MessageQueue):  # type: ignore[no-untyped-def]
    async with LitePullConsumer(group="other", session=session, from_where="first") as consumer:
        consumer.assign([queue])
        return (await consumer.poll(DEADLINE_S))[0]


def test_the_broker_may_go_and_come_back() -> None:
    async def main() -> None:
        async with orders() as (session, cluster, (queue,)):
            await send(session, queue, b"before")
            async with LitePullConsumer(cluster.name_servers, group="g", from_where="first") as consumer:
                consumer.subscribe("orders")
                assert await drain(consumer, 1) == [b"before"]
                await cluster.broker.stop()
                await cluster.broker.start()
                await send(session, queue, b"after")
                assert await drain(consumer, 1) == [b"after"]

    asyncio.run(main())


def test_closing_ends_the_loop_of_another_task() -> None:
    async def main() -> None:
        async with orders() as (_, cluster, queues):
            consumer = LitePullConsumer(cluster.name_servers, group="g")
            await consumer.start()
            consumer.assign(queues)

            async def read() -> int:
                return len([message async for message in consumer])

            reading = asyncio.create_task(read())
            polling = asyncio.create_task(consumer.poll(DEADLINE_S))
            await asyncio.sleep(0)
            await consumer.close()
            assert await reading == 0
            with pytest.raises(ClientClosed):
                await polling
            await consumer.close()

    asyncio.run(main())


def test_what_can_not_be_is_said() -> None:
    async def main() -> None:
        async with orders(2) as (_, cluster, queues):
            consumer = LitePullConsumer(cluster.name_servers, group="g")
            with pytest.raises(ClientClosed):
                await consumer.poll()
            async with consumer:
                consumer.assign(queues[:1])
                with pytest.raises(RocketMQError, match="has queues assigned"):
                    consumer.subscribe("orders")
                with pytest.raises(InvalidMessage, match="not among the queues"):
                    consumer.pause(queues)
                with pytest.raises(InvalidMessage, match="0 to 0, not 7"):
                    await consumer.seek(queues[0], 7)
            async with LitePullConsumer(cluster.name_servers, group="g") as other:
                other.subscribe("orders")
                with pytest.raises(RocketMQError, match="subscribes to topics"):
                    other.assign(queues)

    asyncio.run(main())


def test_a_second_member_in_one_session_is_refused_and_the_first_goes_on() -> None:
    async def main() -> None:
        async with orders() as (session, _, (queue,)):
            first = LitePullConsumer(group="g", session=session, from_where="first")
            second = LitePullConsumer(group="g", session=session)
            first.subscribe("orders")
            second.subscribe("orders")
            async with first:
                with pytest.raises(RocketMQError, match="session of its own"):
                    await second.start()
                assert second.assignment() == []
                await send(session, queue, b"a")
                assert await drain(first, 1) == [b"a"]

    asyncio.run(main())


def test_topics_come_and_go_while_it_runs() -> None:
    async def main() -> None:
        async with LocalCluster(topics={"orders": 1, "bills": 1}) as cluster, Session(cluster.name_servers) as session:
            (order,) = (await session.routes.get("orders")).read_queues
            (bill,) = (await session.routes.get("bills")).read_queues
            async with LitePullConsumer(cluster.name_servers, group="g", from_where="first") as consumer:
                consumer.subscribe("orders")
                await send(session, order, b"an order")
                assert await drain(consumer, 1) == [b"an order"]
                consumer.subscribe("bills")
                await send(session, bill, b"a bill")
                assert await drain(consumer, 1) == [b"a bill"]
                consumer.unsubscribe("orders")
                consumer.unsubscribe("bills")
                assert consumer.assignment() == []
                consumer.subscribe("orders")
                await send(session, order, b"another")
                assert await drain(consumer, 1) == [b"another"]

    asyncio.run(main())
