"""Apache's JSON: texts that its own serializer wrote, round trips, and garbage."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.wire.fastjson import MAX_DEPTH, BadJson, ObjectKey, decode, dumps, loads, quote_number_keys

# Written by RemotingSerializable.encode of Apache RocketMQ 5.5.0.
CONSUME_STATS = (
    b'{"consumeTps":1.5,"offsetTable":{{"brokerName":"a","queueId":0,"topic":"t"}:'
    b'{"brokerOffset":7,"consumerOffset":5,"lastTimestamp":1700000000000,"pullOffset":6}}}'
)
TOPIC_STATS = (
    b'{"offsetTable":{{"brokerName":"a","queueId":1,"topic":"t"}:'
    b'{"lastUpdateTimestamp":3,"maxOffset":9,"minOffset":1}},"topicPutTps":0.0}'
)
ROUTE = (
    b'{"brokerDatas":[{"brokerAddrs":{0:"127.0.0.1:10911",1:"127.0.0.1:10921"},"brokerName":"a","cluster":"c",'
    b'"enableActingMaster":false}],"filterServerTable":{},"queueDatas":[{"brokerName":"a","perm":6,'
    b'"readQueueNums":4,"topicSysFlag":0,"writeQueueNums":4}]}'
)
CLUSTER = (
    b'{"brokerAddrTable":{"a":{"brokerAddrs":{0:"127.0.0.1:10911",1:"127.0.0.1:10921"},"brokerName":"a",'
    b'"cluster":"c","enableActingMaster":false}},"clusterAddrTable":{"c":["a"]}}'
)
RESET = b'{"offsetTable":{{"brokerName":"b","queueId":2,"topic":"t"}:12}}'
STATUS = (
    b'{"consumerTable":{"cid":{{"brokerName":"b","queueId":3,"topic":"t"}:1}},'
    b'"messageQueueTable":{{"brokerName":"b","queueId":2,"topic":"t"}:12}}'
)
ODD_KEYS = b'{1.5:"d",9007199254740993:"l","null":"nul",3:"byte","7":"str7",true:"x",-3:"neg"}'


class Queue(msgspec.Struct, frozen=True, rename="camel"):
    broker_name: str
    queue_id: int
    topic: str


class TopicOffset(msgspec.Struct, rename="camel"):
    min_offset: int = 0
    max_offset: int = 0
    last_update_timestamp: int = 0


class TopicStats(msgspec.Struct, rename="camel"):
    topic_put_tps: float = 0.0
    offset_table: dict[Queue, TopicOffset] = {}


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


@pytest.mark.parametrize("text", [CONSUME_STATS, TOPIC_STATS, ROUTE, CLUSTER, RESET, STATUS, ODD_KEYS])
def test_what_apache_writes_comes_out_the_same(text: bytes) -> None:
    assert dumps(loads(text)) == text


def test_what_apache_writes_is_understood() -> None:
    stats = loads(CONSUME_STATS)
    assert stats["offsetTable"][ObjectKey(topic="t", brokerName="a", queueId=0)]["consumerOffset"] == 5
    assert loads(ROUTE)["brokerDatas"][0]["brokerAddrs"] == {0: "127.0.0.1:10911", 1: "127.0.0.1:10921"}
    assert loads(ODD_KEYS) == {
        1.5: "d", 9007199254740993: "l", "null": "nul", 3: "byte", "7": "str7", True: "x", -3: "neg",
    }  # fmt: skip


def test_objects_as_typed_structs() -> None:
    stats = TopicStats(offset_table={Queue("a", 1, "t"): TopicOffset(1, 9, 3)})
    assert dumps(stats) == TOPIC_STATS
    assert decode(TOPIC_STATS, TopicStats) == stats


def test_strings_are_escaped_like_apache_does() -> None:
    text = "q\"\\/\b\f\n\r\t\x01\x7f\u2028é日😀<>&'"
    written = '"q\\"\\\\/\\b\\f\\n\\r\\t\\u0001\x7f\u2028é日😀<>&\'"'.encode()
    assert dumps(text) == written
    assert loads(written) == text
    assert dumps("\x0b\x1f") == b'"\\u000b\\u001f"'
    assert dumps("\ud800") == b'"?"'


def test_nulls_go_from_maps_and_objects_but_not_from_arrays() -> None:
    class Optional(msgspec.Struct):
        here: int = 1
        gone: int | None = None
        unset: int | msgspec.UnsetType = msgspec.UNSET

    assert dumps({"a": None, "b": [1, None]}) == b'{"b":[1,null]}'
    assert dumps(Optional()) == b'{"here":1}'
    assert dumps(None) == b"null"


@pytest.mark.parametrize(
    ("number", "written"),
    [
        (0.0, b"0.0"), (1.5, b"1.5"), (0.1, b"0.1"), (1234567.125, b"1234567.125"), (1e7, b"1.0E7"), (1e10, b"1.0E10"),
        (12345678.9, b"1.23456789E7"), (1e-5, b"1.0E-5"), (0.001, b"0.001"), (-2.5e300, b"-2.5E300"),
        (math.nan, b"null"), (math.inf, b"null"), (-math.inf, b"null"),
    ],
)  # fmt: skip
def test_doubles_as_java_writes_them(number: float, written: bytes) -> None:
    assert dumps(number) == written


def test_other_types() -> None:
    assert dumps(b"\x01\x02\xff") == b"[1,2,-1]"
    assert dumps({"a": {"x"}, "b": (1,), "c": frozenset()}) == b'{"a":["x"],"b":[1],"c":[]}'
    assert dumps([Colour.RED, Level.LOW, True]) == b'["red",1,true]'
    assert dumps({None: 1, Level.LOW: 2, False: 3}) == b'{"null":1,1:2,false:3}'
    with pytest.raises(TypeError, match="object"):
        dumps(object())
    with pytest.raises(TypeError, match="object"):
        dumps({object(): 1})


def test_pretty_is_apaches_file_format() -> None:
    assert dumps({"a": {0: 1, 1: [1, "x"]}, "b": {}, "c": []}, pretty=True) == (
        b'{\n\t"a":{\n\t\t0:1,\n\t\t1:[\n\t\t\t1,\n\t\t\t"x"\n\t\t]\n\t},\n\t"b":{},\n\t"c":[]\n}'
    )


def test_object_keys_do_not_change() -> None:
    key = ObjectKey(topic="t", queueId=0)
    assert key == {"queueId": 0, "topic": "t"}
    assert hash(key) == hash(ObjectKey(queueId=0, topic="t"))
    changes: list[Callable[[], object]] = [
        lambda: key.update(topic="x"),
        lambda: key.__setitem__("topic", "x"),
        lambda: key.pop("topic"),
        lambda: key.clear(),
        lambda: key.setdefault("x", 1),
        lambda: key.__ior__({"x": 1}),
        lambda: key.__delitem__("topic"),
    ]
    for change in changes:
        with pytest.raises(TypeError, match="cannot change"):
            change()


def test_keys_may_hold_anything() -> None:
    parsed = loads(b'{{"a":[1,{"b":[]}],"c":null}:{"d":[2]}}')
    assert parsed == {ObjectKey(a=(1, ObjectKey(b=())), c=None): {"d": [2]}}
    with pytest.raises(BadJson, match="array cannot be a key at position 1"):
        loads(b"{[3]:4}")


@given(st.integers() | st.floats(allow_nan=False) | st.booleans(), st.integers() | st.floats(allow_nan=False))
def test_equal_keys_have_equal_hashes(left: float, right: float) -> None:
    for value in (right, left, int(left) if math.isfinite(left) else 0):
        one, other = ObjectKey(n=left, l=(left,)), ObjectKey(n=value, l=(value,))
        assert one != other or hash(one) == hash(other)


def test_keys_cannot_be_made_to_collide() -> None:
    names = "abcdefghij"
    keys = [
        ObjectKey((name, -1 - (bits >> place & 1)) for place, name in enumerate(names))
        for bits in range(1 << len(names))
    ]
    assert len({hash(key) for key in keys}) == len(keys)


def test_decode_is_as_lenient_as_fastjson() -> None:
    assert decode(b'{"minOffset":null,"maxOffset":"9","who":1}', TopicOffset) == TopicOffset(0, 9, 0)
    assert decode(b'{"0":1,2:"3"}', dict[int, int]) == {0: 1, 2: 3}
    with pytest.raises(BadJson, match="maxOffset"):
        decode(b'{"maxOffset":"many"}', TopicOffset)
    with pytest.raises(BadJson, match="object"):
        decode(b"[]", TopicOffset)


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip
scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text()
object_keys = st.dictionaries(st.text(), scalars, max_size=3).map(ObjectKey)
# Booleans are left out among the keys: to Python, True and 1 are the same key.
fast_keys = st.integers(-(2**63), 2**63 - 1) | st.text() | object_keys
fast_values: st.SearchStrategy[Any] = st.recursive(
    scalars | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(fast_keys, inner, max_size=4),
    max_leaves=20,
)


@given(fast_values)
def test_round_trip(value: Any) -> None:
    assert loads(dumps(value)) == value
    assert loads(dumps(value, pretty=True)) == value
    assert loads(dumps(value).decode()) == value


@given(json_values)
def test_reads_standard_json_like_everybody(value: Any) -> None:
    assert loads(json.dumps(value)) == value
    assert loads(json.dumps(value, indent=2).encode()) == value
    assert loads(b"{0:" + json.dumps(value).encode() + b"}") == {0: value}


def assert_read_or_refused(data: bytes | str) -> None:
    refused: BadJson | None = None
    try:
        loads(data)
    except BadJson as error:
        refused = error
    assert refused is None or -1 <= refused.position <= len(data)


@given(st.binary())
def test_garbage(data: bytes) -> None:
    assert_read_or_refused(data)


@given(st.text('{}[]:,"0123456789-+.eE \n\\ultrsfan'))
def test_garbage_that_looks_like_json(text: str) -> None:
    assert_read_or_refused(text)


@given(fast_values.map(dumps), st.data())
def test_damaged_text(text: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text) - 1))
    assert_read_or_refused(text[:at])
    assert_read_or_refused(text[:at] + data.draw(st.binary(min_size=1, max_size=2)) + text[at + 1 :])


@pytest.mark.parametrize("text", [CONSUME_STATS, ROUTE])
def test_every_truncation_is_bad(text: bytes) -> None:
    for end in range(len(text)):
        with pytest.raises(BadJson):
            loads(text[:end])


@pytest.mark.parametrize(
    ("text", "position"),
    [
        (b"", 0), (b"{0:1", 4), (b"{0:1,}", 5), (b"{0 1}", 3), (b"{0:}", 3), (b"{0:1}x", 5), (b"{0:tru}", 3),
        (b'{0:"a', 3), (b'{0:"\\x"}', 4), (b"{0:01}", 4), (b"{0:1e999}", 3), (b"\xff{0:1}", 0), (b"{0:[1 2]}", 6),
        (b"{0:" + b"9" * 50 + b"}", 3),
    ],
)  # fmt: skip
def test_errors_say_where(text: bytes, position: int) -> None:
    with pytest.raises(BadJson, match=rf"at position {position}$") as caught:
        loads(text)
    assert caught.value.position == position


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b"{0:", b"}"), (b"{", b":1}"), (b'{"a":', b"}")])
@pytest.mark.parametrize("depth", [MAX_DEPTH * 2, 100_000])
def test_depth_is_bounded(opening: bytes, closing: bytes, depth: int) -> None:
    for text in (opening * depth + b"1" + closing * depth, opening * depth):
        try:
            loads(text)
        except BadJson:
            pass
        else:
            assert depth < 1000, "only msgspec's own, somewhat larger bound may let this pass"
        with pytest.raises(BadJson):
            decode(text, dict[int, int])


def test_depth_is_bounded_when_writing() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(BadJson, match="nested deeper"):
        dumps(endless)
    fits: Any = 1
    for _ in range(MAX_DEPTH):
        fits = {0: fits}
    assert loads(dumps(fits)) == fits


def test_half_surrogates_become_question_marks() -> None:
    assert loads(b'{0:"\\ud800"}') == {0: "?"}
    assert loads(b'{0:"\\ud83d\\ude00"}') == {0: "😀"}


PLAIN = st.recursive(
    st.integers(-(2**31), 2**31) | st.booleans() | st.text(alphabet='ab{},:1" \\\n', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.integers(-9, 99), inner, max_size=3)
        | st.dictionaries(st.text(alphabet='ab{},:1"', max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_numbers_that_are_keys_are_read_as_if_they_were_quoted(value: Any) -> None:
    def quoted(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): quoted(item) for key, item in value.items()}
        return [quoted(item) for item in value] if isinstance(value, list) else value

    text = dumps(value)
    if b"\\" in text:
        assert quote_number_keys(text) == text
    else:
        assert msgspec.json.decode(quote_number_keys(text)) == quoted(value)
