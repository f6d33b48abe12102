"""Traces of what a client sends and consumes, written to a topic of their own in Apache's format (`wire/trace.py`).

Tracing must not disturb what it watches: a record is put into a bounded list and the caller goes on; a task writes the
list out, many records a message, over connections that are not those of the traced client. Records beyond the bound are
dropped and counted; a trace that can't be written is logged and forgotten. Trace messages themselves are not traced.

As in Apache's client, what leaves a record is a send that a broker answered with success or "stored, but", unless the
broker says that it does not want traces, and every call of a listener with messages from such a broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from skylark.client.errors import InvalidMessage, NotReachable, RocketMQError
from skylark.client.listening import ConsumeContext, ConsumeHook
from skylark.client.message import Message, Receipt, SendStatus
from skylark.client.sending import SendContext, SendHook, now_ms
from skylark.client.session import Session
from skylark.client.timing import steady_ms
from skylark.client.validation import check_send_topic
from skylark.wire.codes import ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import (
    PROPERTY_DELAY_LEVEL,
    PROPERTY_KEYS,
    PROPERTY_MSG_REGION,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRACE_SWITCH,
    PROPERTY_TRANSACTION_PREPARED,
)
from skylark.wire.records import decode_batch
from skylark.wire.trace import (
    TRACE_TOPIC,
    ConsumeCode,
    EndTransaction,
    MessageType,
    Pub,
    Recall,
    SubAfter,
    SubBefore,
    Trace,
    encode_trace,
    trace_keys,
)

if TYPE_CHECKING:
    from skylark.client.producer import Producer

log = logging.getLogger(__name__)

MAX_PENDING: Final = 2048
MAX_TRACE_BYTES: Final = 128_000
BATCH: Final = 20  # so many are worth a message at once
MAX_BATCH: Final = 100
FLUSH_INTERVAL_S: Final = 1.0
SEND_TIMEOUT_S: Final = 5.0
CLOSE_TIMEOUT_S: Final = 5.0
DEFAULT_REGION: Final = "DefaultRegion"

_DELAY_PROPERTIES: Final = frozenset(
    (PROPERTY_DELAY_LEVEL, PROPERTY_TIMER_DELAY_MS, PROPERTY_TIMER_DELAY_SEC, PROPERTY_TIMER_DELIVER_MS)
)
_STATE: Final = "trace"  # what the hook keeps between the begin and the end of a call
_numbers = itertools.count(1)


def trace_topic(trace: bool | str) -> str | None:
    """The topic that the option `trace` asks for; None if it asks for nothing."""
    if isinstance(trace, str):
        return trace
    return TRACE_TOPIC if trace else None


def trace_group(group: str, role: str) -> str:
    """The name under which a client's traces are sent."""
    return f"_INNER_TRACE_PRODUCER-{group[:80]}-{role}-{next(_numbers)}"


class Tracer:
    """Writes trace records. `add` may be called from the event loop at any time between `start` and `close`."""

    def __init__(self, producer: Producer, topic: str) -> None:
        """The producer is the tracer's own: it is started and closed with it."""
        self._producer = producer
        self._topic = topic
        self._pending: deque[Trace] = deque()
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_failing = False
        self.dropped = 0

    async def start(self) -> None:
        if self._task is None:
            await self._producer.start()
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Writes what is pending, within a time limit."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._flush()
                await self._producer.flush()
        except TimeoutError:
            log.warning("%d trace records are lost: they can't be written in time", len(self._pending))
        finally:  # also when it is cancelled
            await self._producer.close()

    def add(self, traces: Iterable[Trace]) -> None:
        for trace in traces:
            if len(self._pending) >= MAX_PENDING:
                self.dropped += 1
                continue
            self._pending.append(trace)
        if len(self._pending) >= BATCH:
            self._wanted.set()

    async def _run(self) -> None:
        with contextlib.suppress(RocketMQError):  # said when it matters
            # The way is made before there is something to write: a burst at the start would not wait for it.
            await self._producer.queues(self._topic)
            await self._producer.session.heartbeat()
        while True:
            try:
                async with asyncio.timeout(FLUSH_INTERVAL_S):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            self._wanted.clear()
            await self._flush()

    async def _flush(self) -> None:
        while self._pending:
            await self._send([self._pending.popleft() for _ in range(min(MAX_BATCH, len(self._pending)))])

    async def _send(self, traces: list[Trace]) -> None:
        body = "".join([encode_trace(trace) for trace in traces]).encode("utf-8", "replace")
        try:
            sent = await self._producer.send_soon(self._topic, body, key=sorted(trace_keys(traces)))
        except InvalidMessage as e:
            if len(traces) == 1:
                self._note(e)
                return
            half = len(traces) // 2  # the keys of all their messages may be too long together
            await self._send(traces[:half])
            await self._send(traces[half:])
        else:
            sent.add_done_callback(self._sent)

    def _sent(self, future: asyncio.Future[Receipt]) -> None:
        self._note(None if future.cancelled() else future.exception())

    def _note(self, error: BaseException | None) -> None:
        """Says once that it goes wrong, and once that it goes well again."""
        if error is not None and not self._is_failing:
            log.warning("traces can't be written to %s: %s", self._topic, error)
        elif error is None and self._is_failing:
            log.info("traces are written to %s again", self._topic)
        self._is_failing = error is not None


def transaction_ended(
    session: Session,
    group: str,
    topic: str,
    msg_id: str,
    broker: str,
    *,
    committed: bool,
    labels: Mapping[str, str] = MappingProxyType({}),
    is_from_check: bool = False,
) -> Trace:
    """The record of a producer's word on a transaction; `labels` are the message's properties, where they are known."""
    return EndTransaction(
        time_ms=now_ms(),
        region=labels.get(PROPERTY_MSG_REGION) or DEFAULT_REGION,
        group=session.namespace.unwrap(group),
        topic=session.namespace.unwrap(topic),
        msg_id=msg_id,
        tags=labels.get(PROPERTY_TAGS),
        keys=labels.get(PROPERTY_KEYS),
        store_host=_address(session, broker),
        transaction_id=msg_id,
        state="COMMIT_MESSAGE" if committed else "ROLLBACK_MESSAGE",
        is_from_check=is_from_check,
    )


def recalled(session: Session, group: str, topic: str, msg_id: str, answer: Frame) -> Iterator[Trace]:
    """The record of an attempt to take a message back, if the broker that answered it has a region."""
    region = answer.fields.get(PROPERTY_MSG_REGION)
    if region is not None:
        yield Recall(
            time_ms=now_ms(),
            region=region,
            group=session.namespace.unwrap(group),
            topic=session.namespace.unwrap(topic),
            msg_id=msg_id,
            is_success=answer.code == ResponseCode.SUCCESS,
        )


def open_tracer(session: Session, group: str, role: str, trace: bool | str) -> Tracer | None:
    """A tracer for a client of the session, if it is to be traced; its messages take ways of their own."""
    topic = trace_topic(trace)
    if topic is None:
        return None
    check_send_topic(topic)
    from skylark.client.producer import Producer  # which can be traced itself

    producer = Producer(
        group=trace_group(group, role),
        session=session.companion,
        timeout_s=SEND_TIMEOUT_S,
        max_message_bytes=MAX_TRACE_BYTES,
    )
    return Tracer(producer, topic)


class SendTraces(SendHook):
    """A record for every message that a broker took."""

    def __init__(self, tracer: Tracer, session: Session) -> None:
        self._tracer = tracer
        self._session = session

    def after_send(self, context: SendContext) -> None:
        receipts = context.receipts
        if receipts and receipts[0].region is not None and receipts[0].is_traced:
            self._tracer.add(self._records(context, receipts))

    def _records(self, context: SendContext, receipts: list[Receipt]) -> Iterator[Trace]:
        namespace = self._session.namespace
        store_host = _address(self._session, context.queue.broker_name)
        parts = [(len(context.body), context.properties)]
        if receipts[0].msg_id != context.msg_id:  # a batch: each message has an id of its own
            parts = [(len(body), properties) for _, body, properties in decode_batch(context.body)]
        for receipt, (body_length, properties) in zip(receipts, parts, strict=True):
            yield Pub(
                time_ms=context.started_ms,
                region=receipt.region or "",
                group=namespace.unwrap(context.group),
                topic=namespace.unwrap(context.topic),
                msg_id=receipt.msg_id,
                tags=properties.get(PROPERTY_TAGS),
                keys=properties.get(PROPERTY_KEYS),
                store_host=store_host,
                body_length=body_length,
                cost_ms=now_ms() - context.started_ms,
                message_type=_message_type(properties),
                offset_msg_id=receipt.offset_msg_id or None,
                is_success=receipt.status is SendStatus.OK,
            )


class ConsumeTraces(ConsumeHook):
    """A record before and one after the listener, for every message."""

    def __init__(self, tracer: Tracer, session: Session, timeout_s: float = math.inf) -> None:
        self._tracer = tracer
        self._session = session
        self._timeout_ms = timeout_s * 1000

    def before(self, context: ConsumeContext) -> None:
        messages = [
            message
            for message in context.messages
            if message.properties.get(PROPERTY_TRACE_SWITCH) != "false" and PROPERTY_MSG_REGION in message.properties
        ]
        begin_ms = now_ms()
        request_id = uuid.uuid4().hex.upper()
        context.properties[_STATE] = (request_id, steady_ms(), messages)
        self._tracer.add(
            SubBefore(
                time_ms=begin_ms,
                region=message.properties[PROPERTY_MSG_REGION],
                group=self._session.namespace.unwrap(context.group),
                request_id=request_id,
                msg_id=message.msg_id,
                retries=message.reconsume_times,
                keys=message.properties.get(PROPERTY_KEYS),
            )
            for message in messages
        )

    def after(self, context: ConsumeContext) -> None:
        request_id, began_ms, messages = context.properties[_STATE]
        took_ms = steady_ms() - began_ms
        code = self._code(context, took_ms)
        self._tracer.add(
            SubAfter(
                request_id=request_id,
                msg_id=message.msg_id,
                cost_ms=took_ms // len(context.messages),
                is_success=context.is_success,
                keys=message.properties.get(PROPERTY_KEYS),
                code=code,
                time_ms=now_ms(),
                group=self._session.namespace.unwrap(context.group),
            )
            for message in messages
        )

    def handed_out(self, group: str, messages: list[Message]) -> None:
        """The same where there is no listener: whoever polls has consumed."""
        context = ConsumeContext(group, messages[0].queue, messages, is_success=True, properties={})
        self.before(context)
        self.after(context)

    def _code(self, context: ConsumeContext, took_ms: int) -> ConsumeCode:
        if context.error is not None:
            return ConsumeCode.EXCEPTION
        if took_ms >= self._timeout_ms:
            return ConsumeCode.TIMEOUT
        return ConsumeCode.SUCCESS if context.is_success else ConsumeCode.FAILED


def _address(session: Session, broker: str) -> str:
    try:
        return session.broker_address(broker)
    except NotReachable:
        return ""  # it left the routes just now


def _message_type(properties: dict[str, str]) -> MessageType:
    if not _DELAY_PROPERTIES.isdisjoint(properties):
        return MessageType.DELAY
    if properties.get(PROPERTY_TRANSACTION_PREPARED) == "true":
        return MessageType.TRANSACTION_HALF
    return MessageType.NORMAL
