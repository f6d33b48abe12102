"""Milliseconds since 1970, as Spark counts them; times, as the report shows them; and time cut into buckets."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Final, overload

from skylark.pipelines.report.figures import Bucket

BUCKETS_S: Final = (1, 5, 10, 30, 60, 300, 600, 1800, 3600)
MOST_BUCKETS: Final = 120


@overload
def as_time(ms: int) -> datetime: ...
@overload
def as_time(ms: None) -> None: ...
def as_time(ms: int | None) -> datetime | None:
    """Spark itself would give a time without its zone."""
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)


def as_ms(time: datetime) -> int:
    return round(time.timestamp() * 1000)


def bucket_s(span_ms: int) -> int:
    """How long the buckets are into which a time is cut: 1 s to 1 h, about 100 of them if that is possible."""
    return next((each for each in BUCKETS_S if span_ms <= each * 1000 * MOST_BUCKETS), BUCKETS_S[-1])


def over_time(buckets: Iterable[Bucket], topic: str, length_s: int) -> list[Bucket]:
    """The buckets of a topic from the first to the last, with the empty ones between them."""
    found = {bucket.time: bucket for bucket in buckets if bucket.topic == topic}
    if not found:
        return []
    first, last = min(found), max(found)
    steps = round((last - first).total_seconds() / length_s)
    times = [first + timedelta(seconds=length_s * number) for number in range(steps + 1)]
    return [found.get(time) or Bucket(topic=topic, time=time, messages=0, body_bytes=0) for time in times]
