"""Where topics are: routes from the name servers, cached, and told to whoever wants to know of changes.

A route is fetched when it is first asked for, again every 30 s (by the session) and when somebody finds that it is not
true any more. A topic that the name servers forget keeps its last route, as in Apache's client: a name server that was
just started knows nothing yet.

Where a broker is, the newest route that names it says. Routes of forgotten topics only count for brokers that no other
route names: the addresses of a deleted topic stay as they were, wherever its brokers went.

A producer may send to a topic that does not exist, if a broker is willing to make it: such a topic gets the route of
the topic that new ones are modelled on (`TBW102`). That route is only for sending and is kept apart from the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

import msgspec

from skylark.client.calling import is_cancelled
from skylark.client.crew import Worker
from skylark.client.errors import BrokerError, ClientClosed, RocketMQError, RouteNotFound
from skylark.wire.bodies import BadBody, MessageQueue, decode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import GetRouteInfo
from skylark.wire.mapping import LOGICAL_BROKER_PREFIX, NO_BROKER, logical_broker
from skylark.wire.routes import MASTER_ID, TopicQueueMappingInfo, TopicRouteData, queues_of
from skylark.wire.typed import encode_header

log = logging.getLogger(__name__)

DEFAULT_TOPIC: Final = "TBW102"
DEFAULT_TOPIC_QUEUES: Final = 4
MAX_TOPICS: Final = 4096
_COUNT: Final = re.compile("[0-9]{1,10}")
_PERM_READ: Final = 4
_PERM_WRITE: Final = 2

NOTHING_TO_READ: Final = "it has no queue that can be read; see its permission and brokerPermission of its brokers"

AskNameServer = Callable[[Frame, float], Awaitable[Frame]]
Subscriber = Callable[["TopicRoute"], None]


class TopicRoute(msgspec.Struct, frozen=True, kw_only=True):
    """The queues of a topic and the brokers that hold them. It is never changed: a new route is a new object."""

    topic: str
    write_queues: list[MessageQueue]
    read_queues: list[MessageQueue]
    brokers: dict[str, dict[int, str]]
    """broker name -> broker id (0 is the master) -> address"""
    is_ordered: bool = False
    is_default: bool = False
    """The topic does not exist yet; this is where it would be made."""
    filter_servers: dict[str, list[str]] = {}
    """broker address -> filter servers that stand by it"""
    leaders: dict[MessageQueue, str] = {}
    """Of a static topic, whose queues are logical: which broker leads each of them at the moment."""

    def broker_of(self, queue: MessageQueue) -> str:
        """The name of the broker to ask about a queue."""
        return self.leaders.get(queue, NO_BROKER) if self.leaders else queue.broker_name


def build_route(topic: str, data: TopicRouteData) -> TopicRoute:
    """The route in the order that every client of Apache's works with: by broker name, then by queue id."""
    brokers = {broker.broker_name: dict(sorted(broker.broker_addrs.items())) for broker in data.broker_datas}
    queue_datas = sorted(data.queue_datas, key=lambda queues: queues.broker_name)
    if data.topic_queue_mapping_by_broker:
        leaders = find_leaders(topic, data.topic_queue_mapping_by_broker.values())
        queues = sorted(leaders, key=lambda queue: queue.queue_id)
        return TopicRoute(topic=topic, write_queues=queues, read_queues=queues, brokers=brokers, leaders=leaders)
    if data.order_topic_conf:
        write_queues = _ordered_queues(topic, data.order_topic_conf)
    else:
        write_queues = queues_of(
            topic,
            (
                (queues.broker_name, queues.write_queue_nums)
                for queues in queue_datas
                if queues.perm & _PERM_WRITE and MASTER_ID in brokers.get(queues.broker_name, ())
            ),
        )
    readable = ((queues.broker_name, queues.read_queue_nums) for queues in queue_datas if queues.perm & _PERM_READ)
    return TopicRoute(
        topic=topic,
        write_queues=write_queues,
        read_queues=queues_of(topic, readable),
        brokers=brokers,
        is_ordered=bool(data.order_topic_conf),
        filter_servers=data.filter_server_table,
    )


def find_leaders(topic: str, mappings: Iterable[TopicQueueMappingInfo]) -> dict[MessageQueue, str]:
    """The logical queues of a static topic, and who leads each: the one with the newest mapping that says so."""
    leaders: dict[MessageQueue, str] = {}
    totals: dict[str, int] = {}
    for mapping in sorted(mappings, key=lambda mapping: mapping.epoch):
        if mapping.scope is None or mapping.bname is None:
            continue
        broker = logical_broker(mapping.scope)
        totals[broker] = max(totals.get(broker, 0), mapping.total_queues)
        for number in mapping.curr_id_map:
            leaders[MessageQueue(broker, number, topic)] = mapping.bname
    return {queue: leaders.get(queue, NO_BROKER) for queue in queues_of(topic, totals.items())}


def _ordered_queues(topic: str, conf: str) -> list[MessageQueue]:
    """The queues that an ordered topic always has, whichever brokers are up: `broker-a:4;broker-b:4`."""
    items = (item.partition(":") for item in conf.split(";"))
    return queues_of(topic, ((broker, int(count)) for broker, _, count in items if _COUNT.fullmatch(count)))


class Routes:
    """topic -> route."""

    def __init__(self, ask_name_server: AskNameServer, timeout_s: float = 3.0) -> None:
        self._ask = ask_name_server
        self._timeout_s = timeout_s
        self._routes: dict[str, TopicRoute] = {}
        self._defaults: dict[str, TopicRoute] = {}
        self._fetches: dict[str, asyncio.Task[TopicRoute]] = {}
        self._subscribers: list[Subscriber] = []
        self._forgotten: set[str] = set()  # topics with a route that the name servers do not know any more
        self._is_stale = False
        self._brokers: dict[str, dict[int, str]] | None = {}  # None when they are to be gathered anew

    @property
    def brokers(self) -> Mapping[str, dict[int, str]]:
        """broker name -> broker id -> address, of every route that is known"""
        if self._brokers is None:
            self._brokers = self._gather_brokers()
        return self._brokers

    def known(self, topic: str) -> TopicRoute | None:
        """The cached route, if there is one: no wait."""
        return self._routes.get(topic)

    def known_for_send(self, topic: str) -> TopicRoute | None:
        return self._routes.get(topic) or self._defaults.get(topic)

    def broker_of(self, queue: MessageQueue) -> str:
        """The name of the broker to ask about a queue; not always its own, as the queues of static topics move."""
        if not queue.broker_name.startswith(LOGICAL_BROKER_PREFIX):
            return queue.broker_name
        route = self._routes.get(queue.topic)
        return NO_BROKER if route is None else route.broker_of(queue)

    async def get(self, topic: str, *, refresh: bool = False) -> TopicRoute:
        """The route of a topic that exists. Raises RouteNotFound, NotReachable or RequestTimeout."""
        route = self._routes.get(topic)
        return route if route is not None and not refresh else await self._fetch(topic)

    async def get_for_send(
        self,
        topic: str,
        *,
        refresh: bool = False,
        default_topic: str = DEFAULT_TOPIC,
        default_queues: int = DEFAULT_TOPIC_QUEUES,
    ) -> TopicRoute:
        """The same for a producer: a topic that does not exist gets the route on which it would be made."""
        route = self.known_for_send(topic)
        if route is not None and not refresh:
            return route
        try:
            return await self._fetch(topic)
        except RouteNotFound:
            is_new = default_topic not in self._routes
            model = await self._default(default_topic, topic)
            if is_new:
                # Its broker may have registered just now, after a restart of the name server, and have the topic too.
                with contextlib.suppress(RouteNotFound):
                    return await self._fetch(topic)
        route = self._defaults[topic] = as_default(topic, model, default_queues)
        _keep_bounded(self._defaults)
        self._brokers = None
        return route

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Calls `subscriber` with each route that is new or changed; what is returned ends that."""
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber) if subscriber in self._subscribers else None

    async def refresh(self) -> None:
        """Fetches every cached route again. What fails is kept as it was."""
        failure: RocketMQError | None = None
        for topic in [*self._routes, *self._defaults]:
            try:
                await self._fetch(topic)
            except RouteNotFound:
                self._defaults.pop(topic, None)  # the next send looks again which brokers would make it
            except RocketMQError as e:
                failure = e
        if (failure is not None) is not self._is_stale:
            self._is_stale = failure is not None
            if failure is not None:
                log.warning("routes can't be refreshed and stay as they are: %s", failure)
            else:
                log.info("routes are refreshed again")

    async def _default(self, default_topic: str, topic: str) -> TopicRoute:
        try:
            return await self.get(default_topic)
        except RouteNotFound:
            raise RouteNotFound(
                f"topic {topic!r} does not exist or its broker is down, and no broker that is up creates topics by "
                f"itself: start the broker, or create the topic first, or set autoCreateTopicEnable=true on the broker"
            ) from None

    async def _fetch(self, topic: str) -> TopicRoute:
        """Asks the name servers; those who want the same route at the same time share one request."""
        task = self._fetches.get(topic)
        if task is None:
            task = self._fetches[topic] = Worker(
                self._ask_for(topic), loop=asyncio.get_running_loop(), name=f"route of {topic}"
            )
            task.add_done_callback(lambda done: self._fetched(topic, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and not is_cancelled():
                raise ClientClosed(f"the session was closed while it asked for the route of topic {topic!r}") from None
            raise

    def begin_anew(self) -> None:
        """What is being asked for is not for who comes from now on: its connections are closed."""
        self._fetches = {}

    def _fetched(self, topic: str, task: asyncio.Task[TopicRoute]) -> None:
        if self._fetches.get(topic) is task:
            del self._fetches[topic]
        if not task.cancelled():
            task.exception()  # looked at, so that nobody complains when all who waited have given up

    async def _ask_for(self, topic: str) -> TopicRoute:
        fields = encode_header(GetRouteInfo(topic))
        answer = await self._ask(Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, fields), self._timeout_s)
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            self._forget(topic)
            raise RouteNotFound(
                f"the name servers do not know topic {topic!r}: it does not exist, or its broker is down"
            )
        if answer.code != ResponseCode.SUCCESS:
            raise BrokerError(answer.code, answer.remark, "the name server")
        try:
            route = build_route(topic, decode_body(TopicRouteData, answer.body))
        except BadBody as e:
            raise BrokerError(answer.code, f"the route of topic {topic} can't be read: {e}", "the name server") from e
        self._keep(route)
        return route

    def _keep(self, route: TopicRoute) -> None:
        known = self._routes.pop(route.topic, None)
        if known == route:
            route = known
        self._routes[route.topic] = route  # the last one is the newest
        if known is route and route.topic not in self._forgotten:
            if self._brokers is not None:
                self._brokers |= route.brokers
            return
        self._forgotten.discard(route.topic)
        self._brokers = None
        if known is route:
            return
        self._defaults.pop(route.topic, None)
        _keep_bounded(self._routes)
        self._forgotten &= self._routes.keys()
        for subscriber in list(self._subscribers):
            subscriber(route)

    def _forget(self, topic: str) -> None:
        if topic in self._routes and topic not in self._forgotten:
            self._forgotten.add(topic)
            self._brokers = None

    def _gather_brokers(self) -> dict[str, dict[int, str]]:
        brokers: dict[str, dict[int, str]] = {}
        for stale in (*(self._routes[topic] for topic in self._forgotten), *self._defaults.values()):
            brokers |= stale.brokers
        for topic, route in self._routes.items():
            if topic not in self._forgotten:
                brokers |= route.brokers
        return brokers


def as_default(topic: str, model: TopicRoute, queues: int) -> TopicRoute:
    """The route of a topic that would be made after `model`."""
    return TopicRoute(
        topic=topic,
        write_queues=[
            MessageQueue(queue.broker_name, queue.queue_id, topic)
            for queue in model.write_queues
            if queue.queue_id < queues
        ],
        read_queues=[],
        brokers=model.brokers,
        is_default=True,
    )


def _keep_bounded(routes: dict[str, TopicRoute]) -> None:
    """The oldest entry goes; if it is needed again, it is fetched again."""
    while len(routes) > MAX_TOPICS:
        del routes[next(iter(routes))]
