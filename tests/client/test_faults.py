"""The table of slow brokers."""

from __future__ import annotations

import pytest

from skylark.client import faults
from skylark.client.faults import Faults, penalty_ms


@pytest.mark.parametrize(
    ("latency_ms", "away_s"),
    [
        (0, 0), (49, 0), (50, 0), (100, 0), (549, 0), (550, 30), (999, 30), (1000, 60), (2000, 120), (3000, 180),
        (14_999, 180), (15_000, 600), (10**9, 600),
    ],
)  # fmt: skip
def test_the_penalty_of_a_latency(latency_ms: int, away_s: int) -> None:
    assert penalty_ms(latency_ms) == away_s * 1000


def test_a_broker_stays_away_for_its_penalty() -> None:
    table = Faults()
    assert table.is_available("a", 0)
    table.answered("a", 600, now_ms=1000)
    assert not table.is_available("a", 30_999)
    assert table.is_available("a", 31_000)
    assert table.is_available("b", 1000)


def test_a_failure_counts_thirty_seconds() -> None:
    table = Faults()
    table.failed("a", now_ms=0)
    assert not table.is_available("a", 29_999)
    assert table.is_available("a", 30_000)


def test_a_quick_answer_does_not_shorten_what_a_slow_one_earned() -> None:
    table = Faults()
    table.answered("a", 20_000, now_ms=0)
    table.answered("a", 1, now_ms=10)
    table.failed("a", now_ms=20)
    assert not table.is_available("a", 599_999)


def test_the_table_forgets_what_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "MAX_BROKERS", 10)
    table = Faults()
    for number in range(100):
        table.failed(f"broker-{number}", now_ms=number * 100_000)
    assert len(table._until_ms) <= 10
