"""The segments of a commit log, read without the broker that writes them, and perhaps while it does.

A log is a directory of files, each named after the log offset of its first byte (20 digits). In a segment record
follows record (see `skylark.wire.message`); a blank record fills what is left at its end, zeros the end of the last.

- A record holds its own place in the log. So a record can be found from anywhere: look for the mark, compare the place.
- A message may hold the bytes of a record, and its sender may even have guessed the place. So a part of a segment is
  only good if the chain of sizes from its beginning meets its end; by induction all parts begin with a true record.
- The end of the log is behind its last intact record: one that is being written, or was torn by a crash, has none
  behind it. What can't be read and does have one behind it is damage.
- Files are read, not mapped: a file that someone shortens is then a short read, and not the end of the process.
"""

from __future__ import annotations

import errno
import os
import re
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import Final, Self

import msgspec
import numpy as np

from skylark.spark.records import SMALLEST, Records
from skylark.wire.message import MAGIC_BLANK, MAGIC_V1, MAGIC_V2, BadRecord

_SEGMENT_NAME: Final = re.compile(r"\d{20}")
_MARK: Final = MAGIC_V1.to_bytes(4, "big")[:3]  # what the marks of both kinds of record begin with
_MARK_AT: Final = 4
_BLANK_MARK: Final = MAGIC_BLANK.to_bytes(4, "big")
_SIZE: Final = Struct(">i")
_HEAD: Final = Struct(">iI20xq")  # size, mark, ..., log offset
_CHUNK_BYTES: Final = 4 << 20
_WINDOW_BYTES: Final = 64 << 10
_ZEROS: Final = bytes(1 << 20)


class Damaged(Exception):
    """There should be a record at `position`, and there is none that is whole."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(reason)
        self.position = position


class Segment(msgspec.Struct, frozen=True):
    path: str
    base: int
    size_bytes: int


def segments_in(directory: Path) -> list[Segment]:
    """The segments in the order of the log."""
    files = (file for file in directory.iterdir() if _SEGMENT_NAME.fullmatch(file.name) and file.is_file())
    return [Segment(str(file), int(file.name), file.stat().st_size) for file in sorted(files)]


class SegmentFile:
    """A segment that is open for reading. Positions count from its first byte."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    # Reading records.

    def runs(self, start: int, end: int) -> Iterator[Records]:
        """The records from `start` to `end`, both places where a record begins, some megabytes at a time.

        Bodies are not checked. Raises Damaged; all records before that place have been given by then.
        """
        position = start
        while position < end:
            data = self._read(position, min(_CHUNK_BYTES, end - position))
            starts, length = _whole_records(data)
            if not starts:
                size = self._size_at(position)
                if self._is_blank(position) and position + size == end:
                    return
                if not len(data) < size <= end - position:
                    raise Damaged(position, self._reason(position, size, end))
                data, starts, length = self._read(position, size), [0], size
            yield from self._intact(position, data, starts)
            position += length

    def _reason(self, position: int, size: int, end: int) -> str:
        if self._names_its_place(position) and size > end - position:
            return f"a record of {size} bytes runs past {end}, where the next one was found"
        return f"{self._read(position, 8).hex(' ')} is not the beginning of a record"

    def _intact(self, position: int, data: bytes, starts: list[int]) -> Iterator[Records]:
        try:
            yield self._records(position, data, starts)
        except BadRecord as e:
            # If the first records of a run are intact, so are fewer of them: the place is found by halving.
            lengths = range(1, len(starts) + 1)
            count = bisect_left(lengths, True, key=lambda length: not self._is_intact(position, data, starts[:length]))
            if count:
                yield self._records(position, data, starts[:count])
            raise Damaged(position + starts[count], str(e)) from None

    def _is_intact(self, position: int, data: bytes, starts: list[int]) -> bool:
        try:
            self._records(position, data, starts)
        except BadRecord:
            return False
        return True

    def _records(self, position: int, data: bytes, starts: list[int]) -> Records:
        records = Records(data, starts=starts, check_crc=False)
        if np.any(records.log_offsets() != np.array(starts, np.int64) + (self.segment.base + position)):
            raise BadRecord("a record that names another place in the log as its own")
        return records

    # Finding records.

    def record_at(self, position: int) -> Records | None:
        """The record that begins there, if it is whole from its first to its last byte."""
        size = self._size_at(position)
        if not SMALLEST <= size <= self.segment.size_bytes - position or self._is_blank(position):
            return None
        try:
            record = self._records(position, self._read(position, size), [0])
        except BadRecord:
            return None
        return None if len(record.damaged_bodies()) or record.end_in_zeros().any() else record

    def find_record(self, position: int, end: int) -> int | None:
        """Where the first whole record begins that begins at `position` or behind, and before `end`."""
        while position < end:
            window = self._read(position, _WINDOW_BYTES)
            at = window.find(_MARK, _MARK_AT)
            while at >= 0:
                candidate = position + at - _MARK_AT
                if candidate >= end:
                    return None
                if self._names_its_place(candidate) and self.record_at(candidate) is not None:
                    return candidate
                at = window.find(_MARK, at + 1)
            position += _WINDOW_BYTES - _MARK_AT - len(_MARK) + 1
        return None

    def written_end(self) -> int:
        """The end of the last whole record; the end of the segment if a blank record closes it; 0 if it is empty."""
        last = self._last_byte_end()
        back, position = _WINDOW_BYTES, None
        while position is None:
            begin = max(0, last - back)
            position = self.find_record(begin, last)
            if position is None and begin == 0:
                return 0
            back *= 8
        end = position
        while position is not None and position < last:  # what was written since can wait
            if self.record_at(position) is not None:
                end = position = position + self._size_at(position)
            elif self._is_blank(position) and position + self._size_at(position) == self.segment.size_bytes:
                return self.segment.size_bytes
            else:
                position = self.find_record(position + 1, last)
        return end

    def _last_byte_end(self) -> int:
        """Behind the last byte that is not zero. Holes in the file are not read."""
        end = self._last_extent_end()
        while end > 0:
            begin = max(0, end - len(_ZEROS))
            block = self._read(begin, end - begin)
            if block != _ZEROS[: len(block)]:
                return begin + len(block.rstrip(b"\0"))
            end = begin
        return 0

    def _last_extent_end(self) -> int:
        end, size = 0, self.segment.size_bytes
        try:
            while end < size:
                end = os.lseek(self._descriptor, os.lseek(self._descriptor, end, os.SEEK_DATA), os.SEEK_HOLE)
        except OSError as e:
            # Nothing but a hole follows; or the file system can't tell.
            return min(end, size) if e.errno == errno.ENXIO else size
        return min(end, size)

    def _names_its_place(self, position: int) -> bool:
        head = self._read(position, _HEAD.size)
        if len(head) < _HEAD.size:
            return False
        _, magic, log_offset = _HEAD.unpack(head)
        return magic in (MAGIC_V1, MAGIC_V2) and log_offset == self.segment.base + position

    def _size_at(self, position: int) -> int:
        return int.from_bytes(self._read(position, 4), "big", signed=True)

    def _is_blank(self, position: int) -> bool:
        return self._read(position + _MARK_AT, 4) == _BLANK_MARK

    def _read(self, position: int, size: int) -> bytes:
        return os.pread(self._descriptor, size, position)


def _whole_records(data: bytes) -> tuple[list[int], int]:
    """Where the records in the data begin, and where the last whole one ends. Only sizes are looked at."""
    starts: list[int] = []
    append, size_at, smallest = starts.append, _SIZE.unpack_from, SMALLEST
    position, end = 0, len(data)
    while position + smallest <= end:
        size = size_at(data, position)[0]
        following = position + size
        if size < smallest or following > end:
            break
        append(position)
        position = following
    if starts and data.startswith(_BLANK_MARK, starts[-1] + _MARK_AT):
        position = starts.pop()
    return starts, position
