"""`skylark send` with many messages: the lines of a file or of stdin.

Reading, sending and waiting for answers go on side by side, so the first failure and a signal end it also while no line
comes. The producer bounds what is on its way. At the end one line tells how many messages are stored, and how many
lines were left out because they are blank: a message has a body.
"""

import asyncio
import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from skylark.cli.progress import progress
from skylark.cli.serving import Failure, on_signal_to_end

if TYPE_CHECKING:
    from skylark.client.message import Receipt
    from skylark.client.producer import Producer

_READ_BYTES = 64 * 1024
_SETTLE_TIMEOUT_S = 10.0  # longer than a message is tried

_T = TypeVar("_T")


def read_whole(file: Path | None, max_bytes: int) -> bytes:
    """All of a file or of stdin, which must not be more than that."""
    with _reading(file) as descriptor:
        data = bytearray()
        while part := _read(descriptor):
            data += part
            if len(data) > max_bytes:
                raise Failure(f"{_name(file)} has more than {max_bytes:,} bytes, the most that a message may have")
    return bytes(data)


async def send_lines(
    producer: "Producer", topic: str, file: Path | None, max_bytes: int, labels: dict[str, Any]
) -> None:
    """Ends with the first that fails or with a signal, after those on their way are settled."""
    begin = time.monotonic()
    signals = _Signals()
    with progress("sent") as advance:
        tally = _Tally(advance)
        pump = asyncio.create_task(_pump(producer, topic, _lines(file, max_bytes), labels, tally))
        await asyncio.wait((pump, tally.failure, signals.received), return_when=asyncio.FIRST_COMPLETED)
        is_stopped = signals.received.done()
        pump.cancel()
        await asyncio.wait((pump,))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(producer.flush(), _SETTLE_TIMEOUT_S)
    if is_stopped:
        typer.echo(f"skylark: stopped; {tally}", err=True)
        raise typer.Exit(128 + signals.received.result())
    if tally.failure.done():
        raise Failure(f"{tally.failure.result()}; {tally}")
    if not pump.cancelled() and (error := pump.exception()) is not None:
        raise Failure(f"{error}; {tally}") if isinstance(error, Failure) else error
    took_s = time.monotonic() - begin
    left_out = f", {_counted(tally.blank, 'blank line')} left out," if tally.blank else ""
    rate = f"{tally.stored / max(took_s, 1e-9):,.0f} a second"
    typer.echo(f"sent {_counted(tally.stored, 'message')}{left_out} in {took_s:.1f} s, {rate}", err=True)


async def _pump(
    producer: "Producer",
    topic: str,
    lines: Iterator[list[tuple[int, bytes]]],
    labels: dict[str, Any],
    tally: "_Tally",
) -> None:
    while (portion := await _aside(lambda: next(lines, None))) is not None:
        for number, line in portion:
            if not line:  # a message has a body
                tally.blank += 1
                continue
            try:
                tally.watch(await producer.send_soon(topic, line, **labels))
            except ValueError as error:
                raise Failure(f"line {number}: {error}") from error
    await producer.flush()


class _Tally:
    """What became of the messages so far. `advance` is told how many are stored."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self.stored = 0
        self.blank = 0
        self._advance = advance
        self._refused = 0
        self._unknown = 0
        self._on_their_way = 0
        self.failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def __str__(self) -> str:
        stored = "1 message is stored" if self.stored == 1 else f"{self.stored:,} messages are stored"
        refused = f", {self._refused:,} not" if self._refused else ""
        unknown = self._unknown + self._on_their_way
        not_known = f", of {unknown:,} it is not known" if unknown else ""
        return stored + refused + not_known + (f", {_counted(self.blank, 'blank line')} left out" if self.blank else "")

    def watch(self, receipt: "asyncio.Future[Receipt]") -> None:
        """A message that departs now; one that failed already did not even depart."""
        if receipt.done() and (error := receipt.exception()) is not None:
            self._refused += 1
            self._failed(error)
        else:
            self._on_their_way += 1
            receipt.add_done_callback(self._settled)

    def _settled(self, receipt: "asyncio.Future[Receipt]") -> None:
        from skylark.client.errors import BrokerError

        self._on_their_way -= 1
        error = None if receipt.cancelled() else receipt.exception()
        if receipt.cancelled():
            self._unknown += 1
        elif error is None:
            self.stored += 1
            self._advance(self.stored)
        else:
            self._refused += isinstance(error, BrokerError)
            self._unknown += not isinstance(error, BrokerError)
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_result(error)


class _Signals:
    """The first signal that asks for the end."""

    def __init__(self) -> None:
        self.received: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        on_signal_to_end(self._receive)

    def _receive(self, number: int) -> None:
        if not self.received.done():
            self.received.set_result(number)


def _lines(file: Path | None, max_bytes: int) -> Iterator[list[tuple[int, bytes]]]:
    """Lines with their numbers and without their ends, LF or CRLF, in the portions that they come in."""
    with _reading(file) as descriptor:
        rest = b""
        number = 0
        while data := _read(descriptor):
            *lines, rest = (rest + data).split(b"\n")
            yield [(number + index, line.rstrip(b"\r")) for index, line in enumerate(lines, 1)]
            number += len(lines)
            if len(rest) > max_bytes:
                raise Failure(f"line {number + 1} has more than {max_bytes:,} bytes, the most that a message may have")
        if rest:
            yield [(number + 1, rest.rstrip(b"\r"))]


@contextlib.contextmanager
def _reading(file: Path | None) -> Iterator[int]:
    """The descriptor of a file or of stdin. Python's own stdin has a lock, which a waiting read would hold at exit."""
    try:
        if file is None:
            yield 0
            return
        descriptor = os.open(file, os.O_RDONLY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise Failure(f"cannot read {_name(file)}: {error.strerror}") from error


def _read(descriptor: int) -> bytes:
    while True:
        try:
            return os.read(descriptor, _READ_BYTES)
        except BlockingIOError:  # whoever else has the other end may have set it so
            select.select([descriptor], [], [])


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _name(file: Path | None) -> str:
    return "stdin" if file is None else str(file)


def _aside(work: Callable[[], _T]) -> "asyncio.Future[_T]":
    """Runs what may block in a thread. Unlike one of asyncio's, it does not hold up the end of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: Exception | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: _T | None = None
        failed: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=run, name="skylark-read", daemon=True).start()
    return done
