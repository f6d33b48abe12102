"""What brokers offer: topic -> broker name -> queues, and which of them for static topics; with the bytes it takes.

Every topic of a broker counts for what it takes here, by an estimate that is rather too high. It counts for the remote
host that registered it first or mapped it last, whosever broker name it is, so that what a host registers can be
bounded. It is noted by broker name, so that the topics of a name are found without a search.

Invariants, after every call: a topic without brokers, and a name without topics, is in no table; only who has queues of
a topic has a mapping of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from skylark.nameserver.living import Host
from skylark.wire.routes import QueueData, TopicQueueMappingInfo

TOPIC_BYTES: Final = 600
"""For one topic of one broker: it stands in two tables, and may have a table of its own for this one broker."""

_LOGICAL_QUEUE_BYTES: Final = 100
_NOTHING: Final = (0, None)


def text_bytes(text: str | None) -> int:
    """What a text may take, beside its object."""
    if text is None:
        return 0
    return len(text) if text.isascii() else 4 * len(text)


def offer_bytes(topic: str, mapping: TopicQueueMappingInfo | None = None) -> int:
    """What one topic of one broker takes."""
    if mapping is None:
        return TOPIC_BYTES + text_bytes(topic)
    texts = sum(map(text_bytes, (topic, mapping.bname, mapping.scope, mapping.topic)))
    return 2 * TOPIC_BYTES + texts + _LOGICAL_QUEUE_BYTES * len(mapping.curr_id_map)


class Offers:
    """The topics of all brokers."""

    def __init__(self) -> None:
        self._queues: dict[str, dict[str, QueueData]] = {}  # topic -> broker name
        self._mappings: dict[str, dict[str, TopicQueueMappingInfo]] = {}  # static topic -> broker name
        self._bytes: dict[str, dict[str, tuple[int, Host]]] = {}  # broker name -> topic -> for whom it counts
        self._bytes_of: Counter[Host] = Counter()
        self.size_bytes = 0

    # Questions.

    def topics(self) -> Collection[str]:
        return self._queues.keys()

    def topics_of(self, name: str) -> Collection[str]:
        return self._bytes.get(name, {}).keys()

    def of(self, topic: str) -> Mapping[str, QueueData]:
        """By broker name."""
        return self._queues.get(topic, {})

    def mappings_of(self, topic: str) -> dict[str, TopicQueueMappingInfo] | None:
        return self._mappings.get(topic)

    def queues_of(self, name: str) -> Iterable[QueueData]:
        return (self._queues[topic][name] for topic in self.topics_of(name))

    def bytes_of(self, host: Host) -> int:
        """What counts for a host."""
        return self._bytes_of[host]

    def growth_bytes(self, name: str, topics: Iterable[str], mappings: Mapping[str, TopicQueueMappingInfo]) -> int:
        """How much more there would be with these topics and mappings of a broker name."""
        known = self._bytes.get(name, {})
        growth = sum(offer_bytes(topic) for topic in topics if topic not in known)
        before = (known.get(topic, _NOTHING)[0] for topic in mappings)
        return growth + sum(map(offer_bytes, mappings, mappings.values())) - sum(before)

    # Changes.

    def put(self, topic: str, queue: QueueData, host: Host) -> None:
        name = queue.broker_name
        self._queues.setdefault(topic, {})[name] = queue
        if topic not in self._bytes.get(name, {}):
            self._count(topic, name, offer_bytes(topic), host)

    def put_mapping(self, topic: str, name: str, mapping: TopicQueueMappingInfo, host: Host) -> None:
        """Passed over for a topic that the broker has no queues of: nothing would take it out again."""
        if topic in self._bytes.get(name, {}):
            self._mappings.setdefault(topic, {})[name] = mapping
            self._count(topic, name, offer_bytes(topic, mapping), host)

    def drop(self, topic: str, name: str) -> None:
        self._take_out(topic, name)
        of_name = self._bytes.get(name, {})
        if topic in of_name:
            self._discount(*of_name.pop(topic))
        if not of_name:
            self._bytes.pop(name, None)

    def drop_name(self, name: str) -> None:
        gone = self._bytes.pop(name, {})
        freed: dict[Host, int] = {}
        for topic, (size_bytes, host) in gone.items():  # a hundred thousand, perhaps
            freed[host] = freed.get(host, 0) + size_bytes
            queues = self._queues[topic]
            if len(queues) == 1:
                del self._queues[topic]
            else:
                del queues[name]
        for topic in self._mappings.keys() & gone.keys():
            self._take_out(topic, name)
        for host, size_bytes in freed.items():
            self._discount(size_bytes, host)

    def _take_out(self, topic: str, name: str) -> None:
        queues = self._queues.get(topic, {})
        if queues.pop(name, None) is not None and not queues:
            del self._queues[topic]
        if topic in self._mappings:
            mappings = self._mappings[topic]
            if mappings.pop(name, None) is not None and not mappings:
                del self._mappings[topic]

    def _count(self, topic: str, name: str, size_bytes: int, host: Host) -> None:
        """Notes what the topic of a broker takes now, and for whom."""
        of_name = self._bytes.setdefault(name, {})
        if topic in of_name:
            self._discount(*of_name[topic])
        of_name[topic] = size_bytes, host
        self.size_bytes += size_bytes
        self._bytes_of[host] += size_bytes

    def _discount(self, size_bytes: int, host: Host) -> None:
        self.size_bytes -= size_bytes
        self._bytes_of[host] -= size_bytes
        if not self._bytes_of[host]:
            del self._bytes_of[host]
