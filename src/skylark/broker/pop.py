"""POP_MESSAGE: hands messages out for a while. Who does not acknowledge one in time loses it to somebody else.

A pop reads the queues from the group's offsets on, writes a check point for what it found in each queue (see
`checkpoints.py`), moves the offsets behind it and answers; all that in one step, so no two pops get the same message.
If there are many queues, it answers with what some of them have, and looks at more only while it found nothing
(`walks.py`). The group's retry topic is looked at first in a share of the pops, else last. One that found nothing waits
for an arrival, and looks again when its client takes an answer: until then the messages are anybody's.

A pop in order leaves the offset where it is and blocks the queue instead (`orders.py`).
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from struct import unpack_from
from typing import Final

from skylark.broker.access import Access
from skylark.broker.arrivals import Waiter, too_late
from skylark.broker.checkpoints import CheckPoints
from skylark.broker.config import BrokerConfig
from skylark.broker.filters import BadExpression, Filter, message_filter, parse_subscription
from skylark.broker.groups import Asker
from skylark.broker.offsets import UNKNOWN, Offsets
from skylark.broker.orders import Orders
from skylark.broker.polling import PopWaiters
from skylark.broker.put import Put
from skylark.broker.stats import Stats
from skylark.broker.topics import RETRY_PREFIX, Topics
from skylark.broker.waiting_filters import WaitingFilters
from skylark.broker.walks import FILTERED_PER_TURN, QUEUES_PER_TURN, Place, Walk
from skylark.net.connection import Handler, RequestFailed
from skylark.net.suspended import Suspended
from skylark.store import Appended, ReadResult, ReadStatus, Store
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import MAX_RECORDS_BYTES, Frame
from skylark.wire.message import PROPERTY_POP_CK, QUEUE_OFFSET_POSITION
from skylark.wire.numbers import java_count
from skylark.wire.pop import (
    FROM_MIN,
    MAX_POP_MESSAGES,
    ORDER_REVIVE_QUEUE,
    CheckPoint,
    PopMessage,
    PopMessageResponse,
    ReceiptHandle,
    encode_offsets,
    encode_start_offset,
    pop_retry_topic,
    topic_kind,
)
from skylark.wire.records import decode_record, encode_record
from skylark.wire.tables import SubscriptionGroupConfig, TopicConfig
from skylark.wire.typed import decode_header, encode_header

MAX_ATTEMPT_ID_LENGTH: Final = 128
"""It is kept for as long as the queue is blocked, and written with each table."""
_LATE_MS: Final = 500
_TOO_SHORT_TO_WAIT_MS: Final = 50
_CORRECTS = frozenset((ReadStatus.OFFSET_TOO_SMALL, ReadStatus.OFFSET_OVERFLOW_BADLY, ReadStatus.OFFSET_FOUND_NULL))
_PASSES = frozenset(
    (
        ReadStatus.NO_MATCHED_MESSAGE,
        ReadStatus.OFFSET_FOUND_NULL,
        ReadStatus.MESSAGE_WAS_REMOVING,
        ReadStatus.NO_MATCHED_LOGIC_QUEUE,
    )
)


class _Asked:
    """A pop that passed the checks."""

    def __init__(
        self,
        header: PopMessage,
        topic: TopicConfig,
        group: SubscriptionGroupConfig,
        filter: Filter,
        connection: Asker,
        expires_ms: int,
    ) -> None:
        self.header = header
        self.topic = topic
        self.group = group
        self.filter = filter
        self.connection = connection
        self.expires_ms = expires_ms


class _Found:
    """What a pop has gathered so far."""

    def __init__(self, pop_time_ms: int, revive_queue: int) -> None:
        self.pop_time_ms = pop_time_ms
        self.revive_queue = revive_queue
        self.records: list[bytes] = []
        self.size_bytes = 0
        self.start_offsets: list[str] = []
        self.offsets: list[str] = []
        self.order_counts: list[str] = []
        self.rest = 0
        self.blocked_until_ms = 0
        """When the first of the blocked queues is free again; 0 if there are none."""
        self.last: Appended | None = None
        self.refusal: RequestFailed | None = None


class Pops:
    def __init__(
        self,
        config: BrokerConfig,
        store: Store,
        put: Put,
        topics: Topics,
        access: Access,
        offsets: Offsets,
        orders: Orders,
        check_points: CheckPoints,
        waiters: PopWaiters,
        stats: Stats,
        clock: Callable[[], int],
    ) -> None:
        self._config = config
        self._store = store
        self._put = put
        self._topics = topics
        self._access = access
        self._offsets = offsets
        self._orders = orders
        self._check_points = check_points
        self._waiters = waiters
        self._stats = stats
        self._clock = clock
        self._waiting_filters = WaitingFilters()

    def handlers(self) -> dict[int, Handler]:
        return {RequestCode.POP_MESSAGE: self.pop}

    def pop(self, request: Frame, connection: Asker) -> Frame | Awaitable[Frame | None]:
        header = decode_header(PopMessage, request)
        now_ms = self._clock()
        born_ms = header.born_time or now_ms
        if now_ms - born_ms - header.poll_time > _LATE_MS:
            return self._late(request)
        return self._take_or_wait(request, self._check(header, connection, born_ms + header.poll_time), now_ms)

    def _late(self, request: Frame) -> Frame:
        remark = f"the broker[{self._config.broker_ip1}] pop message is timeout too much"
        return request.reply(ResponseCode.POLLING_TIMEOUT, remark, encode_header(PopMessageResponse(0, 0, 0, 0)))

    def _go_on(self, request: Frame, asked: _Asked) -> Frame | Awaitable[Frame | None]:
        """After an arrival. The client, which has to take the answer first, may have given up meanwhile, or an operator
        have stopped the group.
        """
        now_ms = self._clock()
        if now_ms - asked.expires_ms > _LATE_MS:
            return self._late(request)
        asked.topic, asked.group = self._admit(asked.header, asked.connection)
        return self._take_or_wait(request, asked, now_ms)

    def _take_or_wait(self, request: Frame, asked: _Asked, now_ms: int) -> Frame | Awaitable[Frame | None]:
        is_order = bool(asked.header.order)
        found = _Found(now_ms, ORDER_REVIVE_QUEUE if is_order else self._check_points.next_revive_queue())
        filtered = asked.filter.accepts is not None
        queues_per_turn = FILTERED_PER_TURN if filtered else QUEUES_PER_TURN
        walk = Walk(self._places(asked, found), asked.connection.peer[0], queues_per_turn)
        return self._walk_on(request, asked, found, walk)

    def _next_turn(self, request: Frame, asked: _Asked, found: _Found, walk: Walk) -> Frame | Awaitable[Frame | None]:
        found.pop_time_ms = self._clock()
        try:
            self._admit(asked.header, asked.connection)
        except RequestFailed:
            walk.end()
            raise
        return self._walk_on(request, asked, found, walk)

    def _walk_on(self, request: Frame, asked: _Asked, found: _Found, walk: Walk) -> Frame | Awaitable[Frame | None]:
        if self._waiters.closed:
            raise too_late()
        header = asked.header
        for topic, queue_id in walk.turn():
            try:
                self._look_at_queue(asked, found, topic, queue_id)
            except RequestFailed as e:  # what the other queues gave must nevertheless reach the consumer
                found.refusal = e
        if found.records:
            walk.end()
            return self._answer(request, asked, found, is_all=walk.is_over)
        if not walk.is_over:
            place = (header.topic, header.consumer_group, header.queue_id)
            if header.poll_time > 0 and not walk.watch(self._waiters, *place, asked.filter.wants):
                return self._nothing(request, asked, found, ResponseCode.POLLING_FULL)
            return Suspended(walk.next_turn(), lambda: self._next_turn(request, asked, found, walk))
        has_arrived = walk.end()
        if found.refusal is not None:
            raise found.refusal
        if has_arrived:
            return Suspended(walk.next_turn(), lambda: self._go_on(request, asked))
        waiter = self._suspend(asked, found)
        if not isinstance(waiter, Waiter):
            return self._nothing(request, asked, found, waiter)
        return Suspended(
            waiter.arrived,
            lambda: self._go_on(request, asked),
            lambda: self._waiters.wake(header.topic, header.consumer_group, header.queue_id),
        )

    def _suspend(self, asked: _Asked, found: _Found) -> Waiter | int:
        """Registers for the next arrival, or says with which code the pop ends."""
        header, now_ms = asked.header, found.pop_time_ms
        left_ms = asked.expires_ms - now_ms
        if header.poll_time <= 0 or left_ms < _TOO_SHORT_TO_WAIT_MS:
            return ResponseCode.POLLING_TIMEOUT
        if found.blocked_until_ms:  # nothing arrives when a message's time has passed
            left_ms = min(left_ms, max(1, found.blocked_until_ms - now_ms))
        held = self._waiting_filters.take(asked.filter, asked.connection.peer[0])
        asked.filter = held.filter
        waiter = self._waiters.wait(
            header.topic, header.consumer_group, header.queue_id, asked.filter.wants, left_ms / 1000
        )
        if waiter is None:
            self._waiting_filters.give_back(held)
            return ResponseCode.POLLING_FULL
        waiter.arrived.add_done_callback(partial(self._waiting_filters.give_back, held))
        return waiter

    # The answer.

    def _answer(self, request: Frame, asked: _Asked, found: _Found, *, is_all: bool) -> Frame | Awaitable[Frame | None]:
        """`is_all` says that every queue was looked at."""
        header = asked.header
        if found.rest > 0 or not is_all:
            self._waiters.wake(header.topic, header.consumer_group, header.queue_id)
        fields = encode_header(self._header(asked, found))
        reply = request.reply(ResponseCode.SUCCESS, ReadStatus.FOUND.name, fields, b"".join(found.records))
        if self._put.is_synchronous and found.last is not None:
            flushed = self._put.when_flushed(found.last, reply)
            return Suspended(flushed, flushed.result, held_bytes=len(reply.body))
        return reply

    def _nothing(self, request: Frame, asked: _Asked, found: _Found, code: int) -> Frame:
        self._stats.missed()
        fields = encode_header(self._header(asked, found))
        return request.reply(code, ReadStatus.NO_MESSAGE_IN_QUEUE.name, fields)

    @staticmethod
    def _header(asked: _Asked, found: _Found) -> PopMessageResponse:
        return PopMessageResponse(
            pop_time=found.pop_time_ms,
            invisible_time=asked.header.invisible_time,
            revive_qid=found.revive_queue,
            rest_num=found.rest,
            start_offset_info=";".join(found.start_offsets),
            msg_offset_info=";".join(found.offsets),
            order_count_info=";".join(found.order_counts) if asked.header.order else None,
        )

    # What is there.

    def _places(self, asked: _Asked, found: _Found) -> Iterator[Place]:
        """Where to look; as `found` grows, some of it is left out."""
        header, config = asked.header, self._config
        is_order = bool(header.order)
        chance = random.randrange(100)
        by_priority = _is_by_priority(asked) and chance < _priority_factor(asked.group)
        share = config.pop_from_retry_probability_for_priority if by_priority else config.pop_from_retry_probability
        retry_first = chance < share
        if retry_first and not is_order:
            yield from self._retry_places(asked, by_priority)
        if header.queue_id < 0:
            yield from self._queues_of(asked.topic, by_priority)
        else:
            yield header.topic, header.queue_id
        if not retry_first and not is_order and len(found.records) < header.max_msg_nums:
            yield from self._retry_places(asked, by_priority)

    def _retry_places(self, asked: _Asked, by_priority: bool) -> Iterator[Place]:
        """The group's retry topic of this topic, and the one with the old name while there may be messages in it."""
        header, config = asked.header, self._config
        versions = [config.enable_retry_topic_v2]
        if config.enable_retry_topic_v2 and config.retrieve_message_from_pop_retry_topic_v1:
            versions.append(False)
        for is_v2 in versions:
            topic = self._topics.get(pop_retry_topic(header.topic, header.consumer_group, v2=is_v2))
            if topic is not None:
                yield from self._queues_of(topic, by_priority)

    def _queues_of(self, topic: TopicConfig, by_priority: bool) -> Iterator[Place]:
        """All of them, from any one on unless the first ones come first."""
        count = topic.read_queue_nums
        first = 0 if by_priority or not count else random.randrange(count)
        for step in range(count):
            place = count - 1 - step if self._config.priority_order_asc else step
            yield topic.topic_name, (place + first) % count

    def _look_at_queue(self, asked: _Asked, found: _Found, topic: str, queue_id: int) -> None:
        header = asked.header
        group = header.consumer_group
        offset = self._start(asked, topic, queue_id, found.pop_time_ms)
        if header.order:
            until_ms = self._orders.blocked_until_ms(topic, group, queue_id, header.attempt_id, found.pop_time_ms)
            if until_ms:
                found.blocked_until_ms = min(found.blocked_until_ms or until_ms, until_ms)
                return
            host = asked.connection.peer[0]
            if not self._orders.has_room(topic, group, queue_id, host):
                raise RequestFailed(
                    ResponseCode.SYSTEM_BUSY,
                    f"queue {queue_id} of {topic} can't be popped in order: {self._orders.fullness(host)}",
                )
        room = header.max_msg_nums - len(found.records)
        room_bytes = MAX_RECORDS_BYTES - found.size_bytes
        if room <= 0 or room_bytes <= 0:
            found.rest += self._store.max_offset(topic, queue_id) - offset
            return
        result = self._read(asked, topic, queue_id, offset, room, room_bytes)
        if result.status in _CORRECTS:
            offset = result.next_offset
            self._offsets.commit(group, topic, queue_id, offset, asked.connection)
            result = self._read(asked, topic, queue_id, offset, room, room_bytes)
        if found.records and result.size_bytes > room_bytes:  # a read gives one message, however large it is
            found.rest += result.max_offset - offset
            return
        if result.records:
            self._take(asked, found, topic, queue_id, offset, result)
        elif result.status in _PASSES and result.next_offset >= 0:
            self._offsets.commit(group, topic, queue_id, result.next_offset, asked.connection)
        found.rest += max(0, result.max_offset - result.next_offset)

    def _read(self, asked: _Asked, topic: str, queue_id: int, offset: int, room: int, room_bytes: int) -> ReadResult:
        wanted = asked.filter
        return self._store.read(topic, queue_id, offset, room, room_bytes, wants=wanted.wants, accepts=wanted.accepts)

    def _take(self, asked: _Asked, found: _Found, topic: str, queue_id: int, start: int, result: ReadResult) -> None:
        """The messages are this consumer's from here on."""
        header, group, now_ms = asked.header, asked.header.consumer_group, found.pop_time_ms
        offsets = [unpack_from(">q", record, QUEUE_OFFSET_POSITION)[0] for record in result.records]
        if header.order:
            info, counts = self._orders.popped(
                topic, group, queue_id, header.attempt_id, now_ms, header.invisible_time, offsets
            )
            found.last = self._check_points.in_order(topic, group, queue_id, start, info, now_ms)
            self._orders.put(topic, group, queue_id, info, asked.connection.peer[0])
            self._offsets.commit(group, topic, queue_id, start, asked.connection)
            found.order_counts.append(counts)
        else:
            point = CheckPoint(
                topic=topic,
                group=group,
                queue_id=queue_id,
                start_offset=start,
                pop_time_ms=now_ms,
                invisible_ms=header.invisible_time,
                count=len(offsets),
                diffs=[offset - start for offset in offsets],
                broker_name=self._config.broker_name,
            )
            found.last = self._check_points.popped(point, found.revive_queue, now_ms)
            self._offsets.commit(group, topic, queue_id, result.next_offset, asked.connection)
        found.start_offsets.append(encode_start_offset(topic, queue_id, start))
        found.offsets.append(encode_offsets(topic, queue_id, offsets))
        if topic == header.topic or self._config.pop_response_return_actual_retry_topic:
            found.records += result.records
        else:
            found.records += [self._as_origin(record, asked, found, start) for record in result.records]
        found.size_bytes += result.size_bytes
        self._stats.got(group, topic, result.count, result.size_bytes)

    def _as_origin(self, record: bytes, asked: _Asked, found: _Found, start: int) -> bytes:
        """A record of the retry topic under the topic that was asked for, with its receipt handle, which the client
        could not tell from the topic any more. One that has no room for the handle stays as it is.
        """
        message = decode_record(record, check_crc=False)
        handle = ReceiptHandle(
            start,
            found.pop_time_ms,
            asked.header.invisible_time,
            found.revive_queue,
            topic_kind(message.topic),
            self._config.broker_name,
            message.queue_id,
            message.queue_offset,
        )
        message.properties.setdefault(PROPERTY_POP_CK, handle.encode())
        message.topic = asked.header.topic
        try:
            return encode_record(
                message,
                queue_offset=message.queue_offset,
                log_offset=message.log_offset,
                store_timestamp_ms=message.store_timestamp_ms,
                store_host=message.store_host,
            )
        except ValueError:
            return record

    def _start(self, asked: _Asked, topic: str, queue_id: int, now_ms: int) -> int:
        """Where the group goes on in this queue: as an operator says, as it left off, or as a new group begins."""
        group = asked.header.consumer_group
        reset = self._offsets.take_reset(group, topic, queue_id)
        if reset is not None:
            self._check_points.in_order(topic, group, queue_id, reset, None, now_ms)
            self._orders.put(topic, group, queue_id, None)
            self._offsets.commit(group, topic, queue_id, reset, asked.connection)
            return reset
        offset = self._offsets.query(group, topic, queue_id)
        if offset == UNKNOWN:
            offset = self._first_offset(topic, queue_id, asked.header.init_mode)
            self._offsets.commit(group, topic, queue_id, offset, asked.connection)
        return offset

    def _first_offset(self, topic: str, queue_id: int, init_mode: int) -> int:
        low = self._store.min_offset(topic, queue_id)
        if init_mode == FROM_MIN or topic.startswith(RETRY_PREFIX):
            return low
        if self._config.init_pop_offset_by_check_msg_in_mem and self._store.is_cached(topic, queue_id, 0):
            return 0
        return max(0, self._store.max_offset(topic, queue_id) - 1)

    # Checks.

    def _admit(self, header: PopMessage, connection: Asker) -> tuple[TopicConfig, SubscriptionGroupConfig]:
        """The topic and the group, if that may be read by this now. Raises RequestFailed."""
        self._access.check_broker("pop")
        topic = self._access.readable_topic(header.topic, header.queue_id, connection)
        return topic, self._access.group(header.consumer_group, connection)

    def _check(self, header: PopMessage, connection: Asker, expires_ms: int) -> _Asked:
        self._access.check_broker("pop")
        if header.max_msg_nums > MAX_POP_MESSAGES:
            raise RequestFailed(
                ResponseCode.INVALID_PARAMETER,
                f"the broker[{self._config.broker_ip1}] pop message's num is greater than {MAX_POP_MESSAGES}",
            )
        if header.attempt_id is not None and len(header.attempt_id) > MAX_ATTEMPT_ID_LENGTH:
            raise RequestFailed(
                ResponseCode.INVALID_PARAMETER,
                f"attemptId has {len(header.attempt_id)} characters, and may have {MAX_ATTEMPT_ID_LENGTH}",
            )
        if not self._config.timer_wheel_enable:
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR,
                f"the broker[{self._config.broker_ip1}] pop message is forbidden because timerWheelEnable is false",
            )
        topic, group = self._admit(header, connection)
        return _Asked(header, topic, group, pop_filter(header.topic, header.exp, header.exp_type),
                      connection, expires_ms)  # fmt: skip


def pop_filter(topic: str, expression: str | None, expression_type: str | None) -> Filter:
    """Which messages a pop asks for, all if it does not say. Raises RequestFailed."""
    if not expression:
        return Filter()
    try:
        return message_filter(parse_subscription(topic, expression, expression_type))
    except BadExpression as e:
        raise RequestFailed(
            ResponseCode.SUBSCRIPTION_PARSE_FAILED, f"parse the consumer's subscription failed: {e}"
        ) from None


def _is_by_priority(asked: _Asked) -> bool:
    return asked.topic.attributes.get("message.type") == "PRIORITY" and not asked.header.order


def _priority_factor(group: SubscriptionGroupConfig) -> int:
    """In how many of a hundred pops the queues of high priority come first."""
    factor = java_count(group.attributes.get("priority.factor"))
    return 100 if factor is None else factor
