"""ACK_MESSAGE, BATCH_ACK_MESSAGE and CHANGE_MESSAGE_INVISIBLETIME: what consumers do with what they popped.

An acknowledgement is a record in the revive topic that meets its check point there; nothing is looked up, so a
handle that nobody gave out does nothing. Changing a message's time is a check point of its own for the message, and an
acknowledgement in the old one.

Of a pop in order, which has no check point, the state in memory is changed and noted in the log. There, a handle has to
name a message that the group holds: anything else would move the group's offset over messages that nobody consumed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from skylark.broker.access import Access
from skylark.broker.checkpoints import CheckPoints
from skylark.broker.config import BrokerConfig
from skylark.broker.offsets import Offsets
from skylark.broker.orders import Orders
from skylark.broker.polling import ANY_QUEUE, PopWaiters
from skylark.broker.put import Put
from skylark.broker.turns import next_turn
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.net.request_bodies import request_body
from skylark.store import Appended, Store
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.pop import (
    Ack,
    AckMessage,
    BadHandle,
    BatchAck,
    BatchAckMessage,
    ChangeInvisibleTime,
    ChangeInvisibleTimeResponse,
    CheckPoint,
    ReceiptHandle,
    real_topic,
)
from skylark.wire.typed import decode_header, encode_header

log = logging.getLogger(__name__)

_BATCHES_PER_TURN: Final = 64


class Acks:
    def __init__(
        self,
        config: BrokerConfig,
        store: Store,
        put: Put,
        access: Access,
        offsets: Offsets,
        orders: Orders,
        check_points: CheckPoints,
        waiters: PopWaiters,
        clock: Callable[[], int],
    ) -> None:
        self._config = config
        self._store = store
        self._put = put
        self._access = access
        self._offsets = offsets
        self._orders = orders
        self._check_points = check_points
        self._waiters = waiters
        self._clock = clock

    def handlers(self) -> dict[int, Handler]:
        return {
            RequestCode.ACK_MESSAGE: self.ack,
            RequestCode.BATCH_ACK_MESSAGE: self.batch_ack,
            RequestCode.CHANGE_MESSAGE_INVISIBLETIME: self.change_invisible_time,
        }

    def ack(self, request: Frame, connection: Connection) -> Frame | Awaitable[Frame]:
        header = decode_header(AckMessage, request)
        self._check_queue(header, connection)
        low, high = self._bounds(header.topic, header.queue_id)
        if not low <= header.offset <= high:
            raise RequestFailed(
                ResponseCode.NO_MESSAGE,
                f"offset is illegal, key:{header.topic}@{header.queue_id}, commit:{header.offset}, store:{low}~{high}",
            )
        handle = self._handle(header.extra_info)
        if handle.is_order:
            last = self._ack_in_order(
                header.topic, header.consumer_group, header.queue_id, header.offset, handle.pop_time_ms, connection
            )
        else:
            last = self._ack(header, handle, self._clock())
        return self._when_safe(request.reply(), last)

    def batch_ack(self, request: Frame, connection: Connection) -> Frame | Awaitable[Frame]:
        body = request_body(BatchAckMessage, request.body) if request.body else BatchAckMessage()
        if not body.acks:
            raise RequestFailed(ResponseCode.NO_MESSAGE, "the request acknowledges no message")
        if len(body.acks) > _BATCHES_PER_TURN:
            return self._ack_many(request, body, connection)
        return self._when_safe(request.reply(), self._ack_batches(body.acks, body.broker_name, connection))

    async def _ack_many(self, request: Frame, body: BatchAckMessage, connection: Connection) -> Frame:
        """Takes many acknowledgements in, some at a time."""
        last = None
        failure: RequestFailed | None = None
        for at in range(0, len(body.acks), _BATCHES_PER_TURN):
            try:
                part = body.acks[at : at + _BATCHES_PER_TURN]
                last = self._ack_batches(part, body.broker_name, connection) or last
            except RequestFailed as e:
                failure = e
            await next_turn(connection.peer[0])
        if failure is not None:
            raise failure
        reply = self._when_safe(request.reply(), last)
        return reply if isinstance(reply, Frame) else await reply

    def _ack_batches(
        self, batches: Sequence[BatchAck], broker_name: str | None, connection: Connection
    ) -> Appended | None:
        last = None
        failure: RequestFailed | None = None
        for batch in batches:
            try:
                last = self._ack_batch(batch, broker_name, connection) or last
            except RequestFailed as e:  # the others count nevertheless
                failure = e
        if failure is not None:
            raise failure
        return last

    def change_invisible_time(self, request: Frame, connection: Connection) -> Frame | Awaitable[Frame]:
        header = decode_header(ChangeInvisibleTime, request)
        self._check_queue(header, connection)
        low, high = self._bounds(header.topic, header.queue_id)
        if not low <= header.offset < high:
            raise RequestFailed(
                ResponseCode.NO_MESSAGE,
                f"offset {header.offset} is outside of {header.topic}-{header.queue_id}, which holds {low} to {high}",
            )
        handle = self._handle(header.extra_info)
        now_ms = self._clock()
        if handle.is_order:
            answer, last = self._change_in_order(header, handle, now_ms)
        else:
            # Two check points of one message must differ, or the acknowledgement of the old one meets the new one.
            pop_time_ms = max(now_ms, handle.pop_time_ms + 1)
            point = CheckPoint(
                topic=header.topic,
                group=header.consumer_group,
                queue_id=header.queue_id,
                start_offset=header.offset,
                pop_time_ms=pop_time_ms,
                invisible_ms=header.invisible_time,
                count=1,
                diffs=[0],
                broker_name=handle.broker_name,
                suspend=header.suspend,
            )
            self._check_points.popped(point, handle.revive_queue, now_ms, is_extension=True)
            last = self._ack(header, handle, now_ms)
            answer = ChangeInvisibleTimeResponse(pop_time_ms, header.invisible_time, handle.revive_queue)
        return self._when_safe(request.reply(fields=encode_header(answer)), last)

    # Any order.

    def _ack(self, header: AckMessage | ChangeInvisibleTime, handle: ReceiptHandle, now_ms: int) -> Appended:
        ack = Ack(
            topic=header.topic,
            group=header.consumer_group,
            queue_id=header.queue_id,
            start_offset=handle.start_offset,
            pop_time_ms=handle.pop_time_ms,
            offset=header.offset,
            broker_name=handle.broker_name,
        )
        return self._check_points.acknowledged(ack, handle.revive_queue, handle.visible_at_ms, now_ms)

    def _ack_batch(self, batch: BatchAck, broker_name: str | None, connection: Connection) -> Appended | None:
        try:
            topic = real_topic(batch.topic, batch.consumer_group, batch.retry)
        except BadHandle as e:
            raise _bad_handle(e) from None
        low, high = self._bounds(topic, batch.queue_id)
        offsets = [offset for offset in batch.offsets() if low <= offset <= high]
        if not offsets:
            log.info("%r acknowledges nothing that is in %s-%d", connection, topic, batch.queue_id)
            return None
        handle = ReceiptHandle(
            batch.start_offset,
            batch.pop_time_ms,
            batch.invisible_ms,
            batch.revive_queue,
            batch.retry,
            broker_name or self._config.broker_name,
            batch.queue_id,
        )
        self._check_handle(handle)
        if handle.is_order:
            last = None
            for offset in offsets:
                last = self._ack_in_order(
                    topic, batch.consumer_group, batch.queue_id, offset, batch.pop_time_ms, connection
                )
            return last
        ack = Ack(
            topic=topic,
            group=batch.consumer_group,
            queue_id=batch.queue_id,
            start_offset=batch.start_offset,
            pop_time_ms=batch.pop_time_ms,
            offset=-1,
            offsets=offsets,
            broker_name=handle.broker_name,
        )
        return self._check_points.acknowledged(ack, batch.revive_queue, handle.visible_at_ms, self._clock())

    # In order.

    def _ack_in_order(
        self, topic: str, group: str, queue_id: int, offset: int, pop_time_ms: int, connection: Connection
    ) -> Appended | None:
        old = self._offsets.query(group, topic, queue_id)
        if offset < old:
            return None
        next_offset = self._orders.acknowledged(topic, group, queue_id, offset, pop_time_ms)
        if next_offset == -1:
            raise RequestFailed(
                ResponseCode.MESSAGE_ILLEGAL,
                f"offset is illegal, key:{topic}@{group}@{queue_id}, old:{old}, commit:{offset}, next:{next_offset}, "
                f"{connection!r}",
            )
        if next_offset < 0 or self._offsets.has_reset(group, topic, queue_id):
            return None
        now_ms = self._clock()
        info = self._orders.get(topic, group, queue_id)
        self._offsets.commit(group, topic, queue_id, next_offset, connection)
        noted = self._check_points.in_order(topic, group, queue_id, next_offset, info, now_ms)
        if not self._orders.blocked_until_ms(topic, group, queue_id, None, now_ms):
            self._wake(topic, group, queue_id)
        return noted

    def _change_in_order(
        self, header: ChangeInvisibleTime, handle: ReceiptHandle, now_ms: int
    ) -> tuple[ChangeInvisibleTimeResponse, Appended | None]:
        topic, group, queue_id = header.topic, header.consumer_group, header.queue_id
        old = self._offsets.query(group, topic, queue_id)
        if header.offset < old:
            return ChangeInvisibleTimeResponse(0, 0, 0), None
        visible_at_ms = now_ms + header.invisible_time
        answer = ChangeInvisibleTimeResponse(
            handle.pop_time_ms, visible_at_ms - handle.pop_time_ms, handle.revive_queue
        )
        if not self._orders.extended(topic, group, queue_id, header.offset, handle.pop_time_ms, visible_at_ms):
            return answer, None
        info = self._orders.get(topic, group, queue_id)
        noted = self._check_points.in_order(topic, group, queue_id, old, info, now_ms)
        self._wake(topic, group, queue_id)  # they wait for the time that was
        return answer, noted

    def _wake(self, topic: str, group: str, queue_id: int) -> None:
        for waits_for in (ANY_QUEUE, queue_id):
            self._waiters.wake(topic, group, waits_for)

    # Checks, and the answer.

    def _check_queue(self, header: AckMessage | ChangeInvisibleTime, connection: Connection) -> None:
        topic = self._access.topic(header.topic)
        if not 0 <= header.queue_id < topic.read_queue_nums:
            raise self._access.illegal_queue(topic, header.queue_id, connection, ResponseCode.MESSAGE_ILLEGAL)
        if header.lite_topic and header.lite_topic.strip():
            raise RequestFailed(ResponseCode.INVALID_PARAMETER, "group type or bind topic not match.")

    def _bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        return self._store.min_offset(topic, queue_id), self._store.max_offset(topic, queue_id)

    def _handle(self, text: str) -> ReceiptHandle:
        try:
            handle = ReceiptHandle.parse(text)
        except BadHandle as e:
            raise _bad_handle(e) from None
        self._check_handle(handle)
        return handle

    def _check_handle(self, handle: ReceiptHandle) -> None:
        if not handle.is_order and not self._check_points.is_revive_queue(handle.revive_queue):
            raise RequestFailed(
                ResponseCode.MESSAGE_ILLEGAL,
                f"the receipt handle names revive queue {handle.revive_queue}, which this broker does not have: send "
                "back the handle that came with the message",
            )
        if handle.broker_name != self._config.broker_name:
            raise RequestFailed(
                ResponseCode.MESSAGE_ILLEGAL,
                f"the receipt handle is of broker {handle.broker_name}, this is {self._config.broker_name}: send it "
                "to the broker that gave it out",
            )

    def _when_safe(self, reply: Frame, last: Appended | None) -> Frame | Awaitable[Frame]:
        if last is None or not self._put.is_synchronous:
            return reply
        return self._put.when_flushed(last, reply)


def _bad_handle(error: BadHandle) -> RequestFailed:
    return RequestFailed(
        ResponseCode.SYSTEM_ERROR, f"{error}: send back the handle that came with the message, its property POP_CK"
    )
