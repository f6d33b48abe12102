"""Sends in their encodings and forms are read the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from skylark.wire.codes import RequestCode
from skylark.wire.frame import BadFrame, Encoding, Frame
from skylark.wire.framing import FrameDecoder, encode_frame
from skylark.wire.headers import SendMessage, SendMessageV2
from skylark.wire.sending import SendRequest, decode_send
from skylark.wire.typed import BadHeader, decode_header, encode_header

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
numbers = st.integers(-(1 << 31), (1 << 31) - 1)
times = st.integers(-(1 << 63), (1 << 63) - 1)
fields = st.tuples(
    texts, texts, texts, numbers, numbers, numbers, times, numbers, texts | st.none(), numbers | st.none(),
    st.booleans() | st.none(), st.booleans() | st.none(), numbers | st.none(),
)  # fmt: skip


def received(frame: Frame) -> Frame:
    (got,) = FrameDecoder().feed(encode_frame(frame))
    return got


def values(request: SendRequest) -> tuple[object, ...]:
    return tuple(
        getattr(request, name)
        for name in (
            "producer_group", "topic", "default_topic", "default_topic_queue_nums", "queue_id", "sys_flag",
            "born_timestamp_ms", "flag", "properties", "reconsume_times", "unit_mode", "is_batch",
            "max_reconsume_times",
        )
    )  # fmt: skip


@given(
    fields,
    st.sampled_from(list(Encoding)),
    st.booleans(),
    st.dictionaries(st.sampled_from(["n", "lo", "z", "ab"]), texts),
)
def test_every_form_is_read_the_same(
    given: tuple[object, ...], encoding: Encoding, is_short: bool, others: dict[str, str]
) -> None:
    header = (SendMessageV2 if is_short else SendMessage)(*given)
    code = RequestCode.SEND_MESSAGE_V2 if is_short else RequestCode.SEND_MESSAGE
    frame = received(Frame(code, others | encode_header(header) | others, b"body", encoding=encoding))
    properties = given[8]
    wanted = list(given)
    wanted[8] = properties.encode() if isinstance(properties, str) else b""
    wanted[10], wanted[11] = bool(given[10]), bool(given[11])
    assert values(decode_send(frame)) == tuple(wanted)
    assert astuple(decode_header(type(header), frame)) == given


@pytest.mark.parametrize("encoding", Encoding)
@pytest.mark.parametrize("changed", [{"e": "x"}, {"e": "1 "}, {"h": ""}, {"m": "maybe"}, {"g": "--1"}])
def test_a_field_that_is_wrong_is_named(encoding: Encoding, changed: dict[str, str]) -> None:
    good = encode_header(SendMessageV2("g", "t", "d", 4, 0, 0, 0, 0))
    frame = received(Frame(RequestCode.SEND_MESSAGE_V2, good | changed, encoding=encoding))
    with pytest.raises(BadHeader, match="310"):
        decode_send(frame)


def test_properties_that_are_not_utf8_are_refused() -> None:
    good = encode_header(SendMessageV2("g", "t", "d", 4, 0, 0, 0, 0, properties="TAGS\x01ab\x02"))
    data = encode_frame(Frame(RequestCode.SEND_MESSAGE_V2, good, encoding=Encoding.BINARY))
    (frame,) = FrameDecoder().feed(data.replace(b"\x01ab", b"\x01\xff\xff"))
    with pytest.raises(BadFrame):
        decode_send(frame)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_fields_are_refused(data: bytes) -> None:
    frame = Frame(RequestCode.SEND_MESSAGE_V2, encoding=Encoding.BINARY, raw_fields=data)
    with pytest.raises((BadHeader, BadFrame)):
        decode_send(frame)


@pytest.mark.parametrize("encoding", Encoding)
@pytest.mark.parametrize("is_short", [False, True])
def test_properties_that_no_message_has_are_refused_before_they_are_looked_through(
    encoding: Encoding, is_short: bool
) -> None:
    for size in (1 << 17, (1 << 17) + 1):
        header = (SendMessageV2 if is_short else SendMessage)("g", "t", "d", 1, 1, 0, 1, 0, "\x02" * size)
        code = RequestCode.SEND_MESSAGE_V2 if is_short else RequestCode.SEND_MESSAGE
        frame = received(Frame(code, encode_header(header), encoding=encoding))
        if size == 1 << 17:
            assert len(decode_send(frame).properties) == size
        else:
            with pytest.raises(BadHeader, match="properties of 131073 bytes: a message has up to 32767"):
                decode_send(frame)
