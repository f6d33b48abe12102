"""An archive sent to a topic again, in the order in which its messages were stored.

Spark sorts; the driver sends, one step after the other (see `resending`). The messages of one original queue go to one
queue of the target, and a request to a queue waits for the acknowledgement of the one before: so they stay in order.
Between queues the order is that of the store times, as good as clocks are. The time of a message counts as that of
any before it in its queue if that was later: a clock that was put back reorders nothing.

A topic that was made anew begins at offset 0 again; the messages of its later life come after those before (`lives`).

    {"origin": {"path": ..., "topic": "orders", ...}, "run": "9f0c...", "queues": [["broker-a", 0, 1200], ...],
     "times": [[1767225600000, 1767229200000], ...]}

The checkpoint, a file, says for each original queue the offset to go on from, and when the first message of the life
that this is in was stored, and the last one that was sent. The number of a queue in the list is its queue in the
target; queues without a message have one too. The unique ids of the messages come from the run and their place, and
are the same when a step is repeated.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from pyspark.sql import DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F
from rich.console import Console

from skylark.pipelines.errors import PipelineError
from skylark.pipelines.lake import Lake
from skylark.pipelines.lives import FIRST, Life, Lives
from skylark.pipelines.resending import TIMEOUT_S, Resent, outgoing, resend
from skylark.pipelines.span import ALWAYS, Span
from skylark.spark.cluster import Cluster
from skylark.spark.rows import Outgoing
from skylark.spark.sink import UniqueKeys, unique_keys

_PRODUCER: Final = "skylark-replay"
_PORTION_ROWS: Final = 50_000
_PORTION_BYTES: Final = 64 << 20
_COLUMNS: Final = ("broker", "queueId", "life", "offset", "body", "properties")


class Origin(msgspec.Struct, frozen=True):
    """What is replayed, and where to: by it a checkpoint is known."""

    path: str
    topic: str
    name_server: str
    target: str
    span: Span


class Place(msgspec.Struct, frozen=True):
    """The next message of a queue to send: in which of its lives, and from which offset on."""

    life: int
    offset: int


class Progress(msgspec.Struct):
    """How far a replay came."""

    origin: Origin
    run: str
    queues: list[tuple[str, int, int]] = []
    times: list[tuple[int, int]] = []
    """For each of the queues; earlier versions had none."""

    def place(self, queue: tuple[str, int], lives: list[Life]) -> Place:
        """Where the queue is. Raises PipelineError if that can't be told."""
        for number, (broker, queue_id, following) in enumerate(self.queues):
            if (broker, queue_id) == queue and following:
                times = self.times[number] if number < len(self.times) else None
                return _place(lives, following, times, f"queue {queue_id} at broker {broker}")
        return Place(FIRST, 0)


class Survey(msgspec.Struct, frozen=True):
    """What is left to send."""

    messages: int
    size_bytes: int

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
    messages, lives = lake.in_lives(origin.topic, span)
    left = _left(messages, progress, lives)
    survey = _survey(left)
    sender = _Sender(place, progress, lives, lake.queues(origin.topic))
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

    def __init__(
        self, checkpoint: Checkpoint, progress: Progress, lives: Lives, others: Iterable[tuple[str, int]]
    ) -> None:
        self._checkpoint = checkpoint
        self._progress = progress
        self._lives = lives
        known = [(broker, queue_id) for broker, queue_id, _ in progress.queues]
        new = [queue for queue in all_queues([*lives, *others]) if queue not in known]
        progress.queues += [(*queue, 0) for queue in new]
        progress.times += [(0, 0)] * (len(progress.queues) - len(progress.times))
        self._numbers = {queue: number for number, queue in enumerate([*known, *new])}
        self._keys: dict[tuple[str, int, int], UniqueKeys] = {}
        checkpoint.write(progress)

    def message(self, row: Row) -> Outgoing:
        queue = (row.broker, row.queueId)
        return outgoing(
            self._progress.origin.target,
            bytes(row.body),
            row.properties,
            unique_key=self._unique_keys(*queue, row.life).of(row.offset, 1)[0],
            ordering_key=self._numbers[queue],
        )

    def note(self, rows: Sequence[Row]) -> None:
        for row in rows:
            queue = (row.broker, row.queueId)
            number = self._numbers[queue]
            self._progress.queues[number] = (*queue, row.offset + 1)
            self._progress.times[number] = (self._lives[queue][row.life].from_ms, row.stored_ms)
        self._checkpoint.write(self._progress)

    def _unique_keys(self, broker: str, queue_id: int, life: int) -> UniqueKeys:
        keys = self._keys.get((broker, queue_id, life))
        if keys is None:
            began = [] if life == FIRST else [str(self._lives[broker, queue_id][life].from_ms)]
            keys = self._keys[broker, queue_id, life] = unique_keys(self._progress.run, broker, str(queue_id), *began)
        return keys


def all_queues(found: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """With those between, which had no message: brokers number their queues from 0 on."""
    counts: dict[str, int] = {}
    for broker, queue_id in found:
        counts[broker] = max(counts.get(broker, 0), queue_id + 1)
    return [(broker, queue_id) for broker in sorted(counts) for queue_id in range(counts[broker])]


def _place(lives: list[Life], following: int, times: tuple[int, int] | None, queue: str) -> Place:
    if times is None:
        if len(lives) > 1:
            raise PipelineError(
                f"the topic of {queue} was made anew, and the checkpoint, of an earlier version, does not tell whether "
                "it is before or after that: begin anew with --restart, or with another --checkpoint and --from"
            )
        return Place(FIRST, following)
    began_ms, last_ms = times
    for number, life in enumerate(lives):
        if life.from_ms == began_ms:
            return Place(number, following)
    # Old files may have been removed: then its life seems to have begun later.
    begun = [number for number, life in enumerate(lives) if life.from_ms <= last_ms]
    return Place(begun[-1], following) if begun else Place(FIRST, 0)


def _left(messages: DataFrame, progress: Progress, lives: Lives) -> DataFrame:
    """Without what was sent already."""
    for (broker, queue_id), of_queue in lives.items():
        place = progress.place((broker, queue_id), of_queue)
        if place != Place(FIRST, 0):
            is_of_queue = (F.col("broker") == broker) & (F.col("queueId") == queue_id)
            is_left = (F.col("life") > place.life) | (F.col("life") == place.life) & (F.col("offset") >= place.offset)
            messages = messages.where(~is_of_queue | is_left)
    return messages


def _survey(left: DataFrame) -> Survey:
    (found,) = left.agg(
        F.count("*").alias("rows"), F.coalesce(F.sum(F.length("body")), F.lit(0)).alias("bytes")
    ).collect()
    return Survey(found.rows, found.bytes)


def _sorted(left: DataFrame, portions: int) -> Iterator[Row]:
    in_queue = Window.partitionBy("broker", "queueId").orderBy("life", "offset")
    order = ("time", "broker", "queueId", "life", "offset")
    stored_ms = F.unix_millis("storeTimestamp").alias("stored_ms")
    timed = left.select(*_COLUMNS, stored_ms, F.max("storeTimestamp").over(in_queue).alias("time"))
    in_order = timed.repartitionByRange(portions, *order).sortWithinPartitions(*order).drop("time")
    return in_order.toLocalIterator(prefetchPartitions=True)


def _told(origin: Origin) -> str:
    times = [
        f" {word} {moment:%Y-%m-%dT%H:%M:%SZ}"
        for word, moment in (("from", origin.span.begin), ("to", origin.span.end))
        if moment is not None
    ]
    return f"topic {origin.topic} of {origin.path}{''.join(times)}, to {origin.target} at {origin.name_server}"
