"""What a trace tells, whatever order its records come in: each may lie in another queue of the trace topic."""

from __future__ import annotations

import random

import pytest

from skylark.client.traces import read_events
from skylark.wire.trace import EndTransaction, Pub, Recall, SubAfter, SubBefore, Trace


def call(number: int, begin_ms: int, end_ms: int, *, is_success: bool) -> list[Trace]:
    return [
        SubBefore(time_ms=begin_ms, region="r", group="g", request_id=f"R{number}", msg_id="M", retries=number),
        SubAfter(
            request_id=f"R{number}", msg_id="M", cost_ms=0, is_success=is_success, time_ms=end_ms, group="g"
        ),
    ]  # fmt: skip


SENT = Pub(time_ms=5, region="r", group="p", topic="t", msg_id="M")
IN_ONE_MILLISECOND: list[Trace] = [SENT, *call(0, 5, 5, is_success=False), *call(1, 5, 5, is_success=True)]
OLDER_CLIENT: list[Trace] = [
    SENT,
    SubBefore(time_ms=5, region="r", group="g", request_id="R", msg_id="M"),
    SubAfter(request_id="R", msg_id="M", cost_ms=0, is_success=True),
]
TRANSACTION: list[Trace] = [
    SENT,
    EndTransaction(time_ms=5, region="r", group="p", topic="t", msg_id="M"),
    *call(0, 5, 6, is_success=True),
]
RECALLED: list[Trace] = [SENT, Recall(time_ms=5, region="r", group="p", topic="t", msg_id="M")]


@pytest.mark.parametrize("life", [IN_ONE_MILLISECOND, OLDER_CLIENT, TRANSACTION, RECALLED])
@pytest.mark.parametrize("seed", range(10))
def test_events_are_in_the_order_of_a_life(life: list[Trace], seed: int) -> None:
    records = random.Random(seed).sample(life, len(life))
    assert [event.record for event in read_events((record, "host") for record in records)] == life


def test_time_comes_before_everything_else() -> None:
    late_send = Pub(time_ms=7, region="r", group="p", topic="t", msg_id="M")
    first, second = call(0, 5, 6, is_success=True)
    assert [event.what for event in read_events([(late_send, ""), (second, ""), (first, "")])] == [
        "consuming",
        "consumed",
        "sent",
    ]
