"""The commit log: every message of every topic, one record after the other, in segments of a fixed size.

Invariants:
- a record never crosses a segment's end: 8 bytes are always left for the blank record (its length, `MAGIC_BLANK`) that
  fills the rest when the next record does not fit;
- what lies behind `end_offset` is zeros;
- blocks are reserved before anything is written (see `segments`), and the next segment exists before the blank record
  is written, so a full disk changes nothing.
"""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

from skylark.store.ahead import PagesAhead
from skylark.store.api import MessageTooLarge
from skylark.store.segments import Segment, list_bases
from skylark.wire.message import LOG_OFFSET_POSITION, MAGIC_BLANK, MAGIC_V1, MAGIC_V2
from skylark.wire.records import RECORD_HEADERS

RESERVE_STEP_BYTES = 32 << 20
_RESIDENT_BYTES = 16 << 20  # the newest part, which consumers that keep up read
BLANK_BYTES = 8
_PIECE_BYTES = 1 << 20  # what is made ready at once
_QUICK_PIECE_S = 0.1
_BLANK = struct.Struct(">iI")
_SIZE_AND_MAGIC = struct.Struct(">iI")
_MIN_RECORD_BYTES = RECORD_HEADERS[0].size + 3


class CommitLog:
    """The segments of a log. `make_room`, then pack the record for `end_offset`, then `write`.

    `position` and `limit` are those of the last segment, kept flat for the hot path: a record of `size` bytes may be
    written without further ado while `position + size + BLANK_BYTES <= limit`.
    """

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        self.directory = directory
        self.segment_bytes = segment_bytes
        self._segments = {
            base: Segment(directory, base, segment_bytes) for base in list_bases(directory, segment_bytes)
        }
        self.base = 0
        self.position = 0
        self.limit = 0
        self._active: Segment | None = None
        self._ahead = PagesAhead()
        self._piece_end = 0
        self._piece_began_s = 0.0
        if self._segments:
            # Before recovery found the end, all segments count as full.
            self.base = max(self._segments)
            self.position = segment_bytes

    # --- extent -------------------------------------------------------------------------------------------------------
    @property
    def segments(self) -> list[Segment]:
        """In the order of the log."""
        return [self._segments[base] for base in sorted(self._segments)]

    def segments_between(self, start_offset: int, end_offset: int) -> list[Segment]:
        """Those that hold a part of [start, end). Safe to call from the flush thread."""
        bases = range(start_offset - start_offset % self.segment_bytes, end_offset, self.segment_bytes)
        return [segment for segment in map(self._segments.get, bases) if segment is not None]

    @property
    def min_offset(self) -> int:
        return min(self._segments) if self._segments else 0

    @property
    def end_offset(self) -> int:
        return self.base + self.position

    # --- writing ------------------------------------------------------------------------------------------------------
    def make_room(self, size_bytes: int) -> None:
        """Sees to it that the next `size_bytes` can be written at `end_offset`, in a new segment if need be."""
        if size_bytes + BLANK_BYTES > self.segment_bytes:
            raise MessageTooLarge(f"{size_bytes} bytes do not fit into a log segment of {self.segment_bytes}")
        active = self._active
        if active is None:
            active = self._activate(self._segments.get(self.base) if self.position < self.segment_bytes else None)
        if self.position + size_bytes + BLANK_BYTES > self.segment_bytes:
            active = self._roll(active)
        active.reserve(self.position + max(size_bytes + BLANK_BYTES, RESERVE_STEP_BYTES))
        self.limit = active.reserved_bytes
        active.release(self.position - _RESIDENT_BYTES)

    def _activate(self, segment: Segment | None) -> Segment:
        if segment is None:
            base = self.base + self.segment_bytes if self._segments else self.base
            segment = Segment.create(self.directory, base, self.segment_bytes, RESERVE_STEP_BYTES)
            self._segments[base] = segment
            self.position = 0
            self.base = base
        segment.map  # noqa: B018 -- what is lacking for that shows before a record is written
        segment.reserved_bytes = max(segment.reserved_bytes, self.position)
        self._active = segment
        return segment

    def _roll(self, active: Segment) -> Segment:
        active.reserve(self.position + BLANK_BYTES)
        base = self.base + self.segment_bytes
        following = Segment.create(self.directory, base, self.segment_bytes, RESERVE_STEP_BYTES)
        _BLANK.pack_into(active.map, self.position, self.segment_bytes - self.position, MAGIC_BLANK)
        self._segments[base] = following
        # The flush thread reads base and position without a lock; in this order it never sees an end that was not
        # reached: first an end that is too small, then the right one.
        self.position = 0
        self._piece_end = 0
        self.base = base
        self._active = following
        self.limit = following.reserved_bytes
        return following

    def write(self, data: bytes) -> None:
        """Writes what was packed for `end_offset`, after `make_room`."""
        active = self._active
        assert active is not None
        at = self.position
        end = at + len(data)
        active.map[at:end] = data
        self.position = end
        if end >= self._piece_end:
            self._look_ahead(active)

    def _look_ahead(self, active: Segment) -> None:
        """Has the pages of the next piece made ready if the last one filled up quickly."""
        now_s = time.monotonic()
        was_quick = now_s - self._piece_began_s < _QUICK_PIECE_S
        self._piece_began_s = now_s
        self._piece_end = self.position - self.position % _PIECE_BYTES + _PIECE_BYTES
        if was_quick and self._piece_end + _PIECE_BYTES <= self.limit:
            self._ahead.ask(active.map, self._piece_end, _PIECE_BYTES)

    # --- reading ------------------------------------------------------------------------------------------------------
    def slice(self, log_offset: int, size_bytes: int) -> memoryview | None:
        """The bytes at an offset, if all of them are in one segment and written."""
        segment = self._holding(log_offset, size_bytes)
        at = log_offset % self.segment_bytes
        return None if segment is None else segment.view[at : at + size_bytes]

    def pages(self, log_offset: int) -> tuple[int, int, mmap.mmap] | None:
        """What is written of the segment that an offset lies in: where it begins and ends in the log, and its bytes."""
        base = log_offset - log_offset % self.segment_bytes
        segment = self._segments.get(base)
        if segment is None:
            return None
        return base, base + (self.position if base == self.base else self.segment_bytes), segment.map

    def _holding(self, log_offset: int, size_bytes: int) -> Segment | None:
        at = log_offset % self.segment_bytes
        base = log_offset - at
        written = self.position if base == self.base else self.segment_bytes
        return self._segments.get(base) if at + size_bytes <= written else None

    def record(self, log_offset: int) -> memoryview | None:
        """The record that starts at an offset; None when none does, as far as its first bytes tell."""
        head = self.slice(log_offset, LOG_OFFSET_POSITION + 8) if log_offset >= 0 else None
        if head is None:
            return None
        size, magic = _SIZE_AND_MAGIC.unpack_from(head)
        if magic not in (MAGIC_V1, MAGIC_V2) or size < _MIN_RECORD_BYTES:
            return None
        if int.from_bytes(head[LOG_OFFSET_POSITION:], "big") != log_offset:
            return None
        return self.slice(log_offset, size)

    def next_segment_offset(self, log_offset: int) -> int:
        return log_offset - log_offset % self.segment_bytes + self.segment_bytes

    def release(self) -> None:
        """Lets go of the memory that holds older parts of the log, read or written."""
        for base, segment in self._segments.items():
            segment.release(self.position - _RESIDENT_BYTES if base == self.base else self.segment_bytes)

    # --- recovery, retention, end -------------------------------------------------------------------------------------
    def truncate(self, end_offset: int) -> None:
        """Sets the end of the log: what lies behind it becomes zeros or is deleted."""
        for segment in self.segments:
            if segment.base >= end_offset and segment.base > self.min_offset:
                segment.delete()
                del self._segments[segment.base]
        self._active = None
        self._piece_end = 0
        self.limit = 0
        if self._segments:
            self.base = max(self._segments)
            self.position = end_offset - self.base
            if self.position < self.segment_bytes:
                self._segments[self.base].cut(self.position)

    def delete_first(self) -> bool:
        """Deletes the oldest segment, unless it is the last or a reader holds a slice of it."""
        base = self.min_offset
        if base == self.base or not self._segments[base].delete():
            return False
        del self._segments[base]
        return True

    def close(self) -> None:
        self._ahead.stop()
        for segment in self._segments.values():
            segment.close()
