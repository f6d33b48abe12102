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

What it has read ahead, and how far you are, is kept by `read_ahead`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Self

from skylark.client.allocate import Strategy, average
from skylark.client.errors import ClientClosed, RocketMQError
from skylark.client.message import Message, MessageQueue
from skylark.client.offsets import RemoteOffsets
from skylark.client.pull_consumer import PullConsumer
from skylark.client.pulling import Limits, PullStatus
from skylark.client.read_ahead import Owned, ReadAhead
from skylark.client.session import Session, session_of
from skylark.client.sharing import share_of
from skylark.client.starting import FromWhere, Start, start_of
from skylark.client.subscriptions import ALL, build_subscription
from skylark.client.tracing import ConsumeTraces, open_tracer
from skylark.client.validation import check_group, check_topic
from skylark.net.connection import RequestFailed
from skylark.wire.bodies import CLUSTERING, PULL, ConsumerData, Subscription
from skylark.wire.codes import ResponseCode

log = logging.getLogger(__name__)

SUSPEND_S: Final = 20.0
PULL_TIMEOUT_S: Final = 10.0
UNBALANCED_PAUSE_S: Final = 1.0
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 3.0


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class _Failing:
    """Something that fails at the moment, and in which of its parts: a broker that is away fails in all its queues."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.parts: set[str] = set()


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
        namespace: str = "",
        trace: bool | str = False,
    ) -> None:
        """
        - `session`: shares the connections of a session; without one, the consumer has its own.
        - `from_where`: where a group starts that has no offset yet: "last", "first", or a time (datetime, or epoch
          milliseconds).
        - `auto_commit`: False leaves it to you to call `commit`.
        - `limits`: how much of each queue may be read ahead; `max_cached_messages` of all queues together.
        - `namespace`: stands before the names of group and topics on the wire.
        - `trace`: True, or the name of a topic, writes a trace of everything that is handed out there.
        """
        self._session = session_of(session, name_servers, namespace, request_timeout_s)
        self._namespace = self._session.namespace
        group = self._namespace.wrap(group)
        check_group(group)
        self.group = group
        self._tracer = open_tracer(self._session, group, "CONSUME", trace)
        self._reader = PullConsumer(group=group, session=self._session, request_timeout_s=request_timeout_s)
        self._offsets = RemoteOffsets(self._session, group, request_timeout_s)
        self._start = Start.of(from_where, _now_ms())
        self._auto_commit = auto_commit
        self._commit_interval_s = commit_interval_s
        self._pull_batch_size = pull_batch_size
        self._strategy = strategy
        self._rebalance_interval_s = rebalance_interval_s
        self._subscriptions: dict[str, Subscription] = {}
        self._assigned: dict[MessageQueue, Subscription] = {}
        self._started = False
        self._closed = False
        self._joined = False
        self._is_balancing = False
        self._told: dict[str, int] = {}  # topic -> the version of its subscription that the brokers have heard of
        self._ahead = ReadAhead(limits or Limits(), max_cached_messages)
        self._rebalance_asked = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._partings: set[asyncio.Task[None]] = set()  # last commits of queues that were given up
        self._failing: dict[str, _Failing] = {}

    # Life.

    async def start(self) -> None:
        """Returns when the first queues are taken; `async with` does it."""
        if self._started:
            return
        if self._closed:
            raise ClientClosed("a consumer is started once; make another one")
        await self._reader.start()
        self._started = True
        if self._tracer is not None:
            await self._tracer.start()
        if self._auto_commit:
            self._spawn(self._commit_regularly())
        self._own(None, self._assigned)
        if self._subscriptions:
            try:
                balanced = await self._rebalance()
            except BaseException:
                await self._close(done=False)
                raise
            self._keep_balanced(balanced)

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
        self._ahead.arrived.set()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if done:
            self._ahead.settle()
        self._revoke(list(self._ahead.owned.values()))
        await asyncio.gather(*self._partings)
        if self._joined:
            self._joined = False
            await self._session.remove_consumer(self.group)
        if self._tracer is not None:
            await self._tracer.close()
        await self._reader.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # What to read.

    def subscribe(self, topic: str, tag: str = ALL, *, sql: str | None = None) -> None:
        """Shares the queues of a topic with the other members of the group, which must subscribe to the same."""
        topic = self._namespace.wrap(topic)
        check_topic(topic)
        if self._assigned:
            raise RocketMQError("this consumer has queues assigned; a second consumer can subscribe")
        self._subscriptions[topic] = build_subscription(topic, tag=tag, sql=sql, version=_now_ms())
        self._revoke_topic(topic)  # what was read ahead by another expression
        if self._started:
            self._keep_balanced(False)
        self._rebalance_asked.set()

    def unsubscribe(self, topic: str) -> None:
        """Gives up the topic's queues."""
        topic = self._namespace.wrap(topic)
        if self._subscriptions.pop(topic, None) is not None:
            self._revoke_topic(topic)
            self._rebalance_asked.set()

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
        return [failing.text for failing in self._failing.values()]

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The queues of a topic that can be read."""
        return await self._reader.queues(topic)

    # Messages.

    async def poll(self, timeout_s: float = 5.0, max_count: int = 32) -> list[Message]:
        """Up to `max_count` messages of one queue, an empty list if none came in time.

        It also says that what earlier calls gave is done.
        """
        self._check_started()
        self._ahead.settle()
        if not self._ahead.is_ready:
            self._ahead.arrived.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._ahead.arrived.wait()
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
        self._ahead.settle()
        while not self._ahead.is_ready:
            if self._closed:
                raise StopAsyncIteration
            self._ahead.arrived.clear()
            await self._ahead.arrived.wait()
        return self._take(1)[0]

    def _take(self, max_count: int) -> list[Message]:
        messages = self._ahead.take(max_count)
        if self._tracer is not None and messages:
            ConsumeTraces(self._tracer, self._session).handed_out(self.group, messages)
        return messages

    # Places.

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Goes on at `offset`; what was read ahead is dropped. Raises ValueError for one that can't be."""
        low, high = await self._reader.min_offset(queue), await self._reader.max_offset(queue)
        if not low <= offset <= high:
            raise ValueError(f"{queue} has the offsets {low} to {high}, not {offset}")
        self._move(self._find(queue), offset)

    async def seek_to_begin(self, queue: MessageQueue) -> None:
        self._find(queue)
        await self.seek(queue, await self._reader.min_offset(queue))

    async def seek_to_end(self, queue: MessageQueue) -> None:
        self._find(queue)
        await self.seek(queue, await self._reader.max_offset(queue))

    def position(self, queue: MessageQueue) -> int | None:
        """The offset of the next message that a poll will give, None until that is known."""
        return self._find(queue).position

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
        self._ahead.settle()
        for owned in list(self._ahead.owned.values()):
            await self._commit(owned)

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Gives and reads no messages of these queues until they are resumed."""
        for owned in [self._find(queue) for queue in queues]:
            self._ahead.pause(owned)

    def resume(self, queues: Iterable[MessageQueue]) -> None:
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
        self._rebalance_asked.set()

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

    # Sharing queues.

    def _keep_balanced(self, balanced: bool) -> None:
        if not self._is_balancing:
            self._is_balancing = True
            self._spawn(self._rebalance_regularly(balanced))

    async def _rebalance_regularly(self, balanced: bool) -> None:
        while True:
            try:
                async with asyncio.timeout(self._rebalance_interval_s if balanced else UNBALANCED_PAUSE_S):
                    await self._rebalance_asked.wait()
            except TimeoutError:
                pass  # time to look again, told or not
            try:
                balanced = await self._rebalance()
                self._note_ok("join")
            except RocketMQError as e:
                balanced = False
                self._note("join", f"group {self.group} can't be joined: {e}")

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
            await self._session.add_consumer(self)
            self._joined = True

    async def _rebalance_topic(self, topic: str) -> bool:
        route = await self._session.routes.get(topic)
        share = await share_of(self._session, self.group, route, self._strategy)
        subscription = self._subscriptions.get(topic)
        if subscription is not None:
            self._own(topic, dict.fromkeys(share or [], subscription))
        return share is not None

    def _own(self, topic: str | None, wanted: Mapping[MessageQueue, Subscription]) -> None:
        """Ends what is not wanted, of the topic or of all, and begins what is new."""
        lost = [
            owned
            for queue, owned in self._ahead.owned.items()
            if queue not in wanted and (topic is None or queue.topic == topic)
        ]
        self._revoke(lost)
        for queue, subscription in wanted.items():
            if queue not in self._ahead.owned:
                self._begin(Owned(queue, subscription))

    def _begin(self, owned: Owned) -> None:
        self._ahead.add(owned)
        owned.task = asyncio.get_running_loop().create_task(self._read(owned))

    def _revoke(self, revoked: list[Owned]) -> None:
        """Ends owned queues; what is done of them is committed on the way out."""
        for owned in revoked:
            self._ahead.drop(owned)
            if self._auto_commit:
                task = asyncio.get_running_loop().create_task(self._commit_quietly(owned))
                self._partings.add(task)
                task.add_done_callback(self._partings.discard)

    def _revoke_topic(self, topic: str) -> None:
        self._revoke([owned for owned in self._ahead.owned.values() if owned.queue.topic == topic])

    def _move(self, owned: Owned, offset: int) -> None:
        self._ahead.drop(owned)
        moved = Owned(owned.queue, owned.wanted, offset, owned.is_paused)
        moved.committed = owned.committed
        self._begin(moved)

    # Reading ahead.

    async def _read(self, owned: Owned) -> None:
        where, queue = f"read topic {owned.queue.topic} at {owned.queue.broker_name}", str(owned.queue)
        pause_s = FIRST_PAUSE_S
        try:
            while True:
                try:
                    await self._read_on(owned)
                except RocketMQError as e:
                    self._note(where, f"group {self.group} can't {where}, and goes on trying: {e}", queue)
                    await asyncio.sleep(pause_s)
                    pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
                    await self._look_again(owned.queue.topic)
                else:
                    pause_s = FIRST_PAUSE_S
                    self._note_ok(where, queue)
        finally:
            if not self._closed:
                self._note_ok(where, queue)  # the queue is another's now

    async def _read_on(self, owned: Owned) -> None:
        await self._ahead.wait_for_room(owned)
        if owned.next_pull is None:
            owned.begin_at(await self._first_offset(owned.queue))
            assert owned.next_pull is not None
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
        for offset, reason in pulled.unreadable.items():
            log.error("the message at offset %d of %s is left out: %s", offset, owned.queue, reason)
        readable = [message for message in pulled.messages if message.queue_offset not in pulled.unreadable]
        self._ahead.put(owned, readable, pulled.next_offset)

    async def _first_offset(self, queue: MessageQueue) -> int:
        if self._partings:
            await asyncio.wait(self._partings)  # one of them may have just been this queue
        return await start_of(self._session, self._offsets, queue, self._start)

    async def _look_again(self, topic: str, *, refresh: bool = True) -> None:
        try:
            await self._session.routes.get(topic, refresh=refresh)
        except RocketMQError as e:
            log.debug("the route of %s is not known: %s", topic, e)

    # Committing.

    async def _commit_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._commit_interval_s)
            for owned in list(self._ahead.owned.values()):
                await self._commit_quietly(owned)

    async def _commit(self, owned: Owned) -> None:
        offset = owned.done
        if offset is not None and offset != owned.committed:
            await self._reader.commit(owned.queue, offset)
            owned.committed = offset

    async def _commit_quietly(self, owned: Owned) -> None:
        where = f"commit to {owned.queue.broker_name}"
        try:
            await self._commit(owned)
        except RocketMQError as e:
            self._note(where, f"group {self.group} can't {where}: {e}")
        else:
            self._note_ok(where)

    def _note(self, what: str, text: str, part: str = "") -> None:
        """Logs a failure when it begins, not each time, and once for all its parts."""
        failing = self._failing.get(what)
        if failing is None:
            failing = self._failing[what] = _Failing(text)
            log.warning("%s", text)
        failing.parts.add(part)

    def _note_ok(self, what: str, part: str = "") -> None:
        failing = self._failing.get(what)
        if failing is None:
            return
        failing.parts.discard(part)
        if not failing.parts:
            del self._failing[what]
            log.info("group %s: %s works again", self.group, what)

    def _find(self, queue: MessageQueue) -> Owned:
        owned = self._ahead.owned.get(self._namespace.wrap_queue(queue))
        if owned is None:
            raise ValueError(f"{queue} is not among the queues of this consumer; see assignment()")
        return owned

    def _check_started(self) -> None:
        if not self._started:
            raise ClientClosed("the consumer is not started, or closed already: use it within `async with`")
