"""Handing pulled messages to the listener: many at a time in any order, or one after the other a queue.

Concurrent: a fixed number of workers take batches of all queues. A message that fails goes back to the broker, to come
again later by the retry topic; if it can't be given back it is tried here again after 5 s. A message that takes longer
than the consume timeout is given back while it is still running, so that it does not hold up its queue's offset.

Orderly: one task a queue, which only works while the broker's lock on the queue holds. A message that fails is tried
again in place, after a pause, until it was tried too often and becomes a dead letter.

A broadcasting group has no retry topic and no dead letters. What fails is tried again here, as often as the consumer
was told, which is not at all by default if it is not orderly, as with RocketMQ; then it is dropped.

Both finish what is running when they are stopped, and begin nothing new. What could not be settled, by whatever error,
is taken again. Time is that of the steady clock; only what operators are told is not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import msgspec

from skylark.client.assignment import Assignment
from skylark.client.crew import Crew, Work, wait_for_end
from skylark.client.listening import DEAD_LETTER_LEVEL, Listening, Outcome
from skylark.client.message import Message
from skylark.client.offsets import Offsets
from skylark.client.returning import Returns
from skylark.client.subscriptions import restore_topic
from skylark.client.threads import NotCalled
from skylark.client.timing import steady_ms
from skylark.wire.bodies import MessageQueue

log = logging.getLogger(__name__)

RETRY_HERE_S: Final = 5.0
EXPIRED_DELAY_LEVEL: Final = 3
NEVER: Final = 0x7FFFFFFF
_MAX_SWEEP_S: Final = 60.0
_TURNS_BEFORE_YIELD: Final = 64
_MIN_SUSPEND_S: Final = 0.01

# What the broker's delay levels stand for, unless it was configured otherwise.
LEVEL_DELAYS_S: Final = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
_RELOCK_S: Final = 0.5


class Tally(msgspec.Struct):
    """How the listener fared with one topic."""

    ok: int = 0
    failed: int = 0
    spent_ms: int = 0


def pause_of(outcome: Outcome, otherwise_s: float) -> float:
    """How long an orderly queue stops after a failure."""
    if outcome.suspend_s is not None:
        return max(outcome.suspend_s, _MIN_SUSPEND_S)
    if outcome.delay_level > 0:
        return float(LEVEL_DELAYS_S[min(outcome.delay_level, len(LEVEL_DELAYS_S)) - 1])
    return max(otherwise_s, _MIN_SUSPEND_S)


class Consumption:
    """What the two ways have in common."""

    def __init__(
        self,
        listening: Listening,
        offsets: Offsets,
        returns: Returns | None,
        crew: Crew,
        *,
        group: str,
        batch_size: int,
        running: asyncio.Event,
        now_ms: Callable[[], int],
        max_reconsume_times: int,
    ) -> None:
        """`max_reconsume_times` counts where messages are tried again here."""
        self._listening = listening
        self._offsets = offsets
        self._returns = returns
        self._crew = crew
        self._group = group
        self._batch_size = batch_size
        self._running = running
        self._now_ms = now_ms
        self._max_times = max_reconsume_times
        self._stopping = False
        self.tallies: dict[str, Tally] = {}

    async def _call(self, assignment: Assignment, batch: list[Message]) -> Outcome:
        """The listener's verdict; a message that can't be read fails without it. Raises NotCalled."""
        began_ms = steady_ms()
        reason = assignment.unreadable.get(batch[0].queue_offset)
        if reason is not None:
            log.warning("message %s of %s can't be consumed: %s", batch[0].msg_id, batch[0].topic, reason)
            outcome = Outcome(0)
        else:
            outcome = await self._listening.consume(assignment.queue, batch)
        assignment.last_consume_ms = self._now_ms()
        tally = self.tallies.setdefault(assignment.queue.topic, Tally())
        tally.ok += outcome.done
        tally.failed += len(batch) - outcome.done
        tally.spent_ms += steady_ms() - began_ms
        return outcome

    def _may_try_here(self, assignment: Assignment, message: Message, outcome: Outcome) -> bool:
        """For a broadcasting group: whether the message has tries left. If not, nobody hears of it again."""
        if (
            outcome.delay_level != DEAD_LETTER_LEVEL
            and message.reconsume_times < self._max_times
            and message.queue_offset not in assignment.unreadable
        ):
            message.reconsume_times += 1
            return True
        log.error(
            "message %s of %s failed and is dropped after %d tries: a broadcasting group has no dead letters",
            message.msg_id, message.topic, message.reconsume_times + 1,
        )  # fmt: skip
        return False

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
        crew: Crew,
        *,
        group: str,
        batch_size: int,
        running: asyncio.Event,
        now_ms: Callable[[], int],
        max_reconsume_times: int,
        concurrency: int,
        timeout_s: float,
    ) -> None:
        super().__init__(
            listening, offsets, returns, crew, group=group, batch_size=batch_size, running=running, now_ms=now_ms,
            max_reconsume_times=max_reconsume_times,
        )  # fmt: skip
        # Bounded by what the buffers of the owned queues may hold.
        self._ready: asyncio.Queue[tuple[Assignment, list[Message]] | None] = asyncio.Queue()
        self._busy: dict[int, tuple[Assignment, list[Message], int]] = {}
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._workers: list[asyncio.Task[None]] = []
        self._sweeper: asyncio.Task[None] | None = None
        self._told: dict[int, int] = {}  # worker -> when the call began of which it was said that it takes too long

    def start(self) -> None:
        self._workers = [self._hire(partial(self._work, number), "worker") for number in range(self._concurrency)]
        self._sweeper = self._hire(self._sweep, "sweeper")

    def _hire(self, work: Work, what: str) -> asyncio.Task[None]:
        return self._crew.hire(work, what, until=lambda: self._stopping)

    def begin(self, assignment: Assignment) -> None:
        """A queue is owned now; nothing to prepare."""

    def take(self, assignment: Assignment, messages: list[Message]) -> None:
        for batch in self._batches(assignment, messages):
            self._ready.put_nowait((assignment, batch))

    def halt(self) -> None:
        """Begins nothing new."""
        self._stopping = True

    def skip(self, assignment: Assignment, messages: list[Message]) -> None:
        """Messages that the user's filter does not want."""
        self._finish(assignment, messages)

    async def stop(self, timeout_s: float) -> None:
        """Finishes what is running; what takes longer is cancelled and comes again."""
        self.halt()
        self._running.set()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for _ in self._workers:
            self._ready.put_nowait(None)
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=timeout_s)
            self._crew.dismiss()
            for worker in late:
                worker.cancel()
            if late:
                log.warning("%d listeners of %s did not end in time; their messages come again", len(late), self._group)
                await wait_for_end(list(late))

    async def _work(self, number: int) -> None:
        self._listening.enter()
        turns = 0
        while not self._stopping:
            taken = await self._ready.get()
            if taken is None:
                return
            assignment, batch = taken
            try:
                if not self._running.is_set():
                    await self._running.wait()
                if self._stopping or assignment.revoked:
                    continue
                self._busy[number] = (assignment, batch, steady_ms())
                await self._consume(assignment, batch)
            except NotCalled:
                return
            except Exception:
                log.exception("a batch of %r was not settled; it comes again", assignment)
                self._take_later(assignment, batch)
            except asyncio.CancelledError:
                if not self._crew.is_ending:
                    self._take_later(assignment, batch)
                raise
            finally:
                self._busy.pop(number, None)
            # A listener that never waits for anything would keep everybody else from running.
            turns += 1
            if turns % _TURNS_BEFORE_YIELD == 0:
                await asyncio.sleep(0)

    def _take_later(self, assignment: Assignment, messages: Iterable[Message]) -> None:
        left = [message for message in messages if message.queue_offset in assignment.buffer]
        asyncio.get_running_loop().call_later(RETRY_HERE_S, self.take, assignment, left)

    async def _consume(self, assignment: Assignment, batch: list[Message]) -> None:
        for message in batch:
            restore_topic(message, self._group)
        outcome = await self._call(assignment, batch)
        if assignment.revoked and not self._stopping:
            return  # the next owner gets these again, and settles them
        finished = batch
        if outcome.done < len(batch):
            kept = await self._give_back(assignment, batch[outcome.done :], outcome)
            if kept:
                again = {message.queue_offset for message in kept}
                finished = [message for message in batch if message.queue_offset not in again]
                self._take_later(assignment, kept)
        self._finish(assignment, finished)

    async def _give_back(self, assignment: Assignment, failed: list[Message], outcome: Outcome) -> list[Message]:
        """What could not be given back and has to be tried here again."""
        if self._returns is None:
            return [message for message in failed if self._may_try_here(assignment, message, outcome)]
        kept = []
        for message in failed:
            # One that is not in the buffer any more took too long and was given back already.
            if message.queue_offset not in assignment.buffer:
                continue
            is_readable = message.queue_offset not in assignment.unreadable
            if not await self._returns.send_back(message, outcome.delay_level, may_send_anew=is_readable):
                message.reconsume_times += 1
                kept.append(message)
        return kept

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(self._timeout_s, _MAX_SWEEP_S))
            await self.expire(steady_ms())

    async def expire(self, now_ms: int) -> None:
        """Gives back what has been running for longer than the consume timeout, by the steady clock."""
        for number, (assignment, batch, began_ms) in list(self._busy.items()):
            if now_ms - began_ms < self._timeout_s * 1000:
                continue
            if self._returns is None:
                if self._told.get(number) != began_ms:
                    self._told[number] = began_ms
                    log.warning("message %s of %r is taking too long, and the queue waits", batch[0].msg_id, assignment)
                continue
            for message in batch:
                if message.queue_offset not in assignment.buffer or assignment.revoked:
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
        crew: Crew,
        *,
        group: str,
        batch_size: int,
        running: asyncio.Event,
        now_ms: Callable[[], int],
        max_reconsume_times: int,
        concurrency: int,
        timeout_s: float,
        suspend_s: float,
        relock: Callable[[MessageQueue], None] | None,
    ) -> None:
        super().__init__(
            listening, offsets, returns, crew, group=group, batch_size=batch_size, running=running, now_ms=now_ms,
            max_reconsume_times=max_reconsume_times,
        )  # fmt: skip
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout_s = timeout_s
        self._suspend_s = suspend_s
        self._relock = relock
        self._begun: set[Assignment] = set()

    def start(self) -> None:
        """Nothing runs before a queue is owned."""

    def begin(self, assignment: Assignment) -> None:
        self._begun = {each for each in self._begun if not each.ended} | {assignment}
        work = partial(self._work, assignment)
        assignment.start_consuming(
            self._crew.hire(work, f"consuming of {assignment!r}", until=lambda: assignment.revoked)
        )

    def take(self, assignment: Assignment, messages: list[Message]) -> None:
        assignment.arrived.set()

    def skip(self, assignment: Assignment, messages: list[Message]) -> None:
        self._finish(assignment, messages)

    def halt(self) -> None:
        self._stopping = True
        for assignment in self._begun:
            assignment.revoke()

    async def stop(self, timeout_s: float) -> None:
        self.halt()
        self._running.set()
        begun = list(self._begun)
        idle = await asyncio.gather(*(assignment.wait_idle(timeout_s) for assignment in begun))
        self._crew.dismiss()
        if not all(idle):
            log.warning("a listener of %s did not end in time; its messages come again", self._group)
        for assignment, is_idle in zip(begun, idle, strict=True):
            assignment.is_overrun = not is_idle and self._listening.has_threads  # a thread goes on with it
        ended = await asyncio.gather(*(assignment.cancel() for assignment in begun))
        for assignment, has_ended in zip(begun, ended, strict=True):
            assignment.is_overrun |= not has_ended

    async def _work(self, assignment: Assignment) -> None:
        self._listening.enter()
        turns = 0
        while not assignment.revoked:
            batch = next(iter(self._batches(assignment, self._waiting(assignment))), None)
            if batch is None:
                assignment.arrived.clear()
                await assignment.arrived.wait()
                continue
            await self._running.wait()
            async with self._slots:
                if assignment.revoked:
                    return
                # Only now: the lock may have been lost while others had the slots.
                is_locked = self._relock is None or assignment.is_locked(steady_ms())
                try:
                    pause_s = await self._attempt(assignment, batch) if is_locked else _RELOCK_S
                except NotCalled:
                    return
            if not is_locked and self._relock is not None:
                self._relock(assignment.queue)
            turns += 1
            if pause_s is not None:
                await asyncio.sleep(pause_s)
            elif turns % _TURNS_BEFORE_YIELD == 0:
                await asyncio.sleep(0)

    async def _attempt(self, assignment: Assignment, batch: list[Message]) -> float | None:
        """Consumes the batch; how long the queue has to pause if it must be tried again. Raises NotCalled."""
        try:
            return await self._consume(assignment, batch)
        except NotCalled:
            raise
        except Exception:
            log.exception("a batch of %r was not settled; it is tried again", assignment)
            return max(self._suspend_s, _MIN_SUSPEND_S)

    def _waiting(self, assignment: Assignment) -> list[Message]:
        """What comes next, at least a batch if there is so much."""
        return assignment.buffer.first(self._batch_size)

    def _done(self, assignment: Assignment, messages: list[Message], outcome: Outcome) -> None:
        """The listener took them."""
        self._finish(assignment, messages)

    def _rolled_back(self, assignment: Assignment) -> None:
        log.error("a listener of %s rolls back what is committed at once: see auto_commit", self._group)

    async def _consume(self, assignment: Assignment, batch: list[Message]) -> float | None:
        for message in batch:
            restore_topic(message, self._group)
        # The result counts even if the queue is being taken away: its lock is only given up after this.
        with assignment.working():
            alarm = asyncio.get_running_loop().call_later(self._timeout_s, self._tell_of, assignment, batch)
            try:
                outcome = await self._call(assignment, batch)
            finally:
                alarm.cancel()
            if outcome.rolls_back:
                self._rolled_back(assignment)
                return pause_of(outcome, self._suspend_s)
            self._done(assignment, batch[: outcome.done], outcome)
            left = [
                message for message in batch[outcome.done :] if not await self._is_over(assignment, message, outcome)
            ]
        return pause_of(outcome, self._suspend_s) if left else None

    def _tell_of(self, assignment: Assignment, batch: list[Message]) -> None:
        log.warning("message %s of %r is taking too long, and the queue waits", batch[0].msg_id, assignment)

    async def _is_over(self, assignment: Assignment, message: Message, outcome: Outcome) -> bool:
        """Whether a message that failed has no more tries; if it has, this was one of them."""
        if self._returns is None:
            is_over = not self._may_try_here(assignment, message, outcome)
        elif message.queue_offset in assignment.unreadable:
            # Trying again in place would never end.
            is_over = await self._returns.send_back(message, DEAD_LETTER_LEVEL, may_send_anew=False)
        elif outcome.delay_level == DEAD_LETTER_LEVEL:
            is_over = await self._returns.send_back(message, DEAD_LETTER_LEVEL)
        else:
            is_over = message.reconsume_times >= self._max_times and await self._returns.send_anew(message)
        if is_over:
            self._finish(assignment, [message])
        elif self._returns is not None:
            message.reconsume_times += 1
        return is_over
