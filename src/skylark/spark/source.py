"""The Spark data source `rocketmq`: topics as tables and as streams.

    spark.dataSource.register(RocketMQ)
    spark.read.format("rocketmq").option("nameServer", "localhost:9876").option("subscribe", "orders").load()

Spark pickles the source and runs its readers in Python processes of its own: planning in one beside the driver, `read`
in the workers. So nothing here holds a connection while it is pickled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from msgspec.structs import replace
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
from skylark.spark.commits import Commits
from skylark.spark.continuing import Losses
from skylark.spark.marks import marks_before
from skylark.spark.options import BadOption, Reading, batch_options, duration_ms, parse, stream_options, write_options
from skylark.spark.queues import Offsets, Position, Queue, Range, from_spark
from skylark.spark.reading import read_ranges
from skylark.spark.sink import BatchWriter, StreamWriter

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
        options = batch_options(self.options)
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
            positions.check_order(options, start, end)
            marks = marks_before(cluster, {queue: end[queue] for queue in end if end[queue] > start[queue]}, start)
        # Without a single task Spark would make one up.
        return _tasks(options, planning.ranges_between(start, end, marks)) or [Task(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Task)
        return read_ranges(self._options, self._shape, partition.ranges)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """What Spark asks of a stream, in the order of its batches.

    Where the first batch starts Spark asks again when it runs that batch, and again after a restart: one reader always
    says the same, and the end of the batch holds it for the next reader.
    """

    def __init__(self, options: Reading, shape: Shape) -> None:
        self._options = options
        self._shape = shape
        self._first: dict[str, Any] | None = None  # where the stream begins, once it was asked for
        self._no_first: RocketMQError | BadOption | None = None  # why that is not known
        self._ends = False  # whether the query reads what is there now, and no more
        self._target: Offsets | None = None  # where it ends then
        self._seen: Offsets | None = None  # the ends of the queues when they were last asked for
        self._known_ends: Offsets = {}  # the same of all that were ever seen
        self._told: set[Queue] = set()  # queues that are gone, and are known to be
        self._has_looked = False
        self._waits_since_ms: int | None = None
        self._open: Cluster | None = None
        self._commits: Commits | None = None

    def initialOffset(self) -> dict[str, Any]:
        if self._first is None:
            try:
                self._first = self._beginning()
            except (RocketMQError, BadOption) as e:
                # A first batch that is to be repeated knows where it starts, and does not need what can't be had now.
                self._no_first = e
                self._first = self._stored(Position(offsets={}))
        return self._first

    def _beginning(self) -> dict[str, Any]:
        cluster = self._cluster()
        queues = positions.queues_of(cluster, self._options)
        offsets = positions.starting(cluster, self._options, queues, otherwise="latest")
        return self._stored(Position(offsets=offsets, first=offsets, marks=marks_before(cluster, offsets)))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        if self._no_first is not None and start == self._first:
            raise self._no_first
        at = Position.of(start)
        ends = dict(self._latest(at) if self._target is None else self._target)
        if not isinstance(limit, ReadAllAvailable) and self._waits(planning.backlog(at.offsets, ends)):
            return start
        # Once, queues are looked at closely in which nothing is new, too: an available-now query may end with that.
        begins = self._losses().begins(at, ends, () if self._has_looked else at.marks.keys() & ends.keys())
        self._has_looked = True
        if self._ends:
            self._target = ends
        if not isinstance(limit, ReadAllAvailable):
            ends = self._limited({**at.offsets, **begins}, ends)
        return self._reached(start, at, ends, begins)

    def getDefaultReadLimit(self) -> ReadLimit:
        options = self._options
        if options.max_offsets_per_trigger or options.min_offsets_per_trigger or options.max_bytes_per_trigger:
            # Spark hands it back as it is; the limits themselves are in the options.
            return ReadMaxRows(options.max_offsets_per_trigger or 2**63 - 1)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return None if self._seen is None else self._stored(Position(offsets=self._seen))

    def prepareForTriggerAvailableNow(self) -> None:
        self._ends = True

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        at, to = Position.of(start), Position.of(end)
        if self._no_first is not None and start == self._first and to.first is None:
            raise self._no_first
        offsets = at.offsets
        if to.first is not None and at.first != to.first:
            offsets = to.first  # the first batch again: `start` is what the options say now
        new = [queue for queue in to.offsets if queue not in offsets and queue not in to.begins]
        begin = {**offsets, **to.begins, **(self._cluster().min_offsets(new) if new else {})}
        is_first = at.first is not None and to.first is None
        return _tasks(self._options, planning.ranges_between(self._in_order(begin, to, is_first), to.offsets, to.marks))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Task)
        return read_ranges(self._options, self._shape, partition.ranges)

    def commit(self, end: dict[str, Any]) -> None:
        if self._options.group and self._options.offset_commit:
            if self._commits is None:
                self._commits = Commits(self._options.name_server, self._options.group)
            self._commits.reach(from_spark(end))

    def stop(self) -> None:
        if self._commits is not None:
            self._commits.close()
            self._commits = None
        if self._open is not None:
            self._open.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None, "_commits": None}

    def _cluster(self) -> Cluster:
        if self._open is None:
            self._open = Cluster(self._options.name_server, self._options.timeout_s)
        return self._open

    def _losses(self) -> Losses:
        return Losses(self._cluster(), fail=self._options.fail_on_data_loss)

    def _stored(self, position: Position) -> dict[str, Any]:
        group = self._options.group if self._options.offset_commit else None
        return position.to_spark(group, self._options.name_server)

    def _latest(self, at: Position) -> Offsets:
        """The ends of all queues that are there, those that were added since among them.

        Both are asked for again if a broker goes away in between: then its queues are no longer there.
        """
        cluster = self._cluster()
        known = {queue.topic for queue in at.offsets}
        seen = cluster.retrying(lambda: cluster.max_offsets(positions.queues_of(cluster, self._options, known)))
        self._told -= seen.keys()
        missing = at.offsets.keys() - seen.keys() - self._told
        if missing:
            self._losses().missed(at, sorted(missing), self._known_ends, self._told)
        self._seen = seen
        self._known_ends |= seen
        return seen

    def _reached(self, start: dict[str, Any], at: Position, end: Offsets, begins: Offsets) -> dict[str, Any]:
        """Where the stream is after a batch up to `end`: the very same as before when there is nothing to read.

        What is not there at the moment stays where it was; a new queue is noted when there is something in it.
        """
        offsets = {**at.offsets, **{queue: offset for queue, offset in end.items() if offset or queue in at.offsets}}
        if offsets == at.offsets and not begins:
            return start
        moved = {
            queue: offset for queue, offset in offsets.items() if offset != at.offsets.get(queue) or queue in begins
        }
        kept = {queue: mark for queue, mark in at.marks.items() if queue not in begins}
        return self._stored(
            Position(
                offsets=offsets,
                first=at.first,
                marks={**kept, **marks_before(self._cluster(), moved, {**at.offsets, **begins})},
                begins={queue: offset for queue, offset in begins.items() if queue in offsets},
            )
        )

    def _in_order(self, begin: Offsets, to: Position, is_first: bool) -> Offsets:
        """`begin`, without queues that end before they begin: only checkpoints of before marks were kept have them."""
        wrong = sorted(queue for queue, offset in to.offsets.items() if begin.get(queue, 0) > offset)
        if not wrong:
            return begin
        if self._options.fail_on_data_loss:
            queue = wrong[0]
            raise positions.DataLost(
                f"{queue}: a batch is to be repeated that ends at offset {to.offsets[queue]}, but the stream is at "
                f"{begin[queue]}, and the checkpoint does not say why: an older version of Skylark wrote it, or it was "
                "changed by hand; start with a new checkpoint, or set failOnDataLoss=false to go on"
            )
        # A first batch lies before all that is known; in a later one the queue was made anew.
        return {**begin, **({queue: to.offsets[queue] for queue in wrong} if is_first else dict.fromkeys(wrong, 0))}

    def _waits(self, waiting: int) -> bool:
        """Whether a batch is put off until more has come."""
        options = self._options
        if not self._ends and options.min_offsets_per_trigger and waiting < options.min_offsets_per_trigger:
            now_ms = time.monotonic_ns() // 1_000_000
            if self._waits_since_ms is None:
                self._waits_since_ms = now_ms
            if now_ms - self._waits_since_ms < duration_ms(options.max_trigger_delay, "maxTriggerDelay"):
                return True
        self._waits_since_ms = None
        return False

    def _limited(self, begin: Offsets, end: Offsets) -> Offsets:
        options = self._options
        waiting = planning.backlog(begin, end)
        most = options.max_offsets_per_trigger or waiting
        if options.max_bytes_per_trigger and waiting:
            most = min(most, max(1, options.max_bytes_per_trigger // self._bytes_a_message(begin, end)))
        return planning.capped(begin, end, most)

    def _bytes_a_message(self, begin: Offsets, end: Offsets) -> int:
        """About how long the next messages are: the mean of a few of each queue."""
        count = size = 0
        parts = planning.ranges_between(begin, end)
        samples = [Range(part.queue, part.start, min(part.start + _SAMPLE, part.end)) for part in parts]
        options = replace(self._options, bad_records="drop", dlq_topic=None)  # what is bad is the task's affair
        for batch in read_ranges(options, Shape(["body"]), samples):
            count += batch.num_rows
            size += batch.nbytes
        return max(1, size // count) if count else 1


def _tasks(options: Reading, ranges: Sequence[Range]) -> list[InputPartition]:
    planned = planning.tasks(
        ranges,
        min_partitions=options.min_partitions,
        max_records=options.max_records_per_partition,
    )
    return [Task(ranges) for ranges in planned]
