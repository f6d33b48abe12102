"""SQL over topics: each table of the query that Spark does not know is the topic of that name.

    query(spark, "select tags, count(*) from orders group by tags", name_server="localhost:9876")

Topic names that are not plain words go in backticks: select * from `%DLQ%billing`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Final

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console

from skylark.client.errors import RocketMQError
from skylark.pipelines.errors import PipelineError, reason
from skylark.pipelines.progress import follow, stopped_by_signal
from skylark.pipelines.rows import Printer
from skylark.spark.cluster import Cluster
from skylark.spark.options import BadOption, read_options

_MOST_TOPICS: Final = 50
_MODES: Final = ("append", "update", "complete")


def query(
    spark: SparkSession,
    statement: str,
    *,
    name_server: str,
    options: Mapping[str, str] | None = None,
    stream: bool = False,
) -> DataFrame:
    """The result of the statement; `options` are those of the source. Raises PipelineError."""
    known: set[str] = set()
    while True:
        try:
            return spark.sql(statement)
        except AnalysisException as e:
            topic = _missing_table(e)
            if topic is None or topic in known or len(known) >= _MOST_TOPICS:
                raise PipelineError(reason(e)) from e
            known.add(topic)
            _add_table(spark, topic, {**(options or {}), "nameServer": name_server, "subscribe": topic}, stream)
        except PySparkException as e:
            raise PipelineError(reason(e)) from e


def show(frame: DataFrame, printer: Printer) -> None:
    """Prints a batch result. Raises PipelineError."""
    try:
        printer.show(frame)
    except PySparkException as e:
        raise PipelineError(reason(e)) from e


def show_stream(
    frame: DataFrame,
    printer: Printer,
    *,
    console: Console | None = None,
    once: bool = False,
    watch: Callable[[Callable[[], None]], None] = lambda stop: None,
) -> None:
    """Prints a streaming result as it comes, until the printer is full, or SIGINT or SIGTERM.

    `watch` is given what ends it as well. Raises PipelineError, and OSError when it can't be printed.
    """
    lost: list[OSError] = []
    with stopped_by_signal() as stop:
        watch(stop.set)

        def begin() -> StreamingQuery:
            return _started(frame, printer, stop, lost, once)

        follow(begin(), title="sql", console=console, stop=stop, again=begin)
    if lost:
        raise lost[0]


def _started(
    frame: DataFrame, printer: Printer, stop: threading.Event, lost: list[OSError], once: bool
) -> StreamingQuery:
    def show_batch(rows: DataFrame, batch: int) -> None:
        try:
            if not printer.full and not rows.isEmpty():
                printer.show(rows)
        except OSError as e:  # the reader is gone or the disk is full; Spark, which calls this, would wrap it
            lost.append(e)
        if printer.full or lost:
            stop.set()

    # Only Spark knows which output modes a query allows: rows are final (append), change (update), or are sorted.
    failed: PySparkException | None = None
    for mode in _MODES:
        writer = frame.writeStream.outputMode(mode).foreachBatch(show_batch)
        try:
            return (writer.trigger(availableNow=True) if once else writer).start()
        except PySparkException as e:
            failed = e
    assert failed is not None
    raise PipelineError(reason(failed)) from failed


def _missing_table(error: AnalysisException) -> str | None:
    """The one name of the table that Spark does not know."""
    if error.getCondition() != "TABLE_OR_VIEW_NOT_FOUND":
        return None
    name = (error.getMessageParameters() or {}).get("relationName", "")
    match = re.fullmatch(r"`((?:[^`]|``)+)`", name)
    return match[1].replace("``", "`") if match else None


def _add_table(spark: SparkSession, topic: str, options: Mapping[str, str], stream: bool) -> None:
    try:
        found = read_options(options)
        with Cluster(found.name_server, found.timeout_s) as cluster:
            cluster.route(topic)
        reader = (spark.readStream if stream else spark.read).format("rocketmq")
        reader.options(**options).load().createOrReplaceTempView(f"`{topic.replace('`', '``')}`")
    except (BadOption, RocketMQError) as e:
        raise PipelineError(str(e)) from e
    except PySparkException as e:
        raise PipelineError(reason(e)) from e
