"""The Spark data source `rocketmq`: topics as tables and as streams.

    spark.dataSource.register(RocketMQ)
    spark.read.format("rocketmq").option("nameServer", "localhost:9876").option("subscribe", "orders").load()

Spark pickles the source and runs its readers in Python processes of its own: planning in one beside the driver, `read`
in the workers. So nothing here holds a connection while it is pickled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from skylark.client.errors import RocketMQError
from skylark.spark import planning, positions
from skylark.spark.bodies import Shape, shape_of, spark_schema
from skylark.spark.cluster import Cluster
from skylark.spark.options import Reading, duration_ms, parse, read_options, stream_options, write_options
from skylark.spark.queues import Offsets, Range, from_spark, to_spark
from skylark.spark.reading import read_ranges
from skylark.spark.sink import BatchWriter, StreamWriter

log = logging.getLogger(__name__)

_SAMPLE: Final = 8  # messages of each queue by whose size the others are guessed


class Task(InputPartition):
    """The ranges that one task reads: a frozen value, so that reading it again gives the same messages."""

    def __init__(self, ranges: tuple[Range, ...]) -> None:
        super().__init__(ranges)
        self.ranges = ranges


class RocketMQ(DataSource):
    """Format `rocketmq`."""

    @classmethod
    def name(cls) -> str:
        return "rocketmq"

    def schema(self) -> str:
        return spark_schema(parse(Reading, self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = read_options(self.options)
        return BatchReader(options, shape_of(options, schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = stream_options(self.options)
        return StreamReader(options, shape_of(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return BatchWriter(write_options(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return StreamWriter(write_options(self.options), schema)


class BatchReader(DataSourceReader):
    def __init__(self, options: Reading, shape: Shape) -> None:
        self._options = options
        self._shape = shape

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        with Cluster(options.name_server, options.timeout_s) as cluster:
            queues = positions.queues_of(cluster, options)
            start = positions.starting(cluster, options, queues, otherwise="earliest")
            end = positions.ending(cluster, options, queues)
        # Without a single task Spark would make one up.
        return _tasks(options, start, end) or [Task(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Task)
        return read_ranges(self._options, self._shape, partition.ranges)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Reading, shape: Shape) -> None:
        self._options = options
        self._shape = shape
        self._ends = False  # whether the query reads what is there now, and no more
        self._target: Offsets | None = None  # where it ends then
        self._seen: Offsets | None = None  # the ends of the queues when they were last asked for
        self._waits_since_ms: int | None = None
        self._open: Cluster | None = None

    def initialOffset(self) -> dict[str, Any]:
        queues = positions.queues_of(self._cluster(), self._options)
        return self._stored(positions.starting(self._cluster(), self._options, queues, otherwise="latest"))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        begin = from_spark(start)
        ends = self._target
        if ends is None:
            ends = self._latest(begin)
            self._target = ends if self._ends else None
        end = positions.not_behind(self._cluster(), self._options, begin, ends)
        if not isinstance(limit, ReadAllAvailable):
            new = self._cluster().min_offsets(queue for queue in end if queue not in begin)
            end = self._limited({**new, **begin}, end)
        # What is not there at the moment stays where it was; a new queue is noted when there is something in it.
        return self._stored({**begin, **{queue: offset for queue, offset in end.items() if offset or queue in begin}})

    def getDefaultReadLimit(self) -> ReadLimit:
        options = self._options
        if options.max_offsets_per_trigger or options.min_offsets_per_trigger or options.max_bytes_per_trigger:
            # Spark hands it back as it is; the limits themselves are in the options.
            return ReadMaxRows(options.max_offsets_per_trigger or 2**63 - 1)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return None if self._seen is None else self._stored(self._seen)

    def prepareForTriggerAvailableNow(self) -> None:
        self._ends = True

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        stop = from_spark(end)
        begin = positions.still_there(self._cluster(), self._options, from_spark(start), stop)
        return _tasks(self._options, begin, stop)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Task)
        return read_ranges(self._options, self._shape, partition.ranges)

    def commit(self, end: dict[str, Any]) -> None:
        if self._options.group and self._options.offset_commit:
            try:
                self._cluster().commit_offsets(self._options.group, from_spark(end))
            except RocketMQError as e:
                # The stream itself goes on by its checkpoint; the group catches up with the next batch.
                log.warning("the progress of group %s can't be committed: %s", self._options.group, e)

    def stop(self) -> None:
        if self._open is not None:
            self._open.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}

    def _cluster(self) -> Cluster:
        if self._open is None:
            self._open = Cluster(self._options.name_server, self._options.timeout_s)
        return self._open

    def _stored(self, offsets: Mapping[Any, int]) -> dict[str, Any]:
        group = self._options.group if self._options.offset_commit else None
        return to_spark(offsets, group, self._options.name_server)

    def _latest(self, begin: Offsets) -> Offsets:
        """The ends of all queues that are there, those that were added since among them.

        Both are asked for again if a broker goes away in between: then its queues are no longer there.
        """
        cluster = self._cluster()
        known = {queue.topic for queue in begin}
        self._seen = cluster.retrying(lambda: cluster.max_offsets(positions.queues_of(cluster, self._options, known)))
        return self._seen

    def _limited(self, begin: Offsets, end: Offsets) -> Offsets:
        options = self._options
        waiting = planning.backlog(begin, end)
        if not self._ends and options.min_offsets_per_trigger and waiting < options.min_offsets_per_trigger:
            now_ms = time.monotonic_ns() // 1_000_000
            if self._waits_since_ms is None:
                self._waits_since_ms = now_ms
            if now_ms - self._waits_since_ms < duration_ms(options.max_trigger_delay, "maxTriggerDelay"):
                return begin
        self._waits_since_ms = None
        most = options.max_offsets_per_trigger or waiting
        if options.max_bytes_per_trigger and waiting:
            most = min(most, max(1, options.max_bytes_per_trigger // self._bytes_a_message(begin, end)))
        return planning.capped(begin, end, most)

    def _bytes_a_message(self, begin: Offsets, end: Offsets) -> int:
        """About how long the next messages are: the mean of a few of each queue."""
        count = size = 0
        parts = planning.ranges_between(begin, end)
        samples = [Range(part.queue, part.start, min(part.start + _SAMPLE, part.end)) for part in parts]
        for batch in read_ranges(self._options, Shape(["body"]), samples):
            count += batch.num_rows
            size += batch.nbytes
        return max(1, size // count) if count else 1


def _tasks(options: Reading, start: Offsets, end: Offsets) -> list[InputPartition]:
    planned = planning.tasks(
        planning.ranges_between(start, end),
        min_partitions=options.min_partitions,
        max_records=options.max_records_per_partition,
    )
    return [Task(ranges) for ranges in planned]
