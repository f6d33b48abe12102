"""One process per store directory.

Apache locks the first byte of `<root>/lock` with a POSIX record lock; an open file description lock on that byte
conflicts with it, and unlike it also with a second store of the same process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

from skylark.store.api import StoreLocked

_FLOCK = struct.Struct("hhqqi")  # Linux: type, whence, start, length, process


class DirectoryLock:
    """Held from construction to `release`; `StoreLocked` when somebody else has it."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        except OSError as error:
            os.close(self._fd)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise StoreLocked(f"{path.parent} is in use by another broker (it holds {path.name})") from error
            raise
        os.pwrite(self._fd, b"lock", 0)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
