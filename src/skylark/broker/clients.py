"""Who is connected: the members of consumer groups and of producer groups, as their heartbeats tell.

A member is a connection. It is gone when it says so, when its connection closes, or when it was silent for 120 s. When
a consumer group's members or the topics they subscribe to change, every member is told, so that they share the queues
out anew; broadcasting groups, which share nothing, are not told.

A group exists while it has a member. Its subscriptions are those of the member heard last: members must agree on them,
or messages go missing. That they don't is logged, once until they do again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from skylark.broker.config import BrokerConfig
from skylark.broker.former_members import FormerMembers
from skylark.broker.groups import Groups
from skylark.broker.request_bodies import request_body
from skylark.broker.topics import RETRY_PREFIX, Topics
from skylark.broker.turns import beside, steps
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.wire.bodies import (
    BROADCASTING,
    TAG,
    CheckClient,
    ClientConnection,
    ConsumerConnections,
    ConsumerData,
    ConsumerIds,
    Heartbeat,
    MessageQueue,
    ProducerConnections,
    ProducerInfo,
    ProducerTable,
    ResetOffsets,
    ResetOffsetsForC,
    Subscription,
    SubscriptionAnswer,
    encode_body,
)
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import (
    GetConsumerConnectionList,
    GetConsumerListByGroup,
    GetProducerConnectionList,
    NotifyConsumerIdsChanged,
    QuerySubscriptionByConsumer,
    ResetOffset,
    UnregisterClient,
)
from skylark.wire.tables import PERM_READ, PERM_WRITE, UNIT_SUBSCRIPTION
from skylark.wire.typed import decode_header, encode_header

log = logging.getLogger(__name__)

MAX_GROUPS_PER_CONNECTION: Final = 10_000
MAX_TOPICS_PER_GROUP: Final = 4_096
MAX_CHARACTERS_PER_CONNECTION: Final = 4 << 20
"""Of the subscriptions of its groups. Names and expressions are kept, and compared with those of other members."""
MAX_CLIENT_ID_LENGTH: Final = 1_024
_GROUPS_PER_TURN: Final = 64
NEWCOMER_DELAY_S: Final = 1.0
_MAX_PRODUCER_GROUP_LENGTH: Final = 255
_LONG_PAUSE_MS: Final = 20_000  # between two searches for silent members, which come every 10 s
_FIRST_VERSION_WITH_RESET: Final = 28  # the ordinal of V3_0_7_SNAPSHOT


class Member(msgspec.Struct, eq=False):
    """One client in one group."""

    connection: Connection
    client_id: str
    language: str
    version: int
    seen_ms: int
    expressions: dict[str, str] = {}
    """topic -> what the member wants of it, as its last full heartbeat said"""


class ConsumerGroup(msgspec.Struct, eq=False):
    """A consumer group that has members."""

    name: str
    consume_type: str | None = None
    message_model: str | None = None
    consume_from_where: str | None = None
    subscriptions: dict[str, Subscription] = {}
    members: dict[Connection, Member] = {}
    fingerprint: int | None = None
    is_divided: bool = False
    """Its members subscribe to different things, and that was said."""

    def member(self, client_id: str | None) -> Member | None:
        return next((member for member in self.members.values() if member.client_id == client_id), None)


class _Roles(msgspec.Struct, eq=False):
    """The groups that a connection is a member of, so that its end costs no search."""

    consumer_groups: set[str] = set()
    producer_groups: set[str] = set()
    producer_id: str | None = None
    sizes: dict[str, int] = {}
    """consumer group -> characters of what the connection's member said that it subscribes to"""
    characters: int = 0
    """Of all of them."""


class Clients:
    """The tables of connected clients."""

    def __init__(
        self, topics: Topics, groups: Groups, config: BrokerConfig, former: FormerMembers | None = None
    ) -> None:
        self.on_leave: Callable[[str, str], None] | None = None
        """Called with a consumer group and the id of a client that says that it has left the group, and is gone."""
        self.on_subscribe: Callable[[str, list[Subscription]], None] | None = None
        """Called with a consumer group and what a member's heartbeat says that it subscribes to."""
        self.on_empty: Callable[[str], None] | None = None
        """Called with a consumer group whose last member is gone."""
        self._topics = topics
        self._groups = groups
        self._config = config
        self._former = former or FormerMembers()
        self._checked_ms: int | None = None
        self._consumers: dict[str, ConsumerGroup] = {}
        self._producers: dict[str, dict[Connection, Member]] = {}
        self._roles: dict[Connection, _Roles] = {}
        self._producing: dict[str, Connection] = {}  # by client id
        self._groups_by_topic: dict[str, set[str]] = {}

    # Questions.

    def group(self, name: str) -> ConsumerGroup | None:
        return self._consumers.get(name)

    def consumer_groups(self) -> Iterable[ConsumerGroup]:
        return self._consumers.values()

    def subscription(self, group: str, topic: str) -> Subscription | None:
        consumers = self._consumers.get(group)
        return None if consumers is None else consumers.subscriptions.get(topic)

    def groups_of(self, topic: str) -> set[str]:
        """The groups whose members subscribe to the topic now."""
        return set(self._groups_by_topic.get(topic, ()))

    def member(self, group: str, client_id: str | None) -> Member | None:
        consumers = self._consumers.get(group)
        return None if consumers is None else consumers.member(client_id)

    def sharers(self, group: ConsumerGroup) -> list[str]:
        """Whose the group's queues are, by client id: its members, and who is expected back after a restart.

        Each counts once: of two places, which a client has while its former connection is not known to be dead, it
        would take the queues of one only.
        """
        ids = dict.fromkeys(member.client_id for member in group.members.values())
        return [*ids, *self._former.expected(group.name)]

    def sharing(self) -> Iterator[tuple[str, list[str]]]:
        """Each group whose members share queues, with their ids."""
        for group in self._consumers.values():
            if group.message_model != BROADCASTING:
                yield group.name, self.sharers(group)

    def producers(self, group: str) -> list[Member]:
        return list(self._producers.get(group, {}).values())

    def producing(self, client_id: str) -> Connection | None:
        """Where a client can be reached that is in some producer group."""
        return self._producing.get(client_id)

    def producer_groups(self) -> Iterator[tuple[str, list[Member]]]:
        return ((name, list(members.values())) for name, members in self._producers.items())

    # Changes.

    def heartbeat(self, beat: Heartbeat, connection: Connection, language: str, version: int, now_ms: int) -> bool:
        """Takes in what a client says about itself. Whether it must send its subscriptions (again)."""
        must_send = False
        for consumer in beat.consumer_data_set:
            member = Member(connection, beat.client_id, language, version, now_ms)
            must_send |= self._consumer_beat(consumer, beat, member)
        for producer in beat.producer_data_set:
            if len(producer.group_name) <= _MAX_PRODUCER_GROUP_LENGTH:
                self._add_producer(producer.group_name, Member(connection, beat.client_id, language, version, now_ms))
        return must_send or beat.heartbeat_fingerprint == 0

    def unregister(self, connection: Connection, consumer_group: str | None, producer_group: str | None) -> None:
        roles = self._roles.get(connection)
        if roles is None:
            return
        if consumer_group in roles.consumer_groups:
            roles.consumer_groups.discard(consumer_group)
            roles.characters -= roles.sizes.pop(consumer_group, 0)
            member = self._remove_consumer(consumer_group, connection)
            # A client may be there on another connection still, or already again.
            if self.on_leave is not None and self.member(consumer_group, member.client_id) is None:
                self.on_leave(consumer_group, member.client_id)
        if producer_group in roles.producer_groups:
            roles.producer_groups.discard(producer_group)
            self._remove_producer(producer_group, connection)
            if not roles.producer_groups:
                self._forget_id(roles, connection)
        if not roles.consumer_groups and not roles.producer_groups:
            del self._roles[connection]

    def not_coming(self, consumer_group: str | None, client_id: str) -> None:
        """A client leaves that may not have come back since the broker was restarted."""
        if consumer_group is not None and self._former.left(consumer_group, client_id):
            self._tell(consumer_group)

    def closed(self, connection: Connection) -> None:
        """The connection is gone, and with it its memberships."""
        roles = self._roles.pop(connection, None)
        if roles is not None:
            self._forget_id(roles, connection)
            for group in roles.consumer_groups:
                self._remove_consumer(group, connection)
            for group in roles.producer_groups:
                self._remove_producer(group, connection)

    def expire(self, now_ms: int) -> None:
        """Removes and disconnects members that were silent for too long; called every few seconds."""
        for name in self._former.expire(now_ms):
            self._tell(name)
        timeout_ms = self._config.channel_expired_timeout
        last_ms, self._checked_ms = self._checked_ms, now_ms
        members = [member for group in self._consumers.values() for member in group.members.values()]
        members += [member for group in self._producers.values() for member in group.values()]
        if last_ms is not None and not 0 <= now_ms - last_ms <= max(timeout_ms / 2, _LONG_PAUSE_MS):
            # The clock jumped, or the broker slept: that is not the clients' silence.
            for member in members:
                member.seen_ms = now_ms
            return
        for connection in {member.connection for member in members if now_ms - member.seen_ms > timeout_ms}:
            log.warning("%r sent no heartbeat for %d ms: closing", connection, timeout_ms)
            self.closed(connection)
            connection.close()

    def push_reset(self, group: str, topic: str, timestamp_ms: int, offsets: Mapping[MessageQueue, int]) -> None:
        """Sends every member of the group to `offsets`. Raises RequestFailed if none is there or one is too old."""
        consumers = self._consumers.get(group)
        if consumers is None:
            raise RequestFailed(
                ResponseCode.CONSUMER_NOT_ONLINE,
                f"Consumer not online, so can not reset offset, Group: {group} Topic: {topic} "
                f"Timestamp: {timestamp_ms}",
            )
        for member in consumers.members.values():
            if member.version < _FIRST_VERSION_WITH_RESET:
                raise RequestFailed(
                    ResponseCode.SYSTEM_ERROR, f"the client does not support this feature. version={member.version}"
                )
        fields = encode_header(ResetOffset(group=group, topic=topic, timestamp=timestamp_ms, force=False))
        body = encode_body(ResetOffsets(offset_table=dict(offsets)))
        body_for_c = encode_body(ResetOffsetsForC.of(offsets))
        for member in consumers.members.values():
            member_body = body_for_c if member.language == "CPP" else body
            member.connection.notify(Frame(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, dict(fields), member_body))

    # Consumers.

    def _consumer_beat(self, consumer: ConsumerData, beat: Heartbeat, member: Member) -> bool:
        roles = self._roles.get(member.connection) or _Roles()
        is_new = consumer.group_name not in roles.consumer_groups
        size = _characters(consumer)
        if (is_new and not _has_room(roles, member)) or not _has_room_for(consumer, size, roles, member):
            return False
        config = self._groups.get(consumer.group_name)
        if config is None:
            log.info("%r beats for group %.255s, which does not exist", member.connection, consumer.group_name)
            return False
        is_ordered = any(
            (topic := self._topics.get(subscription.topic)) is not None and topic.order
            for subscription in consumer.subscription_data_set
        )
        self._topics.create_for_send_back(
            RETRY_PREFIX + consumer.group_name,
            config.retry_queue_nums,
            PERM_READ | PERM_WRITE,
            UNIT_SUBSCRIPTION if consumer.unit_mode else 0,
            None if beat.without_sub else is_ordered,
        )
        self._roles[member.connection] = roles
        roles.consumer_groups.add(consumer.group_name)
        if not beat.without_sub:
            roles.characters += size - roles.sizes.get(consumer.group_name, 0)
            roles.sizes[consumer.group_name] = size
        group = self._consumers.get(consumer.group_name)
        if group is None:
            group = self._consumers[consumer.group_name] = ConsumerGroup(consumer.group_name)
        group.consume_type = consumer.consume_type
        group.message_model = consumer.message_model
        group.consume_from_where = consumer.consume_from_where
        is_changed = _refresh(group.members, member)
        if is_changed:
            log.info("%s joins group %s as %r", member.client_id, group.name, member.connection)
            self._former.came(group.name, member.client_id)
        if not beat.without_sub:
            is_changed |= self._subscribe(group, consumer.subscription_data_set)
            _compare(group, group.members[member.connection], consumer.subscription_data_set)
            if self.on_subscribe is not None:
                self.on_subscribe(group.name, consumer.subscription_data_set)
        if is_changed:
            self._notify(group, newcomer=member.connection)
        elif self._former.has_restarted(group.name):
            self._notify_one(group, member.connection, NEWCOMER_DELAY_S)
        known, group.fingerprint = group.fingerprint, beat.heartbeat_fingerprint
        # A client that leaves its subscriptions out relies on a broker that may have been restarted since.
        is_missing = beat.without_sub and not group.subscriptions
        return is_missing or (known is not None and known != beat.heartbeat_fingerprint)

    def _subscribe(self, group: ConsumerGroup, subscriptions: list[Subscription]) -> bool:
        """Replaces the group's subscriptions by newer ones. Whether the topics changed."""
        wanted = {subscription.topic: subscription for subscription in subscriptions}
        added = wanted.keys() - group.subscriptions.keys()
        dropped = group.subscriptions.keys() - wanted.keys()
        for topic, subscription in wanted.items():
            old = group.subscriptions.get(topic)
            if old is None or subscription.sub_version > old.sub_version:
                group.subscriptions[topic] = subscription
        for topic in added:
            self._groups_by_topic.setdefault(topic, set()).add(group.name)
        for topic in dropped:
            del group.subscriptions[topic]
            self._forget_topic(topic, group.name)
        return bool(added or dropped)

    def _remove_consumer(self, name: str, connection: Connection) -> Member:
        group = self._consumers[name]
        member = group.members.pop(connection)
        log.info("%s leaves group %s", member.client_id, name)
        if group.members:
            self._notify(group)
            return member
        del self._consumers[name]
        if self.on_empty is not None:
            self.on_empty(name)
        for topic in group.subscriptions:
            self._forget_topic(topic, name)
        return member

    def _forget_topic(self, topic: str, group: str) -> None:
        groups = self._groups_by_topic[topic]
        groups.discard(group)
        if not groups:
            del self._groups_by_topic[topic]

    def _tell(self, name: str) -> None:
        group = self._consumers.get(name)
        if group is not None:
            self._notify(group)

    def _notify(self, group: ConsumerGroup, newcomer: Connection | None = None) -> None:
        """Tells all members to share the queues out anew.

        Who caused it by a heartbeat is told later: it does so by itself when the heartbeat is answered, and Apache's
        Java client, told in the middle of its first heartbeat, may raise the version of its subscription without being
        able to send that version, and then waits for its next heartbeat.
        """
        for connection in group.members:
            self._notify_one(group, connection, NEWCOMER_DELAY_S if connection is newcomer else 0.0)

    def _notify_one(self, group: ConsumerGroup, connection: Connection, after_s: float) -> None:
        if not self._config.notify_consumer_ids_changed_enable or group.message_model == BROADCASTING:
            return
        config = self._groups.get(group.name) if group.name in self._groups else None
        if config is None or config.notify_consumer_ids_changed_enable:
            fields = encode_header(NotifyConsumerIdsChanged(group.name))
            connection.notify(Frame(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, fields), after_s)

    # Producers.

    def _add_producer(self, group: str, member: Member) -> None:
        roles = self._roles.setdefault(member.connection, _Roles())
        if group not in roles.producer_groups:
            if not _has_room(roles, member):
                return
            roles.producer_groups.add(group)
            log.info("%s produces as group %s from %r", member.client_id, group, member.connection)
        _refresh(self._producers.setdefault(group, {}), member)
        if roles.producer_id != member.client_id:
            self._forget_id(roles, member.connection)
            roles.producer_id = member.client_id
        self._producing[member.client_id] = member.connection

    def _forget_id(self, roles: _Roles, connection: Connection) -> None:
        """Unless the client has come back over another connection meanwhile."""
        if roles.producer_id is not None and self._producing.get(roles.producer_id) is connection:
            del self._producing[roles.producer_id]
        roles.producer_id = None

    def _remove_producer(self, group: str, connection: Connection) -> None:
        members = self._producers[group]
        del members[connection]
        if not members:
            del self._producers[group]


def _refresh(members: dict[Connection, Member], member: Member) -> bool:
    """Takes the member in, or notes its sign of life. Whether it is new."""
    old = members.get(member.connection)
    if old is None or old.client_id != member.client_id:
        members[member.connection] = member
    else:
        old.seen_ms = member.seen_ms
    return old is None


def _compare(group: ConsumerGroup, member: Member, subscriptions: list[Subscription]) -> None:
    """Notes what the member subscribes to, and says so if another member subscribes to something else."""
    expressions = {
        each.topic: f"{each.expression_type or TAG} {each.sub_string}"
        for each in subscriptions
        if not each.topic.startswith(RETRY_PREFIX)
    }
    if expressions == member.expressions and not group.is_divided:
        return
    member.expressions = expressions
    other = next((each for each in group.members.values() if each.expressions not in ({}, expressions)), None)
    if other is not None and not group.is_divided:
        log.warning(
            "group %s is divided, and messages will not reach it: %s subscribes to %s, but %s to %s. A group has one "
            "subscription, that of the member heard last: let all its members subscribe to the same",
            group.name, member.client_id, _in_words(expressions), other.client_id, _in_words(other.expressions),
        )  # fmt: skip
    elif other is None and group.is_divided:
        log.info("all members of group %s subscribe to the same again", group.name)
    group.is_divided = other is not None


def _in_words(expressions: Mapping[str, str]) -> str:
    return ", ".join(f"{topic} by {expressions[topic]}" for topic in sorted(expressions)) or "nothing"


def _has_room(roles: _Roles, member: Member) -> bool:
    if len(roles.consumer_groups) + len(roles.producer_groups) < MAX_GROUPS_PER_CONNECTION:
        return True
    log.warning("%r is in %d groups: no more are taken", member.connection, MAX_GROUPS_PER_CONNECTION)
    return False


def _has_room_for(consumer: ConsumerData, size: int, roles: _Roles, member: Member) -> bool:
    """Whether the broker remembers what the member subscribes to."""
    topics = len(consumer.subscription_data_set)
    others = roles.characters - roles.sizes.get(consumer.group_name, 0)
    if topics <= MAX_TOPICS_PER_GROUP and others + size <= MAX_CHARACTERS_PER_CONNECTION:
        return True
    log.warning(
        "%r subscribes to %d topics for %.255s, or by too long expressions: that is not taken",
        member.connection, topics, consumer.group_name,
    )  # fmt: skip
    return False


def _characters(consumer: ConsumerData) -> int:
    return sum(
        len(each.topic) + len(each.sub_string or "") + sum(map(len, each.tags_set)) + 16 * len(each.code_set)
        for each in consumer.subscription_data_set
    )


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

    def heartbeat(self, request: Frame, connection: Connection) -> Frame | Awaitable[Frame]:
        beat = request_body(Heartbeat, request.body)
        groups = len(beat.consumer_data_set) + len(beat.producer_data_set)
        if len(beat.client_id) > MAX_CLIENT_ID_LENGTH or groups > MAX_GROUPS_PER_CONNECTION:
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR,
                f"the client's id has {len(beat.client_id)} characters, and it is in {groups} groups: up to "
                f"{MAX_CLIENT_ID_LENGTH} characters and {MAX_GROUPS_PER_CONNECTION} groups are taken",
            )
        if groups > _GROUPS_PER_TURN:
            return self._long_heartbeat(request, beat, connection)
        return _heard(request, self._clients.heartbeat(beat, connection, *_form(request), self._clock()))

    async def _long_heartbeat(self, request: Frame, beat: Heartbeat, connection: Connection) -> Frame:
        """Takes many groups in, some at a time."""
        must_send = False
        for at in range(0, max(len(beat.consumer_data_set), len(beat.producer_data_set)), _GROUPS_PER_TURN):
            part = replace(
                beat,
                consumer_data_set=beat.consumer_data_set[at : at + _GROUPS_PER_TURN],
                producer_data_set=beat.producer_data_set[at : at + _GROUPS_PER_TURN],
            )
            must_send |= self._clients.heartbeat(part, connection, *_form(request), self._clock())
            await asyncio.sleep(0)
        return _heard(request, must_send)

    def unregister(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(UnregisterClient, request)
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


def _form(request: Frame) -> tuple[str, int]:
    """The language and the version of who asks."""
    return request.language, request.version


def _heard(request: Frame, must_send: bool) -> Frame:
    return request.reply(fields={"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true" if must_send else "false"})


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
