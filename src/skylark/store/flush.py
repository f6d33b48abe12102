"""Brings what was written to disk: one thread, group commit.

`when_flushed` calls back when the log is on disk up to an offset. While the thread is inside an fdatasync, more of them
gather; the next fdatasync serves all of them, and wakes the event loop once.

In the same thread, less often: the queue files, what is kept beside them, the index, and after them the checkpoint, so
that it only ever names what is on disk. Each of them fails by itself. What a failed fdatasync may have dropped of the
queue files is written once more (`Store.clean`); the others are left as they are until the next start.

When fdatasync of the log fails, the kernel may have dropped the pages it could not write, and a later success says
nothing about them. So the store is fenced for good: whoever waits or comes later is told, nothing more is flushed, and
the abort marker stays for the next start to find out what there is. When only something around it was lacking, such as
a descriptor to open the file or its directory with, nothing is lost: it is tried again, and those who wait go on
waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from skylark.store.api import StoreConfig
from skylark.store.checkpoint import Checkpoint
from skylark.store.commitlog import CommitLog
from skylark.store.consumequeue import ConsumeQueue
from skylark.store.dispatch import Progress
from skylark.store.index import IndexService
from skylark.store.segments import Segment, sync_data, sync_directory

log = logging.getLogger(__name__)

# What was lacking may be there the next time. A failed fdatasync is none of these (see `sync_data`).
_PASSING = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.EINTR))

_QUEUES, _INDEX, _CHECKPOINT = "queues", "index", "checkpoint"  # parts of what is derived from the log

Done = Callable[[str | None], None]
"""Called on the event loop when it is on disk, or with the reason why that will not happen. It must not raise."""


def sync_segment(segment: Segment) -> None:
    segment.sync()


def _sync_queue_file(path: Path) -> bool:
    """False when it is gone: deleted meanwhile, with its topic or by retention."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        sync_data(fd, path)
    finally:
        os.close(fd)
    return True


def _sync_names(files: list[tuple[ConsumeQueue, Path]]) -> None:
    """Makes the names of new queue files survive a power loss: those of the files, their queues and their topics."""
    directories = {path.parents[level] for _, path in files for level in range(3)}
    for directory in sorted(directories, reverse=True):
        with contextlib.suppress(FileNotFoundError):
            sync_directory(directory)
    for queue, path in files:
        queue.named_on_disk = path


class Flusher:
    """The flush thread. `start`, then `when_flushed` from an event loop, then `stop`."""

    def __init__(
        self,
        config: StoreConfig,
        commit_log: CommitLog,
        index: IndexService | None,
        checkpoint: Checkpoint,
        progress: Progress,
        on_failure: Callable[[str], None],
    ) -> None:
        self._config = config
        self._log = commit_log
        self._index = index
        self._checkpoint = checkpoint
        self._progress = progress
        self._on_failure = on_failure
        self.beside: list[Callable[[], Callable[[], None]]] = []
        self.flushed_offset = 0
        self.failure: str | None = None
        self._log_failing = False
        self._derived_failing = False
        self._lost: set[object] = set()  # of what is derived from the log, the parts whose pages may be gone
        self._owed: dict[
            Callable[[], Callable[[], None]], Callable[[], None]
        ] = {}  # what is to be brought to disk beside
        self._waiters: deque[tuple[int, asyncio.AbstractEventLoop, Done]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._flushing = threading.Lock()
        self._flushing_derived = threading.Lock()  # the thread and a store that is being stopped may meet here
        self._thread = threading.Thread(target=self._run, name="skylark-flush", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after a last complete flush."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def when_flushed(self, log_end_offset: int, done: Done) -> None:
        """Calls `done` when the log is on disk up to an offset: at once, if it is."""
        if self.failure is not None or log_end_offset <= self.flushed_offset:
            done(self.failure)
            return
        self._waiters.append((log_end_offset, asyncio.get_running_loop(), done))
        if not self._wake.is_set():
            self._wake.set()

    # --- the thread ---------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._flush_again_and_again()
        except Exception as error:
            log.exception("the flush thread has ended")
            self._give_up(f"flushing failed: {error!r}; the store is fenced")
            self._release_waiters()

    def _give_up(self, failure: str) -> None:
        self.failure = failure
        log.critical("%s", failure)
        self._on_failure(failure)

    def _flush_again_and_again(self) -> None:
        interval_s = self._config.flush_interval_ms / 1000
        queues_due = index_due = time.monotonic()
        while not self._stopping:
            self._wake.wait(interval_s)
            self._wake.clear()
            self.flush_log()
            now = time.monotonic()
            if now >= queues_due and self.failure is None:
                queues_due = now + self._config.queue_flush_interval_ms / 1000
                with_index = now >= index_due
                if with_index:
                    index_due = now + self._config.index_flush_interval_ms / 1000
                self.flush_derived(with_index=with_index)
        self.flush_log()

    def flush_log(self) -> bool:
        """Brings the log to disk up to its present end and lets those go who waited for it. Whether it is there."""
        with self._flushing:
            is_there = self.failure is None and self._try_sync_log()
            self._release_waiters()
            return is_there

    def _try_sync_log(self) -> bool:
        try:
            self._sync_log()
        except OSError as error:
            if error.errno in _PASSING:
                if not self._log_failing:
                    log.error("the commit log could not be flushed, which is tried again: %s", error)
                self._log_failing = True
                return False
            self._give_up(f"flushing the commit log failed: {error}; the store is fenced")
            return False
        if self._log_failing:
            log.warning("the commit log is flushed again")
        self._log_failing = False
        return True

    def _sync_log(self) -> None:
        start, end = self.flushed_offset, self._log.end_offset
        if end <= start:
            return
        for segment in self._log.segments_between(start, end):
            sync_segment(segment)
        self.flushed_offset = end

    def _release_waiters(self) -> None:
        waiters = self._waiters
        released: dict[asyncio.AbstractEventLoop, list[Done]] = {}
        while waiters and (self.failure is not None or waiters[0][0] <= self.flushed_offset):
            _, loop, done = waiters.popleft()
            released.setdefault(loop, []).append(done)
        for loop, calls in released.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_call_all, calls, self.failure)

    def flush_derived(self, *, with_index: bool) -> bool:
        """Brings queue files, what is kept `beside` them, and the index if asked for, to disk; then the checkpoint.
        Whether all of that worked.

        What is beside is asked how it stands before the log is flushed, and then brings just that to disk.

        Their failure does not stop the store, since they can be made from the log again; but the checkpoint then stays
        where it is, and recovery starts from there. What was lacking, open files or space, may be there the next time.
        """
        with self._flushing_derived:
            return self._flush_derived(with_index)

    def _flush_derived(self, with_index: bool) -> bool:
        last_log_offset, last_store_ms = self._progress.last_log_offset, self._progress.last_store_ms
        owed = self._owed = {stand: self._owed[stand] if stand in self._owed else stand() for stand in self.beside}
        if not self.flush_log():
            return False
        has_queues = self._attempt(_QUEUES, self._sync_queues)
        is_whole = has_queues
        for stand in list(owed):
            is_whole &= self._attempt(stand, partial(self._sync_beside, stand))
        if with_index and self._index is not None:
            is_whole &= self._attempt(_INDEX, partial(self._sync_index, self._index))
        if has_queues:
            is_due = last_log_offset != self._checkpoint.logics_offset or with_index
            write = partial(self._write_checkpoint, last_log_offset, last_store_ms)
            is_whole &= self.failure is None and (not is_due or self._attempt(_CHECKPOINT, write))
        if is_whole and self._derived_failing:
            log.warning("consume queues, index and checkpoint are flushed again")
        self._derived_failing = not is_whole
        return is_whole

    def _attempt(self, part: object, bring: Callable[[], None]) -> bool:
        """Brings a part of what is derived from the log to disk, unless that failed before in a way that lasts."""
        if part in self._lost:
            return False
        try:
            bring()
        except OSError as error:
            is_lost = error.errno not in _PASSING
            if is_lost:
                self._lost.add(part)
            if is_lost or not self._derived_failing:
                log.error("flushing consume queues, index or checkpoint failed, the checkpoint stays behind: %s", error)
            self._derived_failing = True
            return False
        return True

    @property
    def queues_are_lost(self) -> bool:
        """Whether pages of queue files may be gone: since the checkpoint, which stays where it is, any entry may be."""
        return _QUEUES in self._lost

    def queues_are_written_again(self) -> None:
        self._lost.discard(_QUEUES)

    def _sync_beside(self, stand: Callable[[], Callable[[], None]]) -> None:
        self._owed[stand]()
        del self._owed[stand]

    def _write_checkpoint(self, last_log_offset: int, last_store_ms: int) -> None:
        checkpoint = self._checkpoint
        checkpoint.physic_ms = checkpoint.logics_ms = last_store_ms
        checkpoint.logics_offset = checkpoint.confirm_offset = last_log_offset
        checkpoint.flush()

    def _sync_queues(self) -> None:
        """The files that were written to, and the names of those that are new. Raises OSError."""
        dirty = self._progress.dirty_queue_files
        files = dict.fromkeys([dirty.popleft() for _ in range(len(dirty))])
        new: list[tuple[ConsumeQueue, Path]] = []
        try:
            for queue, path in files:
                queue.dirty = False
                if _sync_queue_file(path) and queue.named_on_disk != path:
                    new.append((queue, path))
                if self._waiters:  # with many queues this takes long, and a send waits for its log record only
                    self.flush_log()
            _sync_names(new)
        except OSError:
            dirty.extend(files)
            raise

    def _sync_index(self, index: IndexService) -> None:
        """The checkpoint may tell of it when the log has all messages whose keys it has."""
        index.flush()
        if not self.flush_log():
            raise OSError(errno.EAGAIN, "the log is behind the index")
        self._checkpoint.index_ms = max(self._checkpoint.index_ms, index.sealed_timestamp_ms)
        self._checkpoint.index_log_offset = index.durable_log_offset


def _call_all(calls: list[Done], failure: str | None) -> None:
    for done in calls:
        done(failure)
