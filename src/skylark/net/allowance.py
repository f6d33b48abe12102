"""How much of a server's memory the connections of one remote host may hold, all of them together.

Gauges count it: `unread`, what was written and the peers have not taken, and `unhandled`, what they sent and is not
done with: unfinished frames, requests behind answers that nobody reads, requests that wait. A gauge that passes its
limit closes, and opens again when half of it is free. Each may pass its limit by one frame, so that a host can hold
64 MB at most.

While `unread` is closed, no request of the host is handled. `late`, which is smaller, counts the part of it that
answers requests that waited; while it is closed no more of those are answered, and nothing is sent that was not asked
for: a host whose consumers do not read can go on to send. While `unhandled` is closed, nothing more is read from the
host, except from one connection at a time, which finishes its frame: without that, many unfinished frames would wait
for each other for ever. While the server itself works at what takes the room, a frame is finished only if it fits into
twice that: else each would come on top of those before it.

The event loop's time is shared as well: what the requests of a host take of one turn of the loop is bounded (`Turn`).

A host that has a closed gauge and makes no room for a while loses those of its connections that hold most; the more
often, the shorter the while.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from skylark.net.connection import Connection

log = logging.getLogger(__name__)

GAUGE_BYTES: Final = 16 << 20
MAX_WAITING_OF_HOST: Final = 16_384
"""Requests that wait for an event, such as pulls for a message: one more is refused. Each takes some 3 KB."""

LEAST_MOVED_PER_S: Final = 128 << 10
"""What a host with a closed gauge has to take or to send, in bytes."""

TURN_S: Final = 0.01
"""What the requests of a host may take of a turn of the event loop, and the last of them may pass."""

_PATIENCE_S: Final = 4.0
_LEAST_PATIENCE_S: Final = 1.0
_PAUSE_S: Final = 0.001
_FORGIVEN_S: Final = 60.0


class Gauge:
    """Bytes against a limit."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0
        self.is_open = True

    def has_room_for(self, size_bytes: int) -> bool:
        return self.held_bytes + size_bytes <= self._limit_bytes

    @property
    def is_overfull(self) -> bool:
        return self.would_be_overfull(0)

    def would_be_overfull(self, more_bytes: int) -> bool:
        return self.held_bytes + more_bytes > 2 * self._limit_bytes

    def add(self, change_bytes: int) -> bool:
        """Whether the gauge opened or closed by that."""
        self.held_bytes += change_bytes
        was_open = self.is_open
        self.is_open = self.held_bytes <= (self._limit_bytes if was_open else self._limit_bytes // 2)
        return self.is_open != was_open


class Turn:
    """A host's part of a turn of the event loop. When it is used, the host's connections wait for the next turn."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._used_s = 0.0
        self._queue: deque[Connection] = deque()
        self.is_open = True

    def use(self, time_s: float) -> None:
        self._used_s += time_s
        if self._used_s >= self._limit_s and self.is_open:
            self.is_open = False
            asyncio.get_running_loop().call_soon(self._begin)

    def queue(self, connection: Connection) -> None:
        """Lets it go on in the next turn, after those that came before it. Called while the turn is closed."""
        self._queue.append(connection)

    def _begin(self) -> None:
        self._used_s, self.is_open = 0.0, True
        for _ in range(len(self._queue)):
            if not self.is_open:
                break
            self._queue.popleft().take_turn()


class Allowance:
    """What one host holds, and its connections."""

    def __init__(self, limit_bytes: int = GAUGE_BYTES, turn_s: float = TURN_S) -> None:
        """`limit_bytes` is that of `unread` and of `unhandled`."""
        self.turn = Turn(turn_s)
        self.unread = Gauge(limit_bytes)
        self.late = Gauge(limit_bytes // 2)
        self.unhandled = Gauge(limit_bytes)
        self.waiting = 0
        self.connections: dict[Connection, None] = {}
        self.reader: Connection | None = None  # who may read though `unhandled` is closed
        self._awaits_work = False  # nobody may, until this server has done some of what it has taken
        self._check: asyncio.TimerHandle | None = None
        self._patience_s = _PATIENCE_S
        self._lost_s = 0.0  # when connections were closed last
        self._buffered_bytes = 0  # in all transports, when it was looked at last
        self._moved_bytes = 0  # since then: what left the gauges, and what the readers got

    @property
    def takes_late(self) -> bool:
        """Whether requests that waited may be answered, and the server's own be sent."""
        return self.late.is_open and self.unread.is_open

    def count_unread(self, change_bytes: int, late_change_bytes: int) -> None:
        """`late_change_bytes` of them are answers to requests that waited."""
        has_changed = self.unread.add(change_bytes)
        if self.late.add(late_change_bytes) or has_changed:
            self._changed(is_open=change_bytes + late_change_bytes < 0)
        if change_bytes < 0:
            self._moved_bytes -= change_bytes

    def count_unhandled(self, change_bytes: int) -> None:
        if change_bytes < 0:
            self._moved_bytes -= change_bytes
        if self.unhandled.add(change_bytes):
            if self.unhandled.is_open:
                self.reader = None
            self._changed(is_open=self.unhandled.is_open)
        elif self._awaits_work and change_bytes < 0:
            self._awaits_work = False
            asyncio.get_running_loop().call_soon(self._choose_reader)

    def _changed(self, *, is_open: bool) -> None:
        loop = asyncio.get_running_loop()
        if is_open:
            loop.call_soon(self._go_on)
            return
        for connection in self.connections:
            connection.throttle()
        loop.call_soon(self._choose_reader)
        if self._check is None:
            if loop.time() - self._lost_s > _FORGIVEN_S:
                self._patience_s = _PATIENCE_S
            self._buffered_bytes, self._moved_bytes = self._sum_buffered(), 0
            self._check = loop.call_later(self._patience_s, self.check)

    def has_room_to_wait(self, size_bytes: int) -> bool:
        """Whether one more request may wait for an event. Those that do must not keep the host from being read from."""
        return self.waiting < MAX_WAITING_OF_HOST and self.unhandled.has_room_for(2 * size_bytes)

    def join(self, connection: Connection) -> None:
        self.connections[connection] = None
        connection.throttle()

    def leave(self, connection: Connection) -> None:
        """A connection is gone; it holds nothing any more."""
        self.connections.pop(connection, None)
        if self.reader is connection:
            self.reader = None
            self._choose_reader()

    def received(self, connection: Connection, size_bytes: int, *, is_finished: bool) -> None:
        """A connection got that many bytes though `unhandled` is closed, and perhaps the rest of its frame."""
        if connection is self.reader:
            self._moved_bytes += size_bytes
            if is_finished:
                self.reader = None
                connection.throttle()
                self._choose_reader()
        else:  # a new one: some event loops begin to read whatever they are told
            connection.throttle()
            if self.unhandled.is_overfull:
                connection.abort()

    def check(self) -> None:
        """Closes connections of a host that makes no room. Called some time after a gauge closed, until it opens."""
        if self._check is not None:
            self._check.cancel()
            self._check = None
        if self.takes_late and self.unhandled.is_open:
            return
        buffered_bytes = self._sum_buffered()
        moved_bytes = max(self._buffered_bytes - buffered_bytes, 0) + self._moved_bytes
        if moved_bytes < LEAST_MOVED_PER_S * self._patience_s and not self._awaits_work:
            self._make_room()
        self._buffered_bytes, self._moved_bytes = buffered_bytes, 0
        self._check = asyncio.get_running_loop().call_later(self._patience_s, self.check)

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
        self._lost_s = asyncio.get_running_loop().time()
        self._patience_s = max(self._patience_s / 2, _LEAST_PATIENCE_S)

    def _go_on(self) -> None:
        """Room was made. Who is not behind comes first, and is read from before the others take the room again."""
        for connection in list(self.connections):
            if not connection.is_behind:
                connection.go_on()
        asyncio.get_running_loop().call_later(_PAUSE_S, self._go_on_in_turn)

    def _go_on_in_turn(self) -> None:
        for connection in list(self.connections):
            if not self.unread.is_open:
                return
            if connection in self.connections:
                self.connections[connection] = self.connections.pop(connection)  # it is the last one next time
                connection.go_on()
        self._choose_reader()

    def _choose_reader(self) -> None:
        """Lets the connection read whose unfinished frame is the oldest."""
        self._awaits_work = False
        if self.unhandled.is_open or not self.unread.is_open or self.reader is not None:
            return
        unfinished = [connection for connection in self.connections if connection.is_amid_frame]
        if not unfinished:
            return
        oldest = min(unfinished, key=lambda connection: connection.last_frame_s)
        if self.unhandled.would_be_overfull(oldest.missing_bytes):
            self._awaits_work = any(connection.busy_bytes for connection in self.connections)
        if not self._awaits_work:
            self.reader = oldest
            oldest.throttle()

    def _sum_buffered(self) -> int:
        return sum(connection.unsent_bytes for connection in self.connections)


def _size(held: tuple[int, Connection]) -> int:
    return held[0]


UNLIMITED: Final = Allowance(1 << 62, math.inf)
"""Of connections that were dialled: what comes there was asked for."""
