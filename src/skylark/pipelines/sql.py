"""SQL over topics: each table of the query that Spark does not know is the topic of that name.

    query(spark, "select tags, count(*) from orders group by tags", name_server="localhost:9876")

Topic names that are not plain words go in backticks: select * from `%DLQ%billing`. Spark compares names of tables
without case and RocketMQ does not: what could mean two topics is refused.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import pyspark
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console

from skylark.client.errors import RocketMQError, RouteNotFound
from skylark.pipelines import statements
from skylark.pipelines.errors import PipelineError, reason
from skylark.pipelines.progress import follow, stopped_by_signal
from skylark.pipelines.rows import Printer
from skylark.pipelines.topics import TIMEOUT_S
from skylark.spark.cluster import Cluster
from skylark.spark.options import BadOption, batch_options, read_options, stream_options

_MOST_TOPICS: Final = 50
_OF_CATALOGS: Final = ("spark.sql.catalog", "spark.sql.extensions", "spark.sql.warehouse", "spark.hadoop.")
_MODES: Final = ("append", "update", "complete")


def check(
    statement: str,
    *,
    name_server: str,
    options: Mapping[str, str] | None = None,
    settings: Mapping[str, str] | None = None,
    stream: bool = False,
) -> None:
    """What can be told without Spark, whose start takes seconds. Raises PipelineError.

    `settings` are those that Spark will have: with a catalog of its own it may know tables that are no topics.
    """
    found = statements.read(statement)
    settings = settings or {}
    try:
        for topic in found.tables:
            _source_options(topic, name_server, options, stream)
        with Cluster(name_server, TIMEOUT_S) as cluster:
            cluster.brokers()
            if _may_have_tables(settings):
                return
            for topic in found.tables:
                cluster.route(topic)
            if settings.get("spark.sql.caseSensitive", "false").lower() != "true":
                for topic in found.tables:
                    _refuse_mixed(cluster, topic, found.names, found.tables)
    except (BadOption, RocketMQError) as e:
        raise PipelineError(str(e)) from e


def query(
    spark: SparkSession,
    statement: str,
    *,
    name_server: str,
    options: Mapping[str, str] | None = None,
    stream: bool = False,
) -> DataFrame:
    """The result of the statement; `options` are those of the source. Raises PipelineError."""
    known: list[str] = []
    try:
        while True:
            try:
                return spark.sql(statement)
            except AnalysisException as e:
                topic = _missing_table(e)
                if topic is None or topic in known or len(known) >= _MOST_TOPICS:
                    raise PipelineError(reason(e)) from e
                _add_table(spark, topic, statement, _source_options(topic, name_server, options, stream), stream)
                known.append(topic)
    except PySparkException as e:
        raise PipelineError(reason(e)) from e
    except (BadOption, RocketMQError) as e:
        raise PipelineError(str(e)) from e
    finally:
        # The result has them in it; for the next statement they are topics again, with its own options and its case.
        for topic in known:
            spark.sql(f"drop view if exists {_quoted(topic)}")


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


def _source_options(topic: str, name_server: str, options: Mapping[str, str] | None, stream: bool) -> Mapping[str, str]:
    """Raises BadOption."""
    given = {**(options or {}), "nameServer": name_server, "subscribe": topic}
    (stream_options if stream else batch_options)(given)
    return given


def _add_table(spark: SparkSession, topic: str, statement: str, options: Mapping[str, str], stream: bool) -> None:
    found = statements.read(statement)
    with Cluster(options["nameServer"], read_options(options).timeout_s) as cluster:
        cluster.route(topic)
        if spark.conf.get("spark.sql.caseSensitive") != "true":
            _refuse_mixed(cluster, topic, found.names, found.tables)
    reader = (spark.readStream if stream else spark.read).format("rocketmq")
    reader.options(**options).load().createOrReplaceTempView(_quoted(topic))


def _refuse_mixed(cluster: Cluster, topic: str, names: Iterable[str], tables: Iterable[str]) -> None:
    """Raises PipelineError if the statement has the name in another case too, and that is a topic as well."""
    for other in sorted(set(names)):
        if other == topic or other.lower() != topic.lower():
            continue
        try:
            cluster.route(other)
        except RouteNotFound:
            if other in tables:
                raise
            continue  # it names the one topic, as Spark allows
        raise PipelineError(
            f"{min(topic, other)!r} and {max(topic, other)!r} are two topics, and one table for Spark, which compares "
            "names without case: query them one at a time, or set --conf spark.sql.caseSensitive=true"
        )


def _may_have_tables(settings: Mapping[str, str]) -> bool:
    """Whether Spark may know tables from elsewhere: by its settings, those of its installation among them."""
    if any(key.startswith(_OF_CATALOGS) for key in settings):
        return True
    home = os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent
    installed = Path(os.environ.get("SPARK_CONF_DIR") or Path(home) / "conf")
    try:
        defaults = (installed / "spark-defaults.conf").read_text(errors="replace")
    except OSError:
        defaults = ""
    return (installed / "hive-site.xml").exists() or any(
        line.strip().startswith(_OF_CATALOGS) for line in defaults.splitlines()
    )


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"
