"""What groups failed on: messages that were sent back, and those that were given up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import Column, Row
from pyspark.sql import functions as F

from skylark.pipelines.report.counting import count, first_of_each, kept
from skylark.pipelines.report.figures import DeadLetter, DeadLetters, Report, Retries
from skylark.pipelines.report.groups import dead_letter_topic, retry_topics
from skylark.pipelines.report.sources import Source
from skylark.pipelines.report.times import as_time
from skylark.wire.message import PROPERTY_DLQ_ORIGIN_TOPIC, PROPERTY_RETRY_TOPIC


def retries(source: Source, groups: Sequence[str], topics: Sequence[str]) -> list[Retries]:
    owners = {topic: group for group in groups for topic in retry_topics(group, topics) if source.has(topic)}
    if not owners:
        return []
    rows = (
        source.read(list(owners), "topic", "properties", "storeTimestamp", "reconsumeTimes")
        .groupBy("topic", _origin(PROPERTY_RETRY_TOPIC).alias("origin"), "reconsumeTimes")
        .agg(count(), F.max(F.unix_millis("storeTimestamp")).alias("last"))
        .orderBy("topic", "origin", "reconsumeTimes")
    )
    return [
        Retries(
            group=owners[row.topic],
            topic=row.origin or row.topic,
            times=row.reconsumeTimes,
            messages=row.messages,
            last=as_time(row["last"]),
        )
        for row in rows.collect()
    ]


def _origin(*properties: str) -> Column:
    """The topic that a message was first sent to."""
    return F.coalesce(*[F.col("properties").getItem(name) for name in properties])


def add_dead_letters(report: Report, source: Source, groups: Sequence[str], top: int) -> None:
    owners = {dead_letter_topic(group): group for group in groups}
    there = [topic for topic in owners if source.has(topic)]
    if not there:
        return
    read = source.read(there, "topic", "keys", "properties", "storeTimestamp", "reconsumeTimes", "msgId").select(
        "topic",
        "keys",
        "reconsumeTimes",
        "msgId",
        _origin(PROPERTY_DLQ_ORIGIN_TOPIC, PROPERTY_RETRY_TOPIC).alias("origin"),
        F.unix_millis("storeTimestamp").alias("storedMs"),
    )
    with kept(read) as dead:
        counted = dead.groupBy("topic", "origin").agg(
            count(), F.min("storedMs").alias("first"), F.max("storedMs").alias("last")
        )
        report.dead_letters = [
            DeadLetters(
                messages=row.messages, first=as_time(row["first"]), last=as_time(row["last"]), **_whose(row, owners)
            )
            for row in counted.orderBy("topic", "origin").collect()
        ]
        report.last_dead_letters = [
            DeadLetter(
                time=as_time(row.storedMs),
                times=row.reconsumeTimes,
                keys=row["keys"],
                msg_id=row.msgId,
                **_whose(row, owners),
            )
            for row in first_of_each(dead, top, "topic", F.desc("storedMs"), F.col("msgId")).collect()
        ]


def _whose(row: Row, owners: dict[str, str]) -> dict[str, Any]:
    return {"group": owners[row.topic], "topic": row.origin or "-"}
