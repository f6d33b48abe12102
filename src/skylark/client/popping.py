"""POP requests, one function each: take messages, acknowledge them, change how long they stay hidden, wait for some.

A popped message is hidden from the rest of its group for its invisible time, and comes again when nobody acknowledged
it by then. What stands for it until then is its receipt handle (`Message.receipt_handle`), which changes with every
change of the invisible time.

A queue with the number -1 stands for all queues of a topic at one broker: the broker looks through them, and through
the group's retry topic, by itself.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable
from typing import Final

import msgspec

from skylark.client.errors import BrokerError, InvalidMessage
from skylark.client.message import Message
from skylark.client.reading import read_messages
from skylark.client.session import Session
from skylark.client.subscriptions import wants
from skylark.wire.bodies import MessageQueue, Subscription, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import PROPERTY_FIRST_POP_TIME, PROPERTY_POP_CK, BadRecord
from skylark.wire.pop import (
    AckMessage,
    BadHandle,
    BatchAck,
    BatchAckMessage,
    ChangeInvisibleTime,
    ChangeInvisibleTimeResponse,
    Notification,
    NotificationResponse,
    PopMessage,
    PopMessageResponse,
    ReceiptHandle,
    handles_of,
    order_count,
    parse_order_counts,
    real_topic,
    renewed,
)
from skylark.wire.typed import BadHeader, decode_header, encode_header

log = logging.getLogger(__name__)

ANY_QUEUE: Final = -1
TIMEOUT_S: Final = 3.0
DEFAULT_RECONSUME_TIMES: Final = 16
MIN_INVISIBLE_S: Final = 1.0
MAX_INVISIBLE_S: Final = 12 * 3600.0
_EXTRA_WAIT_S: Final = 10.0  # on top of a wait at the broker, as in Apache's client
_NOTHING: Final = frozenset((ResponseCode.POLLING_TIMEOUT, ResponseCode.PULL_NOT_FOUND, ResponseCode.POLLING_FULL))


def new_attempt() -> str:
    """What names a pop in order, and its repetitions until it is answered."""
    return uuid.uuid4().hex


class Popped(msgspec.Struct):
    """What a pop brought; all of it is hidden now and waits for an acknowledgement."""

    messages: list[Message] = []
    unwanted: list[Message] = []
    """Their tags only share a hash code with those asked for."""
    unreadable: list[tuple[Message, str]] = []
    """Their bodies can't be inflated, and why."""
    rest: int = 0
    """About how many more there are."""
    is_refused: bool = False
    """The broker has too many who wait for messages."""

    @property
    def count(self) -> int:
        return len(self.messages) + len(self.unwanted) + len(self.unreadable)


async def pop(
    session: Session,
    group: str,
    queue: MessageQueue,
    subscription: Subscription,
    *,
    max_messages: int,
    invisible_ms: int,
    wait_ms: int = 0,
    init_mode: int,
    in_order: bool = False,
    attempt_id: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Popped:
    """Takes up to `max_messages`; the broker waits up to `wait_ms` for the first. Raises RocketMQError.

    `timeout_s` bounds what is not such a wait. In order, a queue gives nothing more until all that it gave before is
    acknowledged, or its time is over; a pop with the `attempt_id` of one whose answer was lost gets the same again.
    """
    header = PopMessage(
        consumer_group=group,
        topic=queue.topic,
        queue_id=queue.queue_id,
        max_msg_nums=max_messages,
        invisible_time=invisible_ms,
        poll_time=wait_ms,
        born_time=0,  # the broker's clock: with ours, a clock that is late would let every request be too old
        init_mode=init_mode,
        exp_type=subscription.expression_type,
        exp=subscription.sub_string,
        order=in_order,
        attempt_id=attempt_id,
    )
    request = Frame(RequestCode.POP_MESSAGE, encode_header(header))
    limit_s = wait_ms / 1000 + _EXTRA_WAIT_S if wait_ms else timeout_s
    answer = await session.ask_broker(queue.broker_name, request, limit_s)
    return read_popped(answer, queue, subscription, session.namespace.unwrap(queue.topic))


def read_popped(answer: Frame, queue: MessageQueue, subscription: Subscription, topic: str) -> Popped:
    """The messages in the answer to a pop, with their receipt handles, as those of `topic`. Raises BrokerError."""
    broker = queue.broker_name
    if answer.code in _NOTHING:
        return Popped(is_refused=answer.code == ResponseCode.POLLING_FULL)
    if answer.code != ResponseCode.SUCCESS:
        raise BrokerError(answer.code, answer.remark, broker)
    try:
        header = decode_header(PopMessageResponse, answer)
        counts = parse_order_counts(header.order_count_info)
        popped = Popped([], [], [], header.rest_num)
        read, is_whole = read_messages(answer.body, broker)
        if not is_whole:
            log.warning("%s: the bodies of a pop are too large together; some messages of it come again", topic)
        for message, reason in read:
            _give_handle(message, header, counts)
            message.topic = topic  # that of a retry topic tells nobody anything
            if reason is not None:
                popped.unreadable.append((message, reason))
            elif wants(subscription, message.tag):
                popped.messages.append(message)
            else:
                popped.unwanted.append(message)
    except (BadRecord, BadHandle, BadHeader) as e:
        raise BrokerError(answer.code, f"the messages can't be read: {e}", broker) from e
    return popped


def _give_handle(message: Message, header: PopMessageResponse, counts: dict[tuple[str, str], int]) -> None:
    handle = message.properties.pop(PROPERTY_POP_CK, None)
    if handle is None:
        place = (message.topic, message.queue_id, message.queue_offset)
        handle = handles_of(header, message.broker, [place])[0].encode()
        if counts:
            message.reconsume_times = order_count(counts, *place) or message.reconsume_times
    message.receipt_handle = handle
    message.properties.setdefault(PROPERTY_FIRST_POP_TIME, str(header.pop_time))


def handle_of(message: Message) -> ReceiptHandle:
    """Raises InvalidMessage when the message was not popped."""
    if not message.receipt_handle:
        raise InvalidMessage(f"message {message.msg_id} has no receipt handle: no simple consumer received it")
    try:
        handle = ReceiptHandle.parse(message.receipt_handle)
    except BadHandle as e:
        raise InvalidMessage(str(e)) from None
    if handle.offset < 0:
        raise InvalidMessage(f"a receipt handle that names no message: {message.receipt_handle!r}")
    return handle


async def ack(session: Session, group: str, messages: Iterable[Message], timeout_s: float = TIMEOUT_S) -> None:
    """Says that messages are done: one request for each broker and topic. Raises RocketMQError.

    When one of several requests fails, the others are made all the same; acknowledging again does no harm.
    """
    together: dict[tuple[str, str], list[ReceiptHandle]] = {}
    for message in messages:
        handle = handle_of(message)
        together.setdefault((handle.broker_name, session.namespace.wrap(message.topic)), []).append(handle)
    results = await asyncio.gather(
        *(_ack(session, group, broker, topic, handles, timeout_s) for (broker, topic), handles in together.items()),
        return_exceptions=True,
    )
    for result in results:
        if result is not None:
            raise result


async def _ack(
    session: Session, group: str, broker: str, topic: str, handles: list[ReceiptHandle], timeout_s: float
) -> None:
    if len(handles) == 1:
        [handle] = handles
        lies_in = real_topic(topic, group, handle.kind)
        header = AckMessage(group, lies_in, handle.queue_id, handle.encode(), handle.offset)
        request = Frame(RequestCode.ACK_MESSAGE, encode_header(header))
    else:
        body = BatchAckMessage(acks=BatchAck.of(topic, group, handles), broker_name=broker)
        request = Frame(RequestCode.BATCH_ACK_MESSAGE, {}, encode_body(body))
    answer = await session.ask_broker(broker, request, timeout_s)
    if answer.code != ResponseCode.SUCCESS:
        raise BrokerError(answer.code, answer.remark, broker)


async def change_invisible(
    session: Session,
    group: str,
    message: Message,
    invisible_ms: int,
    timeout_s: float = TIMEOUT_S,
    *,
    counts: bool = True,
) -> None:
    """Hides a message for so long from now on and gives it its new handle. Raises RocketMQError.

    With `counts` False, coming again does not count as another try.
    """
    handle = handle_of(message)
    header = ChangeInvisibleTime(
        consumer_group=group,
        topic=real_topic(session.namespace.wrap(message.topic), group, handle.kind),
        queue_id=handle.queue_id,
        extra_info=message.receipt_handle,
        offset=handle.offset,
        invisible_time=invisible_ms,
        suspend=not counts,
    )
    request = Frame(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, encode_header(header))
    answer = await session.ask_broker(handle.broker_name, request, timeout_s)
    if answer.code != ResponseCode.SUCCESS:
        raise BrokerError(answer.code, answer.remark, handle.broker_name)
    try:
        changed = decode_header(ChangeInvisibleTimeResponse, answer)
    except BadHeader as e:
        raise BrokerError(answer.code, str(e), handle.broker_name) from None
    message.receipt_handle = renewed(handle, changed).encode()


async def wait_for_messages(
    session: Session,
    group: str,
    queue: MessageQueue,
    subscription: Subscription,
    wait_ms: int,
    *,
    in_order: bool = False,
    attempt_id: str | None = None,
) -> bool:
    """Whether there is something to pop, as soon as there is; nothing is taken. Raises RocketMQError."""
    header = Notification(
        consumer_group=group,
        topic=queue.topic,
        queue_id=queue.queue_id,
        poll_time=wait_ms,
        born_time=0,
        order=in_order,
        attempt_id=attempt_id,
        exp_type=subscription.expression_type,
        exp=subscription.sub_string,
    )
    request = Frame(RequestCode.NOTIFICATION, encode_header(header))
    answer = await session.ask_broker(queue.broker_name, request, wait_ms / 1000 + _EXTRA_WAIT_S)
    if answer.code != ResponseCode.SUCCESS:
        raise BrokerError(answer.code, answer.remark, queue.broker_name)
    try:
        return decode_header(NotificationResponse, answer).has_msg
    except BadHeader as e:
        raise BrokerError(answer.code, str(e), queue.broker_name) from None
