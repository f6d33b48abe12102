"""Timers: the messages of the timers' queue, by the moment that they fall due.

    <root>/timerwheel   a slot for each moment           <root>/config/timercheck   how far all this has come
    <root>/timerlog/    the timers of the slots, chained

Whoever owns a `TimerStore` follows the timers' queue and calls `put` for each of its messages in turn, and takes what
is due from `next_due`. Nothing is kept in memory for a timer that waits. Everything is derived from the queue, and
recovered so that each message is on the wheel once:
- a unit of the timer log is written before its slot, and recovery repairs the slots from the units that were written
  since the last mark;
- the last unit tells how far the queue was followed;
- a unit since the last mark that speaks of a record behind the end of the log as it was recovered, or behind its first
  gap, is cut off, with all that follow it, and put from the queue again; an older one behind the end of the log is
  damaged, and passed over.

A timer for any time within (T, T + precision] is in slot T, and a slot is read when its moment is over: nothing is due
before its time.

A clock that was ahead leaves slots behind that were read too early. When it is right again, reading goes back to the
present time, and what was read stays read: the slots up to there are emptied, and the timer log's units in them are
known to be done (`timercheck.Turn`). While that is prepared, nothing is put on the wheel.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from skylark.store.api import QueueEntry, StoreError
from skylark.store.segments import sync_directory
from skylark.store.store import Store
from skylark.store.timercheck import Reading, TimerCheck, TimerMark
from skylark.store.timerlog import MAGIC_DEFAULT, MAGIC_DELETE, MAGIC_ROLL, UNIT_BYTES, TimerLog, TimerUnit
from skylark.store.timerwheel import SLOTS, TimerSlot, TimerWheel

log = logging.getLogger(__name__)

TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
MAX_WINDOW_SLOTS: Final = SLOTS // 2 - 60
_MOST_SLOTS_A_TURN: Final = 20_000
_MOST_UNITS_A_TURN: Final = 5_000
_MOST_BEHIND_MS: Final = 5_000  # a clock that is set back no further is waited for
_MOST_TURNS_WAITED: Final = 600  # there are ten a second
_MARK_INTERVAL_MS: Final = 60_000  # while nothing but the time changes


class TimerConfig(msgspec.Struct, kw_only=True):
    root: Path
    file_bytes: int = 100 << 20
    precision_ms: int = 1000
    window_slots: int = 2 * 24 * 3600  # a timer further away is put on the wheel again on its way


class DueSlot:
    """The timers of one slot, oldest first once all are found; `done` of them are delivered."""

    __slots__ = ("done", "is_whole", "positions", "recalls", "rest", "time_ms")

    def __init__(self, time_ms: int, last: int, done: int) -> None:
        self.time_ms = time_ms
        self.positions, self.recalls = array("q"), array("q")
        self.done = done
        self.rest = last  # the position from which the chain is still to be followed
        self.is_whole = False


class TimerStore:
    """The wheel, the timer log and the mark. One thread calls everything but what `flush_later` gives."""

    def __init__(self, store: Store, config: TimerConfig, now_ms: int) -> None:
        """Opens and recovers. Blocks; raises StoreError."""
        root = config.root
        self._store = store
        self._precision_ms = config.precision_ms
        self._window_ms = min(max(config.window_slots, 2), MAX_WINDOW_SLOTS) * config.precision_ms
        self._now_ms = now_ms
        self._changed = True  # since the last mark
        self._slot: DueSlot | None = None  # being read
        self._turning = False  # the clock is behind, and reading is about to go back
        self._turns_waited = 0
        self.pending = 0
        with ExitStack() as opened:
            try:
                self._check = TimerCheck(root / "config" / "timercheck")
                opened.callback(self._check.close)
                self._log = TimerLog(root / "timerlog", config.file_bytes)
                opened.callback(self._log.close)
                self._wheel = TimerWheel(root / "timerwheel", config.precision_ms)
                opened.callback(self._wheel.close)
                (root / "timerlog").mkdir(exist_ok=True)
                sync_directory(root)
                self._recover(rebuild=self._wheel.is_new or any(root.glob("timerwheel.*")))
                if not store.was_clean:
                    self._settle()
            except OSError as error:
                raise StoreError(f"cannot open the timers in {root}: {error}") from error
            opened.pop_all()
        self.write_ms = max(self._floor(now_ms), self.read_ms)
        self._oldest = self._log.start  # no unit before it waits any more
        log.info(
            "%d timers wait; slots are read from %d on, the queue from %d on",
            self.pending, self.read_ms, self.queue_offset,
        )  # fmt: skip

    def _floor(self, time_ms: int) -> int:
        return time_ms - time_ms % self._precision_ms

    # --- recovery -----------------------------------------------------------------------------------------------------
    def _recover(self, *, rebuild: bool) -> None:
        """Brings wheel, timer log and queue in line. Raises OSError."""
        self.read_ms = self._floor(self._check.read_ms or self._first_slot_ms(self._now_ms))
        self._recover_log(rebuild=rebuild)
        self._turn = self._check.turn  # that `read_ms` is of
        self._recover_wheel()
        self._wheel.complete()
        self.queue_offset = self._recover_queue_offset()
        self._recover_reading()

    def _first_slot_ms(self, now_ms: int) -> int:
        """Where to begin reading without a mark: a process that died before its first one may have left timers."""
        first_ms = min((unit.slot_ms for unit in self._log.scan(self._log.start)), default=now_ms)
        if first_ms < now_ms:
            log.warning("there is no mark of how far timers were read: some may come twice")
        return min(first_ms, now_ms)

    def _recover_log(self, *, rebuild: bool) -> None:
        """Finds the end of the timer log, and brings the slots in line with the units since the last mark."""
        marked = self._check.mark.log_position
        position = self._log.start if rebuild else max(marked, self._log.start)
        base = self._log.base_of(position)
        if (position - base) % UNIT_BYTES:
            position = base
        end, damaged = position, array("q")
        for unit in self._log.scan(position, marked):
            record_end = unit.log_offset + unit.size_bytes
            # Not the log's end of now: what came since the start may be where a lost record was.
            if unit.position >= marked and record_end > self._store.whole_until:
                break
            if record_end > self._store.log_max_offset:
                damaged.append(unit.position)  # since the log was on disk before the mark
                continue
            self._revise(unit)
            end = self._log.following(unit.position)
        if damaged:
            log.error(
                "%d units of the timer log lead behind the end of the log and are passed over; the first is at %d",
                len(damaged), damaged[0],
            )  # fmt: skip
        self._log.truncate(end)
        self._check.units_end(self._log.end)

    def _revise(self, unit: TimerUnit) -> int:
        """Files a unit in its slot, unless it is there or done; how many more wait now."""
        slot_ms = self._floor(unit.slot_ms)
        turn = self._check.turn
        if slot_ms < self.read_ms or (unit.position < turn.position and slot_ms < turn.until_ms):
            return 0
        slot = self._wheel.slot(slot_ms)
        if slot is None:
            slot = TimerSlot(slot_ms, unit.position, unit.position, 0)
        elif slot.last >= unit.position:
            return 0  # it is further than this unit; `_recover_wheel` sees whether too far
        change = -1 if unit.magic & MAGIC_DELETE else 1
        slot.last = unit.position
        slot.count += change
        self._wheel.put(slot)
        return change

    def _recover_wheel(self) -> None:
        """Counts what waits. Slots that speak of units behind the end of the timer log are set to the last one there
        is: after a power failure the wheel may have been on disk before the timer log.
        """
        ahead = []
        turn = self._check.turn
        for slot in self._wheel.slots():
            if slot.time_ms < self.read_ms or slot.last < 0:
                continue
            if slot.last >= self._log.end:
                ahead.append(slot)
            elif slot.last < turn.position and slot.time_ms < turn.until_ms:
                self._wheel.put(TimerSlot(slot.time_ms, -1, -1, 0))
            else:
                self.pending += slot.count
        if not ahead:
            return
        log.warning("%d slots of the timer wheel are ahead of the timer log and are set back", len(ahead))
        first = min(slot.first for slot in ahead)
        for slot in ahead:
            self._wheel.put(TimerSlot(slot.time_ms, -1, -1, 0))
        moments = {slot.time_ms for slot in ahead}
        for unit in self._log.scan(max(first, self._log.start), self._log.end):
            slot_ms = self._floor(unit.slot_ms)
            if slot_ms in moments and unit.position < self._log.end:
                self.pending += self._revise(unit)

    def _recover_queue_offset(self) -> int:
        """The first message of the queue that is not on the wheel: behind that of the last unit, or as marked if the
        timer log has all that the mark speaks of.
        """
        last = self._log.last(self._store.log_max_offset)
        low = self._store.min_offset(TIMER_TOPIC, 0)
        high = self._store.max_offset(TIMER_TOPIC, 0)
        known = self._check.mark.queue_offset
        if last is not None:
            behind_last = self._store.offset_behind(TIMER_TOPIC, 0, last.log_offset)
            known = max(known, behind_last) if last.position >= self._check.mark.log_position else behind_last
        if not low <= known <= high:
            log.warning("timers: offset %d is outside of the queue, %d to %d", known, low, high)
        return min(max(known, low), high)

    def _recover_reading(self) -> None:
        """Goes on within the slot that was being read when the process died; after a power failure, behind what was
        on disk for certain.
        """
        reading, mark = self._check.reading, self._check.mark
        if reading.slot_ms < self.read_ms or reading.log_end_offset > self._store.whole_until:
            reading = Reading(self.read_ms, mark.done if mark.read_ms == self.read_ms else 0)
        self.read_ms = self._floor(reading.slot_ms)
        self.pending = sum(
            slot.count for slot in self._wheel.slots() if slot.time_ms >= self.read_ms and slot.last >= 0
        )
        if reading.done and (slot := self._wheel.slot(self.read_ms)) is not None:
            self._slot = DueSlot(slot.time_ms, slot.last, reading.done)

    def _settle(self) -> None:
        """Brings to disk what recovery made: else, after another power failure, units and slots that it took away are
        there once more, and may speak of records that have come to the log in the meantime. Raises OSError.
        """
        self._log.settle()
        self._wheel.sync()
        self._check.settle(Reading(self.read_ms, self._slot.done if self._slot is not None else 0))

    # --- putting timers on the wheel ----------------------------------------------------------------------------------
    def advance(self, now_ms: int) -> None:
        """Says what time it is. A clock that is set back a little is waited for. Raises StoreError."""
        self._now_ms = now_ms
        if self.is_ahead_of(now_ms):
            self._turn_back(self._floor(now_ms))
        else:
            self._turning = False
            self.write_ms = max(self.write_ms, self._floor(now_ms))
        self._pass_read_units()

    def is_ahead_of(self, now_ms: int) -> bool:
        """Whether the clock was wrong: the time that it told before is so far ahead that it can't be waited for."""
        return self.write_ms - now_ms > _MOST_BEHIND_MS

    def _turn_back(self, moment_ms: int) -> None:
        """Lets reading go back to the present time, once all that was due by the wrong clock is read and the mark on
        disk says so: deliveries that a power failure could undo must not be forgotten. A disk that takes no mark is
        waited for a minute or so; without a power failure the rest of the files tells the same.
        """
        if not self._turning:
            self._turning, self._turns_waited = True, 0
            log.warning(
                "the clock is %d s behind what timers were delivered up to: it was ahead, and they go back with it",
                (self.write_ms - moment_ms) // 1000,
            )
            # What came late is in the present slot, and would stay there until the clock is back.
            self.write_ms += self._precision_ms
        if self._slot is not None or self.read_ms < self.write_ms:
            return
        if not self._check.is_marked(self.read_ms) and self._turns_waited < _MOST_TURNS_WAITED:
            self._turns_waited += 1
            self._changed = True
            return
        try:
            self._check.turn_back(self._log.end, self.read_ms, moment_ms)
        except OSError as error:
            raise StoreError(f"timers can't go back with the clock: {error}") from error
        for slot in self._wheel.slots():
            if moment_ms <= slot.time_ms < self.read_ms:
                self._wheel.put(TimerSlot(slot.time_ms, -1, -1, 0))
        self.read_ms = self.write_ms = moment_ms
        self._turn = self._check.turn  # the last thing, for `flush_later`
        self._turning = False
        self._changed = True

    def put(self, out_ms: int, late_ms: int, entry: QueueEntry, *, is_recall: bool, topic_hash: int) -> bool:
        """Puts the next message of the queue on the wheel: in the slot of `out_ms`, in that of `late_ms` if that has
        been read already. False: not now, since it would come in the way of timers that are two weeks late, or reading
        is about to go back. Raises StoreError.
        """
        if self._turning:
            return False
        magic = MAGIC_DEFAULT | (MAGIC_DELETE if is_recall else 0)
        slot_ms = self._floor(out_ms)
        if not self._is_unread(slot_ms):
            slot_ms = late_ms if self._is_unread(late_ms) else self.write_ms
        elif slot_ms - self.write_ms >= self._window_ms:
            magic |= MAGIC_ROLL
            beyond_ms = slot_ms - self.write_ms - self._window_ms
            # A last leap that is too short would leave little time for it: then two of the same length.
            leap_ms = self._window_ms // 2 if beyond_ms < self._window_ms // 3 else self._window_ms
            slot_ms = self._floor(self.write_ms + leap_ms)
        if slot_ms - self.read_ms >= SLOTS * self._precision_ms:
            return False
        slot = self._wheel.slot(slot_ms)
        if slot is None and self._wheel.is_taken(slot_ms, self.read_ms):
            # By a clock that was weeks ahead timers were put there that wait on: this one comes a little later.
            while self._wheel.is_taken(slot_ms, self.read_ms):
                slot_ms += self._precision_ms
            slot = self._wheel.slot(slot_ms)
        previous = slot.last if slot is not None else -1
        position = self._log.append(
            previous, magic, self.write_ms, slot_ms, entry.log_offset, entry.size_bytes, topic_hash
        )
        if slot is None:
            slot = TimerSlot(slot_ms, position, position, 0)
        change = -1 if is_recall else 1
        slot.last = position
        slot.count += change
        self._wheel.put(slot)
        self.pending += change
        self.queue_offset += 1
        self._changed = True
        return True

    def _is_unread(self, slot_ms: int) -> bool:
        return slot_ms > self.read_ms or (slot_ms == self.read_ms and self._slot is None)

    def skip(self) -> None:
        """Goes on to the next message of the queue that there is."""
        self.queue_offset = max(self.queue_offset + 1, self._store.min_offset(TIMER_TOPIC, 0))
        self._changed = True

    def count_at(self, time_ms: int) -> int:
        """How many timers wait for a moment."""
        return self._wheel.count(time_ms)

    # --- taking what is due -------------------------------------------------------------------------------------------
    def next_due(self) -> DueSlot | None:
        """The slot to be delivered now, if its moment is over. Looks at a bounded number of slots, and of timers: None
        may mean that the next call finds one, which `is_behind` tells.
        """
        for _ in range(_MOST_SLOTS_A_TURN):
            if self._slot is not None:
                return self._slot if self._find_timers(self._slot) else None
            if self.read_ms >= self.write_ms:
                return None
            slot = self._wheel.slot(self.read_ms)
            if slot is not None:
                self._slot = DueSlot(slot.time_ms, slot.last, 0)
            else:
                self.read_ms += self._precision_ms
        self._leap()
        return None

    def _leap(self) -> None:
        """After many empty slots: on to the next one with timers."""
        waiting = (slot.time_ms for slot in self._wheel.slots() if slot.last >= 0 and slot.time_ms >= self.read_ms)
        self.read_ms = min([self.write_ms, *waiting])

    @property
    def is_behind(self) -> bool:
        return self._slot is not None or self.read_ms < self.write_ms

    def _find_timers(self, due: DueSlot) -> bool:
        """Follows the chain of a slot; whether all its timers are found. Thousands may be due at one moment."""
        for _ in range(0 if due.is_whole else _MOST_UNITS_A_TURN):
            if due.rest < self._log.start:
                due.positions.reverse()
                due.is_whole = True
                break
            unit = self._log.unit(due.rest)
            # The chain leads backwards, within its slot; anything else is damage, and might lead round and round.
            if unit is None or unit.previous >= due.rest or self._floor(unit.slot_ms) != due.time_ms:
                log.error("the timer log is damaged at %d: the timers of %d are searched for", due.rest, due.time_ms)
                self._search_timers(due)
                break
            (due.recalls if unit.is_recall else due.positions).append(due.rest)
            due.rest = unit.previous
        return due.is_whole

    def _search_timers(self, due: DueSlot) -> None:
        """Finds the timers of a slot whose chain is broken."""
        due.positions, due.recalls = array("q"), array("q")
        due.is_whole = True
        slot = self._wheel.slot(due.time_ms)
        if slot is None:
            return
        for unit in self._log.scan(max(slot.first, self._log.start), self._log.end):
            if unit.position > slot.last:
                break
            if self._floor(unit.slot_ms) == due.time_ms:
                (due.recalls if unit.is_recall else due.positions).append(unit.position)

    def unit(self, position: int) -> TimerUnit | None:
        return self._log.unit(position)

    def delivered(self, log_end_offset: int) -> None:
        """The next timer of the slot is done, and the log ends at least there."""
        slot = self._slot
        assert slot is not None
        slot.done += 1
        self._check.note(slot.time_ms, slot.done, log_end_offset)
        self._changed = True

    def finish_slot(self) -> None:
        slot, self._slot = self._slot, None
        assert slot is not None
        self.pending -= self._wheel.count(slot.time_ms)
        self.read_ms = slot.time_ms + self._precision_ms
        self._check.note(self.read_ms, 0, self._store.log_max_offset)
        self._changed = True

    # --- disk ---------------------------------------------------------------------------------------------------------
    def flush_later(self) -> Callable[[], None]:
        """For the flush thread: takes a mark now, and gives what brings it to disk once the log is there."""
        if not self._changed and self.read_ms - self._check.mark.read_ms < _MARK_INTERVAL_MS:
            return lambda: None
        self._changed = False  # before anything is looked at: the event loop may be in the middle of a change
        # The turn before what it changes: a mark of another turn than that of the file is not written.
        turn = self._turn
        # The offset first: whatever it counts has its unit and its slot. The slot of the last unit may not be written
        # yet, so recovery begins with that.
        queue_offset = self.queue_offset
        slot, read_ms = self._slot, self.read_ms
        done = slot.done if slot is not None and slot.time_ms == read_ms else 0
        mark = TimerMark(read_ms, max(self._log.end - UNIT_BYTES, self._log.start), queue_offset, done)
        now_ms = self._now_ms

        def flush() -> None:
            self._log.sync(self._check.mark.log_position, mark.log_position + UNIT_BYTES)
            self._wheel.sync()
            self._check.write(mark, now_ms, turn)

        return flush

    def check_point(self) -> bytes:
        """The mark, as Apache's slaves ask for it."""
        return self._check.encoded()

    def _pass_read_units(self) -> None:
        self._oldest = self._log.first_from(self.read_ms, self._oldest, _MOST_UNITS_A_TURN)

    def lowest_needed(self) -> int | None:
        """The log offset from which on timers wait, or None. Never too high; after a start it takes some turns to get
        exact.
        """
        self._pass_read_units()
        if self._oldest >= self._log.end:
            entry = self._store.entry(TIMER_TOPIC, 0, self.queue_offset)
            return entry.log_offset if entry is not None else None
        unit = self._log.unit(self._oldest)
        return unit.log_offset if unit is not None else self._store.log_min_offset

    def clean(self) -> int:
        """Deletes files of the timer log whose messages are gone."""
        deleted = self._log.delete_before(self._store.log_min_offset)
        self._oldest = max(self._oldest, self._log.start)
        return deleted

    def close(self) -> None:
        self._wheel.close()
        self._log.close()
        self._check.close()
