"""What a task does: pull a range of a queue and give it to Spark as Arrow batches.

A range is read until the next offset reaches its end; what a filter leaves out uses up offsets too. Without a filter
every offset of the range is a message: one that is missing is a loss, however the broker gets round it. So is a
message that was put there since the range was planned: its queue was made anew.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from skylark.client.errors import UnreadableMessage
from skylark.spark.bodies import Columns, Shape
from skylark.spark.cluster import READ_GROUP, Cluster, Filter
from skylark.spark.marks import made_anew
from skylark.spark.options import Reading
from skylark.spark.positions import DataLost
from skylark.spark.pulls import Pulls
from skylark.spark.queues import Range
from skylark.spark.records import Array, Records
from skylark.wire.bodies import TAG
from skylark.wire.message import PROPERTY_TAGS, BadRecord

log = logging.getLogger(__name__)

DEFAULT_GROUP: Final = READ_GROUP

_BATCH_BYTES: Final = 4 << 20


def read_ranges(options: Reading, shape: Shape, ranges: Sequence[Range]) -> Iterator[pa.RecordBatch]:
    """Opens its own connections: it runs in a worker."""
    with (
        Cluster(options.name_server, options.timeout_s) as cluster,
        Columns(shape, options.bad_records, options) as columns,
    ):
        for part in ranges:
            try:
                for records in _matching(cluster, options, part):
                    yield from columns.of(records, broker=part.queue.broker, topic=part.queue.topic)
            except (BadRecord, UnreadableMessage) as e:
                raise type(e)(f"{part.queue}: {e}") from None


def _matching(cluster: Cluster, options: Reading, part: Range) -> Iterator[Records]:
    """The messages of the range that pass the filter."""
    import pyarrow.compute as pc  # only here, as in `records`

    filter = Filter(options.tags, options.sql_filter)
    tags = _exact_tags(filter)
    for records in _records(cluster, options, part, filter):
        if tags is not None:
            # The broker compares hashes of tags; the tags themselves are compared here.
            is_wanted = pc.is_in(records.property_values(PROPERTY_TAGS), value_set=tags)
            yield records.filter(is_wanted.to_numpy(zero_copy_only=False))
        else:
            yield records


def _exact_tags(wanted: Filter) -> pa.Array | None:
    if wanted.kind != TAG or wanted.passes_all:
        return None
    return pa.array([tag.strip() for tag in wanted.expression.split("||")])


def _records(cluster: Cluster, options: Reading, part: Range, wanted: Filter) -> Iterator[Records]:
    """The range's messages in portions of a few megabytes."""
    pulls = Pulls(cluster, options, part, wanted)
    checks = _Checks(cluster, options, part, is_whole=wanted.passes_all)
    first, left_out = part.start, 0
    for bodies in _portions(pulls):
        yield from checks.of(Records(b"".join(bodies)), first, pulls.at, pulls.left_out - left_out)
        if checks.is_over:
            return
        first, left_out = pulls.at, pulls.left_out


def _portions(pulls: Pulls) -> Iterator[list[bytes]]:
    """The bodies, several at once; the last portion may have none."""
    bodies: list[bytes] = []
    size = 0
    for body in pulls:
        bodies.append(body)
        size += len(body)
        if size >= _BATCH_BYTES:
            yield bodies
            bodies = []
            size = 0
    yield bodies


class _Checks:
    """Whether what was pulled is what the range was planned for."""

    def __init__(self, cluster: Cluster, options: Reading, part: Range, *, is_whole: bool) -> None:
        self._cluster = cluster
        self._fails = options.fail_on_data_loss
        self._part = part
        self._is_whole = is_whole
        # Of a range whose last messages are damaged the mark lies before the parts into which the range was cut.
        mark = part.mark if part.mark is not None and part.mark.offset < part.start else None
        self._is_anew = mark is not None and bool(made_anew(cluster, {part.queue: mark}))
        self.is_over = False
        """Nothing that comes belongs to the range."""

    def of(self, records: Records, first: int, end: int, left_out: int) -> Iterator[Records]:
        """The records from offset `first` to before `end`, unwrapped, if they are those of the range.

        A broker answers with as many messages as it likes; those outside of the range belong to somebody else.
        """
        end = min(end, self._part.end)
        found: list[Array] = []
        for piece in records.unwrapped():
            offsets = piece.queue_offsets().to_numpy()
            low, high = np.searchsorted(offsets, [first, end]).tolist()
            wanted = piece if high - low == len(piece) else piece.slice(low, high)
            if self._is_anew or self._is_other(wanted):
                self._lose(f"the queue was made anew since the batch was planned; its messages from offset {first} on")
                self.is_over = True
                return
            found.append(offsets[low:high])
            if len(wanted):
                yield wanted
        if self._is_whole:
            self._look_for_gaps(np.concatenate(found), first, end, left_out)

    def _look_for_gaps(self, offsets: Array, first: int, end: int, left_out: int) -> None:
        if len(offsets) + left_out < end - first and not self._cluster.is_compacted(self._part.queue):
            missing = np.setdiff1d(np.arange(first, end), offsets)
            self._lose(f"{len(missing)} of the messages from offset {missing[0]} to {missing[-1]}")

    def _is_other(self, records: Records) -> bool:
        """Whether a record was written to the log behind the mark, and has an offset that is not behind it."""
        mark = self._part.mark
        if mark is None:
            return False
        offsets = records.queue_offsets().to_numpy()
        count = int(np.searchsorted(offsets, mark.offset, side="right"))
        if not count:
            return False
        log_offset = int(records.log_offsets()[count - 1])
        if offsets[count - 1] != mark.offset:
            return log_offset > mark.log_offset
        return (log_offset, int(records.store_times_ms()[count - 1])) != (mark.log_offset, mark.stored_ms)

    def _lose(self, what: str) -> None:
        if self._fails:
            raise DataLost(
                f"{self._part.queue}: {what} are not there: they were deleted, or are damaged; set "
                "failOnDataLoss=false to go on without them"
            )
        log.warning("%s: %s are not there and are left out", self._part.queue, what)
