"""Looks through a topic's queues, some in each turn of the event loop: a topic has up to 65,536 of them.

A walk over an ordinary topic is done in its first turn. In a longer one, messages come to queues that it has passed
already. `watch` registers it among those who wait, so that it learns of that and looks again. It passes the news on at
once: somebody else may be there sooner. What a turn found is answered with at once too, so that nothing is held until
the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import chain, islice
from typing import Final

from skylark.broker.arrivals import TagCodes, Waiter
from skylark.broker.polling import PopWaiters
from skylark.broker.turns import next_turn

QUEUES_PER_TURN: Final = 128
FILTERED_PER_TURN: Final = 8
"""Queues in which each message is tried with an expression."""
_WATCH_S: Final = 10.0

Place = tuple[str, int]
"""Topic and queue."""


class Walk:
    """The queues to look at, in that order."""

    def __init__(self, places: Iterator[Place], host: str, queues_per_turn: int = QUEUES_PER_TURN) -> None:
        """`host` is that of whoever asks: the walks of each take turns, and the hosts do."""
        self.is_over = False
        self._host = host
        self._places = chain(places, self._end_of_places())
        self._queues_per_turn = queues_per_turn
        self._watcher: Waiter | None = None

    def _end_of_places(self) -> Iterator[Place]:
        self.is_over = True
        yield from ()

    def turn(self) -> Iterator[Place]:
        """The queues of the next turn."""
        return islice(self._places, self._queues_per_turn)

    def next_turn(self) -> asyncio.Future[None]:
        """Done when the others had their turn; if it is cancelled, the walk ends."""
        begun = next_turn(self._host)
        begun.add_done_callback(self._begun)
        return begun

    def watch(self, waiters: PopWaiters, topic: str, group: str, queue_id: int, wants: TagCodes | None) -> bool:
        """Learns from now on of messages for the group. Whether there was room for one more who waits."""
        if self._watcher is None:
            self._watcher = watcher = waiters.wait(topic, group, queue_id, wants, _WATCH_S)
            if watcher is None:
                return False
            watcher.arrived.add_done_callback(lambda told: told.result() and waiters.wake(topic, group, queue_id))
        return True

    def end(self) -> bool:
        """Whether the walk may have passed a queue before a message came there."""
        watcher = self._watcher
        if watcher is None:
            return False
        is_told = watcher.arrived.done()
        watcher.wake(False)
        return is_told

    def _begun(self, begun: asyncio.Future[None]) -> None:
        if begun.cancelled():
            self.end()
