"""RECALL_MESSAGE: a timer is taken back by its handle, as long as its moment has not come.

A recall is a message in the queue of timers itself, due in the slot of the timer that it names; when that slot is read,
the two cancel each other. Nobody looks for the timer now, so the answer is the same whether there is one or not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from skylark.broker.config import BrokerConfig
from skylark.broker.internal import is_internal
from skylark.broker.put import Put
from skylark.broker.timers import delete_key
from skylark.broker.topics import Topics
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import (
    PROPERTY_BORN_TIMESTAMP,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DELETE_KEY,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_UNIQUE_KEY,
    Message,
)
from skylark.wire.numbers import java_long
from skylark.wire.recall import BadHandle, Recall, RecallHandle
from skylark.wire.tables import PERM_WRITE
from skylark.wire.typed import decode_header

_TAG: Final = "_RECALL_TAG_"
_BODY: Final = b"0"


class Recalls:
    """Takes timers back."""

    def __init__(self, config: BrokerConfig, put: Put, topics: Topics, clock: Callable[[], int]) -> None:
        self._config = config
        self._put = put
        self._topics = topics
        self._clock = clock

    def handlers(self) -> dict[int, Handler]:
        return {RequestCode.RECALL_MESSAGE: self.recall}

    def recall(self, request: Frame, connection: Connection) -> Frame | Awaitable[Frame]:
        header = decode_header(Recall, request)
        now_ms = self._clock()
        handle = self._check(header, now_ms)
        message = self._message(header, handle, now_ms)
        message.born_host = connection.peer_host
        try:
            appended = self._put.one(message, now_ms)
        except RequestFailed as e:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"recall failed, execute error: {e}") from e
        fields = {"msgId": handle.unique_key, "MSG_REGION": self._config.region_id}
        reply = request.reply(fields=fields)
        return self._flushed(self._put.when_flushed(appended, reply)) if self._put.is_synchronous else reply

    @staticmethod
    async def _flushed(answer: Awaitable[Frame]) -> Frame:
        """A recall that is stored but late on the disk counts as done."""
        reply = await answer
        reply.code = ResponseCode.SUCCESS
        return reply

    def _check(self, header: Recall, now_ms: int) -> RecallHandle:
        config = self._config
        if not config.recall_message_enable:
            raise RequestFailed(ResponseCode.NO_PERMISSION, "recall failed, operation is forbidden")
        if not config.broker_permission & PERM_WRITE and not config.allow_recall_when_broker_not_writeable:
            raise RequestFailed(ResponseCode.SERVICE_NOT_AVAILABLE, "recall failed, broker service not available")
        if self._topics.get(header.topic) is None:
            raise RequestFailed(ResponseCode.TOPIC_NOT_EXIST, f"recall failed, the topic[{header.topic}] not exist")
        if is_internal(header.topic):
            raise RequestFailed(ResponseCode.NO_PERMISSION, "recall failed, operation is forbidden")
        try:
            handle = RecallHandle.decode(header.recall_handle)
        except BadHandle as e:
            raise RequestFailed(ResponseCode.ILLEGAL_OPERATION, str(e)) from None
        if handle.topic != header.topic:
            raise RequestFailed(ResponseCode.ILLEGAL_OPERATION, "recall failed, topic not match")
        if handle.broker != config.broker_name:
            raise RequestFailed(ResponseCode.ILLEGAL_OPERATION, "recall failed, broker service not available")
        left_ms = (java_long(handle.time) or 0) - now_ms
        if not 0 < left_ms < config.timer_max_delay_sec * 1000:
            raise RequestFailed(ResponseCode.ILLEGAL_OPERATION, "recall failed, timestamp invalid")
        return handle

    def _message(self, header: Recall, handle: RecallHandle, now_ms: int) -> Message:
        properties = {
            PROPERTY_TAGS: _TAG,
            PROPERTY_TIMER_DELETE_KEY: delete_key(handle.topic, handle.unique_key, self._config),
            PROPERTY_UNIQUE_KEY: handle.unique_key,
            PROPERTY_TIMER_DELIVER_MS: handle.time,
            PROPERTY_BORN_TIMESTAMP: str(now_ms),
        }
        if header.producer_group:
            properties[PROPERTY_PRODUCER_GROUP] = header.producer_group
        return Message(handle.topic, 0, _BODY, properties, born_timestamp_ms=now_ms)
