"""What brokers ask of a client: how its members do, and to tell them what changed or what an operator wants."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from skylark.client import stacks
from skylark.client.dialogue import Dialogue
from skylark.client.message import Message
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.wire import fastjson
from skylark.wire.bodies import (
    ConsumerData,
    ConsumerStatus,
    MessageQueue,
    ResetOffsets,
    decode_body,
    encode_body,
)
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import (
    ConsumeMessageDirectlyResult,
    GetConsumerRunningInfo,
    GetConsumerStatus,
    NotifyConsumerIdsChanged,
    ResetOffset,
)
from skylark.wire.message import PROPERTY_PRODUCER_GROUP, StoredMessage
from skylark.wire.records import decode_record
from skylark.wire.typed import decode_header

log = logging.getLogger(__name__)

TransactionCheck = Callable[[Frame, StoredMessage, Connection], None]
"""Takes a broker's question about a transaction, with the half message, and the connection to answer on."""


class ConsumerMember(Protocol):
    """What a session wants from a consumer that joins a group. The plain methods must not block."""

    @property
    def group(self) -> str: ...

    def data(self) -> ConsumerData:
        """What heartbeats say about the group."""

    def rebalance_soon(self) -> None:
        """The group's members changed."""

    def reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        """An operator moves the group; go on from these offsets."""

    def positions(self, topic: str) -> dict[MessageQueue, int]:
        """The offsets up to which the member has consumed its queues of the topic."""

    def running_info(self) -> Mapping[str, object]:
        """Apache's ConsumerRunningInfo, for operators."""

    def consume_directly(self, message: Message) -> Awaitable[Mapping[str, object]]:
        """An operator has one message consumed here; Apache's ConsumeMessageDirectlyResult."""


class Questions:
    """Answers them for the members of a session, which may come and go."""

    def __init__(
        self, consumers: Mapping[str, ConsumerMember], checkers: Mapping[str, TransactionCheck], dialogue: Dialogue
    ) -> None:
        self._consumers = consumers
        self._checkers = checkers
        self.handlers: dict[int, Handler] = {
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: self._members_changed,
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET: self._reset_offsets,
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: self._tell_positions,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self._tell_running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self._consume_directly,
            RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: dialogue.receive,
            RequestCode.CHECK_TRANSACTION_STATE: self._check_transaction,
        }

    def _members_changed(self, request: Frame, _: Connection) -> None:
        member = self._consumers.get(decode_header(NotifyConsumerIdsChanged, request).consumer_group)
        if member is not None:
            member.rebalance_soon()

    def _reset_offsets(self, request: Frame, _: Connection) -> None:
        header = decode_header(ResetOffset, request)
        member = self._consumers.get(header.group)
        if member is not None and request.body:
            member.reset_offsets(header.topic, decode_body(ResetOffsets, request.body).offset_table)

    def _tell_positions(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(GetConsumerStatus, request)
        table = self._member(header.group).positions(header.topic)
        return request.reply(body=encode_body(ConsumerStatus(message_queue_table=table)))

    def _tell_running_info(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(GetConsumerRunningInfo, request)
        info = dict(self._member(header.consumer_group).running_info())
        if header.jstack_enable:
            info["jstack"] = stacks.dump()
        return request.reply(body=fastjson.dumps(info))

    async def _consume_directly(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(ConsumeMessageDirectlyResult, request)
        member = self._member(header.consumer_group)
        message = Message.from_record(decode_record(request.body), header.broker_name or "")
        return request.reply(body=fastjson.dumps(await member.consume_directly(message)))

    def _check_transaction(self, request: Frame, connection: Connection) -> None:
        record = decode_record(request.body)
        group = record.properties.get(PROPERTY_PRODUCER_GROUP, "")
        check = self._checkers.get(group)
        if check is None:
            log.info("nobody here knows how transactions of group %r ended", group)
        else:
            check(request, record, connection)

    def _member(self, group: str) -> ConsumerMember:
        member = self._consumers.get(group)
        if member is None:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"The Consumer Group <{group}> not exist in this consumer")
        return member
