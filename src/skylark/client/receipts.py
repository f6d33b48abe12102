"""Acknowledges popped messages and extends their time, so that neither overtakes the other.

Each extension gives a message a new receipt handle, and what is acknowledged by the old one comes again. So an
acknowledgement waits for an extension that is under way, also for one whose caller has given up; and a message that is
acknowledged, or is just being, is extended no more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from skylark.client import popping
from skylark.client.crew import Worker
from skylark.client.errors import RocketMQError
from skylark.client.message import Message
from skylark.client.session import Session

log = logging.getLogger(__name__)

MAX_REMEMBERED: Final = 4096


class Receipts:
    """What is done with the receipt handles of one consumer."""

    def __init__(self, session: Session, group: str, timeout_s: float) -> None:
        self._session = session
        self._group = group
        self._timeout_s = timeout_s
        self._extensions: dict[str, asyncio.Task[str]] = {}  # handle -> the one that takes its place
        self._acks: dict[str, asyncio.Future[bool]] = {}  # handle -> whether that went well; the latest ones

    async def ack(self, messages: Sequence[Message]) -> None:
        """Says that messages are done. Raises RocketMQError."""
        while any(message.receipt_handle in self._extensions for message in messages):  # also one that just began
            for message in messages:
                await self._let_extend(message)
        outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        handles = [message.receipt_handle for message in messages]
        self._acks |= dict.fromkeys(handles, outcome)
        try:
            await popping.ack(self._session, self._group, messages, self._timeout_s)
        except BaseException:
            for handle in handles:
                self._acks.pop(handle, None)
            outcome.set_result(False)
            raise
        outcome.set_result(True)
        while len(self._acks) > MAX_REMEMBERED:
            del self._acks[next(iter(self._acks))]

    async def extend(self, message: Message, invisible_ms: int, *, counts: bool = True) -> bool:
        """Hides a message for so long from now on; False when it is acknowledged. Raises RocketMQError."""
        while True:
            await self._let_extend(message)
            ack = self._acks.get(message.receipt_handle)
            if ack is None:
                break
            if await asyncio.shield(ack):
                return False
        handle = message.receipt_handle
        work = self._extend(message, invisible_ms, counts)
        task = Worker(work, loop=asyncio.get_running_loop(), name=f"extension of {message.msg_id}")
        self._extensions[handle] = task
        task.add_done_callback(lambda done: self._extended(handle, done))
        await asyncio.shield(task)  # once it has left, it counts
        return True

    async def close(self, timeout_s: float) -> None:
        """Gives what is under way a moment."""
        if self._extensions:
            _, late = await asyncio.wait(list(self._extensions.values()), timeout=timeout_s)
            for task in late:
                task.cancel()

    async def _let_extend(self, message: Message) -> None:
        while (task := self._extensions.get(message.receipt_handle)) is not None:
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None:
                message.receipt_handle = task.result()  # of a copy, perhaps

    async def _extend(self, message: Message, invisible_ms: int, counts: bool) -> str:
        await popping.change_invisible(
            self._session, self._group, message, invisible_ms, self._timeout_s, counts=counts
        )
        return message.receipt_handle

    def _extended(self, handle: str, task: asyncio.Task[str]) -> None:
        del self._extensions[handle]
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, RocketMQError):
            log.error("%s: the time of a message could not be changed", self._group, exc_info=error)
