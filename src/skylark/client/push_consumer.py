"""A consumer that calls you: it shares the queues of its topics with the other members of its group.

    async def handle(message: Message) -> None: ...

    consumer = PushConsumer("localhost:9876", group="billing", listener=handle)
    consumer.subscribe("orders", tag="new || paid")
    async with consumer:
        await consumer.wait_closed()

Every message is consumed at least once: it is committed only after the listener took it, and comes again when it failed
or when its queue moved to another member in between. What a listener may answer is told in `listening`.

Leaving `async with` finishes what the listener is working on, commits, and leaves the group.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeVar

from skylark.client import allocate
from skylark.client.assignment import Assignment, Assignments
from skylark.client.consuming import NEVER, ConcurrentConsumption, OrderlyConsumption
from skylark.client.errors import BrokerError, ClientClosed, InvalidMessage, RocketMQError, RouteNotFound
from skylark.client.listening import ConsumeHook, Listener, Listening, is_asynchronous
from skylark.client.locking import QueueLocks
from skylark.client.message import Message
from skylark.client.offsets import LocalOffsets, Offsets, RemoteOffsets
from skylark.client.pulling import Limits, Pulled, PullLoop
from skylark.client.rebalance import QueuesChanged, Rebalance
from skylark.client.reporting import Rates, direct_result, running_info
from skylark.client.returning import Returns
from skylark.client.session import Session
from skylark.client.starting import FromWhere, Start, start_of
from skylark.client.subscriptions import build_subscription, restore_topic, retry_topic
from skylark.client.validation import check_group, check_topic
from skylark.wire.bodies import (
    BROADCASTING,
    CLUSTERING,
    PUSH,
    CheckClient,
    ConsumerData,
    MessageQueue,
    Subscription,
    encode_body,
)
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import PROTOCOL_VERSION, Frame

log = logging.getLogger(__name__)

MAX_BATCH: Final = 1024
DEFAULT_RECONSUME_TIMES: Final = 16
_UNBALANCED_WAIT_S: Final = 1.0
_MAX_HASTY_TRIES: Final = 60
_LOCK_INTERVAL_S: Final = 20.0

_AnyListener = TypeVar("_AnyListener", bound=Listener)
Filter = Callable[[Message], bool]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class PushConsumer:
    """A member of a consumer group."""

    def __init__(
        self,
        name_servers: str | Sequence[str] = "localhost:9876",
        group: str = "DEFAULT_CONSUMER",
        *,
        listener: Listener | None = None,
        session: Session | None = None,
        model: Literal["clustering", "broadcasting"] = "clustering",
        orderly: bool = False,
        from_where: FromWhere = "last",
        concurrency: int = 20,
        batch_size: int | None = None,
        max_reconsume_times: int | None = None,
        consume_timeout_s: float = 900.0,
        suspend_s: float = 1.0,
        strategy: allocate.Strategy = allocate.average,
        pull_batch_size: int = 32,
        pull_interval_s: float = 0.0,
        limits: Limits | None = None,
        commit_interval_s: float = 5.0,
        rebalance_interval_s: float = 20.0,
        shutdown_timeout_s: float = 30.0,
        hooks: Sequence[ConsumeHook] = (),
        queues_changed: QueuesChanged | None = None,
        offsets_directory: Path | None = None,
    ) -> None:
        """
        - `listener`: takes a message, or a list if `batch_size` is given; may be set by `@consumer.listen` too.
        - `session`: shares the connections of a session; without one, the consumer has its own.
        - `model`: "clustering" shares the messages among the members, "broadcasting" gives every member all of them.
        - `orderly`: one message after the other a queue; one that fails holds up its queue until it succeeds.
        - `from_where`: where a group starts that has no offset yet: "last", "first", or a time (datetime, or epoch
          milliseconds).
        - `concurrency`: how many calls of the listener may run at once.
        - `max_reconsume_times`: after so many failed tries a message becomes a dead letter; None stands for 16, and
          for no limit when `orderly`.
        - `consume_timeout_s`: a message that takes longer is given back for another try.
        - `suspend_s`: how long an orderly queue pauses before it tries a message again.
        - `limits`: how much of each queue may wait in memory.
        - `shutdown_timeout_s`: how long closing waits for the listener.
        """
        check_group(group)
        _check_range("concurrency", concurrency, 1, 1000)
        _check_range("pull_batch_size", pull_batch_size, 1, 1024)
        _check_range("batch_size", 1 if batch_size is None else batch_size, 1, MAX_BATCH)
        self._group = group
        self._session = session or Session(name_servers)
        self._listener = listener
        self._is_broadcasting = model == "broadcasting"
        self._is_orderly = orderly
        self._start = Start.of(from_where, _now_ms())
        self._concurrency = concurrency
        self._takes_batches = batch_size is not None
        self._batch_size = batch_size or 1
        self._max_reconsume_times = max_reconsume_times
        self._consume_timeout_s = consume_timeout_s
        self._suspend_s = suspend_s
        self._strategy = strategy
        self._pull_batch_size = pull_batch_size
        self._pull_interval_s = pull_interval_s
        # The span only matters where messages finish out of order.
        self._limits = limits or (Limits(span=NEVER) if orderly else Limits())
        self._commit_interval_s = commit_interval_s
        self._rebalance_interval_s = rebalance_interval_s
        self._shutdown_timeout_s = shutdown_timeout_s
        self._hooks = tuple(hooks)
        self._queues_changed = queues_changed
        self._offsets_directory = offsets_directory

        self._subscriptions: dict[str, Subscription] = {}
        self._filters: dict[str, Filter] = {}
        self._assignments = Assignments()
        self._running = asyncio.Event()
        self._running.set()
        self._rebalance_wanted = asyncio.Event()
        self._closed = asyncio.Event()
        self._state: Literal["new", "running", "closed"] = "new"
        self._started_ms = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._executor: ThreadPoolExecutor | None = None
        self._leave_routes: Callable[[], None] = lambda: None
        # Made by `start`, when all that they need is known.
        self._is_built = False
        self._offsets: Offsets
        self._listening: Listening
        self._consumption: ConcurrentConsumption | OrderlyConsumption
        self._rebalance: Rebalance
        self._rates: Rates

    # What users call.

    @property
    def group(self) -> str:
        return self._group

    @property
    def client_id(self) -> str:
        return self._session.client_id

    @property
    def queues(self) -> list[MessageQueue]:
        """The queues that this member owns now."""
        return self._assignments.queues

    def subscribe(self, topic: str, tag: str = "*", *, sql: str | None = None, filter: Filter | None = None) -> None:
        """Wants the messages of a topic with some tags (`a || b`), or by an SQL92 expression that the broker
        evaluates; `filter` is asked here for each of them. All members of a group must subscribe to the same.
        """
        check_topic(topic)
        version = max(_now_ms(), *(each.sub_version + 1 for each in self._subscriptions.values()), 0)
        self._subscriptions[topic] = build_subscription(topic, tag=tag, sql=sql, version=version)
        self._filters.pop(topic, None)
        if filter is not None:
            self._filters[topic] = filter
        if self._state == "running":
            self._spawn(self._announce(topic))

    def unsubscribe(self, topic: str) -> None:
        """Gives up the topic's queues."""
        if self._subscriptions.pop(topic, None) is not None and self._state == "running":
            self._filters.pop(topic, None)
            self._spawn(self._announce(None))

    def listen(self, listener: _AnyListener) -> _AnyListener:
        """Sets the listener; for use as a decorator."""
        if self._state != "new":
            raise ClientClosed("the listener must be set before the consumer starts")
        self._listener = listener
        return listener

    def pause(self) -> None:
        """Stops pulling and calling the listener; what it is working on goes on."""
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    async def start(self) -> None:
        """Joins the group. Returns when the first queues are taken."""
        if self._state != "new":
            raise ClientClosed("a consumer is started once; make another one")
        if self._listener is None:
            raise InvalidMessage("the consumer has no listener: give it one, or decorate a function with listen")
        self._state = "running"
        self._started_ms = _now_ms()
        await self._session.acquire()
        try:
            self._build(self._listener)
            if not self._is_broadcasting:
                retries = retry_topic(self._group)
                self._subscriptions[retries] = build_subscription(retries, version=self._started_ms)
            await asyncio.gather(*(self._learn_route(topic) for topic in self._subscriptions))
            await self._check_filters()
            if isinstance(self._offsets, LocalOffsets):
                await asyncio.to_thread(self._offsets.load)
            self._leave_routes = self._session.routes.subscribe(lambda route: self._route_changed(route.topic))
            self._consumption.start()
            await self._session.add_consumer(self)
            balanced = await self._rebalance.run()
        except BaseException:
            await self.close()
            raise
        self._spawn(self._rebalance_forever(balanced))
        self._spawn(self._commit_forever())
        if self._is_orderly and not self._is_broadcasting:
            self._spawn(self._lock_forever())

    async def close(self) -> None:
        """Finishes what the listener is working on, commits, and leaves the group."""
        if self._state != "running":
            return
        self._state = "closed"
        try:
            await self._stop()
        finally:
            self._closed.set()
            await self._session.release()

    async def wait_closed(self) -> None:
        """Returns when the consumer was closed."""
        await self._closed.wait()

    async def commit(self) -> None:
        """Stores the offsets now, and not only every few seconds."""
        await self._offsets.persist(self._assignments.queues)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # What the session calls.

    def data(self) -> ConsumerData:
        return ConsumerData(
            group_name=self._group,
            consume_type=PUSH,
            message_model=BROADCASTING if self._is_broadcasting else CLUSTERING,
            consume_from_where=self._start.apache_name,
            subscription_data_set=list(self._subscriptions.values()),
        )

    def rebalance_soon(self) -> None:
        self._rebalance_wanted.set()

    def reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        for queue, offset in offsets.items():
            assignment = self._assignments.get(queue)
            if assignment is not None and queue.topic == topic:
                self._spawn(self._rebalance.restart(assignment, offset))

    def positions(self, topic: str) -> dict[MessageQueue, int]:
        return self._offsets.table(topic)

    def running_info(self) -> dict[str, object]:
        now_ms = _now_ms()
        statuses = {
            topic: self._rates.status(topic, now_ms, self._consumption.tallies) for topic in self._subscriptions
        }
        properties = {
            "PROP_CLIENT_VERSION": "V5_5_0" if PROTOCOL_VERSION == 513 else str(PROTOCOL_VERSION),
            "PROP_CONSUMEORDERLY": str(self._is_orderly).lower(),
            "PROP_CONSUMER_START_TIMESTAMP": str(self._started_ms),
            "PROP_CONSUME_TYPE": PUSH,
            "PROP_NAMESERVER_ADDR": ";".join(self._session.name_servers),
            "PROP_THREADPOOL_CORE_SIZE": str(self._concurrency),
        }
        return running_info(
            properties, self._subscriptions.values(), self._assignments, self._offsets, statuses, now_ms
        )

    async def consume_directly(self, message: Message) -> dict[str, object]:
        restore_topic(message, self._group)
        began_ms = _now_ms()
        outcome = await self._listening.consume(message.queue, [message])
        return direct_result(outcome, is_orderly=self._is_orderly, spent_ms=_now_ms() - began_ms)

    # Life.

    def _build(self, listener: Listener) -> None:
        session, group = self._session, self._group
        if not is_asynchronous(listener):
            self._executor = ThreadPoolExecutor(self._concurrency, thread_name_prefix=f"listener of {group}")
        self._listening = Listening(
            listener, group=group, takes_batches=self._takes_batches, hooks=self._hooks, executor=self._executor
        )
        clusters = not self._is_broadcasting
        self._offsets = (
            RemoteOffsets(session, group)
            if clusters
            else LocalOffsets(session.client_id, group, self._offsets_directory)
        )
        locks = QueueLocks(session, group) if clusters and self._is_orderly else None
        limit = self._max_reconsume_times
        if limit is None:
            limit = NEVER if self._is_orderly else DEFAULT_RECONSUME_TIMES
        returns = Returns(session, group, limit, _now_ms) if clusters else None
        if self._is_orderly:
            self._consumption = OrderlyConsumption(
                self._listening,
                self._offsets,
                returns,
                group=group,
                batch_size=self._batch_size,
                running=self._running,
                now_ms=_now_ms,
                concurrency=self._concurrency,
                suspend_s=self._suspend_s,
                max_reconsume_times=limit,
                relock=self._relock if locks is not None else None,
            )
        else:
            self._consumption = ConcurrentConsumption(
                self._listening,
                self._offsets,
                returns,
                group=group,
                batch_size=self._batch_size,
                running=self._running,
                now_ms=_now_ms,
                concurrency=self._concurrency,
                timeout_s=self._consume_timeout_s,
            )
        self._rebalance = Rebalance(
            session,
            group,
            self._subscriptions,
            self._assignments,
            self._offsets,
            strategy=self._strategy,
            is_broadcasting=self._is_broadcasting,
            locks=locks,
            find_start=lambda queue: start_of(session, self._offsets, queue, self._start),
            begin=self._begin,
            queues_changed=self._queues_changed,
            now_ms=_now_ms,
        )
        self._rates = Rates(self._started_ms)
        self._is_built = True

    async def _stop(self) -> None:
        self._leave_routes()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._is_built:
            for assignment in self._assignments:
                assignment.revoke()
            await self._consumption.stop(self._shutdown_timeout_s)
            await self._rebalance.close()
        await self._session.remove_consumer(self._group)
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    async def _learn_route(self, topic: str) -> None:
        try:
            await self._session.routes.get(topic)
        except RouteNotFound as e:
            if topic != retry_topic(self._group):
                log.warning("%s subscribes to a topic that does not exist yet: %s", self._group, e)

    async def _check_filters(self) -> None:
        """Asks a broker whether it understands what is not a tag expression. Raises BrokerError."""
        for subscription in self._subscriptions.values():
            route = self._session.routes.known(subscription.topic)
            if subscription.is_by_tag or route is None:
                continue
            check = CheckClient(client_id=self.client_id, group=self._group, subscription_data=subscription)
            broker = next(iter(route.brokers))
            request = Frame(RequestCode.CHECK_CLIENT_CONFIG, {}, encode_body(check))
            answer = await self._session.ask_broker(broker, request, broker_id=None)
            if answer.code != ResponseCode.SUCCESS:
                raise BrokerError(answer.code, answer.remark, broker)

    async def _announce(self, topic: str | None) -> None:
        """Tells the brokers of changed subscriptions."""
        if topic is not None:
            await self._learn_route(topic)
        await self._session.heartbeat()
        self.rebalance_soon()

    def _route_changed(self, topic: str) -> None:
        if topic in self._subscriptions:
            self.rebalance_soon()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: something went wrong in the background", self._group, exc_info=error)

    async def _rebalance_forever(self, balanced: bool) -> None:
        tries = 0
        while True:
            tries = 0 if balanced else tries + 1
            hasty = not balanced and tries <= _MAX_HASTY_TRIES
            try:
                async with asyncio.timeout(_UNBALANCED_WAIT_S if hasty else self._rebalance_interval_s):
                    await self._rebalance_wanted.wait()
            except TimeoutError:
                pass
            self._rebalance_wanted.clear()
            try:
                balanced = await self._rebalance.run()
            except Exception:
                balanced = False
                log.exception("%s could not share out its queues", self._group)

    async def _commit_forever(self) -> None:
        while True:
            await asyncio.sleep(self._commit_interval_s)
            self._rates.sample(_now_ms(), self._consumption.tallies)
            try:
                await self.commit()
            except RocketMQError as e:
                log.warning("%s can't commit: %s", self._group, e)

    async def _lock_forever(self) -> None:
        while True:
            await asyncio.sleep(_LOCK_INTERVAL_S)
            await self._rebalance.renew_locks()

    def _relock(self, _queue: MessageQueue) -> None:
        self._spawn(self._rebalance.renew_locks())

    def _begin(self, assignment: Assignment, offset: int) -> None:
        self._consumption.begin(assignment)
        loop = PullLoop(
            self._session,
            self._group,
            assignment.queue,
            assignment.buffer,
            _QueueSink(self, assignment),
            limits=self._limits,
            max_messages=self._pull_batch_size,
            running=self._running,
            interval_s=self._pull_interval_s,
            now_ms=_now_ms,
        )
        assignment.start_pulling(loop, offset)

    def _is_wanted(self, message: Message) -> bool:
        restore_topic(message, self._group)
        wanted = self._filters.get(message.topic)
        if wanted is None:
            return True
        try:
            return wanted(message)
        except Exception:
            log.exception("the filter of topic %s failed; the message is consumed", message.topic)
            return True


class _QueueSink:
    """Ties the pull loop of one assignment to its consumer."""

    def __init__(self, consumer: PushConsumer, assignment: Assignment) -> None:
        self._consumer = consumer
        self._assignment = assignment

    def subscription(self) -> Subscription | None:
        return self._consumer._subscriptions.get(self._assignment.queue.topic)

    def commit_offset(self) -> int:
        return -1 if self._consumer._is_broadcasting else self._consumer._offsets.known(self._assignment.queue)

    def found(self, pulled: Pulled) -> None:
        consumer, assignment = self._consumer, self._assignment
        if assignment.revoked:
            return
        assignment.unreadable.update(pulled.unreadable)
        messages = assignment.buffer.put(pulled.messages)
        if consumer._filters:
            unwanted = [message for message in messages if not consumer._is_wanted(message)]
            if unwanted:
                gone = {message.queue_offset for message in unwanted}
                messages = [message for message in messages if message.queue_offset not in gone]
                consumer._consumption.skip(assignment, unwanted)
        if messages:
            consumer._consumption.take(assignment, messages)

    def nothing_until(self, next_offset: int) -> None:
        # Only if nothing before it is unfinished.
        if not len(self._assignment.buffer) and not self._assignment.revoked:
            self._consumer._offsets.update(self._assignment.queue, next_offset)

    def moved(self, next_offset: int) -> None:
        self._consumer._spawn(self._consumer._rebalance.restart(self._assignment, next_offset))


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidMessage(f"{name} is {value}; it must be between {low} and {high}")
