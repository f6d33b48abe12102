"""What the log looks like: a line an event, for people and for machines."""

import io
import json
import logging
import re
import subprocess
import sys
from datetime import datetime

import pytest

import skylark.cli.logs
from cli.commands import TIME
from skylark.cli.logs import JsonLines, TextLines, _Handler, _source


def record(
    message: str, *arguments: object, name: str = "skylark.store.store", error: Exception | None = None
) -> logging.LogRecord:
    info = (type(error), error, error.__traceback__) if error is not None else None
    return logging.LogRecord(name, logging.WARNING, "x.py", 1, message, arguments, info)


def an_error() -> Exception:
    def inner() -> None:
        raise ValueError("line 1\nline 2")

    try:
        inner()
    except ValueError as error:
        return error
    raise AssertionError


def test_a_line_says_when_how_bad_and_who() -> None:
    event = record("%d records checked", 7)
    line = TextLines("", whole_way=False).format(event)
    assert re.fullmatch(f"{TIME} WARNING store.store: 7 records checked", line)
    told = datetime.fromisoformat(line.split()[0])
    assert abs(told.timestamp() - event.created) < 0.001


def test_of_several_brokers_a_line_says_which() -> None:
    assert " broker-b/store.store: x" in TextLines("broker-b", whole_way=False).format(record("x"))
    assert json.loads(JsonLines("broker-b").format(record("x")))["broker"] == "broker-b"


def test_what_others_log_looks_the_same() -> None:
    assert " WARNING asyncio: x" in TextLines("", whole_way=False).format(record("x", name="asyncio"))


def test_an_event_is_one_line_whatever_is_in_it() -> None:
    event = record("remark: %s", "a\nb\r\x1b[31m\u2028c\n")
    assert TextLines("", whole_way=False).format(event).endswith(r": remark: a\nb\r\x1b[31m\u2028c")
    line = JsonLines("").format(event)
    assert line.isascii()
    assert "\n" not in line
    assert json.loads(line)["message"] == "remark: a\nb\r\x1b[31m\u2028c\n"


def test_no_line_is_turned_around_or_ended_by_what_a_client_sends() -> None:
    forged = "me\r\n2026-11-18T03:00:00.000+00:00 CRITICAL store.store: fenced\x85\u2029\u202e\u2066"
    line = TextLines("", whole_way=False).format(record("%s joins group %s", forged, "g"))
    assert len(line.splitlines()) == 1
    assert line.isascii()


@pytest.mark.parametrize("lines", [TextLines("", whole_way=True), JsonLines("")])
@pytest.mark.parametrize("text", ["x", "\0", "\u2028", "\U0001f600"])
def test_a_line_is_short_however_much_is_in_it(lines: logging.Formatter, text: str) -> None:
    event = record("%s.", text * 10_000_000, error=ValueError(text * 1_000_000))
    line = lines.format(event)
    assert len(line.encode()) < 100_000
    assert "... 9998001 characters ..." in line


class Written:
    """What a handler writes of events that come when a test says."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.handler = _Handler(self.stream)
        self.handler.setFormatter(TextLines("", whole_way=False))

    def tell(self, message: str, *arguments: object, at_s: float = 0, name: str = "skylark.net.connection") -> None:
        event = record(message, *arguments, name=name)
        event.created = at_s
        self.handler.handle(event)

    @property
    def lines(self) -> list[str]:
        return [line.split(" ", 1)[1] for line in self.stream.getvalue().splitlines()]


def test_what_comes_too_often_is_counted_and_hides_nothing_else() -> None:
    written = Written()
    for number in range(1000):
        written.tell("closing %s", number)
    written.tell("something else", name="skylark.store.store")
    assert len(written.lines) == 51
    assert written.lines[-1] == "WARNING store.store: something else"
    written.tell("closing %s", 1000, at_s=1)
    assert written.lines[51:] == [
        "WARNING cli.logs: 950 lines were left out, too many came within a second: 950 of net.connection",
        "WARNING net.connection: closing 1000",
    ]
    written.handler.close()
    assert len(written.lines) == 53


def test_what_was_left_out_last_is_told_at_the_end() -> None:
    written = Written()
    for _ in range(60):
        written.tell("x")
    written.handler.close()
    assert "10 lines were left out" in written.lines[-1]


@pytest.mark.parametrize("text", ["x" * 20_000, "\0" * 20_000, "\U0001f600" * 20_000])
def test_nobody_makes_the_log_grow_by_a_megabyte_per_second(text: str) -> None:
    written = Written()
    for number in range(300):
        for kind in range(100):
            written.tell(f"{kind} %s", text, at_s=number / 100)
    assert len(written.stream.getvalue().encode()) < 3_000_000


def test_an_error_is_told_with_its_place_and_when_verbose_with_the_way_there() -> None:
    event = record("it failed", error=an_error())
    brief, verbose = (TextLines("", whole_way=verbose).format(event) for verbose in (False, True))
    assert re.search(r": it failed: ValueError: line 1\\nline 2 \(at test_logs\.py:\d+\)$", brief)
    assert re.search(r": it failed: ValueError: line 1\\nline 2 \(at test_logs\.py:\d+ > test_logs\.py:\d+\)$", verbose)


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        (skylark.cli.logs.__file__, "cli/logs.py"),
        ("skylark/store/store.py", "store/store.py"),  # compiled
        ("/x/skylark/tests/broker/test_send.py", "test_send.py"),  # a checkout may have the name of the package
        ("/x/asyncio/skylark.py", "skylark.py"),
    ],
)
def test_a_place_in_the_package_is_told_by_its_path_below_it(file: str, shown: str) -> None:
    assert _source(file) == shown


def test_the_errors_behind_an_error_are_told_in_the_same_line() -> None:
    error = ExceptionGroup("two failed", [ValueError("a"), KeyError("b")])
    error.__cause__ = OSError("disk")
    line = TextLines("", whole_way=False).format(record("it failed", error=error))
    assert line.endswith(
        ": ExceptionGroup: two failed (2 sub-exceptions), from ValueError: a, from KeyError: 'b', from OSError: disk"
    )
    error.__cause__ = error  # an error may even be behind itself
    assert "\n" not in TextLines("", whole_way=False).format(record("it failed", error=error))


def test_machines_get_an_object_a_line() -> None:
    told = json.loads(JsonLines("").format(record("it failed", error=an_error())))
    traceback = told.pop("traceback")
    assert re.fullmatch(TIME, told.pop("time"))
    assert told == {
        "level": "WARNING",
        "logger": "store.store",
        "message": "it failed",
        "exception": "ValueError: line 1\nline 2",
    }
    assert traceback.startswith("Traceback (most recent call last):\n")
    assert "in inner" in traceback


def test_warnings_and_asyncio_go_the_same_way() -> None:
    program = """
import asyncio, logging, threading, warnings
from skylark.cli.logs import LogFormat, log_to_stderr

async def fail():
    raise ValueError("nobody looks")

async def main():
    task = asyncio.create_task(fail())
    await asyncio.sleep(0)

log_to_stderr(verbose=False, form=LogFormat.JSON)
warnings.warn("odd", UserWarning)
asyncio.run(main())

class Odd:
    def __del__(self):
        raise ValueError("at the end")

def end():
    raise ValueError("in a thread")

thread = threading.Thread(target=end, name="worker")
thread.start()
thread.join()
Odd()
logging.getLogger("skylark.x").warning("%d", "no number")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    first, second, *others = map(json.loads, done.stderr.splitlines())
    assert first["logger"] == "py.warnings"
    assert "UserWarning: odd" in first["message"]
    assert (second["logger"], second["exception"]) == ("asyncio", "ValueError: nobody looks")
    assert [(other["logger"], other["exception"]) for other in others[:2]] == [
        ("cli.logs", "ValueError: in a thread"),
        ("cli.logs", "ValueError: at the end"),
    ]
    assert re.fullmatch(r"cannot log what <string>:\d+ tells", others[2]["message"])
    assert len(others) == 3


def test_warnings_do_not_hide_an_error() -> None:
    stream = io.StringIO()
    handler = _Handler(stream)
    for number in range(10_000):  # each of a kind of its own
        handler.emit(logging.LogRecord("a", logging.WARNING, __file__, 1, f"{number}" * 100, (), None))
    handler.emit(logging.LogRecord("a", logging.ERROR, __file__, 1, "the store is fenced", (), None))
    assert "the store is fenced" in stream.getvalue()
    assert len(stream.getvalue()) < 2 << 20
