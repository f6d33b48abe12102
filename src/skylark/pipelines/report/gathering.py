"""Makes a report: Spark counts over the messages, the brokers tell how far the groups are.

The messages of the topics are read once, without their bodies, and kept by Spark for all that is counted over them. The
trace topic, the retry topics and those of dead letters are read once each. What is not there is a note of its section.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final

import msgspec
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from skylark.pipelines.errors import PipelineError
from skylark.pipelines.lake import check_path
from skylark.pipelines.report import failures, tracing
from skylark.pipelines.report import groups as consumer_groups
from skylark.pipelines.report.counting import count, first_of_each, kept
from skylark.pipelines.report.figures import (
    Bucket,
    HotKey,
    Latency,
    QueueLoad,
    Report,
    SlowMessage,
    Throughput,
    Traced,
)
from skylark.pipelines.report.sources import Archive, Brokers, Source
from skylark.pipelines.report.times import as_time, bucket_s
from skylark.pipelines.span import ALWAYS, Span
from skylark.pipelines.topics import existing
from skylark.spark.queues import Queue
from skylark.wire.trace import TRACE_TOPIC

TO_BROKER: Final = "sent to stored"
TO_GROUP: Final = "stored to handed out"
END_TO_END: Final = "sent to consumed"
BY_MESSAGES: Final = "messages"
BY_TRACES: Final = "traces"

_PERCENTILES: Final = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p999_ms": 0.999}
_HOW_TO_TRACE: Final = "clients write them with trace=True in Python, enableTrace in Java"


class Asked(msgspec.Struct, kw_only=True, frozen=True):
    """What the user wants a report of. With `lake`, messages come from an archive and not from the brokers."""

    name_server: str
    topics: Sequence[str]
    groups: Sequence[str] = ()
    span: Span = ALWAYS
    lake: str | None = None
    top: int = 10
    message: str | None = None


class Known(msgspec.Struct, frozen=True):
    """What the brokers said before Spark was started: the groups to report on, and the queues of the topics."""

    groups: Sequence[str]
    queues: Sequence[Queue]


def check(asked: Asked) -> Known:
    """Raises PipelineError for what can't be reported on. Without a group, a lake needs no broker."""
    if asked.span.begin and asked.span.end and asked.span.begin >= asked.span.end:
        raise PipelineError("the time to end at (--until) must lie behind the time to begin at (--since)")
    if asked.lake is not None:
        check_path(asked.lake)
        if not asked.groups:
            return Known([], [])
    queues = existing(asked.name_server, asked.topics)
    return Known(consumer_groups.known_groups(asked.name_server, asked.topics, asked.groups), queues)


def gather(
    spark: SparkSession, asked: Asked, known: Known, now_ms: int, tell: Callable[[str], None] = lambda section: None
) -> Report:
    """The report. `tell` is called with the name of what comes next. Raises PipelineError."""
    source: Source = (
        Brokers(spark, asked.name_server, asked.span)
        if asked.lake is None
        else Archive(spark, asked.lake, asked.span, asked.topics)
    )
    report = Report(
        made=as_time(now_ms),
        read_from=f"the brokers of {asked.name_server}" if asked.lake is None else f"the archive {asked.lake}",
        topics=list(asked.topics),
        groups=list(known.groups),
        since=asked.span.begin,
        until=asked.span.end,
        message=asked.message,
    )
    with kept(_messages(source, asked.topics)) as messages:
        tell("throughput")
        _add_throughput(report, messages, known.queues if asked.lake is None else [])
        tell("keys")
        report.keys = _hot_keys(messages, report, asked.top)
        tell("latency")
        report.latency = _to_broker(messages)
        tell("traces")
        _add_traces(report, source, messages, asked)
    tell("lag")
    report.queue_lag = consumer_groups.queue_lag(asked.name_server, known.groups, asked.topics, now_ms)
    report.lag = consumer_groups.summed_lag(report.queue_lag)
    tell("retries")
    report.retries = failures.retries(source, known.groups, asked.topics)
    tell("dead letters")
    failures.add_dead_letters(report, source, known.groups, asked.top)
    _add_notes(report, asked)
    return report


def _messages(source: Source, topics: Sequence[str]) -> DataFrame:
    columns = ("topic", "broker", "queueId", "body", "keys", "bornTimestamp", "storeTimestamp", "msgId")
    return source.read(topics, *columns).select(
        "topic",
        "broker",
        "queueId",
        "keys",
        "msgId",
        F.length("body").alias("bytes"),
        F.unix_millis("bornTimestamp").alias("bornMs"),
        F.unix_millis("storeTimestamp").alias("storedMs"),
    )


# Throughput.


def _add_throughput(report: Report, messages: DataFrame, queues: Sequence[Queue]) -> None:
    by_queue = (
        messages.groupBy("topic", "broker", "queueId")
        .agg(count(), F.sum("bytes").alias("bytes"), F.min("storedMs").alias("first"), F.max("storedMs").alias("last"))
        .collect()
    )
    times = [time for row in by_queue for time in (row["first"], row["last"])]
    report.bucket_s = bucket_s(max(times) - min(times) if times else 0)
    report.buckets = _buckets(messages, report.bucket_s)
    report.throughput = [
        _throughput(topic, [row for row in by_queue if row.topic == topic], report) for topic in report.topics
    ]
    report.queues = _queue_loads(report, by_queue, queues)


def _buckets(messages: DataFrame, length_s: int) -> list[Bucket]:
    start = F.floor(F.col("storedMs") / (length_s * 1000)) * (length_s * 1000)
    rows = messages.groupBy("topic", start.alias("start")).agg(count(), F.sum("bytes").alias("bytes"))
    return [
        Bucket(topic=row.topic, time=as_time(row.start), messages=row.messages, body_bytes=row.bytes)
        for row in rows.orderBy("topic", "start").collect()
    ]


def _throughput(topic: str, by_queue: Sequence[Row], report: Report) -> Throughput:
    count = sum(row.messages for row in by_queue)
    first: Any = min((row["first"] for row in by_queue), default=None)
    last: Any = max((row["last"] for row in by_queue), default=None)
    peak = max((b for b in report.buckets if b.topic == topic), key=lambda b: b.messages, default=None)
    return Throughput(
        topic=topic,
        messages=count,
        body_bytes=sum(row.bytes for row in by_queue),
        mean_per_s=count * 1000 / max(1000, last - first) if by_queue else 0.0,
        peak_per_s=peak.messages / report.bucket_s if peak else 0.0,
        peak_at=peak.time if peak else None,
        first=as_time(first),
        last=as_time(last),
    )


def _queue_loads(report: Report, by_queue: Sequence[Row], queues: Sequence[Queue]) -> list[QueueLoad]:
    """Queues without a message too: that is what a skewed key leaves."""
    totals = {each.topic: each.messages for each in report.throughput}
    found = {Queue(row.topic, row.broker, row.queueId): (row.messages, row.bytes) for row in by_queue}
    return [
        QueueLoad(
            topic=queue.topic,
            broker=queue.broker,
            queue=queue.queue_id,
            messages=count,
            body_bytes=size,
            share=count / totals[queue.topic] if totals[queue.topic] else 0.0,
        )
        for queue, (count, size) in sorted({**dict.fromkeys(queues, (0, 0)), **found}.items())
    ]


def _hot_keys(messages: DataFrame, report: Report, top: int) -> list[HotKey]:
    """The most frequent keys of each topic; a message counts for each of its keys."""
    keys = messages.where("keys is not null").select(
        "topic", F.explode(F.array_distinct(F.split(F.trim("keys"), r"\s+"))).alias("key")
    )
    counted = keys.where("key <> ''").groupBy("topic", "key").agg(count())
    totals = {each.topic: each.messages for each in report.throughput}
    return [
        HotKey(topic=row.topic, key=row.key, messages=row.messages, share=row.messages / totals[row.topic])
        for row in first_of_each(counted, top, "topic", F.desc("messages"), F.col("key")).collect()
    ]


# Latency and traces.


def _percentiles(ms: Column) -> list[Column]:
    """Values that occur, at a rank that is wrong by 0.01 % of all at most."""
    return [
        F.percentile_approx(ms, list(_PERCENTILES.values()), 10_000).alias("percentiles"),
        F.max(ms).alias("max"),
        F.count(ms).alias("messages"),
    ]


def _as_percentiles(row: Row) -> dict[str, int]:
    return {**dict(zip(_PERCENTILES, row.percentiles, strict=True)), "max_ms": row["max"]}


def _latencies(frame: DataFrame, way: str, measured_by: str, ms: Column, *by: str) -> list[Latency]:
    rows = frame.groupBy(*by).agg(*_percentiles(ms)).where("messages > 0").orderBy(*by).collect()
    return [
        Latency(
            topic=row.topic,
            way=way,
            group=row.asDict().get("group"),
            measured_by=measured_by,
            messages=row.messages,
            **_as_percentiles(row),
        )
        for row in rows
    ]


def _to_broker(messages: DataFrame) -> list[Latency]:
    return _latencies(messages, TO_BROKER, BY_MESSAGES, F.col("storedMs") - F.col("bornMs"), "topic")


def _add_traces(report: Report, source: Source, messages: DataFrame, asked: Asked) -> None:
    if not source.has(TRACE_TOPIC):
        report.notes["traces"] = f"there is no topic {TRACE_TOPIC}, so there are no traces: {_HOW_TO_TRACE}"
        return
    with ExitStack() as stack:
        traces = stack.enter_context(kept(tracing.records(source.read([TRACE_TOPIC], "body"))))
        calls = stack.enter_context(kept(_calls_with_messages(traces, messages, asked.groups)))
        report.traces = _sends(traces, report.topics) + _consumed(calls)
        handed = stack.enter_context(kept(_by_message(calls)))
        report.latency += _latencies(
            handed, TO_GROUP, BY_TRACES, F.col("beginMs") - F.col("storedMs"), "topic", "group"
        ) + _latencies(handed, END_TO_END, BY_TRACES, _took(), "topic", "group")
        report.slowest = _slowest(handed, asked.top)
    if asked.message is not None:
        report.steps = tracing.steps(source.read([TRACE_TOPIC], "body", "keys"), asked.message)


def _calls_with_messages(traces: DataFrame, messages: DataFrame, groups: Sequence[str]) -> DataFrame:
    """The calls that were about messages of the topics: their records don't name the topic."""
    about = messages.groupBy("msgId").agg(  # a message that was stored twice counts once
        F.first("topic").alias("topic"),
        F.first("keys").alias("keys"),
        F.min("bornMs").alias("bornMs"),
        F.min("storedMs").alias("storedMs"),
    )
    calls = tracing.calls(traces).join(about, "msgId")
    return calls.where(F.col("group").isin(*groups)) if groups else calls


def _by_message(calls: DataFrame) -> DataFrame:
    """A row for each message and group: when it was first handed out, and when it was first consumed with success."""
    return calls.groupBy("topic", "group", "msgId").agg(
        F.first("keys").alias("keys"),
        F.min("bornMs").alias("bornMs"),
        F.min("storedMs").alias("storedMs"),
        F.min("beginMs").alias("beginMs"),
        F.min(F.when(F.col("success"), F.col("endMs"))).alias("endMs"),
        F.count("*").alias("calls"),
    )


def _took() -> Column:
    return F.col("endMs") - F.col("bornMs")


def _sends(traces: DataFrame, topics: Sequence[str]) -> list[Traced]:
    sends = traces.where((F.col("what") == tracing.SENT) & F.col("topic").isin(*topics))
    return _traced(sends, "sent")


def _consumed(calls: DataFrame) -> list[Traced]:
    return _traced(calls, "consumed")


def _traced(frame: DataFrame, what: str) -> list[Traced]:
    failed = F.count(F.when(~F.col("success"), 1)).alias("failed")
    rows = frame.groupBy("topic", "group").agg(*_percentiles(F.col("costMs")), failed)
    return [
        Traced(
            topic=row.topic,
            what=what,
            group=row.group,
            calls=row.messages,
            failed=row.failed,
            **_as_percentiles(row),
        )
        for row in rows.orderBy("topic", "group").collect()
    ]


def _slowest(handed: DataFrame, top: int) -> list[SlowMessage]:
    rows = handed.where("endMs is not null").withColumn("took", _took()).orderBy(F.desc("took"), "msgId").limit(top)
    return [
        SlowMessage(
            topic=row.topic,
            group=row.group,
            msg_id=row.msgId,
            keys=row["keys"],
            sent=as_time(row.bornMs),
            consumed=as_time(row.endMs),
            took_ms=row.took,
            calls=row.calls,
        )
        for row in rows.collect()
    ]


def _add_notes(report: Report, asked: Asked) -> None:
    """Why a section is empty, or what its figures do not say."""
    notes = report.notes
    if not report.buckets:
        notes["throughput"] = "no message was stored in this time"
    elif not report.keys:
        notes["keys"] = "no message has a key"
    if report.buckets and not report.slowest:
        notes["latency"] = (
            "there are no traces of consumers for these messages, so this is only how long they took to the broker, "
            "by the clocks of producer and broker"
        )
    if not report.traces:
        notes.setdefault("traces", f"no client wrote a trace of these topics: {_HOW_TO_TRACE}")
    if report.message is not None and not report.steps:
        notes["steps"] = f"no trace has the id or key {report.message}"
    if not report.groups:
        notes["lag"] = "no group has consumed these topics" if asked.lake is None else "an archive needs --group for it"
        return
    idle = [group for group in report.groups if not any(row.group == group for row in report.lag)]
    if idle:
        notes["lag"] = f"nothing committed yet: {', '.join(idle)}"
    if not report.retries:
        notes["retries"] = "no message was sent back"
    if not report.dead_letters:
        notes["dead_letters"] = "none"
