"""Pages of the log made ready before they are written to.

The first write to a page of a mapped file waits until the system has found and zeroed memory for it: a microsecond, or
ten where the machine is virtual. Under load a thread has that done ahead of the writer, on another core. A page that is
ready counts as written, and may reach the disk as zeros before its content does: so it is done only while the log grows
quickly, and only a little way ahead.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import queue
import threading
from typing import Final

log = logging.getLogger(__name__)

_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14


class PagesAhead:
    """The thread; it starts when it is first asked for pages."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.failure: str | None = None

    def ask(self, pages: mmap.mmap, start: int, size: int) -> None:
        """Has `size` bytes of a mapping made ready, some time soon. Both numbers are whole pages."""
        if self.failure is not None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="skylark-pages", daemon=True)
            self._thread.start()
        # Nothing holds the mapping: if it is gone by then, the system says so, and no harm is done.
        self._asked.put((ctypes.addressof(ctypes.c_char.from_buffer(pages)) + start, size))

    def stop(self) -> None:
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        madvise = ctypes.CDLL(None, use_errno=True).madvise  # Python's own holds on to the interpreter meanwhile
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        while (asked := self._asked.get()) is not None:
            if madvise(*asked, _MADV_POPULATE_WRITE) and self.failure is None:
                self.failure = os.strerror(ctypes.get_errno())
                log.info("pages of the log are not made ready: %s", self.failure)
