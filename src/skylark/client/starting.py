"""Where to begin in a queue: at the group's offset, or, while there is none, where the consumer wants to start."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec

from skylark.client.errors import InvalidMessage
from skylark.client.offsets import UNKNOWN, Offsets, ask_offset
from skylark.client.session import Session
from skylark.client.subscriptions import RETRY_PREFIX
from skylark.wire.bodies import MessageQueue
from skylark.wire.codes import RequestCode
from skylark.wire.headers import GetMaxOffset, SearchOffset

FromWhere = (
    Literal[
        "last", "first", "timestamp",
        "CONSUME_FROM_LAST_OFFSET", "CONSUME_FROM_FIRST_OFFSET", "CONSUME_FROM_TIMESTAMP",
    ] | datetime | int
)  # fmt: skip
"""A time is a datetime or epoch milliseconds; "timestamp" is half an hour ago. RocketMQ's names mean the same."""

_HALF_AN_HOUR_MS = 30 * 60 * 1000


class Start(msgspec.Struct, frozen=True):
    """Where a group starts that has no offset yet."""

    where: Literal["last", "first", "timestamp"]
    timestamp_ms: int = 0

    @classmethod
    def of(cls, where: FromWhere, now_ms: int) -> Start:
        if isinstance(where, datetime):
            return cls("timestamp", int(where.timestamp() * 1000))
        if isinstance(where, int) and not isinstance(where, bool) and where >= 0:
            return cls("timestamp", where)
        match where:
            case "last" | "CONSUME_FROM_LAST_OFFSET":
                return cls("last")
            case "first" | "CONSUME_FROM_FIRST_OFFSET":
                return cls("first")
            case "timestamp" | "CONSUME_FROM_TIMESTAMP":
                return cls("timestamp", now_ms - _HALF_AN_HOUR_MS)
        raise InvalidMessage(
            f"from_where is {where!r}; it takes 'last', 'first', 'timestamp' (half an hour ago) or a time: a datetime, "
            f"or milliseconds since 1970"
        )

    @property
    def apache_name(self) -> str:
        return {
            "last": "CONSUME_FROM_LAST_OFFSET",
            "first": "CONSUME_FROM_FIRST_OFFSET",
            "timestamp": "CONSUME_FROM_TIMESTAMP",
        }[self.where]


async def start_of(session: Session, offsets: Offsets, queue: MessageQueue, start: Start) -> int:
    """The offset of the first message to consume. Raises RocketMQError when it can't be found out."""
    stored = await offsets.fetch(queue, is_strict=start.where == "timestamp")
    if stored != UNKNOWN:
        return stored
    is_retry = queue.topic.startswith(RETRY_PREFIX)
    if start.where == "first" or (start.where == "last" and is_retry):
        return 0  # if the queue begins later, the first pull says so
    if start.where == "last" or is_retry:
        header: msgspec.Struct = GetMaxOffset(queue.topic, queue.queue_id)
        return await ask_offset(session, queue, RequestCode.GET_MAX_OFFSET, header)
    header = SearchOffset(queue.topic, queue.queue_id, start.timestamp_ms)
    return await ask_offset(session, queue, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)
