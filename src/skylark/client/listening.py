"""What a consumer calls with its messages, and what the answer means.

A listener is a coroutine function or a plain one, which then runs in a thread. It gets one message, or a list of them
if the consumer was given a batch size. What it returns or raises decides:

    None, True and what is true   the messages are done
    False and what is false       they come again; so they do after anything that it raises
    RetryLater(delay_level=3)     they come again after the delay of that level (raised or returned)
    Suspend(1.5)                  an orderly consumer tries the same message again after so many seconds
    Acked(5)                      of a batch the first 5 are done, the others come again
    Commit(), RollBack()          of an orderly consumer without `auto_commit`: see `orderly_commits`

An answer that means nothing, as a number of messages that is no number, is a failure. So is a CancelledError, unless
the consumer itself cancels what it runs: then there is no outcome.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from enum import StrEnum
from operator import index
from typing import Any, Final

import msgspec

from skylark.client.calling import call, failure_of, forget_cancels, running_task
from skylark.client.errors import CallbackFailed
from skylark.client.message import Message
from skylark.client.namespace import Namespace
from skylark.client.threads import NotCalled, NoThread, Threads, check_not_ending
from skylark.wire.bodies import MessageQueue
from skylark.wire.message import PROPERTY_CONSUME_START_TIME

log = logging.getLogger(__name__)

Listener = Callable[[Any], Any]
"""Takes a Message, or a list of them."""

DEAD_LETTER_LEVEL: Final = -1
_MAX_LEVEL: Final = 1000
_MAX_SUSPEND_S: Final = 30 * 24 * 3600.0

# Whose listener this runs in, or what that started.
_calling: ContextVar[Listening | None] = ContextVar("skylark_listening", default=None)


class RetryLater(Exception):
    """Consume the message again, after the delay of a level (1 is 1 s, 2 is 5 s, 3 is 10 s, 4 is 30 s, …).

    Level 0 leaves it to the broker, which waits longer each time; -1 gives the message up to the dead letters.
    """

    def __init__(self, delay_level: int = 0) -> None:
        super().__init__(f"retry at delay level {delay_level}")
        self.delay_level = delay_level


class Suspend(Exception):
    """Stop the queue for a while, then consume the same message again. For orderly consumers."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"suspend the queue for {seconds:g} s")
        self.seconds = seconds


class Commit(msgspec.Struct, frozen=True):
    """These messages are done, and with them all that the queue gave since the last commit."""


class RollBack(Exception):
    """Have everything again that the queue gave since the last commit, after a pause (`suspend_s`, unless it says)."""

    def __init__(self, seconds: float | None = None) -> None:
        super().__init__("everything since the last commit again")
        self.seconds = seconds


class Acked(msgspec.Struct, frozen=True):
    """How many of a batch are done, counted from its begin; the others come again."""

    count: int
    delay_level: int = 0


class Outcome(msgspec.Struct, frozen=True):
    """What a listener's answer came to."""

    done: int
    delay_level: int = 0
    suspend_s: float | None = None
    error: Exception | None = None
    commits: bool = False
    rolls_back: bool = False


class ConsumeResult(StrEnum):
    """How a call of the listener went, in the words of Apache's hooks (ConsumeReturnType)."""

    SUCCESS = "SUCCESS"
    TIMEOUT = "TIME_OUT"
    """the messages are done, or come again, but the call took longer than `consume_timeout_s`"""
    EXCEPTION = "EXCEPTION"
    FAILED = "FAILED"
    """the listener said so: the messages come again"""


class ConsumeStatus(StrEnum):
    """What becomes of the messages, in the words of Apache's hooks."""

    DONE = "CONSUME_SUCCESS"
    AGAIN = "RECONSUME_LATER"
    DONE_IN_ORDER = "SUCCESS"
    COMMITTED = "COMMIT"
    ROLLED_BACK = "ROLLBACK"
    SUSPENDED = "SUSPEND_CURRENT_QUEUE_A_MOMENT"


class Handlers:
    """Several listeners of one group, one for each topic. None of them takes batches."""

    def __init__(self, of_topics: Mapping[str, Listener]) -> None:
        self.of_topics = dict(of_topics)


class ConsumeContext(msgspec.Struct):
    """What hooks see of one call of the listener. What it came to is there in `after`."""

    group: str
    queue: MessageQueue
    messages: Sequence[Message]
    is_success: bool = False
    error: Exception | None = None
    properties: dict[str, Any] = {}
    """For the hooks themselves, to carry something from `before` to `after`."""
    namespace: str = ""
    result: ConsumeResult | None = None
    status: ConsumeStatus | None = None


class ConsumeHook:
    """Called around every call of the listener. What it raises is logged and changes nothing."""

    def before(self, context: ConsumeContext) -> None:
        """Just before the listener is called."""

    def after(self, context: ConsumeContext) -> None:
        """When it is known how it went."""


def is_asynchronous(listener: Listener) -> bool:
    """Whether it is a coroutine function, or an object that is called like one."""
    return inspect.iscoroutinefunction(listener) or inspect.iscoroutinefunction(type(listener).__call__)


def never() -> bool:
    return False


class _Handler:
    """A listener, and how it is called."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.is_asynchronous = is_asynchronous(listener)


class Listening:
    """Calls the listener and the hooks."""

    def __init__(
        self,
        listener: Listener | Handlers,
        *,
        group: str,
        takes_batches: bool,
        hooks: Sequence[ConsumeHook] = (),
        concurrency: int = 1,
        grace_s: float = 30.0,
        namespace: Namespace | None = None,
        is_ending: Callable[[], bool] = never,
        is_orderly: bool = False,
        timeout_s: float = math.inf,
    ) -> None:
        """`is_ending` tells whether a CancelledError is the consumer's own. `grace_s` is of `Threads`.

        Who takes longer than `timeout_s` is told to the hooks; nothing is cancelled.
        """
        self._group = group
        self._is_orderly = is_orderly
        self._timeout_s = timeout_s
        self._namespace = namespace
        self._takes_batches = takes_batches
        self._hooks = hooks
        self._is_ending = is_ending
        self._handlers: dict[str, _Handler] = {}
        self._handler: _Handler | None = None
        if isinstance(listener, Handlers):
            self._handlers = {topic: _Handler(each) for topic, each in listener.of_topics.items()}
        else:
            self._handler = _Handler(listener)
        everybody = [*self._handlers.values(), *([self._handler] if self._handler is not None else [])]
        self.has_threads = not all(each.is_asynchronous for each in everybody)
        self._threads = Threads(concurrency, f"listener of {group}", grace_s) if self.has_threads else None
        self._has_complained = False

    def close(self) -> None:
        """Lets the threads go."""
        if self._threads is not None:
            self._threads.close()

    def enter(self) -> None:
        """Marks the task that runs now, and what it starts, as this listener's."""
        _calling.set(self)

    @property
    def is_caller(self) -> bool:
        """Whether the code that runs now was called, or started, by this listener."""
        return _calling.get() is self

    async def consume(self, queue: MessageQueue, messages: list[Message]) -> Outcome:
        """Never raises what the listener raised. Raises NotCalled and NoThread."""
        if self._namespace:
            for message in messages:
                message.topic = self._namespace.unwrap(message.topic)
        if not self._is_orderly:
            started = str(time.time_ns() // 1_000_000)
            for message in messages:
                message.properties[PROPERTY_CONSUME_START_TIME] = started
        if not self._hooks:
            return await self._consume(messages)
        context = ConsumeContext(self._group, queue, tuple(messages), properties={})
        context.namespace = self._namespace.name if self._namespace else ""
        for hook in self._hooks:
            self._run_hook(hook.before, context)
        began_s = time.monotonic()
        outcome = await self._consume(messages)
        self._tell(context, outcome, time.monotonic() - began_s)
        for hook in self._hooks:
            self._run_hook(hook.after, context)
        return outcome

    def _tell(self, context: ConsumeContext, outcome: Outcome, took_s: float) -> None:
        """Writes down for the hooks what a call came to."""
        context.error = outcome.error
        context.is_success = outcome.done == len(context.messages)
        if outcome.error is not None:
            context.result = ConsumeResult.EXCEPTION
        elif took_s >= self._timeout_s:
            context.result = ConsumeResult.TIMEOUT
        else:
            context.result = ConsumeResult.SUCCESS if context.is_success else ConsumeResult.FAILED
        if self._is_orderly and (outcome.commits or outcome.rolls_back):
            context.status = ConsumeStatus.COMMITTED if outcome.commits else ConsumeStatus.ROLLED_BACK
        elif self._is_orderly:
            context.status = ConsumeStatus.DONE_IN_ORDER if context.is_success else ConsumeStatus.SUSPENDED
        else:
            context.status = ConsumeStatus.DONE if context.is_success else ConsumeStatus.AGAIN

    async def _consume(self, messages: list[Message]) -> Outcome:
        check_not_ending()
        given = list(messages) if self._takes_batches else messages[0]
        task = running_task()
        try:
            handler = self._handler or self._handlers[messages[0].topic]
            if handler.is_asynchronous:
                result = await handler.listener(given)
            else:
                result = await self._call_in_thread(handler.listener, given)
            if result is not None and inspect.isawaitable(result):
                result = await result
            outcome = read_result(result, len(messages))
        except (NotCalled, NoThread):
            raise
        except BaseException as e:
            if isinstance(e, asyncio.CancelledError) and self._is_ending():
                raise
            if isinstance(e, GeneratorExit) and running_task() is not task:
                raise  # nobody waits for this coroutine any more
            outcome = self._failed(failure_of(e), messages)
        else:
            if result is not None and result is not True and not self._has_complained:
                self._look_at(result)
        if task is not None and task.cancelling() and not self._is_ending():
            forget_cancels(task)
        return outcome

    async def _call_in_thread(self, listener: Listener, given: Any) -> Any:
        assert self._threads is not None
        result, error = await self._threads.call(listener, given)
        if error is not None:
            raise error
        return result

    def _failed(self, error: Exception, messages: list[Message]) -> Outcome:
        if isinstance(error, RetryLater | Suspend | RollBack):
            try:
                return read_result(error, len(messages))
            except Exception as e:
                error = e
        first = messages[0]
        log.warning(
            "the listener of %s failed on message %s of %s", self._group, first.msg_id, first.topic, exc_info=error
        )
        return Outcome(0, error=error)

    def _look_at(self, result: object) -> None:
        """Says once that a result may not mean what its author thinks."""
        if not isinstance(result, RetryLater | Suspend | Acked | Commit | RollBack | bool):
            self._has_complained = True
            log.warning(
                "the listener of %s returned a %s: what is true counts as done, what is false as failed. Let it return "
                "None or False", self._group, type(result).__name__,
            )  # fmt: skip

    def _run_hook(self, hook: Callable[[ConsumeContext], None], context: ConsumeContext) -> None:
        try:
            call(hook, context)
        except Exception:
            log.exception("a hook of group %s failed", self._group)


def read_result(result: object, count: int) -> Outcome:
    """The outcome that a listener's result stands for, of `count` messages. Raises CallbackFailed and other errors."""
    if result is None or result is True:
        return Outcome(count)
    if isinstance(result, RetryLater):
        return Outcome(0, _level(result.delay_level))
    if isinstance(result, Suspend):
        return Outcome(0, suspend_s=_seconds(result.seconds))
    if isinstance(result, RollBack):
        return Outcome(0, suspend_s=None if result.seconds is None else _seconds(result.seconds), rolls_back=True)
    if isinstance(result, Commit):
        return Outcome(count, commits=True)
    if isinstance(result, Acked):
        return Outcome(min(max(index(result.count), 0), count), _level(result.delay_level))
    if inspect.isawaitable(result):
        raise CallbackFailed(f"the listener returned {result!r}, which nobody waits for")
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise CallbackFailed("the listener is a generator function, nothing of which has run")
    return Outcome(count if result else 0)


def _level(level: int) -> int:
    if not DEAD_LETTER_LEVEL <= index(level) <= _MAX_LEVEL:
        raise CallbackFailed(f"{level!r} is no delay level; they are -1 (no more tries), 0, 1 and so on")
    return index(level)


def _seconds(seconds: float) -> float:
    if math.isnan(seconds):
        raise CallbackFailed("a queue can't be suspended for a time that is no number")
    return min(max(float(seconds), 0.0), _MAX_SUSPEND_S)
