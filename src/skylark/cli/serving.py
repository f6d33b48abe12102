"""What the commands that serve have in common: running until told to stop, and failing in one clear line.

A server is anything that can `start(host, port)` and `stop()`. Servers are stopped in the reverse order of their start,
also when a later one fails to start.
"""

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

from skylark.config.rewrite import rewrite
from skylark.store.api import StoreError
from skylark.store.tables import BadTable

log = logging.getLogger(__name__)

WILDCARDS = {"", "0.0.0.0", "::"}


class Failure(Exception):
    """Something the user can put right; its text is the one line that they see."""


class Server(Protocol):
    async def start(self, host: str, port: int) -> int: ...

    async def stop(self) -> None: ...


class Running:
    """The servers of one process, up to the signal that ends them."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._stop_asked = asyncio.Event()
        self._failure: Failure | None = None

    async def __aenter__(self) -> "Running":
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def start(self, server: Server, what: str, host: str, port: int, port_option: str) -> int:
        """Start `server` and give its port; a port that cannot be had is a `Failure` that says what to do."""
        try:
            bound = await server.start(host, port)
        except OSError as error:
            raise Failure(_explain(error, what, host, port, port_option)) from error
        except (StoreError, BadTable) as error:
            raise Failure(f"the {what} cannot start: {error}") from error
        self._stack.push_async_callback(server.stop)
        return bound

    def stop(self, failure: Failure | None = None) -> None:
        """End the wait for the signal, as if it had come or with what went wrong."""
        if not self._stop_asked.is_set():
            self._failure = failure
        self._stop_asked.set()

    async def until_told_to_stop(self) -> None:
        await self._stop_asked.wait()
        if self._failure is not None:
            raise self._failure


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `main` on uvloop where it exists, else on the standard event loop."""
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    try:
        import uvloop
    except ImportError:
        pass  # there is none for this platform
    else:
        loop_factory = uvloop.new_event_loop
    # A message leaves no reference cycles behind, so looking for them after every 700 new objects is work for nothing.
    gc.set_threshold(50_000, 20, 50)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


def log_to_stderr(*, verbose: bool, name: str = "") -> None:
    """Each line says the time and how bad it is; with a name, also which of several processes wrote it."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if verbose else logging.WARNING,
        format=f"%(asctime)s {name + ' ' if name else ''}%(levelname)s %(message)s",
    )


def writable_directory(path: Path, what: str) -> Path:
    """`path` as a directory that exists and takes files, or a `Failure`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Permission bits do not tell: a file system can be read-only, and root may do anything but that.
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise Failure(f"cannot write to {path}, the directory of {what}: {error.strerror}") from error
    return path


def writes_back(path: Path | None) -> Callable[[dict[str, str]], None]:
    """What keeps changed settings: they go back into the file they came from, if there is one."""

    def write(changed: dict[str, str]) -> None:
        if path is None:
            return
        try:
            rewrite(path, changed)
        except OSError as error:
            log.warning("changed settings will not outlive this process, %s: %s", path, error.strerror)

    return write


def reachable(host: str, advertised: str = "") -> str:
    """The host that a client on this machine, or one told the advertised address, connects to."""
    return advertised or ("127.0.0.1" if host in WILDCARDS else host)


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _explain(error: OSError, what: str, host: str, port: int, port_option: str) -> str:
    where = address(host, port)
    if isinstance(error, socket.gaierror):
        return f"the {what} cannot start: the address to listen on or to advertise is unknown: {error.strerror}"
    if error.errno == errno.EADDRINUSE:
        return f"the {what} cannot listen on {where}: the port is in use; stop what uses it or choose {port_option}"
    if error.errno in (errno.EACCES, errno.EPERM) and error.filename is None:
        return f"the {what} cannot listen on {where}: not permitted; choose {port_option} above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"the {what} cannot listen on {where}: this machine has no such address"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"the {what} cannot start: {reason}" + (f": {error.filename}" if error.filename else "")
