"""Messages on their way out of a task: packed into requests, pipelined, and every answer awaited.

- Rows without an ordering key go to the queues of their topic in turn, packed into batches. A request that fails is
  tried again at another broker, if there is one, until the timeout.
- Rows with an ordering key go to the queue of their key. One request at a time is on the way to such a queue, and it is
  tried again there only, so that nothing overtakes.
- Delayed messages and half messages travel alone: the servers take no batches of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from skylark.client.choosing import select_by_hash
from skylark.client.errors import BrokerError, NotReachable, RequestTimeout, RocketMQError
from skylark.client.message import MessageQueue
from skylark.client.routes import DEFAULT_TOPIC, DEFAULT_TOPIC_QUEUES, TopicRoute
from skylark.client.sending import RETRY_CODES
from skylark.net.blocking import BlockingConnection
from skylark.spark.cluster import Cluster
from skylark.spark.rows import Outgoing
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import PROPERTY_PRODUCER_GROUP, PROPERTY_TRANSACTION_PREPARED, SYS_TRANSACTION_PREPARED
from skylark.wire.records import encode_batch, encode_properties

_PACK_MESSAGES: Final = 256
_PACK_BYTES: Final = 256 * 1024
_MOST_PACKS: Final = 512  # that are being filled: a table may name many topics
_IN_FLIGHT_BYTES: Final = 16 << 20
_PAUSE_S: Final = 0.2
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
    deadline_s: float = 0.0
    failed_broker: str | None = None
    broker: str = ""


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
    ) -> None:
        """`on_broker` is asked before the first message to a broker, and may refuse it by an exception."""
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

    def put(self, message: Outgoing) -> None:
        """Raises RocketMQError as soon as any message can't be delivered in time."""
        queue = None
        if message.ordering_key is not None:
            queue = select_by_hash(self._queues(message.topic), message.ordering_key)
        place: str | MessageQueue = message.topic if queue is None else queue
        if message.is_delayed or self._halves:
            self._send(_pack(message, queue))
            return
        pack = self._packs.get(place)
        if pack is not None and pack.size_bytes + message.size_bytes > _PACK_BYTES:
            self._send(self._packs.pop(place))
            pack = None
        if pack is None:
            if len(self._packs) >= _MOST_PACKS:
                self._send(self._packs.pop(next(iter(self._packs))))
            pack = self._packs[place] = _pack(message, queue)
        else:
            pack.messages.append(message)
            pack.size_bytes += message.size_bytes
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
        pack.deadline_s = time.monotonic() + self._timeout_s
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
            if pack.is_bound and pack.queue is not None:
                self._busy.discard(pack.queue)
            self._on_stored(pack, reply)
            return
        error = BrokerError(reply.code, reply.remark, f"broker {pack.broker} (topic {pack.topic})")
        if reply.code not in RETRY_CODES or pack.messages[0].is_delayed:
            raise error
        self._failed(pack, error)
        self._post(pack)

    def _failed(self, pack: Pack, error: Exception, *, pauses: bool = True) -> None:
        """Raises what went wrong when the time is over; else the next attempt may come."""
        pause_s = _PAUSE_S if pauses else 0.0
        if time.monotonic() + pause_s >= pack.deadline_s:
            if isinstance(error, RocketMQError):
                raise error
            kind = RequestTimeout if isinstance(error, TimeoutError) else NotReachable
            raise kind(f"topic {pack.topic}: {error}") from error
        pack.failed_broker = pack.broker or None
        self._cluster.forget(pack.topic)
        time.sleep(pause_s)

    def _route(self, topic: str) -> TopicRoute:
        route = self._cluster.route_for_send(topic)
        if not route.write_queues:
            raise NotReachable(f"topic {topic} has no queue that can be written to now: its brokers are down")
        return route

    def _queues(self, topic: str) -> list[MessageQueue]:
        """All queues of a topic, which a restart of its brokers may hide for a while."""
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._route(topic).write_queues
            except NotReachable:
                if time.monotonic() + _PAUSE_S >= deadline_s:
                    raise
                self._cluster.forget(topic)
                time.sleep(_PAUSE_S)

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
        if len(pack.messages) > 1:
            fields["m"] = "true"
            body = encode_batch((0, message.body, message.properties) for message in pack.messages)
            return Frame(RequestCode.SEND_BATCH_MESSAGE, fields, body)
        message = pack.messages[0]
        properties = message.properties
        if self._halves:
            properties = properties | {PROPERTY_TRANSACTION_PREPARED: "true", PROPERTY_PRODUCER_GROUP: self._group}
        fields["i"] = encode_properties(properties).decode()
        return Frame(RequestCode.SEND_MESSAGE_V2, fields, message.body)


def _pack(message: Outgoing, queue: MessageQueue | None) -> Pack:
    return Pack(
        topic=message.topic,
        queue=queue,
        is_bound=queue is not None,
        messages=[message],
        size_bytes=message.size_bytes,
    )
