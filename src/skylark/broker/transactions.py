"""END_TRANSACTION (37): a producer commits or rolls back; and RESUME_CHECK_HALF_MESSAGE (323): an operator gives a
discarded transaction back to its producers.

Codes and checks are those of Apache's EndTransactionProcessor. Where it would deliver a message twice, or one that was
rolled back, this broker does not: ending again as before is answered as the first time and does nothing, ending
otherwise is refused with ILLEGAL_OPERATION.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from skylark.broker.config import BrokerConfig
from skylark.broker.halves import Fate, Halves, store_again
from skylark.broker.put import Put
from skylark.broker.topics import HALF_TOPIC, TRANSACTION_CHECK_TOPIC
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.store import Appended, Store
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import ONEWAY_FLAG, Frame
from skylark.wire.headers import EndTransaction, ResumeCheckHalfMessage
from skylark.wire.message import (
    PROPERTY_CHECK_IMMUNITY_SECONDS,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    SYS_TRANSACTION_COMMIT,
    SYS_TRANSACTION_MASK,
    SYS_TRANSACTION_NONE,
    SYS_TRANSACTION_ROLLBACK,
    Message,
    StoredMessage,
)
from skylark.wire.numbers import java_count
from skylark.wire.records import parse_message_id
from skylark.wire.typed import decode_header

_WANTED = {SYS_TRANSACTION_COMMIT: Fate.COMMITTED, SYS_TRANSACTION_ROLLBACK: Fate.ROLLED_BACK}


class Transactions:
    """Ends transactions."""

    def __init__(self, halves: Halves, store: Store, put: Put, config: BrokerConfig, clock: Callable[[], int]) -> None:
        self._halves = halves
        self._store = store
        self._put = put
        self._config = config
        self._clock = clock

    def handlers(self) -> dict[int, Handler]:
        return {
            RequestCode.END_TRANSACTION: self.end,
            RequestCode.RESUME_CHECK_HALF_MESSAGE: self.resume,
        }

    def end(self, request: Frame, _: Connection) -> Frame | Awaitable[Frame] | None:
        header = decode_header(EndTransaction, request)
        if header.commit_or_rollback == SYS_TRANSACTION_NONE:
            return None  # the producer does not know either; it gets no answer and is asked again
        wanted = _WANTED.get(header.commit_or_rollback)
        if wanted is None:
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR,
                f"commitOrRollback field wrong: {header.commit_or_rollback} is none of 0 (unknown), 8 (commit) and "
                "12 (roll back)",
            )
        now_ms = self._clock()
        half = self._half(header, now_ms)
        offset, fate = self._halves.current(half)
        safe: Appended | None = None
        if fate is Fate.UNDECIDED or (fate is Fate.DISCARDED and wanted is Fate.COMMITTED):
            if wanted is Fate.COMMITTED:
                safe = self._put.one(_committed(half), now_ms)
            safe = self._halves.settle(offset, wanted, now_ms) or safe
        else:
            self._halves.settle(offset, fate, now_ms)
            if fate not in (wanted, Fate.ENDED, Fate.DISCARDED):
                raise RequestFailed(
                    ResponseCode.ILLEGAL_OPERATION,
                    f"the transaction {half.unique_key} was {fate.name.lower().replace('_', ' ')} already, and that "
                    "stays so",
                )
        reply = request.reply()
        if safe is None or not self._put.is_synchronous or request.flag & ONEWAY_FLAG:
            return reply
        return self._when_safe(safe, reply)

    def resume(self, request: Frame, _: Connection) -> Frame | Awaitable[Frame]:
        """A half that was discarded is stored again, with all its chances."""
        text = decode_header(ResumeCheckHalfMessage, request).msg_id
        try:
            message = self._store.message_at(parse_message_id(text)[1])
        except ValueError:
            message = None
        if message is None or message.topic not in (TRANSACTION_CHECK_TOPIC, HALF_TOPIC):
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR,
                f"Exception was thrown when putting message back to {HALF_TOPIC}.: {text} is not the id of a message "
                f"in {TRANSACTION_CHECK_TOPIC}",
            )
        properties = message.properties | {PROPERTY_TRANSACTION_CHECK_TIMES: "0"}
        appended = store_again(self._put, message, properties, HALF_TOPIC, self._clock())
        if appended is None:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"Put message back to {HALF_TOPIC} failed.")
        reply = request.reply()
        return self._put.when_flushed(appended, reply) if self._put.is_synchronous else reply

    def _half(self, header: EndTransaction, now_ms: int) -> StoredMessage:
        """The half that a producer ends, if it may."""
        message = self._store.message_at(header.commit_log_offset)
        if message is None or message.topic != HALF_TOPIC or PROPERTY_REAL_TOPIC not in message.properties:
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR,
                f"Find prepared transaction message failed: no half message is at log offset "
                f"{header.commit_log_offset}",
            )
        if not header.from_transaction_check and self._is_too_late(message, now_ms):
            raise RequestFailed(
                ResponseCode.ILLEGAL_OPERATION,
                f"the time that the message sets by {PROPERTY_CHECK_IMMUNITY_SECONDS} is over: the broker asks the "
                "producer group for the end of the transaction",
            )
        if message.properties.get(PROPERTY_PRODUCER_GROUP) != header.producer_group:
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR,
                f"The producer group wrong: the half message is not one of {header.producer_group}",
            )
        if self._halves.find(header.tran_state_table_offset, header.commit_log_offset) is None:
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR,
                f"The transaction state table offset wrong: the half message at log offset "
                f"{header.commit_log_offset} is not number {header.tran_state_table_offset}",
            )
        return message

    def _is_too_late(self, half: StoredMessage, now_ms: int) -> bool:
        if PROPERTY_CHECK_IMMUNITY_SECONDS not in half.properties:
            return False
        immunity_ms = (java_count(half.properties[PROPERTY_CHECK_IMMUNITY_SECONDS]) or 0) * 1000
        return now_ms - half.born_timestamp_ms > max(immunity_ms, self._config.transaction_time_out)

    async def _when_safe(self, appended: Appended, reply: Frame) -> Frame:
        """As at Apache, a disk that is late is no failure here: a half whose end is lost is asked for again."""
        await self._put.when_flushed(appended, reply)
        reply.code = ResponseCode.SUCCESS
        return reply


def _committed(half: StoredMessage) -> Message:
    """The message that consumers get. It names its half, which proves that the transaction is committed."""
    properties = dict(half.properties)
    topic = properties.pop(PROPERTY_REAL_TOPIC)
    queue_id = java_count(properties.pop(PROPERTY_REAL_QUEUE_ID, "")) or 0
    return Message(
        topic,
        queue_id,
        half.body,
        properties,
        half.flag,
        half.sys_flag & ~SYS_TRANSACTION_MASK | SYS_TRANSACTION_COMMIT,
        half.born_timestamp_ms,
        half.born_host,
        half.reconsume_times,
        half.log_offset,
    )
