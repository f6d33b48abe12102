"""Delayed messages: each of the 18 levels has its queue in SCHEDULE_TOPIC_XXXX, in the order of due times.

A queue entry's tag field holds the time at which its message is due. Progress, the next offset of each level, is kept
in delayOffset.json. After a crash the messages since the last save are delivered again, as Apache's broker does: at
least once, never lost. It comes with all properties that it waited with, also DELAY and WAIT: applications read these.

One that can't be delivered, since it is damaged, names no topic or is larger than the store takes now, is passed over.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from skylark.broker.following import MOST_BYTES_A_TURN, UNREADABLE, is_final, message_behind, pass_over
from skylark.broker.held import HeldTable
from skylark.broker.internal import is_internal
from skylark.broker.put import Put
from skylark.broker.topics import SCHEDULE_TOPIC, validate_topic
from skylark.net.connection import RequestFailed
from skylark.store import Appended, QueueEntry, Store
from skylark.store.api import parse_delay_levels
from skylark.store.tables import DelayOffsetTable, load, save
from skylark.wire.message import PROPERTY_REAL_QUEUE_ID, PROPERTY_REAL_TOPIC, Message, StoredMessage
from skylark.wire.numbers import java_count

log = logging.getLogger(__name__)

_MOST_A_TURN: Final = 500
_POLL_MS: Final = 100
_OURS: Final = (PROPERTY_REAL_TOPIC, PROPERTY_REAL_QUEUE_ID)


class Delayed:
    """Moves due messages to their topics."""

    def __init__(self, store: Store, put: Put, levels: str, path: Path) -> None:
        self._store = store
        self._put = put
        self._delays_ms = parse_delay_levels(levels)
        self._path = path
        self.table = load(path, DelayOffsetTable) or DelayOffsetTable()
        self._captured = dict(self.table.offset_table)
        self._first = 0  # the level that the next turn begins with
        self.held: HeldTable[DelayOffsetTable] = HeldTable(store, self._write)
        for level in range(1, len(self._delays_ms) + 1):
            self._correct(level)

    def deliver(self, now_ms: int) -> int:
        """Delivers what is due. Returns after how many milliseconds to call it again: 0 if more is due already, since a
        turn, which all levels share, is bounded so that it does not hold up the broker."""
        left, until = _MOST_A_TURN, self._store.log_max_offset + MOST_BYTES_A_TURN
        wait_ms, count = _POLL_MS, len(self._delays_ms)
        for at in range(self._first, self._first + count):
            delivered, level_wait_ms = self._deliver_level(at % count + 1, now_ms, left, until)
            left -= delivered
            wait_ms = min(wait_ms, level_wait_ms)
            if left <= 0 or self._store.log_max_offset >= until:
                self._first = (at + 1) % count  # the others come first now
                return 0
        return wait_ms

    def save(self, now_ms: int) -> None:
        """Writes delayOffset.json if anything has changed, but never ahead of the log: after a power failure the table
        must not claim the delivery of a message that the disk does not have. Raises OSError.
        """
        self.held.save(lambda: self._capture(now_ms))

    def _capture(self, now_ms: int) -> DelayOffsetTable | None:
        if self.table.offset_table == self._captured:
            return None
        self.table.data_version.next_version(now_ms)
        self._captured = dict(self.table.offset_table)
        return DelayOffsetTable(self.table.data_version, self._captured)

    def _write(self, table: DelayOffsetTable) -> None:
        save(self._path, table)

    def _deliver_level(self, level: int, now_ms: int, most: int, until: int) -> tuple[int, int]:
        """Delivers what is due of a level, up to so many messages and to where the log may go; how many those were,
        and after how many milliseconds to look again.
        """
        begin = offset = self.table.offset_table.get(level, 0)
        queue_id, delay_ms = level - 1, self._delays_ms[level - 1]
        end = min(self._store.max_offset(SCHEDULE_TOPIC, queue_id), offset + most)
        while offset < end and self._store.log_max_offset < until:
            entry = self._store.entry(SCHEDULE_TOPIC, queue_id, offset)
            if entry is None and self._correct(level):
                return offset - begin, 0
            # A due time further away than the level allows shows that the clock was set back: deliver now.
            if entry is not None and now_ms < entry.tag_code <= now_ms + delay_ms:
                return offset - begin, min(entry.tag_code - now_ms, _POLL_MS)
            if not self._deliver(queue_id, offset, entry, now_ms):
                return offset - begin, _POLL_MS
            offset += 1
            self.table.offset_table[level] = offset
        return offset - begin, 0 if offset < self._store.max_offset(SCHEDULE_TOPIC, queue_id) else _POLL_MS

    def _deliver(self, queue_id: int, offset: int, entry: QueueEntry | None, now_ms: int) -> bool:
        """Moves one message, unless that can never be; False if the store takes nothing now."""
        stored = message_behind(self._store, entry, SCHEDULE_TOPIC, queue_id, offset)
        try:
            if stored is None:
                pass_over(SCHEDULE_TOPIC, queue_id, offset, f"no whole message is where {entry} leads")
            else:
                self._put_due(_due(stored), now_ms)
        except RequestFailed as e:
            if not is_final(e):
                log.warning("delayed messages of level %d wait: %s", queue_id + 1, e)
                return False
            pass_over(SCHEDULE_TOPIC, queue_id, offset, e)
        except UNREADABLE as e:
            pass_over(SCHEDULE_TOPIC, queue_id, offset, e)
        return True

    def _put_due(self, message: Message, now_ms: int) -> Appended:
        try:
            return self._put.copy(message, now_ms)
        except RequestFailed as e:
            if not is_final(e):
                raise
            # What the broker added may be what there is no room for.
            for name in _OURS:
                message.properties.pop(name, None)
            return self._put.copy(message, now_ms)

    def _correct(self, level: int) -> bool:
        """Moves an offset outside the queue (files deleted, an old table, or none) to its nearest end; if it did so."""
        offset = self.table.offset_table.get(level, 0)
        low = self._store.min_offset(SCHEDULE_TOPIC, level - 1)
        high = self._store.max_offset(SCHEDULE_TOPIC, level - 1)
        right = min(max(offset, low), high)
        if right != offset:
            log.warning(
                "delay level %d: offset %d is outside %d to %d, going on at %d", level, offset, low, high, right
            )
            self.table.offset_table[level] = right
        return right != offset


def _due(stored: StoredMessage) -> Message:
    """The message in its real topic. Raises ValueError if it has none."""
    properties = dict(stored.properties)
    topic = properties.get(PROPERTY_REAL_TOPIC, "")
    queue_id = java_count(properties.get(PROPERTY_REAL_QUEUE_ID, "0"))
    if validate_topic(topic) is not None or is_internal(topic) or queue_id is None:
        raise ValueError(f"it can't go to topic {topic[:300]!r}, queue {properties.get(PROPERTY_REAL_QUEUE_ID)!r:.40}")
    return Message(
        topic,
        queue_id,
        stored.body,
        properties,
        stored.flag,
        stored.sys_flag,
        stored.born_timestamp_ms,
        stored.born_host,
        stored.reconsume_times,
    )
