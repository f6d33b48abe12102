"""Spark's settings as a file that only its owner can read.

Anybody on a machine sees the command lines of its processes, and settings may be credentials. So none of them is on the
command line of spark-submit, which Spark is started with also where no cluster is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_ESCAPES: Final = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\f": "\\f"})
_IN_KEYS: Final = str.maketrans({" ": "\\ ", "=": "\\=", ":": "\\:", "#": "\\#", "!": "\\!"})


def write(path: Path, settings: Mapping[str, str]) -> Path:
    """Replaces the file. Raises OSError."""
    path.unlink(missing_ok=True)  # one that others may read would stay so
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text(settings))
    return path


def text(settings: Mapping[str, str]) -> str:
    """As `java.util.Properties` reads it."""
    return "".join(f"{_escaped(key).translate(_IN_KEYS)}={_value(value)}\n" for key, value in settings.items())


def options(path: Path) -> list[str]:
    """What spark-submit is told, which else would not read the settings of Spark's installation any more."""
    return ["--properties-file", str(path), "--load-spark-defaults"]


def without_settings(call: Sequence[str], path: Path) -> list[str]:
    """A call of spark-submit with the settings that it begins with (`--conf KEY=VALUE`) in the file instead."""
    settings: dict[str, str] = {}
    end = 1
    while end + 1 < len(call) and call[end] == "--conf":
        key, _, value = call[end + 1].partition("=")
        settings[key] = value
        end += 2
    if not settings or "--properties-file" in call:
        return list(call)
    write(path, settings)
    return [call[0], *options(path), *call[end:]]


def _escaped(part: str) -> str:
    return part.translate(_ESCAPES)


def _value(value: str) -> str:
    return "\\" + _escaped(value) if value.startswith(" ") else _escaped(value)
