"""Changing values in a `.properties` file that a person wrote: everything else in it stays as it is.

The line of a changed key is replaced, comments and order are kept, a key that the file did not have goes to its end.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from skylark.config import properties

_LINE_END = re.compile(r"(?:\r\n|\r|\n)\Z")
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|\Z)")


def rewritten(text: str, changes: Mapping[str, str]) -> str:
    """`text` with the values of `changes`.

    >>> rewritten("# ours\\nlistenPort = 1\\n", {"listenPort": "2", "brokerName": "a"})
    '# ours\\nlistenPort=2\\nbrokerName=a\\n'
    """
    missing = dict(changes)
    parts: list[str] = []
    for lines in _entries(text):
        key = next(iter(properties.parse(lines)), None)
        if key is not None and key in changes:
            missing.pop(key, None)
            lines = _entry(key, changes[key])
        parts.append(lines)
    if missing and parts:
        # A blank line ends an entry that goes on at the end of the file; one newline may complete a carriage return.
        end = "" if parts[-1].endswith("\n") else "\n"
        parts.append("\n\n" if _goes_on(parts[-1]) else end)
    parts.extend(_entry(key, value) for key, value in missing.items())
    return "".join(parts)


def rewrite(path: Path, changes: Mapping[str, str]) -> None:
    """Writes the values of `changes` into the file at `path`, as a whole or not at all. Raises OSError."""
    data = path.read_bytes()
    try:
        text, encoding = data.decode(), "utf-8"
    except UnicodeDecodeError:
        text, encoding = data.decode("latin-1"), "latin-1"
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        os.fchmod(file.fileno(), path.stat().st_mode & 0o7777)
        file.write(rewritten(text, changes).encode(encoding))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _entries(text: str) -> Iterator[str]:
    """The text cut into entries, comments and blank lines, each with its line ends."""
    pending = ""
    for line in _LINE.findall(text):
        pending += line
        if pending and not _goes_on(pending):
            yield pending
            pending = ""
    if pending:
        yield pending


def _goes_on(lines: str) -> bool:
    """Whether the last line ends in a backslash that is not escaped; in a comment it means nothing."""
    content = _LINE_END.sub("", lines)
    if content.lstrip(" \t\f\r\n")[:1] in ("", "#", "!"):
        return False
    return (len(content) - len(content.rstrip("\\"))) % 2 == 1


def _entry(key: str, value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    # A blank that opens the value would be taken for part of the separator.
    return f"{key}={chr(92) if escaped[:1] in (' ', chr(9)) else ''}{escaped}\n"
