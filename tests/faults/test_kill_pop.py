"""kill -9 of a broker while messages are popped, acknowledged and hidden for longer, again and again.

Senders and takers go on through all kills. Takers acknowledge some messages, alone or several at once, hide some for
another while, and leave some alone. In the end everything sent was acknowledged, nothing acknowledged came again, and
nothing came while it was hidden. Where a request was not answered, either of its two outcomes is right.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from servers import SkylarkServer

from client.plain import create_topic, send
from faults.test_kill import ROUNDS
from patience import DEADLINE_S
from skylark.client.errors import RocketMQError
from skylark.client.message import Message, MessageQueue
from skylark.client.popping import ANY_QUEUE, ack, change_invisible, handle_of, pop
from skylark.client.session import Session
from skylark.client.subscriptions import build_subscription
from skylark.wire.pop import FROM_MIN

QUEUES = 4
TAKERS = 6
TOPIC = "KilledPops"
GROUP = "takers"
LONGEST_MS = 3000


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Ledger:
    """What is known of each message, by its number."""

    def __init__(self) -> None:
        self.tried = 0
        self.sent: set[int] = set()
        self.acknowledged: set[int] = set()
        self.perhaps_acknowledged: set[int] = set()
        self.doubtful: set[int] = set()  # hidden for longer when it was due, which may make one delivery two
        self.popped_at_ms: dict[int, int] = {}
        self.hidden_until_ms: dict[int, int] = {}
        self.histories: dict[int, list[str]] = {}
        self.deliveries = 0
        self.extended = 0

    def deliver(self, message: Message) -> None:
        number, handle = int(message.body), handle_of(message)
        self.note(message, "came")
        self.deliveries += 1
        if number in self.doubtful or handle.pop_time_ms < self.popped_at_ms.get(number, 0):
            return  # the answer to the pop after this one was quicker
        assert number not in self.acknowledged, f"it was acknowledged: {self.histories[number]}"
        early_ms = self.hidden_until_ms.get(number, 0) - handle.pop_time_ms
        assert early_ms <= 0, f"it came {early_ms} ms too early: {self.histories[number]}"
        self.popped_at_ms[number], self.hidden_until_ms[number] = handle.pop_time_ms, handle.visible_at_ms

    def note(self, message: Message, what: str) -> None:
        """For the message of a test that fails."""
        self.histories.setdefault(int(message.body), []).append(f"{now_ms()} {what} {message.receipt_handle}")

    @property
    def missing(self) -> set[int]:
        return self.sent - self.acknowledged - self.perhaps_acknowledged


class Load:
    """Senders and takers at a broker that comes and goes."""

    def __init__(self, session: Session, queues: list[MessageQueue], dice: random.Random) -> None:
        self._session = session
        self._queues = queues
        self._dice = dice
        self._all = MessageQueue(queues[0].broker_name, ANY_QUEUE, TOPIC)
        self._subscription = build_subscription(TOPIC, version=0)
        self.ledger = Ledger()
        self.acknowledges_all = False
        self.empty_pops = 0
        self.last: int | None = None
        """A message that is left alone when it first comes."""

    async def send(self) -> None:
        while True:
            number = self.ledger.tried
            self.ledger.tried += 1
            try:
                await send(self._session, self._queues[number % QUEUES], b"%d" % number)
                self.ledger.sent.add(number)
                await asyncio.sleep(0.01)
            except RocketMQError:
                await asyncio.sleep(0.1)

    async def take(self) -> None:
        while True:
            invisible_ms = LONGEST_MS if self.acknowledges_all else self._dice.randrange(1000, LONGEST_MS)
            try:
                popped = await pop(
                    self._session,
                    GROUP,
                    self._all,
                    self._subscription,
                    max_messages=self._dice.randrange(1, 9),
                    invisible_ms=invisible_ms,
                    wait_ms=200,
                    init_mode=FROM_MIN,
                )
            except RocketMQError:
                await asyncio.sleep(0.1)
                continue
            self.empty_pops += not popped.messages
            for message in popped.messages:
                self.ledger.deliver(message)
            await self._settle(popped.messages)

    async def _settle(self, messages: list[Message]) -> None:
        if self.acknowledges_all or self._dice.random() < 0.2:
            await self._acknowledge([message for message in messages if not self._is_left(message)])
            return
        for message in messages:
            choice = self._dice.random()
            # Without an answer, nobody knows which handle is the good one: the message is left alone.
            is_known = choice >= 0.3 or await self._hide(message, self._dice.randrange(1000, LONGEST_MS))
            if is_known and 0.15 < choice < 0.8:
                await self._acknowledge([message])

    def _is_left(self, message: Message) -> bool:
        return int(message.body) == self.last and message.reconsume_times == 0

    async def _acknowledge(self, messages: list[Message]) -> None:
        if not messages:
            return
        try:
            await ack(self._session, GROUP, messages)
        except RocketMQError:
            for message in messages:
                self.ledger.note(message, "perhaps acknowledged")
                self.ledger.perhaps_acknowledged.add(int(message.body))
            return
        for message in messages:
            # After its time, an acknowledgement may come too late.
            in_time = now_ms() < handle_of(message).visible_at_ms
            self.ledger.note(message, f"acknowledged with {len(messages)}")
            (self.ledger.acknowledged if in_time else self.ledger.perhaps_acknowledged).add(int(message.body))

    async def _hide(self, message: Message, invisible_ms: int) -> bool:
        number, until = int(message.body), self.ledger.hidden_until_ms
        until[number] = min(until[number], now_ms() + invisible_ms)  # which of the two, only the answer tells
        visible_at_ms = handle_of(message).visible_at_ms
        if now_ms() >= visible_at_ms:
            return False
        try:
            await change_invisible(self._session, GROUP, message, invisible_ms)
        except RocketMQError:
            return False
        finally:
            if now_ms() >= visible_at_ms:
                self.ledger.doubtful.add(number)
        until[number] = handle_of(message).visible_at_ms
        self.ledger.extended += 1
        self.ledger.note(message, "hidden")
        return True

    async def until(self, is_so: Callable[[], bool], takers: list[asyncio.Task[None]]) -> None:
        """Or until a taker has something to say."""
        async with asyncio.timeout(DEADLINE_S):
            while not is_so() and not any(taker.done() for taker in takers):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def kill_again_and_again(self, server: SkylarkServer, takers: list[asyncio.Task[None]]) -> None:
        """Each time when some more messages are acknowledged and some more are hidden for longer."""
        ledger = self.ledger
        for _ in range(ROUNDS):
            enough, hidden = len(ledger.acknowledged) + self._dice.randrange(15, 60), ledger.extended + 2
            await self.until(
                lambda enough=enough, hidden=hidden: len(ledger.acknowledged) >= enough and ledger.extended >= hidden,
                takers,
            )
            os.kill(server.broker_pid, signal.SIGKILL)
            await asyncio.to_thread(server.kill)  # which only has to wait for it
            await asyncio.to_thread(server.start)

    async def until_all_came(self, takers: list[asyncio.Task[None]]) -> None:
        """Until everything is acknowledged, and whatever were to come again would have: one is hidden after all the
        others, for the longest time, and when it has come again and nothing is left in the queues they have, too.
        """
        ledger = self.ledger
        await self.until(lambda: not ledger.missing, takers)
        self.last = ledger.tried
        await send(self._session, self._queues[0], b"%d" % self.last)
        ledger.sent.add(self.last)
        await self.until(lambda: not ledger.missing, takers)
        goal = self.empty_pops + len(takers) + 1  # at least one of them began after this
        await self.until(lambda: self.empty_pops >= goal, takers)


@pytest.mark.timeout(600)
def test_what_is_due_comes_and_what_is_acknowledged_does_not(tmp_path: Path) -> None:
    server = SkylarkServer(tmp_path)

    async def run() -> None:
        await asyncio.to_thread(server.start)
        async with Session(server.namesrv_addr) as session:
            load = Load(session, await create_topic(session, TOPIC, QUEUES), random.Random("pop"))
            senders = [asyncio.create_task(load.send()) for _ in range(2)]
            takers = [asyncio.create_task(load.take()) for _ in range(TAKERS)]
            try:
                await load.kill_again_and_again(server, takers)
                load.acknowledges_all = True
                for sender in senders:
                    sender.cancel()
                await asyncio.gather(*senders, return_exceptions=True)
                await load.until_all_came(takers)
            finally:
                for task in (*senders, *takers):
                    task.cancel()
                results = await asyncio.gather(*takers, return_exceptions=True)
        for result in results:
            if not isinstance(result, asyncio.CancelledError):
                raise AssertionError from result
        ledger = load.ledger
        assert not ledger.missing, {number: ledger.histories.get(number) for number in ledger.missing}
        assert len(ledger.acknowledged) > 10 * ROUNDS
        assert ledger.extended > ROUNDS
        print(
            f"{len(ledger.sent)} sent, {ledger.deliveries} deliveries, {len(ledger.acknowledged)} acknowledged,"
            f" {ledger.extended} hidden for longer, {len(ledger.perhaps_acknowledged)} open,"
            f" {len(ledger.doubtful)} in doubt"
        )

    try:
        asyncio.run(run())
    finally:
        server.kill()
