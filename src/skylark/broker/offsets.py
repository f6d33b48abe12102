"""How far each group has consumed each queue: the table in consumerOffset.json.

Offsets change with every pull, so they are written every few seconds and at the end, not with each change: after a
crash consumers go back to what was written last and see some messages again. What is written is held until the log is
on disk as far as it was then (see `held`): offsets never are ahead of the log, also after a power cut.

The offsets of a topic that is deleted go at once, from the disk as well: a topic that is made under its name begins at
0, and whoever was further in the former one must not pass over its messages after a crash. So the file deletedOffsets
says of which topics a table up to some version counts no more, also one that a thread is just writing. What the table
and its backup do not need any more goes from there.

A queue's offset may also be reset by an operator. Until a consumer of the queue has been sent to the new offset, which
`take_reset` settles, that one is what counts and what consumers commit is passed over.

A new offset for which there is no room (see `offset_room`) is refused; those that the broker itself commits never are.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Container, Mapping
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from skylark.broker.offset_room import MAX_OFFSETS, OffsetRoom, room_of, room_of_next
from skylark.broker.offset_rows import SEPARATOR, Key, OffsetCopy, OffsetRows
from skylark.broker.turns import beside
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.store.deleted import DeletedTopics
from skylark.store.tables import ConsumerOffsetTable, load, save
from skylark.wire import fastjson
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import QueryConsumerOffset, UpdateConsumerOffset
from skylark.wire.typed import decode_header

log = logging.getLogger(__name__)

UNKNOWN: Final = -1
SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"


def is_of_broker(group: str) -> bool:
    """Whether an offset says how far the broker itself is in a queue of its own."""
    return group.startswith(SYSTEM_GROUP_PREFIX)


def refuse_of_broker(group: str) -> None:
    """For whoever asks to move an offset. Raises RequestFailed: transactions and pops would be lost with it."""
    if is_of_broker(group):
        raise RequestFailed(ResponseCode.NO_PERMISSION, f"the offsets of group {group} are the broker's own")


class Offsets:
    """Consumer offsets by group, topic and queue."""

    def __init__(self, config_dir: Path) -> None:
        self._path = config_dir / "consumerOffset.json"
        self._deleted = DeletedTopics(config_dir / "deletedOffsets")
        self._offsets = OffsetRows()
        self._pulled = OffsetRows()
        self._room_of_pulled = 0
        self._resets: dict[Key, dict[int, int]] = {}  # each of which is an offset too
        self._room = OffsetRoom()
        found = load(self._path, ConsumerOffsetTable)
        self.is_new = self._unsaved = found is None  # written even if it stays empty, so that a lost one is missed
        stored = found or ConsumerOffsetTable()
        self.data_version = stored.data_version
        self._version_on_disk = max(0, self.data_version.counter)
        for name, offsets in stored.offset_table.items():
            topic, is_pair, group = name.partition(SEPARATOR)
            if is_pair and self._version_on_disk >= self._deleted.offset(topic):
                self._offsets.put_row((group, topic), offsets)
                self._room.take(group, room_of(offsets))
            else:
                self._unsaved = True
        # Also for a table that somebody moved away: what is written from now on is not what was deleted.
        self.data_version.counter = max(self._version_on_disk, self._deleted.highest)

    def query(self, group: str, topic: str, queue_id: int) -> int:
        """The offset to consume next, -1 if there is none."""
        reset = self._resets.get((group, topic))
        if reset is not None and queue_id in reset:
            return reset[queue_id]
        return self.of(group, topic).get(queue_id, UNKNOWN)

    def commit(self, group: str, topic: str, queue_id: int, offset: int, peer: object) -> None:
        """Takes a consumer's word for where it is, even if that is further back. Raises RequestFailed if that would be
        one more offset than there is room for.
        """
        if is_of_broker(group):
            self.put(group, topic, queue_id, offset)
            return
        if self.has_reset(group, topic, queue_id):
            log.info("%s commits %s %s-%d after an operator's reset: passed over", peer, group, topic, queue_id)
            return
        key = group, topic
        row = self._offsets.rows.get(key)
        old = None if row is None else row.get(queue_id)
        if old == offset:
            return
        if old is None:
            self._check_room(group, topic, queue_id)
            self._room.take(group, room_of_next(row))
        elif offset < old:
            log.warning("%s moves %s %s-%d back from %d to %d", peer, group, topic, queue_id, old, offset)
        self._offsets.put(key, queue_id, offset)
        self._unsaved = True

    def put(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """What the broker knows itself: it is kept in any case."""
        key = group, topic
        row = self._offsets.rows.get(key)
        if row is None or queue_id not in row:
            self._room.take(group, room_of_next(row))
        elif row[queue_id] == offset:
            return
        self._offsets.put(key, queue_id, offset)
        self._unsaved = True

    def pulled(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """How far a consumer has read, which is before it has consumed; kept in memory only."""
        key = group, topic
        row = self._pulled.rows.get(key)
        if row is None or queue_id not in row:
            self._room_of_pulled += room_of_next(row)
            if self._room_of_pulled > MAX_OFFSETS:  # the next pulls tell it again, of those who still pull
                self._pulled, self._room_of_pulled = OffsetRows(), room_of_next(None)
        self._pulled.put(key, queue_id, offset)

    def query_pulled(self, group: str, topic: str, queue_id: int) -> int:
        offset = self._pulled.rows.get((group, topic), {}).get(queue_id)
        return self.query(group, topic, queue_id) if offset is None else offset

    def reset(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Sends the queue's consumers to `offset`: those of now with their next pull, later ones from the start. Raises
        RequestFailed if there is no room for it.
        """
        if queue_id not in self.of(group, topic):
            self._check_room(group, topic, queue_id)
        self.put(group, topic, queue_id, offset)
        self._resets.setdefault((group, topic), {})[queue_id] = offset

    def has_reset(self, group: str, topic: str, queue_id: int) -> bool:
        return queue_id in self._resets.get((group, topic), ())

    def take_reset(self, group: str, topic: str, queue_id: int) -> int | None:
        """The offset that a consumer must be sent to now; asked once, it is settled."""
        resets = self._resets.get((group, topic))
        if resets is None:
            return None
        offset = resets.pop(queue_id, None)
        if not resets:
            del self._resets[group, topic]
        return offset

    def of(self, group: str, topic: str) -> Mapping[int, int]:
        """Offsets by queue; empty if there are none."""
        return self._offsets.rows.get((group, topic), {})

    def topics_of(self, group: str) -> set[str]:
        return {topic for owner, topic in self._offsets.rows if owner == group}

    def topics_by_group(self) -> dict[str, list[str]]:
        """The same for all groups, in one pass."""
        topics: dict[str, list[str]] = {}
        for group, topic in self._offsets.rows:
            topics.setdefault(group, []).append(topic)
        return topics

    def groups_of(self, topic: str) -> set[str]:
        return {group for group, subject in self._offsets.rows if subject == topic}

    def clone(self, source_group: str, target_group: str, topic: str) -> None:
        """Raises RequestFailed if there is no room for so many."""
        offsets = self._offsets.rows.get((source_group, topic))
        if offsets is not None:
            more = room_of(offsets) - room_of(self._offsets.rows.get((target_group, topic)))
            self._room.check_all(more, f"the offsets of {source_group} in {topic} are not copied")
            self._room.take(target_group, more)
            self._offsets.put_row((target_group, topic), offsets)
            self._unsaved = True
            for queue_id in self._resets.get((target_group, topic), {}).keys() - offsets.keys():
                self.take_reset(target_group, topic, queue_id)

    def group_deleted(self, group: str, *, with_offsets: bool) -> None:
        """Offsets that are not to go with their group are nevertheless not kept if there is no room for such."""
        if with_offsets or self._room.is_crowded:
            self._remove(lambda key: key[0] == group)

    def remove_topics(self, topics: Collection[str]) -> None:
        """Forgets topics that are deleted, also on disk. Raises OSError, and has forgotten nothing then."""
        self._deleted.add(topics, self.data_version.counter + 1)
        self._remove(lambda key: key[1] in topics)

    def copy(self) -> OffsetCopy:
        return OffsetCopy(replace(self.data_version), self._offsets.copy(), self._pulled.copy())

    def capture(self) -> OffsetCopy | None:
        """A copy of the table, to be written soon; None if it did not change since the last one."""
        if not self._unsaved:
            return None
        self._unsaved = False
        self.data_version.counter += 1
        return self.copy()

    def write(self, table: OffsetCopy) -> None:
        """In any thread. Raises OSError."""
        save(self._path, table.written())

    def written(self, table: OffsetCopy) -> None:
        """It is on disk: what is said of tables before the one that it replaced counts no more."""
        replaced, self._version_on_disk = self._version_on_disk, table.data_version.counter
        try:
            self._deleted.keep_within(replaced, sys.maxsize)
        except OSError as e:
            log.warning("topics whose offsets are deleted are kept in mind, until the next write: %s", e)

    def save(self) -> None:
        """Writes the table now, if it changed. Raises OSError."""
        table = self.capture()
        if table is not None:
            self.write(table)
            self.written(table)

    def keep_within(self, max_offset: Callable[[str, int], int]) -> None:
        """Moves what is ahead of its queue to the queue's end, at the start: the next messages are to be consumed."""
        for (group, topic), offsets in self._offsets.copy().items():
            for queue_id, offset in offsets.items():
                end = max_offset(topic, queue_id)
                if offset > end:
                    log.warning(
                        "%s is at %d in %s-%d, which ends at %d: it goes on there", group, offset, topic, queue_id, end
                    )
                    self.put(group, topic, queue_id, end)

    def _check_room(self, group: str, topic: str, queue_id: int) -> None:
        more = room_of_next(self._offsets.rows.get((group, topic)))
        self._room.check(group, more, f"the offset of {group} in {topic}-{queue_id} is not kept")

    def _remove(self, is_gone: Callable[[Key], bool]) -> None:
        for key in [key for key in self._offsets.rows if is_gone(key)]:
            self._room.take(key[0], -room_of(self._offsets.pop(key)))
            self._resets.pop(key, None)
            self._unsaved = True
        for key in [key for key in self._pulled.rows if is_gone(key)]:
            self._room_of_pulled -= room_of(self._pulled.pop(key))


FindBeginning = Callable[[Connection, str, str, int], int]
"""Given who asks, a group without an offset, a topic and a queue, the offset to tell, or -1."""


HasQueue = Callable[[str, int], bool]
"""Whether a topic that exists has a queue."""


def handlers(
    offsets: Offsets,
    find_beginning: FindBeginning,
    topics: Container[str],
    has_queue: HasQueue,
    groups: Container[str],
) -> dict[int, Handler]:
    requests = _OffsetRequests(offsets, find_beginning, topics, has_queue, groups)
    return {
        RequestCode.QUERY_CONSUMER_OFFSET: requests.query,
        RequestCode.UPDATE_CONSUMER_OFFSET: requests.update,
        RequestCode.GET_ALL_CONSUMER_OFFSET: requests.get_all,
    }


class _OffsetRequests:
    def __init__(
        self,
        offsets: Offsets,
        find_beginning: FindBeginning,
        topics: Container[str],
        has_queue: HasQueue,
        groups: Container[str],
    ) -> None:
        self._offsets = offsets
        self._find_beginning = find_beginning
        self._topics = topics
        self._has_queue = has_queue
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
        if queue_id not in self._offsets.of(group, topic) and not self._has_queue(topic, queue_id):
            remark = f"the offset of {group} is not kept: topic {topic} has no queue {queue_id} on this broker"
            log.warning("%r: %s", connection, remark)
            raise RequestFailed(ResponseCode.INVALID_PARAMETER, remark)
        self._offsets.commit(group, topic, queue_id, header.commit_offset, connection)
        return request.reply()

    async def get_all(self, request: Frame, _: Connection) -> Frame:
        table = self._offsets.copy()
        return request.reply(body=await beside(lambda: fastjson.dumps(table.written())))
