"""A disk whose power can be cut: what was synced stays, of everything newer any part may be there or not.

`Disk` stands before `os.fdatasync` and `os.fsync` and keeps a copy of each file, and of the names in each directory, as
they were at their last sync. `cut` makes a directory from the copies: a file has its copy, with a random subset of the
4 KiB pages or 512 byte sectors that were written since, and a random choice of its two sizes; a name that was added,
removed or given to another file since is there or not, each by itself.
"""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path
from typing import Any

import pytest


class PowerCut(BaseException):
    """The power fails at this sync, which is not carried out."""


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
