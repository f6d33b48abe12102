"""What a producer keeps of a message between the call and its receipt, and the bounds on how many there are.

A unique id is, in hex: 4 bytes of IP address, 2 of process id, 4 that tell the clients of a process apart, 4 of
milliseconds since the month began, 2 of a counter. Apache's tools read the time out of it.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, Final, Protocol

import msgspec

from skylark.client.errors import InvalidMessage
from skylark.client.message import MessageQueue, Receipt
from skylark.client.validation import check_encoded_properties
from skylark.net.connection import Connection
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.records import encode_properties

BATCH_OVERHEAD_BYTES: Final = 22
"""of a message in a batch, besides its body and its encoded properties"""
RETRY_CODES: Final = frozenset(
    {
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.NO_PERMISSION,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.NO_BUYER_ID,
        ResponseCode.NOT_IN_CURRENT_UNIT,
        ResponseCode.GO_AWAY,
    }
)
"""Answers after which another broker may do better; the same as in Apache's client."""
_MAX_UNSEEN: Final = 1000
BatchItem = tuple[int, bytes, dict[str, str]]
"""flag, body and properties of one message of a batch"""


class Sending:
    """One request on its way: a message, or the part of a batch that fits into one."""

    __slots__ = (
        "attempts_left", "batch_ids", "body", "broker", "code", "connection", "context", "crowd", "deadline_s",
        "encoded", "flag", "future", "is_bound", "is_left_alone", "is_patient", "msg_id", "opaque", "properties",
        "queue", "size_bytes", "started_s", "sys_flag", "topic", "tried", "until_s",
    )  # fmt: skip

    def __init__(self, topic: str, body: bytes, properties: dict[str, str], encoded: str, msg_id: str) -> None:
        self.topic = topic
        self.body = body
        self.properties = properties
        self.encoded = encoded  # the same as they travel
        self.msg_id = msg_id
        self.code = RequestCode.SEND_MESSAGE_V2
        self.batch_ids: list[str] | None = None
        self.flag = 0
        self.sys_flag = 0
        self.size_bytes = len(body)
        self.queue: MessageQueue | None = None  # where it goes; given by the caller, or chosen for each attempt
        self.broker = ""  # the one that the last attempt went to
        self.is_bound = False  # it goes to that queue or nowhere
        self.is_patient = False  # while its broker is away it is tried until its time is over
        self.is_left_alone = False  # its sender goes on without waiting for it
        self.attempts_left = 0
        self.tried: list[str] = []  # names of the brokers, one an attempt
        self.deadline_s = 0.0  # of the whole call
        self.started_s = 0.0  # the last attempt
        self.until_s = 0.0  # the end of the last attempt
        self.connection: Connection | None = None
        self.opaque = 0
        self.future: asyncio.Future[Any]  # of a receipt, or of a list of them for a batch
        self.context: SendContext | None = None
        self.crowd: Crowd  # from its departure on

    def abandon(self) -> None:
        """Nobody asks how it ended any more."""
        if not self.future.cancel() and not self.future.cancelled():
            self.future.exception()

    def label(self, properties: dict[str, str]) -> None:
        """Adds properties that belong to the system."""
        self.properties |= properties
        encoded = encode_properties(self.properties)
        check_encoded_properties(encoded)
        self.encoded = encoded.decode()


class SendContext(msgspec.Struct, kw_only=True):
    """What hooks see of one attempt to send. `before_send` may change the properties."""

    group: str
    topic: str
    body: bytes
    properties: dict[str, str]
    msg_id: str
    queue: MessageQueue
    attempt: int
    started_ms: int = 0
    receipts: list[Receipt] = []
    error: Exception | None = None


class SendHook:
    """Called around every attempt to send; what it raises is logged and changes nothing."""

    def before_send(self, context: SendContext) -> None:
        """The queue is chosen, nothing is sent yet."""

    def after_send(self, context: SendContext) -> None:
        """`receipts` (several for a batch) or `error` are set; for a one-way message, neither is."""


class Failed(Protocol):
    """A future that failed. asyncio keeps account of whether anybody asked it, for the line that it logs otherwise."""

    @property
    def _log_traceback(self) -> bool: ...

    def exception(self) -> BaseException | None: ...


class Unseen:
    """Messages that failed while their sender went on, and whose futures nobody asks: for `flush` to tell."""

    def __init__(self) -> None:
        self._failed: deque[Failed] = deque()
        self._lost = 0  # those that there was no room for

    def add(self, failed: Failed) -> None:
        while self._failed and not self._failed[0]._log_traceback:
            self._failed.popleft()
        if len(self._failed) < _MAX_UNSEEN:
            self._failed.append(failed)
        else:
            self._lost += 1

    def take(self) -> tuple[int, BaseException] | None:
        """How many there are, and the first error; by that they are seen."""
        errors = [failed.exception() for failed in self._failed if failed._log_traceback]
        lost, self._lost = self._lost, 0
        self._failed.clear()
        return (len(errors) + lost, errors[0]) if errors and errors[0] is not None else None


class UniqueIds:
    """Makes the ids of a producer's messages."""

    def __init__(self, ip: str, pid: int) -> None:
        parts = ip.split(".")
        address = bytes(int(part) for part in parts) if len(parts) == 4 else secrets.token_bytes(4)
        self._prefix = (address + (pid & 0xFFFF).to_bytes(2, "big") + secrets.token_bytes(4)).hex().upper()
        self._numbers = itertools.count(1)  # threads may take ids at the same time
        self._month_ms = 0
        self._next_month_ms = 0

    def take(self, now_ms: int) -> str:
        if now_ms >= self._next_month_ms:
            self._begin_month(now_ms)
        number = next(self._numbers) & 0xFFFF
        return f"{self._prefix}{(now_ms - self._month_ms) & 0xFFFFFFFF:08X}{number:04X}"

    def _begin_month(self, now_ms: int) -> None:
        first = datetime.fromtimestamp(now_ms / 1000).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        following = first.replace(year=first.year + first.month // 12, month=first.month % 12 + 1)
        self._month_ms = int(first.timestamp() * 1000)
        self._next_month_ms = int(following.timestamp() * 1000)


class Crowd:
    """What departed between one flush and the next, and who waits until all of it has ended."""

    __slots__ = ("count", "waiters")

    def __init__(self) -> None:
        self.count = 0
        self.waiters: list[asyncio.Future[None]] = []


class Slots:
    """Room for so many messages, and so many bytes, at a time. One message always fits."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._crowd = Crowd()
        self._earlier: list[Crowd] = []
        self.count = 0
        self.size_bytes = 0

    def has_room(self, size_bytes: int) -> bool:
        return not self.count or (self.count < self._max_count and self.size_bytes + size_bytes <= self._max_bytes)

    def take(self, size_bytes: int) -> Crowd:
        """Only after `has_room` or `wait`, with no await in between. What it returns is given back."""
        self.count += 1
        self.size_bytes += size_bytes
        crowd = self._crowd
        crowd.count += 1
        return crowd

    async def wait(self, size_bytes: int) -> None:
        """Returns when there is room. Who waits first is woken first."""
        while not self.has_room(size_bytes):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake()  # the turn goes to the next
                raise
        # There may be room for more than one; each that is let in lets the next one try.
        asyncio.get_running_loop().call_soon(self._wake)

    def give_back(self, size_bytes: int, crowd: Crowd) -> None:
        self.count -= 1
        self.size_bytes -= size_bytes
        crowd.count -= 1
        if self._waiters:
            self._wake()
        if not crowd.count and crowd.waiters:
            _tell(crowd.waiters)
        if not self.count and self._idle:
            _tell(self._idle)

    async def drained(self) -> None:
        """Returns when nothing is on its way."""
        while self.count:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(waiter)
            await waiter

    async def settled(self) -> None:
        """Returns when all that is on its way now has ended; what departs later is not waited for."""
        self._earlier = [crowd for crowd in self._earlier if crowd.count]
        if self._crowd.count:
            self._earlier.append(self._crowd)
            self._crowd = Crowd()
        for crowd in list(self._earlier):
            while crowd.count:
                waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                crowd.waiters.append(waiter)
                await waiter

    def _wake(self) -> None:
        while self._waiters and self.has_room(0):
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return


def _tell(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()


def split_batch(items: Sequence[BatchItem], sizes: Sequence[int], max_bytes: int) -> Iterator[Sequence[BatchItem]]:
    """Cuts a batch into parts, the `sizes` of each adding up to at most `max_bytes`. Raises InvalidMessage."""
    start = total = 0
    for index, size in enumerate(sizes):
        if size > max_bytes:
            raise InvalidMessage(f"message {index} takes {size} bytes in a batch; {max_bytes} are allowed")
        if total + size > max_bytes:
            yield items[start:index]
            start, total = index, 0
        total += size
    if start < len(items):
        yield items[start:]


def now_ms() -> int:
    return time.time_ns() // 1_000_000
