"""`SendRequest`: what a producer asks a broker to store, read from its header in one pass; and the answer.

Sends are the most frequent requests, so their fields are neither made a map nor left in a struct, whose attributes take
compiled code a lookup each.
"""

from __future__ import annotations

from typing import Final, cast

from librt.strings import read_i16_be, read_i32_be
from msgspec import Raw
from msgspec.structs import astuple
from mypy_extensions import i64

from skylark.wire.codes import RequestCode
from skylark.wire.frame import Encoding, Frame
from skylark.wire.headers import SendMessage, SendMessageV2
from skylark.wire.message import PROPERTIES_MAX_BYTES
from skylark.wire.typed import BadHeader, decode_header

_LONG_NAMES: Final = frozenset((int(RequestCode.SEND_MESSAGE), int(RequestCode.SEND_REPLY_MESSAGE)))
_BINARY: Final = Encoding.BINARY
_MAX_DIGITS: Final = 18  # that surely fit
_INT_MAX: Final = 0x7FFFFFFF
_BORN_TIMESTAMP: Final = 6  # the only long
_REQUIRED: Final = 0xFF  # a bit for each of the fields a to h
_MOST_PROPERTIES: Final = 1 << 17
_A: Final = ord("a")
_ZERO: Final = ord("0")
_Fields = tuple[
    str, str, str, int, int, int, int, int, str | None, int | None, bool | None, bool | None, int | None
]  # fmt: skip


class SendRequest:
    """The fields of a send, with the properties as they are stored."""

    __slots__ = (
        "born_timestamp_ms", "default_topic", "default_topic_queue_nums", "flag", "is_batch", "max_reconsume_times",
        "producer_group", "properties", "queue_id", "reconsume_times", "sys_flag", "topic", "unit_mode",
    )  # fmt: skip

    def __init__(
        self,
        producer_group: str,
        topic: str,
        default_topic: str,
        default_topic_queue_nums: int,
        queue_id: int,
        sys_flag: int,
        born_timestamp_ms: int,
        flag: int,
        properties: bytes,
        reconsume_times: int | None,
        unit_mode: bool,
        is_batch: bool,
        max_reconsume_times: int | None,
    ) -> None:
        self.producer_group = producer_group
        self.topic = topic
        self.default_topic = default_topic
        self.default_topic_queue_nums = default_topic_queue_nums
        self.queue_id = queue_id
        self.sys_flag = sys_flag
        self.born_timestamp_ms = born_timestamp_ms
        self.flag = flag
        self.properties = properties
        self.reconsume_times = reconsume_times
        self.unit_mode = unit_mode
        self.is_batch = is_batch
        self.max_reconsume_times = max_reconsume_times


def acknowledgement(
    frame: Frame,
    message_id: str,
    queue_id: int,
    queue_offset: int,
    region_id: str,
    trace_on: bool,
    unique_key: str | None,
) -> Frame:
    """The answer to a send whose message was stored."""
    trace = "true" if trace_on else "false"
    if frame.encoding is not _BINARY and unique_key and unique_key.isalnum() and region_id.isalnum():
        # Nothing in it has to be escaped, so that it can be put together here.
        text = (
            f'{{"msgId":"{message_id}","queueId":"{queue_id}","queueOffset":"{queue_offset}",'
            f'"MSG_REGION":"{region_id}","TRACE_ON":"{trace}","transactionId":"{unique_key}"}}'
        )
        return frame.reply(raw_fields=Raw(text.encode()))
    fields = {
        "msgId": message_id,
        "queueId": str(queue_id),
        "queueOffset": str(queue_offset),
        "MSG_REGION": region_id,
        "TRACE_ON": trace,
    }
    if unique_key:
        fields["transactionId"] = unique_key
    return frame.reply(fields=fields)


def decode_send(frame: Frame) -> SendRequest:
    """The fields of a send in any of its forms. Raises BadHeader."""
    if frame.code in _LONG_NAMES:
        fields = cast(_Fields, astuple(decode_header(SendMessage, frame)))
    else:
        raw = frame.raw_fields
        found = _read_binary(raw) if raw is not None and frame.encoding is _BINARY else None
        if found is not None:
            _check_size(found.properties)
            return found
        fields = cast(_Fields, astuple(decode_header(SendMessageV2, frame)))
    (
        group, topic, default_topic, queue_nums, queue_id, sys_flag, born_ms, flag, properties, reconsume_times,
        unit_mode, is_batch, max_reconsume_times,
    ) = fields  # fmt: skip
    stored = properties.encode() if properties else b""
    _check_size(stored)
    return SendRequest(
        group, topic, default_topic, queue_nums, queue_id, sys_flag, born_ms, flag, stored,
        reconsume_times, bool(unit_mode), bool(is_batch), max_reconsume_times,
    )  # fmt: skip


def _check_size(properties: bytes) -> None:
    """Refuses what nobody stores before it is looked through; up to there, it is the store that says what it takes."""
    if len(properties) > _MOST_PROPERTIES:
        raise BadHeader(f"properties of {len(properties)} bytes: a message has up to {PROPERTIES_MAX_BYTES}")


def _read_binary(data: bytes) -> SendRequest | None:
    """The fields of `SendMessageV2` in a binary header; None when they are not as Apache's clients write them."""
    request = SendRequest("", "", "", 0, 0, 0, 0, 0, b"", None, False, False, None)
    given: i64 = 0
    end = i64(len(data))
    at: i64 = 0
    try:
        while at < end:
            key_size = i64(read_i16_be(data, at)) & 0xFFFF
            value_at = at + 6 + key_size
            value_end = value_at + i64(read_i32_be(data, value_at - 4))
            if value_end < value_at or value_end > end:
                return None
            if key_size == 1 and value_end > value_at:  # an empty value stands for null
                letter = i64(data[at + 2]) - _A
                if not _set(request, letter, data, value_at, value_end):
                    return None
                if 0 <= letter < 8:
                    given |= 1 << letter
            at = value_end
    except (IndexError, UnicodeDecodeError):
        return None
    return request if given == _REQUIRED else None


def _set(request: SendRequest, letter: i64, data: bytes, at: i64, end: i64) -> bool:
    """Takes over the value of a field; whether it could be read. Letters that have no meaning are passed over.

    Raises UnicodeDecodeError.
    """
    if letter == 0:
        request.producer_group = data[at:end].decode()
    elif letter == 1:
        request.topic = data[at:end].decode()
    elif letter == 2:
        request.default_topic = data[at:end].decode()
    elif letter == 8:
        request.properties = data[at:end]
        if not request.properties.isascii():
            request.properties.decode()
    elif letter == 10 or letter == 12:
        flag = data[at:end]
        if letter == 10:
            request.unit_mode = flag == b"true"
        else:
            request.is_batch = flag == b"true"
        return flag == b"true" or flag == b"false"
    elif letter < 12:
        return _set_number(request, letter, data, at, end)
    return True


def _set_number(request: SendRequest, letter: i64, data: bytes, at: i64, end: i64) -> bool:
    if end - at > _MAX_DIGITS:
        return False
    number: i64 = 0
    for place in range(at, end):
        digit = i64(data[place]) - _ZERO
        if digit < 0 or digit > 9:
            return False
        number = number * 10 + digit
    if number > _INT_MAX and letter != _BORN_TIMESTAMP:
        return False  # what is wrong with it is said by who decodes it as a struct
    if letter == 3:
        request.default_topic_queue_nums = int(number)
    elif letter == 4:
        request.queue_id = int(number)
    elif letter == 5:
        request.sys_flag = int(number)
    elif letter == _BORN_TIMESTAMP:
        request.born_timestamp_ms = int(number)
    elif letter == 7:
        request.flag = int(number)
    elif letter == 9:
        request.reconsume_times = int(number)
    elif letter == 11:
        request.max_reconsume_times = int(number)
    return True
