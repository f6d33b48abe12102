"""What a consumer calls with its messages, and what the answer means.

A listener is a coroutine function or a plain one, which then runs in a thread. It gets one message, or a list of them
if the consumer was given a batch size. What it returns or raises decides:

    None, True and other values   the messages are done
    False, or any exception       they come again
    RetryLater(delay_level=3)     they come again after the delay of that level (raised or returned)
    Suspend(1.5)                  an orderly consumer tries the same message again after so many seconds
    Acked(5)                      of a batch the first 5 are done, the others come again
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextvars import copy_context
from typing import Any

import msgspec

from skylark.client.message import Message
from skylark.client.namespace import Namespace
from skylark.wire.bodies import MessageQueue

log = logging.getLogger(__name__)

Listener = Callable[[Any], Any]
"""Takes a Message, or a list of them."""


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


class ConsumeContext(msgspec.Struct):
    """What hooks see of one call of the listener."""

    group: str
    queue: MessageQueue
    messages: Sequence[Message]
    is_success: bool = False
    error: Exception | None = None
    properties: dict[str, Any] = {}
    """For the hooks themselves, to carry something from `before` to `after`."""


class ConsumeHook:
    """Called around every call of the listener. What it raises is logged and changes nothing."""

    def before(self, context: ConsumeContext) -> None:
        """Just before the listener is called."""

    def after(self, context: ConsumeContext) -> None:
        """When it is known how it went."""


def is_asynchronous(listener: Listener) -> bool:
    """Whether it is a coroutine function, or an object that is called like one."""
    return inspect.iscoroutinefunction(listener) or inspect.iscoroutinefunction(type(listener).__call__)


class Listening:
    """Calls the listener and the hooks."""

    def __init__(
        self,
        listener: Listener,
        *,
        group: str,
        takes_batches: bool,
        hooks: Sequence[ConsumeHook] = (),
        executor: Executor | None = None,
        namespace: Namespace | None = None,
    ) -> None:
        self._group = group
        self._namespace = namespace
        self._takes_batches = takes_batches
        self._hooks = hooks
        self._executor = executor
        self._call = self._bind(listener)

    def _bind(self, listener: Listener) -> Callable[[Any], Awaitable[Any]]:
        if is_asynchronous(listener):
            return listener

        async def call_in_thread(given: Any) -> Any:
            loop = asyncio.get_running_loop()
            result = await loop.run_in_executor(self._executor, copy_context().run, listener, given)
            return await result if inspect.isawaitable(result) else result

        return call_in_thread

    async def consume(self, queue: MessageQueue, messages: list[Message]) -> Outcome:
        """Never raises what the listener raised."""
        if self._namespace:
            for message in messages:
                message.topic = self._namespace.unwrap(message.topic)
        if not self._hooks:
            return await self._consume(queue, messages)
        context = ConsumeContext(self._group, queue, tuple(messages), properties={})
        for hook in self._hooks:
            _run_hook(hook.before, context)
        outcome = await self._consume(queue, messages)
        context.error = outcome.error
        context.is_success = outcome.done == len(messages)
        for hook in self._hooks:
            _run_hook(hook.after, context)
        return outcome

    async def _consume(self, queue: MessageQueue, messages: list[Message]) -> Outcome:
        try:
            result = await self._call(list(messages) if self._takes_batches else messages[0])
        except (RetryLater, Suspend) as e:
            result = e
        except Exception as e:
            first = messages[0]
            log.warning(
                "the listener of %s failed on message %s of %s, which comes again",
                self._group, first.msg_id, first.topic, exc_info=e,
            )  # fmt: skip
            return Outcome(0, error=e)
        return read_result(result, len(messages))


def read_result(result: object, count: int) -> Outcome:
    """The outcome that a listener's result stands for, of `count` messages."""
    if result is False:
        return Outcome(0)
    if isinstance(result, RetryLater):
        return Outcome(0, result.delay_level)
    if isinstance(result, Suspend):
        return Outcome(0, suspend_s=result.seconds)
    if isinstance(result, Acked):
        return Outcome(min(max(result.count, 0), count), result.delay_level)
    return Outcome(count)


def _run_hook(hook: Callable[[ConsumeContext], None], context: ConsumeContext) -> None:
    try:
        hook(context)
    except Exception:
        log.exception("a hook of group %s failed", context.group)
