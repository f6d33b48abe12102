"""Topics read by real Spark from both servers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from skylark.client.sync import Producer


def send(
    namesrv: str, topic: str, bodies: Iterable[str], *, tag: str | None = None, queue_id: int | None = None
) -> None:
    with Producer(namesrv, group="spark-tests") as producer:
        select = None if queue_id is None else (lambda queues, arg: queues[queue_id])
        for body in bodies:
            producer.send(topic, body.encode(), tag=tag, key=f"key-{body}", properties={"n": body}, select=select)


def read(spark: SparkSession, namesrv: str, **options: Any) -> DataFrame:
    return spark.read.format("rocketmq").options(nameServer=namesrv, **options).load()


def bodies(frame: DataFrame) -> list[str]:
    return sorted(bytes(row.body).decode() for row in frame.select("body").collect())


def test_the_columns_of_a_topic(spark: SparkSession, namesrv: str, topic: str) -> None:
    send(namesrv, topic, ["a"], tag="red", queue_id=1)
    (row,) = read(spark, namesrv, subscribe=topic).collect()
    assert (row.topic, row.queueId, row.offset, bytes(row.body), row.tags) == (topic, 1, 0, b"a", "red")
    assert (row["keys"], row.reconsumeTimes, row.properties["n"]) == ("key-a", 0, "a")
    assert row.msgId == row.properties["UNIQ_KEY"]
    assert abs((row.storeTimestamp - row.bornTimestamp).total_seconds()) < 600


def test_a_given_schema_prunes(spark: SparkSession, namesrv: str, topic: str) -> None:
    send(namesrv, topic, ["a"])
    frame = spark.read.format("rocketmq").schema("offset bigint, tags string")
    assert frame.options(nameServer=namesrv, subscribe=topic).load().collect() == [(0, None)]
