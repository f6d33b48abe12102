"""What the name server answers: one method a request code, over the route tables and the KV config.

Codes, remarks and bodies are those of Apache's name server 5.5.0, with three differences: a change of the configuration
that can't be made is refused rather than passed over, a KV value that could not be written is not confirmed, and what
would take too much room is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import msgspec

from skylark.config import properties
from skylark.config.apache_keys import NAMESRV_KEYS
from skylark.config.without_effect import WithoutEffect, remark_on
from skylark.nameserver.brokers import BrokerRequests
from skylark.nameserver.config import NO_EFFECT_KEYS, UPDATABLE_KEYS, NamesrvConfig
from skylark.nameserver.kvconfig import KVConfig, TooLarge
from skylark.nameserver.routes import UNIT_FLAG, UNIT_SUBSCRIPTION_FLAG, Routes
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.wire import headers
from skylark.wire.bodies import TopicList, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.routes import MASTER_ID, ORDER_TOPIC_NAMESPACE, V4_9_4, KVTable, TopicRouteData, encode_standard
from skylark.wire.typed import decode_header

log = logging.getLogger(__name__)

_NO_ROUTE_HINT: Final = "\nSee https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."
_ZONE_NAME: Final = "__ZONE_NAME"
_ZONE_MODE: Final = "__ZONE_MODE"
# Apache's list of what must not be changed over the wire; here nothing may be that is not in UPDATABLE_KEYS.
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

    def route(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(headers.GetRouteInfo, request)
        route = self._routes.route(header.topic)
        if route is None:
            remark = f"No topic route info in name server for the topic: {header.topic}{_NO_ROUTE_HINT}"
            return request.reply(ResponseCode.TOPIC_NOT_EXIST, remark)
        if self._config.order_message_enable:
            route.order_topic_conf = self._kv.get(ORDER_TOPIC_NAMESPACE, header.topic)
        zone = request.fields.get(_ZONE_NAME, "").strip()
        if zone and request.fields.get(_ZONE_MODE, "").lower() == "true":
            return request.reply(body=encode_body(_within_zone(route, zone)))
        is_standard = request.version >= V4_9_4 or header.accept_standard_json_only
        return request.reply(body=encode_standard(route) if is_standard else encode_body(route))

    def cluster_info(self, request: Frame, _: Connection) -> Frame:
        return request.reply(body=encode_body(self._routes.cluster_info()))

    def topics(self, request: Frame, _: Connection) -> Frame:
        return _topic_list(request, self._config.enable_all_topic_list, self._routes.topics)

    def topics_of_cluster(self, request: Frame, _: Connection) -> Frame:
        cluster = decode_header(headers.GetTopicsByCluster, request).cluster
        return self._listed(request, lambda: self._routes.topics_of_cluster(cluster))

    def system_topics(self, request: Frame, _: Connection) -> Frame:
        return request.reply(body=encode_body(self._routes.system_topics()))

    def unit_topics(self, request: Frame, _: Connection) -> Frame:
        return self._listed(request, lambda: self._routes.topics_by_flag(lambda flag: bool(flag & UNIT_FLAG)))

    def unit_subscription_topics(self, request: Frame, _: Connection) -> Frame:
        return self._listed(
            request, lambda: self._routes.topics_by_flag(lambda flag: bool(flag & UNIT_SUBSCRIPTION_FLAG))
        )

    def unit_subscription_only_topics(self, request: Frame, _: Connection) -> Frame:
        both = UNIT_FLAG | UNIT_SUBSCRIPTION_FLAG
        return self._listed(
            request, lambda: self._routes.topics_by_flag(lambda flag: flag & both == UNIT_SUBSCRIPTION_FLAG)
        )

    def _listed(self, request: Frame, topics: Callable[[], TopicList]) -> Frame:
        return _topic_list(request, self._config.enable_topic_list, topics)


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
        table = self._kv.namespace(namespace)
        if table is None:
            return request.reply(ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {namespace}")
        return request.reply(body=encode_body(KVTable(table=table)))

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


def _topic_list(request: Frame, is_enabled: bool, topics: Callable[[], TopicList]) -> Frame:
    if not is_enabled:
        raise RequestFailed(ResponseCode.SYSTEM_ERROR, "disable")
    # Nothing but names: standard JSON is what Apache writes, at a tenth of the price for a hundred thousand of them.
    return request.reply(body=msgspec.json.encode({"topicList": topics().topic_list}))


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
