"""The addresses of hosts by their names, looked up in threads that nothing else needs.

A look-up blocks its thread until the system's resolver gives up, half a minute and more, however early those who wait
for it do. In the threads of the event loop a few names that nobody answers for would hold up whatever else is done
there, above all tables that are written, and the end of the process. So they have threads of their own, only so many
of them, and whoever asks for a name that is being looked up shares that.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from concurrent.futures import Future
from ipaddress import ip_address
from typing import Final

MAX_THREADS: Final = 16


async def addresses_of(host: str) -> list[str]:
    """IP addresses, in the order in which they should be tried. Raises OSError or ValueError."""
    try:
        ip_address(host)
    except ValueError:
        return await asyncio.wrap_future(_look_ups.find(host))
    return [host]


class _LookUps:
    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._found: dict[str, Future[list[str]]] = {}  # of names that are looked up, or wait for a thread
        self._waiting: deque[str] = deque()
        self._threads = 0

    def find(self, host: str) -> Future[list[str]]:
        with self._changing:
            found = self._found.get(host)
            if found is None:
                found = self._found[host] = Future()
                found.set_running_or_notify_cancel()  # who gives up does not end it for the others
                self._waiting.append(host)
                if self._threads < MAX_THREADS:
                    self._threads += 1
                    threading.Thread(target=self._run, name="skylark-names", daemon=True).start()
            return found

    def _run(self) -> None:
        while True:
            with self._changing:
                if not self._waiting:
                    self._threads -= 1
                    return
                host = self._waiting.popleft()
            result: list[str] = []
            failure: Exception | None = None
            try:
                entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
                result = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
            except (OSError, ValueError) as e:
                failure = e
            with self._changing:
                found = self._found.pop(host)
            if failure is None:
                found.set_result(result)
            else:
                found.set_exception(failure)


_look_ups: Final = _LookUps()
