"""What an archive does with a batch, step by step, so that whatever dies when, each message is in the lake once.

It knows nothing of Spark: what it needs of the file system is in `Store`, what it needs of the batch is in `Rows`.

    _archive/staging/3f2a…/…      rows that are being written; nobody looks there
    _archive/planned/00000042     the plan of the 42nd batch of this lake: which files, and where each of them goes
    _archive/kept/00000042        the same file, renamed when they are all in place: how far the lake is

A batch is written aside; its plan is put down in one step, which decides; each file is moved to its place by a rename;
then the plan becomes the mark. A plan that is found is finished before anything else, unless the lake went on without
it, as with an `_archive` that was restored.

A mark names the batch that it is of: the query, its number there, the ranges of offsets, and when Spark planned it. A
checkpoint that was deleted begins a new query; one that was restored brings numbers again, with other ranges. So a
batch is done only if it is the one that the newest mark names. Any other is checked and kept:

- It may reach back to what the lake has: then it is compared with the lake, row by row, and only what is new is kept.
  The mark also says how far the rows in the lake go, so that batches beyond are not compared.
- It may begin behind a gap, as with the checkpoint of another archive: that is an error, and the way on is to delete
  the checkpoint. A new one begins with the oldest message, and what the lake has is not kept twice. What somebody
  passed over by hand (`skylark pipeline offsets`) is no gap: the checkpoint says where the stream was before.

Files are named by the number of the batch in the lake. So files that are newer than the newest mark tell that the marks
were restored, or are gone; how far the lake goes is then found from its rows.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from skylark.pipelines.errors import PipelineError
from skylark.spark.queues import Offsets, Queue, flat, nested

STATE: Final = "_archive"
CHECKPOINT: Final = f"{STATE}/checkpoint"
STAGING: Final = f"{STATE}/staging"
PLANNED: Final = f"{STATE}/planned"
KEPT: Final = f"{STATE}/kept"
OLD_MARKS: Final = f"{STATE}/done"
"""Marks of earlier versions: empty files, named by the number of the batch in its query."""

_PLACES: Final = "topic=*/date=*"
_FOREIGN: Final = "[!0-9]*.parquet"  # what the archive did not write
_KEPT_MARKS: Final = 10  # one is needed; the others are for whoever looks what went on
_KNOWN_QUERIES: Final = 20
_DIGITS: Final = 8

Tree = dict[str, dict[str, dict[str, int]]]


class Extent(msgspec.Struct, frozen=True):
    """How far the rows of a lake go. A queue that was made anew may be `at` 20 when its largest offset is 99."""

    at: Offsets
    """The offset behind the row that was stored last"""
    most: Offsets
    """The offset behind the row with the largest"""


class Store(Protocol):
    """Files below the path of the lake; see `Files`."""

    @property
    def root(self) -> str: ...
    def exists(self, name: str) -> bool: ...
    def names(self, name: str = "") -> list[str]: ...
    def below(self, name: str) -> list[str]: ...
    def matching(self, directories: str, patterns: Sequence[str]) -> list[str]: ...
    def read(self, name: str) -> str | None: ...
    def write(self, name: str, text: str) -> None: ...
    def rename(self, old: str, new: str) -> None: ...
    def delete(self, name: str) -> None: ...


class Rows(Protocol):
    """The rows of a batch."""

    def write(self, directory: str, *, only_new: bool) -> None:
        """Puts files there, in directories as they are in the lake; without rows that the lake has, if `only_new`."""


class Batch(msgspec.Struct, frozen=True):
    """Which messages a batch has, as the checkpoint tells it.

    `begin` is where the batch before ended; None if it is the first and nothing tells where its query began. `moved`
    has the queues that begin elsewhere: they are new, were made anew, or lost messages.
    """

    query: str
    number: int
    begin: Tree | None
    end: Tree
    moved: Tree = {}
    by_hand: Tree = {}
    """Where the query was in queues that were moved by hand before the batch was planned"""
    digest: str = ""
    """Of what the checkpoint says of it, with the time at which it was planned: the same only if it comes again"""

    def starts(self) -> Offsets:
        """Where the rows of each queue begin, as far as it is known; else at 0."""
        return {**flat(self.begin or {}), **flat(self.moved)}

    def came_from(self) -> Offsets | None:
        """Where the query was before the batch, whatever somebody passed over since."""
        return None if self.begin is None else {**flat(self.begin), **flat(self.by_hand)}


class Came(msgspec.Struct, frozen=True):
    """How far a query came in this lake."""

    number: int
    end: Tree


class Mark(msgspec.Struct, frozen=True):
    """What a batch added to the lake, and how far the lake goes with it. Plans of earlier versions have no batch."""

    staged: str
    moves: dict[str, str]
    batch: Batch | None = None
    most: Tree = {}
    """For each queue an offset that is larger than that of any row in the lake"""
    queries: dict[str, Came] = {}


class Keeper:
    """Keeps the batches of one run, one after the other. `extent` finds out from its rows how far the lake goes."""

    def __init__(self, files: Store, extent: Callable[[], Extent], *, skip_lost: bool = False) -> None:
        self._files = files
        self._extent = extent
        self._skip_lost = skip_lost
        self._number = 0  # of the newest mark
        self._mark: Mark | None = None
        self._most: Offsets = {}
        self._is_known = False

    def begin(self) -> None:
        """Before a run, which may find nothing to do: raises PipelineError if rows would be missing nevertheless."""
        self._look()
        ended = [_plain(self._files.names(f"{CHECKPOINT}/{log}")) for log in ("offsets", "commits")]
        last, done = (max(map(int, names), default=-1) for names in ended)
        if last < 0:
            return
        batch = batch_of(self._files, last)
        if last <= done:
            by_hand = (_stored_end(self._files, last) or {}).get("h", {})
            self._check(Batch(batch.query, last + 1, batch.end, batch.end, by_hand=by_hand))
        elif self._mark is None or self._mark.batch != batch:  # it comes again
            self._check(batch)

    def keep(self, batch: Batch, rows: Rows) -> None:
        """Returns when the lake has the batch. Raises PipelineError if rows would be missing."""
        if not self._is_known:
            self._look()
        # The last batch comes again when the process died before Spark noted its end.
        if self._mark is None or self._mark.batch != batch:
            self._is_known = False
            self._check(batch)
            self._apply(self._number + 1, self._plan(batch, rows))
            self._is_known = True
        self._tidy()

    def _look(self) -> None:
        """Finishes what was begun, and finds out how far the lake goes."""
        for name in _plain(self._files.names(PLANNED)):
            plan = self._read(f"{PLANNED}/{name}")
            if self._is_stale(name, plan):
                self._files.delete(f"{PLANNED}/{name}")
            else:
                self._finish(name, plan)
        marks = _plain(self._files.names(KEPT))
        self._mark = self._read(f"{KEPT}/{marks[-1]}") if marks else None
        self._number = int(marks[-1]) if marks else 0
        self._most = flat(self._mark.most) if self._mark is not None else {}
        newer = self._files.matching(_PLACES, [*_later_than(self._number), _FOREIGN] if marks else ["*.parquet"])
        if newer:
            self._most = _furthest(self._most, self._extent().most)
            lasts = [name.rpartition("/")[2][:_DIGITS] for name in newer]
            self._number = max([self._number, *(int(last) for last in lasts if last.isdigit())])
        self._is_known = True

    def _read(self, name: str) -> Mark:
        text = self._files.read(name) or ""
        try:
            return msgspec.json.decode(text, type=Mark)
        except msgspec.DecodeError as e:
            raise PipelineError(f"{self._files.root}/{name} is damaged ({e}). {self._way_on(STATE)}") from e

    def _is_stale(self, name: str, plan: Mark) -> bool:
        """Whether the lake went on without the plan, which was restored since: it may have got the rows otherwise."""
        if plan.batch is None:
            return False
        since = self._files.matching(_PLACES, _later_than(int(name) - 1))
        return bool(set(since) - set(plan.moves.values()))

    def _finish(self, name: str, plan: Mark) -> None:
        self._move(name, plan)
        if plan.batch is None:
            self._files.delete(f"{PLANNED}/{name}")  # an earlier version would make its own mark now, which says little
        else:
            self._files.rename(f"{PLANNED}/{name}", f"{KEPT}/{name}")

    def _move(self, name: str, plan: Mark) -> None:
        for staged, place in plan.moves.items():
            if self._files.exists(place):
                continue
            if not self._files.exists(f"{plan.staged}/{staged}"):
                raise PipelineError(
                    f"{self._files.root}/{PLANNED}/{name} names the file {staged}, which is neither aside nor in its "
                    f"place: somebody took it away. {self._way_on(STATE)}"
                )
            self._files.rename(f"{plan.staged}/{staged}", place)

    def _check(self, batch: Batch) -> None:
        """Raises PipelineError if messages before the batch would be missing in the lake."""
        came = self._mark.queries.get(batch.query) if self._mark is not None else None
        begin = batch.came_from()
        if batch.number and not self._has_old_marks(batch):
            if came is None:
                raise self._not_of_this_lake("has never written here")
            if batch.number > came.number + 1 or begin is None:
                raise self._not_of_this_lake(f"is at batch {batch.number}, and the last one here is {came.number}")
            ended = flat(came.end)
            if batch.number == came.number + 1 and any(begin[queue] > ended.get(queue, 0) for queue in begin):
                raise self._not_of_this_lake(f"has another batch {came.number} than the one that is here")
            behind = {queue: offset for queue, offset in begin.items() if offset > self._most.get(queue, 0)}
            if behind:
                raise self._not_of_this_lake(f"begins at offset {next(iter(behind.values()))} of {next(iter(behind))}")
        elif not batch.number and begin is not None and self._most and not self._skip_lost:
            expired = {queue: end for queue, end in self._extent().at.items() if begin.get(queue, 0) > end}
            for queue, end in expired.items():
                raise PipelineError(
                    f"{queue}: {self._files.root} has its messages up to offset {end}, and the oldest that is still "
                    f"there is at {begin[queue]}: those between were deleted before they were archived, or a filter "
                    "left them out; set --skip-lost to go on without them"
                )

    def _has_old_marks(self, batch: Batch) -> bool:
        """Whether an earlier version kept what is before this batch."""
        if self._mark is not None:
            return False
        numbers = [int(name) for name in _plain(self._files.names(OLD_MARKS))]
        written = self._files.matching(_PLACES, ["*.parquet"])
        named = [name for name in written if name.endswith(f"-{batch.query[:8]}.parquet")]
        return bool(numbers) and max(numbers) >= batch.number - 1 and bool(named or not written)

    def _not_of_this_lake(self, why: str) -> PipelineError:
        return PipelineError(
            f"{self._files.root}/{CHECKPOINT} does not belong to what is kept there: its query {why}. "
            f"Messages would be missing. {self._way_on(CHECKPOINT)}"
        )

    def _way_on(self, name: str) -> str:
        return (
            f"Put the right one back, or delete {self._files.root}/{name}: the next run then begins with the oldest "
            "messages that there are, and keeps those that are not there yet"
        )

    def _plan(self, batch: Batch, rows: Rows) -> Mark:
        # A directory of its own for every try: the tasks of a driver that was killed may still be writing to theirs.
        unique = uuid.uuid4().hex
        staged = f"{STAGING}/{unique}"
        starts, end = batch.starts(), flat(batch.end)
        # A queue that was made anew may end before it begins.
        changed = [queue for queue in end if starts.get(queue, 0) != end[queue]]
        reaches_back = any(starts.get(queue, 0) < self._most.get(queue, 0) for queue in changed)
        rows.write(staged, only_new=reaches_back)
        moves: dict[str, str] = {}
        for name in self._files.below(staged):
            directory, _, last = name.rpartition("/")
            if last.endswith(".parquet"):
                moves[name] = f"{directory}/{_name(self._number + 1)}-{len(moves):04d}-{unique[:16]}.parquet"
        queries = dict(self._mark.queries) if self._mark is not None else {}
        queries.pop(batch.query, None)
        queries = dict([*queries.items(), (batch.query, Came(batch.number, batch.end))][-_KNOWN_QUERIES:])
        return Mark(staged, moves, batch, nested(_furthest(self._most, end)), queries)

    def _apply(self, number: int, plan: Mark) -> None:
        name = _name(number)
        self._files.write(f"{PLANNED}/{name}", msgspec.json.encode(plan).decode())
        self._finish(name, plan)
        self._number, self._mark, self._most = number, plan, flat(plan.most)

    def _tidy(self) -> None:
        for name in (STAGING, PLANNED, OLD_MARKS):
            self._files.delete(name)
        for name in _plain(self._files.names(KEPT))[:-_KEPT_MARKS]:
            self._files.delete(f"{KEPT}/{name}")


def queues_noted(files: Store) -> list[Queue]:
    """The queues that the newest mark knows, also those without a message."""
    marks = _plain(files.names(KEPT))
    text = files.read(f"{KEPT}/{marks[-1]}") if marks else None
    return [] if text is None else sorted(flat(msgspec.json.decode(text, type=Mark).most))


def batch_of(files: Store, number: int) -> Batch:
    """The batch of that number, as Spark's checkpoint has it. Raises PipelineError."""
    query = _object(files.read(f"{CHECKPOINT}/metadata") or "").get("id")
    text = files.read(f"{CHECKPOINT}/offsets/{number}") or ""
    stored, before = _stored(text), _stored_end(files, number - 1)
    if query is None or stored is None:
        raise PipelineError(
            f"{files.root}/{CHECKPOINT} does not tell which messages batch {number} has: unset "
            "spark.sql.streaming.offsetLog.formatVersion if it is set, or begin a new checkpoint by deleting this one"
        )
    found = {
        "query": query,
        "number": number,
        "begin": stored.get("f") if number == 0 else before and before["o"],
        "end": stored["o"],
        "moved": stored.get("b", {}),
        "by_hand": (before or {}).get("h", {}),
        "digest": hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
    }
    return msgspec.convert(found, type=Batch)


def _stored_end(files: Store, number: int) -> dict[str, Any] | None:
    """Where a batch ended, as the checkpoint has it."""
    return _stored(files.read(f"{CHECKPOINT}/offsets/{number}") or "")


def _stored(text: str) -> dict[str, Any] | None:
    """What the source had Spark store: in the file of a batch the last line that has offsets."""
    for line in reversed(text.splitlines()):
        found = _object(line)
        if "o" in found:
            return found
    return None


def _object(line: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _furthest(these: Mapping[Any, int], those: Mapping[Any, int]) -> dict[Any, int]:
    return {queue: max(these.get(queue, 0), those.get(queue, 0)) for queue in {**these, **those}}


def _name(number: int) -> str:
    return f"{number:0{_DIGITS}d}"


def _plain(names: list[str]) -> list[str]:
    """Without what is left of a write that was killed, and checksums."""
    return [name for name in names if name.isdigit()]


def _later_than(number: int) -> list[str]:
    """Patterns for the files of later batches."""
    digits = _name(number)
    return [f"{digits[:place]}[{int(d) + 1}-9]*.parquet" for place, d in enumerate(digits) if d < "9"]
