"""Orderly consuming without automatic commit: the listener says when what it took is committed.

    async def settle(message: Message) -> Commit | None:
        totals.add(message)
        return Commit() if totals.are_complete else None

    PushConsumer("localhost:9876", "totals", listener=settle, orderly=True, auto_commit=False)

What a listener takes, without a word on it, stays open: the next message of the queue comes, but the group's offset
does not move. `Commit()` closes all that the queue gave since the last one, and its own messages. `RollBack()`, raised
or returned, has all of it come again, its own messages first of all the later ones; no try is counted. `Suspend` and
failures are about the messages of the call only, as with automatic commit. When a queue goes to another member, or the
consumer ends, what is open comes again there.

What is open counts as held (`limits`): a listener that takes as much as may be held without a commit gets nothing more,
and the log says so.
"""

from __future__ import annotations

import logging
from typing import Any

from skylark.client.assignment import Assignment
from skylark.client.consuming import OrderlyConsumption
from skylark.client.listening import Outcome
from skylark.client.message import Message
from skylark.client.pulling import Limits

log = logging.getLogger(__name__)


class CommittedByListener(OrderlyConsumption):
    """One task a queue, which goes on behind what is open."""

    def __init__(self, *args: Any, limits: Limits, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._full: set[Assignment] = set()  # of which it was said that nothing more is read
        self._open: dict[Assignment, list[Message]] = {}  # the first messages of each buffer, in order

    def begin(self, assignment: Assignment) -> None:
        self._open = {each: messages for each, messages in self._open.items() if not each.ended}
        self._full = {each for each in self._full if not each.ended}
        super().begin(assignment)

    def _waiting(self, assignment: Assignment) -> list[Message]:
        count = len(self._open.get(assignment, ()))
        waiting = assignment.buffer.first(count + self._batch_size)[count:]
        if not waiting and assignment not in self._full and assignment.buffer.is_full(self._limits):
            self._full.add(assignment)
            log.warning(
                "%d messages of %r wait for a commit of the listener, and no more are read: it must commit earlier, or "
                "the consumer needs wider limits", count, assignment,
            )  # fmt: skip
        return waiting

    def _done(self, assignment: Assignment, messages: list[Message], outcome: Outcome) -> None:
        taken = self._open.setdefault(assignment, [])
        taken += messages
        if outcome.commits:
            del self._open[assignment]
            self._full.discard(assignment)
            self._finish(assignment, taken)

    def _rolled_back(self, assignment: Assignment) -> None:
        self._open.pop(assignment, None)
