"""Rows of a table as messages to send.

A row has any of these columns, `body` at least; a null in any but `topic` and `body` means that there is none:

    topic        string                              where it goes, unless the option `topic` says it for all
    body         binary or string                    null only where the topic is compacted: an empty one, which deletes
                                                     the key that the row names
    tags, keys   string; keys also array<string>
    properties   map<string,string>                  what the system sets itself is left out, so that the properties
                                                     of messages that were read can be written again
    orderingKey  string or whole number              rows of one key go to one queue, in the order of the rows
    delay        milliseconds, interval or timestamp how long, or until when, the broker keeps it back
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    DayTimeIntervalType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from skylark.client.errors import InvalidMessage
from skylark.client.validation import check_encoded_properties, check_labels, check_send_topic, is_reserved
from skylark.spark.options import BadOption, Writing
from skylark.wire.message import (
    KEY_SEPARATOR,
    PROPERTY_CHECK_IMMUNITY_SECONDS,
    PROPERTY_KEYS,
    PROPERTY_SHARDING_KEY,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_TRANSACTION_ID,
    PROPERTY_UNIQUE_KEY,
)
from skylark.wire.records import encode_properties

_WHOLE: Final = (ByteType, ShortType, IntegerType, LongType)
_TYPES: Final[dict[str, tuple[type[DataType], ...]]] = {
    "topic": (StringType,),
    "body": (BinaryType, StringType),
    "tags": (StringType,),
    "keys": (StringType, ArrayType),
    "properties": (MapType,),
    "orderingKey": (StringType, *_WHOLE),
    "delay": (*_WHOLE, DayTimeIntervalType, TimestampType),
}
_EXPECTED: Final = {
    "topic": "string",
    "body": "binary or string",
    "tags": "string",
    "keys": "string or array<string>",
    "properties": "map<string,string>",
    "orderingKey": "string or a whole number",
    "delay": "a number of milliseconds, an interval day to second, or a timestamp",
}
_OF_THE_SOURCE: Final = frozenset(
    ("broker", "queueid", "offset", "borntimestamp", "storetimestamp", "reconsumetimes", "msgid", "value")
)
_LEFT_OUT: Final = frozenset(
    (PROPERTY_TRANSACTION_ID, PROPERTY_TRANSACTION_CHECK_TIMES, PROPERTY_CHECK_IMMUNITY_SECONDS)
)
_KEPT: Final = frozenset((PROPERTY_TAGS, PROPERTY_KEYS))
_SURELY_SHORT: Final = 8_191  # characters of properties that are within the limit in any encoding


class BadColumns(ValueError):
    """The table that is to be written is not one of messages."""


class BadRow(ValueError):
    """A row that can't be a message."""


class Outgoing(msgspec.Struct, gc=False):
    """A message on its way out."""

    topic: str
    body: bytes
    properties: dict[str, str]
    ordering_key: str | int | None
    is_delayed: bool
    size_bytes: int


class Rows:
    """How the rows of one table become messages. Raises BadColumns or BadOption if they can't."""

    def __init__(self, schema: StructType, options: Writing) -> None:
        self._topic = options.topic
        self._positions: dict[str, int] = {}
        self._types: dict[str, DataType] = {}
        names = {name.lower(): name for name in _TYPES}
        for position, field in enumerate(schema.fields):
            name = names.get(field.name.lower())
            if name is None:
                raise BadColumns(f"column {field.name!r} is not one that can be written{_hint(field.name, names)}")
            if name in self._positions:
                raise BadColumns(f"there are two columns {name!r}")
            if not _fits(name, field.dataType):
                raise BadColumns(f"column {name!r} is {field.dataType.simpleString()}; it must be {_EXPECTED[name]}")
            self._positions[name] = position
            self._types[name] = field.dataType
        if "body" not in self._positions:
            raise BadColumns("column 'body' is missing: the bytes or the text of each message")
        if self._topic is None and "topic" not in self._positions:
            raise BadOption("option topic is missing: where the rows go; a column 'topic' says it for each row")
        if options.is_exactly_once and "delay" in self._positions:
            raise BadColumns(
                "column 'delay' can't be written with deliveryGuarantee=exactly-once: the servers know no transactions "
                "with a delay"
            )

    @property
    def has_delays(self) -> bool:
        return "delay" in self._positions

    def messages(
        self,
        batch: pa.RecordBatch,
        unique_keys: Sequence[str],
        first_row: int,
        is_compacted: Callable[[str], bool] = lambda topic: False,
    ) -> Iterator[Outgoing]:
        """The messages of a batch, with these unique keys. Raises BadRow, with the number of the row in its task.

        `is_compacted` says of a topic whether an empty body deletes its key there.
        """
        count = batch.num_rows
        nothing: list[Any] = [None] * count
        values = {name: self._values(batch, name) for name in self._positions}
        delay_property, delays = self._delays(batch)
        columns = zip(
            values.get("topic", nothing) if self._topic is None else [self._topic] * count,
            values["body"],
            values.get("tags", nothing),
            values.get("keys", nothing),
            values.get("properties", nothing),
            values.get("orderingKey", nothing),
            delays if delays is not None else nothing,
            unique_keys,
            strict=True,
        )
        for row, values_of_row in enumerate(columns, first_row):
            try:
                yield _message(delay_property, is_compacted, *values_of_row)
            except InvalidMessage as e:
                raise BadRow(f"row {row} of its partition can't be sent: {e}") from None

    def _values(self, batch: pa.RecordBatch, name: str) -> list[Any]:
        if name == "delay":
            return []
        values: list[Any] = batch.column(self._positions[name]).to_pylist()
        if name == "body" and isinstance(self._types[name], StringType):
            return [value.encode() if value is not None else None for value in values]
        return values

    def _delays(self, batch: pa.RecordBatch) -> tuple[str, list[int | None] | None]:
        """The property that asks for a delay, and its milliseconds for each row."""
        if not self.has_delays:
            return "", None
        kind = self._types["delay"]
        values: list[int | None] = batch.column(self._positions["delay"]).cast(pa.int64()).to_pylist()
        if not isinstance(kind, _WHOLE):  # microseconds; a message is not to come before its time
            values = [None if value is None else -(-value // 1000) for value in values]
        return PROPERTY_TIMER_DELIVER_MS if isinstance(kind, TimestampType) else PROPERTY_TIMER_DELAY_MS, values


def is_own(name: str) -> bool:
    """Whether a property of this name is its user's: what may be written again when a message was read."""
    return not is_reserved(name) and name not in _LEFT_OUT


def _message(
    delay_property: str,
    is_compacted: Callable[[str], bool],
    topic: str | None,
    body: bytes | None,
    tags: str | None,
    keys: str | list[str | None] | None,
    given: list[tuple[str, str | None]] | None,
    ordering_key: str | int | None,
    delay: int | None,
    unique_key: str,
) -> Outgoing:
    if topic is None:
        raise InvalidMessage("its topic is null")
    check_send_topic(topic)
    is_tombstone = False
    if body is None:
        if not is_compacted(topic):
            raise InvalidMessage(
                f"its body is null, and topic {topic} is not compacted (cleanup.policy=COMPACTION), where that deletes "
                "a key; coalesce(body, '') makes it an empty one"
            )
        body, is_tombstone = b"", True
    properties: dict[str, str] = {}
    if given:
        own = {name: value for name, value in given if value is not None and value != "" and is_own(name)}
        check_labels(None, None, own)
        properties = own
        properties.update((name, value) for name, value in given if name in _KEPT and value)
    if isinstance(keys, list):
        several = [key for key in keys if key]
        keys = KEY_SEPARATOR.join(several)
    else:
        several = keys.split() if keys else []
    if keys:
        properties[PROPERTY_KEYS] = keys
    if tags:
        properties[PROPERTY_TAGS] = tags
    if tags or keys:
        check_labels(tags or None, several or None, None)
    if delay is not None:
        if delay < 0:
            raise InvalidMessage(f"its delay is {delay} ms; 0 or more are allowed")
        properties[delay_property] = str(delay)
    if ordering_key is not None and ordering_key != "":
        properties[PROPERTY_SHARDING_KEY] = str(ordering_key)
        check_labels(None, None, {PROPERTY_SHARDING_KEY: properties[PROPERTY_SHARDING_KEY]})
    if is_tombstone and PROPERTY_KEYS not in properties:
        raise InvalidMessage("its body is null and it has no keys: in a compacted topic null deletes a key")
    properties[PROPERTY_UNIQUE_KEY] = unique_key
    size = sum(map(len, properties)) + sum(map(len, properties.values())) + 2 * len(properties)
    if size > _SURELY_SHORT:
        check_encoded_properties(encode_properties(properties))
    return Outgoing(topic, body, properties, ordering_key, delay is not None, len(body) + size)


def _fits(name: str, kind: DataType) -> bool:
    if not isinstance(kind, _TYPES[name]):
        return False
    if isinstance(kind, ArrayType):
        return isinstance(kind.elementType, StringType)
    if isinstance(kind, MapType):
        return isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType)
    return True


def _hint(name: str, names: dict[str, str]) -> str:
    if name.lower() in _OF_THE_SOURCE:
        return ": it belongs to messages that were read; select the columns to write"
    close = difflib.get_close_matches(name.lower(), names, n=1)
    return f"; did you mean {names[close[0]]!r}?" if close else f"; there are {', '.join(_TYPES)}"
