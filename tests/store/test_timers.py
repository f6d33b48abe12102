"""The wheel, the timer log and their recovery."""

from __future__ import annotations

import errno
import os
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faults.power import Disk, NothingUnsynced
from skylark.store import TIMER_TOPIC, Store, StoreConfig, StoreError, TimerConfig, TimerStore, segments
from skylark.store.timerlog import UNIT_BYTES, TimerLog
from skylark.store.timerwheel import FILE_BYTES, TimerSlot, TimerWheel
from skylark.wire.message import Message

NOW_MS = 1_700_000_000_000
SMALL_FILE_BYTES = 4096
LOG_OFFSET_AT = struct.calcsize(">iqiqi")
SLOTS_AT = NOW_MS // 1000 % 1_209_600 * 32


def open_store(root: Path) -> Store:
    return Store.open(StoreConfig(root=root, segment_bytes=1 << 16, index_enabled=False, flush_interval_ms=3_600_000))


class Timers:
    """A store and its timers, with a message for each timer."""

    def __init__(self, root: Path, now_ms: int = NOW_MS) -> None:
        self.store = open_store(root)
        self.open_timers(now_ms)

    def open_timers(self, now_ms: int) -> None:
        config = TimerConfig(root=self.store.config.root, file_bytes=SMALL_FILE_BYTES)
        self.timers = TimerStore(self.store, config, now_ms)
        self.store.keep(self.timers.flush_later, self.timers.lowest_needed)

    def send(self, *delays_s: int, body: bytes = b"x") -> None:
        for delay_s in delays_s:
            message = Message(TIMER_TOPIC, 0, body, {"TIMER_OUT_MS": str(NOW_MS + delay_s * 1000)})
            self.store.append(message, NOW_MS)

    def follow(self, *, until: int | None = None) -> None:
        while self.timers.queue_offset < (until or self.store.max_offset(TIMER_TOPIC, 0)):
            entry = self.store.entry(TIMER_TOPIC, 0, self.timers.queue_offset)
            assert entry is not None
            message = self.store.message_at(entry.log_offset)
            assert message is not None
            out_ms = int(message.properties["TIMER_OUT_MS"])
            assert self.timers.put(out_ms, self.timers.write_ms, entry, is_recall=False, topic_hash=0)

    def due(self, now_ms: int) -> list[int]:
        """Queue offsets of what is due, in the order of delivery."""
        self.timers.advance(now_ms)
        offsets = []
        while (slot := self.timers.next_due()) is not None:
            while slot.done < len(slot.positions):
                unit = self.timers.unit(slot.positions[slot.done])
                assert unit is not None
                message = self.store.message_at(unit.log_offset)
                if message is not None:
                    offsets.append(message.queue_offset)
                self.timers.delivered(self.store.log_max_offset)
            self.timers.finish_slot()
        return offsets

    def close(self) -> None:
        self.store.close()
        self.timers.close()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_the_bytes_are_apaches(tmp_path: Path) -> None:
    timers = Timers(tmp_path)
    timers.send(5, 5)
    timers.follow()
    timers.close()
    log = (tmp_path / "timerlog" / ("0" * 20)).read_bytes()
    assert len(log) == SMALL_FILE_BYTES
    size = struct.unpack_from(">i", (tmp_path / "commitlog" / ("0" * 20)).read_bytes())[0]
    first = struct.pack(">iqiqiqiiq", 52, -1, 1, NOW_MS, 5000, 0, size, 0, 0)
    second = struct.pack(">iqiqiqiiq", 52, 0, 1, NOW_MS, 5000, size, size, 0, 0)
    assert log[: 3 * UNIT_BYTES] == first + second + bytes(52)
    wheel = (tmp_path / "timerwheel").read_bytes()
    assert len(wheel) == FILE_BYTES == 2 * 7 * 24 * 3600 * 32
    at = SLOTS_AT + 5 * 32
    assert wheel[at : at + 32] == struct.pack(">qqqii", NOW_MS // 1000 + 5, 0, 52, 2, 0)
    assert wheel.count(0) > FILE_BYTES - 32
    check = (tmp_path / "config" / "timercheck").read_bytes()
    assert len(check) == 4096
    assert struct.unpack_from(">4q", check) == (NOW_MS, 52, 2, 2)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=120), st.data())
@settings(max_examples=15)
def test_each_is_due_once_in_its_second_whatever_is_cut_off(delays: list[int], data: st.DataObject) -> None:
    """The process dies: what it wrote is there, but units without their slots, and slots without their units."""
    root = Path("/dev/shm" if Path("/dev/shm").is_dir() else "/tmp") / f"skylark-timers-{os.getpid()}"
    shutil.rmtree(root, ignore_errors=True)
    try:
        timers = Timers(root)
        timers.send(*delays)
        timers.follow(until=data.draw(st.integers(0, len(delays))) or 1)
        timers.store.flush()
        check = (root / "config" / "timercheck").read_bytes()
        with (root / "timerwheel").open("rb") as wheel:
            wheel.seek(SLOTS_AT)
            slots = wheel.read(60 * 32)
        timers.follow()
        timers.close()
        (root / "config" / "timercheck").write_bytes(check)
        if data.draw(st.booleans(), "the wheel is that of the last mark"):
            with (root / "timerwheel").open("rb+") as wheel:
                wheel.seek(SLOTS_AT)
                wheel.write(slots)
        if data.draw(st.booleans(), "the wheel is gone"):
            (root / "timerwheel").unlink()
        timers = Timers(root)
        timers.follow()
        assert timers.timers.pending == len(delays)
        seen: dict[int, int] = {}
        for second in range(32):
            for offset in timers.due(NOW_MS + second * 1000):
                assert offset not in seen
                seen[offset] = second
        assert seen == {offset: delay + 1 for offset, delay in enumerate(delays)}
        timers.close()
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.mark.parametrize("damage", [b"\0", b"\xff"])
@pytest.mark.parametrize("wheel_is_lost", [False, True])
def test_a_damaged_unit_costs_one_timer_at_most(tmp_path: Path, damage: bytes, wheel_is_lost: bool) -> None:
    timers = Timers(tmp_path)
    timers.send(*[5] * 40, 6, *[5] * 60)  # in two files
    timers.follow()
    timers.close()
    with (tmp_path / "timerlog" / ("0" * 20)).open("rb+") as file:
        file.seek(30 * UNIT_BYTES)
        file.write(damage * UNIT_BYTES)
    if wheel_is_lost:
        (tmp_path / "timerwheel").unlink()
    timers = Timers(tmp_path)
    timers.follow()
    assert timers.due(NOW_MS + 6000) == [offset for offset in range(101) if offset not in (30, 40)]
    assert timers.due(NOW_MS + 7000) == [40]
    timers.close()


@pytest.mark.parametrize("number", [30, 99, 100])
@pytest.mark.parametrize("is_wheel_lost", [False, True])
def test_a_unit_that_leads_nowhere_costs_one_timer_at_most(tmp_path: Path, number: int, is_wheel_lost: bool) -> None:
    timers = Timers(tmp_path)
    timers.send(*[5] * 101)
    timers.follow()
    timers.close()
    file_number, number_in_file = divmod(number, (SMALL_FILE_BYTES - 16) // UNIT_BYTES)
    with (tmp_path / "timerlog" / f"{file_number * SMALL_FILE_BYTES:020d}").open("rb+") as file:
        file.seek(number_in_file * UNIT_BYTES + LOG_OFFSET_AT)
        file.write(b"\0\0\1")
    if is_wheel_lost:
        (tmp_path / "timerwheel").unlink()
    else:
        (tmp_path / "timerwheel.1").touch()  # a snapshot of Apache's: the wheel is looked through
    timers = Timers(tmp_path)
    timers.follow()
    found = timers.due(NOW_MS + 6000)
    assert sorted(found) == [offset for offset in range(101) if offset != number or number == 100]
    timers.close()


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_chain_that_leads_to_another_slot_costs_no_timer(tmp_path: Path, number: int) -> None:
    timers = Timers(tmp_path)
    timers.send(5, 7, 5, 7, 5, 7)
    timers.follow()
    timers.close()
    with (tmp_path / "timerlog" / ("0" * 20)).open("rb+") as file:
        file.seek(number * UNIT_BYTES + 4)
        file.write(struct.pack(">q", (number - 1) * UNIT_BYTES))
    timers = Timers(tmp_path)
    assert timers.due(NOW_MS + 6000) == [0, 2, 4]
    assert timers.due(NOW_MS + 8000) == [1, 3, 5]
    timers.close()


@pytest.mark.parametrize("field", range(3), ids=["moment", "position", "offset"])
@pytest.mark.parametrize("has_reading", [True, False], ids=["reading", "no reading"])
def test_a_damaged_mark_costs_no_timer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, field: int, has_reading: bool
) -> None:
    timers = Timers(tmp_path)
    timers.send(1, 1, 5, 5)
    timers.follow()
    assert timers.due(NOW_MS + 2000) == [0, 1]
    timers.store.flush()
    timers.send(6, 7)
    timers.close()
    with (tmp_path / "config" / "timercheck").open("rb+") as file:
        file.seek(8 * field + 2)
        file.write(b"\x03")
        if not has_reading:
            for at in (64, 160):
                file.seek(at)
                file.write(bytes(32))
    timers = Timers(tmp_path, NOW_MS + 3000)
    assert "timercheck is damaged" in caplog.text
    timers.follow()
    before = timers.due(NOW_MS + 3000)
    assert before == ([] if has_reading else [0, 1]), "what came already comes again only if nothing tells of it"
    assert timers.due(NOW_MS + 9000) == [2, 3, 4, 5]
    timers.close()


@pytest.mark.parametrize("at", [66, 73, 90, 98, 162, 169, 177])
def test_other_damage_of_the_check_file_costs_no_timer(tmp_path: Path, at: int) -> None:
    """What is being read, and the last turn back."""
    timers = Timers(tmp_path)
    timers.send(1, 1, 5, 5)
    timers.follow()
    assert timers.due(NOW_MS + 2000) == [0, 1]
    timers.close()
    with (tmp_path / "config" / "timercheck").open("rb+") as file:
        file.seek(at)
        file.write(b"\x03")
    timers = Timers(tmp_path, NOW_MS + 3000)
    timers.follow()
    assert [offset for offset in timers.due(NOW_MS + 9000) if offset > 1] == [2, 3]
    timers.close()


def test_a_mark_that_apaches_broker_wrote_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    timers = Timers(tmp_path)
    timers.send(1, 5)
    timers.follow()
    timers.close()
    with (tmp_path / "config" / "timercheck").open("rb+") as file:
        values = list(struct.unpack(">7q", file.read(56)))
        values[0] += 2000
        values[6] += 1
        file.seek(0)
        file.write(struct.pack(">7q", *values))
    timers = Timers(tmp_path, NOW_MS + 3000)
    assert "damaged" not in caplog.text
    assert timers.due(NOW_MS + 9000) == [1]
    timers.close()


@pytest.mark.parametrize("damage", [(0, bytes(4)), (LOG_OFFSET_AT, b"\0\0\1")], ids=["no unit", "leads nowhere"])
def test_messages_of_units_that_are_gone_are_followed_again(tmp_path: Path, damage: tuple[int, bytes]) -> None:
    timers = Timers(tmp_path)
    timers.send(5, 5, 5)
    timers.follow()
    timers.close()
    at, data = damage
    with (tmp_path / "timerlog" / ("0" * 20)).open("rb+") as file:
        for number in (1, 2):
            file.seek(number * UNIT_BYTES + at)
            file.write(data)
    timers = Timers(tmp_path)
    assert timers.timers.queue_offset == 1
    timers.follow()
    assert timers.due(NOW_MS + 6000) == [0, 1, 2]
    timers.close()


@pytest.mark.parametrize("days", [24, 25, 60])
def test_what_waited_in_the_queue_for_weeks_is_due(tmp_path: Path, days: int) -> None:
    timers = Timers(tmp_path)
    timers.send(5)
    timers.follow()
    timers.store.flush()
    timers.send(60, 5)  # the power fails before they are on the wheel
    timers.close()
    later_ms = NOW_MS + days * 24 * 3_600_000
    timers = Timers(tmp_path, later_ms)
    timers.follow()
    found = []
    while timers.timers.is_behind:
        found += timers.due(later_ms)
    assert found == [0, 2, 1], "in the slots of their time"
    timers.close()


def test_slots_ahead_of_the_timer_log_are_set_back(tmp_path: Path) -> None:
    timers = Timers(tmp_path)
    timers.send(5, 5)
    timers.follow()
    timers.store.flush()
    log = (tmp_path / "timerlog" / ("0" * 20)).read_bytes()
    check = (tmp_path / "config" / "timercheck").read_bytes()
    timers.send(5, 6)
    timers.follow()
    timers.close()
    # The power failed: the kernel had written the wheel, but not yet the timer log.
    (tmp_path / "timerlog" / ("0" * 20)).write_bytes(log)
    (tmp_path / "config" / "timercheck").write_bytes(check)
    timers = Timers(tmp_path)
    assert (timers.timers.queue_offset, timers.timers.pending) == (2, 2)
    timers.follow()
    assert timers.due(NOW_MS + 6000) == [0, 1, 2]
    assert timers.due(NOW_MS + 7000) == [3]
    timers.close()


def test_units_of_records_that_the_log_lost_are_cut_off(tmp_path: Path) -> None:
    timers = Timers(tmp_path)
    timers.send(5)
    timers.follow()
    timers.store.flush()
    check = (tmp_path / "config" / "timercheck").read_bytes()
    timers.send(5, body=b"lost")
    timers.follow()
    end = timers.store.log_max_offset
    timers.close()
    (tmp_path / "abort").touch()
    (tmp_path / "config" / "timercheck").write_bytes(check)
    log = tmp_path / "commitlog" / ("0" * 20)
    data = bytearray(log.read_bytes())
    data[end // 2 : end] = bytes(end - end // 2)
    log.write_bytes(data)
    timers = Timers(tmp_path)
    assert timers.store.max_offset(TIMER_TOPIC, 0) == 1
    timers.send(5, body=b"another")
    timers.follow()
    assert timers.due(NOW_MS + 6000) == [0, 1]
    timers.close()


def test_reading_goes_on_within_a_slot(tmp_path: Path) -> None:
    timers = Timers(tmp_path)
    timers.send(*[1] * 5)
    timers.follow()
    timers.timers.advance(NOW_MS + 2000)
    slot = timers.timers.next_due()
    assert slot is not None
    for _ in range(3):
        timers.timers.delivered(timers.store.log_max_offset)
    timers.close()
    timers = Timers(tmp_path, NOW_MS + 2000)
    assert timers.due(NOW_MS + 2000) == [3, 4]
    timers.close()


def test_thousands_of_timers_of_one_moment_are_found_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skylark.store.timers._MOST_UNITS_A_TURN", 4)
    timers = Timers(tmp_path)
    timers.send(*[1] * 10)
    timers.follow()
    timers.timers.advance(NOW_MS + 2000)
    assert timers.timers.next_due() is None
    assert timers.timers.is_behind
    timers.send(1)  # too late for the slot, whose timers are being found
    timers.follow()
    assert timers.timers.next_due() is None
    slot = timers.timers.next_due()
    assert slot is not None
    assert list(slot.positions) == sorted(slot.positions)
    assert timers.due(NOW_MS + 2000) == list(range(10))
    assert timers.due(NOW_MS + 3000) == [10]
    timers.close()


@pytest.mark.parametrize("on_disk", [0, 2])
def test_after_a_power_failure_a_slot_goes_on_behind_what_was_on_disk(tmp_path: Path, on_disk: int) -> None:
    timers = Timers(tmp_path)
    timers.send(*[1] * 5)
    timers.follow()
    timers.timers.advance(NOW_MS + 2000)
    assert timers.timers.next_due() is not None
    for _ in range(on_disk):
        timers.timers.delivered(timers.store.log_max_offset)
    timers.store.flush()
    check = (tmp_path / "config" / "timercheck").read_bytes()
    timers.timers.delivered(timers.store.log_max_offset + 1)
    noted = (tmp_path / "config" / "timercheck").read_bytes()
    timers.close()
    # What was marked is of the last flush; what was noted meanwhile reached the disk, but the log did not.
    (tmp_path / "config" / "timercheck").write_bytes(check[:64] + noted[64:88] + check[88:])
    timers = Timers(tmp_path, NOW_MS + 2000)
    assert timers.due(NOW_MS + 2000) == [0, 1, 2, 3, 4][on_disk:]
    timers.close()


def test_a_delivery_that_is_in_a_gap_of_the_log_does_not_count(tmp_path: Path) -> None:
    timers = Timers(tmp_path / "running")
    timers.send(1, 1)
    timers.follow()
    timers.store.flush()
    timers.timers.advance(NOW_MS + 2000)
    assert timers.timers.next_due() is not None
    copy = timers.store.append(Message("topic", 0, b"delivered", {}), NOW_MS)
    timers.timers.delivered(copy.log_end_offset)
    timers.store.append(Message("topic", 0, b"behind", {}), NOW_MS)
    shutil.copytree(tmp_path / "running", tmp_path / "cut")
    timers.close()
    with (tmp_path / "cut" / "commitlog" / f"{0:020}").open("r+b") as file:
        file.seek(copy.log_offset)
        file.write(bytes(copy.size_bytes))
    timers = Timers(tmp_path / "cut", NOW_MS + 2000)
    assert timers.store.max_offset("topic", 0) == 2, "what is behind the gap is there"
    assert timers.due(NOW_MS + 2000) == [0, 1]
    timers.close()


def test_units_of_lost_records_are_cut_off_also_when_the_log_has_grown_again(tmp_path: Path) -> None:
    timers = Timers(tmp_path / "running")
    timers.send(1)
    timers.follow()
    timers.store.flush()
    timers.send(5)
    timers.follow()
    lost = timers.store.entry(TIMER_TOPIC, 0, 1)
    assert lost is not None
    shutil.copytree(tmp_path / "running", tmp_path / "cut")
    timers.close()
    with (tmp_path / "cut" / "commitlog" / f"{0:020}").open("r+b") as file:
        file.seek(lost.log_offset)
        file.write(bytes(lost.size_bytes))
    timers = Timers.__new__(Timers)
    timers.store = open_store(tmp_path / "cut")
    timers.send(100)  # before anybody has opened the timers
    timers.open_timers(NOW_MS)
    timers.follow()
    assert timers.due(NOW_MS + 10_000) == [0]
    assert timers.due(NOW_MS + 110_000) == [1]
    timers.close()


def test_what_recovery_cut_off_does_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(tmp_path / "running")
    timers.send(1)
    timers.follow()
    timers.store.flush()
    timers.send(5, 5)
    timers.follow()
    lost = timers.store.entry(TIMER_TOPIC, 0, 1)
    assert lost is not None
    shutil.copytree(tmp_path / "running", tmp_path / "cut")
    timers.close()
    with (tmp_path / "cut" / "commitlog" / f"{0:020}").open("r+b") as file:
        file.seek(lost.log_offset)
        file.write(bytes(2 * lost.size_bytes))
    disk = Disk(monkeypatch, NothingUnsynced())
    disk.settle(tmp_path / "cut")
    timers = Timers(tmp_path / "cut")
    timers.send(100, 100)  # where the log had the lost ones
    timers.follow()
    timers.store._flusher.flush_log()
    disk.cut(tmp_path / "cut", tmp_path / "again")
    timers.close()
    timers = Timers(tmp_path / "again")
    timers.follow()
    assert timers.due(NOW_MS + 10_000) == [0]
    assert timers.due(NOW_MS + 110_000) == [1, 2]
    timers.close()
    disk.forget()


@pytest.mark.parametrize("is_again", [False, True])
def test_a_note_that_did_not_count_never_does(tmp_path: Path, is_again: bool) -> None:
    timers = Timers(tmp_path / "running")
    timers.send(1, 1)
    timers.follow()
    timers.store.flush()
    timers.timers.advance(NOW_MS + 2000)
    assert timers.timers.next_due() is not None
    copy = timers.store.append(Message("topic", 0, b"delivered", {}), NOW_MS)
    timers.timers.delivered(copy.log_end_offset)
    shutil.copytree(tmp_path / "running", tmp_path / "cut")
    timers.close()
    with (tmp_path / "cut" / "commitlog" / f"{0:020}").open("r+b") as file:
        file.seek(copy.log_offset)
        file.write(bytes(copy.size_bytes))
    timers = Timers(tmp_path / "cut", NOW_MS + 2000)
    if is_again:
        timers.store.append(Message("topic", 0, b"something else", {}), NOW_MS)
        timers.close()
        timers = Timers(tmp_path / "cut", NOW_MS + 2000)
    assert timers.due(NOW_MS + 2000) == [0, 1]
    timers.close()


def test_a_clock_that_is_set_back_a_little_changes_nothing(tmp_path: Path) -> None:
    timers = Timers(tmp_path)
    timers.send(1)
    timers.follow()
    assert timers.due(NOW_MS + 5_000) == [0]
    timers.send(2)
    timers.timers.advance(NOW_MS)
    timers.follow()
    assert timers.due(NOW_MS) == []
    assert timers.due(NOW_MS + 6_000) == [1]
    timers.close()


def test_segments_that_timers_wait_in_do_not_expire(tmp_path: Path) -> None:
    timers = Timers(tmp_path)
    timers.send(5)
    timers.follow()
    for _ in range(20):
        timers.store.append(Message("t", 0, bytes(20_000), {}), NOW_MS)
    timers.store.flush()
    for file in (tmp_path / "commitlog").iterdir():
        os.utime(file, (0, 0))
    timers.store.delete_expired_soon()
    assert timers.store.clean(NOW_MS).log_files == 0
    assert timers.due(NOW_MS + 6000) == [0]
    timers.store.delete_expired_soon()
    assert timers.store.clean(NOW_MS).log_files > 0
    timers.close()


def test_files_of_the_timer_log_go_with_their_messages(tmp_path: Path) -> None:
    timers = Timers(tmp_path)
    for _ in range(4):
        timers.send(*[1] * 50)
        timers.store.append(Message("t", 0, bytes(60_000), {}), NOW_MS)
    timers.follow()
    assert len(list((tmp_path / "timerlog").iterdir())) == 3
    assert len(timers.due(NOW_MS + 2000)) == 200
    timers.store.flush()
    for file in (tmp_path / "commitlog").iterdir():
        os.utime(file, (0, 0))
    timers.store.delete_expired_soon()
    assert timers.store.clean(NOW_MS).log_files > 0
    assert timers.timers.clean() == 2
    timers.send(5)
    timers.follow()
    assert timers.due(NOW_MS + 6000) == [200]
    timers.close()
    timers = Timers(tmp_path)
    assert timers.timers.queue_offset == 201
    timers.close()


def test_a_wheel_that_is_too_large_is_refused_and_nothing_stays_open(tmp_path: Path) -> None:
    store = Store.open(StoreConfig(root=tmp_path, segment_bytes=1 << 16, index_enabled=False))
    config = TimerConfig(root=tmp_path, file_bytes=SMALL_FILE_BYTES)
    with (tmp_path / "timerwheel").open("wb") as file:
        file.truncate(FILE_BYTES + 1)
    before = open_files()
    for _ in range(3):
        with pytest.raises(StoreError, match="has 38707201 bytes, a timer wheel has 38707200"):
            TimerStore(store, config, NOW_MS)
    assert open_files() == before
    store.close()


def test_a_disk_that_was_full_for_a_while_costs_no_timer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(tmp_path)
    timers.send(5, 6)
    timers.follow()
    timers.close()
    (tmp_path / "timerwheel").unlink()
    store = Store.open(StoreConfig(root=tmp_path, segment_bytes=1 << 16, index_enabled=False))
    before = open_files()

    def fill(fd: int, offset: int, length: int) -> None:
        """What a file system does that finds too little space on its way."""
        os.ftruncate(fd, length // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(segments, "posix_fallocate", fill)
        for _ in range(3):
            with pytest.raises(StoreError, match="No space left"):
                TimerStore(store, TimerConfig(root=tmp_path, file_bytes=SMALL_FILE_BYTES), NOW_MS)
    assert open_files() == before
    store.close()
    timers = Timers(tmp_path)
    assert timers.due(NOW_MS + 7000) == [0, 1]
    timers.close()


def test_a_wheel_that_never_got_its_size_is_built_again(tmp_path: Path) -> None:
    timers = Timers(tmp_path)
    timers.send(5, 6)
    timers.follow()
    timers.close()
    (tmp_path / "timerwheel").write_bytes(bytes(FILE_BYTES // 2))
    timers = Timers(tmp_path)
    assert timers.due(NOW_MS + 7000) == [0, 1]
    timers.close()


def test_a_wheel_has_its_name_only_when_all_timers_are_on_it(tmp_path: Path) -> None:
    wheel = TimerWheel(tmp_path / "timerwheel", 1000)
    assert [path.name for path in tmp_path.iterdir()] == ["timerwheel.new"]
    wheel.put(TimerSlot(NOW_MS, 52, 52, 1))
    wheel.close()  # the process dies
    wheel = TimerWheel(tmp_path / "timerwheel", 1000)
    assert wheel.is_new
    assert wheel.slot(NOW_MS) is None
    wheel.complete()
    assert [path.name for path in tmp_path.iterdir()] == ["timerwheel"]
    wheel.close()


def test_units_fill_files_like_apaches(tmp_path: Path) -> None:
    log = TimerLog(tmp_path, SMALL_FILE_BYTES)
    log.truncate(0)
    positions = [log.append(-1, 1, NOW_MS, NOW_MS, number * 100, 100, 0) for number in range(100)]
    per_file = (SMALL_FILE_BYTES - 16) // UNIT_BYTES
    assert positions[per_file] == SMALL_FILE_BYTES
    full = (tmp_path / ("0" * 20)).read_bytes()
    assert full[per_file * UNIT_BYTES :][:16] == struct.pack(">iqI", SMALL_FILE_BYTES - per_file * 52, 0, 0xCBD43194)
    assert [unit.log_offset for unit in log.scan(0)] == [number * 100 for number in range(100)]
    last = log.last(10_000)
    assert last is not None
    assert last.log_offset == 9900
    for end in (5000, 100 * per_file, 100):
        last = log.last(end)
        assert last is not None
        assert last.log_offset == end - 100
    assert log.last(99) is None
    log.close()


def test_timers_of_a_process_that_died_before_its_first_mark_are_due(tmp_path: Path) -> None:
    timers = Timers(tmp_path / "first")
    timers.send(1, 1, 2, 60)
    timers.follow()
    shutil.copytree(tmp_path / "first", tmp_path / "copy", ignore=shutil.ignore_patterns("timercheck", "lock"))
    timers.close()
    again = Timers(tmp_path / "copy", NOW_MS + 30_000)
    assert again.timers.pending == 4
    assert again.due(NOW_MS + 30_000) == [0, 1, 2]
    assert again.due(NOW_MS + 90_000) == [3]
    again.close()


def test_a_file_of_the_timer_log_that_is_deleted_fails_no_flush(tmp_path: Path) -> None:
    log = TimerLog(tmp_path, SMALL_FILE_BYTES)
    log.truncate(0)
    for number in range(100):
        log.append(-1, 1, NOW_MS, NOW_MS, number * 100, 100, 0)
    log.close()
    (tmp_path / ("0" * 20)).unlink()  # as the event loop does when its messages are gone, at any moment
    log.sync(0, log.end)
    log.close()
