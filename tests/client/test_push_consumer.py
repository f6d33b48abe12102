"""Push consumers on a cluster in this process: how they end, what they do when things fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from client.inbox import DEADLINE_S, Gate, Inbox, eventually, numbered
from client.plain import send
from skylark.client import offsets, pulling
from skylark.client.errors import ClientClosed, InvalidMessage, NotReachable, RocketMQError, RouteNotFound
from skylark.client.listening import ConsumeContext, ConsumeHook, RetryLater
from skylark.client.message import Message, MessageQueue
from skylark.client.offsets import RemoteOffsets
from skylark.client.producer import Producer
from skylark.client.pulling import Limits
from skylark.client.push_consumer import PushConsumer
from skylark.client.routes import TopicRoute
from skylark.client.session import Session
from skylark.testing import LocalCluster
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from skylark.wire.message import SYS_COMPRESSED

QUICK_RETRIES = {"messageDelayLevel": " ".join(["1s"] * 18)}


def consumer_of(cluster: LocalCluster, group: str, listener: Any, **options: Any) -> PushConsumer:
    options.setdefault("from_where", "first")
    consumer = PushConsumer(cluster.name_servers, group, listener=listener, **options)
    consumer.subscribe("orders")
    return consumer


@asynccontextmanager
async def cluster_with(
    count: int, *, queues: int = 1, brokers: int = 1
) -> AsyncIterator[tuple[LocalCluster, Session, list[MessageQueue]]]:
    """A cluster whose topic "orders" holds `count` messages, spread over its queues."""
    async with (
        LocalCluster(brokers, topics={"orders": queues}, settings=QUICK_RETRIES) as cluster,
        Session(cluster.name_servers) as session,
    ):
        read_queues = (await session.routes.get("orders")).read_queues
        for number, body in enumerate(numbered(count)):
            await send(session, read_queues[number % len(read_queues)], body)
        yield cluster, session, read_queues


@pytest.mark.parametrize("orderly", [False, True])
def test_closing_finishes_what_is_in_hand_and_commits_it(orderly: bool) -> None:
    async def main() -> None:
        gate = Gate()
        async with cluster_with(10) as (cluster, session, [queue]):
            consumer = consumer_of(cluster, "g", gate, orderly=orderly, concurrency=3)
            await consumer.start()
            in_hand = 1 if orderly else 3
            await gate.entered.wait(in_hand)
            closing = asyncio.create_task(consumer.close())
            await eventually(lambda: all(each.revoked for each in consumer._member.assignments))  # type: ignore[union-attr]
            assert not closing.done()
            gate.open()
            await closing
            assert gate.done == numbered(10)[:in_hand]
            assert await RemoteOffsets(session, "g").fetch(queue) == in_hand
            await consumer.wait_closed()
            rest = Inbox()
            async with consumer_of(cluster, "g", rest):
                await rest.wait(10 - in_hand)
            assert rest.bodies == numbered(10)[in_hand:]

    asyncio.run(main())


def test_a_pull_that_is_handled_late_does_not_undo_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apache's broker has threads for pulls and others for commits, and may handle last what was sent first."""
    pull, commit = pulling.pull, offsets.commit
    late: list[Coroutine[Any, Any, object]] = []

    async def keep_for_later(*args: Any, **options: Any) -> pulling.Pulled:
        if options["commit_offset"] <= 0:
            return await pull(*args, **options)
        late.append(pull(*args, **options | {"suspend_ms": 0}))
        return await asyncio.Future()

    async def commit_first(*args: Any) -> None:
        await commit(*args)
        await asyncio.gather(*late)
        late.clear()

    async def main() -> None:
        inbox = Inbox()
        async with cluster_with(2) as (cluster, session, [queue]):
            monkeypatch.setattr(pulling, "pull", keep_for_later)
            monkeypatch.setattr(offsets, "commit", commit_first)
            monkeypatch.setattr(RemoteOffsets, "carried", RemoteOffsets.known)  # by the first pulls already
            async with consumer_of(cluster, "g", inbox, pull_batch_size=1):
                await inbox.wait(2)
            assert await RemoteOffsets(session, "g").fetch(queue) == 2

    asyncio.run(main())


@pytest.mark.parametrize("orderly", [False, True])
def test_a_listener_that_does_not_end_is_left_behind_and_its_message_comes_again(orderly: bool) -> None:
    async def main() -> None:
        gate, again = Gate(), Inbox()
        async with cluster_with(1) as (cluster, session, [queue]):
            async with consumer_of(cluster, "g", gate, orderly=orderly, shutdown_timeout_s=0.05):
                await gate.entered.wait(1)
            assert await RemoteOffsets(session, "g").fetch(queue) == 0
            async with consumer_of(cluster, "g", again, orderly=orderly):
                await again.wait(1)

    asyncio.run(main())


def test_a_message_that_takes_too_long_is_given_back() -> None:
    async def main() -> None:
        first_try = asyncio.Event()
        seen: list[int] = []

        async def listen(message: Message) -> None:
            seen.append(message.reconsume_times)
            if message.reconsume_times == 0:
                await first_try.wait()

        async with cluster_with(1) as (cluster, session, [queue]):
            async with consumer_of(cluster, "g", listen, consume_timeout_s=0.1):
                await eventually(lambda: seen == [0, 1])
                first_try.set()
            assert seen == [0, 1]
            assert await RemoteOffsets(session, "g").fetch(queue) == 1

    asyncio.run(main())


def test_a_slow_listener_does_not_fill_the_memory() -> None:
    async def main() -> None:
        gate = Gate()
        async with cluster_with(300) as (cluster, _, [queue]):
            limits = Limits(messages=40)
            async with consumer_of(cluster, "g", gate, limits=limits, concurrency=2) as consumer:
                await gate.entered.wait(2)
                assignment = consumer._member.assignments.get(queue)  # type: ignore[union-attr]
                assert assignment is not None
                await eventually(lambda: len(assignment.buffer) > 40)
                assert len(assignment.buffer) <= 40 + 32
                gate.open()
                await eventually(lambda: len(gate.done) == 300)
                assert len(assignment.buffer) == 0

    asyncio.run(main())


async def route_of(session: Session, topic: str) -> TopicRoute:
    """As soon as the broker has told the name server of a topic that it has just made."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with suppress(RouteNotFound):
                return await session.routes.get(topic, refresh=True)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("orderly", [False, True])
def test_a_body_that_cannot_be_inflated_ends_in_the_dead_letters(orderly: bool) -> None:
    async def main() -> None:
        inbox = Inbox()
        async with cluster_with(0) as (cluster, session, [queue]):
            await send(session, queue, b"not zlib", sys_flag=SYS_COMPRESSED)
            await send(session, queue, b"fine")
            limit = None if orderly else 0
            async with consumer_of(cluster, "g", inbox, orderly=orderly, max_reconsume_times=limit, suspend_s=0.01):
                await inbox.wait(1)
                assert inbox.bodies == [b"fine"]
            assert await RemoteOffsets(session, "g").fetch(queue) == 2
            route = await route_of(session, "%DLQ%g")
            assert len(route.read_queues) == 1

    asyncio.run(main())


def test_a_message_whose_broker_is_gone_is_sent_anew_elsewhere() -> None:
    async def main() -> None:
        again = Inbox()
        stopped = asyncio.Event()

        async def listen(message: Message) -> object:
            await again(message)
            if message.reconsume_times == 0:
                await stopped.wait()
                return RetryLater(1)
            return None

        async with cluster_with(0, brokers=2) as (cluster, session, queues):
            queue = next(queue for queue in queues if queue.broker_name == "broker-b")
            await send(session, queue, b"orphan")
            async with consumer_of(cluster, "g", listen):
                await again.wait(1)
                await cluster.brokers[1].stop()
                stopped.set()
                first, second = await again.wait(2)
            assert (first.broker, second.broker) == ("broker-b", "broker-a")
            assert (second.topic, second.body, second.reconsume_times) == ("orders", b"orphan", 1)

    asyncio.run(main())


def test_a_broker_restarts() -> None:
    async def main() -> None:
        inbox = Inbox()
        async with cluster_with(4, queues=4) as (cluster, session, queues):
            async with consumer_of(cluster, "g", inbox, rebalance_interval_s=0.5) as consumer:
                await inbox.wait(4)
                await cluster.broker.stop()
                await cluster.broker.start()
                for number, queue in enumerate(queues):
                    await _until_sent(session, queue, b"after%d" % number)
                await inbox.until(lambda: set(numbered(4, "after")) <= set(inbox.bodies))
                assert {queue for queue in consumer.queues if queue.topic == "orders"} == set(queues)
            assert [await RemoteOffsets(session, "g").fetch(queue) for queue in queues] == [2] * 4

    asyncio.run(main())


async def _until_sent(session: Session, queue: MessageQueue, body: bytes) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return await send(session, queue, body)
            except RocketMQError:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("orderly", [False, True])
def test_a_broker_that_goes_away_for_good_takes_only_its_queues_along(orderly: bool) -> None:
    async def main() -> None:
        inbox = Inbox()
        async with (
            cluster_with(8, queues=2, brokers=2) as (cluster, session, queues),
            Session(cluster.name_servers) as shared,
            Session(cluster.name_servers) as other,
        ):
            one = consumer_of(cluster, "g", inbox, orderly=orderly, session=shared)
            two = consumer_of(cluster, "g", inbox, orderly=orderly, session=other)
            async with one, two:
                await inbox.wait(8)
                await eventually(lambda: len(_owned(one)) == len(_owned(two)) == 2)
                await cluster.brokers[1].stop()
                for each in (shared, other):
                    await each.routes.refresh()
                left = {queue for queue in queues if queue.broker_name == "broker-a"}
                await eventually(lambda: _owned(one) | _owned(two) == left and len(_owned(one)) == 1)
                for queue in left:
                    await send(session, queue, b"still here")
                await inbox.until(lambda: inbox.bodies.count(b"still here") == 2)

    asyncio.run(main())


def _owned(consumer: PushConsumer) -> set[MessageQueue]:
    return {queue for queue in consumer.queues if queue.topic == "orders"}


def test_orderly_queues_change_hands_without_repetition() -> None:
    """The lock is given up only after the running message is committed, so the next owner begins exactly behind it."""

    async def main() -> None:
        inbox = Inbox()

        async def listen(message: Message) -> None:
            await asyncio.sleep(0.002)
            await inbox(message)

        options: dict[str, Any] = {"orderly": True, "rebalance_interval_s": 0.2}
        async with (
            cluster_with(0, queues=4) as (cluster, session, queues),
            consumer_of(cluster, "g", listen, **options),
        ):
            sending = asyncio.create_task(_send_all(session, queues, numbered(400)))
            for part in range(1, 5):
                async with consumer_of(cluster, "g", listen, **options) as guest:
                    await eventually(lambda guest=guest: len(_owned(guest)) == 2)
                    await inbox.wait(part * 60)
            await sending
            await inbox.wait(400)
        for queue_id in range(4):
            assert inbox.in_queue(queue_id) == numbered(400)[queue_id::4]

    asyncio.run(main())


async def _send_all(session: Session, queues: list[MessageQueue], bodies: list[bytes]) -> None:
    for number, body in enumerate(bodies):
        await send(session, queues[number % len(queues)], body)
        await asyncio.sleep(0.001)


def test_subscriptions_may_change_while_it_runs() -> None:
    async def main() -> None:
        inbox = Inbox()
        async with cluster_with(2) as (cluster, session, [queue]):
            await cluster.create_topic("bills", 1)
            async with consumer_of(cluster, "g", inbox) as consumer:
                await inbox.wait(2)
                consumer.subscribe("bills", "paid")
                [bills] = (await session.routes.get("bills")).read_queues
                await send(session, bills, b"paid", tag="paid")
                await send(session, bills, b"open", tag="open")
                await inbox.until(lambda: b"paid" in inbox.bodies)
                consumer.unsubscribe("orders")
                await eventually(lambda: {each.topic for each in consumer.queues} == {"bills", "%RETRY%g"})
                await send(session, queue, b"not for us")
                await send(session, bills, b"more", tag="paid")
                await inbox.until(lambda: b"more" in inbox.bodies)
            assert sorted(inbox.bodies) == [b"m0", b"m1", b"more", b"paid"]

    asyncio.run(main())


def test_a_topic_may_come_into_being_later() -> None:
    async def main() -> None:
        inbox = Inbox()
        async with LocalCluster() as cluster, Producer(cluster.name_servers, "p") as producer:
            consumer = PushConsumer(cluster.name_servers, "g", listener=inbox, from_where="first")
            consumer.subscribe("later")
            async with consumer:
                await producer.send("later", b"hello")
                await inbox.wait(1)

    asyncio.run(main())


def test_one_session_serves_several_groups() -> None:
    async def main() -> None:
        inboxes = [Inbox(), Inbox()]
        async with cluster_with(3) as (cluster, session, [queue]):
            one = consumer_of(cluster, "one", inboxes[0], session=session)
            two = consumer_of(cluster, "two", inboxes[1], session=session)
            async with one, two:
                for inbox in inboxes:
                    await inbox.wait(3)
                twice = consumer_of(cluster, "one", Inbox(), session=session)
                with pytest.raises(RocketMQError, match="already"):
                    await twice.start()
                await send(session, queue, b"more")
                for inbox in inboxes:
                    await inbox.wait(4)
                answer = await session.ask_broker(
                    "broker-a", Frame(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "one"})
                )
                assert session.client_id.encode() in answer.body
            assert session.is_running

    asyncio.run(main())


def test_hooks_see_what_is_consumed() -> None:
    seen: list[tuple[bytes, bool]] = []

    class Watch(ConsumeHook):
        def after(self, context: ConsumeContext) -> None:
            seen.append((context.messages[0].body, context.is_success))

    async def main() -> None:
        inbox = Inbox(lambda message: message.body != b"m1")
        async with (
            cluster_with(2) as (cluster, _, _queues),
            consumer_of(cluster, "g", inbox, hooks=[Watch()], max_reconsume_times=0),
        ):
            await eventually(lambda: len(seen) == 2)
        assert sorted(seen) == [(b"m0", True), (b"m1", False)]

    asyncio.run(main())


def test_a_broken_filter_lets_messages_through() -> None:
    def broken(_: Message) -> bool:
        raise KeyError("oops")

    async def main() -> None:
        inbox = Inbox()
        async with cluster_with(2) as (cluster, _, _queues):
            consumer = PushConsumer(cluster.name_servers, "g", listener=inbox, from_where="first")
            consumer.subscribe("orders", filter=broken)
            async with consumer:
                await inbox.wait(2)

    asyncio.run(main())


def test_queues_that_change_are_told() -> None:
    told: list[tuple[str, int]] = []

    async def main() -> None:
        async with (
            cluster_with(0, queues=3) as (cluster, _, _queues),
            consumer_of(cluster, "g", Inbox(), queues_changed=lambda topic, queues: told.append((topic, len(queues)))),
        ):
            pass
        assert ("orders", 3) in told

    asyncio.run(main())


def test_a_name_server_that_is_not_there_fails_the_start() -> None:
    async def main() -> None:
        session = Session("127.0.0.1:1")
        consumer = PushConsumer(group="g", listener=Inbox(), session=session)
        consumer.subscribe("orders")
        with pytest.raises(NotReachable):
            await consumer.start()
        assert not session.is_running

    asyncio.run(main())


@pytest.mark.parametrize(
    "make",
    [
        lambda: PushConsumer(group="no blanks allowed"),
        lambda: PushConsumer(group="g", concurrency=0),
        lambda: PushConsumer(group="g", batch_size=0),
        lambda: PushConsumer(group="g", pull_batch_size=2000),
        lambda: PushConsumer(group="g", from_where="middle"),  # type: ignore[arg-type]
        lambda: PushConsumer(group="g").subscribe("no/slash"),
        lambda: PushConsumer(group="g").subscribe("t", "a", sql="b > 1"),
        lambda: PushConsumer(group="g").subscribe("t", " || "),
        lambda: PushConsumer(group="g").subscribe("t", sql=" "),
    ],
)
def test_mistakes_are_told_before_anything_is_sent(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidMessage):
        make()


def test_a_consumer_needs_a_listener_and_starts_once() -> None:
    async def main() -> None:
        async with cluster_with(1) as (cluster, _, _queues):
            inbox = Inbox()
            consumer = PushConsumer(cluster.name_servers, "g", from_where="first")
            consumer.subscribe("orders")
            with pytest.raises(InvalidMessage, match="listener"):
                await consumer.start()

            @consumer.listen
            async def listen(message: Message) -> None:
                await inbox(message)

            async with consumer:
                await inbox.wait(1)
                with pytest.raises(ClientClosed):
                    consumer.listen(listen)
            with pytest.raises(ClientClosed):
                await consumer.start()
            await consumer.close()

    asyncio.run(main())
