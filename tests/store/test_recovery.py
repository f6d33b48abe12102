"""Opening after clean stops, crashes, torn tails, and with derived files missing."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from faults.power import Disk, NothingUnsynced
from skylark.store import Store, StoreError, dispatch, segments
from skylark.store.checkpoint import Checkpoint
from skylark.store.logscan import LogScan
from skylark.wire.message import QUEUE_OFFSET_POSITION
from skylark.wire.records import decode_record, encode_record
from store.small_store import (
    SEGMENT_BYTES,
    START_MS,
    a_message,
    bodies,
    drain,
    expected_bodies,
    fill,
    finish_deleting,
    small_config,
    small_store,
)

FOREVER = (0, 1 << 60)


def crash(store: Store, target: Path) -> Path:
    """The directory as a killed process leaves it: everything written, nothing closed."""
    finish_deleting(store)  # what is copied must not go meanwhile
    shutil.copytree(store.config.root, target)
    assert (target / "abort").exists()
    return target


def crashed(root: Path, target: Path, fills: list[tuple[str, int, int]], **changes: Any) -> Path:
    with small_store(root, **changes) as store:
        for topic, queue_id, count in fills:
            fill(store, count, topic, queue_id)
        return crash(store, target)


def contents(root: Path) -> dict[str, bytes]:
    """Every file of a store, but for the lock."""
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file() and path.name != "lock"}


def count_inspected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []
    original = dispatch.inspect

    def counting(segment: memoryview, at: int, base: int) -> Any:
        seen.append(base + at)
        return original(segment, at, base)

    for module in ("recovery", "logscan"):
        monkeypatch.setattr(f"skylark.store.{module}.inspect", counting)
    return seen


def test_a_clean_stop_is_opened_without_reading_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_store(tmp_path) as store:
        fill(store, 100)
        fill(store, 50, "other", 3)
        end = store.log_max_offset
    seen = count_inspected(monkeypatch)
    with small_store(tmp_path) as store:
        assert len(seen) < 12
        assert store.log_max_offset == store.flushed_offset == end
        assert bodies(store) == expected_bodies(100)
        assert bodies(store, "other", 3) == expected_bodies(50, "other", 3)
        assert len(store.query("topic", "k7", 32, *FOREVER).slices) == 1


def test_a_crash_before_any_checkpoint(tmp_path: Path) -> None:
    root = crashed(tmp_path / "a", tmp_path / "b", [("topic", 0, 40), ("topic", 1, 3), ("topic", 0, 1)])
    with small_store(root) as store:
        assert bodies(store) == expected_bodies(41)
        assert bodies(store, queue_id=1) == expected_bodies(3, queue_id=1)
        fill(store, 5)
        assert bodies(store) == expected_bodies(46)
        assert len(store.query("topic", "k2", 32, *FOREVER).slices) == 2


def test_a_crash_after_a_checkpoint_reads_only_the_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_store(tmp_path / "a") as store:
        fill(store, 60)
        fill(store, 10, "quiet")
        store.flush()
        fill(store, 20)
        root = crash(store, tmp_path / "b")
    seen = count_inspected(monkeypatch)
    with small_store(root) as store:
        assert len(seen) < 70
        assert bodies(store) == expected_bodies(80)
        assert bodies(store, "quiet") == expected_bodies(10, "quiet")
        found = [decode_record(record) for record in store.query("topic", "k75", 32, *FOREVER).slices]
        assert [message.queue_offset for message in found] == [75]


def test_a_checkpoint_without_an_offset_leads_to_a_segment_by_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_store(tmp_path / "a") as store:
        fill(store, 60)
        store.flush()
        root = crash(store, tmp_path / "b")
    checkpoint = Checkpoint(root / "checkpoint")
    checkpoint.logics_offset = 0
    checkpoint.physic_ms = checkpoint.logics_ms = START_MS + 50_000
    checkpoint.flush()
    seen = count_inspected(monkeypatch)
    with small_store(root) as store:
        assert bodies(store) == expected_bodies(60)
    assert min(offset for offset in seen if offset) > 2048


def test_a_torn_tail_at_every_byte_of_the_last_record(tmp_path: Path) -> None:
    with small_store(tmp_path / "a") as store:
        fill(store, 12, size=20)
        last = store.append(a_message(b"the last", KEYS="last"), START_MS)
        root = crash(store, tmp_path / "b")
    name = f"commitlog/{last.log_offset // 2048 * 2048:020d}"
    whole = (root / name).read_bytes()
    start = last.log_offset % 2048
    for torn in range(last.size_bytes + 1):
        case = tmp_path / "case"
        shutil.copytree(root, case)
        (case / name).write_bytes(whole[: start + torn].ljust(2048, b"\0"))
        with small_store(case) as store:
            survived = torn == last.size_bytes
            assert store.max_offset("topic", 0) == 12 + survived
            assert store.log_max_offset == last.log_offset + survived * last.size_bytes
            assert len(store.query("topic", "last", 32, *FOREVER).slices) == survived
            assert not any((case / name).read_bytes()[store.log_max_offset % 2048 :])
            fill(store, 1, size=20)
            assert len(drain(store)) == 13 + survived
        shutil.rmtree(case)


def test_an_unclean_stop_and_what_it_cost_are_told_to_whoever_runs_the_broker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_store(tmp_path / "a") as store:
        fill(store, 3, size=20)
        last = store.append(a_message(b"the last", KEYS="last"), START_MS)
        root = crash(store, tmp_path / "b")
    with small_store(tmp_path / "a"):
        assert not caplog.records  # a clean stop is nothing to warn about
    with small_store(root):
        (told,) = caplog.messages
        assert re.search(
            r"b: opened in \d+\.\d s after an unclean stop: log from 0 to \d+, 1 queues; "
            r"4 records checked from 0 on, all whole$",
            told,
        )
        shutil.copytree(root, tmp_path / "c")
    with (tmp_path / "c" / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(last.log_offset + last.size_bytes - 4)
        file.write(bytes(4))
    caplog.clear()
    with small_store(tmp_path / "c"):
        (told,) = caplog.messages
        assert told.endswith(f"3 records checked from 0 on, {last.size_bytes} bytes of an incomplete one cut off")


def found_offsets(store: Store, topic: str = "topic", queue_id: int = 0) -> list[int]:
    """The queue offsets of the messages that a consumer gets, whatever is missing between them."""
    found, offset = [], store.min_offset(topic, queue_id)
    while offset < store.max_offset(topic, queue_id):
        result = store.read(topic, queue_id, offset, 32)
        found += [decode_record(record).queue_offset for record in result.records]
        assert result.next_offset > offset
        offset = result.next_offset
    return found


def damage(root: Path, log_offset: int, data: bytes | None = None, *, flip: int = 0x40) -> None:
    """Flips bits at an offset of the log, or writes over what is there."""
    with (root / f"commitlog/{log_offset // 2048 * 2048:020d}").open("r+b") as file:
        file.seek(log_offset % 2048)
        was = file.read(1)
        file.seek(log_offset % 2048)
        file.write(bytes([was[0] ^ flip]) if data is None else data)


# Of the queue id (12) and the queue offset (20 to 27) no checksum tells.
@pytest.mark.parametrize("flipped", [0, 2, 3, 5, 7, 10, 12, 15, 20, 21, 26, 27, 30, 35, 84, 87, 90, 188])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_damaged_record_costs_nothing_but_itself(
    tmp_path: Path, flipped: int, checkpoint: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with small_store(tmp_path / "a") as store:
        fill(store, 10)
        fill(store, 3, "other")
        if checkpoint:
            store.flush()
        fill(store, 20)
        fill(store, 3, "other")
        end = store.log_max_offset
        entry = store.entry("topic", 0, 20)
        assert entry is not None
        root = crash(store, tmp_path / "b")
    damage(root, entry.log_offset + flipped)
    with small_store(root) as store:
        assert found_offsets(store) == [*range(20), *range(21, 30)]
        assert bodies(store, "other") == expected_bodies(6, "other")
        assert store.log_max_offset == end
        fill(store, 1)
        assert store.max_offset("topic", 0) == 31
        if flipped not in (12, 15, 20, 21, 26, 27):
            behind = entry.log_offset + entry.size_bytes
            told = f"the log is damaged from offset {entry.log_offset} to {behind}, what was stored there is lost"
            assert told in caplog.messages
            assert f"{entry.size_bytes} damaged bytes passed over, all whole" in caplog.text


def test_what_follows_a_damaged_end_of_a_segment_is_kept(tmp_path: Path) -> None:
    with small_store(tmp_path / "a") as store:
        fill(store, 30)
        end = store.log_max_offset
        root = crash(store, tmp_path / "b")
    last = [m.log_offset for m in drained(root, tmp_path / "c") if m.log_offset < 2048][-1]
    damage(root, last, bytes(2048 - last))  # with the blank record behind it
    damage(root, 4096, bytes(300))  # and the first record of another
    with small_store(root) as store:
        assert store.log_max_offset == end
        lost = set(range(30)) - set(found_offsets(store))
        assert len(lost) == 3


def drained(root: Path, copy: Path) -> list[Any]:
    shutil.copytree(root, copy)
    with small_store(copy) as store:
        return drain(store)


def test_a_segment_that_is_missing_costs_nothing_but_itself(tmp_path: Path) -> None:
    with small_store(tmp_path / "a") as store:
        fill(store, 40)
        end = store.log_max_offset
        root = crash(store, tmp_path / "b")
    (root / "commitlog" / f"{2048:020d}").unlink()
    with small_store(root) as store:
        found = found_offsets(store)
        assert store.log_max_offset == end
        assert (found[0], found[-1]) == (0, 39)
        assert 25 < len(found) < 40
        fill(store, 1)
        assert found_offsets(store) == [*found, 40]


def test_what_a_message_holds_is_no_record(tmp_path: Path) -> None:
    """Whoever knows where the log ends can send a body that looks like a record of its place."""
    with small_store(tmp_path / "a") as store:
        fill(store, 3)
        at = store.log_max_offset + 88
        forged = encode_record(
            a_message(b"forged"), queue_offset=3, log_offset=at, store_timestamp_ms=START_MS, store_host=bytes(8)
        )
        store.append(a_message(forged), START_MS)
        fill(store, 3)
        root = crash(store, tmp_path / "b")
    damage(root, at - 88 + 10)  # its checksum
    with small_store(root) as store:
        assert found_offsets(store) == [0, 1, 2, 4, 5, 6]


def test_queue_files_that_a_power_loss_emptied_are_filled_again(tmp_path: Path) -> None:
    with small_store(tmp_path / "a") as store:
        fill(store, 20)
        store.flush()
        fill(store, 20)
        root = crash(store, tmp_path / "b")
    queue = root / "consumequeue" / "topic" / "0"
    for base in (320, 480):
        path = queue / f"{base:020d}"
        data = path.read_bytes()
        path.write_bytes(bytes(len(data)) if base == 480 else data[:80] + bytes(len(data) - 80))
    with small_store(root) as store:
        assert bodies(store) == expected_bodies(40)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("missing", ["consumequeue", "index", "checkpoint"])
def test_derived_files_are_made_again(tmp_path: Path, missing: str, clean: bool) -> None:
    with small_store(tmp_path / "a") as store:
        fill(store, 20)
        fill(store, 20, "other")
        store.flush()
        fill(store, 3)
        root = crash(store, tmp_path / "b")
    root = tmp_path / "a" if clean else root
    if (root / missing).is_dir():
        shutil.rmtree(root / missing)
    else:
        (root / missing).unlink()
    with small_store(root) as store:
        assert bodies(store) == expected_bodies(23)
        assert bodies(store, "other") == expected_bodies(20, "other")
        assert len(store.query("other", "k3", 32, *FOREVER).slices) == 1
        fill(store, 2, "other")
        assert bodies(store, "other") == expected_bodies(22, "other")


@pytest.mark.parametrize("lost", ["topic", "topic/1", "topic/0/00000000000000000160", "topic/0/00000000000000000320"])
def test_queue_files_lost_while_the_store_was_closed_are_made_again(tmp_path: Path, lost: str) -> None:
    with small_store(tmp_path) as store:
        for queue_id in (0, 1):
            fill(store, 20, queue_id=queue_id)
        fill(store, 20, "other")
    path = tmp_path / "consumequeue" / lost
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    with small_store(tmp_path) as store:
        for queue_id in (0, 1):
            assert bodies(store, queue_id=queue_id) == expected_bodies(20, queue_id=queue_id)
        assert bodies(store, "other") == expected_bodies(20, "other")


def test_one_queue_that_is_missing_after_a_crash_is_made_again(tmp_path: Path) -> None:
    with small_store(tmp_path / "a") as store:
        fill(store, 20)
        fill(store, 20, "other")
        store.flush()
        fill(store, 2)
        root = crash(store, tmp_path / "b")
    shutil.rmtree(root / "consumequeue" / "topic")
    with small_store(root) as store:
        assert bodies(store) == expected_bodies(22)
        assert bodies(store, "other") == expected_bodies(20, "other")


def test_a_torn_record_means_the_same_to_a_queue_that_is_built_again(tmp_path: Path) -> None:
    """Properties that end in NUL, with damage behind them: whichever way a queue is recovered, that one is lost."""
    with small_store(tmp_path / "a") as store:
        fill(store, 5)
        store.flush()
        fill(store, 5)
        torn = store.entry("topic", 0, 7)
        assert torn is not None
        root = crash(store, tmp_path / "b")
    behind = torn.log_offset + torn.size_bytes
    damage(root, behind - 1, b"\0")
    damage(root, behind + 10)  # the checksum of the next one
    without_queue = Path(shutil.copytree(root, tmp_path / "c"))
    shutil.rmtree(without_queue / "consumequeue" / "topic")
    for path in (root, without_queue):
        with small_store(path) as store:
            assert found_offsets(store) == [0, 1, 2, 3, 4, 5, 6, 9]
            assert store.max_offset("topic", 0) == 10


@pytest.mark.parametrize("how", ["clean", "killed", "without checkpoint", "without queues"])
@pytest.mark.parametrize("others", [0, 5])
def test_a_deleted_topic_stays_deleted(
    tmp_path: Path, how: str, others: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with small_store(tmp_path / "a") as store:
        fill(store, others, "other")
        fill(store, 100)
        store.flush()
        fill(store, 20)
        assert store.delete_topic("topic")
        end = store.log_max_offset
        root = crash(store, tmp_path / "b")
    root = root if how == "killed" else tmp_path / "a"
    if how == "without checkpoint":
        (root / "checkpoint").unlink()
    elif how == "without queues":
        shutil.rmtree(root / "consumequeue")
    seen = count_inspected(monkeypatch)
    with small_store(root) as store:
        assert list(store.queues()) == ([("other", 0)] if others else [])
        assert store.log_max_offset == end
        assert how != "clean" or len(seen) < 8
        assert how != "killed" or len(seen) < 60
        assert "built again" not in caplog.text
        fill(store, 3)
        root = crash(store, tmp_path / "c")
    for path in (root, tmp_path / "a"):
        with small_store(path) as store:
            assert bodies(store) == expected_bodies(3 if path == root or how != "killed" else 0)
            assert bodies(store, "other") == expected_bodies(others, "other")


def test_what_a_power_cut_left_of_a_deleted_queue_without_its_entries(tmp_path: Path) -> None:
    """A topic of its name would have begun where the first file that was left does."""
    with small_store(tmp_path / "a") as store:
        fill(store, 100)
        names = sorted(path.name for path in (tmp_path / "a" / "consumequeue" / "topic" / "0").iterdir())
        size = int(names[1])
        store.delete_topic("topic")
        root = crash(store, tmp_path / "b")
    left = root / "consumequeue" / "topic" / "0"
    left.mkdir(parents=True)
    for name in names[1:]:
        (left / name).write_bytes(bytes(size))
    with small_store(root) as store:
        assert store.max_offset("topic", 0) == 0
        fill(store, 3)
        assert bodies(store) == expected_bodies(3)


@pytest.mark.parametrize("kept", [0, 1])
def test_a_log_that_lost_its_end_forgets_that_topics_were_deleted_there(tmp_path: Path, kept: int) -> None:
    with small_store(tmp_path / "a") as store:
        fill(store, 40)
        store.delete_topic("topic")
    for path in sorted((tmp_path / "a" / "commitlog").iterdir())[kept:]:
        path.unlink()
    with small_store(tmp_path / "a") as store:
        assert list(store.queues()) == []
        fill(store, 5)
        root = crash(store, tmp_path / "b")
    (root / "checkpoint").unlink(missing_ok=True)
    with small_store(root) as store:
        assert bodies(store) == expected_bodies(5)


def test_the_list_of_deleted_topics_is_as_long_as_the_log(tmp_path: Path) -> None:
    with small_store(tmp_path, disk_usage=lambda path: 0.87) as store:
        for number in range(5):
            fill(store, 10, f"topic{number}")
            store.delete_topic(f"topic{number}")
            assert not store.delete_topic(f"topic{number}")
        fill(store, 40)
        store.flush()
        store.clean(START_MS)
    assert len((tmp_path / "deletedTopics").read_text().split()) == 5
    with (tmp_path / "deletedTopics").open("a") as file:
        file.write("[12")  # as a crash leaves it
    blocked = tmp_path / "deletedTopics.tmp"
    blocked.mkdir()  # as on a full disk, nothing can be written there
    with small_store(tmp_path) as store:
        assert len(bodies(store)) > 0
    blocked.rmdir()
    with small_store(tmp_path) as store:
        assert (tmp_path / "deletedTopics").read_text() == ""


def test_what_a_killed_process_left_in_memory_is_on_disk_before_it_is_built_upon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note of a deletion, and the names of tables, which a power cut would take back after the next messages."""
    with small_store(tmp_path / "a") as store:
        fill(store, 3)
        store.delete_topic("topic")
        (tmp_path / "a" / "config").mkdir()
        root = crash(store, tmp_path / "b")
    synced: list[str] = []
    for name in ("fdatasync", "fsync"):
        monkeypatch.setattr(os, name, lambda file: synced.append(str(Path(f"/proc/self/fd/{int(file)}").readlink())))
    store = Store.open(small_config(root), flushes=False)
    assert {str(root / "deletedTopics"), str(root / "config"), str(root)} <= set(synced)
    store.close()


def test_a_topic_made_again_after_the_checkpoint(tmp_path: Path) -> None:
    with small_store(tmp_path / "a") as store:
        fill(store, 20)
        store.flush()
        fill(store, 2)
        store.delete_topic("topic")
        fill(store, 5)
        root = crash(store, tmp_path / "b")
    with small_store(root) as store:
        assert bodies(store) == expected_bodies(5)


def test_a_queue_that_outlived_its_first_messages_keeps_its_offsets(tmp_path: Path) -> None:
    with small_store(tmp_path / "a", disk_usage=lambda path: 0.87, delete_batch_max=3) as store:
        fill(store, 60)
        store.flush()
        assert store.clean(START_MS).log_files == 3
        first = store.min_offset("topic", 0)
        assert first > 20
        root = crash(store, tmp_path / "b")
    for path, clean in ((root, False), (tmp_path / "a", True)):
        with small_store(path) as store:
            assert store.min_offset("topic", 0) == first
            assert bodies(store) == expected_bodies(60, start=first)
        shutil.rmtree(path / "consumequeue")
        with small_store(path) as store:
            assert (store.min_offset("topic", 0), store.max_offset("topic", 0)) == (first, 60), clean
            assert bodies(store) == expected_bodies(60, start=first)


@pytest.mark.parametrize("clean", [True, False])
def test_queues_without_their_log_are_left_alone(tmp_path: Path, clean: bool) -> None:
    """Most likely the log is elsewhere, and a setting is wrong."""
    with small_store(tmp_path / "a", commit_log_dir=tmp_path / "log") as store:
        fill(store, 20)
        store.flush()
        root = crash(store, tmp_path / "b")
    root = tmp_path / "a" if clean else root
    before = contents(root)
    with pytest.raises(StoreError, match=r"commitlog has no commit log.*topic-0.*storePathCommitLog.*move .* away"):
        Store.open(small_config(root))
    assert contents(root) == before
    with small_store(root, commit_log_dir=tmp_path / "log") as store:
        assert bodies(store) == expected_bodies(20)
    shutil.rmtree(root / "consumequeue")
    with small_store(root) as store:
        assert list(store.queues()) == []


def test_queues_of_a_log_that_was_never_on_disk_are_dropped(tmp_path: Path) -> None:
    with small_store(tmp_path / "a") as store:
        fill(store, 2)
        root = crash(store, tmp_path / "b")
    shutil.rmtree(root / "commitlog")
    with small_store(root) as store:
        assert list(store.queues()) == []
        fill(store, 3)
        assert bodies(store) == expected_bodies(3)


def test_a_segment_made_ahead_of_time_is_dropped(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        fill(store, 5)
        end = store.log_max_offset
    (tmp_path / "commitlog" / f"{2048:020d}").write_bytes(bytes(2048))
    (tmp_path / "commitlog" / f"{4096:020d}").write_bytes(b"")
    with small_store(tmp_path) as store:
        assert store.log_max_offset == end
        fill(store, 20)
        assert bodies(store) == expected_bodies(25)


def test_queue_entries_beyond_the_log_are_dropped(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        fill(store, 12)
    for path in sorted((tmp_path / "commitlog").iterdir())[1:]:
        path.unlink()
    with small_store(tmp_path) as store:
        count = store.max_offset("topic", 0)
        assert 0 < count < 12
        assert bodies(store) == expected_bodies(count)
        fill(store, 12)
        assert bodies(store) == expected_bodies(count + 12)


def test_old_entries_behind_the_end_of_a_queue_do_not_count(tmp_path: Path) -> None:
    with small_store(tmp_path / "a") as store:
        fill(store, 20)
        fill(store, 3, "other")
        store.flush()
        root = crash(store, tmp_path / "b")
    path = root / "consumequeue" / "other" / "0" / f"{0:020d}"
    entry = path.read_bytes()[:20]
    path.write_bytes(path.read_bytes()[:60] + entry + bytes(80))
    with small_store(root) as store:
        assert bodies(store, "other") == expected_bodies(3, "other")


@pytest.mark.parametrize("topic", ["back", "fore"])
@pytest.mark.parametrize("count", [3, 20])
def test_entries_that_recovery_cut_off_do_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topic: str, count: int
) -> None:
    """A queue was on disk when the log was not. What comes to the log in their place is of another queue."""
    with small_store(tmp_path / "a") as store:
        fill(store, 1, "first")
        store.flush()
        log_offset = store.log_max_offset
        fill(store, count, "back")
        root = crash(store, tmp_path / "b")
        for at in range(log_offset, store.log_max_offset):
            damage(root, at, b"\0")
    disk = Disk(monkeypatch, NothingUnsynced())
    disk.settle(root)
    with small_store(root) as store:
        assert store.max_offset("back", 0) == 0
        fill(store, count, topic)
        store.flush()
        disk.cut(root, tmp_path / "again")
    with small_store(tmp_path / "again") as store:
        assert bodies(store, topic) == expected_bodies(count, topic)
        other = {"back": "fore", "fore": "back"}[topic]
        assert store.max_offset(other, 0) == 0
    disk.forget()


def test_half_messages_at_the_end_of_the_log_are_kept(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        fill(store, 3)
        half = a_message(b"half", KEYS="half")
        half.sys_flag = 4
        offset = store.append(half, START_MS).log_offset
    with small_store(tmp_path) as store:
        assert store.log_max_offset > offset
        assert store.message_at(offset) is not None
        assert len(store.query("topic", "half", 32, *FOREVER).slices) == 1


def test_a_full_disk_does_not_keep_a_store_from_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_store(tmp_path) as store:
        fill(store, 3)

    def full(path: Path, text: str) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with small_store(tmp_path) as store:
        assert (tmp_path / "abort").exists()
        assert bodies(store) == expected_bodies(3)


class Blocks:
    """The disk blocks of files; once the disk is full, each file has those that it had before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self._ends: dict[tuple[str, ...], int] = {}
        monkeypatch.setattr(segments, "posix_fallocate", self)

    def __call__(self, fd: int, offset: int, length: int) -> None:
        name = Path(f"/proc/self/fd/{fd}").readlink().parts[-3:]
        if self.is_full and offset + length > self._ends.get(name, 0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, offset, length)
        self._ends[name] = max(self._ends.get(name, 0), offset + length)


@pytest.mark.parametrize("checked", [0, 2, 2900])
def test_a_full_disk_keeps_no_queue_from_being_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: int
) -> None:
    large: dict[str, Any] = {"queue_entries_per_file": 10_000, "segment_bytes": 1 << 20}
    disk = Blocks(monkeypatch)
    with small_store(tmp_path / "store", **large) as store:
        fill(store, checked)
        store.flush()
        fill(store, 300)
        root = crash(store, tmp_path / "killed" / "store")
    disk.is_full = True
    with small_store(root, **large) as store:
        assert bodies(store) == expected_bodies(checked + 300)


def test_a_scan_crosses_segments(tmp_path: Path) -> None:
    store = Store.open(small_config(tmp_path))
    fill(store, 40)
    scan = LogScan(store._log, 0)
    assert [record.queue_offset for record in scan] == list(range(40))
    assert scan.end_offset == store.log_max_offset
    store.close()


WRITER = """
import sys, time
from pathlib import Path
from skylark.store import Store, StoreConfig
from skylark.wire.message import Message
store = Store.open(StoreConfig(root=Path(sys.argv[1]), segment_bytes=1 << 20, queue_entries_per_file=1000,
                               queue_flush_interval_ms=20, flush_interval_ms=10, index_slots=100, index_entries=100000))
number = store.max_offset("topic", 1)
while True:
    for queue_id in (0, 1):
        if store.max_offset("topic", queue_id) > number:
            continue  # the last process was killed between the two queues
        store.append(Message("topic", queue_id, b"%d-%d" % (queue_id, number), {"KEYS": "k"}), number)
    number += 1
    print(number, flush=True)
"""


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    acknowledged = 0
    for round_number in range(3):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            acknowledged = int(line)
            if acknowledged >= 3000 * (round_number + 1):
                break
        process.kill()
        rest = process.stdout.read().split()
        process.stdout.close()
        process.wait()
        acknowledged = int(rest[-1]) if rest else acknowledged
    config = small_config(tmp_path, segment_bytes=1 << 20, queue_entries_per_file=1000, index_slots=100,
                          index_entries=100_000)  # fmt: skip
    store = Store.open(config)
    try:
        for queue_id in (0, 1):
            messages = drain(store, queue_id=queue_id)
            assert len(messages) >= acknowledged
            assert [message.body for message in messages] == [b"%d-%d" % (queue_id, n) for n in range(len(messages))]
    finally:
        store.close()


def readable(store: Store) -> list[bytes]:
    """What a consumer gets that steps over what is damaged."""
    found: list[bytes] = []
    offset = 0
    while offset < store.max_offset("topic", 0):
        result = store.read("topic", 0, offset, 32)
        found += [decode_record(record).body.rstrip(b".") for record in result.records]
        offset = result.next_offset
    return found


def copy_of_queue(root: Path, path: Path, topic: str = "topic") -> Path:
    return Path(shutil.copytree(root / "consumequeue" / topic, path))


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("position", [0, 16, 19])
def test_one_record_that_says_to_be_the_first_costs_no_other(tmp_path: Path, clean: bool, position: int) -> None:
    """A queue offset is under no checksum: what looks like a topic that was made again may be a flipped bit."""
    with small_store(tmp_path / "a", segment_bytes=1 << 16) as store:
        fill(store, 16)
        store.flush()
        fill(store, 4)
        entry = store.entry("topic", 0, position)
        root = crash(store, tmp_path / "b")
    root = tmp_path / "a" if clean else root
    assert entry is not None
    with (root / "commitlog" / "00000000000000000000").open("r+b") as file:
        file.seek(entry.log_offset + QUEUE_OFFSET_POSITION)
        file.write(bytes(8))
    for _ in range(2):
        with small_store(root, segment_bytes=1 << 16) as store:
            expected = expected_bodies(20)
            if position:
                del expected[position]
            assert readable(store) == expected
        shutil.rmtree(root / "consumequeue")


@pytest.mark.parametrize("claimed", [1, 2, 25, 1 << 24, 1 << 40, -1])
@pytest.mark.parametrize("count", [4, 60])
def test_a_first_record_that_says_to_be_a_later_one_costs_no_other(tmp_path: Path, claimed: int, count: int) -> None:
    with small_store(tmp_path) as store:
        fill(store, count)
    damage(tmp_path, QUEUE_OFFSET_POSITION, claimed.to_bytes(8, "big", signed=True))
    shutil.rmtree(tmp_path / "consumequeue")
    for _ in range(2):
        with small_store(tmp_path) as store:
            assert readable(store) == expected_bodies(count, start=1)
            assert store.max_offset("topic", 0) == count


@pytest.mark.parametrize("is_gone", [True, False])
def test_messages_behind_a_large_hole_of_the_log_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    monkeypatch.setattr(dispatch, "MAX_GAP_ENTRIES", 5)
    with small_store(tmp_path) as store:
        fill(store, 60)
        left = [
            n for n in range(60) if (entry := store.entry("topic", 0, n)) and entry.log_offset // SEGMENT_BYTES != 1
        ]
    hole = tmp_path / "commitlog" / f"{SEGMENT_BYTES:020}"
    hole.unlink()
    if not is_gone:
        hole.write_bytes(bytes(SEGMENT_BYTES))
    shutil.rmtree(tmp_path / "consumequeue")
    with small_store(tmp_path) as store:
        assert found_offsets(store) == left
        assert len(left) < 60 - 5


@pytest.mark.parametrize("count", [2, 5])
def test_a_topic_made_again_without_a_note_of_its_deletion(tmp_path: Path, count: int) -> None:
    """As Apache's broker leaves it: the offsets begin anew, and go on."""
    with small_store(tmp_path) as store:
        fill(store, 20)
        store.delete_topic("topic")
        fill(store, count)
    (tmp_path / "deletedTopics").unlink()
    shutil.rmtree(tmp_path / "consumequeue")
    with small_store(tmp_path) as store:
        assert bodies(store) == expected_bodies(count)


@pytest.mark.parametrize("clean", [True, False])
def test_one_queue_of_a_deleted_topic_that_comes_back_takes_no_other_along(tmp_path: Path, clean: bool) -> None:
    with small_store(tmp_path / "a") as store:
        fill(store, 5)
        store.flush()
        old = copy_of_queue(tmp_path / "a", tmp_path / "old")
        store.delete_topic("topic")
        fill(store, 7, queue_id=1)
        fill(store, 1, "other")
        store.flush()
        root = crash(store, tmp_path / "b")
    root = tmp_path / "a" if clean else root
    shutil.copytree(old / "0", root / "consumequeue" / "topic" / "0")
    with small_store(root) as store:
        assert bodies(store, queue_id=1) == expected_bodies(7, queue_id=1)
        assert ("topic", 0) not in store.queues()


def test_a_queue_with_files_of_a_deleted_topic_behind_its_own_is_made_again(tmp_path: Path) -> None:
    with small_store(tmp_path / "a") as store:
        fill(store, 20)
        store.flush()
        old = copy_of_queue(tmp_path / "a", tmp_path / "old")
        store.delete_topic("topic")
        fill(store, 5)
        fill(store, 1, "other")
        store.flush()
        root = crash(store, tmp_path / "b")
    shutil.copy(old / "0" / f"{8 * 20:020}", root / "consumequeue" / "topic" / "0")
    with small_store(root) as store:
        assert bodies(store) == expected_bodies(5)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("lost", [1, 2])
def test_the_first_files_of_a_queue_are_missed(tmp_path: Path, clean: bool, lost: int) -> None:
    with small_store(tmp_path / "a") as store:
        fill(store, 30)
        fill(store, 1, "other")
        store.flush()
        root = crash(store, tmp_path / "b")
    root = tmp_path / "a" if clean else root
    for number in range(lost):
        (root / "consumequeue" / "topic" / "0" / f"{number * 8 * 20:020}").unlink()
    with small_store(root) as store:
        assert bodies(store) == expected_bodies(30)
        assert bodies(store, "other") == expected_bodies(1, "other")


def test_first_files_that_are_lost_after_retention_are_missed_after_a_clean_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_store(tmp_path, disk_usage=lambda path: 0.87, delete_batch_max=2) as store:
        fill(store, 3, "gone")
        fill(store, 60)
        store.flush()
        store.clean(START_MS)
        first, gone = store.min_offset("topic", 0), store.max_offset("gone", 0)
        assert first > 8
    with small_store(tmp_path) as store:
        assert "lost" not in caplog.text
        assert store.min_offset("topic", 0) == first
    files = sorted((tmp_path / "consumequeue" / "topic" / "0").iterdir())
    assert files[0].name != f"{0:020}"
    files[0].unlink()
    with small_store(tmp_path) as store:
        assert "lost" in caplog.text
        assert bodies(store) == expected_bodies(60, start=first)
        assert store.max_offset("gone", 0) == gone


@pytest.mark.parametrize("lost_file", [None, 0, 8])
def test_a_queue_with_holes_is_recovered_from_the_whole_log_once_more(tmp_path: Path, lost_file: int | None) -> None:
    """Its holes tell what lies behind them, so they count for no more than that."""
    with small_store(tmp_path / "a") as store:
        fill(store, 30)
        places = [store.entry("topic", 0, number) for number in (0, 8, 9)]
        root = crash(store, tmp_path / "b")
    for place in places:
        assert place is not None
        damage(root, place.log_offset, bytes(place.size_bytes))
    shutil.rmtree(root / "consumequeue")
    with small_store(root) as store:
        found = found_offsets(store)
        assert found == [*range(1, 8), *range(10, 30)]
        again = crash(store, tmp_path / "c")
    (again / "checkpoint").unlink(missing_ok=True)
    if lost_file is not None:
        (again / f"consumequeue/topic/0/{lost_file * 20:020}").unlink()
    with small_store(again) as store:
        assert found_offsets(store) == found


def test_first_files_that_a_power_cut_took_are_made_again_behind_retention(tmp_path: Path) -> None:
    """The checkpoint says that all queues are being made again, so their files may lack any of the others."""
    with small_store(tmp_path / "a", disk_usage=lambda path: 0.87, delete_batch_max=2) as store:
        fill(store, 60)
        store.flush()
        store.clean(START_MS)
        first = store.min_offset("topic", 0)
        assert first > 8
        root = crash(store, tmp_path / "b")
    (root / "checkpoint").unlink()
    files = sorted((root / "consumequeue" / "topic" / "0").iterdir())
    for lost in files[:2]:
        lost.unlink()
    with small_store(root) as store:
        assert bodies(store) == expected_bodies(60, start=first)
