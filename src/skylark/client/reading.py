"""From the records in a broker's answer to the messages that a consumer gets, for pulls and pops alike.

Apache's broker can store a whole batch as one record (an inner batch, in topics of queue type BatchCQ): its body has
the layout of a batch send, its queue offset is that of the first message in it. It is unwrapped here.

A message whose body can't be inflated is still a message: it comes with the body as it was sent, and with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from skylark.client.errors import UnreadableMessage
from skylark.client.message import Message
from skylark.wire.message import SYS_COMPRESSED, SYS_INNER_BATCH, SYS_NEED_UNWRAP, BadRecord, StoredMessage
from skylark.wire.records import decode_batch, decode_records

_WRAPPED = SYS_INNER_BATCH | SYS_NEED_UNWRAP


def read_messages(body: bytes, broker: str) -> Iterator[tuple[Message, str | None]]:
    """Each message with None, or with the reason why its body can't be read. Raises BadRecord."""
    for record in decode_records(body):
        message, reason = _read(record, broker)
        if record.sys_flag & _WRAPPED != _WRAPPED or reason is not None:
            yield message, reason
            continue
        try:
            inner = decode_batch(message.body)
        except BadRecord as e:
            yield message, f"it is a batch that can't be unwrapped: {e}"
            continue
        for number, (flag, part, properties) in enumerate(inner):
            yield (
                msgspec.structs.replace(
                    message,
                    body=part,
                    flag=flag,
                    properties=properties,
                    queue_offset=message.queue_offset + number,
                ),
                None,
            )


def _read(record: StoredMessage, broker: str) -> tuple[Message, str | None]:
    try:
        return Message.from_record(record, broker), None
    except UnreadableMessage as e:
        record.sys_flag &= ~SYS_COMPRESSED
        return Message.from_record(record, broker), str(e)
