"""The columns of a topic as a table: their Spark types, and how each is made from records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import pyarrow as pa

from skylark.spark.records import Records
from skylark.wire.message import PROPERTY_KEYS, PROPERTY_TAGS

SPARK_TYPES: Final = {
    "topic": "string",
    "broker": "string",
    "queueId": "int",
    "offset": "bigint",
    "body": "binary",
    "tags": "string",
    "keys": "string",
    "properties": "map<string,string>",
    "bornTimestamp": "timestamp",
    "storeTimestamp": "timestamp",
    "reconsumeTimes": "int",
    "msgId": "string",
}
SCHEMA: Final = ", ".join(f"{name} {kind}" for name, kind in SPARK_TYPES.items())
"""What Spark is told, in its own notation."""

_TEXT: Final = pa.string()
_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")

_TYPES: Final[dict[str, pa.DataType]] = {
    "topic": _TEXT,
    "broker": _TEXT,
    "queueId": pa.int32(),
    "offset": pa.int64(),
    "body": pa.binary(),
    "tags": _TEXT,
    "keys": _TEXT,
    "properties": pa.map_(_TEXT, _TEXT),
    "bornTimestamp": _TIMESTAMP,
    "storeTimestamp": _TIMESTAMP,
    "reconsumeTimes": pa.int32(),
    "msgId": _TEXT,
}
NAMES: Final = tuple(_TYPES)

_MAKERS: Final[dict[str, Callable[[Records], pa.Array]]] = {
    "queueId": Records.queue_ids,
    "offset": Records.queue_offsets,
    "tags": lambda records: records.property_values(PROPERTY_TAGS),
    "keys": lambda records: records.property_values(PROPERTY_KEYS),
    "properties": Records.properties,
    "bornTimestamp": Records.born_times,
    "storeTimestamp": Records.store_times,
    "reconsumeTimes": Records.reconsume_times,
    "msgId": Records.message_ids,
}


def check(wanted: Mapping[str, str]) -> None:
    """Raises ValueError for a column (name -> Spark type) that can't be given."""
    for name, kind in wanted.items():
        given = SPARK_TYPES.get(name)
        if given is None:
            raise ValueError(f"the source has no column {name}; there are {', '.join(SPARK_TYPES)}")
        if kind != given:
            raise ValueError(f"column {name} has the type {kind}; the source gives {given}")


def arrow_schema(names: Sequence[str]) -> pa.Schema:
    return pa.schema([(name, _TYPES[name]) for name in names])


def record_batch(
    records: Records, names: Sequence[str], *, broker: str, topic: str | None = None, bodies: pa.Array | None = None
) -> pa.RecordBatch:
    """The named columns, and no others are made. Without `topic` it is read from the records; `body` is `bodies`."""
    made = []
    for name in names:
        if name == "body":
            made.append(bodies)
        elif name == "broker":
            made.append(pa.repeat(broker, len(records)))
        elif name == "topic":
            made.append(records.topics() if topic is None else pa.repeat(topic, len(records)))
        else:
            made.append(_MAKERS[name](records))
    return pa.RecordBatch.from_arrays(made, schema=arrow_schema(names))
