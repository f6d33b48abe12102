"""Files of deleted topics: out of the way at once, and deleted in a thread."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from skylark.store import Store
from skylark.store.aside import DELETED
from store.small_store import MEMORY, bodies, expected_bodies, fill, finish_deleting, small_config, small_store

CALLS = ("open", "unlink", "rmdir", "rename", "mkdir", "scandir", "stat", "lstat", "fsync", "fdatasync")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with TemporaryDirectory(dir=MEMORY) as directory:
        yield Path(directory)


@contextmanager
def held(store: Store) -> Iterator[None]:
    """The thread deletes nothing meanwhile."""
    with store._queues.aside._working:
        yield


def some_turns(store: Store, count: int) -> None:
    """What the thread does in so many steps, while it is held."""
    for _ in range(count):
        next(store._queues.aside._work[0], None)


def left_over(root: Path) -> list[Path]:
    return list((root / "consumequeue").glob(f"{DELETED}/*"))


def open_files() -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(link.readlink()))
    return found


def calls_of(store: Store, topic: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The system calls that the deletion of a topic makes before it returns."""
    made: list[str] = []
    here = threading.get_ident()

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == here:
                made.append(name)
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, noted(name, getattr(os, name)))
        store.delete_topic(topic)
    return made


def test_it_takes_no_longer_with_more_queues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_store(tmp_path) as store, held(store):
        for queue_id in range(40):
            fill(store, 1, "large", queue_id)
        fill(store, 1, "small")
        fill(store, 1, "first")
        calls_of(store, "first", monkeypatch)
        assert len(calls_of(store, "large", monkeypatch)) == len(calls_of(store, "small", monkeypatch))


def test_nothing_is_left_over(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        for queue_id in range(5):
            fill(store, 20, queue_id=queue_id)
        (tmp_path / "consumequeue" / "topic" / "notes").touch()
        store.delete_topic("topic")
        finish_deleting(store)
        assert not left_over(tmp_path)
        assert not [name for name in open_files() if name.startswith(f"{tmp_path}/consumequeue/topic")]
    assert list((tmp_path / "consumequeue").iterdir()) == []


@pytest.mark.parametrize("turns", [0, 2, 9])
def test_a_topic_that_is_made_again_meanwhile(tmp_path: Path, turns: int) -> None:
    with small_store(tmp_path) as store:
        for _ in range(2):
            for queue_id in range(3):
                fill(store, 20, queue_id=queue_id)
            store.flush()
            with held(store):
                store.delete_topic("topic")
                fill(store, 12)
                some_turns(store, turns)
                fill(store, 3)
                assert bodies(store) == expected_bodies(15)
                store.flush()
            finish_deleting(store)
            assert bodies(store) == expected_bodies(15)
    with small_store(tmp_path) as store:
        assert bodies(store) == expected_bodies(15)
        assert list(store.queues()) == [("topic", 0)]


@pytest.mark.parametrize("turns", [0, 1, 3])
@pytest.mark.parametrize("again", [0, 9])
def test_a_kill_in_the_middle(tmp_path: Path, turns: int, again: int) -> None:
    with small_store(tmp_path / "a") as store:
        for queue_id in range(3):
            fill(store, 20, queue_id=queue_id)
        fill(store, 2, "other")
        store.flush()
        with held(store):
            store.delete_topic("topic")
            fill(store, again)
            some_turns(store, turns)
            shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert left_over(tmp_path / "b")
    with small_store(tmp_path / "b") as store:
        assert sorted(store.queues()) == [("other", 0), ("topic", 0)][: 1 + bool(again)]
        assert bodies(store) == expected_bodies(again)
        assert bodies(store, "other") == expected_bodies(2, "other")
        finish_deleting(store)
        assert not left_over(tmp_path / "b")


def test_a_stop_does_not_wait_for_the_end(tmp_path: Path) -> None:
    store = Store.open(small_config(tmp_path))
    fill(store, 20)
    with held(store):
        store.delete_topic("topic")
        store._queues.aside._closing = True
    store.close()
    assert left_over(tmp_path)
    assert not (tmp_path / "abort").exists()
    with small_store(tmp_path) as store:
        assert list(store.queues()) == []
        finish_deleting(store)
    assert not left_over(tmp_path)


def test_what_can_not_be_moved_is_deleted_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with small_store(tmp_path) as store:
        fill(store, 20)
        monkeypatch.setattr(os, "rename", refuse)
        store.delete_topic("topic")
        monkeypatch.undo()
        assert not (tmp_path / "consumequeue" / "topic").exists()
        assert "topic is deleted file by file" in caplog.text
        fill(store, 3)
    with small_store(tmp_path) as store:
        assert bodies(store) == expected_bodies(3)


def test_what_the_thread_can_not_delete_is_told_and_deleted_after_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with small_store(tmp_path) as store:
        fill(store, 20)
        fill(store, 20, "next")
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", refuse)
            store.delete_topic("topic")
            finish_deleting(store)
        assert "takes space until the next start" in caplog.text
        assert len(left_over(tmp_path)) == 1
        store.delete_topic("next")
        finish_deleting(store)
        fill(store, 3)
        assert bodies(store) == expected_bodies(3)
        assert len(left_over(tmp_path)) == 1
    with small_store(tmp_path) as store:
        finish_deleting(store)
        assert not left_over(tmp_path)
        assert bodies(store) == expected_bodies(3)


def test_no_file_goes_before_its_new_name_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    fsync, rmtree = os.fsync, shutil.rmtree

    def synced(fd: int) -> None:
        happened.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        fsync(fd)

    def removed(path: Any) -> None:
        happened.append("removed")
        rmtree(path)

    with small_store(tmp_path) as store:
        fill(store, 1)
        with held(store):
            store.delete_topic("topic")
            monkeypatch.setattr(os, "fsync", synced)
            monkeypatch.setattr(shutil, "rmtree", removed)
        finish_deleting(store)
    assert happened[:3] == ["consumequeue", DELETED, "removed"]
