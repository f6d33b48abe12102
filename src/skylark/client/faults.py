"""Which brokers to leave alone for a while, by how slow their last answer was.

    latency from    50 ms  100 ms  550 ms   1 s    2 s    3 s    15 s
    stays away for   0 s     0 s    30 s   60 s  120 s  180 s   600 s

A send that failed counts as 30 s away. A later answer never shortens what a slower one earned. The table is pure: the
caller brings the time.
"""

from __future__ import annotations

from typing import Final

STEPS: Final = (
    (15_000, 600_000), (3_000, 180_000), (2_000, 120_000), (1_000, 60_000), (550, 30_000), (100, 0), (50, 0),
)  # fmt: skip
FAILURE_MS: Final = 30_000
MAX_BROKERS: Final = 1024


def penalty_ms(latency_ms: float) -> int:
    """How long a broker that took so long is left alone.

    >>> penalty_ms(20), penalty_ms(550), penalty_ms(16_000)
    (0, 30000, 600000)
    """
    return next((away_ms for step_ms, away_ms in STEPS if latency_ms >= step_ms), 0)


class Faults:
    """broker name -> when it may be used again, in the caller's milliseconds."""

    def __init__(self) -> None:
        self._until_ms: dict[str, float] = {}

    def answered(self, broker: str, latency_ms: float, now_ms: float) -> None:
        away_ms = penalty_ms(latency_ms)
        if away_ms:
            self._isolate(broker, now_ms + away_ms, now_ms)

    def failed(self, broker: str, now_ms: float) -> None:
        self._isolate(broker, now_ms + FAILURE_MS, now_ms)

    def is_available(self, broker: str, now_ms: float) -> bool:
        return now_ms >= self._until_ms.get(broker, now_ms)

    def _isolate(self, broker: str, until_ms: float, now_ms: float) -> None:
        if len(self._until_ms) >= MAX_BROKERS:
            self._until_ms = {name: until for name, until in self._until_ms.items() if until > now_ms}
        self._until_ms[broker] = max(until_ms, self._until_ms.get(broker, until_ms))
