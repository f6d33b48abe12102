"""What a listener's answers mean, and hooks around it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextvars import ContextVar
from typing import Any

import pytest

from skylark.client.listening import (
    Acked,
    Commit,
    ConsumeContext,
    ConsumeHook,
    ConsumeResult,
    ConsumeStatus,
    Listening,
    Outcome,
    RetryLater,
    RollBack,
    Suspend,
    read_result,
)
from skylark.client.message import Message
from skylark.client.namespace import Namespace
from skylark.client.threads import NoThread
from skylark.wire.bodies import MessageQueue

QUEUE = MessageQueue("b", 0, "t")
MESSAGES = [Message(topic="t", body=b"%d" % number, queue_offset=number) for number in range(3)]


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        (None, Outcome(3)),
        (True, Outcome(3)),
        (0, Outcome(0)),
        ("", Outcome(0)),
        ("anything", Outcome(3)),
        (False, Outcome(0)),
        (RetryLater(), Outcome(0)),
        (RetryLater(-1), Outcome(0, -1)),
        (Suspend(2.5), Outcome(0, suspend_s=2.5)),
        (Acked(2), Outcome(2)),
        (Acked(2, delay_level=4), Outcome(2, 4)),
        (Acked(9), Outcome(3)),
        (Acked(-1), Outcome(0)),
        (Commit(), Outcome(3, commits=True)),
        (RollBack(2), Outcome(0, suspend_s=2, rolls_back=True)),
    ],
)
def test_what_a_result_means(result: object, outcome: Outcome) -> None:
    assert read_result(result, 3) == outcome


def consume(listener: Any, *, batch: bool = False, hooks: tuple[ConsumeHook, ...] = ()) -> Outcome:
    listening = Listening(listener, group="g", takes_batches=batch, hooks=hooks)
    return asyncio.run(listening.consume(QUEUE, MESSAGES if batch else MESSAGES[:1]))


def test_a_coroutine_function_gets_one_message() -> None:
    got: list[Message] = []

    async def listen(message: Message) -> None:
        got.append(message)

    assert consume(listen) == Outcome(1)
    assert got == MESSAGES[:1]


def test_a_batch_is_a_list_of_the_listeners_own() -> None:
    async def listen(messages: list[Message]) -> None:
        messages.clear()

    assert consume(listen, batch=True) == Outcome(3)
    assert len(MESSAGES) == 3


def test_a_plain_function_runs_in_a_thread_with_the_callers_context() -> None:
    variable: ContextVar[str] = ContextVar("variable", default="unset")
    seen: list[object] = []

    def listen(_: Message) -> None:
        seen.extend([variable.get(), threading.current_thread() is threading.main_thread()])

    async def main() -> None:
        variable.set("set")
        await Listening(listen, group="g", takes_batches=False).consume(QUEUE, MESSAGES[:1])

    asyncio.run(main())
    assert seen == ["set", False]


def test_what_finds_no_thread_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(NoThread, match="can't start"):
        consume(lambda _: None)


def test_an_object_with_an_asynchronous_call_is_a_listener() -> None:
    class Handler:
        async def __call__(self, _: Message) -> bool:
            return False

    assert consume(Handler()) == Outcome(0)


def test_a_plain_function_may_return_a_coroutine() -> None:
    async def work() -> bool:
        return False

    assert consume(lambda _: work()) == Outcome(0)


def test_a_coroutine_that_a_listener_returns_is_awaited() -> None:
    async def work() -> bool:
        return False

    async def listen(_: Message) -> object:
        return work()

    assert consume(listen) == Outcome(0)


def test_exceptions_are_logged_and_mean_again(caplog: pytest.LogCaptureFixture) -> None:
    async def listen(_: Message) -> None:
        raise KeyError("broken")

    with caplog.at_level(logging.WARNING):
        outcome = consume(listen)
    assert outcome.done == 0
    assert isinstance(outcome.error, KeyError)
    assert "broken" in caplog.text


@pytest.mark.parametrize(("raised", "outcome"), [(RetryLater(2), Outcome(0, 2)), (Suspend(1), Outcome(0, suspend_s=1))])
def test_answers_may_be_raised_and_are_no_failures(
    raised: Exception, outcome: Outcome, caplog: pytest.LogCaptureFixture
) -> None:
    async def listen(_: Message) -> None:
        raise raised

    assert consume(listen) == outcome
    assert caplog.text == ""


def test_hooks_see_each_call_and_may_fail() -> None:
    seen: list[tuple[str, object]] = []

    class Broken(ConsumeHook):
        def before(self, context: ConsumeContext) -> None:
            raise RuntimeError("not again")

    class Timer(ConsumeHook):
        def before(self, context: ConsumeContext) -> None:
            context.properties["mine"] = 5
            seen.append(("before", len(context.messages)))

        def after(self, context: ConsumeContext) -> None:
            seen.append(("after", (context.is_success, context.properties["mine"], context.group, context.queue)))

    async def partly(_: list[Message]) -> Acked:
        return Acked(2)

    assert consume(partly, batch=True, hooks=(Broken(), Timer())) == Outcome(2)
    assert seen == [("before", 3), ("after", (False, 5, "g", QUEUE))]


async def fails(_: Message) -> None:
    raise ValueError


@pytest.mark.parametrize(
    ("listener", "options", "result", "status"),
    [
        (lambda _: None, {}, ConsumeResult.SUCCESS, ConsumeStatus.DONE),
        (lambda _: False, {}, ConsumeResult.FAILED, ConsumeStatus.AGAIN),
        (fails, {}, ConsumeResult.EXCEPTION, ConsumeStatus.AGAIN),
        (lambda _: None, {"timeout_s": 0}, ConsumeResult.TIMEOUT, ConsumeStatus.DONE),
        (lambda _: None, {"is_orderly": True}, ConsumeResult.SUCCESS, ConsumeStatus.DONE_IN_ORDER),
        (lambda _: False, {"is_orderly": True}, ConsumeResult.FAILED, ConsumeStatus.SUSPENDED),
    ],
)
def test_hooks_are_told_in_apaches_words(
    listener: Any, options: dict[str, Any], result: ConsumeResult, status: ConsumeStatus
) -> None:
    seen: list[tuple[object, ...]] = []

    class Noting(ConsumeHook):
        def before(self, context: ConsumeContext) -> None:
            seen.append((context.namespace, context.result, context.status))

        def after(self, context: ConsumeContext) -> None:
            seen.append((context.namespace, context.result, context.status))

    tenant = Namespace("tenant")
    listening = Listening(listener, group="g", takes_batches=False, hooks=[Noting()], namespace=tenant, **options)
    asyncio.run(listening.consume(QUEUE, [Message(topic="tenant%t", body=b"x")]))
    assert seen == [("tenant", None, None), ("tenant", result, status)]


@pytest.mark.parametrize("is_orderly", [False, True])
def test_a_listener_sees_when_it_was_called(is_orderly: bool) -> None:
    """As with Apache's client, which leaves it out where messages are in order."""
    messages = [Message(topic="t", body=b"x") for _ in range(2)]
    before_ms = time.time_ns() // 1_000_000
    listening = Listening(lambda _: None, group="g", takes_batches=True, is_orderly=is_orderly)
    asyncio.run(listening.consume(QUEUE, messages))
    for message in messages:
        started = message.properties.get("CONSUME_START_TIME")
        assert (started is None) is is_orderly
        assert started is None or before_ms <= int(started) <= time.time_ns() // 1_000_000
