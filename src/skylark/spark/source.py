"""The Spark data source `rocketmq`: topics as tables and as streams.

    spark.dataSource.register(RocketMQ)
    spark.read.format("rocketmq").option("nameServer", "localhost:9876").option("subscribe", "orders").load()

Spark pickles the source and runs its readers in Python processes of its own: planning in one beside the driver, `read`
in the workers. So nothing here holds a connection while it is pickled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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

from skylark.spark import columns, planning, positions
from skylark.spark.cluster import Cluster
from skylark.spark.options import Reading, duration_ms, read_options, write_options
from skylark.spark.queues import Offsets, Range, from_spark, to_spark
from skylark.spark.reading import read_ranges
from skylark.spark.sink import BatchWriter, StreamWriter


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
        return columns.SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(read_options(self.options), schema.fieldNames())

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return StreamReader(read_options(self.options), schema.fieldNames())

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return BatchWriter(write_options(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return StreamWriter(write_options(self.options), schema)


class BatchReader(DataSourceReader):
    def __init__(self, options: Reading, names: Sequence[str]) -> None:
        self._options = options
        self._names = names

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        with Cluster(options.name_server, options.timeout_s) as cluster:
            queues = positions.queues_of(cluster, options)
            start = positions.starting(cluster, options, queues, otherwise="earliest")
            end = positions.ending(cluster, options, queues)
        return _tasks(options, start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Task)
        return read_ranges(self._options, partition.ranges, self._names)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Reading, names: Sequence[str]) -> None:
        self._options = options
        self._names = names
        self._target: Offsets | None = None
        self._waits_since_ms: int | None = None
        self._open: Cluster | None = None

    def initialOffset(self) -> dict[str, Any]:
        queues = positions.queues_of(self._cluster(), self._options)
        return self._stored(positions.starting(self._cluster(), self._options, queues, otherwise="latest"))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        begin = from_spark(start)
        end = self._target if self._target is not None else self._latest(begin)
        if not isinstance(limit, ReadAllAvailable):
            end = self._limited(begin, end)
        return self._stored({**begin, **end})

    def getDefaultReadLimit(self) -> ReadLimit:
        options = self._options
        if options.max_offsets_per_trigger or options.min_offsets_per_trigger or options.max_bytes_per_trigger:
            # Spark hands it back as it is; the limits themselves are in the options.
            return ReadMaxRows(options.max_offsets_per_trigger or 2**63 - 1)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return self._stored(self._latest({}))

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._latest({})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        stop = from_spark(end)
        begin = positions.still_there(self._cluster(), self._options, from_spark(start), stop)
        return _tasks(self._options, begin, stop)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Task)
        return read_ranges(self._options, partition.ranges, self._names)

    def commit(self, end: dict[str, Any]) -> None:
        if self._options.group and self._options.offset_commit:
            self._cluster().commit_offsets(self._options.group, from_spark(end))

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
        """The ends of all queues, those that were added since among them. A queue that is gone stays where it was."""
        cluster = self._cluster()
        found = cluster.max_offsets(positions.queues_of(cluster, self._options))
        # A queue that begins anew (its topic was deleted and made again) must not run backwards.
        return {queue: max(offset, begin.get(queue, 0)) for queue, offset in found.items()}

    def _limited(self, begin: Offsets, end: Offsets) -> Offsets:
        options = self._options
        waiting = planning.backlog(begin, end)
        if self._target is None and options.min_offsets_per_trigger and waiting < options.min_offsets_per_trigger:
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
        for part in planning.ranges_between(begin, end):
            sample = Range(part.queue, part.start, min(part.start + 8, part.end))
            for batch in read_ranges(self._options, [sample], ["body"]):
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
