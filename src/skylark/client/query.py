"""Looks messages up: by key, by the producer's id, by their place in a broker's log, by queue and offset, by time.

    async with QueryClient("localhost:9876") as query:
        for message in await query.by_key("orders", "42"): ...
        message = await query.by_unique_key("orders", receipt.msg_id)

Nothing is consumed: no group's progress changes. A message is found as long as its broker keeps it; one that retention
has deleted is gone. Keys are found through the brokers' index, which compares hashes; what is found is compared again
here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import datetime
from typing import Final, Self

from skylark.client.addresses import NameServers
from skylark.client.errors import BrokerError, InvalidMessage, MessageNotFound, NotReachable, RocketMQError
from skylark.client.message import Message, MessageQueue
from skylark.client.pull_consumer import PullConsumer, time_ms
from skylark.client.pulling import PullStatus
from skylark.client.session import Session, session_of
from skylark.client.traces import TraceEvent, read_events
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import QueryMessage, ViewMessage
from skylark.wire.message import BadRecord
from skylark.wire.records import decode_host, decode_record, decode_records, parse_message_id
from skylark.wire.trace import TRACE_TOPIC, decode_traces
from skylark.wire.typed import encode_header

log = logging.getLogger(__name__)

TOOLS_GROUP: Final = "TOOLS_CONSUMER"  # every broker has it
MAX_FOUND: Final = 64
_LAST_MS: Final = 2**63 - 1
_UNIQUE_KEY_FIELD: Final = "_UNIQUE_KEY_QUERY"
_KEY_INDEX: Final = "K"
_UNIQUE_KEY_INDEX: Final = "U"


class QueryClient:
    """Finds messages. See the module for an example."""

    def __init__(
        self,
        name_servers: NameServers = None,
        *,
        session: Session | None = None,
        request_timeout_s: float = 3.0,
        namespace: str = "",
    ) -> None:
        """
        - `name_servers`: `host:port`, several joined by `;` or in a list, or an address server's URL; None leaves it
          to the environment.
        - `session`: shares the connections of a session; without one, the client has its own.
        - `request_timeout_s`: of each request.
        - `namespace`: stands before the names of topics on the wire.
        """
        self._session = session_of(session, name_servers, namespace, request_timeout_s)
        self._namespace = self._session.namespace
        self._timeout_s = request_timeout_s
        self._puller = PullConsumer(session=self._session, group=TOOLS_GROUP, request_timeout_s=request_timeout_s)

    async def start(self) -> None:
        """Connects; `async with` does it."""
        await self._puller.start()

    async def close(self) -> None:
        """Leaves the session."""
        await self._puller.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def by_key(
        self,
        topic: str,
        key: str,
        *,
        max_count: int = MAX_FOUND,
        begin: datetime | int = 0,
        end: datetime | int = _LAST_MS,
    ) -> list[Message]:
        """Messages that were sent with this key, the oldest first; a broker gives 64 at most.

        `begin` and `end` bound the time at which they were stored; a number is milliseconds since 1970.
        """
        name = self._namespace.wrap(topic)
        header = QueryMessage(name, key, max_count, time_ms(begin), time_ms(end), index_type=_KEY_INDEX)
        found = await self._ask_brokers(name, encode_header(header))
        return [message for message in found if message.topic == topic and key in message.keys][:max_count]

    async def by_unique_key(self, topic: str, msg_id: str) -> Message:
        """The message that its producer gave this id, `Receipt.msg_id`. Raises MessageNotFound.

        A message that was stored twice, by a retry of the producer, is the one that was stored first.
        """
        name = self._namespace.wrap(topic)
        header = QueryMessage(name, msg_id, MAX_FOUND, 0, _LAST_MS, index_type=_UNIQUE_KEY_INDEX)
        fields = encode_header(header) | {_UNIQUE_KEY_FIELD: "true"}
        for message in await self._ask_brokers(name, fields):
            if message.msg_id == msg_id:
                return message
        raise MessageNotFound(f"no message of topic {topic!r} has the unique key {msg_id!r}, or it is deleted already")

    async def by_id(self, offset_msg_id: str) -> Message:
        """The message at a place in a broker's log, `Receipt.offset_msg_id`. The id tells the broker's address.

        Raises InvalidMessage for what is no such id, NotReachable when no broker is there, and MessageNotFound.
        """
        host, port, log_offset = _read_id(offset_msg_id)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        request = Frame(RequestCode.VIEW_MESSAGE_BY_ID, encode_header(ViewMessage(log_offset)))
        try:
            answer = await self._session.ask_address(address, request, self._timeout_s)
        except NotReachable as e:
            raise NotReachable(f"message id {offset_msg_id} belongs to a broker at {address}: {e}") from e
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            raise MessageNotFound(f"message id {offset_msg_id} belongs to a broker at {address}, but that is no broker")
        if answer.code != ResponseCode.SUCCESS:
            raise MessageNotFound(f"broker {address} has no message {offset_msg_id}: {answer.remark}")
        try:
            record = decode_record(answer.body)
        except BadRecord as e:
            raise MessageNotFound(f"at the place of {offset_msg_id} begins no message: {e}") from e
        return self._unwrapped(Message.from_record(record, self._broker_name(address)))

    async def by_offset(self, queue: MessageQueue, offset: int) -> Message:
        """The message at an offset of a queue. Raises MessageNotFound, which tells the offsets that there are."""
        if offset < 0:
            raise InvalidMessage(f"an offset is 0 or more, not {offset}")
        pulled = await self._puller.pull(queue, offset, 1)
        if pulled.status is PullStatus.FOUND and pulled.messages[0].queue_offset == offset:
            return pulled.messages[0]
        raise MessageNotFound(
            f"queue {queue.queue_id} of {queue.topic} at {queue.broker_name} has no offset {offset}: it has "
            + (f"{pulled.min_offset} to {pulled.max_offset - 1}" if pulled.max_offset > pulled.min_offset else "none")
        )

    async def by_time(
        self, topic: str, begin: datetime | int, end: datetime | int = _LAST_MS, *, max_count: int = MAX_FOUND
    ) -> list[Message]:
        """Messages that were stored from `begin` on and before `end`, in the order of that time, the first so many."""
        begin_ms, end_ms = time_ms(begin), time_ms(end)
        now_ms = time.time_ns() // 1_000_000
        if begin_ms > now_ms:
            raise InvalidMessage(f"the time to begin at lies {(begin_ms - now_ms) / 1000:.3f} s in the future")
        if begin_ms >= end_ms:
            raise InvalidMessage("the time to end at must lie behind the time to begin at")
        queues = await self._puller.queues(topic)
        found = await asyncio.gather(*(self._read_period(queue, begin_ms, end_ms, max_count) for queue in queues))
        return _in_order([message for part in found for message in part])[:max_count]

    async def trace(self, msg_id: str, *, trace_topic: str = TRACE_TOPIC) -> list[TraceEvent]:
        """What clients that trace wrote about a message, by its unique id, in the order of time."""
        header = QueryMessage(trace_topic, msg_id, MAX_FOUND, 0, _LAST_MS, index_type=_KEY_INDEX)
        records = []
        for message in await self._ask_brokers(trace_topic, encode_header(header)):
            host = message.born_host.rpartition(":")[0]
            for record in decode_traces(message.body.decode("utf-8", "replace")):
                if record.msg_id == msg_id:
                    records.append((record, host))
        return read_events(records)

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The queues of a topic that can be read. Raises RouteNotFound."""
        return await self._puller.queues(topic)

    async def _read_period(self, queue: MessageQueue, begin_ms: int, end_ms: int, max_count: int) -> list[Message]:
        found: list[Message] = []
        offset = await self._puller.offset_for_time(queue, begin_ms)
        while len(found) < max_count:
            pulled = await self._puller.pull(queue, offset)
            found += [m for m in pulled.messages if begin_ms <= m.store_timestamp_ms < end_ms]
            is_past = bool(pulled.messages) and pulled.messages[-1].store_timestamp_ms >= end_ms
            if is_past or pulled.next_offset <= offset or pulled.status is PullStatus.NO_NEW_MESSAGE:
                break
            offset = pulled.next_offset
        return found

    async def _ask_brokers(self, topic: str, fields: dict[str, str]) -> list[Message]:
        """What the brokers of the topic find, the oldest first. Those that fail are passed over, unless all do."""
        route = await self._session.routes.get(topic)
        answers = await asyncio.gather(*(self._ask(broker, fields) for broker in route.brokers), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        for error in errors:
            if not isinstance(error, RocketMQError) or len(errors) == len(answers):
                raise error
            log.warning("a broker can't be asked: %s", error)
        return _in_order([message for answer in answers if isinstance(answer, list) for message in answer])

    async def _ask(self, broker: str, fields: dict[str, str]) -> list[Message]:
        request = Frame(RequestCode.QUERY_MESSAGE, dict(fields))
        answer = await self._session.ask_broker(broker, request, self._timeout_s, broker_id=None)
        if answer.code == ResponseCode.QUERY_NOT_FOUND:
            return []
        if answer.code != ResponseCode.SUCCESS:
            raise BrokerError(answer.code, answer.remark, broker)
        try:
            records = list(decode_records(answer.body))
        except BadRecord as e:
            raise BrokerError(answer.code, f"what it found can't be read: {e}", broker) from e
        return [self._unwrapped(Message.from_record(record, broker)) for record in records]

    def _unwrapped(self, message: Message) -> Message:
        message.topic = self._namespace.unwrap(message.topic)
        return message

    def _broker_name(self, address: str) -> str:
        for name, addresses in self._session.routes.brokers.items():
            if address in addresses.values():
                return name
        return ""


def _read_id(text: str) -> tuple[str, int, int]:
    try:
        host, log_offset = parse_message_id(text)
    except ValueError:
        raise InvalidMessage(f"{text!r} is no message id: it takes 32 hexadecimal digits, or 56 for IPv6") from None
    ip, port = decode_host(host)
    if not 0 < port < 65536 or log_offset >= 1 << 63:
        raise InvalidMessage(f"{text!r} is no place in a broker's log; is it a producer's id, a unique key?")
    return ip, port, log_offset


def _in_order(messages: list[Message]) -> list[Message]:
    return sorted(messages, key=lambda message: (message.store_timestamp_ms, message.queue_offset))
