"""Receipt handles, offset lists, check points and acknowledgements: Apache's own texts, and what goes round."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.wire import pop
from skylark.wire.bodies import BadBody, MessageQueue, decode_body, encode_body
from skylark.wire.frame import Encoding, Frame
from skylark.wire.framing import FrameDecoder, encode_frame
from skylark.wire.typed import decode_header, encode_header

offsets = st.integers(0, 2**62 - 1)
names = st.text("abcXYZ019-_%", min_size=1, max_size=20)
kinds = st.sampled_from(["0", "1", "2"])
handles = st.builds(
    pop.ReceiptHandle, offsets, offsets, offsets, st.integers(0, 999), kinds, names, st.integers(0, 99), offsets
)


@given(handles)
def test_a_receipt_handle_goes_round(handle: pop.ReceiptHandle) -> None:
    assert pop.ReceiptHandle.parse(handle.encode()) == handle


def test_a_receipt_handle_is_apaches_extra_info() -> None:
    text = "7 1700000000000 60000 3 2 broker-a 5 9"
    handle = pop.ReceiptHandle.parse(text)
    assert handle.encode() == text
    assert handle.visible_at_ms == 1700000060000
    assert pop.real_topic("T", "G", handle.kind) == "%RETRY%G+T"
    assert pop.ReceiptHandle.parse(text + " 4711") == handle
    assert pop.ReceiptHandle.parse("7 1700000000000 60000 3 2 broker-a 5").offset == -1


@pytest.mark.parametrize("text", ["", "x", "1 2 3 4 0 b", "1 2 3 x 0 b 1 1", "1 2 3 4 9 b 1 1", "1 2 3 4 0 b 1 offset"])
def test_what_is_no_handle(text: str) -> None:
    with pytest.raises(pop.BadHandle):
        pop.ReceiptHandle.parse(text)


@given(st.text(max_size=60))
def test_any_text_is_a_handle_or_refused(text: str) -> None:
    with contextlib.suppress(pop.BadHandle):
        pop.ReceiptHandle.parse(text)


def test_retry_topics() -> None:
    assert pop.pop_retry_topic("T_1", "G") == "%RETRY%G_T_1"
    for topic in ("%RETRY%G_T_1", "%RETRY%G+T_1", "T_1"):
        assert pop.origin_topic(topic, "G") == "T_1"
    assert [pop.topic_kind(topic) for topic in ("T", "%RETRY%G_T", "%RETRY%G+T")] == ["0", "1", "2"]
    with pytest.raises(pop.BadHandle):
        pop.real_topic("T", "G", "3")


@given(st.dictionaries(st.tuples(kinds, st.integers(0, 99)), st.lists(offsets, min_size=1, max_size=5), max_size=4))
def test_offset_lists_go_round(lists: dict[tuple[str, int], list[int]]) -> None:
    topics = {"0": "T", "1": "%RETRY%G_T", "2": "%RETRY%G+T"}
    info = ";".join(pop.encode_offsets(topics[kind], queue, found) for (kind, queue), found in lists.items())
    assert pop.parse_offsets(info) == lists
    starts = ";".join(pop.encode_start_offset(topics[kind], queue, found[0]) for (kind, queue), found in lists.items())
    assert pop.parse_start_offsets(starts) == {key: found[0] for key, found in lists.items()}


@pytest.mark.parametrize("info", ["0", "0 1", "0 1 2 3", "0 1 x", "0 1 2;0 1 3"])
def test_bad_offset_lists(info: str) -> None:
    with pytest.raises(pop.BadHandle):
        pop.parse_start_offsets(info)


def test_the_handles_of_an_answer() -> None:
    header = pop.PopMessageResponse(100, 60, 3, 0, "0 5 7;1 0 2", "0 5 7,9;1 0 2")
    found = pop.handles_of(header, "b", [("T", 5, 7), ("T", 5, 9), ("%RETRY%G_T", 0, 2)])
    assert [each.encode() for each in found] == ["7 100 60 3 0 b 5 7", "7 100 60 3 0 b 5 9", "2 100 60 3 1 b 0 2"]
    again = pop.renewed(found[1], pop.ChangeInvisibleTimeResponse(200, 30, 3))
    assert again.encode() == "9 200 30 3 0 b 5 9"


def test_order_counts() -> None:
    counts = pop.parse_order_counts("0 1 0;0 qo1%7 2")
    assert pop.order_count(counts, "T", 1, 7) == 2
    assert pop.order_count(counts, "T", 1, 8) == 0
    assert pop.order_count({}, "T", 1, 8) == 0
    entries = [pop.encode_queue_order_count("T", 1, 0), pop.encode_offset_order_count("T", 1, 7, 2)]
    assert pop.parse_order_counts(";".join(entries)) == counts


def test_a_check_point_is_apaches_json() -> None:
    text = (
        b'{"bm":0,"bn":"b","c":"G","d":[0,2],"it":60000,"n":2,"pt":1700000000000,"q":3,"reviveTime":1700000060000,'
        b'"ro":0,"so":7,"sp":false,"t":"T"}'
    )
    point = pop.decode_check_point(text)
    assert point.offsets == [7, 9]
    assert point.unique_key == "T@3@7@G@1700000000000@b@ck"
    assert pop.encode_record(point) == text
    again = (
        b'{"bm":-1,"bn":"b","c":"G","d":[0,2],"it":60000,"n":2,"pt":1700000000000,"q":3,"reviveTime":1700000060000,'
        b'"ro":9,"rp":"2","so":7,"sp":true,"t":"T"}'
    )
    assert pop.encode_record(pop.decode_check_point(again)) == again


def test_a_check_point_without_a_list_is_of_neighbours() -> None:
    point = pop.decode_check_point(b'{"c":"G","it":1,"n":3,"pt":1,"q":0,"so":7,"t":"T"}')
    assert point.offsets == [7, 8, 9]


def test_acknowledgements_are_apaches_json() -> None:
    one = b'{"ao":9,"bn":"b","c":"G","pt":17,"q":3,"so":7,"t":"T"}'
    assert pop.encode_record(pop.decode_ack(one)) == one
    assert pop.decode_ack(one).unique_key == "T@3@9@G@17@b@ack"
    some = b'{"ao":0,"aol":[7,9],"bn":"b","c":"G","pt":17,"q":3,"so":7,"t":"T"}'
    assert pop.encode_record(pop.decode_ack(some)) == some


@pytest.mark.parametrize("body", [b"", b"[]", b'{"c":"G"}', b'{"t":1}', b"\xff"])
def test_what_is_no_record(body: bytes) -> None:
    with pytest.raises(BadBody):
        pop.decode_check_point(body)
    with pytest.raises(BadBody):
        pop.decode_ack(body)


def test_the_body_of_a_batch_is_apaches_json() -> None:
    text = (
        b'{"acks":[{"b":"AQI=","c":"G","it":60,"pt":17,"q":3,"r":"0","rq":1,"so":7,"t":"T"}],"brokerName":"b"}'
    )  # fmt: skip
    body = decode_body(pop.BatchAckMessage, text)
    assert body.acks[0].offsets() == [7, 16]
    assert encode_body(body) == text


@given(st.sets(st.integers(0, 5000), max_size=40))
def test_bit_sets_go_round(indexes: set[int]) -> None:
    assert pop.decode_bits(pop.encode_bits(indexes)) == sorted(indexes)


def test_a_batch_has_an_entry_for_each_check_point() -> None:
    first = pop.ReceiptHandle(7, 100, 60, 3, "0", "b", 5, 7)
    second = msgspec.structs.replace(first, offset=9)
    other = msgspec.structs.replace(first, pop_time_ms=101)
    acks = pop.BatchAck.of("T", "G", [first, other, second])
    assert [ack.offsets() for ack in acks] == [[7, 9], [7]]


@pytest.mark.parametrize("bits", ["!", "A", "A" * (pop.MAX_ACK_BITS // 4)])
def test_bad_bit_sets(bits: str) -> None:
    with pytest.raises(BadBody):
        pop.decode_bits(bits)


def test_a_handle_that_names_a_message_before_its_check_point() -> None:
    with pytest.raises(pop.BadHandle):
        pop.BatchAck.of("T", "G", [pop.ReceiptHandle(7, 100, 60, 3, "0", "b", 5, 6)])


def test_assignment_bodies_are_apaches_json() -> None:
    answer = pop.QueryAssignmentResponse([pop.QueueAssignment(MessageQueue("b", -1, "T"), pop.POP)])
    assert encode_body(answer) == (
        b'{"messageQueueAssignments":[{"messageQueue":{"brokerName":"b","queueId":-1,"topic":"T"},"mode":"POP"}]}'
    )
    mode = pop.SetMessageRequestMode("G", pop.POP, 2, "T")
    assert encode_body(mode) == b'{"consumerGroup":"G","mode":"POP","popShareQueueNum":2,"topic":"T"}'
    asked = b'{"clientId":"c","consumerGroup":"G","messageModel":"CLUSTERING","strategyName":"AVG","topic":"T"}'
    assert encode_body(decode_body(pop.QueryAssignment, asked)) == asked


def test_headers_go_round() -> None:
    header = pop.PopMessage("G", "T", -1, 32, 60_000, 15_000, 1, 0, "TAG", "*", True, "attempt")
    assert decode_header(pop.PopMessage, Frame(200050, encode_header(header))) == header


def test_a_code_that_the_binary_header_has_no_room_for_goes_as_json() -> None:
    """Apache's encoder cuts it off, and no server of Apache's knows what is left."""
    (frame,) = FrameDecoder().feed(encode_frame(Frame(200050, {"a": "b"}, encoding=Encoding.BINARY)))
    assert (frame.code, frame.encoding) == (200050, Encoding.JSON)
