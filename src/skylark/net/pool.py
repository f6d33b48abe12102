"""Connections to other servers, one per address, dialled when first needed and again after they closed.

A network that lost a peer, or a peer that hangs, does not close a connection: so one on which a request got no answer,
and nothing else came since, is closed here. The next request dials again, which shows whether the peer is there.
What may be asked twice need not wait for that: after a second of silence it is asked on a new connection as well.
"""

from __future__ import annotations

import asyncio
import logging
import re
from ipaddress import IPv6Address
from typing import Final

from skylark.net.connection import Connection, Handlers, Watch
from skylark.net.names import addresses_of
from skylark.wire.frame import Frame

log = logging.getLogger(__name__)

SILENCE_S: Final = 1.0

_NAME: Final = re.compile(r"[\w-]{1,63}(?:\.[\w-]{1,63})*\.?")
_PORT: Final = re.compile(r"[0-9]{1,5}")


def split_address(address: str) -> tuple[str, int]:
    """`host:port` in its two parts; an IPv6 host stands in brackets. Raises ValueError for what no server can have."""
    host, _, port = address.rpartition(":")
    has_port = _PORT.fullmatch(port) is not None
    if _is_ipv6(bare := address.removeprefix("[").removesuffix("]")) and not (has_port and _is_ipv6(host)):
        raise ValueError(f"{address!r} has no port: an IPv6 address and its port are written like [{bare}]:9876")
    if not host or not has_port:
        raise ValueError(f"{address!r} is not an address of the form host:port")
    if not 1 <= int(port) <= 65535:
        raise ValueError(f"{address!r} has no port that exists: they go from 1 to 65535")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        if ":" in host:
            IPv6Address(host)
        elif not _NAME.fullmatch(host) or len(host) > 253:
            raise ValueError
        elif not host.isascii():
            host.encode("idna")
    except ValueError:
        raise ValueError(f"{address!r} has no host that exists: {host!r} is neither a name nor an IP address") from None
    return host, int(port)


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True


def abort_if_silent(connection: Connection, since_s: float) -> None:
    """After a request that got no answer: closes a connection on which nothing came since then."""
    if connection.last_received_s <= since_s:
        log.info("%r does not answer; its connection is closed", connection)
        connection.abort()


class Pool:
    """address -> connection. Requests that need one address at the same time share one dial."""

    def __init__(
        self,
        handlers: Handlers | None = None,
        connect_timeout_s: float = 3.0,
        stamp: dict[str, str] | None = None,
        watch: Watch | None = None,
    ) -> None:
        """`stamp` goes into the fields of every request, and `watch` sees it and its response."""
        self._handlers: Handlers = handlers or {}
        self._stamp = stamp
        self._watch = watch
        self._connect_timeout_s = connect_timeout_s
        self._connections: dict[str, Connection] = {}
        self._dials: dict[str, asyncio.Task[Connection]] = {}
        self._retired: set[Connection] = set()  # silent ones, on which an answer may still come
        self._is_closed = False

    def is_open(self, address: str) -> bool:
        """Whether a request can go out at once, on a connection that is there already."""
        connection = self._connections.get(address)
        return connection is not None and connection.is_open

    async def get(self, address: str) -> Connection:
        """An open connection. Raises OSError or TimeoutError, with the address in the text."""
        if self.is_open(address):
            return self._connections[address]
        if self._is_closed:
            raise ConnectionError(f"no connection to {address}: they are all closed")
        dial = self._dials.get(address)
        if dial is None:
            dial = self._dials[address] = asyncio.create_task(self._dial(address))
            dial.add_done_callback(lambda done: self._dialled(address, done))
        return await asyncio.shield(dial)

    async def request(self, address: str, request: Frame, timeout_s: float = 3.0) -> Frame:
        """The response; the time is for the dial too. Raises OSError or TimeoutError, with the address in the text."""
        clock_s = asyncio.get_running_loop().time
        deadline_s = clock_s() + timeout_s
        connection = await self._get_within(address, timeout_s)
        began_s = clock_s()
        try:
            return await connection.request(request, deadline_s - began_s)
        except TimeoutError:
            abort_if_silent(connection, began_s)
            raise TimeoutError(f"no answer from {address} within {timeout_s:.3g} s") from None

    async def ask(self, address: str, request: Frame, timeout_s: float = 3.0) -> Frame:
        """The same for a request that may be asked twice, whose caller is not kept waiting by a silent connection."""
        if timeout_s <= SILENCE_S or not self.is_open(address):
            return await self.request(address, request, timeout_s)
        clock_s = asyncio.get_running_loop().time
        began_s = clock_s()
        connection = self._connections[address]
        asked = [asyncio.create_task(self.request(address, request, timeout_s))]
        try:
            await asyncio.wait(asked, timeout=SILENCE_S)
            if not asked[0].done() and connection.last_received_s <= began_s:
                self._retire(address, connection, timeout_s)
                again = Frame(request.code, request.fields, request.body)
                asked.append(asyncio.create_task(self.request(address, again, began_s + timeout_s - clock_s())))
                await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                asked.sort(key=lambda task: not task.done() or task.exception() is not None)  # an answer first
            try:
                return await asked[0]
            except OSError:
                return await asked[-1]
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def notify(self, address: str, request: Frame) -> None:
        (await self.get(address)).notify(request)

    def drop(self, address: str) -> None:
        """Closes the connection to an address, if there is one."""
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """For good."""
        self._is_closed = True
        for dial in self._dials.values():
            dial.cancel()
        for address in list(self._connections):
            self.drop(address)
        for connection in self._retired:
            connection.abort()
        self._retired.clear()

    def _retire(self, address: str, connection: Connection, after_s: float) -> None:
        """Nobody asks on it from now on, and it closes when nobody waits for it any more."""
        if self._connections.get(address) is connection:
            log.info("%r does not answer; a new connection is tried", connection)
            del self._connections[address]
            self._retired.add(connection)
            asyncio.get_running_loop().call_later(after_s, self._end, connection)

    def _end(self, connection: Connection) -> None:
        self._retired.discard(connection)
        connection.abort()

    async def _get_within(self, address: str, timeout_s: float) -> Connection:
        try:
            async with asyncio.timeout(timeout_s):
                return await self.get(address)
        except TimeoutError as e:
            raise TimeoutError(str(e) or f"no connection to {address} within {timeout_s:.3g} s") from None

    def _dialled(self, address: str, dial: asyncio.Task[Connection]) -> None:
        self._dials.pop(address, None)
        if not dial.cancelled():
            dial.exception()  # looked at, so that nobody complains when all who waited have given up

    async def _dial(self, address: str) -> Connection:
        try:
            host, port = split_address(address)
            async with asyncio.timeout(self._connect_timeout_s):
                connection = await self._connect(await addresses_of(host), port)
        except TimeoutError:
            raise TimeoutError(f"no connection to {address} within {self._connect_timeout_s:g} s") from None
        except (OSError, ValueError) as e:
            raise ConnectionError(f"no connection to {address}: {e}") from e
        self._connections[address] = connection
        return connection

    async def _connect(self, hosts: list[str], port: int) -> Connection:
        """A connection to the first of the addresses that takes one."""
        loop = asyncio.get_running_loop()
        failures = []
        for host in hosts:
            try:
                _, connection = await loop.create_connection(
                    lambda: Connection(self._handlers, dialled=True, stamp=self._stamp, watch=self._watch), host, port
                )
            except OSError as e:
                failures.append(str(e))
            else:
                return connection
        raise ConnectionError("; ".join(failures))
