"""A directory of files that is replaced as a whole: whoever lists it finds all of one snapshot or all of another.

    PATH/part-*.parquet                what it is
    PATH/_compact                      what it was made of; a directory without it is not replaced
    .NAME.compact-3f2a…, beside PATH   a snapshot that is being written, or one that was replaced

A snapshot is written aside, with its mark last, and then changes places with the one before, in one step where the file
system can: Linux on a local disk. Elsewhere it takes two renames. A process that dies between them leaves no snapshot
at PATH, and two whole ones beside it: the next run puts the newer one there before it does anything else.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import datetime
from typing import Final, Protocol

import msgspec

from skylark.pipelines.errors import PipelineError

_MARK: Final = "_compact"


class Store(Protocol):
    """The files beside the snapshot; see `Files`."""

    @property
    def root(self) -> str: ...
    def exists(self, name: str) -> bool: ...
    def names(self, name: str = "") -> list[str]: ...
    def read(self, name: str) -> str | None: ...
    def write(self, name: str, text: str) -> None: ...
    def rename(self, old: str, new: str) -> None: ...
    def exchange(self, one: str, other: str) -> bool: ...
    def delete(self, name: str) -> None: ...


class Made(msgspec.Struct, frozen=True):
    """What is needed of a mark: which of two snapshots is the newer one."""

    finished: datetime


class Snapshot:
    """The directory `name` among the files of `beside`."""

    def __init__(self, beside: Store, name: str) -> None:
        """Puts a snapshot in its place if a process died. Raises PipelineError for a directory with other files."""
        self._beside = beside
        self._name = name
        self._aside = f".{name}.compact-"
        if not beside.exists(name):
            whole = [(made.finished, each) for each in self._others() if (made := self._made(each)) is not None]
            if whole:
                beside.rename(max(whole)[1], name)
        if beside.names(name) and not beside.exists(f"{name}/{_MARK}"):
            raise PipelineError(
                f"{beside.root}/{name} has files that are no snapshot of compact: choose another directory"
            )

    def replace(self, write: Callable[[str], bytes]) -> None:
        """`write` fills a directory of that name, and returns the text of the mark."""
        fresh = f"{self._aside}{uuid.uuid4().hex}"
        mark = write(fresh)
        self._beside.write(f"{fresh}/{_MARK}", mark.decode())
        if not self._beside.exists(self._name):
            self._beside.rename(fresh, self._name)
        elif not self._beside.exchange(fresh, self._name):
            self._beside.rename(self._name, f"{self._aside}{uuid.uuid4().hex}")
            self._beside.rename(fresh, self._name)
        for other in self._others():
            self._beside.delete(other)

    def _others(self) -> list[str]:
        return [name for name in self._beside.names() if name.startswith(self._aside)]

    def _made(self, name: str) -> Made | None:
        text = self._beside.read(f"{name}/{_MARK}")
        return None if text is None else msgspec.json.decode(text, type=Made)
