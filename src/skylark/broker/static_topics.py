"""The static topics that this broker has a part in: the table in topicQueueMapping.json, and who may change it how.

An operator's tool decides where logical queues are (`mqadmin updateStaticTopic`, `remappingStaticTopic`) and tells each
broker its part. A broker only sees to it that what was said before is not contradicted: an epoch never goes back, and
an item never changes but for its end, and for its place once, when that is decided.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from skylark.broker.table_writer import Rendered, TableWriter
from skylark.store.tables import load
from skylark.wire.mapping import MappingDetail, MappingItem, MappingTable
from skylark.wire.tables import MAX_QUEUES

log = logging.getLogger(__name__)


class BadMapping(Exception):
    """A mapping that can't be; the text says why."""


class StaticTopics:
    """topic -> what this broker knows of its logical queues."""

    def __init__(self, config_dir: Path, broker_name: str, clock: Callable[[], int]) -> None:
        path = config_dir / "topicQueueMapping.json"
        self._clock = clock
        self.broker_name = broker_name
        self.table = load(path, MappingTable) or MappingTable()
        self.writer = TableWriter(path, self._capture)
        self.on_change: Callable[[str], None] | None = None
        """Called with a topic whose logical queues may have moved."""

    def __bool__(self) -> bool:
        return bool(self.table.topic_queue_mapping_info_map)

    def get(self, topic: str) -> MappingDetail | None:
        return self.table.topic_queue_mapping_info_map.get(topic)

    def all(self) -> dict[str, MappingDetail]:
        return self.table.topic_queue_mapping_info_map

    def update(self, topic: str, detail: MappingDetail, *, force: bool) -> None:
        """Takes a topic's mapping; queues that the new one does not name stay as they are. Raises BadMapping.

        `force` takes it even if it contradicts the old one.
        """
        if detail.bname != self.broker_name or detail.topic != topic:
            raise BadMapping(
                f"The mapping is that of topic {detail.topic} in broker {detail.bname}, not of {topic} in "
                f"{self.broker_name}"
            )
        if not 0 <= detail.total_queues <= MAX_QUEUES or any(not 0 <= n < MAX_QUEUES for n in detail.hosted_queues):
            raise BadMapping(f"A static topic has up to {MAX_QUEUES} queues, which are numbered from 0 on")
        for items in detail.hosted_queues.values():
            check_items(items)
        old = self.get(topic)
        if old is not None:
            if not force:
                _check_change(old, detail)
            detail.hosted_queues = old.hosted_queues | detail.hosted_queues
        self.all()[topic] = detail
        self._changed()
        log.info("static topic %s is mapped: %s", topic, detail)
        if self.on_change is not None:
            self.on_change(topic)

    def delete(self, topic: str) -> None:
        if self.all().pop(topic, None) is not None:
            self._changed()

    def save(self) -> None:
        """Writes the table now if it holds what the disk does not. Raises OSError."""
        self.writer.save()

    def _changed(self) -> None:
        self.table.data_version.next_version(self._clock())
        self.writer.changed()

    def _capture(self) -> Rendered:
        table = MappingTable(replace(self.table.data_version), dict(self.all()))
        return lambda: table


def check_items(items: Sequence[MappingItem]) -> None:
    """Raises BadMapping unless the items follow each other."""
    following: MappingItem | None = None
    for item in reversed(items):
        if item.start_offset < 0 or item.gen < 0 or item.queue_id < 0:
            raise BadMapping("The field is illegal, should not be negative")
        if item.end_offset != -1 and item.end_offset < item.start_offset:
            raise BadMapping("The endOffset is smaller than the start offset")
        if following is not None:
            if item.logic_offset < 0:
                raise BadMapping("The non-latest item has negative logic offset")
            if item.gen >= following.gen:
                raise BadMapping("The gen does not increase monotonically")
            if following.logic_offset != -1:
                if item.logic_offset >= following.logic_offset:
                    raise BadMapping("The base logic offset does not increase monotonically")
                if item.max_logical >= following.logic_offset:
                    raise BadMapping("The max logic offset does not increase monotonically")
        following = item


def _check_change(old: MappingDetail, new: MappingDetail) -> None:
    if new.epoch < old.epoch:
        raise BadMapping(f"Can't accept data with small epoch {new.epoch} < {old.epoch}")
    if new.scope != old.scope:
        raise BadMapping(f"Can't accept data with unmatched scope {new.scope} != {old.scope}")
    is_same_epoch = new.epoch == old.epoch
    for number, old_items in old.hosted_queues.items():
        new_items = new.hosted_queues.get(number)
        if new_items is None:
            if is_same_epoch:
                raise BadMapping("Cannot accept equal epoch with null data")
        elif old_items:
            _check_items_stay(old_items, new_items, is_same_epoch)


def _check_items_stay(old_items: Sequence[MappingItem], new_items: Sequence[MappingItem], is_same_epoch: bool) -> None:
    if not new_items:
        raise BadMapping("The new item list is null or empty")
    known = {item.gen: item for item in old_items}
    for item in new_items:
        before = known.get(item.gen)
        if before is None:
            continue
        is_moved = (item.bname, item.queue_id, item.start_offset) != (
            before.bname,
            before.queue_id,
            before.start_offset,
        )
        if is_moved or before.logic_offset not in (-1, item.logic_offset):
            raise BadMapping(f"The item of gen {item.gen} can not be changed from {before} to {item}")
    if is_same_epoch:
        leader, leader_before = new_items[-1], old_items[-1]
        if (leader.gen, leader.bname, leader.queue_id, leader.start_offset) != (
            leader_before.gen,
            leader_before.bname,
            leader_before.queue_id,
            leader_before.start_offset,
        ):
            raise BadMapping("The new leader is different but epoch equal")
