"""The format of message traces, against lines that Apache's Java client wrote."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.wire.trace import (
    ConsumeCode,
    EndTransaction,
    MessageType,
    Pub,
    Recall,
    SubAfter,
    SubBefore,
    Trace,
    decode_traces,
    encode_trace,
    trace_keys,
)

PUB = Pub(
    time_ms=1700000000000,
    region="DefaultRegion",
    group="g",
    topic="t",
    msg_id="7F0000010B6A18B4AAC2123456780000",
    keys="k1 k2",
    store_host="127.0.0.1:10911",
    body_length=5,
    cost_ms=7,
    offset_msg_id="7F00000100002A9F0000000000000000",
)
LINES: list[tuple[Trace, str]] = [
    (
        PUB,
        "Pub|1700000000000|DefaultRegion|g|t|7F0000010B6A18B4AAC2123456780000|null|k1 k2|127.0.0.1:10911|5|7|0|"
        "7F00000100002A9F0000000000000000|true\x02",
    ),
    (
        SubBefore(time_ms=1, region="r", group="g", request_id="R", msg_id="M", retries=2),
        "SubBefore|1|r|g|R|M|2|null\x02",
    ),
    (
        SubAfter(
            request_id="R", msg_id="M", cost_ms=3, is_success=False, code=ConsumeCode.EXCEPTION, time_ms=9, group="g"
        ),
        "SubAfter|R|M|3|false|null|2|9|g\x02",
    ),
    (
        EndTransaction(
            time_ms=1, region="r", group="g", topic="t", msg_id="M", tags="a", store_host="h", transaction_id="T",
            state="ROLLBACK_MESSAGE", is_from_check=True,
        ),
        "EndTransaction|1|r|g|t|M|a|null|h|2|T|ROLLBACK_MESSAGE|true\x02",
    ),
    (Recall(time_ms=1, region="r", group="g", topic="t", msg_id="M"), "Recall|1|r|g|t|M|true\x02"),
]  # fmt: skip


@pytest.mark.parametrize(("trace", "line"), LINES, ids=lambda value: type(value).__name__)
def test_a_record_is_written_as_apache_writes_it(trace: Trace, line: str) -> None:
    text = line.replace("|", "\x01")
    assert encode_trace(trace) == text
    assert decode_traces(text) == [trace]


def test_many_records_and_their_keys() -> None:
    traces = [trace for trace, _ in LINES]
    assert decode_traces("".join(map(encode_trace, traces))) == traces
    assert trace_keys(traces) == {PUB.msg_id, "k1", "k2", "M"}


def test_what_older_and_newer_clients_write() -> None:
    fields = encode_trace(PUB).rstrip("\x02").split("\x01")
    older = [*fields[:12], "false"]
    newer = [*fields, "10.0.0.1", "something"]
    (old, new) = decode_traces("\x02".join("\x01".join(part) for part in (older, newer)))
    assert old == msgspec.structs.replace(PUB, offset_msg_id=None, is_success=False)
    assert new == PUB
    (bare,) = decode_traces("\x01".join(["SubAfter", "R", "M", "3", "true", "k"]))
    assert bare == SubAfter(request_id="R", msg_id="M", cost_ms=3, is_success=True, keys="k")


@given(st.text(st.sampled_from("\x01\x02PubSAfterRcal 0129\u00fc"), max_size=80))
def test_whatever_stands_there_is_read_or_passed_over(text: str) -> None:
    good = encode_trace(PUB)
    assert decode_traces(f"{text}\x02{good}")[-1] == PUB


@given(
    st.builds(
        Pub,
        time_ms=st.integers(0, 2**62),
        region=st.just("r"),
        group=st.text(st.characters(exclude_characters="\x01\x02"), min_size=1),
        topic=st.just("t"),
        msg_id=st.just("M"),
        tags=st.none()
        | st.text(st.characters(exclude_characters="\x01\x02"), min_size=1).filter(lambda t: t != "null"),
        message_type=st.sampled_from(MessageType),
        is_success=st.booleans(),
    )
)
def test_a_record_comes_back(trace: Pub) -> None:
    assert decode_traces(encode_trace(trace)) == [trace]
