"""Queues, ranges of their offsets, and the JSON in which Spark keeps how far a stream has come.

Spark compares offsets as texts, so the same offsets must always give the same text: keys are sorted everywhere.

    {"g": "billing", "n": "host:9876", "o": {"orders": {"broker-a": {"0": 123, "1": 120}}}, "v": 1}

`g` and `n` say to which group, at which name server, progress is committed; they are left out when it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

VERSION: Final = 1
EARLIEST: Final = -2
LATEST: Final = -1


class Queue(msgspec.Struct, frozen=True, order=True):
    """One queue of a topic."""

    topic: str
    broker: str
    queue_id: int

    def __str__(self) -> str:
        return f"queue {self.queue_id} of topic {self.topic} at broker {self.broker}"


class Range(msgspec.Struct, frozen=True):
    """The messages of a queue from offset `start` to before offset `end`: what it holds never changes."""

    queue: Queue
    start: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.start


Offsets = dict[Queue, int]


def nested(offsets: Mapping[Queue, int]) -> dict[str, dict[str, dict[str, int]]]:
    """topic -> broker -> queue id -> offset, each level in order."""
    tree: dict[str, dict[str, dict[str, int]]] = {}
    for queue in sorted(offsets):
        tree.setdefault(queue.topic, {}).setdefault(queue.broker, {})[str(queue.queue_id)] = offsets[queue]
    return tree


def flat(tree: Mapping[str, Mapping[str, Mapping[str, int]]]) -> Offsets:
    """The other way round. Raises ValueError for a queue id that is not a number."""
    return {
        Queue(topic, broker, int(queue_id)): offset
        for topic, brokers in tree.items()
        for broker, queues in brokers.items()
        for queue_id, offset in queues.items()
    }


def to_spark(offsets: Mapping[Queue, int], group: str | None, name_server: str | None) -> dict[str, Any]:
    """What Spark stores in its checkpoint."""
    committing = {"g": group, "n": name_server} if group else {}
    return {**committing, "o": nested(offsets), "v": VERSION}


def from_spark(stored: Mapping[str, Any]) -> Offsets:
    version = stored.get("v")
    if version != VERSION:
        raise ValueError(
            f"the checkpoint holds offsets of version {version}, and version {VERSION} is read here: "
            "it was written by another version of Skylark, or by another source"
        )
    return flat(stored["o"])
