"""Bodies decoded by option: the column `value`, and what becomes of rows that can't be decoded.

Schemas are read where the query is planned and travel with it, so workers need no file. JSON is decoded by msgspec for
all rows in one call, with the types of the schema, and the rows are only looked at one by one when one of them is bad.
"""

from __future__ import annotations

import datetime
import decimal
import importlib
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, Self, TypedDict

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import Meta
from pyspark.sql import types as spark_types
from pyspark.sql.pandas.types import to_arrow_type

from skylark.client.errors import RocketMQError
from skylark.client.validation import user_properties
from skylark.extras import how_to_install
from skylark.spark import columns
from skylark.spark.options import BadOption, Reading
from skylark.spark.queues import Queue
from skylark.spark.records import Records
from skylark.wire.message import PROPERTY_KEYS, PROPERTY_TAGS

if TYPE_CHECKING:
    from skylark.client.sync import Producer

log = logging.getLogger(__name__)

COLUMN: Final = "value"
REASON: Final = "badRecordReason"
"""The property that tells why a message is in the DLQ topic; it goes with `badRecordTopic`, `-Broker`, `-Queue`,
`-Offset` and `-Id`, which tell where it was."""

_MOST_REASON: Final = 500  # characters
_PRODUCER_GROUP: Final = "skylark-spark-dlq"
_WHOLE_TYPE: Final = re.compile(r"\s*(struct|array|map)\s*<", re.IGNORECASE)
_CONTROLS: Final = re.compile(r"[\x00-\x1f]+")
_BAD: Final = (ValueError, TypeError, OverflowError, EOFError, LookupError, ArithmeticError, msgspec.MsgspecError)

Decode = Callable[[bytes], Any]


class Undecodable(RocketMQError):
    """A body that is not what the options say."""


class Decoding(Protocol):
    """The options about bodies, of reads with and without a broker."""

    @property
    def body_format(self) -> str: ...
    @property
    def body_schema(self) -> str | None: ...
    @property
    def body_message(self) -> str | None: ...


class Format(msgspec.Struct, frozen=True):
    """How bodies are decoded: a value that travels to the workers."""

    name: str
    schema: bytes = b""
    message: str = ""

    @property
    def spark_type(self) -> str:
        """The type of the column. Raises BadOption."""
        try:
            match self.name:
                case "avro":
                    return str(_module("avro").spark_type(self.schema))
                case "protobuf":
                    return str(_module("protobuf").spark_type(self.schema, self.message))
                case "json":
                    schema = self.schema.decode()
                    return schema if _WHOLE_TYPE.match(schema) else f"struct<{schema}>"
                case _:
                    return "string"
        except BadOption:
            raise
        except ValueError as e:
            raise BadOption(f"option bodySchema: {e}") from None

    def decoder(self, kind: spark_types.DataType) -> Decode:
        decode: Decode
        match self.name:
            case "avro":
                decode = _module("avro").decoder(self.schema)
            case "protobuf":
                decode = _module("protobuf").decoder(self.schema, self.message)
            case "json":
                decode = msgspec.json.Decoder(_json_type(kind)).decode
            case _:
                decode = bytes.decode
        return decode


def format_of(options: Decoding) -> Format | None:
    """How the bodies are to be decoded, None if they stay as they are. Raises BadOption."""
    name, schema = options.body_format, options.body_schema
    if name in ("binary", "text") and schema is not None:
        raise BadOption(f"option bodySchema has no meaning with bodyFormat={name}")
    if options.body_message is not None and name != "protobuf":
        raise BadOption("option bodyMessage is for bodyFormat=protobuf")
    if name == "binary":
        return None
    if name == "text":
        return Format(name)
    if not schema:
        raise BadOption(f"option bodyFormat={name} needs the option bodySchema")
    if name == "json":
        return Format(name, schema.encode())
    if name == "protobuf" and not options.body_message:
        raise BadOption("option bodyFormat=protobuf needs the option bodyMessage: the name of the message type")
    is_text = name == "avro" and schema.lstrip()[:1] in ("{", "[", '"')
    return Format(name, schema.encode() if is_text else _file(schema), options.body_message or "")


def spark_schema(options: Decoding) -> str:
    """The columns that a source with these options has, as Spark is told. Raises BadOption."""
    format = format_of(options)
    return columns.SCHEMA if format is None else f"{columns.SCHEMA}, {COLUMN} {format.spark_type}"


class Shape(msgspec.Struct, frozen=True):
    """Which columns tasks are to give, and how the bodies become one of them. Travels to the workers."""

    names: Sequence[str]
    format: Format | None = None
    value_type: spark_types.DataType | None = None


def shape_of(options: Decoding, schema: spark_types.StructType) -> Shape:
    """All columns, or those that the user's own `.schema()` names. Raises ValueError for what can't be given."""
    format = format_of(options)
    plain = {field.name: field.dataType.simpleString() for field in schema}
    if format is not None:
        plain.pop(COLUMN, None)
    columns.check(plain)
    if format is None or COLUMN not in schema.fieldNames():
        return Shape(schema.fieldNames())
    return Shape(schema.fieldNames(), format, schema[COLUMN].dataType)


def _file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise BadOption(f"option bodySchema={path!r}: {e.strerror or e}") from None


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"skylark.spark.{name}")
    except ImportError as e:
        raise BadOption(f"option bodyFormat={name}: {e}; {how_to_install('formats')} brings what it needs") from None


class Columns:
    """Makes the columns of a task, and does with bad rows what the options say. Used as a context manager.

    `bad_records` is `fail`, `drop`, or `dlq`, which also needs the options with its topic.
    """

    def __init__(self, shape: Shape, bad_records: str, dlq: Reading | None = None) -> None:
        self._names = list(shape.names)
        self._format = shape.format
        if shape.format is not None and shape.value_type is not None:
            self._type = to_arrow_type(shape.value_type, timezone="UTC")
            self._decode = shape.format.decoder(shape.value_type)
        self._bad_records = bad_records
        self._dlq = dlq if bad_records == "dlq" else None
        self._can_send = dlq is not None
        self._producer: Producer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._producer is not None:
            self._producer.__exit__(kind, error, trace)

    def of(self, records: Records, *, broker: str, topic: str | None = None) -> pa.RecordBatch:
        """The records that can be decoded. Without `topic` it is read from them. Raises Undecodable."""
        if self._format is None:
            return columns.record_batch(records, self._names, broker=broker, topic=topic)
        bodies = records.bodies().to_pylist()
        values, bad = self._decoded(bodies)
        if bad:
            self._settle(records, broker, topic, bodies, bad)
            kept = np.array([row not in bad for row in range(len(records))])
            records, values = records.filter(kept), values.filter(pa.array(kept))
        others = [name for name in self._names if name != COLUMN]
        batch = columns.record_batch(records, others, broker=broker, topic=topic)
        return batch.append_column(COLUMN, values).select(self._names)

    def _decoded(self, bodies: list[bytes]) -> tuple[pa.Array, dict[int, str]]:
        """The values, and row -> reason for those that are bad."""
        try:
            return pa.array(map(self._decode, bodies), self._type), {}
        except _BAD:
            pass
        values: list[Any] = [None] * len(bodies)
        bad: dict[int, str] = {}
        for row, body in enumerate(bodies):
            try:
                value = self._decode(body)
                pa.array([value], self._type)
                values[row] = value
            except _BAD as e:
                bad[row] = _CONTROLS.sub(" ", f"{e}" or type(e).__name__)[:_MOST_REASON]
        return pa.array(values, self._type), bad

    def _settle(
        self, records: Records, broker: str, topic: str | None, bodies: list[bytes], bad: dict[int, str]
    ) -> None:
        assert self._format is not None
        offsets = records.queue_offsets().to_pylist()
        for queue, reasons in _by_queue(records, broker, topic, bad).items():
            first, reason = next(iter(reasons.items()))
            if self._bad_records == "fail":
                raise Undecodable(
                    f"{queue}: the message at offset {offsets[first]} is not {self._format.name}: {reason}; "
                    f"set badRecords=drop{' or badRecords=dlq' if self._can_send else ''} to go on without it"
                )
            if self._dlq is not None:
                self._send(self._dlq, records, queue, bodies, reasons)
            log.warning(
                "%s: %s because not %s: %d (from offset %d on; that one: %s)",
                queue,
                f"sent to topic {self._dlq.dlq_topic}" if self._dlq is not None else "dropped",
                self._format.name,
                len(reasons),
                offsets[first],
                reason,
            )

    def _send(self, to: Reading, records: Records, queue: Queue, bodies: list[bytes], bad: dict[int, str]) -> None:
        """Returns when each is stored. A task that runs again sends them again."""
        assert to.dlq_topic is not None
        if self._producer is None:
            from skylark.client.sync import Producer  # here: every task would pay for it, and few have bad rows

            self._producer = Producer(to.name_server, group=_PRODUCER_GROUP, timeout_s=to.timeout_s).__enter__()
        offsets, ids = records.queue_offsets().to_pylist(), records.message_ids().to_pylist()
        all_properties = records.properties()
        for row, reason in bad.items():
            properties = dict(all_properties[row].as_py())
            origin = {
                REASON: reason,
                "badRecordTopic": queue.topic,
                "badRecordBroker": queue.broker,
                "badRecordQueue": str(queue.queue_id),
                "badRecordOffset": str(offsets[row]),
                "badRecordId": ids[row],
            }
            self._producer.send(
                to.dlq_topic,
                bodies[row],
                tag=properties.get(PROPERTY_TAGS),
                key=properties.get(PROPERTY_KEYS, "").split() or None,
                properties={**user_properties(properties), **origin},
            )


def _by_queue(records: Records, broker: str, topic: str | None, bad: dict[int, str]) -> dict[Queue, dict[int, str]]:
    """The bad rows of each queue: a store holds the messages of all queues in one log."""
    topics, queue_ids = records.topics(), records.queue_ids()
    found: dict[Queue, dict[int, str]] = {}
    for row, reason in bad.items():
        queue = Queue(topic or topics[row].as_py(), broker, queue_ids[row].as_py())
        found.setdefault(queue, {})[row] = reason
    return found


def _json_type(kind: spark_types.DataType) -> Any:
    """What msgspec is to make of JSON for a column of this type. Missing and null are the same."""
    if isinstance(kind, spark_types.StructType):
        fields = {field.name: _json_type(field.dataType) | None for field in kind}
        return TypedDict("Struct", fields, total=False)  # type: ignore[operator]
    if isinstance(kind, spark_types.ArrayType):
        return list[_json_type(kind.elementType) | None]  # type: ignore[misc]
    if isinstance(kind, spark_types.MapType):
        return dict[str, _json_type(kind.valueType) | None]  # type: ignore[misc]
    for of_spark, of_json in _JSON_TYPES.items():
        if isinstance(kind, of_spark):
            return of_json
    raise BadOption(f"option bodySchema: JSON can't be decoded as {kind.simpleString()}")


def _integer(bits: int) -> Any:
    return Annotated[int, Meta(ge=-(1 << (bits - 1)), le=(1 << (bits - 1)) - 1)]


_JSON_TYPES: Final[dict[type[spark_types.DataType], Any]] = {
    spark_types.StringType: str,
    spark_types.BooleanType: bool,
    spark_types.ByteType: _integer(8),
    spark_types.ShortType: _integer(16),
    spark_types.IntegerType: _integer(32),
    spark_types.LongType: _integer(64),
    spark_types.FloatType: float,
    spark_types.DoubleType: float,
    spark_types.DecimalType: decimal.Decimal,
    spark_types.BinaryType: bytes,
    spark_types.DateType: datetime.date,
    spark_types.TimestampType: datetime.datetime,
    spark_types.TimestampNTZType: datetime.datetime,
}
