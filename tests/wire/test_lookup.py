"""Properties found where they are stored: the same ones as by decoding them all, whoever wrote them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.wire.lookup import (
    StoredProperties,
    find_property,
    find_text,
    is_at,
    properties_position,
    property_key,
    scan_properties,
)
from skylark.wire.message import Message
from skylark.wire.records import decode_properties, encode_properties, encode_record

hosts = st.binary(min_size=8, max_size=8) | st.binary(min_size=20, max_size=20)
# Few bytes, so that names, ends and broken UTF-8 meet in every way.
loose = st.lists(st.sampled_from([b"a", b"b", b"aa", b"\x01", b"\x02", b"\xc3", "\u00e9".encode()])).map(b"".join)


@given(loose, loose, st.sampled_from(["a", "aa", "b", "\u00e9"]))
def test_a_property_is_found_as_by_decoding_all(before: bytes, stored: bytes, name: str) -> None:
    assert find_text(before + stored, len(before), property_key(name)) == decode_properties(stored).get(name)


@given(loose, loose)
def test_many_are_found_as_one_is(before: bytes, stored: bytes) -> None:
    properties = StoredProperties(before + stored, len(before))
    for _ in range(4):  # at first one by one, and later from a map
        for name in ("a", "aa", "b", "\u00e9"):
            key = property_key(name)
            assert properties.text(key) == decode_properties(stored).get(name)
            assert properties.find(key) == find_property(before + stored, len(before), key)


@given(loose, loose)
def test_bytes_at_a_place(stored: bytes, wanted: bytes) -> None:
    at, end = find_property(stored, 0, property_key("a"))
    assert is_at(stored, at, end, wanted) == (stored[at:end] == wanted)


@given(
    st.sampled_from(["t", "t" * 200]),
    st.binary(max_size=200),
    hosts,
    hosts,
    st.dictionaries(st.just("a"), st.just("b")),
)
def test_where_the_properties_of_a_record_begin(
    topic: str, body: bytes, born_host: bytes, store_host: bytes, properties: dict[str, str]
) -> None:
    message = Message(topic, 0, body, properties, born_host=born_host)
    record = encode_record(message, queue_offset=0, log_offset=0, store_timestamp_ms=0, store_host=store_host)
    assert record[properties_position(record) :] == encode_properties(properties)


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record[:38],  # no flags
        lambda record: record[:86],  # no length of the body
        lambda record: record[:84] + b"\x00\x00\xff\xff" + record[88:],  # a body beyond the end
        lambda record: record[:84] + b"\xff" + record[85:],  # a body of less than nothing
        lambda record: record[:-6],  # a topic beyond the end
    ],
)
def test_a_damaged_record_has_no_properties(damage: Callable[[bytes], bytes]) -> None:
    message = Message("topic", 0, b"body", {"a": "b"})
    record = encode_record(message, queue_offset=0, log_offset=0, store_timestamp_ms=0, store_host=bytes(8))
    with pytest.raises(IndexError):
        properties_position(damage(record))


@given(st.lists(st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "WAIT", "a", "é", "\x01", "\x02", ""]), max_size=20))
def test_keys_are_found_as_in_the_map(words: list[str]) -> None:
    stored = "".join(words).encode()
    properties = decode_properties(stored)
    found = scan_properties(stored)
    places = (found.unique_at, found.unique_end), (found.keys_at, found.keys_end), (found.tags_at, found.tags_end)
    assert [stored[at:end].decode() for at, end in places] == [
        properties.get(name, "") for name in ("UNIQ_KEY", "KEYS", "TAGS")
    ]


@given(st.lists(st.sampled_from(["TAGS", "WAIT", "a", "é", "\x01", "\x02", ""]), max_size=20))
def test_properties_are_special_when_the_map_is_not_what_is_stored(words: list[str]) -> None:
    stored = "".join(words).encode()
    properties = decode_properties(stored)
    has_special_name = "WAIT" in properties or "é" in properties
    found = scan_properties(stored, frozenset((b"WAIT", "é".encode())))
    pairs = stored.decode().removesuffix("\x02").split("\x02") if stored else []
    assert found.is_special == (
        has_special_name or len([pair for pair in pairs if decode_properties(pair)]) < len(pairs)
    )
