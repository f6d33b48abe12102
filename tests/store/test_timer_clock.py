"""Timers under a clock that was ahead for a while: nothing stands still, nothing comes twice, nothing is lost."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skylark.store import TIMER_TOPIC, Store, StoreConfig, TimerConfig, TimerStore
from skylark.store.timercheck import TimerCheck
from skylark.store.timerlog import UNIT_BYTES
from skylark.store.timerwheel import TimerSlot, TimerWheel
from skylark.wire.message import Message

NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
FULL_FILE_UNITS = 6
SHM = Path("/dev/shm")


class Timers:
    """A store and its timers, one of which is due at the time that its properties say."""

    def __init__(self, root: Path, now_ms: int = NOW_MS, file_bytes: int = 4096) -> None:
        self.root = root
        config = StoreConfig(root=root, segment_bytes=1 << 16, index_enabled=False, flush_interval_ms=60_000)
        self.store = Store.open(config)
        self.timers = TimerStore(self.store, TimerConfig(root=root, file_bytes=file_bytes), now_ms)
        self.store.keep(self.timers.flush_later, self.timers.lowest_needed)

    def send(self, out_ms: int, body: bytes = b"x") -> int:
        """The offset of a new timer in the queue."""
        message = Message(TIMER_TOPIC, 0, body, {"TIMER_OUT_MS": str(out_ms)})
        return self.store.append(message, NOW_MS).queue_offset

    def follow(self) -> None:
        while self.timers.queue_offset < self.store.max_offset(TIMER_TOPIC, 0):
            entry = self.store.entry(TIMER_TOPIC, 0, self.timers.queue_offset)
            assert entry is not None
            message = self.store.message_at(entry.log_offset)
            assert message is not None
            out_ms = int(message.properties["TIMER_OUT_MS"])
            if not self.timers.put(out_ms, self.timers.write_ms, entry, is_recall=False, topic_hash=0):
                return

    def turn(self, now_ms: int) -> list[int]:
        """What a broker does again and again: queue offsets of what is due, in the order of delivery."""
        self.timers.advance(now_ms)
        self.follow()
        offsets = []
        while (slot := self.timers.next_due()) is not None or self.timers.is_behind:
            while slot is not None and slot.done < len(slot.positions):
                unit = self.timers.unit(slot.positions[slot.done])
                assert unit is not None
                message = self.store.message_at(unit.log_offset)
                assert message is not None
                offsets.append(message.queue_offset)
                self.timers.delivered(self.store.log_max_offset)
            if slot is not None:
                self.timers.finish_slot()
        return offsets

    def settle(self, now_ms: int) -> list[int]:
        """As many turns as it takes at one time, with what the flush thread does between them."""
        offsets = []
        for _ in range(4):
            offsets += self.turn(now_ms)
            self.store.flush()
        return offsets

    def copy(self, root: Path) -> Path:
        """What a killed process leaves behind."""
        ignored = shutil.ignore_patterns("lock")
        return Path(shutil.copytree(self.root, root, ignore=ignored))

    def close(self) -> None:
        self.store.close()
        self.timers.close()


@pytest.mark.parametrize("ahead_ms", [HOUR_MS, 9 * DAY_MS, 40_000 * DAY_MS])
def test_a_clock_that_was_ahead_holds_nothing_up(tmp_path: Path, ahead_ms: int) -> None:
    timers = Timers(tmp_path)
    early = timers.send(NOW_MS + 10_000)
    beyond = timers.send(NOW_MS + ahead_ms + 4_000)
    assert timers.settle(NOW_MS) == []
    wrong_ms = NOW_MS + ahead_ms
    found = timers.settle(wrong_ms)
    late = timers.send(NOW_MS + 1000)  # by a client whose clock was right
    timers.turn(wrong_ms)
    new = timers.send(NOW_MS + 12_000)
    found += timers.settle(NOW_MS + 3_000)
    assert (early in found, late in found, new in found) == (True, True, False)
    assert timers.settle(NOW_MS + 12_999) == []
    assert timers.settle(NOW_MS + 13_000) == [new]
    newest = timers.send(NOW_MS + 14_000)
    assert timers.settle(NOW_MS + 15_000) == [newest]
    found += timers.settle(wrong_ms + 60_000)
    assert Counter(found) == Counter([early, beyond, late, new, newest]) - Counter([new, newest])
    timers.close()


def test_timers_of_a_clock_that_was_weeks_ahead_wait_on(tmp_path: Path) -> None:
    timers = Timers(tmp_path)
    timers.settle(NOW_MS)
    wrong_ms = NOW_MS + 14 * DAY_MS  # the wheel has as many slots
    far = [timers.send(wrong_ms + 20_000), timers.send(wrong_ms + 21_000)]
    timers.settle(wrong_ms)
    timers.settle(NOW_MS)
    near = [timers.send(NOW_MS + 20_000), timers.send(NOW_MS + 20_000)]
    assert timers.settle(NOW_MS + 22_000) == []
    assert timers.settle(NOW_MS + 23_000) == near
    assert timers.settle(wrong_ms + 22_000) == far
    timers.close()


def test_a_clock_that_starts_in_1970_brings_nothing_early(tmp_path: Path) -> None:
    timers = Timers(tmp_path)
    soon, later = timers.send(NOW_MS + 60_000), timers.send(NOW_MS + 2 * DAY_MS)
    timers.settle(NOW_MS)
    timers.close()
    timers = Timers(tmp_path, 5_000)
    assert timers.settle(5_000) == []
    assert timers.settle(NOW_MS + 50_000) == []
    assert timers.settle(NOW_MS + 61_000) == [soon]
    assert timers.settle(NOW_MS + 3 * DAY_MS) == [later]
    timers.close()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_broker_that_stopped_while_the_clock_was_ahead(tmp_path: Path, is_killed: bool) -> None:
    timers = Timers(tmp_path / "a")
    first = timers.send(NOW_MS + 10_000)
    timers.settle(NOW_MS)
    assert timers.turn(NOW_MS + HOUR_MS) == [first]
    root = timers.copy(tmp_path / "b") if is_killed else tmp_path / "a"
    timers.close()
    timers = Timers(root, NOW_MS + 5_000)
    second = timers.send(NOW_MS + 10_000)
    assert timers.settle(NOW_MS + 5_000) == []
    third = timers.send(NOW_MS + 10_000)
    assert timers.turn(NOW_MS + 6_000) == []
    for place in "cd":  # killed twice, before the new time is marked
        root = timers.copy(tmp_path / place)
        timers.close()
        timers = Timers(root, NOW_MS + 7_000)
        assert timers.turn(NOW_MS + 7_000) == []
    assert timers.settle(NOW_MS + 11_000) == [second, third]
    assert timers.settle(NOW_MS + 2 * HOUR_MS) == []
    timers.close()


@pytest.mark.parametrize("is_marked_ahead", [False, True])
def test_a_disk_that_takes_no_mark_does_not_hold_timers_up(tmp_path: Path, is_marked_ahead: bool) -> None:
    timers = Timers(tmp_path / "a")
    first = timers.send(NOW_MS + 10_000)
    timers.settle(NOW_MS)
    assert (timers.settle if is_marked_ahead else timers.turn)(NOW_MS + HOUR_MS) == [first]
    new, newest = timers.send(NOW_MS + 12_000), timers.send(NOW_MS + 30_000)
    for _ in range(1000):  # from here on nothing is flushed
        assert timers.turn(NOW_MS + 3_000) == []
    assert timers.turn(NOW_MS + 13_000) == [new]
    root = timers.copy(tmp_path / "b")
    timers.close()
    timers = Timers(root, NOW_MS + 14_000)
    assert timers.settle(NOW_MS + 14_000) == []
    assert timers.settle(NOW_MS + 31_000) == [newest]
    assert timers.settle(NOW_MS + 2 * HOUR_MS) == []
    timers.close()


def test_a_mark_that_is_taken_amid_a_turn_back_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(tmp_path)
    first = timers.send(NOW_MS + 10_000)
    timers.settle(NOW_MS)
    assert timers.settle(NOW_MS + HOUR_MS) == [first]
    slots, taken = TimerWheel.slots, []

    def slots_while_a_mark_is_taken(self: TimerWheel) -> Iterator[TimerSlot]:
        taken.append(timers.timers.flush_later())  # by the flush thread
        return slots(self)

    for _ in range(2):
        timers.turn(NOW_MS + 3_000)
    flush = timers.timers.flush_later()
    timers.turn(NOW_MS + 3_000)
    flush()
    monkeypatch.setattr(TimerWheel, "slots", slots_while_a_mark_is_taken)
    timers.turn(NOW_MS + 3_000)
    monkeypatch.undo()
    (flush,) = taken
    check = TimerCheck(tmp_path / "config" / "timercheck")
    assert check.read_ms == NOW_MS + 3_000
    flush()
    again = TimerCheck(tmp_path / "config" / "timercheck")
    assert again.read_ms == NOW_MS + 3_000
    check.close()
    again.close()
    timers.close()


def test_a_lost_wheel_brings_nothing_back(tmp_path: Path) -> None:
    timers = Timers(tmp_path / "a")
    first = timers.send(NOW_MS + 10_000)
    timers.settle(NOW_MS)
    assert timers.settle(NOW_MS + HOUR_MS) == [first]
    timers.settle(NOW_MS)
    second = timers.send(NOW_MS + 10_000)
    timers.settle(NOW_MS)
    root = timers.copy(tmp_path / "b")
    timers.close()
    (root / "timerwheel").unlink()
    timers = Timers(root)
    assert timers.settle(NOW_MS + 11_000) == [second]
    timers.close()


Step = tuple[str, int]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 40)),
        st.tuples(st.just("pass"), st.integers(1, 15)),
        st.tuples(st.just("ahead"), st.sampled_from([20, 60, 3600])),
        st.tuples(st.just("back"), st.just(0)),
        st.tuples(st.just("flush"), st.just(0)),
        st.tuples(st.just("kill"), st.just(0)),
    ),
    max_size=15,
)


@given(STEPS)
@settings(max_examples=8)
def test_each_comes_once_whatever_the_clock_does(steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as directory:
        timers = Timers(Path(directory) / "0")
        now_ms, ahead_ms, sent, found, lives = NOW_MS, 0, 0, Counter[int](), 0
        for step, number in [*steps, ("back", 0)]:
            if step == "send":
                timers.send(now_ms + ahead_ms + number * 1000)
                sent += 1
            elif step == "pass":
                now_ms += number * 1000
            elif step == "ahead":
                ahead_ms = number * 1000
            elif step == "back":
                ahead_ms = 0
            elif step == "flush":
                timers.store.flush()
            else:
                lives += 1
                root = timers.copy(Path(directory) / str(lives))
                timers.close()
                shutil.rmtree(timers.root)
                timers = Timers(root, now_ms + ahead_ms)
            found.update(timers.turn(now_ms + ahead_ms))
        # A timer that was sent by the right clock, or is sent now, is due when the right clock says so.
        timers.store.flush()
        found.update(timers.settle(now_ms))
        new = timers.send(now_ms + 3_000)
        found.update(timers.settle(now_ms))
        found.update(timers.settle(now_ms + 9_000))  # up to 5 s the clock is waited for
        assert found[new] == 1
        found.update(timers.settle(now_ms + 2 * HOUR_MS))
        assert sorted(found.elements()) == list(range(sent + 1))
        timers.close()


def test_a_full_file_that_is_read_protects_what_follows(tmp_path: Path) -> None:
    file_bytes = FULL_FILE_UNITS * UNIT_BYTES + 16
    timers = Timers(tmp_path, file_bytes=file_bytes)
    for _ in range(FULL_FILE_UNITS):
        timers.send(NOW_MS + 1000)
    timers.turn(NOW_MS)
    assert len(timers.settle(NOW_MS + 2_000)) == FULL_FILE_UNITS
    assert timers.timers.lowest_needed() is None
    offset = timers.store.log_max_offset
    timers.send(NOW_MS + 60_000)
    timers.send(NOW_MS + 5_000)
    timers.settle(NOW_MS + 2_000)
    assert timers.timers.lowest_needed() == offset
    assert len(timers.settle(NOW_MS + 6_000)) == 1
    assert timers.timers.lowest_needed() == offset
    timers.close()


def test_the_oldest_timer_that_is_needed_moves_on_without_retention(tmp_path: Path) -> None:
    timers = Timers(tmp_path, file_bytes=1 << 20)
    timers.send(NOW_MS + 1000)
    entry = timers.store.entry(TIMER_TOPIC, 0, 0)
    assert entry is not None
    for _ in range(25_000):
        assert timers.timers.put(NOW_MS + 1000, NOW_MS, entry, is_recall=False, topic_hash=0)
    for second in range(6):
        timers.timers.advance(NOW_MS + 2_000 + second * 1000)
        while timers.timers.is_behind:
            if timers.timers.next_due() is not None:
                timers.timers.finish_slot()
    assert timers.timers.lowest_needed() is None, "one call of retention in a day is enough"
    timers.close()


def test_a_damaged_unit_does_not_unprotect_what_follows(tmp_path: Path) -> None:
    timers = Timers(tmp_path)
    timers.send(NOW_MS + 1000)
    timers.send(NOW_MS + 1000)
    offset = timers.store.log_max_offset
    timers.send(NOW_MS + 60_000)
    timers.turn(NOW_MS)
    with (tmp_path / "timerlog" / ("0" * 20)).open("rb+") as file:
        file.seek(UNIT_BYTES)
        file.write(bytes(UNIT_BYTES))
    timers.settle(NOW_MS + 5_000)
    assert timers.timers.lowest_needed() == offset
    timers.close()
