"""Columns made for all records at once hold what decoding record by record gives."""

from __future__ import annotations

import contextlib
import zlib

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.spark.bodies import Columns, Shape
from skylark.spark.columns import NAMES, record_batch
from skylark.spark.portions import portions
from skylark.spark.records import Records, _entries, _odd_entries
from skylark.wire.message import SYS_COMPRESSED, SYS_INNER_BATCH, SYS_NEED_UNWRAP, BadRecord, Message, message_id
from skylark.wire.records import decode_records, encode_batch, encode_host, encode_record

HOSTS = [encode_host("127.0.0.1", 10911), encode_host("fe80::1", 40000)]
TIMES_MS = st.integers(0, 2**41)
WORDS = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1, max_size=8)


@st.composite
def records(draw: st.DrawFn) -> bytes:
    message = Message(
        draw(st.sampled_from(["t", "orders", "x" * 200])),
        draw(st.integers(0, 1000)),
        draw(st.binary(max_size=40)),
        draw(st.dictionaries(st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "a", "ß"]), WORDS)),
        born_timestamp_ms=draw(TIMES_MS),
        born_host=draw(st.sampled_from(HOSTS)),
        reconsume_times=draw(st.integers(0, 16)),
    )
    return encode_record(
        message,
        queue_offset=draw(st.integers(0, 2**40)),
        log_offset=draw(st.integers(0, 2**50)),
        store_timestamp_ms=draw(TIMES_MS),
        store_host=draw(st.sampled_from(HOSTS)),
    )


@given(st.lists(records(), max_size=6))
def test_columns_hold_what_the_record_decoder_gives(parts: list[bytes]) -> None:
    data = b"".join(parts)
    records = Records(data)
    rows = record_batch(records, NAMES, broker="b", bodies=records.stored_bodies()).to_pylist()
    expected = list(decode_records(data))
    assert len(rows) == len(expected)
    for row, record in zip(rows, expected, strict=True):
        unique = record.properties.get("UNIQ_KEY")
        assert row == {
            "topic": record.topic,
            "broker": "b",
            "queueId": record.queue_id,
            "offset": record.queue_offset,
            "body": record.body,
            "tags": record.properties.get("TAGS"),
            "keys": record.properties.get("KEYS"),
            "properties": list(record.properties.items()),
            "bornTimestamp": row["bornTimestamp"],
            "storeTimestamp": row["storeTimestamp"],
            "reconsumeTimes": record.reconsume_times,
            "msgId": unique or message_id(record.store_host, record.log_offset),
        }
        assert round(row["bornTimestamp"].timestamp() * 1000) == record.born_timestamp_ms
        assert round(row["storeTimestamp"].timestamp() * 1000) == record.store_timestamp_ms


@given(st.lists(records(), min_size=1, max_size=4), st.data())
def test_bytes_that_are_cut_or_changed_are_refused_or_read(parts: list[bytes], data: st.DataObject) -> None:
    whole = bytearray(b"".join(parts))
    position = data.draw(st.integers(0, len(whole) - 1))
    whole[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(BadRecord):
        Records(bytes(whole)[: data.draw(st.integers(1, 80))])
    with contextlib.suppress(BadRecord):
        for batch in Columns(Shape(NAMES), "drop").of(Records(bytes(whole)), broker="b"):
            batch.validate(full=True)


def test_a_changed_body_fails_its_checksum() -> None:
    record = bytearray(_record(Message("t", 0, b"hello", {})))
    record[record.index(b"hello")] ^= 1
    assert Records(bytes(record)).faults() == {0: "its body fails its checksum"}


def test_compressed_bodies_are_inflated() -> None:
    packed = Message("t", 0, zlib.compress(b"hello" * 9), {}, sys_flag=SYS_COMPRESSED)
    data = _record(packed) + _record(Message("t", 0, b"plain", {}))
    (portion,) = portions(Records(data), {})
    assert portion.bodies.to_pylist() == [b"hello" * 9, b"plain"]


def test_a_part_of_the_records() -> None:
    data = b"".join(_record(Message("t", number, b"", {"n": str(number)})) for number in range(5))
    records = Records(data)
    assert records.slice(1, 3).queue_ids().to_pylist() == [1, 2]
    assert len(records.slice(2, 2)) == 0
    assert records.filter(np.array([1, 0, 0, 0, 1])).property_values("n").to_pylist() == ["0", "4"]


def test_records_whose_places_are_known() -> None:
    first, second = (_record(Message("t", number, b"", {})) for number in range(2))
    assert Records(b"..." + first + b"." + second + b"...", starts=[3, len(first) + 4]).queue_ids().to_pylist() == [
        0,
        1,
    ]


@given(st.lists(st.text("ab\x01\x02", max_size=9), min_size=1, max_size=5))
def test_the_quick_way_through_properties_gives_what_the_thorough_one_does(texts: list[str]) -> None:
    text = pa.array(texts)
    quick = _entries(text)
    assert quick is None or [part.to_pylist() for part in quick] == [part.to_pylist() for part in _odd_entries(text)]


def test_a_batch_that_was_stored_as_one_record_becomes_its_messages() -> None:
    inner = [Message("t", 0, body, {"TAGS": body.decode()}) for body in (b"a", b"b")]
    batch = zlib.compress(encode_batch([(message.flag, message.body, message.properties) for message in inner]))
    wrapped = Message("t", 0, batch, {}, sys_flag=SYS_INNER_BATCH | SYS_NEED_UNWRAP | SYS_COMPRESSED)
    (rows,) = Records(_record(wrapped) + _record(Message("t", 0, b"c", {}))).unwrapped()
    assert rows.stored_bodies().to_pylist() == [b"a", b"b", b"c"]
    assert rows.property_values("TAGS").to_pylist() == ["a", "b", None]
    assert rows.queue_offsets().to_pylist() == [5, 6, 5]


def _record(message: Message) -> bytes:
    message.born_host = HOSTS[0]
    return encode_record(message, queue_offset=5, log_offset=0, store_timestamp_ms=0, store_host=HOSTS[0])
