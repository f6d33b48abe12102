"""From popped messages to the listener, and from its answer back to the broker.

    done        acknowledged; what is done at the same time goes in one request
    failed      hidden for a delay that grows with each try, and comes again then
    too often   becomes a dead letter
    in order    the failed message and those behind it come again after a pause, before anything else of their queue

While a message waits for the listener or is being worked on, its invisible time is extended whenever half of it is
over: nobody else gets it, however long the work takes, up to the consume timeout. Its handle changes with that, so an
acknowledgement waits for an extension that is under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from skylark.client import popping
from skylark.client.consuming import LEVEL_DELAYS_S, Tally, pause_of
from skylark.client.crew import Crew, wait_for_end
from skylark.client.errors import RocketMQError
from skylark.client.listening import DEAD_LETTER_LEVEL, Listening, Outcome
from skylark.client.message import Message
from skylark.client.popping import MAX_INVISIBLE_S, Popped
from skylark.client.returning import Returns
from skylark.client.session import Session
from skylark.client.threads import NotCalled
from skylark.client.timing import steady_ms

log = logging.getLogger(__name__)

# Apache's pauses between the tries of a popped message.
POP_DELAYS_S: Final = (10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
_ACK_AGAIN_S: Final = 0.5
_CLOSING_S: Final = 3.0


class Held:
    """A message that was popped and is not settled."""

    def __init__(self, message: Message, reason: str | None, now_s: float, finished: Callable[[], None]) -> None:
        self.message = message
        self.reason = reason
        self.since_s = now_s
        self.hidden_at_s = now_s
        self.is_done = False
        self.is_leaving = False  # what is said of it is on its way, and an extension must not overtake it
        self.is_abandoned = False
        self.extension: asyncio.Task[None] | None = None
        self.finished = finished


class PopConsumption:
    """Workers that share all that was popped."""

    def __init__(
        self,
        session: Session,
        listening: Listening,
        returns: Returns,
        crew: Crew,
        *,
        group: str,
        is_orderly: bool,
        batch_size: int,
        running: asyncio.Event,
        concurrency: int,
        timeout_s: float,
        suspend_s: float,
        invisible_s: float,
        max_reconsume_times: int,
        tallies: dict[str, Tally],
    ) -> None:
        self._session = session
        self._listening = listening
        self._returns = returns
        self._crew = crew
        self._group = group
        self._is_orderly = is_orderly
        self._batch_size = batch_size
        self._running = running
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._suspend_s = suspend_s
        self._invisible_s = invisible_s
        self._max_times = max_reconsume_times
        self._tallies = tallies
        # Bounded by what each of those who pop may hold.
        self._ready: asyncio.Queue[list[Held] | None] = asyncio.Queue()
        self._held: dict[int, Held] = {}
        self._done: list[Held] = []
        self._has_done = asyncio.Event()
        self._settled = asyncio.Event()
        self._workers: list[asyncio.Task[None]] = []
        self._helpers: list[asyncio.Task[None]] = []
        self._is_stopping = False

    def start(self) -> None:
        self._workers = [self._crew.hire(self._work, "worker") for _ in range(self._concurrency)]
        helpers = {"extending": self._extend_forever, "acknowledging": self._acknowledge_forever}
        self._helpers = [self._crew.hire(work, what) for what, work in helpers.items()]

    def take(self, popped: Popped, finished: Callable[[], None]) -> None:
        """Takes what was popped; `finished` is called for each message that is settled."""
        now_s = asyncio.get_running_loop().time()
        reasons = {id(message): reason for message, reason in popped.unreadable}
        everything = [*popped.messages, *(message for message, _ in popped.unreadable)]
        held = [Held(message, reasons.get(id(message)), now_s, finished) for message in everything]
        unwanted = [Held(message, None, now_s, finished) for message in popped.unwanted]
        self._held |= {id(each): each for each in (*held, *unwanted)}
        for each in unwanted:
            self._finish(each)
        for batch in self._batches(held):
            self._ready.put_nowait(batch)

    def _batches(self, held: list[Held]) -> Iterable[list[Held]]:
        """In order, what is of one queue stays together; otherwise batches of the listener's size."""
        if self._is_orderly:
            queues: dict[tuple[str, int], list[Held]] = {}
            for each in sorted(held, key=lambda each: each.message.queue_offset):
                queues.setdefault((each.message.broker, each.message.queue_id), []).append(each)
            return queues.values()
        readable = [each for each in held if each.reason is None]
        batches = [readable[at : at + self._batch_size] for at in range(0, len(readable), self._batch_size)]
        return [*batches, *([each] for each in held if each.reason is not None)]

    def halt(self) -> None:
        """Begins nothing new."""
        self._is_stopping = True

    async def stop(self, timeout_s: float) -> None:
        """Finishes what is running; what the listener has not begun is given back at once."""
        self.halt()
        self._running.set()
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
        try:
            async with asyncio.timeout(_CLOSING_S):
                waiting = [each for each in self._held.values() if not each.is_done]
                await asyncio.gather(*(self._hide(each, 0.0, counts=False) for each in waiting))
                while self._held:
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            log.warning("%s could not settle all of its messages; they come again", self._group)
        for helper in self._helpers:
            helper.cancel()
        await wait_for_end(self._helpers)

    async def _work(self) -> None:
        self._listening.enter()
        while not self._is_stopping:
            batch = await self._ready.get()
            if batch is None:
                return
            try:
                if not self._running.is_set():
                    await self._running.wait()
                if self._is_stopping:
                    return
                if self._is_orderly:
                    await self._consume_in_order(batch)
                else:
                    await self._settle(batch, await self._call(batch))
            except NotCalled:
                return
            except Exception:
                log.exception("messages of %s were not settled; they come again", self._group)
                self._forget_all(batch)
            except asyncio.CancelledError:
                if not self._crew.is_ending:
                    self._forget_all(batch)
                raise
            await asyncio.sleep(0)  # a listener that never waits would keep everybody else from running

    async def _call(self, batch: list[Held]) -> Outcome:
        """The listener's verdict; a message that can't be read fails without it. Raises NotCalled."""
        first = batch[0].message
        began_ms = steady_ms()
        if batch[0].reason is not None:
            log.warning("message %s of %s can't be consumed: %s", first.msg_id, first.topic, batch[0].reason)
            outcome = Outcome(0)
        else:
            outcome = await self._listening.consume(first.queue, [each.message for each in batch])
        tally = self._tallies.setdefault(self._session.namespace.wrap(first.topic), Tally())
        tally.ok += outcome.done
        tally.failed += len(batch) - outcome.done
        tally.spent_ms += steady_ms() - began_ms
        return outcome

    async def _settle(self, batch: list[Held], outcome: Outcome) -> None:
        for each in batch[: outcome.done]:
            self._finish(each)
        for each in batch[outcome.done :]:
            times = each.message.reconsume_times
            level = outcome.delay_level
            if level > 0:
                delay_s = LEVEL_DELAYS_S[min(level, len(LEVEL_DELAYS_S)) - 1]
            else:
                delay_s = POP_DELAYS_S[min(times, len(POP_DELAYS_S) - 1)]
            is_doomed = level == DEAD_LETTER_LEVEL or times >= self._max_times
            if not (is_doomed and await self._bury(each)):
                await self._hide(each, delay_s)

    async def _consume_in_order(self, held: list[Held]) -> None:
        """Batch after batch; when one fails, it and what is behind it waits for the pause to be over."""
        while held and not self._is_stopping and not any(each.is_abandoned for each in held):
            readable = next((at for at, each in enumerate(held) if each.reason is not None), len(held))
            size = min(max(readable, 1), self._batch_size)
            outcome = await self._call(held[:size])
            for each in held[: outcome.done]:
                self._finish(each)
            failed = held[outcome.done : size]
            held = held[outcome.done :]
            if not failed:
                continue
            if outcome.delay_level == DEAD_LETTER_LEVEL:
                doomed = failed
            else:
                is_spent = failed[0].message.reconsume_times >= self._max_times or failed[0].reason is not None
                doomed = failed[:1] if is_spent else []
            buried = [each for each in doomed if await self._bury(each)]
            held = [each for each in held if each not in buried]
            if buried and len(buried) == len(doomed):
                continue
            pause_s = min(pause_of(outcome, self._suspend_s), MAX_INVISIBLE_S)
            await asyncio.gather(*(self._hide(each, pause_s) for each in held))
            return
        if not self._is_stopping:
            for each in held:
                self._forget(each)

    # Back to the broker.

    def _finish(self, held: Held) -> None:
        held.is_done = True
        self._done.append(held)
        self._has_done.set()

    def _forget_all(self, batch: Iterable[Held]) -> None:
        for each in batch:
            if not each.is_done:
                self._forget(each)

    def _forget(self, held: Held) -> None:
        if self._held.pop(id(held), None) is not None:
            held.finished()
            self._settled.set()

    async def _hide(self, held: Held, delay_s: float, *, counts: bool = True) -> None:
        """The message comes again after the delay."""
        await self._let_extend(held)
        try:
            await popping.change_invisible(
                self._session, self._group, held.message, round(delay_s * 1000), counts=counts
            )
        except RocketMQError as e:
            log.warning("message %s comes again when its time is over: %s", held.message.msg_id, e)
        self._forget(held)

    async def _bury(self, held: Held) -> bool:
        if not await self._returns.send_back(held.message, DEAD_LETTER_LEVEL, may_send_anew=held.reason is None):
            return False
        self._finish(held)
        return True

    async def _let_extend(self, held: Held) -> None:
        held.is_leaving = True
        if held.extension is not None:
            await asyncio.wait([held.extension])

    async def _acknowledge_forever(self) -> None:
        while True:
            await self._has_done.wait()
            await self._acknowledge()

    async def _acknowledge(self) -> None:
        """Acknowledges all that is done by now; what fails is tried again while the message is hidden."""
        self._has_done.clear()
        done, self._done = self._done, []
        try:
            for each in done:
                await self._let_extend(each)
            await popping.ack(self._session, self._group, [each.message for each in done])
        except RocketMQError as e:
            log.warning("%s could not acknowledge %d messages: %s", self._group, len(done), e)
            now_s = asyncio.get_running_loop().time()
            late = [each for each in done if now_s >= each.hidden_at_s + self._invisible_s]
            self._done += [each for each in done if now_s < each.hidden_at_s + self._invisible_s]
            done = late
            await asyncio.sleep(_ACK_AGAIN_S)
            self._has_done.set()
        except BaseException:
            self._done += done
            self._has_done.set()
            raise
        for each in done:
            self._forget(each)

    async def _extend_forever(self) -> None:
        clock_s = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self._invisible_s / 8)
            now_s = clock_s()
            for held in list(self._held.values()):
                if held.is_leaving or held.extension is not None or now_s - held.hidden_at_s < self._invisible_s / 2:
                    continue
                if now_s - held.since_s < self._timeout_s:
                    held.extension = asyncio.create_task(self._extend(held))
                elif not held.is_abandoned:
                    held.is_abandoned = True
                    log.warning("message %s is taking too long and comes again", held.message.msg_id)

    async def _extend(self, held: Held) -> None:
        try:
            await popping.change_invisible(self._session, self._group, held.message, round(self._invisible_s * 1000))
            held.hidden_at_s = asyncio.get_running_loop().time()
        except RocketMQError as e:
            log.warning("the time of message %s could not be extended: %s", held.message.msg_id, e)
        finally:
            held.extension = None
