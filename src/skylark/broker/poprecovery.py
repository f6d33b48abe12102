"""What pops did between the last write of the tables and a crash, read from the log.

Consumer offsets and the state of pops in order are written every few seconds. Up to then the log knows more: a check
point says that its group has gone past its messages, a note about a pop in order says where the group stands, a copy
in a retry topic says that its message was revived. So after an unclean stop the end of the log is read, from where it
ended at the last write: what was acknowledged does not come back, and nothing comes before its time.

What is said about a topic that was deleted afterwards counts no more: one of the same name has other messages. After a
power cut there may be gaps in the end of the log. A check point behind one moves its group on only from where the group
is known to have been.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import msgspec

from skylark.broker.checkpoints import ORDER_TAG, decode_order_note
from skylark.broker.following import UNREADABLE, pass_over
from skylark.broker.internal import PROPERTY_LOG_END, PROPERTY_REVIVED
from skylark.broker.offsets import UNKNOWN, Offsets
from skylark.broker.orders import Orders
from skylark.broker.topics import DLQ_PREFIX, RETRY_PREFIX
from skylark.store import TIMER_TOPIC, Store
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

    It is not brought to the disk by itself: a process that is killed leaves it whole, and after a power failure the
    log is read from its end, so that what the tables do not have is popped again.
    """

    def __init__(self, config_dir: Path, store: Store) -> None:
        self._path = config_dir / "popProgress"
        self._written = UNKNOWN
        try:
            text = self._path.read_bytes().decode("ascii", "replace")
        except FileNotFoundError:
            text = ""
        written = java_long(text)
        self.log_offset = store.log_max_offset if written is None else min(written, store.log_max_offset)
        if text and written is None:
            log.warning("%s is damaged, and counts as missing", self._path)
        if written is None:  # nothing was popped here yet, or not by us
            self.write(self.log_offset)

    def write(self, log_offset: int) -> None:
        """Notes that the tables on disk hold what happened up to here. Raises OSError."""
        if log_offset != self._written:
            fresh = self._path.with_name(self._path.name + ".tmp")
            fresh.write_text(str(log_offset))
            fresh.replace(self._path)
            self._written = log_offset


def recover(store: Store, from_log_offset: int, offsets: Offsets, orders: Orders) -> set[str]:
    """Brings offsets and orders up to the log's end. Returns the marks of the copies that revived messages."""
    copied: set[str] = set()
    count = 0
    for topic in orders.topics():
        if 0 < from_log_offset <= store.deleted_offset(topic):
            orders.remove_topic(topic)  # it was deleted after the table was written
    for record in store.scan(max(from_log_offset, store.log_min_offset)):
        topic = record.topic
        if topic.startswith(_COPIES):
            mark = decode_properties(record.properties_data).get(PROPERTY_REVIVED)
            if mark is not None:
                copied.add(mark)
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
        if tag == CHECK_POINT_TAG:
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
                offsets.commit(point.group, point.topic, point.queue_id, behind, "recovery")
            return 1
        if tag == ORDER_TAG:
            note = decode_order_note(message.body)
            if log_end < store.deleted_offset(note.topic):
                return 0
            orders.put(note.topic, note.group, note.queue_id, note.info)
            next_offset = min(note.next_offset, store.max_offset(note.topic, note.queue_id))
            offsets.commit(note.group, note.topic, note.queue_id, next_offset, "recovery")
            return 1
    except (BadBody, msgspec.DecodeError, *UNREADABLE) as e:
        pass_over(message.topic, message.queue_id, message.queue_offset, e)
    return 0
