"""The checkpoint file: Apache's layout, and nothing but a later start of recovery lost with it."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from skylark.store.checkpoint import Checkpoint

GOLDEN = Path(__file__).parent / "golden"
FIELDS = (
    "physic_ms",
    "logics_ms",
    "index_ms",
    "master_flushed_offset",
    "confirm_offset",
    "logics_offset",
    "index_log_offset",
)


def test_reads_what_apache_wrote() -> None:
    checkpoint = Checkpoint(GOLDEN / "checkpoint")
    assert checkpoint.physic_ms == 1_794_789_910_448
    assert checkpoint.logics_ms == 1_794_789_910_448
    assert checkpoint.index_ms == 1_794_789_900_643
    assert checkpoint.master_flushed_offset == 0
    assert checkpoint.confirm_offset == 0
    assert checkpoint.logics_offset == 55_574
    assert checkpoint.index_log_offset == 0


def test_writes_what_apache_wrote(tmp_path: Path) -> None:
    theirs = Checkpoint(GOLDEN / "checkpoint")
    ours = Checkpoint(tmp_path / "store" / "checkpoint")
    for field in FIELDS:
        setattr(ours, field, getattr(theirs, field))
    ours.flush()
    assert (tmp_path / "store" / "checkpoint").read_bytes() == (GOLDEN / "checkpoint").read_bytes()


def test_without_a_file_all_is_zero_and_none_is_made(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    assert [getattr(checkpoint, field) for field in FIELDS] == [0] * 7
    assert not (tmp_path / "checkpoint").exists()


def test_every_field_has_its_place(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    checkpoint = Checkpoint(path)
    for place, field in enumerate(FIELDS, start=1):
        setattr(checkpoint, field, place)
    checkpoint.flush()
    assert len(path.read_bytes()) == 4096
    assert struct.unpack_from(">7q", path.read_bytes()) == (1, 2, 3, 4, 5, 6, 7)
    again = Checkpoint(path)
    assert [getattr(again, field) for field in FIELDS] == [1, 2, 3, 4, 5, 6, 7]


def test_bytes_it_does_not_know_stay(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    shutil.copy(GOLDEN / "checkpoint", path)
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"theirs")
    Checkpoint(path).flush()
    assert path.read_bytes()[100:106] == b"theirs"


@pytest.mark.parametrize("data", [b"", b"\xff", b"\xff" * 20, b"\xff" * 4096, b"\0" * 47])
def test_a_short_or_negative_file_counts_as_zero(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "checkpoint"
    path.write_bytes(data)
    checkpoint = Checkpoint(path)
    assert [getattr(checkpoint, field) for field in FIELDS] == [0] * 7
    checkpoint.flush()
    assert len(path.read_bytes()) == 4096


def test_min_timestamp_steps_back_three_seconds(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    assert checkpoint.min_timestamp_ms(with_index=False) == 0
    checkpoint.physic_ms, checkpoint.logics_ms, checkpoint.index_ms = 10_000, 9_000, 5_000
    assert checkpoint.min_timestamp_ms(with_index=False) == 6_000
    assert checkpoint.min_timestamp_ms(with_index=True) == 5_000
    checkpoint.physic_ms = 2_000
    assert checkpoint.min_timestamp_ms(with_index=False) == 0
