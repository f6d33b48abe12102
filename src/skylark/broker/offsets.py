"""How far each group has consumed each queue: the table in consumerOffset.json.

Offsets change with every pull, so they are written every few seconds and at the end, not with each change: after a
crash consumers go back to what was written last and see some messages again. What is written is held until the log is
on disk as far as it was then (see `held`): offsets never are ahead of the log, also after a power cut.

The offsets of a topic that is deleted go at once, from the disk as well: a topic that is made under its name begins at
0, and whoever was further in the former one must not pass over its messages after a crash.

A queue's offset may also be reset by an operator. Until a consumer of the queue has been sent to the new offset, which
`take_reset` settles, that one is what counts and what consumers commit is passed over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.store.tables import BadTable, ConsumerOffsetTable, load, save
from skylark.wire import fastjson
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import QueryConsumerOffset, UpdateConsumerOffset
from skylark.wire.numbers import Int, Long
from skylark.wire.tables import MAX_QUEUES, DataVersion
from skylark.wire.typed import decode_header

log = logging.getLogger(__name__)

UNKNOWN: Final = -1
MAX_OFFSETS: Final = 1_000_000
"""Of all groups together; also of those that are kept in memory only."""

SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"
_SEPARATOR: Final = "@"
_Key = tuple[str, str]
"""Group and topic."""


def is_of_broker(group: str) -> bool:
    """Whether an offset says how far the broker itself is in a queue of its own."""
    return group.startswith(SYSTEM_GROUP_PREFIX)


def refuse_of_broker(group: str) -> None:
    """For whoever asks to move an offset. Raises RequestFailed: transactions and pops would be lost with it."""
    if is_of_broker(group):
        raise RequestFailed(ResponseCode.NO_PERMISSION, f"the offsets of group {group} are the broker's own")


class WrittenOffsets(msgspec.Struct, rename="camel"):
    """What Apache writes: with the topics of each group, which nobody reads back."""

    data_version: DataVersion
    group_topic_map: dict[str, list[str]]
    offset_table: dict[str, dict[Int, Long]]
    pull_offset_table: dict[str, dict[Int, Long]]


class Offsets:
    """Consumer offsets by group, topic and queue."""

    def __init__(self, config_dir: Path) -> None:
        self._path = config_dir / "consumerOffset.json"
        stored = load(self._path, ConsumerOffsetTable) or ConsumerOffsetTable()
        self.data_version = stored.data_version
        self._unsaved = False
        self._captured: WrittenOffsets | None = None  # the one that is not written yet
        self._resets: dict[_Key, dict[int, int]] = {}
        self._pulled: dict[_Key, dict[int, int]] = {}
        self._offsets: dict[_Key, dict[int, int]] = {}
        for name, offsets in stored.offset_table.items():
            topic, is_pair, group = name.partition(_SEPARATOR)
            if is_pair:
                self._offsets[group, topic] = offsets
        self._count = sum(map(len, self._offsets.values()))

    def query(self, group: str, topic: str, queue_id: int) -> int:
        """The offset to consume next, -1 if there is none."""
        reset = self._resets.get((group, topic))
        if reset is not None and queue_id in reset:
            return reset[queue_id]
        return self._offsets.get((group, topic), {}).get(queue_id, UNKNOWN)

    def commit(self, group: str, topic: str, queue_id: int, offset: int, peer: str) -> None:
        """Takes a consumer's word for where it is, even if that is further back."""
        if not is_of_broker(group) and self.has_reset(group, topic, queue_id):
            log.info("%s commits %s %s-%d after an operator's reset: passed over", peer, group, topic, queue_id)
            return
        old = self._set(self._offsets, (group, topic), queue_id, offset)
        if old is not None and offset < old:
            log.warning("%s moves %s %s-%d back from %d to %d", peer, group, topic, queue_id, old, offset)

    def pulled(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """How far a consumer has read, which is before it has consumed; kept in memory only."""
        self._set(self._pulled, (group, topic), queue_id, offset)

    def query_pulled(self, group: str, topic: str, queue_id: int) -> int:
        offset = self._pulled.get((group, topic), {}).get(queue_id)
        return self.query(group, topic, queue_id) if offset is None else offset

    def reset(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Sends the queue's consumers to `offset`: those of now with their next pull, later ones from the start."""
        self._set(self._resets, (group, topic), queue_id, offset)
        self._set(self._offsets, (group, topic), queue_id, offset)

    def has_reset(self, group: str, topic: str, queue_id: int) -> bool:
        return queue_id in self._resets.get((group, topic), ())

    def take_reset(self, group: str, topic: str, queue_id: int) -> int | None:
        """The offset that a consumer must be sent to now; asked once, it is settled."""
        resets = self._resets.get((group, topic))
        if resets is None:
            return None
        offset = resets.pop(queue_id, None)
        self._count -= offset is not None
        if not resets:
            del self._resets[group, topic]
        return offset

    def of(self, group: str, topic: str) -> Mapping[int, int]:
        """Offsets by queue; empty if there are none."""
        return self._offsets.get((group, topic), {})

    def topics_of(self, group: str) -> set[str]:
        return {topic for owner, topic in self._offsets if owner == group}

    def topics_by_group(self) -> dict[str, list[str]]:
        """The same for all groups, in one pass."""
        topics: dict[str, list[str]] = {}
        for group, topic in self._offsets:
            topics.setdefault(group, []).append(topic)
        return topics

    def groups_of(self, topic: str) -> set[str]:
        return {group for group, subject in self._offsets if subject == topic}

    def clone(self, source_group: str, target_group: str, topic: str) -> None:
        """Raises RequestFailed if there is no room for so many."""
        offsets = self._offsets.get((source_group, topic))
        if offsets is not None:
            more = len(offsets) - len(self._offsets.get((target_group, topic), ()))
            if more > 0 and self._count + more > MAX_OFFSETS:
                raise RequestFailed(
                    ResponseCode.SYSTEM_ERROR,
                    f"the offsets of {source_group} in {topic} are not copied: the broker keeps {self._count} offsets, "
                    f"and takes {MAX_OFFSETS}",
                )
            self._count += more
            self._offsets[target_group, topic] = dict(offsets)
            self._unsaved = True

    def remove_group(self, group: str) -> None:
        self._remove(lambda key: key[0] == group)

    def remove_topics(self, topics: Collection[str]) -> None:
        """Forgets topics that are deleted, also on disk. Raises OSError, and has forgotten nothing then."""
        self._remove_on_disk(topics)
        if self._captured is not None:
            _drop(topics, self._captured)
        self._remove(lambda key: key[1] in topics)

    def encode(self) -> bytes:
        """The whole table as JSON, for GET_ALL_CONSUMER_OFFSET."""
        return fastjson.dumps(self._written())

    def capture(self) -> WrittenOffsets | None:
        """A copy of the table, to be written soon; None if it did not change since the last one."""
        if not self._unsaved:
            return None
        self._unsaved = False
        self.data_version.counter += 1
        self._captured = self._written()
        return self._captured

    def write(self, table: WrittenOffsets) -> None:
        """Raises OSError."""
        save(self._path, table)
        if table is self._captured:
            self._captured = None

    def save(self) -> None:
        """Writes the table now, if it changed. Raises OSError."""
        table = self.capture()
        if table is not None:
            self.write(table)

    def keep_within(self, max_offset: Callable[[str, int], int]) -> None:
        """Moves what is ahead of its queue to the queue's end, at the start: the next messages are to be consumed."""
        for (group, topic), offsets in self._offsets.items():
            for queue_id, offset in offsets.items():
                end = max_offset(topic, queue_id)
                if offset > end:
                    log.warning(
                        "%s is at %d in %s-%d, which ends at %d: it goes on there", group, offset, topic, queue_id, end
                    )
                    offsets[queue_id] = end
                    self._unsaved = True

    def _set(self, table: dict[_Key, dict[int, int]], key: _Key, queue_id: int, offset: int) -> int | None:
        """Puts the offset in; the former one."""
        offsets = table.get(key)
        old = offsets.get(queue_id) if offsets is not None else None
        if old is None:
            # Whoever names queues that don't exist can't fill the memory with them.
            if queue_id < 0 or self._count >= MAX_OFFSETS or (offsets is not None and len(offsets) >= MAX_QUEUES):
                log.warning("%s has no queue %d of %s: its offset is passed over", key[0], queue_id, key[1])
                return None
            self._count += 1
        if offsets is None:
            offsets = table[key] = {}
        if old != offset:
            offsets[queue_id] = offset
            self._unsaved = self._unsaved or table is self._offsets
        return old

    def _remove(self, is_gone: Callable[[_Key], bool]) -> None:
        for table in (self._offsets, self._resets, self._pulled):
            for key in [key for key in table if is_gone(key)]:
                self._count -= len(table.pop(key))
                self._unsaved = True

    def _remove_on_disk(self, topics: Collection[str]) -> None:
        """Takes topics out of the table that was written last: the newer offsets of the others may have to wait."""
        try:
            stored = load(self._path, ConsumerOffsetTable)
        except BadTable as e:
            log.error("offsets are written anew: %s", e)  # with the next turn; nobody can read these before
            return
        if stored is None:
            return
        table = WrittenOffsets(stored.data_version, {}, stored.offset_table, stored.pull_offset_table)
        if _drop(topics, table):
            save(self._path, table)

    def _written(self) -> WrittenOffsets:
        offsets = _joined(self._offsets)
        return WrittenOffsets(replace(self.data_version), _topics_by_group(offsets), offsets, _joined(self._pulled))


def _topics_by_group(offset_table: dict[str, dict[int, int]]) -> dict[str, list[str]]:
    topics: dict[str, list[str]] = {}
    for name in offset_table:
        topic, _, group = name.partition(_SEPARATOR)
        topics.setdefault(group, []).append(topic)
    return topics


def _drop(topics: Collection[str], table: WrittenOffsets) -> bool:
    """Takes the rows of topics out of a table; whether there were any."""
    found = False
    for rows in (table.offset_table, table.pull_offset_table):
        for name in [name for name in rows if name.partition(_SEPARATOR)[0] in topics]:
            del rows[name]
            found = True
    table.group_topic_map = _topics_by_group(table.offset_table)
    return found


def _joined(table: dict[_Key, dict[int, int]]) -> dict[str, dict[int, int]]:
    return {f"{topic}{_SEPARATOR}{group}": dict(offsets) for (group, topic), offsets in table.items()}


FindBeginning = Callable[[Connection, str, str, int], int]
"""Given who asks, a group without an offset, a topic and a queue, the offset to tell, or -1."""


def handlers(
    offsets: Offsets, find_beginning: FindBeginning, topics: Container[str], groups: Container[str]
) -> dict[int, Handler]:
    requests = _OffsetRequests(offsets, find_beginning, topics, groups)
    return {
        RequestCode.QUERY_CONSUMER_OFFSET: requests.query,
        RequestCode.UPDATE_CONSUMER_OFFSET: requests.update,
        RequestCode.GET_ALL_CONSUMER_OFFSET: requests.get_all,
    }


class _OffsetRequests:
    def __init__(
        self, offsets: Offsets, find_beginning: FindBeginning, topics: Container[str], groups: Container[str]
    ) -> None:
        self._offsets = offsets
        self._find_beginning = find_beginning
        self._topics = topics
        self._groups = groups

    def query(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(QueryConsumerOffset, request)
        offset = self._offsets.query(header.consumer_group, header.topic, header.queue_id)
        if offset < 0:
            if header.set_zero_if_not_found is False:
                raise RequestFailed(
                    ResponseCode.QUERY_NOT_FOUND, "Not found, do not set to zero, maybe this group boot first"
                )
            offset = self._find_beginning(connection, header.consumer_group, header.topic, header.queue_id)
        if offset < 0:
            raise RequestFailed(
                ResponseCode.QUERY_NOT_FOUND, "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first"
            )
        return request.reply(fields={"offset": str(offset)})

    def update(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(UpdateConsumerOffset, request)
        group, topic, queue_id = header.consumer_group, header.topic, header.queue_id
        refuse_of_broker(group)
        if group not in self._groups:
            raise RequestFailed(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {group} not exist!")
        if topic not in self._topics:
            raise RequestFailed(ResponseCode.TOPIC_NOT_EXIST, f"Topic {topic} not exist!")
        if self._offsets.has_reset(group, topic, queue_id):
            return request.reply(remark="Offset has been previously reset")
        self._offsets.commit(group, topic, queue_id, header.commit_offset, repr(connection))
        return request.reply()

    def get_all(self, request: Frame, _: Connection) -> Frame:
        return request.reply(body=self._offsets.encode())
