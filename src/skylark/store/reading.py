"""Reads of a queue: a run of messages from an offset on, and offsets by time.

The outcomes, the corrected next offset and the limits are those of Apache's `DefaultMessageStore.getMessage`, which
clients rely on: up to 32 messages or 256 KiB when the messages are thought to be in memory, 8 or 64 KiB when they lie
so far back that they are read from disk; at most 800 entries (or the asked count) looked at, none beyond the queue file
that the read begins in. That an entry leads to a record is checked; the body's checksum is not, as it is not by Apache:
the consumer checks it, and `Store.message_at` does.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from collections.abc import Callable

from librt.strings import read_i32_be, read_i64_be
from mypy_extensions import i64

from skylark.store.api import ReadResult, ReadStatus, StoreConfig
from skylark.store.commitlog import CommitLog
from skylark.store.consumequeue import BLANK_SIZE, ENTRY_BYTES, ConsumeQueue, QueueTable
from skylark.wire.message import LOG_OFFSET_POSITION, SYS_BORN_HOST_V6, SYS_FLAG_POSITION

log = logging.getLogger(__name__)

MAX_READ_BYTES = 128 << 20
_I32 = struct.Struct(">i")
_I64 = struct.Struct(">q")
_BORN_HOST_POSITION = 48


class QueueReader:
    def __init__(self, config: StoreConfig, commit_log: CommitLog, queues: QueueTable) -> None:
        self._config = config
        self._log = commit_log
        self._queues = queues
        memory = config.physical_memory_bytes or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._cached_bytes = memory * config.memory_ratio // 100

    def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_count: int,
        max_bytes: int,
        wants: Callable[[int], bool] | None,
        accepts: Callable[[bytes], bool] | None,
    ) -> ReadResult:
        queue = self._queues.get((topic, queue_id))
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
        wants: Callable[[int], bool] | None,
        accepts: Callable[[bytes], bool] | None,
    ) -> ReadResult:
        """The messages of a read that begins inside the queue."""
        config = self._config
        scan_count = max(-(-config.max_filter_bytes // ENTRY_BYTES), max_count)
        stop = min(queue.max_offset, offset + scan_count, queue.next_file_offset(offset))
        max_bytes = min(max(max_bytes, 100), MAX_READ_BYTES)
        cached = (
            min(max_count, config.max_transfer_count_in_memory),
            min(max_bytes, config.max_transfer_bytes_in_memory),
        )
        on_disk = min(max_count, config.max_transfer_count_on_disk), min(max_bytes, config.max_transfer_bytes_on_disk)
        cached_from: i64 = self._log.end_offset - self._cached_bytes
        status = ReadStatus.NO_MATCHED_MESSAGE
        records: list[bytes] = []
        total: i64 = 0
        next_offset = offset
        log_offset: i64 = 0
        skip_before: i64 = 0
        segment_start: i64 = 0  # of the part of the log that `pages` holds
        segment_end: i64 = 0
        pages: mmap.mmap | None = None
        full = False
        while next_offset < stop and not full:
            # A plain read needs as many entries as messages; only filters look further.
            entries = queue.entries(next_offset, min(stop - next_offset, max(max_count, 32)))
            if not entries:
                status = ReadStatus.OFFSET_FOUND_NULL
                next_offset = queue.next_file_offset(next_offset)
                break
            for at in range(0, len(entries), ENTRY_BYTES):
                entry_log_offset = read_i64_be(entries, at)
                size = i64(read_i32_be(entries, at + 8))
                if records:
                    most_records, most_bytes = cached if entry_log_offset >= cached_from else on_disk
                    if len(records) >= most_records or total + size > most_bytes:
                        full = True
                        break
                log_offset = entry_log_offset
                next_offset += 1
                if log_offset < skip_before:
                    continue
                if wants is None or wants(int(read_i64_be(entries, at + 12))):
                    if not segment_start <= log_offset < segment_end:
                        found = self._log.pages(log_offset)
                        segment_start, segment_end, pages = found if found is not None else (0, 0, None)
                    if pages is None or log_offset + size > segment_end:
                        if size != BLANK_SIZE:
                            skip_before = self._log.next_segment_offset(log_offset)
                            status = ReadStatus.MESSAGE_WAS_REMOVING
                        continue
                    record = pages[log_offset - segment_start : log_offset - segment_start + size]
                    if read_i32_be(record, 0) != size or read_i64_be(record, LOG_OFFSET_POSITION) != log_offset:
                        place = f"{queue.topic}-{queue.queue_id} at {next_offset - 1}"
                        log.error("%s: no record at log offset %d", place, log_offset)
                        continue
                    if accepts is None or accepts(record):
                        records.append(record)
                        total += size
                        skip_before = 0
                        continue
                status = ReadStatus.NO_MATCHED_MESSAGE
        return ReadResult(
            ReadStatus.FOUND if records else status, next_offset, queue.min_offset, queue.max_offset, records,
            int(total), log_offset < cached_from,
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
