"""Directories that are to be deleted: they get another name at once, and a thread deletes what is in them.

A topic may have 65,536 queues, whose files take half a minute to delete. So its directory becomes
`<parent>/.deleted/topic-<number>`, where neither this store nor Apache's looks for queues, and its own name is free
again. The new name is on disk before the first file goes: a power cut brings all of them back, or none. What a stop or
a crash leaves over is deleted after the next start.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final

from skylark.store.segments import sync_directory

log = logging.getLogger(__name__)

DELETED: Final = ".deleted"


class Aside:
    """What of some directories is being deleted."""

    def __init__(self, *parents: Path) -> None:
        """Finds what is left over; it is deleted after `start`."""
        self._places = [parent / DELETED for parent in parents]
        self._numbers = count()
        self._work: deque[Iterator[None]] = deque()
        self._working = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        for place in self._places:
            if place.is_dir():
                self._work.extend(_deleting(each) for each in sorted(place.iterdir()))

    def put(self, directory: Path) -> None:
        """Moves a directory aside, if it is there, to be deleted. Raises OSError, and then it is where it was."""
        if not directory.is_dir():
            return
        place = directory.parent / DELETED
        place.mkdir(exist_ok=True)
        while (target := place / f"topic-{next(self._numbers)}").exists():
            pass
        directory.rename(target)
        self.add(_deleting(target))

    def add(self, work: Iterator[None]) -> None:
        """Has the thread do something else in small steps, which touch nothing that others use."""
        self._work.append(work)
        self.start()

    def start(self) -> None:
        """Starts the thread, if there is something for it to do."""
        if self._thread is None and self._work:
            self._thread = threading.Thread(target=self._run, name="skylark-delete", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:
                self._thread = None
                log.error("what was deleted takes space until a thread can be started: %s", error)
        self._wake.set()

    def close(self) -> None:
        """Ends the thread, which may leave something over."""
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self._work.clear()
        for place in self._places:
            with suppress(OSError):  # it is not there, or not empty
                place.rmdir()

    # --- the thread ---------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._closing:
            if not self.turn():
                self._wake.wait()
                self._wake.clear()

    def turn(self) -> bool:
        """Does a step of the work; whether there was any."""
        with self._working:
            if not self._work:
                return False
            try:
                next(self._work[0])
            except StopIteration:
                self._work.popleft()
            except OSError as error:
                self._work.popleft()
                log.error("what was deleted takes space until the next start: %s", error)
            return True


def _deleting(directory: Path) -> Iterator[None]:
    """Deletes a directory, in steps."""
    for parent in (directory.parent.parent, directory.parent):
        sync_directory(parent)
    with os.scandir(directory) as entries:
        queues = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    for queue in queues:
        yield
        shutil.rmtree(queue)
    shutil.rmtree(directory)
