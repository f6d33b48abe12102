"""What users of the client hold in their hands: `Message` comes in, `OutgoingMessage` goes out, `Receipt` says how.

A message has two ids. `msg_id` was made by the producer and stays the same through retries; `offset_msg_id` names the
place in one broker's log.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Self

import msgspec

from skylark.client.compression import inflate
from skylark.wire.bodies import MessageQueue
from skylark.wire.message import (
    KEY_SEPARATOR,
    PROPERTY_DELAY_LEVEL,
    PROPERTY_KEYS,
    PROPERTY_PRIORITY,
    PROPERTY_TAGS,
    PROPERTY_UNIQUE_KEY,
    StoredMessage,
    message_id,
)
from skylark.wire.records import decode_host

__all__ = ["Message", "MessageQueue", "OutgoingMessage", "Receipt", "SendStatus"]


class Message(msgspec.Struct, kw_only=True):
    """A message as a consumer gets it, with its body inflated."""

    topic: str
    body: bytes
    properties: dict[str, str] = {}
    broker: str = ""
    queue_id: int = 0
    queue_offset: int = 0
    log_offset: int = 0
    born_timestamp_ms: int = 0
    store_timestamp_ms: int = 0
    born_host_bytes: bytes = bytes(8)
    store_host_bytes: bytes = bytes(8)
    reconsume_times: int = 0
    flag: int = 0
    sys_flag: int = 0
    size_bytes: int = 0
    receipt_handle: str = ""
    """Of a message that was popped: what acknowledges it."""

    @classmethod
    def from_record(cls, record: StoredMessage, broker: str) -> Self:
        """The message behind a record of that broker's log. Raises UnreadableMessage."""
        return cls(
            topic=record.topic,
            body=inflate(record.body, record.sys_flag) if record.sys_flag & 1 else record.body,
            properties=record.properties,
            broker=broker,
            queue_id=record.queue_id,
            queue_offset=record.queue_offset,
            log_offset=record.log_offset,
            born_timestamp_ms=record.born_timestamp_ms,
            store_timestamp_ms=record.store_timestamp_ms,
            born_host_bytes=record.born_host,
            store_host_bytes=record.store_host,
            reconsume_times=record.reconsume_times,
            flag=record.flag,
            sys_flag=record.sys_flag,
            size_bytes=record.size_bytes,
        )

    @property
    def queue(self) -> MessageQueue:
        """Where it was stored."""
        return MessageQueue(self.broker, self.queue_id, self.topic)

    @property
    def msg_id(self) -> str:
        """The producer's id of the message; that of its place in the log, if the producer gave none."""
        return self.properties.get(PROPERTY_UNIQUE_KEY) or self.offset_msg_id

    @property
    def offset_msg_id(self) -> str:
        """The id of its place in the log of the broker."""
        return message_id(self.store_host_bytes, self.log_offset)

    @property
    def tag(self) -> str | None:
        """Its tag, None if it has none."""
        return self.properties.get(PROPERTY_TAGS)

    @property
    def keys(self) -> list[str]:
        """Its keys, by which it can be found."""
        return [key for key in self.properties.get(PROPERTY_KEYS, "").split(KEY_SEPARATOR) if key]

    @property
    def delay_level(self) -> int:
        """The level that it was sent with, 0 if without."""
        level = self.properties.get(PROPERTY_DELAY_LEVEL, "")
        return int(level) if level.isdigit() else 0

    @property
    def priority(self) -> int:
        """What the producer gave it, -1 if nothing."""
        priority = self.properties.get(PROPERTY_PRIORITY, "")
        return int(priority) if priority.isdecimal() else -1

    @property
    def born_at(self) -> datetime:
        """When it was sent, by the sender's clock."""
        return _at(self.born_timestamp_ms)

    @property
    def stored_at(self) -> datetime:
        """When it was stored, by the broker's clock."""
        return _at(self.store_timestamp_ms)

    @property
    def born_host(self) -> str:
        """Who sent it, as `host:port`."""
        return _host(self.born_host_bytes)

    @property
    def store_host(self) -> str:
        """The broker that stored it, as `host:port`."""
        return _host(self.store_host_bytes)


class OutgoingMessage(msgspec.Struct, frozen=True):
    """One message of a batch.

    >>> OutgoingMessage(b"hello", tag="new", key=["42", "43"]).to_properties()
    {'KEYS': '42 43', 'TAGS': 'new'}
    """

    body: bytes
    tag: str | None = None
    key: str | Sequence[str] | None = None
    properties: dict[str, str] | None = None
    flag: int = 0

    def to_properties(self) -> dict[str, str]:
        """As it travels: its own properties, its keys and its tag."""
        return build_properties(self.tag, self.key, self.properties)


def build_properties(
    tag: str | None, key: str | Sequence[str] | None, properties: dict[str, str] | None
) -> dict[str, str]:
    """The properties that a message travels with: the user's own, its keys and its tag."""
    built = dict(properties) if properties else {}
    if key is not None:
        built[PROPERTY_KEYS] = key if isinstance(key, str) else KEY_SEPARATOR.join(key)
    if tag is not None:
        built[PROPERTY_TAGS] = tag
    return built


class SendStatus(StrEnum):
    """How safe a stored message is: all but OK mean that it is stored, but not as the broker is told to."""

    OK = "SEND_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What a send gives: where the message went."""

    status: SendStatus
    msg_id: str
    offset_msg_id: str
    queue: MessageQueue
    queue_offset: int
    transaction_id: str | None = None
    region: str | None = None
    is_traced: bool = True
    """Whether the broker wants a trace of it, from clients that write any."""
    recall_handle: str | None = None
    """What a message that waits for its time can be recalled by."""


def _at(timestamp_ms: int) -> datetime:
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC)


def _host(data: bytes) -> str:
    ip, port = decode_host(data)
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
