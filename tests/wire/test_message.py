"""Records, properties, ids and batches: round trips, known bytes, and every way of being cut short."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.wire.message import MAGIC_V2, BadRecord, Message, message_id, message_ids
from skylark.wire.records import (
    decode_batch,
    decode_host,
    decode_properties,
    decode_record,
    decode_records,
    encode_batch,
    encode_host,
    encode_properties,
    encode_record,
    java_hash,
    parse_message_id,
    tag_code,
)

words = st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02"), min_size=1, max_size=20)
property_maps = st.dictionaries(words, words, max_size=6)
int32 = st.integers(-(1 << 31), (1 << 31) - 1)
int64 = st.integers(0, (1 << 63) - 1)
hosts = st.binary(min_size=8, max_size=8) | st.binary(min_size=20, max_size=20)
topics = st.text("abcXYZ019_-%|", min_size=1, max_size=200)
messages = st.builds(
    Message,
    topic=topics,
    queue_id=int32,
    body=st.binary(max_size=200),
    properties=property_maps,
    flag=int32,
    sys_flag=st.integers(0, 0x7FFFFFFF),
    born_timestamp_ms=int64,
    born_host=hosts,
    reconsume_times=int32,
    prepared_transaction_offset=int64,
)


def record_of(message: Message, store_host: bytes = bytes(8)) -> bytes:
    return encode_record(message, queue_offset=7, log_offset=1 << 40, store_timestamp_ms=1700, store_host=store_host)


def small_record() -> bytes:
    return record_of(Message("topic", 3, b"the body", {"TAGS": "a", "KEYS": "k"}))


@given(messages, hosts, int64, int64, int64)
def test_a_record_comes_back(message: Message, store_host: bytes, queue_offset: int, log_offset: int, ms: int) -> None:
    data = encode_record(
        message, queue_offset=queue_offset, log_offset=log_offset, store_timestamp_ms=ms, store_host=store_host
    )
    stored = decode_record(data + b"trailing")
    for name in (
        "topic queue_id body properties flag born_timestamp_ms born_host reconsume_times prepared_transaction_offset"
    ).split():
        assert getattr(stored, name) == getattr(message, name)
    assert stored.sys_flag & ~0x30 == message.sys_flag & ~0x30
    assert (stored.queue_offset, stored.log_offset, stored.store_timestamp_ms) == (queue_offset, log_offset, ms)
    assert (stored.store_host, stored.size_bytes) == (store_host, len(data))
    assert stored.message_id == message_id(store_host, log_offset)


def test_a_record_has_apaches_bytes() -> None:
    message = Message(
        "T",
        2,
        b"hi",
        {"TAGS": "a"},
        flag=1,
        born_timestamp_ms=5,
        born_host=encode_host("1.2.3.4", 80),
        reconsume_times=3,
        prepared_transaction_offset=9,
    )
    data = encode_record(
        message, queue_offset=6, log_offset=7, store_timestamp_ms=8, store_host=encode_host("127.0.0.1", 10911)
    )
    assert data.hex(" ", 4) == bytes.fromhex(
        "00000065 daa320a7 58932aac 00000002 00000001 0000000000000006 0000000000000007 00000000"
        "0000000000000005 0102030400000050 0000000000000008 7f00000100002a9f 00000003 0000000000000009"
        "00000002 6869 01 54 0007 544147530161 02"
    ).hex(" ", 4)


def test_a_record_cut_short_anywhere_is_bad() -> None:
    data = small_record()
    for size in range(len(data)):
        with pytest.raises(BadRecord):
            decode_record(data[:size])
        with pytest.raises(BadRecord):
            decode_record(memoryview(data)[:size], check_crc=False)


def test_a_flipped_body_fails_its_checksum() -> None:
    data = bytearray(small_record())
    data[data.index(b"body")] ^= 1
    with pytest.raises(BadRecord, match="checksum"):
        decode_record(data)
    assert decode_record(data, check_crc=False).body == b"the cody"


@given(st.binary(max_size=200))
def test_random_bytes_are_no_record(data: bytes) -> None:
    with pytest.raises(BadRecord):
        decode_record(data)


@given(st.data())
def test_a_changed_record_never_crashes_the_reader(data: st.DataObject) -> None:
    record = bytearray(small_record())
    record[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_record(record)
    except BadRecord:
        return


def test_long_topics_take_the_second_version() -> None:
    data = record_of(Message("t" * 128, 0, b"", {}))
    assert int.from_bytes(data[4:8], "big") == MAGIC_V2
    assert decode_record(data).topic == "t" * 128


def test_the_body_of_a_pull_reply_is_records_in_a_row() -> None:
    data = small_record() + record_of(Message("other", 1, b"", {}))
    assert [record.topic for record in decode_records(data)] == ["topic", "other"]
    with pytest.raises(BadRecord):
        list(decode_records(data[:-1]))


@given(property_maps)
def test_properties_come_back(properties: dict[str, str]) -> None:
    assert decode_properties(encode_properties(properties)) == properties
    assert decode_properties(encode_properties(properties).decode()) == properties


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (b"", {}),
        (b"a\x01b", {"a": "b"}),
        (b"a\x01b\x02", {"a": "b"}),
        (b"a\x01\x02b\x01c\x02", {"b": "c"}),
        (b"\x01x\x02", {}),
        (b"ab\x02c\x01d\x02", {"c": "d"}),
        (b"a\x01b\x01c\x02", {"a": "b\x01c"}),
        (b"a\x01b\x02a\x01c\x02", {"a": "c"}),
        (b"a\x01\xff\x02", {"a": "\ufffd"}),
    ],
)
def test_odd_properties_are_read_as_apache_reads_them(stored: bytes, expected: dict[str, str]) -> None:
    assert decode_properties(stored) == expected


def plain_java_hash(text: str) -> int:
    value = 0
    data = text.encode("utf-16-be")
    for at in range(0, len(data), 2):
        value = (31 * value + int.from_bytes(data[at : at + 2], "big")) & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


@given(words, words)
def test_the_hash_is_javas(head: str, tail: str) -> None:
    assert java_hash(head) == plain_java_hash(head)
    assert java_hash(tail, java_hash(head)) == plain_java_hash(head + tail)


def test_known_hashes() -> None:
    assert java_hash("") == 0
    assert java_hash("polygenelubricants") == -(1 << 31)
    assert java_hash("x" * 1000) == plain_java_hash("x" * 1000)
    assert tag_code("TagA") == 2598919
    assert tag_code(None) == tag_code("") == 0
    assert tag_code("polygenelubricants") < 0


@pytest.mark.parametrize(("ip", "port"), [("127.0.0.1", 10911), ("::1", 1), ("fe80::1234", 65535)])
def test_hosts_come_back(ip: str, port: int) -> None:
    host = encode_host(ip, port)
    assert len(host) == (20 if ":" in ip else 8)
    assert decode_host(host) == (ip, port)


@given(hosts, st.lists(int64, max_size=3))
def test_the_ids_of_a_batch(host: bytes, offsets: list[int]) -> None:
    assert message_ids(host, offsets) == ",".join(message_id(host, offset) for offset in offsets)


@given(hosts, int64)
def test_message_ids_lead_back(host: bytes, offset: int) -> None:
    text = message_id(host, offset)
    assert len(text) == (32 if len(host) == 8 else 56)
    assert text == text.upper()
    assert parse_message_id(text) == (host, offset)


@pytest.mark.parametrize("text", ["", "00", "x" * 32, "0" * 31, "0" * 34, " " + "0" * 32])
def test_other_texts_are_no_message_ids(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 -- the message is fromhex's or ours
        parse_message_id(text)


@given(st.lists(st.tuples(int32, st.binary(max_size=50), property_maps), max_size=5))
def test_batches_come_back(batch: list[tuple[int, bytes, dict[str, str]]]) -> None:
    data = encode_batch(batch)
    assert decode_batch(data) == batch


def test_a_batch_cut_short_is_bad_unless_between_messages() -> None:
    first = encode_batch([(1, b"abc", {"TAGS": "a"})])
    data = first + encode_batch([(2, b"", {})])
    for size in range(len(data)):
        if size in (0, len(first)):
            assert len(decode_batch(data[:size])) == (size > 0)
        else:
            with pytest.raises(BadRecord):
                decode_batch(data[:size])
