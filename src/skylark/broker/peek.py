"""PEEK_MESSAGE, NOTIFICATION and POLLING_INFO: looking at what a pop would give, without taking it.

NOTIFICATION is the long poll of clients that pop only when there is something to pop: it says whether there is, and
waits for it.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator

import msgspec

from skylark.broker.access import Access
from skylark.broker.arrivals import TagCodes, too_late
from skylark.broker.config import BrokerConfig
from skylark.broker.offsets import UNKNOWN, Offsets
from skylark.broker.orders import Orders
from skylark.broker.polling import PopWaiters
from skylark.broker.pop import pop_filter
from skylark.broker.stats import Stats
from skylark.broker.topics import Topics
from skylark.broker.walks import Place, Walk
from skylark.net.connection import Connection, Handler
from skylark.net.suspended import Suspended
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


class _Question(msgspec.Struct):
    """A request to be told of a message, which passed the checks."""

    request: Frame
    header: Notification
    topic: TopicConfig
    wants: TagCodes | None
    expires_ms: int
    connection: Connection

    def told(self, *, has_message: bool, is_full: bool = False) -> Frame:
        return self.request.reply(fields=encode_header(NotificationResponse(has_message, is_full)))


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

    def peek(self, request: Frame, connection: Connection) -> Frame | Awaitable[Frame | None]:
        header = decode_header(PeekMessage, request)
        topic = self._check(header, connection)
        return self._peek_on(request, header, Walk(self._places(header, topic), connection.peer[0]), 0)

    def _peek_on(self, request: Frame, header: PeekMessage, walk: Walk, rest: int) -> Frame | Awaitable[Frame | None]:
        """`rest` counts what is in the queues so far."""
        group = header.consumer_group
        records: list[bytes] = []
        room_bytes = MAX_RECORDS_BYTES
        for name, queue_id in walk.turn():
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
        if not records and not walk.is_over:
            return Suspended(walk.next_turn(), lambda: self._peek_on(request, header, walk, rest))
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
        return self._tell_or_wait(_Question(request, header, topic, wants, expires_ms, connection))

    def _go_on(self, asked: _Question) -> Frame | Awaitable[Frame | None]:
        """After an arrival; an operator may have stopped the group meanwhile."""
        asked.topic = self._check(asked.header, asked.connection)
        return self._tell_or_wait(asked)

    def _tell_or_wait(self, asked: _Question) -> Frame | Awaitable[Frame | None]:
        return self._walk_on(asked, Walk(self._places(asked.header, asked.topic), asked.connection.peer[0]))

    def _walk_on(self, asked: _Question, walk: Walk) -> Frame | Awaitable[Frame | None]:
        if self._waiters.closed:
            raise too_late()
        header, now_ms = asked.header, self._clock()
        place = (header.topic, header.consumer_group, header.queue_id)
        if any(self._has_message(asked, name, queue_id, now_ms) for name, queue_id in walk.turn()):
            walk.end()
            return asked.told(has_message=True)
        if not walk.is_over:
            if header.poll_time > 0 and not walk.watch(self._waiters, *place, asked.wants):
                return asked.told(has_message=False, is_full=True)
            return Suspended(walk.next_turn(), lambda: self._walk_on(asked, walk))
        if walk.end() and now_ms < asked.expires_ms:
            return Suspended(walk.next_turn(), lambda: self._go_on(asked))
        left_ms = asked.expires_ms - now_ms
        if header.poll_time <= 0 or left_ms < _TOO_SHORT_TO_WAIT_MS:
            return asked.told(has_message=False)
        waiter = self._waiters.wait(*place, asked.wants, left_ms / 1000)
        if waiter is None:
            return asked.told(has_message=False, is_full=True)
        return Suspended(waiter.arrived, lambda: self._go_on(asked), lambda: self._waiters.wake(*place))

    def _has_message(self, asked: _Question, name: str, queue_id: int, now_ms: int) -> bool:
        header, wants = asked.header, asked.wants
        if header.order and self._orders.blocked_until_ms(
            header.topic, header.consumer_group, queue_id, header.attempt_id, now_ms
        ):
            return False
        offset = self._start(name, header.consumer_group, queue_id)
        rest = self._store.max_offset(name, queue_id) - offset
        if rest <= 0:
            return False
        if wants is None or name != header.topic or rest >= _FILTERED_AT_MOST:
            return True
        return any(
            (entry := self._store.entry(name, queue_id, offset + step)) is not None and entry.tag_code in wants
            for step in range(rest)
        )

    # Where to look.

    def _places(self, header: PeekMessage | Notification, topic: TopicConfig) -> Iterator[Place]:
        """The topic's queues, from any one on, and those of the group's retry topics."""
        if header.queue_id >= 0:
            yield header.topic, header.queue_id
        else:
            first = random.randrange(topic.read_queue_nums) if topic.read_queue_nums > 0 else 0
            for step in range(topic.read_queue_nums):
                yield header.topic, (first + step) % topic.read_queue_nums
        versions = [self._config.enable_retry_topic_v2]
        if self._config.enable_retry_topic_v2 and self._config.retrieve_message_from_pop_retry_topic_v1:
            versions.append(False)
        for is_v2 in versions:
            retries = self._topics.get(pop_retry_topic(header.topic, header.consumer_group, v2=is_v2))
            if retries is not None:
                yield from ((retries.topic_name, queue_id) for queue_id in range(retries.read_queue_nums))

    def _start(self, topic: str, group: str, queue_id: int) -> int:
        offset = self._offsets.query(group, topic, queue_id)
        return self._store.min_offset(topic, queue_id) if offset == UNKNOWN else offset

    def _check(self, header: PeekMessage | Notification | PollingInfo, connection: Connection) -> TopicConfig:
        self._access.check_broker("peeking")
        topic = self._access.readable_topic(header.topic, header.queue_id, connection)
        self._access.group(header.consumer_group, connection)
        return topic
