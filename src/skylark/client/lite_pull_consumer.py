"""A consumer that you ask for messages: `await consumer.poll()` or `async for message in consumer`.

It reads ahead in the background, one task for each queue. Either it subscribes to topics and shares their queues with
the other members of its group, or it is assigned queues and has them for itself:

    consumer = LitePullConsumer("localhost:9876", group="billing")
    consumer.subscribe("orders", tag="new || paid")
    async with consumer:
        async for message in consumer:
            ...

Asking for more says that what came before is done: only that is committed, every 5 s, when a queue goes to another
member, and at the end. One that leaves its block by an error does not commit what it had in hand, so that those
messages come again.

An owned queue is a new object each time it is assigned or moved by `seek`, and carries its own end: what still
works for an old one can't touch its successor.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Self

from skylark.client.allocate import Strategy, average, java_order
from skylark.client.errors import BrokerError, ClientClosed, RocketMQError
from skylark.client.message import Message, MessageQueue
from skylark.client.offsets import RemoteOffsets
from skylark.client.pull_consumer import PullConsumer
from skylark.client.pulling import Limits, PullStatus
from skylark.client.session import Session
from skylark.client.starting import FromWhere, Start, start_of
from skylark.client.subscriptions import ALL, build_subscription
from skylark.client.validation import check_group, check_topic
from skylark.net.connection import RequestFailed
from skylark.wire.bodies import CLUSTERING, PULL, ConsumerData, ConsumerIds, Subscription, decode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import GetConsumerListByGroup, encode_header

log = logging.getLogger(__name__)

SUSPEND_S: Final = 20.0
PULL_TIMEOUT_S: Final = 10.0
UNBALANCED_PAUSE_S: Final = 1.0
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 3.0


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class _Owned:
    """A queue that this consumer reads, up to the moment when it is revoked."""

    def __init__(self, queue: MessageQueue, wanted: Subscription, start: int | None, paused: bool) -> None:
        self.queue = queue
        self.wanted = wanted
        self.next_pull = start
        self.paused = paused
        self.position = start  # the offset after what was handed out
        self.done = start  # the same, of what the user is done with
        self.committed: int | None = None
        self.cached: deque[Message] = deque()
        self.cached_bytes = 0
        self.has_room = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def has_space(self, limits: Limits) -> bool:
        return len(self.cached) < limits.messages and self.cached_bytes < limits.size_bytes


class LitePullConsumer:
    """Messages on request, read ahead."""

    def __init__(
        self,
        name_servers: str | Sequence[str] = "localhost:9876",
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
    ) -> None:
        """
        - `session`: shares the connections of a session; without one, the consumer has its own.
        - `from_where`: where a group starts that has no offset yet: "last", "first", or a time (datetime, or epoch
          milliseconds).
        - `auto_commit`: False leaves it to you to call `commit`.
        - `limits`: how much of each queue may be read ahead; `max_cached_messages` of all queues together.
        """
        check_group(group)
        self.group = group
        self._session = session or Session(name_servers, request_timeout_s=request_timeout_s)
        self._reader = PullConsumer(group=group, session=self._session, request_timeout_s=request_timeout_s)
        self._offsets = RemoteOffsets(self._session, group, request_timeout_s)
        self._start = Start.of(from_where, _now_ms())
        self._auto_commit = auto_commit
        self._commit_interval_s = commit_interval_s
        self._pull_batch_size = pull_batch_size
        self._limits = limits or Limits()
        self._max_cached = max_cached_messages
        self._strategy = strategy
        self._rebalance_interval_s = rebalance_interval_s
        self._subscriptions: dict[str, Subscription] = {}
        self._assigned: dict[MessageQueue, Subscription] = {}
        self._started = False
        self._closed = False
        self._joined = False
        self._told: dict[str, int] = {}  # topic -> the version of its subscription that the brokers have heard of
        self._owned: dict[MessageQueue, _Owned] = {}
        self._ready: deque[_Owned] = deque()  # those with cached messages that are not paused, each once
        self._handed: set[_Owned] = set()
        self._cached = 0
        self._arrived = asyncio.Event()
        self._rebalance_asked = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._partings: set[asyncio.Task[None]] = set()  # last commits of queues that were given up
        self._failing: set[str] = set()

    # Life.

    async def start(self) -> None:
        """Returns when the first queues are taken; `async with` does it."""
        if self._started:
            return
        if self._closed:
            raise ClientClosed("a consumer is started once; make another one")
        await self._reader.start()
        self._started = True
        if self._auto_commit:
            self._spawn(self._commit_regularly())
        self._own(None, self._assigned)
        if self._subscriptions:
            self._spawn(self._rebalance_regularly(await self._rebalance()))

    async def close(self) -> None:
        """Commits what was handed out, unless `auto_commit` is off, and leaves the group."""
        await self._close(done=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._close(done=kind is None)

    async def _close(self, *, done: bool) -> None:
        if not self._started:
            return
        self._started, self._closed = False, True
        self._arrived.set()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if done:
            self._settle()
        self._revoke(list(self._owned.values()))
        await asyncio.gather(*self._partings)
        if self._joined:
            self._joined = False
            await self._session.remove_consumer(self.group)
        await self._reader.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # What to read.

    def subscribe(self, topic: str, tag: str = ALL, *, sql: str | None = None) -> None:
        """Shares the queues of a topic with the other members of the group, which must subscribe to the same."""
        check_topic(topic)
        if self._assigned:
            raise RocketMQError("this consumer has queues assigned; a second consumer can subscribe")
        is_first = not self._subscriptions
        self._subscriptions[topic] = build_subscription(topic, tag=tag, sql=sql, version=_now_ms())
        self._revoke_topic(topic)  # what was read ahead by another expression
        if self._started and is_first:
            self._spawn(self._rebalance_regularly(False))
        self._rebalance_asked.set()

    def unsubscribe(self, topic: str) -> None:
        """Gives up the topic's queues."""
        if self._subscriptions.pop(topic, None) is not None:
            self._revoke_topic(topic)
            self._rebalance_asked.set()

    def assign(self, queues: Iterable[MessageQueue], tag: str = ALL, *, sql: str | None = None) -> None:
        """Reads exactly these queues, whoever else does; those of an earlier call that are not among them end."""
        if self._subscriptions:
            raise RocketMQError("this consumer subscribes to topics; a second consumer can have queues assigned")
        version = _now_ms()
        self._assigned = {queue: build_subscription(queue.topic, tag=tag, sql=sql, version=version) for queue in queues}
        if self._started:
            self._own(None, self._assigned)

    def assignment(self) -> list[MessageQueue]:
        """The queues that this consumer reads at the moment."""
        return list(self._owned)

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The queues of a topic that can be read."""
        return await self._reader.queues(topic)

    # Messages.

    async def poll(self, timeout_s: float = 5.0, max_count: int = 32) -> list[Message]:
        """Up to `max_count` messages of one queue, an empty list if none came in time.

        It also says that what earlier calls gave is done.
        """
        self._check_started()
        self._settle()
        if not self._ready:
            self._arrived.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
            except TimeoutError:
                return []
            self._check_started()
        return self._take(max_count)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """Ends when the consumer is closed, by another task."""
        if not self._closed:
            self._check_started()
        self._settle()
        while not self._ready:
            if self._closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._take(1)[0]

    # Places.

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Goes on at `offset`; what was read ahead is dropped. Raises ValueError for one that can't be."""
        low, high = await self._reader.min_offset(queue), await self._reader.max_offset(queue)
        if not low <= offset <= high:
            raise ValueError(f"{queue} has the offsets {low} to {high}, not {offset}")
        self._move(self._owned_or_fail(queue), offset)

    async def seek_to_begin(self, queue: MessageQueue) -> None:
        self._owned_or_fail(queue)
        await self.seek(queue, await self._reader.min_offset(queue))

    async def seek_to_end(self, queue: MessageQueue) -> None:
        self._owned_or_fail(queue)
        await self.seek(queue, await self._reader.max_offset(queue))

    def position(self, queue: MessageQueue) -> int | None:
        """The offset of the next message that a poll will give, None until that is known."""
        return self._owned_or_fail(queue).position

    async def min_offset(self, queue: MessageQueue) -> int:
        return await self._reader.min_offset(queue)

    async def max_offset(self, queue: MessageQueue) -> int:
        return await self._reader.max_offset(queue)

    async def offset_for_time(self, queue: MessageQueue, when: datetime | int) -> int:
        """The offset of the first message stored at `when` or later; a number is milliseconds since 1970."""
        return await self._reader.offset_for_time(queue, when)

    async def committed(self, queue: MessageQueue) -> int | None:
        """The group's offset at the broker, None when there is none."""
        return await self._reader.committed(queue)

    async def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Commits these offsets, or that everything handed out so far is done. Raises what the broker answers."""
        self._check_started()
        if offsets is not None:
            for queue, offset in offsets.items():
                await self._reader.commit(queue, offset)
            return
        self._settle()
        for owned in list(self._owned.values()):
            await self._commit(owned)

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Gives and reads no messages of these queues until they are resumed."""
        for owned in map(self._owned_or_fail, list(queues)):
            owned.paused = True
            if owned in self._ready:
                self._ready.remove(owned)

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        for owned in map(self._owned_or_fail, list(queues)):
            if owned.paused:
                owned.paused = False
                owned.has_room.set()
                if owned.cached:
                    self._make_ready(owned)

    # What the session asks of a member of a group.

    def data(self) -> ConsumerData:
        return ConsumerData(
            group_name=self.group,
            consume_type=PULL,
            message_model=CLUSTERING,
            consume_from_where=self._start.apache_name,
            subscription_data_set=list(self._subscriptions.values()),
        )

    def rebalance_soon(self) -> None:
        self._rebalance_asked.set()

    def reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        for queue, offset in offsets.items():
            owned = self._owned.get(queue)
            if owned is not None and queue.topic == topic:
                self._move(owned, offset)

    def positions(self, topic: str) -> dict[MessageQueue, int]:
        return {
            queue: owned.done for queue, owned in self._owned.items() if queue.topic == topic and owned.done is not None
        }

    def running_info(self) -> Mapping[str, object]:
        return {
            "properties": {"consumerGroup": self.group, "PROP_CONSUME_TYPE": PULL},
            "subscriptionSet": list(self._subscriptions.values()),
            "mqTable": {
                queue: {"commitOffset": owned.done or 0, "cachedMsgCount": len(owned.cached), "droped": False}
                for queue, owned in self._owned.items()
            },
            "statusTable": {},
        }

    def consume_directly(self, message: Message) -> Awaitable[Mapping[str, object]]:
        raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"group {self.group} pulls: it has no listener to consume with")

    # Sharing queues.

    async def _rebalance_regularly(self, balanced: bool) -> None:
        while True:
            try:
                async with asyncio.timeout(self._rebalance_interval_s if balanced else UNBALANCED_PAUSE_S):
                    await self._rebalance_asked.wait()
            except TimeoutError:
                pass  # time to look again, told or not
            balanced = await self._rebalance()

    async def _rebalance(self) -> bool:
        """Brings what is owned in line with what should be; False when that has to be tried again soon."""
        self._rebalance_asked.clear()
        await self._announce()
        balanced = True
        for topic in list(self._subscriptions):
            what = f"sharing the queues of {topic}"
            try:
                balanced = await self._rebalance_topic(topic) and balanced
                self._note_ok(what)
            except RocketMQError as e:
                balanced = False
                self._note(what, f"group {self.group}: {what} failed, and is tried again: {e}")
        return balanced

    async def _announce(self) -> None:
        """Sees to it that the brokers of all topics know what this member wants, before it takes its share."""
        told = {topic: subscription.sub_version for topic, subscription in self._subscriptions.items()}
        if self._joined and told == self._told:
            return
        for topic in told:
            await self._look_again(topic, refresh=False)
        self._told = told
        if self._joined:
            await self._session.heartbeat()
        else:
            self._joined = True
            await self._session.add_consumer(self)

    async def _rebalance_topic(self, topic: str) -> bool:
        route = await self._session.routes.get(topic)
        members = await self._members(list(route.brokers))
        client_id = self._session.client_id
        if client_id not in members:
            # Not heard of yet, or forgotten: nothing is ours until the broker knows us.
            await self._session.heartbeat()
            members = await self._members(list(route.brokers))
        share = self._strategy(client_id, route.read_queues, sorted(members, key=java_order))
        subscription = self._subscriptions.get(topic)
        if subscription is not None:
            self._own(topic, dict.fromkeys(share, subscription))
        return client_id in members

    async def _members(self, brokers: Sequence[str]) -> list[str]:
        """The client ids of the group, from the first broker that tells."""
        fields = encode_header(GetConsumerListByGroup(self.group))
        failure: RocketMQError = RocketMQError(f"no broker knows the members of group {self.group}")
        for broker in brokers:
            try:
                request = Frame(RequestCode.GET_CONSUMER_LIST_BY_GROUP, dict(fields))
                answer = await self._session.ask_broker(broker, request, broker_id=None)
            except RocketMQError as e:
                failure = e
                continue
            if answer.code == ResponseCode.SUCCESS:
                return decode_body(ConsumerIds, answer.body).consumer_id_list
            failure = BrokerError(answer.code, answer.remark, broker)
        raise failure

    def _own(self, topic: str | None, wanted: Mapping[MessageQueue, Subscription]) -> None:
        """Ends what is not wanted, of the topic or of all, and begins what is new."""
        lost = [
            owned
            for queue, owned in self._owned.items()
            if queue not in wanted and (topic is None or queue.topic == topic)
        ]
        self._revoke(lost)
        for queue, subscription in wanted.items():
            if queue not in self._owned:
                self._begin(_Owned(queue, subscription, None, False))

    def _begin(self, owned: _Owned) -> None:
        self._owned[owned.queue] = owned
        owned.task = asyncio.create_task(self._read(owned))

    def _drop(self, owned: _Owned) -> None:
        """Ends an owned queue without a word to the broker."""
        if owned.task is not None:
            owned.task.cancel()
        if self._owned.get(owned.queue) is owned:
            del self._owned[owned.queue]
        if owned in self._ready:
            self._ready.remove(owned)
        self._handed.discard(owned)
        self._cached -= len(owned.cached)
        owned.cached.clear()

    def _revoke(self, revoked: list[_Owned]) -> None:
        """Ends owned queues; what is done of them is committed on the way out."""
        for owned in revoked:
            self._drop(owned)
            if self._auto_commit:
                task = asyncio.get_running_loop().create_task(self._commit_quietly(owned))
                self._partings.add(task)
                task.add_done_callback(self._partings.discard)

    def _revoke_topic(self, topic: str) -> None:
        self._revoke([owned for owned in self._owned.values() if owned.queue.topic == topic])

    def _move(self, owned: _Owned, offset: int) -> None:
        self._drop(owned)
        moved = _Owned(owned.queue, owned.wanted, offset, owned.paused)
        moved.committed = owned.committed
        self._begin(moved)

    # Reading ahead.

    async def _read(self, owned: _Owned) -> None:
        name = str(owned.queue)
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self._read_on(owned)
            except RocketMQError as e:
                self._note(name, f"group {self.group} can't read {name}, and goes on trying: {e}")
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
                await self._look_again(owned.queue.topic)
            else:
                pause_s = FIRST_PAUSE_S
                self._note_ok(name)

    async def _read_on(self, owned: _Owned) -> None:
        while owned.paused or not owned.has_space(self._limits) or self._cached >= self._max_cached:
            owned.has_room.clear()
            await owned.has_room.wait()
        if owned.next_pull is None:
            owned.next_pull = owned.position = owned.done = await self._first_offset(owned.queue)
        pulled = await self._reader.pull_for(
            owned.wanted,
            owned.queue,
            owned.next_pull,
            self._pull_batch_size,
            wait_s=SUSPEND_S,
            timeout_s=PULL_TIMEOUT_S,
        )
        if pulled.status is PullStatus.OFFSET_ILLEGAL:
            log.warning("%s has no offset %d; going on at %d", owned.queue, owned.next_pull, pulled.next_offset)
        owned.next_pull = pulled.next_offset
        for offset, reason in pulled.unreadable.items():
            log.error("the message at offset %d of %s is left out: %s", offset, owned.queue, reason)
        messages = [message for message in pulled.messages if message.queue_offset not in pulled.unreadable]
        if messages:
            owned.cached.extend(messages)
            owned.cached_bytes += sum(len(message.body) for message in messages)
            self._cached += len(messages)
            if not owned.paused:
                self._make_ready(owned)
        elif not owned.cached and owned not in self._handed:
            # Nothing of what was passed over is wanted: the place moves on, so that it is not read again.
            owned.position = owned.done = pulled.next_offset

    async def _first_offset(self, queue: MessageQueue) -> int:
        if self._partings:
            await asyncio.wait(self._partings)  # one of them may have just been this queue
        return await start_of(self._session, self._offsets, queue, self._start)

    async def _look_again(self, topic: str, *, refresh: bool = True) -> None:
        try:
            await self._session.routes.get(topic, refresh=refresh)
        except RocketMQError as e:
            log.debug("the route of %s is not known: %s", topic, e)

    def _make_ready(self, owned: _Owned) -> None:
        if owned not in self._ready:
            self._ready.append(owned)
        self._arrived.set()

    def _take(self, max_count: int) -> list[Message]:
        if not self._ready:
            return []
        owned = self._ready.popleft()
        cached = owned.cached
        taken = [cached.popleft() for _ in range(min(max_count, len(cached)))]
        owned.cached_bytes -= sum(len(message.body) for message in taken)
        owned.position = taken[-1].queue_offset + 1
        self._handed.add(owned)
        was_full = self._cached >= self._max_cached
        self._cached -= len(taken)
        if cached:
            self._ready.append(owned)
        owned.has_room.set()
        if was_full:
            for other in self._owned.values():
                other.has_room.set()
        return taken

    # Committing.

    def _settle(self) -> None:
        """What was handed out is done."""
        for owned in self._handed:
            owned.done = owned.position
        self._handed.clear()

    async def _commit_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._commit_interval_s)
            for owned in list(self._owned.values()):
                await self._commit_quietly(owned)

    async def _commit(self, owned: _Owned) -> None:
        offset = owned.done
        if offset is not None and offset != owned.committed:
            await self._reader.commit(owned.queue, offset)
            owned.committed = offset

    async def _commit_quietly(self, owned: _Owned) -> None:
        where = f"commit to {owned.queue.broker_name}"
        try:
            await self._commit(owned)
        except RocketMQError as e:
            self._note(where, f"group {self.group} can't {where}: {e}")
        else:
            self._note_ok(where)

    def _note(self, what: str, text: str) -> None:
        """Logs a failure when it begins, not each time."""
        if what not in self._failing:
            self._failing.add(what)
            log.warning("%s", text)

    def _note_ok(self, what: str) -> None:
        if what in self._failing:
            self._failing.discard(what)
            log.info("group %s: %s works again", self.group, what)

    def _owned_or_fail(self, queue: MessageQueue) -> _Owned:
        owned = self._owned.get(queue)
        if owned is None:
            raise ValueError(f"{queue} is not among the queues of this consumer; see assignment()")
        return owned

    def _check_started(self) -> None:
        if not self._started:
            raise ClientClosed("the consumer is not started, or closed already: use it within `async with`")
