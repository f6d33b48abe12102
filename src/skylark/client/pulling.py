"""Pulling one queue: what was pulled and is not consumed yet, one pull, and the loop of pulls.

The buffer of a queue holds messages by their queue offset, in rising order, until they are finished. What may be
committed is the lowest offset that is not finished: whatever lies before it is done for good.

The loop holds back while the buffer is full (1,000 messages, 100 MiB, or 2,000 between the lowest and the highest
offset) and asks again at once otherwise; the broker answers an empty queue only when a message comes, or after 15 s.
What goes wrong in a turn is logged, and the next one begins where it did. Where there is no master, a slave is read.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Final, Protocol

import msgspec

from skylark.client.errors import BrokerError, InvalidMessage, NotReachable, RequestTimeout, RocketMQError
from skylark.client.filter_classes import choose_server
from skylark.client.message import Message
from skylark.client.options import check_count
from skylark.client.reading import read_messages
from skylark.client.session import Session
from skylark.client.subscriptions import wants
from skylark.wire.bodies import MessageQueue, Subscription
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import PullMessage
from skylark.wire.message import BadRecord
from skylark.wire.routes import MASTER_ID
from skylark.wire.typed import encode_header

log = logging.getLogger(__name__)

SUSPEND_MS: Final = 15_000
SUSPENDED_TIMEOUT_S: Final = 30.0
FULL_WAIT_S: Final = 0.05
ERROR_WAIT_S: Final = 3.0
FLOW_CONTROL_WAIT_S: Final = 0.02
MAX_IDLE_S: Final = 120.0
"""A loop that has not pulled for so long is stuck, as for RocketMQ's client."""

_FIRST_ERROR_WAIT_S: Final = 0.1

_MAX_HELD: Final = 65535
_COMMIT_OFFSET: Final = 1
_MAY_SUSPEND: Final = 2
_BRINGS_SUBSCRIPTION: Final = 4
_CLASS_FILTER: Final = 8


_UNHEARD: Final = (
    ResponseCode.SUBSCRIPTION_NOT_EXIST,
    ResponseCode.SUBSCRIPTION_NOT_LATEST,
    ResponseCode.FILTER_DATA_NOT_EXIST,
    ResponseCode.FILTER_DATA_NOT_LATEST,
)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much of one queue may wait to be consumed."""

    messages: int = 1000
    size_bytes: int = 100 * 1024 * 1024
    span: int = 2000


def check_limits(limits: object) -> None:
    if not isinstance(limits, Limits):
        raise InvalidMessage(f"limits is {limits!r}; it must be skylark.client.pulling.Limits")
    check_count("limits.messages", limits.messages, 1, _MAX_HELD)
    check_count("limits.size_bytes", limits.size_bytes, 1)
    check_count("limits.span", limits.span, 1)


class Buffer:
    """The messages of one queue that were pulled and are not finished."""

    __slots__ = ("_held", "_order", "_sizes", "last_offset", "size_bytes")

    def __init__(self) -> None:
        self._held: dict[int, Message] = {}
        self._sizes: dict[int, int] = {}  # as they came: a listener may give its message another body
        self._order: deque[int] = deque()  # offsets, rising; those that are not held any more are finished
        self.size_bytes = 0
        self.last_offset = -1
        """The highest offset that was ever put in."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, offset: int) -> bool:
        return offset in self._held

    @property
    def first_offset(self) -> int:
        """The lowest offset that is not finished, -1 when there is none."""
        order = self._order
        while order and order[0] not in self._held:
            order.popleft()
        return order[0] if order else -1

    @property
    def span(self) -> int:
        """The distance between the lowest offset that is not finished and the highest that was pulled."""
        first = self.first_offset
        return 0 if first < 0 else self.last_offset - first

    def put(self, messages: Iterable[Message]) -> list[Message]:
        """Adds messages; those that are new come back. An offset that was there before is passed over."""
        added = []
        for message in messages:
            offset = message.queue_offset
            if offset <= self.last_offset:
                continue
            self._held[offset] = message
            self._order.append(offset)
            self.last_offset = offset
            self._sizes[offset] = size_bytes = len(message.body)
            self.size_bytes += size_bytes
            added.append(message)
        return added

    def first(self, count: int) -> list[Message]:
        """The lowest messages that are not finished, in order."""
        if self.first_offset < 0:
            return []
        found: list[Message] = []
        for offset in self._order:
            message = self._held.get(offset)
            if message is not None:
                found.append(message)
                if len(found) == count:
                    break
        return found

    def finish(self, messages: Iterable[Message]) -> int:
        """Lets messages go; the offset that may be committed now, -1 as long as nothing was ever put in."""
        for message in messages:
            if self._held.pop(message.queue_offset, None) is not None:
                self.size_bytes -= self._sizes.pop(message.queue_offset)
        first = self.first_offset
        return first if first >= 0 else self.last_offset + 1 if self.last_offset >= 0 else -1

    def is_full(self, limits: Limits) -> bool:
        return len(self._held) > limits.messages or self.size_bytes > limits.size_bytes or self.span > limits.span


class PullStatus(Enum):
    FOUND = "FOUND"
    NO_NEW_MESSAGE = "NO_NEW_MESSAGE"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    OFFSET_ILLEGAL = "OFFSET_ILLEGAL"


_STATUSES: Final[dict[int, PullStatus]] = {
    ResponseCode.SUCCESS: PullStatus.FOUND,
    ResponseCode.PULL_NOT_FOUND: PullStatus.NO_NEW_MESSAGE,
    ResponseCode.PULL_RETRY_IMMEDIATELY: PullStatus.NO_MATCHED_MESSAGE,
    ResponseCode.PULL_OFFSET_MOVED: PullStatus.OFFSET_ILLEGAL,
}


class Pulled(msgspec.Struct):
    """What a pull brought."""

    status: PullStatus
    next_offset: int
    min_offset: int
    max_offset: int
    suggested_broker_id: int = MASTER_ID
    messages: list[Message] = []
    unreadable: dict[int, str] = {}
    """queue offset -> why the body of that message, which is among the others, can't be inflated"""


async def pull(
    session: Session,
    group: str,
    queue: MessageQueue,
    subscription: Subscription,
    offset: int,
    *,
    max_messages: int = 32,
    commit_offset: int = -1,
    suspend_ms: int = 0,
    brings_subscription: bool = False,
    broker_id: int = MASTER_ID,
    timeout_s: float = SUSPENDED_TIMEOUT_S,
) -> Pulled:
    """One pull. Raises BrokerError, NotReachable or RequestTimeout.

    If there is no broker of that id, another one of the name is asked. A `commit_offset` above zero is committed on the
    way, though not by a slave. The messages are those of the subscription's tags; where several tags share a hash code,
    the others are taken out here.
    """
    if not subscription.class_filter_mode:
        broker_id = await session.readable_id(queue, broker_id)
    master = broker_id == MASTER_ID
    sys_flag = (
        (_COMMIT_OFFSET if commit_offset > 0 and master else 0)
        | (_MAY_SUSPEND if suspend_ms else 0)
        | (_BRINGS_SUBSCRIPTION if brings_subscription else 0)
        | (_CLASS_FILTER if subscription.class_filter_mode else 0)
    )
    header = PullMessage(
        consumer_group=group,
        topic=queue.topic,
        queue_id=queue.queue_id,
        queue_offset=offset,
        max_msg_nums=max_messages,
        sys_flag=sys_flag,
        commit_offset=max(commit_offset, 0),
        suspend_timeout_millis=suspend_ms,
        sub_version=subscription.sub_version,
        subscription=subscription.sub_string if brings_subscription else None,
        expression_type=subscription.expression_type,
    )
    request = Frame(RequestCode.PULL_MESSAGE, encode_header(header))
    if subscription.class_filter_mode:
        answer = await session.ask_address(choose_server(session, queue), request, timeout_s)
    else:
        answer = await session.ask_queue(queue, request, timeout_s, broker_id=broker_id)
    return read_answer(answer, queue, subscription, offset)


def read_answer(answer: Frame, queue: MessageQueue, subscription: Subscription, offset: int = 0) -> Pulled:
    """The messages and offsets in the answer to a pull from `offset` on. Raises BrokerError."""
    status = _STATUSES.get(answer.code)
    if status is None:
        raise BrokerError(answer.code, answer.remark, queue.broker_name)
    fields = answer.fields
    pulled = Pulled(
        status,
        int(fields.get("nextBeginOffset", 0)),
        int(fields.get("minOffset", 0)),
        int(fields.get("maxOffset", 0)),
        int(fields.get("suggestWhichBrokerId", MASTER_ID)),
        [],
        {},
    )
    if status is PullStatus.FOUND:
        try:
            _read_messages(pulled, answer, queue, subscription, offset)
        except BadRecord as e:
            raise BrokerError(answer.code, f"the messages can't be read: {e}", queue.broker_name) from e
    return pulled


def _read_messages(pulled: Pulled, answer: Frame, queue: MessageQueue, subscription: Subscription, offset: int) -> None:
    delta = int(answer.fields.get("offsetDelta", 0))
    read, is_whole = read_messages(answer.body, queue.broker_name)
    if not is_whole:
        pulled.next_offset = read[-1][0].queue_offset + delta + 1
    for message, reason in read:
        message.queue_offset += delta
        message.queue_id = queue.queue_id  # a logical queue has another number where a broker keeps it
        # Where a batch is stored as one record, the answer begins with the batch that the offset lies in.
        if message.queue_offset < offset or not wants(subscription, message.tag):
            continue
        if reason is not None:
            pulled.unreadable[message.queue_offset] = reason
        pulled.messages.append(message)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Sink(Protocol):
    """Where a pull loop gets what it needs, and takes what it found. The methods must not block."""

    def subscription(self) -> Subscription | None:
        """What to ask for; None when the topic is not subscribed to any more."""

    def commit_offset(self) -> int:
        """What may be committed on the way, -1 for nothing."""

    def found(self, pulled: Pulled) -> None:
        """Messages came."""

    def nothing_until(self, next_offset: int) -> None:
        """There is nothing for us up to that offset."""

    def moved(self, next_offset: int) -> None:
        """The offset asked for does not exist: the loop ends, go on from `next_offset` with another."""


class PullLoop:
    """Pulls one queue until it is cancelled."""

    def __init__(
        self,
        session: Session,
        group: str,
        queue: MessageQueue,
        buffer: Buffer,
        sink: Sink,
        *,
        limits: Limits,
        max_messages: int,
        running: asyncio.Event,
        interval_s: float = 0.0,
        now_ms: Callable[[], int],
        pulls_again: Callable[[], None] = lambda: None,
    ) -> None:
        """`pulls_again` is called when the broker answers after it did not: it may have been started anew."""
        self._pulls_again = pulls_again
        self._session = session
        self._group = group
        self._queue = queue
        self._buffer = buffer
        self._sink = sink
        self._limits = limits
        self._max_messages = max_messages
        self._running = running
        self._interval_s = interval_s
        self._now_ms = now_ms
        self._broker_id = MASTER_ID
        self._failures = 0
        self._offset = 0
        self._turned_s = asyncio.get_running_loop().time()  # the last turn or look at a full buffer
        self.has_moved = False
        """It ended, and another loop goes on from another offset."""
        self.room = asyncio.Event()
        """Set whenever messages are finished: a full buffer may have room again."""
        self.last_pull_ms = now_ms()

    def is_stuck(self, now_s: float) -> bool:
        """Whether it has not pulled for two minutes although it should."""
        return self._running.is_set() and now_s - self._turned_s > MAX_IDLE_S + self._interval_s

    async def run(self, offset: int) -> None:
        """Goes on from `offset`."""
        self._offset = offset
        while not self.has_moved:
            try:
                if not self._running.is_set():
                    self._turned_s = math.inf
                    await self._running.wait()
                self._turned_s = asyncio.get_running_loop().time()
                try:
                    await self._turn()
                except RocketMQError as e:
                    await self._back_off(e)
            except asyncio.CancelledError:
                if _is_cancelled():
                    raise
                await self._begin_again()  # it is something that we waited for that was cancelled
            except Exception:
                await self._begin_again()

    async def _begin_again(self) -> None:
        log.exception("%s: something went wrong while %s was pulled, which goes on", self._group, self._queue)
        self._failures += 1
        await asyncio.sleep(ERROR_WAIT_S)

    async def _turn(self) -> None:
        await self._wait_for_room()
        pulled = await self._pull(self._offset)
        self._broker_id = pulled.suggested_broker_id
        if pulled.status is PullStatus.OFFSET_ILLEGAL:
            log.warning("%s asked for offset %d of %s, and is sent to %d", self._group, self._offset, self._queue,
                        pulled.next_offset)  # fmt: skip
            self._sink.moved(pulled.next_offset)
            self.has_moved = True
            return
        self._note_success()
        self._offset = pulled.next_offset
        if pulled.messages:
            await self._hand_over(pulled)
        else:
            self._sink.nothing_until(self._offset)
        if self._interval_s:
            await asyncio.sleep(self._interval_s)

    async def _hand_over(self, pulled: Pulled) -> None:
        try:
            self._sink.found(pulled)
        except Exception:
            # Nobody knows what was taken and what not: all that is not finished is pulled again, by another loop.
            first = self._buffer.first_offset
            self._offset = first if first >= 0 else pulled.messages[0].queue_offset
            await self._begin_again()
            self._sink.moved(self._offset)
            self.has_moved = True

    async def _pull(self, offset: int) -> Pulled:
        subscription = self._sink.subscription()
        if subscription is None:
            raise NotReachable(f"topic {self._queue.topic} is not subscribed to")
        self.last_pull_ms = self._now_ms()
        return await pull(
            self._session,
            self._group,
            self._queue,
            subscription,
            offset,
            max_messages=self._max_messages,
            commit_offset=self._sink.commit_offset(),
            suspend_ms=0 if self._failures else SUSPEND_MS,  # after failures, to hear at once that it is back
            broker_id=self._broker_id,
        )

    async def _wait_for_room(self) -> None:
        while self._buffer.is_full(self._limits):
            self._turned_s = asyncio.get_running_loop().time()
            self.room.clear()
            try:
                async with asyncio.timeout(FULL_WAIT_S):
                    await self.room.wait()
            except TimeoutError:
                continue

    async def _back_off(self, error: RocketMQError) -> None:
        self._failures += 1
        self._broker_id = MASTER_ID
        if self._failures == 1:
            log.warning("%s can't pull %s and goes on trying: %s", self._group, self._queue, error)
        if isinstance(error, BrokerError):
            if error.code == ResponseCode.FLOW_CONTROL:
                await asyncio.sleep(FLOW_CONTROL_WAIT_S)
                return
            if error.code in _UNHEARD:
                # The broker has not heard of this member yet, or forgot it.
                await self._session.heartbeat()
        elif isinstance(error, NotReachable | RequestTimeout):
            await self._look_again()
        await asyncio.sleep(min(_FIRST_ERROR_WAIT_S * 2 ** min(self._failures - 1, 10), ERROR_WAIT_S))

    async def _look_again(self) -> None:
        """The broker may have moved. Those who look for one topic at a time share one request."""
        try:
            await self._session.routes.get(self._queue.topic, refresh=True)
        except RocketMQError as e:
            log.debug("the route of %s is not known: %s", self._queue.topic, e)

    def _note_success(self) -> None:
        if self._failures:
            self._failures = 0
            log.info("%s pulls %s again", self._group, self._queue)
            self._pulls_again()
