"""A disk whose power can be cut: what was synced stays, of everything newer any part may be there or not.

`Disk` stands before `os.fdatasync` and `os.fsync` and keeps a copy of each file, and of the names in each directory, as
they were at their last sync. `cut` makes a directory from the copies: a file has its copy, with a random subset of the
4 KiB pages or 512 byte sectors that were written since, and a random choice of its two sizes; a name that was added,
removed or given to another file since is there or not, each by itself. A directory that got another name counts as two
such: it may be found under both, or none.

`live_through` lets a `Life`, a store or a broker in a directory, go on from one cut to the next. Some of the cuts are
kills: the process is gone, and its files stay as they are, what was not synced still at the mercy of the next cut.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from skylark.store.aside import Aside
from skylark.store.index import IndexFile
from skylark.store.lock import DirectoryLock
from skylark.store.segments import Segment
from store.small_store import MEMORY, START_MS

SEED = int(os.environ.get("SKYLARK_POWER_SEED", "0"))
CUTS_A_LIFE = 20  # of one directory


def cuts_wanted(usual: int) -> int:
    return int(os.environ.get("SKYLARK_POWER_CUTS", usual))


KILLS = 0.3  # of the cuts


class PowerCut(BaseException):
    """The power fails at this sync, which is not carried out."""


class NothingUnsynced(random.Random):
    """The worst of chances for a cut: nothing survives that was not synced."""

    def random(self) -> float:
        return 1.0

    def choice(self, of: Any) -> Any:
        return of[0]


class Disk:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, chance: random.Random) -> None:
        self._chance = chance
        self._held: dict[int, int] = {}  # a descriptor for each inode, so that no number is used again
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self.syncs_left: int | None = None
        for name in ("fdatasync", "fsync"):
            monkeypatch.setattr(os, name, self._sync)

    def _sync(self, descriptor: Any) -> None:
        if self.syncs_left is not None:
            self.syncs_left -= 1
            if self.syncs_left < 0:
                raise PowerCut
        fd = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        info = os.fstat(fd)
        if info.st_ino not in self._held:
            self._held[info.st_ino] = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)  # it may be open for writing only
        if stat.S_ISDIR(info.st_mode):
            with os.scandir(fd) as entries:
                self._names[info.st_ino] = {entry.name: self._hold(fd, entry.name) for entry in entries}
        else:
            self._contents[info.st_ino] = _content(self._held[info.st_ino])

    def _hold(self, directory: int, name: str) -> int:
        fd = os.open(name, os.O_RDONLY, dir_fd=directory)
        inode = os.fstat(fd).st_ino
        if self._held.setdefault(inode, fd) != fd:
            os.close(fd)
        return inode

    def forget(self) -> None:
        """For another directory: everything that is there now counts as never synced."""
        for fd in self._held.values():
            os.close(fd)
        self._held.clear()
        self._contents.clear()
        self._names.clear()
        self.syncs_left = None

    def settle(self, root: Path) -> None:
        """All that is there is on disk."""
        for directory, _, files in os.walk(root):
            for name in [".", *files]:
                fd = os.open(Path(directory, name), os.O_RDONLY)
                self._sync(fd)
                os.close(fd)

    def cut(self, root: Path, target: Path) -> None:
        """Makes `target` what a power cut leaves of `root`."""
        self.syncs_left = None
        fd = os.open(root, os.O_RDONLY)
        self._cut_directory(fd, target, os.fstat(fd).st_ino)
        os.close(fd)

    def _cut_directory(self, fd: int, target: Path, inode: int) -> None:
        target.mkdir()
        with os.scandir(fd) as entries:
            now = {entry.name: self._hold(fd, entry.name) for entry in entries}
        was = self._names.get(inode, {})
        pick = self._chance.choice((0.0, 0.5, 1.0))  # none, some or all of what changed
        for name in sorted(now.keys() | was.keys()):
            there = now.get(name) if now.get(name) == was.get(name) or self._chance.random() < pick else was.get(name)
            if there is None:
                continue
            held = self._held[there]
            if stat.S_ISDIR(os.fstat(held).st_mode):
                self._cut_directory(held, target / name, there)
            else:
                (target / name).write_bytes(self._cut_file(held, there))

    def _cut_file(self, fd: int, inode: int) -> bytes:
        now, was = _content(fd), self._contents.get(inode, b"")
        if now == was:
            return now
        chance = self._chance
        size = len(now) if chance.random() < 0.5 else len(was)
        left = bytearray(was[:size].ljust(size, b"\0"))
        unit = chance.choice((512, 4096))
        pick = chance.choice((0.0, 0.2, 0.5, 0.8, 1.0))
        for at in range(0, size, unit):
            if chance.random() < pick:
                left[at : at + unit] = now[at : at + unit].ljust(min(unit, size - at), b"\0")
        return bytes(left)


def _content(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


class Life:
    """Something that lives in the directory `root`, until its power was cut some times."""

    def __init__(self, directory: Path, disk: Disk, chance: random.Random) -> None:
        self._directory = directory
        self._disk = disk
        self.chance = chance
        self.now_ms = START_MS
        self.root = directory / "0"
        self.root.mkdir()
        disk.settle(self.root)

    def step(self) -> None:
        """Opens it, if it is not, and checks what the cut left; else does something by chance."""
        raise NotImplementedError

    def finish(self) -> None:
        """Power stays: what must still be there is looked for, and all is closed."""
        raise NotImplementedError

    def abandon(self) -> None:
        """The power is gone, or the process. Lets go of what is open; nothing of that reaches the disk any more."""
        raise NotImplementedError

    def run(self, cuts: int) -> None:
        for number in range(1, cuts + 1):
            # At once, during recovery, or at a sync of later.
            self._disk.syncs_left = self.chance.choice((1, 4, 10, 30, 60, 100))
            try:
                while True:
                    self.step()
            except PowerCut:
                if self.chance.random() < KILLS:
                    self._kill()
                else:
                    self._cut(self._directory / str(number))
        self.finish()

    def _kill(self) -> None:
        self._disk.syncs_left = 0
        with suppress(PowerCut):
            self.abandon()
        self._disk.syncs_left = None
        _close_what_is_left()

    def _cut(self, target: Path) -> None:
        self._disk.cut(self.root, target)
        with suppress(PowerCut):
            self.abandon()
        self._disk.forget()
        shutil.rmtree(self.root)
        self.root = target
        self._disk.settle(target)


def live_through(
    monkeypatch: pytest.MonkeyPatch, cuts: int, begin: Callable[[Path, Disk, random.Random], Life]
) -> None:
    """As many lives as it takes; a failure tells the seed that shows it."""
    for life in range(-(-cuts // CUTS_A_LIFE)):
        seed = SEED + life
        chance = random.Random(seed)
        random.seed(seed)  # for what is left to chance by a broker
        directory = Path(mkdtemp(dir=MEMORY))
        with monkeypatch.context() as patch:
            disk = Disk(patch, chance)
            patch.setattr(Aside, "start", lambda aside: None)  # a life does what this thread does
            gc.disable()
            try:
                begin(directory, disk, chance).run(CUTS_A_LIFE)
            except Exception as error:
                raise AssertionError(f"SKYLARK_POWER_SEED={seed} shows it") from error
            finally:
                disk.forget()
                _close_what_is_left()
                gc.enable()
        shutil.rmtree(directory)


def _close_what_is_left() -> None:
    """What stores had open when their power was cut."""
    for left in gc.get_objects():
        if isinstance(left, Segment) or (isinstance(left, IndexFile) and not left.map.closed):
            left.close()
        elif isinstance(left, DirectoryLock):
            left.release()
