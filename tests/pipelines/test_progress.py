"""The progress of streaming queries: what is counted from Spark's reports, and real queries followed to their end."""

from __future__ import annotations

import io
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
from skylark.pipelines.errors import PipelineError
from skylark.pipelines.progress import Totals, follow, follow_all, stopped_by_signal
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
