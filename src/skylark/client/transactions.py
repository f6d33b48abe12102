"""Messages that are delivered exactly if a local transaction succeeds.

    async def checker(message: Message) -> bool | None:
        return await orders.exists(message.msg_id)

    async with TransactionProducer("localhost:9876", "shop", checker=checker) as producer:
        async with producer.transaction("orders", b"42") as transaction:
            await orders.insert(transaction.id, 42)

The message waits at the broker, unseen, from the beginning of the block. Success of the block commits it, an exception
rolls it back. If the producer dies in between, or its word does not reach the broker, the broker asks the `checker` of
any producer in the group, again and again: True commits, False rolls back, None leaves it for the next time.

- The checker must find out by what the transaction left behind, in a database say, under the id that it was given. It
  may be asked in another process than the one that has the block open: where that is possible, it says None of what it
  does not find, until the block must be over.
- It is not asked for a block that is open in its own producer.
- `prepare`, `commit` and `roll_back` are the steps by themselves. A `HalfMessage` can be kept (`encode`) and ended by
  another process (`decode`) of the same group.
- An error of a commit or a roll back does not say that it did not happen. What is not ended is asked for.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Self

import msgspec

from skylark.client.addresses import NameServers
from skylark.client.calling import failure_of
from skylark.client.choosing import Select, choice_of
from skylark.client.crew import wait_for_end
from skylark.client.errors import BrokerError, InvalidMessage, RequestTimeout, RocketMQError
from skylark.client.listening import is_asynchronous
from skylark.client.message import Message, MessageQueue, Receipt, SendStatus
from skylark.client.options import check_count, check_optional_callback
from skylark.client.producer import Producer
from skylark.client.threads import NotCalled, Threads
from skylark.client.tracing import transaction_ended
from skylark.net.connection import Connection
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import CheckTransactionState, EndTransaction
from skylark.wire.message import (
    PROPERTY_CHECK_IMMUNITY_SECONDS,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_TRANSACTION_PREPARED,
    SYS_TRANSACTION_COMMIT,
    SYS_TRANSACTION_PREPARED,
    SYS_TRANSACTION_ROLLBACK,
    StoredMessage,
)
from skylark.wire.records import parse_message_id
from skylark.wire.typed import decode_header, encode_header

log = logging.getLogger(__name__)

_MAX_WAITING_CHECKS: Final = 2000  # the broker asks again for what is dropped

Checker = Callable[[Message], bool | Awaitable[bool | None] | None]
"""Given the message of a transaction: whether it succeeded, or None if that is not known yet. A plain function runs in
a thread."""


class HalfMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that waits for the end of its transaction: all that is needed to end it."""

    topic: str
    group: str
    broker: str
    msg_id: str
    offset_msg_id: str
    half_offset: int

    def encode(self) -> str:
        """As text, to be kept or sent elsewhere."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str | bytes) -> Self:
        """Raises InvalidMessage for what `encode` did not make."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (TypeError, ValueError) as e:
            raise InvalidMessage(f"{text!r} is no half message, as its encode() gives it: {e}") from None


class Transaction:
    """One transaction, for `async with`. Made by `TransactionProducer.transaction`."""

    half: HalfMessage
    """within the block"""

    def __init__(self, producer: TransactionProducer, prepare: Callable[[], Awaitable[HalfMessage]]) -> None:
        self._producer = producer
        self._prepare = prepare
        self._is_open = False

    @property
    def id(self) -> str:
        """The message's `msg_id`: what the transaction leaves behind should be found by it."""
        return self.half.msg_id

    async def commit(self) -> None:
        """Ends the transaction before the end of the block."""
        self.leave()
        await self._producer.commit(self.half)

    async def rollback(self) -> None:
        """Drops the message before the end of the block."""
        self.leave()
        await self._producer.roll_back(self.half)

    def leave(self) -> None:
        """The end of the block does nothing any more: whatever is not ended is left to the checker."""
        self._is_open = False
        self._producer._open.discard(self.id)

    async def __aenter__(self) -> Self:
        self.half = await self._prepare()
        self._is_open = True
        self._producer._open.add(self.id)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._is_open:
            return
        if kind is None:
            await self.commit()
            return
        try:
            await self.rollback()
        except RocketMQError as e:  # the error of the block is the one to tell
            log.warning("the roll back of %s may not have reached the broker, which will ask for it: %s", self.id, e)


class TransactionProducer(Producer):
    """A producer whose messages may wait for the end of a transaction; see the module for an example."""

    def __init__(
        self,
        name_servers: NameServers,
        group: str,
        *,
        checker: Checker | None,
        topics: Sequence[str] = (),
        max_checks: int = 16,
        **options: Any,
    ) -> None:
        """
        - `name_servers`: `host:port`, several joined by `;` or in a list, or an address server's URL; None leaves it
          to the environment.
        - `group`: all its producers must be able to tell how each other's transactions ended.
        - `checker`: tells it; None answers nothing, so that what was not ended is given up by the broker in the end.
        - `topics`: their brokers can ask from the start on; those of other topics, from the first message on.
        - `max_checks`: so many calls of the checker at a time.
        - the other `options` are those of `Producer`.
        """
        check_optional_callback("the checker", checker, "message")
        check_count("max_checks", max_checks, 1)
        if isinstance(topics, str):
            raise InvalidMessage(f"topics is {topics!r}; it takes several, as in [{topics!r}]")
        super().__init__(name_servers, group, **options)
        self._topics = topics
        self._open: set[str] = set()  # ids of messages that are being prepared, or whose block is open
        self._checker = checker
        self._max_checks = max_checks
        self._checks: Checks | None = None  # while the producer is open

    async def start(self) -> None:
        """Joins the session; `async with` does it. The brokers of `topics` can ask from then on."""
        if self._courier is not None:
            return
        if self._checker is not None:
            self.session.add_checker(self.group, self._asked)
            self._checks = Checks(self._checker, self._max_checks)
        try:
            await super().start()
            await self._learn_topics()
        except BaseException:
            await self.close()  # if it was open already
            if self._checks is not None:
                self.session.remove_checker(self.group, self._asked)
            raise

    async def _learn_topics(self) -> None:
        courier = self._running_courier()
        for topic in self._topics:
            try:
                await courier.route(self._namespace.wrap(topic))
            except RocketMQError as e:
                log.warning("the brokers of topic %s can't ask for transactions yet: %s", topic, e)
        if self._topics:
            await self.session.heartbeat()

    async def close(self) -> None:
        """Ends as a producer does; calls of the checker that run are cancelled."""
        if self._courier is None:
            return
        try:
            if self._checks is not None:
                self.session.remove_checker(self.group, self._asked)
                await self._checks.close()
        finally:  # also when it is cancelled
            await super().close()

    def transaction(
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
        check_after_s: int | None = None,
        timeout_s: float | None = None,
    ) -> Transaction:
        """A block that commits the message by its success and rolls it back by an exception. See `prepare`."""

        def prepare() -> Awaitable[HalfMessage]:
            return self.prepare(
                topic, body, tag=tag, key=key, properties=properties, queue=queue, select=select, arg=arg,
                ordering_key=ordering_key, flag=flag, compress=compress, check_after_s=check_after_s,
                timeout_s=timeout_s,
            )  # fmt: skip

        return Transaction(self, prepare)

    async def prepare(
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
        check_after_s: int | None = None,
        timeout_s: float | None = None,
    ) -> HalfMessage:
        """Stores a message at the broker that nobody gets before `commit`. Parameters and errors are those of `send`.

        With `check_after_s` the broker waits so long before it asks, and then takes the end of the transaction from
        the checker only. After an error there may be a half message nevertheless: the checker will be asked for its
        id, which it does not know.
        """
        courier = self._running_courier()
        sending = self._packing.pack(topic, body, tag, key, properties, flag=flag, ordering_key=ordering_key)
        own = {PROPERTY_TRANSACTION_PREPARED: "true", PROPERTY_PRODUCER_GROUP: self.group}
        if check_after_s is not None:
            if check_after_s < 0:
                raise InvalidMessage(f"check_after_s is {check_after_s}; a number of seconds from 0 on is allowed")
            own[PROPERTY_CHECK_IMMUNITY_SECONDS] = str(check_after_s)
        sending.label(own)
        sending.sys_flag |= SYS_TRANSACTION_PREPARED
        await self._settle(courier, sending, compress, choice_of(queue, select, arg, ordering_key), timeout_s)
        if not self._slots.has_room(sending.size_bytes):
            await self._wait_for_slot(sending)
        self._open.add(sending.msg_id)
        try:
            await courier.depart(sending)
            receipt: Receipt = await sending.future
        finally:
            self._open.discard(sending.msg_id)
        half = HalfMessage(
            topic=sending.topic,
            group=self.group,
            broker=sending.broker,  # where it is; the queue of a static topic is a logical one, and may move
            msg_id=receipt.msg_id,
            offset_msg_id=receipt.offset_msg_id,
            half_offset=receipt.queue_offset,
        )
        if receipt.status is not SendStatus.OK:
            await self.roll_back(half)
            raise RocketMQError(f"the message is rolled back, since it is not stored safely: {receipt.status}")
        return half

    async def commit(self, half: HalfMessage, *, timeout_s: float | None = None) -> None:
        """Has the message delivered. Raises BrokerError if the broker refuses, NotReachable or RequestTimeout.

        With Skylark, ending again as before does nothing and ending otherwise is refused; Apache's broker may then
        deliver the message again.
        """
        await self._end(half, SYS_TRANSACTION_COMMIT, timeout_s)

    async def roll_back(self, half: HalfMessage, *, timeout_s: float | None = None) -> None:
        """Drops the message. Raises the same as `commit`."""
        await self._end(half, SYS_TRANSACTION_ROLLBACK, timeout_s)

    async def _end(self, half: HalfMessage, decision: int, timeout_s: float | None) -> None:
        courier = self._running_courier()
        patience_s = self._timeout_s if timeout_s is None else timeout_s
        deadline_s = self._clock_s() + patience_s
        if half.broker not in self.session.routes.brokers:  # the half message of another process
            try:
                async with asyncio.timeout_at(deadline_s):
                    await courier.route(half.topic, refresh=True)
            except RequestTimeout:
                raise
            except TimeoutError:
                raise RequestTimeout(f"no route of topic {half.topic!r} within {patience_s:.3g} s") from None
        header = EndTransaction(
            producer_group=half.group,
            tran_state_table_offset=half.half_offset,
            commit_log_offset=parse_message_id(half.offset_msg_id)[1],
            commit_or_rollback=decision,
            msg_id=half.msg_id,
            topic=half.topic,
            transaction_id=half.msg_id,
            broker_name=half.broker,
        )
        request = Frame(RequestCode.END_TRANSACTION, encode_header(header))
        answer = await self.session.ask_broker(half.broker, request, deadline_s - self._clock_s())
        if answer.code != ResponseCode.SUCCESS:
            raise BrokerError(answer.code, answer.remark, half.broker)
        self._trace(half.topic, half.msg_id, half.broker, committed=decision == SYS_TRANSACTION_COMMIT)

    def _asked(self, request: Frame, record: StoredMessage, connection: Connection) -> None:
        """A broker wants to know how a transaction ended."""
        question = decode_header(CheckTransactionState, request)
        message = Message.from_record(record, question.broker_name or "")
        message.topic = self._namespace.unwrap(message.topic)
        if message.msg_id in self._open or self._checks is None:
            return  # it will be ended here

        def tell(committed: bool) -> None:
            header = EndTransaction(
                producer_group=self.group,
                tran_state_table_offset=question.tran_state_table_offset,
                commit_log_offset=question.commit_log_offset,
                commit_or_rollback=SYS_TRANSACTION_COMMIT if committed else SYS_TRANSACTION_ROLLBACK,
                msg_id=message.msg_id,
                from_transaction_check=True,
                topic=question.topic,
                transaction_id=question.transaction_id,
                broker_name=question.broker_name,
            )
            connection.notify(Frame(RequestCode.END_TRANSACTION, encode_header(header)))
            self._trace(
                message.topic,
                message.msg_id,
                message.broker,
                committed=committed,
                labels=message.properties,
                is_from_check=True,
            )

        self._checks.begin(message, tell)

    def _trace(self, topic: str, msg_id: str, broker: str, **how: Any) -> None:
        if self._tracer is not None:
            self._tracer.add([transaction_ended(self.session, self.group, topic, msg_id, broker, **how)])


class Checks:
    """Calls the checker, so many at a time; what waits is bounded too."""

    def __init__(self, checker: Checker, max_checks: int) -> None:
        self._checker = checker
        self._threads = None if is_asynchronous(checker) else Threads(max_checks, "transaction checker", 0.0)
        self._turn = asyncio.Semaphore(max_checks)
        self._is_closed = False
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, message: Message, tell: Callable[[bool], None]) -> None:
        """Has `tell` called with the answer, if the checker knows one.

        A checker that does not end is not asked for the same message again: it takes one of the calls, and not all.
        """
        if message.msg_id in self._tasks:
            log.warning("the checker is still being asked for %s", message.msg_id)
            return
        if len(self._tasks) >= _MAX_WAITING_CHECKS:
            log.warning("%d transactions wait for the checker, %s is asked for later", len(self._tasks), message.msg_id)
            return
        task = self._tasks[message.msg_id] = asyncio.create_task(self._check(message, tell))
        task.add_done_callback(lambda _: self._tasks.pop(message.msg_id, None))

    async def close(self) -> None:
        self._is_closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await wait_for_end(tasks)
        if self._threads is not None:
            self._threads.close()

    async def _check(self, message: Message, tell: Callable[[bool], None]) -> None:
        async with self._turn:
            try:
                answer = await self._ask(message)
            except NotCalled:
                return
            except BaseException as e:
                if self._is_closed and isinstance(e, asyncio.CancelledError):
                    raise
                log.error("the checker failed for %s, it will be asked again", message.msg_id, exc_info=failure_of(e))
                return
        try:
            if answer is True or answer is False:
                tell(answer)
            elif answer is not None:
                log.error("the checker said %r of %s; it may say True, False or None", answer, message.msg_id)
        except Exception:
            log.exception("the answer for %s did not reach the broker, which will ask again", message.msg_id)

    async def _ask(self, message: Message) -> object:
        answer: object
        if self._threads is None:
            answer = self._checker(message)
        else:
            answer, error = await self._threads.call(self._checker, message)
            if error is not None:
                raise error
        return await answer if inspect.isawaitable(answer) else answer
