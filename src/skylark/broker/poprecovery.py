"""What pops did between the last write of the tables and a crash, read from the log.

Consumer offsets and the state of pops in order are written every few seconds. Up to then the log knows more: a check
point says that its group has gone past its messages, unless it only gives one of them more time; a note about a pop in
order says where the group stands, a copy in a retry topic says that its message was revived. So after an unclean stop
the end of the log is read, from where it ended at the last write: what was acknowledged does not come back, and nothing
comes before its time.

What is said about a topic that was deleted afterwards counts no more: one of the same name has other messages. After a
power cut there may be gaps in the end of the log. A check point behind one moves its group on only from where the group
is known to have been.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

import msgspec

from skylark.broker.checkpoints import ORDER_TAG, decode_order_note
from skylark.broker.following import UNREADABLE, pass_over
from skylark.broker.internal import PROPERTY_EXTENDED, PROPERTY_LOG_END, PROPERTY_REVIVED
from skylark.broker.offsets import Offsets
from skylark.broker.orders import Orders
from skylark.broker.topics import DLQ_PREFIX, RETRY_PREFIX
from skylark.store import TIMER_TOPIC, Store
from skylark.store.segments import sync_directory
from skylark.wire.bodies import BadBody
from skylark.wire.message import PROPERTY_REAL_TOPIC, PROPERTY_TAGS, StoredMessage
from skylark.wire.numbers import java_long
from skylark.wire.pop import CHECK_POINT_TAG, REVIVE_TOPIC_PREFIX, decode_check_point
from skylark.wire.records import decode_properties

log = logging.getLogger(__name__)

_COPIES: Final = (RETRY_PREFIX, DLQ_PREFIX)
_AT_ONCE_MS: Final = 1_000


class PopProgress:
    """Where the log ended when the tables were written last: popProgress, which Apache's broker passes over.

    Two numbers if the copies that revived messages have to be known from further back than what else the log tells:
    that was taken in, with what was known of gaps then, and must not be once more.

    It is not brought to the disk by itself, but for the first time: a process that is killed leaves it whole, and after
    a power failure the log is read from its end, so that what the tables do not have is popped again.
    """

    def __init__(self, config_dir: Path, store: Store) -> None:
        self._path = config_dir / "popProgress"
        self._written = ""
        try:
            text = self._path.read_bytes().decode("ascii", "replace")
        except FileNotFoundError:
            text = ""
        numbers = [number for number in map(java_long, text.split(" ")[:2]) if number is not None]
        log_end = store.log_max_offset
        self.copies_from = min(numbers[0], log_end) if numbers else log_end
        self.rest_from = min(numbers[-1], log_end) if numbers else log_end
        if text and not numbers:
            log.warning("%s is damaged, and counts as missing", self._path)
        if not numbers:  # nothing was popped here yet, or not by us
            try:
                self.write(log_end, copies_needed=False)
            except OSError as e:
                log.warning("%s can't be written, which is tried again: %s", self._path, e)

    def write(self, log_offset: int, *, copies_needed: bool) -> None:
        """Notes that the tables on disk hold what happened up to here, but for the copies if those of before are still
        needed. Raises OSError.
        """
        text = f"{self.copies_from} {log_offset}" if copies_needed else str(log_offset)
        if text == self._written:
            return
        fresh = self._path.with_name(self._path.name + ".tmp")
        with fresh.open("w") as file:
            file.write(text)
            file.flush()
            if not self._written:
                os.fdatasync(file.fileno())
        fresh.replace(self._path)
        if not self._written:
            sync_directory(self._path.parent)
        self._written = text


def recover(store: Store, progress: PopProgress, offsets: Offsets, orders: Orders) -> set[str]:
    """Brings offsets and orders up to the log's end. Returns the marks of the copies that revived messages."""
    copied: set[str] = set()
    count = 0
    for topic in orders.topics():
        if 0 < progress.rest_from <= store.deleted_offset(topic):
            orders.remove_topics((topic,))  # it was deleted after the table was written
    for record in store.scan(max(progress.copies_from, store.log_min_offset)):
        topic = record.topic
        if topic.startswith(_COPIES):
            mark = decode_properties(record.properties_data).get(PROPERTY_REVIVED)
            if mark is not None:
                copied.add(mark)
        elif record.log_offset < progress.rest_from:
            continue
        elif topic == TIMER_TOPIC or topic.startswith(REVIVE_TOPIC_PREFIX):
            properties = decode_properties(record.properties_data)
            if properties.get(PROPERTY_REAL_TOPIC, topic).startswith(REVIVE_TOPIC_PREFIX):
                message = store.message_at(record.log_offset)
                if message is not None:
                    count += _replay(store, message, offsets, orders)
    if count or copied:
        log.info("pops: %d check points and notes, %d revived messages since the last write", count, len(copied))
    return copied


def _replay(store: Store, message: StoredMessage, offsets: Offsets, orders: Orders) -> int:
    tag = message.properties.get(PROPERTY_TAGS)
    # What comes from a timer tells of the time before it.
    log_end = java_long(message.properties.get(PROPERTY_LOG_END)) or message.log_offset
    try:
        if tag == CHECK_POINT_TAG and PROPERTY_EXTENDED not in message.properties:
            point = decode_check_point(message.body)
            if message.store_timestamp_ms - point.pop_time_ms > _AT_ONCE_MS:
                return 0  # it came from its timer: it tells of a pop that may be before the last reset
            if log_end < store.deleted_offset(point.topic):
                return 0
            behind = point.offsets[-1] + 1 if point.offsets else point.start_offset
            behind = min(behind, store.max_offset(point.topic, point.queue_id))
            known = offsets.query(point.group, point.topic, point.queue_id)
            if message.log_offset >= store.whole_until and point.start_offset > max(known, 0):
                return 0  # the check point of what lies between may be lost: all of it is popped again
            if behind > known:
                offsets.put(point.group, point.topic, point.queue_id, behind)
            return 1
        if tag == ORDER_TAG:
            note = decode_order_note(message.body)
            if log_end < store.deleted_offset(note.topic):
                return 0
            orders.put(note.topic, note.group, note.queue_id, note.info)
            next_offset = min(note.next_offset, store.max_offset(note.topic, note.queue_id))
            offsets.put(note.group, note.topic, note.queue_id, next_offset)
            return 1
    except (BadBody, msgspec.DecodeError, *UNREADABLE) as e:
        pass_over(message.topic, message.queue_id, message.queue_offset, e)
    return 0
