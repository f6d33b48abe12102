"""Listeners at the edges of a consumer's life: closed by themselves, while they start, when the process ends."""

from __future__ import annotations

import asyncio
import itertools
import logging
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from client.inbox import DEADLINE_S, Gate, Inbox, eventually, numbered
from client.plain import send
from client.test_push_consumer import cluster_with, consumer_of, route_of
from skylark import sync
from skylark.client import consuming, membership, rebalance
from skylark.client.app import App
from skylark.client.consuming import pause_of
from skylark.client.errors import ClientClosed
from skylark.client.listening import Outcome, RetryLater
from skylark.client.message import Message
from skylark.client.offsets import RemoteOffsets
from skylark.client.push_consumer import PushConsumer
from skylark.client.session import Session
from skylark.testing import LocalCluster
from skylark.wire.bodies import ConsumerIds, LockedQueues, LockRequest, MessageQueue, decode_body, encode_body
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame


async def members_of(session: Session, group: str) -> list[str]:
    request = Frame(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group})
    answer = await session.ask_broker("broker-a", request)
    return decode_body(ConsumerIds, answer.body).consumer_id_list if answer.body else []


async def lock(session: Session, code: int, client_id: str, *queues: MessageQueue) -> set[MessageQueue]:
    """Locks or unlocks in the name of a client."""
    request = LockRequest(client_id=client_id, consumer_group="g", mq_set=list(queues))
    answer = await session.ask_broker("broker-a", Frame(code, {}, encode_body(request)))
    return set(decode_body(LockedQueues, answer.body).lock_ok_mq_set) if answer.body else set()


# Closing.


@pytest.mark.parametrize("orderly", [False, True])
def test_a_listener_may_close_its_consumer(orderly: bool) -> None:
    async def main() -> None:
        async with cluster_with(3) as (cluster, session, [queue]):

            async def listen(_: Message) -> None:
                await consumer.close()

            consumer = consumer_of(cluster, "g", listen, orderly=orderly, concurrency=1, shutdown_timeout_s=DEADLINE_S)
            async with consumer:
                await consumer.wait_closed()
            assert await RemoteOffsets(session, "g").fetch(queue) == 1
            assert await members_of(session, "g") == []

    asyncio.run(main())


def test_a_plain_listener_may_close_its_consumer() -> None:
    with LocalCluster(topics={"orders": 1}) as cluster:
        with sync.Producer(cluster.name_servers, group="p") as producer:
            producer.send("orders", b"last")
        consumer = sync.PushConsumer(cluster.name_servers, group="g", from_where="first", shutdown_timeout_s=DEADLINE_S)
        consumer.subscribe("orders")

        @consumer.listen
        def listen(_: Message) -> None:
            consumer.close()

        with consumer:
            consumer.wait_closed()


def test_who_gives_up_waiting_for_the_end_does_not_stop_it() -> None:
    async def main() -> None:
        gate = Gate()
        async with cluster_with(1) as (cluster, session, [queue]):
            consumer = consumer_of(cluster, "g", gate)
            await consumer.start()
            await gate.entered.wait(1)
            closing = asyncio.create_task(consumer.close())
            await eventually(lambda: consumer._closed.is_set())
            closing.cancel()
            gate.open()
            await consumer.wait_closed()
            assert await RemoteOffsets(session, "g").fetch(queue) == 1

    asyncio.run(main())


def test_closed_while_it_starts_it_leaves_nothing_running() -> None:
    async def main() -> None:
        async with cluster_with(1) as (cluster, session, _):
            before = asyncio.all_tasks()
            closing: list[asyncio.Task[None]] = []

            def close(*_: object) -> None:
                if not closing:
                    closing.append(asyncio.create_task(consumer.close()))

            consumer = consumer_of(cluster, "g", Inbox(), queues_changed=close, session=session)
            with pytest.raises(ClientClosed, match="before it had started"):
                await consumer.start()
            await asyncio.gather(*closing)
            assert await members_of(session, "g") == []
            left = {task.get_name() for task in asyncio.all_tasks() - before if not task.done()}
            assert not [name for name in left if name.endswith("of g")]

    asyncio.run(main())


def run_program(cluster: LocalCluster, program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), cluster.name_servers],
        stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True,
    ).stdout  # fmt: skip


def test_a_process_ends_although_a_plain_listener_does_not() -> None:
    program = """
        import sys, threading
        from skylark.client.sync import Producer, PushConsumer

        entered = threading.Event()

        def listen(message):
            entered.set()
            threading.Event().wait()

        consumer = PushConsumer(sys.argv[1], group="g", listener=listen, from_where="first", shutdown_timeout_s=0.05)
        consumer.subscribe("orders")
        with Producer(sys.argv[1], group="p") as producer, consumer:
            producer.send("orders", b"stuck")
            entered.wait()
        print("closed", flush=True)
    """
    with LocalCluster(topics={"orders": 1}) as cluster:
        assert run_program(cluster, program) == "closed\n"


def test_what_was_not_called_is_not_given_back_when_the_interpreter_ends() -> None:
    program = """
        import itertools, sys, threading, time
        from skylark.client import listening, threads
        from skylark.client.sync import Producer, PushConsumer

        entered, asked, numbers = threading.Semaphore(0), threading.Event(), itertools.count()
        check = listening.check_not_ending

        def check_aloud():
            if threads._is_ending:
                asked.set()
            check()

        listening.check_not_ending = check_aloud

        def listen(message):
            entered.release()
            while not threads._is_ending:
                time.sleep(0.01)
            if next(numbers):
                asked.wait(1)  # the worker of the other call goes on meanwhile
            print("finished", flush=True)

        consumer = PushConsumer(sys.argv[1], group="g", listener=listen, from_where="first", concurrency=2)
        consumer.subscribe("orders")
        with Producer(sys.argv[1], group="p") as producer:
            for number in range(300):
                producer.send("orders", b"m")
        consumer.start()
        entered.acquire()
        entered.acquire()
    """

    async def count_of_rest(cluster: LocalCluster) -> int:
        rest = Inbox()
        async with Session(cluster.name_servers) as session, consumer_of(cluster, "g", rest, session=session):
            await rest.until(lambda: len({(each.queue_id, each.queue_offset) for each in rest.messages}) == 300)
        return sum(message.reconsume_times for message in rest.messages)

    with LocalCluster(topics={"orders": 1}) as cluster:
        assert run_program(cluster, program) == "finished\n" * 2
        assert asyncio.run(count_of_rest(cluster)) == 0


def test_plain_handlers_of_one_group_run_as_many_at_once_as_they_may() -> None:
    """More than the threads that Python has for everybody."""
    count = 40

    async def main() -> None:
        together = threading.Barrier(count)
        async with (
            LocalCluster(topics={"one": 1, "two": 1}) as cluster,
            Session(cluster.name_servers) as session,
        ):
            for topic in ("one", "two"):
                [queue] = (await session.routes.get(topic)).read_queues
                await send(session, queue, *numbered(count // 2))
            app = App(cluster.name_servers, from_where="first")
            done: list[bytes] = []

            def handle(message: Message) -> None:
                together.wait(DEADLINE_S)
                done.append(message.body)

            app.consumer("one", group="g", concurrency=count)(handle)
            app.consumer("two", group="g")(handle)
            async with app:
                await eventually(lambda: len(done) == count)

    asyncio.run(main())


# In order.


def test_an_orderly_queue_stays_where_its_listener_runs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebalance, "RELEASE_WAIT_S", 0.01)
    monkeypatch.setattr(membership, "_LOCK_INTERVAL_S", 0.01)

    async def main() -> None:
        gate, others = Gate(), Inbox()
        options: dict[str, Any] = {"orderly": True, "rebalance_interval_s": 0.1}
        async with (
            cluster_with(4, queues=2) as (cluster, session, queues),
            consumer_of(cluster, "g", gate, **options) as first,
        ):
            await gate.entered.wait(2)
            async with consumer_of(cluster, "g", others, **options):
                await eventually(lambda: "keeps" in caplog.text)
                [left] = set(queues) - set(first.queues)
                # The lock is still the first one's, and renewed as before.
                assert await lock(session, RequestCode.LOCK_BATCH_MQ, "somebody", left) == set()
                leaving = first._member.assignments.all  # type: ignore[union-attr]
                [assignment] = [each for each in leaving if each.queue == left]
                asked_at_ms = assignment.locked_at_ms
                assert asked_at_ms is not None
                await eventually(lambda: (assignment.locked_at_ms or 0) > asked_at_ms)
                assert others.messages == []
                gate.open()
                await others.wait(1)
                assert others.messages[0].queue_offset == 1

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())


def test_a_lock_is_not_given_back_where_a_thread_goes_on_with_the_queue(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        entered, enough = threading.Event(), threading.Event()

        def listen(_: Message) -> None:
            entered.set()
            enough.wait(DEADLINE_S)

        async with cluster_with(1) as (cluster, session, [queue]):
            async with consumer_of(cluster, "g", listen, orderly=True, shutdown_timeout_s=0.01):
                await eventually(entered.is_set)
            # It has left the group, and a broker of Skylark's frees what members have locked that leave.
            assert await members_of(session, "g") == []
            assert await lock(session, RequestCode.LOCK_BATCH_MQ, "somebody", queue) == set()
            enough.set()
            assert await RemoteOffsets(session, "g").fetch(queue) == 0

    asyncio.run(main())
    assert "leaves the locks of 1 queues to expire" in caplog.text


def test_queues_without_their_locks_ask_for_them_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consuming, "_RELOCK_S", 0.01)

    async def main() -> None:
        answered, asked, inbox = asyncio.Event(), 0, Inbox()
        async with (
            cluster_with(8, queues=4) as (cluster, _, queues),
            consumer_of(cluster, "g", inbox, orderly=True, pull_batch_size=1) as consumer,
        ):
            member = consumer._member
            assert member is not None
            rebalance, turns = member._rebalance, Inbox()
            renew, relock = rebalance.renew_locks, member._relock

            async def renew_late() -> None:
                nonlocal asked
                asked += 1
                await answered.wait()
                await renew()

            def relock_noted(queue: MessageQueue) -> None:
                relock(queue)
                turns.messages.append(queue)  # type: ignore[arg-type]

            await inbox.wait(8)
            monkeypatch.setattr(rebalance, "renew_locks", renew_late)
            monkeypatch.setattr(member.consumption, "_relock", relock_noted)
            for assignment in member.assignments:
                assignment.locked_at_ms = None
            for queue in queues:
                await send(consumer._session, queue, b"more")
            await eventually(lambda: len(turns.messages) >= 12)
            assert asked == 1
            answered.set()
            await inbox.wait(12)

    asyncio.run(main())


def test_a_lock_that_was_lost_while_a_slot_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consuming, "_RELOCK_S", 0.01)

    async def main() -> None:
        gate = Gate()
        async with (
            cluster_with(2, queues=2) as (cluster, session, queues),
            consumer_of(cluster, "g", gate, orderly=True, concurrency=1) as consumer,
        ):
            [first] = await gate.entered.wait(1)
            [waiting] = [queue for queue in queues if queue.queue_id != first.queue_id]
            await lock(session, RequestCode.UNLOCK_BATCH_MQ, consumer.client_id, waiting)
            assert await lock(session, RequestCode.LOCK_BATCH_MQ, "other", waiting) == {waiting}
            member = consumer._member
            assert member is not None
            assignment = member.assignments.get(waiting)
            assert assignment is not None
            await eventually(lambda: len(assignment.buffer) == 1)
            assignment.locked_at_ms = None
            gate.open()
            await eventually(lambda: gate.done != [])
            slots = member.consumption._slots  # type: ignore[union-attr]
            await eventually(lambda: not slots.locked())
            assert len(gate.entered.messages) == 1
            await lock(session, RequestCode.UNLOCK_BATCH_MQ, "other", waiting)
            await gate.entered.wait(2)

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["pull", "pop"])
def test_an_orderly_listener_may_give_up_a_message(mode: Any) -> None:
    async def main() -> None:
        inbox = Inbox(lambda message: RetryLater(-1) if message.body == b"m0" else None)
        async with cluster_with(2) as (cluster, session, _):
            async with consumer_of(cluster, "g", inbox, orderly=True, mode=mode):
                await inbox.wait(2)
            assert inbox.bodies == numbered(2)
            assert len((await route_of(session, "%DLQ%g")).read_queues) == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("outcome", "pause_s"),
    [
        (Outcome(0, suspend_s=60), 60),
        (Outcome(0, suspend_s=3600), 3600),
        (Outcome(0, suspend_s=0), 0.01),
        (Outcome(0, delay_level=5), 60),
        (Outcome(0), 1.5),
        (Outcome(0, delay_level=-1), 1.5),
    ],
)
def test_how_long_an_orderly_queue_stops(outcome: Outcome, pause_s: float) -> None:
    assert pause_of(outcome, 1.5) == pause_s


# Broadcasting.


@pytest.mark.parametrize(
    ("options", "calls"),
    [({}, 1), ({"max_reconsume_times": 2}, 3), ({"orderly": True, "suspend_s": 0.01, "max_reconsume_times": 2}, 3)],
    ids=["as in RocketMQ", "with tries", "orderly"],
)
def test_what_a_broadcasting_listener_fails_on_is_dropped_with_a_word(
    options: dict[str, Any],
    calls: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    monkeypatch.setattr(consuming, "RETRY_HERE_S", 0.01)

    async def main() -> None:
        inbox = Inbox(lambda message: message.body != b"m0")
        async with cluster_with(2) as (cluster, _, _queues):
            consumer = consumer_of(cluster, "g", inbox, model="broadcasting", offsets_directory=tmp_path, **options)
            async with consumer:
                await eventually(lambda: "is dropped" in caplog.text)
                await inbox.until(lambda: b"m1" in inbox.bodies)
            assert inbox.bodies.count(b"m0") == calls
        assert f"is dropped after {calls} tries" in caplog.text
        assert "comes again" not in caplog.text

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())


# Clocks.


def test_the_wall_clock_may_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_ms, sweeps = itertools.count(0, 900_000), itertools.count()
    swept = 0

    def steady_ms() -> int:
        nonlocal swept
        swept = next(sweeps)
        return 1_000_000

    monkeypatch.setattr(membership, "now_ms", lambda: next(wall_ms))
    monkeypatch.setattr(consuming, "steady_ms", steady_ms)

    async def main() -> None:
        gate = Gate()
        async with cluster_with(1) as (cluster, _, _queues):
            async with consumer_of(cluster, "g", gate, consume_timeout_s=0.01):
                await gate.entered.wait(1)
                seen = swept
                await eventually(lambda: swept > seen + 5)
                gate.open()
            assert len(gate.entered.messages) == 1

    asyncio.run(main())


def test_a_lock_holds_although_the_wall_clock_jumps(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    wall_ms = itertools.count(0, 900_000)
    monkeypatch.setattr(membership, "now_ms", lambda: next(wall_ms))
    relocked: list[MessageQueue] = []
    monkeypatch.setattr(membership.Membership, "_relock", lambda _, queue: relocked.append(queue))

    async def main() -> None:
        inbox = Inbox()
        async with cluster_with(5) as (cluster, _, _queues), consumer_of(cluster, "g", inbox, orderly=True):
            await inbox.wait(5)

    asyncio.run(main())
    assert relocked == []


@pytest.mark.parametrize(
    "options", [{"model": "broadcasting"}, {"orderly": True}, {"orderly": True, "auto_commit": False}]
)
def test_a_listener_that_holds_up_its_queue_is_told_of_once(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        gate = Gate()
        async with (
            LocalCluster(topics={"orders": 1}) as cluster,
            Session(cluster.name_servers) as session,
        ):
            [queue] = (await session.routes.get("orders")).read_queues
            await send(session, queue, b"m")
            consumer = PushConsumer(
                cluster.name_servers, "g", listener=gate, from_where="first", consume_timeout_s=0.01,
                offsets_directory=tmp_path, **options,
            )  # fmt: skip
            consumer.subscribe("orders")
            async with consumer:
                await eventually(lambda: "is taking too long, and the queue waits" in caplog.text)
                gate.open()

    asyncio.run(main())
    assert caplog.text.count("is taking too long, and the queue waits") == 1


def test_what_an_operator_had_consumed_ends_with_the_consumer() -> None:
    async def main() -> None:
        async with cluster_with(0) as (cluster, _, [queue]):
            gate, before = Gate(), asyncio.all_tasks()
            async with consumer_of(cluster, "g", gate, shutdown_timeout_s=0.01) as consumer:
                assert consumer._member is not None
                message = Message(topic=queue.topic, body=b"m", broker=queue.broker_name)
                asking = asyncio.ensure_future(consumer._member.consume_directly(message))
                await gate.entered.wait(1)
                asking.cancel()
            assert [task for task in asyncio.all_tasks() - before if not task.done()] == []

    asyncio.run(main())
