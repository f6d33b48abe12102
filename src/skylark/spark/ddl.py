"""Types as SQL writes them (`id bigint, tags array<string>`), read without Spark, so that a mistake is told early.

What is read here is what bodies of JSON can have. Spark gets the text as the user wrote it.
"""

from __future__ import annotations

import re
from typing import Final

from pyspark.sql import types as spark_types

_TOKEN: Final = re.compile(r"\s*(?:(`(?:``|[^`])+`)|('(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\")|(\w+)|([<>(),:]))")
_WHOLE: Final = frozenset(("struct", "array", "map"))
_SIMPLE: Final[dict[str, type[spark_types.DataType]]] = {
    "string": spark_types.StringType,
    "boolean": spark_types.BooleanType,
    "tinyint": spark_types.ByteType,
    "byte": spark_types.ByteType,
    "smallint": spark_types.ShortType,
    "short": spark_types.ShortType,
    "int": spark_types.IntegerType,
    "integer": spark_types.IntegerType,
    "bigint": spark_types.LongType,
    "long": spark_types.LongType,
    "float": spark_types.FloatType,
    "real": spark_types.FloatType,
    "double": spark_types.DoubleType,
    "binary": spark_types.BinaryType,
    "date": spark_types.DateType,
    "timestamp": spark_types.TimestampType,
    "timestamp_ltz": spark_types.TimestampType,
    "timestamp_ntz": spark_types.TimestampNTZType,
}
_DECIMALS: Final = frozenset(("decimal", "dec", "numeric"))
KNOWN: Final = (
    "string, boolean, tinyint, smallint, int, bigint, float, double, decimal(p,s), binary, date, timestamp, "
    "timestamp_ntz, array<...>, map<string,...> and struct<name: type, ...>"
)


class BadType(ValueError):
    """A text that is not a type, or not one that JSON can have."""


def is_whole(text: str) -> bool:
    """Whether the text is one type, and not columns."""
    words = re.match(r"\s*(\w+)\s*<", text)
    return words is not None and words[1].lower() in _WHOLE


def parse(text: str) -> spark_types.DataType:
    """The type; a struct for columns. Raises BadType."""
    reader = _Reader(text)
    found = reader.whole_type() if is_whole(text) else reader.fields(end="")
    reader.expect("")
    return found


class _Reader:
    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        at = 0
        while text[at:].strip():
            token = _TOKEN.match(text, at)
            if token is None:
                raise BadType(f"{text[at:].strip()[:20]!r} is not understood")
            self._tokens.append(token[0].strip())
            at = token.end()
        self._tokens.append("")
        self._next = 0

    def whole_type(self) -> spark_types.DataType:
        name = self._take().lower()
        if name in _SIMPLE:
            if name == "string" and self._is_next("collate"):
                self._take()
            return _SIMPLE[name]()
        if name in _DECIMALS:
            return self._decimal()
        match name:
            case "array":
                self.expect("<")
                element = self.whole_type()
                self.expect(">")
                return spark_types.ArrayType(element)
            case "map":
                self.expect("<")
                key = self.whole_type()
                self.expect(",")
                value = self.whole_type()
                self.expect(">")
                return spark_types.MapType(key, value)
            case "struct":
                self.expect("<")
                found = self.fields(end=">")
                self.expect(">")
                return found
        raise BadType(
            f"{name!r} is not a type of JSON; there are {KNOWN}" if name else "it ends where a type should be"
        )

    def fields(self, end: str) -> spark_types.StructType:
        found = spark_types.StructType()
        while self._tokens[self._next] != end or found.fields:
            name = self._take()
            if not re.fullmatch(r"\w+|`.+`", name, re.DOTALL):
                raise BadType(f"expected the name of a column before its type, not {name or 'the end'!r}")
            self._is_next(":")
            kind = self.whole_type()
            if self._is_next("not"):
                self.expect("null")
            if self._is_next("comment"):
                self._take()
            found.add(name[1:-1].replace("``", "`") if name.startswith("`") else name, kind)
            if not self._is_next(","):
                break
        return found

    def expect(self, token: str) -> None:
        found = self._take()
        if found.lower() != token:
            raise BadType(f"expected {token or 'the end'!r}, not {found or 'the end'!r}")

    def _decimal(self) -> spark_types.DecimalType:
        if not self._is_next("("):
            return spark_types.DecimalType()
        numbers = [self._number()]
        if self._is_next(","):
            numbers.append(self._number())
        self.expect(")")
        precision, scale = numbers[0], numbers[1] if len(numbers) > 1 else 0
        if not (1 <= precision <= 38 and scale <= precision):
            raise BadType(f"decimal({precision},{scale}) has no such digits: 38 at most, and no more behind the point")
        return spark_types.DecimalType(precision, scale)

    def _number(self) -> int:
        token = self._take()
        if not re.fullmatch(r"\d{1,3}", token, re.ASCII):
            raise BadType(f"expected a number of digits, not {token or 'the end'!r}")
        return int(token)

    def _take(self) -> str:
        token = self._tokens[self._next]
        self._next = min(self._next + 1, len(self._tokens) - 1)
        return token

    def _is_next(self, token: str) -> bool:
        if self._tokens[self._next].lower() != token:
            return False
        self._take()
        return True
