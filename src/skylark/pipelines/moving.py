"""Control over where a stopped stream goes on: what is shown, and plans that move its position.

A plan is decided here and shown before anything is written (`checkpoints.apply`). Two rules keep rows from being lost
or doubled unseen. A batch that was planned and did not finish may be known to its sink by its number, so it is not
planned anew unless the user says so. And a skip never passes over a message that was not named: if the batch begins
before it, that batch is made to end there first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Final, Literal

import msgspec

from skylark.client.errors import RocketMQError, RouteNotFound
from skylark.pipelines import spec
from skylark.pipelines.checkpoints import Change, Checkpoint, local_path, moved, shortened
from skylark.pipelines.errors import PipelineError
from skylark.pipelines.span import span
from skylark.spark.cluster import Cluster
from skylark.spark.options import BadOption, per_queue
from skylark.spark.queues import EARLIEST, LATEST, Offsets, Queue

_TIMEOUT_S: Final = 10.0
_LARGEST: Final = 2**63 - 1


class Stream(msgspec.Struct, frozen=True):
    """A stopped stream: its checkpoint, and what the file says that declares it, if there is one."""

    checkpoint: Checkpoint
    declared: spec.Declared | None

    @property
    def name_server(self) -> str | None:
        if self.declared is not None and self.declared.pipeline.source.format == "rocketmq":
            options = spec.options_of(self.declared, "source")
            return next((value for name, value in options.items() if name.lower() == "nameserver"), None)
        return self.checkpoint.name_server


class Place(msgspec.Struct, frozen=True, rename="camel"):
    """Where a stream is in one queue. `min` and `max` are None while its broker is away or its topic is gone."""

    topic: str
    broker: str
    queue_id: int
    offset: int
    planned: int | None
    min: int | None
    max: int | None

    @property
    def lag(self) -> int | None:
        return None if self.max is None else max(self.max - self.offset, 0)


class Shown(msgspec.Struct, frozen=True, rename="camel"):
    checkpoint: str
    finished_batch: int | None
    planned_batch: int | None
    queues: list[Place]


class Move(msgspec.Struct, frozen=True):
    """One queue: where the stream is, and where it goes on."""

    queue: Queue
    before: int
    after: int


class Plan(msgspec.Struct, frozen=True):
    """What is to be changed, with what the user has to know. Without `change` there is nothing to do."""

    moves: tuple[Move, ...]
    remarks: tuple[str, ...]
    change: Change | None


class Wanted(msgspec.Struct, frozen=True):
    """Which queues are meant; None leaves a part open."""

    topic: str | None = None
    broker: str | None = None
    queue_id: int | None = None

    def __contains__(self, queue: Queue) -> bool:
        return (
            self.topic in (None, queue.topic)
            and self.broker in (None, queue.broker)
            and self.queue_id in (None, queue.queue_id)
        )

    def __str__(self) -> str:
        parts = (("topic", self.topic), ("broker", self.broker), ("queue", self.queue_id))
        return ", ".join(f"{name} {value}" for name, value in parts if value is not None) or "every queue"


Ends = dict[Queue, tuple[int, int]]
"""The first offset of each queue, and the one behind its last."""

Target = Literal["earliest", "latest"] | int | datetime | Mapping[Queue, int]


def stream(path: Path) -> Stream:
    """That of a pipeline's file, or of a checkpoint's directory. Raises PipelineError."""
    if path.is_dir():
        return Stream(Checkpoint.read(path), None)
    declared = spec.read(path)
    directory = local_path(declared.checkpoint)
    if directory is None:
        raise PipelineError(
            f"the checkpoint {declared.checkpoint} is not on this machine: copy it here, change the copy, and put its "
            "directory offsets back"
        )
    return Stream(Checkpoint.read(directory), declared)


def target(text: str) -> Target:
    """What `--to` says: earliest, latest, an offset, JSON per queue, or a time. Raises PipelineError."""
    text = text.strip()
    if text in ("earliest", "latest"):
        return "earliest" if text == "earliest" else "latest"
    if text.isdecimal() and int(text) <= _LARGEST:
        return int(text)
    if text.startswith("{"):
        try:
            return per_queue(text, "--to")
        except BadOption as e:
            raise PipelineError(str(e).removeprefix("option ")) from None
    try:
        found = span(text, None).begin
    except PipelineError:
        found = None
    if found is None:
        raise PipelineError(
            f"--to {text!r}: expected earliest, latest, an offset, a time in UTC such as 2026-01-31T12:00, or JSON per "
            'queue such as {"orders":{"broker-a":{"0":23,"1":-2}}} (-2 earliest, -1 latest)'
        )
    return found


def effect(move: Move) -> str:
    """In words."""
    if move.after == move.before:
        return f"stays at {move.before}"
    count = abs(move.after - move.before)
    what = "passed over" if move.after > move.before else "read again"
    return f"from {move.before} to {move.after}, {count:,} {'offset is' if count == 1 else 'offsets are'} {what}"


def show(stream: Stream, ends: Ends) -> Shown:
    checkpoint = stream.checkpoint
    planned = {queue: offset for found in checkpoint.planned_ends().values() for queue, offset in found.items()}
    return Shown(
        str(checkpoint.directory),
        checkpoint.finished.number if checkpoint.finished else None,
        checkpoint.planned.number if checkpoint.planned else None,
        [
            Place(queue.topic, queue.broker, queue.queue_id, offset, planned.get(queue), *ends.get(queue, (None, None)))
            for found in checkpoint.positions().values()
            for queue, offset in sorted(found.items())
        ],
    )


def ends_of(name_server: str, queues: Iterable[Queue]) -> Ends:
    """Of the queues that are there now. Raises PipelineError if a server can't be reached."""
    asked = set(queues)
    there: set[Queue] = set()
    try:
        with Cluster(name_server, _TIMEOUT_S) as cluster:
            for topic in sorted({queue.topic for queue in asked}):
                try:
                    there |= asked & set(cluster.queues(topic))
                except RouteNotFound:
                    continue
            low, high = cluster.min_offsets(sorted(there)), cluster.max_offsets(sorted(there))
    except RocketMQError as e:
        raise PipelineError(str(e)) from e
    return {queue: (low[queue], high[queue]) for queue in there}


def offsets_at(name_server: str, times_ms: Mapping[Queue, int]) -> Offsets:
    """The first offset stored at or after each time. Raises PipelineError."""
    try:
        with Cluster(name_server, _TIMEOUT_S) as cluster:
            return cluster.offsets_at(times_ms)
    except RocketMQError as e:
        raise PipelineError(str(e)) from e


def chosen(stream: Stream, wanted: Wanted) -> tuple[int, Offsets]:
    """The source that has the queues, and where it is in them. Raises PipelineError."""
    found: dict[int, Offsets] = {}
    for source, offsets in stream.checkpoint.positions().items():
        part = {queue: offset for queue, offset in offsets.items() if queue in wanted}
        if part:
            found[source] = part
    if not found and stream.checkpoint.finished is None:
        raise PipelineError(
            f"{stream.checkpoint.directory} does not say where its first batch, which did not finish, begins: start "
            "with a new checkpoint, and say where to begin with the option startingOffsets"
        )
    if not found:
        raise PipelineError(f"the stream has no queue of {wanted}; `skylark pipeline offsets show` lists them")
    if len(found) > 1:
        raise PipelineError(f"{wanted}: several sources of the stream read that; name a topic that only one reads")
    return found.popitem()


def set_to(
    stream: Stream,
    wanted: Wanted,
    to: Target,
    ends: Ends,
    at_time: Callable[[Mapping[Queue, int]], Mapping[Queue, int]],
    *,
    replan: bool = False,
) -> Plan:
    """The stream goes on from `to`. Raises PipelineError."""
    source, offsets = chosen(stream, wanted)
    if isinstance(to, Mapping):
        unknown = sorted(queue for queue in to if queue not in offsets)
        if unknown:
            raise PipelineError(f"--to: the stream does not read {unknown[0]}, or it is not among {wanted}")
        offsets = {queue: offsets[queue] for queue in to}
    if isinstance(to, int) and len(offsets) > 1:
        raise PipelineError(f"--to {to} is for one queue, and {wanted} are {len(offsets)}: name it")
    _expect_there(offsets, ends)
    if isinstance(to, datetime):
        found = dict(at_time(dict.fromkeys(offsets, round(to.timestamp() * 1000))))
    else:
        found = {queue: _numbered(queue, _named(to, queue), ends[queue]) for queue in offsets}
    return _moving(stream, source, {queue: Move(queue, offsets[queue], found[queue]) for queue in offsets}, replan)


def skip_count(stream: Stream, wanted: Wanted, count: int, ends: Ends, *, replan: bool = False) -> Plan:
    """The stream passes over so many messages of each queue. Raises PipelineError."""
    source, offsets = chosen(stream, wanted)
    _expect_there(offsets, ends)
    moves = {}
    for queue, offset in offsets.items():
        low, high = ends[queue]
        moves[queue] = Move(queue, offset, max(offset, min(max(offset, low) + count, high)))
    return _moving(stream, source, moves, replan)


def skip_message(stream: Stream, wanted: Wanted, offset: int, ends: Ends) -> Plan:
    """The stream passes over the one message, and over nothing before it. Raises PipelineError."""
    source, offsets = chosen(stream, wanted)
    if len(offsets) > 1:
        raise PipelineError(f"a message is in one queue, and {wanted} are {len(offsets)}: name topic, broker and queue")
    ((queue, before),) = offsets.items()
    _expect_there(offsets, ends)
    if not offset < ends[queue][1]:
        raise PipelineError(f"{queue} ends at {ends[queue][1]}: there is no message at offset {offset}")
    if offset < before:
        raise PipelineError(f"{queue}: the stream is at {before} already, behind the message at offset {offset}")
    # What lies before it and expired is not there to be read.
    if offset == before or offset <= ends[queue][0]:
        return _moving(stream, source, {queue: Move(queue, before, offset + 1)}, replan=True)
    checkpoint = stream.checkpoint
    planned = checkpoint.planned_ends().get(source, {}).get(queue, before)
    if checkpoint.planned is None or planned <= offset:
        raise PipelineError(
            f"{queue}: the stream is at {before} and has no batch planned with the message at offset {offset}: run it, "
            "and skip the message when it fails by it"
        )
    _refuse_done(stream)
    number = checkpoint.planned.number
    return Plan(
        (),
        (
            f"batch {number}, which did not finish, begins at {before}; it ends at {offset} "
            f"instead of {planned}, before the message",
            f"run the stream: it finishes batch {number} and fails by the message again, as the first of a batch; "
            "then say this once more, and the message is skipped",
        ),
        shortened(checkpoint, source, queue, offset),
    )


def _moving(stream: Stream, source: int, moves: Mapping[Queue, Move], replan: bool) -> Plan:
    changed = {queue: move.after for queue, move in moves.items() if move.after != move.before}
    plan = tuple(moves[queue] for queue in sorted(moves))
    if not changed:
        return Plan(plan, ("the stream is there already",), None)
    checkpoint = stream.checkpoint
    remarks = []
    if checkpoint.planned is not None:
        number = checkpoint.planned.number
        _refuse_done(stream)
        if not replan:
            raise PipelineError(
                f"batch {number} was planned and did not finish, and its sink may know it by its number: run the "
                "stream first, until that batch is done; if it can't be done, say --replan"
            )
        remarks.append(f"batch {number} was planned and did not finish: it is planned anew, under the same number")
    else:
        assert checkpoint.finished is not None
        remarks.append(f"batch {checkpoint.finished.number} is the last one that finished; the next begins there")
    return Plan(plan, tuple(remarks), moved(checkpoint, source, changed))


def _refuse_done(stream: Stream) -> None:
    """A batch that its files have must not come again with other rows: they would be passed over."""
    checkpoint = stream.checkpoint
    assert checkpoint.planned is not None
    number = checkpoint.planned.number
    if any(path.exists() for path in _signs(stream, number)):
        raise PipelineError(
            f"the sink has batch {number} already, and only Spark does not know yet: run the stream once, which notes "
            "that and reads nothing again; then change its position"
        )


def _signs(stream: Stream, number: int) -> list[Path]:
    """Files that are there when the sink has the batch. An archive compares what comes again with what it has."""
    declared = stream.declared
    if declared is None or declared.pipeline.sink.path is None:
        return []
    path = local_path(declared.located(declared.pipeline.sink.path))
    return [] if path is None else [path / "_spark_metadata" / name for name in (str(number), f"{number}.compact")]


def _expect_there(queues: Iterable[Queue], ends: Ends) -> None:
    missing = sorted(queue for queue in queues if queue not in ends)
    if missing:
        raise PipelineError(f"{missing[0]} is not there now: what it holds is not known, so its position stays")


def _named(to: Target, queue: Queue) -> int:
    if to == "earliest":
        return EARLIEST
    if to == "latest":
        return LATEST
    if isinstance(to, Mapping):
        return to[queue]
    assert isinstance(to, int)
    return to


def _numbered(queue: Queue, offset: int, ends: tuple[int, int]) -> int:
    if offset in (EARLIEST, LATEST):
        return ends[0 if offset == EARLIEST else 1]
    if not ends[0] <= offset <= ends[1]:
        raise PipelineError(f"{queue} has the offsets {ends[0]} to {ends[1]}: the stream can't go on from {offset}")
    return offset


def queues_of(stream: Stream) -> list[Queue]:
    return sorted({queue for offsets in stream.checkpoint.positions().values() for queue in offsets})
