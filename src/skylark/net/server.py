"""A listening socket, the connections it accepted and their staged end.

Connections are capped, and those that were silent for `idle_s` are aborted, as Apache's servers do: a client that lives
sends a heartbeat every 30 s. All connections of a host share its `Allowance`, and a host has as many at most as it
leaves free, so that nobody can take all.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from collections.abc import Callable, Iterable
from typing import Final

from skylark.net.addresses import unknown_host
from skylark.net.allowance import Allowance
from skylark.net.connection import Connection, Handler, Handlers
from skylark.net.hosts import packed_host
from skylark.wire.codes import ResponseCode
from skylark.wire.frame import Frame

log = logging.getLogger(__name__)

LOOK_FOR_DESCRIPTORS_S: Final = 1.0
_SAY_AGAIN_S: Final = 60.0
_BACKLOG: Final = 1024


def bind(host: str, port: int, *, unshared: bool = False) -> socket.socket:
    """A bound socket that does not listen yet: the port is known, and taken, before anything else is started.

    The system lets two sockets have one port as long as neither listens, so that a port can be taken again at once when
    its server has stopped. An `unshared` socket takes no port that another one has.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, not unshared)
        bound.bind((host, port))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what it accepts is held to this when it stops
    except (socket.gaierror, TypeError) as e:  # the other one for a name that can't be encoded
        bound.close()
        raise unknown_host(host, e) from None
    except OSError:
        bound.close()
        raise
    return bound


def refused(codes: Iterable[int], hint: str) -> dict[int, Handler]:
    """Handlers for requests that belong to another kind of server: Apache's answer, and what to do about it."""

    def refuse(request: Frame, _: Connection) -> Frame:
        remark = f" request type {request.code} not supported: {hint}"
        return request.reply(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark)

    return dict.fromkeys(codes, refuse)


def host_of(connection: Connection) -> bytes:
    """What stands for the peer's host."""
    return packed_host(connection.peer[0])


class Server:
    """Serves a table of handlers on one port, or on several."""

    def __init__(
        self,
        handlers: Handlers,
        closed: Callable[[Connection], None] | None = None,
        max_connections: int = 16_384,
        idle_s: float = 120.0,
    ) -> None:
        self._handlers = handlers
        self._on_closed = closed
        self._max_connections = max_connections
        self._idle_s = idle_s
        self._server: asyncio.Server | None = None
        self._others: list[asyncio.Server] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self._prober: asyncio.TimerHandle | None = None
        self._say_again_s = 0.0
        self._allowances: dict[bytes, Allowance] = {}
        self.connections: set[Connection] = set()

    async def start(self, bound: socket.socket) -> int:
        """Listens on a socket that `bind` made, and returns its port. Raises OSError."""
        self._server = await self._listen(bound)
        self._sweeper = asyncio.get_running_loop().call_later(self._idle_s / 4, self._sweep)
        self._look_for_descriptors()
        port: int = bound.getsockname()[1]
        return port

    async def also_listen(self, bound: socket.socket) -> None:
        """Listens on another port too. Limits and the end are those of all connections together. Raises OSError."""
        self._others.append(await self._listen(bound))

    async def _listen(self, bound: socket.socket) -> asyncio.Server:
        # When another program has come to listen there since the socket was bound, uvloop serves nothing and says
        # nothing.
        bound.listen(_BACKLOG)
        return await asyncio.get_running_loop().create_server(
            lambda: Connection(self._handlers, self._opened, self._closed), sock=bound, backlog=_BACKLOG
        )

    async def stop(self, grace_s: float = 3.0) -> None:
        """Accepts no more, lets requests in hand finish for a while, then closes every connection."""
        if self._server is None:
            return
        for timer in (self._sweeper, self._prober):
            if timer is not None:
                timer.cancel()
        listeners = [self._server, *self._others]
        for listener in listeners:
            listener.close()
        try:
            async with asyncio.timeout(grace_s):
                await asyncio.gather(*(connection.drained() for connection in self.connections))
        except TimeoutError:
            log.warning("some requests did not end within %.1f s and are dropped", grace_s)
        for connection in list(self.connections):
            connection.close()
        await asyncio.sleep(0)
        for connection in list(self.connections):
            connection.abort()
        for listener in listeners:
            await listener.wait_closed()
        self._server = None

    def _opened(self, connection: Connection) -> None:
        self.connections.add(connection)
        connection.allowance = self._allowances.setdefault(host_of(connection), Allowance())
        connection.allowance.join(connection)
        why = self._lack_of_room(len(connection.allowance.connections))
        if why:
            log.warning("closing %r: %s", connection, why)
            connection.abort()

    def _lack_of_room(self, own: int) -> str:
        """Why a connection can't stay with which a host has so many, if it can't."""
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        places = self._max_connections
        if descriptors != resource.RLIM_INFINITY:
            places = min(places, descriptors)
        left = places - len(self.connections)
        if left >= (own if own > 1 else 0):
            return ""
        return f"{len(self.connections) - 1} connections are open of at most {places}, {own - 1} of them of its host"

    def _closed(self, connection: Connection) -> None:
        self.connections.discard(connection)
        connection.allowance.leave(connection)
        if not connection.allowance.connections:
            del self._allowances[host_of(connection)]
        if self._on_closed is not None:
            self._on_closed(connection)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        silent_since = loop.time() - self._idle_s
        for connection in list(self.connections):
            if connection.is_silent(silent_since):
                log.info("closing %r: silent for %.0f s", connection, self._idle_s)
                connection.abort()
        self._sweeper = loop.call_later(self._idle_s / 4, self._sweep)

    def _look_for_descriptors(self) -> None:
        """Says so when none is left: clients are turned away then, of which the event loop says nothing, or too much.

        No connection tells of it, so one descriptor is asked for and given back every second.
        """
        loop = asyncio.get_running_loop()
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE) and loop.time() >= self._say_again_s:
                self._say_again_s = loop.time() + _SAY_AGAIN_S
                log.error(
                    "clients are turned away: no file descriptor is left (%s), %d of them are connections, "
                    "and this process may have %d: allow more with ulimit -n, or LimitNOFILE of systemd",
                    e.strerror, len(self.connections), resource.getrlimit(resource.RLIMIT_NOFILE)[0],
                )  # fmt: skip
        self._prober = loop.call_later(LOOK_FOR_DESCRIPTORS_S, self._look_for_descriptors)
