"""A wrong option is one clear error that names it."""

from __future__ import annotations

import pytest

from skylark.spark.options import BadOption, duration_ms, per_queue, read_options
from skylark.spark.queues import Queue

NEEDED = {"nameServer": "localhost:9876", "subscribe": "orders"}


def test_names_are_taken_in_any_case_and_spark_s_own_are_passed_over() -> None:
    options = read_options({"NAMESERVER": "a:1", "Subscribe": "t", "maxoffsetspertrigger": "7", "path": "x"})
    assert (options.name_server, options.subscribe, options.max_offsets_per_trigger) == ("a:1", "t", 7)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"subscribe": "orders"}, "nameServer is missing"),
        ({"nameServer": "a:1"}, "one of the options subscribe, subscribePattern, assign"),
        ({**NEEDED, "assign": "{}"}, "subscribe and assign exclude each other"),
        ({**NEEDED, "maxOffsetPerTrigger": "1"}, "did you mean maxOffsetsPerTrigger"),
        ({**NEEDED, "maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger='0': Expected `int` >= 1"),
        ({**NEEDED, "failOnDataLoss": "maybe"}, "failOnDataLoss='maybe'"),
        ({**NEEDED, "tags": "a", "sqlFilter": "b = 1"}, "tags and sqlFilter exclude"),
        ({**NEEDED, "sqlFilter": "price >"}, "option sqlFilter='price >': "),
        ({**NEEDED, "nameServer": "localhost"}, "nameServer='localhost': .*host:port"),
        ({**NEEDED, "timeout": "10ms"}, "timeout='10ms': expected at least 1s"),
        ({**NEEDED, "startingOffsets": "group"}, "needs the option group"),
        ({**NEEDED, "maxTriggerDelay": "15"}, "a number and a unit"),
        ({"nameServer": "a:1", "subscribePattern": "("}, "subscribePattern"),
    ],
)
def test_wrong_options(given: dict[str, str], said: str) -> None:
    with pytest.raises(BadOption, match=said):
        read_options(given)


def test_durations() -> None:
    assert [duration_ms(text, "x") for text in ("5ms", "2 s", "3m", "1h")] == [5, 2_000, 180_000, 3_600_000]


def test_offsets_per_queue() -> None:
    assert per_queue('{"t":{"b":{"0":5,"1":-2}}}', "x") == {Queue("t", "b", 0): 5, Queue("t", "b", 1): -2}
    for text in ("[", '{"t":5}', '{"t":{"b":{"x":5}}}'):
        with pytest.raises(BadOption, match=r"option x=.*expected JSON such as"):
            per_queue(text, "x")


def test_what_spark_adds_itself_is_no_mistake() -> None:
    added = {"queryName": "orders", "checkpointLocation": "x"}
    assert read_options({"nameServer": "a:1", "subscribe": "orders", **added}).subscribe == "orders"
