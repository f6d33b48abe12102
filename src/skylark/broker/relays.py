"""Questions to a consumer that are asked through the broker: it passes them on over the client's own connection and
passes the answer back. A consumer that does not read what it was sent is asked when it does, or never.

Where the members of a group stand is read from their answers: of all of them together as much as takes the event loop
some milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from skylark.broker.clients import Clients, ConsumerGroup, Member
from skylark.broker.config import BrokerConfig
from skylark.broker.groups import Groups
from skylark.broker.lines import refuse_large_body
from skylark.broker.questions import Questions
from skylark.broker.topics import Topics
from skylark.broker.turns import steps
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.wire.bodies import BadBody, ConsumerStatus, MessageQueue, decode_body, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.fastjson import MAX_LENIENT_BYTES
from skylark.wire.frame import Frame
from skylark.wire.headers import ConsumeMessageDirectlyResult, GetConsumerRunningInfo, GetConsumerStatus
from skylark.wire.records import parse_message_id
from skylark.wire.typed import decode_header

log = logging.getLogger(__name__)

_CALL_TIMEOUT_S: Final = 10.0
_STATUS_TIMEOUT_S: Final = 5.0
_MEMBERS_PER_TURN: Final = 64
_FIRST_VERSION_WITH_STATUS: Final = 28  # the ordinal of V3_0_7_SNAPSHOT
_FIRST_VERSION_WITH_CALLS: Final = 62  # the ordinal of V3_1_8_SNAPSHOT


class RecordReader(Protocol):
    """What of the store is asked here."""

    def record_at(self, log_offset: int) -> memoryview | None: ...


def handlers(
    clients: Clients,
    store: RecordReader,
    topics: Topics,
    groups: Groups,
    config: BrokerConfig,
    questions: Questions,
) -> dict[int, Handler]:
    relays = _Relays(clients, store, topics, groups, config, questions)
    return {
        RequestCode.GET_CONSUMER_RUNNING_INFO: relays.running_info,
        RequestCode.CONSUME_MESSAGE_DIRECTLY: relays.consume_directly,
        RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: relays.status,
    }


class _Relays:
    def __init__(
        self,
        clients: Clients,
        store: RecordReader,
        topics: Topics,
        groups: Groups,
        config: BrokerConfig,
        questions: Questions,
    ) -> None:
        self._clients = clients
        self._store = store
        self._topics = topics
        self._groups = groups
        self._config = config
        self._questions = questions

    def running_info(self, request: Frame, connection: Connection) -> Awaitable[Frame]:
        header = decode_header(GetConsumerRunningInfo, request)
        refuse_large_body(request)
        return self._call(
            request, header.consumer_group, header.client_id, request.fields, lambda: request.body, connection
        )

    def consume_directly(self, request: Frame, connection: Connection) -> Awaitable[Frame]:
        """Has a consumer consume one message now, whatever its progress, and tell how that went."""
        header = decode_header(ConsumeMessageDirectlyResult, request)
        refuse_large_body(request)
        fields = request.fields | {"brokerName": self._config.broker_name}
        topic = self._topics.get(header.topic or "")
        if topic is not None:
            fields["topicSysFlag"] = str(topic.topic_sys_flag)
        group = self._groups.get(header.consumer_group, connection)
        if group is not None:
            fields["groupSysFlag"] = str(group.group_sys_flag)
        message_id = header.msg_id or ""
        self._record(message_id)  # there is none: then nobody is asked
        return self._call(
            request,
            header.consumer_group,
            header.client_id,
            fields,
            lambda: bytes(self._record(message_id)),
            connection,
        )

    def status(self, request: Frame, connection: Connection) -> Awaitable[Frame]:
        header = decode_header(GetConsumerStatus, request)
        refuse_large_body(request)
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
        return self._ask_members(request, header, group, connection)

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
        self,
        request: Frame,
        group: str,
        client_id: str | None,
        fields: dict[str, str],
        body: Callable[[], bytes],
        asker: Connection,
    ) -> Awaitable[Frame]:
        self._questions.check_room(asker)  # at once: a request that waits costs more than one that is refused
        member = self._clients.member(group, client_id)
        if member is None:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"The Consumer <{group}> <{client_id}> not online")
        if member.version < _FIRST_VERSION_WITH_CALLS:
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR,
                f"The Consumer <{client_id}> Version <{member.version}> too low to finish, please upgrade it to "
                "V3_1_8_SNAPSHOT",
            )
        return self._pass_on(request, dict(fields), body, group, member, asker)

    async def _pass_on(
        self,
        request: Frame,
        fields: dict[str, str],
        body: Callable[[], bytes],
        group: str,
        member: Member,
        asker: Connection,
    ) -> Frame:
        connection = member.connection
        try:
            with self._questions.counted(asker):
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

    async def _ask_members(
        self, request: Frame, header: GetConsumerStatus, group: ConsumerGroup, asker: Connection
    ) -> Frame:
        """Where the group's members, or the one that the request names, stand. Who does not answer is left out."""
        wanted = header.client_addr
        members = [member for member in group.members.values() if not wanted or member.client_id == wanted]
        answers = _Answers(header.group)
        with self._questions.counted(asker, len(members)):
            async with asyncio.TaskGroup() as asked:
                async for member in steps(members, _MEMBERS_PER_TURN):
                    asked.create_task(self._ask_status(member, header, answers))
        return request.reply(body=encode_body(ConsumerStatus(consumer_table=answers.table)))

    async def _ask_status(self, member: Member, header: GetConsumerStatus, answers: _Answers) -> None:
        question = Frame(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, {"topic": header.topic, "group": header.group})
        try:
            answer = await member.connection.request(question, _STATUS_TIMEOUT_S)
        except (TimeoutError, ConnectionError) as e:
            answers.lacks(member, e)
        else:
            if answer.code == ResponseCode.SUCCESS and answer.body:
                answers.take(member, answer.body)


class _Answers:
    """What the members of a group tell of where they stand."""

    def __init__(self, group: str) -> None:
        self.table: dict[str, dict[MessageQueue, int]] = {}
        self._group = group
        self._left_bytes = MAX_LENIENT_BYTES

    def take(self, member: Member, body: bytes) -> None:
        """The offsets of one of them. Their form is the one that takes longest to read."""
        if len(body) > self._left_bytes:
            self.lacks(member, f"its answer has {len(body)} bytes, and {self._left_bytes} are left for all members")
            return
        self._left_bytes -= len(body)
        try:
            self.table[member.client_id] = decode_body(ConsumerStatus, body).message_queue_table
        except BadBody as e:
            self.lacks(member, e)

    def lacks(self, member: Member, reason: object) -> None:
        log.warning("%s of %s does not tell where it stands: %s", member.client_id, self._group, reason)
