"""The timer log: a unit for each time that a timer was put on the wheel, in the order of the timers' queue.

Big endian, 52 bytes:

    size i32 (52) | position of the unit before it in the same slot i64, -1 if none | magic i32 | write time i64
    | delay from there to the slot i32, ms | log offset i64 | record size i32 | hash of the real topic i32 | 0 i64

Files have a fixed size and are named by the position of their first byte. A unit never crosses the end of a file: 16
bytes are always left for the blank unit (what is left of the file i32, 0 i64, `MAGIC_BLANK`). Behind the last unit
there are zeros. Log offsets ascend from unit to unit. Where a slot is weeks late, the write time is told as early as
the delay has room for: the slot counts.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from skylark.store.segments import Segment, list_bases, sync_data, sync_directory
from skylark.wire.message import MAGIC_BLANK

UNIT: Final = struct.Struct(">iqiqiqiiq")
UNIT_BYTES: Final = UNIT.size
MAGIC_DEFAULT: Final = 1
MAGIC_ROLL: Final = 2  # the slot is not that of the timer yet: it is put on the wheel again from there
MAGIC_DELETE: Final = 4  # a recall
_BLANK: Final = struct.Struct(">iqI")
_RESERVE_STEP_BYTES: Final = 1 << 20
_MOST_LATE_MS: Final = 1 << 31


class TimerUnit(msgspec.Struct, gc=False):
    position: int
    previous: int
    magic: int
    write_ms: int
    slot_ms: int
    log_offset: int
    size_bytes: int

    @property
    def must_roll(self) -> bool:
        return bool(self.magic & MAGIC_ROLL)

    @property
    def is_recall(self) -> bool:
        """A recall takes effect in the slot of its timer, not where it waits to be put on the wheel again."""
        return self.magic & (MAGIC_DELETE | MAGIC_ROLL) == MAGIC_DELETE


class TimerLog:
    """The files of a timer log. `end` is not known before `truncate` said it."""

    def __init__(self, directory: Path, file_bytes: int) -> None:
        self._directory = directory
        self._file_bytes = file_bytes
        self._segments = {base: Segment(directory, base, file_bytes) for base in list_bases(directory, file_bytes)}
        self.end = 0

    @property
    def start(self) -> int:
        return min(self._segments, default=0)

    def append(
        self, previous: int, magic: int, write_ms: int, slot_ms: int, log_offset: int, size_bytes: int, topic_hash: int
    ) -> int:
        """Writes a unit; where. Raises DiskFull, and then nothing is written."""
        position = self.end
        at = position % self._file_bytes
        segment = self._segments.get(position - at)
        if segment is None:
            segment = self._create(position)
        elif at + UNIT_BYTES + _BLANK.size > self._file_bytes:
            following = self._create(position - at + self._file_bytes)
            segment.reserve(self._file_bytes)
            _BLANK.pack_into(segment.map, at, self._file_bytes - at, 0, MAGIC_BLANK)
            segment, position, at = following, following.base, 0
        if at + UNIT_BYTES > segment.reserved_bytes:
            segment.reserved_bytes = max(segment.reserved_bytes, at)
            segment.reserve(at + _RESERVE_STEP_BYTES)
        write_ms = min(write_ms, slot_ms + _MOST_LATE_MS)
        delay_ms = slot_ms - write_ms
        UNIT.pack_into(
            segment.map, at, UNIT_BYTES, previous, magic, write_ms, delay_ms, log_offset, size_bytes, topic_hash, 0
        )
        self.end = position + UNIT_BYTES
        return position

    def _create(self, base: int) -> Segment:
        segment = Segment.create(self._directory, base, self._file_bytes, _RESERVE_STEP_BYTES)
        self._segments[base] = segment
        return segment

    def unit(self, position: int) -> TimerUnit | None:
        """The unit at a position; None when there is none, or its file is gone."""
        if position < 0 or position >= self.end:
            return None
        return self._unit(position)

    def _unit(self, position: int) -> TimerUnit | None:
        at = position % self._file_bytes
        segment = self._segments.get(position - at)
        if segment is None or at + UNIT_BYTES > self._file_bytes:
            return None
        size, previous, magic, write_ms, delay_ms, log_offset, size_bytes, _, _ = UNIT.unpack_from(segment.map, at)
        if size != UNIT_BYTES or magic | 0xF != 0xF or size_bytes <= 0:
            return None
        return TimerUnit(position, previous, magic, write_ms, write_ms + delay_ms, log_offset, size_bytes)

    def following(self, position: int) -> int:
        """Where the unit behind the one at a position is, or will be."""
        return self.place(position + UNIT_BYTES)

    def place(self, position: int) -> int:
        """The same position or, behind the last unit of a full file, the start of the next file once there is one."""
        at = position % self._file_bytes
        if at + UNIT_BYTES + _BLANK.size > self._file_bytes and position - at + self._file_bytes in self._segments:
            return position - at + self._file_bytes
        return position

    def first_from(self, slot_ms: int, position: int, most: int) -> int:
        """Where the first unit from a position on is whose slot is that of a moment or later. Looks at so many units at
        the most, and then says where to go on. Damaged units are passed over.
        """
        position = self.place(position)
        while most > 0 and position < self.end:
            at = position % self._file_bytes
            segment = self._segments.get(position - at)
            written = min(self.end - (position - at), self._last_in_file + UNIT_BYTES)
            count = min((written - at) // UNIT_BYTES, most)
            if segment is None or count <= 0:
                break
            for size, _, _, write_ms, delay_ms, _, _, _, _ in UNIT.iter_unpack(
                segment.map[at : at + count * UNIT_BYTES]
            ):
                if size == UNIT_BYTES and write_ms + delay_ms >= slot_ms:
                    return position
                position += UNIT_BYTES
            position = self.place(position)
            most -= count
        return position

    def scan(self, position: int, known_end: int = 0) -> Iterator[TimerUnit]:
        """The units from a position on, up to the first bytes that are not one. Before a known end such bytes are
        damage, and passed over.
        """
        while position - position % self._file_bytes in self._segments:
            unit = self._unit(position)
            if unit is not None:
                yield unit
            elif position >= known_end:
                return
            position = self.following(position)

    def last(self, log_end_offset: int) -> TimerUnit | None:
        """The last unit that is whole and speaks of a record before an offset of the log."""
        position = self._preceding(self.end)
        while position >= 0:
            unit = self.unit(position)
            if unit is not None and unit.log_offset + unit.size_bytes <= log_end_offset:
                return unit
            position = self._preceding(position)
        return None

    def _preceding(self, position: int) -> int:
        """Where the unit before a position is, or less than 0."""
        at = position % self._file_bytes
        if at:
            return position - UNIT_BYTES
        base = position - self._file_bytes
        return base + self._last_in_file if base in self._segments else -1

    @property
    def _last_in_file(self) -> int:
        """Where the last unit of a full file is."""
        return ((self._file_bytes - _BLANK.size) // UNIT_BYTES - 1) * UNIT_BYTES

    def base_of(self, position: int) -> int:
        """The start of the file that holds a position, or of the first file when there is none for it."""
        base = position - position % self._file_bytes
        return base if base in self._segments else self.start

    def truncate(self, end: int) -> None:
        """Sets the end: what lies behind it becomes zeros or is deleted."""
        for base in sorted(self._segments):
            segment = self._segments[base]
            if base >= end and base != self.start:
                segment.delete()
                del self._segments[base]
            elif base + self._file_bytes > end:
                segment.cut(max(end - base, 0))
        self.end = max(end, self.start)

    def delete_before(self, log_min_offset: int) -> int:
        """Deletes the files all of whose messages are gone from the log, but never the last; how many."""
        deleted = 0
        for base in sorted(self._segments)[:-1]:
            unit = self.unit(base + self._last_in_file)
            if unit is None or unit.log_offset >= log_min_offset or not self._segments[base].delete():
                break
            del self._segments[base]
            deleted += 1
        return deleted

    def sync(self, start: int, end: int) -> None:
        """Brings what was written between two positions to disk. Raises OSError. Called by the flush thread."""
        for base in range(start - start % self._file_bytes, end, self._file_bytes):
            segment = self._segments.get(base)
            if segment is not None:
                _sync(segment)

    def settle(self) -> None:
        """Brings to disk what `truncate` made: the zeros behind the end, and that the files behind it are gone."""
        if self._segments:
            self._segments[max(self._segments)].sync()
            sync_directory(self._directory)

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()


def _sync(segment: Segment) -> None:
    """Syncs a file that may be deleted meanwhile, through a descriptor that nobody else closes. Raises OSError."""
    try:
        fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        sync_data(fd, segment.path)
    finally:
        os.close(fd)
    if not segment.named_on_disk:
        sync_directory(segment.path.parent)
        segment.named_on_disk = True
