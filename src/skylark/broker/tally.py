"""`Tally`: the part of a counter that every message adds to."""

from __future__ import annotations

from mypy_extensions import i64, mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Tally:
    """Calls, messages and bytes. What is compiled adds to them by itself: a method could be overridden."""

    def __init__(self) -> None:
        self.times: i64 = 0
        self.count: i64 = 0
        self.size_bytes: i64 = 0
