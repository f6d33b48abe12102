"""A stream's position in Spark's checkpoint, on this machine: read, changed, and guarded against two at once.

    offsets/N    `v1`, a line of settings, then a line for each source: where batch N ends
    commits/N    batch N is finished

Spark goes on from the newest batch. If it is finished, the next one begins where it ended. If it is only planned, it
runs again: from where the batch before ended to where it was planned to end. Our sources' lines are JSON objects:
`o` is topic -> broker -> queue -> offset, `m` has marks and `b` other beginnings of queues, `f` is where it all began.
A change adds `h`: where the stream was before in the queues that were moved, for the archive, which looks for gaps.

A change never makes a batch: a sink may count them (Spark's files), and state has one version for each. The end of the
last finished batch is changed instead, which Spark does not run again. Spark itself holds no lock on a checkpoint;
Skylark's own runs do.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from skylark.pipelines.errors import PipelineError
from skylark.spark.queues import Offsets, Queue, flat, from_spark

log = logging.getLogger(__name__)

LOCK: Final = "skylark.lock"
SINK: Final = "skylark.sink"
BACKUPS: Final = "backups"
_VERSION: Final = "v1"
_BEFORE_SOURCES: Final = 2  # lines
_MAX_FILE_BYTES: Final = 64 << 20


class Batch(msgspec.Struct, frozen=True):
    """A batch as it was planned: its number, and where it ends for each source of ours, by the source's index."""

    number: int
    lines: tuple[str, ...]

    @property
    def ends(self) -> dict[int, dict[str, Any]]:
        found = {}
        for index, line in enumerate(self.lines[_BEFORE_SOURCES:]):
            stored = _stored(line)
            if stored is not None:
                found[index] = stored
        return found

    def with_end(self, source: int, end: Mapping[str, Any]) -> Batch:
        lines = list(self.lines)
        lines[_BEFORE_SOURCES + source] = json.dumps(end)  # as pyspark writes it: Spark compares texts
        return Batch(self.number, tuple(lines))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


class Checkpoint(msgspec.Struct, frozen=True):
    """What the directory held when it was read. At least one of `finished` and `planned` is there."""

    directory: Path
    finished: Batch | None
    planned: Batch | None
    seen: frozenset[tuple[str, int, int]]  # the files, their times and sizes

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Raises PipelineError."""
        offsets, commits = _numbers(directory / "offsets"), _numbers(directory / "commits")
        if not offsets:
            what = "has no batch yet" if (directory / "metadata").exists() else "is no checkpoint of a Spark stream"
            raise PipelineError(f"{directory} {what}: there is no position to show or to change")
        newest = max(offsets)
        finished = max(commits, default=-1)
        if finished not in (newest, newest - 1) or (newest > 0 and newest - 1 not in offsets):
            raise PipelineError(
                f"{directory} has batch {newest} planned and batch {finished} finished: Spark does not go on from "
                "that; put a backup of it back"
            )
        batch = _read(directory, newest)
        if finished == newest:
            return cls(directory, batch, None, _seen(directory))
        before = _read(directory, newest - 1) if newest else None
        return cls(directory, before, batch, _seen(directory))

    @property
    def name_server(self) -> str | None:
        """The one that progress is committed at, if it is."""
        newest = self.planned or self.finished
        assert newest is not None
        return next((end["n"] for end in newest.ends.values() if "n" in end), None)

    def positions(self) -> dict[int, Offsets]:
        """Where each source of ours reads on, also if that is in the middle of a planned batch that comes again."""
        if self.planned is None:
            assert self.finished is not None
            return {source: from_spark(end) for source, end in self.finished.ends.items()}
        found = {}
        for source, end in self.planned.ends.items():
            from_spark(end)  # checks the version
            before = self.finished.ends.get(source) if self.finished is not None else None
            begin = flat(end.get("f", {})) if before is None else from_spark(before)
            found[source] = {**begin, **flat(end.get("b", {}))}
        return found

    def planned_ends(self) -> dict[int, Offsets]:
        """Where the planned batch ends that comes again; empty if there is none."""
        return {source: from_spark(end) for source, end in self.planned.ends.items()} if self.planned else {}

    @property
    def written(self) -> datetime:
        """When the stream wrote to it last."""
        return datetime.fromtimestamp(max(time_ns for _, time_ns, _ in self.seen) / 1e9, UTC)

    def is_as_read(self) -> bool:
        return _seen(self.directory) == self.seen


class Change(msgspec.Struct, frozen=True):
    """Batches that are to be written anew, and the number of a planned one that is to be forgotten."""

    written: tuple[Batch, ...]
    forgotten: int | None = None


def moved(checkpoint: Checkpoint, source: int, offsets: Offsets) -> Change:
    """The stream goes on from these offsets; a planned batch is planned anew."""
    if checkpoint.finished is not None:
        end = moved_end(checkpoint.finished.ends[source], offsets)
        planned = checkpoint.planned
        return Change((checkpoint.finished.with_end(source, end),), planned.number if planned else None)
    assert checkpoint.planned is not None
    # There is no batch before it whose end could be changed: it stays planned, and reads nothing of these queues.
    end = _placed(checkpoint.planned.ends[source], offsets, ("m", "b"))
    for queue, offset in offsets.items():
        _place(end["f"], queue, offset)
    return Change((checkpoint.planned.with_end(source, end),))


def shortened(checkpoint: Checkpoint, source: int, queue: Queue, offset: int) -> Change:
    """The planned batch ends before a message in the middle of it; what it has of other queues stays."""
    assert checkpoint.planned is not None
    end = _placed(checkpoint.planned.ends[source], {queue: offset}, ("m",))
    return Change((checkpoint.planned.with_end(source, end),))


def apply(checkpoint: Checkpoint, change: Change, now: datetime) -> Path:
    """Makes the change, and returns where the files are kept that it replaces. Raises PipelineError.

    Each step leaves a checkpoint that Spark can go on from, without loss: a planned batch is forgotten first.
    """
    directory = checkpoint.directory
    with held(directory):
        if not checkpoint.is_as_read():
            raise PipelineError(f"{directory} was changed meanwhile: the stream runs; stop it, and say this again")
        try:
            backup = _backup(checkpoint, change, now)
            if change.forgotten is not None:
                _remove(directory / "offsets" / str(change.forgotten))
            for batch in change.written:
                _write(directory / "offsets" / str(batch.number), batch.text)
        except OSError as e:
            raise PipelineError(f"cannot change {directory}: {e}") from e
    return backup


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """One run, or one change, of a stream at a time. Raises PipelineError while another one goes on."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as e:
        raise PipelineError(f"cannot write the checkpoint {directory}: {e.strerror}") from e
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            by = os.read(descriptor, 32).decode(errors="replace").strip()
            raise PipelineError(
                f"the stream of {directory} runs{f' in process {by}' if by else ''}: stop it first"
            ) from None
        except OSError:
            log.warning("%s: the file system has no locks, so nothing keeps two runs apart", directory)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)  # and with it the lock; the file stays, since another process may just have opened it


def expect_sink(directory: Path, sink: str) -> None:
    """Notes where the stream of a checkpoint writes to. Raises PipelineError if it wrote elsewhere until now.

    What Spark has read it does not read again, so the new sink would be without all that, and nobody would be told.
    """
    path = directory / SINK
    try:
        before = path.read_text().strip() if path.exists() and _numbers(directory / "offsets") else sink
        if before == sink:
            path.write_text(f"{sink}\n")
    except (OSError, UnicodeDecodeError) as e:
        raise PipelineError(f"cannot use the checkpoint {directory}: {e}") from e
    if before != sink:
        raise PipelineError(
            f"the stream of {directory} wrote to {before} until now, and what it has read would be missing in {sink}: "
            f"give this pipeline a checkpoint of its own; or delete {path}, if it is to go on from there"
        )


def local_path(checkpoint: str) -> Path | None:
    """The directory, if the checkpoint is on this machine."""
    scheme, colon, path = checkpoint.partition(":")
    if not colon or not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        return Path(checkpoint)
    return Path(path.removeprefix("//")) if scheme == "file" and re.match(r"(//)?/(?!/)", path) else None


def _stored(line: str) -> dict[str, Any] | None:
    """The end of a batch, if it is of a source of ours."""
    try:
        stored = json.loads(line)
    except ValueError:
        return None  # `-`: nothing yet; or a number, of Spark's file sources
    return stored if isinstance(stored, dict) and {"o", "v"} <= stored.keys() else None


def _numbers(directory: Path) -> set[int]:
    try:
        return {int(path.name) for path in directory.iterdir() if path.name.isdecimal()}
    except FileNotFoundError:
        return set()
    except OSError as e:
        raise PipelineError(f"cannot read the checkpoint {directory.parent}: {e.strerror}") from e


def _read(directory: Path, number: int) -> Batch:
    path = directory / "offsets" / str(number)
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise PipelineError(f"{path} is larger than the offsets of a batch may be ({_MAX_FILE_BYTES:,} bytes)")
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise PipelineError(f"cannot read the checkpoint {directory}: {e}") from e
    if lines[0] != _VERSION:
        raise PipelineError(f"{path} has the format {lines[0]!r}, and {_VERSION!r} is known here")
    return Batch(number, tuple(lines))


def _seen(directory: Path) -> frozenset[tuple[str, int, int]]:
    found = set()
    for part in ("offsets", "commits"):
        for number in _numbers(directory / part):
            with contextlib.suppress(FileNotFoundError):  # Spark removes old ones while it runs
                stat = (directory / part / str(number)).stat()
                found.add((f"{part}/{number}", stat.st_mtime_ns, stat.st_size))
    return frozenset(found)


def moved_end(end: Mapping[str, Any], offsets: Offsets) -> dict[str, Any]:
    """The end of a batch that is finished with other offsets, and with where the stream was when it ended."""
    found = _placed(end, offsets, ("m", "b"))
    was = {**dict.fromkeys(offsets, 0), **from_spark(end), **flat(end.get("h", {}))}
    for queue in offsets:
        _place(found.setdefault("h", {}), queue, was[queue])
    return found


def _placed(end: Mapping[str, Any], offsets: Offsets, left_out: Sequence[str]) -> dict[str, Any]:
    """`end` with other offsets. What is not known here stays; marks of queues that move are of another place."""
    found = copy.deepcopy(dict(end))
    for queue, offset in offsets.items():
        _place(found["o"], queue, offset)
        for name in left_out:
            if name in found:
                _leave_out(found[name], queue)
                if not found[name]:
                    del found[name]
    return found


def _place(tree: dict[str, Any], queue: Queue, offset: int) -> None:
    tree.setdefault(queue.topic, {}).setdefault(queue.broker, {})[str(queue.queue_id)] = offset


def _leave_out(tree: dict[str, Any], queue: Queue) -> None:
    brokers = tree.get(queue.topic, {})
    queues = brokers.get(queue.broker, {})
    queues.pop(str(queue.queue_id), None)
    if not queues:
        brokers.pop(queue.broker, None)
    if not brokers:
        tree.pop(queue.topic, None)


def _backup(checkpoint: Checkpoint, change: Change, now: datetime) -> Path:
    """Copies the files that are replaced, with Spark's checksums of them."""
    backups = checkpoint.directory / BACKUPS
    backup = backups / f"{now:%Y%m%dT%H%M%S.%fZ}"
    while backup.exists():
        backup = backups / f"{backup.name}+"
    (backup / "offsets").mkdir(parents=True)
    numbers = {batch.number for batch in change.written} | ({change.forgotten} - {None})
    for number in sorted(number for number in numbers if number is not None):
        path = checkpoint.directory / "offsets" / str(number)
        for source in (path, _checksum(path)):
            if source.exists():
                shutil.copy2(source, backup / "offsets" / source.name)
    return backup


def _write(path: Path, text: str) -> None:
    """Replaces a file in one step. Without its checksum Spark takes a file as it is, so that one goes first."""
    new = path.with_name(f".{path.name}.new")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _checksum(path).unlink(missing_ok=True)
    new.rename(path)
    _sync(path.parent)


def _remove(path: Path) -> None:
    path.unlink()
    _checksum(path).unlink(missing_ok=True)
    _sync(path.parent)


def _checksum(path: Path) -> Path:
    return path.with_name(f".{path.name}.crc")


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
