"""What is kept by queue, such as consumer offsets, of which a copy is had at once, and what a copy is as JSON.

A copy shares its rows with the table: a row that is part of one is not changed but replaced. So a copy stays what it
was when it was made, and a thread can encode it while the table changes.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import msgspec

from skylark.wire.fastjson import EncodedMap, encode_entry
from skylark.wire.tables import DataVersion

SEPARATOR: Final = "@"
Key = tuple[str, str]
"""Group and topic, or the other way round."""

T = TypeVar("T")


class Rows(Generic[T]):
    """By group and topic, what is kept by queue, which must not change itself; change them with the methods only."""

    def __init__(self) -> None:
        self.rows: dict[Key, dict[int, T]] = {}
        self._ours: set[Key] = set()  # that no copy has

    def put(self, key: Key, queue_id: int, value: T) -> None:
        self._own(key)[queue_id] = value

    def put_row(self, key: Key, row: dict[int, T]) -> None:
        self.rows[key] = row.copy()
        self._ours.add(key)

    def remove(self, key: Key, queue_id: int) -> bool:
        """Whether there was something; its row stays, if only empty."""
        if queue_id not in self.rows.get(key, ()):
            return False
        del self._own(key)[queue_id]
        return True

    def pop(self, key: Key) -> dict[int, T]:
        self._ours.discard(key)
        return self.rows.pop(key)

    def copy(self) -> dict[Key, dict[int, T]]:
        self._ours = set()
        return self.rows.copy()

    def _own(self, key: Key) -> dict[int, T]:
        """The row, which no copy has."""
        row = self.rows.get(key)
        if row is None or key not in self._ours:
            row = self.rows[key] = {} if row is None else row.copy()
            self._ours.add(key)
        return row


OffsetRows = Rows[int]


class _WrittenOffsets(msgspec.Struct, rename="camel"):
    """What Apache writes: with the topics of each group, which nobody reads back."""

    data_version: DataVersion
    group_topic_map: dict[str, list[str]]
    offset_table: EncodedMap
    pull_offset_table: EncodedMap


class OffsetCopy(msgspec.Struct):
    """The table as it was."""

    data_version: DataVersion
    offsets: dict[Key, dict[int, int]]
    pulled: dict[Key, dict[int, int]]

    def written(self) -> _WrittenOffsets:
        """As it is written and told; any thread may ask."""
        topics: dict[str, list[str]] = {}
        for group, topic in self.offsets:
            topics.setdefault(group, []).append(topic)
        return _WrittenOffsets(self.data_version, topics, _encoded(self.offsets), _encoded(self.pulled))


def _encoded(table: dict[Key, dict[int, int]]) -> EncodedMap:
    rows = table.items()
    return EncodedMap([encode_entry(f"{topic}{SEPARATOR}{group}", row, pretty=True) for (group, topic), row in rows])
