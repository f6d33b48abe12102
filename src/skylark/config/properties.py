"""Apache's `.properties` files, read into typed records and written back.

The reader follows `java.util.Properties.load`: `#` and `!` open a comment, a key ends at the first unescaped `=`, `:`
or white space, a line that ends in an odd number of backslashes goes on in the next one, `\\uXXXX` is a UTF-16 code
unit, and of two lines with one key the last wins. Values such as `${user.home}` are left alone.

A configuration is a `msgspec.Struct` whose fields carry Apache's camelCase keys (`rename="camel"`, or `field(name=...)`
where camel case does not give Apache's spelling) and whose types say what is allowed: `bool`, `int` or `float` with
bounds, an `Enum`, or `str` with a pattern. A key that no field has is warned about and skipped, because files that work
with Apache's servers must go on working; a value that does not fit is a `ConfigError`, because a guess would be worse.
So is a file of another kind: Java would make keys of the braces and quotes of a JSON file, and skip them all.

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
from collections.abc import Collection, Iterator, Mapping
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
# What a line of another format begins with. A section of an .ini file is let through: Java skips it as a key.
_OTHER_FORMATS = dict.fromkeys('{}[]"', "JSON") | {"<": "XML"}
_SECTION = re.compile(r"""\[(?=[^\]]*[^\W\d])[^"',{}\[\]]+(?:\]|$)""")
_CONFLICT = "<<<<<<<"
# Those above 0x7f are letters and quotes in the code pages of Windows, which Java reads as it reads Latin-1.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f]")
_END_OF_DOS_FILE = b"\x1a"
_SHOWN_CHARACTERS = 20
# Less, and keys are proposed that have no more than a word in common with the one that was written.
_CLOSE = 0.8
_EXPECTED = "Apache's .properties format is expected, such as brokerName=broker-a"
_ESCAPED_CHARACTERS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_MOST_CHARACTERS = 1 << 16
_LONGEST_KEY = 100  # that may be one of ours, misspelt


class ConfigError(ValueError):
    """A configuration that cannot be used; its text is one line for the person who wrote the file."""


class Value(str):
    """A value that knows its line, for messages about it."""

    line: int


def parse(text: str) -> dict[str, str]:
    """The keys and values of a `.properties` text, as `java.util.Properties` would give them. Anybody may have sent it:
    one that is longer than settings are is a `ConfigError`."""
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(f"{len(text)} characters of settings, {_MOST_CHARACTERS} are allowed")
    return {_unescape(key): _unescape(value) for _, key, value in _entries(text)}


def read(path: Path) -> dict[str, str]:
    """The keys and values of the file at `path`, each value a `Value`.

    A file that cannot be read, or is not of this format, is a `ConfigError`.
    """
    result: dict[str, str] = {}
    for line, key, text in _entries(_text_of(path)):
        problem = _not_an_entry(key, text)
        if problem:
            raise ConfigError(f"{path} line {line}: {problem}; {_EXPECTED}")
        try:
            value = Value(_unescape(text))
            value.line = line
            result[_unescape(key)] = value
        except ConfigError as error:
            raise ConfigError(f"{path} line {line}: {error}") from error
    return result


def place(source: str, value: str) -> str:
    """Where a value stands, for messages: the file and, if it is known, the line."""
    return f"{source} line {value.line}" if isinstance(value, Value) else source


def bind(struct_type: type[S], mapping: Mapping[str, str], *, source: str, ignored: Collection[str] = frozenset()) -> S:
    """A `struct_type` filled from `mapping`; `source` names the file in messages.

    `ignored` holds Apache's keys that are known and have no effect here: they are told apart from misspelt ones.
    """
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct_type)}
    values: dict[str, Any] = {}
    for key, text in mapping.items():
        field = fields.get(key)
        if field is None:
            said = _section(key, text) or _unknown(key, fields, ignored)
            log.warning("%s: %s", place(source, text), said)
        else:
            values[field.name] = _convert(field, text, source)
    return struct_type(**values)


def keys(struct_type: type[msgspec.Struct]) -> frozenset[str]:
    """The keys that `struct_type` has a field for."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(struct_type))


def render(struct: msgspec.Struct) -> str:
    """The `key=value` lines that Apache's servers answer a request for their configuration with."""
    return "".join(
        f"{field.encode_name}={_text(getattr(struct, field.name))}\n" for field in msgspec.structs.fields(type(struct))
    )


def update(
    struct: msgspec.Struct,
    changes: Mapping[str, str],
    *,
    allowed: Collection[str],
    known: Collection[str] = frozenset(),
    source: str = "update",
) -> dict[str, str]:
    """Set the values of `changes` in `struct`: all of them, or none and a `ConfigError`.

    Only keys in `allowed` may change while a server runs; those of `known` are no misspellings. Gives the keys whose
    value is now another, with that value.
    """
    fields = {field.encode_name: field for field in msgspec.structs.fields(type(struct))}
    values: dict[str, Any] = {}
    for key, text in changes.items():
        field = fields.get(key)
        if field is None or key not in allowed:
            raise ConfigError(_refusal(key, known=field is not None or key in known, allowed=allowed))
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


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ConfigError(f"{path} line 1: this is UTF-16; save it as UTF-8")
    if len(data) > MAX_FILE_BYTES:
        before, nul, _ = data.partition(b"\0")
        if nul:
            raise ConfigError(f"{path} line {_line_count(before)}: this is not a text file; {_EXPECTED}")
        raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes, is this a configuration file?")
    data = data.rstrip(_END_OF_DOS_FILE)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")  # what Java reads


def _line_count(data: bytes) -> int:
    return len(_NEWLINE.split(data.decode("latin-1")))


def _not_an_entry(key: str, text: str) -> str:
    """What shows that no `.properties` file has this line; an escape in front of the key would say that it is meant."""
    if _CONTROL.search(key) or "\0" in text:
        return "this is not a text file"
    if key.startswith(_CONFLICT):
        return f"{_CONFLICT!r} is a conflict marker of git: choose one of the two versions"
    if key[:1] not in _OTHER_FORMATS or _SECTION.match(f"{key} {text}"):
        return ""
    return f"{key[:_SHOWN_CHARACTERS]!r} is not a key: this looks like {_OTHER_FORMATS[key[:1]]}"


def _entries(text: str) -> Iterator[tuple[int, str, str]]:
    """The line, key and value of each entry, with their escapes."""
    for number, line in _logical_lines(text):
        key = _KEY_END.match(line)
        assert key is not None  # the pattern matches the empty string
        separator = _SEPARATOR.match(line, key.end())
        assert separator is not None
        yield number, key.group(), line[separator.end() :]


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Each with the number of the line that it begins in."""
    lines: list[tuple[int, str]] = []
    pending: list[str] = []
    is_open = False
    begin = 0
    for number, natural in enumerate(_NEWLINE.split(text), 1):
        line = natural.lstrip(_BLANK)
        # A line that holds nothing but a backslash does not count as begun: what follows may be a comment.
        if not pending and (not line or line[0] in "#!"):
            is_open = False
            continue
        if not pending:
            begin = number
        # An odd number of trailing backslashes escapes the line end; an even number is escaped backslashes.
        is_open = bool((len(line) - len(line.rstrip("\\"))) % 2)
        part = line[:-1] if is_open else line
        if part:
            pending.append(part)
        if not is_open:
            lines.append((begin, "".join(pending)))
            pending = []
    if is_open:
        lines.append((begin, "".join(pending)))
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
            f"{place(source, text)}: {field.encode_name}={stripped!r} is not allowed: expected {allowed_values(field)}"
        ) from None


def _section(key: str, text: str) -> str:
    """What to say of a section line of an .ini file, which is a key as well to who knows no sections."""
    line = f"{key} {text}".strip()
    if not (line.startswith("[") and line.endswith("]")):
        return ""
    return f"{line} is a section, which Apache ignores: the keys below it count as all others do"


def _unknown(key: str, known: Collection[str], ignored: Collection[str]) -> str:
    if key in ignored:
        return f"{key} is an Apache RocketMQ setting that Skylark ignores"
    return f"unknown key {key}{_suggestion(key, [*known, *ignored])}"


def _refusal(key: str, *, known: bool, allowed: Collection[str]) -> str:
    if known:
        return f"{key} cannot be changed while the server runs; set it in the configuration file and restart"
    if len(key) > _LONGEST_KEY:
        return f"unknown key {key[:_LONGEST_KEY]}..., which has {len(key)} characters"
    return f"unknown key {key}{_suggestion(key, allowed)}"


def _suggestion(key: str, candidates: Collection[str]) -> str:
    close = difflib.get_close_matches(key, candidates, n=1, cutoff=_CLOSE)
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
