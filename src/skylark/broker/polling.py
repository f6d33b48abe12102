"""Who waits for a message to pop, or to hear that there is one.

Other than pulls (`arrivals.py`), which all see the same message, pops take it from each other: an arrival wakes one
waiter of each group, the one that waited longest, for any queue and for this queue. A waiter is woken once; it looks,
and waits again if somebody else was quicker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from skylark.broker.arrivals import TagCodes, Waiter, wake_in_turns
from skylark.broker.config import BrokerConfig
from skylark.wire.pop import pop_retry_topic

ANY_QUEUE = -1

_Key = tuple[str, str, int]
"""Topic, group and queue."""


class PopWaiters:
    """Suspended requests by topic, group and queue; bounded in all and for each queue."""

    def __init__(self, config: BrokerConfig, *, latest_first: bool = False) -> None:
        self._config = config
        self._latest_first = latest_first
        self._waiters: dict[_Key, dict[Waiter, None]] = {}
        self._total = 0
        # The name of a topic or of a group's retry topic -> the topics and groups somebody waits for.
        self._watched: dict[str, dict[tuple[str, str], int]] = {}
        self.closed = False

    def wait(self, topic: str, group: str, queue_id: int, wants: TagCodes | None, timeout_s: float) -> Waiter | None:
        """Registers a waiter; await its `arrived`. It leaves the table by itself. None if there is no more room."""
        key = (topic, group, queue_id)
        if self._total >= self._config.max_pop_polling_size or self.count(*key) > self._config.pop_polling_size:
            return None
        loop = asyncio.get_running_loop()
        waiter = Waiter(loop, wants)
        self._waiters.setdefault(key, {})[waiter] = None
        self._total += 1
        for name in _names(topic, group):
            pairs = self._watched.setdefault(name, {})
            pairs[topic, group] = pairs.get((topic, group), 0) + 1
        waiter.arrived.add_done_callback(lambda _: self._discard(key, waiter))
        waiter.give_up_after(loop, timeout_s)
        return waiter

    def notify(self, name: str, queue_id: int, queue_offset: int, tag_codes: Sequence[int]) -> None:
        """Messages have arrived. Called for every append, so it costs one lookup where nobody waits."""
        pairs = self._watched.get(name)
        if not pairs:
            return
        # Now and then also for a message that nobody wants, so that the groups' offsets don't stay behind.
        interval = self._config.pop_long_polling_force_notify_interval
        forced = 0
        if interval > 0:
            forced = (queue_offset + len(tag_codes) - 1) // interval - (queue_offset - 1) // interval
        codes = frozenset(tag_codes)
        told = self._told(tuple(pairs), name, queue_id, codes, len(tag_codes), forced)
        wake_in_turns(told)

    def _told(
        self, pairs: Sequence[tuple[str, str]], name: str, queue_id: int, codes: TagCodes, count: int, forced: int
    ) -> Iterator[Waiter]:
        """Whom `count` messages with these tag codes wake, of which some wake somebody whatever he wants.

        Each waiter is looked at once, however many messages there are: a long batch meets many waiters.
        """
        for topic, group in pairs:
            wanted = None if name != topic else codes
            for waits_for in (ANY_QUEUE, queue_id):
                left, forced_left = count, forced
                for waiter in self._waiting(topic, group, waits_for):
                    if waiter.arrived.done():
                        continue  # woken, and about to look
                    if wanted is not None and waiter.wants is not None and wanted.isdisjoint(waiter.wants):
                        if not forced_left:
                            continue
                        forced_left -= 1
                    yield waiter
                    left -= 1
                    if not left:
                        break

    def _waiting(self, topic: str, group: str, queue_id: int) -> list[Waiter]:
        """Who waits for a queue, in the order in which they are woken."""
        waiters = list(self._waiters.get((topic, group, queue_id), ()))
        if self._latest_first:
            waiters.reverse()
        return waiters

    def wake(self, topic: str, group: str, queue_id: int, tag_code: int | None = None) -> bool:
        """Wakes one waiter: that wants the tag, or any if there is none. Whether there was one."""
        waiters = self._waiters.get((topic, group, queue_id))
        if not waiters:
            return False
        for waiter in reversed(waiters) if self._latest_first else waiters:
            if waiter.arrived.done():
                continue  # woken, and about to look
            if tag_code is None or waiter.wants is None or tag_code in waiter.wants:
                waiter.wake(True)
                return True
        return False

    def count(self, topic: str, group: str, queue_id: int) -> int:
        return len(self._waiters.get((topic, group, queue_id), ()))

    def __len__(self) -> int:
        return self._total

    def close(self) -> None:
        """Wakes everybody; nobody should wait from now on."""
        self.closed = True
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.wake(False)

    def _discard(self, key: _Key, waiter: Waiter) -> None:
        waiter.wake(False)  # ends its timer, if it was cancelled
        waiters = self._waiters[key]
        del waiters[waiter]
        if not waiters:
            del self._waiters[key]
        self._total -= 1
        topic, group, _ = key
        for name in _names(topic, group):
            pairs = self._watched[name]
            pairs[topic, group] -= 1
            if not pairs[topic, group]:
                del pairs[topic, group]
            if not pairs:
                del self._watched[name]


def _names(topic: str, group: str) -> tuple[str, str, str]:
    return topic, pop_retry_topic(topic, group), pop_retry_topic(topic, group, v2=True)
