"""What counting over messages with Spark has in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F


@contextmanager
def kept(frame: DataFrame) -> Iterator[DataFrame]:
    """Read once, however often it is counted over."""
    frame.persist()
    try:
        yield frame
    finally:
        frame.unpersist()


def count() -> Column:
    return F.count("*").alias("messages")


def first_of_each(frame: DataFrame, count: int, part: str, *order: Column) -> DataFrame:
    numbered = frame.withColumn("number", F.row_number().over(Window.partitionBy(part).orderBy(*order)))
    return numbered.where(F.col("number") <= count).orderBy(part, "number")
