"""What the name server answers: one method a request code, over the route tables and the KV config.

Codes, remarks and bodies are those of Apache's name server 5.5.0, with three differences: a change of the configuration
that can't be made is refused rather than passed over, a KV value that could not be written is not confirmed, and what
would take too much room is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import msgspec

from skylark.config import properties
from skylark.config.apache_keys import NAMESRV_KEYS
from skylark.config.without_effect import WithoutEffect, remark_on
from skylark.nameserver.brokers import BrokerRequests
from skylark.nameserver.config import NO_EFFECT_KEYS, UPDATABLE_KEYS, NamesrvConfig
from skylark.nameserver.kvconfig import KVConfig, TooLarge
from skylark.nameserver.reading import Busy, Turns
from skylark.nameserver.routes import UNIT_FLAG, UNIT_SUBSCRIPTION_FLAG, Routes
from skylark.nameserver.threads import in_thread
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.net.server import host_of
from skylark.wire import headers
from skylark.wire.bodies import encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.routes import MASTER_ID, ORDER_TOPIC_NAMESPACE, V4_9_4, ClusterInfo, TopicRouteData, encode_standard
from skylark.wire.typed import decode_header

log = logging.getLogger(__name__)

Answer = TypeVar("Answer", TopicRouteData, ClusterInfo)

_NO_ROUTE_HINT: Final = "\nSee https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."
_ZONE_NAME: Final = "__ZONE_NAME"
_ZONE_MODE: Final = "__ZONE_MODE"
# Apache's list of what must not be changed over the wire; here nothing may be that is not in UPDATABLE_KEYS.
_MOST_NAMES_AT_ONCE: Final = 256
_MOST_TOPICS_AT_ONCE: Final = 4096
_WAITING_BYTES: Final = 64 << 10
"""That a request for a large answer counts for while it waits."""
_NEVER_UPDATED: Final = frozenset({"configBlackList", "configStorePath", "kvConfigPath", "rocketmqHome"})


def handlers(
    routes: Routes,
    kv: KVConfig,
    config: NamesrvConfig,
    clock: Callable[[], int],
    on_config_change: Callable[[dict[str, str]], None] = lambda changed: None,
) -> dict[int, Handler]:
    """The table for a `Server`. `clock` gives milliseconds and never jumps."""
    brokers, clients, settings = (
        BrokerRequests(routes, kv, config, clock),
        _Clients(routes, kv, config),
        _Settings(kv, config, on_config_change),
    )
    return brokers.handlers() | {
        RequestCode.GET_ROUTEINFO_BY_TOPIC: clients.route,
        RequestCode.GET_BROKER_CLUSTER_INFO: clients.cluster_info,
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: clients.topics,
        RequestCode.GET_TOPICS_BY_CLUSTER: clients.topics_of_cluster,
        RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: clients.system_topics,
        RequestCode.GET_UNIT_TOPIC_LIST: clients.unit_topics,
        RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: clients.unit_subscription_topics,
        RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: clients.unit_subscription_only_topics,
        RequestCode.PUT_KV_CONFIG: settings.put,
        RequestCode.GET_KV_CONFIG: settings.get,
        RequestCode.DELETE_KV_CONFIG: settings.delete,
        RequestCode.GET_KVLIST_BY_NAMESPACE: settings.namespace,
        RequestCode.UPDATE_NAMESRV_CONFIG: settings.update_config,
        RequestCode.GET_NAMESRV_CONFIG: settings.get_config,
    }


class _Clients:
    """Questions about topics and clusters."""

    def __init__(self, routes: Routes, kv: KVConfig, config: NamesrvConfig) -> None:
        self._routes = routes
        self._kv = kv
        self._config = config
        self._turns = Turns()

    def route(self, request: Frame, connection: Connection) -> Frame | Awaitable[Frame]:
        header = decode_header(headers.GetRouteInfo, request)
        count = self._routes.count_offers(header.topic)
        return self._answered(request, connection, count, lambda: self._route(header.topic), _encode_route)

    def _route(self, topic: str) -> TopicRouteData:
        route = self._routes.route(topic)
        if route is None:
            remark = f"No topic route info in name server for the topic: {topic}{_NO_ROUTE_HINT}"
            raise RequestFailed(ResponseCode.TOPIC_NOT_EXIST, remark)
        if self._config.order_message_enable:
            route.order_topic_conf = self._kv.get(ORDER_TOPIC_NAMESPACE, topic)
        return route

    def cluster_info(self, request: Frame, connection: Connection) -> Frame | Awaitable[Frame]:
        count = self._routes.count_names()
        return self._answered(request, connection, count, self._routes.cluster_info, lambda info, _: encode_body(info))

    def _answered(
        self,
        request: Frame,
        connection: Connection,
        count: int,
        ask: Callable[[], Answer],
        encode: Callable[[Answer, Frame], bytes],
    ) -> Frame | Awaitable[Frame]:
        """What the tables say of so many broker names; of very many, a thread encodes it, in the turn of its host."""
        if count <= _MOST_NAMES_AT_ONCE:
            return request.reply(body=encode(ask(), request))
        return self._answer_slowly(request, connection, ask, encode)

    async def _answer_slowly(
        self,
        request: Frame,
        connection: Connection,
        ask: Callable[[], Answer],
        encode: Callable[[Answer, Frame], bytes],
    ) -> Frame:
        async with self._turn(connection):
            answer = _copied(ask())
            return request.reply(body=await in_thread(lambda: encode(answer, request)))

    @asynccontextmanager
    async def _turn(self, connection: Connection) -> AsyncIterator[None]:
        """The time in which a host has one large answer made."""
        try:
            async with self._turns.turn(host_of(connection), _WAITING_BYTES):
                yield
        except Busy:
            raise RequestFailed(ResponseCode.SYSTEM_BUSY, "others wait for large answers, try again later") from None

    def topics(self, request: Frame, _: Connection) -> Frame:
        _check_enabled(self._config.enable_all_topic_list)
        return _topic_list(request, self._routes.topics())

    def topics_of_cluster(self, request: Frame, _: Connection) -> Frame:
        _check_enabled(self._config.enable_topic_list)
        return _topic_list(
            request, self._routes.topics_of_cluster(decode_header(headers.GetTopicsByCluster, request).cluster)
        )

    def system_topics(self, request: Frame, _: Connection) -> Frame:
        return request.reply(body=encode_body(self._routes.system_topics()))

    def unit_topics(self, request: Frame, connection: Connection) -> Frame | Awaitable[Frame]:
        return self._flagged(request, connection, lambda flag: bool(flag & UNIT_FLAG))

    def unit_subscription_topics(self, request: Frame, connection: Connection) -> Frame | Awaitable[Frame]:
        return self._flagged(request, connection, lambda flag: bool(flag & UNIT_SUBSCRIPTION_FLAG))

    def unit_subscription_only_topics(self, request: Frame, connection: Connection) -> Frame | Awaitable[Frame]:
        both = UNIT_FLAG | UNIT_SUBSCRIPTION_FLAG
        return self._flagged(request, connection, lambda flag: flag & both == UNIT_SUBSCRIPTION_FLAG)

    def _flagged(
        self, request: Frame, connection: Connection, accepts: Callable[[int], bool]
    ) -> Frame | Awaitable[Frame]:
        """The topics whose system flag is accepted; very many are looked through in parts, in the turn of the host."""
        _check_enabled(self._config.enable_topic_list)
        if self._routes.count_topics() <= _MOST_TOPICS_AT_ONCE:
            return _topic_list(request, self._routes.topics_by_flag(self._routes.topics(), accepts))
        return self._look_through(request, connection, accepts)

    async def _look_through(self, request: Frame, connection: Connection, accepts: Callable[[int], bool]) -> Frame:
        async with self._turn(connection):
            every = self._routes.topics()
            found: list[str] = []
            for begin in range(0, len(every), _MOST_TOPICS_AT_ONCE):
                found += self._routes.topics_by_flag(every[begin : begin + _MOST_TOPICS_AT_ONCE], accepts)
                await asyncio.sleep(0)
            return _topic_list(request, found)


class _Settings:
    """The KV config and the name server's own configuration."""

    def __init__(self, kv: KVConfig, config: NamesrvConfig, on_config_change: Callable[[dict[str, str]], None]) -> None:
        self._kv = kv
        self._config = config
        self._on_config_change = on_config_change
        self._without_effect = WithoutEffect(NO_EFFECT_KEYS)

    async def put(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(headers.PutKVConfig, request)
        try:
            await self._kv.put(header.namespace, header.key, header.value)
        except TooLarge:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, "the KV config is full") from None
        except OSError as e:
            raise _unsaved(e) from e
        return request.reply()

    def get(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(headers.GetKVConfig, request)
        value = self._kv.get(header.namespace, header.key)
        if value is None:
            remark = f"No config item, Namespace: {header.namespace} Key: {header.key}"
            return request.reply(ResponseCode.QUERY_NOT_FOUND, remark)
        return request.reply(fields={"value": value})

    async def delete(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(headers.DeleteKVConfig, request)
        try:
            await self._kv.delete(header.namespace, header.key)
        except OSError as e:
            raise _unsaved(e) from e
        return request.reply()

    def namespace(self, request: Frame, _: Connection) -> Frame:
        namespace = decode_header(headers.GetKVListByNamespace, request).namespace
        body = self._kv.encoded(namespace)
        if body is None:
            return request.reply(ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {namespace}")
        return request.reply(body=body)

    def update_config(self, request: Frame, connection: Connection) -> Frame:
        try:
            changes = properties.parse(request.body.decode())
        except ValueError:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, "string2Properties error") from None
        if not _NEVER_UPDATED.isdisjoint(changes):
            raise RequestFailed(ResponseCode.NO_PERMISSION, "Can not update config in black list.")
        idle = {key: value.strip() for key, value in changes.items() if key in NO_EFFECT_KEYS}
        own = {key: value for key, value in changes.items() if key not in idle}
        try:
            self._without_effect.check(idle)
            changed = properties.update(self._config, own, allowed=UPDATABLE_KEYS, known=NAMESRV_KEYS)
        except properties.ConfigError as e:
            is_allowed = UPDATABLE_KEYS.issuperset(own)
            code = ResponseCode.SYSTEM_ERROR if is_allowed else ResponseCode.NO_PERMISSION
            raise RequestFailed(code, str(e)) from None
        changed |= self._without_effect.set(idle)
        if changed:
            log.info("%r changed the configuration: %s", connection, changed)
            self._on_config_change(changed)
        return request.reply(remark=remark_on(idle))

    def get_config(self, request: Frame, _: Connection) -> Frame:
        settings = properties.render(self._config) + self._without_effect.render()
        lines = sorted(settings.splitlines(keepends=True))
        return request.reply(body="".join(lines).encode())


def _check_enabled(is_enabled: bool) -> None:
    if not is_enabled:
        raise RequestFailed(ResponseCode.SYSTEM_ERROR, "disable")


def _topic_list(request: Frame, topics: list[str]) -> Frame:
    """The topics by name, unless there are so many that sorting them takes long."""
    if len(topics) <= _MOST_TOPICS_AT_ONCE:
        topics.sort()
    # Nothing but names: standard JSON is what Apache writes, at a tenth of the price for a hundred thousand of them.
    return request.reply(body=msgspec.json.encode({"topicList": topics}))


def _encode_route(route: TopicRouteData, request: Frame) -> bytes:
    zone = request.fields.get(_ZONE_NAME, "").strip()
    if zone and request.fields.get(_ZONE_MODE, "").lower() == "true":
        return encode_body(_within_zone(route, zone))
    is_standard = request.version >= V4_9_4 or decode_header(headers.GetRouteInfo, request).accept_standard_json_only
    return encode_standard(route) if is_standard else encode_body(route)


def _copied(answer: Answer) -> Answer:
    """The answer without what the tables change."""
    replace = msgspec.structs.replace
    if isinstance(answer, ClusterInfo):
        return replace(answer, broker_addr_table={k: replace(v) for k, v in answer.broker_addr_table.items()})
    mappings = answer.topic_queue_mapping_by_broker
    return replace(
        answer,
        broker_datas=[replace(group) for group in answer.broker_datas],
        queue_datas=[replace(queue) for queue in answer.queue_datas],
        topic_queue_mapping_by_broker=None if mappings is None else dict(mappings),
    )


def _within_zone(route: TopicRouteData, zone: str) -> TopicRouteData:
    """The brokers of one zone; those without a master stay, as their slaves are all that is left to read from."""
    kept = [
        group
        for group in route.broker_datas
        if MASTER_ID not in group.broker_addrs or (group.zone_name or "").lower() == zone.lower()
    ]
    names = {group.broker_name for group in kept}
    addresses = {address for group in kept for address in group.broker_addrs.values()}
    return msgspec.structs.replace(
        route,
        broker_datas=kept,
        queue_datas=[queue for queue in route.queue_datas if queue.broker_name in names],
        filter_server_table={a: servers for a, servers in route.filter_server_table.items() if a in addresses},
    )


def _unsaved(error: OSError) -> RequestFailed:
    log.error("the KV config could not be written: %s", error)
    return RequestFailed(ResponseCode.SYSTEM_ERROR, f"the KV config could not be written: {error.strerror}")
