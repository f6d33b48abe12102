"""A consumer that takes messages when you ask, and has them acknowledged one by one, in any order.

    consumer = SimpleConsumer("localhost:9876", group="billing")
    consumer.subscribe("orders", tag="new || paid")
    async with consumer:
        for message in await consumer.receive():
            ...
            await consumer.ack(message)

The brokers share the messages out (POP consumption): there is no rebalance, any number of consumers take from any
queue, and nobody has to wait for a consumer that died. A message that was received is hidden from the others for its
invisible time. By then it is acknowledged, or its time is extended, or it comes again, with one more try in
`reconsume_times`; after `max_reconsume_times` of them it becomes a dead letter. What waits in this consumer is kept
hidden meanwhile: whoever gets a message has nearly all of its time.

Messages are received from all brokers at once: one that is empty, slow or down does not hold up the rest (`sources`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, Literal, Self

from skylark.client import popping
from skylark.client.addresses import NameServers
from skylark.client.crew import Crew, Worker
from skylark.client.errors import BrokerError, ClientClosed, InvalidMessage, RocketMQError
from skylark.client.holding import calling_thread
from skylark.client.lives import Life
from skylark.client.message import Message, MessageQueue
from skylark.client.options import check_consumer_group, check_flag, check_seconds, check_texts, reconsume_times
from skylark.client.popping import (
    ANY_QUEUE,
    DEFAULT_RECONSUME_TIMES,
    MAX_INVISIBLE_S,
    MIN_INVISIBLE_S,
    Popped,
    handle_of,
)
from skylark.client.receipts import Receipts
from skylark.client.returning import Returns
from skylark.client.routes import TopicRoute
from skylark.client.session import Session, session_of
from skylark.client.sources import Caught, Sources
from skylark.client.subscriptions import ALL, build_subscription, check_filter
from skylark.client.validation import check_group, check_topic
from skylark.net.connection import RequestFailed
from skylark.wire.bodies import CLUSTERING, POP, ConsumerData, Subscription
from skylark.wire.codes import ResponseCode
from skylark.wire.pop import FROM_MAX, FROM_MIN, MAX_POP_MESSAGES

log = logging.getLogger(__name__)

MAX_WAIT_S: Final = 3600.0
_DEAD_LETTER_LEVEL: Final = -1
_CLOSING_S: Final = 3.0
_HAND: Final = 16
"""So many messages are received for one who iterates."""
_WHERE: Final = {
    "last": FROM_MAX,
    "first": FROM_MIN,
    "CONSUME_FROM_LAST_OFFSET": FROM_MAX,
    "CONSUME_FROM_FIRST_OFFSET": FROM_MIN,
}
_STALE: Final = 1 / 8
"""Who gets a message has more of its time than what this leaves."""
_DUE: Final = 1 / 2
"""What waits here is hidden anew when so much of its time is over."""

# A broker that answers so will not answer otherwise a second later.
_LASTING: Final = frozenset(
    (
        ResponseCode.NO_PERMISSION,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.SUBSCRIPTION_PARSE_FAILED,
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
        ResponseCode.INVALID_PARAMETER,
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
    )
)


class SimpleConsumer:
    """Messages on request, each acknowledged for itself."""

    def __init__(
        self,
        name_servers: NameServers = None,
        group: str = "DEFAULT_CONSUMER",
        *,
        session: Session | None = None,
        fifo: bool = False,
        from_where: Literal["last", "first", "CONSUME_FROM_LAST_OFFSET", "CONSUME_FROM_FIRST_OFFSET"] = "last",
        invisible_s: float = 30.0,
        max_reconsume_times: int = DEFAULT_RECONSUME_TIMES,
        request_timeout_s: float = 3.0,
        namespace: str = "",
    ) -> None:
        """
        - `name_servers`: `host:port`, several joined by `;` or in a list, or an address server's URL; None leaves it
          to the environment.
        - `group`: whose messages the consumer shares with its other members.
        - `session`: shares the connections of a session; without one, the consumer has its own.
        - `fifo`: in order: a queue gives nothing more until what it gave before is acknowledged.
        - `from_where`: where a group starts that is new to a queue: with its "first" message or with the "last".
        - `invisible_s`: how long messages are hidden, unless `receive` says otherwise.
        - `max_reconsume_times`: a message that came again more often becomes a dead letter; -1 is RocketMQ's 16.
        - `request_timeout_s`: of each request, beyond what it waits for messages.
        - `namespace`: stands before the names of group and topics on the wire.
        """
        self._session = session_of(session, name_servers, namespace, request_timeout_s)
        self._namespace = self._session.namespace
        check_consumer_group(group)
        group = self._namespace.wrap(group)
        check_group(group)
        check_flag("fifo", fifo)
        if (where := _WHERE.get(from_where)) is None:
            raise InvalidMessage(f"from_where is {from_where!r}; a simple consumer takes 'last' or 'first'")
        times = reconsume_times(max_reconsume_times)
        max_reconsume_times = DEFAULT_RECONSUME_TIMES if times is None else times
        self.group = group
        self._fifo = fifo
        self._init_mode = where
        self._invisible_ms = _invisible_ms(invisible_s, MIN_INVISIBLE_S)
        self._max_times = max_reconsume_times
        self._timeout_s = request_timeout_s
        self._returns = Returns(self._session, group, max_reconsume_times, _now_ms)
        self._subscriptions: dict[str, Subscription] = {}
        self._unchecked: set[str] = set()  # topics whose subscription no broker has seen yet
        self._routes: list[TopicRoute] = []
        self._sources = Sources(self._pop, self._bell, self._settle)
        self._chores: set[asyncio.Task[None]] = set()
        self._iterated: deque[Caught] = deque()
        self._dealt: dict[threading.Thread, deque[Caught]] = {}  # what threads take from, one by one
        self._receipts = Receipts(self._session, group, request_timeout_s)
        self._shortest_ms = self._invisible_ms
        self._crew = Crew(f"group {group}")
        self._life = Life(f"group {group}", self._end)
        self._is_running = False
        self._is_closed = False
        self._has_joined = False

    # Life.

    async def start(self) -> None:
        """Connects; `async with` does it. Raises RouteNotFound when a topic does not exist."""
        if self._is_running:
            return
        if self._is_closed:
            raise ClientClosed("a consumer is started once; make another one")
        await self._session.acquire()
        self._is_running = True
        await self._life.begin(self._begin)

    async def _begin(self) -> None:
        await self._follow_subscriptions()
        self._crew.hire(self._renew_forever, "renewing", until=lambda: self._is_closed)

    async def close(self) -> None:
        """Leaves the group. What was received and not acknowledged can still be acknowledged by another consumer.

        Whoever gives up waiting does not stop the closing.
        """
        if not self._is_running and not self._is_closed:
            return
        self._session.check_home()
        await self._life.end()

    async def _end(self) -> None:
        self._is_running, self._is_closed = False, True
        self._sources.changed.set()
        try:
            await self._crew.end()
            await self._settle_all()
        finally:
            try:
                await self._session.remove_consumer(self)
            finally:
                await self._session.release()

    async def _settle_all(self) -> None:
        await self._sources.close(_CLOSING_S)
        self._take_back_dealt()
        # What nobody received after all need not wait until its time is over.
        now_s = asyncio.get_running_loop().time()
        waiting = [each for each in (*self._iterated, *self._sources.pile) if _age(each, now_s) < 1]
        await asyncio.gather(*(self._let_go(each.message) for each in waiting))
        await self._receipts.close(_CLOSING_S)
        if self._chores:
            await asyncio.wait(self._chores, timeout=_CLOSING_S)
        for chore in self._chores:
            chore.cancel()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _check_running(self) -> None:
        if not self._is_running:
            raise ClientClosed("the consumer is not started, or closed already; use it within `with` or `async with`")
        self._session.check_home()

    # What to receive.

    def subscribe(self, topic: str, tag: str = ALL, *, sql: str | None = None) -> None:
        """Wants the messages of a topic with some tags (`a || b`), or by an SQL92 expression that the broker evaluates.

        All members of a group must subscribe to the same.
        """
        check_texts(topic=topic, tag=tag)
        topic = self._namespace.wrap(topic)
        check_topic(topic)
        self._subscriptions[topic] = build_subscription(topic, tag=tag, sql=sql, version=_now_ms())
        self._unchecked.add(topic)

    def unsubscribe(self, topic: str) -> None:
        """Wants no more messages of the topic; what waits here of it may still come."""
        topic = self._namespace.wrap(topic)
        if self._subscriptions.pop(topic, None) is not None:
            self._unchecked.add(topic)

    async def _follow_subscriptions(self) -> None:
        """Brings the sources in line with subscriptions and routes, and tells the brokers what is new."""
        routes = [
            self._session.routes.known(topic) or await self._session.routes.get(topic) for topic in self._subscriptions
        ]
        for route in routes:
            if route.leaders:
                raise RocketMQError(
                    f"topic {route.topic!r} is static, and its queues can't be popped: use a push consumer"
                )
        if routes != self._routes:
            self._routes = routes
            self._sources.set_queues(
                MessageQueue(queue.broker_name, ANY_QUEUE, route.topic)
                for route in routes
                for queue in route.read_queues
            )
        if not self._unchecked:
            return
        for topic in self._unchecked & self._subscriptions.keys():
            await check_filter(self._session, self.group, self._subscriptions[topic])
        self._unchecked.clear()
        if self._has_joined:
            await self._session.heartbeat()
        elif self._subscriptions:
            await self._session.add_consumer(self)
            self._has_joined = True

    # Messages.

    async def receive(
        self, max_messages: int = 16, invisible_s: float | None = None, wait_s: float = 15.0
    ) -> list[Message]:
        """Up to `max_messages`, hidden from the rest of the group for `invisible_s`; an empty list when none came
        within `wait_s`.

        Raises RouteNotFound when a topic does not exist, and what the matter is when no broker can be asked.
        """
        clock_s = asyncio.get_running_loop().time
        deadline_s = clock_s() + wait_s
        while True:
            caught = await self._receive(max_messages, invisible_s, max(deadline_s - clock_s(), 0.0))
            messages = await self._fresh(caught)
            if messages or not caught:
                return messages

    async def _receive(self, max_messages: int, invisible_s: float | None, wait_s: float) -> list[Caught]:
        self._check_running()
        if not 1 <= max_messages <= MAX_POP_MESSAGES:
            raise InvalidMessage(f"max_messages is {max_messages}; a broker gives 1 to {MAX_POP_MESSAGES} at once")
        if not 0 <= wait_s <= MAX_WAIT_S:
            raise InvalidMessage(f"wait_s is {wait_s:g}; it must be between 0 and {MAX_WAIT_S:g}")
        invisible_ms = self._invisible_ms if invisible_s is None else _invisible_ms(invisible_s, MIN_INVISIBLE_S)
        self._shortest_ms = min(self._shortest_ms, invisible_ms)
        if not self._subscriptions:
            raise InvalidMessage("the consumer is not subscribed to any topic: call subscribe first")
        clock_s = asyncio.get_running_loop().time
        began_s = clock_s()
        deadline_s = began_s + wait_s
        self._sources.look_again()
        while self._is_running:
            self._sources.changed.clear()
            caught = self._take(max_messages)
            if caught:
                return caught
            await self._follow_subscriptions()
            wait_ms = max(round((deadline_s - clock_s()) * 1000), 0)
            self._sources.ask(max_messages, invisible_ms, wait_ms)
            failure = self._sources.failure(began_s)
            if isinstance(failure, BrokerError) and failure.code in _LASTING:
                raise failure
            if not wait_ms and not self._sources.is_undecided:
                failure = self._sources.failure()
                if failure is not None:
                    raise failure
                return []
            await self._wait(min(self._sources.next_turn_s(), deadline_s) if wait_ms else self._sources.next_turn_s())
        return []

    def _take(self, count: int) -> list[Caught]:
        pile = self._sources.pile
        return [pile.popleft() for _ in range(min(count, len(pile)))]

    async def _wait(self, until_s: float) -> None:
        try:
            async with asyncio.timeout_at(until_s):
                await self._sources.changed.wait()
        except TimeoutError:
            pass

    async def _fresh(self, caught: list[Caught]) -> list[Message]:
        """Those of the messages that are still ours, hidden from now on for nearly their whole time.

        The others have come again, or will: nobody must work on them here. When this is cancelled, they wait again.
        """
        try:
            if renewals := [each.renewal for each in caught if each.renewal is not None]:
                await asyncio.wait(renewals)
            await asyncio.gather(*(self._renew(each, _STALE) for each in caught))
        except asyncio.CancelledError:
            self._sources.pile.extendleft(reversed(caught))
            raise
        now_s = asyncio.get_running_loop().time()
        fresh = [each.message for each in caught if _age(each, now_s) < _DUE]
        if len(fresh) < len(caught):
            log.info("%s: %d messages waited here for too long and come again", self.group, len(caught) - len(fresh))
        return fresh

    async def _renew(self, caught: Caught, at_age: float) -> None:
        """Hides a message anew that has used up such a part of its time, unless it is too late for that."""
        began_s = asyncio.get_running_loop().time()
        if not at_age <= _age(caught, began_s) < 1:
            return
        message = caught.message
        try:
            await self._receipts.extend(message, handle_of(message).invisible_ms)
            caught.hidden_at_s = began_s
        except RocketMQError as e:
            log.info("the time of message %s, which waits here, can't be extended: %s", message.msg_id, e)

    async def _renew_forever(self) -> None:
        """Keeps hidden what was popped and waits here, behind what is worked on: it must come to nobody else."""
        clock_s = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self._shortest_ms / 8000)
            dealt = [caught for hand in self._dealt.values() for caught in list(hand)]
            for caught in [*self._iterated, *self._sources.pile, *dealt]:
                try:
                    if caught.renewal is None and _DUE <= _age(caught, clock_s()) < 1:
                        caught.renewal = self._spawn(self._renew(caught, _DUE))
                        caught.renewal.add_done_callback(partial(_renewed, caught))
                except Exception:
                    log.exception("%s: a message that waits here can't be kept hidden", self.group)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """The next message; ends when the consumer is closed, by another task."""
        if not self._is_closed:
            self._check_running()
        while not self._is_closed:
            if not self._iterated:
                self._iterated.extend(await self._receive(_HAND, None, 15.0))
            while self._iterated:
                for message in await self._fresh([self._iterated.popleft()]):
                    return message
        raise StopAsyncIteration

    async def _deal(self) -> deque[Caught] | None:
        """For the blocking twin: what its thread takes one by one, without the loop; None when the consumer is closed.

        It waits there as it does here: it is kept hidden, and others get it when there is nothing else for them.
        """
        thread = calling_thread.get()
        assert thread is not None
        if not self._is_closed:
            self._check_running()
        hand = self._dealt.setdefault(thread, deque())
        while not self._is_closed and not hand:
            if not self._iterated and not self._sources.pile:
                self._take_back_dealt()
            if not self._iterated:
                self._iterated.extend(await self._receive(_HAND, None, 15.0))
            hand.extend(self._iterated)
            self._iterated.clear()
        return None if self._is_closed else hand

    def _take_back_dealt(self) -> None:
        """What threads have not looked at waits here again."""
        for thread, hand in list(self._dealt.items()):
            with suppress(IndexError):
                while True:
                    self._iterated.appendleft(hand.pop())
            if not thread.is_alive():
                del self._dealt[thread]

    def _interrupted(self, _: threading.Thread) -> None:
        """A thread has not seen what it was dealt: it still lies there."""

    async def ack(self, messages: Message | Iterable[Message]) -> None:
        """Says that a message, or several, are done. Raises RocketMQError; acknowledging again does no harm."""
        self._check_running()
        given = [messages] if isinstance(messages, Message) else list(messages)
        await self._receipts.ack(given)

    async def extend(self, message: Message, invisible_s: float) -> None:
        """Hides the message for so long from now on: more time to work on it, or less, before it comes again.

        The message has a new receipt handle then. One that is acknowledged, or is just being, stays so. Raises
        RocketMQError.
        """
        self._check_running()
        await self._receipts.extend(message, _invisible_ms(invisible_s, 0.0))

    # What the sources call.

    async def _pop(
        self, queue: MessageQueue, max_messages: int, invisible_ms: int, wait_ms: int, attempt_id: str
    ) -> Popped:
        return await popping.pop(
            self._session,
            self.group,
            queue,
            self._subscription(queue.topic),
            max_messages=max_messages,
            invisible_ms=invisible_ms,
            wait_ms=wait_ms,
            init_mode=self._init_mode,
            in_order=self._fifo,
            attempt_id=attempt_id if self._fifo else None,
            timeout_s=self._timeout_s,
        )

    async def _bell(self, queue: MessageQueue, wait_ms: int, attempt_id: str) -> bool:
        return await popping.wait_for_messages(
            self._session,
            self.group,
            queue,
            self._subscription(queue.topic),
            wait_ms,
            in_order=self._fifo,
            attempt_id=attempt_id if self._fifo else None,
        )

    def _subscription(self, topic: str) -> Subscription:
        subscription = self._subscriptions.get(topic)
        if subscription is None:
            raise InvalidMessage(f"the consumer is not subscribed to topic {topic!r} any more")
        return subscription

    def _settle(self, popped: Popped) -> list[Message]:
        """What the user gets; the rest is dealt with in the background."""
        if popped.unwanted:
            self._spawn(popping.ack(self._session, self.group, popped.unwanted, self._timeout_s))
        for message, reason in popped.unreadable:
            # It comes again: another consumer of the group may be able to read it.
            log.warning("message %s of %s can't be received: %s", message.msg_id, message.topic, reason)
        everything = [*popped.messages, *(message for message, _ in popped.unreadable)]
        doomed = [message for message in everything if message.reconsume_times > self._max_times]
        for message in doomed:
            self._spawn(self._bury(message))
        return [message for message in popped.messages if message.reconsume_times <= self._max_times]

    async def _bury(self, message: Message) -> None:
        """Makes a message a dead letter; if that fails it comes again, and is tried again."""
        if await self._returns.send_back(message, _DEAD_LETTER_LEVEL, may_send_anew=False):
            await popping.ack(self._session, self.group, [message], self._timeout_s)

    async def _let_go(self, message: Message) -> None:
        try:
            await self._receipts.extend(message, 0, counts=False)
        except RocketMQError as e:
            log.debug("message %s comes again when its time is over: %s", message.msg_id, e)

    def _spawn(self, chore: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = Worker(chore, loop=asyncio.get_running_loop(), name=f"chore of {self.group}")
        self._chores.add(task)
        task.add_done_callback(self._chore_done)
        return task

    def _chore_done(self, task: asyncio.Task[None]) -> None:
        self._chores.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s could not put a message away, which comes again: %s", self.group, error)

    # What the session calls.

    def data(self) -> ConsumerData:
        return ConsumerData(
            group_name=self.group,
            consume_type=POP,
            message_model=CLUSTERING,
            consume_from_where=(
                "CONSUME_FROM_FIRST_OFFSET" if self._init_mode == FROM_MIN else "CONSUME_FROM_LAST_OFFSET"
            ),
            subscription_data_set=list(self._subscriptions.values()),
        )

    def rebalance_soon(self) -> None:
        """There is nothing to share out."""

    def reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        """The brokers know where the group is."""

    def positions(self, topic: str) -> dict[MessageQueue, int]:
        return {}

    def running_info(self) -> dict[str, object]:
        return {
            "mqPopTable": {},
            "mqTable": {},
            "properties": {
                "PROP_CONSUMEORDERLY": str(self._fifo).lower(),
                "PROP_CONSUME_TYPE": POP,
                "PROP_NAMESERVER_ADDR": ";".join(self._session.name_servers),
            },
            "statusTable": {},
            "subscriptionSet": sorted(self._subscriptions.values(), key=lambda each: each.topic),
            "userConsumerInfo": {},
        }

    def consume_directly(self, message: Message) -> Awaitable[Mapping[str, object]]:
        raise RequestFailed(
            ResponseCode.SYSTEM_ERROR, f"a simple consumer of group {self.group} has no listener to give a message to"
        )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _invisible_ms(invisible_s: float, least_s: float) -> int:
    check_seconds("invisible_s", invisible_s, least_s, MAX_INVISIBLE_S)
    return round(invisible_s * 1000)


def _age(caught: Caught, now_s: float) -> float:
    """Which part of its time is over; from 1 on, the message comes again."""
    return (now_s - caught.hidden_at_s) * 1000 / max(handle_of(caught.message).invisible_ms, 1)


def is_young(caught: Caught) -> bool:
    """Whether a message can be handed out as it is, with nearly all of its time. For any thread."""
    return caught.renewal is None and _age(caught, time.monotonic()) < _STALE


def _renewed(caught: Caught, _: object) -> None:
    caught.renewal = None
