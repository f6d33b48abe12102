"""`Tally`: the part of a counter that every message adds to."""

from __future__ import annotations

from mypy_extensions import i64, mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Tally:
    """Calls, messages and bytes."""

    def __init__(self) -> None:
        self.times: i64 = 0
        self.count: i64 = 0
        self.size_bytes: i64 = 0


def add_to(tally: Tally, count: i64, size_bytes: i64) -> None:
    """One call with `count` messages. No method: those of a class that may be inherited from are looked up."""
    tally.times += 1
    tally.count += count
    tally.size_bytes += size_bytes
