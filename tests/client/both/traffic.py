"""Producers and consumers of both languages that keep a topic busy while a test changes something."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Self

from drivers import DriverError
from drivers import Session as JavaSession

from client.inbox import DEADLINE_S, Inbox
from skylark.client.errors import RocketMQError
from skylark.client.producer import Producer
from skylark.client.push_consumer import PushConsumer
from skylark.client.session import Session

_RECENT = 10


class Traffic:
    """While it is open, a producer of each language sends, and a group of each language gets everything."""

    def __init__(self, namesrv: str, java: JavaSession, topic: str, group: str) -> None:
        self.session = Session(namesrv)
        self._java = java
        self._topic = topic
        self._group = group
        self._wanted = True
        self.sent: set[str] = set()
        """What a broker has acknowledged."""
        self.recent: dict[str, deque[int]] = {}
        """language -> the queues of its last messages"""
        self.inbox = Inbox()
        self.seen_by_java: dict[str, int] = {}
        """body -> queue"""

    async def __aenter__(self) -> Self:
        self.consumer = PushConsumer(
            group=f"{self._group}_python", session=self.session, listener=self.inbox, from_where="first",
            rebalance_interval_s=0.5,
        )  # fmt: skip
        self.consumer.subscribe(self._topic)
        self.java_consumer = await asyncio.to_thread(self._java.consumer, f"{self._group}_java", self._topic)
        self._java_producer = await asyncio.to_thread(self._java.producer, f"{self._group}_p", timeoutMs=3000)
        self._producer = Producer(session=self.session, group=f"{self._group}_q")
        await self.consumer.start()
        await self._producer.start()
        self._producing = asyncio.gather(self._produce("python", self._send), self._produce("java", self._send_by_java))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await self.consumer.close()
        await self._producer.close()

    async def stop(self) -> None:
        """No more messages."""
        self._wanted = False
        await self._producing

    async def more(self, count: int = 40) -> None:
        """Waits until so many more messages have come."""
        await self.inbox.wait(len(self.inbox.messages) + count)

    async def until(self, done: Callable[[], bool], *, refresh: bool = False) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not done():
                if refresh:
                    await self.session.routes.refresh()  # which the client does every 30 s
                await asyncio.sleep(0.05)

    async def all_consumed(self, among: set[str] | None = None) -> None:
        """Waits until both groups have got everything that was acknowledged by now, or these messages."""
        wanted = set(self.sent) if among is None else among
        await self.inbox.until(lambda: {body.decode() for body in self.inbox.bodies} >= wanted)
        while not self.seen_by_java.keys() >= wanted:
            await self._see_by_java()

    async def every_queue_goes_on(self, before: set[str], count: int) -> None:
        """Waits until both groups have got something from each queue that is not among these messages."""
        wanted = set(range(count))
        await self.inbox.until(
            lambda: {each.queue_id for each in self.inbox.messages if each.body.decode() not in before} >= wanted
        )
        while not {queue for body, queue in self.seen_by_java.items() if body not in before} >= wanted:
            await self._see_by_java()

    async def _see_by_java(self) -> None:
        for event in await asyncio.to_thread(self.java_consumer.take, 1):
            self.seen_by_java[event["body"]] = event["queue"]

    async def _produce(self, language: str, send: Callable[[str], Awaitable[int]]) -> None:
        recent = self.recent[language] = deque(maxlen=_RECENT)
        for number in itertools.count():
            if not self._wanted:
                return
            body = f"{language}-{number}"
            try:
                recent.append(await send(body))
            except (DriverError, RocketMQError):
                recent.clear()
                await asyncio.sleep(0.1)
                continue
            self.sent.add(body)
            await asyncio.sleep(0.02)

    async def _send(self, body: str) -> int:
        return (await self._producer.send(self._topic, body.encode())).queue.queue_id

    async def _send_by_java(self, body: str) -> int:
        [result] = await asyncio.to_thread(self._java_producer.send, self._topic, body)
        queue_id: int = result["queue"]
        return queue_id
