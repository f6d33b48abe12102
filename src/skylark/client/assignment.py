"""The queues that a consumer owns at the moment.

An assignment is one queue from the moment it is given to this member until it is taken away, and it carries its own
revocation: whoever works for it looks at `revoked` before acting, so work that outlives the ownership can't act on the
next one, which is another object even for the same queue. When the rebalance takes a queue away:

    revoke       pulling stops, nothing new is begun
    wait_idle    an orderly consumer waits for what is running, as the next owner must not overtake it
    end          nothing that is still running counts any more
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from skylark.client.crew import Worker, wait_for_end
from skylark.client.pulling import Buffer, PullLoop
from skylark.wire.bodies import MessageQueue

LOCK_VALID_MS = 30_000


class Assignment:
    """One owned queue: what was pulled of it, its lock at the broker, and the tasks that work on it."""

    def __init__(self, queue: MessageQueue, now_ms: int) -> None:
        self.queue = queue
        self.buffer = Buffer()
        self.unreadable: dict[int, str] = {}
        self.arrived = asyncio.Event()
        self.pull_loop: PullLoop | None = None
        self.locked_at_ms: int | None = None
        """When the lock was asked for that holds now, by the steady clock."""
        self.last_lock_ms = 0
        self.last_consume_ms = now_ms
        self.is_overrun = False
        """A listener still runs although its consumer gave up waiting for it."""
        self._revoked = False
        self._ended = False
        self._pulling: asyncio.Task[None] | None = None
        self._consuming: asyncio.Task[None] | None = None
        self._working = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return f"{self.queue.topic}-{self.queue.queue_id} at {self.queue.broker_name}"

    @property
    def revoked(self) -> bool:
        """Nothing new may be begun."""
        return self._revoked

    @property
    def ended(self) -> bool:
        """Results don't count any more: the queue may have another owner."""
        return self._ended

    def is_locked(self, now_ms: int) -> bool:
        """Whether the broker's lock surely holds, by the steady clock: it lasts longer there than we rely on it."""
        return self.locked_at_ms is not None and now_ms - self.locked_at_ms <= LOCK_VALID_MS

    def start_pulling(self, loop: PullLoop, offset: int) -> None:
        self.pull_loop = loop
        # A filter of the user's runs in it.
        self._pulling = Worker(loop.run(offset), loop=asyncio.get_running_loop(), name=f"pull {self!r}")

    def is_stalled(self, now_s: float) -> bool:
        """Whether nobody pulls the queue any more although it is ours; nothing would ever come of it."""
        if self.pull_loop is None or self._pulling is None or self._revoked or self.pull_loop.has_moved:
            return False
        return self._pulling.done() or self.pull_loop.is_stuck(now_s)

    def start_consuming(self, task: asyncio.Task[None]) -> None:
        """For orderly consumers, which have one task a queue."""
        self._consuming = task

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within it, a listener is running."""
        self._working += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._working -= 1
            if not self._working:
                self._idle.set()

    async def wait_idle(self, timeout_s: float | None) -> bool:
        """Waits until no listener is running; False when that takes too long. None waits as long as it takes."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def made_room(self) -> None:
        if self.pull_loop is not None:
            self.pull_loop.room.set()

    def revoke(self) -> None:
        """Ends pulling at once; a listener that is running goes on."""
        self._revoked = True
        self.arrived.set()
        if self._pulling is not None:
            self._pulling.cancel()
        if self._consuming is not None and not self._working:
            self._consuming.cancel()

    def end(self) -> None:
        """From now on nothing counts that is still running."""
        self.revoke()
        self._ended = True

    async def cancel(self) -> bool:
        """Stops everything, also a listener that is running; False when that does not let itself be stopped."""
        self.end()
        tasks = [task for task in (self._pulling, self._consuming) if task is not None]
        for task in tasks:
            task.cancel()
        return await wait_for_end(tasks) == 0


class Assignments:
    """queue -> assignment, and those that are on their way out."""

    def __init__(self) -> None:
        self._owned: dict[MessageQueue, Assignment] = {}
        self._leaving: dict[MessageQueue, Assignment] = {}

    def __len__(self) -> int:
        return len(self._owned)

    def __iter__(self) -> Iterator[Assignment]:
        return iter(list(self._owned.values()))

    def get(self, queue: MessageQueue) -> Assignment | None:
        return self._owned.get(queue)

    @property
    def queues(self) -> list[MessageQueue]:
        return list(self._owned)

    @property
    def leaving(self) -> list[MessageQueue]:
        return list(self._leaving)

    @property
    def all(self) -> list[Assignment]:
        """Those that are owned, and those on their way out, whose listener may still run."""
        return [*self._owned.values(), *self._leaving.values()]

    def of_topic(self, topic: str) -> set[MessageQueue]:
        return {queue for queue in self._owned if queue.topic == topic}

    @property
    def topics(self) -> set[str]:
        return {queue.topic for queue in self._owned}

    def plan(self, topic: str, wanted: Iterable[MessageQueue]) -> tuple[list[Assignment], list[MessageQueue]]:
        """What to take away and what to acquire so that exactly `wanted` is owned of the topic.

        A queue that is still on its way out is not acquired again before it is gone.
        """
        wanted_set = set(wanted)
        lost = [self._owned[queue] for queue in self._owned if queue.topic == topic and queue not in wanted_set]
        gained = [queue for queue in wanted_set if queue not in self._owned and queue not in self._leaving]
        return lost, sorted(gained, key=lambda queue: (queue.broker_name, queue.queue_id))

    def add(self, assignment: Assignment) -> None:
        assert assignment.queue not in self._owned, f"{assignment} has an owner already"
        self._owned[assignment.queue] = assignment

    def begin_leaving(self, assignment: Assignment) -> bool:
        """Revokes an assignment; False when somebody else did."""
        if self._owned.get(assignment.queue) is not assignment:
            return False
        del self._owned[assignment.queue]
        self._leaving[assignment.queue] = assignment
        assignment.revoke()
        return True

    def finish_leaving(self, assignment: Assignment) -> None:
        assignment.end()
        if self._leaving.get(assignment.queue) is assignment:
            del self._leaving[assignment.queue]
