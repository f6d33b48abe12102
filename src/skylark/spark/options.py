"""The options of source and sink, as types. A wrong one is an error that names it and says what would be right."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, field

from skylark.client.addresses import parse_name_servers
from skylark.client.errors import InvalidMessage
from skylark.client.validation import check_group, check_send_topic
from skylark.spark.own_topics import LEDGER
from skylark.spark.queues import EARLIEST, Offsets, flat

_MOST: Final = 2**63 - 1
Positive = Annotated[int, Meta(ge=1, le=_MOST)]
Millis = Annotated[int, Meta(ge=0, le=_MOST)]
_Struct = TypeVar("_Struct", bound=msgspec.Struct)

BodyFormat = Annotated[
    Literal["binary", "text", "json", "avro", "protobuf"],
    Meta(description="how bodies are decoded into the column `value`; `binary` adds none"),
]
BodySchema = Annotated[
    str | None,
    Meta(description="columns as in SQL (json), a schema as JSON or its file (avro), a descriptor file (protobuf)"),
]
BodyMessage = Annotated[str | None, Meta(description="the message type in the descriptor file (protobuf)")]

_OF_SPARK: Final = frozenset(("path", "checkpointlocation", "queryname"))
"""Options that Spark itself hands to every source and sink."""

_A_TIME_MS: Final = 1_767_225_600_000  # the beginning of 2026, for examples
_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class BadOption(ValueError):
    """An option that can't be meant so."""


class Connecting(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """What source and sink have in common."""

    name_server: Annotated[str, Meta(min_length=1, description="host:port, several separated by a semicolon")] = field(
        default=""
    )
    timeout: Annotated[
        str, Meta(description="how long a server may be unreachable before the query fails: `30s`, `2m`")
    ] = "30s"

    @property
    def timeout_s(self) -> float:
        return duration_ms(self.timeout, "timeout") / 1000


class Reading(Connecting, rename="camel", kw_only=True, frozen=True):
    """The options of a read."""

    subscribe: Annotated[str | None, Meta(description="topics, separated by commas")] = None
    subscribe_pattern: Annotated[
        str | None, Meta(description="a regular expression for whole topic names; never RocketMQ's own topics")
    ] = None
    assign: Annotated[str | None, Meta(description='queues as JSON: `{"orders":{"broker-a":[0,1]}}`')] = None
    group: Annotated[str | None, Meta(description="the consumer group whose offsets are read and committed")] = None
    tags: Annotated[str | None, Meta(description="tags to read, `a || b`; the broker filters")] = None
    sql_filter: Annotated[str | None, Meta(description="an SQL92 expression over properties; the broker filters")] = (
        None
    )
    starting_offsets: Annotated[
        str | None,
        Meta(
            description="`earliest` (a batch read's default), `latest` (a stream's), `group`, or JSON per queue (-2 "
            "earliest, -1 latest)"
        ),
    ] = None
    starting_timestamp: Annotated[Millis | None, Meta(description="milliseconds since 1970, for all queues")] = None
    starting_offsets_by_timestamp: Annotated[
        str | None, Meta(description="milliseconds since 1970 as JSON per queue")
    ] = None
    starting_offsets_by_timestamp_strategy: Annotated[
        Literal["latest", "error"],
        Meta(description="for a queue that has no message since the timestamp: start at its end, or fail"),
    ] = "latest"
    ending_offsets: Annotated[str, Meta(description="`latest`, or JSON per queue; batch only")] = "latest"
    ending_timestamp: Annotated[Millis | None, Meta(description="milliseconds since 1970; batch only")] = None
    ending_offsets_by_timestamp: Annotated[str | None, Meta(description="the same as JSON per queue; batch only")] = (
        None
    )
    max_offsets_per_trigger: Annotated[Positive | None, Meta(description="most messages a trigger")] = None
    min_offsets_per_trigger: Annotated[
        Positive | None, Meta(description="wait for that many messages, up to maxTriggerDelay")
    ] = None
    max_trigger_delay: Annotated[str, Meta(description="how long minOffsetsPerTrigger may hold up: `15m`")] = "15m"
    max_bytes_per_trigger: Annotated[Positive | None, Meta(description="most bytes a trigger, about")] = None
    min_partitions: Annotated[Positive | None, Meta(description="split queues until there are that many tasks")] = None
    max_records_per_partition: Annotated[Positive | None, Meta(description="split queues larger than that")] = None
    pull_batch_size: Annotated[
        int, Meta(ge=1, le=1024, description="messages that one pull asks for; brokers give 32 unless set otherwise")
    ] = 512
    fail_on_data_loss: Annotated[
        bool, Meta(description="fail when messages are lost: deleted or damaged before they were read")
    ] = True
    body_format: BodyFormat = "binary"
    body_schema: BodySchema = None
    body_message: BodyMessage = None
    bad_records: Annotated[
        Literal["fail", "drop", "dlq"],
        Meta(description="what becomes of a message that can't be read or decoded; `dlq` sends it to dlqTopic"),
    ] = "fail"
    dlq_topic: Annotated[str | None, Meta(description="where badRecords=dlq sends to")] = None
    offset_commit: Annotated[bool, Meta(description="commit progress to the group, so that its lag shows")] = True


class Writing(Connecting, rename="camel", kw_only=True, frozen=True):
    """The options of a write."""

    topic: Annotated[str | None, Meta(description="where all rows go; without it, each names its topic")] = None
    group: Annotated[str, Meta(description="the producer group")] = "spark"
    delivery_guarantee: Annotated[
        Literal["at-least-once", "exactly-once"], Meta(description="`at-least-once`, or `exactly-once` (Skylark only)")
    ] = "at-least-once"
    write_id: Annotated[str | None, Meta(description="the name of a batch write, by which its rerun is recognised")] = (
        None
    )
    ledger_topic: Annotated[
        str, Meta(description="where exactly-once writes note what is decided; it has one queue")
    ] = LEDGER
    new_ledger: Annotated[
        bool, Meta(description="go on with a stream though the ledger does not know the batch before")
    ] = False
    fail_on_other_rows: Annotated[
        bool,
        Meta(description="fail when a batch that was decided comes again with other rows; else what was decided stays"),
    ] = True
    max_in_flight: Annotated[
        int, Meta(ge=1, le=4096, description="requests of a task that may wait for their answer")
    ] = 64
    max_body_bytes: Annotated[
        Positive | None, Meta(description="the largest body; else the `maxMessageSize` of the brokers")
    ] = None

    @property
    def is_exactly_once(self) -> bool:
        return self.delivery_guarantee == "exactly-once"


def parse(kind: type[_Struct], options: Mapping[str, str]) -> _Struct:
    """The options as `kind`. Names may be in any case, as Spark's are. Raises BadOption."""
    names = {name.lower(): name for name in option_names(kind)}
    given: dict[str, str] = {}
    for name, value in options.items():
        known = names.get(name.lower())
        if known is not None:
            given[known] = value
        elif name.lower() not in _OF_SPARK:
            raise BadOption(f"unknown option {name!r}{_suggestion(name, names)}")
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as e:
        name, reason = _placed(e)
        raise BadOption(f"option {name}={given.get(name)!r}: {_expected(kind, name) or reason}") from None


def _expected(kind: type[msgspec.Struct], name: str) -> str:
    """What an option takes, for types that tell; the description has the unit of a number."""
    from msgspec import inspect  # here: only an error needs it

    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    (found,) = (item.type for item in info.fields if item.encode_name == name)
    description = ""
    if isinstance(found, inspect.Metadata):
        description = (found.extra_json_schema or {}).get("description", "")
        found = found.type
    for part in found.types if isinstance(found, inspect.UnionType) else (found,):
        if isinstance(part, inspect.LiteralType):
            *most, last = map(str, part.values)
            return f"expected {', '.join(most)} or {last}"
        if isinstance(part, inspect.BoolType):
            return "expected true or false"
        if isinstance(part, inspect.IntType):
            high = "on" if part.le is None or part.le == _MOST else f"to {part.le}"
            such_as = f", such as {_A_TIME_MS}" if "milliseconds since" in description else ""
            return f"expected a whole number from {part.ge} {high} ({description}){such_as}"
    return ""


@cache  # finding out about a type takes milliseconds
def _fields(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)


def option_names(kind: type[msgspec.Struct]) -> list[str]:
    return [item.encode_name for item in _fields(kind)]


def read_options(options: Mapping[str, str]) -> Reading:
    """What batch reads and streams have in common. Raises BadOption also for options that contradict each other."""
    found = parse(Reading, options)
    check_connecting(found)
    _exactly_one(found, "subscribe", "subscribePattern", "assign")
    _at_most_one(found, "tags", "sqlFilter")
    _at_most_one(found, "startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp")
    _at_most_one(found, "endingTimestamp", "endingOffsetsByTimestamp")
    if _is_given(options, "endingOffsets"):
        for name in _given(found, ("endingTimestamp", "endingOffsetsByTimestamp")):
            raise BadOption(f"the options endingOffsets and {name} exclude each other")
    check_times(found.starting_timestamp, found.ending_timestamp)
    _check_name("group", found.group, check_group)
    if found.starting_offsets == "group" and not found.group:
        raise BadOption("option startingOffsets=group needs the option group")
    _check_positions(found)
    _check_times_of_queues(found)
    if found.sql_filter is not None:
        _check_sql(found.sql_filter)
    if found.subscribe_pattern is not None:
        try:
            re.compile(found.subscribe_pattern)
        except re.error as e:
            raise BadOption(f"option subscribePattern={found.subscribe_pattern!r}: {e}") from None
    _check_dlq(found)
    duration_ms(found.max_trigger_delay, "maxTriggerDelay")
    return found


def write_options(options: Mapping[str, str]) -> Writing:
    """Raises BadOption also for names that no topic or group can have."""
    found = parse(Writing, options)
    check_connecting(found)
    _check_name("topic", found.topic, check_send_topic)
    _check_name("ledgerTopic", found.ledger_topic, check_send_topic)
    _check_name("group", found.group, check_group)
    return found


def _check_name(option: str, value: str | None, check: Callable[[str], object]) -> None:
    try:
        if value is not None:
            check(value)
    except InvalidMessage as e:
        raise BadOption(f"option {option}={value!r}: {e}") from None


def _check_positions(options: Reading) -> None:
    """What can be told of them without a server."""
    _check_offsets("startingOffsets", options.starting_offsets, "earliest", "latest", "group")
    _check_offsets("endingOffsets", options.ending_offsets, "latest")
    for name, times in (
        ("startingOffsetsByTimestamp", options.starting_offsets_by_timestamp),
        ("endingOffsetsByTimestamp", options.ending_offsets_by_timestamp),
    ):
        if times is not None:
            per_queue(times, name)
    if options.assign is not None:
        brokers = assigned_queues(options.assign).values()
        if not any(numbers for queues in brokers for numbers in queues.values()):
            raise BadOption(f"option assign={options.assign!r} names no queue")


def _check_offsets(option: str, text: str | None, *words: str) -> None:
    if text is None or text in words:
        return
    if not text.lstrip().startswith("{"):
        raise BadOption(f"option {option}={text!r}: expected {', '.join(words)}, or JSON per queue")
    for queue, offset in per_queue(text, option).items():
        if offset < EARLIEST:
            raise BadOption(f"option {option}: {offset} for {queue} is neither an offset nor -2 or -1")


def _check_dlq(options: Reading) -> None:
    if (options.bad_records == "dlq") != (options.dlq_topic is not None):
        raise BadOption("the options badRecords=dlq and dlqTopic need each other")
    if options.dlq_topic is None:
        return
    _check_name("dlqTopic", options.dlq_topic, check_send_topic)
    topics = re.split(r"\s*,\s*", (options.subscribe or "").strip())
    pattern = options.subscribe_pattern
    if (
        options.dlq_topic in topics
        or (pattern is not None and re.fullmatch(pattern, options.dlq_topic))
        or (options.assign is not None and options.dlq_topic in assigned_queues(options.assign))
    ):
        raise BadOption(f"option dlqTopic={options.dlq_topic!r} is itself read: bad records would go round in circles")


def _check_sql(expression: str) -> None:
    """Apache's broker takes an expression that makes no sense for one that lets everything through."""
    from skylark.selectors import BadSelector, compile_selector  # here: most reads have none, and a parser is large

    try:
        compile_selector(expression)
    except BadSelector as e:
        raise BadOption(f"option sqlFilter={expression!r}: {e}") from None


def stream_options(options: Mapping[str, str]) -> Reading:
    """The same for a stream, which has no end."""
    for name in ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"):
        if _is_given(options, name):
            raise BadOption(f"option {name} is for batch reads: a stream has no end")
    return read_options(options)


def batch_options(options: Mapping[str, str]) -> Reading:
    """The same for a batch read, which has no triggers, and begins before its end."""
    for name in ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxBytesPerTrigger", "maxTriggerDelay"):
        if _is_given(options, name):
            raise BadOption(
                f"option {name} is for streams: a batch read has no triggers and reads everything up to its end, which "
                "endingOffsets or endingTimestamp can set"
            )
    found = read_options(options)
    if found.starting_offsets == "latest":
        raise BadOption(
            "option startingOffsets=latest is for streams: a batch read would begin where it ends; without the option "
            "it begins with the first message"
        )
    return found


def check_times(starting_ms: int | None, ending_ms: int | None) -> None:
    """Raises BadOption for a range of time that ends before it begins."""
    if starting_ms is not None and ending_ms is not None and ending_ms < starting_ms:
        raise BadOption(f"option endingTimestamp={ending_ms} is before startingTimestamp={starting_ms}")


def _check_times_of_queues(options: Reading) -> None:
    starts, ends = (
        per_queue(text, name) if text is not None else {}
        for name, text in (
            ("startingOffsetsByTimestamp", options.starting_offsets_by_timestamp),
            ("endingOffsetsByTimestamp", options.ending_offsets_by_timestamp),
        )
    )
    for queue in sorted({**starts, **ends}):
        start_ms, end_ms = starts.get(queue, options.starting_timestamp), ends.get(queue, options.ending_timestamp)
        if start_ms is not None and end_ms is not None and end_ms < start_ms:
            raise BadOption(f"{queue} is to be read up to the time {end_ms}, which is before its first one, {start_ms}")


def check_connecting(options: Connecting) -> None:
    """Raises BadOption for a server that can't be meant."""
    if not options.name_server:
        raise BadOption("option nameServer is missing: the address of a name server, such as localhost:9876")
    try:
        parse_name_servers(options.name_server)
    except ValueError as e:
        raise BadOption(f"option nameServer={options.name_server!r}: {e}") from None
    if duration_ms(options.timeout, "timeout") < 1000:
        raise BadOption(f"option timeout={options.timeout!r}: expected at least 1s")


def duration_ms(text: str, option: str) -> int:
    """`500ms`, `30s`, `15m`, `1h` as milliseconds."""
    match = re.fullmatch(r"(\d{1,9})\s*(ms|s|m|h|d)", text.strip())
    if match is None:
        raise BadOption(f"option {option}={text!r}: expected a number and a unit, such as 500ms, 30s, 15m or 1h")
    return int(match[1]) * _UNITS_MS[match[2]]


def per_queue(text: str, option: str) -> Offsets:
    """`{"orders":{"broker-a":{"0":23,"1":-2}}}` as a mapping; of offsets, or of times if the option says so."""
    is_time = option.endswith("ByTimestamp")
    try:
        found = flat(msgspec.json.decode(text, type=dict[str, dict[str, dict[str, int]]]))
        if is_time and any(time_ms < 0 for time_ms in found.values()):
            raise ValueError("a time before 1970")
    except (msgspec.MsgspecError, ValueError) as e:
        values = {"0": _A_TIME_MS} if is_time else {"0": 23, "1": -2}
        raise BadOption(
            f"option {option}={text!r}: {e}; expected JSON such as "
            + json.dumps({"orders": {"broker-a": values}})
            + (", in milliseconds since 1970" if is_time else "")
        ) from None
    return found


def assigned_queues(text: str) -> dict[str, dict[str, list[int]]]:
    """The option `assign`: topic -> broker -> queues."""
    try:
        return msgspec.json.decode(text, type=dict[str, dict[str, list[int]]])
    except msgspec.MsgspecError as e:
        raise BadOption(
            f'option assign={text!r}: {e}; expected JSON such as {{"orders": {{"broker-a": [0, 1]}}}}'
        ) from None


def _placed(error: msgspec.ValidationError) -> tuple[str, str]:
    """msgspec says `Expected ... - at `$.name``."""
    reason, _, place = str(error).partition(" - at `$.")
    return place.rstrip("`"), reason


def _suggestion(name: str, names: Mapping[str, str]) -> str:
    close = difflib.get_close_matches(name.lower(), names, n=1)
    return f"; did you mean {names[close[0]]}?" if close else f"; there are {', '.join(sorted(names.values()))}"


def _is_given(options: Mapping[str, str], name: str) -> bool:
    return name.lower() in map(str.lower, options)


def _given(options: msgspec.Struct, names: tuple[str, ...]) -> list[str]:
    values = {item.encode_name: getattr(options, item.name) for item in _fields(type(options))}
    return [name for name in names if values[name] is not None]


def _exactly_one(options: msgspec.Struct, *names: str) -> None:
    if not _given(options, names):
        raise BadOption(f"one of the options {', '.join(names)} is needed")
    _at_most_one(options, *names)


def _at_most_one(options: msgspec.Struct, *names: str) -> None:
    given = _given(options, names)
    if len(given) > 1:
        raise BadOption(f"the options {' and '.join(given)} exclude each other")
