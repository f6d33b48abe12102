"""What a task does: pull a range of a queue and give it to Spark as Arrow batches.

A range is read until the next offset reaches its end; what a filter leaves out uses up offsets too. Without a filter
the offsets of the next pulls are known in advance, so several are on their way at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from skylark.client.errors import BrokerError
from skylark.net.blocking import BlockingConnection
from skylark.spark.cluster import Cluster, Filter, pull_request
from skylark.spark.columns import record_batch
from skylark.spark.options import Reading
from skylark.spark.positions import DataLost
from skylark.spark.queues import Range
from skylark.spark.records import Records
from skylark.wire.bodies import TAG
from skylark.wire.codes import ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import PROPERTY_TAGS

DEFAULT_GROUP: Final = "skylark-spark"
"""Under which pulls run when the user names no group; nothing is committed to it."""

_AHEAD: Final = 8  # pulls on their way at once
_BATCH_BYTES: Final = 4 << 20
_NOTHING_HERE: Final = frozenset((ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY))


def read_ranges(options: Reading, ranges: Sequence[Range], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Opens its own connections: it runs in a worker."""
    wanted = Filter(options.tags, options.sql_filter)
    tags = _exact_tags(wanted)
    with Cluster(options.name_server, options.timeout_s) as cluster:
        for part in ranges:
            for records in _records(cluster, options, part, wanted):
                if tags is not None:
                    # The broker compares hashes of tags; the tags themselves are compared here.
                    matching = pc.is_in(records.property_values(PROPERTY_TAGS), value_set=tags)
                    records = records.filter(matching.to_numpy(zero_copy_only=False))
                if len(records):
                    yield record_batch(records, names, broker=part.queue.broker, topic=part.queue.topic)


def _exact_tags(wanted: Filter) -> pa.Array | None:
    if wanted.kind != TAG or wanted.passes_all:
        return None
    return pa.array([tag.strip() for tag in wanted.expression.split("||")])


def _records(cluster: Cluster, options: Reading, part: Range, wanted: Filter) -> Iterator[Records]:
    """The range's messages in portions of a few megabytes."""
    bodies: list[bytes] = []
    size = 0
    for body in _Pulls(cluster, options, part, wanted):
        bodies.append(body)
        size += len(body)
        if size >= _BATCH_BYTES:
            yield _within(Records(b"".join(bodies)), part)
            bodies.clear()
            size = 0
    if bodies:
        yield _within(Records(b"".join(bodies)), part)


def _within(records: Records, part: Range) -> Records:
    """A broker answers with as many messages as it likes; those at and behind the end belong to somebody else."""
    offsets = records.queue_offsets().to_numpy()
    end = int(np.searchsorted(offsets, part.end))
    return records if end == len(records) else records.slice(0, end)


class _Pulls:
    """The bodies of the pulls that cover a range, in order."""

    def __init__(self, cluster: Cluster, options: Reading, part: Range, wanted: Filter) -> None:
        self._cluster = cluster
        self._options = options
        self._part = part
        self._wanted = wanted
        self._at = part.start
        self._step = options.pull_batch_size
        self._ahead = _AHEAD if wanted.passes_all else 1
        self._posted: deque[tuple[int, int]] = deque()  # offset asked for, number of the request
        self._connection: BlockingConnection | None = None

    def __iter__(self) -> Iterator[bytes]:
        while self._at < self._part.end:
            reply = self._cluster.retrying(self._next)
            if reply.code == ResponseCode.SUCCESS:
                self._advance(reply)
                yield reply.body
            elif reply.code in _NOTHING_HERE and int(reply.fields["nextBeginOffset"]) > self._at:
                self._advance(reply)
            elif reply.code in _NOTHING_HERE or reply.code == ResponseCode.PULL_OFFSET_MOVED:
                self._lose(reply)
            else:
                raise BrokerError(reply.code, reply.remark, self._part.queue.broker)

    def _next(self) -> Frame:
        """The reply for the current offset. After a broken connection everything is asked for again."""
        try:
            if self._connection is None:
                self._posted.clear()
                self._connection = self._cluster.connect(self._part.queue.broker, self._part.queue.topic)
            self._post()
            _, number = self._posted.popleft()
            return self._connection.take(number)
        except OSError:
            self._connection = None
            raise

    def _post(self) -> None:
        assert self._connection is not None
        if self._posted and self._posted[0][0] != self._at:
            # The last reply was shorter than expected: what was asked for in advance does not follow it.
            for _, number in self._posted:
                self._connection.take(number)
            self._posted.clear()
        offset = self._posted[-1][0] + self._step if self._posted else self._at
        while len(self._posted) < self._ahead and offset < self._part.end:
            count = min(self._step, self._part.end - offset)
            request = pull_request(self._options.group or DEFAULT_GROUP, self._part.queue, offset, count, self._wanted)
            self._posted.append((offset, self._connection.post(request)))
            offset += count

    def _advance(self, reply: Frame) -> None:
        next_offset = int(reply.fields["nextBeginOffset"])
        if self._wanted.passes_all and reply.code == ResponseCode.SUCCESS:
            # Large messages: a reply has room for fewer than were asked for, and so will the next ones.
            self._step = min(self._options.pull_batch_size, max(1, next_offset - self._at))
        self._at = next_offset

    def _lose(self, reply: Frame) -> None:
        part, low = self._part, int(reply.fields.get("minOffset", 0))
        high = int(reply.fields.get("maxOffset", 0))
        if self._options.fail_on_data_loss:
            raise DataLost(
                f"{part.queue}: offset {self._at} is to be read, but the queue holds {low} to {high}; "
                "set failOnDataLoss=false to go on without what is missing"
            )
        self._at = low if low > self._at else part.end
