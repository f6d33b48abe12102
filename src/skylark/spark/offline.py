"""The Spark data source `rocketmq-commitlog`: the messages in a broker's store directory, read without the broker.

    spark.read.format("rocketmq-commitlog").load("/data/broker-a/store")

The log holds the messages of all topics in the order of their arrival. It is cut into parts of some megabytes at places
where a record begins; each task walks its parts and makes columns only of the messages that are asked for. A part is a
frozen value, and what lies before the end of a log never changes: reading it again gives the same messages.
"""

from __future__ import annotations

import glob
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
from msgspec.structs import replace
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from skylark.spark.bodies import Shape, shape_of, spark_schema
from skylark.spark.commitlog import SegmentFile, segments_in
from skylark.spark.options import BadOption, check_times, parse
from skylark.spark.positions import DataLost
from skylark.spark.records import SMALLEST
from skylark.spark.scanning import Part, Scanning, Selection, read_parts

_CLOCK_SET_BACK_MS: Final = 600_000
"""Times of arrival grow along the log, but for a clock that was set back: parts that near to a time range are read."""


class Task(InputPartition):
    def __init__(self, parts: tuple[Part, ...]) -> None:
        super().__init__(parts)
        self.parts = parts


class RocketMQCommitLog(DataSource):
    """Format `rocketmq-commitlog`."""

    @classmethod
    def name(cls) -> str:
        return "rocketmq-commitlog"

    def schema(self) -> str:
        return spark_schema(scan_options(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = scan_options(self.options)
        return Reader(options, shape_of(options, schema))


class Reader(DataSourceReader):
    def __init__(self, options: Scanning, shape: Shape) -> None:
        self._options = options
        self._shape = shape

    def partitions(self) -> Sequence[InputPartition]:
        # Without any, Spark would call `read` for none.
        return [Task(parts) for parts in plan(self._options)] or [Task(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Task)
        return read_parts(self._options, self._shape, partition.parts)


def scan_options(options: Mapping[str, str]) -> Scanning:
    """Raises BadOption."""
    given = dict(options)
    if "paths" in given:  # Spark's name for several of them
        given["path"] = ",".join(json.loads(given.pop("paths")))
    found = parse(Scanning, given)
    if not found.path.strip():
        raise BadOption("option path is missing: the directory of a broker's store")
    if found.topics is not None and found.topic_pattern is not None:
        raise BadOption("the options topics and topicPattern exclude each other")
    check_times(found.starting_timestamp, found.ending_timestamp)
    Selection(found)
    return found


# Which logs, and in which parts.


def plan(options: Scanning) -> list[tuple[Part, ...]]:
    """What each task reads. Raises BadOption for a path without a log, DataLost for one with a gap."""
    segments = [part for directory in log_directories(options.path) for part in _segments(options, directory)]
    step = options.max_bytes_per_partition
    if options.min_partitions is not None:
        step = max(SMALLEST, min(step, -(-sum(part.size_bytes for part in segments) // options.min_partitions)))
    parts = [part for segment in segments for part in _in_time(options, _cut(segment, step))]
    return _packed(parts, step)


def log_directories(path: str) -> list[Path]:
    """The commit logs that the option names. Raises BadOption."""
    found = []
    for text in filter(None, map(str.strip, path.split(","))):
        plain = text.removeprefix("file://")
        matches = [plain] if Path(plain).exists() else sorted(glob.glob(plain, recursive=True))  # noqa: PTH207
        if not matches:
            raise BadOption(f"option path={path!r}: there is no {plain}")
        found += [_log_directory(path, Path(match)) for match in matches]
    return list(dict.fromkeys(found))


def _log_directory(option: str, directory: Path) -> Path:
    try:
        if (directory / "commitlog").is_dir():
            return directory / "commitlog"
        if directory.is_dir() and segments_in(directory):
            return directory
    except OSError as e:
        raise BadOption(f"option path={option!r}: {e}") from None
    kind = "holds neither a commitlog directory nor segments of one" if directory.is_dir() else "is not a directory"
    raise BadOption(f"option path={option!r}: {directory} {kind}; expected the directory of a broker's store")


def broker_name(directory: Path) -> str:
    """After the store's directory, or the one above it if that is just called `store`."""
    root = directory.absolute().parent if directory.name == "commitlog" else directory.absolute()
    return root.parent.name if root.name == "store" and root.parent.name else root.name


def _segments(options: Scanning, directory: Path) -> list[Part]:
    """The segments that can hold messages of the time range, up to where each is to be read."""
    broker = options.broker or broker_name(directory)
    parts = [Part(broker, segment, 0, segment.size_bytes) for segment in segments_in(directory)]
    while parts:  # brokers make segments before they need them
        last = parts.pop()
        with SegmentFile(last.segment) as file:
            end = file.written_end()
        if end:
            parts.append(replace(last, end=end))
            break
    for part, following in itertools.pairwise(parts):
        gap = part.segment.base + part.segment.size_bytes, following.segment.base
        if gap[0] != gap[1] and options.fail_on_data_loss:
            raise DataLost(
                f"{directory}: the log from offset {gap[0]} to {gap[1]} is missing; "
                "set failOnDataLoss=false to go on without it"
            )
    return _in_time(options, parts)


def _cut(part: Part, step: int) -> list[Part]:
    """The same in pieces of about `step` bytes."""
    with SegmentFile(part.segment) as file:
        places = {file.find_record(place, part.end) for place in range(part.start + step, part.end, step)}
    bounds = sorted({part.start, part.end, *(place for place in places if place is not None)})
    return [replace(part, start=low, end=high) for low, high in itertools.pairwise(bounds)]


def _in_time(options: Scanning, parts: Sequence[Part]) -> list[Part]:
    """Those, of parts that follow each other, that can hold messages of the time range."""
    if options.starting_timestamp is None and options.ending_timestamp is None:
        return list(parts)
    begun_ms = [*map(_stored_at_ms, parts), None]
    return [part for number, part in enumerate(parts) if _may_hold(options, *begun_ms[number : number + 2])]


def _stored_at_ms(part: Part) -> int | None:
    with SegmentFile(part.segment) as file:
        record = file.record_at(part.start)
    return None if record is None else int(record.store_times_ms()[0])


def _may_hold(options: Scanning, first_ms: int | None, next_ms: int | None) -> bool:
    """Whether a part can be of interest whose first message, and the first one behind it, were stored then."""
    since_ms, before_ms = options.starting_timestamp, options.ending_timestamp
    if since_ms is not None and next_ms is not None and next_ms + _CLOCK_SET_BACK_MS < since_ms:
        return False
    return before_ms is None or first_ms is None or first_ms - _CLOCK_SET_BACK_MS < before_ms


def _packed(parts: Sequence[Part], room: int) -> list[tuple[Part, ...]]:
    """Neighbours share a task while they are small: starting one costs more than reading a little."""
    packed: list[list[Part]] = []
    free = 0
    for part in parts:
        if part.size_bytes > free:
            packed.append([])
            free = room
        packed[-1].append(part)
        free -= part.size_bytes
    return [tuple(task) for task in packed]
