"""Frames of the remoting protocol: bytes in, `Frame` objects out.

    4 bytes   length of everything after this field
    4 bytes   header encoding (1 byte: 0 JSON, 1 ROCKETMQ binary) and header length (3 bytes)
    header    JSON object, or the binary layout below
    body      the rest

The binary header:

    2 code   1 language   2 version   4 opaque   4 flag   4+n remark   4+n fields
    a field: see `binary_header`

The decoder holds at most one incomplete frame.
"""

from __future__ import annotations

from typing import Final, cast

import msgspec
from librt.strings import BytesWriter, read_i16_be, read_i32_be, write_i16_be, write_i32_be
from msgspec.structs import astuple
from mypy_extensions import i16, i32, i64

from skylark.wire.frame import LANGUAGES, MAX_FRAME_BYTES, RESPONSE_FLAG, BadFrame, Encoding, Frame
from skylark.wire.json_header import JsonHeader, JsonReply
from skylark.wire.numbers import INT_MAX, INT_MIN

_LANGUAGE_CODES: Final = {name: code for code, name in enumerate(LANGUAGES)}
_OTHER: Final = LANGUAGES.index("OTHER")
_NUMBERED_LANGUAGES: Final = {b"%d" % code: msgspec.Raw(f'"{name}"'.encode()) for code, name in enumerate(LANGUAGES)}
_OTHER_LANGUAGE: Final = msgspec.Raw(b'"OTHER"')
_JSON: Final = 0
_BINARY: Final = 1
_MAX_HEADER_BYTES: Final = 0xFFFFFF
_JSON_ENCODING: Final = Encoding.JSON
_BINARY_ENCODING: Final = Encoding.BINARY
_Members = tuple[int, msgspec.Raw | msgspec.UnsetType, int, str, int, str | None, int]

_decode_json = msgspec.json.Decoder(JsonHeader).decode
_decode_lax = msgspec.json.Decoder(JsonHeader, strict=False).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode_json = msgspec.json.Encoder().encode


class FrameTooLong(BadFrame):
    """A frame that the lengths in front of its parts can't express."""


def encode_frame(frame: Frame) -> bytes:
    """The whole frame as it goes over the wire. Raises FrameTooLong."""
    # The binary header has two bytes for the code; Apache's encoder cuts longer ones off, and no server knows the rest.
    is_binary = frame.encoding is _BINARY_ENCODING and -0x8000 <= frame.code <= 0x7FFF
    header = _encode_binary_header(frame) if is_binary else _encode_json_header(frame)
    size = len(header)
    length = 4 + size + len(frame.body)
    if size > _MAX_HEADER_BYTES or length > INT_MAX:
        raise FrameTooLong(f"a header of {size} bytes, and {length} bytes in all")
    out = BytesWriter()
    write_i32_be(out, i32(length))
    write_i32_be(out, i32(size + (_BINARY << 24 if is_binary else 0)))
    out.write(header)
    out.write(frame.body)
    return out.getvalue()


class FrameDecoder:
    """Cuts a byte stream into frames. Feed it what arrives; it keeps what is not complete."""

    __slots__ = ("_max_bytes", "_max_header_bytes", "_missing", "_rest")

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES, max_header_bytes: int = _MAX_HEADER_BYTES) -> None:
        self._max_bytes = max_bytes
        self._max_header_bytes = max_header_bytes
        self._rest = bytearray()
        self._missing = 0  # bytes to wait for before another look can bring anything

    @property
    def held_bytes(self) -> int:
        """The size of the incomplete frame so far."""
        return len(self._rest)

    @property
    def missing_bytes(self) -> int:
        """How much may still come of the incomplete frame."""
        return self._missing if len(self._rest) >= 4 else self._max_bytes

    def clear(self) -> None:
        """Forgets the incomplete frame."""
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Every frame that `data` completes. Raises BadFrame; the decoder is of no use after that."""
        if self._rest:
            self._rest += data
            if self._missing > len(data):
                self._missing -= len(data)
                return []
            data = bytes(self._rest)
            self._rest.clear()
        frames: list[Frame] = []
        end = i64(len(data))
        position: i64 = 0
        while end - position >= 4:
            length = i64(read_i32_be(data, position))
            if not 4 <= length <= self._max_bytes:
                raise BadFrame(f"frame length {length} is not between 4 and {self._max_bytes}")
            stop = position + 4 + length
            if stop > end:
                self._missing = stop - end
                break
            frame = _decode_frame(data, position + 4, stop, self._max_header_bytes)
            frame.wire_bytes = length
            frames.append(frame)
            position = stop
        else:
            self._missing = 4 - (end - position)
        if position < end:
            self._rest += memoryview(data)[position:]
        return frames


def _decode_frame(data: bytes, start: i64, stop: i64, max_header_bytes: i64) -> Frame:
    encoding = data[start]
    header_start = start + 4
    header_size = i64(read_i32_be(data, start)) & 0xFFFFFF
    header_stop = header_start + header_size
    if header_stop > stop:
        raise BadFrame(f"header of {header_size} bytes in a frame of {stop - start}")
    if header_size > max_header_bytes:
        raise BadFrame(f"header of {header_size} bytes, which may have up to {max_header_bytes}")
    body = data[header_stop:stop]
    if encoding == _BINARY:
        return _decode_binary_header(data, header_start, header_stop, body)
    if encoding == _JSON:
        return _decode_json_header(data[header_start:header_stop], body)
    raise BadFrame(f"unknown header encoding {encoding}: 0 is JSON, 1 is ROCKETMQ")


def _decode_json_header(header: bytes, body: bytes) -> Frame:
    try:
        try:
            h = _decode_json(header)
        except msgspec.ValidationError:
            h = _decode_lax_json(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise BadFrame(f"bad JSON header: {e}") from None
    code, given, flag, language, opaque, remark, version = cast(_Members, astuple(h))
    if not (
        INT_MIN <= code <= INT_MAX
        and INT_MIN <= flag <= INT_MAX
        and INT_MIN <= opaque <= INT_MAX
        and INT_MIN <= version <= INT_MAX
    ):
        raise BadFrame("bad JSON header: code, flag, opaque or version is no int of Java's")
    fields = given if isinstance(given, msgspec.Raw) else None
    return _checked(Frame(code, None, body, opaque, flag, remark, language, version, _JSON_ENCODING, fields))


def _checked(frame: Frame) -> Frame:
    """The fields of a request are decoded by who asks for them, and bad ones are answered; in a response they mean that
    the connection can't be trusted."""
    if frame.flag & RESPONSE_FLAG:
        frame.fields  # noqa: B018
    return frame


def _decode_lax_json(header: bytes) -> JsonHeader:
    """The same for clients that write numbers as strings, the language as a number, or null for what they leave out."""
    given = {key: value for key, value in _decode_members(header).items() if bytes(value) != b"null"}
    number = bytes(given.get("language", b""))
    if number.isdigit():
        given["language"] = _NUMBERED_LANGUAGES.get(number, _OTHER_LANGUAGE)
    return _decode_lax(msgspec.json.encode(given))


def _decode_binary_header(data: bytes, start: i64, stop: i64, body: bytes) -> Frame:
    try:
        code = read_i16_be(data, start)
        language = data[start + 2]
        version = read_i16_be(data, start + 3)
        opaque = read_i32_be(data, start + 5)
        flag = read_i32_be(data, start + 9)
        remark_size = i64(read_i32_be(data, start + 13))
        fields_at = start + 17 + remark_size + 4
        if remark_size < 0 or fields_at > stop:
            raise BadFrame("a length in the binary header exceeds the header")
        remark = data[start + 17 : start + 17 + remark_size].decode() if remark_size else None
        fields_size = i64(read_i32_be(data, fields_at - 4))
        if fields_size < 0 or fields_at + fields_size > stop:
            raise BadFrame("a length in the binary header exceeds the header")
    except (IndexError, UnicodeDecodeError) as e:
        raise BadFrame(f"bad binary header: {e}") from None
    name = LANGUAGES[language] if language < len(LANGUAGES) else "OTHER"
    fields = data[fields_at : fields_at + fields_size]
    return _checked(Frame(code, None, body, opaque, flag, remark, name, version, _BINARY_ENCODING, fields))


def _encode_json_header(frame: Frame) -> bytes:
    raw = frame.raw_fields
    return _encode_json(
        JsonReply(
            frame.code,
            raw if isinstance(raw, msgspec.Raw) else frame.fields or msgspec.UNSET,
            frame.flag,
            frame.language,
            frame.opaque,
            msgspec.UNSET if frame.remark is None else frame.remark,
            "JSON",
            frame.version,
        )
    )


def _encode_binary_header(frame: Frame) -> bytes:
    fields = BytesWriter()
    for key, value in frame.fields.items():
        name = key.encode()
        write_i16_be(fields, i16(len(name)))
        fields.write(name)
        _write_text(fields, value)
    packed = fields.getvalue()
    header = BytesWriter()
    write_i16_be(header, i16(frame.code))
    header.append(_LANGUAGE_CODES.get(frame.language, _OTHER))
    write_i16_be(header, i16(frame.version))
    write_i32_be(header, i32(frame.opaque))
    write_i32_be(header, i32(frame.flag))
    _write_text(header, frame.remark or "")
    write_i32_be(header, i32(len(packed)))
    header.write(packed)
    return header.getvalue()


def _write_text(out: BytesWriter, text: str) -> None:
    data = text.encode()
    write_i32_be(out, i32(len(data)))
    out.write(data)
