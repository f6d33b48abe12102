"""Messages on their way out of a task: packed into requests, pipelined, and every answer awaited.

- Rows without an ordering key go to the queues of their topic in turn, packed into batches. A request that fails is
  tried again at another broker, if there is one, until the timeout.
- Rows with an ordering key go to the queue of their key. One request at a time is on the way to such a queue, and it is
  tried again there only, so that nothing overtakes.
- Delayed messages and half messages travel alone: the servers take no batches of them.
- A topic that is known and has no route is at a broker that is away: it is waited for until the timeout, and never
  made anew elsewhere. One that nobody knows is made by a broker that makes topics (`autoCreateTopicEnable`). If there
  is none, it is an error, once brokers that came back with the name server have had time to say what they have.
- Brokers differ in what they take. A batch that one of them finds too large goes there message by message.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

import msgspec

from skylark.client.choosing import select_by_hash
from skylark.client.errors import (
    BrokerError,
    InvalidMessage,
    NotReachable,
    RequestTimeout,
    RocketMQError,
    RouteNotFound,
)
from skylark.client.message import MessageQueue
from skylark.client.routes import DEFAULT_TOPIC, DEFAULT_TOPIC_QUEUES, TopicRoute
from skylark.client.sending import RETRY_CODES
from skylark.client.validation import MAX_MESSAGE_BYTES
from skylark.net.blocking import BlockingConnection
from skylark.spark.cluster import Cluster
from skylark.spark.rows import Outgoing
from skylark.spark.settings import largest_body_bytes
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import PROPERTY_PRODUCER_GROUP, PROPERTY_TRANSACTION_PREPARED, SYS_TRANSACTION_PREPARED
from skylark.wire.records import encode_batch, encode_properties

_PACK_MESSAGES: Final = 256
_PACK_BYTES: Final = 256 * 1024
_MOST_PACKS: Final = 512  # that are being filled: a table may name many topics
_IN_FLIGHT_BYTES: Final = 16 << 20
_RECORD_BYTES: Final = 32  # what a message takes in a batch besides body and properties
_PAUSE_S: Final = 0.2
_SETTLED_S: Final = 5.0
"""So long after a name server brokers may come back until it counts that none of them has a topic."""
_MOST_TOPICS: Final = 4096
_BUSY: Final = frozenset((ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE))
_STORED: Final = frozenset(
    (
        ResponseCode.SUCCESS,
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
    )
)
"""The broker has the message; it may not be as safe yet as the broker is told to make it."""


class Pack(msgspec.Struct, kw_only=True):
    """Messages that travel in one request."""

    topic: str
    queue: MessageQueue | None
    is_bound: bool
    messages: list[Outgoing]
    size_bytes: int = 0
    deadline_s: float | None = None
    """from its first failure on; rows may come slowly, so an answer may have waited for long to be looked at"""
    failed_broker: str | None = None
    broker: str = ""
    rest: list[Outgoing] = []
    """what goes when this is stored"""


_T = TypeVar("_T")

OnStored = Callable[[Pack, Frame], None]
OnBroker = Callable[[str, str], None]


class Outbox:
    """The messages of one task. `flush` must be called before they count as sent."""

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        timeout_s: float,
        *,
        max_in_flight: int,
        first_turn: int = 0,
        halves: bool = False,
        on_stored: OnStored = lambda pack, reply: None,
        on_broker: OnBroker = lambda broker, topic: None,
        max_body_bytes: int | None = None,
        existing: Iterable[str] = (),
        is_later: bool = False,
    ) -> None:
        """`on_broker` is asked before the first message to a broker, and may refuse it by an exception.

        `existing` are topics that somebody has seen, so that they are waited for. `is_later` says that there was a
        write like this before: a topic that nobody here has seen is also waited for until the timeout.
        """
        self._cluster = cluster
        self._group = group
        self._timeout_s = timeout_s
        self._max_in_flight = max_in_flight
        self._turn = first_turn
        self._halves = halves
        self._on_stored = on_stored
        self._on_broker = on_broker
        self._packs: dict[str | MessageQueue, Pack] = {}
        self._flying: deque[tuple[Pack, BlockingConnection, int]] = deque()
        self._flying_bytes = 0
        self._busy: set[MessageQueue] = set()  # with ordered messages on the way
        self._known: set[str] = set()
        self._max_body_bytes = max_body_bytes
        self._limits: dict[str, int] = {}  # of bodies, by broker
        self._pack_bytes = min(_PACK_BYTES, max_body_bytes or _PACK_BYTES)
        self._existing = dict.fromkeys(existing)
        self._settled_s = timeout_s if is_later else min(timeout_s, _SETTLED_S)
        self._there: tuple[list[str], float] = ([], 0.0)  # the brokers when a topic was missing, and since when

    def put(self, message: Outgoing) -> None:
        """Raises InvalidMessage for one that is too large, RocketMQError as soon as any can't be delivered in time."""
        if len(message.body) > (self._max_body_bytes or MAX_MESSAGE_BYTES):
            self._check_large(message)
        queue = None
        if message.ordering_key is not None:
            queue = select_by_hash(self._queues(message.topic), message.ordering_key)
        place: str | MessageQueue = message.topic if queue is None else queue
        if message.is_delayed or self._halves:
            self._send(_pack(message, queue))
            return
        pack = self._packs.get(place)
        if pack is not None and pack.size_bytes + message.size_bytes + _RECORD_BYTES > self._pack_bytes:
            self._send(self._packs.pop(place))
            pack = None
        if pack is None:
            if len(self._packs) >= _MOST_PACKS:
                self._send(self._packs.pop(next(iter(self._packs))))
            pack = self._packs[place] = _pack(message, queue)
        else:
            pack.messages.append(message)
            pack.size_bytes += message.size_bytes + _RECORD_BYTES
        if len(pack.messages) >= _PACK_MESSAGES:
            self._send(self._packs.pop(place))

    def flush(self) -> None:
        """Returns when every message is stored."""
        while self._packs:
            self._send(self._packs.pop(next(iter(self._packs))))
        while self._flying:
            self._settle()

    def _send(self, pack: Pack) -> None:
        while self._flying and (
            len(self._flying) >= self._max_in_flight
            or self._flying_bytes + pack.size_bytes > _IN_FLIGHT_BYTES
            or (pack.is_bound and pack.queue in self._busy)
        ):
            self._settle()
        self._post(pack)

    def _post(self, pack: Pack) -> None:
        """Puts the request on the way, trying until the deadline."""
        while True:
            try:
                queue = self._choose(pack)
                pack.broker = self._route(pack.topic).broker_of(queue)
                if pack.broker not in self._known:
                    self._on_broker(pack.broker, pack.topic)
                    self._known.add(pack.broker)
                connection = self._cluster.connect(pack.broker, pack.topic)
            except OSError as e:
                self._failed(pack, e)
                continue
            try:
                number = connection.post(self._request(pack, queue))
            except OSError as e:
                self._cluster.drop(connection)
                self._failed(pack, e)
                continue
            self._flying.append((pack, connection, number))
            self._flying_bytes += pack.size_bytes
            if pack.is_bound:
                self._busy.add(queue)
            return

    def _settle(self) -> None:
        """Waits for the oldest request's answer."""
        pack, connection, number = self._flying.popleft()
        self._flying_bytes -= pack.size_bytes
        try:
            reply = connection.take(number)
        except OSError as e:
            self._cluster.drop(connection)
            self._failed(pack, e, pauses=pack.failed_broker is not None)
            self._post(pack)
            return
        if reply.code in _STORED and not (self._halves and reply.code != ResponseCode.SUCCESS):
            if pack.is_bound and pack.queue is not None and not pack.rest:
                self._busy.discard(pack.queue)
            self._on_stored(pack, reply)
            self._post_singly(pack.rest, pack)
            return
        error = BrokerError(reply.code, reply.remark, f"broker {pack.broker} (topic {pack.topic})")
        if reply.code == ResponseCode.MESSAGE_ILLEGAL and len(pack.messages) > 1:
            self._pack_bytes = min(self._pack_bytes, pack.size_bytes // 2)
            self._post_singly(pack.messages, pack)
            return
        if reply.code not in RETRY_CODES or (pack.messages[0].is_delayed and reply.code not in _BUSY):
            raise error
        self._failed(pack, error)
        self._post(pack)

    def _post_singly(self, messages: list[Outgoing], pack: Pack) -> None:
        """The messages of a batch that was refused, one after the other, so that their order stays."""
        if messages:
            first = _pack(messages[0], pack.queue if pack.is_bound else None)
            first.rest = messages[1:]
            self._post(first)

    def _failed(self, pack: Pack, error: Exception, *, pauses: bool = True) -> None:
        """Raises what went wrong when the time is over; else the next attempt may come."""
        pause_s = _PAUSE_S if pauses else 0.0
        now_s = time.monotonic()
        if pack.deadline_s is None:
            waited_s = self._timeout_s / 2 if isinstance(error, TimeoutError) else 0.0  # as long as a wait may last
            pack.deadline_s = now_s + self._timeout_s - waited_s
        if now_s + pause_s >= pack.deadline_s:
            if isinstance(error, RocketMQError):
                raise error
            kind = RequestTimeout if isinstance(error, TimeoutError) else NotReachable
            raise kind(f"topic {pack.topic}: {error}") from error
        pack.failed_broker = pack.broker or None
        self._cluster.forget(pack.topic)
        time.sleep(pause_s)

    def _route(self, topic: str) -> TopicRoute:
        """Raises NotReachable for a topic to wait for, and RouteNotFound for one that never was."""
        try:
            route = self._cluster.route(topic)
        except RouteNotFound:
            route = self._route_of_new(topic)
        if not route.write_queues:
            raise NotReachable(f"topic {topic} has no queue that can be written to now: its brokers are down")
        if not route.is_default and topic not in self._existing:
            if len(self._existing) >= _MOST_TOPICS:
                del self._existing[next(iter(self._existing))]
            self._existing[topic] = None
        return route

    def _route_of_new(self, topic: str) -> TopicRoute:
        if topic in self._existing:
            raise NotReachable(f"topic {topic} has no broker now: the one that has it is away")
        try:
            return self._cluster.route_for_send(topic)
        except RouteNotFound:
            brokers = list(self._cluster.groups())
        if not brokers:
            raise NotReachable(f"topic {topic} has no broker now: none is registered with the name server")
        now_s = time.monotonic()
        if brokers != self._there[0]:
            self._there = brokers, now_s
        what = (
            f"no broker that is there ({', '.join(brokers)}) has topic {topic!r} or makes topics by itself: create it, "
            "or set autoCreateTopicEnable=true at a broker, or start the broker that has it"
        )
        if now_s < self._there[1] + self._settled_s:
            raise NotReachable(what)
        raise RouteNotFound(what)

    def _queues(self, topic: str) -> list[MessageQueue]:
        """All queues of a topic, which a restart of its brokers may hide for a while."""
        return self._waiting(topic, lambda: self._route(topic).write_queues)

    def _waiting(self, topic: str, work: Callable[[], _T]) -> _T:
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                return work()
            except OSError:
                if time.monotonic() + _PAUSE_S >= deadline_s:
                    raise
                self._cluster.forget(topic)
                time.sleep(_PAUSE_S)

    def _check_large(self, message: Outgoing) -> None:
        """Of a body beyond what brokers take by default, all brokers of the topic must say that they take it."""
        size = f"its body has {len(message.body):,} bytes"
        if self._max_body_bytes is not None:
            raise InvalidMessage(f"{size}; the option maxBodyBytes allows {self._max_body_bytes:,}")
        for broker in dict.fromkeys(queue.broker_name for queue in self._queues(message.topic)):
            limit = self._waiting(message.topic, lambda broker=broker: self._limit(broker, message.topic))  # type: ignore[misc]
            if len(message.body) > limit:
                raise InvalidMessage(f"{size}; broker {broker} takes {limit:,} (maxMessageSize)")

    def _limit(self, broker: str, topic: str) -> int:
        if broker not in self._limits:
            self._limits[broker] = largest_body_bytes(self._cluster, broker, topic)
        return self._limits[broker]

    def _choose(self, pack: Pack) -> MessageQueue:
        if pack.is_bound:
            assert pack.queue is not None
            return pack.queue
        route = self._route(pack.topic)
        queues = [queue for queue in route.write_queues if route.broker_of(queue) != pack.failed_broker]
        queues = queues or route.write_queues
        self._turn += 1
        pack.queue = queues[self._turn % len(queues)]
        return pack.queue

    def _request(self, pack: Pack, queue: MessageQueue) -> Frame:
        fields = {
            "a": self._group,
            "b": pack.topic,
            "c": DEFAULT_TOPIC,
            "d": str(DEFAULT_TOPIC_QUEUES),
            "e": str(queue.queue_id),
            "f": str(SYS_TRANSACTION_PREPARED if self._halves else 0),
            "g": str(time.time_ns() // 1_000_000),
            "h": "0",
            "j": "0",
            "k": "false",
        }
        first = pack.messages[0]
        # Apache's broker fails at a request without a body, and takes an empty one in a batch.
        if len(pack.messages) > 1 or not (first.body or first.is_delayed or self._halves):
            fields["m"] = "true"
            body = encode_batch((0, message.body, message.properties) for message in pack.messages)
            return Frame(RequestCode.SEND_BATCH_MESSAGE, fields, body)
        properties = first.properties
        if self._halves:
            properties = properties | {PROPERTY_TRANSACTION_PREPARED: "true", PROPERTY_PRODUCER_GROUP: self._group}
        fields["i"] = encode_properties(properties).decode()
        return Frame(RequestCode.SEND_MESSAGE_V2, fields, first.body)


def _pack(message: Outgoing, queue: MessageQueue | None) -> Pack:
    return Pack(
        topic=message.topic,
        queue=queue,
        is_bound=queue is not None,
        messages=[message],
        size_bytes=message.size_bytes + _RECORD_BYTES,
    )
