"""POP consumption on the wire and in the log: request headers, receipt handles, check points and acknowledgements.

A broker that hands out messages ("pop") hides them for a while and remembers that with a check point. The client can't
name what it got by an offset alone, since a message is popped again when nobody acknowledges it; it sends back a
*receipt handle*, which Apache calls extra info and which travels as the property POP_CK:

    START_OFFSET POP_TIME INVISIBLE_TIME REVIVE_QUEUE KIND BROKER QUEUE [OFFSET]        separated by spaces

KIND is 0 for the topic itself, 1 and 2 for the group's retry topic under its old and its new name. START_OFFSET,
POP_TIME, queue, group and topic name the check point, OFFSET the message in it.

The handles of one answer are not written out: its header has, for each queue, the start offset (`startOffsetInfo`) and
the messages' offsets (`msgOffsetInfo`), entries separated by semicolons, from which `handles_of` builds them.

Check points and acknowledgements are messages of the revive topic, in JSON; their tags say which is which.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator
from typing import Annotated, Final

import msgspec

from skylark.wire.bodies import BadBody, MessageQueue
from skylark.wire.enums import MESSAGE_MODELS, REQUEST_MODES, EnumName
from skylark.wire.numbers import Int, Long, Summand, java_long

REVIVE_TOPIC_PREFIX: Final = "rmq_sys_REVIVE_LOG_"
REVIVE_GROUP: Final = "CID_RMQ_SYS_REVIVE_GROUP"
ORDER_REVIVE_QUEUE: Final = 999
"""What stands for the revive queue in the handles of a pop in order: such pops have no check point in the log."""

CHECK_POINT_TAG: Final = "ck"
ACK_TAG: Final = "ack"
BATCH_ACK_TAG: Final = "bAck"

MAX_POP_MESSAGES: Final = 32
FROM_MIN: Final = 0
FROM_MAX: Final = 1
"""Where a group that is new to a queue begins: at the first message, or at the last."""

PULL: Final = "PULL"
POP: Final = "POP"

_RETRY_PREFIX = "%RETRY%"
_BAD_BASE64 = (binascii.Error, ValueError)


def revive_topic(cluster: str) -> str:
    return REVIVE_TOPIC_PREFIX + cluster


def pop_retry_topic(topic: str, group: str, *, v2: bool = False) -> str:
    """Where a group's messages of one topic go when nobody acknowledged them in time."""
    return f"{_RETRY_PREFIX}{group}{'+' if v2 else '_'}{topic}"


def is_pop_retry_v2(topic: str) -> bool:
    return topic.startswith(_RETRY_PREFIX) and "+" in topic


def topic_kind(topic: str) -> str:
    """How handles and offset lists name the kind of topic: 0 itself, 1 a retry topic, 2 one with the new name."""
    if not topic.startswith(_RETRY_PREFIX):
        return "0"
    return "2" if "+" in topic else "1"


def real_topic(topic: str, group: str, kind: str) -> str:
    """The topic that the message lies in, from the topic the consumer asked for. Raises BadHandle."""
    if kind == "0":
        return topic
    if kind not in ("1", "2"):
        raise BadHandle(f"the kind of topic is {kind!r}: it is 0, or 1 or 2 for a retry topic")
    return pop_retry_topic(topic, group, v2=kind == "2")


def origin_topic(topic: str, group: str) -> str:
    """The topic that a message in a group's pop retry topic came from; other topics are their own origin."""
    for separator in "+_":
        prefix = f"{_RETRY_PREFIX}{group}{separator}"
        if topic.startswith(prefix):
            return topic[len(prefix) :]
    return topic


class BadHandle(ValueError):
    """A receipt handle, or a list of offsets, that no broker gave out."""


class ReceiptHandle(msgspec.Struct, frozen=True, array_like=True):
    """What acknowledges one popped message, or extends its time: `encode` it, `parse` it."""

    start_offset: Long
    pop_time_ms: Summand
    invisible_ms: Summand
    revive_queue: Int
    kind: str
    broker_name: str
    queue_id: Int
    offset: Long = -1

    @property
    def is_order(self) -> bool:
        return self.revive_queue == ORDER_REVIVE_QUEUE

    @property
    def visible_at_ms(self) -> int:
        """When the message may be given to somebody else."""
        return self.pop_time_ms + self.invisible_ms

    def encode(self) -> str:
        text = (
            f"{self.start_offset} {self.pop_time_ms} {self.invisible_ms} {self.revive_queue} {self.kind}"
            f" {self.broker_name} {self.queue_id}"
        )
        return text if self.offset < 0 else f"{text} {self.offset}"

    @classmethod
    def parse(cls, text: str) -> ReceiptHandle:
        """The handle that `text` is; the commit log's offset that Apache's proxies add is passed over."""
        parts = text.split(" ")
        if len(parts) < 7:
            raise BadHandle(f"a receipt handle has at least 7 parts, this one has {len(parts)}: {text[:200]!r}")
        try:
            handle = msgspec.convert(parts, cls, strict=False)
        except msgspec.ValidationError as e:
            raise BadHandle(f"a receipt handle with something else than numbers in it ({e}): {text[:200]!r}") from None
        if parts[4] not in ("0", "1", "2"):
            raise BadHandle(f"a receipt handle of an unknown kind of topic: {text[:200]!r}")
        return handle


# Headers.


class PopMessage(msgspec.Struct, rename="camel"):
    """Times are milliseconds; `born_time` 0 stands for "now"; queue -1 for any queue of the topic."""

    consumer_group: str
    topic: str
    queue_id: Int
    max_msg_nums: Int
    invisible_time: Summand
    poll_time: Summand
    born_time: Summand
    init_mode: Int
    exp_type: str | None = None
    exp: str | None = None
    order: bool | None = False
    attempt_id: str | None = None


class PopMessageResponse(msgspec.Struct, rename="camel"):
    pop_time: Summand
    invisible_time: Summand
    revive_qid: Int
    rest_num: Long
    start_offset_info: str | None = None
    msg_offset_info: str | None = None
    order_count_info: str | None = None


class AckMessage(msgspec.Struct, rename="camel"):
    """`topic` is the one that the message lies in (see `real_topic`)."""

    consumer_group: str
    topic: str
    queue_id: Int
    extra_info: str
    offset: Long
    lite_topic: str | None = None


class ChangeInvisibleTime(msgspec.Struct, rename="camel"):
    """`topic` is the one that the message lies in. `suspend`: the message comes back without counting as a retry."""

    consumer_group: str
    topic: str
    queue_id: Int
    extra_info: str
    offset: Long
    invisible_time: Summand
    lite_topic: str | None = None
    suspend: bool = False


class ChangeInvisibleTimeResponse(msgspec.Struct, rename="camel"):
    """What differs in the handle that is good from now on (see `renewed`)."""

    pop_time: Summand
    invisible_time: Summand
    revive_qid: Int


class Notification(msgspec.Struct, rename="camel"):
    consumer_group: str
    topic: str
    queue_id: Int
    poll_time: Summand
    born_time: Summand
    order: bool | None = False
    attempt_id: str | None = None
    exp_type: str | None = None
    exp: str | None = None


class NotificationResponse(msgspec.Struct, rename="camel"):
    has_msg: bool = False
    polling_full: bool = False


class PollingInfo(msgspec.Struct, rename="camel"):
    consumer_group: str
    topic: str
    queue_id: Int


class PollingInfoResponse(msgspec.Struct, rename="camel"):
    polling_num: Int


class PeekMessage(msgspec.Struct, rename="camel"):
    topic: str
    queue_id: Int
    max_msg_nums: Int
    consumer_group: str


def renewed(handle: ReceiptHandle, header: ChangeInvisibleTimeResponse) -> ReceiptHandle:
    """The handle of the same message after its time was changed: from then on it is a check point of its own."""
    return msgspec.structs.replace(
        handle,
        start_offset=handle.offset,
        pop_time_ms=header.pop_time,
        invisible_ms=header.invisible_time,
        revive_queue=header.revive_qid,
    )


# The lists of offsets in the answer to a pop.


def encode_start_offset(topic: str, queue_id: int, start_offset: int) -> str:
    return f"{topic_kind(topic)} {queue_id} {start_offset}"


def encode_offsets(topic: str, queue_id: int, offsets: Iterable[int]) -> str:
    return f"{topic_kind(topic)} {queue_id} {','.join(map(str, offsets))}"


def encode_queue_order_count(topic: str, queue_id: int, count: int) -> str:
    return f"{topic_kind(topic)} {queue_id} {count}"


def encode_offset_order_count(topic: str, queue_id: int, offset: int, count: int) -> str:
    return f"{topic_kind(topic)} qo{queue_id}%{offset} {count}"


def parse_start_offsets(info: str | None) -> dict[tuple[str, int], int]:
    """Kind of topic and queue -> the first offset of the check point."""
    return {(kind, _integer(queue)): _integer(start) for kind, queue, start in _entries(info)}


def parse_offsets(info: str | None) -> dict[tuple[str, int], list[int]]:
    """Kind of topic and queue -> the offsets of the messages."""
    return {
        (kind, _integer(queue)): [_integer(each) for each in offsets.split(",")]
        for kind, queue, offsets in _entries(info)
    }


def parse_order_counts(info: str | None) -> dict[tuple[str, str], int]:
    """Kind of topic, and queue or `qoQUEUE%OFFSET` -> how often it was popped before."""
    return {(kind, key): _integer(count) for kind, key, count in _entries(info)}


def order_count(counts: dict[tuple[str, str], int], topic: str, queue_id: int, offset: int) -> int:
    """How often this message of a pop in order was handed out before."""
    kind = topic_kind(topic)
    return counts.get((kind, f"qo{queue_id}%{offset}"), counts.get((kind, str(queue_id)), 0))


def _entries(info: str | None) -> Iterator[tuple[str, str, str]]:
    seen = set()
    for entry in (info or "").split(";"):
        parts = entry.split(" ")
        if entry and (len(parts) != 3 or (parts[0], parts[1]) in seen):
            raise BadHandle(f"bad list of offsets: {info!r}")
        if entry:
            seen.add((parts[0], parts[1]))
            yield parts[0], parts[1], parts[2]


def _integer(text: str) -> int:
    number = java_long(text)
    if number is None:
        raise BadHandle(f"{text[:200]!r} should be a number")
    return number


def handles_of(
    header: PopMessageResponse, broker_name: str, messages: Iterable[tuple[str, int, int]]
) -> list[ReceiptHandle]:
    """The receipt handles of what a pop brought: messages as (topic, queue, queue offset), in the order they came.

    Only for messages without the property POP_CK; one that has it brought its handle along.
    """
    starts = parse_start_offsets(header.start_offset_info)
    handles = []
    for topic, queue_id, offset in messages:
        kind = topic_kind(topic)
        handles.append(
            ReceiptHandle(
                starts.get((kind, queue_id), offset),
                header.pop_time,
                header.invisible_time,
                header.revive_qid,
                kind,
                broker_name,
                queue_id,
                offset,
            )
        )
    return handles


# The body of a batch of acknowledgements.


class BatchAck(msgspec.Struct):
    """Messages of one check point: bit i of the bit set (little endian, in base 64) is offset `start_offset` + i."""

    bits: str = msgspec.field(name="b")
    consumer_group: str = msgspec.field(name="c")
    invisible_ms: Summand = msgspec.field(name="it")
    pop_time_ms: Summand = msgspec.field(name="pt")
    queue_id: Int = msgspec.field(name="q")
    retry: str = msgspec.field(name="r")
    revive_queue: Int = msgspec.field(name="rq")
    start_offset: Summand = msgspec.field(name="so")
    topic: str = msgspec.field(name="t")

    @classmethod
    def of(cls, topic: str, group: str, handles: Iterable[ReceiptHandle]) -> list[BatchAck]:
        """The acknowledgements of `handles`, one for each check point. `topic` is the one that was subscribed to."""
        points: dict[tuple[str, int, int, int], list[ReceiptHandle]] = {}
        for handle in handles:
            key = (handle.kind, handle.queue_id, handle.start_offset, handle.pop_time_ms)
            points.setdefault(key, []).append(handle)
        return [
            cls(
                encode_bits(handle.offset - handle.start_offset for handle in together),
                group,
                first.invisible_ms,
                first.pop_time_ms,
                first.queue_id,
                first.kind,
                first.revive_queue,
                first.start_offset,
                topic,
            )
            for together in points.values()
            for first in together[:1]
        ]

    def offsets(self) -> list[int]:
        """The queue offsets that are acknowledged, in order. Raises BadBody."""
        return [self.start_offset + each for each in decode_bits(self.bits)]


class BatchAckMessage(msgspec.Struct, rename="camel"):
    """The body of BATCH_ACK_MESSAGE."""

    acks: list[BatchAck] = []
    broker_name: str | None = None


MAX_ACK_BITS: Final = 1 << 20
"""A check point has up to 32 messages, but a filter may have left far more between them."""
MAX_ACKS: Final = 1024


def encode_bits(indexes: Iterable[int]) -> str:
    """Raises BadHandle for an index that no check point has."""
    number = 0
    for index in indexes:
        if not 0 <= index < MAX_ACK_BITS:
            raise BadHandle(f"a message {index} places behind the first one of its check point")
        number |= 1 << index
    return base64.b64encode(number.to_bytes((number.bit_length() + 7) // 8, "little")).decode()


def decode_bits(bits: str) -> list[int]:
    """The positions of the bits that are set. Raises BadBody."""
    try:
        data = base64.b64decode(bits, validate=True)
    except _BAD_BASE64:
        raise BadBody("the bit set of an acknowledgement is not in base 64") from None
    if len(data) * 8 > MAX_ACK_BITS:
        raise BadBody(f"the bit set of an acknowledgement has {len(data) * 8} bits: the limit is {MAX_ACK_BITS}")
    count = int.from_bytes(data, "little").bit_count()
    if count > MAX_ACKS:
        raise BadBody(f"the bit set of an acknowledgement names {count} messages: the limit is {MAX_ACKS}")
    return [at * 8 + bit for at, byte in enumerate(data) if byte for bit in range(8) if byte >> bit & 1]


# What the revive topic holds. Numbers are checked when they are read, so that whoever follows the topic can go on.

_Count = Annotated[int, msgspec.Meta(ge=0, le=127)]
_Distances = Annotated[list[Int], msgspec.Meta(max_length=1024)]


class CheckPoint(msgspec.Struct, kw_only=True):
    """Messages of one queue, hidden from a group until `revive_time_ms`. Fields stand in the order of their keys."""

    bit_map: Int = msgspec.field(name="bm", default=0)
    broker_name: str | msgspec.UnsetType = msgspec.field(name="bn", default=msgspec.UNSET)
    group: str = msgspec.field(name="c")
    diffs: _Distances | msgspec.UnsetType = msgspec.field(name="d", default=msgspec.UNSET)
    invisible_ms: Summand = msgspec.field(name="it")
    count: _Count = msgspec.field(name="n")
    pop_time_ms: Summand = msgspec.field(name="pt")
    queue_id: Int = msgspec.field(name="q")
    revive_time_ms: Long = msgspec.field(name="reviveTime", default=0)
    revive_offset: Long = msgspec.field(name="ro", default=0)
    put_again_times: str | msgspec.UnsetType = msgspec.field(name="rp", default=msgspec.UNSET)
    start_offset: Summand = msgspec.field(name="so")
    suspend: bool = msgspec.field(name="sp", default=False)
    topic: str = msgspec.field(name="t")

    def __post_init__(self) -> None:
        self.revive_time_ms = self.pop_time_ms + self.invisible_ms

    @property
    def offsets(self) -> list[int]:
        """The queue offsets of its messages; brokers before 5.0 handed out neighbours only and wrote no list."""
        if self.diffs:
            return [self.start_offset + diff for diff in self.diffs]
        return list(range(self.start_offset, self.start_offset + self.count))

    @property
    def key(self) -> tuple[str, str, int, int, int]:
        """What an acknowledgement names it by."""
        return self.topic, self.group, self.queue_id, self.start_offset, self.pop_time_ms

    @property
    def unique_key(self) -> str:
        broker = "null" if self.broker_name is msgspec.UNSET else self.broker_name
        return (
            f"{self.topic}@{self.queue_id}@{self.start_offset}@{self.group}@{self.pop_time_ms}@{broker}"
            f"@{CHECK_POINT_TAG}"
        )


class Ack(msgspec.Struct, kw_only=True):
    """One acknowledgement or, with `offsets`, several of one check point."""

    offset: Long = msgspec.field(name="ao", default=0)
    offsets: list[Long] | msgspec.UnsetType = msgspec.field(name="aol", default=msgspec.UNSET)
    broker_name: str | msgspec.UnsetType = msgspec.field(name="bn", default=msgspec.UNSET)
    group: str = msgspec.field(name="c")
    pop_time_ms: Summand = msgspec.field(name="pt")
    queue_id: Int = msgspec.field(name="q")
    start_offset: Long = msgspec.field(name="so")
    topic: str = msgspec.field(name="t")

    @property
    def key(self) -> tuple[str, str, int, int, int]:
        """The check point that it is for."""
        return self.topic, self.group, self.queue_id, self.start_offset, self.pop_time_ms

    @property
    def unique_key(self) -> str:
        broker = "null" if self.broker_name is msgspec.UNSET else self.broker_name
        return f"{self.topic}@{self.queue_id}@{self.offset}@{self.group}@{self.pop_time_ms}@{broker}@{ACK_TAG}"


encode_record = msgspec.json.Encoder().encode
_decode_check_point = msgspec.json.Decoder(CheckPoint).decode
_decode_ack = msgspec.json.Decoder(Ack).decode


def decode_check_point(body: bytes) -> CheckPoint:
    """Raises BadBody."""
    try:
        return _decode_check_point(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise BadBody(f"bad check point: {e}") from None


def decode_ack(body: bytes) -> Ack:
    """Raises BadBody."""
    try:
        return _decode_ack(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise BadBody(f"bad acknowledgement: {e}") from None


# Bodies of the assignment by the broker.


class QueryAssignment(msgspec.Struct, rename="camel"):
    client_id: str | None = None
    consumer_group: str | None = None
    message_model: EnumName | None = None
    strategy_name: str | None = None
    topic: str | None = None

    def __post_init__(self) -> None:
        self.message_model = MESSAGE_MODELS.read(self.message_model)


class QueueAssignment(msgspec.Struct, rename="camel", omit_defaults=True):
    """A queue to consume from: itself by pulling, or, with queue -1, any queue of the broker by popping."""

    message_queue: MessageQueue
    mode: EnumName
    attachments: dict[str, str] | None = None

    def __post_init__(self) -> None:
        self.mode = REQUEST_MODES.read(self.mode) or PULL


class QueryAssignmentResponse(msgspec.Struct, rename="camel"):
    message_queue_assignments: list[QueueAssignment] | None = None
    """None says that the broker can't tell now, and that everything stays as it is."""


class SetMessageRequestMode(msgspec.Struct, rename="camel"):
    """Whether a group pulls or pops a topic, and how many queues of others a member may pop from (0: all)."""

    consumer_group: str | None = None
    mode: EnumName | None = PULL
    pop_share_queue_num: Int = 0
    topic: str | None = None

    def __post_init__(self) -> None:
        self.mode = REQUEST_MODES.read(self.mode) or self.mode  # whoever sets an unknown one is told
