"""A running member of a consumer group: everything that a push consumer has between its start and its end.

It ties the pieces together, one of each a member: the rebalance gives and takes queues, a pull loop each fills their
buffers, the consumption empties them into the listener, and the offsets remember how far that got.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from skylark.client.allocate import Strategy
from skylark.client.assignment import Assignment, Assignments
from skylark.client.calling import call
from skylark.client.consuming import NEVER, ConcurrentConsumption, OrderlyConsumption
from skylark.client.crew import Crew, Worker, wait_for_end
from skylark.client.errors import RocketMQError, RouteNotFound
from skylark.client.filter_classes import FilterClass, upload
from skylark.client.listening import ConsumeHook, Handlers, Listener, Listening, Outcome
from skylark.client.locking import QueueLocks
from skylark.client.message import Message
from skylark.client.offsets import UNKNOWN, LocalOffsets, Offsets, RemoteOffsets
from skylark.client.orderly_commits import CommittedByListener
from skylark.client.pop_consuming import PopConsumption
from skylark.client.pop_loops import PopLoops
from skylark.client.popping import DEFAULT_RECONSUME_TIMES
from skylark.client.pulling import Limits, Pulled, PullLoop
from skylark.client.rebalance import QueuesChanged, Rebalance
from skylark.client.reporting import Rates, direct_result, running_info
from skylark.client.returning import Returns
from skylark.client.session import Session
from skylark.client.starting import Start, start_of
from skylark.client.subscriptions import check_filter, restore_topic, retry_topic
from skylark.client.timing import steady_ms
from skylark.wire.bodies import (
    BROADCASTING,
    CLUSTERING,
    PUSH,
    ConsumerData,
    MessageQueue,
    Subscription,
)
from skylark.wire.pop import FROM_MAX, FROM_MIN, MAX_POP_MESSAGES

log = logging.getLogger(__name__)

_CLIENT_VERSION: Final = "V5_5_0"
_UNBALANCED_WAIT_S: Final = 1.0
_MAX_HASTY_TRIES: Final = 60
_LOCK_INTERVAL_S: Final = 20.0
_UPLOAD_INTERVAL_S: Final = 10.0

Filter = Callable[[Message], bool]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What `PushConsumer` was told; it says what each means."""

    is_broadcasting: bool
    is_orderly: bool
    auto_commit: bool
    start: Start
    concurrency: int
    batch_size: int | None
    max_reconsume_times: int | None
    consume_timeout_s: float
    suspend_s: float
    strategy: Strategy
    pull_batch_size: int
    pull_interval_s: float
    limits: Limits
    commit_interval_s: float
    rebalance_interval_s: float
    shutdown_timeout_s: float
    hooks: tuple[ConsumeHook, ...]
    queues_changed: QueuesChanged | None
    offsets_directory: Path | None
    mode: Literal["pull", "pop", "broker"]
    invisible_s: float


class Membership:
    """One member, from `start` to `stop`. It is what the session knows of the consumer."""

    def __init__(
        self,
        session: Session,
        group: str,
        options: Options,
        listener: Listener | Handlers,
        subscriptions: dict[str, Subscription],
        filters: Mapping[str, Filter],
        running: asyncio.Event,
        classes: Mapping[str, FilterClass],
    ) -> None:
        """What is wanted may change later on; `running` is clear while the consumer is paused."""
        self._session = session
        self._group = group
        self._options = options
        self.subscriptions = subscriptions
        self.filters = filters
        self._running = running
        self._classes = classes
        self._started_ms = now_ms()
        self.assignments = Assignments()
        self._crew = Crew(group)
        self._listening = Listening(
            listener,
            group=group,
            takes_batches=options.batch_size is not None,
            hooks=options.hooks,
            concurrency=options.concurrency,
            grace_s=options.shutdown_timeout_s,
            namespace=session.namespace,
            is_ending=lambda: self._crew.is_ending,
            is_orderly=options.is_orderly,
            timeout_s=options.consume_timeout_s,
        )
        self.offsets: Offsets
        if options.is_broadcasting:
            self.offsets = LocalOffsets(session.lasting_id, group, options.offsets_directory)
        else:
            self.offsets = RemoteOffsets(session, group)
        self._has_locks = options.is_orderly and not options.is_broadcasting
        self.consumption = self._build_consumption()
        self._pop_consumption: PopConsumption | None = None
        self.pops: PopLoops | None = None
        if options.mode != "pull":
            self._pop_consumption = self._build_pop_consumption()
            self.pops = self._build_pops(self._pop_consumption)
        self._rebalance = Rebalance(
            session,
            group,
            subscriptions,
            self.assignments,
            self.offsets,
            strategy=options.strategy,
            is_broadcasting=options.is_broadcasting,
            locks=QueueLocks(session, group) if self._has_locks else None,
            find_start=lambda queue: start_of(session, self.offsets, queue, options.start),
            begin=self._begin,
            queues_changed=options.queues_changed,
            now_ms=now_ms,
            pops=self.pops,
        )
        self._rebalance_wanted = asyncio.Event()
        self._rates = Rates(steady_ms())
        self._tasks: set[asyncio.Task[None]] = set()
        self._rebalancing: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._is_locking_again = False
        self._is_relocking = False
        self._asked_for: set[asyncio.Task[Outcome]] = set()  # messages that operators have consumed here
        self._leave_routes: Callable[[], None] = lambda: None

    def _build_consumption(self) -> ConcurrentConsumption | OrderlyConsumption:
        options = self._options
        returns = None
        if not options.is_broadcasting:
            returns = Returns(self._session, self._group, options.max_reconsume_times, now_ms)
        limit = options.max_reconsume_times
        if limit is None:
            limit = NEVER if options.is_orderly else 0
        if options.is_orderly:
            if options.auto_commit:
                build: Callable[..., OrderlyConsumption] = OrderlyConsumption
            else:
                build = partial(CommittedByListener, limits=options.limits)
            return build(
                self._listening,
                self.offsets,
                returns,
                self._crew,
                group=self._group,
                batch_size=options.batch_size or 1,
                running=self._running,
                now_ms=now_ms,
                concurrency=options.concurrency,
                timeout_s=options.consume_timeout_s,
                suspend_s=options.suspend_s,
                max_reconsume_times=limit,
                relock=self._relock if self._has_locks else None,
            )
        return ConcurrentConsumption(
            self._listening,
            self.offsets,
            returns,
            self._crew,
            group=self._group,
            batch_size=options.batch_size or 1,
            running=self._running,
            now_ms=now_ms,
            max_reconsume_times=limit,
            concurrency=options.concurrency,
            timeout_s=options.consume_timeout_s,
        )

    def _build_pop_consumption(self) -> PopConsumption:
        options = self._options
        limit = options.max_reconsume_times
        if limit is None:
            limit = NEVER if options.is_orderly else DEFAULT_RECONSUME_TIMES
        return PopConsumption(
            self._session,
            self._listening,
            Returns(self._session, self._group, options.max_reconsume_times, now_ms),
            self._crew,
            group=self._group,
            is_orderly=options.is_orderly,
            batch_size=options.batch_size or 1,
            running=self._running,
            concurrency=options.concurrency,
            timeout_s=options.consume_timeout_s,
            suspend_s=options.suspend_s,
            invisible_s=options.invisible_s,
            max_reconsume_times=limit,
            tallies=self.consumption.tallies,
        )

    def _build_pops(self, consumption: PopConsumption) -> PopLoops:
        options = self._options
        return PopLoops(
            self._session,
            self._group,
            self.subscriptions,
            consumption,
            self.wants,
            self._crew,
            always=options.mode == "pop",
            init_mode=FROM_MIN if options.start.where == "first" else FROM_MAX,
            in_order=options.is_orderly,
            max_messages=min(options.pull_batch_size, MAX_POP_MESSAGES),
            invisible_ms=round(options.invisible_s * 1000),
            running=self._running,
            now_ms=now_ms,
        )

    # Life.

    @property
    def queues(self) -> list[MessageQueue]:
        """What this member owns; a queue -1 stands for all of its broker, shared with other members."""
        return [*self.assignments.queues, *(self.pops.queues if self.pops is not None else ())]

    async def start(self) -> None:
        """Joins the group and takes the first queues."""
        await asyncio.gather(*(self._learn_route(topic) for topic in list(self.subscriptions)))
        for subscription in self.subscriptions.values():
            await check_filter(self._session, self._group, subscription)
        await self._upload_classes()
        if isinstance(self.offsets, LocalOffsets):
            await asyncio.to_thread(self.offsets.load)
        self._leave_routes = self._session.routes.subscribe(lambda route: self._route_changed(route.topic))
        self.consumption.start()
        if self._pop_consumption is not None:
            self._pop_consumption.start()
        await self._session.add_consumer(self)
        balanced = await self._rebalance.run()
        self._rebalancing = self._crew.hire(
            partial(self._rebalance_forever, balanced), "rebalancing", until=lambda: self._is_stopping
        )
        self._crew.hire(self._commit_forever, "committing")
        self._crew.hire(self._upload_forever, "uploading of filter classes")
        if self._has_locks:
            self._crew.hire(self._lock_forever, "renewal of locks")

    def halt(self) -> None:
        """Calls the listener no more."""
        self.consumption.halt()
        if self._pop_consumption is not None:
            self._pop_consumption.halt()

    async def stop(self) -> None:
        """Finishes what the listener is working on, commits, and leaves the group."""
        self._is_stopping = True
        self._leave_routes()
        tasks = [*self._tasks, *([self._rebalancing] if self._rebalancing is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for assignment in self.assignments:
            assignment.revoke()
        # Whatever fails, the rest is done.
        if self.pops is not None and self._pop_consumption is not None:
            await self._try("end its pops", self.pops.close())
            await self._try("end its listeners", self._pop_consumption.stop(self._options.shutdown_timeout_s))
        await self._try("end its listeners", self.consumption.stop(self._options.shutdown_timeout_s))
        await self._crew.end()
        asked_for = [*self._asked_for]
        for each in asked_for:
            each.cancel()
        await wait_for_end(asked_for)
        await self._try("commit", self._rebalance.close())
        await self._try("leave the group", self._leave())
        self._listening.close()

    async def _leave(self) -> None:
        # Both in one write, so that nobody else comes in between.
        await asyncio.gather(self._session.remove_consumer(self), self._rebalance.keep_locks())

    async def _try(self, what: str, step: Awaitable[None]) -> None:
        try:
            await step
        except Exception:
            log.exception("%s could not %s when it was closed", self._group, what)

    @property
    def is_called_by_listener(self) -> bool:
        """Whether the code that runs now was called, or started, by this member's listener."""
        return self._listening.is_caller

    async def commit(self) -> None:
        await self.offsets.persist(self.assignments.queues)

    def announce(self, topic: str | None) -> None:
        """Tells the brokers, in the background, that a subscription changed; `topic` is one that is new."""
        self._spawn(self._announce(topic))

    # What the session calls.

    @property
    def group(self) -> str:
        return self._group

    def data(self) -> ConsumerData:
        return ConsumerData(
            group_name=self._group,
            consume_type=PUSH,
            message_model=BROADCASTING if self._options.is_broadcasting else CLUSTERING,
            consume_from_where=self._options.start.apache_name,
            subscription_data_set=list(self.subscriptions.values()),
            unit_mode=self._session.unit_mode,
        )

    def rebalance_soon(self) -> None:
        self._rebalance_wanted.set()

    def reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        for queue, offset in offsets.items():
            assignment = self.assignments.get(queue)
            if assignment is not None and queue.topic == topic:
                self.restart(assignment, offset)

    def positions(self, topic: str) -> dict[MessageQueue, int]:
        return self.offsets.table(topic)

    def running_info(self) -> dict[str, object]:
        at_ms = steady_ms()
        statuses = {topic: self._rates.status(topic, at_ms, self.consumption.tallies) for topic in self.subscriptions}
        properties = {
            "PROP_CLIENT_VERSION": _CLIENT_VERSION,
            "PROP_CONSUMEORDERLY": str(self._options.is_orderly).lower(),
            "PROP_CONSUMER_START_TIMESTAMP": str(self._started_ms),
            "PROP_CONSUME_TYPE": PUSH,
            "PROP_NAMESERVER_ADDR": ";".join(self._session.name_servers),
            "PROP_THREADPOOL_CORE_SIZE": str(self._options.concurrency),
        }
        info = running_info(properties, self.subscriptions.values(), self.assignments, self.offsets, statuses)
        return info if self.pops is None else info | {"mqPopTable": self.pops.table()}

    async def consume_directly(self, message: Message) -> dict[str, object]:
        restore_topic(message, self._group)
        began_ms = steady_ms()
        # In a task of its own: the one that asks ends with the connection of the operator.
        task = asyncio.create_task(self._consume_once(message), name=f"one message of {self._group}")
        self._asked_for.add(task)
        task.add_done_callback(self._asked_for.discard)
        outcome = await asyncio.shield(task)
        return direct_result(
            outcome,
            is_orderly=self._options.is_orderly,
            spent_ms=steady_ms() - began_ms,
            auto_commit=self._options.auto_commit,
        )

    async def _consume_once(self, message: Message) -> Outcome:
        self._listening.enter()
        return await self._listening.consume(message.queue, [message])

    # In the background.

    async def _learn_route(self, topic: str) -> None:
        try:
            await self._session.routes.get(topic)
        except RouteNotFound as e:
            if topic != retry_topic(self._group):
                log.warning("%s subscribes to a topic that does not exist yet: %s", self._group, e)

    async def _announce(self, topic: str | None) -> None:
        if topic is not None:
            await self._learn_route(topic)
        if topic is not None and topic in self._classes:
            await upload(self._session, self._group, topic, self._classes[topic])
        await self._session.heartbeat()
        self.rebalance_soon()

    def _route_changed(self, topic: str) -> None:
        if topic in self.subscriptions:
            self.rebalance_soon()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._is_stopping:
            work.close()
            return
        task = Worker(work, loop=asyncio.get_running_loop(), name=f"change of {self._group}")
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
                async with asyncio.timeout(_UNBALANCED_WAIT_S if hasty else self._options.rebalance_interval_s):
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
            await asyncio.sleep(self._options.commit_interval_s)
            self._rates.sample(steady_ms(), self.consumption.tallies)
            try:
                await self.commit()
            except RocketMQError as e:
                log.warning("%s can't commit: %s", self._group, e)

    async def _upload_classes(self) -> None:
        for topic, filter_class in list(self._classes.items()):
            await upload(self._session, self._group, topic, filter_class)

    async def _upload_forever(self) -> None:
        """Filter servers come, and forget when they are started again; one that knows the class does nothing."""
        while True:
            await asyncio.sleep(_UPLOAD_INTERVAL_S)
            try:
                await self._upload_classes()
            except RocketMQError as e:
                log.warning("%s can't upload its filter class: %s", self._group, e)

    async def _lock_forever(self) -> None:
        while True:
            await asyncio.sleep(_LOCK_INTERVAL_S)
            await self._rebalance.renew_locks()

    def _relock(self, _queue: MessageQueue) -> None:
        """Each queue without its lock asks for all of them, again and again: once at a time is enough."""
        if not self._is_relocking:
            self._is_relocking = True
            self._spawn(self._relock_all())

    async def _relock_all(self) -> None:
        try:
            await self._rebalance.renew_locks()
        finally:
            self._is_relocking = False

    def _lock_again(self) -> None:
        """A broker that was started anew knows no locks, and would give a queue to the next that asks."""
        if not self._is_locking_again:
            self._is_locking_again = True
            self._spawn(self._renew_once())

    async def _renew_once(self) -> None:
        self._is_locking_again = False  # whose queue is pulled again from here on asks anew
        await self._rebalance.renew_locks()

    def _begin(self, assignment: Assignment, offset: int) -> None:
        self.consumption.begin(assignment)
        loop = PullLoop(
            self._session,
            self._group,
            assignment.queue,
            assignment.buffer,
            _QueueSink(self, assignment),
            limits=self._options.limits,
            max_messages=self._options.pull_batch_size,
            running=self._running,
            interval_s=self._options.pull_interval_s,
            now_ms=now_ms,
            pulls_again=self._lock_again if self._has_locks else lambda: None,
        )
        assignment.start_pulling(loop, offset)

    def restart(self, assignment: Assignment, offset: int) -> None:
        """Goes on from another offset, in the background."""
        self._spawn(self._restart(assignment, offset))

    async def _restart(self, assignment: Assignment, offset: int) -> None:
        await self._rebalance.restart(assignment, offset)
        self.rebalance_soon()  # the queue was neither ours nor given up meanwhile, and may belong to another by now

    def wants(self, message: Message) -> bool:
        """Whether the user's own filter, if there is one, lets the message through."""
        restore_topic(message, self._group)
        wanted = self.filters.get(self._session.namespace.wrap(message.topic))
        if wanted is None:
            return True
        message.topic = self._session.namespace.unwrap(message.topic)
        try:
            return bool(call(wanted, message))
        except Exception:
            log.exception("the filter of topic %s failed; the message is consumed", message.topic)
            return True


class _QueueSink:
    """What the pull loop of one assignment works for."""

    def __init__(self, member: Membership, assignment: Assignment) -> None:
        self._member = member
        self._assignment = assignment

    def subscription(self) -> Subscription | None:
        return self._member.subscriptions.get(self._assignment.queue.topic)

    def commit_offset(self) -> int:
        # Not while a message is in hand: what is committed next is higher than what this pull would carry, and a broker
        # with many threads, as Apache's, may come to the pull last.
        if len(self._assignment.buffer):
            return UNKNOWN
        return self._member.offsets.carried(self._assignment.queue)

    def found(self, pulled: Pulled) -> None:
        member, assignment = self._member, self._assignment
        if assignment.revoked:
            return
        assignment.unreadable.update(pulled.unreadable)
        messages = assignment.buffer.put(pulled.messages)
        if member.filters:
            unwanted = [message for message in messages if not member.wants(message)]
            if unwanted:
                gone = {message.queue_offset for message in unwanted}
                messages = [message for message in messages if message.queue_offset not in gone]
                member.consumption.skip(assignment, unwanted)
        if messages:
            member.consumption.take(assignment, messages)

    def nothing_until(self, next_offset: int) -> None:
        # Only if nothing before it is unfinished.
        if not len(self._assignment.buffer) and not self._assignment.revoked:
            self._member.offsets.update(self._assignment.queue, next_offset)

    def moved(self, next_offset: int) -> None:
        self._member.restart(self._assignment, next_offset)
