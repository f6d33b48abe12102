"""Whose turn it is to have a large request read in a thread.

What is read takes several times the room of the request, and threads share the time of the process: few are read at
once, and of each remote host only one. The hosts take turns, so that whoever sends a lot waits for itself, and others
wait for one request of each host at most. What waits is bounded, and a host has half of what the others leave.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from skylark.nameserver.living import Host

MOST_AT_ONCE: Final = 2
MOST_WAITING_BYTES: Final = 128 << 20


class Busy(Exception):
    """Too much waits to be read already."""


class Turns:
    """Who reads, and who waits for that."""

    def __init__(self) -> None:
        self._waiting: Counter[Host] = Counter()  # bytes of requests that are read or wait for that
        self._of_host: dict[Host, asyncio.Lock] = {}
        self._places = asyncio.Semaphore(MOST_AT_ONCE)

    @asynccontextmanager
    async def turn(self, host: Host, size_bytes: int) -> AsyncIterator[None]:
        """The time in which a host may have a request of some bytes, one at least, read. Raises Busy."""
        own_bytes = self._waiting[host]
        left_bytes = MOST_WAITING_BYTES - self._waiting.total() + own_bytes
        if own_bytes + size_bytes > (left_bytes // 2 if own_bytes else left_bytes):
            raise Busy
        self._waiting[host] += size_bytes
        lock = self._of_host.setdefault(host, asyncio.Lock())
        try:
            async with lock, self._places:
                yield
        finally:
            self._waiting[host] -= size_bytes
            if not self._waiting[host]:
                del self._waiting[host], self._of_host[host]
