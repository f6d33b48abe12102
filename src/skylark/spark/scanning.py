"""What a task of the offline source does: walk its parts of a commit log, and make columns of what is asked for.

Records of other topics cost little: where their parts lie is found for all records of a run at once, and each topic's
name is looked at once a run. Only bodies that are asked for are compared with their checksums.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import Meta

from skylark.client.errors import MissingCodec
from skylark.spark.bodies import Columns, Shape
from skylark.spark.commitlog import Damaged, Segment, SegmentFile
from skylark.spark.options import BadOption, BodyFormat, BodyMessage, BodySchema, Millis, Positive
from skylark.spark.own_topics import is_own
from skylark.spark.positions import DataLost
from skylark.spark.records import Array, Records
from skylark.wire.message import SYS_TRANSACTION_COMMIT, SYS_TRANSACTION_MASK, SYS_TRANSACTION_NONE, BadRecord

log = logging.getLogger(__name__)

_SMALL_BATCH_ROWS: Final = 4096
_SMALL_BATCH_BYTES: Final = 4 << 20


class Scanning(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """The options of a read without a broker."""

    path: Annotated[
        str, Meta(description="a store's root or its commitlog directory; several with commas, or a glob")
    ] = ""
    topics: Annotated[str | None, Meta(description="topics, separated by commas; all if not given")] = None
    topic_pattern: Annotated[str | None, Meta(description="a regular expression for whole topic names")] = None
    queues: Annotated[str | None, Meta(description="numbers of queues, separated by commas; all if not given")] = None
    starting_timestamp: Annotated[
        Millis | None, Meta(description="stored at or after that: milliseconds since 1970")
    ] = None
    ending_timestamp: Annotated[Millis | None, Meta(description="stored before that: milliseconds since 1970")] = None
    include_system_topics: Annotated[
        bool, Meta(description="also RocketMQ's own topics: retries, dead letters, parked timers, open transactions")
    ] = False
    broker: Annotated[str | None, Meta(description="what the column broker holds; else the directory's name")] = None
    max_bytes_per_partition: Annotated[
        Annotated[int, Meta(ge=1 << 16)], Meta(description="about how many bytes of the log a task reads")
    ] = 32 << 20
    min_partitions: Annotated[Positive | None, Meta(description="cut the log until there are that many tasks")] = None
    check_crc: Annotated[bool, Meta(description="compare bodies with their checksums")] = True
    fail_on_data_loss: Annotated[bool, Meta(description="fail when a part of the log is damaged or missing")] = True
    body_format: BodyFormat = "binary"
    body_schema: BodySchema = None
    body_message: BodyMessage = None
    bad_records: Annotated[
        Literal["fail", "drop"], Meta(description="what becomes of a message that can't be read or decoded")
    ] = "fail"


class Part(msgspec.Struct, frozen=True):
    """A piece of a segment; both ends are places where a record begins, or the end of the log or of the segment."""

    broker: str
    segment: Segment
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


class Selection:
    """Which messages are asked for."""

    def __init__(self, options: Scanning) -> None:
        self._topics = frozenset(_listed(options.topics)) if options.topics is not None else None
        self._pattern = None
        if options.topic_pattern is not None:
            try:
                self._pattern = re.compile(options.topic_pattern)
            except re.error as e:
                raise BadOption(f"option topicPattern={options.topic_pattern!r}: {e}") from None
        try:
            self._queues = None if options.queues is None else np.array([int(n) for n in _listed(options.queues)])
        except ValueError:
            raise BadOption(f"option queues={options.queues!r}: expected numbers, such as 0,1,2") from None
        self._own_too = options.include_system_topics
        self._since_ms = options.starting_timestamp
        self._before_ms = options.ending_timestamp

    def of(self, records: Records) -> Records:
        wanted = self._of_topics(records)
        # What was prepared or rolled back in its own topic, as old brokers did it, is in no queue.
        kind = records.sys_flags() & SYS_TRANSACTION_MASK
        wanted &= (kind == SYS_TRANSACTION_NONE) | (kind == SYS_TRANSACTION_COMMIT)
        if self._queues is not None:
            wanted &= np.isin(records.queue_ids().to_numpy(), self._queues)
        if self._since_ms is not None or self._before_ms is not None:
            times_ms = records.store_times_ms()
            if self._since_ms is not None:
                wanted &= times_ms >= self._since_ms
            if self._before_ms is not None:
                wanted &= times_ms < self._before_ms
        return records if wanted.all() else records.filter(wanted)

    def _of_topics(self, records: Records) -> Array:
        """Each topic of the records is looked at once."""
        found = records.topics().dictionary_encode()
        wanted = np.array([self._wants(topic) for topic in found.dictionary.to_pylist()], bool)
        picked: Array = wanted[found.indices.to_numpy()]
        return picked

    def _wants(self, topic: str) -> bool:
        if self._topics is not None:
            return topic in self._topics
        if self._pattern is not None and self._pattern.fullmatch(topic) is None:
            return False
        return self._own_too or not is_own(topic)


def _listed(text: str) -> list[str]:
    return [item for item in map(str.strip, text.split(",")) if item]


def read_parts(options: Scanning, shape: Shape, parts: Sequence[Part]) -> Iterator[pa.RecordBatch]:
    """The messages that are asked for; few in each part of the log are gathered to batches of a good size."""
    columns = Columns(shape, options.bad_records)
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for part in parts:
        for batch in _batches(options, part, columns):
            waiting.append(batch)
            rows += batch.num_rows
            size += batch.nbytes
            if rows >= _SMALL_BATCH_ROWS or size >= _SMALL_BATCH_BYTES:
                yield _joined(waiting)
                waiting = []
                rows = size = 0
    if waiting:
        yield _joined(waiting)


def _batches(options: Scanning, part: Part, columns: Columns) -> Iterator[pa.RecordBatch]:
    for records in _selected(options, part):
        try:
            for found in records.unwrapped():
                yield from columns.of(found, broker=part.broker)
        except (BadRecord, MissingCodec) as e:
            kind = MissingCodec if isinstance(e, MissingCodec) else DataLost
            raise kind(f"{part.segment.path}, between {part.start} and {part.end}: {e}") from None


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    (joined,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return joined


def _selected(options: Scanning, part: Part) -> Iterator[Records]:
    selection = Selection(options)
    for records in _readable(options, part):
        wanted = selection.of(records)
        if options.check_crc and len(wanted):
            damaged = wanted.damaged_bodies()
            if len(damaged):
                place = int(wanted.log_offsets()[damaged[0]]) - part.segment.base
                _lose(options, part, place, "the body fails its checksum")
                wanted = wanted.filter(~np.isin(np.arange(len(wanted)), damaged))
        if len(wanted):
            yield wanted


def _readable(options: Scanning, part: Part) -> Iterator[Records]:
    """The records of a part, without what is damaged if that is allowed."""
    try:
        file = SegmentFile(part.segment)
    except FileNotFoundError:
        _lose(options, part, part.start, "the file was deleted since the query was planned")
        return
    with file:
        position: int | None = part.start
        while position is not None:
            try:
                yield from file.runs(position, part.end)
                return
            except Damaged as e:
                _lose(options, part, e.position, str(e))
                position = file.find_record(e.position + 1, part.end)


def _lose(options: Scanning, part: Part, position: int, reason: str) -> None:
    place = f"{part.segment.path}, position {position} (log offset {part.segment.base + position})"
    if options.fail_on_data_loss:
        raise DataLost(f"{place}: {reason}; set failOnDataLoss=false to go on without what is damaged")
    log.warning("%s: %s; left out", place, reason)
