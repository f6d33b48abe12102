"""QUERY_ASSIGNMENT and SET_MESSAGE_REQUEST_MODE: the broker, not its clients, shares out the queues of a topic.

A client whose own rebalance is switched off asks what to consume and how: by pulling, queues that are its own, or by
popping, where everybody may pop everything (queue -1 of each broker) or, if an operator says so, its own queues and
those of the next few members. The mode of a group and topic is kept in messageRequestMode.json.

The queues of a topic may be spread over several brokers, so its route is fetched from a name server, and kept for a
while; without one, the broker knows its own queues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from skylark.broker.clients import Clients
from skylark.broker.config import BrokerConfig
from skylark.broker.groups import Groups
from skylark.broker.name_servers import NameServers
from skylark.broker.shares import Shares
from skylark.broker.table_writer import Rendered, TableWriter, not_written
from skylark.broker.topics import RETRY_PREFIX, Topics
from skylark.broker.turns import ITEMS_PER_TURN, beside, steps
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.net.pool import Pool
from skylark.net.request_bodies import request_body
from skylark.store.tables import load
from skylark.wire.bodies import BROADCASTING, MessageQueue, decode_body, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import GetRouteInfo
from skylark.wire.pop import (
    POP,
    PULL,
    QueryAssignment,
    QueryAssignmentResponse,
    QueueAssignment,
    SetMessageRequestMode,
)
from skylark.wire.routes import TopicRouteData, queues_of
from skylark.wire.tables import MAX_QUEUES, PERM_READ
from skylark.wire.typed import encode_header

log = logging.getLogger(__name__)

MAX_MODES: Final = 100_000
MAX_ROUTES: Final = 10_000
MAX_KNOWN_QUEUES: Final = 16 * MAX_QUEUES
_ROUTE_TIMEOUT_S: Final = 3.0

Allocate = Callable[[Sequence[MessageQueue], Sequence[str], str], list[MessageQueue]]


def averagely(queues: Sequence[MessageQueue], members: Sequence[str], member: str) -> list[MessageQueue]:
    """Neighbouring queues to each member; the first ones get one more if they can't be shared out evenly."""
    if member not in members:
        return []
    place = members.index(member)
    share, more = divmod(len(queues), len(members))
    first = place * share + min(place, more)
    return list(queues[first : first + share + (place < more)])


def by_circle(queues: Sequence[MessageQueue], members: Sequence[str], member: str) -> list[MessageQueue]:
    """One queue to each member in turn."""
    return list(queues[members.index(member) :: len(members)]) if member in members else []


_STRATEGIES: Final[dict[str | None, Allocate]] = {"AVG": averagely, "AVG_BY_CIRCLE": by_circle}


def allocate_for_pop(
    allocate: Allocate, queues: Sequence[MessageQueue], members: Sequence[str], member: str, share: int
) -> list[MessageQueue]:
    """What a member pops: everything, or its own queues and those of the `share` members behind it."""
    if share <= 0 or share >= len(members) - 1:
        brokers = dict.fromkeys((queue.topic, queue.broker_name) for queue in queues)
        return [MessageQueue(broker_name, -1, topic) for topic, broker_name in brokers]
    if member not in members:
        return []
    place = members.index(member)
    if len(members) > len(queues):  # nobody goes without
        return [queues[place % len(queues)]] if queues else []
    circle = [members[(place + step) % len(members)] for step in range(share + 1)]
    return [queue for each in circle for queue in allocate(queues, members, each)]


class _Modes(msgspec.Struct, rename="camel"):
    message_request_mode_map: dict[str, dict[str, SetMessageRequestMode]] = {}


class Assignments:
    def __init__(
        self,
        config: BrokerConfig,
        topics: Topics,
        groups: Groups,
        clients: Clients,
        config_dir: Path,
        steady_clock: Callable[[], int],
    ) -> None:
        self._config = config
        self._topics = topics
        self._groups = groups
        self._clients = clients
        path = config_dir / "messageRequestMode.json"
        self._modes = (load(path, _Modes) or _Modes()).message_request_mode_map
        self._known_modes = sum(map(len, self._modes.values()))
        self._shares = Shares()
        self.writer = TableWriter(path, self._capture)
        self._steady_clock = steady_clock
        self._routes: dict[str, tuple[int, list[MessageQueue]]] = {}
        self._known_queues = 0
        self._pool = Pool()
        self._name_servers = NameServers(config, self._pool)

    def handlers(self) -> dict[int, Handler]:
        return {
            RequestCode.QUERY_ASSIGNMENT: self.query,
            RequestCode.SET_MESSAGE_REQUEST_MODE: self.set_mode,
            RequestCode.GET_ALL_MESSAGE_REQUEST_MODE: self.all_modes,
        }

    def close(self) -> None:
        self._pool.close()

    def mode(self, topic: str, group: str) -> SetMessageRequestMode:
        """How a group consumes a topic: as it was set, else as the broker's settings say; retry topics are pulled."""
        known = self._modes.get(topic, {}).get(group)
        if known is not None:
            return known
        mode = PULL if topic.startswith(RETRY_PREFIX) else self._config.default_message_request_mode
        share = self._config.default_pop_share_queue_num if mode == POP else 0
        return SetMessageRequestMode(group, mode, share, topic)

    async def query(self, request: Frame, connection: Connection) -> Frame:
        asked = request_body(QueryAssignment, request.body)
        topic, group, client_id = _named(asked.topic), _named(asked.consumer_group), asked.client_id or ""
        mode = self.mode(topic, group)
        queues = await self._queues(topic)
        if queues is None:
            log.info("%r asks for its share of %s, which does not exist", connection, topic)
            return request.reply(body=b"{}")
        if asked.message_model != BROADCASTING and self._config.server_load_balancer_enable:
            shared = self._share(asked, mode, queues, group, client_id)
            if shared is None:
                return request.reply(body=b"{}")
            queues = shared
        assigned = [QueueAssignment(queue, mode.mode or PULL) async for queue in steps(queues)]
        body = QueryAssignmentResponse(assigned)
        if len(assigned) <= ITEMS_PER_TURN:
            return request.reply(body=encode_body(body))
        return request.reply(body=await beside(lambda: encode_body(body)))

    def _share(
        self, asked: QueryAssignment, mode: SetMessageRequestMode, queues: list[MessageQueue], group: str, client: str
    ) -> list[MessageQueue] | None:
        consumers = self._clients.group(group)
        allocate = _STRATEGIES.get(asked.strategy_name)
        if consumers is None or allocate is None:
            reason = "group has no members" if consumers is None else f"strategy {asked.strategy_name} is unknown"
            log.info("%s asks for its share of %s: the %s", client, asked.topic, reason)
            return None
        members = sorted(self._clients.sharers(consumers))
        if mode.mode == POP:
            return allocate_for_pop(allocate, queues, members, client, mode.pop_share_queue_num)
        return allocate(queues, members, client)

    async def set_mode(self, request: Frame, connection: Connection) -> Frame:
        wanted = request_body(SetMessageRequestMode, request.body)
        topic, group = _named(wanted.topic), _named(wanted.consumer_group)
        if topic.startswith(RETRY_PREFIX):
            raise RequestFailed(ResponseCode.NO_PERMISSION, "retry topic is not allowed to set mode")
        if wanted.mode not in (PULL, POP):
            raise RequestFailed(ResponseCode.INVALID_PARAMETER, f"the mode is {wanted.mode}: it is PULL or POP")
        if topic not in self._topics:
            raise RequestFailed(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist")
        if self._groups.get(group, connection) is None:
            raise RequestFailed(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "subscription group does not exist")
        if group not in self._modes.get(topic, ()):
            host = connection.peer[0]
            if not self._shares.has_room(host, 1, MAX_MODES - self._known_modes - 1):
                raise RequestFailed(
                    ResponseCode.INVALID_PARAMETER,
                    f"clients of {host} have set {self._shares.held(host)} modes, and all {self._known_modes} of "
                    f"{MAX_MODES}: no more are taken from there",
                )
            self._known_modes += 1
            self._shares.add(host, 1)
        self._modes.setdefault(topic, {})[group] = wanted
        self.writer.changed()
        try:
            await self.writer.written()
        except Exception as e:
            raise not_written(f"the mode of {group} and {topic} is set, but not after the next start", e) from e
        return request.reply()

    async def all_modes(self, request: Frame, _: Connection) -> Frame:
        rendered = self._capture()
        return request.reply(body=await beside(lambda: encode_body(rendered())))

    def _capture(self) -> Rendered:
        modes = _Modes({topic: dict(by_group) for topic, by_group in self._modes.items()})
        return lambda: modes

    # The queues of a topic.

    async def _queues(self, topic: str) -> list[MessageQueue] | None:
        """All queues that can be read, in order; None for an unknown topic."""
        now_ms = self._steady_clock()
        known = self._routes.get(topic)
        if known is not None and now_ms - known[0] < self._config.load_balance_poll_name_server_interval:
            return known[1]
        queues = await self._fetch(topic, known[1] if known is not None else None)
        if queues is None:
            queues = self._own(topic)
        if queues is not None:
            self._remember(topic, now_ms, queues)
        return queues

    def _remember(self, topic: str, now_ms: int, queues: list[MessageQueue]) -> None:
        """Keeps the queues for a while, those of other topics as long as there is room."""
        _, before = self._routes.pop(topic, (0, []))
        self._known_queues += len(queues) - len(before)
        self._routes[topic] = (now_ms, queues)
        while len(self._routes) > MAX_ROUTES or (self._known_queues > MAX_KNOWN_QUEUES and len(self._routes) > 1):
            _, oldest = self._routes.pop(next(iter(self._routes)))
            self._known_queues -= len(oldest)

    async def _fetch(self, topic: str, known: list[MessageQueue] | None) -> list[MessageQueue] | None:
        """What the name servers tell; if none of them answers, what was known before."""
        is_answered = False

        def read(answer: Frame) -> list[MessageQueue] | None:
            nonlocal is_answered
            is_answered = True
            if answer.code != ResponseCode.SUCCESS:
                return None
            route = decode_body(TopicRouteData, answer.body)
            readable = sorted(
                (data.broker_name, data.read_queue_nums) for data in route.queue_datas if data.perm & PERM_READ
            )
            return queues_of(topic, readable)

        request = Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, encode_header(GetRouteInfo(topic)))
        try:
            return await self._name_servers.ask(request, _ROUTE_TIMEOUT_S, read)
        except ConnectionError as e:
            log.info("no name server tells the route of %s: %s", topic, e)
            return None if is_answered else known

    def _own(self, topic: str) -> list[MessageQueue] | None:
        config = self._topics.get(topic)
        if config is None:
            return None
        return queues_of(topic, [(self._config.broker_name, config.read_queue_nums)])


def _named(name: str | None) -> str:
    if not name:
        raise RequestFailed(ResponseCode.INVALID_PARAMETER, "the request names no topic or no consumer group")
    return name
