"""Handing pulled messages to the listener: many at a time in any order, or one after the other a queue.

Concurrent: a fixed number of workers take batches of all queues. A message that fails goes back to the broker, to come
again later by the retry topic; if it can't be given back it is tried here again after 5 s. A message that takes longer
than the consume timeout is given back while it is still running, so that it does not hold up its queue's offset.

Orderly: one task a queue, which only works while the broker's lock on the queue holds. A message that fails is tried
again in place, after a pause, until it was tried too often and becomes a dead letter.

Both finish what is running when they are stopped, and begin nothing new.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from skylark.client.assignment import Assignment
from skylark.client.listening import Listening, Outcome
from skylark.client.message import Message
from skylark.client.offsets import Offsets
from skylark.client.returning import Returns
from skylark.client.subscriptions import restore_topic
from skylark.wire.bodies import MessageQueue

log = logging.getLogger(__name__)

RETRY_HERE_S: Final = 5.0
EXPIRED_DELAY_LEVEL: Final = 3
DEAD_LETTER_LEVEL: Final = -1
NEVER: Final = 0x7FFFFFFF
_MAX_SWEEP_S: Final = 60.0
_TURNS_BEFORE_YIELD: Final = 64
_MIN_SUSPEND_S: Final = 0.01
_MAX_SUSPEND_S: Final = 30.0
_RELOCK_S: Final = 0.5


class Tally(msgspec.Struct):
    """How the listener fared with one topic."""

    ok: int = 0
    failed: int = 0
    spent_ms: int = 0


class Consumption:
    """What the two ways have in common."""

    def __init__(
        self,
        listening: Listening,
        offsets: Offsets,
        returns: Returns | None,
        *,
        group: str,
        batch_size: int,
        running: asyncio.Event,
        now_ms: Callable[[], int],
    ) -> None:
        self._listening = listening
        self._offsets = offsets
        self._returns = returns
        self._group = group
        self._batch_size = batch_size
        self._running = running
        self._now_ms = now_ms
        self._stopping = False
        self.tallies: dict[str, Tally] = {}

    async def _call(self, assignment: Assignment, batch: list[Message]) -> Outcome:
        """The listener's verdict; a message that can't be read fails without it."""
        began_ms = self._now_ms()
        reason = assignment.unreadable.get(batch[0].queue_offset)
        if reason is not None:
            log.warning("message %s of %s can't be consumed: %s", batch[0].msg_id, batch[0].topic, reason)
            outcome = Outcome(0)
        else:
            outcome = await self._listening.consume(assignment.queue, batch)
        assignment.last_consume_ms = now_ms = self._now_ms()
        tally = self.tallies.setdefault(assignment.queue.topic, Tally())
        tally.ok += outcome.done
        tally.failed += len(batch) - outcome.done
        tally.spent_ms += now_ms - began_ms
        return outcome

    def _finish(self, assignment: Assignment, messages: Iterable[Message]) -> None:
        """Lets messages go and remembers how far the queue is done."""
        for message in messages:
            assignment.unreadable.pop(message.queue_offset, None)
        offset = assignment.buffer.finish(messages)
        assignment.made_room()
        if offset >= 0 and not assignment.ended:
            self._offsets.update(assignment.queue, offset)

    def _batches(self, assignment: Assignment, messages: list[Message]) -> Iterable[list[Message]]:
        """Cuts messages into batches; one that can't be read stands alone."""
        if not assignment.unreadable:
            size = self._batch_size
            return [messages[at : at + size] for at in range(0, len(messages), size)]
        batches: list[list[Message]] = []
        for message in messages:
            alone = message.queue_offset in assignment.unreadable
            joins = batches and len(batches[-1]) < self._batch_size and not alone
            if joins and batches[-1][-1].queue_offset not in assignment.unreadable:
                batches[-1].append(message)
            else:
                batches.append([message])
        return batches


class ConcurrentConsumption(Consumption):
    """Workers that share all queues."""

    def __init__(
        self,
        listening: Listening,
        offsets: Offsets,
        returns: Returns | None,
        *,
        group: str,
        batch_size: int,
        running: asyncio.Event,
        now_ms: Callable[[], int],
        concurrency: int,
        timeout_s: float,
    ) -> None:
        super().__init__(
            listening, offsets, returns, group=group, batch_size=batch_size, running=running, now_ms=now_ms
        )
        # Bounded by what the buffers of the owned queues may hold.
        self._ready: asyncio.Queue[tuple[Assignment, list[Message]] | None] = asyncio.Queue()
        self._busy: dict[int, tuple[Assignment, list[Message], int]] = {}
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._workers: list[asyncio.Task[None]] = []
        self._sweeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._workers = [asyncio.create_task(self._work(number)) for number in range(self._concurrency)]
        if self._returns is not None:
            self._sweeper = asyncio.create_task(self._sweep())

    def begin(self, assignment: Assignment) -> None:
        """A queue is owned now; nothing to prepare."""

    def take(self, assignment: Assignment, messages: list[Message]) -> None:
        for batch in self._batches(assignment, messages):
            self._ready.put_nowait((assignment, batch))

    def skip(self, assignment: Assignment, messages: list[Message]) -> None:
        """Messages that the user's filter does not want."""
        self._finish(assignment, messages)

    async def stop(self, timeout_s: float) -> None:
        """Finishes what is running; what takes longer is cancelled and comes again."""
        self._stopping = True
        self._running.set()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for _ in self._workers:
            self._ready.put_nowait(None)
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=timeout_s)
            for worker in late:
                worker.cancel()
            if late:
                log.warning("%d listeners of %s did not end in time; their messages come again", len(late), self._group)
                await asyncio.wait(late)

    async def _work(self, number: int) -> None:
        turns = 0
        while True:
            taken = await self._ready.get()
            if not self._running.is_set():
                await self._running.wait()
            if self._stopping or taken is None:
                return
            assignment, batch = taken
            if assignment.revoked:
                continue
            self._busy[number] = (assignment, batch, self._now_ms())
            try:
                await self._consume(assignment, batch)
            except Exception:
                log.exception("a batch of %r was not settled; it comes again", assignment)
            finally:
                del self._busy[number]
            # A listener that never waits for anything would keep everybody else from running.
            turns += 1
            if turns % _TURNS_BEFORE_YIELD == 0:
                await asyncio.sleep(0)

    async def _consume(self, assignment: Assignment, batch: list[Message]) -> None:
        for message in batch:
            restore_topic(message, self._group)
        outcome = await self._call(assignment, batch)
        if assignment.revoked and not self._stopping:
            return  # the next owner gets these again, and settles them
        finished = batch
        if outcome.done < len(batch):
            kept = await self._give_back(assignment, batch[outcome.done :], outcome.delay_level)
            if kept:
                again = {message.queue_offset for message in kept}
                finished = [message for message in batch if message.queue_offset not in again]
                asyncio.get_running_loop().call_later(RETRY_HERE_S, self.take, assignment, kept)
        self._finish(assignment, finished)

    async def _give_back(self, assignment: Assignment, failed: list[Message], delay_level: int) -> list[Message]:
        """What could not be given back and has to be tried here again."""
        if self._returns is None:
            for message in failed:
                log.warning("message %s failed; a broadcasting group does not try again", message.msg_id)
            return []
        kept = []
        for message in failed:
            # One that is not in the buffer any more took too long and was given back already.
            if message.queue_offset not in assignment.buffer:
                continue
            is_readable = message.queue_offset not in assignment.unreadable
            if not await self._returns.send_back(message, delay_level, may_send_anew=is_readable):
                message.reconsume_times += 1
                kept.append(message)
        return kept

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(self._timeout_s, _MAX_SWEEP_S))
            await self.expire(self._now_ms())

    async def expire(self, now_ms: int) -> None:
        """Gives back what has been running for longer than the consume timeout."""
        for assignment, batch, began_ms in list(self._busy.values()):
            if now_ms - began_ms < self._timeout_s * 1000:
                continue
            for message in batch:
                if message.queue_offset not in assignment.buffer or assignment.revoked or self._returns is None:
                    continue
                log.warning("message %s is taking too long and is given back", message.msg_id)
                if await self._returns.send_back(message, EXPIRED_DELAY_LEVEL):
                    self._finish(assignment, [message])


class OrderlyConsumption(Consumption):
    """One task a queue."""

    def __init__(
        self,
        listening: Listening,
        offsets: Offsets,
        returns: Returns | None,
        *,
        group: str,
        batch_size: int,
        running: asyncio.Event,
        now_ms: Callable[[], int],
        concurrency: int,
        suspend_s: float,
        max_reconsume_times: int,
        relock: Callable[[MessageQueue], None] | None,
    ) -> None:
        super().__init__(
            listening, offsets, returns, group=group, batch_size=batch_size, running=running, now_ms=now_ms
        )
        self._slots = asyncio.Semaphore(concurrency)
        self._suspend_s = suspend_s
        self._max_times = max_reconsume_times
        self._relock = relock
        self._begun: set[Assignment] = set()

    def start(self) -> None:
        """Nothing runs before a queue is owned."""

    def begin(self, assignment: Assignment) -> None:
        self._begun = {each for each in self._begun if not each.ended} | {assignment}
        assignment.start_consuming(self._work(assignment))

    def take(self, assignment: Assignment, messages: list[Message]) -> None:
        assignment.arrived.set()

    def skip(self, assignment: Assignment, messages: list[Message]) -> None:
        self._finish(assignment, messages)

    async def stop(self, timeout_s: float) -> None:
        self._stopping = True
        self._running.set()
        for assignment in self._begun:
            assignment.revoke()
        idle = await asyncio.gather(*(assignment.wait_idle(timeout_s) for assignment in self._begun))
        if not all(idle):
            log.warning("a listener of %s did not end in time; its messages come again", self._group)
        await asyncio.gather(*(assignment.cancel() for assignment in self._begun))

    async def _work(self, assignment: Assignment) -> None:
        turns = 0
        while not assignment.revoked:
            batch = next(iter(self._batches(assignment, assignment.buffer.first(self._batch_size))), None)
            if batch is None:
                assignment.arrived.clear()
                await assignment.arrived.wait()
                continue
            await self._running.wait()
            if not await self._is_locked(assignment):
                continue
            suspend_s = None
            async with self._slots:
                if not assignment.revoked:
                    try:
                        suspend_s = await self._consume(assignment, batch)
                    except Exception:
                        log.exception("a batch of %r was not settled; it is tried again", assignment)
                        suspend_s = self._suspend_s
            turns += 1
            if suspend_s is not None:
                await asyncio.sleep(min(max(suspend_s, _MIN_SUSPEND_S), _MAX_SUSPEND_S))
            elif turns % _TURNS_BEFORE_YIELD == 0:
                await asyncio.sleep(0)

    async def _is_locked(self, assignment: Assignment) -> bool:
        """Whether the queue is ours at the broker; if not, asks for it and waits a moment."""
        if self._relock is None or assignment.is_locked(self._now_ms()):
            return True
        self._relock(assignment.queue)
        await asyncio.sleep(_RELOCK_S)
        return False

    async def _consume(self, assignment: Assignment, batch: list[Message]) -> float | None:
        """Consumes the batch; how long the queue has to pause if it must be tried again."""
        for message in batch:
            restore_topic(message, self._group)
        # The result counts even if the queue is being taken away: its lock is only given up after this.
        with assignment.working():
            outcome = await self._call(assignment, batch)
            failed = batch[outcome.done :]
            if failed and self._returns is None:
                log.warning("message %s failed; a broadcasting group does not try again", failed[0].msg_id)
                failed = []
            if not failed:
                self._finish(assignment, batch)
                return None
            self._finish(assignment, batch[: outcome.done])
            await self._count_tries(assignment, failed)
        return self._suspend_s if outcome.suspend_s is None else outcome.suspend_s

    async def _count_tries(self, assignment: Assignment, failed: list[Message]) -> None:
        """Those that were tried too often become dead letters, the others have one more try behind them."""
        assert self._returns is not None
        for message in failed:
            if message.queue_offset in assignment.unreadable:
                # Trying again in place would never end.
                is_gone = await self._returns.send_back(message, DEAD_LETTER_LEVEL, may_send_anew=False)
            else:
                is_gone = message.reconsume_times >= self._max_times and await self._returns.send_anew(message)
            if is_gone:
                self._finish(assignment, [message])
            else:
                message.reconsume_times += 1
