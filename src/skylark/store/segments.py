"""Fixed-size mapped files, named by the 20-digit offset of their first byte.

A file gets its full size when it is created but no disk blocks: those are reserved step by step, ahead of the write
position. A write through a mapping into a hole of a full disk would kill the process with SIGBUS; asking for the blocks
first turns that into a `DiskFull` before a byte is written.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from skylark.store.api import DiskFull, NotWriteable, StoreError

log = logging.getLogger(__name__)

posix_fallocate = os.posix_fallocate  # replaced by tests that fill the disk

NAME_DIGITS = 20
_CUT_BYTES = 1 << 16
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OF_ALL = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EROFS)


def file_name(base: int) -> str:
    return f"{base:0{NAME_DIGITS}d}"


def list_bases(directory: Path, size_bytes: int) -> list[int]:
    """The start offsets of the files in a directory, in order. One that never got its size is removed: it is empty."""
    bases = []
    try:
        with os.scandir(directory) as entries:
            found = [(entry.name, entry.stat().st_size) for entry in entries if entry.is_file()]
    except FileNotFoundError:
        return []
    found = sorted((name, size) for name, size in found if len(name) == NAME_DIGITS and name.isdigit())
    for name, size in found:
        if size == 0:
            log.warning("%s is empty and is removed: its creation was interrupted", directory / name)
            (directory / name).unlink()
        elif size != size_bytes:
            raise StoreError(
                f"{directory / name} has {size} bytes, the configuration says {size_bytes}: set the mappedFileSize of "
                "these files to the size that they have, or, if this one alone was cut short, put a whole copy in its "
                "place; one of a queue may be moved away instead, and is made again from the log"
            )
        else:
            bases.append(int(name))
    return bases


def sync_data(fd: int, path: Path) -> None:
    """Brings what was written to a file to disk.

    Whatever a failure is called, it is raised as EIO: a disk that was full for a moment has room again, but the pages
    that it had no room for may be gone.
    """
    try:
        os.fdatasync(fd)
    except OSError as error:
        raise OSError(errno.EIO, f"{path}: {error.strerror}") from error


def sync_directory(directory: Path) -> None:
    """Makes the names of new files survive a power loss."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Segment:
    """One file under a mapping. The mapping is made when it is first needed."""

    __slots__ = ("_fd", "_map", "_view", "base", "named_on_disk", "path", "reserved_bytes", "size_bytes")

    def __init__(self, directory: Path, base: int, size_bytes: int) -> None:
        self.path = directory / file_name(base)
        self.base = base
        self.size_bytes = size_bytes
        self.reserved_bytes = 0  # blocks are known to be there up to here
        self.named_on_disk = True
        self._fd = -1
        self._map: mmap.mmap | None = None
        self._view: memoryview | None = None

    @classmethod
    def create(cls, directory: Path, base: int, size_bytes: int, reserve_bytes: int) -> Segment:
        """A new file with its first blocks; on a full disk nothing is left behind."""
        segment = cls(directory, base, size_bytes)
        segment.named_on_disk = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
            segment._fd = os.open(segment.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            os.ftruncate(segment._fd, size_bytes)
            segment.reserve(reserve_bytes)
            segment.map  # noqa: B018 -- mapped now: later it may be that no descriptor is left for it
        except (OSError, StoreError) as error:
            segment.close()
            with suppress(OSError):  # it can't be there if its directory can't
                segment.path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise store_error(error, f"cannot create {segment.path}") from error
            raise
        return segment

    @property
    def fd(self) -> int:
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        return self._fd

    @property
    def map(self) -> mmap.mmap:
        """The writable mapping."""
        if self._map is None:
            self._map = mmap.mmap(self.fd, self.size_bytes)
        return self._map

    @property
    def view(self) -> memoryview:
        """The read-only whole, to be sliced for readers."""
        if self._view is None:
            self._view = memoryview(self.map).toreadonly()
        return self._view

    def reserve(self, until_bytes: int) -> None:
        """Takes blocks up to a position in the file; `DiskFull` when there are none."""
        until_bytes = min(until_bytes, self.size_bytes)
        if until_bytes <= self.reserved_bytes:
            return
        try:
            posix_fallocate(self.fd, self.reserved_bytes, until_bytes - self.reserved_bytes)
        except OSError as error:
            raise store_error(error, f"cannot reserve space in {self.path}") from error
        self.reserved_bytes = until_bytes

    def write_from(self, position: int) -> None:
        """What comes from a position on is written next, and there is nothing to be read ahead: with the first byte the
        system would fill megabytes of memory with zeros, which takes a hundred times as long as everything else.
        """
        self.map.madvise(mmap.MADV_RANDOM, position - position % mmap.PAGESIZE)

    def release(self, until_bytes: int) -> None:
        """Lets go of the memory behind the mapping up to a position. The pages stay in the system's cache, dirty ones
        too, and are mapped again when they are read: only this process no longer counts as holding them."""
        whole_pages = until_bytes - until_bytes % mmap.PAGESIZE
        if self._map is not None and whole_pages > 0:
            self._map.madvise(mmap.MADV_DONTNEED, 0, whole_pages)

    def cut(self, position: int) -> bool:
        """Makes everything from a position on zeros. The file keeps its size, whenever the process is killed. Whether
        there was anything.
        """
        is_changed = False
        for start, end in self.written(position):
            for at in range(start, end, _CUT_BYTES):
                until = min(at + _CUT_BYTES, end)
                zeros = bytes(until - at)
                if self.map[at:until] != zeros:
                    os.pwrite(self.fd, zeros, at)
                    is_changed = True
        return is_changed

    def written(self, position: int) -> Iterator[tuple[int, int]]:
        """The parts of the file from a position on that are not holes, each from its beginning to its end."""
        while position < self.size_bytes:
            try:
                start = os.lseek(self.fd, position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return
                raise
            position = os.lseek(self.fd, start, os.SEEK_HOLE)
            yield start, position

    def sync(self) -> None:
        """Brings all written pages to disk. Raises OSError."""
        sync_data(self.fd, self.path)
        if not self.named_on_disk:
            sync_directory(self.path.parent)
            self.named_on_disk = True

    def release_fd(self) -> None:
        """Gives the descriptor back; the mapping keeps its own."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> bool:
        """Unmaps the file, unless a reader still holds a slice of it: then it says False and stays mapped."""
        if self._view is not None:
            self._view.release()
            self._view = None
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:
                return False
            self._map = None
        self.release_fd()
        return True

    def delete(self) -> bool:
        """Deletes the file, unless it is in use."""
        if not self.close():
            return False
        self.path.unlink(missing_ok=True)
        return True


def store_error(error: OSError, what: str) -> StoreError:
    """What a file's failure means to the store: `NotWriteable` if it has nothing to do with this one file."""
    if error.errno in _NO_SPACE:
        return DiskFull(f"{what}: {error.strerror}")
    kind = NotWriteable if error.errno in _OF_ALL else StoreError
    return kind(f"{what}: {error.strerror}")


class MappingPool:
    """A bounded number of mapped files: the one used longest ago is unmapped to make room for another.

    Only for files whose slices are copied out at once; their owners hear of an eviction and drop what they keep.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(capacity, 1)
        self._segments: dict[Path, tuple[Segment, Callable[[Segment], None]]] = {}

    def __len__(self) -> int:
        return len(self._segments)

    def get(self, path: Path) -> Segment | None:
        found = self._segments.pop(path, None)
        if found is None:
            return None
        self._segments[path] = found  # now the newest
        return found[0]

    def add(self, segment: Segment, on_evict: Callable[[Segment], None]) -> Segment:
        while len(self._segments) >= self._capacity:
            self.drop(next(iter(self._segments)))
        self._segments[segment.path] = (segment, on_evict)
        segment.map  # noqa: B018 -- mapped now, so that the descriptor can go
        segment.release_fd()
        return segment

    def drop(self, path: Path) -> None:
        found = self._segments.pop(path, None)
        if found is not None:
            segment, on_evict = found
            on_evict(segment)
            segment.close()

    def take_below(self, directories: Iterable[Path]) -> list[Segment]:
        """Gives the files below some directories, still mapped, to whoever closes them. Their owners are gone."""
        starts = tuple(f"{directory}/" for directory in directories)
        return [self._segments.pop(path)[0] for path in list(self._segments) if str(path).startswith(starts)]

    def clear(self) -> None:
        for path in list(self._segments):
            self.drop(path)
