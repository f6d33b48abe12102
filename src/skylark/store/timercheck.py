"""How far the timers have come: Apache's `config/timercheck`, 4096 bytes of big-endian 64-bit integers.

     0  moment whose slot is to be read next, ms
     8  position up to which the timer log is on disk
    16  offset up to which the timers' queue is on the wheel
    24  the same, as the master has it
    32  version of these: state, time in ms, counter
    64  ours: moment whose slot is being read, ms
    72  ours: how many of its timers are done
    80  ours: where the log ended after the last of these

The first part is written after everything that it speaks of is on disk. Ours is written with each delivery, through a
mapping, so that it survives the death of the process; it counts only if the log still reaches as far as it says, since
after a power failure it may have reached the disk when the log did not.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Final

import msgspec

_FILE_BYTES: Final = 4096
_FIELDS: Final = struct.Struct(">7q")
_READING: Final = struct.Struct(">3q")
_READING_AT: Final = 64


class TimerMark(msgspec.Struct, frozen=True):
    """The values of the first part."""

    read_ms: int = 0
    log_position: int = 0
    queue_offset: int = 0


class Reading(msgspec.Struct, frozen=True):
    """The values of the second part."""

    slot_ms: int = 0
    done: int = 0
    log_end_offset: int = 0


class TimerCheck:
    """The file, mapped."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.posix_fallocate(self._fd, 0, _FILE_BYTES)
        self._map = mmap.mmap(self._fd, _FILE_BYTES)
        read_ms, log_position, queue_offset, _, self._state, self._version_ms, self._counter = (
            max(value, 0) for value in _FIELDS.unpack_from(self._map)
        )
        self.mark = TimerMark(read_ms, log_position, queue_offset)
        self.reading = Reading(*_READING.unpack_from(self._map, _READING_AT))

    def write(self, mark: TimerMark, now_ms: int) -> None:
        """Makes a mark the file's, on disk. Raises OSError. Called by the flush thread."""
        if mark == self.mark:
            return
        self._counter += 1
        self._version_ms = now_ms
        self.mark = mark
        self._map[: _FIELDS.size] = self.encoded()
        os.fdatasync(self._fd)

    def encoded(self) -> bytes:
        """The first part, as a slave asks for it."""
        mark = self.mark
        return _FIELDS.pack(
            mark.read_ms, mark.log_position, mark.queue_offset, mark.queue_offset,
            self._state, self._version_ms, self._counter,
        )  # fmt: skip

    def note(self, slot_ms: int, done: int, log_end_offset: int) -> None:
        _READING.pack_into(self._map, _READING_AT, slot_ms, done, log_end_offset)

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)
