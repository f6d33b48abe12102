"""The log by itself: rolling over, slices, truncation."""

from __future__ import annotations

from pathlib import Path

import pytest

from skylark.store import MessageTooLarge
from skylark.store.commitlog import BLANK_BYTES, CommitLog

SEGMENT_BYTES = 1024


def append(log: CommitLog, data: bytes) -> int:
    log.make_room(len(data))
    offset = log.end_offset
    log.write(data)
    return offset


def test_an_empty_log_has_no_extent(tmp_path: Path) -> None:
    log = CommitLog(tmp_path, SEGMENT_BYTES)
    assert (log.min_offset, log.end_offset, log.segments) == (0, 0, [])
    assert log.slice(0, 1) is None
    assert log.record(0) is None


def test_a_record_never_crosses_segments(tmp_path: Path) -> None:
    log = CommitLog(tmp_path, SEGMENT_BYTES)
    assert append(log, b"a" * 500) == 0
    assert append(log, b"b" * (SEGMENT_BYTES - 500 - BLANK_BYTES)) == 500
    assert append(log, b"c") == 1024
    assert append(log, b"d" * 1016) == 2048
    assert [segment.base for segment in log.segments] == [0, 1024, 2048]
    assert (tmp_path / f"{1024:020d}").read_bytes()[1:9] == (1023).to_bytes(4, "big") + bytes.fromhex("cbd43194")
    with pytest.raises(MessageTooLarge):
        log.make_room(SEGMENT_BYTES - BLANK_BYTES + 1)


def test_slices_end_with_what_was_written(tmp_path: Path) -> None:
    log = CommitLog(tmp_path, SEGMENT_BYTES)
    append(log, b"hello")
    assert log.slice(0, 5) == b"hello"
    assert log.slice(1, 4) == b"ello"
    for offset, size in ((0, 6), (5, 1), (-1, 1), (1024, 1)):
        assert log.slice(offset, size) is None
    append(log, b"x" * 1012)
    assert log.slice(0, 1024) is not None  # a full segment is read to its end, blank included
    assert log.slice(1000, 100) is None


def test_truncation_deletes_and_zeroes(tmp_path: Path) -> None:
    log = CommitLog(tmp_path, SEGMENT_BYTES)
    for letter in b"abcdef":
        append(log, bytes([letter]) * 400)
    log.close()
    log = CommitLog(tmp_path, SEGMENT_BYTES)
    assert log.end_offset == 3072
    log.truncate(1024 + 400)
    assert [segment.base for segment in log.segments] == [0, 1024]
    assert log.end_offset == 1424
    assert append(log, b"new") == 1424
    log.close()
    assert (tmp_path / f"{1024:020d}").read_bytes() == (b"c" * 400 + b"new").ljust(1024, b"\0")


def test_truncation_to_a_segments_start_keeps_what_can_be_appended_to(tmp_path: Path) -> None:
    log = CommitLog(tmp_path, SEGMENT_BYTES)
    append(log, b"a" * 900)
    append(log, b"b" * 900)
    log.truncate(0)
    assert append(log, b"again") == 0


def test_a_full_last_segment_is_followed_by_a_new_one(tmp_path: Path) -> None:
    log = CommitLog(tmp_path, SEGMENT_BYTES)
    append(log, b"a" * (SEGMENT_BYTES - BLANK_BYTES))
    log.close()
    log = CommitLog(tmp_path, SEGMENT_BYTES)
    assert append(log, b"b") == 1024


def test_the_first_segment_goes_only_when_others_follow(tmp_path: Path) -> None:
    log = CommitLog(tmp_path, SEGMENT_BYTES)
    append(log, b"a" * 900)
    assert not log.delete_first()
    append(log, b"b" * 900)
    held = log.slice(0, 3)
    assert not log.delete_first()
    del held
    assert log.delete_first()
    assert (log.min_offset, log.slice(0, 3)) == (1024, None)


def test_the_segments_of_a_range(tmp_path: Path) -> None:
    log = CommitLog(tmp_path, SEGMENT_BYTES)
    for _ in range(3):
        append(log, b"a" * 900)
    assert [segment.base for segment in log.segments_between(0, 2948)] == [0, 1024, 2048]
    assert [segment.base for segment in log.segments_between(1024, 1025)] == [1024]
    assert log.segments_between(5000, 5001) == []
