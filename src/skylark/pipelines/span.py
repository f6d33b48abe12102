"""A span of store times: from a time on, and before another."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

import msgspec

from skylark.pipelines.errors import PipelineError


class Span(msgspec.Struct, frozen=True):
    """`end` is the first moment that is not in it; None leaves that side open."""

    begin: datetime | None = None
    end: datetime | None = None

    def __contains__(self, moment: datetime) -> bool:
        return (self.begin is None or self.begin <= moment) and (self.end is None or moment < self.end)


ALWAYS: Final = Span()


def span(begin: str | None, end: str | None) -> Span:
    """What `--from` and `--to-time` say. Raises PipelineError."""
    found = Span(_moment("--from", begin), _moment("--to-time", end))
    if found.begin is not None and found.end is not None and found.begin >= found.end:
        raise PipelineError(f"--from {begin} is not before --to-time {end}: nothing is between them")
    return found


def _moment(option: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise PipelineError(
            f"{option} {text!r} is no time: expected a date or a time in UTC, such as 2026-01-31 or "
            "2026-01-31T12:00:00, or one with its zone, 2026-01-31T12:00:00+01:00"
        ) from None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
