"""Group commit, the order of what reaches the disk, and what happens when the disk fails."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from skylark.store import NotWriteable, Store, flush
from skylark.store.checkpoint import Checkpoint
from skylark.store.segments import Segment
from store.small_store import START_MS, a_message, bodies, expected_bodies, fill, flushed, small_config, small_store

DEADLINE_S = 30


class Disk:
    """Stands between the flush thread and fdatasync: counts, holds it up, or lets it fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: list[int] = []
        self.broken = False
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        monkeypatch.setattr(flush, "sync_segment", self)

    def __call__(self, segment: Segment) -> None:
        self.entered.set()
        assert self.gate.wait(30)
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        segment.sync()
        self.synced.append(segment.base)


def test_a_future_is_done_after_fdatasync_and_not_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)

    async def scenario(store: Store) -> None:
        disk.gate.clear()
        appended = store.append(a_message(), START_MS)
        future = flushed(store, appended.log_end_offset)
        await asyncio.to_thread(disk.entered.wait, 30)
        await asyncio.sleep(0)
        assert not future.done()
        assert store.flushed_offset == 0
        disk.gate.set()
        await future
        assert store.flushed_offset == appended.log_end_offset
        assert flushed(store, appended.log_end_offset).done()

    with small_store(tmp_path) as store:
        asyncio.run(scenario(store))


def test_those_who_wait_share_an_fdatasync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)

    async def scenario(store: Store) -> None:
        disk.gate.clear()
        futures = [flushed(store, store.append(a_message(), START_MS).log_end_offset)]
        await asyncio.to_thread(disk.entered.wait, 30)
        for _ in range(100):
            futures.append(flushed(store, store.append(a_message(b""), START_MS).log_end_offset))
        disk.gate.set()
        await asyncio.gather(*futures)
        assert len(disk.synced) == 2

    with small_store(tmp_path, segment_bytes=1 << 20) as store:
        asyncio.run(scenario(store))


def test_all_segments_up_to_the_offset_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)

    async def scenario(store: Store) -> None:
        fill(store, 40)
        await flushed(store, store.log_max_offset)
        assert disk.synced == list(range(0, store.log_max_offset, 2048))
        assert len(disk.synced) > 3

    with small_store(tmp_path) as store:
        asyncio.run(scenario(store))


def test_a_failed_fdatasync_fences_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)

    async def scenario(store: Store) -> None:
        fill(store, 3)
        await flushed(store, store.log_max_offset)
        disk.broken = True
        future = flushed(store, store.append(a_message(), START_MS).log_end_offset)
        with pytest.raises(NotWriteable, match="Input/output error"):
            await future
        assert not store.writeable
        with pytest.raises(NotWriteable, match="fenced"):
            store.append(a_message(), START_MS)
        disk.broken = False  # the pages that could not be written are gone: a later success means nothing
        with pytest.raises(NotWriteable):
            await flushed(store, store.log_max_offset)
        assert bodies(store)[:3] == expected_bodies(3)

    with small_store(tmp_path) as store:
        asyncio.run(scenario(store))
    assert (tmp_path / "abort").exists()
    monkeypatch.undo()
    with small_store(tmp_path) as store:
        fill(store, 1)
        assert len(bodies(store)) == 5


def test_without_waiting_the_log_is_flushed_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    with small_store(tmp_path, flush_interval_ms=1) as store:
        fill(store, 1)
        assert disk.entered.wait(30)


def test_the_checkpoint_names_what_was_flushed(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        fill(store, 10)
        store.flush()
        checkpoint = Checkpoint(tmp_path / "checkpoint")
        entry = store.entry("topic", 0, 9)
        assert entry is not None
        assert checkpoint.logics_offset == entry.log_offset
        assert checkpoint.logics_ms == checkpoint.physic_ms == START_MS + 9000
        assert checkpoint.index_log_offset == entry.log_offset + 1
        fill(store, 1)
        assert Checkpoint(tmp_path / "checkpoint").logics_offset == entry.log_offset


def test_queue_files_that_cannot_be_flushed_leave_the_checkpoint_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_store(tmp_path) as store:
        fill(store, 10)
        store.flush()
        before = Checkpoint(tmp_path / "checkpoint").logics_offset

        def broken(*_: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(flush, "_sync_queue_file", broken)
        fill(store, 10)
        store.flush()
        assert store.writeable
        assert Checkpoint(tmp_path / "checkpoint").logics_offset == before
        fill(store, 5)
    assert (tmp_path / "abort").exists()
    with small_store(tmp_path) as store:
        assert bodies(store) == expected_bodies(25)


def test_entries_that_a_failed_flush_may_have_lost_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One queue's file could not be brought to disk: that is no reason to leave the checkpoint behind for good."""
    marks: list[int] = []
    with small_store(tmp_path) as store:
        store.keep(lambda: partial(marks.append, store.log_max_offset), lambda: None)
        fill(store, 10)
        fill(store, 3, "other")
        store.flush()
        really = flush._sync_queue_file

        def lost(path: Path) -> bool:
            """The system drops the page, as it may after a failure."""
            if path.parts[-3] == "other":
                with path.open("r+b") as file:
                    file.seek(3 * 20)
                    file.write(bytes(20))
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return really(path)

        monkeypatch.setattr(flush, "_sync_queue_file", lost)
        fill(store, 10)
        fill(store, 2, "other")
        taken = len(marks)
        for _ in range(2):
            store.flush()
        assert len(marks) == taken + 2, "what is beside the queues is none of their business"
        before = Checkpoint(tmp_path / "checkpoint").logics_offset
        assert before < store.log_max_offset // 2
        store.clean(START_MS)
        store.flush()
        assert Checkpoint(tmp_path / "checkpoint").logics_offset == before, "it fails again"
        monkeypatch.setattr(flush, "_sync_queue_file", really)
        store.clean(START_MS)
        store.flush()
        last = store.entry("other", 0, 4)
        assert last is not None
        assert Checkpoint(tmp_path / "checkpoint").logics_offset == last.log_offset
        assert bodies(store) == expected_bodies(20)
        assert bodies(store, "other") == expected_bodies(5, "other")
    assert not (tmp_path / "abort").exists()


def test_a_flush_thread_that_ends_fences_the_store(tmp_path: Path) -> None:
    def stand() -> Callable[[], None]:
        raise ValueError("nobody thought of it")

    async def scenario(store: Store) -> None:
        store.keep(stand, lambda: None)
        appended = store.append(a_message(), START_MS)
        with pytest.raises(NotWriteable, match="nobody thought of it"):
            await asyncio.wait_for(flushed(store, appended.log_end_offset + 1), DEADLINE_S)
        assert not store.writeable
        store._flusher.beside.clear()

    with small_store(tmp_path, flush_interval_ms=1, queue_flush_interval_ms=1) as store:
        asyncio.run(scenario(store))


class Failing:
    """Stands before a function of the system: it raises as long as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.error: int | None = None
        self._call = getattr(os, name)
        monkeypatch.setattr(os, name, self)

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        return self._call(*arguments, **more)


@pytest.mark.parametrize(("name", "error"), [("open", errno.EMFILE), ("fsync", errno.ENOSPC), ("fsync", errno.ENOMEM)])
def test_what_is_lacking_around_the_log_only_delays_its_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, error: int
) -> None:
    """A new segment also needs its name on disk: no descriptor, or no space, for its directory."""
    call = Failing(monkeypatch, name)

    async def scenario(store: Store) -> None:
        fill(store, 1)
        await flushed(store, store.log_max_offset)
        fill(store, 20)  # in new segments
        call.error = error
        future = flushed(store, store.log_max_offset)
        for _ in range(3):
            store.flush()
        await asyncio.sleep(0)
        assert not future.done()
        assert store.writeable
        assert caplog.text.count("could not be flushed, which is tried again") == 1
        call.error = None
        store.flush()
        await future
        assert caplog.messages[-1] == "consume queues, index and checkpoint are flushed again" or (
            caplog.messages[-1] == "the commit log is flushed again"
        )

    with small_store(tmp_path) as store:
        asyncio.run(scenario(store))
    assert not (tmp_path / "abort").exists()


def test_a_full_disk_that_fdatasync_tells_of_fences_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages that it had no room for may be gone, even if there is room later."""
    call = Failing(monkeypatch, "fdatasync")
    with small_store(tmp_path) as store:
        fill(store, 1)
        call.error = errno.ENOSPC
        store.flush()
        call.error = None
        assert not store.writeable
    assert (tmp_path / "abort").exists()


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """This process can open only so many files more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(count + 1)]
    last = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, before[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in taken:
            os.close(fd)


@pytest.mark.parametrize("left", range(5))
def test_without_descriptors_messages_are_refused_and_nothing_more(tmp_path: Path, left: int) -> None:
    """At a new segment, wherever the last descriptor goes: to the file, to its mapping, to its directory."""
    stored = 0
    with small_store(tmp_path / "a") as store:
        fill(store, 1)
    with small_store(tmp_path / "a") as store:
        with descriptors_left(left), suppress(NotWriteable):
            fill(store, 20)
        stored = store.max_offset("topic", 0)
        with descriptors_left(left):
            store.flush()
        assert store.writeable
        fill(store, 20 - stored)
        store.flush()
        assert bodies(store) == expected_bodies(20)
    assert not (tmp_path / "a" / "abort").exists()


@pytest.mark.parametrize(("name", "error"), [("open", errno.EMFILE), ("dup", errno.EMFILE), ("dup", errno.ENOSPC)])
def test_a_failure_that_passes_leaves_the_checkpoint_behind_until_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, error: int
) -> None:
    call = Failing(monkeypatch, name)
    marks: list[int] = []
    with small_store(tmp_path / "a") as store:
        store.keep(lambda: partial(marks.append, store.log_max_offset), lambda: None)
        fill(store, 10)
        store.flush()
        before = Checkpoint(tmp_path / "a" / "checkpoint").logics_offset
        fill(store, 10)
        call.error = error
        for _ in range(3):
            store.flush()
        call.error = None
        checkpoint = Checkpoint(tmp_path / "a" / "checkpoint")
        assert (checkpoint.logics_offset if name == "open" else checkpoint.index_log_offset - 1) == before
        assert {record.levelname for record in caplog.records} == {"ERROR"}
        assert store.writeable
        fill(store, 1)
        store.flush()
        last = store.entry("topic", 0, 20)
        assert last is not None
        checkpoint = Checkpoint(tmp_path / "a" / "checkpoint")
        assert checkpoint.logics_offset == last.log_offset
        assert checkpoint.index_log_offset == last.log_offset + 1
        assert name == "open" or caplog.messages[1:] == ["consume queues, index and checkpoint are flushed again"]
        assert len(marks) >= 2
    assert not (tmp_path / "a" / "abort").exists()


def test_what_is_kept_beside_is_brought_to_disk_again_after_a_failure(tmp_path: Path) -> None:
    taken = 0
    written: list[int] = []
    broken = True

    def stand() -> Callable[[], None]:
        nonlocal taken
        taken += 1
        return partial(write, taken)

    def write(mark: int) -> None:
        if broken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(mark)

    with small_store(tmp_path) as store:
        store.keep(stand, lambda: None)
        for _ in range(3):
            store.flush()
        assert taken == 1
        broken = False
        store.flush()
        store.flush()
        assert written == [1, 2]


def test_a_stop_that_could_not_flush_is_not_a_clean_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dup = Failing(monkeypatch, "dup")
    with small_store(tmp_path) as store:
        fill(store, 10)
        dup.error = errno.EMFILE
    assert (tmp_path / "abort").exists()
    dup.error = None
    with small_store(tmp_path) as store:
        assert bodies(store) == expected_bodies(10)


def test_a_queue_file_deleted_before_its_flush_is_no_failure(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        fill(store, 10)
        store.delete_topic("topic")
        store.flush()
        fill(store, 1)
    assert not (tmp_path / "abort").exists()


def test_closing_lets_those_who_wait_go(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        future = flushed(store, store.append(a_message(), START_MS).log_end_offset)
        store.close()
        await future

    asyncio.run(scenario(Store.open(small_config(tmp_path))))


def test_power_loss_after_an_acknowledgement(tmp_path: Path) -> None:
    """What an acknowledged message needs is in the log file alone: everything derived may be lost."""
    kept = tmp_path / "kept"

    async def scenario(store: Store) -> None:
        fill(store, 25)
        await flushed(store, store.log_max_offset)
        kept.mkdir()
        shutil.copytree(store.config.root / "commitlog", kept / "commitlog")

    with small_store(tmp_path / "a", flush_sync=True) as store:
        asyncio.run(scenario(store))
    (kept / "abort").touch()
    with small_store(kept) as store:
        assert bodies(store) == expected_bodies(25)
