"""How far the store's files were known to be on disk, kept so that recovery need not start from the beginning.

Apache's checkpoint file: 4096 bytes, big-endian signed 64-bit integers at these places, the rest is zero.

     0  store time of the newest message whose log page was flushed, ms
     8  store time of the newest message whose queue entry was flushed, ms
    16  end time of the newest full index file that was flushed, ms
    24  log offset up to which the master had flushed (a slave's view)
    32  log offset up to which the replicas had confirmed
    40  log offset of the newest message whose queue entry was flushed
    48  ours: log offset below which the index is on disk (Apache leaves these bytes alone)
    56  ours: end of the log at the last clean stop, when the queues were counted
    64  ours: how many queues had entries then
    72  ours: how many entries they had, from the first that was ever written
    80  ours: for how many of those there were files

The values only ever let recovery start later, so a lost or older checkpoint costs time and nothing else; but for the
count, which tells that queue files were lost while the store was closed. The file is written in place by one call that
fits a disk sector.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

FILE_BYTES = 4096
_FIELDS = struct.Struct(">11q")
# A message and its queue entry are flushed at different moments; Apache steps back this far to be sure of both.
_SAFETY_MS = 3000


class Checkpoint:
    """The values of the file, which is read on construction; change them and call `flush`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.physic_ms = 0
        self.logics_ms = 0
        self.index_ms = 0
        self.master_flushed_offset = 0
        self.confirm_offset = 0
        self.logics_offset = 0
        self.index_log_offset = 0
        self.counted_log_end = 0
        self.queue_count = 0
        self.queue_entries = 0
        self.stored_entries = 0
        self.load()

    def load(self) -> None:
        """Reads the file; what is missing, or negative because the file is damaged, counts as 0."""
        try:
            with self._path.open("rb") as file:
                data = file.read(_FIELDS.size)
        except FileNotFoundError:
            data = b""
        values = _FIELDS.unpack(data.ljust(_FIELDS.size, b"\0"))
        (
            self.physic_ms,
            self.logics_ms,
            self.index_ms,
            self.master_flushed_offset,
            self.confirm_offset,
            self.logics_offset,
            self.index_log_offset,
            self.counted_log_end,
            self.queue_count,
            self.queue_entries,
            self.stored_entries,
        ) = (max(value, 0) for value in values)

    def flush(self) -> None:
        """Writes the values and waits until they are on disk. Raises OSError."""
        data = _FIELDS.pack(
            self.physic_ms,
            self.logics_ms,
            self.index_ms,
            self.master_flushed_offset,
            self.confirm_offset,
            self.logics_offset,
            self.index_log_offset,
            self.counted_log_end,
            self.queue_count,
            self.queue_entries,
            self.stored_entries,
        )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(fd).st_size < FILE_BYTES:
                os.posix_fallocate(fd, 0, FILE_BYTES)
            os.pwrite(fd, data, 0)
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def min_timestamp_ms(self, with_index: bool) -> int:
        """Messages stored before this time are on disk, with their queue entries and, if asked for, their index."""
        safe_ms = max(min(self.physic_ms, self.logics_ms) - _SAFETY_MS, 0)
        return min(safe_ms, self.index_ms) if with_index else safe_ms
