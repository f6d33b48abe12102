"""The one way into the store: what every message goes through, whether a producer sent it, a consumer sent it back or
its delay has passed. One with a delay is parked first; see `parking`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from mypy_extensions import mypyc_attr

from skylark.broker.config import BrokerConfig, FlushDiskType
from skylark.broker.internal import is_internal
from skylark.broker.parking import DELAY_PROPERTIES, Parking
from skylark.broker.stats import Stats
from skylark.broker.tally import add_to
from skylark.net.connection import RequestFailed
from skylark.store import (
    TIMER_TOPIC,
    Appended,
    MessageTooLarge,
    NotWriteable,
    PropertiesTooLarge,
    Store,
    StoreError,
)
from skylark.wire.codes import ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import PROPERTY_WAIT_STORE_OK, Message
from skylark.wire.records import BatchPart


@mypyc_attr(allow_interpreted_subclasses=True)
class Put:
    """Appends messages, and tells when they are safe."""

    def __init__(self, store: Store, config: BrokerConfig, stats: Stats) -> None:
        self._store = store
        self._config = config
        self._stats = stats
        self._find_tally = stats.find_put
        self.parking = Parking(config)
        self.on_timer: Callable[[dict[str, str], Appended], None] = lambda properties, appended: None
        self._unflushed: deque[tuple[asyncio.Future[Frame], Frame, float]] = deque()
        self._watching = False
        self.is_synchronous = config.flush_disk_type is FlushDiskType.SYNC_FLUSH

    def one(self, message: Message, now_ms: int) -> Appended:
        """Stores a message. Raises RequestFailed with the code and remark that clients know."""
        is_delayed = not DELAY_PROPERTIES.isdisjoint(message.properties)
        if is_delayed:
            self.parking.park(message, now_ms)
        appended = self.copy(message, now_ms)
        if is_delayed and message.topic == TIMER_TOPIC:
            self.on_timer(message.properties, appended)
        return appended

    def copy(self, message: Message, now_ms: int) -> Appended:
        """Stores what has waited already, or never does. Raises RequestFailed, like `one`."""
        try:
            appended = self._store.append(message, now_ms)
        except StoreError as e:
            raise self._refusal(e, message.topic) from e
        self._count(message.topic, 1, appended.size_bytes)
        return appended

    def batch(self, message: Message, parts: list[BatchPart], now_ms: int) -> Appended:
        """Stores messages that have a queue in common behind each other, all of them or none."""
        try:
            appended = self._store.append_batch(message, parts, now_ms)
        except StoreError as e:
            raise self._refusal(e, message.topic) from e
        self._count(message.topic, len(parts), appended.size_bytes)
        return appended

    def _count(self, topic: str, count: int, size_bytes: int) -> None:
        tally = self._find_tally(topic)
        if tally is None:
            self._stats.put(topic, count, size_bytes)
        else:
            add_to(tally, count, size_bytes)

    def must_wait(self, properties: dict[str, str]) -> bool:
        """Whether the acknowledgement of a message has to wait for the disk; a sender may waive that."""
        return self.is_synchronous and properties.get(PROPERTY_WAIT_STORE_OK) != "false"

    def when_flushed(self, last: Appended, reply: Frame) -> asyncio.Future[Frame]:
        """`reply` after the disk has everything up to `last`; another code if the disk is late or broken."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Frame] = loop.create_future()
        began_s = loop.time()
        self._store.when_flushed(last.log_end_offset, partial(self._flushed, answer, reply, began_s))
        unflushed = self._unflushed
        while unflushed and unflushed[0][0].done():
            unflushed.popleft()
        unflushed.append((answer, reply, began_s))
        if not self._watching:
            self._watching = True
            loop.call_later(self._config.sync_flush_timeout / 1000, self._answer_late_ones, loop)
        return answer

    def _flushed(self, answer: asyncio.Future[Frame], reply: Frame, began_s: float, failure: str | None) -> None:
        if answer.done():
            return  # it was late, or the connection is gone
        if failure is None:
            self._answer(answer, reply, began_s)
        else:
            answer.set_exception(self._refusal(NotWriteable(failure), ""))

    def _answer(self, answer: asyncio.Future[Frame], reply: Frame, began_s: float) -> None:
        self._stats.put_took(int((answer.get_loop().time() - began_s) * 1000))
        answer.set_result(reply)

    def _answer_late_ones(self, loop: asyncio.AbstractEventLoop) -> None:
        """One timer for all that wait: they are in the order of their deadlines."""
        timeout_s = self._config.sync_flush_timeout / 1000
        unflushed = self._unflushed
        while unflushed:
            answer, reply, began_s = unflushed[0]
            if not answer.done():
                if began_s + timeout_s > loop.time():
                    loop.call_at(began_s + timeout_s, self._answer_late_ones, loop)
                    return
                reply.code = ResponseCode.FLUSH_DISK_TIMEOUT
                self._answer(answer, reply, began_s)
            unflushed.popleft()
        self._watching = False

    def _refusal(self, error: StoreError, topic: str) -> RequestFailed:
        self._stats.put_failed()
        if isinstance(error, MessageTooLarge | PropertiesTooLarge):
            return RequestFailed(
                ResponseCode.MESSAGE_ILLEGAL,
                "the message is illegal, maybe msg body or properties length not matched. msg body length limit "
                f"{self._config.max_message_size}B, msg properties length limit 32KB.",
            )
        # A queue of the broker's own that fails concerns every message that would go through it: none is at fault.
        if isinstance(error, NotWriteable) or is_internal(topic):
            return RequestFailed(ResponseCode.SERVICE_NOT_AVAILABLE, f"service not available now: {error}")
        return RequestFailed(ResponseCode.SYSTEM_ERROR, str(error))
