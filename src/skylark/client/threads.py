"""Threads for plain listeners.

Those of `concurrent.futures` are waited for without end when the interpreter ends, whatever they are stuck in, and turn
new work down from then on, which looks like a failure of what was never called. These here are daemons:

- A call that does not end is left behind by `close`, and the process can end.
- When the interpreter ends and nobody closed, nothing more is called, and what runs is waited for, up to the grace
  period. What was not called is not consumed, and comes again.

Only the event loop's thread calls `call` and `close`.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread  # noqa: F401  its own hook for the interpreter's end has to come after ours
import os
import threading
import time
from collections.abc import Callable
from contextvars import Context, copy_context
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

from skylark.client.calling import caught

Result = tuple[Any, Exception | None]
"""What a call returned, or what it raised."""

_Call = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Result]", Context, Callable[..., Any], tuple[Any, ...]]

_open_pools: WeakSet[Threads] = WeakSet()
_finishers: list[Callable[[], None]] = []
_is_ending = False


class NotCalled(Exception):
    """The interpreter ends: the listener is not called any more, which is no failure of it."""


class NoThread(Exception):
    """The system gives no thread; nothing was called."""


def check_not_ending() -> None:
    """Raises NotCalled when the interpreter ends."""
    if _is_ending:
        raise NotCalled("the interpreter ends")


class Threads:
    """Up to `count` threads, started when they are needed."""

    def __init__(self, count: int, name: str, grace_s: float) -> None:
        self.grace_s = grace_s
        self._count = count
        self._name = name
        self._pid = os.getpid()
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._wanted = 0  # calls that were not answered yet
        _open_pools.add(self)

    def call(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Result]:
        """Calls the function in a thread, with the caller's context. Raises NotCalled and NoThread."""
        check_not_ending()
        loop = asyncio.get_running_loop()
        if self._wanted >= len(self._threads) < self._count:
            self._start_thread()
        self._wanted += 1
        future: asyncio.Future[Result] = loop.create_future()
        self._calls.put((loop, future, copy_context(), function, args))
        return future

    def _start_thread(self) -> None:
        number = len(self._threads)
        thread = threading.Thread(target=self._serve, name=f"{self._name}_{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError as e:  # there are as many as the system allows
            if not self._threads:
                raise NoThread(str(e)) from e
        else:
            self._threads.append(thread)

    def _serve(self) -> None:
        while (given := self._calls.get()) is not None and not _is_ending:
            loop, future, context, function, args = given
            # Who was cancelled while it waited for a thread is not there any more.
            result = (None, None) if future.cancelled() else context.run(caught, function, *args)
            try:
                loop.call_soon_threadsafe(self._answer, future, result)
            except RuntimeError:
                return  # the loop is closed, and nobody waits
            del given, loop, future, context, function, args, result  # not held while there is nothing to do

    def _answer(self, future: asyncio.Future[Result], result: Result) -> None:
        self._wanted -= 1
        if not future.done():
            future.set_result(result)

    def close(self) -> None:
        """Lets the threads go. One that is still busy ends with its call, or with the process."""
        _open_pools.discard(self)
        self._release()

    def _release(self) -> None:
        for _ in self._threads:
            self._calls.put(None)

    def finish(self, deadline_s: float) -> None:
        """For the end of the interpreter: waits for what runs."""
        if self._pid != os.getpid():
            return  # the threads are those of a parent process
        self._release()
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))


def at_end(finish: Callable[[], None]) -> None:
    """Has it called when the interpreter ends, behind the last listener."""
    _finishers.append(finish)


def _end() -> None:
    global _is_ending
    _is_ending = True
    began_s = time.monotonic()
    for pool in list(_open_pools):
        pool.finish(began_s + pool.grace_s)
    for finish in _finishers:
        finish()


# Before concurrent.futures turns down what listeners give it; atexit, for other Pythons than CPython, comes later.
getattr(threading, "_register_atexit", atexit.register)(_end)
