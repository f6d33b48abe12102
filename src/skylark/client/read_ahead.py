"""What a lite-pull consumer has read ahead: owned queues, the messages that wait in them, and how far the user is.

    next_pull   the offset to ask the broker for
    position    the offset after what was handed out
    done        the offset after what the user is done with; only this is committed

    done <= position <= next_pull, and what waits lies between the last two.

Nothing here talks to a broker. An owned queue is a new object each time it is assigned or moved, so what still works
for an old one can't touch its successor.
"""

from __future__ import annotations

import asyncio
from collections import deque

from skylark.client.message import Message, MessageQueue
from skylark.client.pulling import Limits
from skylark.wire.bodies import Subscription


class Owned:
    """A queue that a consumer reads, up to the moment when it is dropped."""

    def __init__(
        self, queue: MessageQueue, wanted: Subscription, start: int | None = None, is_paused: bool = False
    ) -> None:
        self.queue = queue
        self.wanted = wanted
        self.next_pull = start
        self.position = start
        self.done = start
        self.committed: int | None = None
        self.is_paused = is_paused
        self.waiting: deque[Message] = deque()
        self.waiting_bytes = 0
        self.room = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def begin_at(self, offset: int) -> None:
        self.next_pull = self.position = self.done = offset


class ReadAhead:
    """The owned queues of a consumer, and whose turn it is."""

    def __init__(self, limits: Limits, max_messages: int) -> None:
        self._limits = limits
        self._max_messages = max_messages
        self._ready: deque[Owned] = deque()  # those with messages that are not paused, each once
        self._handed: set[Owned] = set()
        self._count = 0
        self.owned: dict[MessageQueue, Owned] = {}
        self.arrived = asyncio.Event()
        """Set when messages come; whoever waits clears it first."""

    @property
    def is_ready(self) -> bool:
        return bool(self._ready)

    def add(self, owned: Owned) -> None:
        self.owned[owned.queue] = owned

    def drop(self, owned: Owned) -> None:
        """Ends an owned queue; what waits in it is forgotten."""
        if owned.task is not None:
            owned.task.cancel()
        if self.owned.get(owned.queue) is owned:
            del self.owned[owned.queue]
        if owned in self._ready:
            self._ready.remove(owned)
        self._handed.discard(owned)
        self._leave(len(owned.waiting))
        owned.waiting.clear()

    async def wait_for_room(self, owned: Owned) -> None:
        """Returns when more of the queue may be read."""
        while owned.is_paused or self._is_full(owned):
            owned.room.clear()
            await owned.room.wait()

    def _is_full(self, owned: Owned) -> bool:
        return (
            len(owned.waiting) >= self._limits.messages
            or owned.waiting_bytes >= self._limits.size_bytes
            or self._count >= self._max_messages
        )

    def put(self, owned: Owned, messages: list[Message], next_offset: int) -> None:
        """What a pull brought, and where the next one begins."""
        owned.next_pull = next_offset
        if messages:
            owned.waiting.extend(messages)
            owned.waiting_bytes += sum(len(message.body) for message in messages)
            self._count += len(messages)
            if not owned.is_paused:
                self._make_ready(owned)
        elif not owned.waiting and owned not in self._handed:
            # Nothing of what was passed over is wanted: the place moves on, so that it is not read again.
            owned.position = owned.done = next_offset

    def take(self, max_count: int) -> list[Message]:
        """The next messages of the queue whose turn it is."""
        if not self._ready:
            return []
        owned = self._ready.popleft()
        waiting = owned.waiting
        taken = [waiting.popleft() for _ in range(min(max_count, len(waiting)))]
        owned.waiting_bytes -= sum(len(message.body) for message in taken)
        owned.position = taken[-1].queue_offset + 1
        self._handed.add(owned)
        if waiting:
            self._ready.append(owned)
        owned.room.set()
        self._leave(len(taken))
        return taken

    def settle(self) -> None:
        """What was handed out is done."""
        for owned in self._handed:
            owned.done = owned.position
        self._handed.clear()

    def pause(self, owned: Owned) -> None:
        owned.is_paused = True
        if owned in self._ready:
            self._ready.remove(owned)

    def resume(self, owned: Owned) -> None:
        owned.is_paused = False
        owned.room.set()
        if owned.waiting:
            self._make_ready(owned)

    def _make_ready(self, owned: Owned) -> None:
        if owned not in self._ready:
            self._ready.append(owned)
        self.arrived.set()

    def _leave(self, count: int) -> None:
        was_full = self._count >= self._max_messages
        self._count -= count
        if was_full:
            for owned in self.owned.values():
                owned.room.set()
