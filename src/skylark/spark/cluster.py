"""A RocketMQ cluster as Spark's driver and workers see it: routes, offsets and pulls, over plain sockets.

Nothing here waits longer than the timeout that the user gave. A broker or name server that does not answer, or says
that it is busy, is tried again until then; what is left is an error that names its address.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec

from skylark.client.addresses import of_name_server, parse_name_servers
from skylark.client.errors import (
    BrokerError,
    NotANameServer,
    NotReachable,
    RequestTimeout,
    RocketMQError,
    RouteNotFound,
)
from skylark.client.routes import DEFAULT_TOPIC, DEFAULT_TOPIC_QUEUES, TopicRoute, as_default, build_route
from skylark.net.blocking import BlockingConnection
from skylark.spark.own_topics import is_own_of
from skylark.spark.queues import Queue
from skylark.wire.bodies import TAG, TopicList, decode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Encoding, Frame
from skylark.wire.headers import (
    GetMaxOffset,
    GetMinOffset,
    GetRouteInfo,
    GetTopicConfig,
    PullMessage,
    QueryConsumerOffset,
    SearchOffset,
    UpdateConsumerOffset,
)
from skylark.wire.routes import MASTER_ID, ClusterInfo, TopicRouteData
from skylark.wire.tables import TopicConfig
from skylark.wire.typed import encode_header

_PAUSE_S: Final = 0.2
_PIPELINED: Final = 256  # requests on the way at once: more would fill the sockets of both sides
_SUBSCRIPTION_IN_REQUEST: Final = 4
_UNKNOWN: Final = -1
_SHORTEST_WAIT_S: Final = 0.05
_ONCE_S: Final = 5.0
_BUSY: Final = frozenset((ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE))
_LARGE_PIPELINED: Final = 16  # the same where each reply may be a message of megabytes
_COMPACTED: Final = "COMPACTION"
READ_GROUP: Final = "skylark-spark"
"""Under which everything is pulled: nobody resets its offsets, and nothing is committed to it."""

_T = TypeVar("_T")


class Filter:
    """What the broker sends: everything, tags (`a || b`) or what an SQL92 expression accepts."""

    def __init__(self, tags: str | None = None, sql: str | None = None) -> None:
        self.kind = "SQL92" if sql else TAG
        self.expression = sql or tags or "*"
        self.option = "sqlFilter" if sql else "tags" if tags else None

    @property
    def passes_all(self) -> bool:
        return self.expression == "*"


class Cluster:
    """Open connections to the servers of one cluster; used by one thread and closed by whoever made it."""

    def __init__(self, name_servers: str, timeout_s: float) -> None:
        self._name_servers = parse_name_servers(name_servers)
        self._timeout_s = timeout_s  # for everything that is retried; one wait gets half of it
        self._deadline_s: float | None = None  # while something is retried
        self._connections: dict[str, BlockingConnection] = {}
        self._routes: dict[str, TopicRoute] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    # Where things are.

    def topics(self, pattern: str) -> list[str]:
        """The topics whose whole name matches, without RocketMQ's own."""
        reply = self._ask_name_server(Frame(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER))
        matches = re.compile(pattern).fullmatch
        names = [name for name in decode_body(TopicList, reply.body).topic_list if matches(name)]
        if not names:
            return []
        info = self._info()
        clusters, brokers = info.cluster_addr_table.keys(), info.broker_addr_table.keys()
        return sorted(name for name in names if not is_own_of(name, clusters, brokers))

    def route(self, topic: str, *, refresh: bool = False) -> TopicRoute:
        """Raises RouteNotFound for a topic that no name server knows."""
        if refresh or topic not in self._routes:
            header = GetRouteInfo(topic=topic, accept_standard_json_only=True)
            reply = self._ask_name_server(Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, encode_header(header)))
            if reply.code == ResponseCode.TOPIC_NOT_EXIST:
                raise RouteNotFound(
                    f"topic {topic!r} does not exist at name server {', '.join(self._name_servers)}; "
                    "create it, or send a message to it, first"
                )
            self._routes[topic] = build_route(topic, decode_body(TopicRouteData, reply.body))
        return self._routes[topic]

    def existing(self, topic: str) -> TopicRoute:
        """The route of a topic that is there, or comes back within the timeout. Raises NotReachable."""
        return self.retrying(lambda: self._existing(topic))

    def route_for_send(self, topic: str) -> TopicRoute:
        """The same for a producer: a topic that does not exist yet gets the route on which brokers would make it."""
        try:
            return self.route(topic)
        except RouteNotFound as e:
            try:
                model = self.route(DEFAULT_TOPIC)
            except RouteNotFound:
                raise e from None
            route = self._routes[topic] = as_default(topic, model, DEFAULT_TOPIC_QUEUES)
            return route

    def forget(self, topic: str) -> None:
        """Its route is asked for anew when it is needed again."""
        self._routes.pop(topic, None)

    def brokers(self) -> dict[str, str]:
        """Every broker's name, and the address of its master."""
        table = self._info().broker_addr_table
        return {
            name: data.broker_addrs[MASTER_ID] for name, data in sorted(table.items()) if MASTER_ID in data.broker_addrs
        }

    def groups(self) -> dict[str, dict[int, str]]:
        """The addresses of every broker's master and slaves by their ids: also of one that has no master now."""
        reply = self._ask_name_server(Frame(RequestCode.GET_BROKER_CLUSTER_INFO))
        table = decode_body(ClusterInfo, reply.body).broker_addr_table
        return {name: dict(data.broker_addrs) for name, data in sorted(table.items()) if data.broker_addrs}

    def connect_to(self, address: str) -> BlockingConnection:
        """A connection to the server there, whatever topics it has."""
        return self._connection(address)

    def deleted(self, queues: Iterable[Queue]) -> list[Queue]:
        """Those that no route names although their broker is there: they are gone, and not only away."""
        wanted = set(queues)
        there = {queue for topic in sorted({queue.topic for queue in wanted}) for queue in self._routed(topic)}
        brokers = self.brokers() if wanted - there else {}
        return sorted(queue for queue in wanted - there if queue.broker in brokers)

    def has_route(self, queue: Queue) -> bool:
        """Whether a server of the queue's broker is known now. Asks no broker, and waits for none."""
        try:
            return queue.broker in self.route(queue.topic).brokers
        except RouteNotFound:
            return False

    def queues(self, topic: str, *, must_exist: bool = False) -> list[Queue]:
        """The queues that can be read now. A topic that `must_exist` is waited for: its broker may be restarting."""
        route = self.existing(topic) if must_exist else self.route(topic, refresh=True)
        if route.leaders:
            raise RocketMQError(f"topic {topic!r} is a static topic: its logical queues can't be read here")
        return [Queue(topic, queue.broker_name, queue.queue_id) for queue in route.read_queues]

    # Offsets. Each call asks for all queues at once: the requests to a broker follow each other without a wait.

    def min_offsets(self, queues: Iterable[Queue]) -> dict[Queue, int]:
        found = self._offsets(RequestCode.GET_MIN_OFFSET, queues, lambda q: GetMinOffset(q.topic, q.queue_id))
        return {queue: max(0, offset) for queue, offset in found.items()}  # Apache's say -1 of one that was never used

    def max_offsets(self, queues: Iterable[Queue]) -> dict[Queue, int]:
        return self._offsets(RequestCode.GET_MAX_OFFSET, queues, lambda q: GetMaxOffset(q.topic, q.queue_id))

    def offsets_at(self, times_ms: Mapping[Queue, int]) -> dict[Queue, int]:
        """The first offset stored at or after each time; the end of the queue if there is none."""
        return self._offsets(
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
            times_ms,
            lambda q: SearchOffset(q.topic, q.queue_id, times_ms[q], boundary_type="LOWER"),
        )

    def committed_offsets(self, group: str, queues: Iterable[Queue]) -> dict[Queue, int]:
        """Where the group stands; a queue that it never committed is left out."""
        asked = self._ask_brokers(
            (queue, _frame(RequestCode.QUERY_CONSUMER_OFFSET, header))
            for queue in queues
            for header in [QueryConsumerOffset(group, queue.topic, queue.queue_id, set_zero_if_not_found=False)]
        )
        found = {}
        for queue, reply in asked:
            if reply.code == ResponseCode.SUCCESS:
                found[queue] = int(reply.fields["offset"])
            elif reply.code != ResponseCode.QUERY_NOT_FOUND:
                raise BrokerError(reply.code, reply.remark, queue.broker)
        return {queue: offset for queue, offset in found.items() if offset != _UNKNOWN}

    def commit_offsets(self, group: str, offsets: Mapping[Queue, int]) -> None:
        """Moves the group forward to these offsets, never back. Waits for brokers that are away."""
        known = self.committed_offsets(group, offsets)
        ahead = {queue: offset for queue, offset in offsets.items() if offset > known.get(queue, _UNKNOWN)}
        # A group's first commit for a topic at a broker comes alone: of several at once, Apache's forgets all but one.
        begun = {(queue.broker, queue.topic) for queue in known}
        first = {(queue.broker, queue.topic): queue for queue in ahead}
        alone = [queue for place, queue in first.items() if place not in begun]
        for queues in (alone, ahead.keys() - set(alone)):
            asked = self._ask_brokers(
                (queue, _frame(RequestCode.UPDATE_CONSUMER_OFFSET, header))
                for queue in queues
                for header in [UpdateConsumerOffset(group, queue.topic, queue.queue_id, ahead[queue])]
            )
            for queue, reply in asked:
                if reply.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
                    self._commit_first(group, queue, ahead[queue])
                else:
                    _expect_success(reply, queue.broker)

    def _commit_first(self, group: str, queue: Queue, offset: int) -> None:
        """The same for a group that nobody used yet: brokers that make groups do so when it pulls, not for a commit."""
        pull = pull_request(pull_fields(group, queue, Filter()), offset, 1)
        self.retrying(lambda: self.connect(queue.broker, queue.topic).request(pull))
        header = UpdateConsumerOffset(group, queue.topic, queue.queue_id, offset)
        self.ask(queue.broker, queue.topic, _frame(RequestCode.UPDATE_CONSUMER_OFFSET, header))

    # Messages.

    def messages_at(self, offsets: Mapping[Queue, int]) -> dict[Queue, Frame]:
        """The answer to a pull of one message at each offset, without a filter. Raises BrokerError."""
        requests = (
            (queue, pull_request(pull_fields(READ_GROUP, queue, Filter()), offset, 1))
            for queue, offset in offsets.items()
        )
        found = dict(self._ask_brokers(requests, at_once=_LARGE_PIPELINED))
        for queue, reply in found.items():
            check_may_read(reply, queue.broker)
        return found

    def is_compacted(self, queue: Queue) -> bool:
        """Whether the broker keeps only the last message of each key, so that the offsets of others are not there."""
        try:
            reply = self.ask(
                queue.broker, queue.topic, _frame(RequestCode.GET_TOPIC_CONFIG, GetTopicConfig(queue.topic))
            )
        except BrokerError:
            return False  # Apache's before 5.0 know neither the request nor such topics
        return decode_body(TopicConfig, reply.body).attributes.get("cleanup.policy") == _COMPACTED

    def ask(self, broker: str, topic: str, request: Frame) -> Frame:
        """A broker's answer to one request, which may be repeated. Raises BrokerError for any but a good one."""
        return _expect_success(self.retrying(lambda: self.connect(broker, topic).request(request)), broker)

    def ask_address(self, address: str, request: Frame) -> Frame:
        return _expect_success(self.retrying(lambda: self._connection(address).request(request)), address)

    def drop(self, connection: BlockingConnection) -> None:
        """A connection that is broken, so that the next one is a new one."""
        connection.close()
        if self._connections.get(connection.address) is connection:
            del self._connections[connection.address]

    def connect(self, broker: str, topic: str) -> BlockingConnection:
        """A connection to the master of that name, or to a slave if there is no master now."""
        addresses = self._existing(topic, refresh=False).brokers.get(broker)
        if not addresses:
            raise NotReachable(
                f"broker {broker} of topic {topic!r} is not registered with name server {', '.join(self._name_servers)}"
            )
        return self._connection(addresses.get(MASTER_ID) or next(iter(addresses.values())))

    def has_master(self, queue: Queue) -> bool:
        """Whether its broker's master is there: a slave may not have everything yet."""
        return MASTER_ID in self.route(queue.topic).brokers.get(queue.broker, ())

    def retrying(self, work: Callable[[], _T]) -> _T:
        """The result of `work`, tried again until the timeout when a server can't be reached.

        A retry inside another one has no time of its own.
        """
        if self._deadline_s is not None:
            return work()
        self._deadline_s = time.monotonic() + self._timeout_s
        try:
            while True:
                try:
                    return work()
                except OSError as e:
                    self.close()
                    self._routes.clear()
                    if time.monotonic() + _PAUSE_S >= self._deadline_s:
                        kind = RequestTimeout if isinstance(e, TimeoutError) else NotReachable
                        raise kind(f"{e} (tried for {self._timeout_s:g} s)") from None
                    time.sleep(_PAUSE_S)
        finally:
            self._deadline_s = None

    def once(self, work: Callable[[], _T]) -> _T:
        """The result of `work` at the first try. Raises OSError where a server can't be reached."""
        if self._deadline_s is not None:
            return work()
        self._deadline_s = time.monotonic() + min(self._timeout_s, _ONCE_S)
        try:
            return work()
        finally:
            self._deadline_s = None

    def _existing(self, topic: str, *, refresh: bool = True) -> TopicRoute:
        """The route of a topic that was there before: one that is missing is not reachable, and not a mistake."""
        try:
            return self.route(topic, refresh=refresh)
        except RouteNotFound as e:
            raise NotReachable(str(e)) from None

    def _routed(self, topic: str) -> list[Queue]:
        try:
            route = self.route(topic, refresh=True)
        except RouteNotFound:
            self.forget(topic)
            return []
        return [Queue(topic, queue.broker_name, queue.queue_id) for queue in route.read_queues]

    def _info(self) -> ClusterInfo:
        reply = self._ask_name_server(Frame(RequestCode.GET_BROKER_CLUSTER_INFO))
        return decode_body(ClusterInfo, reply.body)

    def _offsets(
        self, code: int, queues: Iterable[Queue], header: Callable[[Queue], GetMinOffset | GetMaxOffset | SearchOffset]
    ) -> dict[Queue, int]:
        asked = self._ask_brokers((queue, _frame(code, header(queue))) for queue in queues)
        return {queue: int(_expect_success(reply, queue.broker).fields["offset"]) for queue, reply in asked}

    def _ask_brokers(
        self, requests: Iterable[tuple[Queue, Frame]], at_once: int = _PIPELINED
    ) -> list[tuple[Queue, Frame]]:
        wanted = list(requests)
        answers: list[tuple[Queue, Frame]] = []
        for start in range(0, len(wanted), at_once):
            part = wanted[start : start + at_once]
            answers += self.retrying(lambda part=part: self._exchange(part))  # type: ignore[misc]
        return answers

    def _exchange(self, requests: Sequence[tuple[Queue, Frame]]) -> list[tuple[Queue, Frame]]:
        posted = []
        for queue, request in requests:
            connection = self.connect(queue.broker, queue.topic)
            posted.append((queue, connection, connection.post(request)))
        return [(queue, unless_busy(connection.take(number), connection)) for queue, connection, number in posted]

    def _ask_name_server(self, request: Frame) -> Frame:
        return self.retrying(lambda: self._first_answer(request))

    def _first_answer(self, request: Frame) -> Frame:
        failed: OSError | NotANameServer | None = None
        for address in self._name_servers:
            try:
                return of_name_server(self._connection(address).request(request), address)
            except NotANameServer as e:
                failed = failed or e
            except OSError as e:
                self._connections.pop(address, None)
                failed = e
        assert failed is not None
        raise failed

    def _connection(self, address: str) -> BlockingConnection:
        connection = self._connections.get(address)
        wait_s = self._timeout_s / 2
        if self._deadline_s is not None:
            wait_s = max(_SHORTEST_WAIT_S, min(wait_s, self._deadline_s - time.monotonic()))
        if connection is None:
            connection = self._connections[address] = BlockingConnection(address, wait_s)
        else:
            connection.limit(wait_s)
        return connection


def pull_fields(group: str, queue: Queue, filter: Filter) -> dict[str, str]:
    """What all pulls of a queue have in common."""
    header = PullMessage(
        consumer_group=group,
        topic=queue.topic,
        queue_id=queue.queue_id,
        queue_offset=0,
        max_msg_nums=1,
        sys_flag=_SUBSCRIPTION_IN_REQUEST,
        commit_offset=0,
        suspend_timeout_millis=0,
        sub_version=0,
        subscription=filter.expression,
        expression_type=filter.kind,
    )
    return encode_header(header)


def pull_request(fields: dict[str, str], offset: int, count: int) -> Frame:
    fields = {**fields, "queueOffset": str(offset), "maxMsgNums": str(count)}
    return Frame(RequestCode.PULL_MESSAGE, fields, encoding=Encoding.JSON)


def unless_busy(reply: Frame, connection: BlockingConnection) -> Frame:
    """The reply, if it is one. A server that is starting, stopping or full is as good as one that can't be reached."""
    if reply.code in _BUSY:
        raise NotReachable(f"{connection.address} is busy: {reply.remark or 'no remark'}")
    return reply


def check_may_read(reply: Frame, broker: str) -> None:
    """Raises BrokerError if the broker does not let Spark read."""
    if reply.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
        raise BrokerError(
            reply.code,
            f"Spark reads as group {READ_GROUP}, which this broker does not know and may not create: create it at "
            f"every broker of the cluster (`mqadmin updateSubGroup -n NAME_SERVER -c CLUSTER -g {READ_GROUP}`), or set "
            "autoCreateSubscriptionGroup=true there",
            broker,
        )


def _frame(code: int, header: msgspec.Struct) -> Frame:
    return Frame(code, encode_header(header))


def _expect_success(reply: Frame, broker: str) -> Frame:
    if reply.code != ResponseCode.SUCCESS:
        raise BrokerError(reply.code, reply.remark, broker)
    return reply
