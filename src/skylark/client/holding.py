"""Who holds which messages of a lite-pull consumer, and what becomes of them.

Asking for more says that what the same task or thread was given before is done. It says nothing of what others hold:
one that is still at work settles its messages itself. What a task had that ended well is done too, once somebody asks
for more (it may have been a task for one call). What a task had that failed or was cancelled is handed out again, and
so is what a thread had that has ended, since nobody knows how: let it call `commit` before.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextvars import ContextVar
from typing import Any

from skylark.client.read_ahead import Hand, ReadAhead

log = logging.getLogger(__name__)

Holder = asyncio.Task[Any] | threading.Thread

calling_thread: ContextVar[threading.Thread | None] = ContextVar("calling_thread", default=None)
"""For whom the blocking twin calls."""


def current_holder() -> Holder:
    """Who asks."""
    thread = calling_thread.get()
    if thread is not None:
        return thread
    task = asyncio.current_task()
    assert task is not None, "only a task can await"
    return task


class Holding:
    """What is handed out and not settled, by holder."""

    def __init__(self, group: str, ahead: ReadAhead) -> None:
        self._group = group
        self._ahead = ahead
        self._hands: dict[Holder, list[Hand]] = {}
        self._watched: set[Holder] = set()

    def take(self, holder: Holder, max_count: int) -> Hand | None:
        """The next messages of one queue are the holder's."""
        hand = self._ahead.take(max_count)
        if hand is not None:
            self._hands.setdefault(holder, []).append(hand)
            if holder not in self._watched and isinstance(holder, asyncio.Task):
                self._watched.add(holder)
                holder.add_done_callback(self._ended)
        return hand

    def latest(self, holder: Holder) -> Hand | None:
        """What the holder was given last."""
        hands = self._hands.get(holder)
        return hands[-1] if hands else None

    def settle(self, holder: Holder) -> None:
        """What the holder was given before is done, and what tasks were given that ended well."""
        for hand in self._hands.pop(holder, ()):
            self._release(hand)
        if not self._hands:
            return
        self.look_for_ended()
        for other in list(self._hands):
            if isinstance(other, asyncio.Task) and other.done():
                for hand in self._hands.pop(other):
                    self._release(hand)

    def look_for_ended(self) -> None:
        """Hands out again what was in the hands of who is gone, and did not end well."""
        for holder in list(self._hands):
            if isinstance(holder, threading.Thread):
                if not holder.is_alive():
                    self._hand_out_again(holder, f"thread {holder.name} ended", None)
            elif not holder.done():
                continue
            elif holder.cancelled():
                self._hand_out_again(holder, f"task {holder.get_name()} was cancelled", None)
            elif (error := holder.exception()) is not None:
                self._hand_out_again(holder, f"task {holder.get_name()} ended by an error", error)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._watched.discard(task)
        for hand in self._hands.get(task, ()):
            self._ahead.put_back(hand.owned, hand.unread())
        if task in self._hands:
            self.look_for_ended()

    def take_back(self, thread: threading.Thread) -> None:
        """The thread was interrupted, and has not seen what it was given last, if it was given anything."""
        if thread in self._hands:
            self._hand_out_again(thread, f"thread {thread.name} was interrupted", None)

    def forget(self) -> None:
        """Nobody settles anything any more, and nothing is handed out again."""
        self._hands.clear()

    def reclaim_unread(self) -> None:
        """Somebody waits: what others were dealt and have not looked at yet is for anybody."""
        for hands in self._hands.values():
            for hand in hands:
                self._ahead.put_back(hand.owned, hand.unread())

    def _release(self, hand: Hand) -> None:
        self._ahead.put_back(hand.owned, hand.unread())
        hand.owned.hands.discard(hand)

    def _hand_out_again(self, holder: Holder, what: str, error: BaseException | None) -> None:
        count = 0
        for hand in self._hands.pop(holder):
            messages = hand.unsettled()
            count += len(messages)
            self._ahead.put_back(hand.owned, messages)
            hand.owned.hands.discard(hand)
        log.warning(
            "group %s: %s with %d messages in hand, which are handed out again", self._group, what, count,
            exc_info=error,
        )  # fmt: skip
