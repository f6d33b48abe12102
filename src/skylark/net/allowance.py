"""How much of a server's memory the connections of one remote host may hold, all of them together.

Two gauges count it: `unread`, what was written and the peers have not taken, and `unhandled`, what they sent and is not
done with: unfinished frames, requests behind answers that nobody reads, requests that wait. A gauge that passes its
limit closes, and opens again when half of it is free. Each may pass its limit by one frame, so that a host can hold
64 MB at most.

While `unread` is closed, no request of the host is handled and no waiting one is answered. While `unhandled` is closed,
nothing more is read from the host, except from one connection at a time, which finishes its frame: without that, many
unfinished frames would wait for each other for ever.

A host whose gauge stays closed although it could make room loses those of its connections that hold most.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from skylark.net.connection import Connection

log = logging.getLogger(__name__)

GAUGE_BYTES: Final = 16 << 20
MAX_WAITING_OF_HOST: Final = 32_768
"""Requests that wait for an event, such as pulls for a message: one more is refused."""

CLOSED_S: Final = 2.0
LEAST_MOVED_BYTES: Final = 256 << 10
"""What a host with a closed gauge has to take or to send within `CLOSED_S`."""


class Gauge:
    """Bytes against a limit."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0
        self.is_open = True

    def add(self, change_bytes: int) -> bool:
        """Whether the gauge opened or closed by that."""
        self.held_bytes += change_bytes
        was_open = self.is_open
        self.is_open = self.held_bytes <= (self._limit_bytes if was_open else self._limit_bytes // 2)
        return self.is_open != was_open


class Allowance:
    """What one host holds, and its connections."""

    def __init__(self, limit_bytes: int = GAUGE_BYTES) -> None:
        """`limit_bytes` is that of each gauge."""
        self.unread = Gauge(limit_bytes)
        self.unhandled = Gauge(limit_bytes)
        self.waiting = 0
        self.connections: dict[Connection, None] = {}
        self.reader: Connection | None = None  # who may read though `unhandled` is closed
        self._check: asyncio.TimerHandle | None = None
        self._buffered_bytes = 0  # in all transports, when it was looked at last
        self._moved_bytes = 0  # since then: what left the gauges, and what the readers got

    def count(self, gauge: Gauge, change_bytes: int) -> None:
        if change_bytes < 0:
            self._moved_bytes -= change_bytes
        if not gauge.add(change_bytes):
            return
        loop = asyncio.get_running_loop()
        if gauge.is_open:
            if self.unhandled.is_open:
                self.reader = None
            loop.call_soon(self._go_on)
        else:
            for connection in self.connections:
                connection.throttle()
            loop.call_soon(self._choose_reader)
            if self._check is None:
                self._buffered_bytes, self._moved_bytes = self._sum_buffered(), 0
                self._check = loop.call_later(CLOSED_S, self.check)

    def join(self, connection: Connection) -> None:
        self.connections[connection] = None
        connection.throttle()

    def leave(self, connection: Connection) -> None:
        """A connection is gone; it holds nothing any more."""
        self.connections.pop(connection, None)
        if self.reader is connection:
            self.reader = None
            self._choose_reader()

    def read_on(self, size_bytes: int, *, is_finished: bool) -> None:
        """The reader got that many bytes, and perhaps the rest of its frame."""
        self._moved_bytes += size_bytes
        if is_finished:
            reader, self.reader = self.reader, None
            if reader is not None:
                reader.throttle()
            self._choose_reader()

    def check(self) -> None:
        """Closes connections of a host that makes no room. Called some time after a gauge closed, until it opens."""
        self._check = None
        if self.unread.is_open and self.unhandled.is_open:
            return
        buffered_bytes = self._sum_buffered()
        if max(self._buffered_bytes - buffered_bytes, 0) + self._moved_bytes < LEAST_MOVED_BYTES:
            self._make_room()
        self._buffered_bytes, self._moved_bytes = buffered_bytes, 0
        self._check = asyncio.get_running_loop().call_later(CLOSED_S, self.check)

    def _make_room(self) -> None:
        """Aborts who may send the rest of its frame and does not, and who holds most, until half is free."""
        held = sorted(((connection.held_bytes, connection) for connection in self.connections), key=_size, reverse=True)
        held_bytes = sum([size for size, _ in held])
        wanted_bytes = held_bytes // 2
        aborted = [] if self.reader is None else [self.reader]
        for size, connection in held:
            if wanted_bytes <= 0 or not size:
                break
            wanted_bytes -= size
            if connection is not self.reader:
                aborted.append(connection)
        if aborted:
            log.warning(
                "closing %d connections of %s, %r first: that host leaves %d bytes unread or unfinished",
                len(aborted), aborted[0].peer[0], aborted[0], held_bytes,
            )  # fmt: skip
        for connection in aborted:
            connection.abort()

    def _go_on(self) -> None:
        """Room was made: the connections go on in turn, until there is none again."""
        for connection in list(self.connections):
            if not self.unread.is_open:
                return
            if connection in self.connections:
                self.connections[connection] = self.connections.pop(connection)  # it is the last one next time
                connection.go_on()
        self._choose_reader()

    def _choose_reader(self) -> None:
        """Lets the connection read whose unfinished frame is the oldest."""
        if self.unhandled.is_open or not self.unread.is_open or self.reader is not None:
            return
        unfinished = [connection for connection in self.connections if connection.is_amid_frame]
        if unfinished:
            self.reader = min(unfinished, key=lambda connection: connection.last_frame_s)
            self.reader.throttle()

    def _sum_buffered(self) -> int:
        return sum(connection.buffered_bytes for connection in self.connections)


def _size(held: tuple[int, Connection]) -> int:
    return held[0]


UNLIMITED: Final = Allowance(1 << 62)
"""Of connections that were dialled: what comes there was asked for."""
