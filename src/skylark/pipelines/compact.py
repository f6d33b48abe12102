"""The latest message of each key: of a topic, or of an archive of it, as Parquet files or as messages of another topic.

The key is the whole text of a message's keys, as in Apache's compaction topics; messages without one are left out. Of
the messages of a key in one queue the last one counts, whatever its time; of several queues, the one stored last. A
message with an empty body, or with the tag that was chosen for it, says that its key is deleted.

A topic that was made anew begins at offset 0 again: in an archive the messages of its later life come last (see
`lives`).

A snapshot has the columns of the source and a row for each key; how it takes the place of the one before is in
`snapshot`.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime

import msgspec
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from skylark.pipelines.files import Files
from skylark.pipelines.lake import Lake
from skylark.pipelines.lives import FIRST
from skylark.pipelines.snapshot import Snapshot
from skylark.spark.columns import NAMES


class Compacted(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the messages. `kept` counts the keys in the result, `deleted` those whose last message says so."""

    topic: str
    messages: int
    without_key: int
    kept: int
    deleted: int
    finished: datetime
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.topic}: {self.messages:,} messages, the latest of {self.kept:,} keys kept, {self.deleted:,} keys "
            f"deleted, {self.without_key:,} messages without a key, {self.seconds:.1f} s"
        )


def topic_messages(spark: SparkSession, name_server: str, topic: str) -> DataFrame:
    """All that the topic has now: of one life."""
    options = {"nameServer": name_server, "subscribe": topic, "startingOffsets": "earliest", "endingOffsets": "latest"}
    return spark.read.format("rocketmq").options(**options).load().withColumn("life", F.lit(FIRST))


def lake_messages(spark: SparkSession, path: str, topic: str) -> DataFrame:
    lake = Lake(spark, path)
    return lake.in_lives(lake.choose(topic))[0]


class Compaction:
    """One run over the messages of a topic."""

    def __init__(
        self, messages: DataFrame, topic: str, *, delete_tag: str | None = None, keep_deleted: bool = False
    ) -> None:
        self._topic = topic
        self._began_s = time.monotonic()
        self._read, self._latest = Observation(), Observation()
        is_deletion = F.length("body") == 0
        if delete_tag is not None:
            is_deletion |= F.coalesce(F.col("tags") == delete_tag, F.lit(False))
        has_key = F.coalesce(F.col("keys"), F.lit("")) != ""
        counted = messages.observe(self._read, _count(F.lit(True), "messages"), _count(~has_key, "without_key"))
        latest = _latest(counted.where(has_key)).observe(
            self._latest, _count(F.lit(True), "keys"), _count(is_deletion, "deleted")
        )
        self._keeps_deleted = keep_deleted
        self._result = latest if keep_deleted else latest.where(~is_deletion)

    def to_files(self, spark: SparkSession, path: str) -> Compacted:
        """Replaces the snapshot there. Raises PipelineError for a directory with other files."""
        parent, _, name = Files(spark, path).root.rpartition("/")
        beside = Files(spark, parent)
        done: list[Compacted] = []

        def write(directory: str) -> bytes:
            self._result.write.parquet(beside.path(directory))
            done.append(self._done())
            return msgspec.json.encode(done[0])

        Snapshot(beside, name).replace(write)
        return done[0]

    def to_topic(self, name_server: str, topic: str) -> Compacted:
        """Sends the latest messages; those of one key always go to the same queue."""
        rows = self._result.select("body", "tags", "keys", "properties", F.col("keys").alias("orderingKey"))
        rows.write.format("rocketmq").options(nameServer=name_server, topic=topic).mode("append").save()
        return self._done()

    def _done(self) -> Compacted:
        read, latest = self._read.get, self._latest.get
        return Compacted(
            topic=self._topic,
            messages=read["messages"],
            without_key=read["without_key"],
            kept=latest["keys"] - (0 if self._keeps_deleted else latest["deleted"]),
            deleted=latest["deleted"],
            finished=datetime.now(UTC),
            seconds=time.monotonic() - self._began_s,
        )


def _latest(messages: DataFrame) -> DataFrame:
    of_queue = messages.groupBy("keys", "broker", "queueId").agg(
        F.max_by(F.struct(*NAMES), F.struct("life", "offset")).alias("row")
    )
    last_stored = F.struct("row.storeTimestamp", "row.broker", "row.queueId")
    return of_queue.groupBy("keys").agg(F.max_by("row", last_stored).alias("row")).select("row.*")


def _count(condition: Column, name: str) -> Column:
    return F.count_if(condition).alias(name)
