"""Bodies decoded by option, and what becomes of those that can't be."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pytest
from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from skylark.spark.bodies import format_of
from skylark.spark.options import BadOption, read_options
from spark.conftest import wait_until

AVRO = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "token", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["NEW", "PAID"]}},
        {"name": "before", "type": {"type": "array", "items": "State"}},
        {"name": "counts", "type": {"type": "map", "values": "int"}},
    ],
}
AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
NEEDED = {"nameServer": "localhost:9876", "subscribe": "orders"}


@pytest.fixture
def read(spark: SparkSession, namesrv: str) -> Callable[..., DataFrame]:
    return lambda **options: spark.read.format("rocketmq").options(nameServer=namesrv, **options).load()


def values(frame: DataFrame) -> list[Any]:
    return [row.value for row in frame.orderBy("offset").select("value").collect()]


def test_text(spark: SparkSession, read: Any, topics: Any, topic: str) -> None:
    topics.create(topic)
    topics.send(topic, "ä", "b", b"\xff")
    spark.conf.set("spark.sql.pyspark.worker.logging.enabled", "true")
    assert values(read(subscribe=topic, bodyFormat="text", badRecords="drop")) == ["ä", "b"]

    def is_told() -> bool:
        logs = spark.tvf.python_worker_logs().where("logger = 'skylark.spark.bodies'").collect()
        dropped = "dropped because not text: 1 (from offset 2"
        return any(f"queue 0 of topic {topic}" in row.msg and dropped in row.msg for row in logs)

    wait_until(is_told)  # Spark passes a worker's log on by itself
    spark.conf.unset("spark.sql.pyspark.worker.logging.enabled")
    with pytest.raises(PySparkException, match=rf"queue 0 of topic {topic} .* offset 2 is not text: .*badRecords=drop"):
        read(subscribe=topic, bodyFormat="text").collect()


def test_json(read: Any, topics: Any, topic: str) -> None:
    topics.create(topic)
    whole = {"id": 1, "price": 2.5, "at": "2026-01-02T03:04:05Z", "tags": ["a", None], "more": {"x": {"y": 1}}, "z": 0}
    topics.send(topic, json.dumps(whole), '{"id": null}', '{"id": "1"}', '{"id": 1', '{"id": 3000000000}', "[]")
    schema = "id int, price decimal(9,2), at timestamp, tags array<string>, more map<string, struct<y: int>>"
    options = {"subscribe": topic, "bodyFormat": "json", "bodySchema": schema}
    frame = read(**options, badRecords="drop")
    first, second = frame.select("value.*", "value.more.x.y").collect()
    assert (first.id, first.price, first.at, first.tags, first.y) == (
        1,
        Decimal("2.50"),
        AT.replace(tzinfo=None),
        ["a", None],
        1,
    )
    assert set(second) == {None}
    with pytest.raises(PySparkException, match="offset 2 is not json: Expected `int"):
        read(**options).collect()


def test_avro(read: Any, topics: Any, topic: str, tmp_path: Path) -> None:
    topics.create(topic)
    order = {
        **{"id": 7, "at": AT, "price": Decimal("1.25"), "token": "t", "note": None, "state": "PAID"},
        **{"before": ["NEW"], "counts": {"a": 1}},
    }
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema({**AVRO, "fields": AVRO["fields"]}), order)
    topics.send(topic, stream.getvalue(), stream.getvalue() + b"x", stream.getvalue()[:-3])
    options = {"subscribe": topic, "bodyFormat": "avro", "badRecords": "drop"}
    (found,) = values(read(**options, bodySchema=json.dumps(AVRO)))
    assert found.asDict() == {**order, "at": AT.replace(tzinfo=None)}
    path = tmp_path / "order.avsc"
    path.write_text(json.dumps(AVRO))
    assert values(read(**options, bodySchema=str(path))) == [found]


def test_protobuf(read: Any, topics: Any, topic: str, tmp_path: Path) -> None:
    descriptors = _order_descriptors()
    pool = DescriptorPool()
    for file in descriptors.file:
        pool.AddSerializedFile(file.SerializeToString())
    order_type = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))
    topics.create(topic)
    order = order_type(id=7, states=[1, 9], counts={"a": 1})
    order.at.FromDatetime(AT)
    topics.send(topic, order.SerializeToString(), order_type(big=2**63).SerializeToString(), b"\xff\xff")
    path = tmp_path / "orders.desc"
    path.write_bytes(descriptors.SerializeToString())
    frame = read(subscribe=topic, bodyFormat="protobuf", bodySchema=path, bodyMessage="shop.Order", badRecords="drop")
    first, second = values(frame)
    assert first.asDict() == {
        **{"id": 7, "big": Decimal(0), "note": None, "states": ["PAID", "9"], "counts": {"a": 1}},
        "at": AT.replace(tzinfo=None),
    }
    assert (second.id, second.big, second.at, second.states) == (0, 2**63, None, [])


def _order_descriptors() -> descriptor_pb2.FileDescriptorSet:
    from google.protobuf import timestamp_pb2

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="orders.proto", package="shop", syntax="proto3", dependency=["google/protobuf/timestamp.proto"]
    )
    state = file.enum_type.add(name="State")
    state.value.add(name="NEW", number=0)
    state.value.add(name="PAID", number=1)
    order = file.message_type.add(name="Order")
    order.oneof_decl.add(name="_note")
    entry = order.nested_type.add(name="CountsEntry", options=descriptor_pb2.MessageOptions(map_entry=True))
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=kinds.TYPE_INT32, label=kinds.LABEL_OPTIONAL)
    for number, (name, kind, of, label) in enumerate(
        (
            ("id", kinds.TYPE_INT64, None, kinds.LABEL_OPTIONAL),
            ("big", kinds.TYPE_UINT64, None, kinds.LABEL_OPTIONAL),
            ("note", kinds.TYPE_STRING, None, kinds.LABEL_OPTIONAL),
            ("at", kinds.TYPE_MESSAGE, ".google.protobuf.Timestamp", kinds.LABEL_OPTIONAL),
            ("states", kinds.TYPE_ENUM, ".shop.State", kinds.LABEL_REPEATED),
            ("counts", kinds.TYPE_MESSAGE, ".shop.Order.CountsEntry", kinds.LABEL_REPEATED),
        ),
        start=1,
    ):
        field = order.field.add(name=name, number=number, type=kind, type_name=of, label=label)
        if name == "note":
            field.proto3_optional = True
            field.oneof_index = 0
    imported = descriptor_pb2.FileDescriptorProto.FromString(timestamp_pb2.DESCRIPTOR.serialized_pb)
    return descriptor_pb2.FileDescriptorSet(file=[imported, file])


def test_a_message_type_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    path = tmp_path / "orders.desc"
    path.write_bytes(_order_descriptors().SerializeToString())
    options = {**NEEDED, "bodyFormat": "protobuf", "bodySchema": str(path), "bodyMessage": "shop.Ordr"}
    with pytest.raises(BadOption, match=r"option bodyMessage='shop.Ordr': .*there are google.*Timestamp, shop.Order"):
        _spark_type(options)


def test_bad_records_go_to_a_topic_with_what_they_had(read: Any, topics: Any, topic: str) -> None:
    topics.create(topic)
    dlq = topics.create(f"{topic}_dlq")
    topics.send(topic, '{"id": 1}')
    topics.send(topic, "oops", tag="red", key="k1", properties={"colour": "blue"})
    options = {"bodyFormat": "json", "bodySchema": "id int", "badRecords": "dlq", "dlqTopic": dlq}
    # Not sorted: Spark would read twice to sort, and what is read twice is sent twice.
    assert [row.value.id for row in read(subscribe=topic, **options).select("value").collect()] == [1]
    (bad,) = read(subscribe=dlq).collect()
    assert (bytes(bad.body), bad.tags, bad["keys"], bad.properties["colour"]) == (b"oops", "red", "k1", "blue")
    assert "malformed" in bad.properties["badRecordReason"]
    assert [bad.properties[f"badRecord{name}"] for name in ("Topic", "Queue", "Offset")] == [topic, "0", "1"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bodyFormat": "xml"}, "bodyFormat='xml'"),
        ({"bodyFormat": "json"}, "bodyFormat=json needs the option bodySchema"),
        ({"bodyFormat": "protobuf", "bodySchema": "x"}, "needs the option bodyMessage"),
        ({"bodyFormat": "avro", "bodySchema": "nowhere.avsc"}, "bodySchema='nowhere.avsc': No such file"),
        ({"bodyFormat": "avro", "bodySchema": '{"type": "recor"}'}, "bodySchema: not an Avro schema"),
        ({"bodyFormat": "avro", "bodySchema": '["int", "string"]'}, "bodySchema: a union of several types"),
        (
            {"bodyFormat": "json", "bodySchema": "id bigintt"},
            "bodySchema: 'bigintt' is not a type of JSON",
        ),
        ({"bodyFormat": "json", "bodySchema": "id"}, "bodySchema: it ends where a type should be"),
        ({"bodyFormat": "json", "bodySchema": "schema.ddl"}, "bodySchema: '.ddl' is not understood"),
        ({"bodyFormat": "json", "bodySchema": "map<int, int>"}, "bodySchema: the keys of a map in JSON are strings"),
        ({"bodyFormat": "avro", "bodySchema": '{"type": "array", "items": "null"}'}, "bodySchema: .*take no bytes"),
        ({"bodyFormat": "text", "bodySchema": "id int"}, "bodySchema has no meaning with bodyFormat=text"),
        ({"badRecords": "dlq"}, "badRecords=dlq and dlqTopic need each other"),
        ({"badRecords": "dlq", "dlqTopic": "orders"}, "is itself read"),
    ],
)
def test_wrong_options(given: dict[str, str], said: str) -> None:
    with pytest.raises(BadOption, match=said):
        _spark_type({**NEEDED, **given})


def _spark_type(options: dict[str, str]) -> str | None:
    found = format_of(read_options(options))
    return found and found.spark_type
