"""When a message is to be delivered."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from skylark.client.errors import InvalidMessage
from skylark.client.timing import delay_properties


@pytest.mark.parametrize(
    ("said", "travels"),
    [
        ((0, None, None), {}),
        ((3, None, None), {"DELAY": "3"}),
        ((0, 0, None), {"TIMER_DELAY_MS": "0"}),
        ((0, 0.0011, None), {"TIMER_DELAY_MS": "2"}),
        ((0, 90, None), {"TIMER_DELAY_MS": "90000"}),
        ((0, None, 1_700_000_000_000), {"TIMER_DELIVER_MS": "1700000000000"}),
        ((0, None, datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)), {"TIMER_DELIVER_MS": "1700000000000"}),
        (
            (0, None, datetime(2023, 11, 15, 0, 13, 20, tzinfo=timezone(timedelta(hours=2)))),
            {"TIMER_DELIVER_MS": "1700000000000"},
        ),
    ],
)
def test_what_is_said_is_what_travels(said: tuple[Any, Any, Any], travels: dict[str, str]) -> None:
    assert delay_properties(*said) == travels


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ((1, 1.0, None), "exclude each other"),
        ((0, 1.0, 5), "exclude each other"),
        ((0, -1, None), "0 or more"),
        ((0, float("nan"), None), "0 or more"),
        ((0, float("inf"), None), "0 or more"),
        ((0, "5", None), "a number of seconds"),
        ((0, None, datetime(2023, 11, 14)), "no time zone"),
        ((0, None, -5), "milliseconds since 1970"),
        ((0, None, 1.5), "milliseconds since 1970"),
        ((0, None, True), "milliseconds since 1970"),
        ((0, None, 1_700_000_000), "looks like seconds"),
        ((0, 1e30, None), "no more than"),
    ],
)
def test_what_makes_no_sense_is_refused(said: tuple[Any, Any, Any], why: str) -> None:
    with pytest.raises(InvalidMessage, match=why):
        delay_properties(*said)
