"""Sharing the queues of the subscribed topics among a group's members, again whenever something changed.

Every member does this by itself: it asks a broker who the members are, computes its share by the group's strategy,
gives up what is not its own any more and takes what is new. Two members may own one queue for a moment while both are
at it; orderly members can't, as a queue's lock is given up last and taken first.

    giving up   no new work; orderly: wait for what runs, however long, and keep the lock; commit the offset; unlock
    taking      orderly: lock; read the committed offset, or find where to start; pull
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from skylark.client.allocate import Strategy
from skylark.client.assignment import Assignment, Assignments
from skylark.client.calling import call
from skylark.client.crew import CANCEL_WAIT_S, Worker
from skylark.client.errors import RocketMQError, RouteNotFound
from skylark.client.locking import QueueLocks
from skylark.client.offsets import Offsets
from skylark.client.pop_loops import PopLoops
from skylark.client.routes import NOTHING_TO_READ, TopicRoute
from skylark.client.session import Session
from skylark.client.sharing import share_of
from skylark.client.subscriptions import RETRY_PREFIX
from skylark.client.timing import steady_ms
from skylark.wire.bodies import MessageQueue, Subscription

log = logging.getLogger(__name__)

RELEASE_WAIT_S: Final = 20.0

QueuesChanged = Callable[[str, list[MessageQueue]], None]


class Rebalance:
    """One group's share of its topics."""

    def __init__(
        self,
        session: Session,
        group: str,
        subscriptions: Mapping[str, Subscription],
        assignments: Assignments,
        offsets: Offsets,
        *,
        strategy: Strategy,
        is_broadcasting: bool,
        locks: QueueLocks | None,
        find_start: Callable[[MessageQueue], Awaitable[int]],
        begin: Callable[[Assignment, int], None],
        queues_changed: QueuesChanged | None,
        now_ms: Callable[[], int],
        pops: PopLoops | None = None,
    ) -> None:
        """With `pops`, the brokers share the queues out: what they have popped goes to it."""
        self._session = session
        self._group = group
        self._subscriptions = subscriptions
        self._assignments = assignments
        self._offsets = offsets
        self._strategy = strategy
        self._is_broadcasting = is_broadcasting
        self._locks = locks
        self._find_start = find_start
        self._begin = begin
        self._queues_changed = queues_changed
        self._now_ms = now_ms
        self._pops = pops
        self._releases: set[asyncio.Task[None]] = set()
        self._locking: set[MessageQueue] = set()  # locked, or perhaps, and not owned yet
        self._overrun: set[MessageQueue] = set()  # whose listener goes on behind the end
        self._complaints: set[object] = set()

    async def run(self) -> bool:
        """Brings what is owned in line with what should be; False when that has to be tried again soon."""
        balanced = True
        for topic in self._assignments.topics - self._subscriptions.keys():
            await self._apply(topic, [])
        if self._pops is not None:
            for topic in self._pops.topics - self._subscriptions.keys():
                self._pops.set_queues(topic, [])
        for topic in list(self._subscriptions):
            try:
                route = await self._session.routes.get(topic)
                balanced = await self._rebalance(topic, route) and balanced
                is_nothing = not route.read_queues and not topic.startswith(RETRY_PREFIX)
                self._complain(topic, NOTHING_TO_READ if is_nothing else "")
            except RouteNotFound as e:
                balanced = False
                # A broker makes the retry topic when it hears of the group, and the name servers hear of it later.
                if not topic.startswith(RETRY_PREFIX):
                    self._complain(topic, str(e))
            except RocketMQError as e:
                balanced = False
                self._complain(topic, str(e))
        return balanced and not self._releases

    def _complain(self, topic: str, reason: str) -> None:
        if reason and topic not in self._complaints:
            log.warning("%s can't share out topic %s and goes on trying: %s", self._group, topic, reason)
            self._complaints.add(topic)
        elif not reason and topic in self._complaints:
            self._complaints.discard(topic)
            log.info("%s shares out topic %s again", self._group, topic)

    async def _rebalance(self, topic: str, route: TopicRoute) -> bool:
        if self._is_broadcasting:
            return await self._apply(topic, route.read_queues)
        if self._pops is not None and not topic.startswith(RETRY_PREFIX):
            pulls = await self._pops.share(route)
            return pulls is not None and await self._apply(topic, pulls)
        share = await share_of(self._session, self._group, route, self._strategy)
        return await self._apply(topic, share or []) and share is not None

    async def _apply(self, topic: str, wanted: list[MessageQueue]) -> bool:
        await self._drop_stalled(topic)
        lost, gained = self._assignments.plan(topic, wanted)
        await self._give_up(lost)
        await self._drop_locks({queue for queue in self._locking if queue.topic == topic} - set(wanted))
        balanced = await self._take(gained)
        if lost or gained:
            owned = sorted(self._assignments.of_topic(topic), key=lambda queue: (queue.broker_name, queue.queue_id))
            log.info("%s owns %d queues of %s now", self._group, len(owned), topic)
            self._tell(topic, owned)
        return balanced and self._assignments.of_topic(topic) == set(wanted)

    def _tell(self, topic: str, owned: list[MessageQueue]) -> None:
        if self._queues_changed is None:
            return
        try:
            call(self._queues_changed, topic, owned)
        except Exception:
            log.exception("what %s calls when its queues change failed", self._group)

    async def _drop_stalled(self, topic: str) -> None:
        """Gives up queues that are not pulled any more, as RocketMQ's client does: they are taken anew."""
        now_s = asyncio.get_running_loop().time()
        stalled = [each for each in self._assignments if each.queue.topic == topic and each.is_stalled(now_s)]
        for each in stalled:
            log.error("%s: nobody pulls %r any more; it is given up and taken anew", self._group, each)
        await self._give_up(stalled)

    async def _give_up(self, lost: list[Assignment]) -> None:
        leaving = [assignment for assignment in lost if self._assignments.begin_leaving(assignment)]
        if self._locks is not None:
            for assignment in leaving:
                task = Worker(
                    self._release(assignment), loop=asyncio.get_running_loop(), name=f"release of {assignment!r}"
                )
                self._releases.add(task)
                task.add_done_callback(self._releases.discard)
        elif leaving:
            await self._persist([assignment.queue for assignment in leaving])
            for assignment in leaving:
                self._leave(assignment)

    async def _drop_locks(self, queues: set[MessageQueue]) -> None:
        """Gives back locks that were, or may have been, taken for queues that belong to others by now."""
        if queues and self._locks is not None:
            self._locking -= queues
            await self._locks.unlock(queues)

    async def _release(self, assignment: Assignment) -> None:
        """Hands an orderly queue over: only when nothing runs any more, its offset first and its lock last."""
        await self._wait_idle(assignment)
        await self._persist([assignment.queue])
        self._leave(assignment)
        if self._locks is not None and not assignment.is_overrun:
            await self._locks.unlock([assignment.queue])

    async def _wait_idle(self, assignment: Assignment) -> None:
        """Nobody else may work on an orderly queue while its listener runs here; its lock is renewed meanwhile."""
        if not await assignment.wait_idle(RELEASE_WAIT_S):
            log.warning("%s keeps %r as long as its listener is still running", self._group, assignment)
            await assignment.wait_idle(None)

    async def _persist(self, queues: list[MessageQueue]) -> None:
        """Before something that must happen in any case, or the queues would be on their way out for ever."""
        try:
            await self._offsets.persist(queues)
        except Exception:
            log.exception("%s: offsets of queues that are given up are not stored", self._group)

    def _leave(self, assignment: Assignment) -> None:
        self._assignments.finish_leaving(assignment)
        self._offsets.forget(assignment.queue)

    async def _take(self, gained: list[MessageQueue]) -> bool:
        if not gained:
            return True
        queues = gained
        locked_at_ms, last_lock_ms = steady_ms(), self._now_ms()
        if self._locks is not None:
            self._locking.update(gained)
            locked, unknown = await self._locks.lock(gained)
            self._locking.difference_update(set(gained) - locked - unknown)
            queues = [queue for queue in gained if queue in locked]
        starts = await asyncio.gather(*(self._start_of(queue) for queue in queues))
        for queue, offset in zip(queues, starts, strict=True):
            if offset is not None and self._assignments.get(queue) is None:
                assignment = Assignment(queue, self._now_ms())
                if self._locks is not None:
                    assignment.locked_at_ms, assignment.last_lock_ms = locked_at_ms, last_lock_ms
                self._assignments.add(assignment)
                self._locking.discard(queue)
                if self._is_broadcasting:
                    self._offsets.update(queue, offset)  # where the next start goes on, also if nothing comes
                self._begin(assignment, offset)
        return len(queues) == len(gained) and None not in starts

    async def _start_of(self, queue: MessageQueue) -> int | None:
        self._offsets.forget(queue)
        try:
            start = await self._find_start(queue)
        except RocketMQError as e:
            if queue not in self._complaints:
                self._complaints.add(queue)
                log.warning("%s can't find out where to start in %s and goes on trying: %s", self._group, queue, e)
            return None
        self._complaints.discard(queue)
        return start

    async def restart(self, assignment: Assignment, offset: int) -> None:
        """Goes on with a queue from another offset: the old assignment ends, a new one begins.

        The queue is on its way out until then, so that nobody takes it and whoever closes gives its lock back.
        """
        if not self._assignments.begin_leaving(assignment):
            return
        await self._wait_idle(assignment)
        queue = assignment.queue
        assignment.end()
        self._offsets.update(queue, offset, increase_only=False)
        await self._persist([queue])
        self._assignments.finish_leaving(assignment)
        again = Assignment(queue, self._now_ms())
        again.locked_at_ms, again.last_lock_ms = assignment.locked_at_ms, assignment.last_lock_ms
        self._assignments.add(again)
        self._begin(again, offset)

    async def renew_locks(self) -> None:
        """Asks for the locks of all owned queues again. A broker that does not answer says nothing about them."""
        asked = self._assignments.all
        if self._locks is None or not asked:
            return
        locked_at_ms, last_lock_ms = steady_ms(), self._now_ms()
        locked, unknown = await self._locks.lock([assignment.queue for assignment in asked])
        for assignment in asked:
            if assignment.queue in locked:
                assignment.locked_at_ms, assignment.last_lock_ms = locked_at_ms, last_lock_ms
            elif assignment.queue not in unknown and assignment.locked_at_ms is not None:
                log.warning("%s lost the lock of %r", self._group, assignment)
                assignment.locked_at_ms = None

    async def close(self) -> None:
        """Commits everything and gives the locks back, also those that were just being taken."""
        everything = self._assignments.all
        if self._releases:
            is_hopeless = any(assignment.is_overrun for assignment in everything)
            _, late = await asyncio.wait(self._releases, timeout=CANCEL_WAIT_S if is_hopeless else RELEASE_WAIT_S)
            for release in late:
                release.cancel()
            everything = self._assignments.all
        queues = {assignment.queue for assignment in everything}
        try:
            await self._offsets.persist(queues)
        finally:
            self._offsets.close()
        if self._locks is not None:
            self._overrun = {assignment.queue for assignment in everything if assignment.is_overrun}
            if self._overrun:
                log.warning(
                    "%s leaves the locks of %d queues to expire: their listener runs", self._group, len(self._overrun)
                )
            await self._locks.unlock((queues | self._locking) - self._overrun)
        await asyncio.gather(*(assignment.cancel() for assignment in everything))

    async def keep_locks(self) -> None:
        """For who leaves the group: with that, a broker of Skylark's frees what is locked. Behind it, what a listener
        still works on is locked again, and the lock expires."""
        if self._locks is not None and self._overrun:
            await self._locks.lock(self._overrun)
