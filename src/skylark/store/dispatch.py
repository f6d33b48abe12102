"""What the queues and the index take from a message, and how a record of the log is put into them again.

A new message is dispatched by `Store.append` itself, in the same call that writes it. `Dispatcher` does the same for
records that recovery finds in the log.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from pathlib import Path
from typing import Final
from zlib import crc32

from librt.strings import BytesWriter, write_i32_be, write_i64_be
from mypy_extensions import i32, i64

from skylark.store.api import LogRecord, StoreError
from skylark.store.consumequeue import BLANK_SIZE, ENTRY, ConsumeQueue, QueueTable
from skylark.store.deleted import DeletedTopics
from skylark.store.index import IndexService
from skylark.wire.lookup import find_text, property_key
from skylark.wire.message import (
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    PROPERTY_DELAY_LEVEL,
    SYS_FLAG_POSITION,
    SYS_TRANSACTION_MASK,
    SYS_TRANSACTION_PREPARED,
    SYS_TRANSACTION_ROLLBACK,
)
from skylark.wire.numbers import java_count
from skylark.wire.records import RECORD_HEADERS, BatchPart, java_hash_of

log = logging.getLogger(__name__)

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
# By the sys flag's transaction bits: half messages and their rollbacks are in the log but in no queue.
UNQUEUED = frozenset((SYS_TRANSACTION_PREPARED, SYS_TRANSACTION_ROLLBACK))
MAX_GAP_ENTRIES = 1 << 20  # a larger hole in a queue is a damaged record, unless that many are lost in the log
_MOST_BLANKS: Final = 1 << 16  # at once
_MOST_TOLD: Final = 20
_DELAY_LEVEL: Final = property_key(PROPERTY_DELAY_LEVEL)
_SIZE_AND_MAGIC = struct.Struct(">iI")
_I32 = struct.Struct(">i")
_I16 = struct.Struct(">h")
_U16 = struct.Struct(">H")


class Progress:
    """What the append path tells the flush thread. Written by the event loop, read by the thread."""

    __slots__ = ("dirty_queue_files", "last_log_offset", "last_store_ms")

    def __init__(self) -> None:
        self.last_log_offset = 0
        self.last_store_ms = 0
        self.dirty_queue_files: deque[tuple[ConsumeQueue, Path]] = deque()

    def put(self, queue: ConsumeQueue, packed: bytes) -> None:
        """Puts entries into a queue, which may lie in several of its files, and notes those for the flush."""
        while packed:
            packed = packed[queue.put_some(packed) :]
            if not queue.dirty:
                queue.dirty = True
                self.dirty_queue_files.append((queue, queue.write_path))

    def cut(self, queue: ConsumeQueue) -> None:
        """Cuts a queue off behind its end, and notes for the flush what that changes."""
        path = queue.cut()
        if path is not None:
            self.dirty_queue_files.append((queue, path))


class QueueEntries:
    """Messages that are being written to the log, as they go into their queue."""

    __slots__ = ("_packed", "codes")

    def __init__(self) -> None:
        self._packed = BytesWriter()
        self.codes: list[int] = []

    def add(self, log_offset: i64, size: i64, code: i64) -> None:
        packed = self._packed
        write_i64_be(packed, log_offset)
        write_i32_be(packed, i32(size))
        write_i64_be(packed, code)
        self.codes.append(int(code))

    @property
    def packed(self) -> bytes:
        return self._packed.getvalue()


def queue_tag_code(topic: str, part: BatchPart, store_ms: int, delays_ms: tuple[int, ...]) -> i64:
    """The tag field of a queue entry: the tag's hash, or for a delayed message the time it is due, in ms."""
    if topic == SCHEDULE_TOPIC:
        level = min(java_count(find_text(part.properties, 0, _DELAY_LEVEL)) or 0, len(delays_ms))
        if level > 0:
            return store_ms + delays_ms[level - 1]
    return java_hash_of(part.properties, part.scan.tags_at, part.scan.tags_end, 0)


def code_of(record: memoryview, log_offset: int, delays_ms: tuple[int, ...]) -> int:
    """The same of a record of the log; 0 when it is not whole."""
    found = inspect(record, 0, log_offset)
    return 0 if found is None else int(queue_tag_code(found.topic, _part(found), found.store_ms, delays_ms))


def inspect(segment: memoryview, at: int, base: int) -> LogRecord | None:
    """The record at a position of a segment, with all that can be checked about it; None when it is not one.

    The checksum covers the body only. A record cut short by a crash leaves zeros: a topic has none, and that of the
    properties `LogRecord.may_be_torn` tells.
    """
    try:
        size, magic = _SIZE_AND_MAGIC.unpack_from(segment, at)
        if magic == MAGIC_BLANK:
            return LogRecord(base + at, 0)
        if magic not in (MAGIC_V1, MAGIC_V2) or not 0 < size <= len(segment) - at:
            return None
        (sys_flag,) = _I32.unpack_from(segment, at + SYS_FLAG_POSITION)
        header = RECORD_HEADERS[sys_flag >> 4 & 3]
        (
            _, _, crc, queue_id, _, queue_offset, log_offset, _, _, _, store_ms, _, _, _, body_size,
        ) = header.unpack_from(segment, at)  # fmt: skip
        end = at + size
        body_at = at + header.size
        topic_at = body_at + body_size
        if log_offset != base + at or body_size < 0 or topic_at >= end:
            return None
        if magic == MAGIC_V1:
            topic_size = segment[topic_at]
            topic_at += 1
        else:
            (topic_size,) = _U16.unpack_from(segment, topic_at)
            topic_at += 2
        properties_at = topic_at + topic_size + 2
        (properties_size,) = _I16.unpack_from(segment, properties_at - 2)
        if properties_size < 0 or properties_at + properties_size != end:
            return None
        if body_size and crc32(segment[body_at : body_at + body_size]) & 0x7FFFFFFF != crc:
            return None
        topic = str(segment[topic_at : topic_at + topic_size], "utf-8")
        if not topic or "\0" in topic:
            return None
    except (struct.error, UnicodeDecodeError):
        return None
    return LogRecord(
        log_offset, size, topic, queue_id, queue_offset, sys_flag, store_ms, bytes(segment[properties_at:end])
    )


class Dispatcher:
    """Puts records that are already in the log into the queues and the index, once each."""

    def __init__(
        self,
        queues: QueueTable,
        index: IndexService | None,
        delays_ms: tuple[int, ...],
        progress: Progress,
        deleted: DeletedTopics,
    ) -> None:
        self._queues = queues
        self._index = index
        self._delays_ms = delays_ms
        self._progress = progress
        self.deleted = deleted
        # Queues whose next record has an offset they cannot have yet: entries before it are missing.
        self.lagging: set[ConsumeQueue] = set()
        # Records that say to be before others that their queue has: the next one tells whether that is so.
        self._going_back: dict[ConsumeQueue, LogRecord] = {}
        self._out_of_order = 0

    def cut(self, queue: ConsumeQueue) -> None:
        """Cuts a queue off behind its end."""
        self._progress.cut(queue)

    def to_queue(
        self, record: LogRecord, *, lost: int, is_complete: bool, only: set[ConsumeQueue] | None = None
    ) -> None:
        """Adds the record's entry unless the queue has it, or its topic was deleted.

        `lost`: how many records may be lost in what is damaged of the log. `is_complete`: all others that the log has
        of the queue before this one are dispatched. A queue whose offsets go back is that of a topic that was deleted
        and made again, or began with a record whose offset is damaged, if the deletion is known or two records in a row
        say so: a single one is damaged itself, and would cost all before it.
        """
        if self._is_in_no_queue(record):
            return
        try:
            queue = self._queues.create(record.topic, record.queue_id)
        except (StoreError, ValueError) as error:
            log.warning("no queue for the record at log offset %d: %s", record.log_offset, error)
            return
        if only is not None and queue not in only:
            return
        back = self._going_back.pop(queue, None)
        if back is not None and back.log_offset < record.log_offset:
            if record.queue_offset == back.queue_offset + 1:
                queue.start_at(back.queue_offset)
                self._put(queue, back)
            else:
                lost += 1
        missing = record.queue_offset - queue.max_offset
        if missing < 0 and is_complete and queue.max_offset == queue.first_stored_offset:
            queue.start_at(record.queue_offset)  # a power cut took its first files, and what is left does not count
            missing = 0
        if missing < 0 and not self._makes_room(queue, record):
            return
        if missing > 0:
            is_empty = queue.max_offset == queue.first_stored_offset
            if not is_complete and (is_empty or missing > lost):
                self.lagging.add(queue)
                return
            if not self._skip_to(queue, record, lost):
                return
        self._put(queue, record)

    def _makes_room(self, queue: ConsumeQueue, record: LogRecord) -> bool:
        """Whether a queue that is further than a record was brought back to it."""
        if self._is_in_a_gap(queue, record):
            # The record behind the gap claimed an offset that it never had.
            queue.max_offset = record.queue_offset
            self._progress.cut(queue)
            return True
        last_log_offset = queue.last_record_end()[0]
        if record.log_offset <= last_log_offset:
            return False  # it is there
        if record.queue_offset == 0 and last_log_offset < self.deleted.offset(queue.topic):
            queue.destroy()  # the topic was deleted and made again: its offsets began anew
            return True
        if record.queue_offset == 0 or queue.max_offset - queue.min_offset == 1:
            # Apache's broker notes no deletions; but an offset is under no checksum, and may be damaged.
            self._going_back[queue] = record
        self._out_of_order += 1
        if self._out_of_order <= _MOST_TOLD:
            place = f"{queue.topic}-{queue.queue_id} at {queue.max_offset}"
            log.warning(
                "%s: the record at log offset %d says to be number %d", place, record.log_offset, record.queue_offset
            )
        return False

    def to_queue_again(self, record: LogRecord) -> tuple[ConsumeQueue, Path] | None:
        """Writes the entry that a record has in its queue once more; the queue, and the file that it is in."""
        queue = self._queues.get(record.topic, record.queue_id)
        if queue is None or self._is_in_no_queue(record):
            return None
        path = queue.put_again(record.queue_offset, self._entry(record))
        return None if path is None else (queue, path)

    def _is_in_no_queue(self, record: LogRecord) -> bool:
        is_of_deleted = record.log_offset < self.deleted.offset(record.topic)
        return is_of_deleted or record.sys_flag & SYS_TRANSACTION_MASK in UNQUEUED

    def _put(self, queue: ConsumeQueue, record: LogRecord) -> None:
        self._progress.put(queue, self._entry(record))

    def _entry(self, record: LogRecord) -> bytes:
        code = queue_tag_code(record.topic, _part(record), record.store_ms, self._delays_ms)
        return ENTRY.pack(record.log_offset, record.size_bytes, code)

    def _is_in_a_gap(self, queue: ConsumeQueue, record: LogRecord) -> bool:
        """Whether the queue has a blank entry in the place of a record that comes only now."""
        entry = queue.entry(record.queue_offset)
        return entry is not None and entry.size_bytes == BLANK_SIZE and 0 < entry.log_offset < record.log_offset

    def _skip_to(self, queue: ConsumeQueue, record: LogRecord, lost: int) -> bool:
        """Moves the end of a queue forward to a record whose predecessors are not in the log."""
        if queue.max_offset == queue.first_stored_offset:
            queue.start_at(record.queue_offset)
            return True
        missing = record.queue_offset - queue.max_offset
        place = f"{queue.topic}-{queue.queue_id} at {queue.max_offset}"
        if missing > max(MAX_GAP_ENTRIES, lost):
            log.error("%s: the record at log offset %d claims to be %d further", place, record.log_offset, missing)
            return False
        log.error("%s: %d messages are missing in the log", place, missing)
        blank = ENTRY.pack(record.log_offset, BLANK_SIZE, 0)
        while queue.max_offset < record.queue_offset:
            self._progress.put(queue, blank * min(record.queue_offset - queue.max_offset, _MOST_BLANKS))
        return True

    def to_index(self, record: LogRecord) -> None:
        if self._index is None:
            return
        if record.sys_flag & SYS_TRANSACTION_MASK == SYS_TRANSACTION_ROLLBACK:
            self._index.put(record.topic, (), record.log_offset, record.store_ms)
        else:
            self._index.put_all(record.topic, [_part(record)], [record.log_offset], record.store_ms)


def _part(record: LogRecord) -> BatchPart:
    """What the queues and the index take a message's keys and tags from."""
    return BatchPart(0, b"", record.properties_data)
