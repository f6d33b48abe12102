"""Pages of the log are made ready ahead of a writer that needs them soon."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from skylark.store.ahead import PagesAhead
from skylark.store.commitlog import CommitLog

PIECE = 1 << 20


def resident_bytes(path: Path) -> int:
    """How much of a file is in the memory of this process, by its mappings."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    return sum(
        int(next(line for line in lines if line.startswith("Rss:")).split()[1]) << 10
        for line in lines
        if line.endswith(str(path))
    )


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[tuple[Path, mmap.mmap]]:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * PIECE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        yield path, pages


def test_pages_are_there_before_they_are_written(mapped: tuple[Path, mmap.mmap]) -> None:
    path, pages = mapped
    assert resident_bytes(path) == 0
    ahead = PagesAhead()
    ahead.ask(pages, PIECE, PIECE)
    ahead.stop()
    assert ahead.failure is None
    assert resident_bytes(path) >= PIECE
    assert pages[:] == bytes(4 * PIECE)


def test_a_system_that_can_not_do_it_is_not_asked_again(mapped: tuple[Path, mmap.mmap]) -> None:
    path, pages = mapped
    ahead = PagesAhead()
    ahead.ask(pages, 1, PIECE)  # no page begins there
    ahead.stop()
    assert ahead.failure == "Invalid argument"
    ahead.ask(pages, 0, PIECE)
    ahead.stop()
    assert resident_bytes(path) == 0


@pytest.mark.parametrize(("seconds_a_piece", "pieces"), [(0.05, [2, 3, 4, 5]), (0.5, [])])
def test_the_log_asks_when_it_grows_quickly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds_a_piece: float, pieces: list[int]
) -> None:
    asked: list[int] = []

    class Recorder(PagesAhead):
        def ask(self, pages: mmap.mmap, start: int, size: int) -> None:
            asked.append(start // size)

    commit_log = CommitLog(tmp_path, 64 * PIECE)
    commit_log._ahead = Recorder()
    clock = count(100)
    monkeypatch.setattr("time.monotonic", lambda: next(clock) * seconds_a_piece)
    for _ in range(4 * 8):
        commit_log.make_room(PIECE // 8)
        commit_log.write(bytes(PIECE // 8))
    assert asked == pieces
    commit_log.close()
