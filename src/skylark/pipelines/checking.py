"""Whether a pipeline makes sense, asked of Spark before anything starts.

The transforms are analysed on an empty stream of the source's schema, and the result is run into nothing: that finds
unknown columns, wrong types, and what Spark can't do with a stream. No server is asked and nothing is written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from skylark.pipelines.errors import reason
from skylark.pipelines.spec import Declared, options_of
from skylark.pipelines.transforms import transformed
from skylark.spark.options import BadOption, read_options

BATCH_ONLY: Final = ("rocketmq-commitlog",)
_TIMEOUT_S: Final = 120

_OPTIONS: Final[dict[tuple[str, str], Callable[[Mapping[str, str]], object]]] = {
    ("source", "rocketmq"): read_options,
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
            try:
                parse(given)
            except BadOption as e:
                named = next((option for option in given if option in str(e)), None)
                key = (part, "options", named) if named else (part, "options")
                raise declared.document.error(key, str(e)) from None


def source_schema(declared: Declared, spark: SparkSession) -> StructType:
    source = declared.pipeline.source
    reader = spark.read.format(source.format).options(**options_of(declared, "source"))
    if source.schema is not None:
        try:
            reader = reader.schema(source.schema)
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
    types: dict[str, Any] = {field.name: field.dataType.simpleString() for field in result.schema.fields}
    for index, name in enumerate(sink.partition_by):
        if name not in types:
            raise document.error(("sink", "partitionBy", index), f"there is no column {name}, only {', '.join(types)}")
    if sink.format == "rocketmq":
        if "body" not in types:
            raise document.error(("sink", "format"), f"a message needs a column body, and there are {', '.join(types)}")
        if types["body"] not in ("binary", "string"):
            raise document.error(("sink", "format"), f"column body must be binary or string, not {types['body']}")
