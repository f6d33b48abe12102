"""What a report says: one record, made of rows that are the same on the terminal, in JSON, in Parquet and on the page.

A field's name ends with its unit (`_ms`, `_s`, `_bytes`) or says what it is (`share`, a part of 1), and `written` shows
it accordingly. A section that has no rows has a note that says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

_EXACT: Final = ("time", "sent", "consumed", "next_stored")
_UNITS: Final = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s"))


class Row(msgspec.Struct, kw_only=True):
    """A line of a section."""


class Throughput(Row):
    """A topic in the period. A mean is over the time from the first to the last message, a peak that of a bucket."""

    topic: str
    messages: int
    body_bytes: int
    mean_per_s: float
    peak_per_s: float
    peak_at: datetime | None
    first: datetime | None
    last: datetime | None


class Bucket(Row):
    """The messages of a topic that were stored in the `bucket_s` from a time on. Empty ones are left out."""

    topic: str
    time: datetime
    messages: int
    body_bytes: int


class QueueLoad(Row):
    topic: str
    broker: str
    queue: int
    messages: int
    body_bytes: int
    share: float


class HotKey(Row):
    topic: str
    key: str
    messages: int
    share: float


class Percentiles(Row):
    p50_ms: int
    p90_ms: int
    p99_ms: int
    p999_ms: int
    max_ms: int


class Latency(Percentiles):
    topic: str
    way: str
    group: str | None
    measured_by: str
    messages: int


class Lag(Row):
    """A group and a topic; `behind_s` is the age of the oldest message that is to be consumed."""

    group: str
    topic: str
    queues: int
    behind: int
    behind_s: float | None


class QueueLag(Row):
    """`committed` is the offset that the group consumes next; None where it never committed."""

    group: str
    topic: str
    broker: str
    queue: int
    committed: int | None
    end: int
    behind: int
    next_stored: datetime | None
    behind_s: float | None


class Retries(Row):
    """Messages in the retry topics of a group, by how often they were sent back."""

    group: str
    topic: str
    times: int
    messages: int
    last: datetime


class DeadLetters(Row):
    group: str
    topic: str
    messages: int
    first: datetime
    last: datetime


class DeadLetter(Row):
    group: str
    topic: str
    time: datetime
    times: int
    keys: str | None
    msg_id: str


class Traced(Percentiles):
    """What clients wrote about their calls: how many, how they ended, how long they took."""

    topic: str
    what: str
    group: str
    calls: int
    failed: int


class SlowMessage(Row):
    topic: str
    group: str
    msg_id: str
    keys: str | None
    sent: datetime
    consumed: datetime
    took_ms: int
    calls: int


class Step(Row):
    """One event in the life of the message that was asked for."""

    time: datetime
    what: str
    group: str
    msg_id: str
    took_ms: int | None
    result: str


class Report(msgspec.Struct, kw_only=True):
    made: datetime
    read_from: str
    topics: list[str]
    groups: list[str]
    since: datetime | None
    until: datetime | None
    bucket_s: int = 1
    message: str | None = None
    throughput: list[Throughput] = []
    buckets: list[Bucket] = []
    queues: list[QueueLoad] = []
    keys: list[HotKey] = []
    latency: list[Latency] = []
    lag: list[Lag] = []
    queue_lag: list[QueueLag] = []
    retries: list[Retries] = []
    dead_letters: list[DeadLetters] = []
    last_dead_letters: list[DeadLetter] = []
    traces: list[Traced] = []
    slowest: list[SlowMessage] = []
    steps: list[Step] = []
    notes: dict[str, str] = {}
    """Name of a section -> what is to be known about it."""

    def rows(self, section: Section) -> Sequence[Row]:
        found: Sequence[Row] = getattr(self, section.name)
        return found


class Section(msgspec.Struct, frozen=True):
    """A table of the report; `name` is its field there and its directory in Parquet."""

    name: str
    title: str
    row: type[Row]
    columns: tuple[str, ...]
    is_long: bool = False  # grows with queues or time: shortened where it would be in the way

    def cells(self, row: Row) -> list[str]:
        return [written(name, getattr(row, name)) for name in self.columns]


_PERCENTILES: Final = ("p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms")


def _section(name: str, title: str, row: type[Row], columns: Sequence[str] = (), *, is_long: bool = False) -> Section:
    return Section(name, title, row, tuple(columns) or row.__struct_fields__, is_long)


SECTIONS: Final = (
    _section("throughput", "Throughput", Throughput),
    _section("buckets", "Throughput over time", Bucket, is_long=True),
    _section("queues", "Messages by queue", QueueLoad, is_long=True),
    _section("keys", "Hot keys", HotKey),
    _section("latency", "Latency", Latency, ("topic", "way", "group", "measured_by", "messages", *_PERCENTILES)),
    _section("lag", "Lag", Lag),
    _section("queue_lag", "Lag by queue", QueueLag, is_long=True),
    _section("retries", "Retries", Retries),
    _section("dead_letters", "Dead letters", DeadLetters),
    _section("last_dead_letters", "Last dead letters", DeadLetter),
    _section("traces", "Traced calls", Traced, ("topic", "what", "group", "calls", "failed", *_PERCENTILES)),
    _section("slowest", "Slowest messages", SlowMessage),
    _section("steps", "Trace of one message", Step),
)

_HEADINGS: Final = {"p999_ms": "p99.9", "behind_s": "time behind", "took_ms": "took", "body_bytes": "bytes"}


def heading(column: str) -> str:
    return _HEADINGS.get(column) or column.removesuffix("_ms").replace("_per_s", "/s").replace("_", " ")


def is_number(column: str) -> bool:
    """Whether its values stand at the right."""
    words = ("share", "messages", "behind", "committed", "end", "queue", "queues", "times", "calls", "failed")
    return column in words or column.endswith(("_ms", "_s", "_bytes"))


def written(column: str, value: Any) -> str:
    """A value as people read it; times in UTC."""
    if value is None:
        return "-"
    if isinstance(value, datetime):
        exact = "milliseconds" if column in _EXACT else "seconds"
        return value.astimezone(UTC).replace(tzinfo=None).isoformat(" ", exact)
    if column.endswith("_bytes"):
        return size(value)
    if column.endswith("_ms"):
        return duration(value)
    if column.endswith("_per_s"):
        return f"{value:,.1f}"
    if column.endswith("_s"):
        return duration(value * 1000)
    if column == "share":
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:,.0f} {unit}" if unit == "B" else f"{amount:,.1f} {unit}"
        amount /= 1024
    return f"{amount:,.1f} TiB"


def duration(ms: float) -> str:
    for unit_ms, unit in _UNITS:
        if abs(ms) >= unit_ms:
            return f"{ms / unit_ms:,.1f} {unit}"
    return f"{ms:,.0f} ms"
