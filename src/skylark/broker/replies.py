"""SEND_REPLY_MESSAGE (324, and 325 with short names): takes a reply to the client that asked, over that client's own
connection, and keeps a copy in the reply topic.

The acknowledgement says whether the requester has the reply. The copy is for those who look back later: whether it
could be stored does not change the answer, as in Apache's broker.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from typing import Final

from skylark.broker.clients import Clients
from skylark.broker.config import BrokerConfig
from skylark.broker.internal import SENDERS_FLAGS, without_internal
from skylark.broker.put import Put
from skylark.broker.questions import Questions
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import PushReply
from skylark.wire.message import PROPERTY_PUSH_REPLY_TIME, PROPERTY_REPLY_TO_CLIENT, Message
from skylark.wire.records import decode_properties, encode_properties
from skylark.wire.sending import SendRequest, decode_send
from skylark.wire.tables import TopicConfig
from skylark.wire.typed import encode_header

log = logging.getLogger(__name__)

_PUSH_TIMEOUT_S: Final = 10.0


class Replies:
    """Passes replies on."""

    def __init__(
        self,
        config: BrokerConfig,
        put: Put,
        check: Callable[[SendRequest, Connection], TopicConfig],
        clients: Clients,
        clock: Callable[[], int],
        address: str,
        questions: Questions,
    ) -> None:
        """`check` gives the topic that may be written to; `address` is this broker's."""
        self._config = config
        self._put = put
        self._check = check
        self._clients = clients
        self._clock = clock
        self._address = address
        self._questions = questions

    def handlers(self) -> dict[int, Handler]:
        return {RequestCode.SEND_REPLY_MESSAGE: self.send, RequestCode.SEND_REPLY_MESSAGE_V2: self.send}

    def send(self, request: Frame, connection: Connection) -> Awaitable[Frame]:
        header = decode_send(request)
        topic = self._check(header, connection)
        queue_id = header.queue_id if header.queue_id >= 0 else random.randrange(topic.write_queue_nums)
        return self._deliver(request, header, queue_id, connection)

    async def _deliver(self, request: Frame, header: SendRequest, queue_id: int, connection: Connection) -> Frame:
        properties = without_internal(decode_properties(header.properties))
        failure = await self._push(request, header, dict(properties), connection)
        fields = {
            "MSG_REGION": self._config.region_id,
            "TRACE_ON": "true" if self._config.trace_on else "false",
        }
        if failure is None:
            fields |= {"msgId": "0", "queueId": str(queue_id), "queueOffset": "0"}
        else:
            log.warning("a reply of %r was not delivered: %s", connection, failure)
        if self._config.store_reply_message_enable:
            message = Message(
                header.topic,
                queue_id,
                request.body,
                properties,
                header.flag,
                header.sys_flag & SENDERS_FLAGS,
                header.born_timestamp_ms,
                connection.peer_host,
                header.reconsume_times or 0,
            )
            fields |= self._keep(message)
        return request.reply(ResponseCode.SUCCESS if failure is None else ResponseCode.SYSTEM_ERROR, failure, fields)

    async def _push(
        self, request: Frame, header: SendRequest, properties: dict[str, str], connection: Connection
    ) -> str | None:
        """Why the requester did not take the reply; None when it did."""
        client_id = properties.get(PROPERTY_REPLY_TO_CLIENT)
        if client_id is None:
            return f"reply message properties[{PROPERTY_REPLY_TO_CLIENT}] is null"
        requester = self._clients.producing(client_id)
        if requester is None:
            return f"push reply message fail, channel of <{client_id}> not found."
        now_ms = self._clock()
        properties[PROPERTY_PUSH_REPLY_TIME] = str(now_ms)
        push = PushReply(
            header.producer_group,
            header.topic,
            header.default_topic,
            header.default_topic_queue_nums,
            header.queue_id,
            header.sys_flag,
            header.born_timestamp_ms,
            header.flag,
            born_host=f"{connection!r}",
            store_host=self._address,
            store_timestamp=now_ms,
            properties=encode_properties(properties).decode(),
            reconsume_times=header.reconsume_times,
            unit_mode=header.unit_mode,
        )
        question = Frame(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, encode_header(push), request.body)
        try:
            with self._questions.counted(connection):
                answer = await requester.request(question, _PUSH_TIMEOUT_S)
        except (ConnectionError, TimeoutError, RequestFailed) as e:
            log.warning("the requester %s at %r: %s", client_id, requester, str(e) or "no answer in time")
        else:
            if answer.code == ResponseCode.SUCCESS:
                return None
            log.warning("the requester %s at %r refuses a reply: %s", client_id, requester, answer.remark)
        return f"push reply message to {client_id}fail."

    def _keep(self, message: Message) -> dict[str, str]:
        queue_id = message.queue_id
        try:
            appended = self._put.one(message, self._clock())
        except RequestFailed as e:
            log.warning("a reply can't be stored: %s", e)
            return {}
        return {
            "msgId": appended.message_id,
            "queueId": str(queue_id),
            "queueOffset": str(appended.queue_offset),
        }
