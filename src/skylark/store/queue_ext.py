"""Tag codes that Apache's broker keeps outside the queues, with `enableConsumeQueueExt=true`.

The tag field of such a queue entry is an address: the least 64-bit number plus an offset into the files of
`<root>/consumequeue_ext/<topic>/<queue id>/`, where a unit lies. A unit, big endian:

    size i16 | tag code i64 | store time i64 | bit map size i16 | bit map

Addresses are below every tag code. Apache does not rely on the units, which a crash may lose; then the code comes from
the message itself. Skylark writes codes into the queue and no units, which Apache reads as well.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

from skylark.store.segments import file_name

EXT_DIRECTORY: Final = "consumequeue_ext"
_FIRST_ADDRESS: Final = -(2**63)
_LAST_ADDRESS: Final = -(2**31) - 1
_ENTRY: Final = struct.Struct(">qiq")
_CODE: Final = struct.Struct(">q")
_CODE_AT: Final = 12
_UNIT: Final = struct.Struct(">hq")


def is_address(code: int) -> bool:
    return code <= _LAST_ADDRESS


class ExtUnits:
    """The units of one queue."""

    def __init__(self, directory: Path, code_of: Callable[[int], int]) -> None:
        """`code_of` gives the code of the message at a log offset."""
        self._directory = directory
        self._code_of = code_of
        sizes = [path.stat().st_size for path in directory.glob("[0-9]*")] if directory.is_dir() else []
        self._file_bytes = max(sizes, default=0)

    def plain(self, entries: bytes) -> bytes:
        """Queue entries, with codes in place of addresses."""
        result = bytearray(entries)
        fd, fd_base = -1, -1
        try:
            for at, (log_offset, _, code) in enumerate(_ENTRY.iter_unpack(entries)):
                if not is_address(code):
                    continue
                offset = code - _FIRST_ADDRESS
                base = offset - offset % self._file_bytes if self._file_bytes else -1
                if base != fd_base:
                    fd, fd_base = self._opened(base, fd), base
                found = _code_in(fd, offset - base)
                found = self._code_of(log_offset) if found is None else found
                _CODE.pack_into(result, at * _ENTRY.size + _CODE_AT, found)
        finally:
            _close(fd)
        return bytes(result)

    def _opened(self, base: int, former: int) -> int:
        """The file that starts at an offset, or -1, in place of the one that was open."""
        _close(former)
        try:
            return os.open(self._directory / file_name(base), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return -1


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def _code_in(fd: int, at: int) -> int | None:
    """The code of the unit at a position of a file; None when there is none."""
    data = os.pread(fd, _UNIT.size, at) if fd >= 0 else b""
    if len(data) < _UNIT.size:
        return None
    size, code = _UNIT.unpack(data)
    return int(code) if size > 0 else None
