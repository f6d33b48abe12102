"""What a trace tells, in the words of whoever asks what became of a message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from skylark.wire.trace import ConsumeCode, EndTransaction, Pub, Recall, SubAfter, SubBefore, Trace

_CODES: Final = {code.value: code.name.lower().replace("_", " ") for code in ConsumeCode}
_PLAIN_CODES: Final = (ConsumeCode.SUCCESS, ConsumeCode.FAILED)
_STAGES: Final = (Pub, EndTransaction, Recall, SubBefore | SubAfter)


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a message's life; `record` is what the client at `client_host` wrote about it."""

    what: str  # sent, consuming, consumed, transaction ended, recalled
    group: str
    client_host: str
    time_ms: int
    cost_ms: int | None = None
    result: str = ""
    record: Trace

    def to_dict(self) -> dict[str, Any]:
        """All that is known, for programs."""
        known: dict[str, Any] = msgspec.to_builtins(self.record)
        return {"kind": known.pop("type"), **known, "client_host": self.client_host}


def read_events(records: Iterable[tuple[Trace, str]]) -> list[TraceEvent]:
    """The events behind records and the hosts of their writers, in the order of time, and in the order of a message's
    life within a millisecond. The records of one message come in any order: each may lie in another queue."""
    pairs = list(records)
    begun = {record.request_id: record for record, _ in pairs if isinstance(record, SubBefore)}
    events = [_event(record, host, begun) for record, host in pairs]
    return sorted(events, key=lambda event: (event.time_ms, *_place_in_life(event.record, begun)))


def _place_in_life(record: Trace, begun: dict[str, SubBefore]) -> tuple[int, int, bool]:
    stage = next(number for number, kinds in enumerate(_STAGES) if isinstance(record, kinds))
    before = begun.get(record.request_id) if isinstance(record, SubAfter) else record
    retries = before.retries if isinstance(before, SubBefore) else 0
    return stage, retries, isinstance(record, SubAfter)


def _event(record: Trace, client_host: str, begun: dict[str, SubBefore]) -> TraceEvent:
    time_ms, group, cost_ms, result = record.time_ms, record.group, None, ""
    match record:
        case Pub():
            what, cost_ms, result = "sent", record.cost_ms, _result(record.is_success)
        case SubBefore():
            what = "consuming"
            result = f"retry {record.retries}" if record.retries else ""
        case SubAfter():
            what, cost_ms, result = "consumed", record.cost_ms, _result(record.is_success)
            if record.code not in _PLAIN_CODES:
                result += f" ({_CODES.get(record.code, record.code)})"
            before = begun.get(record.request_id)
            if not group and before is not None:  # older clients leave it to the record before
                time_ms, group = before.time_ms + record.cost_ms, before.group
        case EndTransaction():
            what = "transaction ended"
            result = record.state.lower() + (" after a check" if record.is_from_check else "")
        case Recall():
            what, result = "recalled", _result(record.is_success)
    return TraceEvent(
        what=what,
        group=group,
        client_host=client_host,
        time_ms=time_ms,
        cost_ms=cost_ms,
        result=result,
        record=record,
    )


def _result(is_success: bool) -> str:
    return "success" if is_success else "failed"
