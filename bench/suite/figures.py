"""Figures: what a sample consists of, how samples become one number, and whether a ratio reaches its aim. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec

Sample = dict[str, float]
"""Metric -> value, of one round; a metric that a workload doesn't have is left out."""


class Metric(msgspec.Struct, frozen=True):
    title: str
    digits: int


METRICS: dict[str, Metric] = {
    "rate": Metric("messages/s", 0),
    "cpu": Metric("server CPU s per 100,000 messages", 2),
    "consumed": Metric("consumed/s", 0),
    "rss_mb": Metric("resident memory, MB", 0),
    "own_mb": Metric("anonymous memory, MB", 0),
    "mean_ms": Metric("mean, ms", 2),
    "p50_ms": Metric("p50, ms", 2),
    "p99_ms": Metric("p99, ms", 2),
    "p999_ms": Metric("p99.9, ms", 2),
    "seconds": Metric("seconds", 2),
    "cpu_percent": Metric("server CPU, % of a core", 2),
    "generator_cpu": Metric("load generator CPU s per 100,000", 2),
    "refused_percent": Metric("refused or lost, %", 2),
}
DETAILS = (
    *("rate", "consumed", "cpu", "rss_mb", "own_mb", "mean_ms", "p50_ms", "p99_ms", "p999_ms"),
    *("refused_percent", "generator_cpu"),
)


class Aim(msgspec.Struct, frozen=True):
    """A bound of the ratio Skylark / Apache of one metric."""

    metric: str
    bound: Literal["at least", "at most"]
    ratio: float

    def reached(self, ratio: float) -> bool:
        return ratio >= self.ratio if self.bound == "at least" else ratio <= self.ratio

    def __str__(self) -> str:
        return f"{self.bound} {self.ratio:g}"


def at_least(metric: str, ratio: float) -> Aim:
    return Aim(metric, "at least", ratio)


def at_most(metric: str, ratio: float) -> Aim:
    return Aim(metric, "at most", ratio)


class Summary(msgspec.Struct, frozen=True):
    """Several rounds of one metric."""

    median: float
    lowest: float
    highest: float

    def text(self, digits: int, *, spread: bool = True) -> str:
        middle = f"{self.median:,.{digits}f}"
        return f"{middle} ({self.lowest:,.{digits}f} - {self.highest:,.{digits}f})" if spread else middle


def summary(samples: Sequence[Sample], metric: str) -> Summary | None:
    """None when no sample has the metric."""
    values = [sample[metric] for sample in samples if metric in sample]
    return Summary(statistics.median(values), min(values), max(values)) if values else None


def ratio(apache: Summary, skylark: Summary) -> float:
    """Skylark's median to Apache's; infinite where Apache's is nothing."""
    return skylark.median / apache.median if apache.median else float("inf")
