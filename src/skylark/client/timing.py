"""When a message is to be delivered, as the caller says it and as it travels; and the clock for what lasts."""

from __future__ import annotations

import math
import time
from datetime import datetime

from skylark.client.errors import InvalidMessage
from skylark.wire.message import PROPERTY_DELAY_LEVEL, PROPERTY_TIMER_DELAY_MS, PROPERTY_TIMER_DELIVER_MS

_MOST_MS = (1 << 63) - 1
# As milliseconds these are days of the early seventies; as seconds, all times from 2001 until long from now.
_LIKE_SECONDS = range(10**9, 10**11)


def steady_ms() -> int:
    """For whatever lasts: nobody sets this clock."""
    return time.monotonic_ns() // 1_000_000


def delay_properties(delay_level: int, delay_s: float | None, deliver_at: datetime | int | None) -> dict[str, str]:
    """The property that asks a broker to wait.

    >>> delay_properties(0, 1.5, None)
    {'TIMER_DELAY_MS': '1500'}
    """
    if bool(delay_level) + (delay_s is not None) + (deliver_at is not None) > 1:
        raise InvalidMessage("delay_level, delay_s and deliver_at exclude each other")
    if delay_s is not None:
        return {PROPERTY_TIMER_DELAY_MS: str(_delay_ms(delay_s))}
    if deliver_at is not None:
        return {PROPERTY_TIMER_DELIVER_MS: str(_deliver_ms(deliver_at))}
    return {PROPERTY_DELAY_LEVEL: str(delay_level)} if delay_level else {}


def _delay_ms(delay_s: float) -> int:
    if isinstance(delay_s, bool) or not isinstance(delay_s, int | float):
        raise InvalidMessage(f"delay_s is {delay_s!r} and must be a number of seconds")
    if not 0 <= delay_s * 1000 <= _MOST_MS or math.isnan(delay_s):
        raise InvalidMessage(f"delay_s is {delay_s!r} and must be 0 or more, and no more than {_MOST_MS // 1000}")
    return math.ceil(delay_s * 1000)


def _deliver_ms(deliver_at: datetime | int) -> int:
    if isinstance(deliver_at, datetime):
        if deliver_at.tzinfo is None:
            raise InvalidMessage("deliver_at has no time zone; add one, as in datetime.now().astimezone()")
        return math.ceil(deliver_at.timestamp() * 1000)
    if isinstance(deliver_at, bool) or not isinstance(deliver_at, int) or not 0 <= deliver_at <= _MOST_MS:
        raise InvalidMessage(f"deliver_at is {deliver_at!r} and must be a datetime, or milliseconds since 1970")
    if deliver_at in _LIKE_SECONDS:
        raise InvalidMessage(f"deliver_at is {deliver_at}, which looks like seconds; it takes milliseconds since 1970")
    return deliver_at
