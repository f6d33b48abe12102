"""How many consumer offsets a broker keeps, and of whom.

Each group has a share that nobody else can take. What groups have beyond their shares is bounded for all of them
together: one client that fills this up, in as many groups as it likes, leaves their shares to the others. Whoever has
an offset can change it at any time.

Shares are for groups that exist, whose number is bounded. Of groups that are deleted, or not made yet, the broker keeps
offsets only as long as there are not too many in all.
"""

from __future__ import annotations

import logging
from collections.abc import Sized
from typing import Final

from skylark.net.connection import RequestFailed
from skylark.wire.codes import ResponseCode

log = logging.getLogger(__name__)

MAX_OFFSETS: Final = 1_000_000
GROUP_SHARE: Final = 64
LEAST_PER_TOPIC: Final = 8
"""A topic of a group takes the memory of so many offsets itself, and counts for these at least."""


def room_of(row: Sized | None) -> int:
    """How much the offsets of a group in a topic count for."""
    return 0 if row is None else max(len(row), LEAST_PER_TOPIC)


def room_of_next(row: Sized | None) -> int:
    """How much one more of them does."""
    return LEAST_PER_TOPIC if row is None else int(len(row) >= LEAST_PER_TOPIC)


class OffsetRoom:
    def __init__(self) -> None:
        self._taken: dict[str, int] = {}
        self._all = 0
        self._beyond_shares = 0

    def take(self, group: str, more: int) -> None:
        """Of what was checked, or has to be kept in any case; less than 0 gives room back."""
        before = self._taken.get(group, 0)
        after = self._taken[group] = before + more
        if not after:
            del self._taken[group]
        self._all += more
        self._beyond_shares += _beyond(after) - _beyond(before)

    def check(self, group: str, more: int, what: str) -> None:
        """Raises RequestFailed if a group can't have more."""
        taken = self._taken.get(group, 0)
        if self._beyond_shares + _beyond(taken + more) - _beyond(taken) > MAX_OFFSETS and taken + more > GROUP_SHARE:
            raise _refusal(
                f"{what}: the group has {taken} offsets, and beyond the {GROUP_SHARE} that are each group's own, all "
                f"groups have {self._beyond_shares} of at most {MAX_OFFSETS}"
            )

    def check_all(self, more: int, what: str) -> None:
        """The same for a group that may not exist."""
        if more > 0 and self._all + more > MAX_OFFSETS:
            raise _refusal(f"{what}: the broker keeps {self._all} offsets, of at most {MAX_OFFSETS}")

    @property
    def is_crowded(self) -> bool:
        """Whether there is no room for the offsets of groups that do not exist."""
        return self._all > MAX_OFFSETS


def _beyond(count: int) -> int:
    return max(0, count - GROUP_SHARE)


def _refusal(reason: str) -> RequestFailed:
    remark = (
        f"{reason} (a topic counts for {LEAST_PER_TOPIC} at least): delete topics, or groups with their offsets, that "
        "nobody needs"
    )
    log.warning("%s", remark)  # most consumers commit without asking for an answer
    return RequestFailed(ResponseCode.SYSTEM_ERROR, remark)
