"""Questions to a consumer that are asked through the broker: it passes them on over the client's own connection and
passes the answer back. A consumer that does not read what it was sent is asked when it does, or never.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from skylark.broker.clients import Clients, ConsumerGroup, Member
from skylark.broker.config import BrokerConfig
from skylark.broker.groups import Groups
from skylark.broker.topics import Topics
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.wire.bodies import BadBody, ConsumerStatus, MessageQueue, decode_body, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import ConsumeMessageDirectlyResult, GetConsumerRunningInfo, GetConsumerStatus
from skylark.wire.records import parse_message_id
from skylark.wire.typed import decode_header

log = logging.getLogger(__name__)

_CALL_TIMEOUT_S: Final = 10.0
_STATUS_TIMEOUT_S: Final = 5.0
_FIRST_VERSION_WITH_STATUS: Final = 28  # the ordinal of V3_0_7_SNAPSHOT
_FIRST_VERSION_WITH_CALLS: Final = 62  # the ordinal of V3_1_8_SNAPSHOT


class RecordReader(Protocol):
    """What of the store is asked here."""

    def record_at(self, log_offset: int) -> memoryview | None: ...


def handlers(
    clients: Clients, store: RecordReader, topics: Topics, groups: Groups, config: BrokerConfig
) -> dict[int, Handler]:
    relays = _Relays(clients, store, topics, groups, config)
    return {
        RequestCode.GET_CONSUMER_RUNNING_INFO: relays.running_info,
        RequestCode.CONSUME_MESSAGE_DIRECTLY: relays.consume_directly,
        RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: relays.status,
    }


class _Relays:
    def __init__(
        self, clients: Clients, store: RecordReader, topics: Topics, groups: Groups, config: BrokerConfig
    ) -> None:
        self._clients = clients
        self._store = store
        self._topics = topics
        self._groups = groups
        self._config = config

    def running_info(self, request: Frame, _: Connection) -> Awaitable[Frame]:
        header = decode_header(GetConsumerRunningInfo, request)
        return self._call(request, header.consumer_group, header.client_id, request.fields, lambda: request.body)

    def consume_directly(self, request: Frame, _: Connection) -> Awaitable[Frame]:
        """Has a consumer consume one message now, whatever its progress, and tell how that went."""
        header = decode_header(ConsumeMessageDirectlyResult, request)
        fields = request.fields | {"brokerName": self._config.broker_name}
        topic = self._topics.get(header.topic or "")
        if topic is not None:
            fields["topicSysFlag"] = str(topic.topic_sys_flag)
        group = self._groups.get(header.consumer_group)
        if group is not None:
            fields["groupSysFlag"] = str(group.group_sys_flag)
        message_id = header.msg_id or ""
        self._record(message_id)  # there is none: then nobody is asked
        return self._call(
            request, header.consumer_group, header.client_id, fields, lambda: bytes(self._record(message_id))
        )

    def status(self, request: Frame, _: Connection) -> Awaitable[Frame]:
        header = decode_header(GetConsumerStatus, request)
        group = self._clients.group(header.group)
        if group is None:
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR, f"No Any Consumer online in the consumer group: [{header.group}]"
            )
        for member in group.members.values():
            if member.version < _FIRST_VERSION_WITH_STATUS:
                raise RequestFailed(
                    ResponseCode.SYSTEM_ERROR, f"the client does not support this feature. version={member.version}"
                )
        return self._ask_members(request, header, group)

    def _record(self, message_id: str) -> memoryview:
        try:
            _, log_offset = parse_message_id(message_id)
        except ValueError as e:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"{message_id} is not a message id: {e}") from None
        record = self._store.record_at(log_offset)
        if record is None:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"can not find message by the offset, {log_offset}")
        return record

    def _call(
        self, request: Frame, group: str, client_id: str | None, fields: dict[str, str], body: Callable[[], bytes]
    ) -> Awaitable[Frame]:
        member = self._clients.member(group, client_id)
        if member is None:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"The Consumer <{group}> <{client_id}> not online")
        if member.version < _FIRST_VERSION_WITH_CALLS:
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR,
                f"The Consumer <{client_id}> Version <{member.version}> too low to finish, please upgrade it to "
                "V3_1_8_SNAPSHOT",
            )
        return self._pass_on(request, dict(fields), body, group, member)

    async def _pass_on(
        self, request: Frame, fields: dict[str, str], body: Callable[[], bytes], group: str, member: Member
    ) -> Frame:
        connection = member.connection
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                await connection.writable()  # before the question is made: many of them may wait
                answer = await connection.request(Frame(request.code, fields, body()), _CALL_TIMEOUT_S)
        except TimeoutError:
            raise RequestFailed(
                ResponseCode.CONSUME_MSG_TIMEOUT,
                f"consumer <{group}> <{member.client_id}> Timeout: no answer within {_CALL_TIMEOUT_S:.0f} s",
            ) from None
        except ConnectionError as e:
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR, f"invoke consumer <{group}> <{member.client_id}> Exception: {e}"
            ) from None
        return request.reply(answer.code, answer.remark, answer.fields, answer.body)

    async def _ask_members(self, request: Frame, header: GetConsumerStatus, group: ConsumerGroup) -> Frame:
        """Where the group's members, or the one that the request names, stand. Who does not answer is left out."""
        wanted = header.client_addr
        members = [member for member in group.members.values() if not wanted or member.client_id == wanted]
        answers = await asyncio.gather(*(self._member_status(member, header) for member in members))
        table = {
            member.client_id: answer for member, answer in zip(members, answers, strict=True) if answer is not None
        }
        return request.reply(body=encode_body(ConsumerStatus(consumer_table=table)))

    async def _member_status(self, member: Member, header: GetConsumerStatus) -> dict[MessageQueue, int] | None:
        question = Frame(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, {"topic": header.topic, "group": header.group})
        try:
            answer = await member.connection.request(question, _STATUS_TIMEOUT_S)
            if answer.code != ResponseCode.SUCCESS or not answer.body:
                return None
            return decode_body(ConsumerStatus, answer.body).message_queue_table
        except (TimeoutError, ConnectionError, BadBody) as e:
            log.warning("%s of %s does not tell where it stands: %s", member.client_id, header.group, e)
            return None
