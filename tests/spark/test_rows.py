"""Which tables can be written, and what messages their rows are."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DayTimeIntervalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from skylark.spark.options import BadOption, write_options
from skylark.spark.rows import BadColumns, BadRow, Outgoing, Rows
from skylark.spark.sink import unique_keys

TEXT = StringType()
TYPES: dict[str, DataType] = {
    "string": TEXT,
    "binary": BinaryType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "double": DoubleType(),
    "timestamp": TimestampType(),
    "interval": DayTimeIntervalType(),
    "array<string>": ArrayType(TEXT),
    "array<int>": ArrayType(IntegerType()),
    "map<string,string>": MapType(TEXT, TEXT),
    "map<string,int>": MapType(TEXT, IntegerType()),
}


def rows(schema: str, **options: str) -> Rows:
    fields = StructType()
    for name, kind in (column.split() for column in schema.split(", ")):
        fields.add(name, TYPES[kind])
    return Rows(fields, write_options({"nameServer": "localhost:9876", **options}))


def messages(schema: str, columns: dict[str, pa.Array], **options: str) -> list[Outgoing]:
    batch = pa.RecordBatch.from_pydict(columns)
    keys = unique_keys("query", "1", "2").of(0, batch.num_rows)
    return list(rows(schema, **options).messages(batch, keys, 100))


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ("topic string", "column 'body' is missing"),
        ("body int", "column 'body' is int; it must be binary or string"),
        ("body string, tag string", "column 'tag' is not one that can be written; did you mean 'tags'?"),
        ("body string, queueId int", "belongs to messages that were read; select the columns"),
        ("body string, properties map<string,int>", "must be map<string,string>"),
        ("body string, keys array<int>", "must be string or array<string>"),
        ("body string, delay string", "column 'delay' is string; it must be a number of milliseconds"),
        ("body string, orderingKey double", "must be string or a whole number"),
        ("body string, Body string", "two columns 'body'"),
    ],
)
def test_wrong_columns(schema: str, complaint: str) -> None:
    with pytest.raises(BadColumns) as caught:
        rows(schema, topic="orders")
    assert complaint in str(caught.value)


def test_the_topic_is_needed() -> None:
    with pytest.raises(BadOption, match="option topic is missing"):
        rows("body string")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"nameServer": ""}, "nameServer"),
        ({"topic": "with blanks"}, "option topic='with blanks'"),
        ({"group": "?"}, "option group='?'"),
        ({"ledgerTopic": "SCHEDULE_TOPIC_XXXX"}, "option ledgerTopic="),
        ({"deliveryGuarantee": "twice"}, "option deliveryGuarantee='twice'"),
        ({"timeout": "soon"}, "option timeout='soon'"),
        ({"topics": "a"}, "did you mean topic?"),
    ],
)
def test_wrong_options(options: dict[str, str], complaint: str) -> None:
    with pytest.raises(BadOption) as caught:
        write_options({"nameServer": "localhost:9876", **options})
    assert complaint in str(caught.value)


def test_a_delay_and_exactly_once_exclude_each_other() -> None:
    with pytest.raises(BadColumns, match="'delay' can't be written with deliveryGuarantee=exactly-once"):
        rows("body string, delay int", topic="orders", deliveryGuarantee="exactly-once")


def test_every_column() -> None:
    schema = (
        "topic string, body string, tags string, keys array<string>, orderingKey int, properties map<string,string>"
    )
    given = [("a", "1"), ("UNIQ_KEY", "of another"), ("TAGS", "old"), ("DELAY", "3"), ("empty", "")]
    first, second = messages(
        schema,
        {
            "topic": pa.array(["orders", "bills"]),
            "body": pa.array(["é", "x"]),
            "tags": pa.array(["new", None]),
            "keys": pa.array([["k1", "k2"], None]),
            "orderingKey": pa.array([7, None]),
            "properties": pa.array([given, given], pa.map_(pa.string(), pa.string())),
        },
    )
    assert (first.topic, first.body, first.ordering_key) == ("orders", "é".encode(), 7)
    assert first.properties.pop("UNIQ_KEY") == unique_keys("query", "1", "2").of(0, 1)[0]
    assert first.properties == {"a": "1", "TAGS": "new", "KEYS": "k1 k2", "__SHARDINGKEY": "7"}
    assert (second.topic, second.ordering_key, second.properties["TAGS"]) == ("bills", None, "old")


@pytest.mark.parametrize(
    ("kind", "values", "property", "expected"),
    [
        ("bigint", pa.array([1500, None]), "TIMER_DELAY_MS", "1500"),
        ("interval", pa.array([timedelta(seconds=2), None]), "TIMER_DELAY_MS", "2000"),
        ("timestamp", pa.array([datetime(2030, 1, 1, tzinfo=UTC), None]), "TIMER_DELIVER_MS", "1893456000000"),
    ],
)
def test_delays(kind: str, values: pa.Array, property: str, expected: str) -> None:
    delayed, other = messages(f"body string, delay {kind}", {"body": pa.array(["a", "b"]), "delay": values}, topic="t")
    assert (delayed.properties[property], delayed.is_delayed) == (expected, True)
    assert property not in other.properties


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"topic": ["t", None], "body": ["a", "b"]}, "row 101 of its partition can't be sent: its topic is null"),
        ({"topic": ["t", "t"], "body": ["a", None]}, "row 101 of its partition can't be sent: its body is null"),
        ({"topic": ["t", "t?"], "body": ["a", "b"]}, "illegal characters"),
    ],
)
def test_rows_that_are_no_messages(columns: dict[str, list[str]], complaint: str) -> None:
    with pytest.raises(BadRow) as caught:
        messages("topic string, body string", {name: pa.array(values) for name, values in columns.items()})
    assert complaint in str(caught.value)


def test_an_empty_body_is_one() -> None:
    (message,) = messages("body binary", {"body": pa.array([b""])}, topic="t")
    assert message.body == b""


def test_null_deletes_a_key_where_the_topic_is_compacted() -> None:
    columns = {"topic": ["t", "t"], "body": ["a", None], "keys": ["k", "k"]}
    batch = pa.RecordBatch.from_pydict({name: pa.array(values) for name, values in columns.items()})
    table = rows("topic string, body string, keys string")
    assert [each.body for each in table.messages(batch, ["1", "2"], 0, lambda topic: topic == "t")] == [b"a", b""]
    with pytest.raises(BadRow, match="row 1 of its partition can't be sent: its body is null, and topic t is not com"):
        list(table.messages(batch, ["1", "2"], 0))


def test_null_without_a_key_deletes_nothing() -> None:
    batch = pa.RecordBatch.from_pydict({"body": pa.array([None], pa.string())})
    with pytest.raises(BadRow, match="its body is null and it has no keys"):
        list(rows("body string", topic="t").messages(batch, ["1"], 0, lambda topic: True))


def test_unique_keys_tell_tasks_and_rows_apart() -> None:
    found = [key for task in ("1", "2") for key in unique_keys("query", task).of(65_530, 10)]
    assert len(set(found)) == 20
    assert {len(key) for key in found} == {32}
