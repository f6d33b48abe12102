"""The trace topic as a table: a row for each record that clients wrote about a send or a call of a listener."""

from __future__ import annotations

from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from skylark.client.traces import read_events
from skylark.pipelines.report.figures import Step
from skylark.pipelines.report.times import as_time
from skylark.wire.trace import Pub, Recall, SubAfter, SubBefore, Trace, decode_traces

SENT: Final = "sent"
BEGUN: Final = "begun"
ENDED: Final = "ended"

_RECORD: Final = (
    "struct<what: string, timeMs: bigint, `group`: string, topic: string, msgId: string, costMs: bigint, "
    "success: boolean, call: string>"
)


def records(messages: DataFrame) -> DataFrame:
    """The records in the bodies of trace messages. `topic` is that of a send, `call` pairs begin and end of a call."""
    # Arrow would be faster, but Spark wants pandas for that.
    decode = F.udf(_decoded, f"array<{_RECORD}>", useArrow=False)
    return messages.select(F.inline(decode("body")))


def _decoded(body: bytes) -> list[tuple[Any, ...]]:
    rows = map(_row, decode_traces(body.decode("utf-8", "replace")))
    return [row for row in rows if row is not None]


def _row(trace: Trace) -> tuple[Any, ...] | None:
    match trace:
        case Pub():
            return (
                SENT, trace.time_ms, trace.group, trace.topic, trace.msg_id, trace.cost_ms, trace.is_success, None,
            )  # fmt: skip
        case SubBefore():
            return BEGUN, trace.time_ms, trace.group, None, trace.msg_id, None, None, trace.request_id
        case SubAfter():  # older clients leave time and group to the record before
            return (
                ENDED, trace.time_ms or None, trace.group or None, None, trace.msg_id, trace.cost_ms, trace.is_success,
                trace.request_id,
            )  # fmt: skip
        case _:
            return None


def calls(traces: DataFrame) -> DataFrame:
    """A row for each call of a listener with a message that came to its end, from the two records about it."""
    ended = F.col("what") == ENDED
    begin = F.min(F.when(F.col("what") == BEGUN, F.col("timeMs")))
    return (
        traces.where(F.col("what").isin(BEGUN, ENDED))
        .groupBy("call", "msgId")
        .agg(
            F.max("group").alias("group"),
            begin.alias("beginMs"),
            F.coalesce(F.max(F.when(ended, F.col("timeMs"))), begin + F.max("costMs")).alias("endMs"),
            F.max("costMs").alias("costMs"),
            F.min("success").alias("success"),
            F.max(ended).alias("ended"),
        )
        .where("ended")
    )


def steps(messages: DataFrame, wanted: str) -> list[Step]:
    """The events of the message with this id or key, in order. A trace message has those of its records as its keys."""
    found = messages.where(F.array_contains(F.split("keys", " "), wanted)).select("body").collect()
    traces = [trace for row in found for trace in decode_traces(bytes(row.body).decode("utf-8", "replace"))]
    return [
        Step(
            time=as_time(event.time_ms),
            what=event.what,
            group=event.group,
            msg_id=event.record.msg_id,
            took_ms=event.cost_ms,
            result=event.result,
        )
        for event in read_events((trace, "") for trace in traces if _is_about(trace, wanted))
    ]


def _is_about(trace: Trace, wanted: str) -> bool:
    keys = None if isinstance(trace, Recall) else trace.keys
    return trace.msg_id == wanted or wanted in (keys or "").split()
