"""How threads hand messages to the event loop that sends them: many at a time, while they go on.

Waking the loop for each message and waiting for its word costs more than to send it. So a thread checks and labels its
message itself, puts it into its outbox and has the future of the receipt; the loop empties the outbox, and is only
woken when it had stopped to. An outbox has room for so much, then its thread waits. Each thread has one of its own:
what one waits for (a route, say) does not hold up the others, and the order in which a thread sends is kept.

What users give (selectors, callbacks of futures) runs on the way: whatever it raises or cancels, the rest is sent.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple, TypeVar

from skylark.client.calling import caught
from skylark.client.choosing import Choice
from skylark.client.crew import Worker
from skylark.client.errors import ClientClosed
from skylark.client.message import Receipt
from skylark.client.producer import Producer
from skylark.client.sending import Sending

log = logging.getLogger(__name__)

_T = TypeVar("_T")

MAX_MESSAGES: Final = 512
MAX_BYTES: Final = 4 << 20


class Handed(Future[_T]):
    """Keeps account of whether anybody asks how it failed, as asyncio's does: `flush` tells of the others."""

    _log_traceback = True

    def result(self, timeout: float | None = None) -> _T:
        self._log_traceback = False
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._log_traceback = False
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[_T]], object]) -> None:
        self._log_traceback = False
        super().add_done_callback(partial(_call_back, fn))


def _call_back(fn: Callable[[Future[_T]], object], future: Future[_T]) -> None:
    """In the loop's thread, where all blocking clients live."""
    _, error = caught(fn, future)
    if error is not None:
        log.error("what was to be called with a receipt failed", exc_info=error)


class Parcel(NamedTuple):
    """A message that is ready, how it is to be sent, and who waits for its receipt."""

    sending: Sending
    compress: bool
    choice: Choice | None
    timeout_s: float | None
    handed: Handed[Receipt]


class Outbox:
    """What one thread has sent and the loop has not taken yet."""

    def __init__(self, producer: Producer, loop: asyncio.AbstractEventLoop, is_closed: Callable[[], bool]) -> None:
        self.thread = threading.current_thread()
        self._producer = producer
        self._loop = loop
        self._is_closed = is_closed
        self._parcels: deque[Parcel] = deque()
        self._size_bytes = 0
        self._changed = threading.Condition()
        self._emptying: asyncio.Task[None] | None = None
        self._is_busy = False
        self._put_count = 0
        self._sent_count = 0
        self._waiters: list[asyncio.Future[None]] = []  # for more to be on its way

    @property
    def is_busy(self) -> bool:
        """Something is here, or is being sent."""
        with self._changed:
            return self._is_busy

    def put(self, parcel: Parcel) -> None:
        """Waits while there is no room; one message always fits. Raises ClientClosed."""
        size_bytes = parcel.sending.size_bytes
        with self._changed:
            while self._parcels and (
                len(self._parcels) >= MAX_MESSAGES or self._size_bytes + size_bytes > MAX_BYTES
            ):  # fmt: skip
                self._changed.wait()
            if self._is_closed():
                raise ClientClosed("the producer is being closed, and takes no more messages")
            self._parcels.append(parcel)
            self._size_bytes += size_bytes
            self._put_count += 1
            if self._is_busy:
                return
            self._is_busy = True
        self._loop.call_soon_threadsafe(self._begin)

    async def emptied(self) -> None:
        """Returns when all of it is on its way, or has failed. What the thread sends meanwhile is not waited for."""
        with self._changed:
            count = self._put_count
        while self._sent_count < count:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def _begin(self) -> None:
        self._emptying = Worker(self._empty(), loop=self._loop, name=f"outbox of {self.thread.name}")

    async def _empty(self) -> None:
        while True:
            with self._changed:
                parcels, self._parcels = self._parcels, deque()
                self._size_bytes = 0
                if not parcels:
                    self._emptying = None
                    self._is_busy = False
                    return
                self._changed.notify()
            for parcel in parcels:
                await self._send(parcel)
            self._sent_count += len(parcels)
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def _send(self, parcel: Parcel) -> None:
        handed = parcel.handed
        if not handed.set_running_or_notify_cancel():
            return
        try:
            courier = self._producer._running_courier()
            future = await self._producer._send_soon(
                courier, parcel.sending, parcel.compress, parcel.choice, parcel.timeout_s
            )
        except BaseException as e:  # also what a selector raises; the next message is sent all the same
            self._fail(handed, e)
            if isinstance(e, asyncio.CancelledError) and _is_cancelled():
                raise
        else:
            future.add_done_callback(partial(self._settle, handed))

    def _settle(self, handed: Handed[Receipt], future: asyncio.Future[Receipt]) -> None:
        if future.cancelled():
            self._fail(handed, CancelledError())
        elif (error := future.exception()) is not None:
            self._fail(handed, error)
        else:
            handed.set_result(future.result())

    def _fail(self, handed: Handed[Receipt], error: BaseException) -> None:
        handed.set_exception(error)
        if handed._log_traceback:
            self._producer._unseen.add(handed)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Outboxes:
    """The outboxes of one producer, one for each thread that sends."""

    def __init__(self, producer: Producer, loop: asyncio.AbstractEventLoop) -> None:
        self._producer = producer
        self._loop = loop
        self._own = threading.local()
        self._all: list[Outbox] = []
        self._changing = threading.Lock()
        self._is_closed = False

    @property
    def own(self) -> Outbox:
        """That of the calling thread."""
        outbox: Outbox | None = getattr(self._own, "outbox", None)
        if outbox is None:
            outbox = self._own.outbox = Outbox(self._producer, self._loop, lambda: self._is_closed)
            with self._changing:
                self._all = [each for each in self._all if each.is_busy or each.thread.is_alive()]
                self._all.append(outbox)
        return outbox

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Within it, nothing more is taken."""
        self._is_closed = True
        try:
            yield
        finally:
            self._is_closed = False  # the producer itself is closed now, or goes on

    async def emptied(self) -> None:
        """Returns when all that any thread has sent is on its way, or has failed."""
        for outbox in list(self._all):
            await outbox.emptied()
