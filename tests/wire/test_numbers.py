"""Java's int and long ranges hold for every header, every body and every table."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import inspect

from skylark.broker import assignment, checkpoints, filterdata, offsets, orders
from skylark.store import tables as store_tables
from skylark.wire import bodies, fastjson, headers, json_header, mapping, pop, recall, routes, stats, tables
from skylark.wire.bodies import BadBody, decode_body
from skylark.wire.codes import RequestCode
from skylark.wire.frame import BadFrame, Encoding, Frame
from skylark.wire.framing import FrameDecoder, encode_frame
from skylark.wire.sending import decode_send
from skylark.wire.typed import BadHeader, decode_header
from wire.poisoned import TOO_LARGE, integers, sample, structs_of, variants

WIRE = (bodies, headers, json_header, mapping, pop, recall, routes, stats, tables)
TABLES = (store_tables, orders, assignment, filterdata, offsets, checkpoints)
BODIES = [
    each
    for each in structs_of(bodies, mapping, pop, routes, stats, tables, store_tables, orders, filterdata)
    if any(integers(inspect.type_info(each))) and each is not pop.ReceiptHandle  # a text, see below
]
CHECKED_ELSEWHERE = {json_header.JsonHeader}
"""`framing` checks it: see the test of frames below."""


@pytest.mark.parametrize(
    "kind",
    [each for each in structs_of(*WIRE, *TABLES) if each not in CHECKED_ELSEWHERE],
    ids=lambda kind: kind.__name__,
)
def test_every_number_has_a_range(kind: type[msgspec.Struct]) -> None:
    for path, number in integers(inspect.type_info(kind)):
        assert number.ge is not None, path
        assert number.le is not None, path


@pytest.mark.parametrize("kind", structs_of(headers), ids=lambda kind: kind.__name__)
def test_a_header_with_a_number_out_of_range_is_refused_and_the_field_is_named(kind: type[msgspec.Struct]) -> None:
    for bad in TOO_LARGE:
        for name, fields in variants(inspect.type_info(kind), bad):
            texts = {
                key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in fields.items()
            }
            for frame in (
                Frame(1, dict(texts)),
                Frame(1, raw_fields=msgspec.Raw(msgspec.json.encode(texts))),
                Frame(1, raw_fields=msgspec.Raw(msgspec.json.encode(dict(fields)))),
            ):
                with pytest.raises(BadHeader, match=rf"\$\.{name}`"):
                    decode_header(kind, frame)


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_a_body_with_a_number_out_of_range_is_refused_and_the_field_is_named(kind: type[msgspec.Struct]) -> None:
    assert decode_body(kind, fastjson.dumps(sample(inspect.type_info(kind)))) is not None
    for bad in TOO_LARGE:
        for name, body in variants(inspect.type_info(kind), bad):
            with pytest.raises(BadBody, match=name):
                decode_body(kind, fastjson.dumps(body))


@pytest.mark.parametrize("letter", "defhjl")
@pytest.mark.parametrize("bad", [2**31, 10**17, -(2**31) - 1, 10**30])
@pytest.mark.parametrize("encoding", list(Encoding))
def test_a_send_with_an_int_out_of_range_is_refused(letter: str, bad: int, encoding: Encoding) -> None:
    fields = dict.fromkeys("abc", "x") | dict.fromkeys("defgh", "1") | {letter: str(bad)}
    (frame,) = FrameDecoder().feed(encode_frame(Frame(RequestCode.SEND_MESSAGE_V2, fields, encoding=encoding)))
    with pytest.raises(BadHeader, match=rf"\$\.{letter}`"):
        decode_send(frame)


NUMBERS_OF_A_FRAME = [
    each.encode_name
    for each in msgspec.structs.fields(json_header.JsonHeader)
    if isinstance(inspect.type_info(each.type), inspect.IntType)
]


def as_frame(header: dict[str, object]) -> bytes:
    data = msgspec.json.encode(header)
    return (4 + len(data)).to_bytes(4, "big") + len(data).to_bytes(4, "big") + data


@pytest.mark.parametrize("name", NUMBERS_OF_A_FRAME)
@pytest.mark.parametrize("bad", [2**31, -(2**31) - 1, 2**63, 10**30])
@pytest.mark.parametrize("form", [int, str])
def test_a_frame_with_a_number_out_of_range_ends_its_connection(name: str, bad: int, form: type[int | str]) -> None:
    with pytest.raises(BadFrame):
        FrameDecoder().feed(as_frame({"code": 1, "opaque": 1, name: form(bad)}))


@pytest.mark.parametrize("name", NUMBERS_OF_A_FRAME)
@pytest.mark.parametrize("number", [2**31 - 1, -(2**31)])
def test_a_frame_may_have_any_int(name: str, number: int) -> None:
    (frame,) = FrameDecoder().feed(as_frame({"code": 1, "extFields": {}, name: number}))
    assert getattr(frame, name) == number


@pytest.mark.parametrize("part", [0, 1, 2, 3, 6, 7])
@pytest.mark.parametrize("bad", TOO_LARGE)
def test_a_handle_with_a_number_out_of_range_is_refused(part: int, bad: int) -> None:
    parts = ["1", "2", "3", "4", "0", "broker-a", "6", "7"]
    parts[part] = str(bad)
    with pytest.raises(pop.BadHandle):
        pop.ReceiptHandle.parse(" ".join(parts))


@pytest.mark.parametrize("line", ["t {} 1 6 SINGLE_TAG", "t 1 {} 6 SINGLE_TAG", "t 1 1 {} SINGLE_TAG"])
def test_a_compressed_registration_with_a_number_out_of_range_is_refused(line: str) -> None:
    parse: Any = routes._parse_topic_line  # type: ignore[attr-defined]  # the rest is of no interest here
    assert parse(line.format(6).encode()).topic_name == "t"
    for bad in (2**31, *TOO_LARGE):
        with pytest.raises(BadBody):
            parse(line.format(bad).encode())
