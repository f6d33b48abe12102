"""Whatever a message holds: each is a row, or a fault that the option badRecords covers; no other one suffers by it."""

from __future__ import annotations

import json
import logging
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as spark_types

from skylark.client import compression
from skylark.client.errors import MissingCodec
from skylark.spark import ddl
from skylark.spark.bodies import Columns, Format, Shape, Undecodable
from skylark.spark.columns import NAMES
from skylark.spark.commitlog import Segment
from skylark.spark.options import BadOption
from skylark.spark.portions import portions
from skylark.spark.records import FIRST_TIME_MS, LAST_TIME_MS, PORTION_BYTES, Records
from skylark.spark.scanning import Part, Scanning, read_parts
from skylark.wire.message import (
    MAGIC_V1,
    SYS_BORN_HOST_V6,
    SYS_COMPRESSED,
    SYS_COMPRESSION_LZ4,
    SYS_INNER_BATCH,
    SYS_NEED_UNWRAP,
    SYS_STORE_HOST_V6,
)
from skylark.wire.records import RECORD_HEADERS, body_crc, encode_batch

ALL = Shape(NAMES)
WRAPPED = SYS_INNER_BATCH | SYS_NEED_UNWRAP
I32, I64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
TIMES_MS = I64 | st.sampled_from(
    [-(2**63), 2**62, 2**63 - 1, FIRST_TIME_MS - 1, FIRST_TIME_MS, -1, 0, LAST_TIME_MS, LAST_TIME_MS + 1]
)


def record(
    body: bytes = b"body",
    properties: bytes = b"",
    *,
    topic: bytes = b"orders",
    queue_id: int = 0,
    offset: int = 0,
    log_offset: int = 0,
    sys_flag: int = 0,
    born_ms: int = 0,
    stored_ms: int = 0,
    reconsume_times: int = 0,
    crc: int | None = None,
) -> bytes:
    """A whole record of any content; no encoder would make most of them."""
    header = RECORD_HEADERS[sys_flag >> 4 & 3]
    size = header.size + len(body) + 1 + len(topic) + 2 + len(properties)
    born_host = bytes(20 if sys_flag & SYS_BORN_HOST_V6 else 8)
    store_host = bytes(20 if sys_flag & SYS_STORE_HOST_V6 else 8)
    return (
        header.pack(
            size, MAGIC_V1, body_crc(body) if crc is None else crc, queue_id, 0, offset, log_offset, sys_flag, born_ms,
            born_host, stored_ms, store_host, reconsume_times, 0, len(body),
        )
        + body + bytes((len(topic),)) + topic + struct.pack(">h", len(properties)) + properties
    )  # fmt: skip


def batches(data: bytes, bad_records: str = "drop", shape: Shape = ALL) -> list[pa.RecordBatch]:
    columns = Columns(shape, bad_records)
    return [batch for part in Records(data).unwrapped() for batch in columns.of(part, broker="b", topic="orders")]


def offsets(data: bytes, names: Sequence[str] = NAMES) -> list[int]:
    """Of the messages that are left when the bad ones are dropped."""
    return [row["offset"] for batch in batches(data, shape=Shape(names)) for row in batch.to_pylist()]


def json_shape(schema: str) -> Shape:
    return shape("json", schema.encode())


def shape(name: str, schema: bytes) -> Shape:
    format = Format(name, schema)
    kind = spark_types.StringType() if name == "text" else ddl.parse(format.spark_type)
    return Shape(["offset", "value"], format, kind)


# --- each kind of fault -----------------------------------------------------------------------------------------------
UNREADABLE: dict[str, tuple[bytes, str]] = {
    "a time of birth that Spark does not have": (record(offset=1, born_ms=2**62), "bornTimestamp is 46116860184"),
    "a time of storing": (record(offset=1, stored_ms=LAST_TIME_MS + 1), "storeTimestamp is 253402300800000 ms"),
    "a body that is not compressed": (record(b"plain", offset=1, sys_flag=SYS_COMPRESSED), "can't be inflated"),
    "a codec that nobody knows": (record(b"x", offset=1, sys_flag=SYS_COMPRESSED | 0x700), "not known"),
    "no checksum of its body": (record(offset=1, crc=7), "its body fails its checksum"),
    "a batch that is none": (record(b"plain", offset=1, sys_flag=WRAPPED), "a batch that can't be unpacked"),
    "an empty batch": (record(b"", offset=1, sys_flag=WRAPPED), "it holds no message"),
    "a batch that is not compressed": (
        record(b"plain", offset=1, sys_flag=WRAPPED | SYS_COMPRESSED),
        "can't be inflated",
    ),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_message_that_can_not_be_read(what: str, caplog: pytest.LogCaptureFixture) -> None:
    bad, reason = UNREADABLE[what]
    data = record(offset=0) + bad + record(offset=2)
    with pytest.raises(
        Undecodable, match=rf"queue 0 of topic orders at broker b: the message at offset 1 is .*{reason}"
    ):
        batches(data, "fail")
    with pytest.raises(Undecodable, match="set badRecords=drop to go on without it"):
        batches(data, "fail")
    with caplog.at_level(logging.WARNING):
        assert offsets(data) == [0, 2]
    assert "dropped because unreadable: 1 (from offset 1 on; that one:" in caplog.text


def test_only_what_is_asked_for_can_be_bad() -> None:
    data = record(offset=0, born_ms=2**62) + record(b"plain", offset=1, sys_flag=SYS_COMPRESSED)
    assert offsets(data, ["offset", "storeTimestamp"]) == [0, 1]
    assert offsets(data, ["offset", "body"]) == [0]
    assert offsets(data, ["offset", "bornTimestamp"]) == [1]


def test_a_codec_that_is_not_installed_drops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(codec: compression.Codec) -> Any:
        raise ImportError(codec)

    monkeypatch.setattr(compression, "_module", missing)
    data = record(offset=3, sys_flag=SYS_COMPRESSED | SYS_COMPRESSION_LZ4)
    with pytest.raises(MissingCodec, match=r"the message at offset 3: .*lz4; pip install '\.\[compression\]'"):
        batches(data)
    wrapped = record(offset=3, sys_flag=WRAPPED | SYS_COMPRESSED | SYS_COMPRESSION_LZ4)
    with pytest.raises(MissingCodec, match=r"the message at offset 3: "):
        batches(wrapped)


def test_the_ends_of_time_are_rows() -> None:
    data = record(offset=0, born_ms=FIRST_TIME_MS, stored_ms=LAST_TIME_MS)
    (batch,) = batches(data)
    (row,) = batch.to_pylist()
    assert (row["bornTimestamp"].year, row["storeTimestamp"].year) == (1, 9999)


# --- every field, every extreme ---------------------------------------------------------------------------------------
BODIES = st.binary(max_size=30) | st.binary(max_size=30).map(zlib.compress) | st.just(encode_batch([(0, b"x", {})] * 2))
RECORDS = st.builds(
    record,
    BODIES,
    st.binary(max_size=30) | st.text("ab\x01\x02 ß", max_size=20).map(str.encode),
    topic=st.binary(max_size=100),
    queue_id=I32,
    offset=I64,
    log_offset=I64,
    sys_flag=I32 | st.sampled_from([0, SYS_COMPRESSED, WRAPPED, WRAPPED | SYS_COMPRESSED]),
    born_ms=TIMES_MS,
    stored_ms=TIMES_MS,
    reconsume_times=I32,
    crc=st.none() | st.just(1),
)


@given(st.lists(RECORDS, max_size=5))
@settings(max_examples=300)
def test_any_record_is_rows_or_a_fault(parts: list[bytes]) -> None:
    data = b"".join(parts)
    columns = Columns(Shape(NAMES), "drop")
    for names in (NAMES, ["offset"], ["msgId", "properties", "topic"]):
        columns = Columns(Shape(names), "drop")
        given = rows = bad = 0
        for part in Records(data).unwrapped():
            given += len(part)
            faults = part.faults(names)
            bad += sum(len(portion.faults) for portion in portions(part, faults)) if "body" in names else len(faults)
            for batch in columns.of(part, broker="b"):
                batch.validate(full=True)
                assert "offset" not in names or batch.column("offset").null_count == 0
                batch.to_pylist()
                rows += batch.num_rows
        assert rows + bad == given >= len(parts)


JSON_SCHEMA = (
    "a tinyint, b bigint, f float, d double, m decimal(5,2), t timestamp, n timestamp_ntz, y date, x binary, s string, "
    "l array<struct<t: timestamp>>, p map<string, timestamp>"
)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(
        ["9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59", "2026-01-02T03:04:05", "2026-01-02T03:04:05Z", "NaN"]
    ),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from([*"abfdmtnyxslpz"]), inner, max_size=9),
    max_leaves=8,
)


@given(st.lists(JSON_VALUES.map(json.dumps).map(str.encode) | st.binary(max_size=20), min_size=1, max_size=5))
@settings(max_examples=300)
def test_any_body_is_a_value_or_a_fault(bodies: list[bytes]) -> None:
    data = b"".join(record(body, offset=offset) for offset, body in enumerate(bodies))
    for each in (json_shape(JSON_SCHEMA), json_shape("map<string, double>"), shape("text", b""), shape("avro", AVRO)):
        left = [row["offset"] for batch in batches(data, shape=each) for row in batch.to_pylist()]
        for offset, body in enumerate(bodies):  # each by itself as well as among the others
            alone = batches(record(body, offset=offset), shape=each)
            assert [row["offset"] for batch in alone for row in batch.to_pylist()] == [offset] * (offset in left)


AVRO = json.dumps(
    {
        "type": "record",
        "name": "R",
        "fields": [
            {"name": "l", "type": ["null", "long"]},
            {"name": "t", "type": {"type": "long", "logicalType": "timestamp-micros"}},
            {"name": "s", "type": {"type": "array", "items": "string"}},
            {"name": "m", "type": {"type": "map", "values": {"type": "int", "logicalType": "date"}}},
        ],
    }
).encode()


def test_json_that_nobody_should_send() -> None:
    bodies = [
        b'{"id": 1}',
        b'{"x": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        b"[" * 100_000,
        b'{"f": 1e300}',
        b'{"f": -1e39}',
        b'{"f": 3.4028234663852886e38}',
        b'{"t": "2026-01-02T03:04:05"}',
        b'{"t": "9999-12-31T23:59:59-01:00"}',
        b'{"t": "2026-01-02T03:04:05+01:00"}',
        b'{"n": "2026-01-02T03:04:05Z"}',
        b'{"n": "2026-01-02T03:04:05"}',
        b'{"l": [{"t": "0001-01-01T00:00:00+01:00"}]}',
    ]
    data = b"".join(record(body, offset=offset) for offset, body in enumerate(bodies))
    each = json_shape("id int, f float, t timestamp, n timestamp_ntz, l array<struct<t: timestamp>>")
    found = [row for batch in batches(data, shape=each) for row in batch.to_pylist()]
    assert [row["offset"] for row in found] == [0, 5, 8, 10]
    assert found[2]["value"]["t"].isoformat() == "2026-01-02T02:04:05+00:00"
    with pytest.raises(Undecodable, match=r"offset 6 is not json: .*timezone"):
        batches(record(bodies[6], offset=6), "fail", each)
    with pytest.raises(Undecodable, match=r"offset 1 is not json: maximum recursion depth"):
        batches(record(bodies[1], offset=1), "fail", each)


def test_a_type_that_bodies_can_not_have_is_told_where_the_query_is_planned() -> None:
    with pytest.raises(BadOption, match="option bodySchema: JSON can't be decoded as void"):
        Format("json", b"id int").decoder(spark_types.NullType())


# --- memory -----------------------------------------------------------------------------------------------------------
def test_what_bodies_inflate_to_is_bounded_in_each_batch() -> None:
    size = 4 << 20
    zeros = zlib.compress(bytes(size))
    count = 2 * PORTION_BYTES // size + 1
    data = b"".join(record(zeros, offset=offset, sys_flag=SYS_COMPRESSED) for offset in range(count))
    for each in (
        Shape(["offset", "body"]),
        Shape(["offset", "body", "value"], Format("text"), spark_types.StringType()),
    ):
        found = []
        for batch in Columns(each, "fail").of(Records(data), broker="b"):
            assert batch.column("body").nbytes <= PORTION_BYTES + size
            found += batch.column("offset").to_pylist()
        assert found == list(range(count))


def test_batches_that_inflate_are_bounded() -> None:
    inner = encode_batch([(0, bytes(1 << 20), {})] * 8)
    wrapped = zlib.compress(inner)
    data = b"".join(
        record(wrapped, offset=8 * number, sys_flag=WRAPPED | SYS_COMPRESSED) for number in range(PORTION_BYTES >> 22)
    )
    parts = list(Records(data).unwrapped())
    assert [offset for part in parts for offset in part.queue_offsets().to_pylist()] == list(
        range(2 * PORTION_BYTES >> 20)
    )
    assert len(parts) >= 2
    assert max(len(part) for part in parts) <= PORTION_BYTES >> 20


def test_a_body_beyond_the_limit_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression.inflate, "__defaults__", (100,))
    data = b"".join(
        record(zlib.compress(bytes(size)), offset=size, sys_flag=SYS_COMPRESSED) for size in (99, 100, 101, 5000)
    )
    assert offsets(data) == [99, 100]
    with pytest.raises(Undecodable, match=r"offset 101 is unreadable: .*larger than 100 bytes when inflated"):
        batches(data, "fail")


def test_batches_without_a_broker_are_bounded_by_bytes(tmp_path: Path) -> None:
    size = 1 << 20
    log_offset, data = 0, b""
    while log_offset < 9 * size:
        data += record(bytes(size), offset=len(data), log_offset=log_offset)
        log_offset = len(data)
    path = tmp_path / f"{0:020}"
    path.write_bytes(data)
    part = Part("b", Segment(str(path), 0, len(data)), 0, len(data))
    found = list(read_parts(Scanning(path=str(tmp_path)), Shape(["body"]), [part]))
    assert sum(batch.num_rows for batch in found) == 9
    assert max(batch.nbytes for batch in found) < 9 * size


def test_avro_of_weightless_items_is_refused() -> None:
    empty = {"type": "record", "name": "E", "fields": []}
    for items in ("null", empty, {"type": "fixed", "name": "F", "size": 0}, {"type": "null"}):
        with pytest.raises(BadOption, match="take no bytes"):
            _ = Format("avro", json.dumps({"type": "array", "items": items}).encode()).spark_type
    assert fastavro.parse_schema(empty)
