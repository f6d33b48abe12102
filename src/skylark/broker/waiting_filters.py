"""What waiting pulls and pops filter by: one copy for all that wait by the same, however many they are.

A compiled expression takes thirty times its text, and a request keeps it for as long as it waits. A group may change
its expression before each of its pulls, so that each waits by another, and neither the requests nor the caches tell how
much that is. It is counted here, as characters, and divided among the hosts that the requests come from (`shares.py`).
"""

from __future__ import annotations

from typing import Final

import msgspec

from skylark.broker.arrivals import TagCodes
from skylark.broker.filters import Filter
from skylark.broker.shares import Shares
from skylark.net.connection import RequestFailed
from skylark.wire.codes import ResponseCode

MAX_CHARACTERS: Final = 1 << 20
"""Of all expressions that somebody waits by."""
_CHARACTERS_PER_TAG: Final = 4  # a set takes as much for a tag as an expression for these


class Held(msgspec.Struct, eq=False):
    """A filter that somebody waits by."""

    filter: Filter
    host: str
    """Whose share it counts for: that of the first who waited by it."""
    characters: int
    waiters: int = 0


class WaitingFilters:
    """Filters that somebody waits by, by what they let through."""

    def __init__(self) -> None:
        self._held: dict[str | TagCodes, Held] = {}
        self._shares = Shares()
        self.characters = 0

    def __len__(self) -> int:
        return len(self._held)

    def take(self, wanted: Filter, host: str) -> Held:
        """Counts one more that waits by a filter, and gives the one that all of them have. Raises RequestFailed if
        there is no room for it.
        """
        meaning = _meaning(wanted)
        if not meaning:
            return Held(wanted, host, 0, 1)
        held = self._held.get(meaning)
        if held is None:
            held = Held(wanted, host, len(wanted.text) + _CHARACTERS_PER_TAG * len(wanted.wants or ()))
            if not self._shares.has_room(host, held.characters, MAX_CHARACTERS - self.characters - held.characters):
                raise self._no_room(held)
            self._held[meaning] = held
            self._count(held, held.characters)
        held.waiters += 1
        return held

    def give_back(self, held: Held, _: object = None) -> None:
        """One of those who wait by the filter does so no more."""
        held.waiters -= 1
        if held.characters and not held.waiters:
            del self._held[_meaning(held.filter)]
            self._count(held, -held.characters)

    def _count(self, held: Held, characters: int) -> None:
        self.characters += characters
        self._shares.add(held.host, characters)

    def _no_room(self, held: Held) -> RequestFailed:
        return RequestFailed(
            ResponseCode.SYSTEM_BUSY,
            f"no request can wait by one more filter, of {held.characters} characters: those of {held.host} wait by "
            f"{self._shares.held(held.host)} of {MAX_CHARACTERS}, and all by {self.characters}. Use shorter "
            f"expressions, or the same in more groups",
        )


def _meaning(wanted: Filter) -> str | TagCodes:
    return wanted.text or wanted.wants or ""
