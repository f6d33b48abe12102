"""Tables that must not be on disk before the log is: how far somebody has come in queues, whose messages the log holds.

Such a table is captured together with the end of the log, and written once the log is flushed that far, however much
was appended since. So after a power cut no table tells of something that the log has lost; and under a steady load,
when the newest messages never are on disk, each capture is nevertheless written, one flush later.

A thread writes, between `write_in_background` and `write_at_once`: while a broker starts or stops, nobody waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from skylark.store import Store

log = logging.getLogger(__name__)

T = TypeVar("T")


class HeldTable(Generic[T]):
    """One table, or some that belong together, on the way to the disk."""

    def __init__(
        self, store: Store, write: Callable[[T], None], written: Callable[[T], None] = lambda table: None
    ) -> None:
        """`write` brings a captured table to disk, or raises OSError; it may be called in a thread, but once at a time.
        `written` is told afterwards, and is not.
        """
        self._store = store
        self._write = write
        self._written = written
        self._held: tuple[int, T] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writing: asyncio.Future[None] | None = None

    def write_in_background(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def write_at_once(self) -> None:
        """The loop ends soon. Returns when no thread writes any more."""
        self._loop = None
        if self._writing is not None:
            await asyncio.wait([self._writing])

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
        """Writes what is held, if the log is on disk up to where it ended then. What can't be written is still held:
        raises OSError then, or logs it if a thread writes.
        """
        if self._held is None or self._writing is not None or self._store.flushed_offset < self._held[0]:
            return
        table = self._held[1]
        if self._loop is None:
            self._write(table)
            self._release(table)
        else:
            self._writing = self._loop.run_in_executor(None, self._write, table)
            self._writing.add_done_callback(partial(self._ended, table))

    def _ended(self, table: T, writing: asyncio.Future[None]) -> None:
        self._writing = None
        if writing.cancelled():
            return
        failure = writing.exception()
        if failure is None:
            self._release(table)
        else:
            unexpected = None if isinstance(failure, OSError) else failure
            log.error("a table can't be written, and is tried again: %s", failure, exc_info=unexpected)

    def _release(self, table: T) -> None:
        self._held = None
        self._written(table)
