"""JSON bodies of requests and responses, shared by clients and servers.

`decode_body(Heartbeat, frame.body)` gives the struct, `encode_body(struct)` the bytes that Apache's
`RemotingSerializable` writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec

from skylark.wire import fastjson
from skylark.wire.enums import CONSUME_TYPES, MESSAGE_MODELS, STARTS, EnumName
from skylark.wire.numbers import Int, Long
from skylark.wire.tables import SubscriptionGroupConfig, TopicConfig
from skylark.wire.typed import BadBody as BadBody

_Body = TypeVar("_Body", bound=msgspec.Struct)

PUSH: Final = "CONSUME_PASSIVELY"
PULL: Final = "CONSUME_ACTIVELY"
POP: Final = "CONSUME_POP"
CLUSTERING: Final = "CLUSTERING"
BROADCASTING: Final = "BROADCASTING"
TAG: Final = "TAG"


def encode_body(body: msgspec.Struct) -> bytes:
    """The JSON that Apache's classes of the same fields write."""
    return fastjson.dumps(body)


def decode_body(kind: type[_Body], body: bytes) -> _Body:
    """The body of a request or a response as `kind`. Raises BadBody."""
    try:
        return fastjson.decode(body, kind)
    except fastjson.BadJson as e:
        raise BadBody(f"bad body: {e}") from None


class MessageQueue(msgspec.Struct, rename="camel", frozen=True):
    """One queue of a topic, at the broker that has it."""

    broker_name: str
    queue_id: Int
    topic: str

    def __str__(self) -> str:
        return f"queue {self.queue_id} of {self.topic} at {self.broker_name}"


class Subscription(msgspec.Struct, rename="camel", kw_only=True):
    """What a group wants of a topic: tags (with their Java hash codes), or an expression of another type."""

    class_filter_mode: bool = False
    code_set: list[Int] = []
    expression_type: str | None = TAG
    sub_string: str | None = None
    sub_version: Long = 0
    tags_set: list[str] = []
    topic: str

    @property
    def is_by_tag(self) -> bool:
        return self.expression_type in (None, "", TAG)


class Consuming(msgspec.Struct, rename="camel", kw_only=True):
    """How a group consumes, as its members say."""

    consume_from_where: EnumName | None = None
    consume_type: EnumName | None = None
    message_model: EnumName | None = None

    def __post_init__(self) -> None:
        self.consume_from_where = STARTS.read(self.consume_from_where)
        self.consume_type = CONSUME_TYPES.read(self.consume_type)
        self.message_model = MESSAGE_MODELS.read(self.message_model)


class ConsumerData(Consuming, rename="camel", kw_only=True):
    group_name: str
    subscription_data_set: list[Subscription] = []
    unit_mode: bool = False


class ProducerData(msgspec.Struct, rename="camel", kw_only=True):
    group_name: str


class Heartbeat(msgspec.Struct, rename="camel", kw_only=True):
    """What a client says about itself every 30 s.

    A fingerprint other than 0 marks the second form: when the client believes that the broker knows its subscriptions
    already, it leaves them out (`without_sub`).
    """

    client_id: str = msgspec.field(name="clientID")
    consumer_data_set: list[ConsumerData] = []
    heartbeat_fingerprint: Int = 0
    producer_data_set: list[ProducerData] = []
    without_sub: bool = False


class CheckClient(msgspec.Struct, rename="camel", kw_only=True):
    client_id: str | None = None
    group: str | None = None
    namespace: str | None = None
    subscription_data: Subscription | None = None


class LockRequest(msgspec.Struct, rename="camel", kw_only=True):
    """Locks or unlocks queues for an orderly consumer."""

    client_id: str
    consumer_group: str
    mq_set: list[MessageQueue] = []
    only_this_broker: bool = False


class LockedQueues(msgspec.Struct, kw_only=True):
    lock_ok_mq_set: list[MessageQueue] = msgspec.field(name="lockOKMQSet", default_factory=list)


class ConsumerIds(msgspec.Struct, rename="camel", kw_only=True):
    consumer_id_list: list[str] = []


class ClientConnection(msgspec.Struct, rename="camel", kw_only=True):
    client_addr: str
    client_id: str
    language: str
    version: Int


class ConsumerConnections(Consuming, rename="camel", kw_only=True):
    connection_set: list[ClientConnection] = []
    subscription_table: dict[str, Subscription] = {}


class ProducerConnections(msgspec.Struct, rename="camel", kw_only=True):
    connection_set: list[ClientConnection] = []


class ProducerInfo(msgspec.Struct, rename="camel", kw_only=True):
    client_id: str
    language: str
    last_update_timestamp: Long
    remote_ip: str = msgspec.field(name="remoteIP")
    version: Int = 0


class ProducerTable(msgspec.Struct, rename="camel", kw_only=True):
    data: dict[str, list[ProducerInfo]] = {}


class SubscriptionAnswer(msgspec.Struct, rename="camel", kw_only=True):
    group: str
    subscription_data: Subscription | None = None
    topic: str | None = None


class TopicList(msgspec.Struct, rename="camel", kw_only=True):
    broker_addr: str | None = None
    topic_list: list[str] = []


class GroupList(msgspec.Struct, rename="camel", kw_only=True):
    group_list: list[str] = []


class TopicConfigs(msgspec.Struct, rename="camel", kw_only=True):
    """Topics to create in one go."""

    topic_config_list: list[TopicConfig] = []


class GroupConfigs(msgspec.Struct, rename="camel", kw_only=True):
    """Subscription groups to create in one go."""

    group_config_list: list[SubscriptionGroupConfig] = []


class GroupForbidden(msgspec.Struct, rename="camel", kw_only=True):
    group: str
    readable: bool
    topic: str


class ConsumerStatus(msgspec.Struct, rename="camel", kw_only=True):
    """Where a group's members stand: a client fills `message_queue_table`, the broker `consumer_table` by client id."""

    consumer_table: dict[str, dict[MessageQueue, Long]] = {}
    message_queue_table: dict[MessageQueue, Long] = {}


class ResetOffsets(msgspec.Struct, rename="camel", kw_only=True):
    """Queues and the offsets that their consumers must go to."""

    offset_table: dict[MessageQueue, Long] = {}


class QueueOffset(msgspec.Struct, rename="camel", kw_only=True):
    broker_name: str
    offset: Long
    queue_id: Int
    topic: str


class ResetOffsetsForC(msgspec.Struct, rename="camel", kw_only=True):
    """The same for the C++ client, whose JSON reader knows no keys that are objects."""

    offset_table: list[QueueOffset] = []

    @classmethod
    def of(cls, offsets: Mapping[MessageQueue, int]) -> ResetOffsetsForC:
        return cls(
            offset_table=[
                QueueOffset(broker_name=q.broker_name, offset=offset, queue_id=q.queue_id, topic=q.topic)
                for q, offset in offsets.items()
            ]
        )
