"""Delayed messages: each of the 18 levels has its queue in SCHEDULE_TOPIC_XXXX, in the order of due times.

A queue entry's tag field holds the time at which its message is due. Progress, the next offset of each level, is kept
in delayOffset.json. After a crash the messages since the last save are delivered again, as Apache's broker does: at
least once, never lost.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from skylark.broker.put import Put
from skylark.broker.topics import SCHEDULE_TOPIC
from skylark.net.connection import RequestFailed
from skylark.store import Store
from skylark.store.api import parse_delay_levels
from skylark.store.tables import DelayOffsetTable, load, save
from skylark.wire.message import (
    PROPERTY_DELAY_LEVEL,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_WAIT_STORE_OK,
    Message,
    StoredMessage,
)

log = logging.getLogger(__name__)

_MOST_A_TURN: Final = 500
_POLL_MS: Final = 100


class Delayed:
    """Moves due messages to their topics."""

    def __init__(self, store: Store, put: Put, levels: str, path: Path) -> None:
        self._store = store
        self._put = put
        self._delays_ms = parse_delay_levels(levels)
        self._path = path
        self.table = load(path, DelayOffsetTable) or DelayOffsetTable()
        self._saved = dict(self.table.offset_table)
        self._delivered_to = 0  # the log offset behind the last delivered message
        for level in range(1, len(self._delays_ms) + 1):
            self._correct(level)

    def deliver(self, now_ms: int) -> int:
        """Delivers what is due. Returns after how many milliseconds to call it again: 0 if more is due already, since a
        turn is bounded so that it does not hold up the broker."""
        return min(self._deliver_level(level, delay_ms, now_ms) for level, delay_ms in enumerate(self._delays_ms, 1))

    def save(self, now_ms: int) -> None:
        """Writes delayOffset.json if anything has changed, but never ahead of the log: after a power failure the table
        must not claim the delivery of a message that the disk does not have.
        """
        if self.table.offset_table != self._saved and self._store.flushed_offset >= self._delivered_to:
            self.table.data_version.next_version(now_ms)
            save(self._path, self.table)
            self._saved = dict(self.table.offset_table)

    def _deliver_level(self, level: int, delay_ms: int, now_ms: int) -> int:
        offset = self.table.offset_table.get(level, 0)
        queue_id = level - 1
        end = min(self._store.max_offset(SCHEDULE_TOPIC, queue_id), offset + _MOST_A_TURN)
        while offset < end:
            entry = self._store.entry(SCHEDULE_TOPIC, queue_id, offset)
            if entry is None:
                self._correct(level)
                return _POLL_MS
            # A due time further away than the level allows shows that the clock was set back: deliver now.
            if now_ms < entry.tag_code <= now_ms + delay_ms:
                return min(entry.tag_code - now_ms, _POLL_MS)
            message = self._store.message_at(entry.log_offset)
            if message is not None:
                try:
                    self._delivered_to = self._put.one(_due(message), now_ms).log_end_offset
                except RequestFailed as e:
                    log.warning("delayed messages of level %d wait: %s", level, e)
                    return _POLL_MS
            offset += 1
            self.table.offset_table[level] = offset
        return 0 if offset < self._store.max_offset(SCHEDULE_TOPIC, queue_id) else _POLL_MS

    def _correct(self, level: int) -> None:
        """An offset outside the queue (files deleted, an old table) moves to its nearest end."""
        offset = self.table.offset_table.get(level)
        if offset is None:
            return
        low = self._store.min_offset(SCHEDULE_TOPIC, level - 1)
        high = self._store.max_offset(SCHEDULE_TOPIC, level - 1)
        right = min(max(offset, low), high)
        if right != offset:
            log.warning(
                "delay level %d: offset %d is outside %d to %d, going on at %d", level, offset, low, high, right
            )
            self.table.offset_table[level] = right


def _due(stored: StoredMessage) -> Message:
    properties = dict(stored.properties)
    for name in (PROPERTY_DELAY_LEVEL, PROPERTY_TIMER_DELIVER_MS, PROPERTY_TIMER_DELAY_SEC):
        properties.pop(name, None)
    properties[PROPERTY_WAIT_STORE_OK] = "false"
    return Message(
        properties.get(PROPERTY_REAL_TOPIC, stored.topic),
        int(properties.get(PROPERTY_REAL_QUEUE_ID, "0")),
        stored.body,
        properties,
        stored.flag,
        stored.sys_flag,
        stored.born_timestamp_ms,
        stored.born_host,
        stored.reconsume_times,
    )
