"""What a broker tells every name server of itself and of its topics.

What is too much for a frame goes in parts, as with `enableSplitRegistration`, each with some of the topics. A name
server takes the topics of a registration over when it comes with another version than the one before: so each part has
a version of its own, and only the last one has that of the table. Where all parts arrived the versions are equal, and
the next rounds only ask for that: such a registration is not sent again every 30 s.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Final
from zlib import crc32

import msgspec

from skylark.broker.config import BrokerConfig
from skylark.broker.static_topics import StaticTopics
from skylark.broker.topics import Topics
from skylark.wire.bodies import encode_body
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from skylark.wire.headers import QueryDataVersion, RegisterBroker, UnregisterBroker
from skylark.wire.routes import RegisterBrokerBody, TopicConfigWrapper, TopicQueueMappingInfo, encode_register_body
from skylark.wire.tables import PERM_READ, PERM_WRITE, TopicConfig
from skylark.wire.typed import encode_header

MAX_PART_BYTES: Final = 4 << 20
"""Far below what name servers take, for it is estimated; and little enough to be encoded between two requests."""

_ENTRY_BYTES: Final = 256
_QUEUE_BYTES: Final = 24


def estimated_bytes(topic: TopicConfig) -> int:
    """What a topic takes in a registration, and a little more; to encode them all only for this takes too long."""
    attributes = sum(len(key) + len(value) + 6 for key, value in topic.attributes.items())
    return _ENTRY_BYTES + 2 * len(topic.topic_name) + attributes


class Part:
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

    def changed(self) -> None:
        """What was told is not true any more."""
        self._latest = lambda: None

    def parts(self) -> Parts:
        """What there is to tell; those who tell it at the same time share it, for it may be large."""
        parts = self._latest()
        if parts is None:
            parts = self._build()
            self._latest = weakref.ref(parts)
        return parts

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

    def _build(self) -> Parts:
        """In one part, if that is not too much."""
        version = msgspec.structs.replace(self._topics.data_version)
        contents = list(self._contents())
        parts = Parts()
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
            parts.append(Part(header, self.filter_servers(), wrapper))
        parts.reverse()
        return parts

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
