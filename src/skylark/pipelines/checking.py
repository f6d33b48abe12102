"""Whether a pipeline makes sense, asked of Spark before anything starts.

The transforms are analysed on an empty stream of the source's schema, and the result is run into nothing: that finds
unknown columns, wrong types, and what Spark can't do with a stream. No server is asked and nothing is written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from skylark.client.errors import RocketMQError
from skylark.pipelines.errors import reason
from skylark.pipelines.spec import Declared, options_of
from skylark.pipelines.transforms import transformed
from skylark.spark.cluster import Cluster
from skylark.spark.offline import log_directories, scan_options
from skylark.spark.options import BadOption, read_options, write_options
from skylark.spark.rows import BadColumns, Rows

BATCH_ONLY: Final = ("rocketmq-commitlog",)
_TIMEOUT_S: Final = 120


def _scan(options: Mapping[str, str]) -> None:
    log_directories(scan_options(options).path)


_OPTIONS: Final[dict[tuple[str, str], Callable[[Mapping[str, str]], object]]] = {
    ("source", "rocketmq"): read_options,
    ("source", "rocketmq-commitlog"): _scan,
    ("sink", "rocketmq"): write_options,
}


def check(declared: Declared, spark: SparkSession) -> StructType:
    """The columns that go into the sink. Raises PipelineError."""
    check_options(declared)
    schema = source_schema(declared, spark)
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


def check_options(declared: Declared) -> None:
    """Options of our own formats; those of Spark's formats it looks at itself."""
    for (part, name), parse in _OPTIONS.items():
        if getattr(declared.pipeline, part).format == name:
            given = options_of(declared, part)  # type: ignore[arg-type]
            path = getattr(declared.pipeline, part).path
            if path is not None:
                given["path"] = declared.located(path)
            try:
                parse(given)
            except BadOption as e:
                named = next((option for option in given if option in str(e)), None)
                inside = () if named is None else ("options", named) if named != "path" else ("path",)
                raise declared.document.error((part, *inside), str(e)) from None


def check_servers(declared: Declared) -> None:
    """Asks the name servers for the topics that are read and for the brokers that are written to."""
    pipeline = declared.pipeline
    try:
        if pipeline.source.format == "rocketmq":
            reading = read_options(options_of(declared, "source"))
            with Cluster(reading.name_server, reading.timeout_s) as cluster:
                asked = reading.subscribe.split(",") if reading.subscribe is not None else []
                for topic in filter(None, map(str.strip, asked)):
                    cluster.route(topic)
                cluster.brokers()
    except RocketMQError as e:
        raise declared.document.error(("source", "options"), str(e)) from e
    try:
        if pipeline.sink.format == "rocketmq":
            writing = write_options(options_of(declared, "sink"))
            with Cluster(writing.name_server, writing.timeout_s) as cluster:
                cluster.brokers()
    except RocketMQError as e:
        raise declared.document.error(("sink", "options"), str(e)) from e


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
        raise declared.document.error(("source", "path" if source.path else "options"), reason(e)) from e


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
    for index, name in enumerate(sink.partition_by):
        if name not in result.columns:
            known = ", ".join(result.columns)
            raise document.error(("sink", "partitionBy", index), f"there is no column {name}, only {known}")
    if sink.format == "rocketmq":
        try:
            Rows(result.schema, write_options(options_of(declared, "sink")))
        except BadOption as e:
            raise document.error(("sink", "options"), str(e)) from None
        except BadColumns as e:
            raise document.error(("sink", "format"), str(e)) from None
