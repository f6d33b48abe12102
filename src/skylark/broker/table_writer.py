"""Brings a broker's tables to disk beside the event loop: a table that changes is copied, and a thread writes the copy.

What changes while a copy is written is part of the next one, however many changes that are. Whoever has to know that a
change is on disk waits for it, or is called; both learn why a table could not be written. Such a table is tried again
with the next change, and by `save` every few seconds.

Until `write_in_background`, and after `write_at_once`, each change is written before `changed` returns: while a broker
starts or stops, nobody waits.

Entries keep the JSON that they were written as, so that a change costs its own entry, and not the whole table.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

from skylark.net.connection import RequestFailed
from skylark.store.tables import save
from skylark.wire import fastjson
from skylark.wire.codes import ResponseCode
from skylark.wire.tables import DataVersion

log = logging.getLogger(__name__)

MAX_IDLERS: Final = 64
"""Changes that wait for one of the same entry."""
_SHOWN: Final = 20

Done = Callable[[Exception | None], None]
"""Told that a change is on disk, or why it is not."""
Rendered = Callable[[], msgspec.Struct]
"""Gives the table of a copy; called in the thread."""


class TableWriter:
    """One table's way to its file."""

    def __init__(self, path: Path, capture: Callable[[], Rendered]) -> None:
        """`capture` copies the table, in as little time as that takes."""
        self._path = path
        self._capture = capture
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changes = 0
        self._saved = 0  # of the changes
        self._on_disk = 0  # the same, for whoever holds the lock
        self._is_writing = False
        self._waiting: list[tuple[int, Done]] = []
        self._file = threading.Lock()

    def write_in_background(self) -> None:
        self._loop = asyncio.get_running_loop()

    def write_at_once(self) -> None:
        """The loop ends soon."""
        self._loop = None

    @property
    def is_saved(self) -> bool:
        return self._saved == self._changes

    def changed(self, done: Done | None = None) -> None:
        """The table has changed."""
        self._changes += 1
        if done is not None:
            self._waiting.append((self._changes, done))
        self._attempt()

    async def written(self) -> None:
        """Returns when all changes so far are on disk. Raises what kept them from it."""
        if self.is_saved:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._changes, partial(settle, future)))
        self._attempt()
        await future

    def save(self) -> None:
        """Writes what the disk does not have; before it returns, and raises OSError, unless in the background."""
        if self.is_saved:
            return
        if self._loop is not None:
            self._attempt()
            return
        number, failure = self._changes, None
        try:
            self._write(number, self._capture())
        except OSError as e:
            failure = e
        self._settle(number, failure)
        if failure is not None:
            raise failure

    def _attempt(self) -> None:
        if self._loop is None:
            try:
                self.save()
            except OSError as e:
                log.error("%s can't be written, and is tried again: %s", self._path, _reason(e))
        elif not self._is_writing:
            self._is_writing = True
            number = self._changes
            writing = self._loop.run_in_executor(None, self._write, number, self._capture())
            writing.add_done_callback(partial(self._written, number))

    def _write(self, number: int, rendered: Rendered) -> None:
        with self._file:
            if number > self._on_disk:  # else somebody who could not wait has written a later copy
                save(self._path, rendered())
                self._on_disk = number

    def _written(self, number: int, writing: asyncio.Future[None]) -> None:
        self._is_writing = False
        if writing.cancelled():
            return
        failure = writing.exception()
        assert failure is None or isinstance(failure, Exception)
        if failure is not None:
            log.error("%s can't be written, and is tried again: %s", self._path, _reason(failure))
        self._settle(number, failure)
        if self._changes > number:
            self._attempt()

    def _settle(self, number: int, failure: Exception | None) -> None:
        if failure is None:
            self._saved = max(self._saved, number)
        told = [done for change, done in self._waiting if change <= number]
        self._waiting = [(change, done) for change, done in self._waiting if change > number]
        for done in told:
            done(failure)


def settle(future: asyncio.Future[None], failure: Exception | None) -> None:
    """Lets a future that nobody may wait for any more tell of the end of a write."""
    if future.done():
        return
    if failure is None:
        future.set_result(None)
    else:
        future.set_exception(failure)


def not_written(what: str, failure: Exception) -> RequestFailed:
    """The answer to a request whose change is not on disk."""
    if isinstance(failure, RequestFailed):
        return failure
    return RequestFailed(ResponseCode.SYSTEM_ERROR, f"{what}: its table can't be written: {_reason(failure)}")


def _reason(failure: Exception) -> str:
    """What went wrong, without the file's name, which clients need not know and the log has said."""
    return failure.strerror if isinstance(failure, OSError) and failure.strerror else str(failure)


T = TypeVar("T", bound=msgspec.Struct)


class EntryTable(Generic[T]):
    """Structs by name, with a version, in a file. A struct that is in the table must not change but be replaced."""

    def __init__(
        self,
        path: Path,
        kind: str,
        entries: dict[str, T],
        version: DataVersion,
        clock: Callable[[], int],
        rendered: Callable[[], Callable[[DataVersion, fastjson.EncodedMap], msgspec.Struct]],
        on_change: Callable[[list[T]], None] = lambda changed: None,
    ) -> None:
        """`kind` is what an entry is called. `rendered` copies what else is in the file, and gives what makes the
        file's table of that and the entries. `on_change` learns of each change that can be seen.
        """
        self.entries = entries
        self.version = version
        self._kind = kind
        self._clock = clock
        self._rendered = rendered
        self._on_change = on_change
        self._coming: dict[str, T] = {}
        self._idlers: dict[str, list[asyncio.Future[None]]] = {}  # by the entry that they wait for
        self._rows: dict[str, tuple[T, str]] = {}
        self.writer = TableWriter(path, self._capture)

    def __len__(self) -> int:
        """With those that are on their way."""
        return len(self.entries) + sum(name not in self.entries for name in self._coming)

    def changed(self) -> None:
        """What else is in the file has changed. It is written soon, and until then holds in memory only."""
        self.version.next_version(self._clock())
        self.writer.changed()

    def put(self, entries: Mapping[str, T]) -> None:
        """Adds or replaces entries, as one change, which is written soon."""
        self._enter(entries)
        self.changed()
        self._on_change(list(entries.values()))

    def delete(self, name: str) -> T | None:
        was_coming = self._coming.pop(name, None) is not None
        entry = self.entries.pop(name, None)
        if entry is not None or was_coming:
            log.info("deleted %s %s", self._kind, name)
            self.changed()
            self._on_change([])
        return entry

    async def idle(self, names: Collection[str]) -> None:
        """Returns when no change of these entries is on its way: one after the other, each builds on the one before.

        Whoever waits is woken when the entry is written that it waits for, and others may be first then: each of them
        costs a little with every change, so that only so many may wait. Raises RequestFailed for one more.
        """
        while (name := next((name for name in names if name in self._coming), None)) is not None:
            idlers = self._idlers.setdefault(name, [])
            if len(idlers) >= MAX_IDLERS:
                raise RequestFailed(
                    ResponseCode.SYSTEM_BUSY,
                    f"{len(idlers)} changes of {self._kind} {name:.255s} wait already: try again later",
                )
            idler: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            idlers.append(idler)
            await idler

    async def create(self, entries: Mapping[str, T]) -> None:
        """Adds or replaces entries, as one change, once they are on disk: nobody sees them before. Raises what kept
        them from it, and then nothing has changed.
        """
        await self.idle(entries.keys())
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(failure: Exception | None) -> None:
            # What was deleted meanwhile is left alone. Whether anybody still waits does not matter.
            ours = {name: entry for name, entry in entries.items() if self._coming.get(name) is entry}
            for name in ours:
                del self._coming[name]
            if failure is None and ours:
                self._enter(ours)
                self.version.next_version(self._clock())
                self._on_change(list(ours.values()))
            settle(future, failure)
            for name in entries:
                for idler in self._idlers.pop(name, ()):
                    settle(idler, None)

        self._coming.update(entries)
        self.writer.changed(done)
        await future

    def _enter(self, entries: Mapping[str, T]) -> None:
        for name, entry in islice(entries.items(), _SHOWN):
            log.info("%s %s %s", "changed" if name in self.entries else "created", self._kind, entry)
        if len(entries) > _SHOWN:
            log.info("created or changed %d more of %ss", len(entries) - _SHOWN, self._kind)
        self.entries.update(entries)

    def encoded(self, entries: Mapping[str, T]) -> fastjson.EncodedMap:
        """Entries of the table as JSON; any thread may ask."""
        return fastjson.EncodedMap([self._row(name, entry)[1] for name, entry in entries.items()])

    def _row(self, name: str, entry: T) -> tuple[T, str]:
        row = self._rows.get(name)
        return row if row is not None and row[0] is entry else (entry, fastjson.encode_entry(name, entry, pretty=True))

    def _capture(self) -> Rendered:
        version = msgspec.structs.replace(self.version)
        if self._coming:
            version.next_version(self._clock())
        entries, render = self.entries | self._coming, self._rendered()
        return lambda: render(version, self._encode(entries))

    def _encode(self, entries: Mapping[str, T]) -> fastjson.EncodedMap:
        """The whole table; in the thread. Keeps what it encoded, and forgets what is gone."""
        rows = {name: self._row(name, entry) for name, entry in entries.items()}
        self._rows = rows
        return fastjson.EncodedMap([text for _, text in rows.values()])
