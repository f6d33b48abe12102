"""Queue files: entries, searches, ends, blanks and what retention leaves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skylark.store import StoreError
from skylark.store.consumequeue import BLANK_SIZE, ENTRY, ConsumeQueue, QueueTable
from skylark.store.segments import MappingPool

PER_FILE = 5


def a_queue(directory: Path, entries: int = 0) -> ConsumeQueue:
    queue = ConsumeQueue("topic", 0, directory, PER_FILE, MappingPool(2))
    for number in range(entries):
        queue.put(number * 100, 100, -number)
    return queue


def reopened(directory: Path, below: int | None = None) -> ConsumeQueue:
    queue = a_queue(directory)
    queue.find_end(below)
    return queue


def test_entries_are_apaches_20_bytes(tmp_path: Path) -> None:
    a_queue(tmp_path, 2)
    data = (tmp_path / f"{0:020d}").read_bytes()
    assert len(data) == 100
    assert data[:40].hex() == "0000000000000000000000640000000000000000" + "000000000000006400000064" + "f" * 16
    assert not any(data[40:])


def test_entries_come_back_over_files(tmp_path: Path) -> None:
    queue = a_queue(tmp_path, 12)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{base:020d}" for base in (0, 100, 200)]
    for number in range(12):
        entry = queue.entry(number)
        assert entry is not None
        assert (entry.log_offset, entry.size_bytes, entry.tag_code) == (number * 100, 100, -number)
    assert queue.entry(12) is None
    assert queue.entry(-1) is None
    assert len(queue.entries(3, 10) or b"") == 40  # up to the end of the file
    assert [queue.next_file_offset(offset) for offset in (0, 4, 5)] == [5, 5, 10]


@given(st.integers(0, 23))
@settings(max_examples=24)
def test_the_end_is_found_again(tmp_path_factory: pytest.TempPathFactory, count: int) -> None:
    directory = tmp_path_factory.mktemp("queue")
    a_queue(directory, count)
    queue = reopened(directory)
    assert queue.max_offset == count
    queue.put(count * 100, 100, 7)
    assert reopened(directory).max_offset == count + 1


@given(st.integers(0, 23), st.integers(0, 2400))
@settings(max_examples=60)
def test_the_end_below_a_log_offset(tmp_path_factory: pytest.TempPathFactory, count: int, below: int) -> None:
    directory = tmp_path_factory.mktemp("queue")
    a_queue(directory, count)
    queue = reopened(directory, below)
    expected = min(count, -(-below // 100))
    assert queue.max_offset == expected
    queue.cut()
    again = reopened(directory)
    assert again.max_offset == expected
    assert again.last_record_end() == (((expected - 1) * 100, expected * 100) if expected else (-1, -1))


def test_a_queue_can_begin_in_the_middle(tmp_path: Path) -> None:
    queue = a_queue(tmp_path)
    queue.start_at(13)
    queue.put(500, 100, 1)
    assert (queue.min_offset, queue.max_offset) == (13, 14)
    data = (tmp_path / f"{200:020d}").read_bytes()
    assert list(ENTRY.iter_unpack(data))[:4] == [(0, BLANK_SIZE, 0)] * 3 + [(500, 100, 1)]
    for log_min_offset in (0, 400):
        queue = reopened(tmp_path)
        queue.correct_min_offset(log_min_offset)
        assert (queue.min_offset, queue.max_offset) == (13, 14)


def test_the_smallest_offset_follows_the_log(tmp_path: Path) -> None:
    queue = a_queue(tmp_path, 12)
    for log_min_offset, expected in ((0, 0), (1, 1), (100, 1), (650, 7), (1100, 11), (1101, 12)):
        queue.correct_min_offset(log_min_offset)
        assert queue.min_offset == expected
    assert queue.entry(3) is None


def test_files_whose_messages_are_gone_are_deleted(tmp_path: Path) -> None:
    queue = a_queue(tmp_path, 12)
    assert queue.delete_before(400) == 0
    assert queue.delete_before(401) == 1
    assert (queue.min_offset, queue.first_stored_offset) == (5, 5)
    assert queue.delete_before(5000) == 1  # the last file stays, for the queue's end
    assert (queue.min_offset, queue.max_offset) == (12, 12)
    assert reopened(tmp_path).max_offset == 12


def test_missing_files_in_the_middle_are_noticed(tmp_path: Path) -> None:
    assert not a_queue(tmp_path, 12).has_holes
    (tmp_path / f"{100:020d}").unlink()
    assert a_queue(tmp_path).has_holes


def test_an_evicted_queue_goes_on_writing(tmp_path: Path) -> None:
    pool = MappingPool(1)
    queues = [ConsumeQueue("topic", number, tmp_path / str(number), PER_FILE, pool) for number in range(3)]
    for number in range(12):
        for queue in queues:
            queue.put(number * 100, 100, queue.queue_id)
    for queue in queues:
        found = [queue.entry(number) for number in range(12)]
        assert [entry.log_offset for entry in found if entry] == [number * 100 for number in range(12)]


def reads_ahead(path: Path) -> list[bool]:
    """Of each part of a mapped file, whether the system may read more of it than is asked for."""
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    return [" rr" not in part.split("VmFlags:")[1] for part in parts if str(path) in part.partition("\n")[0]]


def test_nothing_is_read_ahead_of_what_is_written(tmp_path: Path) -> None:
    """A new file is a hole: with its first entry the system would fill memory with megabytes of zeros."""
    pool = MappingPool(1)
    queue = ConsumeQueue("topic", 0, tmp_path / "0", 5000, pool)
    queue.put(0, 100, 0)
    path = tmp_path / "0" / f"{0:020d}"
    assert reads_ahead(path) == [False]
    for number in range(1, 1000):
        queue.put(number * 100, 100, 0)
    ConsumeQueue("topic", 1, tmp_path / "1", 5000, pool).put(0, 100, 0)
    assert reads_ahead(path) == []
    queue.put(1000 * 100, 100, 0)
    assert reads_ahead(path) == [True, False], "what was written is read as usual"


def test_room_for_many_entries_is_made_at_once(tmp_path: Path) -> None:
    queue = a_queue(tmp_path, 3)
    queue.make_room(14)
    assert len(list(tmp_path.iterdir())) == 4
    assert queue.max_offset == 3
    assert reopened(tmp_path).max_offset == 3


def test_the_table_knows_the_queues_of_a_directory(tmp_path: Path) -> None:
    table = QueueTable(tmp_path, PER_FILE, MappingPool(5))
    for topic, queue_id in (("a", 0), ("a", 3), ("b", 0)):
        table.create(topic, queue_id).put(0, 100, 0)
    (tmp_path / "a" / "notes").mkdir()
    (tmp_path / "file").touch()
    again = QueueTable(tmp_path, PER_FILE, MappingPool(5))
    assert sorted((queue.topic, queue.queue_id) for queue in again) == [("a", 0), ("a", 3), ("b", 0)]
    assert again.get("a", 1) is None
    again.delete_topics(["a"])
    again.aside.close()
    assert [queue.topic for queue in again] == ["b"]
    assert not (tmp_path / "a").exists()
    for name in ("../a", ".deleted"):
        with pytest.raises(StoreError):
            again.create(name, 0)
    assert table.count() == (3, 3, 3)
