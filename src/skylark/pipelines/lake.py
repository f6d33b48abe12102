"""The files that `archive` wrote, read again: PATH/topic=orders/date=2026-01-31/*.parquet."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from skylark.pipelines.errors import PipelineError
from skylark.pipelines.files import Files
from skylark.pipelines.keeping import queues_noted
from skylark.pipelines.lives import FIRST, Lives, Portion, later, lives_of
from skylark.pipelines.span import ALWAYS, Span
from skylark.spark.columns import NAMES, SCHEMA

_TOPIC: Final = "topic="
_BESIDE: Final = timedelta(days=1)


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

    @property
    def topics(self) -> list[str]:
        return sorted(self._directories)

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
        """The columns of the source. Of a span, only the files of its days and of those beside them are looked at."""
        return self._found(topic, span).select(*NAMES)

    def in_lives(self, topic: str, span: Span = ALWAYS) -> tuple[DataFrame, Lives]:
        """The same with the column `life`, by whose number and then by offset the messages of a queue are in order."""
        found = self._found(topic, span).select(*NAMES, F.col("_metadata.file_path").alias("file"))
        time_ms = F.unix_millis("storeTimestamp")
        portions = found.groupBy("broker", "queueId", "file").agg(
            F.min("offset"), F.max("offset"), F.count("*"), F.min(time_ms), F.max(time_ms)
        )
        lives = lives_of(Portion(*row) for row in portions.collect())
        others = later(lives)
        if not others:
            return found.drop("file").withColumn("life", F.lit(FIRST)), lives
        numbered = self._spark.createDataFrame(others, "broker string, queueId int, file string, life int")
        joined = found.join(F.broadcast(numbered), ["broker", "queueId", "file"], "left")
        return joined.select(*NAMES, F.coalesce("life", F.lit(FIRST)).alias("life")), lives

    def queues(self, topic: str) -> list[tuple[str, int]]:
        """The queues that the topic had when it was archived last, also those without a message: broker and number."""
        return [(queue.broker, queue.queue_id) for queue in queues_noted(self._files) if queue.topic == topic]

    def _found(self, topic: str, span: Span) -> DataFrame:
        found = self._spark.read.schema(f"{SCHEMA}, date date").parquet(self._files.path(self._directories[topic]))
        # Earlier versions took the date from the session's time zone.
        if span.begin is not None:
            found = found.where(F.col("date") >= span.begin.date() - _BESIDE).where(
                F.col("storeTimestamp") >= span.begin
            )
        if span.end is not None:
            found = found.where(F.col("date") <= span.end.date() + _BESIDE)
            found = found.where(F.col("storeTimestamp") < span.end)
        return found.withColumn("topic", F.lit(topic))
