"""Where a simple consumer's messages come from: every broker of every topic, so that none holds up another.

A source is one topic at one broker. It is in one of three states, and each of them can only be left in one way:

    hot      there may be messages: the next receive that needs some pops here
    popping  a pop is under way; what it brings goes to the common pile, whoever asked for it
    cold     the last pop found nothing: a request waits at the broker that takes no messages and says when there are
             some (Apache's NOTIFICATION), and then the source is hot

So a receive waits at all empty brokers at once, and takes only where something is. It pops at one source after the
other; one that does not answer at once is left to itself and its messages are found on the pile by the next receive.
With a single source the pop itself waits at the broker, which saves the second request.

A source that fails is left alone for a while that grows up to 3 s; the others go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

from skylark.client.crew import Worker
from skylark.client.errors import BrokerError, RocketMQError
from skylark.client.message import Message
from skylark.client.popping import Popped, new_attempt
from skylark.wire.bodies import MessageQueue

log = logging.getLogger(__name__)

SLOW_S: Final = 0.05
"""After so long without an answer, the next source is asked too."""
BELL_MS: Final = 15_000
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 3.0
_FIRST_LULL_S: Final = 0.01
_LONGEST_LULL_S: Final = 1.0

Pop = Callable[[MessageQueue, int, int, int, str], Coroutine[Any, Any, Popped]]
"""Takes up to so many messages, hidden for so long, after a wait of so long at the most, under an attempt id."""
Bell = Callable[[MessageQueue, int, str], Coroutine[Any, Any, bool]]
"""Waits so long for messages to come, under an attempt id."""
Settle = Callable[[Popped], list[Message]]
_T = TypeVar("_T")


class Caught:
    """A message that waits here, and since when it is hidden from others."""

    __slots__ = ("hidden_at_s", "message", "renewal")

    def __init__(self, message: Message, hidden_at_s: float) -> None:
        self.message = message
        self.hidden_at_s = hidden_at_s
        self.renewal: asyncio.Task[None] | None = None


class Source:
    """One topic at one broker."""

    def __init__(self, queue: MessageQueue) -> None:
        self.queue = queue
        self.is_hot = True
        self.popping: asyncio.Task[None] | None = None
        self.is_waiting = False  # the pop waits at the broker
        self.bell: asyncio.Task[None] | None = None
        self.failure: RocketMQError | None = None
        self.failed_at_s = 0.0
        self.rests_until_s = 0.0
        self.attempt_id = new_attempt()
        self._failures = 0
        self._has_rung = False
        self._false_alarms = 0

    def __str__(self) -> str:
        return f"{self.queue.topic} of {self.queue.broker_name}"

    @property
    def is_idle(self) -> bool:
        return self.popping is None and self.bell is None

    def failed(self, error: RocketMQError, now_s: float) -> None:
        self.failure = error
        self.failed_at_s = now_s
        self._failures += 1
        self.rests_until_s = now_s + min(FIRST_PAUSE_S * 2 ** min(self._failures - 1, 10), LONGEST_PAUSE_S)
        if self._failures == 1:
            log.warning(
                "%s of %s can't be read and is tried again: %s", self.queue.topic, self.queue.broker_name, error
            )

    def answered(self) -> None:
        if self._failures:
            log.info("%s is read again", self)
        self.failure = None
        self._failures = 0

    def rang(self) -> None:
        self.is_hot = self._has_rung = True

    def found(self, popped: Popped, now_s: float) -> None:
        """A pop was answered."""
        self.attempt_id = new_attempt()
        self.is_hot = popped.count > 0 and popped.rest > 0
        if popped.count:
            self._false_alarms = 0
        elif self._has_rung:
            # A broker may see messages that it does not give out now, and would go on telling us of them.
            self._false_alarms += 1
            self.rests_until_s = now_s + min(_FIRST_LULL_S * 2 ** min(self._false_alarms - 1, 10), _LONGEST_LULL_S)
        if popped.is_refused:
            self.rests_until_s = now_s + FIRST_PAUSE_S
        self._has_rung = False


class Sources:
    """All sources of a consumer, and the pile of what they brought."""

    def __init__(self, pop: Pop, bell: Bell, settle: Settle) -> None:
        """`settle` gives those of the popped messages that are for the user, and deals with the others."""
        self._pop = pop
        self._bell = bell
        self._settle = settle
        self._turns: deque[Source] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self.pile: deque[Caught] = deque()
        self.changed = asyncio.Event()

    def set_queues(self, queues: Iterable[MessageQueue]) -> None:
        """These are the sources from now on. A pop under way at one that is gone still counts."""
        wanted = dict.fromkeys(queues)
        for source in list(self._turns):
            if source.queue not in wanted:
                self._turns.remove(source)
                if source.bell is not None:
                    source.bell.cancel()
        known = {source.queue for source in self._turns}
        self._turns.extend(Source(queue) for queue in wanted if queue not in known)

    def look_again(self) -> None:
        """Somebody wants messages: of a source at which nothing waits it is not known whether it has some."""
        for source in self._turns:
            source.is_hot |= source.is_idle

    def ask(self, max_messages: int, invisible_ms: int, wait_ms: int) -> None:
        """Begins a pop at the next source that may have something, and waits at those that had nothing."""
        now_s = asyncio.get_running_loop().time()
        ready = [source for source in self._turns if source.popping is None and now_s >= source.rests_until_s]
        if len(self._turns) == 1:
            if ready and (wait_ms or ready[0].is_hot):
                self._begin(ready[0], max_messages, invisible_ms, wait_ms)
            return
        chosen = next((source for source in ready if source.is_hot), None)
        if chosen is not None:
            self._begin(chosen, max_messages, invisible_ms, 0)
            self._turns.remove(chosen)
            self._turns.append(chosen)  # the others come first next time
        for source in ready:
            if not source.is_hot and source.bell is None:
                source.bell = self._spawn(self._listen(source))

    def next_turn_s(self) -> float:
        """When to ask again if nothing happens until then: a source is slow, or has rested."""
        now_s = asyncio.get_running_loop().time()
        turns = [source.rests_until_s for source in self._turns if source.is_idle and source.rests_until_s > now_s]
        if len(self._turns) > 1 and any(source.is_hot and source.popping is None for source in self._turns):
            turns.append(now_s + SLOW_S)
        return min([*turns, now_s + LONGEST_PAUSE_S])

    @property
    def is_undecided(self) -> bool:
        """Whether a source has not said yet if it has something now."""
        now_s = asyncio.get_running_loop().time()
        return any(
            not source.is_waiting if source.popping is not None else source.is_hot and now_s >= source.rests_until_s
            for source in self._turns
        )

    def failure(self, since_s: float = 0.0) -> RocketMQError | None:
        """Why nothing can be received; None as long as one source did not fail since then."""
        failures = [source.failure for source in self._turns if source.failed_at_s >= since_s]
        if not failures or len(failures) < len(self._turns) or None in failures:
            return None
        # What a broker refuses tells more than a network that is down.
        return next((each for each in failures if isinstance(each, BrokerError)), failures[0])

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = Worker(work, loop=asyncio.get_running_loop(), name="receiving")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _begin(self, source: Source, max_messages: int, invisible_ms: int, wait_ms: int) -> None:
        source.is_waiting = wait_ms > 0
        source.popping = self._spawn(self._take(source, max_messages, invisible_ms, wait_ms))

    async def _take(self, source: Source, max_messages: int, invisible_ms: int, wait_ms: int) -> None:
        began_s = asyncio.get_running_loop().time()
        pop = self._pop(source.queue, max_messages, invisible_ms, wait_ms, source.attempt_id)
        try:
            popped = await self._watched(source, pop)
            if popped is not None:
                now_s = asyncio.get_running_loop().time()
                source.found(popped, now_s)
                # An answer may be read long after it came; unless it was waited for, the request says more.
                hidden_at_s = now_s if wait_ms else began_s
                self.pile.extend(Caught(message, hidden_at_s) for message in self._settle(popped))
        finally:
            source.popping = None
            self.changed.set()

    async def _listen(self, source: Source) -> None:
        try:
            if await self._watched(source, self._bell(source.queue, BELL_MS, source.attempt_id)):
                source.rang()
        finally:
            source.bell = None
            self.changed.set()

    async def _watched(self, source: Source, request: Coroutine[Any, Any, _T]) -> _T | None:
        """What the request gives, or None when it failed, which the source remembers."""
        try:
            result = await request
        except RocketMQError as e:
            source.failed(e, asyncio.get_running_loop().time())
            return None
        except Exception as e:
            log.exception("what %s answers makes no sense", source.queue.broker_name)
            error = RocketMQError(f"what {source.queue.broker_name} answers makes no sense: {e}")
            source.failed(error, asyncio.get_running_loop().time())
            return None
        source.answered()
        return result

    async def close(self, timeout_s: float) -> None:
        """Ends the waiting; a pop that takes messages right now is given a moment, and they are on the pile then."""
        for source in self._turns:
            if source.bell is not None:
                source.bell.cancel()
            if source.popping is not None and source.is_waiting:
                source.popping.cancel()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
