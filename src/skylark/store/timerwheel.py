"""The timer wheel: for each moment of two weeks, where the timers that fall due then are in the timer log.

One file of 1,209,600 slots, big endian, 32 bytes each:

    moment i64 (ms / precision) | position of the first unit i64 | position of the last unit i64 | count i32 | 0 i32

The units of a slot are chained backwards from the last one. A slot belongs to the moment that is written in it; the
same slot serves again two weeks later, so timers are put at most a week ahead and the rest is rolled.

The file is mapped, so it costs the same whether there are no timers or millions, and what was written survives the
death of the process.

A new wheel has another name (`timerwheel.new`) until its owner has put all timers on it that wait: a process that dies
before that, or finds the disk full, leaves no wheel that looks whole and lacks them.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from skylark.store import segments
from skylark.store.api import StoreError

log = logging.getLogger(__name__)

SLOTS: Final = 2 * 7 * 24 * 3600
_SLOT: Final = struct.Struct(">qqqii")
FILE_BYTES: Final = SLOTS * _SLOT.size
_BLOCK_BYTES: Final = 4096
_MOST_COUNTED: Final = (1 << 31) - 1


class TimerSlot(msgspec.Struct, gc=False):
    time_ms: int
    first: int
    last: int
    count: int


class TimerWheel:
    """The slots of one file. `is_new`: there was none that was whole, and `complete` is to be called."""

    def __init__(self, path: Path, precision_ms: int) -> None:
        """Raises StoreError, and then nothing is left open or behind."""
        self._precision_ms = precision_ms
        self._path = path
        size = path.stat().st_size if path.exists() else 0
        if size > FILE_BYTES:
            raise StoreError(f"{path} has {size} bytes, a timer wheel has {FILE_BYTES}")
        self.is_new = size < FILE_BYTES
        if size and self.is_new:
            log.warning("%s has %d of %d bytes and is built again: its creation failed", path, size, FILE_BYTES)
        try:
            if self.is_new:
                path.unlink(missing_ok=True)  # it may hold the space that the new one needs
            self._open()
        except OSError as error:
            raise StoreError(f"cannot open {path}: {error}") from error

    @property
    def _new_path(self) -> Path:
        return self._path.with_name(f"{self._path.name}.new")

    def _open(self) -> None:
        path, flags = (self._new_path, os.O_CREAT | os.O_TRUNC) if self.is_new else (self._path, 0)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o644)
        try:
            # With all its blocks: a write into a hole of a full disk would kill the process.
            segments.posix_fallocate(self._fd, 0, FILE_BYTES)
            self._map = mmap.mmap(self._fd, FILE_BYTES)
        except OSError:
            os.close(self._fd)
            if self.is_new:
                path.unlink(missing_ok=True)
            raise

    def complete(self) -> None:
        """All timers that wait are on the wheel: a new one gets its name, on disk. Raises OSError."""
        if self.is_new:
            self.sync()
            self._new_path.replace(self._path)
            segments.sync_directory(self._path.parent)
            self.is_new = False

    def _at(self, time_ms: int) -> int:
        return time_ms // self._precision_ms % SLOTS * _SLOT.size

    def slot(self, time_ms: int) -> TimerSlot | None:
        """The slot of a moment, if it has timers."""
        moment, first, last, count, _ = _SLOT.unpack_from(self._map, self._at(time_ms))
        if moment != time_ms // self._precision_ms or last < 0:
            return None
        return TimerSlot(moment * self._precision_ms, first, last, count)

    def is_taken(self, time_ms: int, read_ms: int) -> bool:
        """Whether the slot of a moment holds timers of another one that is still to be read."""
        moment, _, last, _, _ = _SLOT.unpack_from(self._map, self._at(time_ms))
        is_other = moment != time_ms // self._precision_ms
        return bool(is_other and last >= 0 and moment * self._precision_ms >= read_ms)

    def count(self, time_ms: int) -> int:
        slot = self.slot(time_ms)
        return slot.count if slot is not None else 0

    def put(self, slot: TimerSlot) -> None:
        moment = slot.time_ms // self._precision_ms
        count = min(max(slot.count, -_MOST_COUNTED), _MOST_COUNTED)  # it may be damaged, and is only shown
        _SLOT.pack_into(self._map, self._at(slot.time_ms), moment, slot.first, slot.last, count, 0)

    def slots(self) -> Iterator[TimerSlot]:
        """All slots that were ever used; a part of the file where none was costs next to nothing."""
        empty = bytes(_BLOCK_BYTES)
        for at in range(0, FILE_BYTES, _BLOCK_BYTES):
            block = self._map[at : at + _BLOCK_BYTES]
            if block == empty[: len(block)]:
                continue
            for moment, first, last, count, _ in _SLOT.iter_unpack(block):
                if moment > 0:
                    yield TimerSlot(moment * self._precision_ms, first, last, count)

    def sync(self) -> None:
        """Brings the slots to disk. Raises OSError. Called by the flush thread."""
        segments.sync_data(self._fd, self._path)

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)
