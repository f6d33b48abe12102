"""Which topics were deleted, and where the log ended then: what it holds of them below that is never queued again.

The file has a line of JSON for each deletion, `[log offset, topic]`, of which the last for a topic counts. A line is on
disk before the topic's queues go. A last line that a crash cut short belongs to a deletion that was not carried out.

The table of consumer offsets has such a file of its own, with its version in place of the log offset.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from skylark.store.segments import sync_directory

log = logging.getLogger(__name__)

_Line = tuple[int, str]


class DeletedTopics:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: dict[str, int] = {}
        data = path.read_bytes() if path.exists() else b""
        if data:
            self._bring_to_disk()
        for line in filter(None, data.split(b"\n")):
            try:
                log_offset, topic = msgspec.json.decode(line, type=_Line)
            except msgspec.DecodeError as error:
                log.warning("%s: a line is passed over: %s", path, error)
            else:
                self._offsets[topic] = log_offset

    def offset(self, topic: str) -> int:
        """Below this log offset, records of the topic are of one that was deleted."""
        return self._offsets.get(topic, 0)

    @property
    def highest(self) -> int:
        return max(self._offsets.values(), default=0)

    def add(self, topics: Collection[str], log_offset: int) -> None:
        """Notes that topics are deleted now, and brings that to disk. Raises OSError."""
        is_new = not self._path.exists()
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            # On a line of its own, whatever a crash left of the last one.
            data = b"".join(b"\n" + msgspec.json.encode((log_offset, topic)) + b"\n" for topic in topics)
            if os.write(fd, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fdatasync(fd)
        finally:
            os.close(fd)
        if is_new:
            sync_directory(self._path.parent)
        self._offsets.update(dict.fromkeys(topics, log_offset))

    def _bring_to_disk(self) -> None:
        """What is built upon from here on: a process that was killed may have left its last line in memory only."""
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
        sync_directory(self._path.parent)

    def keep_within(self, log_min_offset: int, log_end_offset: int) -> None:
        """Forgets what the log holds nothing of, before anything is appended to it. Raises OSError.

        A log that ends earlier than it did, since a crash took its end or somebody removed it, is written again from
        there on: what it gets then was not deleted. What else there is to forget may wait until the disk has room.
        """
        kept = {
            topic: min(log_offset, log_end_offset)
            for topic, log_offset in self._offsets.items()
            if min(log_offset, log_end_offset) > log_min_offset
        }
        if kept == self._offsets:
            return
        is_shorter = self.highest > log_end_offset
        self._offsets = kept
        try:
            self._replace()
        except OSError as error:
            if is_shorter:
                raise
            log.warning("%s is longer than it needs to be: %s", self._path, error)

    def _replace(self) -> None:
        fresh = self._path.with_name(self._path.name + ".tmp")
        with fresh.open("wb") as file:
            file.writelines(msgspec.json.encode((offset, topic)) + b"\n" for topic, offset in self._offsets.items())
            file.flush()
            os.fdatasync(file.fileno())
        fresh.replace(self._path)
        sync_directory(self._path.parent)
