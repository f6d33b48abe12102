"""Who settles what: tasks and threads that hold messages of one lite pull consumer, and how they end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from client.inbox import DEADLINE_S
from client.plain import send
from client.test_lite_pull_consumer import drain, orders
from client.test_sync import fill
from skylark.client import sync
from skylark.client.lite_pull_consumer import LitePullConsumer
from skylark.client.message import MessageQueue
from skylark.testing import LocalCluster


@asynccontextmanager
async def consuming(*bodies: bytes, queues: int = 1) -> AsyncIterator[tuple[LitePullConsumer, list[MessageQueue]]]:
    """A started consumer that has the queues, with the bodies in the first."""
    async with orders(queues) as (session, cluster, owned):
        await send(session, owned[0], *bodies)
        consumer = LitePullConsumer(cluster.name_servers, group="g", from_where="first")
        await consumer.start()
        consumer.assign(owned)
        try:
            yield consumer, owned
        finally:
            await consumer.close()


async def committed(cluster_servers: str, queue: MessageQueue) -> int | None:
    async with LitePullConsumer(cluster_servers, group="g") as consumer:
        return await consumer.committed(queue)


def test_close_commits_only_what_was_settled() -> None:
    async def main() -> None:
        async with orders() as (session, cluster, (queue,)):
            await send(session, queue, b"a", b"b", b"c")
            consumer = LitePullConsumer(cluster.name_servers, group="g", from_where="first")
            await consumer.start()
            consumer.assign([queue])
            assert [message.body for message in await consumer.poll(DEADLINE_S, 1)] == [b"a"]
            await consumer.close()
            assert await committed(cluster.name_servers, queue) == 0
            consumer = LitePullConsumer(cluster.name_servers, group="g", from_where="first")
            await consumer.start()
            consumer.assign([queue])
            assert await drain(consumer, 3) == [b"a", b"b", b"c"]
            await consumer.commit()
            await consumer.close()
            assert await committed(cluster.name_servers, queue) == 3

    asyncio.run(main())


def test_a_task_settles_what_it_holds_and_nothing_else() -> None:
    async def main() -> None:
        async with consuming(b"a", b"b", b"c") as (consumer, (queue,)):
            held, let_go = asyncio.Event(), asyncio.Event()

            async def slow() -> None:
                assert (await consumer.poll(DEADLINE_S, 1))[0].body == b"a"
                held.set()
                await let_go.wait()
                assert await consumer.poll(0) == []

            task = asyncio.create_task(slow())
            await held.wait()
            assert await drain(consumer, 2) == [b"b", b"c"]
            assert await consumer.poll(0) == []
            await consumer.commit()
            assert await consumer.committed(queue) == 0
            let_go.set()
            await task
            await consumer.commit()
            assert await consumer.committed(queue) == 3

    asyncio.run(main())


@pytest.mark.parametrize("ends", ["fails", "is cancelled"])
def test_what_a_task_leaves_behind_is_handed_out_again(ends: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with consuming(b"a", b"b", b"c") as (consumer, (queue,)):
            held = asyncio.Event()

            async def work() -> None:
                assert (await consumer.poll(DEADLINE_S, 2))[0].body == b"a"
                held.set()
                if ends == "fails":
                    raise ZeroDivisionError
                await asyncio.Event().wait()

            task = asyncio.create_task(work(), name="worker")
            await held.wait()
            task.cancel()
            await asyncio.wait([task])
            assert sorted(await drain(consumer, 3)) == [b"a", b"b", b"c"]
            await consumer.commit()
            assert await consumer.committed(queue) == 3

    asyncio.run(main())
    assert "with 2 messages in hand, which are handed out again" in caplog.text
    assert ("ZeroDivisionError" in caplog.text) == (ends == "fails")


@pytest.mark.parametrize("ends", ["well", "fails"])
def test_what_a_task_was_dealt_and_did_not_look_at_goes_to_who_waits(ends: str) -> None:
    async def main() -> None:
        bodies = [b"%d" % number for number in range(10)]
        async with consuming(*bodies) as (consumer, (queue,)):

            async def take_four() -> None:
                count = 0
                async for _ in consumer:
                    count += 1
                    if count == 4:
                        break
                if ends == "fails":
                    raise ZeroDivisionError

            await asyncio.wait([asyncio.create_task(take_four())])
            first = 4 if ends == "well" else 3
            assert await drain(consumer, 10 - first) == bodies[first:]
            await consumer.commit()
            assert await consumer.committed(queue) == 10

    asyncio.run(main())


def test_a_next_in_a_task_of_its_own_takes_no_more_than_that() -> None:
    async def main() -> None:
        async with consuming(b"a", b"b", b"c") as (consumer, (queue,)):
            for number, body in enumerate((b"a", b"b")):
                assert (await asyncio.wait_for(anext(consumer), DEADLINE_S)).body == body
                assert consumer.position(queue) == number + 1
            await consumer.commit()
            assert await consumer.committed(queue) == 2

    asyncio.run(main())


def test_a_task_that_leaves_the_block_by_an_error_is_nothing_to_tell_of(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with orders() as (session, cluster, (queue,)):
            await send(session, queue, b"a")

            async def fail() -> None:
                async with LitePullConsumer(cluster.name_servers, group="g", from_where="first") as consumer:
                    consumer.assign([queue])
                    await consumer.poll(DEADLINE_S)
                    raise ZeroDivisionError

            task = asyncio.create_task(fail())
            await asyncio.wait([task])
            assert isinstance(task.exception(), ZeroDivisionError)
            assert await committed(cluster.name_servers, queue) == 0

    asyncio.run(main())
    assert "handed out again" not in caplog.text


def test_a_poll_in_a_task_of_its_own_is_settled_by_the_next() -> None:
    async def main() -> None:
        async with consuming(b"a", b"b") as (consumer, (queue,)):
            for body in (b"a", b"b"):
                (message,) = await asyncio.create_task(consumer.poll(DEADLINE_S, 1))
                assert message.body == body
            assert await consumer.poll(0) == []
            await consumer.commit()
            assert await consumer.committed(queue) == 2

    asyncio.run(main())


def test_threads_settle_what_they_hold_and_one_that_is_gone_leaves_it_to_others(
    skylark_cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = skylark_cluster
    cluster.run(lambda: cluster.create_topic("orders", 1))
    consumer = sync.LitePullConsumer(cluster.name_servers, group="g", from_where="first")
    consumer.subscribe("orders")
    with consumer:
        (queue,) = consumer.assignment()
        fill(cluster, queue, *(b"%d" % number for number in range(5)))
        seen: list[bytes] = []

        def fail_at_the_second() -> None:
            for message in consumer:
                seen.append(message.body)
                if len(seen) == 2:
                    return

        thread = threading.Thread(target=fail_at_the_second, name="worker")
        thread.start()
        thread.join()
        assert seen == [b"0", b"1"]
        consumer.commit()
        assert consumer.committed(queue) in (None, 0, 1)
        got = [next(consumer).body for _ in range(4)]
        assert got == [b"1", b"2", b"3", b"4"]
        assert consumer.poll(0) == []
        consumer.commit()
        assert consumer.committed(queue) == 5
    assert "thread worker ended" in caplog.text


def test_a_thread_that_takes_its_time_keeps_no_messages_from_others(skylark_cluster: LocalCluster) -> None:
    cluster = skylark_cluster
    cluster.run(lambda: cluster.create_topic("orders", 1))
    consumer = sync.LitePullConsumer(cluster.name_servers, group="g", from_where="first")
    consumer.subscribe("orders")
    with consumer:
        (queue,) = consumer.assignment()
        fill(cluster, queue, *(b"%d" % number for number in range(20)))
        held, let_go = threading.Event(), threading.Event()

        def slow() -> None:
            next(consumer)
            held.set()
            let_go.wait(DEADLINE_S)

        thread = threading.Thread(target=slow)
        thread.start()
        held.wait(DEADLINE_S)
        assert sorted(int(next(consumer).body) for _ in range(19)) == list(range(1, 20))
        let_go.set()
        thread.join()


@pytest.fixture
def ten(skylark_cluster: LocalCluster) -> tuple[LocalCluster, MessageQueue]:
    """A queue with the messages 0 to 9."""
    queue = MessageQueue("broker-a", 0, "orders")
    skylark_cluster.run(lambda: skylark_cluster.create_topic("orders", 1))
    fill(skylark_cluster, queue, *(b"%d" % number for number in range(10)))
    return skylark_cluster, queue


def test_a_thread_that_iterates_sees_where_it_was_moved_to_and_what_was_paused(
    ten: tuple[LocalCluster, MessageQueue],
) -> None:
    cluster, queue = ten
    with sync.LitePullConsumer(cluster.name_servers, group="g", from_where="first") as consumer:
        consumer.assign([queue])
        assert [next(consumer).body for _ in range(2)] == [b"0", b"1"]
        consumer.seek(queue, 5)
        assert next(consumer).body == b"5"
        consumer.pause([queue])
        assert consumer.poll(0) == []
        assert consumer.position(queue) == 6
        consumer.resume([queue])
        assert next(consumer).body == b"6"


@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_commits_what_it_iterated_over_and_not_what_it_was_dealt(
    ten: tuple[LocalCluster, MessageQueue], fails: bool
) -> None:
    cluster, queue = ten

    def take_three() -> None:
        with sync.LitePullConsumer(cluster.name_servers, group="g", from_where="first") as consumer:
            consumer.assign([queue])
            for message in consumer:
                if message.body == b"2":
                    if fails:
                        raise ZeroDivisionError
                    return

    if fails:
        with pytest.raises(ZeroDivisionError):
            take_three()
    else:
        take_three()
    with sync.PullConsumer(cluster.name_servers, group="g") as reader:
        assert reader.committed(queue) == (2 if fails else 3)


def test_what_an_interrupted_thread_has_not_seen_comes_again(
    ten: tuple[LocalCluster, MessageQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, queue = ten
    with sync.LitePullConsumer(cluster.name_servers, group="g", from_where="first") as consumer:
        consumer.assign([queue])
        run = consumer._background.run

        def interrupted(work: Any) -> Any:
            run(work)
            raise KeyboardInterrupt  # Ctrl-C, just when the messages were there

        with monkeypatch.context() as patch:
            patch.setattr(consumer._background, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                consumer.poll(DEADLINE_S, 2)
        assert [message.body for message in consumer.poll(DEADLINE_S, 2)] == [b"0", b"1"]
