"""Where the messages of a report come from: the brokers, or an archive's files. Both give the same columns."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

from pyspark.sql import DataFrame, SparkSession

from skylark.pipelines.lake import Lake
from skylark.pipelines.report.times import as_ms
from skylark.pipelines.span import Span
from skylark.pipelines.topics import is_there
from skylark.spark.columns import SPARK_TYPES


class Source(Protocol):
    def has(self, topic: str) -> bool: ...

    def read(self, topics: Sequence[str], *columns: str) -> DataFrame:
        """The messages of these topics, which are there, in the span."""


class Brokers:
    def __init__(self, spark: SparkSession, name_server: str, span: Span) -> None:
        self._spark = spark
        self._name_server = name_server
        self._span = span

    def has(self, topic: str) -> bool:
        return is_there(self._name_server, topic)

    def read(self, topics: Sequence[str], *columns: str) -> DataFrame:
        # What expires while it is read is not there any more: no reason to fail.
        reader = self._spark.read.format("rocketmq").options(
            nameServer=self._name_server, subscribe=",".join(topics), failOnDataLoss=False
        )
        if self._span.begin is not None:
            reader = reader.option("startingTimestamp", as_ms(self._span.begin))
        if self._span.end is not None:
            reader = reader.option("endingTimestamp", as_ms(self._span.end))
        return reader.schema(", ".join(f"{name} {SPARK_TYPES[name]}" for name in columns)).load()


class Archive:
    """What `skylark pipeline archive` wrote."""

    def __init__(self, spark: SparkSession, path: str, span: Span, topics: Sequence[str]) -> None:
        """Raises PipelineError unless the topics were archived."""
        self._lake = Lake(spark, path)
        self._span = span
        for topic in topics:
            self._lake.choose(topic)

    def has(self, topic: str) -> bool:
        return self._lake.has(topic)

    def read(self, topics: Sequence[str], *columns: str) -> DataFrame:
        parts = [self._lake.messages(topic, self._span).select(*columns) for topic in topics]
        return functools.reduce(DataFrame.unionByName, parts)
