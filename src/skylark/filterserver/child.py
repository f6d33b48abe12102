"""The process that a filter class runs in: `python -m skylark.filterserver.child`, started by `worker`.

It reads from standard input and answers on standard output, both as messages of 4 bytes of length and MessagePack. The
first is the `Order`, answered when the class is loaded; each of the others holds the records of a pull, answered by a
`Verdict`. The limits are set before a line of the class runs. When its input ends, so does it.

A filter class has a method `match(message)` that says whether the consumer gets the message, a
`skylark.client.message.Message`:

    class Expensive:
        def match(self, message):
            return float(message.properties.get("price", 0)) > 100
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from skylark.client.message import Message
from skylark.wire.records import decode_records

LENGTH = struct.Struct(">I")
_SPARE_FILES = 16


class Order(msgspec.Struct):
    """Which class to run, and how much it may use."""

    class_name: str
    source: str
    broker_name: str
    memory_bytes: int
    timeout_s: float


class Verdict(msgspec.Struct):
    """Whether each message matches, or what went wrong."""

    matches: list[bool] = []
    error: str = ""


def main() -> None:
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    # What the class prints must not end up among the answers.
    os.dup2(2, 1)
    data = _read(requests)
    if data is None:
        return
    order = msgspec.msgpack.decode(data, type=Order)
    _limit(order)
    # The parent kills what takes too long. If the parent is gone, this does.
    match = _guarded(order.timeout_s, lambda: _load(order))
    if isinstance(match, str):
        _write(answers, Verdict(error=match))
        return
    _write(answers, Verdict())
    while (records := _read(requests)) is not None:
        _write(answers, _judge(match, records, order))


def _limit(order: Order) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (order.memory_bytes, order.memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_SPARE_FILES, _SPARE_FILES))
    if os.getuid() != 0:
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _guarded(timeout_s: float, work: Callable[[], Any]) -> Any:
    signal.setitimer(signal.ITIMER_REAL, 2 * timeout_s)
    try:
        return work()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _load(order: Order) -> Callable[[Message], object] | str:
    """The class's method, or why there is none."""
    name = order.class_name.rpartition(".")[2]
    namespace: dict[str, Any] = {"__name__": order.class_name.rpartition(".")[0] or "__filter__"}
    try:
        exec(compile(order.source, f"<{order.class_name}>", "exec"), namespace)
        kind = namespace.get(name)
        if not isinstance(kind, type):
            return f"the source has no class {name}"
        match: Callable[[Message], object] | None = getattr(kind(), "match", None)
        if not callable(match):
            return f"class {name} has no method match(message)"
        return match
    except BaseException as e:
        return f"class {name} can't be loaded: {_describe(e)}"


def _judge(match: Callable[[Message], object], records: bytes, order: Order) -> Verdict:
    verdict = Verdict([])

    def work() -> None:
        for record in decode_records(records):
            try:
                verdict.matches.append(bool(match(Message.from_record(record, order.broker_name))))
            except BaseException as e:
                verdict.error = (
                    f"{order.class_name} fails for the message at offset {record.queue_offset}: {_describe(e)}"
                )
                return

    _guarded(order.timeout_s, work)
    return verdict


def _describe(error: BaseException) -> str:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    line = f" (line {place.tb_lineno})" if place is not None and not isinstance(error, SyntaxError) else ""
    return f"{type(error).__name__}: {str(error)[:500]}{line}"


def _read(file: BinaryIO) -> bytes | None:
    header = file.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    return file.read(LENGTH.unpack(header)[0])


def _write(file: BinaryIO, verdict: Verdict) -> None:
    data = msgspec.msgpack.encode(verdict)
    file.write(LENGTH.pack(len(data)) + data)
    file.flush()


if __name__ == "__main__":
    sys.setrecursionlimit(500)
    main()
