"""How a message gets ready to travel: checked, with its properties and its id, and compressed where that pays."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

from skylark.client.compression import SYS_FLAGS, Codec, deflate
from skylark.client.errors import InvalidMessage
from skylark.client.message import OutgoingMessage, build_properties
from skylark.client.namespace import Namespace
from skylark.client.sending import BATCH_OVERHEAD_BYTES, Sending, UniqueIds, now_ms, split_batch
from skylark.client.subscriptions import RETRY_PREFIX
from skylark.client.timing import delay_properties
from skylark.client.validation import (
    check_body,
    check_encoded_properties,
    check_labels,
    check_priority,
    check_send_topic,
)
from skylark.wire.message import (
    PROPERTY_PRIORITY,
    PROPERTY_SHARDING_KEY,
    PROPERTY_UNIQUE_KEY,
    PROPERTY_WAIT_STORE_OK,
)
from skylark.wire.records import encode_batch, encode_properties

_DEFLATE_ASIDE_BYTES: Final = 256 * 1024


class Packing:
    """Makes a producer's messages ready. Raises InvalidMessage for what no broker takes."""

    def __init__(
        self,
        namespace: Namespace,
        host: str,
        *,
        codec: Codec | None,
        compress_over_bytes: int,
        compression_level: int,
        max_message_bytes: int,
        retries: int,
    ) -> None:
        self._namespace = namespace
        self._ids = UniqueIds(host, os.getpid())
        self._codec = codec
        self._compress_over_bytes = compress_over_bytes if codec is not None else max_message_bytes
        self._compression_level = compression_level
        self._max_message_bytes = max_message_bytes
        self._retries = retries

    def pack(
        self,
        topic: str,
        body: bytes,
        tag: str | None,
        key: str | Sequence[str] | None,
        properties: dict[str, str] | None,
        delay_level: int = 0,
        flag: int = 0,
        wait_stored: bool = True,
        priority: int | None = None,
        delay_s: float | None = None,
        deliver_at: datetime | int | None = None,
        ordering_key: str | int | None = None,
    ) -> Sending:
        topic = self._namespace.wrap(topic)
        check_send_topic(topic)
        check_body(body, self._max_message_bytes)
        if tag is not None or key is not None or properties is not None or delay_level:
            check_labels(tag, key, properties, delay_level)
        built = build_properties(tag, key, properties)
        if delay_level or delay_s is not None or deliver_at is not None:
            built |= delay_properties(delay_level, delay_s, deliver_at)
        if ordering_key is not None:
            built[PROPERTY_SHARDING_KEY] = str(ordering_key)
        if priority is not None:
            check_priority(priority)
            built[PROPERTY_PRIORITY] = str(priority)
        if not wait_stored:
            built[PROPERTY_WAIT_STORE_OK] = "false"
        msg_id = built[PROPERTY_UNIQUE_KEY] = self._ids.take(now_ms())
        encoded = encode_properties(built)
        check_encoded_properties(encoded)
        sending = Sending(topic, body, built, encoded.decode(), msg_id)
        sending.attempts_left = self._retries
        sending.is_patient = self._retries > 0
        sending.flag = flag
        return sending

    def pack_batch(self, topic: str, messages: Iterable[bytes | OutgoingMessage]) -> list[Sending]:
        """Requests of many messages each, as few as the size limit allows. All are checked before the first is sent."""
        topic = self._namespace.wrap(topic)
        check_send_topic(topic)
        if topic.startswith(RETRY_PREFIX):
            raise InvalidMessage("retry topics take no batches")
        items, sizes, ids = [], [], []
        for message in messages:
            if not isinstance(message, OutgoingMessage):
                message = OutgoingMessage(message)
            check_body(message.body, self._max_message_bytes)
            check_labels(message.tag, message.key, message.properties)
            properties = message.to_properties()
            properties[PROPERTY_UNIQUE_KEY] = msg_id = self._ids.take(now_ms())
            encoded = encode_properties(properties)
            check_encoded_properties(encoded)
            items.append((message.flag, message.body, properties))
            sizes.append(BATCH_OVERHEAD_BYTES + len(message.body) + len(encoded))
            ids.append(msg_id)
        sendings: list[Sending] = []
        begin = 0
        for part in split_batch(items, sizes, self._max_message_bytes):
            batch_id = self._ids.take(now_ms())
            own = {PROPERTY_UNIQUE_KEY: batch_id}
            sending = Sending(topic, encode_batch(part), own, encode_properties(own).decode(), batch_id)
            sending.batch_ids = ids[begin : begin + len(part)]
            sending.attempts_left = self._retries
            sending.is_patient = self._retries > 0
            sendings.append(sending)
            begin += len(part)
        return sendings

    def is_large(self, sending: Sending) -> bool:
        """Whether compressing may pay."""
        return len(sending.body) > self._compress_over_bytes

    async def compress(self, sending: Sending) -> None:
        """Compresses a body that is large, if that makes it smaller."""
        codec = self._codec
        assert codec is not None
        if len(sending.body) > _DEFLATE_ASIDE_BYTES:
            packed = await asyncio.to_thread(deflate, sending.body, codec, self._compression_level)
        else:
            packed = deflate(sending.body, codec, self._compression_level)
        if len(packed) < len(sending.body):
            sending.body = packed
            sending.sys_flag |= SYS_FLAGS[codec]
