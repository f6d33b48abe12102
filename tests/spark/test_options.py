"""A wrong option is one clear error that names it."""

from __future__ import annotations

import pytest

from skylark.spark.offline import scan_options
from skylark.spark.options import BadOption, batch_options, duration_ms, per_queue, read_options, write_options
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
        (
            {**NEEDED, "maxOffsetsPerTrigger": "0"},
            r"maxOffsetsPerTrigger='0': expected a whole number from 1 on \(most",
        ),
        ({**NEEDED, "pullBatchSize": "1025"}, "pullBatchSize='1025': expected a whole number from 1 to 1024"),
        ({**NEEDED, "failOnDataLoss": "maybe"}, "failOnDataLoss='maybe': expected true or false"),
        ({**NEEDED, "badRecords": "skip"}, "badRecords='skip': expected dlq, drop or fail"),
        ({**NEEDED, "bodyFormat": "xml"}, "bodyFormat='xml': expected avro, binary, json, protobuf or text"),
        (
            {**NEEDED, "startingTimestamp": "2026-01-01"},
            r"expected a whole number .*milliseconds .* such as 1767225600000",
        ),
        ({**NEEDED, "endingOffsets": "latest", "endingTimestamp": "1"}, "endingOffsets and endingTimestamp exclude"),
        ({**NEEDED, "endingoffsets": "latest", "endingOffsetsByTimestamp": "{}"}, "endingOffsetsByTimestamp exclude"),
        (
            {**NEEDED, "startingTimestamp": "2", "endingTimestamp": "1"},
            "endingTimestamp=1 is before startingTimestamp=2",
        ),
        (
            {**NEEDED, "startingTimestamp": "2", "endingOffsetsByTimestamp": '{"orders":{"b":{"0":1}}}'},
            "queue 0 of topic orders at broker b is to be read up to the time 1, which is before its first one, 2",
        ),
        ({**NEEDED, "badRecords": "dlq"}, "need each other"),
        ({**NEEDED, "badRecords": "dlq", "dlqTopic": "a b"}, "dlqTopic='a b': .*illegal characters"),
        ({**NEEDED, "badRecords": "dlq", "dlqTopic": "orders"}, "is itself read"),
        (
            {"nameServer": "a:1", "assign": '{"dead":{"b":[0]}}', "badRecords": "dlq", "dlqTopic": "dead"},
            "dlqTopic='dead' is itself read",
        ),
        ({"nameServer": "a:1", "subscribePattern": ".*", "badRecords": "dlq", "dlqTopic": "dead"}, "is itself read"),
        ({**NEEDED, "tags": "a", "sqlFilter": "b = 1"}, "tags and sqlFilter exclude"),
        ({**NEEDED, "sqlFilter": "price >"}, "option sqlFilter='price >': "),
        ({**NEEDED, "nameServer": "localhost"}, "nameServer='localhost': .*host:port"),
        ({**NEEDED, "timeout": "10ms"}, "timeout='10ms': expected at least 1s"),
        ({**NEEDED, "startingOffsets": "group"}, "needs the option group"),
        ({**NEEDED, "group": "no body"}, "option group='no body': .*illegal characters"),
        ({**NEEDED, "startingOffsets": "first"}, "startingOffsets='first': expected earliest, latest, group, or JSON"),
        ({**NEEDED, "startingOffsets": '{"t":{"b":{"0":-3}}}'}, "startingOffsets: -3 for queue 0 of topic t at broker"),
        ({**NEEDED, "endingOffsets": "earliest"}, "endingOffsets='earliest': expected latest, or JSON per queue"),
        ({**NEEDED, "startingOffsetsByTimestamp": "now"}, "startingOffsetsByTimestamp='now': .*expected JSON such as"),
        ({**NEEDED, "endingOffsetsByTimestamp": "[]"}, "endingOffsetsByTimestamp='.*expected JSON such as"),
        ({"nameServer": "a:1", "assign": "orders"}, "assign='orders': .*expected JSON such as"),
        ({"nameServer": "a:1", "assign": '{"orders":{"b":[]}}'}, "assign=.* names no queue"),
        ({**NEEDED, "maxTriggerDelay": "15"}, "a number and a unit"),
        ({"nameServer": "a:1", "subscribePattern": "("}, "subscribePattern"),
    ],
)
def test_wrong_options(given: dict[str, str], said: str) -> None:
    with pytest.raises(BadOption, match=said):
        read_options(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"startingOffsets": "latest"}, "startingOffsets=latest is for streams"),
        ({"maxOffsetsPerTrigger": "5"}, "maxOffsetsPerTrigger is for streams: a batch read has no triggers"),
        ({"minoffsetspertrigger": "5"}, "minOffsetsPerTrigger is for streams"),
        ({"maxBytesPerTrigger": "5"}, "maxBytesPerTrigger is for streams"),
        ({"maxTriggerDelay": "5s"}, "maxTriggerDelay is for streams"),
    ],
)
def test_what_a_batch_read_does_not_take(given: dict[str, str], said: str) -> None:
    with pytest.raises(BadOption, match=said):
        batch_options({**NEEDED, **given})
    assert batch_options(NEEDED) == read_options(NEEDED)


def test_other_kinds_of_options_tell_what_they_take() -> None:
    with pytest.raises(BadOption, match="deliveryGuarantee='once': expected at-least-once or exactly-once"):
        write_options({"nameServer": "a:1", "deliveryGuarantee": "once"})
    with pytest.raises(BadOption, match=r"maxBytesPerPartition='32m': expected a whole number from 65536 on .*bytes"):
        scan_options({"path": "x", "maxBytesPerPartition": "32m"})
    with pytest.raises(BadOption, match="endingTimestamp=1 is before"):
        scan_options({"path": "x", "startingTimestamp": "2", "endingTimestamp": "1"})


def test_durations() -> None:
    assert [duration_ms(text, "x") for text in ("5ms", "2 s", "3m", "1h")] == [5, 2_000, 180_000, 3_600_000]


def test_offsets_per_queue() -> None:
    assert per_queue('{"t":{"b":{"0":5,"1":-2}}}', "x") == {Queue("t", "b", 0): 5, Queue("t", "b", 1): -2}
    for text in ("[", '{"t":5}', '{"t":{"b":{"x":5}}}'):
        with pytest.raises(BadOption, match=r"option x=.*expected JSON such as"):
            per_queue(text, "x")
    for text in ("[", '{"t":{"b":{"0":-1}}}'):
        with pytest.raises(BadOption, match=r"expected JSON such as .*1767225600000.* in milliseconds since 1970"):
            per_queue(text, "startingOffsetsByTimestamp")


def test_what_spark_adds_itself_is_no_mistake() -> None:
    added = {"queryName": "orders", "checkpointLocation": "x"}
    assert read_options({"nameServer": "a:1", "subscribe": "orders", **added}).subscribe == "orders"
