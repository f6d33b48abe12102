"""What brokers, clients and name servers tell each other about routes: the bodies of requests 103, 105, 106 and kin.

`encode_body` and `decode_body` of `bodies` write and read them. Route answers also have a standard form, which
`encode_standard` writes: it quotes the numeric keys of a map (`{"0":"host:port"}`), where the older form leaves them
bare (`{0:"host:port"}`). Clients since 4.9.4 get it, and those that ask for it.

The body of REGISTER_BROKER may come compressed. Inflated, it is a run of counts and length-prefixed items:

    4+n  data version, JSON
    4    number of topics, then each 4+n: name, read queues, write queues, permission, filter type, attributes (JSON),
         separated by blanks
    4+n  filter servers, JSON
    4    number of static topic mappings, then each 4+n JSON; only from brokers since 5.0.0

A large one, of either form, is read item by item, so that a thread that reads it lets the others of its process run. It
must be JSON that is quick to read, its items may not be larger than `MAX_VALUE_BYTES`, and of topics only that is kept
which routes tell.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from itertools import islice
from struct import Struct as Layout
from typing import Any, Final, TypeVar

import msgspec

from skylark.wire import fastjson
from skylark.wire.bodies import BadBody, MessageQueue, decode_body, encode_body
from skylark.wire.numbers import Int, Long
from skylark.wire.tables import MAX_QUEUES, PERM_READ, PERM_WRITE, DataVersion, TopicConfig
from skylark.wire.walking import MAX_VALUE_BYTES, Walk

MASTER_ID: Final = 0
ORDER_TOPIC_NAMESPACE: Final = "ORDER_TOPIC_CONFIG"
MAX_INFLATED_BYTES: Final = 16 * 1024 * 1024
MAX_TOPICS: Final = 100_000
"""Of one registration: a name server takes fewer, and a few compressed bytes can say that there are millions."""
MAX_LOGICAL_QUEUES: Final = 500_000
"""Of the static topics of one registration."""

# Ordinals in Apache's MQVersion.
V3_0_11: Final = 37
V4_9_4: Final = 401
V5_0_0: Final = 413

_INT = Layout(">i")
_T = TypeVar("_T")


class QueueData(msgspec.Struct, rename="camel", kw_only=True):
    """What one broker offers of a topic."""

    broker_name: str
    perm: Int = 0
    read_queue_nums: Int = 0
    topic_sys_flag: Int = 0
    write_queue_nums: Int = 0


class BrokerData(msgspec.Struct, rename="camel", kw_only=True):
    """The brokers that share a name: the master (id 0) and its slaves."""

    broker_addrs: dict[Long, str]
    broker_name: str
    cluster: str = ""
    enable_acting_master: bool = False
    zone_name: str | None = None


class TopicQueueMappingInfo(msgspec.Struct, rename="camel", kw_only=True):
    """Which of a static topic's logical queues one broker hosts."""

    bname: str | None = None
    curr_id_map: dict[Int, Int] = {}
    dirty: bool = False
    epoch: Long = 0
    scope: str | None = "__global__"
    topic: str | None = None
    total_queues: Int = 0


class TopicRouteData(msgspec.Struct, rename="camel", kw_only=True):
    """Where a topic is, with the fields in the order of their names: `encode_standard` keeps it."""

    broker_datas: list[BrokerData] = []
    filter_server_table: dict[str, list[str]] = {}
    order_topic_conf: str | None = None
    queue_datas: list[QueueData] = []
    topic_queue_mapping_by_broker: dict[str, TopicQueueMappingInfo] | None = None


class ClusterInfo(msgspec.Struct, rename="camel", kw_only=True):
    broker_addr_table: dict[str, BrokerData]
    cluster_addr_table: dict[str, list[str]]


class KVTable(msgspec.Struct):
    table: dict[str, str] = {}


class BrokerMemberGroup(msgspec.Struct, rename="camel", kw_only=True):
    broker_addrs: dict[Long, str]
    broker_name: str
    cluster: str


class BrokerMemberGroupBody(msgspec.Struct, rename="camel", kw_only=True):
    broker_member_group: BrokerMemberGroup


class TopicConfigWrapper(msgspec.Struct, rename="camel", kw_only=True):
    """The topics of a broker and the version of that table."""

    data_version: DataVersion = msgspec.field(default_factory=DataVersion)
    mapping_data_version: DataVersion = msgspec.field(default_factory=DataVersion)
    topic_config_table: dict[str, TopicConfig] = {}
    topic_queue_mapping_detail_map: dict[str, Any] = {}
    topic_queue_mapping_info_map: dict[str, TopicQueueMappingInfo] = {}


class RegisterBrokerBody(msgspec.Struct, rename="camel", kw_only=True):
    filter_server_list: list[str] = []
    topic_config_serialize_wrapper: TopicConfigWrapper = msgspec.field(default_factory=TopicConfigWrapper)


class RegisterBrokerResult(msgspec.Struct, rename="camel"):
    """The fields of the answer to a registration: where a slave finds its master."""

    ha_server_addr: str | None = None
    master_addr: str | None = None


def queues_of(topic: str, counts: Iterable[tuple[str, int]]) -> list[MessageQueue]:
    """The queues of a topic, from how many of them each broker says it has; no more than a topic can have.

    >>> queues_of("t", [("a", 1), ("b", 2_000_000_000)])[:2]
    [MessageQueue(broker_name='a', queue_id=0, topic='t'), MessageQueue(broker_name='b', queue_id=0, topic='t')]
    """
    every = (MessageQueue(broker, queue_id, topic) for broker, count in counts for queue_id in range(count))
    return list(islice(every, MAX_QUEUES))


def encode_standard(body: msgspec.Struct) -> bytes:
    """Standard JSON: the keys of every map are strings."""
    return fastjson.dumps(msgspec.to_builtins(body, str_keys=True))


def decode_register_body(data: bytes, *, compressed: bool, version: int) -> RegisterBrokerBody:
    """The body of REGISTER_BROKER from a broker of that version. Raises BadBody."""
    if not data:
        return RegisterBrokerBody()
    # Apache's broker 5.5.0 compresses when told to but says it did not; no JSON starts with zlib's first byte.
    if compressed or data[0] == 0x78:
        return _decode_compressed(data, version)
    if len(data) > fastjson.MAX_LENIENT_BYTES:
        return _decode_large(data, version)
    if version < V3_0_11:
        return RegisterBrokerBody(topic_config_serialize_wrapper=decode_body(TopicConfigWrapper, data))
    return decode_body(RegisterBrokerBody, data)


def encode_register_body(body: RegisterBrokerBody, *, compressed: bool = False) -> bytes:
    """The body of REGISTER_BROKER, as brokers since 5.0.0 write it."""
    if not compressed:
        return encode_body(body)
    topics = body.topic_config_serialize_wrapper
    parts: list[bytes] = []

    def put(item: bytes) -> None:
        parts.append(_INT.pack(len(item)))
        parts.append(item)

    put(encode_body(topics.data_version))
    parts.append(_INT.pack(len(topics.topic_config_table)))
    for topic in topics.topic_config_table.values():
        put(_topic_line(topic).encode())
    put(fastjson.dumps(body.filter_server_list))
    parts.append(_INT.pack(len(topics.topic_queue_mapping_info_map)))
    for mapping in topics.topic_queue_mapping_info_map.values():
        put(encode_body(mapping))
    return zlib.compress(b"".join(parts), 9)


class _RoutedTopic(msgspec.Struct, rename="camel"):
    """What routes tell of a `TopicConfig`."""

    topic_name: str = ""
    read_queue_nums: Int = 16
    write_queue_nums: Int = 16
    perm: Int = PERM_READ | PERM_WRITE
    topic_sys_flag: Int = 0


def _decode_large(data: bytes, version: int) -> RegisterBrokerBody:
    walk, body = Walk(data), RegisterBrokerBody()
    try:
        if version < V3_0_11:
            _walk_topics(walk, body.topic_config_serialize_wrapper)
        else:
            for name in walk.entries():
                if name == "filterServerList":
                    body.filter_server_list = _read(walk.value(), list[str])
                elif name == "topicConfigSerializeWrapper":
                    _walk_topics(walk, body.topic_config_serialize_wrapper)
                else:
                    walk.skip()
        walk.end()
    except fastjson.BadJson as e:
        raise BadBody(f"bad body: {e}") from None
    return body


def _walk_topics(walk: Walk, topics: TopicConfigWrapper) -> None:
    """Fills `topics` with what the walk has before it."""
    for name in walk.entries():
        if name == "dataVersion":
            topics.data_version = _read(walk.value(), DataVersion)
        elif name == "topicConfigTable":
            topics.topic_config_table = _read_topics(walk.pieces())
        elif name == "topicQueueMappingInfoMap":
            mappings = (_read(piece, dict[str, TopicQueueMappingInfo]) for piece in walk.pieces())
            topics.topic_queue_mapping_info_map = _counted_mappings(
                each for piece in mappings for each in piece.items()
            )
        else:
            walk.skip()


def _read_topics(pieces: Iterable[bytes]) -> dict[str, TopicConfig]:
    table: dict[str, TopicConfig] = {}
    for piece in pieces:
        for key, topic in _read(piece, dict[str, _RoutedTopic]).items():
            table[key] = TopicConfig(
                topic.topic_name,
                topic.read_queue_nums,
                topic.write_queue_nums,
                topic.perm,
                topic_sys_flag=topic.topic_sys_flag,
            )
        if len(table) > MAX_TOPICS:
            raise BadBody(f"the registration has more than {MAX_TOPICS} topics")
    return table


def _counted_mappings(entries: Iterable[tuple[str | None, TopicQueueMappingInfo]]) -> dict[str, TopicQueueMappingInfo]:
    mappings: dict[str, TopicQueueMappingInfo] = {}
    queues = 0
    for topic, mapping in entries:
        queues += 1 + len(mapping.curr_id_map)
        if queues > MAX_LOGICAL_QUEUES:
            raise BadBody(f"the registration maps more than {MAX_LOGICAL_QUEUES} queues of static topics")
        if topic is not None:
            mappings[topic] = mapping
    return mappings


def _read(data: bytes, wanted: type[_T]) -> _T:
    """An item of a registration that may be large. Raises BadBody."""
    try:
        return fastjson.decode(data, wanted, is_quick=True)
    except fastjson.BadJson as e:
        raise BadBody(f"bad registration: {e}") from None


class _Items:
    """Reads the inflated registration from front to back."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def count(self) -> int:
        if self._position + 4 > len(self._data):
            raise BadBody("the compressed registration ends too early")
        (value,) = _INT.unpack_from(self._data, self._position)
        self._position += 4
        # An item takes at least its length field: what claims to be more can't be there.
        if not 0 <= value <= len(self._data) - self._position:
            raise BadBody(f"{value} is not a possible length in the compressed registration")
        return int(value)

    def topics(self) -> int:
        """How many of them follow."""
        value = self.count()
        if value > MAX_TOPICS:
            raise BadBody(f"the compressed registration has {value} topics, of {MAX_TOPICS} at most")
        return value

    def item(self) -> bytes:
        size = self.count()
        if size > MAX_VALUE_BYTES:
            raise BadBody(f"the compressed registration has an item of {size} bytes, of {MAX_VALUE_BYTES} at most")
        start = self._position
        self._position += size
        return self._data[start : self._position]


def _decode_compressed(data: bytes, version: int) -> RegisterBrokerBody:
    items = _Items(_inflate(data))
    topics = TopicConfigWrapper(data_version=_read(items.item(), DataVersion))
    table: dict[str, TopicConfig] = {}
    for _ in range(items.topics()):
        topic = _parse_topic_line(items.item())
        table[topic.topic_name] = topic
    topics.topic_config_table = table
    filter_servers = _read(items.item(), list[str])
    if version >= V5_0_0:
        mappings = (_read(items.item(), TopicQueueMappingInfo) for _ in range(items.topics()))
        topics.topic_queue_mapping_info_map = _counted_mappings((each.topic, each) for each in mappings)
    return RegisterBrokerBody(filter_server_list=filter_servers, topic_config_serialize_wrapper=topics)


def _inflate(data: bytes) -> bytes:
    inflater = zlib.decompressobj()
    try:
        inflated = inflater.decompress(data, MAX_INFLATED_BYTES)
    except zlib.error as e:
        raise BadBody(f"the registration can't be inflated: {e}") from None
    if not inflater.eof:
        raise BadBody(f"the registration is cut off, or larger than {MAX_INFLATED_BYTES} bytes")
    return inflated


def _topic_line(topic: TopicConfig) -> str:
    attributes = fastjson.dumps(topic.attributes).decode()
    return (
        f"{topic.topic_name} {topic.read_queue_nums} {topic.write_queue_nums} {topic.perm} "
        f"{topic.topic_filter_type} {attributes}"
    )


def _parse_topic_line(line: bytes) -> TopicConfig:
    try:
        name, read_queues, write_queues, perm, *_ = line.decode().split(" ")
        # The name server routes by the numbers alone; filter type and attributes stay with the broker.
        numbers = {"readQueueNums": read_queues, "writeQueueNums": write_queues, "perm": perm}
        return msgspec.convert({"topicName": name} | numbers, TopicConfig, strict=False)
    except ValueError as e:
        raise BadBody(f"bad topic in the compressed registration: {e}") from None
