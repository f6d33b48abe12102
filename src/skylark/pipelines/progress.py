"""How a streaming query comes along, on the terminal: rows, rows a second, lag, batch times, and a summary at the end.

    summary = follow(query, title="archive", console=Console(stderr=True))

Spark describes each batch after it is done. `Totals` adds those descriptions up and nothing else; `follow` waits, draws
and stops the query when SIGINT or SIGTERM come. What was stopped in the middle of a batch is done again by the next
run, from the checkpoint.
"""

from __future__ import annotations

import collections
import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from skylark.pipelines.errors import PipelineError, is_too_busy, reason
from skylark.spark.planning import backlog
from skylark.spark.queues import from_spark

_POLL_S: Final = 0.25
_LINE_EVERY_S: Final = 10.0
_MOST_STARTS: Final = 5
_REMEMBERED: Final = 1000  # batches whose times and rates are kept


class Totals:
    """What a query did so far."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.batches = 0
        self.rows = 0
        self.lag: int | None = None
        self.read: int | None = None  # the sum of the offsets that it came to
        self.batch_ms: collections.deque[int] = collections.deque(maxlen=_REMEMBERED)
        self.rows_per_s = 0.0
        self.last_batch = -1  # the number of the last batch that was counted
        self._busy_ms = 0

    def add(self, progress: dict[str, Any]) -> bool:
        """One of Spark's progress reports; True if it tells of a batch that was not counted yet."""
        lags = [lag for lag in map(_lag, progress["sources"]) if lag is not None]
        if lags:
            self.lag = sum(lags)
        ends = [end for end in map(_end, progress["sources"]) if end is not None]
        if ends:
            self.read = sum(ends)
        number = progress["batchId"]
        # A report without addBatch says that there was nothing to do; the batch of that number is still to come.
        if number <= self.last_batch or "addBatch" not in progress["durationMs"]:
            return False
        self.last_batch = number
        took_ms = progress["durationMs"].get("triggerExecution", progress.get("batchDuration", 0))
        rows = max(progress["numInputRows"], 0)
        self.batches += 1
        self.rows += rows
        self.batch_ms.append(took_ms)
        self._busy_ms += took_ms
        self.rows_per_s = rows * 1000 / took_ms if took_ms else 0.0
        return True

    def summary(self, seconds: float) -> Summary:
        times = sorted(self.batch_ms)
        return Summary(
            title=self.title,
            batches=self.batches,
            rows=self.rows,
            seconds=round(seconds, 3),
            rows_per_s=round(self.rows * 1000 / self._busy_ms, 1) if self._busy_ms else 0.0,
            batch_ms_median=times[len(times) // 2] if times else 0,
            batch_ms_max=times[-1] if times else 0,
            lag=self.lag,
        )


class Summary(msgspec.Struct, kw_only=True, frozen=True):
    """What a query did in this run. `rows_per_s` counts the time of the batches, not the waits between them."""

    title: str
    batches: int
    rows: int
    seconds: float
    rows_per_s: float
    batch_ms_median: int
    batch_ms_max: int
    lag: int | None

    def __str__(self) -> str:
        batches = "1 batch" if self.batches == 1 else f"{self.batches:,} batches"
        lag = "" if self.lag is None else f", {self.lag:,} waiting"
        return (
            f"{self.title}: {self.rows:,} rows in {batches}, {self.seconds:.1f} s, {self.rows_per_s:,.0f} rows/s{lag}; "
            f"batches took {self.batch_ms_median:,} ms (median), {self.batch_ms_max:,} ms (longest)"
        )


def follow(
    query: StreamingQuery,
    *,
    title: str = "",
    console: Console | None = None,
    stop: threading.Event | None = None,
    again: Callable[[], StreamingQuery] | None = None,
) -> Summary:
    """Shows the query until it ends; stops it when `stop` is set. Raises PipelineError if it failed.

    Without `stop`, SIGINT and SIGTERM stop the query; the caller must be the main thread then. `again` starts the query
    anew if Spark gave up the Python process of its source before that had started.
    """
    return follow_all(
        [query],
        titles=[title or query.name or "query"],
        console=console,
        stop=stop,
        again=None if again is None else [again],
    )[0]


def follow_all(
    queries: Sequence[StreamingQuery],
    *,
    titles: Sequence[str],
    console: Console | None = None,
    stop: threading.Event | None = None,
    again: Sequence[Callable[[], StreamingQuery]] | None = None,
    until: Callable[[Sequence[Totals]], bool] = lambda totals: False,
) -> list[Summary]:
    """The same for several queries, which end together: when one fails or is stopped, the others are stopped.

    They are stopped as well when `until` says so, of what they did so far.
    """
    console = console or Console(stderr=True)
    running = _Running(queries, [Totals(title) for title in titles], again, console)
    started_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        told = stop if stop is not None else stack.enter_context(stopped_by_signal())
        stack.callback(running.stop)
        view = stack.enter_context(_view(console, running.totals))
        while running.goes_on() and not told.is_set() and not until(running.totals):
            told.wait(_POLL_S)
            view.show(running.count())
        running.stop()
        running.count()
        if not told.is_set():
            running.raise_failure()
    summaries = [total.summary(time.monotonic() - started_s) for total in running.totals]
    for summary in summaries:
        console.print(Text(str(summary)), soft_wrap=True)
    return summaries


class _Running:
    """Queries that are followed. One whose Python process Spark gave up before it had started is started again."""

    def __init__(
        self,
        queries: Sequence[StreamingQuery],
        totals: Sequence[Totals],
        again: Sequence[Callable[[], StreamingQuery]] | None,
        console: Console,
    ) -> None:
        self.totals = totals
        self._queries = list(queries)
        self._again = again
        self._starts = [1] * len(queries)
        self._console = console

    def goes_on(self) -> bool:
        """Whether one of them runs, perhaps again. Raises PipelineError if one failed."""
        for index, query in enumerate(self._queries):
            error = _failure(query)
            if error is None:
                continue
            if self._again is None or self._starts[index] == _MOST_STARTS or not _was_given_up(query, error):
                raise error
            self._console.print("Spark gave its Python process up before it had started: the query is started again")
            self._queries[index] = self._again[index]()
            self._starts[index] += 1
        return any(query.isActive for query in self._queries)

    def count(self) -> bool:
        """Whether there was something new."""
        changed = False
        for query, total in zip(self._queries, self.totals, strict=True):
            last = query.lastProgress
            if last is not None:
                # The last report is enough unless batches are shorter than a poll.
                new = [last] if last.batchId <= total.last_batch + 1 else query.recentProgress
                for progress in new:
                    changed |= total.add(json.loads(progress.json))
        return changed

    def stop(self) -> None:
        for query in self._queries:
            if query.isActive:
                try:
                    query.stop()
                except PySparkException as e:
                    raise PipelineError(f"the query does not stop: {reason(e)}") from e

    def raise_failure(self) -> None:
        for query in self._queries:
            error = _failure(query)
            if error is not None:
                raise error


def _failure(query: StreamingQuery) -> PipelineError | None:
    error = None if query.isActive else query.exception()
    if error is None:
        return None
    failure = PipelineError(reason(error))
    failure.__cause__ = error
    return failure


def _was_given_up(query: StreamingQuery, error: PipelineError) -> bool:
    """Before its first batch: a query without a checkpoint of its own would tell again what it has told."""
    return is_too_busy(error) and not any("addBatch" in progress.durationMs for progress in query.recentProgress)


@contextlib.contextmanager
def stopped_by_signal() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; a second signal has its usual effect."""
    told = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: object) -> None:
        told.set()
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    for number in before:
        signal.signal(number, handle)
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _View:
    """Draws on a terminal; writes a line now and then where there is none."""

    def __init__(self, console: Console, totals: Sequence[Totals], live: Live | None) -> None:
        self._console = console
        self._totals = totals
        self._live = live
        self._next_line_s = time.monotonic() + _LINE_EVERY_S

    def show(self, changed: bool) -> None:
        if self._live is not None:
            self._live.update(_drawn(self._totals))
        elif changed and time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + _LINE_EVERY_S
            for total in self._totals:
                lag = "" if total.lag is None else f", {total.lag:,} waiting"
                text = f"{total.title}: {total.rows:,} rows, {total.rows_per_s:,.0f} rows/s{lag}"
                self._console.print(Text(text), soft_wrap=True)


@contextlib.contextmanager
def _view(console: Console, totals: Sequence[Totals]) -> Iterator[_View]:
    if not console.is_terminal:
        yield _View(console, totals, None)
        return
    with Live(_drawn(totals), console=console, refresh_per_second=4, transient=True) as live:
        yield _View(console, totals, live)


def _drawn(totals: Sequence[Totals]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for heading in ("rows", "rows/s", "waiting", "batches", "last batch"):
        table.add_column(heading, justify="right")
    for total in totals:
        table.add_row(
            Text(total.title, style="bold"),
            f"{total.rows:,}",
            f"{total.rows_per_s:,.0f}",
            "-" if total.lag is None else f"{total.lag:,}",
            f"{total.batches:,}",
            f"{total.batch_ms[-1]:,} ms" if total.batch_ms else "-",
        )
    return table


def _lag(source: dict[str, Any]) -> int | None:
    """Messages that a source of ours has not read yet."""
    try:
        return backlog(from_spark(source["endOffset"]), from_spark(source["latestOffset"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _end(source: dict[str, Any]) -> int | None:
    """The sum of the offsets up to which a source of ours was read."""
    try:
        return sum(from_spark(source["endOffset"]).values())
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
