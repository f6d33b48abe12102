"""Bodies in Avro's binary form: the Spark type of a schema, and a decoder.

A body is one value without a container: the plain encoding, or Avro's single-object encoding (two bytes of mark, the
schema's fingerprint, the value) of the same schema.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any, Final

import fastavro
import msgspec
from fastavro.schema import fingerprint, to_parsing_canonical_form

_PRIMITIVES: Final = {
    "null": "void",
    "boolean": "boolean",
    "int": "int",
    "long": "bigint",
    "float": "float",
    "double": "double",
    "bytes": "binary",
    "string": "string",
    "fixed": "binary",
    "enum": "string",
}
_LOGICAL: Final = {
    ("int", "date"): "date",
    ("long", "timestamp-millis"): "timestamp",
    ("long", "timestamp-micros"): "timestamp",
    ("long", "local-timestamp-millis"): "timestamp_ntz",
    ("long", "local-timestamp-micros"): "timestamp_ntz",
}
_SINGLE_OBJECT: Final = b"\xc3\x01"


def spark_type(schema: bytes) -> str:
    """The type of the schema (JSON) in Spark's notation. Raises ValueError."""
    return _Types().of(_parsed(schema))


def decoder(schema: bytes) -> Callable[[bytes], Any]:
    """Raises whatever fastavro does for a body that is not of the schema."""
    parsed = fastavro.parse_schema(_without_unknown_logical_types(_parsed(schema)))
    mark = _SINGLE_OBJECT + bytes.fromhex(fingerprint(to_parsing_canonical_form(parsed), "CRC-64-AVRO"))

    def decode(body: bytes) -> Any:
        stream = BytesIO(body)
        if body.startswith(mark):
            stream.seek(len(mark))
        value = fastavro.schemaless_reader(stream, parsed, None)
        if stream.tell() != len(body):
            raise ValueError(f"{len(body) - stream.tell()} bytes too many")
        return value

    return decode


def _parsed(schema: bytes) -> Any:
    try:
        parsed = msgspec.json.decode(schema)
        fastavro.parse_schema(parsed)
    except msgspec.MsgspecError as e:
        raise ValueError(f"not the JSON of an Avro schema: {e}") from None
    except (fastavro.schema.SchemaParseException, ValueError) as e:
        raise ValueError(f"not an Avro schema: {e}") from None
    return parsed


class _Types:
    """Spark's types of Avro's. A named type may be used again after it was described."""

    def __init__(self) -> None:
        self._named: dict[str, str] = {}
        self._weightless: set[str] = set()  # named types whose values take no bytes

    def of(self, schema: Any) -> str:
        if isinstance(schema, list):
            return self._of_union(schema)
        if isinstance(schema, str):
            return self._of_name(schema)
        kind = schema["type"]
        if not isinstance(kind, str):
            return self.of(kind)
        if kind == "array":
            items = self.of(schema["items"])
            if self._is_weightless(schema["items"]):
                raise ValueError("items of an array that take no bytes: a body of six could hold a billion of them")
            return f"array<{items}>"
        if kind == "map":
            return f"map<string,{self.of(schema['values'])}>"
        if kind == "record":
            found = ",".join(f"`{field['name']}`: {self.of(field['type'])}" for field in schema["fields"])
            return self._remember(schema, f"struct<{found}>")
        if schema.get("logicalType") == "decimal":
            return self._remember(schema, f"decimal({schema['precision']},{schema.get('scale', 0)})")
        logical = _LOGICAL.get((kind, schema.get("logicalType", "")))
        return self._remember(schema, logical or self._of_name(kind))

    def _of_union(self, branches: list[Any]) -> str:
        others = [branch for branch in branches if branch != "null"]
        if len(others) != 1:
            raise ValueError("a union of several types has no type in Spark; one with null has")
        return self.of(others[0])

    def _of_name(self, name: str) -> str:
        found = _PRIMITIVES.get(name) or self._named.get(name.rpartition(".")[2])
        if found is None:
            raise ValueError(f"the type {name} is used inside itself, which a column can't be")
        return found

    def _remember(self, schema: Any, kind: str) -> str:
        if "name" in schema:
            name = schema["name"].rpartition(".")[2]
            self._named[name] = kind
            if self._is_weightless(schema):
                self._weightless.add(name)
        return kind

    def _is_weightless(self, schema: Any) -> bool:
        if isinstance(schema, str):
            return schema == "null" or schema.rpartition(".")[2] in self._weightless
        if isinstance(schema, list):
            return False
        kind = schema["type"]
        if kind == "record":
            return all(self._is_weightless(field["type"]) for field in schema["fields"])
        if kind == "fixed":
            return bool(schema["size"] == 0)
        return kind not in ("array", "map", "enum") and self._is_weightless(kind)


def _without_unknown_logical_types(schema: Any) -> Any:
    """fastavro makes objects of times of day and UUIDs that a column of numbers or texts does not take."""
    if isinstance(schema, list):
        return [_without_unknown_logical_types(branch) for branch in schema]
    if not isinstance(schema, dict):
        return schema
    logical = schema.get("logicalType")
    is_known = logical == "decimal" or (str(schema.get("type")), logical) in _LOGICAL
    kept = {key: value for key, value in schema.items() if key != "logicalType" or is_known}
    for key in ("type", "items", "values"):
        if key in kept:
            kept[key] = _without_unknown_logical_types(kept[key])
    if "fields" in kept:
        kept["fields"] = [_without_unknown_logical_types(field) for field in kept["fields"]]
    return kept
