"""What a broker tells every name server of itself and of its topics.

What is too much for a frame goes in parts, as with `enableSplitRegistration`, each with some of the topics. A name
server takes the topics of a registration over when it comes with another version than the one before: so each part has
a version of its own, and only the last one has that of the table. Where all parts arrived the versions are equal, and
the next rounds only ask for that: such a registration is not sent again every 30 s.

Threads put it together, of what the table of topics has encoded already: the event loop only copies the table.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final
from zlib import crc32

import msgspec

from skylark.broker.config import BrokerConfig
from skylark.broker.static_topics import StaticTopics
from skylark.broker.topics import MAX_TOPICS, Topics
from skylark.broker.turns import beside
from skylark.wire.bodies import encode_body
from skylark.wire.codes import RequestCode
from skylark.wire.fastjson import EncodedMap
from skylark.wire.frame import Frame
from skylark.wire.headers import QueryDataVersion, RegisterBroker, UnregisterBroker
from skylark.wire.mapping import MappingDetail
from skylark.wire.routes import RegisterBrokerBody, TopicConfigWrapper, TopicQueueMappingInfo, encode_register_body
from skylark.wire.tables import PERM_READ, PERM_WRITE, DataVersion, TopicConfig
from skylark.wire.typed import encode_header

MAX_PART_BYTES: Final = 4 << 20
"""Far below what name servers take, for it is estimated."""

_ENTRY_BYTES: Final = 256
_QUEUE_BYTES: Final = 24


def estimated_bytes(topic: TopicConfig) -> int:
    """What a topic takes in a registration, and a little more; to encode them all only for this takes too long."""
    attributes = sum(len(key) + len(value) + 6 for key, value in topic.attributes.items())
    return _ENTRY_BYTES + 2 * len(topic.topic_name) + attributes


class _EncodedTopics(msgspec.Struct, rename="camel", kw_only=True):
    """A `TopicConfigWrapper` on its way to a name server."""

    data_version: DataVersion
    mapping_data_version: DataVersion
    topic_config_table: EncodedMap
    topic_queue_mapping_detail_map: dict[str, Any]
    topic_queue_mapping_info_map: dict[str, TopicQueueMappingInfo]


class _EncodedBody(msgspec.Struct, rename="camel", kw_only=True):
    """A `RegisterBrokerBody` on its way to a name server."""

    filter_server_list: list[str]
    topic_config_serialize_wrapper: _EncodedTopics


class Part:
    """One of the frames of a registration, encoded when it is first sent."""

    def __init__(
        self,
        header: RegisterBroker,
        body: RegisterBrokerBody,
        encoded: Callable[[Mapping[str, TopicConfig]], EncodedMap],
    ) -> None:
        self._header = header
        self._body = body
        self._encoded = encoded
        self._encoding: asyncio.Future[tuple[dict[str, str], bytes]] | None = None
        self.version = body.topic_config_serialize_wrapper.data_version
        self.topics = body.topic_config_serialize_wrapper.topic_config_table

    async def request(self) -> Frame:
        if self._encoding is None:
            self._encoding = asyncio.ensure_future(beside(self._encode))
        fields, body = await asyncio.shield(self._encoding)  # for those who tell other name servers too
        return Frame(RequestCode.REGISTER_BROKER, fields, body)

    def _encode(self) -> tuple[dict[str, str], bytes]:
        """In a thread."""
        if self._header.compressed:
            body = encode_register_body(self._body, compressed=True)
        else:
            topics = self._body.topic_config_serialize_wrapper
            fields = msgspec.structs.asdict(topics) | {"topic_config_table": self._encoded(self.topics)}
            body = encode_body(
                _EncodedBody(
                    filter_server_list=self._body.filter_server_list,
                    topic_config_serialize_wrapper=_EncodedTopics(**fields),
                )
            )
        header = msgspec.structs.replace(self._header, body_crc32=crc32(body) & 0x7FFFFFFF)
        return encode_header(header), body


class Parts(list[Part]):
    """All parts of a registration, of which a weak reference can be kept."""


class Announcement:
    """The requests that a broker sends to name servers."""

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
        self._latest: Callable[[], Parts | None] = lambda: None
        self._building: asyncio.Future[Parts] | None = None

    def changed(self) -> None:
        """What was told is not true any more."""
        self._latest = lambda: None
        self._building = None

    async def parts(self) -> Parts:
        """What there is to tell; those who tell it at the same time share it, for it may be large."""
        parts = self._latest()
        if parts is not None:
            return parts
        if self._building is None:
            self._building = asyncio.ensure_future(self._build())
            self._building.add_done_callback(self._built)
        return await asyncio.shield(self._building)

    def question(self) -> Frame:
        """Whether a name server knows the topics as they are now."""
        header = QueryDataVersion(
            broker_name=self._config.broker_name,
            broker_addr=self._address,
            cluster_name=self._config.broker_cluster_name,
            broker_id=self._config.broker_id,
        )
        return Frame(RequestCode.QUERY_DATA_VERSION, encode_header(header), encode_body(self._topics.data_version))

    def goodbye(self) -> Frame:
        header = UnregisterBroker(
            broker_name=self._config.broker_name,
            broker_addr=self._address,
            cluster_name=self._config.broker_cluster_name,
            broker_id=self._config.broker_id,
        )
        return Frame(RequestCode.UNREGISTER_BROKER, encode_header(header))

    def _built(self, building: asyncio.Future[Parts]) -> None:
        if building is self._building:
            self._building = None
            if not building.cancelled() and building.exception() is None:
                self._latest = weakref.ref(building.result())

    async def _build(self) -> Parts:
        """In one part, if that is not too much."""
        version = msgspec.structs.replace(self._topics.data_version)
        topics, static_topics = list(self._topics.all()), dict(self._static_topics.all())
        contents = await beside(lambda: list(self._contents(topics, static_topics)))
        parts = Parts()
        for left, (table, mappings) in enumerate(reversed(contents)):
            wrapper = TopicConfigWrapper(
                data_version=msgspec.structs.replace(version, timestamp_ms=version.timestamp_ms - left),
                topic_config_table=table,
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
            body = RegisterBrokerBody(filter_server_list=self.filter_servers(), topic_config_serialize_wrapper=wrapper)
            parts.append(Part(header, body, self._topics.table.encoded))
        parts.reverse()
        return parts

    def _contents(
        self, every: Iterable[TopicConfig], static_topics: Mapping[str, MappingDetail]
    ) -> Iterator[tuple[dict[str, TopicConfig], dict[str, TopicQueueMappingInfo]]]:
        """The topics and the static ones among them, as many at once as a part may have; in a thread."""
        most = self._config.split_registration_size if self._config.enable_split_registration else MAX_TOPICS
        topics: dict[str, TopicConfig] = {}
        mappings: dict[str, TopicQueueMappingInfo] = {}
        size_bytes = 0
        for topic in every:
            name = topic.topic_name
            detail = static_topics.get(name)
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
