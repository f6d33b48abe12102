"""Frames of the remoting protocol: bytes in, `Frame` objects out.

    4 bytes   length of everything after this field
    4 bytes   header encoding (1 byte: 0 JSON, 1 ROCKETMQ binary) and header length (3 bytes)
    header    JSON object, or the binary layout below
    body      the rest

The binary header:

    2 code   1 language   2 version   4 opaque   4 flag   4+n remark   4+n fields
    a field: 2+n key, 4+n value

A frame is answered in the encoding it came in: `Frame.reply` sees to that. Flag bit 0 marks a response, bit 1 a one-way
request. The decoder holds at most one incomplete frame.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from struct import Struct, error
from typing import Any, Final

import msgspec

MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
PROTOCOL_VERSION: Final = 513
"""The ordinal of V5_5_0 in Apache's MQVersion: clients choose what they send by it."""

RESPONSE_FLAG: Final = 1
ONEWAY_FLAG: Final = 2

LANGUAGES: Final = (
    "JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY",
    "OTHER", "HTTP", "GO", "PHP", "OMS", "RUST", "NODE_JS",
)  # fmt: skip
_LANGUAGE_CODES: Final = {name: code for code, name in enumerate(LANGUAGES)}
_OTHER: Final = LANGUAGES.index("OTHER")

_PREFIX = Struct(">II")
_LENGTH = Struct(">I")
_BINARY_HEAD = Struct(">hBhiii")
_ONE_LETTER_FIELD = Struct(">HcI")


class BadFrame(Exception):
    """Bytes that are not a frame; the connection they came on can't be read any further."""


class Encoding(IntEnum):
    JSON = 0
    BINARY = 1


class Frame(msgspec.Struct):
    """One request or response."""

    code: int
    fields: dict[str, str] = {}
    body: bytes = b""
    opaque: int = 0
    flag: int = 0
    remark: str | None = None
    language: str = "PYTHON"
    version: int = PROTOCOL_VERSION
    encoding: Encoding = Encoding.JSON

    @property
    def is_response(self) -> bool:
        return bool(self.flag & RESPONSE_FLAG)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & ONEWAY_FLAG)

    def reply(
        self, code: int = 0, remark: str | None = None, fields: dict[str, str] | None = None, body: bytes = b""
    ) -> Frame:
        """The response to this request, in its encoding."""
        return Frame(
            code, {} if fields is None else fields, body, self.opaque, RESPONSE_FLAG, remark, encoding=self.encoding
        )


class _JsonHeader(msgspec.Struct, rename="camel", omit_defaults=True):
    code: int
    ext_fields: dict[str, str] | None = None
    flag: int = 0
    language: str = "JAVA"
    opaque: int = 0
    remark: str | None = None
    version: int = 0


class _JsonReply(msgspec.Struct, rename="camel"):
    """The header as it is written: Apache's field names in Apache's (alphabetical) order."""

    code: int
    ext_fields: dict[str, str] | msgspec.UnsetType
    flag: int
    language: str
    opaque: int
    remark: str | msgspec.UnsetType
    serialize_type_current_rpc: str = msgspec.field(name="serializeTypeCurrentRPC")
    version: int = 0


_decode_json = msgspec.json.Decoder(_JsonHeader).decode
_decode_loose_json = msgspec.json.Decoder(dict[str, Any]).decode
_encode_json = msgspec.json.Encoder().encode


def encode_frame(frame: Frame) -> bytes:
    """The whole frame as it goes over the wire."""
    # The binary header has two bytes for the code; Apache's encoder cuts longer ones off, and no server knows the rest.
    encoding = frame.encoding if -0x8000 <= frame.code <= 0x7FFF else Encoding.JSON
    header = _encode_binary_header(frame) if encoding else _encode_json_header(frame)
    size = len(header)
    return _PREFIX.pack(4 + size + len(frame.body), encoding << 24 | size) + header + frame.body


class FrameDecoder:
    """Cuts a byte stream into frames. Feed it what arrives; it keeps what is not complete."""

    __slots__ = ("_max_bytes", "_missing", "_rest")

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()
        self._missing = 0  # bytes to wait for before another look can bring anything

    def feed(self, data: bytes) -> list[Frame]:
        """Every frame that `data` completes. Raises BadFrame; the decoder is of no use after that."""
        if self._rest:
            self._rest += data
            if self._missing > len(data):
                self._missing -= len(data)
                return []
            data = bytes(self._rest)
            self._rest.clear()
        frames = []
        position, end = 0, len(data)
        while end - position >= 4:
            (length,) = _LENGTH.unpack_from(data, position)
            if not 4 <= length <= self._max_bytes:
                raise BadFrame(f"frame length {length} is not between 4 and {self._max_bytes}")
            stop = position + 4 + length
            if stop > end:
                self._missing = stop - end
                break
            frames.append(_decode_frame(data, position + 4, stop))
            position = stop
        else:
            self._missing = 4 - (end - position)
        if position < end:
            self._rest += memoryview(data)[position:]
        return frames


def _decode_frame(data: bytes, start: int, stop: int) -> Frame:
    (mark,) = _LENGTH.unpack_from(data, start)
    header_start = start + 4
    header_stop = header_start + (mark & 0xFFFFFF)
    if header_stop > stop:
        raise BadFrame(f"header of {mark & 0xFFFFFF} bytes in a frame of {stop - start}")
    encoding = mark >> 24
    body = data[header_stop:stop]
    if encoding == Encoding.BINARY:
        return _decode_binary_header(data, header_start, header_stop, body)
    if encoding == Encoding.JSON:
        return _decode_json_header(data[header_start:header_stop], body)
    raise BadFrame(f"unknown header encoding {encoding}: 0 is JSON, 1 is ROCKETMQ")


def _decode_json_header(header: bytes, body: bytes) -> Frame:
    try:
        h = _decode_json(header)
        return Frame(h.code, h.ext_fields or {}, body, h.opaque, h.flag, h.remark, h.language, h.version)
    except msgspec.ValidationError:
        return _decode_loose_json_header(header, body)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise BadFrame(f"bad JSON header: {e}") from None


def _decode_loose_json_header(header: bytes, body: bytes) -> Frame:
    """The same for clients that write values as numbers or null: every value becomes a string, null is left out."""
    try:
        h = _decode_loose_json(header)
        given = h.get("extFields") or {}
        fields = {k: v if isinstance(v, str) else _as_text(v) for k, v in given.items() if v is not None}
        strict = {key: value for key, value in h.items() if key != "extFields" and value is not None}
        typed = msgspec.convert(strict, _JsonHeader, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, AttributeError, RecursionError) as e:
        raise BadFrame(f"bad JSON header: {e}") from None
    return Frame(typed.code, fields, body, typed.opaque, typed.flag, typed.remark, typed.language, typed.version)


def _as_text(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _decode_binary_header(data: bytes, position: int, stop: int, body: bytes) -> Frame:
    try:
        code, language, version, opaque, flag, remark_size = _BINARY_HEAD.unpack_from(data, position)
        position += 17
        remark = None
        if remark_size:
            remark = data[position : position + remark_size].decode()
            position += remark_size
        (fields_size,) = _LENGTH.unpack_from(data, position)
        position += 4
        if remark_size < 0 or position + fields_size > stop:
            raise BadFrame("a length in the binary header exceeds the header")
        fields = _decode_fields(data, position, position + fields_size) if fields_size else {}
    except (error, UnicodeDecodeError) as e:
        raise BadFrame(f"bad binary header: {e}") from None
    name = LANGUAGES[language] if language < len(LANGUAGES) else "OTHER"
    return Frame(code, fields, body, opaque, flag, remark, name, version, Encoding.BINARY)


def _decode_fields(data: bytes, start: int, stop: int) -> dict[str, str]:
    # Cutting pieces out of one text is quicker than decoding each piece: Latin-1 gives a character for every byte, and
    # only the rare piece that is not ASCII has to be looked at again. Fields on the hot path (SEND_MESSAGE_V2) have
    # keys of one letter: their key and both lengths are read in one go.
    text = data[start:stop].decode("latin-1")
    end = stop - start
    fields = {}
    at = 0
    unpack = _ONE_LETTER_FIELD.unpack_from
    while at < end:
        key_size, _, size = unpack(data, start + at)
        key_end = at + 2 + key_size
        key = text[at + 2 : key_end]
        if key_size != 1:
            (size,) = _LENGTH.unpack_from(data, start + key_end)
        at = key_end + 4 + size
        value = text[key_end + 4 : at]
        fields[key if key.isascii() else _utf8(key)] = value if value.isascii() else _utf8(value)
    if at != end:
        raise BadFrame("the fields of the binary header end beyond their length")
    return fields


def _utf8(latin: str) -> str:
    return latin.encode("latin-1").decode()


def _encode_json_header(frame: Frame) -> bytes:
    return _encode_json(
        _JsonReply(
            frame.code,
            frame.fields or msgspec.UNSET,
            frame.flag,
            frame.language,
            frame.opaque,
            msgspec.UNSET if frame.remark is None else frame.remark,
            "JSON",
            frame.version,
        )
    )


def _encode_binary_header(frame: Frame) -> bytes:
    remark = frame.remark.encode() if frame.remark else b""
    parts: list[bytes] = []
    for key, value in frame.fields.items():
        data = value.encode()
        parts += (_field_key(key), _LENGTH.pack(len(data)), data)
    fields = b"".join(parts)
    language = _LANGUAGE_CODES.get(frame.language, _OTHER)
    head = _BINARY_HEAD.pack(frame.code, language, frame.version, frame.opaque, frame.flag, len(remark))
    return b"".join((head, remark, _LENGTH.pack(len(fields)), fields))


@lru_cache(maxsize=1024)
def _field_key(key: str) -> bytes:
    data = key.encode()
    return len(data).to_bytes(2, "big") + data
