"""Tells the members of consumer groups that they have to share the queues out anew.

A client may come to or leave thousands of groups at once, and each may have thousands of members. So some members are
told in each turn of the event loop, and a group that changes again before its members are told is told once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from skylark.net.connection import Connection

TOLD_PER_TURN: Final = 256

Tell = Callable[[str, Connection, bool], None]
"""Given a group, one of its members, and whether that one has just come and caused the news."""
MembersOf = Callable[[str], Iterable[Connection]]
CallSoon = Callable[[Callable[[], None]], object]


class MemberNews:
    """Groups whose members are to be told."""

    def __init__(self, tell: Tell, members_of: MembersOf, call_soon: CallSoon | None) -> None:
        """`call_soon` is the event loop's; without one, everybody is told at once."""
        self._tell = tell
        self._members_of = members_of
        self._call_soon = call_soon
        self._changed: dict[str, set[Connection]] = {}  # group -> who has just come
        self._telling: Iterator[tuple[str, Connection, bool]] = iter(())
        self._left = TOLD_PER_TURN  # whom this turn of the loop may tell
        self._is_counting = False

    def changed(self, group: str, newcomer: Connection | None = None) -> None:
        """The group has other members than before."""
        newcomers = self._changed.setdefault(group, set())
        if newcomer is not None:
            newcomers.add(newcomer)
        self._go_on()

    def _go_on(self) -> None:
        while self._left:
            told = self._next()
            if told is None:
                return
            self._tell(*told)
            if self._call_soon is not None:
                self._left -= 1
                if not self._is_counting:
                    self._is_counting = True
                    self._call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._left = TOLD_PER_TURN
        self._is_counting = False
        self._go_on()

    def _next(self) -> tuple[str, Connection, bool] | None:
        told = next(self._telling, None)
        while told is None and self._changed:
            group = next(iter(self._changed))
            newcomers = self._changed.pop(group)
            self._telling = iter([(group, member, member in newcomers) for member in self._members_of(group)])
            told = next(self._telling, None)
        return told
