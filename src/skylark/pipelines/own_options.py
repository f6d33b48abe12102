"""Mistakes in the options of our own formats, as they can be seen in a file. Those of Spark's it looks at itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from skylark.spark.offline import log_directories, scan_options
from skylark.spark.options import BadOption, stream_options, write_options

_PATH: Final = "path"


def _scan(options: Mapping[str, str]) -> None:
    log_directories(scan_options(options).path)


_PARSERS: Final[dict[tuple[str, str], Callable[[Mapping[str, str]], object]]] = {
    ("source", "rocketmq"): stream_options,
    ("source", "rocketmq-commitlog"): _scan,
    ("sink", "rocketmq"): write_options,
}


def wrong_options(
    part: str, format_name: str, options: Mapping[str, str], path: str | None
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each mistake of a source or a sink, with its place in the part.

    What was told is left out, which brings up the next; what its absence makes wrong is not told.
    """
    parse = _PARSERS.get((part, format_name))
    if parse is None:
        return
    given = dict(options) if path is None else {**options, _PATH: path}
    left_out: set[str] = set()
    while True:
        try:
            parse(given)
            return
        except BadOption as e:
            text = str(e)
        if left_out.intersection(_words(text)):
            return
        place = place_of(text, given)
        yield place, text
        if not place:
            return
        left_out |= {place[-1], text.partition("; did you mean ")[2].rstrip("?")}
        del given[place[-1]]


def place_of(text: str, options: Mapping[str, str]) -> tuple[str, ...]:
    """Where the option that the text is about stands in its part; nothing if it is about none that is given."""
    named = next((word for word in _words(text) if word in options), None)
    if named is None:
        return ()
    return (_PATH,) if named == _PATH else ("options", named)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", re.split(r"; did you mean |; there are |: expected ", text)[0])
