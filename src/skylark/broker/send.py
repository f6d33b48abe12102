"""SEND_MESSAGE in its three forms (10, 310, and batches 320): check, build, store, acknowledge.

This is the hottest path of the broker: one pass, nothing awaited unless the acknowledgement has to wait for the disk.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import deque
from collections.abc import Awaitable, Callable
from functools import lru_cache, partial
from time import perf_counter
from typing import Final

from skylark.broker.config import BrokerConfig
from skylark.broker.groups import Groups
from skylark.broker.halves import become_half
from skylark.broker.internal import (
    INTERNAL_PROPERTIES,
    INTERNAL_TOPICS,
    SENDERS_FLAGS,
    is_internal,
    part_without_internal,
    without_internal,
)
from skylark.broker.locks import Locks
from skylark.broker.message_types import check_type, place_by_priority
from skylark.broker.parking import DELAY_PROPERTIES, recall_handle
from skylark.broker.put import Put
from skylark.broker.retry import buried, bury, origin_of
from skylark.broker.stats import Stats
from skylark.broker.topics import DLQ_PREFIX, RETRY_PREFIX, Topics, suggest, validate_topic
from skylark.broker.turns import next_turn
from skylark.net.allowance import TURN_S
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.store import Appended
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.lookup import PropertyScan, find_text, property_key, scan_properties
from skylark.wire.message import (
    PROPERTY_CLUSTER,
    PROPERTY_DELAY_LEVEL,
    PROPERTY_MSG_REGION,
    PROPERTY_PRIORITY,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_TRACE_SWITCH,
    PROPERTY_TRANSACTION_PREPARED,
    PROPERTY_UNIQUE_KEY,
    PROPERTY_WAIT_STORE_OK,
    SYS_MULTI_TAGS,
    BadRecord,
    Message,
)
from skylark.wire.records import BatchPart, decode_properties, encode_properties, split_batch
from skylark.wire.sending import SendRequest, acknowledgement, decode_send
from skylark.wire.tables import PERM_READ, PERM_WRITE, UNIT_SUBSCRIPTION, UNIT_TOPIC, TopicConfig

MAX_BATCH_MESSAGES: Final = 1 << 16
"""Their ids are in the header of the acknowledgement, which has 16 MB at most."""

_Store = Callable[[], Frame | Awaitable[Frame]]
_WAIT: Final = property_key(PROPERTY_WAIT_STORE_OK)
# A message that has one of these is not stored as it comes.
_SPECIAL: Final = frozenset(
    name.encode()
    for name in DELAY_PROPERTIES
    | INTERNAL_PROPERTIES
    | {
        PROPERTY_CLUSTER,
        PROPERTY_MSG_REGION,
        PROPERTY_PRIORITY,
        PROPERTY_TIMER_OUT_MS,
        PROPERTY_TRACE_SWITCH,
        PROPERTY_TRANSACTION_PREPARED,
    }
)


class Sends:
    """Takes messages from producers."""

    def __init__(
        self,
        config: BrokerConfig,
        put: Put,
        topics: Topics,
        groups: Groups,
        locks: Locks,
        published: Callable[[], Awaitable[None]],
        stats: Stats,
        clock: Callable[[], int],
        steady_clock: Callable[[], int],
    ) -> None:
        """`published()` waits for the name servers to know a new topic; the locks go by `steady_clock`."""
        self._config = config
        self._put = put
        self._topics = topics
        self._find_topic = topics.get
        self._groups = groups
        self._locks = locks
        self._published = published
        self._stats = stats
        self._clock = clock
        self._steady_clock = steady_clock
        self._first: dict[str, deque[tuple[asyncio.Future[Frame | Awaitable[Frame]], _Store]]] = {}
        """What waits for a topic to be created, by its name."""
        self._creations: set[asyncio.Task[None]] = set()
        # Clients can't create internal topics, so that those of the start are all.
        self._closed = INTERNAL_TOPICS.union(t.topic_name for t in topics.all() if is_internal(t.topic_name))

    def handlers(self) -> dict[int, Handler]:
        return {
            RequestCode.SEND_MESSAGE: self.send,
            RequestCode.SEND_MESSAGE_V2: self.send,
            RequestCode.SEND_BATCH_MESSAGE: self.send,
        }

    def send(self, frame: Frame, connection: Connection) -> Frame | Awaitable[Frame]:
        request = decode_send(frame)
        topic = self._find_topic(request.topic)
        if self._first and request.topic in self._first:
            topic = None  # those that came before are not stored yet
        if topic is not None and self._may_be_plain(request):
            scan = scan_properties(request.properties, _SPECIAL)
            if not scan.is_special and scan.unique_end:
                self._check(request, topic, connection)
                return self._send_plain(frame, request, _message(frame, request, topic, connection), scan)
        if topic is None:
            return self._send_first(frame, request, connection)
        topics = len(self._topics)
        answer = self._send(frame, request, connection)
        return answer if len(self._topics) == topics else self._when_published(answer)

    def _send_first(self, frame: Frame, request: SendRequest, connection: Connection) -> Awaitable[Frame]:
        """Stores a message of a topic that is not there yet, once it is: on disk, so that no crash parts the two.

        Messages that come meanwhile wait behind it: they are stored in the order in which they came.
        """
        name = request.topic
        if name not in self._first:
            host = connection.peer[0]
            topic = self._new_topic(request, host)
            self._topics.take_share(name, host)
            self._first[name] = deque()
            creation = asyncio.create_task(self._create(topic, host))
            self._creations.add(creation)
            creation.add_done_callback(self._creations.discard)
        stored: asyncio.Future[Frame | Awaitable[Frame]] = asyncio.get_running_loop().create_future()
        self._first[name].append((stored, partial(self._send, frame, request, connection)))
        return self._when_stored(stored)

    async def _create(self, topic: TopicConfig, host: str) -> None:
        """Creates a topic, then stores what waits for it, and behind that what comes meanwhile. That takes turns: a new
        queue takes longer than a message does, and many topics may be on disk at the same time.
        """
        failure: RequestFailed | None = None
        try:
            await self._topics.table.idle((topic.topic_name,))
            if topic.topic_name not in self._topics:  # else somebody has just created it
                await self._topics.create(topic)
        except RequestFailed as e:
            failure = e
            self._topics.give_back_share(topic.topic_name)
        waiting = self._first[topic.topic_name]
        while waiting:
            await next_turn(host)
            until_s = perf_counter() + TURN_S
            while waiting:
                _store(*waiting.popleft(), failure)
                if perf_counter() >= until_s:
                    break
        del self._first[topic.topic_name]

    async def _when_stored(self, stored: asyncio.Future[Frame | Awaitable[Frame]]) -> Frame:
        return await self._when_published(await stored)

    async def _when_published(self, answer: Frame | Awaitable[Frame]) -> Frame:
        """The first message of a new topic is acknowledged when consumers can find the topic."""
        await self._published()
        return answer if isinstance(answer, Frame) else await answer

    def _may_be_plain(self, request: SendRequest) -> bool:
        if request.is_batch or request.topic.startswith(RETRY_PREFIX):
            return False
        return not self._config.enable_topic_message_type_check

    def _send_plain(
        self, frame: Frame, request: SendRequest, message: Message, scan: PropertyScan
    ) -> Frame | Awaitable[Frame]:
        """Stores a message of which nothing but its keys and tags matters to a broker: most are."""
        config = self._config
        stored = request.properties
        separator = b"" if stored.endswith(b"\x02") else b"\x02"
        properties = stored + separator + _added(config.region_id, config.trace_on, config.broker_cluster_name)
        part = BatchPart(message.flag, message.body, properties, scan)
        appended = self._put.batch(message, [part], self._clock())
        unique_key = stored[scan.unique_at : scan.unique_end].decode("utf-8", "replace")
        reply = self._acknowledge(frame, appended, message.queue_id, unique_key)
        if self._put.is_synchronous and find_text(stored, 0, _WAIT) != "false":
            return self._put.when_flushed(appended, reply)
        return reply

    def _send(self, frame: Frame, request: SendRequest, connection: Connection) -> Frame | Awaitable[Frame]:
        topic = self.check(request, connection)
        message = _message(frame, request, topic, connection)
        if request.is_batch:
            return self._send_batch(frame, request, topic, message)
        return self._send_special(frame, request, topic, message, connection)

    def _send_special(
        self, frame: Frame, request: SendRequest, topic: TopicConfig, message: Message, connection: Connection
    ) -> Frame | Awaitable[Frame]:
        message.properties = self._properties(request)
        if self._config.enable_topic_message_type_check:
            check_type(topic, message.properties)
        if PROPERTY_PRIORITY in message.properties:
            place_by_priority(message, topic)
        is_half = self._is_half(message)
        is_spent = request.topic.startswith(RETRY_PREFIX) and self._to_dead_letters_if_spent(
            request, message, connection
        )
        unique_key = message.properties.get(PROPERTY_UNIQUE_KEY)
        if not unique_key:
            unique_key = message.properties[PROPERTY_UNIQUE_KEY] = os.urandom(16).hex().upper()
        queue_id = message.queue_id  # before a delay or a transaction moves the message
        if is_half:
            become_half(message)
        appended = self._put.one(message, self._clock())
        if is_spent:
            origin = origin_of(message.properties, request.topic, self._topics)
            buried(message, request.topic.removeprefix(RETRY_PREFIX), origin, appended, self._stats)
        reply = self._acknowledge(frame, appended, queue_id, unique_key)
        if PROPERTY_TIMER_OUT_MS in message.properties:
            handle = recall_handle(message.properties, self._config.broker_name)
            if handle is not None:
                reply.fields["recallHandle"] = handle
        return self._put.when_flushed(appended, reply) if self._put.must_wait(message.properties) else reply

    def _send_batch(
        self, frame: Frame, request: SendRequest, topic: TopicConfig, message: Message
    ) -> Frame | Awaitable[Frame]:
        if request.topic.startswith(RETRY_PREFIX):
            raise RequestFailed(
                ResponseCode.MESSAGE_ILLEGAL, f"batch request does not support retry group {request.topic}"
            )
        try:
            parts = split_batch(frame.body)
        except BadRecord as e:
            raise RequestFailed(ResponseCode.MESSAGE_ILLEGAL, f"the batch can't be read: {e}") from None
        if not parts:
            raise RequestFailed(ResponseCode.MESSAGE_ILLEGAL, "the batch holds no message")
        if len(parts) > MAX_BATCH_MESSAGES:
            raise RequestFailed(
                ResponseCode.MESSAGE_ILLEGAL,
                f"the batch holds {len(parts)} messages: the ids of {MAX_BATCH_MESSAGES} fit into an acknowledgement",
            )
        if request.topic.startswith(DLQ_PREFIX):
            parts = [part_without_internal(part) for part in parts]
        if self._config.enable_topic_message_type_check:
            for part in parts:
                check_type(topic, decode_properties(part.properties))
        appended = self._put.batch(message, parts, self._clock())
        # The properties of the request are those of the batch; each message has its own and gets nothing from them.
        shared = decode_properties(request.properties)
        reply = self._acknowledge(frame, appended, message.queue_id, shared.get(PROPERTY_UNIQUE_KEY))
        return self._put.when_flushed(appended, reply) if self._put.must_wait(shared) else reply

    def _properties(self, request: SendRequest) -> dict[str, str]:
        """The sender's properties, with what a broker adds to every message."""
        properties = without_internal(decode_properties(request.properties))
        return properties | _stamp(self._config.region_id, self._config.trace_on, self._config.broker_cluster_name)

    def _acknowledge(self, frame: Frame, appended: Appended, queue_id: int, unique_key: str | None) -> Frame:
        config = self._config
        return acknowledgement(
            frame, appended.message_id, queue_id, appended.queue_offset, config.region_id, config.trace_on, unique_key
        )

    def check(self, request: SendRequest, connection: Connection) -> TopicConfig:
        """The topic to write to, created if that is allowed. Raises RequestFailed."""
        topic = self._find_topic(request.topic)
        if topic is None:
            host = connection.peer[0]
            topic = self._new_topic(request, host)
            self._topics.take_share(topic.topic_name, host)
            self._topics.put(topic)
        self._check(request, topic, connection)
        return topic

    def _check(self, request: SendRequest, topic: TopicConfig, connection: Connection) -> None:
        if request.topic in self._closed:
            raise RequestFailed(ResponseCode.NO_PERMISSION, f"Sending message to topic[{request.topic}] is forbidden.")
        if not self._config.broker_permission & PERM_WRITE and topic.order:
            raise RequestFailed(
                ResponseCode.NO_PERMISSION, f"the broker[{self._config.broker_ip1}] sending message is forbidden"
            )
        if request.queue_id >= max(topic.write_queue_nums, topic.read_queue_nums):
            raise RequestFailed(
                ResponseCode.INVALID_PARAMETER,
                f"request queueId[{request.queue_id}] is illegal, the topic {request.topic} has "
                f"{topic.write_queue_nums} write and {topic.read_queue_nums} read queues. Producer: {connection!r}",
            )

    def _new_topic(self, request: SendRequest, host: str) -> TopicConfig:
        """What a topic that is not there is to be like. Raises RequestFailed if it may not be created."""
        name = request.topic
        remark = validate_topic(name)
        if remark is not None:
            raise RequestFailed(ResponseCode.INVALID_PARAMETER, remark)
        if is_internal(name):
            raise RequestFailed(ResponseCode.NO_PERMISSION, f"Sending message to topic[{name}] is forbidden.")
        is_retry = name.startswith(RETRY_PREFIX)
        sys_flag = (UNIT_SUBSCRIPTION if is_retry else UNIT_TOPIC) if request.unit_mode else 0
        topic = self._topics.inherited(name, request.default_topic, request.default_topic_queue_nums, sys_flag, host)
        if topic is None and is_retry and self._topics.has_room_for_senders(host):
            topic = TopicConfig(name, 1, 1, PERM_READ | PERM_WRITE, topic_sys_flag=sys_flag)
        if topic is None and not self._topics.has_room_for_senders(host):
            raise RequestFailed(
                ResponseCode.TOPIC_NOT_EXIST,
                f"topic[{name}] is not created: {self._topics.fullness(host)}. Delete topics that nobody uses, or "
                "create this one as an operator does (updateTopic)",
            )
        if topic is None:
            raise RequestFailed(
                ResponseCode.TOPIC_NOT_EXIST, f"topic[{name}] not exist, apply first please!{suggest()}"
            )
        return topic

    def _is_half(self, message: Message) -> bool:
        """Whether the message waits for the end of a transaction."""
        properties = message.properties
        if properties.get(PROPERTY_TRANSACTION_PREPARED, "").lower() != "true":
            return False
        if message.reconsume_times > 0 and PROPERTY_DELAY_LEVEL in properties:
            return False  # old clients send a message back with all its properties
        if self._config.reject_transaction_message:
            raise RequestFailed(
                ResponseCode.NO_PERMISSION,
                f"the broker[{self._config.broker_ip1}] sending transaction message is forbidden",
            )
        if not DELAY_PROPERTIES.isdisjoint(properties):
            # Apache's clients refuse it by these words; its broker takes it and delivers it nowhere.
            raise RequestFailed(ResponseCode.MESSAGE_ILLEGAL, "Transactional messages do not support delayed delivery")
        return True

    def _to_dead_letters_if_spent(self, request: SendRequest, message: Message, connection: Connection) -> bool:
        """A message that a client sends to a retry topic by itself obeys the same limit as one that is sent back.
        Whether it has passed it."""
        name = request.topic.removeprefix(RETRY_PREFIX)
        group = self._groups.get(name, connection)
        if group is None:
            raise RequestFailed(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group not exist, {name} {suggest()}"
            )
        limit = group.retry_max_times if request.max_reconsume_times is None else request.max_reconsume_times
        is_ordered = not self._locks.all_expired(name, self._steady_clock())
        is_spent = message.reconsume_times > limit or is_ordered
        if is_spent:
            bury(message, name, self._topics)
        return is_spent


def _message(frame: Frame, request: SendRequest, topic: TopicConfig, connection: Connection) -> Message:
    """What is sent, still without properties."""
    return Message(
        request.topic,
        request.queue_id if request.queue_id >= 0 else random.randrange(topic.write_queue_nums),
        frame.body,
        {},
        request.flag,
        (request.sys_flag | SYS_MULTI_TAGS if topic.topic_filter_type == "MULTI_TAG" else request.sys_flag)
        & SENDERS_FLAGS,
        request.born_timestamp_ms,
        connection.peer_host,
        request.reconsume_times or 0,
    )


def _store(stored: asyncio.Future[Frame | Awaitable[Frame]], store: _Store, failure: RequestFailed | None) -> None:
    if stored.done():  # whoever sent it is gone
        return
    try:
        if failure is not None:
            raise RequestFailed(failure.code, failure.remark)
        stored.set_result(store())
    except Exception as e:
        stored.set_exception(e)


@lru_cache(maxsize=16)
def _added(region_id: str, trace_on: bool, cluster_name: str) -> bytes:
    """What a broker adds to the stored properties of every message."""
    return encode_properties(_stamp(region_id, trace_on, cluster_name))


def _stamp(region_id: str, trace_on: bool, cluster_name: str) -> dict[str, str]:
    return {
        PROPERTY_MSG_REGION: region_id,
        PROPERTY_TRACE_SWITCH: "true" if trace_on else "false",
        PROPERTY_CLUSTER: cluster_name,
    }
