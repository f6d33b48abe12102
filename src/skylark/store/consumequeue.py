"""Consume queues: for each queue of a topic, where its messages lie in the log.

An entry is 20 bytes, big endian: log offset i64 | record size i32 | tag code i64. Entry n of a queue is its message
with queue offset n; files hold a fixed number of entries and are named by the byte offset of their first. A file that
starts in the middle of a queue's life is filled up to there with blank entries (offset 0, size 2**31 - 1); a hole that
damage left in a queue is filled with such entries that have the log offset of the message behind it. Behind the last
entry there are zeros, which is how the end is found.

Everything here is derived from the log. Log offsets ascend within a queue, so that every search is a binary one, and
opening a queue reads a few entries of its last file only.
"""

from __future__ import annotations

import logging
import mmap
import shutil
import struct
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, KeysView
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Final

from skylark.store.api import DiskFull, QueueEntry, StoreError
from skylark.store.aside import DELETED, Aside
from skylark.store.queue_ext import EXT_DIRECTORY, ExtUnits, is_address
from skylark.store.segments import MappingPool, Segment, file_name, list_bases, store_error, sync_directory
from skylark.wire.records import topic_field

log = logging.getLogger(__name__)

ENTRY_BYTES: Final = 20
ENTRY = struct.Struct(">qiq")
BLANK_SIZE: Final = 0x7FFFFFFF
_BLANK = ENTRY.pack(0, BLANK_SIZE, 0)
_RESERVE_FIRST_BYTES = 64 << 10
_RESERVE_MOST_BYTES = 1 << 20


class ConsumeQueue:
    """One queue. `write_map`, `write_at` and `write_limit` are for the hot path: see `put`.

    `min_offset` is the first entry whose message is still in the log, `max_offset` the next one to be written.
    """

    __slots__ = (
        "_bases", "_directory", "_file_bytes", "_pool", "_write_base", "dirty", "ext", "magic", "max_offset",
        "min_offset", "named_on_disk", "queue_id", "topic", "topic_bytes", "write_at", "write_limit", "write_map",
        "write_path",
    )  # fmt: skip

    def __init__(self, topic: str, queue_id: int, directory: Path, entries_per_file: int, pool: MappingPool) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.magic, self.topic_bytes = topic_field(topic)
        self.min_offset = 0
        self.max_offset = 0
        self.dirty = False  # the flush thread has been told of the file that is written to
        self.named_on_disk = directory  # the last file whose name is known to be on disk
        self.ext: ExtUnits | None = None  # if there are entries whose tag codes are kept elsewhere
        self._directory = directory
        self._file_bytes = entries_per_file * ENTRY_BYTES
        self._pool = pool
        self._bases = list_bases(directory, self._file_bytes)
        self._write_base = -1
        self.write_map: mmap.mmap | None = None
        self.write_path = directory
        self.write_at = 0
        self.write_limit = 0

    # --- files --------------------------------------------------------------------------------------------------------
    def _forget(self, segment: Segment) -> None:
        if segment.base == self._write_base:
            self.write_map = None
            self.write_limit = 0
            self._write_base = -1

    def _file(self, base: int) -> Segment:
        segment = self._pool.get(self._directory / file_name(base))
        if segment is None:
            segment = self._pool.add(Segment(self._directory, base, self._file_bytes), self._forget)
        return segment

    def _delete_file(self, base: int) -> None:
        path = self._directory / file_name(base)
        self._pool.drop(path)
        path.unlink(missing_ok=True)
        self._bases.remove(base)

    # --- writing ------------------------------------------------------------------------------------------------------
    def make_room(self, count: int = 1) -> None:
        """Makes sure that the next `count` entries can be written; `DiskFull` when they cannot.

        Maps the file of the next entry; files are created as needed, and their blocks reserved.
        """
        byte = self.max_offset * ENTRY_BYTES
        at = byte % self._file_bytes
        base = byte - at
        segment = self._with_blocks(base, at, count * ENTRY_BYTES)
        for later in range(base + self._file_bytes, byte + count * ENTRY_BYTES, self._file_bytes):
            self._with_blocks(later, 0, byte + count * ENTRY_BYTES - later)
            segment = self._with_blocks(base, at, count * ENTRY_BYTES)  # the pool may have let go of it meanwhile
        if base != self._write_base:
            segment.write_from(at)
            self._write_base = base
            self.write_map = segment.map
            self.write_path = segment.path
            self.dirty = False
        self.write_at = at
        self.write_limit = segment.reserved_bytes // ENTRY_BYTES * ENTRY_BYTES

    def _with_blocks(self, base: int, at: int, size_bytes: int) -> Segment:
        """The file, mapped, with blocks for so many bytes from a position on, and some more."""
        if base in self._bases:
            segment = self._file(base)
        else:
            segment = Segment.create(self._directory, base, self._file_bytes, _RESERVE_FIRST_BYTES)
            insort(self._bases, base)
            self._pool.add(segment, self._forget)
        segment.reserved_bytes = max(segment.reserved_bytes, at)
        try:
            segment.reserve(at + max(size_bytes, min(max(at, _RESERVE_FIRST_BYTES), _RESERVE_MOST_BYTES)))
        except DiskFull:
            # Just what is needed. After a crash a full disk has that: the entries were there before.
            segment.reserve(at + size_bytes)
        segment.release_fd()
        return segment

    def put(self, log_offset: int, size_bytes: int, tag_code: int) -> None:
        """Writes the next entry."""
        self.put_some(ENTRY.pack(log_offset, size_bytes, tag_code))

    def put_some(self, entries: bytes) -> int:
        """Writes the next entries, which are packed already, as far as their file goes. How many bytes it took."""
        if self.write_at >= self.write_limit:
            self.make_room()
        assert self.write_map is not None
        size = min(len(entries), self.write_limit - self.write_at)
        self.write_map[self.write_at : self.write_at + size] = entries if size == len(entries) else entries[:size]
        self.write_at += size
        self.max_offset += size // ENTRY_BYTES
        return size

    def put_again(self, queue_offset: int, entry: bytes) -> Path | None:
        """Writes an entry once more, unless it is another one; the file that it is in."""
        byte = queue_offset * ENTRY_BYTES
        at = byte % self._file_bytes
        if queue_offset >= self.max_offset or byte - at not in self._bases:
            return None
        segment = self._file(byte - at)
        if segment.map[at : at + ENTRY_BYTES] not in (entry, bytes(ENTRY_BYTES)):
            return None
        segment.map[at : at + ENTRY_BYTES] = entry
        return segment.path

    def start_at(self, queue_offset: int) -> None:
        """Lets an empty queue begin at an offset, with blank entries before it in its first file."""
        self.destroy()
        at = queue_offset * ENTRY_BYTES % self._file_bytes
        self.max_offset = queue_offset - at // ENTRY_BYTES
        for _ in range(at // ENTRY_BYTES):
            self.put_some(_BLANK)
        self.min_offset = queue_offset

    # --- reading ------------------------------------------------------------------------------------------------------
    def entries(self, queue_offset: int, count: int) -> bytes | None:
        """Up to `count` entries from an offset on, as far as their file goes; None when there is no such file."""
        byte = queue_offset * ENTRY_BYTES
        at = byte % self._file_bytes
        base = byte - at
        end = min(at + min(count, self.max_offset - queue_offset) * ENTRY_BYTES, self._file_bytes)
        if base == self._write_base and self.write_map is not None:
            found = self.write_map[at:end]
        elif base in self._bases:
            found = self._file(base).map[at:end]
        else:
            return None
        return found if self.ext is None else self.ext.plain(found)

    def entry(self, queue_offset: int) -> QueueEntry | None:
        if not self.min_offset <= queue_offset < self.max_offset:
            return None
        data = self.entries(queue_offset, 1)
        return QueueEntry(*ENTRY.unpack(data)) if data else None

    def next_file_offset(self, queue_offset: int) -> int:
        per_file = self._file_bytes // ENTRY_BYTES
        return queue_offset - queue_offset % per_file + per_file

    def first(self, matches: Callable[[int, int], bool], low: int, high: int) -> int:
        """The first entry in [low, high) that matches (log offset, size), if those that match are the last ones."""
        while low < high:
            middle = (low + high) // 2
            byte = middle * ENTRY_BYTES
            at = byte % self._file_bytes
            log_offset, size, _ = ENTRY.unpack_from(self._file(byte - at).map, at)
            if matches(log_offset, size):
                high = middle
            else:
                low = middle + 1
        return low

    @property
    def first_stored_offset(self) -> int:
        """The first entry that the files have, whether its message is still in the log or not."""
        return self._bases[0] // ENTRY_BYTES if self._bases else 0

    @property
    def has_files(self) -> bool:
        return bool(self._bases)

    @property
    def has_holes(self) -> bool:
        """Whether files in the middle are missing."""
        return any(later - base != self._file_bytes for base, later in pairwise(self._bases))

    @property
    def begins_within(self) -> bool:
        """Whether the first file begins with a message that is not the queue's first: there was a file before it."""
        if self.first_stored_offset == 0:
            return False
        log_offset, size, _ = ENTRY.unpack_from(self._file(self._bases[0]).map)
        return bool(size > 0 and (size != BLANK_SIZE or log_offset > 0))

    def first_log_offset(self) -> int:
        """Log offset of the first entry behind the blank ones that a queue may begin with; -1 if there is none."""

        def is_set(log_offset: int, size: int) -> bool:
            return size != BLANK_SIZE or log_offset > 0

        first = self.first(is_set, min(self.first_stored_offset, self.max_offset), self.max_offset)
        data = self.entries(first, 1) if first < self.max_offset else None
        return int(ENTRY.unpack(data)[0]) if data else -1

    def last_record_end(self) -> tuple[int, int]:
        """Log offset of the last entry's record, and of what follows it; (-1, -1) in an empty queue."""
        if self.max_offset <= self.first_stored_offset:
            return -1, -1
        data = self.entries(self.max_offset - 1, 1)
        log_offset, size, _ = ENTRY.unpack(data or _BLANK)
        return (-1, -1) if size == BLANK_SIZE else (log_offset, log_offset + size)

    # --- recovery and retention ---------------------------------------------------------------------------------------
    def find_end(self, below_log_offset: int | None = None) -> None:
        """Sets `max_offset` behind the last entry, or behind the last one below a log offset.

        Entries of files before the last are taken to be whole, since a file is flushed when the next one is begun.
        """

        def is_end(log_offset: int, size: int) -> bool:
            if size <= 0 or log_offset < 0:
                return True
            if below_log_offset is None:
                return False
            # Blank entries have the log offset of the message behind them, or 0 at the beginning of a queue.
            return log_offset > below_log_offset if size == BLANK_SIZE else log_offset >= below_log_offset

        low, high = 0, len(self._bases)
        while high - low > 1:  # the last file whose first entry is one; the first file counts in any case
            middle = (low + high) // 2
            log_offset, size, _ = ENTRY.unpack_from(self._file(self._bases[middle]).map)
            if is_end(log_offset, size):
                high = middle
            else:
                low = middle
        if self._bases:
            start = self._bases[low] // ENTRY_BYTES
            self.max_offset = self.first(is_end, start, start + self._file_bytes // ENTRY_BYTES)
        self.write_limit = 0

    def cut(self) -> Path | None:
        """Makes zeros of what lies behind `max_offset`, and deletes the files behind it. If there was anything, the
        file that is the last one now: until it and its name are on disk, a power cut may bring all of that back.
        """
        byte = self.max_offset * ENTRY_BYTES
        last, is_changed = -1, False
        for base in self._bases[:]:
            if base >= byte and base != self._bases[0]:
                self._delete_file(base)
                is_changed = True
                continue
            last = base
            if base + self._file_bytes > byte:
                segment = self._file(base)
                is_changed = segment.cut(max(byte - base, 0)) or is_changed
                segment.release_fd()
        self.write_limit = 0
        return self._directory / file_name(last) if is_changed else None

    def correct_min_offset(self, log_min_offset: int) -> None:
        """Moves `min_offset` to the first entry whose message is still in the log; to `max_offset` if none is."""

        def is_alive(log_offset: int, size: int) -> bool:
            return log_offset >= log_min_offset and (size != BLANK_SIZE or log_offset > 0)

        low = max(self.min_offset, self.first_stored_offset)
        self.min_offset = self.first(is_alive, min(low, self.max_offset), self.max_offset)

    def delete_before(self, log_min_offset: int) -> int:
        """Deletes the files all of whose messages are gone, but never the last; says how many."""
        deleted = 0
        while len(self._bases) > 1:
            last = self._file(self._bases[0]).map[-ENTRY_BYTES:]
            if ENTRY.unpack(last)[0] >= log_min_offset:
                break
            self._delete_file(self._bases[0])
            deleted += 1
        self.correct_min_offset(log_min_offset)
        return deleted

    def destroy(self) -> None:
        """Back to an empty queue without files."""
        for base in self._bases[:]:
            self._delete_file(base)
        if self._directory.is_dir():
            shutil.rmtree(self._directory)
        self.min_offset = self.max_offset = 0
        self.write_at = self.write_limit = 0


class QueueTable:
    """All queues of a store, under `<root>/consumequeue/<topic>/<queue id>/`."""

    def __init__(self, directory: Path, entries_per_file: int, pool: MappingPool) -> None:
        self.directory = directory
        self.aside = Aside(directory, directory.with_name(EXT_DIRECTORY))
        self._entries_per_file = entries_per_file
        self._pool = pool
        self._topics: dict[str, dict[int, ConsumeQueue]] = {}
        if directory.is_dir():
            for topic in directory.iterdir():
                for queue in topic.iterdir() if topic.is_dir() and topic.name != DELETED else ():
                    if queue.name.isdigit() and queue.is_dir():
                        self.create(topic.name, int(queue.name))

    def get(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        queues = self._topics.get(topic)
        return None if queues is None else queues.get(queue_id)

    def __iter__(self) -> Iterator[ConsumeQueue]:
        return iter([queue for queues in self._topics.values() for queue in queues.values()])

    def __len__(self) -> int:
        return sum([len(queues) for queues in self._topics.values()])

    def __contains__(self, queue: ConsumeQueue) -> bool:
        """Whether its topic was not deleted."""
        return self.get(queue.topic, queue.queue_id) is queue

    @property
    def topics(self) -> KeysView[str]:
        return self._topics.keys()

    def create(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue, new if there is none yet. Its files come with its first entry."""
        queue = self.get(topic, queue_id)
        if queue is None:
            # The name becomes a directory: whatever the broker lets through, it must stay below ours.
            if not topic or "/" in topic or "\0" in topic or topic in (".", "..", DELETED) or len(topic.encode()) > 255:
                raise StoreError(f"{topic[:300]!r} cannot be the name of a topic")
            directory = self.directory / topic / str(queue_id)
            try:
                queue = ConsumeQueue(topic, queue_id, directory, self._entries_per_file, self._pool)
            except OSError as error:
                raise store_error(error, f"cannot open {directory}") from error
            self._topics.setdefault(topic, {})[queue_id] = queue
        return queue

    def find_ext(self, code_of: Callable[[int], int]) -> None:
        """Lets queues find tag codes that Apache's broker has kept elsewhere; see `queue_ext`."""
        units = self.directory.with_name(EXT_DIRECTORY)
        for queue in self:
            directory = units / queue.topic / str(queue.queue_id)
            ends = (queue.entry(queue.min_offset), queue.entry(queue.max_offset - 1))
            if directory.is_dir() or any(entry is not None and is_address(entry.tag_code) for entry in ends):
                directory.mkdir(parents=True, exist_ok=True)  # tells the next start, even if none is at the ends then
                queue.ext = ExtUnits(directory, code_of)

    def count(self) -> tuple[int, int, int]:
        """How many queues have had entries, how many those were, and for how many of them there are files."""
        used = [queue for queue in self if queue.max_offset]
        entries = sum(queue.max_offset for queue in used)
        return len(used), entries, entries - sum(queue.first_stored_offset for queue in used)

    def remove(self, queue: ConsumeQueue) -> None:
        """Forgets one queue and deletes its files, for good: a power loss brings none of them back."""
        queues = self._topics[queue.topic]
        del queues[queue.queue_id]
        if not queues:
            del self._topics[queue.topic]
        queue.destroy()
        shutil.rmtree(self.directory.with_name(EXT_DIRECTORY) / queue.topic / str(queue.queue_id), ignore_errors=True)
        with suppress(OSError):
            sync_directory(self.directory / queue.topic)

    def delete_topics(self, topics: Iterable[str]) -> None:
        """Forgets all queues of these topics, at once and however many they are. Their files go soon; see `aside`."""
        found = [topic for topic in topics if topic in self._topics]
        if not found:
            return
        queues = [self._topics.pop(topic) for topic in found]
        mapped = self._pool.take_below([self.directory / topic for topic in found])
        for parent in (self.directory, self.directory.with_name(EXT_DIRECTORY)):
            for topic in found:
                self._delete(parent / topic)
        self.aside.add(_let_go(mapped, queues))

    def _delete(self, directory: Path) -> None:
        try:
            self.aside.put(directory)
        except OSError as error:
            log.warning("%s is deleted file by file, which may take long: %s", directory, error)
            shutil.rmtree(directory, ignore_errors=True)
            with suppress(OSError):
                sync_directory(directory.parent)

    def destroy(self) -> None:
        self.delete_topics(list(self._topics))


def _let_go(mapped: list[Segment], topics: list[dict[int, ConsumeQueue]]) -> Iterator[None]:
    """What takes time even in memory."""
    for segment in mapped:
        segment.close()
        yield
    for queues in topics:
        while queues:
            queues.popitem()
            yield
