"""Who is connected: the members of consumer groups and of producer groups, as their heartbeats tell.

A member is a connection. It is gone when it says so, when its connection closes, or when it was silent for 120 s. When
a consumer group's members or the topics they subscribe to change, every member is told, so that they share the queues
out anew; broadcasting groups, which share nothing, are not told.

A group exists while it has a member. Its subscriptions are those of the member heard last: members must agree on them,
or messages go missing. That they don't is logged, once until they do again.

What the broker remembers of members is bounded for each connection and for all, and divided among their hosts
(`shares.py`). Who is a member already stays one, as long as it does not subscribe to more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from skylark.broker.config import BrokerConfig
from skylark.broker.former_members import FormerMembers
from skylark.broker.groups import Groups
from skylark.broker.member_news import CallSoon, MemberNews
from skylark.broker.shares import Shares
from skylark.broker.topics import RETRY_PREFIX, Topics
from skylark.net.connection import Connection, RequestFailed
from skylark.wire.bodies import (
    BROADCASTING,
    TAG,
    ConsumerData,
    Heartbeat,
    MessageQueue,
    ResetOffsets,
    ResetOffsetsForC,
    Subscription,
    encode_body,
)
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import NotifyConsumerIdsChanged, ResetOffset
from skylark.wire.tables import PERM_READ, PERM_WRITE, UNIT_SUBSCRIPTION
from skylark.wire.typed import encode_header

log = logging.getLogger(__name__)

MAX_GROUPS_PER_CONNECTION: Final = 10_000
MAX_TOPICS_PER_GROUP: Final = 4_096
MAX_CHARACTERS_PER_CONNECTION: Final = 4 << 20
"""Of the subscriptions of its groups. Names and expressions are kept, and compared with those of other members."""
MAX_CHARACTERS: Final = 48 << 20
"""Of all connections."""
_MEMBER_CHARACTERS: Final = 256  # for which a member counts, besides
_MAX_WORDS: Final = 1000
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
    complaint: str = ""
    """That it subscribes to something else than the others: for the one that brought it about."""


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
    """Of all of them, and for those of producer groups."""


class Clients:
    """The tables of connected clients."""

    def __init__(
        self,
        topics: Topics,
        groups: Groups,
        config: BrokerConfig,
        former: FormerMembers | None = None,
        call_soon: CallSoon | None = None,
    ) -> None:
        """`call_soon` is the event loop's."""
        self.on_leave: Callable[[str, str], None] | None = None
        """Called with a consumer group and the id of a client that says that it has left the group, and is gone."""
        self.on_subscribe: Callable[[str, list[Subscription], str], None] | None = None
        """Called with a consumer group, what a member's heartbeat says that it subscribes to, and the member's host."""
        self.on_empty: Callable[[str], None] | None = None
        """Called with a consumer group whose last member is gone."""
        self._topics = topics
        self._groups = groups
        self._config = config
        self._former = former or FormerMembers()
        self._news = MemberNews(self._tell, self._members_of, call_soon)
        self._checked_ms: int | None = None
        self._consumers: dict[str, ConsumerGroup] = {}
        self._producers: dict[str, dict[Connection, Member]] = {}
        self._roles: dict[Connection, _Roles] = {}
        self._producing: dict[str, Connection] = {}  # by client id
        self._groups_by_topic: dict[str, set[str]] = {}
        self._characters = 0
        self._shares = Shares()

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
        """Takes in what a client says about itself. Whether it must send its subscriptions (again).

        Raises RequestFailed if there is no room for any of its groups. Where there is for some, the others are told
        when they pull: the client needs the answer for the sake of those that are taken.
        """
        must_send = is_heard = False
        lacks: list[RequestFailed] = []
        for consumer in beat.consumer_data_set:
            try:
                member = Member(connection, beat.client_id, language, version, now_ms)
                must_send |= self._consumer_beat(consumer, beat, member)
                is_heard = True
            except RequestFailed as e:
                lacks.append(e)
        for producer in beat.producer_data_set:
            if len(producer.group_name) <= _MAX_PRODUCER_GROUP_LENGTH:
                try:
                    member = Member(connection, beat.client_id, language, version, now_ms)
                    self._add_producer(producer.group_name, member)
                    is_heard = True
                except RequestFailed as e:
                    lacks.append(e)
        if lacks:
            log.warning("%d groups of %s at %r are not taken: %s", len(lacks), beat.client_id, connection, lacks[0])
            if not is_heard:
                raise lacks[0]
        return must_send or beat.heartbeat_fingerprint == 0

    def complaints(self, beat: Heartbeat, connection: Connection) -> str:
        """What the client should know of its groups."""
        groups = (self._consumers.get(consumer.group_name) for consumer in beat.consumer_data_set)
        members = (group.members.get(connection) for group in groups if group is not None and group.is_divided)
        return "; ".join(member.complaint for member in members if member is not None and member.complaint)

    def unregister(self, connection: Connection, consumer_group: str | None, producer_group: str | None) -> None:
        roles = self._roles.get(connection)
        if roles is None:
            return
        if consumer_group in roles.consumer_groups:
            roles.consumer_groups.discard(consumer_group)
            self._count(roles, connection, -roles.sizes.pop(consumer_group))
            member = self._remove_consumer(consumer_group, connection)
            # A client may be there on another connection still, or already again.
            if self.on_leave is not None and self.member(consumer_group, member.client_id) is None:
                self.on_leave(consumer_group, member.client_id)
        if producer_group in roles.producer_groups:
            roles.producer_groups.discard(producer_group)
            self._count(roles, connection, -_MEMBER_CHARACTERS)
            self._remove_producer(producer_group, connection)
            if not roles.producer_groups:
                self._forget_id(roles, connection)
        if not roles.consumer_groups and not roles.producer_groups:
            del self._roles[connection]

    def not_coming(self, consumer_group: str | None, client_id: str) -> None:
        """A client leaves that may not have come back since the broker was restarted."""
        if consumer_group is not None and self._former.left(consumer_group, client_id):
            self._news.changed(consumer_group)

    def closed(self, connection: Connection) -> None:
        """The connection is gone, and with it its memberships."""
        roles = self._roles.pop(connection, None)
        if roles is not None:
            self._forget_id(roles, connection)
            self._count(roles, connection, -roles.characters)
            for group in roles.consumer_groups:
                self._remove_consumer(group, connection)
            for group in roles.producer_groups:
                self._remove_producer(group, connection)

    def expire(self, now_ms: int) -> None:
        """Removes and disconnects members that were silent for too long; called every few seconds."""
        for name in self._former.expire(now_ms):
            self._news.changed(name)
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

    def push_reset(self, group: str, topic: str, timestamp_ms: int, offsets: Mapping[MessageQueue, int]) -> list[str]:
        """Sends every member of the group to `offsets`. The ids of those that do not read, and don't learn it. Raises
        RequestFailed if none is there or one is too old.
        """
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
        missed = []
        for member in consumers.members.values():
            member_body = body_for_c if member.language == "CPP" else body
            told = Frame(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, dict(fields), member_body)
            if not member.connection.notify(told):
                missed.append(member.client_id)
        return missed

    # Consumers.

    def _consumer_beat(self, consumer: ConsumerData, beat: Heartbeat, member: Member) -> bool:
        roles = self._roles.get(member.connection) or _Roles()
        known = roles.sizes.get(consumer.group_name)
        size = known if known is not None and beat.without_sub else _characters(consumer)
        growth = size if known is None else size - known
        if known is None:
            _check_count(roles)
        self._check_size(consumer, growth, roles, member)
        config = self._groups.get(consumer.group_name, member.connection)
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
        roles.sizes[consumer.group_name] = size
        self._count(roles, member.connection, growth)
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
                self.on_subscribe(group.name, consumer.subscription_data_set, member.connection.peer[0])
        if is_changed:
            self._news.changed(group.name, newcomer=member.connection)
        elif self._former.has_restarted(group.name):
            self._tell(group.name, member.connection, True)
        fingerprint, group.fingerprint = group.fingerprint, beat.heartbeat_fingerprint
        # A client that leaves its subscriptions out relies on a broker that may have been restarted since.
        is_missing = beat.without_sub and not group.subscriptions
        return is_missing or (fingerprint is not None and fingerprint != beat.heartbeat_fingerprint)

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
            self._news.changed(name)
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

    def _tell(self, name: str, connection: Connection, is_newcomer: bool) -> None:
        """Tells a member to share the queues out anew.

        Who caused it by a heartbeat is told later: it does so by itself when the heartbeat is answered, and Apache's
        Java client, told in the middle of its first heartbeat, may raise the version of its subscription without being
        able to send that version, and then waits for its next heartbeat.
        """
        group = self._consumers.get(name)
        if group is None or connection not in group.members:
            return
        if not self._config.notify_consumer_ids_changed_enable or group.message_model == BROADCASTING:
            return
        config = self._groups.get(name) if name in self._groups else None
        if config is None or config.notify_consumer_ids_changed_enable:
            fields = encode_header(NotifyConsumerIdsChanged(name))
            after_s = NEWCOMER_DELAY_S if is_newcomer else 0.0
            connection.notify(Frame(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, fields), after_s)

    def _members_of(self, name: str) -> Iterable[Connection]:
        group = self._consumers.get(name)
        return () if group is None else group.members

    # What it takes to remember them.

    def _check_size(self, consumer: ConsumerData, growth: int, roles: _Roles, member: Member) -> None:
        """Raises RequestFailed if what the member subscribes to now is too much to remember."""
        topics = len(consumer.subscription_data_set)
        if topics > MAX_TOPICS_PER_GROUP:
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR,
                f"{consumer.group_name:.255s} subscribes to {topics} topics, and up to {MAX_TOPICS_PER_GROUP} are "
                f"taken: use more groups",
            )
        self._check_room(growth, roles, member)

    def _check_room(self, growth: int, roles: _Roles, member: Member) -> None:
        host = member.connection.peer[0]
        left = MAX_CHARACTERS - self._characters - growth
        if growth <= 0 or (
            roles.characters + growth <= MAX_CHARACTERS_PER_CONNECTION and self._shares.has_room(host, growth, left)
        ):
            return
        raise RequestFailed(
            ResponseCode.SYSTEM_BUSY,
            f"there is no room for what the client subscribes to: its groups take {roles.characters} of "
            f"{MAX_CHARACTERS_PER_CONNECTION} characters, those of {host} {self._shares.held(host)} of "
            f"{MAX_CHARACTERS}, and all {self._characters}. Subscribe to fewer topics, by shorter expressions, or from "
            f"fewer groups",
        )

    def _count(self, roles: _Roles, connection: Connection, growth: int) -> None:
        roles.characters += growth
        self._characters += growth
        self._shares.add(connection.peer[0], growth)

    # Producers.

    def _add_producer(self, group: str, member: Member) -> None:
        roles = self._roles.get(member.connection) or _Roles()
        if group not in roles.producer_groups:
            _check_count(roles)
            self._check_room(_MEMBER_CHARACTERS, roles, member)
            self._roles[member.connection] = roles
            roles.producer_groups.add(group)
            self._count(roles, member.connection, _MEMBER_CHARACTERS)
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
    is_new, member.expressions = expressions != member.expressions, expressions
    other = next((each for each in group.members.values() if each.expressions not in ({}, expressions)), None)
    if other is not None and is_new:
        member.complaint = (
            f"group {group.name} is divided, and messages will not reach it: {member.client_id} subscribes to "
            f"{_in_words(expressions)}, but {other.client_id} to {_in_words(other.expressions)}. A group has one "
            f"subscription, that of the member heard last: let all its members subscribe to the same"
        )
        if not group.is_divided:
            log.warning("%s", member.complaint)
    if other is None and group.is_divided:
        log.info("all members of group %s subscribe to the same again", group.name)
        for each in group.members.values():
            each.complaint = ""
    group.is_divided = other is not None


def _in_words(expressions: Mapping[str, str]) -> str:
    words = ", ".join(f"{topic} by {expressions[topic]}" for topic in sorted(expressions)) or "nothing"
    return words if len(words) <= _MAX_WORDS else words[:_MAX_WORDS] + "…"


def _check_count(roles: _Roles) -> None:
    if len(roles.consumer_groups) + len(roles.producer_groups) >= MAX_GROUPS_PER_CONNECTION:
        raise RequestFailed(
            ResponseCode.SYSTEM_ERROR,
            f"the client is in {MAX_GROUPS_PER_CONNECTION} groups, and no more are taken from one: leave some of them",
        )


def _characters(consumer: ConsumerData) -> int:
    return _MEMBER_CHARACTERS + sum(
        len(each.topic) + len(each.sub_string or "") + sum(map(len, each.tags_set)) + 16 * len(each.code_set)
        for each in consumer.subscription_data_set
    )
