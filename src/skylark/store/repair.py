"""Reads a table of which single numbers are out of range.

Older versions took any number from the wire and wrote it down. Such a number is left out: an entry of a map goes as a
whole, a field of a record gets its default, and what is in a list stands or falls with the list. Whatever else may be
wrong with a table is damage, and not mended here.
"""

from __future__ import annotations

import re
from types import NoneType, UnionType
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin

import msgspec

from skylark.wire import fastjson

T = TypeVar("T")

_NUMBER: Final = re.compile(r"-?[0-9]+")


class _OutOfRange(Exception):
    """A number that can't be; the text says where it stands."""


def decode(data: bytes, wanted: type[T]) -> tuple[T, list[str]]:
    """The table, and the places of what was left out. Raises fastjson.BadJson if more is wrong."""
    left_out: list[str] = []
    try:
        mended = _mended(fastjson.loads(fastjson.quote_long_numbers(data)), wanted, "$", left_out)
    except _OutOfRange as error:
        raise fastjson.BadJson(f"{error} is out of range") from None
    return fastjson.convert(mended, wanted), left_out


def _mended(value: Any, wanted: Any, path: str, left_out: list[str]) -> Any:
    """The value without what is out of range. Raises _OutOfRange if it is a number that is, or has one in a list."""
    try:
        fastjson.convert(value, wanted)
    except fastjson.BadJson:
        pass
    else:
        return value
    origin, args = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType) and len(args) == 2 and NoneType in args:
        return _mended(value, next(each for each in args if each is not NoneType), path, left_out)
    if origin is Annotated and args[0] is int and _is_whole_number(value):
        raise _OutOfRange(path)
    if origin is dict and isinstance(value, dict):
        return _mended_map(value, args[0], args[1], path, left_out)
    if origin is list and isinstance(value, list):
        return _checked_list(value, args[0], path)
    if isinstance(wanted, type) and issubclass(wanted, msgspec.Struct) and isinstance(value, dict):
        return _mended_record(value, wanted, path, left_out)
    return value  # damage, of which the last conversion complains


def _is_whole_number(value: Any) -> bool:
    return type(value) is int or (isinstance(value, str) and _NUMBER.fullmatch(value) is not None)


def _mended_map(value: dict[Any, Any], keys: Any, values: Any, path: str, left_out: list[str]) -> dict[Any, Any]:
    entries = {}
    for key, item in value.items():
        place = f"{path}[{str(key)[:100]}]"
        try:
            entries[_mended(key, keys, place, left_out)] = _mended(item, values, place, left_out)
        except _OutOfRange as error:
            left_out.append(str(error))
    return entries


def _mended_record(
    value: dict[Any, Any], wanted: type[msgspec.Struct], path: str, left_out: list[str]
) -> dict[Any, Any]:
    fields = {}
    for field in msgspec.structs.fields(wanted):
        if field.encode_name not in value:
            continue
        try:
            item = value[field.encode_name]
            fields[field.encode_name] = _mended(item, field.type, f"{path}.{field.encode_name}", left_out)
        except _OutOfRange as error:
            if field.required:
                raise
            left_out.append(str(error))
    return fields


def _checked_list(value: list[Any], items: Any, path: str) -> list[Any]:
    left_out: list[str] = []
    checked = [_mended(item, items, f"{path}[{at}]", left_out) for at, item in enumerate(value)]
    if left_out:
        raise _OutOfRange(left_out[0])
    return checked
