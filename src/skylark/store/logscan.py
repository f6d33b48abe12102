"""Reads the log record by record, from an offset on; what is damaged is passed over, never a reason to stop.

Where no whole record begins, the next one is looked for: by its magic, and by its own log offset, which tells that the
bytes are a record of just that place and not a part of some message. Only what lies behind the last whole record of the
log is its end. Holes of a file are not read, so that the search through a segment that was just begun costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from skylark.store.api import LogRecord
from skylark.store.commitlog import CommitLog
from skylark.store.dispatch import inspect
from skylark.store.segments import Segment
from skylark.wire.message import LOG_OFFSET_POSITION, MAGIC_V1
from skylark.wire.records import RECORD_HEADERS

log = logging.getLogger(__name__)

MIN_RECORD_BYTES = RECORD_HEADERS[0].size + 4  # a topic of one letter, nothing else
_MOST_TOLD = 20
_MAGIC_AT = 4
_MAGIC_BEGINNING = MAGIC_V1.to_bytes(4, "big")[:3]  # which both have in common


class Damage:
    """The stretches of a log that hold no whole record although some follow; each is told once, the first few only."""

    def __init__(self) -> None:
        self.stretches: dict[int, int] = {}  # where each begins and ends
        self.most_records = 0  # that may be lost

    def passed(self, start: int, end: int) -> None:
        if start in self.stretches:
            return
        self.stretches[start] = end
        self.most_records += (end - start) // MIN_RECORD_BYTES + 1
        if len(self.stretches) <= _MOST_TOLD:
            log.error("the log is damaged from offset %d to %d, what was stored there is lost", start, end)
        elif len(self.stretches) == _MOST_TOLD + 1:
            log.error("the log is damaged in more places behind offset %d, which are not told one by one", start)

    @property
    def size_bytes(self) -> int:
        return sum(end - start for start, end in self.stretches.items())


class LogScan:
    """Iterates over the whole records of the log from an offset on; afterwards `end_offset` is where they ended."""

    def __init__(
        self, commit_log: CommitLog, start_offset: int, damage: Damage | None = None, *, ends_whole: bool = True
    ) -> None:
        """`ends_whole`: the log ends as its writer left it, and not where a crash may have cut a record short."""
        self._log = commit_log
        self._damage = damage if damage is not None else Damage()
        self._ends_whole = ends_whole
        self.end_offset = start_offset

    def __iter__(self) -> Iterator[LogRecord]:
        log_end = self._log.end_offset
        expected = self.end_offset  # where the next record begins, if nothing is damaged
        for segment in self._log.segments:
            segment_end = segment.base + segment.size_bytes
            at: int | None = max(expected, segment.base)
            while at is not None and at < min(segment_end, log_end):
                record = self._whole(segment, at)
                if record is None:
                    at = self._next_whole(segment, at)
                    continue
                if at != expected:
                    self._damage.passed(expected, at)
                if record.size_bytes == 0:
                    expected = segment_end
                    break
                yield record
                at = expected = self.end_offset = at + record.size_bytes

    def _whole(self, segment: Segment, log_offset: int) -> LogRecord | None:
        """What is at an offset: a record, or the blank one that fills the segment."""
        at = log_offset - segment.base
        record = inspect(segment.view, at, segment.base)
        if record is None or self._ends_whole or not record.may_be_torn:
            return record
        return record if inspect(segment.view, at + record.size_bytes, segment.base) is not None else None

    def _next_whole(self, segment: Segment, log_offset: int) -> int | None:
        """Where the next record of a segment begins, behind an offset at which none does."""
        at = log_offset - segment.base
        head = segment.view[at : at + LOG_OFFSET_POSITION + 8]
        if int.from_bytes(head[LOG_OFFSET_POSITION:], "big") == log_offset:
            # Only its content is damaged, if a record follows; what its body holds is not looked at then.
            behind = log_offset + int.from_bytes(head[:_MAGIC_AT], "big")
            if log_offset < behind < segment.base + segment.size_bytes and self._whole(segment, behind) is not None:
                return behind
        for start, end in segment.written(at + 1):
            found = segment.map.find(_MAGIC_BEGINNING, start + _MAGIC_AT, end)
            while found >= 0:
                behind = segment.base + found - _MAGIC_AT
                if self._whole(segment, behind) is not None:
                    return behind
                found = segment.map.find(_MAGIC_BEGINNING, found + 1, end)
        return None
