"""Who waits for a message in which queue: the heart of long polling.

A pull that found nothing registers here, in the same step in which it looked, so that no arrival falls between. Each
waiter is woken once: by the first message that its filter lets through, by its timeout, by an operator who moved the
queue's offset, or by the end of the broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from skylark.net.connection import RequestFailed
from skylark.wire.codes import ResponseCode

TagCodes = frozenset[int]
RecordFilter = Callable[[bytes], bool]
RecordOf = Callable[[str, int, int], memoryview | None]
"""The record at an offset of a topic's queue."""

WOKEN_PER_TURN: Final = 128
"""Waiters, of one arrival."""
_EVALUATED_PER_TURN: Final = 16  # expressions, each of which may be long


def too_late() -> RequestFailed:
    """The answer to who waits, or wants to, when the broker ends: the client tries again after a second or more.

    Told that there is no message, it would ask again at once, and Apache's Java client that has just sent a request
    when its connection is closed may not notice that, and wait for the answer for 30 s.
    """
    return RequestFailed(ResponseCode.SERVICE_NOT_AVAILABLE, "this broker is shutting down")


class Waiter:
    """One suspended pull. `arrived` gives True for a message, False for the timeout."""

    __slots__ = ("_timer", "accepts", "arrived", "wants")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, wants: TagCodes | None, accepts: RecordFilter | None = None
    ) -> None:
        self.arrived: asyncio.Future[bool] = loop.create_future()
        self.wants = wants
        self.accepts = accepts
        self._timer: asyncio.TimerHandle | None = None

    def give_up_after(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        self._timer = loop.call_later(timeout_s, self.wake, False)

    def wake(self, arrived: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.arrived.done():
            self.arrived.set_result(arrived)


def wake_in_turns(waiters: Iterator[Waiter], arrived: bool = True) -> None:
    """Wakes waiters, some in each turn of the loop: each makes an answer then."""
    for number, waiter in enumerate(waiters, 1):
        waiter.wake(arrived)
        if number == WOKEN_PER_TURN:
            waiter.arrived.get_loop().call_soon(wake_in_turns, waiters, arrived)
            return


class Arrivals:
    """Waiters by topic and queue."""

    def __init__(self, record_of: RecordOf = lambda topic, queue_id, offset: None) -> None:
        """`record_of` is asked only for who filters by more than tags."""
        self._record_of = record_of
        self._waiters: dict[tuple[str, int], set[Waiter]] = {}
        self.closed = False

    def __len__(self) -> int:
        return sum(map(len, self._waiters.values()))

    def wait(
        self,
        topic: str,
        queue_id: int,
        wants: TagCodes | None,
        timeout_s: float,
        accepts: RecordFilter | None = None,
    ) -> Waiter:
        """Registers a waiter; await its `arrived`. It leaves the table by itself."""
        loop = asyncio.get_running_loop()
        waiter = Waiter(loop, wants, accepts)
        if self.closed:
            waiter.wake(False)
            return waiter
        key = (topic, queue_id)
        self._waiters.setdefault(key, set()).add(waiter)
        waiter.arrived.add_done_callback(lambda _: self._discard(key, waiter))
        waiter.give_up_after(loop, timeout_s)
        return waiter

    def notify(self, topic: str, queue_id: int, queue_offset: int, tag_codes: Sequence[int]) -> None:
        """Messages have arrived. Called for every append, so it costs one lookup where nobody waits."""
        waiters = self._waiters.get((topic, queue_id))
        if waiters:
            if len(tag_codes) > _EVALUATED_PER_TURN:
                wake_in_turns(_who_may_want(tuple(waiters), frozenset(tag_codes)))
                return
            for number, tag_code in enumerate(tag_codes):
                told = iter(tuple(waiters) if len(waiters) >= WOKEN_PER_TURN else waiters)
                self._tell(told, topic, queue_id, queue_offset + number, tag_code)

    def _tell(self, waiters: Iterator[Waiter], topic: str, queue_id: int, queue_offset: int, tag_code: int) -> None:
        """Wakes who wants the message, some at a time; many different expressions are evaluated some at a time too."""
        record: bytes | None = None
        verdicts: dict[RecordFilter, bool] = {}
        woken = 0
        for waiter in waiters:
            if waiter.arrived.done() or (waiter.wants is not None and tag_code not in waiter.wants):
                continue
            accepts = waiter.accepts
            if accepts is not None:
                record = record or bytes(self._record_of(topic, queue_id, queue_offset) or b"")
                verdict = verdicts.get(accepts)
                if verdict is None:
                    if len(verdicts) == _EVALUATED_PER_TURN:
                        late = iter((waiter, *waiters))
                        waiter.arrived.get_loop().call_soon(self._tell, late, topic, queue_id, queue_offset, tag_code)
                        return
                    verdict = verdicts[accepts] = not record or accepts(record)
                if not verdict:
                    continue
            waiter.wake(True)
            woken += 1
            if woken == WOKEN_PER_TURN:
                waiter.arrived.get_loop().call_soon(self._tell, waiters, topic, queue_id, queue_offset, tag_code)
                return

    def wake(self, topic: str, queue_id: int) -> None:
        """Wakes all who wait for the queue, though no message has come."""
        wake_in_turns(iter(tuple(self._waiters.get((topic, queue_id), ()))), arrived=False)

    def close(self) -> None:
        """Wakes everybody, now and from now on."""
        self.closed = True
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.wake(False)

    def _discard(self, key: tuple[str, int], waiter: Waiter) -> None:
        waiter.wake(False)  # ends its timer, if it was cancelled
        waiters = self._waiters.get(key)
        if waiters is not None:
            waiters.discard(waiter)
            if not waiters:
                del self._waiters[key]


def _who_may_want(waiters: Sequence[Waiter], tag_codes: TagCodes) -> Iterator[Waiter]:
    """Of a long batch. Who filters by more than tags looks by himself."""
    for waiter in waiters:
        if waiter.wants is None or not waiter.wants.isdisjoint(tag_codes):
            yield waiter
