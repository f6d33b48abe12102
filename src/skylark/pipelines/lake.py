"""The files that `archive` wrote, read again: PATH/topic=orders/date=2026-01-31/*.parquet."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from skylark.pipelines.errors import PipelineError
from skylark.pipelines.files import Files
from skylark.pipelines.span import ALWAYS, Span
from skylark.spark.columns import NAMES

_TOPIC: Final = "topic="


def check_path(path: str) -> None:
    """Raises PipelineError for a directory of this machine that is not there; what is elsewhere only Spark can tell."""
    if not re.match(r"[a-z][a-z0-9+.-]+:", path) and not Path(path).is_dir():
        raise PipelineError(f"{path} is no directory: name the one that `skylark pipeline archive` wrote to")


class Lake:
    """What is archived below one path."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self._spark = spark
        self._files = Files(spark, path)
        # Spark writes what a path can't hold as %XX, the percent sign of %DLQ% among it.
        self._directories = {
            unquote(name.removeprefix(_TOPIC)): name for name in self._files.names() if name.startswith(_TOPIC)
        }

    @property
    def root(self) -> str:
        return self._files.root

    def has(self, topic: str) -> bool:
        return topic in self._directories

    def choose(self, topic: str | None) -> str:
        """The topic of that name, or the only one. Raises PipelineError."""
        there = ", ".join(sorted(self._directories))
        if not self._directories:
            raise PipelineError(f"{self.root} has no archive: there is no directory {_TOPIC}NAME in it")
        if topic is None and len(self._directories) > 1:
            raise PipelineError(f"{self.root} has several topics, choose one with --topic: {there}")
        if topic is not None and topic not in self._directories:
            raise PipelineError(f"{self.root} has no topic {topic}, only {there}")
        return topic or there

    def messages(self, topic: str, span: Span = ALWAYS) -> DataFrame:
        """The columns of the source. Of a span, only the files of its days are looked at."""
        found = self._spark.read.parquet(self._files.path(self._directories[topic]))
        if span.begin is not None:
            found = found.where((F.col("date") >= span.begin.date()) & (F.col("storeTimestamp") >= span.begin))
        if span.end is not None:
            found = found.where((F.col("date") <= span.end.date()) & (F.col("storeTimestamp") < span.end))
        return found.withColumn("topic", F.lit(topic)).select(*NAMES)
