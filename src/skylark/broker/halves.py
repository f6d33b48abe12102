"""Half messages: what became of each transaction, and how that is kept in the store.

Apache's layout, so that a store with open transactions goes from one server to the other:

- RMQ_SYS_TRANS_HALF_TOPIC, queue 0: the half messages, each with its real topic and queue in its properties. One that
  the broker asks its producer for is stored again at the end: a new copy, which stands for the transaction from then
  on.
- RMQ_SYS_TRANS_OP_HALF_TOPIC, queue 0: the offsets of halves that were ended, several in one message (`17,18,21,`).
- The offsets of the group CID_RMQ_SYS_TRANS in both: every half before the first is ended or has a newer copy.

A transaction ends once, however often its end is asked for:

- From the group's offset on, one byte in memory says of each half whether and how it ended.
- The proof of a commit is the message itself, which names its half, so the op messages of commits may wait for each
  other, as Apache's do. A roll back leaves nothing else behind: its op message is stored before it is acknowledged.
- Halves from before a restart, and those that have newer copies, are looked up in the index by their unique key. Only
  without an index (`messageIndexEnable=false`) an end that comes after the broker has asked is done again, as Apache
  does it.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Iterator
from typing import Final

from skylark.broker.config import BrokerConfig
from skylark.broker.following import is_final, message_behind, pass_over
from skylark.broker.offsets import UNKNOWN, Offsets
from skylark.broker.put import Put
from skylark.broker.topics import HALF_TOPIC, OP_HALF_TOPIC, TRANSACTION_CHECK_TOPIC
from skylark.net.connection import RequestFailed
from skylark.store import Appended, Store
from skylark.wire.message import (
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TAGS,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_TRANSACTION_ID,
    PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET,
    PROPERTY_UNIQUE_KEY,
    PROPERTY_WAIT_STORE_OK,
    SYS_TRANSACTION_COMMIT,
    SYS_TRANSACTION_MASK,
    BadRecord,
    Message,
    StoredMessage,
)
from skylark.wire.numbers import java_long
from skylark.wire.records import decode_record

log = logging.getLogger(__name__)

GROUP: Final = "CID_RMQ_SYS_TRANS"
QUEUE: Final = 0
_REMOVE_TAG: Final = "d"
_PEER: Final = "the broker itself"
_MOST_COPIES: Final = 64
_CHECKS: Final = (PROPERTY_TRANSACTION_CHECK_TIMES, PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET)
_END_OF_TIME_MS: Final = 1 << 62


class Fate(enum.IntEnum):
    """What became of a transaction."""

    UNDECIDED = 0
    COMMITTED = 1
    ROLLED_BACK = 2
    ENDED = 3
    """one or the other; an op message does not tell"""
    DISCARDED = 4
    """asked for too often; its producer may still commit it"""


def become_half(message: Message) -> None:
    """Turns a producer's message into the half that waits for the end of its transaction."""
    properties = message.properties
    for name in _CHECKS:  # of another transaction, if the message was sent on with all its properties
        properties.pop(name, None)
    properties[PROPERTY_TRANSACTION_ID] = properties[PROPERTY_UNIQUE_KEY]
    properties[PROPERTY_REAL_TOPIC] = message.topic
    properties[PROPERTY_REAL_QUEUE_ID] = str(message.queue_id)
    message.topic = HALF_TOPIC
    message.queue_id = QUEUE


class Halves:
    """The transactions of one broker."""

    def __init__(self, store: Store, put: Put, offsets: Offsets, config: BrokerConfig, broker_host: bytes) -> None:
        self._store = store
        self._put = put
        self._offsets = offsets
        self._config = config
        self._broker_host = broker_host
        self.offset = self._start(HALF_TOPIC)
        self._fates = bytearray()  # of the halves from `offset` on; none beyond its end has ended
        self._op_offset = self._start(OP_HALF_TOPIC)
        self._op_tops: deque[int] = deque()  # the highest half that each op message from `_op_offset` on names
        self._unsure_below = store.max_offset(HALF_TOPIC, QUEUE)
        self._batch: list[int] = []
        self._batch_bytes = 0
        self._doubtful: list[int] = []  # halves that ended by what is behind a gap of the log
        self._recover()

    # Questions.

    @property
    def end_offset(self) -> int:
        return self._store.max_offset(HALF_TOPIC, QUEUE)

    def at(self, offset: int) -> StoredMessage | None:
        return message_behind(self._store, self._store.entry(HALF_TOPIC, QUEUE, offset), HALF_TOPIC, QUEUE, offset)

    def find(self, offset: int, log_offset: int) -> StoredMessage | None:
        """The half at a place that a client names; None if there is no half, whatever else there may be."""
        entry = self._store.entry(HALF_TOPIC, QUEUE, offset) if offset >= 0 else None
        if entry is None or entry.log_offset != log_offset:
            return None
        return self._store.message_at(log_offset)

    def current(self, half: StoredMessage) -> tuple[int, Fate]:
        """The queue offset of the copy that stands for the half's transaction now, and what became of that."""
        fate = self._fate(half.queue_offset)
        if fate is Fate.UNDECIDED and not self._is_unsure(half):
            return half.queue_offset, fate
        if fate in (Fate.COMMITTED, Fate.ROLLED_BACK):
            return half.queue_offset, fate
        if any(
            m.sys_flag & SYS_TRANSACTION_MASK == SYS_TRANSACTION_COMMIT for m in self._same(half, _real_topic(half))
        ):
            return half.queue_offset, Fate.COMMITTED
        copies = list(self._same(half, HALF_TOPIC))
        if not copies:
            return half.queue_offset, fate  # no index to ask
        latest = max(copies, key=lambda copy: copy.queue_offset)
        if any(m.log_offset > latest.log_offset for m in self._same(half, TRANSACTION_CHECK_TOPIC)):
            return latest.queue_offset, Fate.DISCARDED
        if latest.queue_offset < self.offset or self._fate(latest.queue_offset) is not Fate.UNDECIDED:
            return latest.queue_offset, Fate.ROLLED_BACK
        return latest.queue_offset, Fate.UNDECIDED

    def is_former(self, half: StoredMessage) -> bool:
        """Whether the half is from before the last start, so that `current` may know more about it."""
        return half.queue_offset < self._unsure_below

    # Changes.

    def settle(self, offset: int, fate: Fate, now_ms: int) -> Appended | None:
        """Notes how the transaction of a half ended; its op message, if that was stored at once.

        Raises RequestFailed for a roll back that can't be stored: it did not happen.
        """
        at = offset - self.offset
        if at < 0 or offset >= self.end_offset:
            return None
        if self._fate(offset) is not Fate.UNDECIDED:
            return None
        self._note(offset, fate)
        self._batch.append(offset)
        self._batch_bytes += len(str(offset)) + 1
        is_proven = fate is Fate.COMMITTED and self._config.message_index_enable
        if is_proven and self._batch_bytes < self._config.transaction_op_msg_max_size:
            return None
        try:
            return self.write_ops(now_ms)
        except RequestFailed as e:
            if fate is Fate.COMMITTED:
                log.warning("the op messages of commits wait: %s", e)  # the message is stored, so it is committed
                return None
            self._fates[at] = Fate.UNDECIDED
            self._batch.remove(offset)
            self._batch_bytes -= len(str(offset)) + 1
            raise

    def write_ops(self, now_ms: int) -> Appended | None:
        """Stores the op messages that wait. Raises RequestFailed."""
        appended = None
        while self._batch:
            body = ""
            count = 0
            while count < len(self._batch) and (not body or len(body) < self._config.transaction_op_msg_max_size):
                body += f"{self._batch[count]},"
                count += 1
            properties = {PROPERTY_WAIT_STORE_OK: "true", PROPERTY_TAGS: _REMOVE_TAG}
            message = Message(OP_HALF_TOPIC, QUEUE, body.encode(), properties)
            message.born_timestamp_ms = now_ms
            message.born_host = self._broker_host
            appended = self._put.one(message, now_ms)
            self._op_tops.append(max(self._batch[:count]))
            del self._batch[:count]
            self._batch_bytes -= len(body)
        return appended

    def renew_doubtful(self, now_ms: int) -> None:
        """Stores halves again whose end is not proven since a power cut: no op message names the new copies, not even
        after the next stop, when nobody knows of the gap any more.
        """
        for offset in self._doubtful if self._config.message_index_enable else ():
            half = self.at(offset) if self._fate(offset) is Fate.UNDECIDED else None
            if half is None or self.current(half) != (offset, Fate.UNDECIDED):
                continue
            try:
                appended = store_again(self._put, half, half.properties, HALF_TOPIC, now_ms)
            except RequestFailed as e:
                pass_over(HALF_TOPIC, QUEUE, offset, e)
                continue
            if appended is not None:
                self._note(offset, Fate.ENDED)

    def pass_to(self, offset: int) -> None:
        """Everything before `offset` is done with."""
        del self._fates[: offset - self.offset]
        self.offset = offset

    def pass_ended(self, until: int) -> None:
        """Passes the halves that have ended, up to the first that has not."""
        undecided = self._fates.find(0)
        ended = undecided if undecided >= 0 else len(self._fates)
        self.pass_to(max(self.offset, min(self.offset + ended, until)))

    def save(self) -> None:
        """Hands the group's offsets over to the table that is written to disk. That one is held until the log is there
        as well: after a power failure no half counts as done with when its end, or its newer copy, is lost.
        """
        while self._op_tops and self._op_tops[0] < self.offset:
            self._op_tops.popleft()
            self._op_offset += 1
        if self.end_offset:
            self._offsets.commit(GROUP, HALF_TOPIC, QUEUE, self.offset, _PEER)
            self._offsets.commit(GROUP, OP_HALF_TOPIC, QUEUE, self._op_offset, _PEER)

    # How it is found out.

    def _start(self, topic: str) -> int:
        low, high = self._store.min_offset(topic, QUEUE), self._store.max_offset(topic, QUEUE)
        saved = self._offsets.query(GROUP, topic, QUEUE)
        return low if saved == UNKNOWN else min(max(saved, low), high)

    def _recover(self) -> None:
        """Reads the op messages since the saved offset: once, at the start."""
        ended = 0
        for op_offset in range(self._op_offset, self._store.max_offset(OP_HALF_TOPIC, QUEUE)):
            entry = self._store.entry(OP_HALF_TOPIC, QUEUE, op_offset)
            op = message_behind(self._store, entry, OP_HALF_TOPIC, QUEUE, op_offset)
            halves = _named(op) if op is not None else []
            self._op_tops.append(max(halves, default=-1))
            open_halves = [offset for offset in halves if self.offset <= offset < self._unsure_below]
            if op is not None and op.log_offset >= self._store.whole_until:
                # Behind a gap that a power cut left in the log, it is no proof: what was committed may be lost.
                self._doubtful += open_halves
                continue
            for offset in open_halves:
                self._note(offset, Fate.ENDED)
                ended += 1
        if self._unsure_below > self.offset:
            log.info("transactions: %d halves since %d, %d ended", self._unsure_below - self.offset, self.offset, ended)

    def _note(self, offset: int, fate: Fate) -> None:
        at = offset - self.offset
        self._fates.extend(bytes(max(0, at + 1 - len(self._fates))))
        self._fates[at] = fate

    def _fate(self, offset: int) -> Fate:
        at = offset - self.offset
        return Fate(self._fates[at]) if 0 <= at < len(self._fates) else Fate.UNDECIDED

    def _is_unsure(self, half: StoredMessage) -> bool:
        """Whether memory alone can't tell: a newer copy or a commit of a former run may be in the store."""
        return (
            half.queue_offset < max(self.offset, self._unsure_below)
            or PROPERTY_TRANSACTION_CHECK_TIMES in half.properties
        )

    def _same(self, half: StoredMessage, topic: str) -> Iterator[StoredMessage]:
        """The messages of a topic that belong to the same transaction. A key may be used twice; a birth may not."""
        key = half.unique_key or ""
        for record in self._store.query(topic, key, _MOST_COPIES, 0, _END_OF_TIME_MS).slices:
            try:
                found = decode_record(record, check_crc=False)
            except BadRecord:
                continue
            is_same = (found.unique_key, found.topic, found.born_timestamp_ms, found.born_host) == (
                key, topic, half.born_timestamp_ms, half.born_host,
            )  # fmt: skip
            if is_same and self._is_in_its_queue(found):
                yield found

    def _is_in_its_queue(self, message: StoredMessage) -> bool:
        """The index may lead to what a power cut left, and what was passed over when the store was opened."""
        entry = self._store.entry(message.topic, message.queue_id, message.queue_offset)
        return entry is not None and entry.log_offset == message.log_offset


def _real_topic(half: StoredMessage) -> str:
    return half.properties.get(PROPERTY_REAL_TOPIC, "")


def _named(op: StoredMessage) -> list[int]:
    """The halves that an op message says to have ended."""
    if op.tags != _REMOVE_TAG or op.born_host != op.store_host:
        pass_over(op.topic, QUEUE, op.queue_offset, f"it has the tag {op.tags!r:.40}, or is not of a broker")
        return []
    words = (java_long(word) for word in op.body.decode("ascii", "replace").split(","))
    return [word for word in words if word is not None]


def store_again(put: Put, half: StoredMessage, properties: dict[str, str], topic: str, now_ms: int) -> Appended | None:
    """Stores a copy of a half; None, with a line in the log, if the store takes none now. Raises RequestFailed if it
    never will.
    """
    copy = Message(
        topic, QUEUE, half.body, properties, half.flag, half.sys_flag, half.born_timestamp_ms, half.born_host,
        half.reconsume_times,
    )  # fmt: skip
    try:
        return put.copy(copy, now_ms)
    except RequestFailed as e:
        if is_final(e):
            raise
        log.warning("half message %s can't be stored again now: %s", half.unique_key, e)
        return None
