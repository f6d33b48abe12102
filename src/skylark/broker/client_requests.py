"""What clients say of themselves, and what tools ask about them: the requests to the tables of `clients.py`.

A heartbeat of many groups is taken in some at a time. What comes on its connection meanwhile, another heartbeat or a
client that leaves a group, waits for its end: otherwise the rest of the heartbeat would undo it. What waits is not read
yet, for that takes many times its room, and of each host one large heartbeat is read at a time (`lines.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from msgspec.structs import replace

from skylark.broker.clients import MAX_GROUPS_PER_CONNECTION, Clients, Member
from skylark.broker.config import BrokerConfig
from skylark.broker.lines import Lines
from skylark.broker.turns import beside, next_turn, steps
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.net.hosts import host_key
from skylark.net.request_bodies import request_body
from skylark.wire.bodies import (
    CheckClient,
    ClientConnection,
    ConsumerConnections,
    ConsumerData,
    ConsumerIds,
    Heartbeat,
    ProducerConnections,
    ProducerData,
    ProducerInfo,
    ProducerTable,
    SubscriptionAnswer,
    encode_body,
)
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import (
    GetConsumerConnectionList,
    GetConsumerListByGroup,
    GetProducerConnectionList,
    QuerySubscriptionByConsumer,
    UnregisterClient,
)
from skylark.wire.typed import decode_header

MAX_CLIENT_ID_LENGTH: Final = 1_024
_MAX_REMARK: Final = 10_000
MAX_WAITING: Final = 4_096
"""Large heartbeats of a host, and requests behind them. Each takes some 3 KB beside its frame."""
_QUICK_BYTES: Final = 32 << 10
"""Of a heartbeat that is read before it is known what it says."""
MAX_OBJECTS: Final = 32_768
"""Of a heartbeat: groups and subscriptions. To read one takes a microsecond; of those that clients write, which say all
that there is to say, not so many fit into a body."""
_WEIGHT_PER_TURN: Final = 1_024
_GROUP_WEIGHT: Final = 16
"""What a group takes, where a subscription takes 1."""

CheckExpression = Callable[[str, str], str | None]
"""Given an expression's type and text, what is wrong with it, or None."""


def handlers(
    clients: Clients,
    config: BrokerConfig,
    clock: Callable[[], int],
    check_expression: CheckExpression | None = None,
) -> dict[int, Handler]:
    requests = _ClientRequests(clients, config, clock, check_expression)
    return {
        RequestCode.HEART_BEAT: requests.heartbeat,
        RequestCode.UNREGISTER_CLIENT: requests.unregister,
        RequestCode.CHECK_CLIENT_CONFIG: requests.check,
        RequestCode.GET_CONSUMER_LIST_BY_GROUP: requests.consumer_ids,
        RequestCode.GET_CONSUMER_CONNECTION_LIST: requests.consumer_connections,
        RequestCode.GET_PRODUCER_CONNECTION_LIST: requests.producer_connections,
        RequestCode.GET_ALL_PRODUCER_INFO: requests.producer_table,
        RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: requests.subscription,
    }


class _ClientRequests:
    def __init__(
        self,
        clients: Clients,
        config: BrokerConfig,
        clock: Callable[[], int],
        check_expression: CheckExpression | None,
    ) -> None:
        self._clients = clients
        self._config = config
        self._clock = clock
        self._check_expression = check_expression
        self._beating: dict[Connection, asyncio.Task[Frame]] = {}  # what comes last on each connection
        self._waiting: Counter[str] = Counter()  # how many of them, and of those before them, a host has
        self._line = Lines(MAX_WAITING)

    def heartbeat(self, request: Frame, connection: Connection) -> Frame | Awaitable[Frame]:
        if connection not in self._beating and len(request.body) <= _QUICK_BYTES:
            beat = _read(request)
            if _weight(beat) <= _WEIGHT_PER_TURN:
                must_send = self._clients.heartbeat(beat, connection, *_form(request), self._clock())
                return _heard(request, must_send, self._clients.complaints(beat, connection))
        return self._in_turn(connection, lambda: self._long_heartbeat(request, connection))

    def _in_turn(self, connection: Connection, work: Callable[[], Awaitable[Frame]]) -> Awaitable[Frame]:
        """Does what takes turns, after what came before it on the connection. Raises RequestFailed."""
        host, before = host_key(connection.peer[0]), self._beating.get(connection)
        if self._waiting[host] >= MAX_WAITING:
            raise RequestFailed(
                ResponseCode.SYSTEM_BUSY,
                f"{self._waiting[host]} heartbeats of {connection.peer[0]} wait already: try again later",
            )
        self._waiting[host] += 1

        async def follow() -> Frame:
            if before is not None:
                await asyncio.wait([before])
            return await work()

        def done(task: asyncio.Task[Frame]) -> None:
            self._waiting[host] -= 1
            if not self._waiting[host]:
                del self._waiting[host]
            if self._beating.get(connection) is task:
                del self._beating[connection]

        task = self._beating[connection] = asyncio.ensure_future(follow())
        task.add_done_callback(done)
        return task

    async def _long_heartbeat(self, request: Frame, connection: Connection) -> Frame:
        """Takes many groups in, some at a time."""
        host = connection.peer[0]
        async with self._line.turn(host):
            beat = _read(request)
            must_send = is_heard = False
            lack: RequestFailed | None = None
            for part in _parts(beat):
                try:
                    must_send |= self._clients.heartbeat(part, connection, *_form(request), self._clock())
                    is_heard = True
                except RequestFailed as e:
                    lack = e
                await next_turn(host)
            if lack is not None and not is_heard:
                raise lack
            return _heard(request, must_send, self._clients.complaints(beat, connection))

    def unregister(self, request: Frame, connection: Connection) -> Frame | Awaitable[Frame]:
        header = decode_header(UnregisterClient, request)
        if connection not in self._beating:
            return self._leave(request, header, connection)

        async def leave() -> Frame:
            return self._leave(request, header, connection)

        return self._in_turn(connection, leave)

    def _leave(self, request: Frame, header: UnregisterClient, connection: Connection) -> Frame:
        self._clients.not_coming(header.consumer_group, header.client_id)
        self._clients.unregister(connection, header.consumer_group, header.producer_group)
        return request.reply()

    def check(self, request: Frame, _: Connection) -> Frame:
        subscription = request_body(CheckClient, request.body).subscription_data if request.body else None
        if subscription is None or subscription.is_by_tag:
            return request.reply()
        kind = subscription.expression_type or ""
        if not self._config.enable_property_filter or self._check_expression is None:
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR, f"The broker does not support consumer to filter message by {kind}"
            )
        complaint = self._check_expression(kind, subscription.sub_string or "")
        if complaint is not None:
            raise RequestFailed(ResponseCode.SUBSCRIPTION_PARSE_FAILED, complaint)
        return request.reply()

    def consumer_ids(self, request: Frame, _: Connection) -> Frame:
        name = decode_header(GetConsumerListByGroup, request).consumer_group
        group = self._clients.group(name)
        if group is None:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {name}")
        return request.reply(body=encode_body(ConsumerIds(consumer_id_list=self._clients.sharers(group))))

    def consumer_connections(self, request: Frame, _: Connection) -> Frame:
        name = decode_header(GetConsumerConnectionList, request).consumer_group
        group = self._clients.group(name)
        if group is None:
            raise RequestFailed(ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{name}] not online")
        body = ConsumerConnections(
            connection_set=[_connection_of(member) for member in group.members.values()],
            consume_from_where=group.consume_from_where,
            consume_type=group.consume_type,
            message_model=group.message_model,
            subscription_table=group.subscriptions,
        )
        return request.reply(body=encode_body(body))

    def producer_connections(self, request: Frame, _: Connection) -> Frame:
        name = decode_header(GetProducerConnectionList, request).producer_group
        members = self._clients.producers(name)
        if not members:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"the producer group[{name}] not exist")
        body = ProducerConnections(connection_set=[_connection_of(member) for member in members])
        return request.reply(body=encode_body(body))

    async def producer_table(self, request: Frame, _: Connection) -> Frame:
        table = ProducerTable(data={})
        async for group, members in steps(list(self._clients.producer_groups())):
            table.data[group] = [_info(member) for member in members]
        return request.reply(body=await beside(lambda: encode_body(table)))

    def subscription(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(QuerySubscriptionByConsumer, request)
        subscription = self._clients.subscription(header.group, header.topic or "")
        answer = SubscriptionAnswer(group=header.group, subscription_data=subscription, topic=header.topic)
        return request.reply(body=encode_body(answer))


def _read(request: Frame) -> Heartbeat:
    """Raises RequestFailed for what no client says of itself, or BadBody."""
    objects = request.body.count(b"{")
    if objects > MAX_OBJECTS:
        raise RequestFailed(
            ResponseCode.MESSAGE_ILLEGAL,
            f"the heartbeat has {objects} groups and subscriptions, and may have up to {MAX_OBJECTS}",
        )
    beat = request_body(Heartbeat, request.body)
    groups = len(beat.consumer_data_set) + len(beat.producer_data_set)
    if len(beat.client_id) > MAX_CLIENT_ID_LENGTH or groups > MAX_GROUPS_PER_CONNECTION:
        raise RequestFailed(
            ResponseCode.SYSTEM_ERROR,
            f"the client's id has {len(beat.client_id)} characters, and it is in {groups} groups: up to "
            f"{MAX_CLIENT_ID_LENGTH} characters and {MAX_GROUPS_PER_CONNECTION} groups are taken",
        )
    return beat


def _consumer_weight(consumer: ConsumerData) -> int:
    return _GROUP_WEIGHT + len(consumer.subscription_data_set)


def _weight(beat: Heartbeat) -> int:
    """What it takes to take a heartbeat in."""
    return sum(map(_consumer_weight, beat.consumer_data_set)) + _GROUP_WEIGHT * len(beat.producer_data_set)


def _parts(beat: Heartbeat) -> Iterator[Heartbeat]:
    """The heartbeat in parts of a turn each, one at least; a group is in one part, whatever it subscribes to."""
    left = _WEIGHT_PER_TURN
    part = replace(beat, consumer_data_set=[], producer_data_set=[])
    groups: list[ConsumerData | ProducerData] = [*beat.consumer_data_set, *beat.producer_data_set]
    for group in groups:
        weight = _consumer_weight(group) if isinstance(group, ConsumerData) else _GROUP_WEIGHT
        if weight > left and left < _WEIGHT_PER_TURN:
            yield part
            left, part = _WEIGHT_PER_TURN, replace(beat, consumer_data_set=[], producer_data_set=[])
        left -= weight
        if isinstance(group, ConsumerData):
            part.consumer_data_set.append(group)
        else:
            part.producer_data_set.append(group)
    yield part


def _form(request: Frame) -> tuple[str, int]:
    """The language and the version of who asks."""
    return request.language, request.version


def _heard(request: Frame, must_send: bool, complaints: str) -> Frame:
    """Apache's answer, with a remark where the client should know something: Apache's clients read none."""
    fields = {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true" if must_send else "false"}
    return request.reply(remark=complaints[:_MAX_REMARK] or None, fields=fields)


def _info(member: Member) -> ProducerInfo:
    return ProducerInfo(
        client_id=member.client_id,
        language=member.language,
        last_update_timestamp=member.seen_ms,
        remote_ip=f"/{member.connection!r}",
        version=member.version,
    )


def _connection_of(member: Member) -> ClientConnection:
    return ClientConnection(
        client_addr=repr(member.connection),
        client_id=member.client_id,
        language=member.language,
        version=member.version,
    )
