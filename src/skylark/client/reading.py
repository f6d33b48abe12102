"""From the records in a broker's answer to the messages that a consumer gets, for pulls and pops alike.

Apache's broker can store a whole batch as one record (an inner batch, in topics of queue type BatchCQ): its body has
the layout of a batch send, its queue offset is that of the first message in it. It is unwrapped here.

A message whose body can't be inflated is still a message: it comes with the body as it was sent, and with the reason.
Small bodies can be inflated to much: an answer is read only as far as that fits into the memory, and the rest is left
with the broker, which hands it out again.
"""

from __future__ import annotations

import msgspec

from skylark.client.compression import MAX_INFLATED_BYTES
from skylark.client.errors import UnreadableMessage
from skylark.client.message import Message
from skylark.wire.message import SYS_COMPRESSED, SYS_INNER_BATCH, SYS_NEED_UNWRAP, BadRecord, StoredMessage
from skylark.wire.records import decode_batch, decode_records

_WRAPPED = SYS_INNER_BATCH | SYS_NEED_UNWRAP


def read_messages(body: bytes, broker: str) -> tuple[list[tuple[Message, str | None]], bool]:
    """Each message with None, or with the reason why its body can't be read; and whether those are all.

    The last message is the one with which more than `MAX_INFLATED_BYTES` are inflated. Raises BadRecord.
    """
    messages: list[tuple[Message, str | None]] = []
    inflated_bytes = 0
    for record in decode_records(body):
        if inflated_bytes > MAX_INFLATED_BYTES:
            return messages, False
        if record.sys_flag & SYS_COMPRESSED:
            message, reason = _read(record, broker)
            inflated_bytes += len(message.body)
        else:
            message, reason = Message.from_record(record, broker), None
        if record.sys_flag & _WRAPPED == _WRAPPED and reason is None:
            messages += _unwrap(message)
        else:
            messages.append((message, reason))
    return messages, True


def _unwrap(message: Message) -> list[tuple[Message, str | None]]:
    try:
        inner = decode_batch(message.body)
    except BadRecord as e:
        return [(message, f"it is a batch that can't be unwrapped: {e}")]
    return [
        (
            msgspec.structs.replace(
                message, body=part, flag=flag, properties=properties, queue_offset=message.queue_offset + number
            ),
            None,
        )
        for number, (flag, part, properties) in enumerate(inner)
    ]


def _read(record: StoredMessage, broker: str) -> tuple[Message, str | None]:
    try:
        return Message.from_record(record, broker), None
    except UnreadableMessage as e:
        record.sys_flag &= ~SYS_COMPRESSED
        return Message.from_record(record, broker), str(e)
