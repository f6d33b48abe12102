"""A lake without Spark: a disk in memory that dies at any step, queues of a broker, and a driver like Spark's.

The driver keeps its checkpoint in Spark's form on the same disk, and runs the real `Keeper`. What is asked of a topic,
and what is read of it, follows the source: offsets are planned and stored first, then read, once or again.
"""

from __future__ import annotations

import fnmatch
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from skylark.pipelines import checkpoints
from skylark.pipelines.errors import PipelineError
from skylark.pipelines.keeping import CHECKPOINT, Extent, Keeper, batch_of
from skylark.spark.queues import Offsets, Queue, flat, nested

TOPIC = "orders"


class Died(Exception):
    """The process was killed."""


class DataLost(PipelineError):
    """As the source says it."""


@dataclass(frozen=True, order=True)
class Row:
    queue: Queue
    place: int  # in the log, which only grows: also its time
    offset: int


class Disk:
    """Names and what they hold. `left` is the number of steps until the process dies."""

    def __init__(self) -> None:
        self.files: dict[str, str | tuple[Row, ...]] = {}
        self.left: int | None = None
        self._asides = 0

    @property
    def root(self) -> str:
        return "lake"

    def step(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Died

    def exists(self, name: str) -> bool:
        return name in self.files or any(each.startswith(f"{name}/") for each in self.files)

    def names(self, name: str = "") -> list[str]:
        start = f"{name}/" if name else ""
        return sorted({each[len(start) :].partition("/")[0] for each in self.files if each.startswith(start)})

    def below(self, name: str) -> list[str]:
        return sorted(each.removeprefix(f"{name}/") for each in self.files if each.startswith(f"{name}/"))

    def matching(self, directories: str, patterns: Sequence[str]) -> list[str]:
        wanted = directories.split("/")
        return sorted(
            name
            for name in self.files
            if len(parts := name.split("/")) == len(wanted) + 1
            and all(fnmatch.fnmatchcase(part, want) for part, want in zip(parts, wanted, strict=False))
            and any(fnmatch.fnmatchcase(parts[-1], pattern) for pattern in patterns)
        )

    def read(self, name: str) -> str | None:
        text = self.files.get(name)
        assert not isinstance(text, tuple)
        return text

    def write(self, name: str, text: str) -> None:
        self.step()
        self._asides += 1
        directory, _, last = name.rpartition("/")
        aside = f"{directory}/.{last}.{self._asides}"
        self.files[aside] = text
        self.step()
        self.files[name] = self.files.pop(aside)

    def rename(self, old: str, new: str) -> None:
        """A file, or a directory."""
        self.step()
        assert not self.exists(new)
        for name in [name for name in self.files if name == old or name.startswith(f"{old}/")]:
            self.files[new + name.removeprefix(old)] = self.files.pop(name)
        self.step()

    def exchange(self, one: str, other: str) -> bool:
        return False

    def delete(self, name: str) -> None:
        for each in [each for each in self.files if each == name or each.startswith(f"{name}/")]:
            self.step()
            del self.files[each]

    def put(self, name: str, rows: tuple[Row, ...]) -> None:
        self.step()
        self.files[name] = rows

    def rows(self) -> list[Row]:
        """What whoever looks at the lake sees."""
        return sorted(row for name in self.matching("topic=*/date=*", ["*.parquet"]) for row in self.files[name])  # type: ignore[arg-type]


@dataclass
class Log:
    """A queue as it is now."""

    life: int = 0  # how often it was made anew
    rows: list[Row] = field(default_factory=list)
    low: int = 0


class Broker:
    """Queues; a place in the log for each message, ever."""

    def __init__(self, queues: int) -> None:
        self.logs = {Queue(TOPIC, "broker-a", number): Log() for number in range(queues)}
        self.place = 0
        self.now_ms = 0
        self.unknown: set[Row] = set()
        """What the source could not know to be there: it was moved by hand, and its queue was made anew."""

    def send(self, queue: Queue, count: int) -> None:
        log = self.logs[queue]
        for _ in range(count):
            log.rows.append(Row(queue, self.place, len(log.rows)))
            self.place += 1

    def expire(self, queue: Queue, count: int) -> None:
        log = self.logs[queue]
        log.low = min(log.low + count, len(log.rows))

    def make_anew(self) -> None:
        for queue, log in self.logs.items():
            self.logs[queue] = Log(log.life + 1)

    def there(self) -> list[Row]:
        return sorted(row for log in self.logs.values() for row in log.rows[log.low :])


class ModelRows:
    """What a batch reads: the rows of a queue as it was when the batch was planned, as far as they are there."""

    def __init__(self, disk: Disk, read: Callable[[], list[Row]], split: int) -> None:
        self._disk = disk
        self._read = read
        self._split = split

    def write(self, directory: str, *, only_new: bool) -> None:
        there = set(self._disk.rows()) if only_new else set()
        rows = [row for row in self._read() if row not in there]
        for number in range(0, len(rows), self._split):
            part = tuple(rows[number : number + self._split])
            self._disk.put(f"{directory}/topic={TOPIC}/date=2026-01-3{number % 2}/part-{number}.parquet", part)
        self._disk.put(f"{directory}/_SUCCESS", ())


def extent(disk: Disk) -> Extent:
    found = Extent({}, {})
    for row in sorted(disk.rows(), key=lambda row: row.place):
        found.at[row.queue] = row.offset + 1
        found.most[row.queue] = max(row.offset + 1, found.most.get(row.queue, 0))
    return found


class Driver:
    """One run of `archive`: batch after batch, until there is no more."""

    def __init__(self, disk: Disk, broker: Broker, *, skip_lost: bool = False, most: int = 5, split: int = 3) -> None:
        self._disk = disk
        self._broker = broker
        self._skip_lost = skip_lost
        self._most = most
        self._split = split
        self._keeper = Keeper(disk, lambda: extent(disk), skip_lost=skip_lost)

    def run(self, query: str) -> None:
        """`query` is the name of the query if there is no checkpoint. Raises PipelineError or Died."""
        self._keeper.begin()
        if not self._disk.exists(f"{CHECKPOINT}/metadata"):
            self._disk.write(f"{CHECKPOINT}/metadata", json.dumps({"id": query}))
        while True:
            planned = self._last("offsets")
            if planned is None or planned == self._last("commits"):
                planned = 0 if planned is None else planned + 1
                if not self._planned(planned):
                    return
            batch = batch_of(self._disk, planned)
            self._keeper.keep(batch, ModelRows(self._disk, functools.partial(self._read, planned), self._split))
            self._disk.write(f"{CHECKPOINT}/commits/{planned}", "v1\n{}")

    def _last(self, log: str) -> int | None:
        return max((int(name) for name in self._disk.names(f"{CHECKPOINT}/{log}") if name.isdigit()), default=None)

    def _planned(self, number: int) -> bool:
        """Whether there is a batch of that number; then it is stored what it has."""
        logs = self._broker.logs
        if number == 0:
            first = begin = {queue: log.low for queue, log in logs.items()}
            moved: Offsets = {}
        else:
            before = self._stored(number - 1)
            first, begin = flat(before["f"]), flat(before["o"])
            moved = self._moved(begin, _lives(before))
        starts = {**begin, **moved}
        end, left = dict(starts), self._most
        for queue, log in logs.items():
            taken = min(left, len(log.rows) - starts[queue])
            end[queue], left = starts[queue] + taken, left - taken
        if end == begin and not moved:
            return False
        lives = {queue: log.life for queue, log in logs.items()}
        stored = {"b": nested(moved), "f": nested(first), "m": nested(lives), "o": nested(end), "v": 1}
        self._broker.now_ms += 1
        planned = json.dumps({"batchTimestampMs": self._broker.now_ms})
        self._disk.write(f"{CHECKPOINT}/offsets/{number}", f"v1\n{planned}\n{json.dumps(stored)}")
        return True

    def _moved(self, begin: Offsets, lives: Offsets) -> Offsets:
        moved = {}
        for queue, log in self._broker.logs.items():
            if queue not in lives:
                self._broker.unknown |= set(log.rows[: begin[queue]])
            is_anew = begin[queue] > len(log.rows) or log.life != lives.get(queue, log.life)
            if is_anew or begin[queue] < log.low:
                moved[queue] = log.low
        if moved and not self._skip_lost:
            raise DataLost(f"the queues {moved} are not as they were: set failOnDataLoss=false")
        return moved

    def _read(self, number: int) -> list[Row]:
        stored = self._stored(number)
        begin = flat(stored["f"]) if number == 0 else flat(self._stored(number - 1)["o"])
        starts, lives, found = {**begin, **flat(stored["b"])}, _lives(stored), []
        for queue, end in flat(stored["o"]).items():
            log = self._broker.logs[queue]
            if starts[queue] == end:
                continue
            if not self._skip_lost and (log.life != lives[queue] or starts[queue] < log.low):
                raise DataLost(f"{queue} lost messages: set failOnDataLoss=false")
            found += log.rows[max(starts[queue], log.low) : end] if log.life == lives[queue] else []
        return found

    def _stored(self, number: int) -> dict:  # type: ignore[type-arg]
        text = self._disk.read(f"{CHECKPOINT}/offsets/{number}")
        assert text is not None
        found: dict = json.loads(text.splitlines()[-1])  # type: ignore[type-arg]
        return found


def move_by_hand(disk: Disk, offsets: Offsets) -> None:
    """What `skylark pipeline offsets set` does to the checkpoint of a stream that has no planned batch."""
    number = max(int(name) for name in disk.names(f"{CHECKPOINT}/commits") if name.isdigit())
    name = f"{CHECKPOINT}/offsets/{number}"
    finished = checkpoints.Batch(number, tuple((disk.read(name) or "").split("\n")))
    stopped = checkpoints.Checkpoint(Path(CHECKPOINT), finished, None, frozenset())
    (changed,) = checkpoints.moved(stopped, 0, offsets).written
    disk.write(name, changed.text)


def _lives(stored: dict) -> Offsets:  # type: ignore[type-arg]
    """In the place of the source's marks: which life of each queue the offsets are of."""
    return flat(stored.get("m", {}))
