"""Bodies of JSON: the Spark type of a schema, and a decoder.

msgspec decodes with the types of the schema. Nothing is bent to fit: a number that a column has no room for, and a time
that leaves open which moment it means, are errors.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable
from typing import Annotated, Any, Final, TypedDict

import msgspec
from msgspec import Meta
from pyspark.sql import types as spark_types

from skylark.spark import ddl

_LARGEST_FLOAT: Final = 3.4028234663852886e38


def spark_type(schema: bytes) -> str:
    """The type of the schema (columns, or a whole type) in Spark's notation. Raises ValueError."""
    text = schema.decode()
    decoder(ddl.parse(text))
    return text if ddl.is_whole(text) else f"struct<{text}>"


def decoder(kind: spark_types.DataType) -> Callable[[bytes], Any]:
    """Raises ValueError for a type that JSON can't be decoded as; what it gives, for bodies that are not of it."""
    return msgspec.json.Decoder(_type(kind)).decode


def _type(kind: spark_types.DataType) -> Any:
    """What msgspec is to make of JSON for a column of this type. Missing and null are the same."""
    if isinstance(kind, spark_types.StructType):
        fields = {field.name: _type(field.dataType) | None for field in kind}
        return TypedDict("Struct", fields, total=False)  # type: ignore[operator]
    if isinstance(kind, spark_types.ArrayType):
        return list[_type(kind.elementType) | None]  # type: ignore[misc]
    if isinstance(kind, spark_types.MapType):
        if not isinstance(kind.keyType, spark_types.StringType):
            raise ddl.BadType(f"the keys of a map in JSON are strings, not {kind.keyType.simpleString()}")
        return dict[str, _type(kind.valueType) | None]  # type: ignore[misc]
    for of_spark, of_json in _TYPES.items():
        if isinstance(kind, of_spark):
            return of_json
    raise ddl.BadType(f"JSON can't be decoded as {kind.simpleString()}; there are {ddl.KNOWN}")


def _integer(bits: int) -> Any:
    return Annotated[int, Meta(ge=-(1 << (bits - 1)), le=(1 << (bits - 1)) - 1)]


_TYPES: Final[dict[type[spark_types.DataType], Any]] = {
    spark_types.StringType: str,
    spark_types.BooleanType: bool,
    spark_types.ByteType: _integer(8),
    spark_types.ShortType: _integer(16),
    spark_types.IntegerType: _integer(32),
    spark_types.LongType: _integer(64),
    spark_types.FloatType: Annotated[float, Meta(ge=-_LARGEST_FLOAT, le=_LARGEST_FLOAT)],
    spark_types.DoubleType: float,
    spark_types.DecimalType: decimal.Decimal,
    spark_types.BinaryType: bytes,
    spark_types.DateType: datetime.date,
    spark_types.TimestampType: Annotated[datetime.datetime, Meta(tz=True)],
    spark_types.TimestampNTZType: Annotated[datetime.datetime, Meta(tz=False)],
}
