"""The report as Parquet: a directory for each section, to which every report adds its rows.

DIR/lag/…, DIR/latency/…       each row with the time of its report, so that a scheduler's reports are a history
"""

from __future__ import annotations

import types
import typing
from datetime import datetime
from typing import Any, Final

from pyspark.sql import SparkSession

from skylark.pipelines.report.figures import SECTIONS, Report, Section

_SPARK_TYPES: Final[dict[type, str]] = {str: "string", int: "bigint", float: "double", datetime: "timestamp"}
_MADE: Final = "report_made"


def write(spark: SparkSession, report: Report, path: str) -> None:
    for section in SECTIONS:
        rows = report.rows(section)
        if rows:
            values = [(report.made, *[getattr(row, name) for name in section.columns]) for row in rows]
            frame = spark.createDataFrame(values, schema(section))
            frame.coalesce(1).write.mode("append").parquet(f"{path.rstrip('/')}/{section.name}")


def schema(section: Section) -> str:
    """The columns of a section, in Spark's notation."""
    hints = typing.get_type_hints(section.row)
    columns = [f"`{name}` {_SPARK_TYPES[_plain(hints[name])]}" for name in section.columns]
    return ", ".join([f"{_MADE} timestamp", *columns])


def _plain(hint: Any) -> type:
    """Without its None."""
    if isinstance(hint, types.UnionType):
        (hint,) = [each for each in typing.get_args(hint) if each is not types.NoneType]
    assert isinstance(hint, type)
    return hint
