"""Runs a declared pipeline: once, up to what there is now, or until it is told to stop.

How far it has come is in its checkpoint, so a run goes on where the last one ended, however that ended. A batch that
was under way then is done again: files and tables take it once, a topic as often as the sink's options promise.
"""

from __future__ import annotations

import contextlib
import threading
import time

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console

from skylark.pipelines.checking import BATCH_ONLY, check
from skylark.pipelines.checkpoints import expect_sink, held, local_path
from skylark.pipelines.errors import PipelineError, reason
from skylark.pipelines.progress import Summary, follow
from skylark.pipelines.rows import Printer, Style
from skylark.pipelines.spec import Declared, options_of
from skylark.pipelines.transforms import transformed
from skylark.spark.options import duration_ms


def run(
    declared: Declared,
    spark: SparkSession,
    *,
    once: bool = False,
    console: Console | None = None,
    stop: threading.Event | None = None,
) -> Summary:
    """Checks, starts and follows the pipeline to its end. Raises PipelineError."""
    check(declared, spark)
    if declared.pipeline.source.format in BATCH_ONLY:
        return _run_batch(declared, spark, console)

    def begin() -> StreamingQuery:
        return start(declared, spark, once=once)

    checkpoint = local_path(declared.checkpoint)
    with contextlib.nullcontext() if checkpoint is None else held(checkpoint):
        if checkpoint is not None:
            expect_sink(checkpoint, _target(declared))
        return follow(begin(), title=declared.pipeline.name, console=console, stop=stop, again=begin)


def start(declared: Declared, spark: SparkSession, *, once: bool = False) -> StreamingQuery:
    """The running query. Raises PipelineError."""
    pipeline = declared.pipeline
    rows = transformed(declared, spark, _source(declared, spark))
    writer = rows.writeStream.queryName(pipeline.name).outputMode(pipeline.sink.mode)
    writer = writer.option("checkpointLocation", declared.checkpoint)
    if once or pipeline.trigger == "once":
        writer = writer.trigger(availableNow=True)
    elif pipeline.trigger != "continuous":
        writer = writer.trigger(processingTime=f"{duration_ms(pipeline.trigger, 'trigger')} milliseconds")
    sink = pipeline.sink
    writer = writer.options(**options_of(declared, "sink"))
    try:
        if sink.partition_by:
            writer = writer.partitionBy(*sink.partition_by)
        if sink.format == "console":
            return writer.foreachBatch(_print).start()
        if sink.format == "table":
            assert sink.table is not None
            return writer.toTable(sink.table, format="parquet")
        if sink.path is not None:
            writer = writer.option("path", declared.located(sink.path))
        return writer.format(sink.format).start()
    except PySparkException as e:
        raise PipelineError(f"{pipeline.name}: {reason(e)}") from e


def _target(declared: Declared) -> str:
    """What the rows go to, in words."""
    sink = declared.pipeline.sink
    if sink.format == "rocketmq":
        options = {name.lower(): value for name, value in options_of(declared, "sink").items()}
        return f"topic {options['topic']}" if "topic" in options else "the topics that its rows name"
    return {"parquet": f"{sink.path}", "table": f"table {sink.table}"}.get(sink.format, "the terminal")


def _source(declared: Declared, spark: SparkSession) -> DataFrame:
    source = declared.pipeline.source
    batch = source.format in BATCH_ONLY
    reader = (spark.read if batch else spark.readStream).format(source.format).options(**options_of(declared, "source"))
    if source.schema is not None:
        reader = reader.schema(source.schema)
    elif source.path is not None and not batch:
        reader = reader.schema(spark.read.format(source.format).load(declared.located(source.path)).schema)
    return reader.load(declared.located(source.path)) if source.path is not None else reader.load()


def _run_batch(declared: Declared, spark: SparkSession, console: Console | None) -> Summary:
    """A source that is not a stream is read once, from beginning to end; files that are there already are an error."""
    pipeline, sink = declared.pipeline, declared.pipeline.sink
    seen = Observation()
    started_s = time.monotonic()
    try:
        rows = transformed(declared, spark, _source(declared, spark)).observe(seen, f.count(f.lit(1)).alias("rows"))
        if sink.format == "console":
            Printer(Style.TABLE).show(rows)
        else:
            writer = rows.write.mode("append" if sink.format == "rocketmq" else "errorifexists")
            writer = writer.options(**options_of(declared, "sink")).partitionBy(*sink.partition_by)
            if sink.format == "table":
                assert sink.table is not None
                writer.format("parquet").saveAsTable(sink.table)
            else:
                writer.format(sink.format).save(declared.located(sink.path) if sink.path is not None else None)
    except PySparkException as e:
        raise PipelineError(f"{pipeline.name}: {reason(e)}") from e
    took_s = time.monotonic() - started_s
    count = int(seen.get["rows"])
    summary = Summary(
        title=pipeline.name,
        batches=1,
        rows=count,
        seconds=round(took_s, 3),
        rows_per_s=round(count / took_s, 1),
        batch_ms_median=round(took_s * 1000),
        batch_ms_max=round(took_s * 1000),
        lag=None,
    )
    (console or Console(stderr=True)).print(str(summary), markup=False, highlight=False, soft_wrap=True)
    return summary


def _print(rows: DataFrame, batch: int) -> None:
    Printer(Style.TABLE).show(rows)
