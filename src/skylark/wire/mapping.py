"""Static topics: topics whose queues are logical ones, spread over brokers and moved between them, under fixed numbers.

A logical queue is a list of items, one for each broker's queue that it has ever been in, oldest first. The last item is
the leader: messages are written there and asked for there. An item holds a stretch of the logical queue:

    logical     0 ......... 4_321 |          10_000 ........
    item        gen 0, broker-a-2 |          gen 1, broker-b-0
    physical    0 ......... 4_321 |          0 .............

`logic_offset` is where it begins in the logical queue, -1 as long as that is not decided: while a queue moves, the new
leader is written to before it is known how far the old one got. `start_offset` is the same place in the physical queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import msgspec

from skylark.wire.numbers import Int, Long, Summand
from skylark.wire.routes import TopicQueueMappingInfo
from skylark.wire.tables import DataVersion, TopicConfig

LOGICAL_BROKER_PREFIX: Final = "__syslo__"
"""Begins the name of the broker that logical queues have: it is the same for all of a topic, and none that exists."""
NO_BROKER: Final = "__syslo__none__"
GLOBAL_SCOPE: Final = "__global__"
END: Final = 2**63 - 1


class MappingItem(msgspec.Struct, rename="camel", kw_only=True):
    """A stretch of a logical queue in a queue of a broker."""

    bname: str = ""
    end_offset: Summand = -1
    gen: Int = 0
    logic_offset: Summand = 0
    queue_id: Int = 0
    start_offset: Summand = 0
    time_of_end: Long = -1
    time_of_start: Long = -1

    @property
    def is_ended(self) -> bool:
        return self.end_offset > self.start_offset

    @property
    def delta(self) -> int:
        """What is added to a physical offset."""
        return self.logic_offset - self.start_offset

    @property
    def max_logical(self) -> int:
        return self.logic_offset + max(0, self.end_offset - self.start_offset)

    def to_logical(self, physical: int) -> int:
        return self.logic_offset if physical < self.start_offset else physical + self.delta

    def to_logical_within(self, physical: int) -> int:
        """The same, not beyond the end of the item, and -1 if its place is not decided."""
        if self.logic_offset < 0:
            return -1
        if self.start_offset <= self.end_offset < physical:
            return self.logic_offset + self.end_offset - self.start_offset
        return self.to_logical(physical)

    def to_physical(self, logical: int) -> int:
        return logical - self.delta


class MappingDetail(msgspec.Struct, rename="camel", kw_only=True):
    """What one broker knows of a static topic: all items of the logical queues that it leads, or led."""

    bname: str | None = None
    curr_id_map: dict[Int, Int] = {}
    dirty: bool = False
    epoch: Long = 0
    hosted_queues: dict[Int, list[MappingItem]] = {}
    scope: str | None = GLOBAL_SCOPE
    topic: str | None = None
    total_queues: Int = 0

    def __str__(self) -> str:
        """In short: it may have many thousand items."""
        return (
            f"{self.topic}: epoch {self.epoch}, {len(self.hosted_queues)} of {self.total_queues} queues at {self.bname}"
        )

    def info(self) -> TopicQueueMappingInfo:
        """What name servers are told: the logical queues that the broker leads, each with its queue there."""
        led = {
            number: items[-1].queue_id
            for number, items in self.hosted_queues.items()
            if items and items[-1].bname == self.bname
        }
        return TopicQueueMappingInfo(
            topic=self.topic, bname=self.bname, epoch=self.epoch, total_queues=self.total_queues, curr_id_map=led
        )


class MappingTable(msgspec.Struct, rename="camel"):
    """topicQueueMapping.json"""

    data_version: DataVersion = msgspec.field(default_factory=DataVersion)
    topic_queue_mapping_info_map: dict[str, MappingDetail] = {}


class MappedTopicConfig(TopicConfig, rename="camel", omit_defaults=False):
    """The answer to GET_TOPIC_CONFIG: a topic, and its mapping if that was asked for and it has one."""

    mapping_detail: MappingDetail | None = None


def item_at(items: Sequence[MappingItem], logical: int) -> MappingItem | None:
    """The item that holds a logical offset: the last decided one that begins at it or before it, else the first."""
    decided = [item for item in items if item.logic_offset >= 0]
    return next((item for item in reversed(decided) if logical >= item.logic_offset), decided[0] if decided else None)


def item_after(items: Sequence[MappingItem], current: MappingItem) -> MappingItem | None:
    """The next item, if there is one and its place is decided."""
    for item, following in pairwise(items):
        if item.gen == current.gen:
            return following if following.logic_offset >= 0 else None
    return None


def logical_broker(scope: str) -> str:
    """The broker name of the logical queues of a scope.

    >>> logical_broker("__global__")
    '__syslo__global__'
    """
    return LOGICAL_BROKER_PREFIX + (scope[2:] if scope == GLOBAL_SCOPE else scope)
