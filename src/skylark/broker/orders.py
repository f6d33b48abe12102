"""Pops in order: what of each queue is in a group's hands, the table in consumerOrderInfo.json.

A queue that a group pops in order is blocked from a pop until each message of it is acknowledged or its time has
passed; then the queue is popped again from the first message that was not acknowledged. The group's offset stands at
that message, so that what comes back is simply read again; nothing is copied to a retry topic.

The table is written every few seconds; between two writes, `checkpoints.py` notes each change in the log.

How many queues it has is bounded, and divided among the hosts that pop (`shares.py`): a queue stays for a day, or for
as long as its messages are in somebody's hands. A queue that is in the table can always be popped again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from skylark.broker.groups import Groups
from skylark.broker.offset_rows import Key, Rows
from skylark.broker.shares import Shares
from skylark.broker.topics import Topics
from skylark.store.tables import load, save
from skylark.wire.numbers import Int, Long
from skylark.wire.pop import encode_offset_order_count, encode_queue_order_count

log = logging.getLogger(__name__)

MAX_COMMIT_BITS: Final = 64
_MOST_AHEAD_MS: Final = 5_000
_FORGET_AFTER_MS: Final = 24 * 3_600_000
_MOST_A_CLEANING: Final = 4_096
MAX_INFOS: Final = 262_144
"""Each takes less than half a KB."""


class OrderInfo(msgspec.Struct, kw_only=True):
    """One pop of one queue. `offsets`: the first one, and the distances of the others from it, as Apache keeps them.

    It is not changed but replaced: a copy of the table, which a thread writes, has the same infos.
    """

    attempt_id: str | None = msgspec.field(name="a", default=None)
    committed: Long = msgspec.field(name="cm", default=0)
    invisible_ms: Long | None = msgspec.field(name="i", default=None)
    last_consume_ms: Long = msgspec.field(name="l", default=0)
    offsets: list[Long] = msgspec.field(name="o", default_factory=list)
    consumed_counts: dict[Long, Int] | None = msgspec.field(name="oc", default=None)
    visible_at: dict[Long, Long] | None = msgspec.field(name="ot", default=None)
    pop_time_ms: Long = msgspec.field(name="popTime", default=0)

    @property
    def queue_offsets(self) -> list[int]:
        first = self.offsets[:1]
        return first + [first[0] + distance for distance in self.offsets[1:]]

    def free_at_ms(self) -> int:
        """When the last message that is not acknowledged may be popped again; 0 if all are."""
        times = [
            (self.visible_at or {}).get(offset, self.pop_time_ms + (self.invisible_ms or 0))
            for index, offset in enumerate(self.queue_offsets)
            if not self.committed >> index & 1
        ]
        return max(times, default=0)

    def counted_from(self, now_ms: int) -> OrderInfo:
        """A pop that is yet to come was made by a clock that was ahead: its messages' time begins now instead."""
        free_at_ms = now_ms + (self.invisible_ms or 0)
        times = dict(self.visible_at or {})
        for offset in self.queue_offsets:
            if times.get(offset, self.pop_time_ms + (self.invisible_ms or 0)) > free_at_ms + _MOST_AHEAD_MS:
                times[offset] = free_at_ms
        return replace(self, visible_at=times)

    def next_offset(self) -> int:
        """The first message that is not acknowledged, else the one behind the last."""
        offsets = self.queue_offsets
        for index, offset in enumerate(offsets):
            if not self.committed >> index & 1:
                return offset
        return offsets[-1] + 1

    def popped_again(self, offsets: Sequence[int], attempt_id: str | None) -> dict[int, int]:
        """How often each of `offsets` was handed out before, if it was; the same attempt does not count twice."""
        counts = self.consumed_counts or {}
        if self.attempt_id is not None and self.attempt_id == attempt_id:
            return counts
        before = set(self.queue_offsets) if self.offsets else set()
        return {offset: counts.get(offset, 0) + 1 for offset in offsets if offset in before}


class WrittenOrders(msgspec.Struct, rename="camel"):
    order_info_count: Int = 0
    ordered_consumption_level: str = "QUEUE"
    table: dict[str, dict[Int, OrderInfo]] = {}


class OrderCopy(NamedTuple):
    """The table as it was, by topic and group."""

    infos: dict[Key, dict[int, OrderInfo]]

    def written(self) -> WrittenOrders:
        """As it is written; any thread may ask."""
        table = {f"{topic}@{group}": infos for (topic, group), infos in self.infos.items()}
        return WrittenOrders(len(table), table=table)


class Orders:
    """Order infos by topic, group and queue."""

    def __init__(self, config_dir: Path) -> None:
        self._path = config_dir / "consumerOrderInfo.json"
        # Without it, what was popped in order may be popped again: that is all.
        stored = load(self._path, WrittenOrders, expendable=True) or WrittenOrders()
        self._infos: Rows[OrderInfo] = Rows()
        self._count = 0
        self._shares = Shares()
        self._hosts: dict[Key, str] = {}  # whose share the queues of a topic and a group count for
        for name, infos in stored.table.items():
            topic, is_pair, group = name.partition("@")
            if is_pair:
                self._infos.put_row((topic, group), infos)
                self._count += len(infos)
        self._unsaved = False
        self._to_clean: list[Key] = []

    def get(self, topic: str, group: str, queue_id: int) -> OrderInfo | None:
        return self._infos.rows.get((topic, group), {}).get(queue_id)

    def has_room(self, topic: str, group: str, queue_id: int, host: str) -> bool:
        """Whether a client on `host` may pop the queue for the group."""
        if self.get(topic, group, queue_id) is not None:
            return True
        return self._shares.has_room(self._hosts.get((topic, group), host), 1, MAX_INFOS - self._count - 1)

    def fullness(self, host: str) -> str:
        return f"those of {host} hold {self._shares.held(host)} of {MAX_INFOS} queues, all {self._count}"

    def put(self, topic: str, group: str, queue_id: int, info: OrderInfo | None, host: str = "") -> None:
        """What recovery found in the log or a client on `host` popped, or None to unblock the queue."""
        self._unsaved = True
        key = topic, group
        if info is None:
            if self._infos.remove(key, queue_id):
                self._add(key, -1)
            return
        if key not in self._infos.rows:
            self._hosts[key] = host
        if self.get(topic, group, queue_id) is None:
            self._add(key, 1)
        self._infos.put(key, queue_id, info)

    def _add(self, key: Key, more: int) -> None:
        self._count += more
        self._shares.add(self._hosts.get(key, ""), more)

    def _forget(self, key: Key) -> None:
        self._add(key, -len(self._infos.pop(key)))
        self._hosts.pop(key, None)
        self._unsaved = True

    def blocked_until_ms(self, topic: str, group: str, queue_id: int, attempt_id: str | None, now_ms: int) -> int:
        """When the queue can be popped again; 0 if that is now. The attempt that took the messages may be repeated."""
        info = self.get(topic, group, queue_id)
        if info is None or not info.offsets or (info.attempt_id is not None and info.attempt_id == attempt_id):
            return 0
        if info.pop_time_ms > now_ms + _MOST_AHEAD_MS:
            info = info.counted_from(now_ms)
            self.put(topic, group, queue_id, info)
        free_at_ms = info.free_at_ms()
        return free_at_ms if now_ms < free_at_ms else 0

    def popped(
        self,
        topic: str,
        group: str,
        queue_id: int,
        attempt_id: str | None,
        now_ms: int,
        invisible_ms: int,
        offsets: Sequence[int],
    ) -> tuple[OrderInfo, str]:
        """What blocks the queue from now on, to be `put`, and its entries of the answer's `orderCountInfo`."""
        old = self.get(topic, group, queue_id)
        counts = old.popped_again(offsets, attempt_id) if old is not None else None
        info = OrderInfo(
            attempt_id=attempt_id,
            invisible_ms=invisible_ms,
            last_consume_ms=now_ms,
            offsets=[offsets[0], *(offset - offsets[0] for offset in offsets[1:])],
            consumed_counts=counts,
            pop_time_ms=now_ms,
        )
        entries = [encode_offset_order_count(topic, queue_id, each, count) for each, count in (counts or {}).items()]
        least = min(counts.values()) if counts and len(counts) == len(offsets) else 0
        return info, ";".join([*entries, encode_queue_order_count(topic, queue_id, least)])

    def acknowledged(self, topic: str, group: str, queue_id: int, offset: int, pop_time_ms: int) -> int:
        """The group's next offset after an acknowledgement; -1 for a message that it doesn't hold, -2 for one of an
        earlier pop.
        """
        info = self.get(topic, group, queue_id)
        if info is None or not info.offsets:
            return -1
        if info.pop_time_ms != pop_time_ms:
            return -2
        offsets = info.queue_offsets
        if offset not in offsets:
            return -1
        info = replace(info, committed=info.committed | 1 << offsets.index(offset))
        self.put(topic, group, queue_id, info)
        return info.next_offset()

    def extended(
        self, topic: str, group: str, queue_id: int, offset: int, pop_time_ms: int, visible_at_ms: int
    ) -> bool:
        """Notes another time for one message; False if this pop is not the one that holds the queue."""
        info = self.get(topic, group, queue_id)
        if info is None or info.pop_time_ms != pop_time_ms:
            return False
        # Bounded: only messages that the pop handed out are noted.
        if offset in info.queue_offsets:
            times = (info.visible_at or {}) | {offset: visible_at_ms}
            self.put(topic, group, queue_id, replace(info, visible_at=times))
        return True

    def topics(self) -> set[str]:
        return {topic for topic, _ in self._infos.rows}

    def remove_topics(self, names: Collection[str]) -> None:
        """Forgets deleted topics: one that is made under such a name has other messages at the same offsets."""
        for key in [key for key in self._infos.rows if key[0] in names]:
            self._forget(key)

    def clean(self, topics: Topics, groups: Groups, now_ms: int) -> None:
        """Forgets topics, groups and queues that are gone, what nobody popped for a day and, when there are many, those
        of which all is acknowledged. Looks at a part each time: it is called often, and there may be many.
        """
        looked_at = 0
        self._to_clean = self._to_clean or list(self._infos.rows)
        while self._to_clean and looked_at < _MOST_A_CLEANING:
            topic, group = self._to_clean.pop()
            infos = self._infos.rows.get((topic, group), {})
            looked_at += max(1, len(infos))
            config = topics.get(topic) if group in groups else None
            for queue_id, info in list(infos.items()):
                is_old = now_ms - info.last_consume_ms > _FORGET_AFTER_MS
                is_settled = self._count > MAX_INFOS // 4 and not info.free_at_ms()
                if config is None or queue_id >= config.read_queue_nums or is_old or is_settled:
                    self.put(topic, group, queue_id, None)
                elif info.pop_time_ms > now_ms + _MOST_AHEAD_MS:
                    self.put(topic, group, queue_id, info.counted_from(now_ms))
            if self._infos.rows.get((topic, group)) == {}:
                self._forget((topic, group))

    def capture(self) -> OrderCopy | None:
        """A copy of the table, to be written soon; None if it did not change since the last one."""
        if not self._unsaved:
            return None
        self._unsaved = False
        return OrderCopy(self._infos.copy())

    def write(self, table: OrderCopy) -> None:
        """In any thread. Raises OSError."""
        save(self._path, table.written())

    def save(self) -> None:
        """Writes the table now, if it changed. Raises OSError."""
        table = self.capture()
        if table is not None:
            self.write(table)
