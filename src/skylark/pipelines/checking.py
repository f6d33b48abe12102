"""Whether a pipeline makes sense, asked of Spark before anything starts.

The transforms are analysed on an empty stream of the source's schema, and the result is run into nothing: that finds
unknown columns, wrong types, and what Spark can't do with a stream. No server is asked and nothing is written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from skylark.client.errors import RocketMQError, RouteNotFound
from skylark.pipelines.errors import PipelineError, as_one, raise_all, reason
from skylark.pipelines.own_options import place_of
from skylark.pipelines.spec import Declared, Mistake, options_of
from skylark.pipelines.transforms import transformed, wrong_apart
from skylark.spark.cluster import Cluster
from skylark.spark.options import BadOption, stream_options, write_options
from skylark.spark.rows import BadColumns, Rows

BATCH_ONLY: Final = ("rocketmq-commitlog",)
_TIMEOUT_S: Final = 120


def check(declared: Declared, spark: SparkSession) -> StructType:
    """The columns that go into the sink. Raises PipelineError."""
    try:
        schema = source_schema(declared, spark)
    except PipelineError as e:
        raise as_one([e, *wrong_apart(declared, spark, 0)]) from e.__cause__
    with tempfile.TemporaryDirectory(prefix="skylark-check-") as directory:
        if declared.pipeline.source.format in BATCH_ONLY:
            result = transformed(declared, spark, spark.createDataFrame([], schema))
        else:
            (Path(directory) / "rows").mkdir()
            empty = spark.readStream.schema(schema).parquet(f"{directory}/rows")
            result = transformed(declared, spark, empty)
            _check_streams(declared, result, f"{directory}/checkpoint")
    _check_sink(declared, result)
    return result.schema


def check_servers(declared: Declared) -> None:
    """Asks the name servers for the topics that are read and for the brokers that are written to."""
    raise_all([*_unreadable(declared), *_unwritable(declared)])


def _unreadable(declared: Declared) -> Iterator[Mistake]:
    if declared.pipeline.source.format != "rocketmq":
        return
    reading = stream_options(options_of(declared, "source"))
    asked = reading.subscribe.split(",") if reading.subscribe is not None else []
    try:
        with Cluster(reading.name_server, reading.timeout_s) as cluster:
            cluster.brokers()
            for topic in filter(None, map(str.strip, asked)):
                try:
                    cluster.route(topic)
                except RouteNotFound as e:
                    yield declared.document.error(("source", "options"), str(e))
    except RocketMQError as e:
        yield declared.document.error(("source", "options"), str(e))


def _unwritable(declared: Declared) -> Iterator[Mistake]:
    if declared.pipeline.sink.format != "rocketmq":
        return
    writing = write_options(options_of(declared, "sink"))
    try:
        with Cluster(writing.name_server, writing.timeout_s) as cluster:
            cluster.brokers()
    except RocketMQError as e:
        yield declared.document.error(("sink", "options"), str(e))


def source_schema(declared: Declared, spark: SparkSession) -> StructType:
    source = declared.pipeline.source
    reader = spark.read.format(source.format).options(**options_of(declared, "source"))
    if source.schema is not None:
        try:
            return spark.createDataFrame([], source.schema).schema
        except PySparkException as e:
            raise declared.document.error(("source", "schema"), reason(e)) from e
    try:
        return (reader.load(declared.located(source.path)) if source.path else reader.load()).schema
    except PySparkException as e:
        place = place_of(reason(e), source.options) or ("path" if source.path else "options",)
        raise declared.document.error(("source", *place), reason(e)) from e


def _check_streams(declared: Declared, result: DataFrame, checkpoint: str) -> None:
    sink = declared.pipeline.sink
    try:
        query = (
            result.writeStream.format("noop")
            .outputMode(sink.mode)
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(_TIMEOUT_S)
        query.stop()
    except PySparkException as e:
        raise declared.document.error(("sink", "mode"), reason(e)) from e


def _check_sink(declared: Declared, result: DataFrame) -> None:
    sink, document = declared.pipeline.sink, declared.document
    known = ", ".join(result.columns)
    raise_all(
        [
            document.error(("sink", "partitionBy", index), f"there is no column {name}, only {known}")
            for index, name in enumerate(sink.partition_by)
            if name not in result.columns
        ]
    )
    if sink.format == "rocketmq":
        try:
            Rows(result.schema, write_options(options_of(declared, "sink")))
        except BadOption as e:
            raise document.error(("sink", "options"), str(e)) from None
        except BadColumns as e:
            raise document.error(("sink", "format"), str(e)) from None
