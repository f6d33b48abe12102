"""The progress of streaming queries: what is counted from Spark's reports, and real queries followed to their end."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from rich.console import Console

from patience import DEADLINE_S
from skylark.client.sync import Producer
from skylark.pipelines.demo import has_read_all
from skylark.pipelines.errors import PipelineError
from skylark.pipelines.progress import Summary, Totals, follow, follow_all, stopped_by_signal
from skylark.spark.source import RocketMQ
from skylark.testing import LocalCluster


def report(batch: int, rows: int, took_ms: int, *, end: int = 0, latest: int = 0, done: bool = True) -> dict[str, Any]:
    def offsets(last: int) -> dict[str, Any]:
        return {"o": {"orders": {"broker-a": {"0": last}}}, "v": 1}

    return {
        "batchId": batch,
        "numInputRows": rows,
        "durationMs": {"triggerExecution": took_ms} | ({"addBatch": took_ms} if done else {}),
        "sources": [{"endOffset": offsets(end), "latestOffset": offsets(latest)}],
    }


def test_batches_are_counted_once() -> None:
    totals = Totals("orders")
    assert not totals.add(report(0, 0, 5, done=False))  # nothing to do yet
    assert totals.add(report(0, 100, 50, end=100, latest=130))
    assert not totals.add(report(0, 100, 50, end=100, latest=130))
    assert totals.lag == 30
    assert totals.add(report(1, 30, 10, end=130, latest=130))
    assert not totals.add(report(2, 0, 5, end=130, latest=135, done=False))
    summary = totals.summary(seconds=2.0)
    assert (summary.batches, summary.rows, summary.lag) == (2, 130, 5)
    assert (summary.batch_ms_median, summary.batch_ms_max) == (50, 50)
    assert summary.rows_per_s == pytest.approx(130 / 0.06, abs=0.1)
    assert "130 rows in 2 batches" in str(summary)


def test_other_sources_have_no_lag() -> None:
    totals = Totals("files")
    progress = report(0, 1, 1)
    progress["sources"] = [{"endOffset": {"logOffset": 0}, "latestOffset": None}]
    assert totals.add(progress)
    assert totals.lag is None


def test_nothing_done_has_a_summary() -> None:
    assert "0 rows in 0 batches" in str(Totals("idle").summary(0.0))


def test_a_signal_sets_the_event_and_the_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stopped_by_signal() as told:
        os.kill(os.getpid(), signal.SIGTERM)
        assert told.wait(DEADLINE_S)
    assert signal.getsignal(signal.SIGTERM) is before


class Report:
    def __init__(self, progress: dict[str, Any]) -> None:
        self.batchId, self.durationMs, self.json = progress["batchId"], progress["durationMs"], json.dumps(progress)


class Query:
    """A streaming query as `follow` sees it: its reports, and then perhaps the error that ended it."""

    name = "query"

    def __init__(self, *reports: dict[str, Any], error: str | None = None, active: bool = False) -> None:
        self.recentProgress = [Report(report) for report in reports]
        self.isActive = active
        self._error = error

    @property
    def lastProgress(self) -> Report | None:
        return self.recentProgress[-1] if self.recentProgress else None

    def exception(self) -> Exception | None:
        return RuntimeError(self._error) if self._error else None

    def stop(self) -> None:
        self.isActive = False


GIVEN_UP = "[STREAM_FAILED] Query failed: Python worker failed to connect back."


def followed(*queries: Query, again: list[list[Query]] | None = None, **options: Any) -> tuple[list[Summary], str]:
    """`again` are the queries that each of the queries is replaced by, one after the other."""
    console = Console(file=io.StringIO(), width=200)
    starts: Any = None if again is None else [iter(more).__next__ for more in again]
    titles = [f"query {number}" for number in range(len(queries))]
    given: Any = queries
    done = follow_all(given, titles=titles, console=console, stop=threading.Event(), again=starts, **options)
    assert isinstance(console.file, io.StringIO)
    return done, console.file.getvalue()


def test_each_of_several_queries_is_started_again() -> None:
    first = Query(report(0, 5, 1), active=True)
    second = Query(error=GIVEN_UP)
    later = [Query(error=GIVEN_UP), Query(report(0, 7, 1), active=True)]
    done, told = followed(first, second, again=[[], later], until=lambda totals: all(total.rows for total in totals))
    assert [summary.rows for summary in done] == [5, 7]
    assert told.count("the query is started again") == 2
    assert not first.isActive


def test_a_query_is_not_started_for_ever() -> None:
    later = [Query(error=GIVEN_UP) for _ in range(10)]
    with pytest.raises(PipelineError, match="this machine is too busy"):
        followed(Query(error=GIVEN_UP), again=[later])


@pytest.mark.parametrize(
    "query", [Query(error="something else"), Query(report(0, 5, 1), error=GIVEN_UP)], ids=["another", "it had begun"]
)
def test_what_is_not_started_again(query: Query) -> None:
    other = Query(active=True)
    with pytest.raises(PipelineError):
        followed(query, other, again=[[Query()], [Query()]])
    assert not other.isActive


def test_a_query_that_stays_down_is_an_error_without_another_start() -> None:
    with pytest.raises(PipelineError, match="connect back"):
        followed(Query(error=GIVEN_UP))


def test_how_far_a_query_has_read() -> None:
    totals = Totals("orders")
    assert totals.read is None
    totals.add(report(0, 10, 1, end=10, latest=20))
    assert totals.read == 10
    totals.add(report(1, 0, 1, end=20, latest=20, done=False))
    assert totals.read == 20
    assert has_read_all([totals], 20)
    assert not has_read_all([totals], 21)
    assert not has_read_all([totals], None)
    assert not has_read_all([totals, Totals("another")], 20)


def test_a_query_that_ends(spark: SparkSession, tmp_path: Path) -> None:
    spark.range(50).write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema("id bigint").parquet(str(tmp_path / "in"))
    writer = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    summary = follow(writer.trigger(availableNow=True).start(), title="numbers", console=console)
    assert (summary.rows, summary.title) == (50, "numbers")
    assert isinstance(console.file, io.StringIO)
    assert "numbers: 50 rows" in console.file.getvalue()


def test_queries_are_stopped_together(spark: SparkSession) -> None:
    queries = [spark.readStream.format("rate").load().writeStream.format("noop").start() for _ in range(2)]
    stop = threading.Event()
    stop.set()
    assert len(follow_all(queries, titles=["a", "b"], console=Console(file=io.StringIO()), stop=stop)) == 2
    assert not any(query.isActive for query in queries)


def test_a_failure_is_one_sentence(spark: SparkSession, tmp_path: Path) -> None:
    source = spark.readStream.format("rocketmq").options(nameServer="127.0.0.1:1", subscribe="orders", timeout="1s")
    writer = source.load().writeStream.format("noop").option("checkpointLocation", str(tmp_path))
    with pytest.raises(PipelineError, match=r"^no connection to 127\.0\.0\.1:1[^\n]*$"):
        follow(writer.start(), title="orders", console=Console(file=io.StringIO()))


def test_a_python_process_that_spark_gave_up_is_started_again(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process of the source never connects, as on a machine that is too busy: Spark waits 10 s for it."""
    python, flag = tmp_path / "python", tmp_path / "never-connects"
    python.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *python_streaming_source_runner*) rm {flag} 2>/dev/null && exec sleep 15;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))

    class Held(RocketMQ):
        @classmethod
        def name(cls) -> str:
            return "held"

    spark.dataSource.register(Held)
    console = Console(file=io.StringIO(), width=200)

    def begin() -> Any:
        rows = spark.readStream.format("held").options(
            nameServer=cluster.name_servers, subscribe="orders", startingOffsets="earliest"
        )
        writer = rows.load().writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
        return writer.trigger(availableNow=True).start()

    with LocalCluster(topics={"orders": 1}) as cluster:
        with Producer(cluster.name_servers, group="tests") as producer:
            producer.send("orders", b"hello")
        flag.touch()
        summary = follow(begin(), console=console, again=begin)
    assert (summary.rows, summary.batches) == (1, 1)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("the query is started again") == 1
