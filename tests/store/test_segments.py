"""Mapped files: their names and sizes, reserved blocks, slices that keep them alive, and the pool."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

import pytest

from skylark.store import DiskFull, StoreError, segments
from skylark.store.segments import MappingPool, Segment, list_bases


def test_a_new_file_has_its_size_but_only_the_blocks_it_asked_for(tmp_path: Path) -> None:
    segment = Segment.create(tmp_path / "new", 4096, 1 << 24, 1 << 16)
    info = (tmp_path / "new" / "00000000000000004096").stat()
    assert info.st_size == 1 << 24
    assert 1 << 16 <= info.st_blocks * 512 < 1 << 20
    segment.reserve(1 << 21)
    assert segment.path.stat().st_blocks * 512 >= 1 << 21
    segment.reserve(1 << 30)
    assert segment.reserved_bytes == 1 << 24
    assert segment.delete()
    assert not segment.path.exists()


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, StoreError)]
)
def test_a_file_without_space_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def fail(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(segments, "posix_fallocate", fail)
    with pytest.raises(kind, match="reserve"):
        Segment.create(tmp_path, 0, 4096, 4096)
    assert list(tmp_path.iterdir()) == []


def test_what_a_slice_belongs_to_is_neither_unmapped_nor_deleted(tmp_path: Path) -> None:
    segment = Segment.create(tmp_path, 0, 8192, 8192)
    segment.map[0:5] = b"hello"
    part = segment.view[0:5]
    assert part.readonly
    assert not segment.delete()
    assert segment.path.exists()
    assert part == b"hello"
    assert segment.view[0:5] == b"hello"
    part.release()
    assert segment.delete()


def test_cutting_makes_zeros_under_the_mapping(tmp_path: Path) -> None:
    segment = Segment.create(tmp_path, 0, 16384, 16384)
    segment.map[0:16384] = b"x" * 16384
    segment.cut(5000)
    assert segment.map[4990:5010] == b"x" * 10 + bytes(10)
    assert not any(segment.map[5000:])
    assert segment.path.stat().st_size == 16384
    segment.reserve(6000)
    segment.map[5000:5003] = b"new"
    segment.close()
    assert segment.path.read_bytes()[4999:5004] == b"xnew\0"


def test_released_memory_is_given_back_and_nothing_is_lost(tmp_path: Path) -> None:
    size = 1 << 20
    segment = Segment.create(tmp_path, 0, size, size)
    written = bytes(range(256)) * (size // 256)
    segment.map[:] = written
    assert resident_bytes(segment.path) == size
    segment.release(size // 2 + 5)
    assert resident_bytes(segment.path) == size // 2
    assert segment.path.read_bytes() == written
    assert segment.map[:] == written
    segment.close()


def resident_bytes(path: Path) -> int:
    """How much of a mapped file this process holds in memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.endswith(str(path)):
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))
    raise AssertionError(f"{path} is not mapped")


def test_listing_takes_only_files_with_20_digits(tmp_path: Path) -> None:
    for name, size in (("00000000000000000000", 10), ("00000000000000000010", 10), ("notes.txt", 3), ("0010", 1)):
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "00000000000000000020").touch()
    (tmp_path / "00000000000000000030").mkdir()
    assert list_bases(tmp_path, 10) == [0, 10]
    assert not (tmp_path / "00000000000000000020").exists()
    assert list_bases(tmp_path / "missing", 10) == []


def test_an_empty_file_is_removed_wherever_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The names and sizes of files that were not synced reach the disk in any order."""
    for base, size in ((0, 100), (100, 0), (200, 100), (300, 0)):
        (tmp_path / f"{base:020d}").write_bytes(bytes(size))
    assert list_bases(tmp_path, 100) == [0, 200]
    assert len(list(tmp_path.iterdir())) == 2
    assert len(caplog.messages) == 2


def test_the_pool_unmaps_what_was_used_longest_ago(tmp_path: Path) -> None:
    pool = MappingPool(2)
    evicted: list[int] = []
    made = [Segment.create(tmp_path, base, 4096, 4096) for base in (0, 4096, 8192)]
    for segment in made[:2]:
        pool.add(segment, lambda gone: evicted.append(gone.base))
    assert pool.get(made[0].path) is made[0]
    pool.add(made[2], lambda gone: evicted.append(gone.base))
    assert evicted == [4096]
    assert pool.get(made[1].path) is None
    pool.clear()
    assert (sorted(evicted), len(pool)) == ([0, 4096, 8192], 0)


def test_the_pool_holds_one_descriptor_per_file(tmp_path: Path) -> None:
    pool = MappingPool(10)
    for base in range(0, 5 * 4096, 4096):
        pool.add(Segment.create(tmp_path, base, 4096, 4096), lambda gone: None)
    assert open_descriptors(tmp_path) == 5
    pool.clear()
    assert open_descriptors(tmp_path) == 0


def open_descriptors(directory: Path) -> int:
    """How many files of the directory are open; others come and go with threads and forgotten objects."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += link.readlink().is_relative_to(directory)
    return found
