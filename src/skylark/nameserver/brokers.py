"""What brokers ask a name server for, and operators about them.

No registration holds the event loop for long: one of many topics is read in a thread, one after the other, and taken in
by parts, as if its broker had sent it in parts. What waits to be read is bounded, for a connection and in all.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Final
from zlib import crc32

import msgspec

from skylark.nameserver.config import NamesrvConfig
from skylark.nameserver.kvconfig import KVConfig
from skylark.nameserver.routes import Broker, NoRoom, Routes
from skylark.nameserver.threads import in_thread
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.wire import headers
from skylark.wire.bodies import decode_body, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import MAX_FRAME_BYTES, Frame
from skylark.wire.routes import (
    ORDER_TOPIC_NAMESPACE,
    BrokerMemberGroupBody,
    KVTable,
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
_MOST_BYTES_AT_ONCE: Final = 64 << 10
_MOST_TOPICS_AT_ONCE: Final = 1024
_MOST_WAITING_BYTES: Final = 128 << 20
_SAY_AGAIN_MS: Final = 60_000


class BrokerRequests:
    """Requests of brokers, and of operators about them."""

    def __init__(self, routes: Routes, kv: KVConfig, config: NamesrvConfig, clock: Callable[[], int]) -> None:
        self._routes = routes
        self._kv = kv
        self._config = config
        self._clock = clock
        self._turn = asyncio.Lock()
        self._waiting: Counter[Connection] = Counter()  # bytes of registrations that are read or wait for that
        self._say_again_ms = 0

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
        if header.body_crc32 and header.body_crc32 != crc32(request.body) & 0x7FFFFFFF:
            log.warning("registration of broker %s from %r: the checksum is wrong", header.broker_name, connection)
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, "crc32 not match")
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
        if len(request.body) > _MOST_BYTES_AT_ONCE or not is_plain:
            return self._register_slowly(request, header, broker, connection)
        body = decode_register_body(request.body, compressed=header.compressed, version=request.version)
        return self._registered(request, self._take(broker, body, connection, self._kept(header, body)))

    async def _register_slowly(
        self, request: Frame, header: headers.RegisterBroker, broker: Broker, connection: Connection
    ) -> Frame:
        size_bytes = len(request.body)
        own_bytes = self._waiting[connection]
        if (own_bytes and own_bytes + size_bytes > MAX_FRAME_BYTES) or self._waiting.total() > _MOST_WAITING_BYTES:
            raise RequestFailed(ResponseCode.SYSTEM_BUSY, "other registrations wait to be read, try again later")
        self._waiting[connection] += size_bytes
        try:
            async with self._turn:  # what is read takes many times the room of the request
                body = await in_thread(
                    lambda: decode_register_body(request.body, compressed=header.compressed, version=request.version)
                )
                return await self._take_by_parts(request, header, broker, body, connection)
        finally:
            self._waiting[connection] -= size_bytes
            if not self._waiting[connection]:
                del self._waiting[connection]

    async def _take_by_parts(
        self,
        request: Frame,
        header: headers.RegisterBroker,
        broker: Broker,
        body: RegisterBrokerBody,
        connection: Connection,
    ) -> Frame:
        kept = self._kept(header, body)
        is_known = self._routes.version(broker.cluster, broker.address) == _version(body)
        with self._room_for(broker):
            self._routes.check_room(broker, body, connection, self._clock())
        result = RegisterBrokerResult()
        for part in [body] if is_known else _parts(body):
            result = self._take(broker, part, connection, kept)
            await asyncio.sleep(0)
        return self._registered(request, result)

    def _take(
        self, broker: Broker, body: RegisterBrokerBody, connection: Connection, kept: Collection[str] | None
    ) -> RegisterBrokerResult:
        is_new = self._routes.version(broker.cluster, broker.address) is None
        rival = self._routes.rival(broker)
        now_ms = self._clock()
        with self._room_for(broker):
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
        ordered = (
            self._kv.namespace(ORDER_TOPIC_NAMESPACE) if self._config.return_order_topic_config_to_broker else None
        )
        return request.reply(
            fields=encode_header(result), body=b"" if ordered is None else encode_body(KVTable(table=ordered))
        )

    def _kept(self, header: headers.RegisterBroker, body: RegisterBrokerBody) -> Collection[str] | None:
        """The topics of the broker, if it is to lose all others; one with static topics loses none, as with Apache."""
        topics = body.topic_config_serialize_wrapper
        if header.is_part or topics.topic_queue_mapping_info_map:
            return None
        return topics.topic_config_table if self._config.delete_topic_with_broker_registration else None

    @contextmanager
    def _room_for(self, broker: Broker) -> Iterator[None]:
        """Answers a broker for which there is no room, and says so from time to time."""
        try:
            yield
        except NoRoom as e:
            now_ms = self._clock()
            if now_ms >= self._say_again_ms:
                self._say_again_ms = now_ms + _SAY_AGAIN_MS
                log.warning("broker %s at %s can't register: %s", broker.name, broker.address, e)
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"no room: {e}") from None

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
        theirs = decode_body(DataVersion, _small(request))
        self._routes.heartbeat(header.cluster_name, header.broker_addr, self._clock())
        ours = self._routes.version(header.cluster_name, header.broker_addr)
        return request.reply(
            fields={"changed": "false" if ours == theirs else "true"}, body=b"" if ours is None else encode_body(ours)
        )

    def _register_topic(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(headers.RegisterTopic, request)
        queues = decode_body(TopicRouteData, _small(request)).queue_datas if request.body else []
        try:
            if queues and not self._routes.register_topic(header.topic, queues):
                log.warning("%r registers topic %s for an unknown broker", connection, header.topic)
        except NoRoom as e:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"no room: {e}") from None
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


def _small(request: Frame) -> bytes:
    """The body of a request that never has much to say."""
    if len(request.body) > _MOST_BYTES_AT_ONCE:
        raise RequestFailed(
            ResponseCode.SYSTEM_ERROR, f"the body has {len(request.body)} bytes, {_MOST_BYTES_AT_ONCE} at most are read"
        )
    return request.body


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
