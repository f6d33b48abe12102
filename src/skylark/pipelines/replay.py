"""An archive sent to a topic again, in the order in which its messages were stored.

Spark sorts; the driver sends, one step after the other (see `resending`). The messages of one original queue go to one
queue of the target, and a request to a queue waits for the acknowledgement of the one before: so they stay in order.
Between queues the order is that of the store times, as good as clocks are. The time of a message counts as that of
any before it in its queue if that was later: a clock that was put back reorders nothing.

    {"origin": {"path": ..., "topic": "orders", ...}, "run": "9f0c...", "queues": [["broker-a", 0, 1200], ...]}

The checkpoint, a file, says for each original queue the offset to go on from; its number in the list is its queue in
the target. The unique ids of the messages come from the run and their place, and are the same when a step is repeated.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from pyspark.sql import DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F
from rich.console import Console

from skylark.pipelines.errors import PipelineError
from skylark.pipelines.lake import Lake
from skylark.pipelines.resending import TIMEOUT_S, Resent, outgoing, resend
from skylark.pipelines.span import ALWAYS, Span
from skylark.spark.cluster import Cluster
from skylark.spark.rows import Outgoing
from skylark.spark.sink import unique_keys

_PRODUCER: Final = "skylark-replay"
_PORTION_ROWS: Final = 50_000
_PORTION_BYTES: Final = 64 << 20
_COLUMNS: Final = ("broker", "queueId", "offset", "body", "properties")


class Origin(msgspec.Struct, frozen=True):
    """What is replayed, and where to: by it a checkpoint is known."""

    path: str
    topic: str
    name_server: str
    target: str
    span: Span


class Progress(msgspec.Struct):
    """How far a replay came."""

    origin: Origin
    run: str
    queues: list[tuple[str, int, int]] = []


class Survey(msgspec.Struct, frozen=True):
    """What is left to send."""

    messages: int
    size_bytes: int
    queues: list[tuple[str, int]]

    @property
    def portions(self) -> int:
        """In so many the messages come to the driver, which has to hold one."""
        return max(1, self.messages // _PORTION_ROWS, self.size_bytes // _PORTION_BYTES)


def replay(
    spark: SparkSession,
    path: str,
    name_server: str,
    target: str,
    *,
    checkpoint: Path | None = None,
    topic: str | None = None,
    span: Span = ALWAYS,
    rate: int | None = None,
    restart: bool = False,
    stop: threading.Event | None = None,
    console: Console | None = None,
) -> Resent:
    """Sends what the archive has and the checkpoint does not know as sent. Raises PipelineError."""
    lake = Lake(spark, path)
    origin = Origin(lake.root, lake.choose(topic), name_server, target, span)
    place = Checkpoint(checkpoint or Path(f"checkpoints/replay-{origin.topic}-to-{target}.json"))
    progress = place.read(origin, restart=restart)
    left = _left(lake.messages(origin.topic, span), progress)
    survey = _survey(left)
    sender = _Sender(place, progress, survey)
    with Cluster(name_server, TIMEOUT_S) as cluster:
        return resend(
            _sorted(left, survey.portions),
            sender.message,
            sender.note,
            cluster=cluster,
            group=_PRODUCER,
            title=f"{origin.topic} of {path} to {target}",
            total=survey.messages,
            rate=rate,
            stop=stop,
            console=console,
        )


class Checkpoint:
    """The file that says how far a replay came."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, origin: Origin, *, restart: bool) -> Progress:
        """Raises PipelineError for a file that is not of this replay."""
        if restart or not self._path.exists():
            return Progress(origin, uuid.uuid4().hex)
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=Progress)
        except (OSError, msgspec.DecodeError) as e:
            raise PipelineError(f"{self._path} is no checkpoint of a replay ({e}): name another file") from e
        if found.origin != origin:
            raise PipelineError(
                f"{self._path} belongs to a replay of other messages or to another topic: {_told(found.origin)}; "
                "begin anew with --restart, or name another file with --checkpoint"
            )
        return found

    def write(self, progress: Progress) -> None:
        """Whoever reads it finds all of the old text or all of the new."""
        aside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(msgspec.json.encode(progress))
            aside.replace(self._path)
        except OSError as e:
            raise PipelineError(f"the checkpoint {self._path} can't be written: {e.strerror}") from e


class _Sender:
    """Makes the messages, and notes those that are sent."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress, survey: Survey) -> None:
        self._checkpoint = checkpoint
        self._progress = progress
        known = [(broker, queue_id) for broker, queue_id, _ in progress.queues]
        new = [queue for queue in survey.queues if queue not in known]
        progress.queues += [(*queue, 0) for queue in new]
        self._numbers = {queue: number for number, queue in enumerate([*known, *new])}
        self._keys = {queue: unique_keys(progress.run, queue[0], str(queue[1])) for queue in self._numbers}
        checkpoint.write(progress)

    def message(self, row: Row) -> Outgoing:
        queue = (row.broker, row.queueId)
        return outgoing(
            self._progress.origin.target,
            bytes(row.body),
            row.properties,
            unique_key=self._keys[queue].of(row.offset, 1)[0],
            ordering_key=self._numbers[queue],
        )

    def note(self, rows: Sequence[Row]) -> None:
        for row in rows:
            queue = (row.broker, row.queueId)
            self._progress.queues[self._numbers[queue]] = (*queue, row.offset + 1)
        self._checkpoint.write(self._progress)


def _left(messages: DataFrame, progress: Progress) -> DataFrame:
    """Without what was sent already."""
    for broker, queue_id, following in progress.queues:
        is_of_queue = (F.col("broker") == broker) & (F.col("queueId") == queue_id)
        messages = messages.where(~is_of_queue | (F.col("offset") >= following))
    return messages


def _survey(left: DataFrame) -> Survey:
    rows = left.groupBy("broker", "queueId").agg(F.count("*").alias("rows"), F.sum(F.length("body")).alias("bytes"))
    found = sorted(rows.collect())
    return Survey(
        sum(row.rows for row in found), sum(row.bytes for row in found), [(row.broker, row.queueId) for row in found]
    )


def _sorted(left: DataFrame, portions: int) -> Iterator[Row]:
    in_queue = Window.partitionBy("broker", "queueId").orderBy("offset")
    order = ("time", "broker", "queueId", "offset")
    timed = left.select(*_COLUMNS, F.max("storeTimestamp").over(in_queue).alias("time"))
    in_order = timed.repartitionByRange(portions, *order).sortWithinPartitions(*order).drop("time")
    return in_order.toLocalIterator(prefetchPartitions=True)


def _told(origin: Origin) -> str:
    times = [
        f" {word} {moment:%Y-%m-%dT%H:%M:%SZ}"
        for word, moment in (("from", origin.span.begin), ("to", origin.span.end))
        if moment is not None
    ]
    return f"topic {origin.topic} of {origin.path}{''.join(times)}, to {origin.target} at {origin.name_server}"
