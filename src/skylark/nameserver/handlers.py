"""What the name server answers: one method a request code, over the route tables and the KV config.

Codes, remarks and bodies are those of Apache's name server 5.5.0, with two differences: a change of the configuration
that can't be made is refused rather than passed over, and a KV value that could not be written is not confirmed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final
from zlib import crc32

import msgspec

from skylark.config import properties
from skylark.nameserver.config import UPDATABLE_KEYS, NamesrvConfig
from skylark.nameserver.kvconfig import KVConfig, TooManyEntries
from skylark.nameserver.routes import UNIT_FLAG, UNIT_SUBSCRIPTION_FLAG, Broker, Routes
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.wire import headers
from skylark.wire.bodies import TopicList, decode_body, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.routes import (
    MASTER_ID,
    ORDER_TOPIC_NAMESPACE,
    V4_9_4,
    BrokerMemberGroupBody,
    KVTable,
    TopicRouteData,
    decode_register_body,
    encode_standard,
)
from skylark.wire.tables import DataVersion
from skylark.wire.typed import decode_header, encode_header

log = logging.getLogger(__name__)

_NO_ROUTE_HINT: Final = "\nSee https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."
_ZONE_NAME: Final = "__ZONE_NAME"
_ZONE_MODE: Final = "__ZONE_MODE"
# Apache's list of what must not be changed over the wire; here nothing may be that is not in UPDATABLE_KEYS.
_NEVER_UPDATED: Final = frozenset({"configBlackList", "configStorePath", "kvConfigPath", "rocketmqHome"})


def handlers(routes: Routes, kv: KVConfig, config: NamesrvConfig, clock: Callable[[], int]) -> dict[int, Handler]:
    """The table for a `Server`. `clock` gives milliseconds and never jumps."""
    brokers, clients, settings = (
        _Brokers(routes, kv, config, clock),
        _Clients(routes, kv, config),
        _Settings(kv, config),
    )
    return {
        RequestCode.REGISTER_BROKER: brokers.register,
        RequestCode.UNREGISTER_BROKER: brokers.unregister,
        RequestCode.BROKER_HEARTBEAT: brokers.heartbeat,
        RequestCode.QUERY_DATA_VERSION: brokers.query_data_version,
        RequestCode.REGISTER_TOPIC_IN_NAMESRV: brokers.register_topic,
        RequestCode.DELETE_TOPIC_IN_NAMESRV: brokers.delete_topic,
        RequestCode.WIPE_WRITE_PERM_OF_BROKER: brokers.wipe_write_perm,
        RequestCode.ADD_WRITE_PERM_OF_BROKER: brokers.add_write_perm,
        RequestCode.GET_BROKER_MEMBER_GROUP: brokers.members,
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


class _Brokers:
    """Requests of brokers, and of operators about them."""

    def __init__(self, routes: Routes, kv: KVConfig, config: NamesrvConfig, clock: Callable[[], int]) -> None:
        self._routes = routes
        self._kv = kv
        self._config = config
        self._clock = clock

    def register(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(headers.RegisterBroker, request)
        if header.body_crc32 and header.body_crc32 != crc32(request.body) & 0x7FFFFFFF:
            log.warning("registration of broker %s from %r: the checksum is wrong", header.broker_name, connection)
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, "crc32 not match")
        body = decode_register_body(request.body, compressed=header.compressed, version=request.version)
        broker = Broker(
            cluster=header.cluster_name,
            name=header.broker_name,
            id=header.broker_id,
            address=header.broker_addr,
            ha_address=header.ha_server_addr,
            zone=request.fields.get(_ZONE_NAME),
            timeout_ms=header.heartbeat_timeout_millis,
            acting_master=header.enable_acting_master,
        )
        is_new = self._routes.version(broker.cluster, broker.address) is None
        rival = self._routes.rival(broker)
        now_ms = self._clock()
        result = self._routes.register(
            broker,
            body,
            connection,
            now_ms,
            drop_missing_topics=self._config.delete_topic_with_broker_registration and not header.is_part,
        )
        if result is None:
            # One topic alone only tells of a change, and comes after the broker has told of all of its topics.
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, "register broker failed")
        if is_new:
            log.info("broker %s (id %d) at %s registered", broker.name, broker.id, broker.address)
        # Both live on and register again and again, and each time clients are sent to the other one.
        if is_new and rival is not None and self._routes.version(broker.cluster, broker.address) is not None:
            log.warning(
                "broker %s (id %d) now registers from %s instead of %s, which was seen %d s ago: "
                "two brokers of one name? set brokerName",
                broker.name, broker.id, broker.address, rival[0], (now_ms - rival[1]) // 1000,
            )  # fmt: skip
        ordered = (
            self._kv.namespace(ORDER_TOPIC_NAMESPACE) if self._config.return_order_topic_config_to_broker else None
        )
        return request.reply(
            fields=encode_header(result), body=b"" if ordered is None else encode_body(KVTable(table=ordered))
        )

    def unregister(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(headers.UnregisterBroker, request)
        self._routes.unregister(header.cluster_name, header.broker_name, header.broker_addr)
        log.info("broker %s (id %d) at %s unregistered", header.broker_name, header.broker_id, header.broker_addr)
        return request.reply()

    def heartbeat(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(headers.BrokerHeartbeat, request)
        self._routes.heartbeat(header.cluster_name, header.broker_addr, self._clock())
        return request.reply()

    def query_data_version(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(headers.QueryDataVersion, request)
        theirs = decode_body(DataVersion, request.body)
        self._routes.heartbeat(header.cluster_name, header.broker_addr, self._clock())
        ours = self._routes.version(header.cluster_name, header.broker_addr)
        return request.reply(
            fields={"changed": "false" if ours == theirs else "true"}, body=b"" if ours is None else encode_body(ours)
        )

    def register_topic(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(headers.RegisterTopic, request)
        queues = decode_body(TopicRouteData, request.body).queue_datas if request.body else []
        if queues and not self._routes.register_topic(header.topic, queues):
            log.warning("%r registers topic %s for an unknown broker", connection, header.topic)
        return request.reply()

    def delete_topic(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(headers.DeleteTopicFromNamesrv, request)
        self._routes.delete_topic(header.topic, header.cluster_name)
        return request.reply()

    def wipe_write_perm(self, request: Frame, connection: Connection) -> Frame:
        name = decode_header(headers.WipeWritePermOfBroker, request).broker_name
        count = self._routes.wipe_write_perm(name)
        log.info("%r takes the write permission from broker %s: %d topics", connection, name, count)
        return request.reply(fields={"wipeTopicCount": str(count)})

    def add_write_perm(self, request: Frame, connection: Connection) -> Frame:
        name = decode_header(headers.AddWritePermOfBroker, request).broker_name
        count = self._routes.add_write_perm(name)
        log.info("%r gives broker %s the write permission: %d topics", connection, name, count)
        return request.reply(fields={"addTopicCount": str(count)})

    def members(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(headers.GetBrokerMemberGroup, request)
        members = self._routes.members(header.cluster_name, header.broker_name)
        return request.reply(body=encode_body(BrokerMemberGroupBody(broker_member_group=members)))


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

    def __init__(self, kv: KVConfig, config: NamesrvConfig) -> None:
        self._kv = kv
        self._config = config

    async def put(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(headers.PutKVConfig, request)
        try:
            await self._kv.put(header.namespace, header.key, header.value)
        except TooManyEntries:
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
        try:
            changed = properties.update(self._config, changes, allowed=UPDATABLE_KEYS)
        except properties.ConfigError as e:
            is_allowed = UPDATABLE_KEYS.issuperset(changes)
            code = ResponseCode.SYSTEM_ERROR if is_allowed else ResponseCode.NO_PERMISSION
            raise RequestFailed(code, str(e)) from None
        log.info("%r changed the configuration: %s", connection, changed)
        return request.reply()

    def get_config(self, request: Frame, _: Connection) -> Frame:
        lines = sorted(properties.render(self._config).splitlines(keepends=True))
        return request.reply(body="".join(lines).encode())


def _topic_list(request: Frame, is_enabled: bool, topics: Callable[[], TopicList]) -> Frame:
    if not is_enabled:
        raise RequestFailed(ResponseCode.SYSTEM_ERROR, "disable")
    return request.reply(body=encode_body(topics()))


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
