"""Which files go, and when."""

from __future__ import annotations

import logging
import os
from datetime import datetime
from pathlib import Path
from typing import Any

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


def test_the_log_says_why_no_room_is_made_but_not_at_every_look(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "skylark.store.retention")
    usage = [0.8]
    with small_store(tmp_path, disk_usage=lambda path: usage[0], clean_forcibly=False) as store:
        store.clean(FOUR)
        fill(store, 40)
        store.flush()
        now_ms = at_hour(9)
        for path in (store.config.root / "commitlog").iterdir():
            os.utime(path, (now_ms / 1000, now_ms / 1000))
        for look in range(120):
            store.clean(now_ms + look * 10_000)
        usage[0] = 0.89
        store.clean(now_ms + 1_200_000)
    young = "no file of the log can go: the oldest was written to within the 72 hours of fileReservedTime"
    assert [record.message for record in caplog.records] == [
        "80% of the disk is used, and no file of the log can go: the one that is written to is the only one",
        f"80% of the disk is used, and {young}",
        f"80% of the disk is used, and {young}",
        f"89% of the disk is used, and {young}; cleanFileForciblyEnable=false keeps it: make room, or lower "
        "fileReservedTime",
    ]


@pytest.mark.parametrize(
    ("settings", "usage", "fresh_go", "writeable"),
    [
        ({"disk_clean_forcibly_ratio": 99}, 0.86, True, True),  # taken as 85
        ({"disk_clean_forcibly_ratio": 5}, 0.30, False, True),  # taken as 30
        ({"disk_clean_forcibly_ratio": 5}, 0.31, True, True),
        ({"disk_warning_ratio": 99}, 0.91, True, False),  # taken as 90
        ({"disk_warning_ratio": 5, "clean_forcibly": False}, 0.35, False, True),  # taken as 35
        ({"disk_warning_ratio": 5, "clean_forcibly": False}, 0.36, False, False),
        ({"clean_forcibly": False}, 0.95, False, False),
    ],
)
def test_apaches_limits_of_the_ratios(
    tmp_path: Path, settings: dict[str, Any], usage: float, fresh_go: bool, writeable: bool
) -> None:
    with small_store(tmp_path, disk_usage=lambda path: usage, **settings) as store:
        fill(store, 40)
        store.flush()
        assert (store.clean(at_hour(9)).log_files > 0, store.writeable) == (fresh_go, writeable)


@pytest.mark.parametrize(("percent", "usage", "expired_go"), [(1, 0.10, False), (1, 0.11, True), (100, 0.96, True)])
def test_apaches_limits_of_the_ratio_for_what_has_expired(
    tmp_path: Path, percent: int, usage: float, expired_go: bool
) -> None:
    settings: dict[str, Any] = {"disk_max_used_ratio": percent, "clean_forcibly": False}
    with small_store(tmp_path, disk_usage=lambda path: usage, **settings) as store:
        fill(store, 40)
        store.flush()
        age(store, [80], at_hour(9))
        assert (store.clean(at_hour(9)).log_files > 0) is expired_go


def test_messages_that_had_not_expired_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_store(tmp_path, disk_usage=lambda path: 0.87, delete_batch_max=2) as store:
        for _ in range(20):
            fill(store, 1, "a")
            fill(store, 1, "b", 3)
        fill(store, 1, "quiet")
        store.flush()
        age(store, [80])
        store.clean(at_hour(3))
        expired = first_of_segment(store, "a", 1)
        (record,) = [record for record in caplog.records if "before the 72 hours" in record.message]
        assert record.levelname == "ERROR"
        gone_a, gone_b = store.min_offset("a", 0), store.min_offset("b", 3)
        assert 0 < expired < gone_a
        assert f"a-0 {expired} to {gone_a - 1}" in record.message
        assert f"b-3 {expired} to {gone_b - 1}" in record.message
        assert f"over, {gone_a + gone_b - 2 * expired} messages: " in record.message
        assert "quiet" not in record.message
        caplog.clear()
        age(store, [80, 80])
        store.clean(at_hour(3))
        assert "before the 72 hours" not in caplog.text, "what has expired goes quietly"


def first_of_segment(store: Store, topic: str, segment: int) -> int:
    """The messages have the same size and come by turns: how many of a topic lay before a segment."""
    entry = store.entry(topic, 0, store.max_offset(topic, 0) - 1)
    assert entry is not None
    return -(-segment * (2048 // entry.size_bytes) // 2)


def test_many_queues_follow_in_turns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_store(tmp_path, disk_usage=lambda path: 0.87, delete_batch_max=99) as store:
        for queue_id in range(150):
            fill(store, 1, "many", queue_id)
        fill(store, 1, "last")
        store.flush()
        turns = [store.clean(at_hour(9))]
        assert turns[0].log_files > 10
        followed = sum(store.min_offset("many", queue_id) for queue_id in range(150))
        assert 0 < followed <= 64
        statuses = {store.read("many", queue_id, 0, 32).status for queue_id in range(100)}
        assert statuses == {ReadStatus.OFFSET_TOO_SMALL, ReadStatus.MESSAGE_WAS_REMOVING}
        store.delete_topic("last")
        while turns[-1].more:
            turns.append(store.clean(at_hour(9)))
        assert len(turns) == 3
        gone = sum(store.min_offset("many", queue_id) for queue_id in range(150))
        assert gone > 128
        assert f"over, {gone} messages: many-0 0 to 0, many-1 0 to 0," in caplog.text
        assert f" and of {gone - 20} more queues" in caplog.text


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
