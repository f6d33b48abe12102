"""What a lite-pull consumer has read ahead: owned queues, the messages that wait in them, and how far the user is.

    next_pull   the offset to ask the broker for
    position    the offset of the next message that is handed out
    done        the offset up to which everything is settled; only this is committed

    done <= position <= next_pull, and what waits lies between the last two.

Who was handed messages holds them until he asks for more, and for nobody else's (`holding`); meanwhile they keep `done`
where they begin. What a holder left behind when he failed waits again, and is handed out once more.

Nothing here talks to a broker. An owned queue is a new object each time it is assigned or moved, so what still works
for an old one can't touch its successor.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from math import inf

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
        self.committed: int | None = None
        self.is_paused = is_paused
        self.is_dropped = False
        self.waiting: deque[Message] = deque()
        self.waiting_bytes = 0
        self.hands: set[Hand] = set()
        self.room = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._reached = start or 0

    def begin_at(self, offset: int) -> None:
        self.next_pull = self.position = self._reached = offset

    @property
    def done(self) -> int | None:
        """Up to where everything is settled, None until it is known where the queue begins for us."""
        if self.position is None or not self.hands:
            return self.position
        return min(self.position, *(hand.floor for hand in self.hands))

    @property
    def next_offset(self) -> int | None:
        """The offset of the next message that somebody sees."""
        if self.position is None or not self.hands:
            return self.position
        return int(min(self.position, *(hand.next_offset for hand in self.hands)))

    def skip_to(self, offset: int) -> None:
        """Nothing of what lies before is wanted: it need not be read again."""
        if not self.waiting:
            self.position = self._reached = offset

    def take(self, max_count: int) -> Hand:
        """Hands out the next messages; there must be some."""
        waiting, first = self.waiting, self.position
        assert first is not None
        taken = [waiting.popleft() for _ in range(min(max_count, len(waiting)))]
        self.waiting_bytes -= _size_bytes(taken)
        after = taken[-1].queue_offset + 1
        if after >= self._reached:
            self.position = self._reached = after
        else:  # these were handed out before: what comes next may wait behind them, or be handed out already
            self.position = min(waiting[0].queue_offset, self._reached) if waiting else self._reached
        hand = Hand(self, first, taken)
        self.hands.add(hand)
        return hand

    def take_back(self, messages: list[Message]) -> None:
        """Messages that were handed out wait again, in their places."""
        if not messages:
            return
        if not self.waiting or messages[-1].queue_offset < self.waiting[0].queue_offset:
            self.waiting.extendleft(reversed(messages))
        else:
            self.waiting = deque(sorted([*messages, *self.waiting], key=lambda message: message.queue_offset))
        self.waiting_bytes += _size_bytes(messages)
        assert self.position is not None
        self.position = min(self.position, messages[0].queue_offset)


class Hand:
    """Messages of one queue that somebody was given and has not settled.

    Either all of them are seen at once (`messages`), or the holder takes them out of `rest` one by one. Then what is
    left there can be taken back at any time, from the other end: nobody gets a message twice or misses one.
    """

    __slots__ = ("current", "first", "messages", "owned", "rest", "size")

    def __init__(self, owned: Owned, first: int, messages: list[Message]) -> None:
        self.owned = owned
        self.first = first
        self.messages = messages
        self.size = len(messages)
        self.rest: deque[Message] = deque()
        self.current: Message | None = None
        """What the holder took last; it has settled what came before."""

    @property
    def floor(self) -> int:
        """The lowest offset that is not settled."""
        return self.first if self.current is None else self.current.queue_offset

    @property
    def next_offset(self) -> float:
        """The offset of the next message that the holder sees, infinite when it has to ask for more."""
        try:
            return self.rest[0].queue_offset
        except IndexError:
            return inf

    def deal(self) -> None:
        """From now on, the holder takes the messages one by one."""
        self.rest.extend(self.messages)
        self.messages = []

    def unread(self) -> list[Message]:
        """Takes back what nobody has seen."""
        back: list[Message] = []
        with suppress(IndexError):
            while True:
                back.append(self.rest.pop())
        back.reverse()
        return back

    def unsettled(self) -> list[Message]:
        """Takes back everything that is not settled: its holder is gone."""
        seen = self.messages if self.current is None else [self.current]
        return [*seen, *self.unread()]


class ReadAhead:
    """The owned queues of a consumer, and whose turn it is."""

    def __init__(self, limits: Limits, max_messages: int) -> None:
        self._limits = limits
        self._max_messages = max_messages
        self._ready: deque[Owned] = deque()  # those with messages that are not paused, each once
        self._count = 0  # what waits in queues that are not paused: those that are must not stop the others
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
        owned.is_dropped = True
        if owned in self._ready:
            self._ready.remove(owned)
        for hand in owned.hands:
            hand.unread()
        if not owned.is_paused:
            self._leave(len(owned.waiting))
        owned.waiting.clear()

    def succeed(self, owned: Owned, wanted: Subscription) -> Owned:
        """The same queue from the same place on, to be read by another filter. What is in hand stays in hand."""
        for hand in owned.hands:
            self.put_back(owned, hand.unread())
        heir = Owned(owned.queue, wanted, owned.position, owned.is_paused)
        heir.committed = owned.committed
        heir.hands, owned.hands = owned.hands, set()
        for hand in heir.hands:
            hand.owned = heir
        self.drop(owned)
        return heir

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
        if not messages:
            owned.skip_to(next_offset)
            return
        owned.waiting.extend(messages)
        owned.waiting_bytes += sum(len(message.body) for message in messages)
        if not owned.is_paused:
            self._count += len(messages)
            self._make_ready(owned)

    def take(self, max_count: int) -> Hand | None:
        """The next messages of the queue whose turn it is."""
        if not self._ready:
            return None
        owned = self._ready.popleft()
        before = len(owned.waiting)
        hand = owned.take(max_count)
        if owned.waiting:
            self._ready.append(owned)
        owned.room.set()
        self._leave(before - len(owned.waiting))
        return hand

    def put_back(self, owned: Owned, messages: list[Message]) -> None:
        """What was handed out and not settled waits again, unless the queue is another's by now."""
        if owned.is_dropped or not messages:
            return
        owned.take_back(messages)
        if not owned.is_paused:
            self._count += len(messages)
            self._make_ready(owned)

    def pause(self, owned: Owned) -> None:
        if owned.is_paused:
            return
        for hand in owned.hands:
            self.put_back(owned, hand.unread())
        owned.is_paused = True
        if owned in self._ready:
            self._ready.remove(owned)
        self._leave(len(owned.waiting))

    def resume(self, owned: Owned) -> None:
        if not owned.is_paused:
            return
        owned.is_paused = False
        owned.room.set()
        self._count += len(owned.waiting)
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


def _size_bytes(messages: Iterable[Message]) -> int:
    """Who had a message in hand may have given it another body, of whatever kind."""
    return sum(len(message.body) if isinstance(message.body, bytes) else 0 for message in messages)
