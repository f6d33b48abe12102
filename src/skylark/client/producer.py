"""Sends messages.

    async with Producer("localhost:9876", group="orders") as producer:
        receipt = await producer.send("orders", b"hello", tag="new", key="42")

A call ends in a receipt or in an error, within its timeout. A message goes to the next queue of its topic, from a
random start; when a broker refuses for a reason of its own, it goes to another one, up to `retries` times. When no
broker can be reached, it is tried again, with growing pauses, until one is back or the time is over. A message that was
bound to a queue (`queue`, `select`, `ordering_key`) waits for the broker of that queue, and goes nowhere else.

An error of `RequestTimeout` or `NotReachable` does not say that the message was not stored, and a retry may store it
twice: consumers tell by `msg_id`, which stays the same. `retries=0` sends once, whatever comes.

Many in flight: `send_soon` returns as soon as the message is on its way. What is on its way is bounded by count and by
bytes; beyond that, every call waits for room. Messages of one queue keep their order if each is awaited before the
next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, Self

from skylark.client.addresses import NameServers
from skylark.client.choosing import Choice, Select, choice_of
from skylark.client.compression import DEFAULT_LEVEL, MAX_LEVEL, Codec, require
from skylark.client.courier import Courier
from skylark.client.dialogue import reply_properties, reply_topic, request_properties
from skylark.client.errors import (
    BatchInterrupted,
    BrokerError,
    ClientClosed,
    InvalidMessage,
    RequestTimeout,
    RocketMQError,
    SendsFailed,
)
from skylark.client.faults import Faults
from skylark.client.message import Message, MessageQueue, OutgoingMessage, Receipt
from skylark.client.options import (
    LEAST_S,
    check_count,
    check_hooks,
    check_seconds,
    check_texts,
    check_trace,
    codec_among,
    several,
)
from skylark.client.packing import Packing
from skylark.client.routes import DEFAULT_TOPIC, DEFAULT_TOPIC_QUEUES
from skylark.client.sending import RETRY_CODES, SendHook, Sending, Slots, Unseen
from skylark.client.session import Session, session_of
from skylark.client.tracing import SendTraces, open_tracer, recalled
from skylark.client.validation import MAX_MESSAGE_BYTES, check_group, check_send_topic, check_topic
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import PROPERTY_CORRELATION_ID
from skylark.wire.recall import BadHandle, Recall, RecallHandle
from skylark.wire.typed import encode_header

log = logging.getLogger(__name__)

_RECALL_HINT: Final = "a broker takes recalls with recallMessageEnable=true"


class Producer:
    """Sends messages to the brokers that the name servers know. See the module for an example."""

    def __init__(
        self,
        name_servers: NameServers = None,
        group: str = "DEFAULT_PRODUCER",
        *,
        session: Session | None = None,
        timeout_s: float = 3.0,
        attempt_timeout_s: float | None = None,
        retries: int = 2,
        retry_codes: Iterable[int] = RETRY_CODES,
        retry_not_stored: bool = False,
        avoid_slow_brokers: bool = False,
        compression: Codec | str | None = Codec.ZLIB,
        compress_over_bytes: int = 4096,
        compression_level: int = DEFAULT_LEVEL,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_in_flight: int = 1024,
        max_in_flight_bytes: int = 100 * 1024 * 1024,
        default_topic: str = DEFAULT_TOPIC,
        default_topic_queues: int = DEFAULT_TOPIC_QUEUES,
        hooks: Sequence[SendHook] = (),
        namespace: str = "",
        trace: bool | str = False,
    ) -> None:
        """
        - `name_servers`: `host:port`, several joined by `;` or in a list, or an address server's URL; None leaves it
          to the environment.
        - `group`: by which brokers know it; producers of one kind have one name.
        - `session`: shares the connections of a session; without one, the producer has its own.
        - `timeout_s`: of a whole call, with its retries; `attempt_timeout_s`: of one attempt while retries are left.
        - `retries`: how often a message that is refused goes to another broker; 0 sends once, also while none is there.
        - `retry_codes`: answers of a broker after which a message goes to another one.
        - `retry_not_stored`: a message that is stored, but not flushed or replicated in time, goes to another broker.
        - `avoid_slow_brokers`: latency fault tolerance; see `skylark.client.faults` for its table.
        - `compression`: how bodies over `compress_over_bytes` are compressed (zlib, lz4, zstd), or None;
          `compression_level`: from 0, quick, to 9, small.
        - `max_message_bytes`: a body may have so many.
        - `max_in_flight`, `max_in_flight_bytes`: so many messages, of so many bytes, may be on their way; then calls
          wait.
        - `default_topic`, `default_topic_queues`: where a topic that does not exist is made, and with how many queues.
        - `hooks`: each a `SendHook`, called before and after each attempt to send.
        - `namespace`: stands before the names of group and topics on the wire.
        - `trace`: True, or the name of a topic, writes a trace of every send there.
        """
        check_texts(group=group, namespace=namespace)
        self.session = session_of(session, name_servers, namespace)
        self._namespace = self.session.namespace
        group = self._namespace.wrap(group)
        check_group(group)
        check_seconds("timeout_s", timeout_s, LEAST_S)
        check_seconds("attempt_timeout_s", LEAST_S if attempt_timeout_s is None else attempt_timeout_s, LEAST_S)
        check_count("retries", retries, 0)
        check_count("compress_over_bytes", compress_over_bytes, 0)
        check_count("compression_level", compression_level, 0, MAX_LEVEL)
        check_count("max_message_bytes", max_message_bytes, 1)
        check_count("max_in_flight", max_in_flight, 1)
        check_count("max_in_flight_bytes", max_in_flight_bytes, 1)
        check_count("default_topic_queues", default_topic_queues, 1)
        check_topic(default_topic)
        hooks, retry_codes = several("hooks", hooks), several("retry_codes", retry_codes)
        check_hooks("hooks", hooks, "before_send", "after_send")
        check_trace(trace)
        codec = codec_among(compression)
        if codec is not None:
            require(codec)
        self.group = group
        self._timeout_s = timeout_s
        self._packing = Packing(
            self._namespace,
            self.session.client_id.partition("@")[0],
            codec=codec,
            compress_over_bytes=compress_over_bytes,
            compression_level=compression_level,
            max_message_bytes=max_message_bytes,
            retries=retries,
        )
        self._slots = Slots(max_in_flight, max_in_flight_bytes)
        self._unseen = Unseen()
        self.hooks = list(hooks)
        self._make_courier = partial(
            Courier,
            self.session,
            group,
            retry_codes=frozenset(int(code) for code in retry_codes),
            retry_not_stored=retry_not_stored,
            attempt_timeout_s=attempt_timeout_s,
            faults=Faults() if avoid_slow_brokers else None,
            slots=self._slots,
            unseen=self._unseen,
            default_topic=default_topic,
            default_topic_queues=default_topic_queues,
            hooks=self.hooks,
        )
        self._tracer = open_tracer(self.session, group, "PRODUCE", trace)
        if self._tracer is not None:
            self.hooks.append(SendTraces(self._tracer, self.session))
        self._courier: Courier | None = None  # while the producer is open
        self._has_joined = False
        self._clock_s: Callable[[], float]

    # Life.

    async def start(self) -> None:
        """Joins the session; `async with` does it."""
        if self._courier is not None:
            self.session.check_home()
            return
        await self.session.acquire()
        self._clock_s = asyncio.get_running_loop().time
        courier = self._courier = self._make_courier()
        try:
            await self.session.add_producer(self.group)
            if self._courier is courier:
                self._has_joined = True
                if self._tracer is not None:
                    await self._tracer.start()
        except BaseException:
            if self._courier is courier:
                await self.close()
            raise
        if not self._has_joined:
            await self.session.remove_producer(self.group)
            raise ClientClosed("the producer was closed before it had started")

    async def close(self) -> None:
        """Takes no more messages, waits for those on their way and leaves the session."""
        courier = self._courier
        if courier is None:
            return
        self.session.check_home()
        self._courier = None
        try:
            await self._slots.drained()
            await asyncio.sleep(0)  # as in `flush`
            if failed := self._unseen.take():
                count, first = failed
                log.error(
                    "%d messages of %s failed, and nobody asked for them; the first: %s", count, self.group, first
                )
            if self._tracer is not None:
                await self._tracer.close()
        finally:  # also when it is cancelled, or the session would never end
            courier.close()
            try:
                if self._has_joined:
                    self._has_joined = False
                    await self.session.remove_producer(self.group)
            finally:
                await self.session.release()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Sending.

    async def send(
        self,
        topic: str,
        body: bytes,
        *,
        tag: str | None = None,
        key: str | Sequence[str] | None = None,
        properties: dict[str, str] | None = None,
        delay_level: int = 0,
        delay_s: float | None = None,
        deliver_at: datetime | int | None = None,
        priority: int | None = None,
        queue: MessageQueue | None = None,
        select: Select | None = None,
        arg: Any = None,
        ordering_key: str | int | None = None,
        flag: int = 0,
        wait_stored: bool = True,
        compress: bool = True,
        timeout_s: float | None = None,
    ) -> Receipt:
        """Sends one message and waits for its receipt.

        - `key`: one or several, by which the message can be found again.
        - `delay_level`: the broker delivers it later; 1 is 1 s, 18 is 2 h.
        - `delay_s` or `deliver_at`: after any time, or at any time (a datetime, or milliseconds since 1970); never
          before it, and within a second. The receipt then has a `recall_handle`; see `recall`.
        - `priority`: 0 or more; the message goes to the topic's queue of that number, or to its last one. Consumers
          that pop take the queues of a topic whose type is PRIORITY from the highest number down.
        - `queue`, `select` with its `arg`, or `ordering_key`: the queue, a function that picks one, called as
          `select(queues, arg)`, or a key whose hash does. Messages of one ordering key keep their order.
        - `wait_stored`: False lets a broker that flushes or replicates synchronously answer before it did.

        Raises InvalidMessage before anything is sent; BrokerError, NotReachable, RequestTimeout or RouteNotFound after
        all retries.
        """
        courier = self._running_courier()
        sending = self._packing.pack(
            topic, body, tag, key, properties, delay_level, flag, wait_stored, priority, delay_s, deliver_at,
            ordering_key,
        )  # fmt: skip
        await self._settle(courier, sending, compress, choice_of(queue, select, arg, ordering_key), timeout_s)
        if not self._slots.has_room(sending.size_bytes):
            await self._wait_for_slot(sending)
        await courier.depart(sending)
        receipt: Receipt = await sending.future
        return receipt

    async def send_soon(
        self,
        topic: str,
        body: bytes,
        *,
        tag: str | None = None,
        key: str | Sequence[str] | None = None,
        properties: dict[str, str] | None = None,
        delay_level: int = 0,
        delay_s: float | None = None,
        deliver_at: datetime | int | None = None,
        priority: int | None = None,
        queue: MessageQueue | None = None,
        select: Select | None = None,
        arg: Any = None,
        ordering_key: str | int | None = None,
        flag: int = 0,
        wait_stored: bool = True,
        compress: bool = True,
        timeout_s: float | None = None,
    ) -> asyncio.Future[Receipt]:
        """Returns when the message is on its way, with the future of its receipt. Waits while too much is in flight.

        receipts = [await producer.send_soon("orders", body) for body in bodies]
        for receipt in asyncio.as_completed(receipts): ...
        """
        courier = self._running_courier()
        sending = self._packing.pack(
            topic, body, tag, key, properties, delay_level, flag, wait_stored, priority, delay_s, deliver_at,
            ordering_key,
        )  # fmt: skip
        choice = choice_of(queue, select, arg, ordering_key)
        return await self._send_soon(courier, sending, compress, choice, timeout_s)

    async def _send_soon(
        self, courier: Courier, sending: Sending, compress: bool, choice: Choice | None, timeout_s: float | None
    ) -> asyncio.Future[Receipt]:
        await self._settle(courier, sending, compress, choice, timeout_s)
        if not self._slots.has_room(sending.size_bytes):
            began_s = self._clock_s()
            while not self._slots.has_room(sending.size_bytes):
                await self._slots.wait(sending.size_bytes)
            sending.deadline_s += self._clock_s() - began_s  # waiting for room does not count
        sending.is_left_alone = True
        await courier.depart(sending)
        return sending.future

    async def flush(self) -> None:
        """Returns when everything that was sent so far is settled.

        Raises SendsFailed if messages of `send_soon` failed whose futures nobody waits for or has asked: how many since
        the last flush, and the first error. What it told of is done with.
        """
        self._running_courier()
        await self._slots.settled()
        await asyncio.sleep(0)  # callbacks of futures, which ask them, run in the next turn of the loop
        if failed := self._unseen.take():
            count, first = failed
            raise SendsFailed(count, first) from first

    async def send_oneway(
        self,
        topic: str,
        body: bytes,
        *,
        tag: str | None = None,
        key: str | Sequence[str] | None = None,
        properties: dict[str, str] | None = None,
        delay_level: int = 0,
        delay_s: float | None = None,
        deliver_at: datetime | int | None = None,
        priority: int | None = None,
        queue: MessageQueue | None = None,
        select: Select | None = None,
        arg: Any = None,
        ordering_key: str | int | None = None,
        flag: int = 0,
        compress: bool = True,
        timeout_s: float | None = None,
    ) -> None:
        """Sends without an answer: fast, and nobody knows whether it arrived. Waits while the broker does not read."""
        courier = self._running_courier()
        sending = self._packing.pack(
            topic, body, tag, key, properties, delay_level, flag, True, priority, delay_s, deliver_at, ordering_key
        )
        await self._settle(courier, sending, compress, choice_of(queue, select, arg, ordering_key), timeout_s)
        try:
            async with asyncio.timeout_at(sending.deadline_s):
                connection = await courier.find_way(sending)
                connection.notify(courier.request(sending))
                courier.after(sending, None, None)
                await connection.writable()
        except TimeoutError:
            raise courier.as_timeout(sending) from None

    async def send_batch(
        self,
        topic: str,
        messages: Iterable[bytes | OutgoingMessage],
        *,
        queue: MessageQueue | None = None,
        select: Select | None = None,
        arg: Any = None,
        ordering_key: str | int | None = None,
        timeout_s: float | None = None,
    ) -> list[Receipt]:
        """Sends many messages of one topic in as few requests as the size limit allows, one request after the other.

        Raises BatchInterrupted, which has the receipts so far, when a later request fails; the timeout is that of one.
        """
        courier = self._running_courier()
        choice = choice_of(queue, select, arg, ordering_key)
        parts = self._packing.pack_batch(topic, messages)
        receipts: list[Receipt] = []
        for part in parts:
            try:
                receipts += await self._send_part(courier, part, choice, timeout_s)
            except RocketMQError as e:
                if not receipts:
                    raise
                raise BatchInterrupted(receipts, sum(len(each.batch_ids or ()) for each in parts), e) from e
        return receipts

    async def request(
        self,
        topic: str,
        body: bytes,
        *,
        tag: str | None = None,
        key: str | Sequence[str] | None = None,
        properties: dict[str, str] | None = None,
        queue: MessageQueue | None = None,
        select: Select | None = None,
        arg: Any = None,
        ordering_key: str | int | None = None,
        flag: int = 0,
        compress: bool = True,
        timeout_s: float | None = None,
    ) -> Message:
        """Sends a message and waits for the reply of whoever consumes it; the timeout is for both.

        Raises the errors of `send`, and RequestTimeout when no reply came in time: the request may be consumed later.
        """
        courier = self._running_courier()
        patience_s = self._timeout_s if timeout_s is None else timeout_s
        sending = self._packing.pack(topic, body, tag, key, properties, flag=flag, ordering_key=ordering_key)
        sending.label(request_properties(self.session.client_id, patience_s))
        await self._settle(courier, sending, compress, choice_of(queue, select, arg, ordering_key), timeout_s)
        if not self._slots.has_room(sending.size_bytes):
            await self._wait_for_slot(sending)
        with self.session.dialogue.expect(sending.properties[PROPERTY_CORRELATION_ID]) as reply:
            await courier.depart(sending)
            try:
                async with asyncio.timeout_at(sending.deadline_s):
                    await asyncio.wait((reply, sending.future), return_when=asyncio.FIRST_COMPLETED)
                    if not reply.done():
                        sending.future.result()  # raises when the request was not stored
                    return await reply
            except RequestTimeout:
                raise
            except TimeoutError:
                raise RequestTimeout(
                    f"request {sending.msg_id} was sent, but no reply came within {patience_s:.3g} s"
                ) from None
            finally:
                sending.abandon()

    async def reply(
        self,
        request: Message,
        body: bytes,
        *,
        properties: dict[str, str] | None = None,
        flag: int = 0,
        compress: bool = True,
        timeout_s: float | None = None,
    ) -> Receipt:
        """Answers a request that was consumed. Returns when the requester has the reply.

        Raises InvalidMessage if the message was no request, and BrokerError when the requester is gone.
        """
        courier = self._running_courier()
        sending = self._packing.pack(reply_topic(request), body, None, None, properties, flag=flag)
        sending.topic = reply_topic(request)  # it belongs to the system and has no namespace
        sending.label(reply_properties(request))
        sending.code = RequestCode.SEND_REPLY_MESSAGE_V2
        await self._settle(courier, sending, compress, None, timeout_s)
        try:
            async with asyncio.timeout_at(sending.deadline_s):
                queues = (await courier.route(sending.topic)).write_queues
        except TimeoutError:
            raise courier.as_timeout(sending) from None
        # The requester is connected to the broker that took the request, and perhaps to no other.
        sending.queue = next((queue for queue in queues if queue.broker_name == request.broker), None)
        if not self._slots.has_room(sending.size_bytes):
            await self._wait_for_slot(sending)
        await courier.depart(sending)
        receipt: Receipt = await sending.future
        return receipt

    async def recall(self, topic: str, handle: str, *, timeout_s: float | None = None) -> str:
        """Takes back a message that was sent with `delay_s` or `deliver_at`, by its receipt's `recall_handle`; its id.

        Raises InvalidMessage if that is no handle, and BrokerError when it is too late or the broker allows no recalls
        (`recallMessageEnable`).
        """
        courier = self._running_courier()
        topic = self._namespace.wrap(topic)
        check_send_topic(topic)
        if not isinstance(handle, str):
            raise InvalidMessage(
                f"the recall handle is {handle!r} and must be a str; receipts of messages sent with delay_s or "
                "deliver_at have one"
            )
        try:
            decoded = RecallHandle.decode(handle)
        except BadHandle as e:
            raise InvalidMessage(str(e)) from None
        broker = decoded.broker
        patience_s = self._timeout_s if timeout_s is None else timeout_s
        deadline_s = self._clock_s() + patience_s
        try:
            async with asyncio.timeout_at(deadline_s):
                route = await courier.route(topic)
        except TimeoutError:
            raise RequestTimeout(f"no route of topic {topic!r} within {patience_s:.3g} s") from None
        if broker not in route.brokers:
            broker = route.broker_of(route.write_queues[0])  # a proxy answers for brokers that it does not name
        request = Frame(RequestCode.RECALL_MESSAGE, encode_header(Recall(topic, handle, self.group)))
        answer = await self.session.ask_broker(broker, request, deadline_s - self._clock_s())
        if self._tracer is not None:
            self._tracer.add(recalled(self.session, self.group, topic, decoded.unique_key, answer))
        if answer.code != ResponseCode.SUCCESS:
            is_forbidden = answer.code == ResponseCode.NO_PERMISSION
            raise BrokerError(answer.code, answer.remark, broker, _RECALL_HINT if is_forbidden else "")
        return answer.fields.get("msgId", "")

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The queues that messages of the topic can be sent to."""
        courier = self._running_courier()
        topic = self._namespace.wrap(topic)
        check_send_topic(topic)
        return [self._namespace.unwrap_queue(queue) for queue in (await courier.route(topic)).write_queues]

    # How a message gets ready.

    async def _settle(
        self, courier: Courier, sending: Sending, compress: bool, choice: Choice | None, timeout_s: float | None
    ) -> None:
        """The last things before a message departs: its deadline, its size, and the queue if the sender has a say."""
        if timeout_s is None:
            timeout_s = self._timeout_s
        else:
            check_seconds("timeout_s", timeout_s)
        sending.deadline_s = self._clock_s() + timeout_s
        if compress and self._packing.is_large(sending):
            try:
                async with asyncio.timeout_at(sending.deadline_s):
                    await self._packing.compress(sending)
            except TimeoutError:
                raise RequestTimeout(f"message {sending.msg_id} was not compressed in time; nothing was sent") from None
        if choice is not None:
            await self._bind(courier, sending, choice)

    async def _bind(self, courier: Courier, sending: Sending, choice: Choice) -> None:
        """Settles the one queue that the message may go to."""
        queue = choice
        if not isinstance(queue, MessageQueue):
            try:
                async with asyncio.timeout_at(sending.deadline_s):
                    known = (await courier.route(sending.topic)).write_queues
            except TimeoutError:
                raise courier.as_timeout(sending) from None
            queues = [self._namespace.unwrap_queue(each) for each in known] if self._namespace else known
            queue = queue(queues)
        if isinstance(queue, MessageQueue):
            queue = self._namespace.wrap_queue(queue)
        if not isinstance(queue, MessageQueue) or queue.topic != sending.topic:
            raise InvalidMessage(f"{queue!r} is not a queue of topic {sending.topic!r}")
        sending.queue = queue
        sending.is_bound = True
        sending.attempts_left = 0

    async def _send_part(
        self, courier: Courier, sending: Sending, choice: Choice | None, timeout_s: float | None
    ) -> list[Receipt]:
        await self._settle(courier, sending, False, choice, timeout_s)
        if not self._slots.has_room(sending.size_bytes):
            await self._wait_for_slot(sending)
        await courier.depart(sending)
        receipts: list[Receipt] = await sending.future
        return receipts

    async def _wait_for_slot(self, sending: Sending) -> None:
        try:
            async with asyncio.timeout_at(sending.deadline_s):
                while not self._slots.has_room(sending.size_bytes):
                    await self._slots.wait(sending.size_bytes)
        except TimeoutError:
            raise RequestTimeout(
                f"{self._slots.count} messages are in flight and none ended in time; the limit is max_in_flight"
            ) from None

    def _running_courier(self) -> Courier:
        courier = self._open_courier()
        self.session.check_home()
        return courier

    def _open_courier(self) -> Courier:
        if self._courier is None:
            raise ClientClosed("the producer is not started, or closed already; use it within `with` or `async with`")
        return self._courier
