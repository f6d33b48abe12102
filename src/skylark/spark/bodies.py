"""Bodies decoded by option: the column `value`, and what becomes of messages that can't be given as a row.

Schemas are read where the query is planned and travel with it, so workers need no file. Bodies are decoded for all rows
in one call, and the rows are only looked at one by one when one of them is bad. Whatever a message holds, the option
`badRecords` says what becomes of it, and it takes no more memory than a portion (see `portions`).
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql import types as spark_types
from pyspark.sql.pandas.types import to_arrow_type

from skylark.client.errors import RocketMQError
from skylark.extras import how_to_install
from skylark.spark import columns
from skylark.spark.letters import Letters, letters_of
from skylark.spark.options import BadOption, Reading
from skylark.spark.portions import Portion, portions
from skylark.spark.queues import Queue
from skylark.spark.records import FIRST_TIME_MS, LAST_TIME_MS, Records

log = logging.getLogger(__name__)

COLUMN: Final = "value"

_MOST_REASON: Final = 500  # characters
_CONTROLS: Final = re.compile(r"[\x00-\x1f]+")
_BAD: Final = (
    ValueError, TypeError, EOFError, LookupError, ArithmeticError, RecursionError, msgspec.MsgspecError,
    pa.ArrowException,
)  # fmt: skip
_UNREADABLE: Final = "unreadable"

Decode = Callable[[bytes], Any]


class Undecodable(RocketMQError):
    """A message that can't be given as a row: its body is not what the options say, or it holds what Spark has not."""


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
                    return self._protobuf_type()
                case "json":
                    return str(_module("json_values").spark_type(self.schema))
                case _:
                    return "string"
        except BadOption:
            raise
        except ValueError as e:
            raise BadOption(f"option bodySchema: {e}") from None

    def _protobuf_type(self) -> str:
        try:
            return str(_module("protobuf").spark_type(self.schema, self.message))
        except LookupError as e:
            raise BadOption(f"option bodyMessage={self.message!r}: {e}") from None

    def decoder(self, kind: spark_types.DataType) -> Decode:
        """Raises BadOption for a type that bodies can't be decoded as."""
        try:
            return self._decoder(kind)
        except BadOption:
            raise
        except ValueError as e:
            raise BadOption(f"option bodySchema: {e}") from None

    def _decoder(self, kind: spark_types.DataType) -> Decode:
        decode: Decode
        match self.name:
            case "avro":
                decode = _module("avro").decoder(self.schema)
            case "protobuf":
                decode = _module("protobuf").decoder(self.schema, self.message)
            case "json":
                decode = _module("json_values").decoder(kind)
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
    format.decoder(schema[COLUMN].dataType)  # what can't be decoded is told here, and not in every task
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
        self._needs_bodies = shape.format is not None or "body" in self._names
        self._format = shape.format
        if shape.format is not None and shape.value_type is not None:
            self._type = to_arrow_type(shape.value_type, timezone="UTC")
            self._decode = shape.format.decoder(shape.value_type)
        self._bad_records = bad_records
        self._letters = Letters(dlq) if dlq is not None and bad_records == "dlq" else None
        self._can_send = dlq is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._letters is not None:
            self._letters.close()

    def of(self, records: Records, *, broker: str, topic: str | None = None) -> Iterator[pa.RecordBatch]:
        """The rows, in batches that have room in memory; none is empty. Without `topic` it is read from the records.

        Raises Undecodable, and MissingCodec for a body that only needs an installation.
        """
        faults = records.faults(self._names)
        parts = portions(records, faults) if self._needs_bodies else [Portion(records, None, faults)]
        for part in parts:
            batch = self._batch(part, broker, topic)
            if batch.num_rows:
                yield batch

    def _batch(self, part: Portion, broker: str, topic: str | None) -> pa.RecordBatch:
        part = self._without(part, _UNREADABLE, broker, topic)
        if self._format is None:
            return columns.record_batch(part.records, self._names, broker=broker, topic=topic, bodies=part.bodies)
        values, part.faults = self._decoded(part.bodies.to_pylist())
        if part.faults:
            values = values.filter(_kept(part))
            part = self._without(part, f"not {self._format.name}", broker, topic)
        others = [name for name in self._names if name != COLUMN]
        batch = columns.record_batch(part.records, others, broker=broker, topic=topic, bodies=part.bodies)
        return batch.append_column(COLUMN, values).select(self._names)

    def _without(self, part: Portion, what: str, broker: str, topic: str | None) -> Portion:
        """The portion without its faults, with which is done what the options say. `what` is what they are."""
        if not part.faults:
            return part
        self._settle(part, what, broker, topic)
        kept = _kept(part)
        bodies = part.bodies if part.bodies is None else part.bodies.filter(kept)
        return Portion(part.records.filter(kept.to_numpy(zero_copy_only=False)), bodies, {})

    def _decoded(self, bodies: list[bytes]) -> tuple[pa.Array, dict[int, str]]:
        """The values, and row -> reason for those that are bad."""
        try:
            return self._values(map(self._decode, bodies)), {}
        except _BAD:
            pass
        values: list[Any] = [None] * len(bodies)
        bad: dict[int, str] = {}
        for row, body in enumerate(bodies):
            try:
                value = self._decode(body)
                self._values([value])
                values[row] = value
            except _BAD as e:
                bad[row] = _CONTROLS.sub(" ", f"{e}" or type(e).__name__)[:_MOST_REASON]
        return pa.array(values, self._type), bad

    def _values(self, values: Iterable[Any]) -> pa.Array:
        array = pa.array(values, self._type)
        _check_times(array)
        return array

    def _settle(self, part: Portion, what: str, broker: str, topic: str | None) -> None:
        offsets = part.records.queue_offsets().to_pylist()
        for queue, reasons in _by_queue(part, broker, topic).items():
            first, reason = next(iter(reasons.items()))
            if self._bad_records == "fail":
                raise Undecodable(
                    f"{queue}: the message at offset {offsets[first]} is {what}: {reason}; "
                    f"set badRecords=drop{' or badRecords=dlq' if self._can_send else ''} to go on without it"
                )
            if self._letters is not None:
                self._letters.send(letters_of(part.records, queue, reasons))
            log.warning(
                "%s: %s because %s: %d (from offset %d on; that one: %s)",
                queue,
                f"sent to topic {self._letters.topic}" if self._letters is not None else "dropped",
                what,
                len(reasons),
                offsets[first],
                reason,
            )


def _kept(part: Portion) -> pa.Array:
    kept = np.ones(len(part.records), bool)
    kept[list(part.faults)] = False
    return pa.array(kept)


def _by_queue(part: Portion, broker: str, topic: str | None) -> dict[Queue, dict[int, str]]:
    """The bad rows of each queue: a store holds the messages of all queues in one log."""
    topics, queue_ids = part.records.topics(), part.records.queue_ids()
    found: dict[Queue, dict[int, str]] = {}
    for row, reason in sorted(part.faults.items()):
        queue = Queue(topic or topics[row].as_py(), broker, queue_ids[row].as_py())
        found.setdefault(queue, {})[row] = reason
    return found


def _check_times(array: pa.Array) -> None:
    """Raises ValueError for a time that Spark does not have: a zone may move one out of the years that it may name."""
    kind = array.type
    if pa.types.is_timestamp(kind):
        import pyarrow.compute as pc  # only here, as in `records`

        ends = pc.min_max(array.view(pa.int64())).as_py()
        if ends["min"] is not None and not FIRST_TIME_MS <= ends["min"] // 1000 <= ends["max"] // 1000 <= LAST_TIME_MS:
            raise ValueError("a time outside of the years 1 to 9999 in UTC, where Spark's times end")
    elif pa.types.is_map(kind):
        _check_times(array.items)
    elif pa.types.is_list(kind):
        _check_times(array.values)
    elif pa.types.is_struct(kind):
        for number in range(kind.num_fields):
            _check_times(array.field(number))
