"""Large JSON objects, walked through entry by entry."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skylark.wire.fastjson import BadJson
from skylark.wire.walking import MAX_VALUE_BYTES, Walk

scalars = st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")) | st.floats(allow_nan=False)
values = st.recursive(
    scalars.filter(lambda value: value not in (float("inf"), float("-inf"))),
    lambda inner: st.lists(inner | st.none(), max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def walked(data: bytes, deep: str = "deep") -> dict[str, Any]:
    found: dict[str, Any] = {}
    walk = Walk(data)
    for name in walk.entries():
        if name == deep:
            found[name] = {}
            for piece in walk.pieces():
                found[name] |= json.loads(piece)
        elif name.startswith("skipped"):
            walk.skip()
        else:
            found[name] = json.loads(walk.value())
    walk.end()
    return found


@given(
    st.dictionaries(st.text(), values, max_size=4),
    st.dictionaries(st.text(), values, max_size=4),
    st.sampled_from([None, 2]),
    st.booleans(),
)
@settings(max_examples=30)
def test_all_entries_are_found(
    flat: dict[str, Any], inner: dict[str, Any], indent: int | None, ensure_ascii: bool
) -> None:
    flat = {f"-{name}": value for name, value in flat.items()}
    skipped = {f"skipped{number}": value for number, value in enumerate(flat.values())}
    whole = {"none": None, **skipped, **flat, "deep": inner}
    data = json.dumps(whole, indent=indent, ensure_ascii=ensure_ascii).encode("utf-8", "replace")
    again = json.loads(data)
    expected = {name: value for name, value in again.items() if name != "none" and not name.startswith("skipped")}
    assert walked(data) == walked(b" \n" + data + b"\t") == expected


def test_names_may_be_numbers() -> None:
    assert walked(b'{0:1,-7 : 2,"x":{}}') == {"0": 1, "-7": 2, "x": {}}
    assert list(Walk(b"{0:1,-7 : {1:2}}").pieces()) == [b"{0:1}", b"{-7 : {1:2}}"]


@given(st.binary(max_size=40) | st.text('{}[]:," 0anul\\').map(str.encode))
def test_any_bytes_are_walked_through_or_refused(data: bytes) -> None:
    walk = Walk(data)
    try:
        for name in walk.entries():
            if name == "a" and data[:1] == b"{":
                assert all(piece[:1] == b"{" for piece in walk.pieces())
            else:
                walk.skip()
        walk.end()
    except BadJson:
        return


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"1", b'{"a"}', b'{"a":}', b'{"a":1', b'{"a":1,}', b'{"a":1 2}', b'{"a":[}', b'{"a":{}}}',
        b'{"a":"\\"}', b'{a:1}', b'{"\xff":1}', b'{"a":1}x',
    ],
)  # fmt: skip
def test_what_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises((BadJson, ValueError)):
        walked(data)


def test_no_step_goes_far() -> None:
    """A step is one match; none may see more than a value may have."""
    size = MAX_VALUE_BYTES
    assert walked(b'{"a":"' + b"x" * (size - 2) + b'"}')["a"] == "x" * (size - 2)
    small = b"[" + b"[]," * (size // 3) + b"[]]"
    assert walked(b'{"skipped":' + small + b"}") == {}
    for large in (b'"' + b"x" * size + b'"', b"[" + b"1," * size + b"1]", small):
        with pytest.raises(BadJson, match="more than 262144 bytes"):
            walked(b'{"a":' + large + b"}")
        with pytest.raises(BadJson, match="more than 262144 bytes"):
            walked(b'{"deep":{"b":' + large + b"}}")
    with pytest.raises(BadJson, match="more than 262144 bytes"):
        walked(b'{"' + b"x" * size + b'":1}')


def test_a_large_object_comes_in_few_pieces() -> None:
    table = {f"t{number}": {"n": number, "attributes": {"+a": "}{"}, "list": []} for number in range(10)}
    table |= {f"u{number}": {"n": number, "attributes": {"+a": '\\"}{'}} for number in range(2_000)}
    data = json.dumps(table, indent=1).encode()
    pieces = list(Walk(data).pieces())
    assert [found for piece in pieces for found in json.loads(piece).items()] == list(table.items())
    assert 11 < len(pieces) < 20
    assert max(map(len, pieces)) <= 33_000
