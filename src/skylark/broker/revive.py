"""Gives popped messages to somebody else when their time has passed and nobody acknowledged them.

The queues of the revive topic are read: check points, which arrive a second before their messages' time is over, and
acknowledgements, which arrive when it is. A check point is settled when everything that was due by then has arrived,
and a moment more, for acknowledgements that come late: its messages without an acknowledgement are copied to the retry
topic of their group and topic, to be popped from there, or to the group's dead letters when they were tried too often.
(Apache's broker retries for ever and leaves the dead letters to its proxy.)

A check point that is due long after the present time arrived by a clock that was ahead, and is settled soon: it must
not hold up those behind it until the clock is there again.

Only what is due within these seconds is in memory, and of a backlog no more than is being settled. A queue's progress
is the offset of the last settled check point, as consumer offset of a system group, in Apache's way. A copy says which
message of which check point it is of, so that after a crash nothing is copied twice (`poprecovery.py`).

A check point arrives when its time is nearly over, so one whose time is far away was not written by a pop. It is
settled soon: what can't be right neither holds up those behind it nor hides messages for ever. A message that is too
large to be copied with what a copy says, or whose retry topic can't be written, goes to the group's dead letters as it
is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Set
from typing import Final

import msgspec

from skylark.broker.config import BrokerConfig
from skylark.broker.following import MOST_BYTES_A_TURN, UNREADABLE, is_final, message_behind, pass_over
from skylark.broker.groups import Groups
from skylark.broker.internal import PROPERTY_LOG_END, PROPERTY_REVIVED
from skylark.broker.offsets import UNKNOWN, Offsets
from skylark.broker.put import Put
from skylark.broker.retry import buried, bury
from skylark.broker.stats import Stats
from skylark.broker.topics import DLQ_PREFIX, MAX_RETRY_NAME_LENGTH, RETRY_PREFIX, Topics
from skylark.net.connection import RequestFailed
from skylark.store import Store
from skylark.wire.bodies import BadBody
from skylark.wire.message import (
    PROPERTY_FIRST_POP_TIME,
    PROPERTY_TIMER_DELIVER_MS,
    Message,
    StoredMessage,
)
from skylark.wire.numbers import INT_MAX, java_long
from skylark.wire.pop import (
    ACK_TAG,
    BATCH_ACK_TAG,
    CHECK_POINT_TAG,
    REVIVE_GROUP,
    CheckPoint,
    decode_ack,
    decode_check_point,
    origin_topic,
    pop_retry_topic,
    revive_topic,
)
from skylark.wire.tables import TopicConfig

log = logging.getLogger(__name__)

PROPERTY_ORIGIN_GROUP: Final = "ORIGIN_GROUP"

GRACE_MS: Final = 1_000
_MOST_AHEAD_MS: Final = 10_000
_MOST_A_TURN: Final = 2_000
"""Records that are read, and messages that are copied below, of all queues together."""
_MOST_COPIES_A_TURN: Final = 500
_MOST_PENDING: Final = 10_000
"""Check points of a queue in memory, while what is due of them is not settled: no more are read then."""
_RETRY_QUEUES: Final = 1

_Key = tuple[str, str, int, int, int]


def copy_mark(point: CheckPoint, offset: int) -> str:
    return f"{point.unique_key}@{offset}"


class _Pending(msgspec.Struct):
    """A check point that was read and is not settled."""

    point: CheckPoint
    revive_offset: int
    due_ms: int
    log_end: int | None = None  # where the log ended at the pop, if it says so
    acked: set[int] = set()


class _ReviveQueue(msgspec.Struct):
    queue_id: int
    read_at: int
    settled: int
    seen_ms: int = 0  # what was due by then has been read
    is_settled: bool = True  # of what has been read, all that is due
    pending: dict[_Key, _Pending] = {}


class Revive:
    def __init__(
        self,
        config: BrokerConfig,
        store: Store,
        put: Put,
        topics: Topics,
        groups: Groups,
        offsets: Offsets,
        stats: Stats,
        delivered_to_ms: Callable[[int], int],
        copied: Set[str] = frozenset(),
    ) -> None:
        """`delivered_to_ms` is the time up to which timers were delivered; `copied` are the marks of copies that were
        made before a crash.
        """
        self._config = config
        self._store = store
        self._put = put
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._stats = stats
        self._delivered_to_ms = delivered_to_ms
        self._copied = copied
        self._topic = revive_topic(config.broker_cluster_name)
        self._queues = [self._opened(queue_id) for queue_id in range(config.revive_queue_num)]
        self._ends = [store.max_offset(self._topic, queue.queue_id) for queue in self._queues]

    @property
    def is_caught_up(self) -> bool:
        """Whether everything from before a crash is settled: until then the marks of copies are needed."""
        if self._copied and all(queue.settled >= end - 1 for queue, end in zip(self._queues, self._ends, strict=True)):
            self._copied = frozenset()
        return not self._copied

    @property
    def pending_count(self) -> int:
        return sum(len(queue.pending) for queue in self._queues)

    def turn(self, now_ms: int) -> bool:
        """Reads what has arrived and settles what can be. True if there is more: a turn is bounded."""
        due_ms = self._delivered_to_ms(now_ms)  # asked first: what was delivered by then is read below
        busy = False
        for queue in self._queues:
            has_room = queue.is_settled or len(queue.pending) < _MOST_PENDING
            is_read = has_room and self._read(queue)
            try:
                queue.is_settled = self._settle(queue, due_ms if is_read else min(queue.seen_ms, due_ms), now_ms)
            except RequestFailed as e:
                log.warning("messages of revive queue %d wait: %s", queue.queue_id, e)
                queue.is_settled = False
                continue
            busy |= not (is_read and queue.is_settled)
        return busy

    def commit(self) -> None:
        """Tells the table of offsets how far the queues are settled, whatever a client made of that meanwhile."""
        for queue in self._queues:
            if self._offsets.query(REVIVE_GROUP, self._topic, queue.queue_id) != queue.settled:
                self._offsets.commit(REVIVE_GROUP, self._topic, queue.queue_id, queue.settled, "revive")

    def _opened(self, queue_id: int) -> _ReviveQueue:
        """A queue as it was left. A table from before a power cut may be ahead of it: what comes next must be read."""
        settled = self._offsets.query(REVIVE_GROUP, self._topic, queue_id)
        end = self._store.max_offset(self._topic, queue_id)
        if settled >= end:
            log.warning("revive queue %d is settled up to %d, but ends at %d", queue_id, settled, end)
            settled = end - 1
            self._offsets.commit(REVIVE_GROUP, self._topic, queue_id, settled, "revive")
        return _ReviveQueue(queue_id, settled + 1, settled)

    # Reading.

    def _read(self, queue: _ReviveQueue) -> bool:
        """Takes in what is there, up to a limit. Whether that was everything."""
        low = self._store.min_offset(self._topic, queue.queue_id)
        end = self._store.max_offset(self._topic, queue.queue_id)
        if not low <= queue.read_at <= end:
            log.warning("revive queue %d has %d to %d: %d is outside of that", queue.queue_id, low, end, queue.read_at)
            queue.read_at = min(max(queue.read_at, low), end)
        stop = min(end, queue.read_at + max(1, _MOST_A_TURN // len(self._queues)))
        while queue.read_at < stop:
            self._take_in(queue, queue.read_at)
            queue.read_at += 1
        return queue.read_at >= end

    def _take_in(self, queue: _ReviveQueue, offset: int) -> None:
        entry = self._store.entry(self._topic, queue.queue_id, offset)
        message = message_behind(self._store, entry, self._topic, queue.queue_id, offset)
        if message is None:
            pass_over(self._topic, queue.queue_id, offset, f"no whole message is where {entry} leads")
            return
        self._note(queue, message)
        due_ms, stored_ms = java_long(message.properties.get(PROPERTY_TIMER_DELIVER_MS)), message.store_timestamp_ms
        queue.seen_ms = max(queue.seen_ms, stored_ms if due_ms is None else min(due_ms, stored_ms))

    def _note(self, queue: _ReviveQueue, message: StoredMessage) -> None:
        try:
            if message.tags == CHECK_POINT_TAG:
                point = decode_check_point(message.body)
                due_ms = min(point.revive_time_ms, message.store_timestamp_ms + _MOST_AHEAD_MS)
                # Timers may deliver one twice around a crash: what was acknowledged in the first one stays so.
                log_end = java_long(message.properties.get(PROPERTY_LOG_END))
                queue.pending.setdefault(point.key, _Pending(point, message.queue_offset, due_ms, log_end))
            elif message.tags in (ACK_TAG, BATCH_ACK_TAG):
                ack = decode_ack(message.body)
                pending = queue.pending.get(ack.key)
                if pending is not None:
                    offsets = [ack.offset] if ack.offsets is msgspec.UNSET else ack.offsets
                    pending.acked.update(offsets)
        except (BadBody, *UNREADABLE) as e:
            pass_over(self._topic, queue.queue_id, message.queue_offset, e)

    # Settling.

    def _settle(self, queue: _ReviveQueue, due_ms: int, now_ms: int) -> bool:
        """Settles what is due, up to a limit: copies hold up the broker. Whether that was everything."""
        settled = UNKNOWN
        left = _MOST_COPIES_A_TURN // len(self._queues)
        until = self._store.log_max_offset + MOST_BYTES_A_TURN // len(self._queues)
        try:
            for key, pending in list(queue.pending.items()):
                pending.due_ms = min(pending.due_ms, now_ms + _MOST_AHEAD_MS)
                if due_ms - pending.due_ms <= GRACE_MS:
                    break
                if left < 0 or self._store.log_max_offset >= until:
                    return False
                left -= len(pending.point.offsets) - len(pending.acked)
                self._revive(pending, now_ms)
                del queue.pending[key]
                settled = pending.revive_offset
            return True
        finally:
            if not queue.pending and queue.read_at > 0:
                settled = queue.read_at - 1
            if settled > queue.settled:
                queue.settled = settled
                self._offsets.commit(REVIVE_GROUP, self._topic, queue.queue_id, settled, "revive")

    def _revive(self, pending: _Pending, now_ms: int) -> None:
        point = pending.point
        origin = self._topics.get(origin_topic(point.topic, point.group))
        if origin is None or point.group not in self._groups:
            log.info("check point %s is passed over: its topic or its group is gone", point.unique_key)
            return
        for offset in point.offsets:
            if offset in pending.acked or copy_mark(point, offset) in self._copied:
                continue
            try:
                self._revive_one(pending, origin, offset, now_ms)
            except UNREADABLE as e:
                pass_over(point.topic, point.queue_id, offset, e)
            pending.acked.add(offset)  # not again, if the next one fails

    def _revive_one(self, pending: _Pending, origin: TopicConfig, offset: int, now_ms: int) -> None:
        point = pending.point
        # Only a deletion tells that it is another message: after a power cut one may stand in the place of a lost one.
        if pending.log_end is not None and pending.log_end < self._store.deleted_offset(point.topic):
            log.info("%s-%d was made anew: message %d is not the popped one", point.topic, point.queue_id, offset)
            return
        entry = self._store.entry(point.topic, point.queue_id, offset)
        original = message_behind(self._store, entry, point.topic, point.queue_id, offset)
        if original is None:
            log.info("%s-%d has no message %d any more to be revived", point.topic, point.queue_id, offset)
            return
        message = self._copy(point, original, origin, offset)
        try:
            appended = self._put.copy(message, now_ms)
        except RequestFailed as e:
            if not is_final(e):
                raise
            self._bury_as_it_is(point, original, origin, offset, e, now_ms)
        else:
            if message.topic.startswith(DLQ_PREFIX):
                buried(message, point.group, origin.topic_name, appended, self._stats)

    def _bury_as_it_is(
        self,
        point: CheckPoint,
        original: StoredMessage,
        origin: TopicConfig,
        offset: int,
        reason: RequestFailed,
        now_ms: int,
    ) -> None:
        message = _again(point, original, dict(original.properties))
        bury(message, point.group, self._topics)
        try:
            appended = self._put.copy(message, now_ms)
        except RequestFailed as e:
            if not is_final(e):
                raise
            pass_over(point.topic, point.queue_id, offset, f"it can't be given out again: {e}")
        else:
            why = f"it can't be tried again: {reason}"
            buried(message, point.group, origin.topic_name, appended, self._stats, why)

    def _copy(self, point: CheckPoint, original: StoredMessage, origin: TopicConfig, offset: int) -> Message:
        properties = dict(original.properties)
        if original.reconsume_times == 0:
            properties.pop(PROPERTY_FIRST_POP_TIME, None)
        properties.setdefault(PROPERTY_FIRST_POP_TIME, str(point.pop_time_ms))
        properties[PROPERTY_ORIGIN_GROUP] = point.group
        properties[PROPERTY_REVIVED] = copy_mark(point, offset)
        message = _again(point, original, properties)
        if not point.topic.startswith(RETRY_PREFIX):
            message.topic = pop_retry_topic(point.topic, point.group, v2=self._config.enable_retry_topic_v2)
        group = self._groups.get(point.group)
        is_spent = group is not None and not point.suspend and original.reconsume_times >= group.retry_max_times
        if is_spent or len(message.topic) > MAX_RETRY_NAME_LENGTH:  # two long names may make one that is too long
            bury(message, point.group, self._topics)
        else:
            self._to_retry_topic(message, point, original, origin)
        return message

    def _to_retry_topic(
        self, message: Message, point: CheckPoint, original: StoredMessage, origin: TopicConfig
    ) -> None:
        queues = origin.write_queue_nums if self._config.use_separate_retry_queue else _RETRY_QUEUES
        topic = self._topics.get(message.topic)
        if topic is None or (self._config.use_separate_retry_queue and topic.write_queue_nums != queues):
            topic = TopicConfig(message.topic, read_queue_nums=queues, write_queue_nums=queues)
            self._topics.put(topic)
            for queue_id in range(queues):
                if self._offsets.query(point.group, message.topic, queue_id) == UNKNOWN:
                    self._offsets.put(point.group, message.topic, queue_id, 0)
        if self._config.use_separate_retry_queue and original.queue_id < topic.write_queue_nums:
            message.queue_id = original.queue_id


def _again(point: CheckPoint, original: StoredMessage, properties: dict[str, str]) -> Message:
    """The message as it is given out once more."""
    return Message(
        point.topic,
        0,
        original.body,
        properties,
        original.flag,
        original.sys_flag,
        original.born_timestamp_ms,
        original.store_host,
        min(original.reconsume_times + (0 if point.suspend else 1), INT_MAX),
    )
