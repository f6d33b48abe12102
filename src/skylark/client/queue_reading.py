"""Reads one queue ahead, for as long as a lite-pull consumer owns it.

What fails is said once and tried again, whatever it is: an owned queue is never left unread in silence.

A message whose body can't be read is not passed over. If a codec is missing here, the queue stops before it, until the
consumer is started with the codec. What nobody can read goes to the group's dead letters, with the body as it was sent;
the queue goes on once the broker has it there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from skylark.client.compression import is_missing
from skylark.client.errors import RocketMQError, UnreadableMessage
from skylark.client.failing import Failures
from skylark.client.message import Message, MessageQueue
from skylark.client.pull_consumer import PullConsumer
from skylark.client.pulling import PullStatus
from skylark.client.read_ahead import Owned, ReadAhead
from skylark.client.returning import Returns

log = logging.getLogger(__name__)

SUSPEND_S: Final = 20.0
PULL_TIMEOUT_S: Final = 10.0
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 3.0
_DEAD_LETTER_LEVEL: Final = -1


class QueueReading:
    """What the tasks that read have in common, one task for each owned queue."""

    def __init__(
        self,
        group: str,
        reader: PullConsumer,
        ahead: ReadAhead,
        returns: Returns,
        failures: Failures,
        *,
        batch_size: int,
        first_offset: Callable[[MessageQueue], Awaitable[int]],
        look_again: Callable[[str], Awaitable[None]],
    ) -> None:
        """`first_offset` says where to begin in a queue, `look_again` asks for the route of a topic anew."""
        self._group = group
        self._reader = reader
        self._ahead = ahead
        self._returns = returns
        self._failures = failures
        self._batch_size = batch_size
        self._first_offset = first_offset
        self._look_again = look_again
        self.is_closing = False

    async def run(self, owned: Owned) -> None:
        """Reads until it is cancelled."""
        where, queue = f"read topic {owned.queue.topic} at {owned.queue.broker_name}", str(owned.queue)
        unread = f"read on in {queue}"
        pause_s = 0.0
        try:
            while True:
                try:
                    if pause_s:
                        await asyncio.sleep(pause_s)
                        await self._look_again(owned.queue.topic)
                    await self._read_on(owned)
                except Exception as e:
                    defect = None if isinstance(e, RocketMQError) else e
                    what = unread if isinstance(e, UnreadableMessage) else where
                    text = f"group {self._group} can't {what}, and goes on trying: {repr(e) if defect else e}"
                    self._failures.note(what, text, queue, defect)
                    pause_s = min(pause_s * 2, LONGEST_PAUSE_S) or FIRST_PAUSE_S
                else:
                    pause_s = 0.0
                    self._works(where, unread, queue)
        finally:
            if not self.is_closing:
                self._works(where, unread, queue)  # the queue is another's now

    def _works(self, where: str, unread: str, queue: str) -> None:
        self._failures.works(where, queue)
        self._failures.works(unread, queue)

    async def _read_on(self, owned: Owned) -> None:
        await self._ahead.wait_for_room(owned)
        if owned.next_pull is None:
            owned.begin_at(await self._first_offset(owned.queue))
            assert owned.next_pull is not None
        pulled = await self._reader.pull_for(
            owned.wanted,
            owned.queue,
            owned.next_pull,
            self._batch_size,
            wait_s=SUSPEND_S,
            timeout_s=PULL_TIMEOUT_S,
        )
        if pulled.status is PullStatus.OFFSET_ILLEGAL:
            log.warning("%s has no offset %d; going on at %d", owned.queue, owned.next_pull, pulled.next_offset)
        messages = pulled.messages
        if pulled.unreadable:
            messages = []
            for message in pulled.messages:
                reason = pulled.unreadable.get(message.queue_offset)
                if reason is None:
                    messages.append(message)
                elif not await self._bury(owned.queue, message, reason):
                    self._ahead.put(owned, messages, message.queue_offset)
                    raise UnreadableMessage(f"the message at offset {message.queue_offset} of {owned.queue}: {reason}")
        self._ahead.put(owned, messages, pulled.next_offset)

    async def _bury(self, queue: MessageQueue, message: Message, reason: str) -> bool:
        """Makes a dead letter of what nobody can read."""
        if is_missing(message.sys_flag):
            return False
        if not await self._returns.send_back(message, _DEAD_LETTER_LEVEL, may_send_anew=False):
            return False
        log.error(
            "the message at offset %d of %s is a dead letter of %s now: %s",
            message.queue_offset, queue, self._group, reason,
        )  # fmt: skip
        return True
