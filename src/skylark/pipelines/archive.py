"""Topics kept as Parquet files, each message exactly once, whoever reads the files and whatever is killed when.

    PATH/topic=orders/date=2026-01-31/00000042-0000-3f2a9c1e.parquet     batch 42, its first file, of query 3f2a9c1e
    PATH/_archive/checkpoint                                             Spark's: which offsets each batch has
    PATH/_archive/staging/42/…                                           a batch that is being written
    PATH/_archive/planned/42, PATH/_archive/done/42                      its files; that they are all in place

A batch is a range of offsets, fixed in Spark's checkpoint before it is read, and comes again with the same messages
after a kill. It is written to a fresh directory aside, then its list of files is put down in one step, and each file is
moved to its place by a rename. From then on a batch that comes again goes on with the same list: a file is in one place
or in the other, never in both. So a file that can be seen is whole, and no message is in two of them.

The date is that of the store time, in UTC: it belongs to the message and does not change when a batch comes again.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Final

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from skylark.pipelines.errors import PipelineError
from skylark.pipelines.files import Files
from skylark.pipelines.lake import Lake
from skylark.pipelines.topics import existing
from skylark.spark.columns import NAMES
from skylark.spark.options import BadOption, duration_ms

STATE: Final = "_archive"
_KEPT_MARKS: Final = 100  # Spark itself repeats the last batch only


class Plan(msgspec.Struct, frozen=True):
    """What a batch adds to the lake: where its files are, and where each of them goes."""

    staged: str
    moves: dict[str, str]


def archive(
    spark: SparkSession,
    name_server: str,
    topics: Sequence[str],
    path: str,
    *,
    tags: str | None = None,
    sql_filter: str | None = None,
    every_ms: int | None = None,
    max_per_batch: int = 500_000,
    group: str | None = None,
    skip_lost: bool = False,
) -> StreamingQuery:
    """Starts the query: over what there is now, or with a batch every so often until it is stopped.

    The first run begins with the oldest messages; each later one goes on where the last one stopped or died. It fails
    when messages were deleted before they were kept, unless `skip_lost`.
    """
    existing(name_server, topics)
    files = Files(spark, path)
    _refuse_lost_progress(Lake(spark, path), files, topics)
    reader = spark.readStream.format("rocketmq").options(
        nameServer=name_server,
        subscribe=",".join(topics),
        startingOffsets="earliest",
        maxOffsetsPerTrigger=max_per_batch,
        failOnDataLoss=not skip_lost,
    )
    for option, value in (("tags", tags), ("sqlFilter", sql_filter), ("group", group)):
        if value:
            reader = reader.option(option, value)
    writer = (
        reader.load()
        .writeStream.foreachBatch(lambda batch, number: _Batch(files, number).keep(batch))
        .option("checkpointLocation", files.path(f"{STATE}/checkpoint"))
        .queryName("archive")
    )
    writer = (
        writer.trigger(processingTime=f"{every_ms} milliseconds") if every_ms else writer.trigger(availableNow=True)
    )
    return writer.start()


def interval_ms(text: str) -> int:
    """`30s`, `5m`. Raises PipelineError."""
    try:
        return duration_ms(text, "every")
    except BadOption as e:
        raise PipelineError(str(e)) from e


def _refuse_lost_progress(lake: Lake, files: Files, topics: Sequence[str]) -> None:
    """An archive that begins again where files are already would keep everything twice."""
    if files.exists(STATE):
        return
    for topic in topics:
        if lake.has(topic):
            raise PipelineError(
                f"{files.root} has files of topic {topic}, but {STATE}, which says how far they go, is missing: "
                "archive to another path, or put it back"
            )


class _Batch:
    """One batch on its way into the lake."""

    def __init__(self, files: Files, number: int) -> None:
        self._files = files
        self._number = number
        self._staging = f"{STATE}/staging/{number}"
        self._planned = f"{STATE}/planned/{number}"
        self._done = f"{STATE}/done/{number}"

    def keep(self, batch: DataFrame) -> None:
        # A batch that is done comes again when the process died before Spark noted its end.
        if not self._files.exists(self._done):
            text = self._files.read(self._planned)
            plan = self._write(batch) if text is None else msgspec.json.decode(text, type=Plan)
            for staged, place in plan.moves.items():
                if not self._files.exists(place):
                    self._files.rename(f"{plan.staged}/{staged}", place)
            self._files.write(self._done, "")
        self._tidy()

    def _write(self, batch: DataFrame) -> Plan:
        # A directory of its own for every try: the tasks of a driver that was killed may still be writing to theirs.
        staged = f"{self._staging}/{uuid.uuid4().hex}"
        by_day = batch.select(*NAMES, F.to_date("storeTimestamp").alias("date"))
        (
            by_day.sortWithinPartitions("topic", "date", "broker", "queueId", "offset")
            .write.partitionBy("topic", "date")
            .parquet(self._files.path(staged))
        )
        query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId") or uuid.uuid4().hex
        moves: dict[str, str] = {}
        for name in self._files.below(staged):
            directory, _, last = name.rpartition("/")
            if last.endswith(".parquet"):
                moves[name] = f"{directory}/{self._number:08d}-{len(moves):04d}-{query[:8]}.parquet"
        plan = Plan(staged, moves)
        self._files.write(self._planned, msgspec.json.encode(plan).decode())
        return plan

    def _tidy(self) -> None:
        self._files.delete(self._staging)
        self._files.delete(self._planned)
        self._files.delete(f"{STATE}/done/{self._number - _KEPT_MARKS}")
