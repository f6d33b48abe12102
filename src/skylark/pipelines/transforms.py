"""The transforms of a pipeline, applied to a DataFrame: that of the source, or an empty one of its schema.

An error names the transform by file, line and key.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from skylark.pipelines.errors import PipelineError, as_one, reason
from skylark.pipelines.spec import Declared, Key

_LINE: Final = re.compile(r"\(?line (\d+),? pos \d+\)?")


def transformed(declared: Declared, spark: SparkSession, rows: DataFrame) -> DataFrame:
    """Raises PipelineError: the first mistake, and those of later transforms that can be told without it."""
    rows.createOrReplaceTempView("source")
    for index, transform in enumerate(declared.pipeline.transforms):
        rows.createOrReplaceTempView("input")
        try:
            if transform.sql is not None:
                rows = _by_sql(declared, spark, ("transforms", index, "sql"), transform.sql)
            elif transform.python is not None:
                rows = _by_python(declared, rows, ("transforms", index, "python"), transform.python)
        except PipelineError as e:
            raise as_one([e, *wrong_apart(declared, spark, index + 1)]) from e.__cause__
    return rows


def wrong_apart(declared: Declared, spark: SparkSession, first: int) -> Iterator[PipelineError]:
    """What is wrong with transforms whatever columns they get: SQL that is none, and functions that are not there."""
    for index, transform in enumerate(declared.pipeline.transforms[first:], first):
        try:
            if transform.sql is not None:
                _parse(declared, spark, ("transforms", index, "sql"), transform.sql)
            elif transform.python is not None:
                _function(declared, ("transforms", index, "python"), transform.python)
        except PipelineError as e:
            yield e


def _parse(declared: Declared, spark: SparkSession, key: Key, statement: str) -> None:
    session: Any = spark
    try:
        session._jsparkSession.sessionState().sqlParser().parsePlan(statement)
    except PySparkException as e:
        raise _about_sql(declared, key, e) from e


def _by_sql(declared: Declared, spark: SparkSession, key: Key, statement: str) -> DataFrame:
    try:
        return spark.sql(statement)
    except PySparkException as e:
        raise _about_sql(declared, key, e) from e


def _about_sql(declared: Declared, key: Key, error: PySparkException) -> PipelineError:
    text = reason(error)
    line = _LINE.search(text)
    text = _LINE.sub("", text).rstrip(" ;")
    return declared.document.error(key, text, line_within=int(line[1]) if line else 1)


def _by_python(declared: Declared, rows: DataFrame, key: Key, name: str) -> DataFrame:
    function = _function(declared, key, name)
    try:
        result = function(rows)
    except Exception as e:  # whatever a user's function raises is theirs to put right
        raise declared.document.error(key, f"{name} raised {type(e).__name__}: {reason(e)}") from e
    if not isinstance(result, DataFrame):
        raise declared.document.error(key, f"{name} returned {type(result).__name__}, not a DataFrame")
    return result


def _function(declared: Declared, key: Key, name: str) -> Callable[[DataFrame], Any]:
    """`module:function`; modules beside the pipeline's file are found first."""
    module_name, _, function_name = name.partition(":")
    directory = str(declared.directory.resolve())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        module = importlib.import_module(module_name)
    except Exception as e:  # a module may fail in any way while it is imported
        raise declared.document.error(key, f"module {module_name} can't be imported: {e}") from e
    function = getattr(module, function_name, None)
    if not callable(function):
        raise declared.document.error(key, f"module {module_name} has no function {function_name}")
    if module.__file__ and Path(module.__file__).resolve().is_relative_to(directory):
        # Spark's workers don't have it, so what it holds travels with the functions that are run there.
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    found: Callable[[DataFrame], Any] = function
    return found
