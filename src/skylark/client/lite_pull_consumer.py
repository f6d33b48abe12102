"""A consumer that you ask for messages: `await consumer.poll()` or `async for message in consumer`.

It reads ahead in the background, one task for each queue. Either it subscribes to topics and shares their queues with
the other members of its group, or it is assigned queues and has them for itself:

    consumer = LitePullConsumer("localhost:9876", group="billing")
    consumer.subscribe("orders", tag="new || paid")
    async with consumer:
        async for message in consumer:
            ...

Asking for more says that what the same task, or thread, was given before is done (`holding`): only that is committed,
every 5 s, when a queue goes to another member, and at the end. So does leaving the block without an error. One that
leaves it by an error, or calls `close`, does not commit what it had in hand: those messages come again.

What it has read ahead is kept by `read_ahead`, filled by `queue_reading`, for the queues that `queue_sharing` gives it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Final, Self

from skylark.client.addresses import NameServers
from skylark.client.allocate import Strategy, average
from skylark.client.committing import Commits
from skylark.client.crew import Crew
from skylark.client.errors import BrokerError, ClientClosed, InvalidMessage, RocketMQError
from skylark.client.failing import Failures
from skylark.client.holding import Holding, current_holder
from skylark.client.lives import Life
from skylark.client.message import Message, MessageQueue
from skylark.client.offsets import RemoteOffsets
from skylark.client.options import (
    LEAST_S,
    check_consumer_group,
    check_count,
    check_flag,
    check_plain_callback,
    check_seconds,
    check_texts,
    check_trace,
)
from skylark.client.pull_consumer import MAX_PULL, PullConsumer
from skylark.client.pulling import Limits, check_limits
from skylark.client.queue_reading import QueueReading
from skylark.client.queue_sharing import QueueSharing, look_at
from skylark.client.read_ahead import Hand, Owned, ReadAhead
from skylark.client.returning import Returns
from skylark.client.session import Session, session_of
from skylark.client.starting import FromWhere, Start, start_of
from skylark.client.subscriptions import ALL, build_subscription, check_filter
from skylark.client.tracing import ConsumeTraces, open_tracer
from skylark.client.validation import check_group, check_topic
from skylark.net.connection import RequestFailed
from skylark.wire.bodies import CLUSTERING, PULL, ConsumerData, Subscription
from skylark.wire.codes import ResponseCode

log = logging.getLogger(__name__)

MAX_HAND: Final = 256
"""So many messages are dealt at once to one who iterates over them."""


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class LitePullConsumer:
    """Messages on request, read ahead."""

    def __init__(
        self,
        name_servers: NameServers = None,
        group: str = "DEFAULT_CONSUMER",
        *,
        session: Session | None = None,
        from_where: FromWhere = "last",
        auto_commit: bool = True,
        commit_interval_s: float = 5.0,
        pull_batch_size: int = 32,
        limits: Limits | None = None,
        max_cached_messages: int = 10_000,
        strategy: Strategy = average,
        rebalance_interval_s: float = 20.0,
        request_timeout_s: float = 3.0,
        namespace: str = "",
        trace: bool | str = False,
    ) -> None:
        """
        - `name_servers`: `host:port`, several joined by `;` or in a list, or an address server's URL; None leaves it
          to the environment.
        - `group`: whose messages the consumer shares with its other members.
        - `session`: shares the connections of a session; without one, the consumer has its own.
        - `from_where`: where a group starts that has no offset yet: "last", "first", or a time (datetime, or epoch
          milliseconds).
        - `auto_commit`: False leaves it to you to call `commit`; else it is done every `commit_interval_s`.
        - `pull_batch_size`: messages of one pull at most.
        - `limits`: how much of each queue may be read ahead (`skylark.client.pulling.Limits`); `max_cached_messages` of
          all queues together.
        - `strategy`: how queues are shared, one of `skylark.client.allocate`; the same for all members.
          `rebalance_interval_s`: how often that is done without a reason.
        - `request_timeout_s`: of each request.
        - `namespace`: stands before the names of group and topics on the wire.
        - `trace`: True, or the name of a topic, writes a trace of everything that is handed out there.
        """
        self._session = session_of(session, name_servers, namespace, request_timeout_s)
        self._namespace = self._session.namespace
        check_consumer_group(group)
        group = self._namespace.wrap(group)
        check_group(group)
        limits = Limits() if limits is None else limits
        check_flag("auto_commit", auto_commit)
        check_count("pull_batch_size", pull_batch_size, 1, MAX_PULL)
        check_limits(limits)
        check_count("max_cached_messages", max_cached_messages, 1)
        check_seconds("commit_interval_s", commit_interval_s, LEAST_S)
        check_seconds("rebalance_interval_s", rebalance_interval_s, LEAST_S)
        check_plain_callback("strategy", strategy, "client", "queues", "members")
        check_trace(trace)
        self.group = group
        self._tracer = open_tracer(self._session, group, "CONSUME", trace)
        self._reader = PullConsumer(group=group, session=self._session, request_timeout_s=request_timeout_s)
        self._offsets = RemoteOffsets(self._session, group, request_timeout_s)
        self._start = Start.of(from_where, _now_ms())
        self._subscriptions: dict[str, Subscription] = {}
        self._assigned: dict[MessageQueue, Subscription] = {}
        self._started = False
        self._closed = False
        self._is_balancing = False
        self._is_told_of_no_topic = False
        self._waiters = 0
        self._failures = Failures(group, log)
        self._ahead = ReadAhead(limits, max_cached_messages)
        self._holding = Holding(group, self._ahead)
        self._commits = Commits(
            group,
            self._reader,
            self._ahead,
            self._holding,
            self._failures,
            is_automatic=auto_commit,
            interval_s=commit_interval_s,
        )
        self._reading = QueueReading(
            group,
            self._reader,
            self._ahead,
            Returns(self._session, group, None, _now_ms),
            self._failures,
            batch_size=pull_batch_size,
            first_offset=self._first_offset,
            look_again=lambda topic: look_at(self._session, topic, refresh=True),
        )
        self._sharing = QueueSharing(
            self._session,
            self,
            self._subscriptions,
            self._failures,
            strategy=strategy,
            interval_s=rebalance_interval_s,
            own=self._own_share,
        )
        self._crew = Crew(f"group {group}")
        self._life = Life(f"group {group}", self._end)

    # Life.

    async def start(self) -> None:
        """Returns when the first queues are taken; `async with` does it. Raises BrokerError for SQL that is none."""
        if self._started:
            return
        if self._closed:
            raise ClientClosed("a consumer is started once; make another one")
        await self._reader.start()
        self._started = True
        await self._life.begin(self._begin_all)

    async def _begin_all(self) -> None:
        if self._tracer is not None:
            await self._tracer.start()
        await self._check_filters()
        self._crew.hire(self._commits.run, "committing", until=lambda: self._closed)
        self._own(None, self._assigned)
        if self._subscriptions:
            self._keep_balanced(await self._sharing.share())

    async def close(self) -> None:
        """Commits what is settled, unless `auto_commit` is off, and leaves the group.

        What was handed out last comes again, to whoever reads the queue then, unless you asked for more or called
        `commit`. Whoever gives up waiting does not stop the closing.
        """
        if not self._started and not self._closed:
            return
        self._session.check_home()
        await self._life.end()

    async def _end(self) -> None:
        self._started, self._closed = False, True
        self._reading.is_closing = True
        self._ahead.arrived.set()
        try:
            await self._crew.end()
            self._holding.forget()
            self._revoke(list(self._ahead.owned.values()))
            await self._commits.parted()
            await self._sharing.leave()
            if self._tracer is not None:
                await self._tracer.close()
        finally:
            await self._reader.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._holding.settle(current_holder())
        await self.close()

    async def _check_filters(self) -> None:
        """Has a broker look at each SQL expression; one that can't be asked is no reason not to start."""
        wanted = [*self._subscriptions.values(), *self._assigned.values()]
        for subscription in {(each.topic, each.sub_string): each for each in wanted if not each.is_by_tag}.values():
            await look_at(self._session, subscription.topic)
            try:
                await check_filter(self._session, self.group, subscription)
            except BrokerError:
                raise
            except RocketMQError as e:
                log.warning("group %s: nobody can check the filter of %s: %s", self.group, subscription.topic, e)

    # What to read.

    def subscribe(self, topic: str, tag: str = ALL, *, sql: str | None = None) -> None:
        """Shares the queues of a topic with the other members of the group, which must subscribe to the same."""
        check_texts(topic=topic, tag=tag)
        topic = self._namespace.wrap(topic)
        check_topic(topic)
        if self._assigned:
            raise RocketMQError("this consumer has queues assigned; a second consumer can subscribe")
        self._subscriptions[topic] = build_subscription(topic, tag=tag, sql=sql, version=_now_ms())
        self._revoke_topic(topic)  # what was read ahead by another expression
        if self._started:
            self._keep_balanced(False)
        self._sharing.soon()

    def unsubscribe(self, topic: str) -> None:
        """Gives up the topic's queues."""
        topic = self._namespace.wrap(topic)
        if self._subscriptions.pop(topic, None) is not None:
            self._revoke_topic(topic)
            self._sharing.soon()

    def assign(self, queues: Iterable[MessageQueue], tag: str = ALL, *, sql: str | None = None) -> None:
        """Reads exactly these queues, whoever else does; those of an earlier call that are not among them end."""
        if self._subscriptions:
            raise RocketMQError("this consumer subscribes to topics; a second consumer can have queues assigned")
        version = _now_ms()
        places = [self._namespace.wrap_queue(queue) for queue in queues]
        self._assigned = {queue: build_subscription(queue.topic, tag=tag, sql=sql, version=version) for queue in places}
        if self._started:
            self._own(None, self._assigned)

    def assignment(self) -> list[MessageQueue]:
        """The queues that this consumer reads at the moment."""
        return [self._namespace.unwrap_queue(queue) for queue in self._ahead.owned]

    def failures(self) -> list[str]:
        """What can't be done at the moment, or could not until the end: topics to read, offsets to commit."""
        return self._failures.texts()

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The queues of a topic that can be read."""
        return await self._reader.queues(topic)

    # Messages.

    async def poll(self, timeout_s: float = 5.0, max_count: int = 32) -> list[Message]:
        """Up to `max_count` messages of one queue, an empty list if none came in time.

        It also says that what earlier calls of the same task gave is done.
        """
        self._check_started()
        if max_count < 1:
            raise InvalidMessage(f"max_count is {max_count}; it must be 1 or more")
        holder = current_holder()
        self._holding.settle(holder)
        hand = self._take(max_count)
        if hand is None:
            try:
                async with asyncio.timeout(timeout_s):
                    while hand is None:
                        await self._arrival()
                        self._check_started()
                        hand = self._take(max_count)
            except TimeoutError:
                return []
        return list(hand.messages)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """Ends when the consumer is closed, by another task."""
        hand = self._holding.latest(current_holder())
        if hand is None or not hand.rest:
            hand = await self._deal()
            if hand is None:
                raise StopAsyncIteration
        message = hand.current = hand.rest.popleft()
        return message

    async def _deal(self) -> Hand | None:
        """A hand of messages for one who iterates, None when the consumer is closed.

        Who iterates on gets twice as many each time. It is one message when others wait.
        """
        if not self._closed:
            self._check_started()
        holder = current_holder()
        last = self._holding.latest(holder)
        count = min(2 * last.size, MAX_HAND) if last is not None else 1
        self._holding.settle(holder)
        while not self._closed:
            hand = self._take(1 if self._waiters else count)
            if hand is not None:
                hand.deal()
                return hand
            await self._arrival()
        return None

    def _take(self, max_count: int) -> Hand | None:
        if not self._ahead.is_ready:
            self._holding.reclaim_unread()
        hand = self._holding.take(current_holder(), max_count)
        if self._tracer is not None and hand is not None:
            ConsumeTraces(self._tracer, self._session).handed_out(self.group, hand.messages)
        return hand

    def _interrupted(self, thread: threading.Thread) -> None:
        """A thread has not seen what it was just given."""
        self._holding.take_back(thread)

    async def _arrival(self) -> None:
        if not (self._subscriptions or self._assigned or self._is_told_of_no_topic):
            self._is_told_of_no_topic = True
            log.warning("group %s has no topic, and gets nothing until it subscribes or assigns", self.group)
        self._ahead.arrived.clear()
        self._waiters += 1
        try:
            await self._ahead.arrived.wait()
        finally:
            self._waiters -= 1

    # Places.

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Goes on at `offset`; what was read ahead is dropped. Raises InvalidMessage for one that can't be."""
        low, high = await self._reader.min_offset(queue), await self._reader.max_offset(queue)
        if not low <= offset <= high:
            raise InvalidMessage(f"{queue} has the offsets {low} to {high}, not {offset}")
        self._move(self._find(queue), offset)

    async def seek_to_begin(self, queue: MessageQueue) -> None:
        """Goes on at the oldest message that is still there."""
        self._find(queue)
        await self.seek(queue, await self._reader.min_offset(queue))

    async def seek_to_end(self, queue: MessageQueue) -> None:
        """Goes on behind the last message."""
        self._find(queue)
        await self.seek(queue, await self._reader.max_offset(queue))

    def position(self, queue: MessageQueue) -> int | None:
        """The offset of the next message that a poll will give, None until that is known."""
        return self._find(queue).next_offset

    async def min_offset(self, queue: MessageQueue) -> int:
        """The offset of the oldest message that is still there."""
        return await self._reader.min_offset(queue)

    async def max_offset(self, queue: MessageQueue) -> int:
        """The offset that the next message will have."""
        return await self._reader.max_offset(queue)

    async def offset_for_time(self, queue: MessageQueue, when: datetime | int) -> int:
        """The offset of the first message stored at `when` or later; a number is milliseconds since 1970."""
        return await self._reader.offset_for_time(queue, when)

    async def committed(self, queue: MessageQueue) -> int | None:
        """The group's offset at the broker, None when there is none."""
        return await self._reader.committed(queue)

    async def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Commits these offsets, or that everything is done which this task was given. Raises what the broker answers.

        What other tasks, or threads, hold is theirs to settle.
        """
        self._check_started()
        if offsets is not None:
            for queue, offset in offsets.items():
                await self._reader.commit(queue, offset)
            return
        self._holding.settle(current_holder())
        for owned in list(self._ahead.owned.values()):
            await self._commits.commit(owned)

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Gives and reads no messages of these queues until they are resumed."""
        for owned in [self._find(queue) for queue in queues]:
            self._ahead.pause(owned)

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """Gives and reads messages of these queues again."""
        for owned in [self._find(queue) for queue in queues]:
            self._ahead.resume(owned)

    # What the session asks of a member of a group.

    def data(self) -> ConsumerData:
        return ConsumerData(
            group_name=self.group,
            consume_type=PULL,
            message_model=CLUSTERING,
            consume_from_where=self._start.apache_name,
            subscription_data_set=list(self._subscriptions.values()),
            unit_mode=self._session.unit_mode,
        )

    def rebalance_soon(self) -> None:
        self._sharing.soon()

    def reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        for queue, offset in offsets.items():
            owned = self._ahead.owned.get(queue)
            if owned is not None and queue.topic == topic:
                self._move(owned, offset)

    def positions(self, topic: str) -> dict[MessageQueue, int]:
        return {
            queue: owned.done
            for queue, owned in self._ahead.owned.items()
            if queue.topic == topic and owned.done is not None
        }

    def running_info(self) -> Mapping[str, object]:
        return {
            "properties": {"consumerGroup": self.group, "PROP_CONSUME_TYPE": PULL},
            "subscriptionSet": list(self._subscriptions.values()),
            "mqTable": {
                queue: {"commitOffset": owned.done or 0, "cachedMsgCount": len(owned.waiting), "droped": False}
                for queue, owned in self._ahead.owned.items()
            },
            "statusTable": {},
        }

    def consume_directly(self, message: Message) -> Awaitable[Mapping[str, object]]:
        raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"group {self.group} pulls: it has no listener to consume with")

    # Queues.

    def _keep_balanced(self, balanced: bool) -> None:
        if not self._is_balancing:
            self._is_balancing = True
            self._crew.hire(partial(self._sharing.run, balanced), "sharing of queues", until=lambda: self._closed)

    def _own_share(self, topic: str, share: Iterable[MessageQueue]) -> None:
        self._own(topic, dict.fromkeys(share, self._subscriptions[topic]))

    def _own(self, topic: str | None, wanted: Mapping[MessageQueue, Subscription]) -> None:
        """Ends what is not wanted, of the topic or of all, and begins what is new."""
        lost = [
            owned
            for queue, owned in self._ahead.owned.items()
            if queue not in wanted and (topic is None or queue.topic == topic)
        ]
        self._revoke(lost)
        for queue, subscription in wanted.items():
            owned = self._ahead.owned.get(queue)
            if owned is None:
                self._begin(Owned(queue, subscription))
            elif not _is_same_filter(owned.wanted, subscription):
                self._begin(self._ahead.succeed(owned, subscription))

    def _begin(self, owned: Owned) -> None:
        self._ahead.add(owned)
        owned.task = self._crew.hire(
            partial(self._reading.run, owned), f"reading of {owned.queue}", until=lambda: owned.is_dropped
        )

    def _revoke(self, revoked: list[Owned]) -> None:
        """Ends owned queues; what is done of them is committed on the way out."""
        for owned in revoked:
            self._ahead.drop(owned)
            self._commits.part(owned)

    def _revoke_topic(self, topic: str) -> None:
        self._revoke([owned for owned in self._ahead.owned.values() if owned.queue.topic == topic])

    def _move(self, owned: Owned, offset: int) -> None:
        self._ahead.drop(owned)
        moved = Owned(owned.queue, owned.wanted, offset, owned.is_paused)
        moved.committed = owned.committed
        self._begin(moved)

    async def _first_offset(self, queue: MessageQueue) -> int:
        await self._commits.parted()  # this queue may be among those that were just given up
        await look_at(self._session, queue.topic)
        return await start_of(self._session, self._offsets, queue, self._start)

    def _find(self, queue: MessageQueue) -> Owned:
        owned = self._ahead.owned.get(self._namespace.wrap_queue(queue))
        if owned is None:
            raise InvalidMessage(f"{queue} is not among the queues of this consumer; see assignment()")
        return owned

    def _check_started(self) -> None:
        if not self._started:
            raise ClientClosed("the consumer is not started, or closed already: use it within `with` or `async with`")
        self._session.check_home()


def _is_same_filter(one: Subscription, other: Subscription) -> bool:
    return (one.sub_string, one.expression_type) == (other.sub_string, other.expression_type)
