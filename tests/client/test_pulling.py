"""The buffer of a queue against a model, and what the answers to pulls mean."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from skylark.client.compression import MAX_INFLATED_BYTES
from skylark.client.errors import BrokerError
from skylark.client.message import Message
from skylark.client.pulling import Buffer, Limits, PullStatus, read_answer
from skylark.client.subscriptions import build_subscription
from skylark.wire.bodies import MessageQueue
from skylark.wire.codes import ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import SYS_COMPRESSED
from skylark.wire.message import Message as Record
from skylark.wire.records import encode_record

QUEUE = MessageQueue("broker-a", 0, "t")
ALL = build_subscription("t", version=1)


def message(offset: int, body: bytes = b"x") -> Message:
    return Message(topic="t", body=body, queue_offset=offset)


class BufferModel(RuleBasedStateMachine):
    """Messages come in rising order with gaps and repetitions, and are finished in any order."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.buffer = Buffer()
        self.model: dict[int, Message] = {}
        self.highest = -1

    @rule(target=held, gaps=st.lists(st.integers(1, 5), max_size=8), repeated=st.integers(0, 3), size=st.integers(0, 9))
    def pulled(self, gaps: list[int], repeated: int, size: int) -> Any:
        new = []
        offset = self.highest
        for gap in gaps:
            offset += gap
            new.append(message(offset, bytes(size)))
        again = [message(at) for at in range(max(self.highest - repeated, 0), self.highest + 1)]
        assert self.buffer.put([*again, *new]) == new
        self.model |= {each.queue_offset: each for each in new}
        self.highest = offset
        return multiple(*new)

    @rule(done=consumes(held))
    def finished(self, done: Message) -> None:
        del self.model[done.queue_offset]
        committable = min(self.model) if self.model else self.highest + 1
        assert self.buffer.finish([done]) == committable
        assert self.buffer.finish([done]) == committable

    @invariant()
    def agrees(self) -> None:
        assert len(self.buffer) == len(self.model)
        assert self.buffer.size_bytes == sum(len(each.body) for each in self.model.values())
        assert self.buffer.first_offset == min(self.model, default=-1)
        assert self.buffer.span == (self.highest - min(self.model) if self.model else 0)
        assert self.buffer.first(3) == [self.model[offset] for offset in sorted(self.model)[:3]]
        assert all(offset in self.buffer for offset in self.model)


TestBuffer = BufferModel.TestCase


def test_nothing_can_be_committed_before_anything_came() -> None:
    assert Buffer().finish([]) == -1


@pytest.mark.parametrize(
    ("limits", "full_at"),
    [(Limits(messages=3), 4), (Limits(size_bytes=4), 5), (Limits(span=6), 7)],
    ids=["count", "size", "span"],
)
def test_a_buffer_is_full_beyond_each_of_its_limits(limits: Limits, full_at: int) -> None:
    buffer = Buffer()
    offset = 0
    while not buffer.is_full(limits):
        buffer.put([message(offset)])
        offset += 1
        if limits.span == 6 and offset > 1:
            buffer.finish([message(offset - 1)])
    assert offset == full_at + (limits.span == 6)


def record(offset: int, tag: str = "", body: bytes = b"x", sys_flag: int = 0) -> bytes:
    given = Record(topic="t", queue_id=0, body=body, properties={"TAGS": tag} if tag else {}, sys_flag=sys_flag)
    return encode_record(given, queue_offset=offset, log_offset=offset, store_timestamp_ms=0, store_host=bytes(8))


def answer(code: int, body: bytes = b"", **fields: int) -> Frame:
    return Frame(code, {key: str(value) for key, value in fields.items()}, body)


def test_tags_that_only_share_a_hash_code_are_taken_out() -> None:
    # "Aa" and "BB" are the classic pair with one Java hash code.
    body = record(3, "Aa") + record(4, "BB") + record(5)
    found = answer(ResponseCode.SUCCESS, body, nextBeginOffset=6, minOffset=1, maxOffset=9, suggestWhichBrokerId=1)
    pulled = read_answer(found, QUEUE, build_subscription("t", tag="Aa || c", version=1))
    assert [each.queue_offset for each in pulled.messages] == [3]
    assert (pulled.next_offset, pulled.min_offset, pulled.max_offset) == (6, 1, 9)
    assert pulled.suggested_broker_id == 1
    assert pulled.messages[0].broker == "broker-a"


def test_a_static_topics_offsets_are_shifted() -> None:
    found = answer(ResponseCode.SUCCESS, record(3), nextBeginOffset=4, offsetDelta=100)
    assert read_answer(found, QUEUE, ALL).messages[0].queue_offset == 103


def test_a_body_that_cannot_be_inflated_does_not_hide_the_others() -> None:
    body = record(3, body=b"not zlib", sys_flag=SYS_COMPRESSED) + record(4)
    pulled = read_answer(answer(ResponseCode.SUCCESS, body, nextBeginOffset=5), QUEUE, ALL)
    assert [each.queue_offset for each in pulled.messages] == [3, 4]
    assert list(pulled.unreadable) == [3]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ResponseCode.PULL_NOT_FOUND, PullStatus.NO_NEW_MESSAGE),
        (ResponseCode.PULL_RETRY_IMMEDIATELY, PullStatus.NO_MATCHED_MESSAGE),
        (ResponseCode.PULL_OFFSET_MOVED, PullStatus.OFFSET_ILLEGAL),
    ],
)
def test_what_the_codes_mean(code: int, status: PullStatus) -> None:
    pulled = read_answer(answer(code, nextBeginOffset=7), QUEUE, ALL)
    assert (pulled.status, pulled.next_offset, pulled.messages) == (status, 7, [])


def test_any_other_code_is_an_error_of_the_broker() -> None:
    with pytest.raises(BrokerError) as raised:
        read_answer(Frame(ResponseCode.NO_PERMISSION, remark="forbidden"), QUEUE, ALL)
    assert (raised.value.code, raised.value.remark) == (ResponseCode.NO_PERMISSION, "forbidden")


def test_damaged_messages_are_an_error_of_the_broker() -> None:
    damaged = record(3)[:-3]
    with pytest.raises(BrokerError, match="can't be read"):
        read_answer(answer(ResponseCode.SUCCESS, damaged, nextBeginOffset=4), QUEUE, ALL)


def test_an_answer_is_read_only_as_far_as_its_bodies_fit_into_the_memory() -> None:
    body = zlib.compress(bytes(MAX_INFLATED_BYTES // 2))
    packed = b"".join(record(offset, body=body, sys_flag=SYS_COMPRESSED) for offset in range(10, 20))
    pulled = read_answer(answer(ResponseCode.SUCCESS, packed, nextBeginOffset=20, offsetDelta=100), QUEUE, ALL)
    assert [each.queue_offset for each in pulled.messages] == [110, 111, 112]
    assert pulled.next_offset == 113
    plain = b"".join(record(offset) for offset in range(10, 20))
    assert read_answer(answer(ResponseCode.SUCCESS, plain, nextBeginOffset=20), QUEUE, ALL).next_offset == 20


@pytest.mark.parametrize("body", [b"", b"longer than before", 5, None])
def test_a_listener_may_give_its_message_another_body(body: Any) -> None:
    buffer, limits = Buffer(), Limits(size_bytes=10)
    [given] = buffer.put([message(0, bytes(11))])
    assert buffer.is_full(limits)
    given.body = body
    assert buffer.finish([given]) == 1
    assert buffer.size_bytes == 0
    assert not buffer.is_full(limits)
