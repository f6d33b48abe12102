"""The static topics that this broker has a part in: the table in topicQueueMapping.json, and who may change it how.

An operator's tool decides where logical queues are (`mqadmin updateStaticTopic`, `remappingStaticTopic`) and tells each
broker its part. A broker only sees to it that what was said before is not contradicted: an epoch never goes back, and
an item never changes but for its end, and for its place once, when that is decided.

A mapping is there once it is on disk, like a topic (`topics.py`, which sees to it that both are there, or neither).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from skylark.broker.entry_room import EntryRoom
from skylark.broker.table_writer import EntryTable, not_written
from skylark.store.tables import load
from skylark.wire.fastjson import EncodedMap
from skylark.wire.mapping import MappingDetail, MappingItem, MappingTable
from skylark.wire.tables import MAX_QUEUES, DataVersion

MAX_SIZE_BYTES: Final = 32 << 20
"""Of all mappings, beyond what each has of its own."""
_OWN_BYTES: Final = 1_024
_ITEM_BYTES: Final = 256
_NUMBER_BYTES: Final = 128  # of a queue's entry in a map


class BadMapping(Exception):
    """A mapping that can't be; the text says why."""


class _WrittenMappings(msgspec.Struct, rename="camel"):
    """A `MappingTable` on its way to the disk."""

    data_version: DataVersion
    topic_queue_mapping_info_map: EncodedMap


class StaticTopics:
    """topic -> what this broker knows of its logical queues."""

    def __init__(self, config_dir: Path, broker_name: str, clock: Callable[[], int]) -> None:
        path = config_dir / "topicQueueMapping.json"
        self.broker_name = broker_name
        stored = load(path, MappingTable) or MappingTable()
        self.table = EntryTable(
            path, "mapping", stored.topic_queue_mapping_info_map, stored.data_version, clock,
            lambda: _WrittenMappings, self._changed,
        )  # fmt: skip
        self._room = EntryRoom(_OWN_BYTES, MAX_SIZE_BYTES)
        for topic, detail in self.table.entries.items():
            self._room.keep(topic, _size_bytes(detail))
        self.on_change: Callable[[str], None] | None = None
        """Called with a topic whose logical queues may have moved."""

    def __bool__(self) -> bool:
        return bool(self.table.entries)

    def get(self, topic: str) -> MappingDetail | None:
        return self.table.entries.get(topic)

    def all(self) -> dict[str, MappingDetail]:
        return self.table.entries

    def checked(self, topic: str, detail: MappingDetail, *, force: bool) -> MappingDetail:
        """The mapping as it would be; queues that the new one does not name stay as they are. Raises BadMapping.

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
            detail = msgspec.structs.replace(detail, hosted_queues=old.hosted_queues | detail.hosted_queues)
        return detail

    async def create(self, topic: str, detail: MappingDetail) -> None:
        """Takes a topic's mapping, once it is on disk. Raises RequestFailed: then nothing has changed."""
        before = self._room.take({topic: _size_bytes(detail)})
        try:
            await self.table.create({topic: detail})
        except Exception as e:
            self._room.give_back(before)
            raise not_written(f"the queues of {topic} can't be mapped", e) from e

    def restore(self, topic: str, detail: MappingDetail | None) -> None:
        """Goes back to a former mapping, or to none."""
        if detail is None:
            self.delete(topic)
        else:
            self._room.keep(topic, _size_bytes(detail))
            self.table.put({topic: detail})

    def delete(self, topic: str) -> None:
        self._room.remove(topic)
        self.table.delete(topic)

    def save(self) -> None:
        """Writes the table now if it holds what the disk does not. Raises OSError."""
        self.table.writer.save()

    def _changed(self, details: list[MappingDetail]) -> None:
        for detail in details:
            if self.on_change is not None and detail.topic is not None:
                self.on_change(detail.topic)


def _size_bytes(detail: MappingDetail) -> int:
    """What a mapping takes in memory, as estimated."""
    items = sum(_ITEM_BYTES + len(item.bname) for items in detail.hosted_queues.values() for item in items)
    numbers = len(detail.hosted_queues) + len(detail.curr_id_map)
    return items + numbers * _NUMBER_BYTES + len(detail.scope or "")


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
