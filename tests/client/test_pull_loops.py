"""The loops that pull: whatever happens in one of them, its queue is read on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from client.inbox import Inbox, eventually, numbered
from client.plain import send
from skylark.client import pulling
from skylark.client.assignment import Assignment
from skylark.client.membership import Membership, _QueueSink
from skylark.client.message import Message, MessageQueue
from skylark.client.pulling import MAX_IDLE_S, Pulled, PullLoop
from skylark.client.push_consumer import PushConsumer
from skylark.client.session import Session
from skylark.testing import LocalCluster


@asynccontextmanager
async def consumer_of(
    listener: Any, *, count: int = 4, **options: Any
) -> AsyncIterator[tuple[PushConsumer, Callable[[bytes], Any]]]:
    """A consumer of a queue that holds some messages, and how to send more."""
    async with LocalCluster(topics={"orders": 1}) as cluster, Session(cluster.name_servers) as session:
        [queue] = (await session.routes.get("orders")).read_queues
        await send(session, queue, *numbered(count))
        subscription = {"filter": options.pop("filter", None)}
        consumer = PushConsumer(cluster.name_servers, "g", listener=listener, from_where="first", **options)
        consumer.subscribe("orders", **subscription)
        async with consumer:
            yield consumer, lambda body: send(session, queue, body)


def assignment_of(consumer: PushConsumer) -> Assignment:
    assert consumer._member is not None
    [found] = [each for each in consumer._member.assignments if each.queue.topic == "orders"]
    return found


@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError])
def test_a_loop_goes_on_after_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    commit_offset = _QueueSink.commit_offset
    failures = iter([error("once")])

    def fail_once(sink: _QueueSink) -> int:
        if (failure := next(failures, None)) is not None:
            raise failure
        return commit_offset(sink)

    monkeypatch.setattr(_QueueSink, "commit_offset", fail_once)
    monkeypatch.setattr(pulling, "ERROR_WAIT_S", 0.01)

    async def main() -> None:
        inbox = Inbox()
        async with consumer_of(inbox):
            await inbox.wait(4)
        assert "something went wrong while" in caplog.text

    asyncio.run(main())


@pytest.mark.parametrize("orderly", [False, True])
def test_messages_that_could_not_be_taken_are_pulled_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, orderly: bool
) -> None:
    """They are in the buffer by then, from which nobody would ever have taken them."""
    found = _QueueSink.found
    failures = iter([RuntimeError("once")])

    def fail_halfway(sink: _QueueSink, pulled: Pulled) -> None:
        if (failure := next(failures, None)) is not None:
            sink._assignment.buffer.put(pulled.messages)
            raise failure
        found(sink, pulled)

    monkeypatch.setattr(_QueueSink, "found", fail_halfway)
    monkeypatch.setattr(pulling, "ERROR_WAIT_S", 0.01)

    async def main() -> None:
        inbox = Inbox()
        async with consumer_of(inbox, orderly=orderly):
            await inbox.wait(4)
        assert set(inbox.bodies) == set(numbered(4))
        assert "something went wrong while" in caplog.text

    asyncio.run(main())


@pytest.mark.parametrize("error", [asyncio.CancelledError, StopIteration, SystemExit, KeyError])
def test_a_filter_may_raise_what_it_wants(error: type[BaseException]) -> None:
    def fails(message: Message) -> bool:
        raise error

    async def main() -> None:
        inbox = Inbox()
        async with consumer_of(inbox, filter=fails) as (_, more):
            await inbox.wait(4)
            await more(b"later")
            await inbox.wait(5)

    asyncio.run(main())


@pytest.mark.parametrize("orderly", [False, True])
def test_a_queue_that_nobody_pulls_is_taken_anew(caplog: pytest.LogCaptureFixture, orderly: bool) -> None:
    """As after a library that cancels all tasks of the event loop."""

    async def main() -> None:
        inbox = Inbox()
        async with consumer_of(inbox, orderly=orderly) as (consumer, more):
            await inbox.wait(4)
            before = assignment_of(consumer)
            assert before._pulling is not None
            before._pulling.cancel()
            await eventually(before._pulling.done)
            await more(b"later")
            assert consumer._member is not None
            consumer._member.rebalance_soon()
            await inbox.until(lambda: b"later" in inbox.bodies)
            assert assignment_of(consumer) is not before
        assert "nobody pulls orders-0 at broker-a any more" in caplog.text

    asyncio.run(main())


def test_a_loop_is_stuck_when_it_should_pull_and_has_not_for_two_minutes() -> None:
    async def main() -> None:
        gate = asyncio.Event()

        async def listener(_: Message) -> None:
            await gate.wait()

        async with consumer_of(listener, pull_interval_s=0.01) as (consumer, _):
            assignment = assignment_of(consumer)
            loop = assignment.pull_loop
            assert loop is not None
            now_s = asyncio.get_running_loop().time()
            assert not assignment.is_stalled(now_s + MAX_IDLE_S - 60)
            assert assignment.is_stalled(now_s + MAX_IDLE_S + 60)
            consumer.pause()
            assert not assignment.is_stalled(now_s + MAX_IDLE_S + 60), "it should not"
            gate.set()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["raises", "cancels", "exits", "none", "strange"])
def test_a_strategy_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """Nor what is told of changed queues, which is as bad here."""
    failures = iter(range(2))
    errors = {"raises": ValueError, "cancels": asyncio.CancelledError, "exits": SystemExit}

    def fail() -> None:
        if kind in errors:
            raise errors[kind]

    def strategy(client: str, queues: list[MessageQueue], clients: list[str]) -> Any:
        if next(failures, None) is not None:
            fail()
            return None if kind == "none" else [MessageQueue("broker-z", 7, "orders")]
        return queues

    async def main() -> None:
        inbox = Inbox()
        async with consumer_of(inbox, strategy=strategy, queues_changed=lambda *_: fail()):
            await inbox.wait(4)
        assert "the strategy" in caplog.text

    asyncio.run(main())


def test_what_runs_regularly_goes_on_after_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit = Membership.commit
    failures = iter([RuntimeError("once")])
    done = asyncio.Event()

    async def fail_once(member: Membership) -> None:
        if (failure := next(failures, None)) is not None:
            raise failure
        await commit(member)
        done.set()

    monkeypatch.setattr(Membership, "commit", fail_once)

    async def main() -> None:
        async with consumer_of(Inbox(), commit_interval_s=0.01):
            await done.wait()
        assert "RuntimeError: once" in caplog.text

    asyncio.run(main())


def test_a_loop_is_not_stuck_before_it_runs() -> None:
    async def main() -> None:
        async with consumer_of(Inbox()) as (consumer, _):
            loop = assignment_of(consumer).pull_loop
            assert isinstance(loop, PullLoop)
            assert not loop.is_stuck(asyncio.get_running_loop().time())

    asyncio.run(main())
