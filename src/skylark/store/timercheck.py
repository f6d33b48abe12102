"""How far the timers have come: Apache's `config/timercheck`, 4096 bytes of big-endian 64-bit integers.

     0  moment whose slot is to be read next, ms
     8  position up to which the timer log is on disk
    16  offset up to which the timers' queue is on the wheel
    24  the same, as the master has it
    32  version of these: state, time in ms, counter
    64  ours: moment whose slot is being read, ms
    72  ours: how many of its timers are done
    80  ours: where the log ended after the last of these
    88  ours: position of the timer log before which units of slots before the next moment are done, although
    96  reading began once more, since the clock had been ahead, before this moment,
   104  at this one, ms
   112  ours: counter of the version at that time
   120  ours: the first moment above again, and
   128  how many timers of its slot are done, as far as that is on disk
   136  ours: counter of the version of which
   144  this is the checksum, of the first part with the last two
   152  ours: checksum of the turn back
   160  ours: the moment whose slot is being read, how many are done and where the log ended once more, and a checksum

The first part, with the last two, is written after everything that it speaks of is on disk. What is being read is
written with each delivery, through a mapping, so that it survives the death of the process; it counts only if the log
is whole as far as it says, since after a power failure it may have reached the disk when the log did not. A turn
back is on disk before anything is built on it.

A wrong number here would make timers pass for read. So a part whose checksum is wrong is told and counts as missing:
what it said is found out from the others and from the timer log, and some timers may come twice. A checksum of 0 is
none; Apache's broker, which knows of none, writes the first part with a counter of its own.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import threading
from pathlib import Path
from typing import Final
from zlib import crc32

import msgspec

log = logging.getLogger(__name__)

_FILE_BYTES: Final = 4096
_FIELDS: Final = struct.Struct(">7q")
_READING: Final = struct.Struct(">3q")
_READING_AT: Final = 64
_TURN: Final = struct.Struct(">4q")
_TURN_AT: Final = _READING_AT + _READING.size
_DONE: Final = struct.Struct(">2q")
_DONE_AT: Final = _TURN_AT + _TURN.size
_COUNTER_AND_SUM: Final = struct.Struct(">2q")
_MARK_SUM_AT: Final = _DONE_AT + _DONE.size
_SUM: Final = struct.Struct(">q")
_TURN_SUM_AT: Final = _MARK_SUM_AT + _COUNTER_AND_SUM.size
_READING_AGAIN_AT: Final = _TURN_SUM_AT + _SUM.size


class TimerMark(msgspec.Struct, frozen=True):
    """The values of the first part, and how many timers of the slot `read_ms` are done."""

    read_ms: int = 0
    log_position: int = 0
    queue_offset: int = 0
    done: int = 0


class Reading(msgspec.Struct, frozen=True):
    """The values of the second part."""

    slot_ms: int = 0
    done: int = 0
    log_end_offset: int = 0


class Turn(msgspec.Struct, frozen=True):
    """The last time that reading went back, from `until_ms` to `to_ms`: slots up to there had been read when the clock
    was ahead, so that units before `position` in slots before `until_ms` are done.
    """

    position: int = 0
    until_ms: int = 0
    to_ms: int = 0
    counter: int = 0


def _sum(data: bytes) -> int:
    """A checksum, never 0."""
    return crc32(data) | 1 << 32


class TimerCheck:
    """The file, mapped. The flush thread calls `write`, and may hold up `turn_back` for as long as that takes."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, and then nothing is left open."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(self._fd, 0, _FILE_BYTES)
            self._map = mmap.mmap(self._fd, _FILE_BYTES)
        except OSError:
            os.close(self._fd)
            raise
        self._path = path
        self.mark, self.reading, self.turn = self._load_mark(), self._load_reading(), self._load_turn()
        self._marked: Turn | None = None  # that of the last mark that was written
        self._writing = threading.Lock()

    def _load_mark(self) -> TimerMark:
        read_ms, log_position, queue_offset, _, self._state, self._version_ms, self._counter = (
            max(value, 0) for value in _FIELDS.unpack_from(self._map)
        )
        done_ms, done = _DONE.unpack_from(self._map, _DONE_AT)
        counter, known = _COUNTER_AND_SUM.unpack_from(self._map, _MARK_SUM_AT)
        if counter == self._counter and self._is_damaged(self._mark_bytes(), known, "how far timers were brought"):
            return TimerMark()
        return TimerMark(read_ms, log_position, queue_offset, done if done_ms == read_ms else 0)

    def _load_reading(self) -> Reading:
        again = self._map[_READING_AGAIN_AT : _READING_AGAIN_AT + _READING.size]
        (known,) = _SUM.unpack_from(self._map, _READING_AGAIN_AT + _READING.size)
        if self._is_damaged(again, known, "which timers were being read"):
            return Reading()
        return Reading(*_READING.unpack(again) if known else _READING.unpack_from(self._map, _READING_AT))

    def _load_turn(self) -> Turn:
        fields = self._map[_TURN_AT : _TURN_AT + _TURN.size]
        (known,) = _SUM.unpack_from(self._map, _TURN_SUM_AT)
        if self._is_damaged(fields, known, "how timers went back with the clock"):
            return Turn()
        return Turn(*_TURN.unpack(fields))

    def _is_damaged(self, data: bytes, known: int, what: str) -> bool:
        is_damaged = known not in (0, _sum(data))
        if is_damaged:
            log.error("%s is damaged: %s is found out anew, and some may come twice", self._path, what)
        return is_damaged

    def _mark_bytes(self) -> bytes:
        return self._map[: _FIELDS.size] + self._map[_DONE_AT : _DONE_AT + _DONE.size]

    @property
    def read_ms(self) -> int:
        """The moment of the mark, or that of a turn back since then."""
        turn = self.turn
        is_newer = turn.counter == self._counter and turn.until_ms >= self.mark.read_ms
        return turn.to_ms if turn.until_ms and is_newer else self.mark.read_ms

    def write(self, mark: TimerMark, now_ms: int, turn: Turn) -> None:
        """Makes a mark the file's, on disk, if there was no other turn back since it was taken. Raises OSError."""
        with self._writing:
            if turn is not self.turn or (mark == self.mark and turn is self._marked):
                return
            self._counter += 1
            self._version_ms = now_ms
            self._map[: _FIELDS.size] = self._encode(mark)
            _DONE.pack_into(self._map, _DONE_AT, mark.read_ms, mark.done)
            _COUNTER_AND_SUM.pack_into(self._map, _MARK_SUM_AT, self._counter, _sum(self._mark_bytes()))
            os.fdatasync(self._fd)
            self.mark, self._marked = mark, turn

    def is_marked(self, read_ms: int) -> bool:
        """Whether the mark on disk is of that moment, and was written since the last turn back."""
        return self.mark.read_ms == read_ms and self._marked is self.turn

    def turn_back(self, position: int, until_ms: int, to_ms: int) -> None:
        """Notes that reading goes back, on disk. Raises OSError, and then nothing is changed."""
        with self._writing:
            turn = Turn(position, until_ms, to_ms, self._counter)
            before = self._map[:]
            self._note_turn(turn)
            self.note(to_ms, 0, 0)
            try:
                os.fdatasync(self._fd)
            except OSError:
                self._map[:] = before
                raise
            self.turn = turn

    def _note_turn(self, turn: Turn) -> None:
        fields = _TURN.pack(turn.position, turn.until_ms, turn.to_ms, turn.counter)
        self._map[_TURN_AT : _TURN_AT + _TURN.size] = fields
        _SUM.pack_into(self._map, _TURN_SUM_AT, _sum(fields))

    def units_end(self, position: int) -> None:
        """The timer log was cut at a position: units that are put from there on are not done. Raises OSError."""
        turn = self.turn
        if position < turn.position:
            self.turn = Turn(position, turn.until_ms, turn.to_ms, turn.counter)
            self._note_turn(self.turn)
            os.fdatasync(self._fd)

    def settle(self, reading: Reading) -> None:
        """Replaces what was noted by what recovery made of it, on disk. Raises OSError."""
        self.note(reading.slot_ms, reading.done, reading.log_end_offset)
        os.fdatasync(self._fd)

    def encoded(self) -> bytes:
        """The first part, as a slave asks for it."""
        return self._encode(self.mark)

    def _encode(self, mark: TimerMark) -> bytes:
        return _FIELDS.pack(
            mark.read_ms, mark.log_position, mark.queue_offset, mark.queue_offset,
            self._state, self._version_ms, self._counter,
        )  # fmt: skip

    def note(self, slot_ms: int, done: int, log_end_offset: int) -> None:
        data = _READING.pack(slot_ms, done, log_end_offset)
        self._map[_READING_AT : _READING_AT + _READING.size] = data  # where older versions look for it
        data += _SUM.pack(_sum(data))
        self._map[_READING_AGAIN_AT : _READING_AGAIN_AT + len(data)] = data

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)
