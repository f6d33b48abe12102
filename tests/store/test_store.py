"""What callers of a store see: appending, reading, looking up, and the limits."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from skylark.store import (
    DiskFull,
    MessageTooLarge,
    NotWriteable,
    PropertiesTooLarge,
    ReadStatus,
    Store,
    StoreError,
    StoreLocked,
    segments,
)
from skylark.store.api import parse_delay_levels
from skylark.wire.message import Message
from skylark.wire.records import BatchPart, decode_record, encode_host, encode_properties, parse_message_id, tag_code
from store.small_store import START_MS, a_message, bodies, drain, expected_bodies, fill, small_config, small_store


def test_a_message_comes_back_with_its_place(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        message = Message("topic", 3, b"hello", {"TAGS": "a", "KEYS": "k"}, flag=5, born_timestamp_ms=9)
        appended = store.append(message, START_MS)
        assert (appended.log_offset, appended.queue_offset, appended.store_timestamp_ms) == (0, 0, START_MS)
        assert parse_message_id(appended.message_id) == (encode_host("127.0.0.1", 10911), 0)
        assert store.log_max_offset == appended.log_end_offset == appended.size_bytes
        stored = store.message_at(0)
        assert stored is not None
        assert (stored.body, stored.properties, stored.flag, stored.queue_id) == (b"hello", message.properties, 5, 3)
        assert store.append(message, START_MS).queue_offset == 1
        assert list(store.queues()) == [("topic", 3)]


def test_files_lie_where_apache_has_them(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        fill(store, 20, size=300)
        assert (tmp_path / "abort").read_text() == str(os.getpid())
        names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
        assert "commitlog/00000000000000000000" in names
        assert "commitlog/00000000000000002048" in names
        assert "consumequeue/topic/0/00000000000000000160" in names
        assert {path.stat().st_size for path in (tmp_path / "commitlog").iterdir()} == {2048}
    assert not (tmp_path / "abort").exists()
    assert (tmp_path / "checkpoint").stat().st_size == 4096


def test_a_segment_ends_with_a_blank_record(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        first = store.append(a_message(bytes(1000)), START_MS)
        second = store.append(a_message(bytes(1000)), START_MS)
        assert second.log_offset == 2048
        data = (tmp_path / "commitlog" / "00000000000000000000").read_bytes()
        blank = data[first.size_bytes :]
        assert blank[:8] == (2048 - first.size_bytes).to_bytes(4, "big") + bytes.fromhex("cbd43194")
        assert not any(blank[8:])
        assert store.message_at(first.size_bytes) is None


def test_a_record_that_leaves_room_for_the_blank_just_fits(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        overhead = store.append(a_message(b"", topic="probe"), START_MS).size_bytes
        start = store.log_max_offset
        store.append(a_message(bytes(2048 - start - overhead - 8), topic="probe"), START_MS)
        assert store.log_max_offset == 2048 - 8
        assert store.append(a_message(b"", topic="probe"), START_MS).log_offset == 2048


@pytest.mark.parametrize("size", [2048, 5000])
def test_a_record_larger_than_a_segment_is_refused(tmp_path: Path, size: int) -> None:
    with small_store(tmp_path) as store:
        with pytest.raises(MessageTooLarge):
            store.append(a_message(bytes(size)), START_MS)
        assert store.log_max_offset == 0


def test_limits_of_body_and_properties(tmp_path: Path) -> None:
    with small_store(tmp_path, max_message_bytes=10, segment_bytes=1 << 20) as store:
        with pytest.raises(MessageTooLarge):
            store.append(a_message(bytes(11)), START_MS)
        with pytest.raises(PropertiesTooLarge):
            store.append(a_message(b"", KEYS="x" * 32767), START_MS)
        store.append(a_message(b"", KEYS="x" * (32767 - 6)), START_MS)
        assert len(drain(store)) == 1


@pytest.mark.parametrize("topic", ["../../x", "a/b", "..", "", "nul\0"])
def test_topics_that_would_leave_the_directory_are_refused(tmp_path: Path, topic: str) -> None:
    with small_store(tmp_path) as store, pytest.raises(StoreError):
        store.append(a_message(topic=topic), START_MS)


def test_batches_lie_together(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        fill(store, 5)
        batch = [BatchPart(i, f"b{i}".encode(), f"KEYS\x01batch{i}\x02".encode()) for i in range(6)]
        begin = store.log_max_offset
        stored = store.append_batch(a_message(), batch, START_MS)
        assert stored.queue_offset == 5
        found = drain(store)[5:]
        assert [(m.flag, m.body, encode_properties(m.properties)) for m in found] == [
            (part.flag, part.body, part.properties) for part in batch
        ]
        assert [m.queue_offset for m in found] == list(range(5, 11))
        assert stored.log_offsets == [m.log_offset for m in found]
        assert stored.message_id == ",".join(m.message_id for m in found)
        assert stored.log_offsets[0] == begin
        for one, next_one in pairwise(found):
            assert next_one.log_offset == one.log_offset + one.size_bytes
        assert stored.log_end_offset == store.log_max_offset
        [record] = store.query("topic", "batch3", 32, 0, 1 << 60).slices
        assert decode_record(record).body == b"b3"


def test_a_batch_is_stored_whole_or_not_at_all(tmp_path: Path) -> None:
    with small_store(tmp_path, max_message_bytes=100) as store:
        with pytest.raises(MessageTooLarge):
            store.append_batch(a_message(), [BatchPart(0, b"a", b""), BatchPart(0, bytes(101), b"")], START_MS)
        with pytest.raises(PropertiesTooLarge):
            store.append_batch(a_message(), [BatchPart(0, b"a", b""), BatchPart(0, b"a", bytes(32768))], START_MS)
        assert (store.log_max_offset, store.max_offset("topic", 0)) == (0, 0)


def test_every_queue_file_of_a_batch_is_flushed(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        fill(store, 1)
        store.flush()
        batch = [BatchPart(0, b"", b"")] * (2 * store.config.queue_entries_per_file)
        store.append_batch(a_message(), batch, START_MS)
        files = sorted((tmp_path / "consumequeue" / "topic" / "0").iterdir())
        assert len(files) == 3
        assert [path for _, path in store._progress.dirty_queue_files] == files


@pytest.mark.parametrize("mapped", [1, 2, 100])
@pytest.mark.parametrize("before", [0, 3, 8])
def test_a_batch_larger_than_a_queue_file_keeps_the_order_of_the_files(
    tmp_path: Path, before: int, mapped: int
) -> None:
    with small_store(tmp_path, segment_bytes=1 << 14, max_mapped_queue_files=mapped) as store:
        fill(store, before)
        batch = [BatchPart(0, f"topic-0-{before + number}".encode(), b"") for number in range(12)]
        fill(store, 100, "other")
        store.append_batch(a_message(), batch, START_MS)
        assert store._queues.create("topic", 0)._bases == [*range(0, 20 * (before + 12), 160)]
        store.flush()
        os.utime(min((tmp_path / "commitlog").iterdir()), (0, 0))
        store.delete_expired_soon()
        assert store.clean(START_MS).log_files == 1
        assert bodies(store) == expected_bodies(before + 12, start=before)
        fill(store, 20)
    with small_store(tmp_path, segment_bytes=1 << 14) as store:
        assert bodies(store) == expected_bodies(before + 32, start=before)


def test_a_batch_is_limited_as_a_whole(tmp_path: Path) -> None:
    with small_store(tmp_path, segment_bytes=1 << 20, max_message_bytes=1000) as store:
        for parts in (
            [BatchPart(0, bytes(978), b"")] * 2,  # bodies
            [BatchPart(0, b"", b"x" * 500)] * 2,  # properties
            [BatchPart(0, b"", b"")] * 46,  # messages
        ):
            with pytest.raises(MessageTooLarge):
                store.append_batch(a_message(), parts, START_MS)
        assert store.log_max_offset == 0
        store.append_batch(a_message(), [BatchPart(0, b"", b"")] * 45, START_MS)
        store.append_batch(a_message(), [BatchPart(0, bytes(1000), b"x" * 2000)], START_MS)
        assert len(drain(store)) == 46


def test_half_messages_enter_no_queue(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        for sys_flag, queue_offset in ((0, 0), (4, 0), (12, 0), (8, 1), (0, 2)):
            message = a_message(b"m", KEYS="key")
            message.sys_flag = sys_flag
            assert store.append(message, START_MS).queue_offset == queue_offset
        assert [message.sys_flag for message in drain(store)] == [0, 8, 0]
        found = [decode_record(record).sys_flag for record in store.query("topic", "key", 32, 0, 1 << 60).slices]
        assert found == [0, 4, 8, 0]


def test_delayed_messages_keep_their_due_time_in_the_queue(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        for level, delay_ms in (("1", 1000), ("18", 7_200_000), ("99", 7_200_000)):
            message = a_message(b"", "SCHEDULE_TOPIC_XXXX", 0, DELAY=level, TAGS="t")
            offset = store.append(message, START_MS).queue_offset
            entry = store.entry("SCHEDULE_TOPIC_XXXX", 0, offset)
            assert entry is not None
            assert entry.tag_code == START_MS + delay_ms
        store.append(a_message(b"", "other", 0, DELAY="1", TAGS="t"), START_MS)
        other = store.entry("other", 0, 0)
        assert other is not None
        assert other.tag_code == tag_code("t")


def test_delay_levels() -> None:
    assert parse_delay_levels("1s 5m 2h 1d") == (1000, 300_000, 7_200_000, 86_400_000)
    with pytest.raises(StoreError, match="1x"):
        parse_delay_levels("1x")


def test_arrivals_are_told(tmp_path: Path) -> None:
    heard: list[tuple[str, int, int, Sequence[int]]] = []
    with small_store(tmp_path) as store:
        store.listeners = (lambda *arrival: heard.append(arrival),)
        store.append_batch(a_message(), [BatchPart(0, b"", b"TAGS\x01a\x02"), BatchPart(0, b"", b"")], START_MS)
        half = a_message()
        half.sys_flag = 4
        store.append(half, START_MS)
    assert heard == [("topic", 0, 0, [tag_code("a"), 0])]


# --- reading ----------------------------------------------------------------------------------------------------------
def test_the_outcomes_of_a_read_that_finds_nothing(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        assert store.read("topic", 0, 5, 32).status is ReadStatus.NO_MATCHED_LOGIC_QUEUE
        half = a_message(queue_id=1)
        half.sys_flag = 4
        store.append(half, START_MS)
        empty = store.read("topic", 1, 5, 32)
        assert (empty.status, empty.next_offset) == (ReadStatus.NO_MESSAGE_IN_QUEUE, 0)
        fill(store, 3)
        for offset, status, next_offset in (
            (3, ReadStatus.OFFSET_OVERFLOW_ONE, 3),
            (4, ReadStatus.OFFSET_OVERFLOW_BADLY, 3),
            (-1, ReadStatus.OFFSET_TOO_SMALL, 0),
        ):
            result = store.read("topic", 0, offset, 32)
            assert (result.status, result.next_offset) == (status, next_offset)
            assert (result.min_offset, result.max_offset, result.count) == (0, 3, 0)


def test_a_read_stops_at_the_end_of_a_queue_file(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        fill(store, 20)
        result = store.read("topic", 0, 5, 32)
        assert (result.status, result.count, result.next_offset) == (ReadStatus.FOUND, 3, 8)
        assert bodies(store) == expected_bodies(20)


def test_count_and_size_limits(tmp_path: Path) -> None:
    with small_store(tmp_path, queue_entries_per_file=100, segment_bytes=1 << 20) as store:
        fill(store, 60, size=20_000)
        size = store.read("topic", 0, 0, 1).size_bytes
        assert store.read("topic", 0, 0, 5).count == 5
        assert store.read("topic", 0, 0, 100).count == (256 << 10) // size
        assert store.read("topic", 0, 0, 100, max_bytes=3 * size).count == 3
        assert store.read("topic", 0, 0, 100, max_bytes=1).count == 1


def test_old_messages_are_read_in_smaller_portions(tmp_path: Path) -> None:
    with small_store(tmp_path, queue_entries_per_file=100, segment_bytes=1 << 20, physical_memory_bytes=1000) as store:
        fill(store, 60)
        old = store.read("topic", 0, 0, 32)
        assert (old.count, old.from_disk) == (8, True)
        new = store.read("topic", 0, 59, 32)
        assert (new.count, new.from_disk) == (1, False)
        assert [store.is_cached("topic", 0, offset) for offset in (0, 59, 60, -1)] == [False, True, False, False]
        assert not store.is_cached("topic", 1, 0)


def test_filters(tmp_path: Path) -> None:
    with small_store(tmp_path, queue_entries_per_file=5000, segment_bytes=1 << 20) as store:
        for number in range(1000):
            store.append(a_message(str(number).encode(), TAGS="odd" if number % 2 else "even"), START_MS)
        result = store.read("topic", 0, 0, 32, wants=frozenset([tag_code("odd")]))
        assert [decode_record(record).body for record in result.records][:3] == [b"1", b"3", b"5"]
        assert (result.count, result.next_offset) == (32, 64)
        none = store.read("topic", 0, 0, 32, wants=frozenset())
        assert (none.status, none.next_offset) == (ReadStatus.NO_MATCHED_MESSAGE, 800)
        by_record = store.read("topic", 0, 0, 32, accepts=lambda record: decode_record(record).body == b"77")
        assert (by_record.count, by_record.next_offset) == (1, 800)


@pytest.mark.parametrize(("place", "damage"), [(27, b"\x04"), (28, b"\0\0\0\x05"), (28, b"\xff\xff\xff\xff")])
def test_an_entry_that_leads_nowhere_is_not_served(tmp_path: Path, place: int, damage: bytes) -> None:
    with small_store(tmp_path) as store:
        fill(store, 3)
    path = tmp_path / "consumequeue" / "topic" / "0" / "00000000000000000000"
    data = bytearray(path.read_bytes())
    data[place : place + len(damage)] = damage
    path.write_bytes(data)
    with small_store(tmp_path) as store:
        result = store.read("topic", 0, 0, 32)
        assert [decode_record(record).queue_offset for record in result.records] == [0, 2]


def test_a_damaged_body_is_not_served_by_offset(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        fill(store, 3)
    path = tmp_path / "commitlog" / "00000000000000000000"
    data = bytearray(path.read_bytes())
    data[data.index(b"topic-0-0")] ^= 1
    path.write_bytes(data)
    with small_store(tmp_path) as store:
        assert store.message_at(0) is None
        assert store.message_at(1) is None
        assert store.message_at(-5) is None
        assert store.message_at(1 << 40) is None
        entry = store.entry("topic", 0, 1)
        assert entry is not None
        assert store.message_at(entry.log_offset) is not None


def test_offsets_by_time(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        assert store.offset_by_time("topic", 0, START_MS) == 0
        for second in (1, 2, 2, 2, 4, 5, 5, 7, 8, 9, 9):
            store.append(a_message(), START_MS + 1000 * second)
        for second, lower, upper in ((0, 0, 0), (1, 0, 0), (2, 1, 3), (3, 4, 3), (5, 5, 6), (9, 9, 10), (10, 11, 10)):
            assert store.offset_by_time("topic", 0, START_MS + 1000 * second) == lower
            assert store.offset_by_time("topic", 0, START_MS + 1000 * second, "upper") == upper
        assert store.store_time("topic", 0, 4) == START_MS + 4000
        assert store.store_time("topic", 0, 11) == store.store_time("topic", 9, 0) == -1
        assert store.earliest_store_time("topic", 0) == START_MS + 1000


def test_messages_are_found_by_key(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        store.append(a_message(b"1", KEYS="a  b", UNIQ_KEY="u1", TAGS="t"), START_MS)
        store.append(a_message(b"2", KEYS="b", UNIQ_KEY="u2", TAGS="t"), START_MS + 1)

        def found(key: str) -> list[bytes]:
            return [decode_record(record).body for record in store.query("topic", key, 32, 0, 1 << 60).slices]

        assert (found("a"), found("b"), found("u2"), found("")) == ([b"1"], [b"1", b"2"], [b"2"], [])
        assert found("T#t") == [b"1", b"2"]
        assert store.query("topic", "b", 32, 0, 1 << 60).index_last_update_timestamp == START_MS + 1
    with small_store(tmp_path, index_enabled=False) as store:
        assert store.query("topic", "a", 32, 0, 1 << 60).slices == []


def found_by_key(store: Store, key: str) -> list[int]:
    return [decode_record(record).queue_offset for record in store.query("topic", key, 32, 0, 1 << 60).slices]


@pytest.mark.parametrize("how", ["appends", "round", "clean stop", "kill"])
def test_messages_that_the_index_had_no_room_for_are_indexed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    real, full = os.posix_fallocate, False

    def fallocate(*arguments: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    monkeypatch.setattr(segments, "posix_fallocate", real)
    root = tmp_path / "a"
    with small_store(root, index_entries=20) as store:
        fill(store, 15)
        full = True
        fill(store, 40)
        store.flush()
        full = how == "clean stop"
        if how == "appends":
            fill(store, 5)
        elif how == "round":
            store.clean(START_MS)
        assert found_by_key(store, "k30") == ([30] if how in ("appends", "round") else [])
        count = store.max_offset("topic", 0)
        shutil.copytree(root, tmp_path / "b")
    with small_store(tmp_path / "b" if how == "kill" else root, index_entries=20) as store:
        if full:
            assert found_by_key(store, "k30") == []  # it is open all the same
            full = False
            store.clean(START_MS)
        for number in range(count):
            assert found_by_key(store, f"k{number}") == [number]
    assert len([message for message in caplog.messages if "not found by key" in message]) == 1 + (how == "clean stop")


def test_ipv6_hosts(tmp_path: Path) -> None:
    with small_store(tmp_path, store_host=encode_host("::1", 10911)) as store:
        message = a_message(b"six")
        message.born_host = encode_host("fe80::2", 5)
        appended = store.append(message, START_MS)
        assert len(appended.message_id) == 56
        (stored,) = drain(store)
        assert (stored.born_host, stored.store_host) == (message.born_host, encode_host("::1", 10911))
        assert store.store_time("topic", 0, 0) == START_MS


def test_a_deleted_topic_starts_again(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        fill(store, 10)
        fill(store, 3, "other")
        assert store.delete_topic("topic")
        assert not store.delete_topic("topic")
        assert not (tmp_path / "consumequeue" / "topic").exists()
        assert store.max_offset("topic", 0) == 0
        fill(store, 2)
    with small_store(tmp_path) as store:
        assert bodies(store) == expected_bodies(2)
        assert bodies(store, "other") == expected_bodies(3, "other")


def test_many_queues_share_few_mappings(tmp_path: Path) -> None:
    with small_store(tmp_path, max_mapped_queue_files=3) as store:
        for _ in range(3):
            for queue_id in range(10):
                fill(store, 5, queue_id=queue_id)
        for queue_id in range(10):
            assert bodies(store, queue_id=queue_id) == expected_bodies(15, queue_id=queue_id)


# --- opening ----------------------------------------------------------------------------------------------------------
def test_only_one_store_opens_a_directory(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        with pytest.raises(StoreLocked, match="in use"):
            Store.open(small_config(tmp_path))
        fill(store, 1)
    with small_store(tmp_path) as store:
        assert bodies(store) == expected_bodies(1)


def test_a_lock_file_that_somebody_deletes_lets_nobody_in(tmp_path: Path) -> None:
    with small_store(tmp_path):
        (tmp_path / "lock").unlink()
        with pytest.raises(StoreLocked, match="in use"):
            Store.open(small_config(tmp_path))
    with small_store(tmp_path) as store:
        fill(store, 1)


def test_two_stores_do_not_share_a_log(tmp_path: Path) -> None:
    """Whatever path it is named by."""
    (tmp_path / "link").symlink_to(tmp_path / "log")
    other = small_config(tmp_path / "b", commit_log_dir=tmp_path / "link")
    with (
        small_store(tmp_path / "a", commit_log_dir=tmp_path / "log"),
        pytest.raises(StoreLocked, match="log is in use"),
    ):
        Store.open(other)
    with small_store(tmp_path / "b", commit_log_dir=tmp_path / "link") as store:
        fill(store, 1)


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        Store.open(small_config(tmp_path / "file"))


def test_other_file_sizes_are_refused_by_name(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        fill(store, 1)
    with pytest.raises(StoreError, match=r"commitlog.*2048"):
        Store.open(small_config(tmp_path, segment_bytes=4096))
    with pytest.raises(StoreError, match="consumequeue"):
        Store.open(small_config(tmp_path, queue_entries_per_file=9))
    with small_store(tmp_path) as store:
        assert bodies(store) == expected_bodies(1)


def test_a_closed_store_takes_no_messages(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        pass
    store.close()
    with pytest.raises(NotWriteable, match="closed"):
        store.append(a_message(), START_MS)


# --- a full disk ------------------------------------------------------------------------------------------------------
class FullDisk:
    """Lets so many more reservations succeed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 1 << 30
        monkeypatch.setattr(segments, "posix_fallocate", self)

    def __call__(self, *arguments: Any) -> None:
        if self.left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.left -= 1
        os.posix_fallocate(*arguments)


def test_a_full_disk_refuses_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch)
    with small_store(tmp_path) as store:
        stored = 0
        for room in range(12):
            disk.left = room % 3
            before = store.log_max_offset
            with pytest.raises(DiskFull, match="No space left"):
                fill(store, 1000)
            stored = store.max_offset("topic", 0)
            assert store.log_max_offset >= before
            assert bodies(store) == expected_bodies(stored)
        disk.left = 1 << 30
        fill(store, 30)
        assert bodies(store) == expected_bodies(stored + 30)
    with small_store(tmp_path) as store:
        assert bodies(store) == expected_bodies(stored + 30)


def test_a_full_disk_is_told_when_it_begins_and_when_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(monkeypatch)
    with small_store(tmp_path) as store:
        disk.left = 0
        for _ in range(3):
            with pytest.raises(DiskFull):
                fill(store, 1)
        (told,) = caplog.messages
        assert told.startswith("no messages are taken: cannot reserve space in ")
        assert told.endswith(": No space left on device")
        disk.left = 1 << 30
        fill(store, 30)
        assert caplog.messages == [told, f"there is space in {tmp_path}: messages are taken again"]


def test_a_disk_that_is_full_at_the_start_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Usage = type(shutil.disk_usage(tmp_path))  # the compiled store takes nothing else
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(4096, 3072, 1024))
    with small_store(tmp_path):
        assert caplog.messages == [f"{tmp_path}/commitlog: 1 KiB are free, messages may be refused below 2 KiB"]


def test_a_batch_over_queue_files_finds_space_for_all_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch)
    with small_store(tmp_path, segment_bytes=1 << 20) as store:
        batch = [BatchPart(0, str(number).encode(), b"") for number in range(20)]
        fill(store, 3)
        disk.left = 1
        with pytest.raises(DiskFull):
            store.append_batch(a_message(), batch, START_MS)
        assert store.max_offset("topic", 0) == 3
        disk.left = 1 << 30
        store.append_batch(a_message(), batch, START_MS)
        assert [message.body for message in drain(store)[3:]] == [part.body for part in batch]


def test_a_queue_that_can_not_be_opened_is_an_error_of_the_store(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        (tmp_path / "consumequeue" / "broken").write_text("")
        with pytest.raises(StoreError) as refused:
            store.append(a_message(topic="broken"), START_MS)
        assert not isinstance(refused.value, NotWriteable), "other queues can be written"
        fill(store, 3)
        assert bodies(store) == expected_bodies(3)


def test_a_queue_file_that_can_not_be_created_is_an_error_of_the_store(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        fill(store, 8, size=10)
        (tmp_path / "consumequeue" / "topic" / "0" / f"{160:020}").mkdir()
        with pytest.raises(StoreError) as refused:
            store.append(a_message(), START_MS)
        assert not isinstance(refused.value, NotWriteable), "other queues can be written"


def test_a_log_that_can_not_be_written_takes_nothing(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        following = tmp_path / "commitlog" / f"{2048:020}"
        following.mkdir()
        with pytest.raises(NotWriteable):
            fill(store, 20, size=300)
        following.rmdir()
        store.append(a_message(), START_MS)
