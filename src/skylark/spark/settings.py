"""What brokers say of themselves and of topics, asked once by each task that needs it."""

from __future__ import annotations

from typing import Final

from skylark.client.validation import MAX_MESSAGE_BYTES
from skylark.spark.cluster import Cluster
from skylark.wire.bodies import decode_body
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from skylark.wire.headers import GetTopicConfig
from skylark.wire.tables import TopicConfig
from skylark.wire.typed import encode_header

_MAX_MESSAGE_SIZE: Final = "maxMessageSize"
_CLEANUP_POLICY: Final = "cleanup.policy"
_COMPACTION: Final = "COMPACTION"
_MOST_TOPICS: Final = 1024


def largest_body_bytes(cluster: Cluster, broker: str, topic: str) -> int:
    """What a broker takes; what it takes usually, if it does not tell."""
    reply = cluster.connect(broker, topic).request(Frame(RequestCode.GET_BROKER_CONFIG))
    for line in reply.body.decode(errors="replace").splitlines():
        name, _, value = line.partition("=")
        if name.strip() == _MAX_MESSAGE_SIZE and value.strip().isdecimal():
            return int(value)
    return MAX_MESSAGE_BYTES


class Compacted:
    """The topics of which the brokers keep the last message of each key: an empty body deletes its key there."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[str, bool] = {}

    def holds(self, topic: str) -> bool:
        """Raises NotReachable for a topic that does not come back within the timeout."""
        if topic not in self._known:
            if len(self._known) >= _MOST_TOPICS:
                self._known.clear()
            self._known[topic] = self._ask(topic)
        return self._known[topic]

    def _ask(self, topic: str) -> bool:
        brokers = self._cluster.existing(topic).brokers
        request = Frame(RequestCode.GET_TOPIC_CONFIG, encode_header(GetTopicConfig(topic)))
        body = self._cluster.ask(next(iter(brokers)), topic, request).body
        return decode_body(TopicConfig, body).attributes.get(_CLEANUP_POLICY) == _COMPACTION
