"""What the revive topic is told: check points of what was popped, acknowledgements, and the state of pops in order.

All of it is in the log before a client gets its answer, so a broker that is killed knows afterwards who holds what.
Check points and acknowledgements wait as timers until the messages' time is nearly over and arrive in the revive topic
then, a check point a second before its acknowledgements; `revive.py` reads them there. So what is in flight costs no
memory, however much it is, and Apache's broker finds what it expects.

Pops in order have no check point. Their state is noted in a queue of its own of the revive topic, which Apache's
broker does not read; it is needed only after a crash, for what the tables on disk don't have yet.
"""

from __future__ import annotations

from typing import Final

import msgspec

from skylark.broker.config import BrokerConfig
from skylark.broker.internal import PROPERTY_EXTENDED, PROPERTY_LOG_END
from skylark.broker.orders import OrderInfo
from skylark.broker.put import Put
from skylark.store import Appended, Store
from skylark.wire.message import (
    PROPERTY_TAGS,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_UNIQUE_KEY,
    Message,
)
from skylark.wire.numbers import Int, Long
from skylark.wire.pop import (
    ACK_TAG,
    BATCH_ACK_TAG,
    CHECK_POINT_TAG,
    ORDER_REVIVE_QUEUE,
    Ack,
    CheckPoint,
    encode_record,
    revive_topic,
)

ORDER_TAG: Final = "order"
_BEFORE_ACKS_MS: Final = 1_000


class OrderNote(msgspec.Struct, kw_only=True):
    """Where a group stands in a queue that it pops in order."""

    group: str = msgspec.field(name="c")
    next_offset: Long = msgspec.field(name="n")
    info: OrderInfo | None = msgspec.field(name="o", default=None)
    queue_id: Int = msgspec.field(name="q")
    topic: str = msgspec.field(name="t")


decode_order_note = msgspec.json.Decoder(OrderNote, strict=False).decode


class CheckPoints:
    """Writes to the revive topic. Everything here raises RequestFailed if the store takes no messages."""

    def __init__(self, put: Put, config: BrokerConfig, store: Store) -> None:
        self._put = put
        self._store = store
        self._queue_count = config.revive_queue_num
        self._next_queue = 0
        self.topic = revive_topic(config.broker_cluster_name)

    def next_revive_queue(self) -> int:
        """The revive queue for the next pop."""
        self._next_queue += 1
        return self._next_queue % self._queue_count

    def is_revive_queue(self, queue_id: int) -> bool:
        return 0 <= queue_id < self._queue_count

    def popped(self, point: CheckPoint, revive_queue: int, now_ms: int, *, is_extension: bool = False) -> Appended:
        deliver_ms = point.revive_time_ms - _BEFORE_ACKS_MS
        properties = {PROPERTY_LOG_END: str(self._store.log_max_offset), PROPERTY_TIMER_DELIVER_MS: str(deliver_ms)}
        if is_extension:
            properties[PROPERTY_EXTENDED] = "true"
        return self._write(revive_queue, CHECK_POINT_TAG, point.unique_key, encode_record(point), properties, now_ms)

    def acknowledged(self, ack: Ack, revive_queue: int, visible_at_ms: int, now_ms: int) -> Appended:
        tag = ACK_TAG if ack.offsets is msgspec.UNSET else BATCH_ACK_TAG
        properties = {PROPERTY_TIMER_DELIVER_MS: str(visible_at_ms)}
        return self._write(revive_queue, tag, ack.unique_key, encode_record(ack), properties, now_ms)

    def in_order(
        self, topic: str, group: str, queue_id: int, next_offset: int, info: OrderInfo | None, now_ms: int
    ) -> Appended:
        note = OrderNote(topic=topic, group=group, queue_id=queue_id, next_offset=next_offset, info=info)
        key = f"{topic}@{queue_id}@{next_offset}@{group}@{ORDER_TAG}"
        return self._write(ORDER_REVIVE_QUEUE, ORDER_TAG, key, msgspec.json.encode(note), {}, now_ms)

    def _write(
        self, queue_id: int, tag: str, key: str, body: bytes, properties: dict[str, str], now_ms: int
    ) -> Appended:
        properties = {PROPERTY_TAGS: tag, PROPERTY_UNIQUE_KEY: key, **properties}
        host = self._store.config.store_host
        message = Message(self.topic, queue_id, body, properties, born_timestamp_ms=now_ms, born_host=host)
        return self._put.one(message, now_ms)
