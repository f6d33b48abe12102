"""PEEK_MESSAGE, NOTIFICATION and POLLING_INFO: looking at what a pop would give, without taking it.

NOTIFICATION is the long poll of clients that pop only when there is something to pop: it says whether there is, and
waits for it.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

from skylark.broker.access import Access
from skylark.broker.arrivals import TagCodes, Waiter
from skylark.broker.config import BrokerConfig
from skylark.broker.offsets import UNKNOWN, Offsets
from skylark.broker.orders import Orders
from skylark.broker.polling import PopWaiters
from skylark.broker.pop import pop_filter
from skylark.broker.stats import Stats
from skylark.broker.topics import Topics
from skylark.net.connection import Connection, Handler, Suspended
from skylark.store import ReadStatus, Store
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import MAX_RECORDS_BYTES, Frame
from skylark.wire.pop import (
    Notification,
    NotificationResponse,
    PeekMessage,
    PollingInfo,
    PollingInfoResponse,
    PopMessageResponse,
    pop_retry_topic,
)
from skylark.wire.tables import TopicConfig
from skylark.wire.typed import decode_header, encode_header

_FILTERED_AT_MOST = 64
_TOO_SHORT_TO_WAIT_MS = 50
_GONE = frozenset((ReadStatus.OFFSET_TOO_SMALL, ReadStatus.OFFSET_OVERFLOW_BADLY))


class Peeks:
    def __init__(
        self,
        config: BrokerConfig,
        store: Store,
        topics: Topics,
        access: Access,
        offsets: Offsets,
        orders: Orders,
        pop_waiters: PopWaiters,
        waiters: PopWaiters,
        stats: Stats,
        clock: Callable[[], int],
    ) -> None:
        """`pop_waiters` are asked about, in `waiters` those wait who want to be notified."""
        self._config = config
        self._store = store
        self._topics = topics
        self._access = access
        self._offsets = offsets
        self._orders = orders
        self._pop_waiters = pop_waiters
        self._waiters = waiters
        self._stats = stats
        self._clock = clock

    def handlers(self) -> dict[int, Handler]:
        return {
            RequestCode.PEEK_MESSAGE: self.peek,
            RequestCode.NOTIFICATION: self.notification,
            RequestCode.POLLING_INFO: self.polling_info,
        }

    def polling_info(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(PollingInfo, request)
        self._check(header, connection)
        count = self._pop_waiters.count(header.topic, header.consumer_group, header.queue_id)
        return request.reply(fields=encode_header(PollingInfoResponse(count)))

    def peek(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(PeekMessage, request)
        topic = self._check(header, connection)
        group = header.consumer_group
        places = [*self._places(header, topic), *self._retry_places(header)]
        records: list[bytes] = []
        room_bytes = MAX_RECORDS_BYTES
        rest = 0
        for name, queue_id in places:
            offset = self._start(name, group, queue_id)
            rest += self._store.max_offset(name, queue_id) - offset
            room = header.max_msg_nums - len(records)
            if room <= 0 or room_bytes <= 0:
                continue
            result = self._store.read(name, queue_id, offset, room, room_bytes)
            if result.status in _GONE:
                result = self._store.read(name, queue_id, result.next_offset, room, room_bytes)
            if not records or result.size_bytes <= room_bytes:  # a read gives one message, however large it is
                records += result.records
                room_bytes -= result.size_bytes
        fields = encode_header(PopMessageResponse(0, 0, 0, rest))
        if not records:
            return request.reply(ResponseCode.PULL_NOT_FOUND, ReadStatus.NO_MESSAGE_IN_QUEUE.name, fields)
        body = b"".join(records)
        self._stats.got(group, header.topic, len(records), len(body))
        return request.reply(ResponseCode.SUCCESS, ReadStatus.FOUND.name, fields, body)

    def notification(self, request: Frame, connection: Connection) -> Frame | Awaitable[Frame | None]:
        header = decode_header(Notification, request)
        topic = self._check(header, connection)
        wants = pop_filter(header.topic, header.exp, header.exp_type).wants if header.exp_type else None
        expires_ms = (header.born_time or self._clock()) + header.poll_time
        return self._tell_or_wait(request, header, topic, wants, expires_ms)

    def _tell_or_wait(
        self, request: Frame, header: Notification, topic: TopicConfig, wants: TagCodes | None, expires_ms: int
    ) -> Frame | Awaitable[Frame | None]:
        now_ms = self._clock()
        if self._has_message(header, topic, wants, now_ms):
            return _told(request, has_message=True)
        waiter = self._suspend(header, wants, expires_ms, now_ms)
        if not isinstance(waiter, Waiter):
            return _told(request, has_message=False, is_full=waiter)
        return Suspended(
            waiter.arrived,
            lambda: self._tell_or_wait(request, header, topic, wants, expires_ms),
            lambda: self._waiters.wake(header.topic, header.consumer_group, header.queue_id),
        )

    def _suspend(self, header: Notification, wants: TagCodes | None, expires_ms: int, now_ms: int) -> Waiter | bool:
        """Registers for the next arrival; else whether that is because too many wait."""
        left_ms = expires_ms - now_ms
        if header.poll_time <= 0 or left_ms < _TOO_SHORT_TO_WAIT_MS or self._waiters.closed:
            return False
        waiter = self._waiters.wait(header.topic, header.consumer_group, header.queue_id, wants, left_ms / 1000)
        return True if waiter is None else waiter

    def _has_message(self, header: Notification, topic: TopicConfig, wants: TagCodes | None, now_ms: int) -> bool:
        for name, queue_id in [*self._places(header, topic), *self._retry_places(header)]:
            if header.order and self._orders.blocked_until_ms(
                header.topic, header.consumer_group, queue_id, header.attempt_id, now_ms
            ):
                continue
            offset = self._start(name, header.consumer_group, queue_id)
            rest = self._store.max_offset(name, queue_id) - offset
            if rest <= 0:
                continue
            if wants is None or name != header.topic or rest >= _FILTERED_AT_MOST:
                return True
            if any(
                (entry := self._store.entry(name, queue_id, offset + step)) is not None and entry.tag_code in wants
                for step in range(rest)
            ):
                return True
        return False

    # Where to look.

    def _places(self, header: PeekMessage | Notification, topic: TopicConfig) -> list[tuple[str, int]]:
        if header.queue_id >= 0:
            return [(header.topic, header.queue_id)]
        first = random.randrange(topic.read_queue_nums) if topic.read_queue_nums > 0 else 0
        return [(header.topic, (first + step) % topic.read_queue_nums) for step in range(topic.read_queue_nums)]

    def _retry_places(self, header: PeekMessage | Notification) -> list[tuple[str, int]]:
        versions = [self._config.enable_retry_topic_v2]
        if self._config.enable_retry_topic_v2 and self._config.retrieve_message_from_pop_retry_topic_v1:
            versions.append(False)
        names = [pop_retry_topic(header.topic, header.consumer_group, v2=is_v2) for is_v2 in versions]
        topics = [topic for name in names if (topic := self._topics.get(name)) is not None]
        return [(topic.topic_name, queue_id) for topic in topics for queue_id in range(topic.read_queue_nums)]

    def _start(self, topic: str, group: str, queue_id: int) -> int:
        offset = self._offsets.query(group, topic, queue_id)
        return self._store.min_offset(topic, queue_id) if offset == UNKNOWN else offset

    def _check(self, header: PeekMessage | Notification | PollingInfo, connection: Connection) -> TopicConfig:
        self._access.check_broker("peeking")
        topic = self._access.readable_topic(header.topic, header.queue_id, connection)
        self._access.group(header.consumer_group)
        return topic


def _told(request: Frame, *, has_message: bool, is_full: bool = False) -> Frame:
    return request.reply(fields=encode_header(NotificationResponse(has_message, is_full)))
