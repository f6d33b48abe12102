"""Topics kept as Parquet files, each message exactly once, whoever reads the files and whatever is killed when.

    PATH/topic=orders/date=2026-01-31/00000042-0000-3f2a9c1e5b7d0a64.parquet     the 42nd batch of the lake, first file
    PATH/_archive/checkpoint                                                     Spark's: which offsets each batch has
    PATH/_archive/staging, planned, kept                                         how batches come into the lake

A batch is a range of offsets, fixed in Spark's checkpoint before it is read, and comes again with the same messages
after a kill. How it becomes files that can be seen, all of them whole and no message in two of them, is in `keeping`;
here is what Spark does for it.

The date is that of the store time, in UTC whatever the session's time zone is: it belongs to the message and does not
change when a batch comes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from skylark.pipelines.errors import PipelineError
from skylark.pipelines.files import Files
from skylark.pipelines.keeping import CHECKPOINT, Batch, Extent, Keeper, batch_of
from skylark.pipelines.lake import Lake
from skylark.pipelines.topics import existing
from skylark.spark.columns import NAMES
from skylark.spark.options import BadOption, duration_ms
from skylark.spark.queues import Queue, flat

_DAY_US: Final = 86_400_000_000
_IDENTITY: Final = ("topic", "broker", "queueId", "offset", "storeTimestamp", "msgId")
"""By these a message is told from any other, also from one of a topic that was made anew."""


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
    when messages were deleted before they were kept, unless `skip_lost`. One run at a time may write to a path.
    """
    existing(name_server, topics)
    files = Files(spark, path)
    keeper = Keeper(files, lambda: extent(Lake(spark, path)), skip_lost=skip_lost)
    keeper.begin()
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

    def keep(rows: DataFrame, number: int) -> None:
        batch = batch_of(files, number)
        keeper.keep(batch, BatchRows(rows, files, batch))

    writer = (
        reader.load()
        .writeStream.foreachBatch(keep)
        .option("checkpointLocation", files.path(CHECKPOINT))
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


class BatchRows:
    """The rows of a batch, for the `Keeper`."""

    def __init__(self, rows: DataFrame, files: Files, batch: Batch) -> None:
        self._rows = rows
        self._files = files
        self._batch = batch

    def write(self, directory: str, *, only_new: bool) -> None:
        rows = self._new() if only_new else self._rows
        (
            rows.select(*NAMES, _day(F.col("storeTimestamp")).alias("date"))
            .sortWithinPartitions("topic", "date", "broker", "queueId", "offset")
            .write.partitionBy("topic", "date")
            .parquet(self._files.path(directory))
        )

    def _new(self) -> DataFrame:
        """Without what the lake has."""
        lake, rows = Lake(self._rows.sparkSession, self._files.root), self._rows
        starts, ends = self._batch.starts(), flat(self._batch.end)
        for topic in filter(lake.has, self._batch.end):
            first = min(min(starts.get(queue, 0), end) for queue, end in ends.items() if queue.topic == topic)
            found = lake.messages(topic).where(F.col("offset") >= first)
            there = found.select(*(F.col(name).alias(f"_{name}") for name in _IDENTITY))
            same = [F.col(name).eqNullSafe(F.col(f"_{name}")) for name in _IDENTITY]
            rows = rows.join(there, same, "left_anti")
        return rows


def extent(lake: Lake) -> Extent:
    """How far the rows of a lake go."""
    found = Extent({}, {})
    last_stored = F.struct("storeTimestamp", "offset")
    for topic in lake.topics:
        rows = lake.messages(topic).groupBy("broker", "queueId")
        for row in rows.agg(F.max_by("offset", last_stored).alias("at"), F.max("offset").alias("most")).collect():
            queue = Queue(topic, row.broker, row.queueId)
            found.at[queue], found.most[queue] = row.at + 1, row.most + 1
    return found


def _day(time: Column) -> Column:
    """The date in UTC; Spark's own functions go by the session's time zone."""
    time_us = F.unix_micros(time)
    return F.date_from_unix_date(((time_us - F.pmod(time_us, F.lit(_DAY_US))) / _DAY_US).cast("int"))
