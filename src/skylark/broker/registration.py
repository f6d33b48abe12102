"""Keeps this broker known to every name server: at the start, every 30 s, at once when a topic changes, and not any
more after its end.

Name servers are independent: each is told by itself, and one that is away or is something else costs nothing but a log
line.

What is too much for a frame goes in parts, as with `enableSplitRegistration`, each with some of the topics. A name
server takes the topics of a registration over when it comes with another version than the one before: so each part has
a version of its own, and only the last one has that of the table. Where all parts arrived the versions are equal, and
the next rounds only ask for that: such a registration is not sent again every 30 s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Final
from zlib import crc32

import msgspec

from skylark.broker.config import BrokerConfig
from skylark.broker.static_topics import StaticTopics
from skylark.broker.topics import Topics
from skylark.net.pool import Pool
from skylark.wire.bodies import BadBody, decode_body, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import QueryDataVersion, RegisterBroker, UnregisterBroker
from skylark.wire.routes import (
    KVTable,
    RegisterBrokerBody,
    TopicConfigWrapper,
    TopicQueueMappingInfo,
    encode_register_body,
)
from skylark.wire.tables import PERM_READ, PERM_WRITE, TopicConfig
from skylark.wire.typed import encode_header

log = logging.getLogger(__name__)

MAX_PART_BYTES: Final = 4 << 20
"""Far below what name servers take, for it is estimated; and little enough to be encoded between two requests."""

_ENTRY_BYTES: Final = 256
_QUEUE_BYTES: Final = 24


def estimated_bytes(topic: TopicConfig) -> int:
    """What a topic takes in a registration, and a little more; to encode them all only for this takes too long."""
    attributes = sum(len(key) + len(value) + 6 for key, value in topic.attributes.items())
    return _ENTRY_BYTES + 2 * len(topic.topic_name) + attributes


class _Part:
    """One of the frames of a registration, encoded when it is first sent."""

    def __init__(self, header: RegisterBroker, filter_servers: list[str], topics: TopicConfigWrapper) -> None:
        self._header = header
        self._body = RegisterBrokerBody(filter_server_list=filter_servers, topic_config_serialize_wrapper=topics)
        self.version = topics.data_version
        self.topics = topics.topic_config_table

    def request(self) -> Frame:
        return Frame(RequestCode.REGISTER_BROKER, self._fields, self._encoded)

    @cached_property
    def _encoded(self) -> bytes:
        return encode_register_body(self._body, compressed=self._header.compressed)

    @cached_property
    def _fields(self) -> dict[str, str]:
        header = msgspec.structs.replace(self._header, body_crc32=crc32(self._encoded) & 0x7FFFFFFF)
        return encode_header(header)


class Registration:
    """The broker's side of the name servers' routes."""

    def __init__(
        self, config: BrokerConfig, topics: Topics, address: str, ha_address: str, static_topics: StaticTopics
    ) -> None:
        self.filter_servers: Callable[[], list[str]] = list
        """Where consumers may have their messages filtered."""
        self._config = config
        self._topics = topics
        self._static_topics = static_topics
        self._address = address
        self._ha_address = ha_address
        self._pool = Pool()
        self._changed = asyncio.Event()
        self._next_round: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._trouble: dict[str, str] = {}  # name server -> why it does not know this broker

    @property
    def _name_servers(self) -> list[str]:
        return [address for address in self._config.namesrv_addr.split(";") if address]

    def topics_changed(self, _: list[TopicConfig]) -> None:
        """Registers again as soon as possible; many changes at once cost one registration."""
        self._changed.set()

    async def published(self) -> None:
        """Returns when the name servers that can be reached know the topics as they are now."""
        self._changed.set()
        await asyncio.shield(self._next_round)

    async def run(self) -> None:
        """Registers for ever."""
        period_s = self._config.register_name_server_period / 1000
        try:
            while True:
                try:
                    async with asyncio.timeout(period_s):
                        await self._changed.wait()
                    is_changed = True
                except TimeoutError:
                    is_changed = False
                try:
                    await self._round(is_changed)
                except Exception:
                    log.exception("the registration failed, and is tried again")
        finally:
            self._next_round.cancel()

    async def _round(self, is_changed: bool) -> None:
        # Who asks from here on waits for the round after this one: this one may have read the topics already.
        this_round, self._next_round = self._next_round, asyncio.get_running_loop().create_future()
        try:
            await self.register(is_changed)
        finally:
            this_round.set_result(None)

    async def register(self, is_changed: bool = True) -> None:
        """Tells every name server, or only those that say that what they know is old."""
        self._changed.clear()
        parts = self._parts()
        force = is_changed or (self._config.force_register and len(parts) == 1)
        await asyncio.gather(*(self._register_with(server, parts, force) for server in self._name_servers))

    async def unregister(self) -> None:
        """Says goodbye, so that clients learn of the end before their connections tell them."""
        header = UnregisterBroker(
            broker_name=self._config.broker_name,
            broker_addr=self._address,
            cluster_name=self._config.broker_cluster_name,
            broker_id=self._config.broker_id,
        )
        await asyncio.gather(*(self._unregister_from(server, header) for server in self._name_servers))
        self._pool.close()

    def _parts(self) -> list[_Part]:
        """What there is to tell, in one part if that is not too much."""
        version = msgspec.structs.replace(self._topics.data_version)
        contents = list(self._contents())
        parts = []
        for left, (topics, mappings) in enumerate(reversed(contents)):
            wrapper = TopicConfigWrapper(
                data_version=msgspec.structs.replace(version, timestamp_ms=version.timestamp_ms - left),
                topic_config_table=topics,
                topic_queue_mapping_info_map=mappings,
            )
            header = RegisterBroker(
                broker_name=self._config.broker_name,
                broker_addr=self._address,
                cluster_name=self._config.broker_cluster_name,
                ha_server_addr=self._ha_address,
                broker_id=self._config.broker_id,
                enable_acting_master=False,
                compressed=self._config.compressed_register,
                is_part=True if len(contents) > 1 else None,
            )
            parts.append(_Part(header, self.filter_servers(), wrapper))
        return parts[::-1]

    def _contents(self) -> Iterator[tuple[dict[str, TopicConfig], dict[str, TopicQueueMappingInfo]]]:
        """The topics and the static ones among them, as many at once as a part may have."""
        most = self._config.split_registration_size if self._config.enable_split_registration else len(self._topics)
        topics: dict[str, TopicConfig] = {}
        mappings: dict[str, TopicQueueMappingInfo] = {}
        size_bytes = 0
        for topic in self._topics.all():
            name = topic.topic_name
            detail = self._static_topics.get(name)
            more_bytes = estimated_bytes(topic)
            if detail is not None:
                more_bytes += _ENTRY_BYTES + 2 * len(name) + _QUEUE_BYTES * len(detail.hosted_queues)
            if topics and (len(topics) >= most or size_bytes + more_bytes > MAX_PART_BYTES):
                yield topics, mappings
                topics, mappings, size_bytes = {}, {}, 0
            topics[name] = self._allowed(topic)
            if detail is not None:
                mappings[name] = detail.info()
            size_bytes += more_bytes
        yield topics, mappings

    def _allowed(self, topic: TopicConfig) -> TopicConfig:
        """The topic with the permissions that the broker has."""
        allowed = self._config.broker_permission
        if allowed & (PERM_READ | PERM_WRITE) == PERM_READ | PERM_WRITE:
            return topic
        return TopicConfig(topic.topic_name, topic.read_queue_nums, topic.write_queue_nums, topic.perm & allowed)

    async def _register_with(self, server: str, parts: list[_Part], force: bool) -> None:
        timeout_s = self._config.register_broker_timeout_mills / 1000
        try:
            if not force and await self._is_known(server, timeout_s):
                return
            for part in parts:
                response = await self._pool.request(server, part.request(), timeout_s)
                if response.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                    self._note(server, f"{server} is no name server but, it seems, a broker: correct -n or namesrvAddr")
                    return
                if response.code != ResponseCode.SUCCESS:
                    self._note(server, f"name server {server} refused the registration: {response.remark}")
                    return
                if response.body:  # the ordered topics, if the name server is set to tell
                    self._topics.mark_ordered(decode_body(KVTable, response.body).table)
        except (OSError, TimeoutError, BadBody) as e:
            trouble = "does not answer" if isinstance(e, TimeoutError) else "can't be reached"
            self._note(server, f"name server {server} {trouble}, and is tried again", f": {e}")
            return
        if self._trouble.pop(server, None):
            log.warning("name server %s knows this broker again", server)

    def _note(self, server: str, trouble: str, detail: str = "") -> None:
        """Warns once of a trouble that lasts."""
        if self._trouble.get(server) != trouble:
            self._trouble[server] = trouble
            log.warning("%s%s", trouble, detail)

    async def _is_known(self, server: str, timeout_s: float) -> bool:
        header = QueryDataVersion(
            broker_name=self._config.broker_name,
            broker_addr=self._address,
            cluster_name=self._config.broker_cluster_name,
            broker_id=self._config.broker_id,
        )
        body = encode_body(self._topics.data_version)
        request = Frame(RequestCode.QUERY_DATA_VERSION, encode_header(header), body)
        response = await self._pool.request(server, request, timeout_s)
        return response.code == ResponseCode.SUCCESS and response.fields.get("changed") == "false"

    async def _unregister_from(self, server: str, header: UnregisterBroker) -> None:
        request = Frame(RequestCode.UNREGISTER_BROKER, encode_header(header))
        try:
            await self._pool.request(server, request)
        except (OSError, TimeoutError) as e:
            log.info("name server %s was not told of the end: %s", server, e)
