"""The log that a process writes to stderr: one line an event, for people or for machines.

    2026-11-18T03:00:00.123+00:00 WARNING store.store: ./data: recovered after an unclean stop ...
    2026-11-18T03:00:00.123+00:00 WARNING broker-b/store.store: ...

The part that speaks is a module of Skylark, without the name of the package; of several brokers it also says which. An
error ends the line with its type, its text and the place it came from, or with all places on the way there when
everything is logged. What the log is told may come from anybody on the network: control characters are escaped, of a
long text the middle is left out, and of many lines within a second most, with a line that says how many.
"""

from __future__ import annotations

import enum
import json
import logging
import sys
import threading
import traceback
from collections import Counter
from datetime import datetime
from pathlib import PurePath
from typing import TextIO

# Control characters, the two others that some programs take for the end of a line, and those that turn its direction.
_ENDS = (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
_TURNS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPES = {code: repr(chr(code))[1:-1] for code in (*_ENDS, *_TURNS)}
_PACKAGE = "skylark."
_DIRECTORY = f"{PurePath(__file__).parents[2]}/"
# A line tells no more than so many errors behind one another, and of a group no more than so many.
_DEPTH = 4
_SIDE_BY_SIDE = 3
# A text has no more than so many characters, one kind of line comes no more than so often within a second, and nothing
# more is written within a second that has so many bytes.
_MOST_CHARACTERS = 2_000
_MOST_ALIKE = 50
_MOST_BYTES = 1 << 19
_PARTS_TOLD = 10

log = logging.getLogger(__name__)


class LogFormat(enum.StrEnum):
    TEXT = "text"
    JSON = "json"


class TextLines(logging.Formatter):
    """Time, level, part and message, in one line."""

    def __init__(self, process: str, *, whole_way: bool) -> None:
        super().__init__()
        self._prefix = f"{process}/" if process else ""
        self._whole_way = whole_way

    def format(self, record: logging.LogRecord) -> str:
        message = _shortened(record.getMessage().rstrip())
        if record.exc_info and record.exc_info[1] is not None:
            message += f": {_shortened(self._error(record.exc_info[1]))}"
        message = message.translate(_ESCAPES)
        return f"{_time(record)} {record.levelname} {self._prefix}{_part(record)}: {message}"

    def _error(self, error: BaseException, depth: int = 0) -> str:
        places = [f"{_source(frame.filename)}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        way = " > ".join(places if self._whole_way else places[-1:])
        told = f"{_summary(error)} (at {way})" if way else _summary(error)
        behind = _behind(error) if depth < _DEPTH else []
        return told + "".join(f", from {self._error(each, depth + 1)}" for each in behind[:_SIDE_BY_SIDE])


class JsonLines(logging.Formatter):
    """An object a line: time, level, logger and message; broker and exception where there is one."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        event = {"time": _time(record), "level": record.levelname, "logger": _part(record)}
        if self._process:
            event["broker"] = self._process
        event["message"] = _shortened(record.getMessage())
        if record.exc_info and record.exc_info[1] is not None:
            event["exception"] = _summary(record.exc_info[1])
            event["traceback"] = _shortened("".join(traceback.format_exception(record.exc_info[1])))
        return json.dumps(event)


def log_to_stderr(*, verbose: bool, name: str = "", form: LogFormat = LogFormat.TEXT) -> None:
    """What goes wrong, or all that happens. `name` says which of several brokers this process is."""
    handler = _Handler(sys.stderr)
    handler.setFormatter(JsonLines(name) if form is LogFormat.JSON else TextLines(name, whole_way=verbose))
    logging.basicConfig(handlers=[handler], level=logging.INFO if verbose else logging.WARNING)
    logging.captureWarnings(True)
    threading.excepthook = _tell_of_thread
    sys.unraisablehook = _tell_of_unraisable


class _Handler(logging.StreamHandler[TextIO]):
    """Leaves out what is too much: lines are of one kind if one call of the log made them.

    A call of the log that makes no sense is an event as well.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._second = 0
        self._written_bytes = 0
        self._alike: Counter[tuple[str, str]] = Counter()
        self._left_out: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if int(record.created) != self._second:
            self._begin_second(int(record.created))
        kind = (record.name, record.msg if isinstance(record.msg, str) else "")
        room_bytes = _MOST_BYTES if record.levelno < logging.ERROR else 2 * _MOST_BYTES  # no warnings hide an error
        if self._alike[kind] >= _MOST_ALIKE or self._written_bytes >= room_bytes:
            self._left_out[_part(record)] += 1
            return
        self._alike[kind] += 1
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        self._written_bytes += len(line) if line.isascii() else len(line.encode("utf-8", "backslashreplace"))
        return line

    def close(self) -> None:
        self._tell_of_left_out()
        super().close()

    def _begin_second(self, second: int) -> None:
        self._second = second
        self._written_bytes = 0
        self._alike.clear()
        self._tell_of_left_out()

    def _tell_of_left_out(self) -> None:
        if self._left_out:
            parts = ", ".join(f"{count} of {part}" for part, count in self._left_out.most_common(_PARTS_TOLD))
            arguments = (self._left_out.total(), parts)
            self._left_out.clear()
            text = "%d lines were left out, too many came within a second: %s"
            super().emit(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, arguments, None))

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if error is None or isinstance(error, OSError) or record.name == __name__:  # there is nowhere to say so
            return
        place = f"{_source(record.pathname)}:{record.lineno}"
        info = (type(error), error, error.__traceback__)
        self.emit(logging.LogRecord(__name__, logging.ERROR, __file__, 0, "cannot log what %s tells", (place,), info))


def _tell_of_thread(told: threading.ExceptHookArgs) -> None:
    if told.exc_value is not None and not issubclass(told.exc_type, SystemExit):
        name = told.thread.name if told.thread is not None else "a thread"
        log.error("%s ended", name, exc_info=told.exc_value)


def _tell_of_unraisable(told: sys.UnraisableHookArgs) -> None:
    log.error("%s: %r", told.err_msg or "exception ignored in", told.object, exc_info=told.exc_value)


def is_json() -> bool:
    """Whether this process was told to log for machines."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


def _part(record: logging.LogRecord) -> str:
    return record.name.removeprefix(_PACKAGE)


def _shortened(text: str) -> str:
    """A long text without its middle: how it begins says what it is about, and how it ends what went wrong."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    half = _MOST_CHARACTERS // 2
    return f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"


def _summary(error: BaseException) -> str:
    text = _shortened(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _behind(error: BaseException) -> list[BaseException]:
    """The errors that this one stands for: those of a group, and its cause."""
    inside = list(error.exceptions) if isinstance(error, BaseExceptionGroup) else []
    return inside + ([error.__cause__] if error.__cause__ is not None else [])


def _source(filename: str) -> str:
    """A file of the package by its path below it, any other by its name. Compiled code names its files from there."""
    below = filename.removeprefix(_DIRECTORY).removeprefix("skylark/")
    return PurePath(filename).name if below == filename else below
