"""How much room the entries of a table take, where an entry can be of any size.

How many entries there may be is the table's own business. Each has some bytes of its own; what entries take beyond that
is bounded for all of them together. An entry that is there can always be replaced by a smaller one.
"""

from __future__ import annotations

from collections.abc import Mapping

from skylark.net.connection import RequestFailed
from skylark.wire.codes import ResponseCode


class EntryRoom:
    def __init__(self, own_bytes: int, max_bytes: int) -> None:
        self._own_bytes = own_bytes
        self._max_bytes = max_bytes
        self._taken: dict[str, int] = {}  # by entry, of those that take more than their own
        self.taken_bytes = 0

    def take(self, sizes_bytes: Mapping[str, int]) -> dict[str, int]:
        """Gives entries the room that they take now, and tells what they took before. Raises RequestFailed, and then
        nothing has changed.
        """
        before = {name: self._taken.get(name, 0) for name in sizes_bytes}
        after = {name: max(0, size_bytes - self._own_bytes) for name, size_bytes in sizes_bytes.items()}
        more = sum(after.values()) - sum(before.values())
        if more > 0 and self.taken_bytes + more > self._max_bytes:
            name = max(after, key=after.__getitem__)
            raise RequestFailed(
                ResponseCode.INVALID_PARAMETER,
                f"{name:.255s} is too large: it takes {after[name]} bytes more than the {self._own_bytes} that each "
                f"has, and of those all take {self.taken_bytes} of {self._max_bytes}. Make it, or others, smaller",
            )
        self._set(after)
        return before

    def give_back(self, before: Mapping[str, int]) -> None:
        """What was taken is not needed after all."""
        self._set(before)

    def keep(self, name: str, size_bytes: int) -> None:
        """What is there already, or has to be."""
        self._set({name: max(0, size_bytes - self._own_bytes)})

    def remove(self, name: str) -> None:
        self._set({name: 0})

    def _set(self, taken: Mapping[str, int]) -> None:
        for name, more_bytes in taken.items():
            self.taken_bytes += more_bytes - self._taken.pop(name, 0)
            if more_bytes:
                self._taken[name] = more_bytes
