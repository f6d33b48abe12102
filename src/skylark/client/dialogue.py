"""Requests that wait for their reply: the half of request and reply that belongs to a whole session.

A request is an ordinary message with a correlation id and the id of the client that asks. Whoever consumes it sends the
reply to a broker that the requester is connected to, and that broker hands it over on the requester's own connection.

A reply that nobody waits for, because it is late or the second one, is acknowledged and dropped, as Apache's client
does: a sender that tried again could not do better.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from skylark.client.compression import inflate
from skylark.client.errors import ClientClosed, InvalidMessage, RocketMQError, UnreadableMessage
from skylark.client.message import Message
from skylark.net.connection import Connection, RequestFailed
from skylark.net.pool import split_address
from skylark.wire.codes import ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import PushReply
from skylark.wire.message import (
    PROPERTY_CLUSTER,
    PROPERTY_CORRELATION_ID,
    PROPERTY_MESSAGE_TYPE,
    PROPERTY_REPLY_ARRIVE_TIME,
    PROPERTY_REPLY_TO_CLIENT,
    PROPERTY_TTL,
    REPLY_MESSAGE_TYPE,
    SYS_COMPRESSED,
)
from skylark.wire.records import decode_properties, encode_host
from skylark.wire.typed import decode_header

log = logging.getLogger(__name__)

MAX_WAITING: Final = 65_536


class Dialogue:
    """The requests of one client that have no reply yet, by correlation id."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Message]] = {}

    @contextmanager
    def expect(self, correlation_id: str) -> Iterator[asyncio.Future[Message]]:
        """The future of a reply; nobody waits for it any more when the block ends."""
        if len(self._waiting) >= MAX_WAITING:
            raise RocketMQError(f"{MAX_WAITING} requests wait for their reply already")
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[correlation_id] = reply
        try:
            yield reply
        finally:
            del self._waiting[correlation_id]
            if not reply.cancel() and not reply.cancelled():
                reply.exception()  # looked at, should the requester have left with another error

    def close(self) -> None:
        """No reply can come any more."""
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(ClientClosed("the client was closed before the reply came"))

    def receive(self, request: Frame, connection: Connection) -> Frame:
        """A broker hands over a reply."""
        header = decode_header(PushReply, request)
        properties = decode_properties(header.properties or "")
        reply = self._waiting.get(properties.get(PROPERTY_CORRELATION_ID, ""))
        if reply is None or reply.done():
            log.warning(
                "a reply from %s answers no request that waits, correlation id %s",
                header.born_host, properties.get(PROPERTY_CORRELATION_ID),
            )  # fmt: skip
            return request.reply()
        properties[PROPERTY_REPLY_ARRIVE_TIME] = str(time.time_ns() // 1_000_000)
        try:
            reply.set_result(_message(header, properties, request.body))
        except UnreadableMessage as e:
            reply.set_exception(e)
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"process reply message fail: {e}") from e
        return request.reply()


def request_properties(client_id: str, timeout_s: float) -> dict[str, str]:
    """What makes a message a request."""
    return {
        PROPERTY_CORRELATION_ID: str(uuid.uuid4()),
        PROPERTY_REPLY_TO_CLIENT: client_id,
        PROPERTY_TTL: str(round(timeout_s * 1000)),
    }


def reply_properties(request: Message) -> dict[str, str]:
    """What leads a reply to whoever sent the request. Raises InvalidMessage if it was no request."""
    properties = {PROPERTY_MESSAGE_TYPE: REPLY_MESSAGE_TYPE}
    for name in (PROPERTY_CORRELATION_ID, PROPERTY_REPLY_TO_CLIENT):
        if name not in request.properties:
            raise InvalidMessage(f"message {request.msg_id} is no request: it has no property {name}")
        properties[name] = request.properties[name]
    if PROPERTY_TTL in request.properties:
        properties[PROPERTY_TTL] = request.properties[PROPERTY_TTL]
    return properties


def reply_topic(request: Message) -> str:
    """Where the replies of the request's cluster go. Raises InvalidMessage."""
    cluster = request.properties.get(PROPERTY_CLUSTER)
    if cluster is None:
        raise InvalidMessage(f"message {request.msg_id} was not consumed from a broker: it has no {PROPERTY_CLUSTER}")
    return f"{cluster}_REPLY_TOPIC"


def _message(header: PushReply, properties: dict[str, str], body: bytes) -> Message:
    return Message(
        topic=header.topic,
        body=inflate(body, header.sys_flag) if header.sys_flag & SYS_COMPRESSED else body,
        properties=properties,
        queue_id=header.queue_id,
        born_timestamp_ms=header.born_timestamp,
        store_timestamp_ms=header.store_timestamp,
        born_host_bytes=_host(header.born_host),
        store_host_bytes=_host(header.store_host),
        reconsume_times=header.reconsume_times or 0,
        flag=header.flag,
        sys_flag=header.sys_flag,
        size_bytes=len(body),
    )


def _host(address: str) -> bytes:
    """The address as bytes; a name, which a broker may have been given, says nothing here."""
    try:
        return encode_host(*split_address(address))
    except (ValueError, OSError):
        return bytes(8)
