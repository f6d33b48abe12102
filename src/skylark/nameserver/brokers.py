"""What brokers ask a name server for, and operators about them.

No registration holds the event loop for long: one of many topics is read in a thread, when it is the turn of its host,
and taken in by parts, as if its broker had sent it in parts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Final
from zlib import crc32

import msgspec

from skylark.nameserver.config import NamesrvConfig
from skylark.nameserver.kvconfig import KVConfig
from skylark.nameserver.living import Broker
from skylark.nameserver.reading import Busy, Turns
from skylark.nameserver.routes import NoRoom, Routes
from skylark.nameserver.threads import in_thread
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.net.request_bodies import request_body
from skylark.net.server import host_of
from skylark.wire import headers
from skylark.wire.bodies import encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.fastjson import MAX_LENIENT_BYTES
from skylark.wire.frame import Frame
from skylark.wire.routes import (
    ORDER_TOPIC_NAMESPACE,
    BrokerMemberGroupBody,
    RegisterBrokerBody,
    RegisterBrokerResult,
    TopicConfigWrapper,
    TopicRouteData,
    decode_register_body,
)
from skylark.wire.tables import DataVersion
from skylark.wire.typed import decode_header, encode_header

log = logging.getLogger(__name__)

_ZONE_NAME: Final = "__ZONE_NAME"
_MOST_TOPICS_AT_ONCE: Final = 1024
_SAY_AGAIN_MS: Final = 60_000
_MOST_SAID: Final = 16
"""Hosts of which it is said that there is no room for them, within that time."""


class BrokerRequests:
    """Requests of brokers, and of operators about them."""

    def __init__(self, routes: Routes, kv: KVConfig, config: NamesrvConfig, clock: Callable[[], int]) -> None:
        self._routes = routes
        self._kv = kv
        self._config = config
        self._clock = clock
        self._turns = Turns()
        self._said_ms: dict[str, int] = {}  # when it was said of a host that there is no room for it

    def handlers(self) -> dict[int, Handler]:
        return {
            RequestCode.REGISTER_BROKER: self._register,
            RequestCode.UNREGISTER_BROKER: self._unregister,
            RequestCode.BROKER_HEARTBEAT: self._heartbeat,
            RequestCode.QUERY_DATA_VERSION: self._query_data_version,
            RequestCode.REGISTER_TOPIC_IN_NAMESRV: self._register_topic,
            RequestCode.DELETE_TOPIC_IN_NAMESRV: self._delete_topic,
            RequestCode.WIPE_WRITE_PERM_OF_BROKER: self._wipe_write_perm,
            RequestCode.ADD_WRITE_PERM_OF_BROKER: self._add_write_perm,
            RequestCode.GET_BROKER_MEMBER_GROUP: self._members,
        }

    def _register(self, request: Frame, connection: Connection) -> Frame | Awaitable[Frame]:
        header = decode_header(headers.RegisterBroker, request)
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
        is_plain = request.body[:1] in (b"", b"{")
        if len(request.body) > MAX_LENIENT_BYTES or not is_plain:
            return self._register_slowly(request, header, broker, connection)
        body = _read(request, header, connection)
        return self._registered(request, self._take(broker, body, connection, self._kept(header, body)))

    async def _register_slowly(
        self, request: Frame, header: headers.RegisterBroker, broker: Broker, connection: Connection
    ) -> Frame:
        try:
            async with self._turns.turn(host_of(connection), len(request.body)):
                body, parts = await in_thread(lambda: _read_in_parts(request, header, connection))
                kept = self._kept(header, body)
                return self._registered(request, await self._take_by_parts(broker, parts, connection, kept))
        except Busy:
            raise RequestFailed(
                ResponseCode.SYSTEM_BUSY, "other registrations wait to be read, try again later"
            ) from None

    async def _take_by_parts(
        self, broker: Broker, parts: list[RegisterBrokerBody], connection: Connection, kept: Collection[str] | None
    ) -> RegisterBrokerResult:
        growth_bytes = 0
        for part in parts:
            growth_bytes += self._routes.growth_bytes(broker, part)
            await asyncio.sleep(0)
        with self._room_for(broker.name, connection):
            self._routes.check_room(broker, parts[-1], growth_bytes, connection, self._clock())
        version = _version(parts[-1])
        is_known = self._routes.version(broker.cluster, broker.address) == version
        result = RegisterBrokerResult()
        for part in parts:
            if is_known:
                part.topic_config_serialize_wrapper.data_version = version
            result = self._take(broker, part, connection, kept if part is parts[-1] else None)
            await asyncio.sleep(0)
        return result

    def _take(
        self, broker: Broker, body: RegisterBrokerBody, connection: Connection, kept: Collection[str] | None
    ) -> RegisterBrokerResult:
        is_new = self._routes.version(broker.cluster, broker.address) is None
        rival = self._routes.rival(broker)
        now_ms = self._clock()
        with self._room_for(broker.name, connection):
            result = self._routes.register(broker, body, connection, now_ms, drop_all_but=kept)
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
        return result

    def _registered(self, request: Frame, result: RegisterBrokerResult) -> Frame:
        ordered = self._kv.encoded(ORDER_TOPIC_NAMESPACE) if self._config.return_order_topic_config_to_broker else None
        return request.reply(fields=encode_header(result), body=ordered or b"")

    def _kept(self, header: headers.RegisterBroker, body: RegisterBrokerBody) -> Collection[str] | None:
        """The topics of the broker, if it is to lose all others; one with static topics loses none, as with Apache."""
        topics = body.topic_config_serialize_wrapper
        if header.is_part or topics.topic_queue_mapping_info_map:
            return None
        return topics.topic_config_table if self._config.delete_topic_with_broker_registration else None

    @contextmanager
    def _room_for(self, name: str, connection: Connection) -> Iterator[None]:
        """Answers who has no room for topics of a broker name, and says so from time to time."""
        try:
            yield
        except NoRoom as e:
            self._say_no_room(name, connection, e)
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"no room: {e}") from None

    def _say_no_room(self, name: str, connection: Connection, why: NoRoom) -> None:
        now_ms, host = self._clock(), connection.peer[0]
        self._said_ms = {each: said for each, said in self._said_ms.items() if now_ms - said < _SAY_AGAIN_MS}
        if host not in self._said_ms and len(self._said_ms) < _MOST_SAID:
            self._said_ms[host] = now_ms
            log.warning(
                "%r can't register topics of broker %s: %s; for %d s nothing more is said of its host",
                connection, name, why, _SAY_AGAIN_MS // 1000,
            )  # fmt: skip

    def _unregister(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(headers.UnregisterBroker, request)
        self._routes.unregister(header.cluster_name, header.broker_name, header.broker_addr)
        log.info("broker %s (id %d) at %s unregistered", header.broker_name, header.broker_id, header.broker_addr)
        return request.reply()

    def _heartbeat(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(headers.BrokerHeartbeat, request)
        self._routes.heartbeat(header.cluster_name, header.broker_addr, self._clock())
        return request.reply()

    def _query_data_version(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(headers.QueryDataVersion, request)
        theirs = request_body(DataVersion, request.body, MAX_LENIENT_BYTES)
        self._routes.heartbeat(header.cluster_name, header.broker_addr, self._clock())
        ours = self._routes.version(header.cluster_name, header.broker_addr)
        return request.reply(
            fields={"changed": "false" if ours == theirs else "true"}, body=b"" if ours is None else encode_body(ours)
        )

    def _register_topic(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(headers.RegisterTopic, request)
        queues = request_body(TopicRouteData, request.body, MAX_LENIENT_BYTES).queue_datas if request.body else []
        if queues:
            with self._room_for(queues[0].broker_name, connection):
                if not self._routes.register_topic(header.topic, queues, connection):
                    log.warning("%r registers topic %s for an unknown broker", connection, header.topic)
        return request.reply()

    def _delete_topic(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(headers.DeleteTopicFromNamesrv, request)
        self._routes.delete_topic(header.topic, header.cluster_name)
        return request.reply()

    def _wipe_write_perm(self, request: Frame, connection: Connection) -> Frame:
        name = decode_header(headers.WipeWritePermOfBroker, request).broker_name
        count = self._routes.wipe_write_perm(name)
        log.info("%r takes the write permission from broker %s: %d topics", connection, name, count)
        return request.reply(fields={"wipeTopicCount": str(count)})

    def _add_write_perm(self, request: Frame, connection: Connection) -> Frame:
        name = decode_header(headers.AddWritePermOfBroker, request).broker_name
        count = self._routes.add_write_perm(name)
        log.info("%r gives broker %s the write permission: %d topics", connection, name, count)
        return request.reply(fields={"addTopicCount": str(count)})

    def _members(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(headers.GetBrokerMemberGroup, request)
        members = self._routes.members(header.cluster_name, header.broker_name)
        return request.reply(body=encode_body(BrokerMemberGroupBody(broker_member_group=members)))


def _read(request: Frame, header: headers.RegisterBroker, connection: Connection) -> RegisterBrokerBody:
    if header.body_crc32 and header.body_crc32 != crc32(request.body) & 0x7FFFFFFF:
        log.warning("registration of broker %s from %r: the checksum is wrong", header.broker_name, connection)
        raise RequestFailed(ResponseCode.SYSTEM_ERROR, "crc32 not match")
    return decode_register_body(request.body, compressed=header.compressed, version=request.version)


def _read_in_parts(
    request: Frame, header: headers.RegisterBroker, connection: Connection
) -> tuple[RegisterBrokerBody, list[RegisterBrokerBody]]:
    body = _read(request, header, connection)
    return body, list(_parts(body))


def _version(body: RegisterBrokerBody) -> DataVersion:
    return body.topic_config_serialize_wrapper.data_version


def _parts(body: RegisterBrokerBody) -> Iterator[RegisterBrokerBody]:
    """The registration in parts, each as if its broker had sent it: only the last one has the version of them all, and
    the others have some that no broker ever has.
    """
    whole = body.topic_config_serialize_wrapper
    topics, mappings = iter(whole.topic_config_table.items()), whole.topic_queue_mapping_info_map
    left = max(0, len(whole.topic_config_table) - 1) // _MOST_TOPICS_AT_ONCE
    while left >= 0:
        table = dict(islice(topics, _MOST_TOPICS_AT_ONCE))
        version = msgspec.structs.replace(whole.data_version, counter=-left) if left else whole.data_version
        wrapper = TopicConfigWrapper(
            data_version=version,
            topic_config_table=table,
            topic_queue_mapping_info_map={name: mappings[name] for name in table if name in mappings},
        )
        yield RegisterBrokerBody(filter_server_list=body.filter_server_list, topic_config_serialize_wrapper=wrapper)
        left -= 1
