"""Listeners that keep what they get, and let a test wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from skylark.client.message import Message

DEADLINE_S = 180.0  # only what hangs takes so long


class Inbox:
    """`answer` decides what the listener returns; without it every message is taken."""

    def __init__(self, answer: Callable[[Message], object] | None = None) -> None:
        self.messages: list[Message] = []
        self._answer = answer
        self._changed = asyncio.Event()

    async def __call__(self, message: Message) -> object:
        self.messages.append(message)
        self._changed.set()
        return None if self._answer is None else self._answer(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.messages]

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not done():
                self._changed.clear()
                await self._changed.wait()

    async def wait(self, count: int) -> list[Message]:
        """Waits until so many messages came in all."""
        await self.until(lambda: len(self.messages) >= count)
        return self.messages

    def in_queue(self, queue_id: int) -> list[bytes]:
        return [message.body for message in self.messages if message.queue_id == queue_id]


class Gate:
    """A listener that waits to be let through."""

    def __init__(self) -> None:
        self.entered = Inbox()
        self.done: list[bytes] = []
        self._open = asyncio.Event()

    async def __call__(self, message: Message) -> None:
        await self.entered(message)
        await self._open.wait()
        self.done.append(message.body)

    def open(self) -> None:
        self._open.set()


async def eventually(done: Callable[[], bool]) -> None:
    """Waits for something that nobody announces."""
    async with asyncio.timeout(DEADLINE_S):
        while not done():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def numbered(count: int, prefix: str = "m") -> list[bytes]:
    return [f"{prefix}{number}".encode() for number in range(count)]
