"""Timers: follows the queue of messages that wait for a time of their own, and delivers what is due.

A turn first puts what is new in the queue on the wheel, all of it, and only then reads slots whose moment is over. So a
recall, which is a message of the same queue and is taken only before the moment of its timer, is always on the wheel
before its timer's slot is read. A message that is found too late, since the broker was down, goes through a slot as
well, together with its recall.

A slot is delivered in the order of its queue. When the broker dies meanwhile, it goes on behind what was delivered; the
last message may come twice.

Nothing that a record holds stops those behind it: a message that is no timer, or can't be delivered, is logged and
passed over. Only a store that takes no messages makes timers wait.

The files are opened when there is a first timer: a broker that has none pays nothing. They are opened as well when
timers are switched off: those that wait do not expire.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from skylark.broker.config import BrokerConfig
from skylark.broker.following import MOST_BYTES_A_TURN, UNREADABLE, is_final, pass_over
from skylark.broker.internal import is_internal
from skylark.broker.put import Put
from skylark.broker.topics import validate_topic
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.store import (
    TIMER_TOPIC,
    Appended,
    DueSlot,
    QueueEntry,
    Store,
    StoreError,
    TimerConfig,
    TimerStore,
    TimerUnit,
)
from skylark.store.tables import TimerMetrics, TopicTimers, load, save
from skylark.wire import fastjson
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import (
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_DELETE_KEY,
    PROPERTY_TIMER_DEQUEUE_MS,
    PROPERTY_TIMER_ENQUEUE_MS,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_TIMER_ROLL_TIMES,
    PROPERTY_UNIQUE_KEY,
    BadRecord,
    Message,
    StoredMessage,
)
from skylark.wire.numbers import java_count
from skylark.wire.pop import REVIVE_TOPIC_PREFIX
from skylark.wire.records import decode_record, java_hash

log = logging.getLogger(__name__)

_MOST_A_TURN: Final = 500
_TIME_DIGITS: Final = 14  # enough until the year 5138

NO_TIMERS: Final = {
    "timerReadBehind": "0",
    "timerOffsetBehind": "0",
    "timerCongestNum": "0",
    "timerEnqueueTps": "0.0",
    "timerDequeueTps": "0.0",
}


_topic_hash = lru_cache(maxsize=1024)(java_hash)


def delete_key(topic: str, unique_key: str, config: BrokerConfig) -> str:
    """What a recall names its timer by."""
    return f"{topic}+{unique_key}" if config.append_topic_for_timer_delete_key else unique_key


class Rate(msgspec.Struct):
    """How many a second, over the last whole seconds between two looks at the clock."""

    count: int = 0
    since_ms: int = 0
    per_second: float = 0.0

    def tick(self, now_ms: int) -> None:
        passed_ms = now_ms - self.since_ms
        if not 0 <= passed_ms < 1000:  # the clock may have been set back
            self.per_second = self.count * 1000 / passed_ms if self.since_ms and passed_ms > 0 else 0.0
            self.count, self.since_ms = 0, now_ms


class Timers:
    """Delivers timers; `put.parking` brings them."""

    def __init__(
        self, config: BrokerConfig, store: Store, put: Put, metrics_path: Path, is_topic: Callable[[str], bool]
    ) -> None:
        self._config = config
        self._store = store
        self._put = put
        self._is_topic = is_topic
        self._timers: TimerStore | None = None
        self._late_ms: int | None = None  # the slot of what is found too late, until the queue's end is reached
        self._slot: DueSlot | None = None
        self._recalled: set[str] = set()
        self._recalls: Iterator[int] = iter(())  # of the slot, that are not read yet
        self._metrics_path = metrics_path
        self._metrics = load(metrics_path, TimerMetrics, expendable=True) or TimerMetrics()
        self._saved_counter = self._metrics.data_version.counter
        self._put_rate, self._delivery_rate = Rate(), Rate()
        put.parking.timers_at = self._waiting_at
        put.on_timer = self._came
        store.keep(self._flush_later, self._lowest_needed)

    def handlers(self) -> dict[int, Handler]:
        return {
            RequestCode.GET_TIMER_CHECK_POINT: self._get_check_point,
            RequestCode.GET_TIMER_METRICS: self._get_metrics,
        }

    def turn(self, now_ms: int) -> bool:
        """Puts on the wheel what is new and delivers what is due, so many at the most. True if there is more to do."""
        timers = self._timers or self._open(now_ms)
        if timers is None or not self._config.timer_wheel_enable:
            return False
        timers.advance(now_ms)
        self._put_rate.tick(now_ms)
        self._delivery_rate.tick(now_ms)
        return self._follow(timers, now_ms) or self._deliver_due(timers, now_ms)

    def recover(self, now_ms: int) -> None:
        """Opens the files before anything comes to the log: what they say of records that a power cut took must not
        meet others in their place. Files that can't be opened are tried again with each turn.
        """
        try:
            self._open(now_ms)
        except StoreError as e:
            log.error("timers wait: %s", e)

    def _open(self, now_ms: int) -> TimerStore | None:
        config = self._config
        if not self._store.max_offset(TIMER_TOPIC, 0):
            return None
        self._timers = TimerStore(
            self._store,
            TimerConfig(
                root=Path(config.store_path_root_dir),
                file_bytes=config.mapped_file_size_timer_log,
                precision_ms=self._put.parking.precision_ms,
                window_slots=config.timer_roll_window_slot,
            ),
            now_ms,
        )
        return self._timers

    def _flush_later(self) -> Callable[[], None]:
        return self._timers.flush_later() if self._timers is not None else lambda: None

    def _lowest_needed(self) -> int | None:
        """Where the log must not expire. As long as the files can't be opened, everything in the queue may wait."""
        if self._timers is not None:
            return self._timers.lowest_needed()
        entry = self._store.entry(TIMER_TOPIC, 0, self._store.min_offset(TIMER_TOPIC, 0))
        return entry.log_offset if entry is not None else None

    def delivered_to_ms(self, now_ms: int) -> int:
        """The time up to which everything that was due is delivered."""
        if self._timers is not None:
            return self._timers.read_ms
        return 0 if self._store.max_offset(TIMER_TOPIC, 0) else now_ms

    def clean(self) -> None:
        if self._timers is not None:
            self._timers.clean()

    def close(self) -> None:
        """After the store is closed."""
        if self._timers is not None:
            self._timers.close()

    # --- putting on the wheel -----------------------------------------------------------------------------------------
    def _follow(self, timers: TimerStore, now_ms: int) -> bool:
        """Puts messages of the queue on the wheel. True unless the end is reached, or the wheel is full."""
        end = self._store.max_offset(TIMER_TOPIC, 0)
        # A moment that was noted before the clock was set back is none.
        late_ms = min(self._late_ms or timers.write_ms, timers.write_ms)
        for _ in range(_MOST_A_TURN):
            if timers.queue_offset >= end:
                self._late_ms = None
                return False
            try:
                if not self._follow_one(timers, late_ms, now_ms):
                    return False
            except UNREADABLE as e:
                pass_over(TIMER_TOPIC, 0, timers.queue_offset, repr(e))
                timers.skip()
        self._late_ms = late_ms
        return True

    def _follow_one(self, timers: TimerStore, late_ms: int, now_ms: int) -> bool:
        """Puts the next message of the queue on the wheel, or passes over it; False if the wheel is full."""
        message = self._read(timers.queue_offset)
        if message is None:
            timers.skip()
            return True
        entry = QueueEntry(message.log_offset, message.size_bytes, 0)
        return self._put_on_wheel(timers, message.properties, entry, late_ms, now_ms)

    def _came(self, properties: dict[str, str], appended: Appended) -> None:
        """A timer was just stored: if the queue was followed up to it, there is no need to read it again."""
        timers = self._timers
        is_next = timers is not None and timers.queue_offset == appended.queue_offset and self._late_ms is None
        if timers is None or not is_next or not _is_timer(properties):
            return
        if timers.is_ahead_of(appended.store_timestamp_ms):
            return  # its slot may have been read by a clock that was wrong
        entry = QueueEntry(appended.log_offset, appended.size_bytes, 0)
        try:
            self._put_on_wheel(timers, properties, entry, timers.write_ms, appended.store_timestamp_ms)
        except (StoreError, *UNREADABLE) as e:
            log.warning("a timer is not on the wheel yet: %s", e)

    def _put_on_wheel(
        self, timers: TimerStore, properties: dict[str, str], entry: QueueEntry, late_ms: int, now_ms: int
    ) -> bool:
        topic = properties.get(PROPERTY_REAL_TOPIC, "")
        is_recall = PROPERTY_TIMER_DELETE_KEY in properties
        out_ms = int(properties[PROPERTY_TIMER_OUT_MS])
        if not timers.put(out_ms, late_ms, entry, is_recall=is_recall, topic_hash=_topic_hash(topic)):
            return False
        self._put_rate.count += 1
        self._count(topic, -1 if is_recall else 1, now_ms)
        return True

    def _read(self, offset: int) -> StoredMessage | None:
        """The message at an offset of the queue, if it is a timer. Somebody may have sent anything there."""
        entry = self._store.entry(TIMER_TOPIC, 0, offset)
        record = self._store.record_at(entry.log_offset) if entry is not None else None
        if entry is None or record is None:
            log.error("offset %d of the queue of timers has no message in the log, and is passed over", offset)
            return None
        try:
            message = decode_record(record, check_crc=False)
        except BadRecord as error:
            log.error("the timer at log offset %d is damaged: %s", entry.log_offset, error)
            return None
        if message.topic != TIMER_TOPIC or message.queue_offset != offset or not _is_timer(message.properties):
            log.warning("the message at log offset %d is in the queue of timers, but is none", entry.log_offset)
            return None
        return message

    def _waiting_at(self, slot_ms: int) -> int:
        return self._timers.count_at(slot_ms) if self._timers is not None else 0

    # --- delivering ---------------------------------------------------------------------------------------------------
    def _deliver_due(self, timers: TimerStore, now_ms: int) -> bool:
        left, until = _MOST_A_TURN, self._store.log_max_offset + MOST_BYTES_A_TURN
        while (slot := timers.next_due()) is not None:
            if slot is not self._slot:
                self._slot, self._recalled, self._recalls = slot, set(), iter(slot.recalls)
            left -= self._read_recalls(timers, left, now_ms)
            while slot.done < len(slot.positions):
                if left <= 0 or self._store.log_max_offset >= until:
                    return True
                left -= 1
                try:
                    timers.delivered(self._deliver(timers, slot.positions[slot.done], now_ms))
                except RequestFailed as e:
                    log.warning("timers wait: %s", e)
                    return False
                except UNREADABLE as e:
                    log.error("the timer at %d of the timer log is dropped: %r", slot.positions[slot.done], e)
                    timers.delivered(self._store.log_max_offset)
            if left <= 0:
                return True  # recalls may be left: of what did not come, which is counted
            timers.finish_slot()
        self._slot = None
        return timers.is_behind

    def _read_recalls(self, timers: TimerStore, most: int, now_ms: int) -> int:
        """Notes what is recalled in the slot, up to so many; how many those were."""
        count = 0
        for position in islice(self._recalls, most):
            count += 1
            unit = timers.unit(position)
            message = self._store.message_at(unit.log_offset) if unit is not None else None
            if message is not None and PROPERTY_TIMER_DELETE_KEY in message.properties:
                self._recalled.add(message.properties[PROPERTY_TIMER_DELETE_KEY])
                self._count(message.properties.get(PROPERTY_REAL_TOPIC, ""), 1, now_ms)
        return count

    def _deliver(self, timers: TimerStore, position: int, now_ms: int) -> int:
        """Delivers one timer, unless it was recalled; the end of the log after it. Raises RequestFailed."""
        unit = timers.unit(position)
        message = self._store.message_at(unit.log_offset) if unit is not None else None
        if unit is None or message is None or message.topic != TIMER_TOPIC:
            log.error("a timer is lost: the log does not have its message any more; it was put at %d", position)
            return self._store.log_max_offset
        properties = message.properties
        topic = properties.get(PROPERTY_REAL_TOPIC, "")
        self._count(topic, -1, now_ms)
        if delete_key(topic, properties.get(PROPERTY_UNIQUE_KEY, ""), self._config) in self._recalled:
            return self._store.log_max_offset
        try:
            appended = self._put_copy(message, unit, now_ms)
        except RequestFailed:
            self._count(topic, 1, now_ms)
            raise
        if appended is None:
            return self._store.log_max_offset
        self._delivery_rate.count += 1
        return appended.log_end_offset

    def _put_copy(self, message: StoredMessage, unit: TimerUnit, now_ms: int) -> Appended | None:
        """Puts a message where it goes from its slot; None if it can go nowhere. Raises RequestFailed."""
        times = {PROPERTY_TIMER_ENQUEUE_MS: str(unit.write_ms), PROPERTY_TIMER_DEQUEUE_MS: str(now_ms)}
        # With little room left for properties the message goes without what only tells of its way.
        for told in (times, {}):
            due = _again(message, told) if unit.must_roll else _due(message, told)
            if due is None:
                log.error("the timer at log offset %d can't be delivered: no such topic or queue", message.log_offset)
                return None
            try:
                return self._put.one(due, now_ms)
            except RequestFailed as e:
                if not is_final(e):
                    raise
                illegal = e
        log.error("the timer at log offset %d can't be delivered, and is dropped: %s", message.log_offset, illegal)
        return None

    # --- what there is to know ----------------------------------------------------------------------------------------
    def _count(self, topic: str, change: int, now_ms: int) -> None:
        counts = self._metrics.timing_count
        entry = counts.get(topic)
        if entry is None:
            entry = counts[topic] = TopicTimers()
        entry.count += change
        entry.timestamp_ms = now_ms
        self._metrics.data_version.next_version(now_ms)

    def save(self) -> None:
        """Writes timermetrics if it changed, without topics that are gone. Raises OSError."""
        counter = self._metrics.data_version.counter
        if counter != self._saved_counter:
            counts = self._metrics.timing_count
            for topic in [topic for topic in counts if not self._is_topic(topic)]:
                del counts[topic]
            save(self._metrics_path, self._metrics)
            self._saved_counter = counter

    def info(self, now_ms: int) -> dict[str, str]:
        """For the broker's runtime info."""
        timers = self._timers
        if timers is None:
            return NO_TIMERS
        return {
            "timerReadBehind": str(max(now_ms - timers.read_ms, 0) // 1000),
            "timerOffsetBehind": str(self._store.max_offset(TIMER_TOPIC, 0) - timers.queue_offset),
            "timerCongestNum": str(max(timers.pending, 0)),
            "timerEnqueueTps": f"{self._put_rate.per_second:.1f}",
            "timerDequeueTps": f"{self._delivery_rate.per_second:.1f}",
        }

    def _get_check_point(self, request: Frame, connection: Connection) -> Frame:
        if not self._config.timer_wheel_enable:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, "The checkpoint is null")
        return request.reply(body=self._timers.check_point() if self._timers is not None else bytes(56))

    def _get_metrics(self, request: Frame, connection: Connection) -> Frame:
        if not self._config.timer_wheel_enable:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, "The timer message store is null")
        return request.reply(body=fastjson.dumps(self._metrics))


def _is_timer(properties: dict[str, str]) -> bool:
    out_ms = properties.get(PROPERTY_TIMER_OUT_MS, "")
    return out_ms.isdecimal() and out_ms.isascii() and len(out_ms) <= _TIME_DIGITS


def _due(stored: StoredMessage, told: dict[str, str]) -> Message | None:
    """The message in its real topic; None if it has none."""
    properties = stored.properties
    topic = properties.get(PROPERTY_REAL_TOPIC, "")
    queue_id = java_count(properties.get(PROPERTY_REAL_QUEUE_ID))
    if validate_topic(topic) is not None or queue_id is None or PROPERTY_TIMER_DELETE_KEY in properties:
        return None
    if is_internal(topic) and not topic.startswith(REVIVE_TOPIC_PREFIX):
        return None  # no timer of the broker's goes there, and some would come back here again and again
    return _copy(stored, topic, queue_id, told)


def _again(stored: StoredMessage, told: dict[str, str]) -> Message:
    """The message as it is put into the queue of timers once more."""
    rolled = java_count(stored.properties.get(PROPERTY_TIMER_ROLL_TIMES)) or 0
    return _copy(stored, TIMER_TOPIC, 0, told and {**told, PROPERTY_TIMER_ROLL_TIMES: str(rolled + 1)})


def _copy(stored: StoredMessage, topic: str, queue_id: int, told: dict[str, str]) -> Message:
    """The message elsewhere, with all its properties: those that say where it waited stay, as with Apache's broker."""
    return Message(
        topic,
        queue_id,
        stored.body,
        {**stored.properties, **told},
        stored.flag,
        stored.sys_flag,
        stored.born_timestamp_ms,
        stored.born_host,
        stored.reconsume_times,
    )
