"""The standard streams: what goes to stdout arrives, or the command fails in one line; stderr may take nothing.

Whoever reads a pipe may leave when they have enough: that ends the command quietly. A server goes on serving.
"""

import contextlib
import io
import logging
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from skylark.cli.serving import Failure

log = logging.getLogger(__name__)


class _NotWritten(OSError):
    """Stdout did not take what was printed. It has no number: Rich and Typer end the process for a broken pipe."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror)
        self.nobody_reads = isinstance(error, BrokenPipeError)


class _Stdout(io.FileIO):
    """Tells its own errors apart from those of sockets, of files and of stderr."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise _NotWritten(error) from error


class _Stderr(io.FileIO):
    """Takes everything: a remark that finds no reader must not change how the command ends."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Around all that a command does."""
    _open_what_is_closed()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _over(_Stdout, sys.stdout), _over(_Stderr, sys.stderr)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that does not know a character still shows the others
    try:
        yield
    finally:
        try:
            _flush()
        except _NotWritten:
            _drop_the_rest()
        sys.stdout, sys.stderr = before


@contextlib.contextmanager
def written() -> Iterator[None]:
    """What is printed inside is out at the end."""
    try:
        yield
        _flush()
    except _NotWritten as error:
        _drop_the_rest()
        if not error.nobody_reads:
            raise Failure(f"cannot write to stdout: {error}") from error


@contextlib.contextmanager
def announcing() -> Iterator[None]:
    """What a server says of itself: it serves also when that is not heard."""
    try:
        yield
        _flush()
    except _NotWritten as error:
        _drop_the_rest()
        log.warning("stdout takes nothing, this goes on without it: %s", error)


def check_stdout() -> None:
    """For a command whose result is what it prints."""
    if sys.stdout is None:
        raise Failure("stdout is closed; > /dev/null is the way to have no output")


def when_nobody_reads(told: Callable[[], None]) -> None:
    """Calls `told`, from a thread, when the other end of the pipe that stdout is was closed.

    A write would notice that too, but the next message may be long in coming.
    """

    def wait() -> None:
        waiting = select.poll()
        waiting.register(1, 0)  # only what always comes: that there is an error
        waiting.poll()
        told()

    threading.Thread(target=wait, name="skylark-output", daemon=True).start()


def _open_what_is_closed() -> None:
    """A standard stream that the caller closed leads nowhere: else the next file or socket would take its number.

    Libuv ends a process that closes such a one.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def _over(kind: type[io.FileIO], stream: TextIO) -> TextIO:
    """The same stream by way of `kind`. What others put in place of a standard stream stays."""
    if type(stream) is not io.TextIOWrapper:
        return stream
    stream.flush()
    raw = kind(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _drop_the_rest() -> None:
    """What is left in the buffer must not complain again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
