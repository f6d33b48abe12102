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
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Final, Self, TypedDict

import msgspec
import pyarrow as pa
from msgspec import Meta
from pyspark.sql import types as spark_types
from pyspark.sql.pandas.types import to_arrow_type

from skylark.client.errors import RocketMQError
from skylark.client.validation import user_properties
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


def format_of(options: Reading) -> Format | None:
    """How the bodies are to be decoded, None if they stay as they are. Raises BadOption."""
    name, schema = options.body_format, options.body_schema
    _check(options)
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


def _check(options: Reading) -> None:
    if options.body_format in ("binary", "text") and options.body_schema is not None:
        raise BadOption(f"option bodySchema has no meaning with bodyFormat={options.body_format}")
    if options.body_message is not None and options.body_format != "protobuf":
        raise BadOption("option bodyMessage is for bodyFormat=protobuf")
    if (options.bad_records == "dlq") != (options.dlq_topic is not None):
        raise BadOption("the options badRecords=dlq and dlqTopic need each other")
    topics = re.split(r"\s*,\s*", (options.subscribe or "").strip())
    pattern = options.subscribe_pattern
    if options.dlq_topic and (options.dlq_topic in topics or (pattern and re.fullmatch(pattern, options.dlq_topic))):
        raise BadOption(f"option dlqTopic={options.dlq_topic!r} is itself read: bad records would go round in circles")


def _file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise BadOption(f"option bodySchema={path!r}: {e.strerror or e}") from None


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"skylark.spark.{name}")
    except ImportError as e:
        raise BadOption(
            f"option bodyFormat={name}: {e}; pip install 'skylark-mq[formats]' brings what it needs"
        ) from None


class Values:
    """Makes the column of a task, and does with bad rows what the options say. Used as a context manager."""

    def __init__(self, options: Reading, format: Format, kind: spark_types.DataType) -> None:
        self._options = options
        self._format = format
        self._type = to_arrow_type(kind, timezone="UTC")
        self._decode = format.decoder(kind)
        self._producer: Producer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._producer is not None:
            self._producer.__exit__(kind, error, trace)

    def of(self, records: Records, queue: Queue) -> tuple[Records, pa.Array]:
        """The records that can be decoded, and their values. Raises Undecodable."""
        bodies = records.bodies().to_pylist()
        values, bad = self._decoded(bodies)
        if not bad:
            return records, values
        self._settle(records, queue, bodies, bad)
        kept = pa.array([row not in bad for row in range(len(records))]).to_numpy(zero_copy_only=False)
        return records.filter(kept), values.filter(pa.array(kept))

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

    def _settle(self, records: Records, queue: Queue, bodies: list[bytes], bad: dict[int, str]) -> None:
        offsets = records.queue_offsets().to_pylist()
        first, reason = next(iter(bad.items()))
        if self._options.bad_records == "fail":
            raise Undecodable(
                f"{queue}: the message at offset {offsets[first]} is not {self._format.name}: {reason}; "
                "set badRecords=drop or badRecords=dlq to go on without it"
            )
        if self._options.dlq_topic is not None:
            self._send(self._options.dlq_topic, records, queue, bodies, bad)
        log.warning(
            "%s: %s because not %s: %d (from offset %d on; that one: %s)",
            queue,
            f"sent to topic {self._options.dlq_topic}" if self._options.dlq_topic else "dropped",
            self._format.name,
            len(bad),
            offsets[first],
            reason,
        )

    def _send(self, topic: str, records: Records, queue: Queue, bodies: list[bytes], bad: dict[int, str]) -> None:
        """Returns when each is stored. A task that runs again sends them again."""
        if self._producer is None:
            from skylark.client.sync import Producer  # here: every task would pay for it, and few have bad rows

            self._producer = Producer(
                self._options.name_server, group=_PRODUCER_GROUP, timeout_s=self._options.timeout_s
            ).__enter__()
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
                topic,
                bodies[row],
                tag=properties.get(PROPERTY_TAGS),
                key=properties.get(PROPERTY_KEYS, "").split() or None,
                properties={**user_properties(properties), **origin},
            )


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
