"""Reads of a queue: a run of messages from an offset on, and offsets by time.

The outcomes, the corrected next offset and the limits are those of Apache's `DefaultMessageStore.getMessage`, which
clients rely on: up to 32 messages or 256 KiB when the messages are thought to be in memory, 8 or 64 KiB when they lie
so far back that they are read from disk; at most 800 entries (or the asked count) looked at, none beyond the queue file
that the read begins in. That an entry leads to the record of its queue and offset is checked: one that does not is told
and stepped over. The body's checksum is not checked, as it is not by Apache: the consumer does, and `Store.message_at`.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from collections.abc import Callable
from typing import Final

from librt.strings import read_i32_be, read_i64_be
from mypy_extensions import i64

from skylark.store.api import ReadResult, ReadStatus, StoreConfig
from skylark.store.commitlog import CommitLog
from skylark.store.consumequeue import BLANK_SIZE, ENTRY_BYTES, ConsumeQueue, QueueTable
from skylark.wire.message import (
    LOG_OFFSET_POSITION,
    QUEUE_ID_POSITION,
    QUEUE_OFFSET_POSITION,
    SYS_BORN_HOST_V6,
    SYS_FLAG_POSITION,
)

log = logging.getLogger(__name__)

MAX_READ_BYTES: Final = 128 << 20
_I32 = struct.Struct(">i")
_I64 = struct.Struct(">q")
_BORN_HOST_POSITION: Final = 48
_MIN_RECORD_BYTES: Final = LOG_OFFSET_POSITION + 8
_MOST_TOLD: Final = 1000
# Apache's light queues lead to records of other queues.
_LIGHT_PREFIX: Final = "%LMQ%"


class QueueReader:
    def __init__(self, config: StoreConfig, commit_log: CommitLog, queues: QueueTable) -> None:
        self._config = config
        self._log = commit_log
        self._queues = queues
        memory = config.physical_memory_bytes or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._cached_bytes = memory * config.memory_ratio // 100
        self._told: set[tuple[str, int, int]] = set()

    def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_count: int,
        max_bytes: int,
        wants: frozenset[int] | None,
        accepts: Callable[[bytes], bool] | None,
    ) -> ReadResult:
        queue = self._queues.get(topic, queue_id)
        if queue is None:
            return ReadResult(ReadStatus.NO_MATCHED_LOGIC_QUEUE, 0, 0, 0)
        low, high = queue.min_offset, queue.max_offset
        if high == 0:
            return ReadResult(ReadStatus.NO_MESSAGE_IN_QUEUE, 0, low, high)
        if offset < low:
            return ReadResult(ReadStatus.OFFSET_TOO_SMALL, low, low, high)
        if offset == high:
            return ReadResult(ReadStatus.OFFSET_OVERFLOW_ONE, offset, low, high)
        if offset > high:
            return ReadResult(ReadStatus.OFFSET_OVERFLOW_BADLY, high, low, high)
        return self._collect(queue, offset, max_count, max_bytes, wants, accepts)

    def _collect(
        self,
        queue: ConsumeQueue,
        offset: int,
        max_count: int,
        max_bytes: int,
        wants: frozenset[int] | None,
        accepts: Callable[[bytes], bool] | None,
    ) -> ReadResult:
        """The messages of a read that begins inside the queue."""
        config = self._config
        scan_count = max(-(-config.max_filter_bytes // ENTRY_BYTES), max_count)
        stop = min(queue.max_offset, offset + scan_count, queue.next_file_offset(offset))
        # A plain read needs as many entries as messages; only filters look further.
        step = max(max_count, 32) if wants is None and accepts is None else scan_count
        cached_from = self._log.end_offset - self._cached_bytes
        found = _Found(self._log, queue, _Limits(config, max_count, max_bytes, cached_from))
        is_missing = False
        while offset < stop and not found.is_full:
            entries = queue.entries(offset, min(stop - offset, step))
            if not entries:
                is_missing = True
                offset = queue.next_file_offset(offset)
                break
            offset += found.look_at(entries, offset, wants, accepts)
        if found.damaged:
            self._tell(queue, found.damaged)
        if found.records:
            status = ReadStatus.FOUND
        elif is_missing:
            status = ReadStatus.OFFSET_FOUND_NULL
        else:
            status = ReadStatus.MESSAGE_WAS_REMOVING if found.is_removing else ReadStatus.NO_MATCHED_MESSAGE
        return ReadResult(
            status, offset, queue.min_offset, queue.max_offset, found.records, int(found.size_bytes),
            found.log_offset < cached_from,
        )  # fmt: skip

    def is_cached(self, topic: str, queue_id: int, offset: int) -> bool:
        """Whether there is a message at an offset, so new that a read would take it for one in memory."""
        queue = self._queues.get(topic, queue_id)
        entry = queue.entry(offset) if queue is not None else None
        if entry is None or entry.size_bytes == BLANK_SIZE:
            return False
        return entry.log_offset >= max(self._log.min_offset, self._log.end_offset - self._cached_bytes)

    def _tell(self, queue: ConsumeQueue, damaged: list[tuple[int, int]]) -> None:
        """Logs the entries of a read that lead nowhere, however often they are read: once, and not without end."""
        told = self._told
        new = [(offset, to) for offset, to in damaged if (queue.topic, queue.queue_id, offset) not in told]
        if not new or len(told) >= _MOST_TOLD:
            return
        told.update([(queue.topic, queue.queue_id, offset) for offset, _ in new])
        log.error(
            "%s-%d: %d entries lead to no record of this queue and are stepped over: that at %d, to log offset %d%s",
            queue.topic, queue.queue_id, len(new), new[0][0], new[0][1],
            "; no more of them are told" if len(told) >= _MOST_TOLD else "",
        )  # fmt: skip

    # --- time ---------------------------------------------------------------------------------------------------------
    def record_time(self, log_offset: int, size_bytes: int) -> int:
        """When the record at a place of the log was stored, in ms; -1 when it is not there."""
        view = self._log.slice(log_offset, size_bytes) if size_bytes != BLANK_SIZE else None
        if view is None or len(view) < _BORN_HOST_POSITION + 28:
            return -1
        (sys_flag,) = _I32.unpack_from(view, SYS_FLAG_POSITION)
        at = _BORN_HOST_POSITION + (20 if sys_flag & SYS_BORN_HOST_V6 else 8)
        store_ms: int = _I64.unpack_from(view, at)[0]
        return store_ms

    def entry_time(self, queue: ConsumeQueue, offset: int) -> int:
        entry = queue.entry(offset)
        return self.record_time(entry.log_offset, entry.size_bytes) if entry is not None else -1

    def offset_by_time(self, queue: ConsumeQueue, timestamp_ms: int, *, upper: bool) -> int:
        """The first message stored at a time or later; with `upper`, the last one stored at a time or before.

        When all are older the answers are the queue's end and its last message, when all are newer its beginning.
        """
        low, high = queue.min_offset, queue.max_offset

        def is_later(log_offset: int, size: int) -> bool:
            store_ms = self.record_time(log_offset, size)
            return store_ms > timestamp_ms if upper else store_ms >= timestamp_ms

        found = queue.first(is_later, low, high)
        return max(found - 1, low) if upper else found


class _Limits:
    """How much one read gives: less from the log offsets before `cached_from`."""

    def __init__(self, config: StoreConfig, max_count: int, max_bytes: int, cached_from: int) -> None:
        max_bytes = min(max(max_bytes, 100), MAX_READ_BYTES)
        self._cached_from: i64 = cached_from
        self._cached_count: i64 = min(max_count, config.max_transfer_count_in_memory)
        self._cached_bytes: i64 = min(max_bytes, config.max_transfer_bytes_in_memory)
        self._disk_count: i64 = min(max_count, config.max_transfer_count_on_disk)
        self._disk_bytes: i64 = min(max_bytes, config.max_transfer_bytes_on_disk)

    def allow(self, count: i64, size_bytes: i64, log_offset: i64) -> bool:
        """Whether a read may have so many messages before the one at a log offset, and so many bytes with it."""
        if log_offset >= self._cached_from:
            return count < self._cached_count and size_bytes <= self._cached_bytes
        return count < self._disk_count and size_bytes <= self._disk_bytes


class _Found:
    """What a read has come to so far."""

    def __init__(self, commit_log: CommitLog, queue: ConsumeQueue, limits: _Limits) -> None:
        self._log = commit_log
        self._queue = queue
        self._limits = limits
        self.records: list[bytes] = []
        self.size_bytes: i64 = 0
        self.log_offset: i64 = 0  # of the last entry that was looked at
        self.is_full = False
        self.is_removing = False  # the last message that was looked for is not in the log any more
        self.damaged: list[tuple[int, int]] = []  # entries that lead nowhere: their queue offsets and log offsets
        self._queue_id: i64 = queue.queue_id
        self._skip_before: i64 = 0  # what lies before it in the log was deleted
        self._pages: mmap.mmap | None = None
        self._pages_start: i64 = 0  # of the part of the log that `_pages` holds
        self._pages_end: i64 = 0

    def look_at(
        self, entries: bytes, offset: int, wants: frozenset[int] | None, accepts: Callable[[bytes], bool] | None
    ) -> int:
        """Goes through the entries at an offset, as far as there is room for more messages; how many those were."""
        limits = self._limits
        records = self.records
        bits: i64 = _bits(wants) if wants is not None else 0
        at: i64 = 0
        end: i64 = len(entries)
        next_offset: i64 = offset
        while at < end:
            log_offset = read_i64_be(entries, at)
            size = i64(read_i32_be(entries, at + 8))
            if records and not limits.allow(len(records), self.size_bytes + size, log_offset):
                self.is_full = True
                break
            code = read_i64_be(entries, at + 12)
            at += ENTRY_BYTES
            next_offset += 1
            self.log_offset = log_offset
            if 0 <= log_offset < self._skip_before:
                continue
            # The bit spares most entries the lookup, which takes longer than all the rest.
            if wants is None or (bits >> (code & 31) & 1 and int(code) in wants):
                record = self._record(log_offset, size, next_offset - 1)
                if record is None:
                    continue
                if accepts is None or accepts(record):
                    records.append(record)
                    self.size_bytes += size
                    self._skip_before = 0
                    continue
            self.is_removing = False
        return int(next_offset) - offset

    def _record(self, log_offset: i64, size: i64, offset: i64) -> bytes | None:
        """The record that the entry at an offset leads to, if it is there."""
        if not self._pages_start <= log_offset < self._pages_end:
            found = self._log.pages(log_offset)
            self._pages_start, self._pages_end, self._pages = found if found is not None else (0, 0, None)
        pages = self._pages
        if pages is None or size < _MIN_RECORD_BYTES or log_offset + size > self._pages_end:
            self._miss(log_offset, size, offset)
            return None
        at = log_offset - self._pages_start
        record = pages[at : at + size]
        if (
            read_i32_be(record, 0) != size
            or read_i64_be(record, LOG_OFFSET_POSITION) != log_offset
            or read_i64_be(record, QUEUE_OFFSET_POSITION) != offset
            or i64(read_i32_be(record, QUEUE_ID_POSITION)) != self._queue_id
        ) and not self._is_light(record, size, log_offset):
            self.damaged.append((int(offset), int(log_offset)))
            return None
        return record

    def _is_light(self, record: bytes, size: i64, log_offset: i64) -> bool:
        """Whether the queue's entries lead to records of other queues, and this to one of them."""
        if not self._queue.topic.startswith(_LIGHT_PREFIX):
            return False
        return i64(read_i32_be(record, 0)) == size and read_i64_be(record, LOG_OFFSET_POSITION) == log_offset

    def _miss(self, log_offset: i64, size: i64, offset: i64) -> None:
        """An entry leads to no written part of the log: its message has expired, it stands for one, or it is damaged.

        Only if the message has expired the entries behind it are passed over as far as theirs have: a damaged one says
        nothing about others.
        """
        if size == BLANK_SIZE:
            return
        log_min_offset = i64(self._log.min_offset)
        if 0 <= log_offset < log_min_offset:
            self._skip_before = log_min_offset
            self.is_removing = True
        else:
            self.damaged.append((int(offset), int(log_offset)))


def _bits(codes: frozenset[int]) -> int:
    """One of 32 bits, chosen by its last five, for each code."""
    bits = 0
    for code in codes:
        bits |= 1 << (code & 31)
    return bits
