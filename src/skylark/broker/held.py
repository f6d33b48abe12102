"""Tables that must not be on disk before the log is: how far somebody has come in queues, whose messages the log holds.

Such a table is captured together with the end of the log, and written once the log is flushed that far, however much
was appended since. So after a power cut no table tells of something that the log has lost; and under a steady load,
when the newest messages never are on disk, each capture is nevertheless written, one flush later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from skylark.store import Store

T = TypeVar("T")


class HeldTable(Generic[T]):
    """One table, or some that belong together, on the way to the disk."""

    def __init__(self, store: Store, write: Callable[[T], None]) -> None:
        """`write` brings a captured table to disk, or raises OSError."""
        self._store = store
        self._write = write
        self._held: tuple[int, T] | None = None

    def save(self, capture: Callable[[], T | None]) -> None:
        """Writes what is held, if that may be, and then captures what is to be written next; None if nothing changed.

        While something is held, nothing newer takes its place: it would have to wait for a later end of the log, and
        under load that never comes. Raises OSError.
        """
        self.write()
        if self._held is None:
            log_end = self._store.log_max_offset
            table = capture()
            if table is not None:
                self._held = log_end, table
                self.write()

    def write(self) -> None:
        """Writes what is held, if the log is on disk up to where it ended then. Raises OSError: it is still held."""
        if self._held is not None and self._store.flushed_offset >= self._held[0]:
            self._write(self._held[1])
            self._held = None
