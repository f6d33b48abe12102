"""One process per store directory.

Apache locks the first byte of `<root>/lock` with a POSIX record lock; an open file description lock on that byte
conflicts with it, and unlike it also with a second store of the same process. The directories themselves are locked as
well: a file that somebody deletes protects nothing any more, and a log may lie outside of the root.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
from pathlib import Path

from skylark.store.api import StoreLocked

log = logging.getLogger(__name__)

_FLOCK = struct.Struct("hhqqi")  # Linux: type, whence, start, length, process
_HELD = (errno.EACCES, errno.EAGAIN)


class DirectoryLock:
    """Held from construction to `release`; `StoreLocked` when somebody else has the file or one of the directories."""

    def __init__(self, path: Path, *directories: Path) -> None:
        self._fds: list[int] = []
        try:
            self._lock_file(path)
            for directory in dict.fromkeys(each.resolve() for each in directories):
                self._lock_directory(directory)
        except BaseException:
            self.release()
            raise
        os.pwrite(self._fds[0], b"lock", 0)

    def _lock_file(self, path: Path) -> None:
        self._fds.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        try:
            fcntl.fcntl(self._fds[-1], fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        except OSError as error:
            if error.errno in _HELD:
                raise StoreLocked(f"{path.parent} is in use by another broker (it holds {path.name})") from error
            raise

    def _lock_directory(self, directory: Path) -> None:
        self._fds.append(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            fcntl.flock(self._fds[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise StoreLocked(f"{directory} is in use by another broker (it holds the directory)") from error
            log.info("%s can't be locked, only the file in it: %s", directory, error)  # as over NFS

    def release(self) -> None:
        while self._fds:
            os.close(self._fds.pop())
