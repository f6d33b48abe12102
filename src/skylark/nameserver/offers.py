"""What brokers offer: topic -> broker name -> queues, and which of them for static topics; with the bytes it takes.

Every topic of a broker counts for what it takes here, by an estimate that is rather too high. It is counted by broker
name, so that what one connection registers can be bounded, and so that the topics of a name are found without a search.

Invariants, after every call: a topic without brokers, and a name without topics, is in no table; only who has queues of
a topic has a mapping of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from skylark.wire.routes import QueueData, TopicQueueMappingInfo

TOPIC_BYTES: Final = 600
"""For one topic of one broker: it stands in two tables, and may have a table of its own for this one broker."""

_LOGICAL_QUEUE_BYTES: Final = 100


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
        self._bytes: dict[str, dict[str, int]] = {}  # broker name -> topic
        self._bytes_of_name: dict[str, int] = {}
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

    def bytes_of(self, name: str) -> int:
        return self._bytes_of_name.get(name, 0)

    def growth_bytes(self, name: str, topics: Iterable[str], mappings: Mapping[str, TopicQueueMappingInfo]) -> int:
        """How much more there would be with these topics and mappings of a broker name."""
        known = self._bytes.get(name, {})
        growth = sum(offer_bytes(topic) for topic in topics if topic not in known)
        return growth + sum(offer_bytes(topic, each) - known.get(topic, 0) for topic, each in mappings.items())

    # Changes.

    def put(self, topic: str, queue: QueueData) -> None:
        name = queue.broker_name
        self._queues.setdefault(topic, {})[name] = queue
        if topic not in self._bytes.get(name, {}):
            self._count(topic, name, offer_bytes(topic))

    def put_mapping(self, topic: str, name: str, mapping: TopicQueueMappingInfo) -> None:
        """Passed over for a topic that the broker has no queues of: nothing would take it out again."""
        if topic in self._bytes.get(name, {}):
            self._mappings.setdefault(topic, {})[name] = mapping
            self._count(topic, name, offer_bytes(topic, mapping))

    def drop(self, topic: str, name: str) -> None:
        self._take_out(topic, name)
        self._count(topic, name, 0)

    def drop_name(self, name: str) -> None:
        for topic in self._bytes.pop(name, {}):
            self._take_out(topic, name)
        self.size_bytes -= self._bytes_of_name.pop(name, 0)

    def _take_out(self, topic: str, name: str) -> None:
        queues = self._queues.get(topic)
        if queues is not None and queues.pop(name, None) is not None and not queues:
            del self._queues[topic]
        mappings = self._mappings.get(topic)
        if mappings is not None and mappings.pop(name, None) is not None and not mappings:
            del self._mappings[topic]

    def _count(self, topic: str, name: str, size_bytes: int) -> None:
        """Notes what the topic of a broker takes now."""
        of_name = self._bytes.setdefault(name, {})
        more = size_bytes - of_name.pop(topic, 0)
        if size_bytes:
            of_name[topic] = size_bytes
        self.size_bytes += more
        self._bytes_of_name[name] = self._bytes_of_name.get(name, 0) + more
        if not of_name:
            del self._bytes[name], self._bytes_of_name[name]
