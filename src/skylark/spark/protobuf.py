"""Bodies in Protobuf: the Spark type of a message type, and a decoder.

The types come from a descriptor file: `protoc --include_imports --descriptor_set_out=orders.desc orders.proto`. Enums
become their names, `google.protobuf.Timestamp` a timestamp; a field that has presence and is not set is null.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

_SCALARS: Final = {
    FieldDescriptor.CPPTYPE_INT32: "int",
    FieldDescriptor.CPPTYPE_INT64: "bigint",
    FieldDescriptor.CPPTYPE_UINT32: "bigint",
    FieldDescriptor.CPPTYPE_UINT64: "decimal(20,0)",
    FieldDescriptor.CPPTYPE_DOUBLE: "double",
    FieldDescriptor.CPPTYPE_FLOAT: "float",
    FieldDescriptor.CPPTYPE_BOOL: "boolean",
    FieldDescriptor.CPPTYPE_ENUM: "string",
    FieldDescriptor.CPPTYPE_STRING: "string",
}
_TIMESTAMP: Final = "google.protobuf.Timestamp"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def spark_type(descriptors: bytes, name: str) -> str:
    """The message type in Spark's notation. Raises ValueError, or LookupError for a type that is not there."""
    return _struct(_found(descriptors, name), ())


def decoder(descriptors: bytes, name: str) -> Callable[[bytes], Any]:
    """Raises ValueError for a body that is not of the type."""
    descriptor = _found(descriptors, name)
    parse = GetMessageClass(descriptor).FromString
    convert = _converter(descriptor)

    def decode(body: bytes) -> Any:
        try:
            return convert(parse(body))
        except DecodeError as e:
            raise ValueError(str(e)) from None

    return decode


def _found(descriptors: bytes, name: str) -> Descriptor:
    pool = DescriptorPool()
    try:
        files = FileDescriptorSet.FromString(descriptors).file
        for file in files:
            pool.AddSerializedFile(file.SerializeToString())
    except (DecodeError, TypeError) as e:
        raise ValueError(f"not a whole descriptor file, as protoc --include_imports writes it: {e}") from None
    try:
        return pool.FindMessageTypeByName(name)
    except KeyError:
        there = sorted(f"{file.package}.{kind.name}".lstrip(".") for file in files for kind in file.message_type)
        raise LookupError(f"the descriptor file has no such message type; there are {', '.join(there)}") from None


def _struct(message: Descriptor, around: tuple[str, ...]) -> str:
    if message.full_name in around:
        raise ValueError(f"the type {message.full_name} is used inside itself, which a column can't be")
    inside = (*around, message.full_name)
    return "struct<" + ",".join(f"`{field.name}`: {_of_field(field, inside)}" for field in message.fields) + ">"


def _of_field(field: FieldDescriptor, around: tuple[str, ...]) -> str:
    if (entry := _map_entry(field)) is not None:
        return f"map<{_of_value(entry['key'], around)},{_of_value(entry['value'], around)}>"
    kind = _of_value(field, around)
    return f"array<{kind}>" if field.is_repeated else kind


def _of_value(field: FieldDescriptor, around: tuple[str, ...]) -> str:
    if field.message_type is not None:
        return "timestamp" if field.message_type.full_name == _TIMESTAMP else _struct(field.message_type, around)
    return "binary" if field.type == FieldDescriptor.TYPE_BYTES else _SCALARS[field.cpp_type]


def _map_entry(field: FieldDescriptor) -> Mapping[str, FieldDescriptor] | None:
    """The fields `key` and `value`, if it is a map."""
    kind = field.message_type
    return kind.fields_by_name if kind is not None and kind.GetOptions().map_entry else None


Convert = Callable[[Any], Any]


def _converter(message: Descriptor) -> Convert:
    """From a message object to a dict; which field needs what is found out once, not for each message."""
    fields = [(field.name, field.has_presence, _of_container(field)) for field in message.fields]

    def convert(found: Any) -> dict[str, Any]:
        return {
            name: None if has_presence and not found.HasField(name) else make(getattr(found, name))
            for name, has_presence, make in fields
        }

    return convert


def _of_container(field: FieldDescriptor) -> Convert:
    if (entry := _map_entry(field)) is not None:
        key, value = _maker(entry["key"]), _maker(entry["value"])
        return lambda found: {key(name): value(found[name]) for name in found}
    make = _maker(field)
    return (lambda found: [make(item) for item in found]) if field.is_repeated else make


def _maker(field: FieldDescriptor) -> Convert:
    if field.message_type is not None:
        return _timestamp if field.message_type.full_name == _TIMESTAMP else _converter(field.message_type)
    if field.enum_type is not None:
        names = {number: value.name for number, value in field.enum_type.values_by_number.items()}
        return lambda number: names.get(number, str(number))
    return lambda value: value


def _timestamp(found: Any) -> datetime:
    return _EPOCH + timedelta(seconds=found.seconds, microseconds=found.nanos // 1000)
