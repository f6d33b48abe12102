"""Which files go, and when."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import pytest

from skylark.store import DiskFull, NotWriteable, ReadStatus, Store
from skylark.store.retention import disk_usage
from store.small_store import START_MS, a_message, bodies, expected_bodies, fill, small_store

HOUR_MS = 3_600_000


def at_hour(hour: int) -> int:
    return int(datetime(2026, 3, 1, hour, 30).timestamp() * 1000)


FOUR = at_hour(4)


def age(store: Store, hours_of_segments: list[float], now_ms: int = FOUR) -> None:
    """Sets how long ago the first segments were last written; the others were just now."""
    paths = sorted((store.config.root / "commitlog").iterdir())
    for place, path in enumerate(paths):
        hours = hours_of_segments[place] if place < len(hours_of_segments) else 0
        seconds = (now_ms - hours * HOUR_MS) / 1000
        os.utime(path, (seconds, seconds))


def log_names(store: Store) -> list[int]:
    return sorted(int(path.name) // 2048 for path in (store.config.root / "commitlog").iterdir())


def test_expired_segments_go_at_the_hour(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        fill(store, 40)
        store.flush()
        age(store, [80, 73, 71])
        assert store.clean(at_hour(3)).log_files == 0
        report = store.clean(FOUR)
        assert (report.log_files, log_names(store)[0]) == (2, 2)
        assert store.log_min_offset == 2 * 2048
        first = store.min_offset("topic", 0)
        assert 0 < first < 40
        assert report.queue_files == first // 8
        assert bodies(store) == expected_bodies(40, start=first)
        small = store.read("topic", 0, 0, 32)
        assert (small.status, small.next_offset) == (ReadStatus.OFFSET_TOO_SMALL, first)
        assert store.clean(FOUR).log_files == 0


def test_several_hours_and_by_hand(tmp_path: Path) -> None:
    with small_store(tmp_path, delete_when="03;16", delete_batch_max=1) as store:
        fill(store, 60)
        store.flush()
        age(store, [999, 999, 999, 999])
        assert store.clean(FOUR).log_files == 0
        assert store.clean(at_hour(16)).log_files == 1
        store.delete_expired_soon()
        assert store.clean(at_hour(9)).log_files == 1
        assert store.clean(at_hour(10)).log_files == 1


def test_the_last_segment_stays_whatever_its_age(tmp_path: Path) -> None:
    with small_store(tmp_path, disk_usage=lambda path: 0.89) as store:
        fill(store, 40)
        store.flush()
        age(store, [999] * 99)
        last = log_names(store)[-1]
        store.clean(FOUR)
        assert log_names(store) == [last]
        fill(store, 3)
        assert bodies(store)[-3:] == expected_bodies(43, start=40)


def test_a_segment_that_a_reader_holds_stays(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        fill(store, 40)
        store.flush()
        age(store, [80, 80])
        held = store.record_at(0)
        assert store.clean(FOUR).log_files == 0
        assert held is not None
        assert bytes(held)
        del held
        assert store.clean(FOUR).log_files == 2


def test_segments_that_are_not_flushed_stay(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        fill(store, 40)
        age(store, [80, 80])
        assert store.clean(FOUR).log_files == 0


@pytest.mark.parametrize(
    ("usage", "fresh_go", "expired_go", "writeable"),
    [
        (0.70, False, False, True),
        (0.76, False, True, True),
        (0.86, True, True, True),
        (0.91, True, True, False),
    ],
)
def test_disk_usage_decides(tmp_path: Path, usage: float, fresh_go: bool, expired_go: bool, writeable: bool) -> None:
    now_ms = at_hour(9)
    with small_store(tmp_path, disk_usage=lambda path: usage) as store:
        fill(store, 40)
        store.flush()
        age(store, [80], now_ms)
        expected = 10 if fresh_go else int(expired_go)
        assert store.clean(now_ms).log_files == min(
            expected, len(log_names(store)) + 99, expected if expected < 2 else 4
        )
        assert store.writeable is writeable
        assert store.disk_ratio() == usage
        if not writeable:
            with pytest.raises(NotWriteable, match="91%"):
                store.append(a_message(), START_MS)


def test_writing_goes_on_when_there_is_space_again(tmp_path: Path) -> None:
    usage = [0.95]
    with small_store(tmp_path, disk_usage=lambda path: usage[0]) as store:
        fill(store, 3)
        store.clean(FOUR)
        for level, writeable in ((0.88, False), (0.84, True), (0.88, True), (0.91, False), (0.5, True)):
            usage[0] = level
            store.clean(FOUR)
            assert store.writeable is writeable
        fill(store, 1)
        assert not issubclass(NotWriteable, DiskFull)


def test_forcible_cleaning_can_be_switched_off(tmp_path: Path) -> None:
    with small_store(tmp_path, disk_usage=lambda path: 0.87, clean_forcibly=False) as store:
        fill(store, 40)
        store.flush()
        age(store, [0.1], at_hour(9))
        assert store.clean(at_hour(9)).log_files == 0


def test_a_queue_whose_messages_are_all_gone_keeps_its_end(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        fill(store, 5, "quiet")
        fill(store, 60)
        store.flush()
        age(store, [80, 80])
        store.clean(FOUR)
        assert (store.min_offset("quiet", 0), store.max_offset("quiet", 0)) == (5, 5)
        assert store.earliest_store_time("quiet", 0) == -1
        fill(store, 1, "quiet")
        assert bodies(store, "quiet") == expected_bodies(6, "quiet", start=5)
    with small_store(tmp_path) as store:
        assert bodies(store, "quiet") == expected_bodies(6, "quiet", start=5)


def test_index_files_follow_the_log(tmp_path: Path) -> None:
    with small_store(tmp_path, index_entries=6) as store:
        fill(store, 60)
        store.flush()
        age(store, [80, 80, 80])
        assert store.clean(FOUR).index_files > 0
        assert store.query("topic", "k0", 32, 0, 1 << 60).slices == []
        assert len(store.query("topic", "k59", 32, 0, 1 << 60).slices) == 1


def test_the_systems_own_disk_usage(tmp_path: Path) -> None:
    assert 0 <= disk_usage(tmp_path) <= 1
    assert disk_usage(tmp_path / "missing") == -1
