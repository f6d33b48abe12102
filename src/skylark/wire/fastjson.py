"""JSON as Apache's fastjson writes and reads it.

It differs from the standard in the keys of maps, which may be any value:

    {0:"127.0.0.1:10911"}                                       a number without quotes
    {{"brokerName":"a","queueId":0,"topic":"t"}:{"maxOffset":9}}  a whole object

Written as fastjson2 2.0 does it by default: fields of objects in alphabetical order and maps in their own, null fields
and null values of maps left out (in arrays they stay), doubles in Java's notation (1.0E10), NaN and infinity as null,
bytes as an array of signed numbers.

Read in linear time and to a bounded depth: standard JSON, which nearly everything is, goes through msgspec's parser,
and only what that refuses goes through the one here. Whatever the input is, `BadJson` is the only error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from json import JSONDecodeError
from json.decoder import scanstring  # type: ignore[attr-defined]  # documented nowhere, but in C and as old as json
from json.encoder import encode_basestring as _quoted
from typing import Any, NoReturn, TypeVar, cast

import msgspec

T = TypeVar("T")

MAX_DEPTH = 128
MAX_LENIENT_BYTES = 1 << 15
"""What a server reads in any form that fastjson knows; of more, only what is quick to read."""
_ENTRY_LINE = "\n\t\t"  # before an entry of a map in the outermost object

_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_STRING_OR_LONG_NUMBER = re.compile(rb'"(?:[^"\\]|\\.)*"|-?[0-9]{19,}')
_NUMBER_KEY = re.compile(rb"([{,][ \t\n\r]*)(-?(?:0|[1-9][0-9]*))([ \t\n\r]*:)")
_LITERALS = {"t": ("true", True), "f": ("false", False), "n": ("null", None)}


class BadJson(ValueError):
    """The text is not JSON, or not of the wanted shape. `position` counts characters, -1 when it has no place."""

    def __init__(self, reason: str, position: int = -1) -> None:
        super().__init__(reason if position < 0 else f"{reason} at position {position}")
        self.position = position


class NumberOutOfRange(BadJson):
    """A whole number that is longer than any that is used."""


class ObjectKey(dict[str, Any]):
    """An object that is the key of a map: a dict that cannot change, and so has a hash.

    It equals the plain dict with the same items, which however cannot be looked up, having no hash itself.

    >>> loads(b'{{"queueId":0,"topic":"t"}:7}')[ObjectKey(topic="t", queueId=0)]
    7
    """

    __slots__ = ("_hash",)

    def __hash__(self) -> int:  # type: ignore[override]
        # Kept, as a key that nests keys would be hashed once a level.
        try:
            return self._hash
        except AttributeError:
            self._hash: int = hash(frozenset((name, _mixed_hash(value)) for name, value in self.items()))
            return self._hash

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError("the key of a map cannot change")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


def _mixed_hash(value: Any) -> int:
    """Equal for equal values. Numbers go by their digits, since text is hashed with a secret seed: of their own hashes
    (that of -1 is that of -2) a sender could build any number of keys that collide.
    """
    if isinstance(value, (int, float)) and math.isfinite(value):
        return hash(str(int(value)) if value == int(value) else repr(value))
    if isinstance(value, tuple):
        return hash(tuple(map(_mixed_hash, value)))
    return hash(value)


class EncodedMap:
    """A map whose entries are JSON already, from `encode_entry`: a large one is not encoded anew, or all at once."""

    __slots__ = ("entries",)

    def __init__(self, entries: list[str]) -> None:
        self.entries = entries


def encode_entry(key: Any, value: Any, *, pretty: bool = False) -> str:
    """An entry of a map; `pretty` indents as if the map were a field of the outermost object."""
    line = _ENTRY_LINE if pretty else ""
    parts = [_key(key, line, 1), ":"]
    _write(value, parts, line, 2)
    return "".join(parts)


def dumps(obj: Any, *, pretty: bool = False) -> bytes:
    """The JSON of dicts, lists, sets, msgspec Structs and scalars; `pretty` indents with tabs, as in Apache's files.

    >>> dumps({0: "a", ObjectKey(topic="t"): [1, None], "gone": None})
    b'{0:"a",{"topic":"t"}:[1,null]}'
    """
    parts: list[str] = []
    _write(obj, parts, "\n" if pretty else "", 0)
    return "".join(parts).encode("utf-8", "replace")


def _write(obj: Any, parts: list[str], line: str, depth: int) -> None:
    """Appends the JSON of `obj`; `line` is the line break with the indentation of its surroundings, or empty."""
    if depth > MAX_DEPTH:
        raise BadJson(f"nested deeper than {MAX_DEPTH}")
    if isinstance(obj, str) and not isinstance(obj, Enum):
        parts.append(_quoted(obj))
    elif isinstance(obj, Mapping):
        inner = line + "\t" if line else ""
        entries = ((_key(key, inner, depth), value) for key, value in obj.items())
        _write_object(entries, parts, line, depth)
    elif isinstance(obj, msgspec.Struct):
        _write_object(((name, getattr(obj, field)) for name, field in _fields(type(obj))), parts, line, depth)
    elif isinstance(obj, (list, tuple, set, frozenset)):
        _write_array(obj, parts, line, depth)
    elif isinstance(obj, EncodedMap):
        _write_entries(obj.entries, parts, line)
    elif isinstance(obj, (bytes, bytearray, memoryview)):
        _write_array([byte - 256 if byte > 127 else byte for byte in bytes(obj)], parts, line, depth)
    else:
        parts.append(_scalar(obj))


def _write_object(entries: Any, parts: list[str], line: str, depth: int) -> None:
    inner = line + "\t" if line else ""
    before = "{" + inner
    for name, value in entries:
        if value is None or value is msgspec.UNSET:
            continue
        if type(value) is int:
            # Offset tables are nothing but these.
            parts.append(f"{before}{name}:{value}")
        else:
            parts.append(f"{before}{name}:")
            _write(value, parts, inner, depth + 1)
        before = "," + inner
    parts.append("{}" if before[0] == "{" else line + "}")


def _write_array(items: Any, parts: list[str], line: str, depth: int) -> None:
    inner = line + "\t" if line else ""
    before = "[" + inner
    for item in items:
        parts.append(before)
        _write(item, parts, inner, depth + 1)
        before = "," + inner
    parts.append("[]" if before[0] == "[" else line + "]")


def _write_entries(entries: list[str], parts: list[str], line: str) -> None:
    if not entries:
        parts.append("{}")
    elif line:
        parts.append("{" + _ENTRY_LINE + ("," + _ENTRY_LINE).join(entries) + line + "}")
    else:  # strings hold line breaks and tabs as escapes, so those that are there are between tokens
        parts.append("{" + ",".join(entries).replace("\n", "").replace("\t", "") + "}")


def _scalar(obj: Any) -> str:
    if obj is None:
        return "null"
    if obj is True or obj is False:
        return "true" if obj else "false"
    if isinstance(obj, Enum):
        return _quoted(obj.value) if isinstance(obj.value, str) else _scalar(obj.value)
    if isinstance(obj, int):
        return str(int(obj))
    if isinstance(obj, float):
        return _java_double(obj)
    raise TypeError(f"{type(obj).__name__} has no JSON form")


def _java_double(number: float) -> str:
    if not math.isfinite(number):
        return "null"
    if number == 0 or 1e-3 <= abs(number) < 1e7:
        return repr(number)
    sign, digits, exponent = Decimal(repr(number)).as_tuple()
    mantissa = "".join(map(str, digits)).rstrip("0")
    power = len(digits) - 1 + int(exponent)
    return f"{'-' if sign else ''}{mantissa[0]}.{mantissa[1:] or '0'}E{power}"


def _key(key: Any, line: str, depth: int) -> str:
    if type(key) is int:
        return str(key)
    if isinstance(key, str):
        return _quoted(key.value if isinstance(key, Enum) else key)
    if key is None:
        return '"null"'
    parts: list[str] = []
    _write(key, parts, line, depth + 1)
    return "".join(parts)


@lru_cache(maxsize=1024)
def _fields(struct: type[msgspec.Struct]) -> list[tuple[str, str]]:
    return sorted((_quoted(field.encode_name), field.name) for field in msgspec.structs.fields(struct))


def loads(data: bytes | bytearray | memoryview | str) -> Any:
    """The value of a JSON text. Keys without quotes become numbers, object keys become `ObjectKey`s.

    >>> loads(b'{0:"127.0.0.1:10911"}')
    {0: '127.0.0.1:10911'}
    """
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise BadJson("nested too deep") from None
    except (msgspec.DecodeError, UnicodeError):
        return _parse(data)


def decode(data: bytes | bytearray | memoryview | str, wanted: type[T], *, is_quick: bool = False) -> T:
    """The value of a JSON text as `wanted`, a Struct or any type that msgspec knows, with numeric and object keys too.

    As lenient as fastjson: a null is a field that is not there, "5" is good for a number, unknown fields are ignored.
    `is_quick` refuses what would take much longer than standard JSON or numeric keys.
    """
    decoder = _decoder(cast(Any, wanted)) if isinstance(data, bytes) and b"null" not in data else None
    if decoder is not None:
        for form in (bytes, quote_number_keys):
            try:
                return cast(T, decoder.decode(form(cast(bytes, data))))
            except msgspec.ValidationError as error:
                raise BadJson(str(error)) from None
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                continue  # not standard, or not JSON at all
    try:
        value = _loads_standard(data) if is_quick else loads(data)
    except NumberOutOfRange:
        value = loads(quote_long_numbers(data))  # the types complain of them too, and name the field
    return convert(value, wanted)


def _loads_standard(data: bytes | bytearray | memoryview | str) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadJson(f"not standard JSON: {error}") from None


@lru_cache(maxsize=1024)
def _decoder(wanted: Any) -> msgspec.json.Decoder[Any] | None:
    """What reads standard JSON in one step; None for a type with keys that standard JSON can't have."""
    try:
        return msgspec.json.Decoder(wanted, strict=False)
    except TypeError:
        return None


def quote_number_keys(data: bytes) -> bytes:
    """The same JSON with keys that are whole numbers as strings, which is standard if nothing else is amiss. Strings
    with escapes are not understood: then nothing is changed.

    >>> quote_number_keys(b'{0:"{1:2}", -1 :{2:3}}')
    b'{"0":"{1:2}", "-1" :{"2":3}}'
    """
    if b"\\" in data or b"\0" in data:
        return data
    parts = data.split(b'"')  # every other one is a string
    parts[::2] = _NUMBER_KEY.sub(rb'\1"\2"\3', b"\0".join(parts[::2])).split(b"\0")
    return b'"'.join(parts)


def quote_long_numbers(data: bytes | bytearray | memoryview | str) -> bytes:
    """The same JSON with whole numbers that may be out of range as strings, which can be as long as they like.

    >>> quote_long_numbers('{0:9223372036854775808,"1":"9223372036854775808"}')
    b'{0:"9223372036854775808","1":"9223372036854775808"}'
    """
    text = data.encode("utf-8", "replace") if isinstance(data, str) else bytes(data)
    return _STRING_OR_LONG_NUMBER.sub(lambda m: m[0] if m[0].startswith(b'"') else b'"' + m[0] + b'"', text)


def convert(value: Any, wanted: type[T]) -> T:
    """The same for what `loads` gave."""
    try:
        return msgspec.convert(_without_nulls(value, 0), wanted, strict=False)
    except msgspec.ValidationError as error:
        raise BadJson(str(error)) from None
    except RecursionError:
        raise BadJson("nested too deep") from None


_CONTAINERS = frozenset((dict, list))


def _without_nulls(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise BadJson(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, ObjectKey):
        return value
    if isinstance(value, dict):
        return {
            key: _without_nulls(item, depth + 1) if type(item) in _CONTAINERS else item
            for key, item in value.items()
            if item is not None
        }
    if isinstance(value, list):
        return [_without_nulls(item, depth + 1) if type(item) in _CONTAINERS else item for item in value]
    return value


def _parse(data: bytes | bytearray | memoryview | str) -> Any:
    if isinstance(data, str):
        text = data
    else:
        try:
            text = str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise BadJson("not UTF-8", error.start) from None
    value, position = _value(text, _skip_space(text, 0), 0, False)
    position = _skip_space(text, position)
    if position < len(text):
        raise BadJson("something follows the value", position)
    return value


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _value(text: str, position: int, depth: int, in_key: bool) -> tuple[Any, int]:
    """The value that starts at `position`, and where it ends; inside of a key everything must have a hash."""
    first = text[position : position + 1]
    if first == '"':
        return _string(text, position)
    if first in ("{", "["):
        if depth >= MAX_DEPTH:
            raise BadJson(f"nested deeper than {MAX_DEPTH}", position)
        return (_object if first == "{" else _array)(text, position + 1, depth + 1, in_key)
    if first in _LITERALS:
        word, value = _LITERALS[first]
        if text.startswith(word, position):
            return value, position + len(word)
    match = _NUMBER.match(text, position)
    if match is None:
        raise BadJson("a value is missing" if first in ("", ",", "}", "]", ":") else f"unexpected {first!r}", position)
    return _number(match), match.end()


def _string(text: str, position: int) -> tuple[str, int]:
    try:
        value, end = scanstring(text, position + 1, True)
    except JSONDecodeError as error:
        raise BadJson(error.msg.removesuffix(" at"), error.pos) from None
    if not value.isascii():
        # Half of a surrogate pair can be written as an escape, but never be encoded: Java makes it a question mark.
        value = value.encode("utf-8", "replace").decode()
    return value, end


def _number(match: re.Match[str]) -> int | float:
    digits = match.group()
    if match.group(1) is None and match.group(2) is None:
        # As far as msgspec goes; the types say what fits. Far larger ones take quadratic time to convert, and can be
        # made to collide as keys.
        if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
            raise NumberOutOfRange("number out of range", match.start())
        return int(digits)
    number = float(digits)
    if not math.isfinite(number):
        raise BadJson("number out of range", match.start())
    return number


def _array(text: str, position: int, depth: int, in_key: bool) -> tuple[Any, int]:
    items: list[Any] = []
    position = _skip_space(text, position)
    if text.startswith("]", position):
        return (() if in_key else items), position + 1
    while True:
        item, position = _value(text, position, depth, in_key)
        items.append(item)
        position = _skip_space(text, position)
        if text.startswith("]", position):
            return (tuple(items) if in_key else items), position + 1
        if not text.startswith(",", position):
            raise BadJson("expected ',' or ']'", position)
        position = _skip_space(text, position + 1)


def _object(text: str, position: int, depth: int, in_key: bool) -> tuple[Any, int]:
    entries: dict[Any, Any] = {}
    position = _skip_space(text, position)
    if text.startswith("}", position):
        return (ObjectKey() if in_key else entries), position + 1
    while True:
        if text.startswith("[", position):
            raise BadJson("an array cannot be a key", position)
        key, position = _value(text, position, depth, True)
        position = _skip_space(text, position)
        if not text.startswith(":", position):
            raise BadJson("expected ':'", position)
        value, position = _value(text, _skip_space(text, position + 1), depth, in_key)
        entries[key] = value
        position = _skip_space(text, position)
        if text.startswith("}", position):
            return (ObjectKey(entries) if in_key else entries), position + 1
        if not text.startswith(",", position):
            raise BadJson("expected ',' or '}'", position)
        position = _skip_space(text, position + 1)
