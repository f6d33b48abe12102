"""Queues, ranges of their offsets, and the JSON in which Spark keeps how far a stream has come.

Spark compares offsets as texts, so the same offsets must always give the same text: keys are sorted everywhere.

    {"f": {"orders": {"broker-a": {"0": 100, "1": 90}}},
     "g": "billing",
     "m": {"orders": {"broker-a": {"0": [122, 51200, 1700000000000]}}},
     "n": "host:9876",
     "o": {"orders": {"broker-a": {"0": 123, "1": 120}}},
     "v": 1}

`o` is where the stream is: the next offset of each queue. The others may be missing:
- `f` is where the stream began, the same for as long as it lives. Spark does not store where its first batch starts,
  and asks for that anew each time that it runs this batch.
- `m` are marks: a message of each queue that was read, by its offset, its place in the log and its time of storing, so
  that a queue that was made anew is told from the one that was read.
- `b` says where a queue begins in the batch that ends here, if that is not where the batch before ended: a new queue,
  or one of which messages were lost.
- `h`, in a line that `skylark pipeline offsets` changed, says where queues were that it moved.
- `g` and `n` say to which group, at which name server, progress is committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Self, TypeVar

import msgspec

VERSION: Final = 1
EARLIEST: Final = -2
LATEST: Final = -1
NO_MESSAGE: Final = -1

_T = TypeVar("_T")
_Tree = dict[str, dict[str, dict[str, _T]]]


class Queue(msgspec.Struct, frozen=True, order=True):
    """One queue of a topic."""

    topic: str
    broker: str
    queue_id: int

    def __str__(self) -> str:
        return f"queue {self.queue_id} of topic {self.topic} at broker {self.broker}"


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """A message of a queue. The log only grows, so no message of a queue that is made anew has the same place in it.

    The log offset is NO_MESSAGE where everything up to the offset has expired.
    """

    offset: int
    log_offset: int
    stored_ms: int

    @property
    def is_message(self) -> bool:
        return self.log_offset != NO_MESSAGE


class Range(msgspec.Struct, frozen=True):
    """The messages of a queue from offset `start` to before offset `end`: what it holds never changes.

    The mark is of the queue as it was when the range was planned.
    """

    queue: Queue
    start: int
    end: int
    mark: Mark | None = None

    @property
    def count(self) -> int:
        return self.end - self.start


Offsets = dict[Queue, int]
Marks = dict[Queue, Mark]


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Where a stream is, as its checkpoint says."""

    offsets: Offsets
    first: Offsets | None = None
    marks: Marks = {}
    begins: Offsets = {}

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Self:
        return cls(
            offsets=from_spark(stored),
            first=flat(stored["f"]) if "f" in stored else None,
            marks={queue: Mark(*mark) for queue, mark in flat(stored.get("m", {})).items()},
            begins=flat(stored.get("b", {})),
        )

    def to_spark(self, group: str | None, name_server: str | None) -> dict[str, Any]:
        """What Spark stores in its checkpoint."""
        found = to_spark(self.offsets, group, name_server)
        if self.begins:
            found["b"] = nested(self.begins)
        if self.first is not None:
            found["f"] = nested(self.first)
        if self.marks:
            found["m"] = nested({queue: list(msgspec.structs.astuple(mark)) for queue, mark in self.marks.items()})
        return dict(sorted(found.items()))


def nested(values: Mapping[Queue, _T]) -> _Tree[_T]:
    """topic -> broker -> queue id -> value, each level in order."""
    tree: _Tree[_T] = {}
    for queue in sorted(values):
        tree.setdefault(queue.topic, {}).setdefault(queue.broker, {})[str(queue.queue_id)] = values[queue]
    return tree


def flat(tree: Mapping[str, Mapping[str, Mapping[str, _T]]]) -> dict[Queue, _T]:
    """The other way round. Raises ValueError for a queue id that is not a number."""
    return {
        Queue(topic, broker, int(queue_id)): value
        for topic, brokers in tree.items()
        for broker, queues in brokers.items()
        for queue_id, value in queues.items()
    }


def to_spark(offsets: Mapping[Queue, int], group: str | None, name_server: str | None) -> dict[str, Any]:
    """Offsets alone, in the form that Spark stores."""
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
