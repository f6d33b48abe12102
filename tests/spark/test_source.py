"""Topics read by real Spark from both servers."""

from __future__ import annotations

import io
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.worker import lookup_data_sources
from servers import Server

from patience import DEADLINE_S
from spark.conftest import wait_until


@pytest.fixture
def read(spark: SparkSession, namesrv: str) -> Callable[..., DataFrame]:
    return lambda **options: spark.read.format("rocketmq").options(nameServer=namesrv, **options).load()


@pytest.fixture
def stream(spark: SparkSession, namesrv: str) -> Callable[..., DataFrame]:
    return lambda **options: spark.readStream.format("rocketmq").options(nameServer=namesrv, **options).load()


def bodies(frame: DataFrame) -> list[str]:
    return sorted(bytes(row.body).decode() for row in frame.select("body").collect())


class Batches:
    """A streaming query whose batches are kept."""

    def __init__(self, frame: DataFrame, checkpoint: Path, *, available_now: bool) -> None:
        self.seen: list[list[str]] = []
        writer = frame.writeStream.foreachBatch(lambda batch, number: self._see(bodies(batch)))
        if available_now:
            writer = writer.trigger(availableNow=True)
        self.query: StreamingQuery = writer.option("checkpointLocation", str(checkpoint)).start()

    def _see(self, batch: list[str]) -> None:
        if batch:  # the first of a query may be empty
            self.seen.append(batch)

    @property
    def all(self) -> list[str]:
        return sorted(body for batch in self.seen for body in batch)


def run(frame: DataFrame, checkpoint: Path) -> Batches:
    """Reads what is there now."""
    batches = Batches(frame, checkpoint, available_now=True)
    assert batches.query.awaitTermination(DEADLINE_S)
    return batches


@contextmanager
def running(frame: DataFrame, checkpoint: Path) -> Iterator[Batches]:
    batches = Batches(frame, checkpoint, available_now=False)
    try:
        batches.query.processAllAvailable()
        yield batches
    finally:
        batches.query.stop()


def refused(said: str) -> Any:
    return pytest.raises(PySparkException, match=said)


# Batch reads.


def test_the_columns_of_a_topic(read: Any, topics: Any, topic: str) -> None:
    topics.create(topic, 2)
    topics.send(topic, "a", queue_id=1, tag="red", key="key-a", properties={"n": "a"})
    (row,) = read(subscribe=topic).collect()
    assert (row.topic, row.queueId, row.offset, bytes(row.body), row.tags) == (topic, 1, 0, b"a", "red")
    assert (row["keys"], row.reconsumeTimes, row.properties["n"]) == ("key-a", 0, "a")
    assert row.msgId == row.properties["UNIQ_KEY"]
    assert abs((row.storeTimestamp - row.bornTimestamp).total_seconds()) < 600


def test_a_given_schema_prunes(spark: SparkSession, namesrv: str, topics: Any, topic: str) -> None:
    topics.create(topic)
    topics.send(topic, "a")
    options = {"nameServer": namesrv, "subscribe": topic}
    frame = spark.read.format("rocketmq").schema("offset bigint, tags string").options(**options).load()
    assert frame.collect() == [(0, None)]
    with refused("the source has no column colour; there are topic, broker"):
        spark.read.format("rocketmq").schema("colour string").options(**options).load().collect()
    with refused("column offset has the type string; the source gives bigint"):
        spark.read.format("rocketmq").schema("offset string").options(**options).load().collect()


def test_an_empty_topic_is_an_empty_table(read: Any, topics: Any, topic: str) -> None:
    topics.create(topic, 3)
    assert read(subscribe=topic).collect() == []


def test_topics_by_list_by_pattern_and_by_queue(read: Any, topics: Any, topic: str) -> None:
    first, second = topics.create(f"{topic}_1", 2), topics.create(f"{topic}_2")
    topics.send(first, "a", queue_id=0)
    topics.send(first, "b", queue_id=1)
    topics.send(second, "c")
    assert bodies(read(subscribe=f"{first}, {second}")) == ["a", "b", "c"]
    assert bodies(read(subscribePattern=f"{topic}_.")) == ["a", "b", "c"]
    assert bodies(read(subscribePattern=f"{topic}_[2-9]")) == ["c"]
    broker = read(subscribe=first).first().broker
    assert bodies(read(assign=json.dumps({first: {broker: [1]}, second: {broker: [0]}}))) == ["b", "c"]


def test_where_a_batch_begins_and_ends(read: Any, topics: Any, topic: str, group: str) -> None:
    topics.create(topic, 2)
    topics.send(topic, "a", "b", "c", queue_id=0)
    time.sleep(0.005)  # so that their times of storage differ
    topics.send(topic, "x", "y", queue_id=1)
    rows = {bytes(row.body).decode(): row for row in read(subscribe=topic).collect()}
    broker = rows["a"].broker
    later_ms = round(rows["x"].storeTimestamp.timestamp() * 1000)

    def queues(*offsets: int) -> str:
        return json.dumps({topic: {broker: {str(number): offset for number, offset in enumerate(offsets)}}})

    def between(**options: Any) -> list[str]:
        return bodies(read(subscribe=topic, **options))

    with refused("startingOffsets=latest is for streams"):
        between(startingOffsets="latest")
    assert between(startingOffsets=queues(1, -1)) == ["b", "c"]
    assert between(startingOffsets=queues(2), endingOffsets=queues(-1, 1)) == ["c", "x"]
    assert between(startingOffsets="group", group=group) == ["a", "b", "c", "x", "y"]
    assert between(startingTimestamp=later_ms) == ["x", "y"]
    assert between(endingTimestamp=later_ms) == ["a", "b", "c"]
    assert between(startingOffsetsByTimestamp=queues(later_ms, later_ms)) == ["x", "y"]
    assert between(endingOffsetsByTimestamp=queues(0)) == ["x", "y"]
    with refused("startingTimestamp: no message of queue 0 .* startingOffsetsByTimestampStrategy=latest"):
        between(startingTimestamp=later_ms, startingOffsetsByTimestampStrategy="error")
    with refused("startingOffsets: there is no queue 2 of topic"):
        between(startingOffsets=queues(0, 0, 0))
    with refused("startingOffsets: offset 7 is outside queue 0 .* which holds 0 to 3; set failOnDataLoss=false"):
        between(startingOffsets=queues(7))
    assert between(startingOffsets=queues(7), failOnDataLoss=False) == ["x", "y"]


def test_queues_are_split_and_put_together(read: Any, topics: Any, topic: str) -> None:
    topics.create(topic, 2)
    sent = [f"{number:03}" for number in range(100)]
    topics.send(topic, *sent)
    for options, tasks in (
        ({}, 1),
        ({"minPartitions": 4}, 4),
        ({"maxRecordsPerPartition": 10}, 10),
        ({"minPartitions": 2, "maxRecordsPerPartition": 30, "pullBatchSize": 7}, 4),
    ):
        frame = read(subscribe=topic, **options)
        assert (bodies(frame), frame.rdd.getNumPartitions()) == (sent, tasks)


def test_the_broker_filters(read: Any, topics: Any, topic: str) -> None:
    topics.create(topic)
    for tag, price in (("Aa", 1), ("BB", 2), ("C", 3), (None, 4)):  # Aa and BB have one hash
        topics.send(topic, f"{tag}", tag=tag, properties={"price": str(price)})
    assert bodies(read(subscribe=topic, tags="Aa")) == ["Aa"]
    assert bodies(read(subscribe=topic, tags="BB || C")) == ["BB", "C"]
    assert bodies(read(subscribe=topic, tags="none")) == []
    assert bodies(read(subscribe=topic, sqlFilter="price > 2")) == ["C", "None"]
    with refused("option sqlFilter='price >'"):
        bodies(read(subscribe=topic, sqlFilter="price >"))


def test_large_bodies_come_inflated(read: Any, topics: Any, topic: str) -> None:
    topics.create(topic)
    large = ["a" * 100_000, "b" * 300_000, "c"]
    topics.send(topic, *large)
    assert bodies(read(subscribe=topic)) == large


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"subscribe": "no_such_topic"}, "topic 'no_such_topic' does not exist at name server 127"),
        ({"subscribePattern": "no_such_.*"}, "option subscribePattern='no_such_.*' matches no topic"),
        (
            {"assign": '{"SELF_TEST_TOPIC":{"nobody":[0]}}'},
            "there is no queue 0 of topic SELF_TEST_TOPIC at broker nob",
        ),
        ({"subscribe": "t", "startingOffsets": "first"}, "startingOffsets='first': expected earliest, latest"),
        ({"subscribe": "t", "minPartition": 3}, "unknown option 'minpartition'; did you mean minPartitions"),
    ],
)
def test_what_can_not_be_read_is_told(read: Any, topics: Any, options: dict[str, Any], said: str) -> None:
    if options.get("startingOffsets"):
        topics.create("t")
    with refused(said):
        read(**options).collect()


def test_nothing_waits_longer_than_the_timeout(spark: SparkSession) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{silent.getsockname()[1]}"
        options = {"nameServer": nobody, "subscribe": "t", "timeout": "1s"}
        with refused(f"no connection to {nobody}.*tried for 1 s"):
            spark.read.format("rocketmq").options(**options).load().collect()
        silent.listen()
        with refused(f"{nobody} did not answer within"):
            spark.read.format("rocketmq").options(**options).load().collect()


# Streams.


def test_a_stream_in_limited_batches_goes_on_from_its_checkpoint(
    stream: Any, topics: Any, topic: str, group: str, tmp_path: Path
) -> None:
    topics.create(topic, 2)
    topics.send(topic, *"abcdefghij")
    options = {"subscribe": topic, "startingOffsets": "earliest", "group": group, "maxOffsetsPerTrigger": 4}
    first = run(stream(**options, minOffsetsPerTrigger=1000), tmp_path)
    assert [len(batch) for batch in first.seen] == [4, 4, 2]
    assert first.all == list("abcdefghij")
    wait_until(lambda: sum(topics.committed(group, topic).values()) == 10)
    topics.send(topic, *"klm")
    assert run(stream(**options), tmp_path).seen == [["k", "l", "m"]]
    wait_until(lambda: sum(topics.committed(group, topic).values()) == 13)
    # A second query that starts again does not take the group back.
    assert len(run(stream(**options), tmp_path / "again").all) == 13
    assert sum(topics.committed(group, topic).values()) == 13


def test_a_stream_begins_at_the_end_or_where_the_group_stands(
    stream: Any, topics: Any, topic: str, group: str, tmp_path: Path
) -> None:
    topics.create(topic)
    topics.send(topic, "a", "b")
    with running(stream(subscribe=topic, group=group), tmp_path / "end") as batches:
        topics.send(topic, "c")
        batches.query.processAllAvailable()
        assert batches.all == ["c"]
        wait_until(lambda: topics.committed(group, topic) == {0: 3})
    topics.send(topic, "d")
    frame = stream(subscribe=topic, group=group, startingOffsets="group", offsetCommit=False)
    assert run(frame, tmp_path / "group").all == ["d"]
    assert topics.committed(group, topic) == {0: 3}


def test_new_topics_and_queues_are_read_while_the_stream_runs(
    stream: Any, topics: Any, topic: str, tmp_path: Path
) -> None:
    first = topics.create(f"{topic}_1")
    with running(stream(subscribePattern=f"{topic}_.*"), tmp_path) as batches:
        second = topics.create(f"{topic}_2")
        topics.send(second, "b")
        batches.query.processAllAvailable()
        topics.create(first, 3)
        topics.send(first, "c", queue_id=2)
        batches.query.processAllAvailable()
        assert batches.seen == [["b"], ["c"]]


def test_a_trigger_waits_for_enough_messages(stream: Any, topics: Any, topic: str, tmp_path: Path) -> None:
    topics.create(topic)
    with running(stream(subscribe=topic, minOffsetsPerTrigger=4), tmp_path) as batches:
        topics.send(topic, "a", "b")
        batches.query.processAllAvailable()
        topics.send(topic, "c", "d")
        batches.query.processAllAvailable()
        assert batches.seen == [["a", "b", "c", "d"]]
    with running(stream(subscribe=topic, minOffsetsPerTrigger=4, maxTriggerDelay="1s"), tmp_path) as batches:
        topics.send(topic, "e")
        wait_until(lambda: batches.seen == [["e"]])


def test_a_trigger_reads_so_many_bytes(stream: Any, topics: Any, topic: str, tmp_path: Path) -> None:
    topics.create(topic)
    topics.send(topic, *(f"{number}" * 1000 for number in range(8)))
    options = {"subscribe": topic, "startingOffsets": "earliest", "maxBytesPerTrigger": 4100}
    assert [len(batch) for batch in run(stream(**options), tmp_path).seen] == [4, 4]


def test_a_topic_that_was_made_again_has_lost_messages(stream: Any, topics: Any, topic: str, tmp_path: Path) -> None:
    topics.create(topic)
    topics.send(topic, "a", "b", "c")
    options = {"subscribe": topic, "startingOffsets": "earliest"}
    assert run(stream(**options), tmp_path).all == ["a", "b", "c"]
    topics.delete(topic)
    with refused(f"topic {topic}: none of its brokers is there, or it does not exist now .*tried for 3 s"):
        run(stream(**options, timeout="3s"), tmp_path)
    topics.create(topic)
    topics.send(topic, *"wxyz")
    with refused("the message at offset 2 is another one now: the topic was deleted .*failOnDataLoss=false"):
        run(stream(**options), tmp_path)
    assert run(stream(**options, failOnDataLoss=False), tmp_path).all == list("wxyz")


def test_a_stream_outlives_a_restart_of_the_server(
    stream: Any, topics: Any, topic: str, server: Server, tmp_path: Path
) -> None:
    topics.create(topic)
    with running(stream(subscribe=topic, timeout=f"{DEADLINE_S:.0f}s"), tmp_path) as batches:
        topics.send(topic, "a")
        batches.query.processAllAvailable()
        server.stop()
        server.start()
        topics.send(topic, "b")
        batches.query.processAllAvailable()
        assert batches.all == ["a", "b"]


def test_what_a_stream_can_not_read_is_told(stream: Any, spark: SparkSession, tmp_path: Path) -> None:
    with refused("topic 'no_such_topic' does not exist"):
        run(stream(subscribe="no_such_topic"), tmp_path / "1")
    with refused("option endingOffsets is for batch reads"):
        run(stream(subscribe="t", endingOffsets="latest"), tmp_path / "2")


def test_spark_finds_the_format_by_itself() -> None:
    """What Spark runs in a Python process of its own when it first looks for a format."""
    found = io.BytesIO()
    lookup_data_sources._main(io.BytesIO(), found)
    assert b"rocketmq" in found.getvalue()
