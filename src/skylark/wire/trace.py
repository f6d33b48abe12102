"""Message traces: the bodies that clients write to RMQ_SYS_TRACE_TOPIC, and that tools read back.

A body holds records, each ended by \\x02; a record's fields are separated by \\x01, the first names its kind:

    Pub            time region group topic id tags keys store-host body-length cost type offset-id success
    SubBefore      time region group request-id id retries keys
    SubAfter       request-id id cost success keys code [time group]
    EndTransaction time region group topic id tags keys store-host type transaction-id state from-check
    Recall         time region group topic id success

What is not there is the word "null", as Java prints it. Times and costs are in milliseconds. A trace message has the
ids and the keys of all its records as its own keys, which is how a trace is found.

Older clients write fewer fields and newer ones may write more: what is missing has its default, what is too much is
passed over, and so is a record that can't be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Final

import msgspec

TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
FIELD_SEPARATOR: Final = "\x01"
RECORD_SEPARATOR: Final = "\x02"
_NULL: Final = "null"


class MessageType(IntEnum):
    NORMAL = 0
    TRANSACTION_HALF = 1
    TRANSACTION_COMMIT = 2
    DELAY = 3
    ORDER = 4


class ConsumeCode(IntEnum):
    """How a listener ended."""

    SUCCESS = 0
    TIMEOUT = 1
    EXCEPTION = 2
    RETURNED_NULL = 3
    FAILED = 4


class Pub(msgspec.Struct, kw_only=True, tag="Pub"):
    """A message was sent."""

    time_ms: int
    region: str
    group: str
    topic: str
    msg_id: str
    tags: str | None = None
    keys: str | None = None
    store_host: str = ""
    body_length: int = 0
    cost_ms: int = 0
    message_type: int = MessageType.NORMAL
    offset_msg_id: str | None = None
    is_success: bool = True


class SubBefore(msgspec.Struct, kw_only=True, tag="SubBefore"):
    """A message is about to be consumed."""

    time_ms: int
    region: str
    group: str
    request_id: str
    msg_id: str
    retries: int = 0
    keys: str | None = None


class SubAfter(msgspec.Struct, kw_only=True, tag="SubAfter"):
    """A message was consumed. Time and group are 0 and empty where an older client wrote."""

    request_id: str
    msg_id: str
    cost_ms: int
    is_success: bool
    keys: str | None = None
    code: int = ConsumeCode.SUCCESS
    time_ms: int = 0
    group: str = ""


class EndTransaction(msgspec.Struct, kw_only=True, tag="EndTransaction"):
    """A transaction was ended by its producer."""

    time_ms: int
    region: str
    group: str
    topic: str
    msg_id: str
    tags: str | None = None
    keys: str | None = None
    store_host: str = ""
    message_type: int = MessageType.TRANSACTION_COMMIT
    transaction_id: str | None = None
    state: str = "COMMIT_MESSAGE"  # or ROLLBACK_MESSAGE, UNKNOW
    is_from_check: bool = False


class Recall(msgspec.Struct, kw_only=True, tag="Recall"):
    """A delayed message was called back."""

    time_ms: int
    region: str
    group: str
    topic: str
    msg_id: str
    is_success: bool = True


Trace = Pub | SubBefore | SubAfter | EndTransaction | Recall


def encode_trace(trace: Trace) -> str:
    """One record, with its end."""
    fields: Sequence[object]
    match trace:
        case Pub():
            fields = (
                "Pub", trace.time_ms, trace.region, trace.group, trace.topic, trace.msg_id, trace.tags, trace.keys,
                trace.store_host, trace.body_length, trace.cost_ms, int(trace.message_type), trace.offset_msg_id,
                trace.is_success,
            )  # fmt: skip
        case SubBefore():
            fields = (
                "SubBefore", trace.time_ms, trace.region, trace.group, trace.request_id, trace.msg_id, trace.retries,
                trace.keys,
            )  # fmt: skip
        case SubAfter():
            fields = (
                "SubAfter", trace.request_id, trace.msg_id, trace.cost_ms, trace.is_success, trace.keys,
                int(trace.code), trace.time_ms, trace.group,
            )  # fmt: skip
        case EndTransaction():
            fields = (
                "EndTransaction", trace.time_ms, trace.region, trace.group, trace.topic, trace.msg_id, trace.tags,
                trace.keys, trace.store_host, int(trace.message_type), trace.transaction_id, trace.state,
                trace.is_from_check,
            )  # fmt: skip
        case Recall():
            fields = (
                "Recall", trace.time_ms, trace.region, trace.group, trace.topic, trace.msg_id, trace.is_success,
            )  # fmt: skip
    return FIELD_SEPARATOR.join([_text(field) for field in fields]) + RECORD_SEPARATOR


def decode_traces(body: str) -> list[Trace]:
    """The records of a trace message that can be read, in their order."""
    traces: list[Trace] = []
    for record in body.split(RECORD_SEPARATOR):
        kind, *fields = record.split(FIELD_SEPARATOR)
        read = _READERS.get(kind)
        if read is not None:
            try:
                traces.append(read(fields))
            except (IndexError, ValueError):
                continue
    return traces


def trace_keys(traces: Iterable[Trace]) -> set[str]:
    """What the message that carries these records can be found by."""
    keys = set()
    for trace in traces:
        keys.add(trace.msg_id)
        if not isinstance(trace, Recall) and trace.keys:
            keys.update(trace.keys.split())
    return keys


def _text(value: object) -> str:
    if value is None:
        return _NULL
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _word(text: str) -> str | None:
    return None if text in ("", _NULL) else text


def _flag(text: str) -> bool:
    return text.lower() == "true"


def _read_pub(fields: list[str]) -> Pub:
    trace = Pub(
        time_ms=int(fields[0]),
        region=fields[1],
        group=fields[2],
        topic=fields[3],
        msg_id=fields[4],
        tags=_word(fields[5]),
        keys=_word(fields[6]),
        store_host=fields[7],
        body_length=int(fields[8]),
        cost_ms=int(fields[9]),
        message_type=int(fields[10]),
    )
    if len(fields) == 12:  # before there was an offset id
        trace.is_success = _flag(fields[11])
    elif len(fields) > 12:
        trace.offset_msg_id = _word(fields[11])
        trace.is_success = _flag(fields[12])
    return trace


def _read_sub_before(fields: list[str]) -> SubBefore:
    return SubBefore(
        time_ms=int(fields[0]),
        region=fields[1],
        group=fields[2],
        request_id=fields[3],
        msg_id=fields[4],
        retries=int(fields[5]),
        keys=_word(fields[6]),
    )


def _read_sub_after(fields: list[str]) -> SubAfter:
    trace = SubAfter(
        request_id=fields[0],
        msg_id=fields[1],
        cost_ms=int(fields[2]),
        is_success=_flag(fields[3]),
        keys=_word(fields[4]),
    )
    if len(fields) > 5 and fields[5]:
        trace.code = int(fields[5])
    if len(fields) > 7:
        trace.time_ms = int(fields[6])
        trace.group = fields[7]
    return trace


def _read_end_transaction(fields: list[str]) -> EndTransaction:
    return EndTransaction(
        time_ms=int(fields[0]),
        region=fields[1],
        group=fields[2],
        topic=fields[3],
        msg_id=fields[4],
        tags=_word(fields[5]),
        keys=_word(fields[6]),
        store_host=fields[7],
        message_type=int(fields[8]),
        transaction_id=_word(fields[9]),
        state=fields[10],
        is_from_check=_flag(fields[11]),
    )


def _read_recall(fields: list[str]) -> Recall:
    return Recall(
        time_ms=int(fields[0]),
        region=fields[1],
        group=fields[2],
        topic=fields[3],
        msg_id=fields[4],
        is_success=_flag(fields[5]),
    )


_READERS: Final[dict[str, Callable[[list[str]], Trace]]] = {
    "Pub": _read_pub,
    "SubBefore": _read_sub_before,
    "SubAfter": _read_sub_after,
    "EndTransaction": _read_end_transaction,
    "Recall": _read_recall,
}
