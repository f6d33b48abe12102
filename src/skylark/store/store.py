"""`Store`: a directory of messages, in Apache's layout.

    <root>/commitlog/   the log                         <root>/checkpoint   what is known to be on disk
    <root>/consumequeue/<topic>/<queue id>/             <root>/abort        there while the store is open
    <root>/index/       lookup by key                   <root>/lock         locked while the store is open
    <root>/deletedTopics   what the log still holds of them counts no more

One thread, that of the event loop, calls everything here. A message is in the log, in its queue and in the index when
`append` returns, and on disk when `when_flushed` says so.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from librt.strings import BytesWriter
from mypy_extensions import i64

from skylark.store import open_files
from skylark.store.api import (
    CleanReport,
    DiskFull,
    LogRecord,
    MessageTooLarge,
    NotWriteable,
    PropertiesTooLarge,
    QueryResult,
    QueueEntry,
    ReadResult,
    StoreConfig,
    StoreError,
    parse_delay_levels,
)
from skylark.store.appended import Appended
from skylark.store.checkpoint import Checkpoint
from skylark.store.commitlog import BLANK_BYTES, RESERVE_STEP_BYTES, CommitLog
from skylark.store.consumequeue import ENTRY_BYTES, ConsumeQueue, QueueTable
from skylark.store.deleted import DeletedTopics
from skylark.store.dispatch import UNQUEUED, Dispatcher, Progress, QueueEntries, code_of, queue_tag_code
from skylark.store.flush import Done, Flusher
from skylark.store.index import IndexService
from skylark.store.lock import DirectoryLock
from skylark.store.logscan import LogScan
from skylark.store.reading import MAX_READ_BYTES, QueueReader
from skylark.store.recovery import recover
from skylark.store.retention import Retention
from skylark.store.segments import MappingPool, store_error, sync_directory
from skylark.store.tables import config_directory
from skylark.wire.message import (
    PROPERTIES_MAX_BYTES,
    SYS_BORN_HOST_V6,
    SYS_STORE_HOST_V6,
    SYS_TRANSACTION_MASK,
    SYS_TRANSACTION_ROLLBACK,
    BadRecord,
    Message,
    StoredMessage,
)
from skylark.wire.records import (
    BATCH_PART_BYTES,
    BatchPart,
    decode_record,
    encode_properties,
    host_bits,
    record_size,
    write_record,
)

log = logging.getLogger(__name__)

Listener = Callable[[str, int, int, Sequence[int]], None]
"""Told of messages in a queue: topic, queue id, offset of the first, and the tag code of each."""
_QUERY_MAX_COUNT = 64
_INDEX_CATCH_UP = 16  # messages, with each that comes
_MOST_BYTES_AGAIN = 128 << 20  # of the log
_INDEX_CATCH_UP_ROUND = 2000  # in each round of retention
_HOST_BITS = SYS_BORN_HOST_V6 | SYS_STORE_HOST_V6
_CLOSED = "the store is closed"


class Store:
    """Messages on disk. Made by `Store.open`, ended by `close`; see the module's docstring."""

    def __init__(self, config: StoreConfig, lock: DirectoryLock) -> None:
        """For `open`, which says whether the last stop was a clean one."""
        root = config.root
        self.config = config
        self.listeners: tuple[Listener, ...] = ()
        self._directory_lock = lock
        self._abort_path = root / "abort"
        self._delays_ms = parse_delay_levels(config.delay_levels)
        self._log = CommitLog(config.commit_log_dir or root / "commitlog", config.segment_bytes)
        self._pool = MappingPool(min(config.max_mapped_queue_files, open_files.allow_all() // 4))
        self._queues = QueueTable(root / "consumequeue", config.queue_entries_per_file, self._pool)
        self._checkpoint = Checkpoint(root / "checkpoint")
        self._index = None
        if config.index_enabled:
            if not (root / "index").is_dir():
                self._checkpoint.index_log_offset = 0
            self._index = IndexService(root / "index", config.index_slots, config.index_entries)
        self._disk_full = False
        self._refusal: str | None = None
        self._store_host = config.store_host
        clean = self.was_clean = not self._abort_path.exists()
        began_s = time.monotonic()
        self._deleted = DeletedTopics(root / "deletedTopics")
        self._progress = Progress()
        self._dispatcher = Dispatcher(self._queues, self._index, self._delays_ms, self._progress, self._deleted)
        found = recover(
            self._log, self._queues, self._index, self._checkpoint, self._dispatcher, self._distrust_queues, clean=clean
        )
        self._index_behind = found.index_behind
        # What was written before this is in the log; of what came later, some may be lost although the rest is there.
        self.whole_until = found.whole_until
        self._deleted.keep_within(self._log.min_offset, found.end_offset)
        # After a clean stop there is nothing to say; a crash, and what it cost, is for whoever runs this to know.
        log.log(
            logging.INFO if clean else logging.WARNING,
            "%s: opened in %.1f s after %s stop: log from %d to %d, %d queues; %d records checked from %d on, %s",
            root, time.monotonic() - began_s, "a clean" if clean else "an unclean",
            self._log.min_offset, found.end_offset, len(self._queues), found.record_count, found.start_offset,
            found.state,
        )  # fmt: skip
        self._progress.last_log_offset = found.last_log_offset
        self._progress.last_store_ms = found.last_store_ms
        self._queues.find_ext(self._code_of)
        self._reader = QueueReader(config, self._log, self._queues)
        self._flusher = Flusher(config, self._log, self._index, self._checkpoint, self._progress, self._fence)
        self._flusher.flushed_offset = self._log.end_offset if clean else found.start_offset
        self._retention = Retention(config, self._log, self._queues, self._index, lambda: self._flusher.flushed_offset)
        if not clean:
            # Whatever the crash left in memory only is brought to disk before it is built upon.
            self._flusher.flush_log()

    @classmethod
    def open(cls, config: StoreConfig, *, flushes: bool = True) -> Store:
        """Opens the directory, or makes it, and recovers what it holds. Blocks; raises `StoreError`.

        Without `flushes` nothing is brought to disk by itself until `start_flushing`. After an unclean stop that is for
        whoever derives something from the log: once a checkpoint has passed a gap, the next start knows of none.
        """
        try:
            log_dir = config.commit_log_dir or config.root / "commitlog"
            log_dir.mkdir(parents=True, exist_ok=True)
            (config.root / "consumequeue").mkdir(parents=True, exist_ok=True)
            lock = DirectoryLock(config.root / "lock", config.root, log_dir)
            try:
                store = cls(config, lock)
                store._mark_open()
            except BaseException:
                lock.release()
                raise
        except OSError as error:
            raise StoreError(f"cannot open the store in {config.root}: {error}") from error
        store._warn_of_little_space()
        if flushes:
            store.start_flushing()
        return store

    def start_flushing(self) -> None:
        self._flusher.start()
        self._queues.aside.start()

    def _warn_of_little_space(self) -> None:
        """Tells before the first message is refused; blocks may be reserved already, so that it is not sure to be."""
        free = shutil.disk_usage(self._log.directory).free
        needed = min(self.config.segment_bytes, RESERVE_STEP_BYTES)
        if free < needed:
            log.warning(
                "%s: %d KiB are free, messages may be refused below %d KiB",
                self._log.directory,
                free >> 10,
                needed >> 10,
            )

    def _mark_open(self) -> None:
        self._abort_path.touch()
        sync_directory(self.config.root)  # a power cut must not make this look like a clean stop
        try:
            self._abort_path.write_text(str(os.getpid()))
        except OSError as error:
            # On a full disk the store opens nevertheless: it is the file that counts, not what it says.
            log.warning("%s stays empty: %s", self._abort_path, error)
        # Without the marker a power loss would pass for a clean stop, and without their names files are not found: that
        # of a segment, or of a table that was written anew, may be in memory only, if the process that made it was
        # killed.
        root, log_directory, tables = self.config.root, self._log.directory, config_directory(self.config.root)
        for directory in (root, root.parent, log_directory, log_directory.parent, tables):
            if directory.is_dir():
                sync_directory(directory)

    def _distrust_queues(self) -> None:
        """The queues are about to be made again: a crash before they are on disk must lead to the whole log."""
        self._mark_open()
        checkpoint = self._checkpoint
        checkpoint.physic_ms = checkpoint.logics_ms = checkpoint.logics_offset = checkpoint.counted_log_end = 0
        checkpoint.flush()

    # --- writing ------------------------------------------------------------------------------------------------------
    def append(self, message: Message, now_ms: int) -> Appended:
        """Stores one message; nothing is stored when it raises."""
        part = BatchPart(message.flag, message.body, encode_properties(message.properties))
        return self.append_batch(message, [part], now_ms)

    def append_batch(self, message: Message, parts: list[BatchPart], now_ms: int) -> Appended:
        """Stores messages side by side in the log and in their queue; all of them or, raising, none. The hot path.

        `message` is what they have in common.
        """
        queue = self._open_queue(message.topic, message.queue_id)
        store_host = self._store_host
        sys_flag = message.sys_flag & ~_HOST_BITS | host_bits(message.born_host, store_host)
        fixed_size = i64(record_size(message.born_host, store_host, queue.topic_bytes))
        total = i64(len(parts)) * fixed_size + self._variable_bytes(parts)
        queued = sys_flag & SYS_TRANSACTION_MASK not in UNQUEUED
        commit_log = self._log
        queue_is_short = queued and queue.write_at + len(parts) * ENTRY_BYTES > queue.write_limit
        log_is_short = commit_log.position + total + BLANK_BYTES > commit_log.limit
        if queue_is_short or log_is_short:
            self._make_room(queue if queue_is_short else None, len(parts), total if log_is_short else 0)
        log_offset = i64(commit_log.end_offset)
        queue_offset = i64(queue.max_offset if queued else 0)
        stored = Appended([], total, queue_offset, now_ms, store_host)
        records = BytesWriter()
        entries = QueueEntries()
        for part in parts:
            size = fixed_size + i64(len(part.body)) + i64(len(part.properties))
            write_record(
                records, message, part, size, queue.magic, sys_flag, queue_offset, log_offset, now_ms, store_host,
                queue.topic_bytes,
            )  # fmt: skip
            entries.add(log_offset, size, queue_tag_code(queue.topic, part, now_ms, self._delays_ms))
            stored.log_offsets.append(int(log_offset))
            log_offset += size
            if queued:
                queue_offset += 1
        commit_log.write(records.getvalue())
        self._progress.last_log_offset = stored.log_offsets[-1]
        self._progress.last_store_ms = now_ms
        if queued:
            self._put_in_queue(queue, entries)
        if self._index is not None and sys_flag & SYS_TRANSACTION_MASK != SYS_TRANSACTION_ROLLBACK:
            self._put_in_index(queue.topic, parts, stored)
        return stored

    def _open_queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue to append to, if messages are taken at all."""
        if self._refusal is not None or self._retention.space_refusal is not None:
            raise NotWriteable(self._refusal or self._retention.space_refusal)
        return self._queues.get(topic, queue_id) or self._queues.create(topic, queue_id)

    def _make_room(self, queue: ConsumeQueue | None, count: int, log_bytes: int) -> None:
        """Takes blocks for entries of a queue and bytes of the log; what fails is told once, not for each message."""
        try:
            if queue is not None:
                self._make_room_in_queue(queue, count)
            if log_bytes:
                self._make_room_in_log(log_bytes)
        except DiskFull as error:
            if not self._disk_full:
                log.warning("no messages are taken: %s", error)
            self._disk_full = True
            raise
        if self._disk_full:
            log.warning("there is space in %s: messages are taken again", self.config.root)
        self._disk_full = False

    def _make_room_in_queue(self, queue: ConsumeQueue, count: int) -> None:
        try:
            queue.make_room(count)
        except OSError as error:
            raise store_error(error, f"cannot write to queue {queue.topic}-{queue.queue_id}") from error

    def _make_room_in_log(self, size_bytes: int) -> None:
        """What is wrong with the log is no fault of the message: none is taken now."""
        try:
            self._log.make_room(size_bytes)
        except (MessageTooLarge, NotWriteable):
            raise
        except (OSError, StoreError) as error:
            raise NotWriteable(f"cannot write to the log: {error}") from error

    def _variable_bytes(self, parts: list[BatchPart]) -> i64:
        """The size of bodies and properties together, if messages may have such."""
        most = i64(self.config.max_message_bytes)
        total: i64 = 0
        for part in parts:
            body_size = i64(len(part.body))
            properties_size = i64(len(part.properties))
            if body_size > most:
                raise MessageTooLarge(f"a body of {body_size} bytes, {most} are allowed")
            if properties_size > PROPERTIES_MAX_BYTES:
                raise PropertiesTooLarge(f"properties of {properties_size} bytes, {PROPERTIES_MAX_BYTES} are allowed")
            total += body_size + properties_size
        count = i64(len(parts))
        if count > 1 and total + count * BATCH_PART_BYTES > most:
            raise MessageTooLarge(f"a batch of {total + count * BATCH_PART_BYTES} bytes, {most} are allowed")
        return total

    def _put_in_queue(self, queue: ConsumeQueue, entries: QueueEntries) -> None:
        """Files messages that were just written to the log, and tells of them."""
        queue_offset = queue.max_offset
        self._progress.put(queue, entries.packed)
        for tell in self.listeners:
            tell(queue.topic, queue.queue_id, queue_offset, entries.codes)

    def _put_in_index(self, topic: str, parts: list[BatchPart], stored: Appended) -> None:
        assert self._index is not None
        if self._index_behind:
            self._catch_up_index(_INDEX_CATCH_UP)
            return
        try:
            self._index.put_all(topic, parts, stored.log_offsets, stored.store_timestamp_ms)
        except OSError as error:
            # The messages are stored; only those who look for them by key will miss them for a while.
            log.error("messages are not found by key until the index can be written again: %s", error)
            self._index_behind = True

    def _catch_up_index(self, most: int) -> None:
        """Files the next messages that the index had no room for: in the order of the log, as all are."""
        index = self._index
        assert index is not None
        start = index.next_log_offset - 1  # the last that was filed
        if self._log.record(start) is None:
            start = self._log.min_offset
        try:
            for number, record in enumerate(LogScan(self._log, start)):
                self._dispatcher.to_index(record)
                if number >= most:
                    return
        except OSError:
            return
        log.warning("all messages are found by key again")
        self._index_behind = False

    def when_flushed(self, log_end_offset: int, done: Done) -> None:
        """Calls `done` when the log is on disk up to an offset, or with the reason why that will not happen."""
        self._flusher.when_flushed(log_end_offset, done)

    def flush_log(self) -> bool:
        """Brings the log to disk now, and says whether it is there. Blocks."""
        return self._flusher.flush_log()

    def flush(self) -> None:
        """Brings log, queues, index and checkpoint to disk now. Blocks."""
        self._flusher.flush_derived(with_index=True)

    def _fence(self, reason: str) -> None:
        self._refusal = reason

    # --- reading ------------------------------------------------------------------------------------------------------
    def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_count: int,
        max_bytes: int = MAX_READ_BYTES,
        wants: frozenset[int] | None = None,
        accepts: Callable[[bytes], bool] | None = None,
    ) -> ReadResult:
        """Messages of a queue from an offset on: those whose tag code is wanted and whose record is accepted.

        What Apache's `getMessage` does; see `reading`. Bodies are not checked against their checksums.
        """
        return self._reader.read(topic, queue_id, offset, max_count, max_bytes, wants, accepts)

    def is_cached(self, topic: str, queue_id: int, offset: int) -> bool:
        """Whether there is a message at an offset, so new that it is thought to be in memory."""
        return self._reader.is_cached(topic, queue_id, offset)

    def entry(self, topic: str, queue_id: int, offset: int) -> QueueEntry | None:
        queue = self._queues.get(topic, queue_id)
        return queue.entry(offset) if queue is not None else None

    def record_at(self, log_offset: int, size_bytes: int | None = None) -> memoryview | None:
        """The record at a log offset, as it is stored and unchecked; None when there is none."""
        return self._log.record(log_offset) if size_bytes is None else self._log.slice(log_offset, size_bytes)

    def message_at(self, log_offset: int) -> StoredMessage | None:
        """The message at a log offset; None when there is none or its body fails the checksum."""
        record = self._log.record(log_offset)
        if record is None:
            return None
        try:
            return decode_record(record)
        except BadRecord as error:
            log.error("the record at log offset %d is damaged: %s", log_offset, error)
            return None

    def _code_of(self, log_offset: int) -> int:
        """What the entry of a message has in its tag field; 0 when there is no such message."""
        record = self._log.record(log_offset)
        return 0 if record is None else code_of(record, log_offset, self._delays_ms)

    def scan(self, from_log_offset: int) -> Iterator[LogRecord]:
        """The records of the log from an offset on, at which one starts; for what is derived from them at the start."""
        return iter(LogScan(self._log, from_log_offset))

    def query(self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int) -> QueryResult:
        """Records, oldest first, that are filed under a key: by hash, so that the caller compares the key itself."""
        offsets: list[int] = []
        for _ in self.search(topic, key, max_count, begin_ms, end_ms, offsets):
            pass
        return self.found(offsets)

    def search(
        self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int, offsets: list[int]
    ) -> Iterator[None]:
        """Looks a key up as `query` does, into `offsets`; gives way now and then, since many may have the same key."""
        if self._index is not None:
            yield from self._index.search(topic, key, min(max_count, _QUERY_MAX_COUNT), begin_ms, end_ms, offsets)

    def found(self, offsets: list[int]) -> QueryResult:
        """The records that a search has led to."""
        if self._index is None:
            return QueryResult([], 0, 0)
        records = [self._log.record(offset) for offset in sorted(set(offsets))]
        found = [record for record in records if record is not None]
        return QueryResult(found, self._index.last_timestamp_ms, self._index.last_log_offset)

    # --- offsets and times --------------------------------------------------------------------------------------------
    def min_offset(self, topic: str, queue_id: int) -> int:
        queue = self._queues.get(topic, queue_id)
        return queue.min_offset if queue is not None else 0

    def max_offset(self, topic: str, queue_id: int) -> int:
        queue = self._queues.get(topic, queue_id)
        return queue.max_offset if queue is not None else 0

    def offset_by_time(
        self, topic: str, queue_id: int, timestamp_ms: int, boundary: Literal["lower", "upper"] = "lower"
    ) -> int:
        """The first message stored at or after a time; with "upper", the last one stored at or before it."""
        queue = self._queues.get(topic, queue_id)
        return self._reader.offset_by_time(queue, timestamp_ms, upper=boundary == "upper") if queue is not None else 0

    def store_time(self, topic: str, queue_id: int, offset: int) -> int:
        """When a message was stored, in ms; -1 when there is no such message."""
        queue = self._queues.get(topic, queue_id)
        return self._reader.entry_time(queue, offset) if queue is not None else -1

    def earliest_store_time(self, topic: str, queue_id: int) -> int:
        return self.store_time(topic, queue_id, self.min_offset(topic, queue_id))

    def offset_behind(self, topic: str, queue_id: int, log_offset: int) -> int:
        """The first message of a queue that lies behind an offset of the log."""
        queue = self._queues.get(topic, queue_id)
        if queue is None:
            return 0
        return queue.first(lambda entry_offset, _: entry_offset > log_offset, queue.min_offset, queue.max_offset)

    @property
    def log_min_offset(self) -> int:
        return self._log.min_offset

    @property
    def log_max_offset(self) -> int:
        return self._log.end_offset

    @property
    def flushed_offset(self) -> int:
        return self._flusher.flushed_offset

    @property
    def writeable(self) -> bool:
        return self._refusal is None and self._retention.space_refusal is None

    # --- queues, retention, end ---------------------------------------------------------------------------------------
    def queues(self) -> Iterator[tuple[str, int]]:
        return iter([(queue.topic, queue.queue_id) for queue in self._queues])

    def has_queue(self, topic: str, queue_id: int) -> bool:
        return self._queues.get(topic, queue_id) is not None

    def topics(self) -> set[str]:
        """Those that have queues."""
        return set(self._queues.topics)

    def delete_topic(self, topic: str) -> bool:
        """Forgets a topic's queues and their offsets; its records stay in the log until they expire."""
        return self.delete_topics([topic])

    def delete_topics(self, topics: Iterable[str]) -> bool:
        """The same for some topics, of which one has queues at least; else it says False."""
        found = [topic for topic in topics if topic in self._queues.topics]
        if not found:
            return False
        try:
            self._deleted.add(found, self._log.end_offset)
        except OSError as error:
            names = ", ".join(found)
            log.error("%s: deleted, but may come back if the next start reads the log again: %s", names, error)
        self._queues.delete_topics(found)
        return True

    def deleted_offset(self, topic: str) -> int:
        """Where the log ended when the topic was deleted last; 0 if it was not, or the log holds nothing of it."""
        return self._deleted.offset(topic)

    def disk_ratio(self) -> float:
        """The used part of the disk, 0 to 1."""
        return self._retention.disk_ratio()

    def clean(self, now_ms: int) -> CleanReport:
        """A turn of retention, to be called every 10 s or so, and again at once when it says that there is more; memory
        that holds older messages is let go as well.
        """
        if not self._retention.is_following:
            self._log.release()
        if self._index_behind:
            self._catch_up_index(_INDEX_CATCH_UP_ROUND)
        if self._flusher.queues_are_lost:
            self._write_queues_again()
        return self._retention.clean(now_ms)

    def _write_queues_again(self) -> None:
        """The disk failed when queue files were brought there: what it may lack of them comes from the log once more.

        If the disk fails for so long that it is too much for a turn, the checkpoint stays until the next start.
        """
        start = max(self._checkpoint.logics_offset, self._log.min_offset)
        if self._log.end_offset - start > _MOST_BYTES_AGAIN:
            return
        try:
            files = dict.fromkeys(map(self._dispatcher.to_queue_again, LogScan(self._log, start)))
        except OSError as error:
            log.error("consume queues can't be written again, which is tried again: %s", error)
            return
        self._progress.dirty_queue_files.extend(file for file in files if file is not None)
        self._flusher.queues_are_written_again()
        log.warning("consume queues are written again from log offset %d on", start)

    def keep(self, flush_later: Callable[[], Callable[[], None]], lowest_needed: Callable[[], int | None]) -> None:
        """Takes care of what is derived from the log elsewhere: it is flushed with the queues, and segments from the
        lowest offset that it needs on do not expire. `flush_later` says how it stands and gives what brings just that
        to disk, in the flush thread and after the log.
        """
        self._flusher.beside.append(flush_later)
        self._retention.lowest_needed = lowest_needed

    def delete_expired_soon(self) -> None:
        """Lets the next rounds of retention delete expired files at any hour."""
        self._retention.delete_soon()

    def close(self) -> None:
        """Stops cleanly: everything is brought to disk, and the abort marker goes if that worked."""
        if self._refusal == _CLOSED:
            return
        fenced = self._refusal is not None
        self._refusal = _CLOSED
        self._flusher.stop()
        self._queues.aside.close()
        checkpoint = self._checkpoint
        checkpoint.counted_log_end = self._log.end_offset
        checkpoint.queue_count, checkpoint.queue_entries, checkpoint.stored_entries = self._queues.count()
        fenced = not self._flusher.flush_derived(with_index=True) or fenced
        if self._index is not None:
            try:
                self._index.close()
            except OSError as error:
                log.error("closing the index: %s", error)
                fenced = True
        if not fenced:
            self._abort_path.unlink(missing_ok=True)
        else:
            log.error("the store was not flushed completely, the next start will recover it")
        self._pool.clear()
        self._log.close()
        self._directory_lock.release()
