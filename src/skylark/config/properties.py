"""Apache's `.properties` files, read into typed records and written back.

The reader follows `java.util.Properties.load`: `#` and `!` open a comment, a key ends at the first unescaped `=`, `:`
or white space, a line that ends in an odd number of backslashes goes on in the next one, `\\uXXXX` is a UTF-16 code
unit, and of two lines with one key the last wins. Values such as `${user.home}` are left alone.

A configuration is a `msgspec.Struct` whose fields carry Apache's camelCase keys (`rename="camel"`, or `field(name=...)`
where camel case does not give Apache's spelling) and whose types say what is allowed: `bool`, `int` or `float` with
bounds, an `Enum`, or `str` with a pattern. A key that no field has is warned about and skipped, because files that work
with Apache's servers must go on working; a value that does not fit is a `ConfigError`, because a guess would be worse.

    >>> from typing import Annotated
    >>> class Limits(msgspec.Struct, rename="camel", kw_only=True):
    ...     max_message_size: Annotated[int, msgspec.Meta(ge=1)] = 4194304
    >>> bind(Limits, parse("maxMessageSize = 1024"), source="broker.conf").max_message_size
    1024
"""

import difflib
import enum
import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

log = logging.getLogger(__name__)

S = TypeVar("S", bound=msgspec.Struct)

# A file larger than this is not a configuration; it is somebody's log or store.
MAX_FILE_BYTES = 1 << 20

_BLANK = " \t\f"
_NEWLINE = re.compile(r"\r\n|\r|\n")
_KEY_END = re.compile(r"(?:[^\\=: \t\f]|\\.)*", re.DOTALL)
_SEPARATOR = re.compile(r"[ \t\f]*[=:]?[ \t\f]*")
_ESCAPE = re.compile(r"\\(u(.{0,4})|.|$)", re.DOTALL)
_ESCAPED_CHARACTERS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


class ConfigError(ValueError):
    """A configuration that cannot be used; its text is one line for the person who wrote the file."""


def parse(text: str) -> dict[str, str]:
    """The keys and values of a `.properties` text, as `java.util.Properties` would give them."""
    result: dict[str, str] = {}
    for line in _logical_lines(text):
        key = _KEY_END.match(line)
        assert key is not None  # the pattern matches the empty string
        separator = _SEPARATOR.match(line, key.end())
        assert separator is not None
        result[_unescape(key.group())] = _unescape(line[separator.end() :])
    return result


def read(path: Path) -> dict[str, str]:
    """The keys and values of the file at `path`; a file that cannot be read is a `ConfigError`."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes, is this a configuration file?")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")  # what Java reads
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def bind(struct_type: type[S], mapping: Mapping[str, str], *, source: str, ignored: Collection[str] = frozenset()) -> S:
    """A `struct_type` filled from `mapping`; `source` names the file in messages.

    `ignored` holds Apache's keys that are known and have no effect here: they are told apart from misspelt ones.
    """
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct_type)}
    values: dict[str, Any] = {}
    for key, text in mapping.items():
        field = fields.get(key)
        if field is None:
            log.warning("%s: %s", source, _unknown(key, fields, ignored))
        else:
            values[field.name] = _convert(field, text, source)
    return struct_type(**values)


def render(struct: msgspec.Struct) -> str:
    """The `key=value` lines that Apache's servers answer a request for their configuration with."""
    return "".join(
        f"{field.encode_name}={_text(getattr(struct, field.name))}\n" for field in msgspec.structs.fields(type(struct))
    )


def update(
    struct: msgspec.Struct, changes: Mapping[str, str], *, allowed: Collection[str], source: str = "update"
) -> dict[str, str]:
    """Set the values of `changes` in `struct`: all of them, or none and a `ConfigError`.

    Only keys in `allowed` may change while a server runs. Gives the keys whose value is now another, with that value.
    """
    fields = {field.encode_name: field for field in msgspec.structs.fields(type(struct))}
    values: dict[str, Any] = {}
    for key, text in changes.items():
        field = fields.get(key)
        if field is None or key not in allowed:
            raise ConfigError(_refusal(key, known=field is not None, allowed=allowed))
        values[key] = _convert(field, text, source)
    changed: dict[str, str] = {}
    for key, value in values.items():
        name = fields[key].name
        if getattr(struct, name) != value:
            setattr(struct, name, value)
            changed[key] = _text(value)
    return changed


def allowed_values(field: msgspec.structs.FieldInfo) -> str:
    """What a field accepts, in words: for error messages and for the documentation."""
    kind = inspect.type_info(field.type)
    described = ""
    if isinstance(kind, inspect.Metadata):
        described = (kind.extra_json_schema or {}).get("description", "")
        kind = kind.type
    if described:
        return str(described)
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.EnumType():
            return " or ".join(str(member.value) for member in kind.cls)
        case inspect.IntType() | inspect.FloatType():
            return _range(kind)
        case _:
            return "text"


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
    if kind.ge is not None and kind.le is not None:
        return f"{noun} from {kind.ge} to {kind.le}"
    if kind.ge is not None:
        return f"{noun}, {kind.ge} or more"
    if kind.le is not None:
        return f"{noun}, at most {kind.le}"
    return noun


def _logical_lines(text: str) -> list[str]:
    lines: list[str] = []
    pending: str | None = None
    for natural in _NEWLINE.split(text):
        line = natural.lstrip(_BLANK)
        # A line that holds nothing but a backslash does not count as begun: what follows may be a comment.
        if not pending and (not line or line[0] in "#!"):
            pending = None
            continue
        joined = (pending or "") + line
        # An odd number of trailing backslashes escapes the line end; an even number is escaped backslashes.
        if (len(line) - len(line.rstrip("\\"))) % 2:
            pending = joined[:-1]
        else:
            lines.append(joined)
            pending = None
    if pending is not None:
        lines.append(pending)
    return lines


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    unescaped = _ESCAPE.sub(_unescape_one, text)
    # Characters outside the basic plane arrive as two escapes, a surrogate pair; a lone half cannot be encoded later.
    return unescaped.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _unescape_one(match: re.Match[str]) -> str:
    escaped = match.group(1)
    if escaped.startswith("u"):
        digits = match.group(2)
        if not re.fullmatch(r"[0-9a-fA-F]{4}", digits):
            raise ConfigError(f"bad escape \\u{digits}: four hexadecimal digits must follow \\u")
        return chr(int(digits, 16))
    return _ESCAPED_CHARACTERS.get(escaped, escaped)


def _convert(field: msgspec.structs.FieldInfo, text: str, source: str) -> Any:
    stripped = text.strip()
    try:
        if field.type is bool:
            return {"true": True, "false": False}[stripped.lower()]
        return msgspec.convert(stripped, field.type, strict=False)
    except (KeyError, msgspec.ValidationError):
        raise ConfigError(
            f"{source}: {field.encode_name}={stripped!r} is not allowed: expected {allowed_values(field)}"
        ) from None


def _unknown(key: str, known: Collection[str], ignored: Collection[str]) -> str:
    if key in ignored:
        return f"{key} is an Apache RocketMQ setting that Skylark ignores"
    return f"unknown key {key}{_suggestion(key, [*known, *ignored])}"


def _refusal(key: str, *, known: bool, allowed: Collection[str]) -> str:
    if known:
        return f"{key} cannot be changed while the server runs; set it in the configuration file and restart"
    return f"unknown key {key}{_suggestion(key, allowed)}"


def _suggestion(key: str, candidates: Collection[str]) -> str:
    close = difflib.get_close_matches(key, candidates, n=1)
    if not close:
        # difflib weighs case, a reader does not: brokername is brokerName to whoever typed it.
        close = [candidate for candidate in candidates if candidate.lower() == key.lower()]
    return f" (did you mean {close[0]}?)" if close else ""


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, enum.Enum):
        return str(value.value)
    return str(value)
