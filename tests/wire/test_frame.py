"""Frames: round trips in both encodings, however the bytes arrive, and bytes that are no frames."""

from __future__ import annotations

import contextlib
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.wire.frame import LANGUAGES, MAX_FRAME_BYTES, BadFrame, Encoding, Frame
from skylark.wire.framing import FrameDecoder, encode_frame
from skylark.wire.headers import GetRouteInfo
from skylark.wire.typed import decode_header

INT = st.integers(-(2**31), 2**31 - 1)
SHORT = st.integers(-(2**15), 2**15 - 1)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    return Frame(
        code=draw(SHORT),
        fields=draw(st.dictionaries(st.text(min_size=1, max_size=8), st.text(max_size=20), max_size=6)),
        body=draw(st.binary(max_size=64)),
        opaque=draw(INT),
        flag=draw(st.integers(0, 3)),
        remark=draw(st.none() | st.text(min_size=1, max_size=20)),
        language=draw(st.sampled_from(LANGUAGES)),
        version=draw(st.integers(0, 600)),
        encoding=draw(st.sampled_from(Encoding)),
    )


def raw(header: bytes, body: bytes = b"", encoding: int = 0, header_size: int | None = None) -> bytes:
    size = len(header) if header_size is None else header_size
    return struct.pack(">II", 4 + len(header) + len(body), encoding << 24 | size) + header + body


def decode_one(data: bytes) -> Frame:
    (frame,) = FrameDecoder().feed(data)
    return frame


@given(st.lists(frames(), max_size=4))
def test_frames_in_one_piece(sent: list[Frame]) -> None:
    assert FrameDecoder().feed(b"".join(map(encode_frame, sent))) == sent


@given(st.lists(frames(), min_size=1, max_size=2))
def test_frames_byte_by_byte(sent: list[Frame]) -> None:
    decoder = FrameDecoder()
    stream = b"".join(map(encode_frame, sent))
    received = [frame for i in range(len(stream)) for frame in decoder.feed(stream[i : i + 1])]
    assert received == sent


@given(st.lists(frames(), min_size=1, max_size=4), st.data())
def test_frames_in_any_pieces(sent: list[Frame], data: st.DataObject) -> None:
    decoder = FrameDecoder()
    stream = b"".join(map(encode_frame, sent))
    received: list[Frame] = []
    while stream:
        size = data.draw(st.integers(1, len(stream)), label="piece")
        received += decoder.feed(stream[:size])
        stream = stream[size:]
    assert received == sent


@given(frames(), frames(), st.data())
def test_what_follows_a_frame_is_kept_for_the_next(first: Frame, second: Frame, data: st.DataObject) -> None:
    rest = encode_frame(second)
    cut = data.draw(st.integers(0, len(rest) - 1))
    decoder = FrameDecoder()
    assert decoder.feed(encode_frame(first) + rest[:cut]) == [first]
    assert decoder.feed(rest[cut:]) == [second]


@given(frames(), st.integers(0, 300), st.none() | st.text(min_size=1), st.dictionaries(st.text(min_size=1), st.text()))
def test_a_reply_has_the_encoding_and_the_number_of_its_request(
    request: Frame, code: int, remark: str | None, fields: dict[str, str]
) -> None:
    reply = decode_one(encode_frame(request.reply(code, remark, fields, b"body")))
    assert (reply.encoding, reply.opaque, reply.is_response, reply.is_oneway) == (
        request.encoding,
        request.opaque,
        True,
        False,
    )
    assert (reply.code, reply.remark, reply.fields, reply.body) == (code, remark, fields, b"body")


@given(st.binary(max_size=200))
def test_any_bytes_give_frames_or_are_refused(data: bytes) -> None:
    with contextlib.suppress(BadFrame):
        FrameDecoder().feed(data)


@given(frames(), st.data())
def test_a_damaged_frame_gives_a_frame_or_is_refused(frame: Frame, data: st.DataObject) -> None:
    damaged = bytearray(encode_frame(frame))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(4, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadFrame):
        FrameDecoder().feed(bytes(damaged))


@pytest.mark.parametrize("length", [0, 1, 3, MAX_FRAME_BYTES + 1, 0x7FFFFFFF, 0xFFFFFFFF])
def test_an_impossible_length_is_refused_before_the_rest_arrives(length: int) -> None:
    with pytest.raises(BadFrame, match="length"):
        FrameDecoder().feed(struct.pack(">I", length))


def test_the_largest_frame_is_taken() -> None:
    frame = Frame(10, body=b"x" * (MAX_FRAME_BYTES - 200))
    assert decode_one(encode_frame(frame)).body == frame.body


def test_a_limit_can_be_set() -> None:
    small = encode_frame(Frame(10))
    assert FrameDecoder(len(small) - 4).feed(small)
    with pytest.raises(BadFrame):
        FrameDecoder(len(small) - 5).feed(small)


BINARY_HEAD = struct.pack(">hBhiii", 10, 0, 513, 1, 0, 0)
BINARY_RESPONSE = struct.pack(">hBhiii", 10, 0, 513, 1, 1, 0)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(raw(b"{}", encoding=2), id="unknown encoding"),
        pytest.param(raw(b'{"code":1}', header_size=11), id="header longer than the frame"),
        pytest.param(raw(b""), id="empty JSON header"),
        pytest.param(raw(b"{}"), id="no code"),
        pytest.param(raw(b"[]"), id="not an object"),
        pytest.param(raw(b'{"code":1'), id="cut JSON"),
        pytest.param(raw(b'{"code":1,"remark":"\xff"}'), id="not UTF-8"),
        pytest.param(raw(b'{"code":"x"}'), id="code is a word"),
        pytest.param(raw(b'{"code":1,"flag":1,"extFields":[1]}'), id="fields of a response are a list"),
        pytest.param(raw(b"[" * 100_000), id="deep nesting"),
        pytest.param(raw(b'{"code":1,"extFields":{"a":' + b"[" * 100_000), id="deep nesting in a field"),
        pytest.param(raw(b"", encoding=1), id="empty binary header"),
        pytest.param(raw(BINARY_HEAD, encoding=1), id="no length of the fields"),
        pytest.param(raw(BINARY_HEAD + b"\0\0\0\x09", b"123456789", 1), id="fields in the body"),
        pytest.param(raw(BINARY_RESPONSE + b"\0\0\0\x07\0\1a\0\0\0\5", b"12345", 1), id="value in the body"),
        pytest.param(raw(BINARY_RESPONSE + b"\0\0\0\x08\0\1\xff\0\0\0\1x", b"", 1), id="key is not UTF-8"),
        pytest.param(raw(BINARY_HEAD[:-4] + b"\xff\xff\xff\xff\0\0\0\0", b"", 1), id="negative length of the remark"),
        pytest.param(raw(BINARY_HEAD[:-4] + b"\0\0\x10\0\0\0\0\0", b"x" * 9000, 1), id="remark in the body"),
    ],
)
def test_a_bad_header_is_refused(data: bytes) -> None:
    with pytest.raises(BadFrame):
        FrameDecoder().feed(data)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(raw(b'{"code":10,"extFields":[1]}'), id="list"),
        pytest.param(raw(b'{"code":10,"extFields":7}'), id="number"),
        pytest.param(raw(b'{"code":10,"extFields":{"a":"\xff"}}'), id="value is not UTF-8"),
        pytest.param(raw(BINARY_HEAD + b"\0\0\0\x07\0\1a\0\0\0\5", b"12345", 1), id="value in the body"),
        pytest.param(raw(BINARY_HEAD + b"\0\0\0\x07\0\1a\xff\0\0\5", b"12345", 1), id="negative length"),
        pytest.param(raw(BINARY_HEAD + b"\0\0\0\x08\0\1\xff\0\0\0\1x", b"", 1), id="key is not UTF-8"),
    ],
)
def test_bad_fields_of_a_request_are_refused_when_they_are_asked_for(data: bytes) -> None:
    (frame,) = FrameDecoder().feed(data)
    with pytest.raises(BadFrame):
        decode_header(GetRouteInfo, frame)
    with pytest.raises(BadFrame):
        _ = frame.fields


def test_values_that_are_no_strings_become_strings() -> None:
    header = {
        "code": "105",
        "extFields": {"queueId": 3, "order": False, "gone": None, "topic": "t"},
        "flag": 0,
        "language": "GO",
        "opaque": 7,
        "remark": None,
        "serializeTypeCurrentRPC": "JSON",
        "version": 317,
    }
    frame = decode_one(raw(json.dumps(header).encode(), b"body"))
    assert frame == Frame(
        105, {"queueId": "3", "order": "false", "topic": "t"}, b"body", 7, 0, None, "GO", 317, Encoding.JSON
    )


def test_a_json_header_has_the_fields_and_the_order_of_apaches() -> None:
    frame = Frame(0, {"value": "v1"}, b"", 7, 1, None, "JAVA", 513)
    header = (
        b'{"code":0,"extFields":{"value":"v1"},"flag":1,"language":"JAVA","opaque":7,'
        b'"serializeTypeCurrentRPC":"JSON","version":513}'
    )
    assert encode_frame(frame) == raw(header)


def test_a_binary_header_has_the_layout_of_apaches() -> None:
    frame = Frame(10, {"a": "group", "topic": "t"}, b"body", 7, 2, "no", "GO", 317, Encoding.BINARY)
    fields = b"\0\1a" + b"\0\0\0\5group" + b"\0\5topic" + b"\0\0\0\1t"
    header = struct.pack(">hBhii", 10, 9, 317, 7, 2) + b"\0\0\0\2no" + struct.pack(">I", len(fields)) + fields
    assert encode_frame(frame) == raw(header, b"body", 1)


def test_an_unknown_language_does_not_matter() -> None:
    data = raw(struct.pack(">hBhiii", 10, 200, 513, 1, 0, 0) + b"\0\0\0\0", encoding=1)
    assert decode_one(data).language == "OTHER"
    for written, name in {"0": "JAVA", "1": "CPP", "99": "OTHER", "null": "JAVA", '"XYZ"': "XYZ"}.items():
        assert decode_one(raw(b'{"code":105,"language":%s,"opaque":7}' % written.encode())).language == name
