"""What the commands that serve have in common: running until told to stop, and failing in one clear line.

A server is anything that can `start(host, port)` and `stop()`. Servers are stopped in the reverse order of their start,
also when a later one fails to start.
"""

import asyncio
import errno
import gc
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

from skylark.cli.logs import log_to_stderr as log_to_stderr
from skylark.config.rewrite import rewrite
from skylark.store import open_files
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
        self._told_of_stop: list[Callable[[], None]] = []

    async def __aenter__(self) -> "Running":
        on_signal_to_end(lambda _: self.stop())
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

    def at_stop(self, told: Callable[[], None]) -> None:
        """`told` is called as soon as the end is asked for; servers are stopped one after the other from then on."""
        self._told_of_stop.append(told)

    def stop(self) -> None:
        """End the wait for the signal, as if it had come."""
        self._stop_asked.set()
        for told in self._told_of_stop:
            told()

    async def until_told_to_stop(self) -> None:
        await self._stop_asked.wait()


def on_signal_to_end(act: Callable[[int], None]) -> None:
    """Calls `act` with the number of every SIGINT, SIGTERM and SIGHUP; under nohup the last one stays ignored."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, act, number)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `main` on uvloop where it exists, else on the standard event loop."""
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    try:
        import uvloop
    except ImportError:
        pass  # there is none for this platform
    else:
        loop_factory = uvloop.new_event_loop
    open_files.allow_all()
    # A message leaves no reference cycles behind, so looking for them after every 700 new objects is work for nothing.
    gc.set_threshold(50_000, 20, 50)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


def warn_if_slow() -> None:
    """For a process that messages go through, once it serves."""
    from skylark import form

    complaint = form.complaint()
    if complaint is not None:
        log.warning(complaint)
        form.tell_when_compiled(log.warning)


def writable_directory(path: Path, what: str) -> Path:
    """`path` as a directory that exists and takes files, or a `Failure`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Permission bits do not tell: a file system can be read-only, and root may do anything but that.
        with tempfile.TemporaryFile(dir=path):
            pass
    except FileExistsError as error:
        raise Failure(f"cannot write to {path}, the directory of {what}: it is a file") from error
    except OSError as error:
        raise Failure(f"cannot write to {path}, the directory of {what}: {error.strerror}") from error
    return path


def holds_store(root: Path) -> bool:
    return any((root / name).exists() for name in ("commitlog", "consumequeue", "checkpoint"))


def default_place(home: Path, former: Path, is_used: Callable[[Path], bool], setting: str) -> Path:
    """Where files are when nothing names a place: at home, as Apache's are, unless former versions left some here.

    Nobody should find an empty server after an update, so what is there is used; of two that are, none is guessed at.
    """
    if not is_used(former):
        return home
    if is_used(home):
        raise Failure(f"both {home} and {former.absolute()} are in use, and nothing says which one is meant: {setting}")
    log.warning("%s is used, as in former versions; the default is %s now: %s", former.absolute(), home, setting)
    return former


def described_store(root: Path, log_directory: str = "") -> str:
    """Where messages are kept and whether there are any, for whoever starts a server; to be asked before the start."""
    log_place = f", log in {Path(log_directory).absolute()}" if log_directory else ""
    used = holds_store(root) or (log_directory and any(Path(log_directory).glob("*")))
    return f"{root.absolute()}{log_place} ({'in use' if used else 'empty'} before this start)"


def writes_back(path: Path | None, why_not: str = "it was started without -c FILE") -> Callable[[dict[str, str]], None]:
    """What keeps changed settings: they go back into the file they came from. Without one, the log says why not."""

    def write(changed: dict[str, str]) -> None:
        reason = why_not
        if path is not None:
            try:
                rewrite(path, changed)
            except OSError as error:
                reason = f"{path}: {error.strerror}"
            else:
                return
        log.warning("%s will not outlive this process: %s", ", ".join(f"{k}={v}" for k, v in changed.items()), reason)

    return write


def command() -> str:
    """How this command is called from another terminal: by its name if the shell finds it, else by its path."""
    found, called = shutil.which("skylark"), Path(sys.argv[0])
    if called.name != "skylark" or (found is not None and Path(found).resolve() == called.resolve()):
        return "skylark"
    return str(called.relative_to(Path.cwd()) if called.is_relative_to(Path.cwd()) else called)


def reachable(host: str, advertised: str = "") -> str:
    """The host that a client on this machine, or one told the advertised address, connects to."""
    return advertised or ("127.0.0.1" if host in WILDCARDS else host)


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _explain(error: OSError, what: str, host: str, port: int, port_option: str) -> str:
    where = address(host, port)
    if isinstance(error, socket.gaierror):
        return f"the {what} cannot start: it finds no address to listen on or to advertise: {error.strerror}"
    if error.errno == errno.EADDRINUSE:
        return f"the {what} cannot listen on {where}: the port is in use; stop what uses it or choose {port_option}"
    if error.errno in (errno.EACCES, errno.EPERM) and error.filename is None:
        return f"the {what} cannot listen on {where}: not permitted; choose {port_option} above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"the {what} cannot listen on {where}: this machine has no such address"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"the {what} cannot start: {reason}" + (f": {error.filename}" if error.filename else "")
