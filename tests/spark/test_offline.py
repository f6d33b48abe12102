"""The stores of both brokers, read by real Spark from their directories while the brokers run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.worker import lookup_data_sources
from servers import Server

from patience import DEADLINE_S
from skylark.client.sync import Producer
from spark.conftest import wait_for


def read(spark: SparkSession, path: Path | str, **options: Any) -> DataFrame:
    return spark.read.format("rocketmq-commitlog").options(**options).load(str(path))


def rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in frame.collect())


def test_a_store_holds_what_its_broker_gives(spark: SparkSession, server: Server, topic: str) -> None:
    with Producer(server.namesrv_addr, group="spark-tests", timeout_s=DEADLINE_S) as producer:
        for number in range(300):
            name = f"{topic}_{number % 3}"
            properties = {"n": str(number)} if number % 2 else {}
            producer.send(
                name, b"x" * (number + 1), tag="red" if number % 5 else None, key=f"k{number}", properties=properties
            )
        producer.send(f"{topic}_0", b"zeros" * 5000)  # large enough to be compressed
    for number, total in enumerate((101, 100, 100)):
        wait_for(server.namesrv_addr, f"{topic}_{number}", total)
    online = (
        spark.read.format("rocketmq").options(nameServer=server.namesrv_addr, subscribePattern=f"{topic}_.*").load()
    )
    expected = rows(online)
    assert len(expected) == 301
    broker = expected[0][1]

    whole = read(spark, server.store, broker=broker, topicPattern=f"{topic}_.*")
    assert rows(whole) == expected
    cut = read(spark, server.store / "commitlog", broker=broker, topicPattern=f"{topic}_.*", minPartitions=7)
    assert cut.rdd.getNumPartitions() >= 7
    assert rows(cut) == expected

    one = read(spark, server.store, broker=broker, topics=f"{topic}_1", queues="0,2")
    assert rows(one) == [row for row in expected if row[0] == f"{topic}_1" and row[2] in (0, 2)]

    columns = online.columns
    times_ms = sorted(round(row[columns.index("storeTimestamp")].timestamp() * 1000) for row in expected)
    middle_ms = times_ms[150]
    names = {"broker": broker, "topicPattern": f"{topic}_.*"}
    before = rows(read(spark, server.store, endingTimestamp=middle_ms, **names))
    since = rows(read(spark, server.store, startingTimestamp=middle_ms, **names))
    assert len(before) == sum(time_ms < middle_ms for time_ms in times_ms)
    assert sorted(before + since) == expected

    pruned = spark.read.format("rocketmq-commitlog").schema("offset bigint, topic string").options(**names)
    assert sorted(pruned.load(str(server.store)).collect()) == sorted((row[3], row[0]) for row in expected)


def test_delayed_messages_are_in_their_topic_once(spark: SparkSession, server: Server, topic: str) -> None:
    with Producer(server.namesrv_addr, group="spark-tests", timeout_s=DEADLINE_S) as producer:
        producer.send(topic, b"now")
        producer.send(topic, b"in two hours", delay_level=18)
    assert [bytes(row.body) for row in read(spark, server.store, topics=topic).collect()] == [b"now"]
    parked = read(spark, server.store, topics="SCHEDULE_TOPIC_XXXX").where(f"properties['REAL_TOPIC'] = '{topic}'")
    assert [bytes(row.body) for row in parked.collect()] == [b"in two hours"]


def test_bodies_are_decoded(spark: SparkSession, server: Server, topics: Any, topic: str) -> None:
    topics.create(topic, 2)
    topics.send(topic, '{"id": 1}', '{"id": 2}', queue_id=0)
    topics.send(topic, "oops", queue_id=1)
    options = {"topics": topic, "bodyFormat": "json", "bodySchema": "id int"}
    found = read(spark, server.store, badRecords="drop", **options).select("value.id", "offset", "queueId")
    assert rows(found) == [(1, 0, 0), (2, 1, 0)]
    place = f"queue 1 of topic {topic} at broker {server.store.parent.name}"
    with pytest.raises(PySparkException, match=f"{place}: the message at offset 0 is not json: .*set badRecords=drop "):
        read(spark, server.store, **options).collect()
    text = spark.read.format("rocketmq-commitlog").schema("value string, offset bigint")
    read_text = text.options(topics=topic, bodyFormat="text", queues="1").load(str(server.store))
    assert rows(read_text) == [("oops", 0)]


def test_spark_says_what_is_wrong(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(PySparkException, match=r"option path=.*holds neither a commitlog directory nor segments"):
        read(spark, tmp_path).collect()
    with pytest.raises(PySparkException, match=r"there is no .*nowhere"):
        read(spark, tmp_path / "nowhere").collect()
    with pytest.raises(PySparkException, match="unknown option 'topik'; did you mean topics"):
        read(spark, tmp_path, topik="a").collect()
    with pytest.raises(PySparkException, match="option bodyFormat=json needs the option bodySchema"):
        read(spark, tmp_path, bodyFormat="json").collect()
    with pytest.raises(PySparkException, match="option badRecords='dlq'"):
        read(spark, tmp_path, badRecords="dlq").collect()
    log = tmp_path / "commitlog"
    log.mkdir()
    assert read(spark, tmp_path).collect() == []


def test_spark_finds_the_format_by_itself() -> None:
    """What Spark runs in a Python process of its own when it first looks for a format."""
    found = io.BytesIO()
    lookup_data_sources._main(io.BytesIO(), found)
    assert b"rocketmq-commitlog" in found.getvalue()
