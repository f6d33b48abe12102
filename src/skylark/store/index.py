"""Finds messages by key: Apache's index files, byte for byte.

A file is a chained hash table of fixed size, named by the local time of its creation (yyyyMMddHHmmssSSS):

    header   40 bytes   begin timestamp ms (8), end timestamp ms (8), begin log offset (8), end log offset (8),
                        slots in use (4), next entry number (4)
    slots    4 each     number of the newest entry whose hash falls into this slot, 0 when there is none
    entries  20 each    key hash (4), log offset (8), seconds since the begin timestamp (4), previous entry (4)

All integers are big-endian. Entries are numbered from 1 (number 0 means "none" and its 20 bytes stay unused), so a file
for N entries holds N - 1. The hash is that of "topic#key"; what shall be found by tag is put under the key "T#tags".

Invariants:
- entries are in the order of the log, a chain leads to ever smaller entry numbers, and an entry never changes;
- entries are written together, after the slots that point to them and before they are counted; the header is written
  when the file is flushed, full or closed, and until then tells of fewer entries than there are;
- no byte is written through the mapping before the disk space under it was reserved: a full disk raises OSError(ENOSPC)
  in `put` instead of killing the process with SIGBUS. The message itself is then safe in the log: the caller goes on
  without its keys, and puts again what lies from `next_log_offset` on in the log, before anything else;
- the event loop's thread calls everything but `flush`, which belongs to the flush thread.

The index is derived from the log. After a crash `recover` keeps what was known to be on disk, and the caller dispatches
the log again from the offset that it returns.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from librt.strings import BytesWriter, write_i32_be, write_i64_be
from mypy_extensions import i32, i64

from skylark.store.api import StoreError
from skylark.store.segments import sync_directory
from skylark.wire.message import KEY_SEPARATOR
from skylark.wire.records import BatchPart, java_hash, java_hash_of

log = logging.getLogger(__name__)

HEADER = struct.Struct(">qqqqii")
ENTRY = struct.Struct(">iqii")
SLOT = struct.Struct(">i")
_HASH_AND_OFFSET = struct.Struct(">iq8x")
_IS_LITTLE_ENDIAN: Final = sys.byteorder == "little"

_FIRST_ENTRY: Final = 1
_SPACE: Final = ord(KEY_SEPARATOR)
_TAG_PREFIX: Final = b"T#"
_RESERVE_BYTES = 4 << 20
_SCAN_ENTRIES = 1 << 15
_MAX_SECONDS: Final = 0x7FFF_FFFF
_MAX_TOPIC_LENGTH: Final = 255
# A chain of one hot tag can be as long as the file; a query must not take seconds because of it.
_MAX_CHAIN_STEPS = 500_000
_CHAIN_STEPS_PER_TURN = 16_384


class BadIndexFile(StoreError):
    """An index file does not have the size that the configured numbers of slots and entries give."""


@lru_cache(maxsize=4096)
def topic_seed(topic: str) -> int:
    """The hash of what stands before each key of a topic."""
    return java_hash(topic + "#")


def key_hash(topic: str, key: str) -> int:
    """The non-negative hash under which Apache files "topic#key".

    >>> key_hash("TopicTest", "order-1")
    1829193424
    """
    # Whoever asks may name anything: only what can be a topic is worth remembering.
    seed = topic_seed(topic) if len(topic) <= _MAX_TOPIC_LENGTH else java_hash(topic + "#")
    return int(_positive(java_hash(key, seed)))


def filed_hash(data: bytes, at: i64, end: i64, seed: i64) -> i64:
    """The same of a key that is a part of some UTF-8; `seed` is that of the topic."""
    return _positive(java_hash_of(data, at, end, seed))


def _positive(code: i64) -> i64:
    # Java's Math.abs has no positive answer for the smallest int; Apache then takes 0.
    if code == -0x8000_0000:
        return 0
    return -code if code < 0 else code


def _big_endian(number: i64) -> i64:
    """A number of four bytes as it looks in a slot, or the other way round."""
    if not _IS_LITTLE_ENDIAN:
        return number
    return (number & 0xFF) << 24 | (number & 0xFF00) << 8 | number >> 8 & 0xFF00 | number >> 24 & 0xFF


class IndexFile:
    """One mapped file. New entries are kept until `write_entries`, the header until `write_header`."""

    def __init__(self, path: Path, slots: int, entries: int) -> None:
        self.path = path
        self.slots: i64 = slots
        self.entries: i64 = entries
        self.entries_at: i64 = HEADER.size + slots * SLOT.size
        self.size_bytes = self.entries_at + entries * ENTRY.size
        self.sealed_on_disk = False
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(self.fd).st_size
            if size == 0:
                os.ftruncate(self.fd, self.size_bytes)
            elif size != self.size_bytes:
                raise BadIndexFile(
                    f"{path} has {size} bytes, but maxHashSlotNum={slots} and maxIndexNum={entries} need"
                    f" {self.size_bytes}: restore the settings it was written with, or remove the file"
                )
            self.map = mmap.mmap(self.fd, self.size_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        begin_ms, end_ms, begin_offset, end_offset, used_slots, count = HEADER.unpack_from(self.map)
        self.begin_ms: i64 = begin_ms
        self.end_ms: i64 = end_ms
        self.begin_offset: i64 = begin_offset
        self.end_offset: i64 = end_offset
        self.used_slots: i64 = used_slots
        self.count: i64 = min(max(count, _FIRST_ENTRY), entries)
        # Entries below this number have disk space under them; nothing is assumed about a file that was found.
        self.reserved: i64 = _FIRST_ENTRY
        self._slots_view = memoryview(self.map)[HEADER.size : self.entries_at].cast("I")
        self._new = BytesWriter()
        self.next_number: i64 = self.count
        self._last_offset: i64 = end_offset
        self._last_ms: i64 = end_ms

    @property
    def full(self) -> bool:
        return self.count >= self.entries

    @property
    def empty(self) -> bool:
        return self.count <= _FIRST_ENTRY

    def reserve(self) -> None:
        """Takes disk space for the next entries, and once for header and slots. Raises OSError when there is none."""
        if self.reserved <= _FIRST_ENTRY:
            self.reserve_slots()
        start = self.entries_at + self.count * ENTRY.size
        length = min(_RESERVE_BYTES, self.size_bytes - start)
        os.posix_fallocate(self.fd, start, length)
        self._release(start)
        self.reserved = self.count + length // ENTRY.size

    def _release(self, until: int) -> None:
        """Entries are written once and hardly ever read: what they take up is left to the system's cache."""
        first = self.entries_at + mmap.PAGESIZE - self.entries_at % mmap.PAGESIZE
        whole_pages = (until - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if whole_pages > 0:
            self.map.madvise(mmap.MADV_DONTNEED, first, whole_pages)

    def reserve_slots(self) -> None:
        os.posix_fallocate(self.fd, 0, self.entries_at)

    def add(self, code: i64, log_offset: i64, store_timestamp_ms: i64) -> None:
        """Adds an entry; the caller made sure of space."""
        number = self.next_number
        slot = code % self.slots
        previous = _big_endian(self._slots_view[slot])
        if previous <= 0 or previous >= number:
            previous = 0
            self.used_slots += 1
        self._slots_view[slot] = _big_endian(number)
        seconds: i64 = 0
        if 0 < self.begin_ms < store_timestamp_ms:
            seconds = (store_timestamp_ms - self.begin_ms) // 1000
            if seconds > _MAX_SECONDS:
                seconds = _MAX_SECONDS
        if number <= _FIRST_ENTRY:
            self.begin_offset = log_offset
            self.begin_ms = store_timestamp_ms
        new = self._new
        write_i32_be(new, i32(code))
        write_i64_be(new, log_offset)
        write_i32_be(new, i32(seconds))
        write_i32_be(new, i32(previous))
        self.next_number = number + 1
        self._last_offset = log_offset
        self._last_ms = store_timestamp_ms

    def write_entries(self) -> None:
        """Writes and counts what was added."""
        start = self.entries_at + self.count * 20
        end = self.entries_at + self.next_number * 20
        self.map[start:end] = self._new.getvalue()
        self._new.truncate(0)
        self.end_offset = self._last_offset
        self.end_ms = self._last_ms
        self.count = self.next_number

    def write_header(self) -> None:
        HEADER.pack_into(
            self.map, 0, self.begin_ms, self.end_ms, self.begin_offset, self.end_offset, self.used_slots, self.count
        )

    def overlaps(self, begin_ms: int, end_ms: int) -> bool:
        return begin_ms <= self.end_ms and end_ms >= self.begin_ms

    def select(self, code: int, max_count: int, begin_ms: int, end_ms: int, found: list[int]) -> Iterator[None]:
        """Adds to `found`, newest first, the log offsets filed under this hash in this span of time. Gives way now and
        then, after which the file may be closed.
        """
        (number,) = SLOT.unpack_from(self.map, HEADER.size + code % self.slots * 4)
        upper = self.count
        for step in range(1, _MAX_CHAIN_STEPS + 1):
            # Only ever downwards: a damaged chain ends, it never loops.
            if not 0 < number < upper or len(found) >= max_count:
                return
            entry_code, log_offset, seconds, previous = ENTRY.unpack_from(self.map, self.entries_at + number * 20)
            time_ms = self.begin_ms + seconds * 1000
            if entry_code == code and begin_ms <= time_ms <= end_ms:
                found.append(log_offset)
            if seconds < 0 or time_ms < begin_ms:
                return
            upper, number = number, previous
            if step % _CHAIN_STEPS_PER_TURN == 0:
                yield
                if self.map.closed:
                    return
        log.warning("gave up a key lookup in %s after %d entries with the same hash slot", self.path, _MAX_CHAIN_STEPS)

    def cut(self, log_offset: int) -> None:
        """Keeps the leading entries that are whole and below `log_offset`, and builds the slots again from them.

        Nothing but the entries is trusted: after a power loss any page beyond the last flush may be old or new, and
        a page that never reached the disk shows as zeros, or as an offset that goes back.
        """
        heads = array("i", bytes(self.slots * 4))
        kept, last, used = _FIRST_ENTRY, self.begin_offset, 0
        while kept < self.count:
            start = self.entries_at + kept * ENTRY.size
            stop = min(start + _SCAN_ENTRIES * ENTRY.size, self.entries_at + self.count * ENTRY.size)
            expected = kept + (stop - start) // ENTRY.size
            for code, offset in _HASH_AND_OFFSET.iter_unpack(self.map[start:stop]):
                if not last <= offset < log_offset or code < 0 or not (code or offset):
                    break
                slot = code % self.slots
                used += not heads[slot]
                heads[slot] = kept
                last = offset
                kept += 1
            if kept < expected:
                break
        if struct.pack("=i", 1) != SLOT.pack(1):
            heads.byteswap()
        self.map[HEADER.size : self.entries_at] = heads.tobytes()
        if kept > _FIRST_ENTRY:
            _, _, seconds, _ = ENTRY.unpack_from(self.map, self.entries_at + (kept - 1) * ENTRY.size)
            # The exact millisecond of an entry is not stored; its second is.
            self.end_ms = min(self.end_ms, self.begin_ms + seconds * 1000 + 999)
        self.end_offset, self.used_slots, self.count = last, used, kept
        self.next_number, self._last_offset, self._last_ms = kept, last, self.end_ms
        self.write_header()

    def slots_point_past_end(self) -> bool:
        """Whether a put was interrupted between its slot and the header."""
        heads = array("i", self.map[HEADER.size : self.entries_at])
        if struct.pack("=i", 1) != SLOT.pack(1):
            heads.byteswap()
        return max(heads, default=0) >= self.count

    def close(self) -> None:
        self._slots_view.release()
        self.map.close()
        os.close(self.fd)

    def delete(self) -> None:
        self.close()
        self.path.unlink()


class IndexService:
    """The index files of a store. See the module's docstring for what the caller does when `put` raises."""

    def __init__(self, directory: Path, slots: int, entries: int) -> None:
        if slots < 1 or entries < 2:
            raise ValueError(f"an index needs at least 1 slot and 2 entries, not {slots} and {entries}")
        self._directory = directory
        self._slots = slots
        self._entries = entries
        self._files: list[IndexFile] = []
        self._files_lock = threading.Lock()
        self._sync_failed = False
        self._has_new_file = True  # whose name may not be on disk
        directory.mkdir(parents=True, exist_ok=True)
        for path in sorted(directory.iterdir()):
            if path.name.isdigit() and path.is_file():
                self._load(path)
        self._next_log_offset = self._indexed_end()
        self._durable_log_offset = self._next_log_offset
        self._sealed_timestamp_ms = 0

    def _load(self, path: Path) -> None:
        if path.stat().st_size == 0:
            # The process stopped between creating the file and giving it its size.
            path.unlink()
            return
        try:
            self._files.append(IndexFile(path, self._slots, self._entries))
        except BaseException:
            for file in self._files:
                file.close()
            raise

    def _indexed_end(self) -> int:
        return next((file.end_offset + 1 for file in reversed(self._files) if not file.empty), 0)

    @property
    def last_log_offset(self) -> int:
        """Log offset of the newest indexed message, as Apache reports it in the answer to a query."""
        return self._files[-1].end_offset if self._files else 0

    @property
    def last_timestamp_ms(self) -> int:
        """Store time of the newest indexed message, as Apache reports it in the answer to a query."""
        return self._files[-1].end_ms if self._files else 0

    @property
    def next_log_offset(self) -> int:
        """Every message that starts below this log offset has been put; `put` ignores it when it comes again."""
        return self._next_log_offset

    @property
    def durable_log_offset(self) -> int:
        """Everything put below this log offset survives a power loss. Belongs into the checkpoint."""
        return self._durable_log_offset

    @property
    def sealed_timestamp_ms(self) -> int:
        """End time of the newest full file that `flush` brought to disk, 0 before the first. Belongs into the
        checkpoint: Apache trusts, after a crash, the files that end no later than this."""
        return self._sealed_timestamp_ms

    def put(self, topic: str, keys: Sequence[str], log_offset: int, store_timestamp_ms: int) -> None:
        """Files the message at `log_offset` under each of its keys (without keys: only notes that it was seen).

        Raises OSError when the disk has no space for it. Some of the keys may have been filed by then.
        """
        if log_offset < self._next_log_offset:
            return
        try:
            for key in keys:
                self._add(key_hash(topic, key), log_offset, store_timestamp_ms)
            self._next_log_offset = log_offset + 1
        finally:
            self._write_entries()

    def put_all(self, topic: str, parts: list[BatchPart], log_offsets: list[int], store_timestamp_ms: int) -> None:
        """Files messages by what their properties say. What is said of `put` holds for each."""
        seed = i64(topic_seed(topic))
        try:
            for number, log_offset in enumerate(log_offsets):
                if log_offset >= self._next_log_offset:
                    self._put_stored(seed, parts[number], log_offset, store_timestamp_ms)
                    self._next_log_offset = log_offset + 1
        finally:
            self._write_entries()

    def _put_stored(self, seed: i64, part: BatchPart, log_offset: i64, store_timestamp_ms: i64) -> None:
        """Files a message under its unique key, each of its keys, and "T#" with its tags."""
        properties = part.properties
        scan = part.scan
        if scan.unique_end:
            code = filed_hash(properties, scan.unique_at, scan.unique_end, seed)
            self._add(code, log_offset, store_timestamp_ms)
        if scan.keys_end:
            word_at = scan.keys_at
            for at in range(scan.keys_at, scan.keys_end + 1):
                if at == scan.keys_end or i64(properties[at]) == _SPACE:
                    if at > word_at:
                        self._add(filed_hash(properties, word_at, at, seed), log_offset, store_timestamp_ms)
                    word_at = at + 1
        if scan.tags_end:
            tags_seed = java_hash_of(_TAG_PREFIX, 0, len(_TAG_PREFIX), seed)
            code = filed_hash(properties, scan.tags_at, scan.tags_end, tags_seed)
            self._add(code, log_offset, store_timestamp_ms)

    def _add(self, code: i64, log_offset: i64, store_timestamp_ms: i64) -> None:
        file = self._files[-1] if self._files else None
        if file is None or file.next_number >= file.reserved:
            file = self._with_space(store_timestamp_ms)
        file.add(code, log_offset, store_timestamp_ms)

    def _write_entries(self) -> None:
        if self._files:
            self._files[-1].write_entries()

    def _with_space(self, now_ms: int) -> IndexFile:
        """The last file, or a new one after it, with disk space for at least one more entry."""
        last = self._files[-1] if self._files else None
        if last is not None:
            last.write_entries()
            last.write_header()
            if not last.full:
                last.reserve()
                return last
        file = IndexFile(self._directory / self._new_name(now_ms), self._slots, self._entries)
        try:
            file.reserve()
        except OSError:
            file.delete()
            raise
        if last is not None:
            file.begin_offset = file.end_offset = last.end_offset
            file.begin_ms = file.end_ms = last.end_ms
        with self._files_lock:
            self._files.append(file)
            self._has_new_file = True
        return file

    def _new_name(self, now_ms: int) -> str:
        seconds, millis = divmod(now_ms, 1000)
        name = time.strftime("%Y%m%d%H%M%S", time.localtime(seconds)) + f"{millis:03d}"
        if self._files and name <= self._files[-1].path.name:
            # The files are sorted by name when they are loaded, whatever the clock has done in between.
            name = f"{int(self._files[-1].path.name) + 1:017d}"
        return name

    def query(self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int) -> list[int]:
        """Log offsets, newest first, of messages that may have this key: only the hash was compared."""
        found: list[int] = []
        for _ in self.search(topic, key, max_count, begin_ms, end_ms, found):
            pass
        return found

    def search(
        self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int, found: list[int]
    ) -> Iterator[None]:
        """The same, into `found`; gives way now and then."""
        code = key_hash(topic, key)
        for file in self._files[::-1]:
            if file.map.closed:  # deleted meanwhile, and with it the older ones
                return
            if not file.empty and file.overlaps(begin_ms, end_ms):
                yield from file.select(code, max_count, begin_ms, end_ms, found)
            if len(found) >= max_count or file.begin_ms < begin_ms:
                return

    def flush(self) -> None:
        """Brings all files to disk; a full file only once. For the flush thread; blocks. Raises OSError.

        Slots are hit at random, so each flush may write the whole slot table (20 MB): every 10 s is often enough, the
        only price is a longer `recover`.
        """
        with self._files_lock:
            end = self._next_log_offset
            pending = self._open_again()
            has_new_file, self._has_new_file = self._has_new_file, False
        try:
            if has_new_file:
                self._sync_names()
            self._sync(pending)
        finally:
            for _, _, fd in pending:
                os.close(fd)
        if not self._sync_failed:
            self._durable_log_offset = end

    def _open_again(self) -> list[tuple[IndexFile, bool, int]]:
        """The files to be synced, with headers; whether each is full; and descriptors, since the event loop may delete
        a file meanwhile."""
        pending: list[tuple[IndexFile, bool, int]] = []
        try:
            for file in self._files:
                if not file.sealed_on_disk:
                    pending.append((file, file.full, os.dup(file.fd)))
        except OSError:
            for _, _, fd in pending:
                os.close(fd)
            raise
        for file, _, _ in pending:
            file.write_header()
        return pending

    def _sync_names(self) -> None:
        try:
            sync_directory(self._directory)
        except OSError:
            self._has_new_file = True
            raise

    def _sync(self, pending: list[tuple[IndexFile, bool, int]]) -> None:
        for file, full, fd in pending:
            try:
                os.fdatasync(fd)
            except OSError:
                # The kernel drops the pages that it failed to write: no later success says anything about them.
                self._sync_failed = True
                raise
            if full:
                file.sealed_on_disk = True
                self._sealed_timestamp_ms = file.end_ms

    def recover(self, index_ms: int, durable_log_offset: int, log_end_offset: int) -> int:
        """After a crash: keeps what is known to be whole, returns the log offset to dispatch again from.

        A file that ends no later than `index_ms` is kept as Apache keeps it; of the others what lies below
        `durable_log_offset`. Nothing at or beyond `log_end_offset`, the end of the recovered log, stays.

        The checkpoint must get the new `durable_log_offset`, on disk, before anything is appended to the log.
        """
        sealed_end = next((f.end_offset + 1 for f in reversed(self._files) if not f.empty and f.end_ms <= index_ms), 0)
        return self.truncate_from(min(max(durable_log_offset, sealed_end), log_end_offset))

    def truncate_from(self, log_offset: int) -> int:
        """Drops the entries of all messages at and after `log_offset`. Returns the new `next_log_offset`."""
        while self._files:
            file = self._files[-1]
            if not file.empty and (file.end_offset >= log_offset or file.slots_point_past_end()):
                self._cut(file, log_offset)
            if not file.empty:
                break
            with self._files_lock:
                self._files.pop()
            file.delete()
        self._next_log_offset = self._indexed_end()
        self._durable_log_offset = min(self._durable_log_offset, self._next_log_offset)
        return self._next_log_offset

    def _cut(self, file: IndexFile, log_offset: int) -> None:
        try:
            file.reserve_slots()
        except OSError as error:
            # A sparse file on a full disk: rather build its part of the index again than not start.
            log.warning("dropping %s, which cannot be repaired: %s", file.path, error)
            file.count = _FIRST_ENTRY
            return
        file.cut(log_offset)
        file.sealed_on_disk = False

    def delete_before(self, log_min_offset: int) -> int:
        """Deletes the files all of whose messages are gone from the log, but never the last. Returns how many."""
        deleted = 0
        while len(self._files) > 1 and self._files[0].end_offset < log_min_offset:
            with self._files_lock:
                file = self._files.pop(0)
            file.delete()
            deleted += 1
        return deleted

    def close(self) -> None:
        """Flushes and closes. Raises OSError, with everything closed, when the flush failed or an earlier one had."""
        try:
            self.flush()
        finally:
            with self._files_lock:
                files, self._files = self._files, []
            for file in files:
                file.close()
        if self._sync_failed:
            raise OSError("an earlier flush of the index failed, its files are not to be trusted")
