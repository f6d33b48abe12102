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
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self, TypeVar

import msgspec

from skylark.client import allocate
from skylark.client.addresses import NameServers
from skylark.client.calling import is_cancelled
from skylark.client.consuming import NEVER
from skylark.client.crew import Worker
from skylark.client.errors import ClientClosed, InvalidMessage
from skylark.client.filter_classes import FilterClass
from skylark.client.listening import ConsumeHook, Handlers, Listener
from skylark.client.membership import Filter, Membership, Options, now_ms
from skylark.client.options import (
    check_consumer_group,
    check_plain_callback,
    check_texts,
    check_trace,
    choice_among,
    reconsume_times,
    several,
)
from skylark.client.pulling import Limits
from skylark.client.push_options import check_listener, check_push_options
from skylark.client.rebalance import QueuesChanged
from skylark.client.session import Session, session_of
from skylark.client.starting import FromWhere, Start
from skylark.client.subscriptions import build_subscription, retry_topic
from skylark.client.tracing import ConsumeTraces, open_tracer
from skylark.client.validation import check_group, check_topic
from skylark.wire.bodies import MessageQueue, Subscription

log = logging.getLogger(__name__)

_AnyListener = TypeVar("_AnyListener", bound=Listener)


class PushConsumer:
    """A member of a consumer group."""

    def __init__(
        self,
        name_servers: NameServers = None,
        group: str = "DEFAULT_CONSUMER",
        *,
        listener: Listener | Handlers | None = None,
        session: Session | None = None,
        model: Literal["clustering", "broadcasting", "CLUSTERING", "BROADCASTING"] = "clustering",
        orderly: bool = False,
        auto_commit: bool = True,
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
        namespace: str = "",
        mode: Literal["pull", "pop", "broker"] = "pull",
        invisible_s: float = 60.0,
        trace: bool | str = False,
    ) -> None:
        """
        - `name_servers`: `host:port`, several joined by `;` or in a list, or an address server's URL; None leaves it
          to the environment.
        - `group`: whose messages the consumer shares with its other members.
        - `listener`: takes a message, or a list if `batch_size` is given; may be set by `@consumer.listen` too.
        - `session`: shares the connections of a session; without one, the consumer has its own.
        - `model`: "clustering" shares the messages among the members, "broadcasting" gives every member all of them.
        - `orderly`: one message after the other a queue; one that fails holds up its queue until it succeeds.
        - `auto_commit`: False leaves it to an orderly listener to `Commit` or to `RollBack`; see `orderly_commits`.
        - `from_where`: where a group starts that has no offset yet: "last", "first", or a time (datetime, or epoch
          milliseconds).
        - `concurrency`: how many calls of the listener may run at once.
        - `max_reconsume_times`: after so many failed tries a message becomes a dead letter; None, or -1 as in RocketMQ,
          stands for the group's setting at the broker, 16 if nobody changed it, and for no limit when `orderly`. A
          broadcasting consumer tries so often itself, 5 s apart, and then drops the message; None stands for no second
          try unless `orderly`.
        - `consume_timeout_s`: a message that takes longer is given back for another try; an orderly or broadcasting
          consumer can only say so in the log.
        - `suspend_s`: how long an orderly queue pauses before it tries a message again.
        - `strategy`: how queues are shared, one of `skylark.client.allocate` or a function of client id, queues and
          client ids; the same for all members. `rebalance_interval_s`: how often that is done without a reason.
          `queues_changed`: called with a topic and the queues that this member has of it now.
        - `pull_batch_size`: messages of one pull at most; `pull_interval_s`: a pause after each.
        - `limits`: how much of each queue may wait in memory (`skylark.client.pulling.Limits`).
        - `commit_interval_s`: how often offsets are stored.
        - `offsets_directory`: where a broadcasting consumer keeps its offsets, `~/.rocketmq_offsets` unless given.
        - `hooks`: each a `ConsumeHook`, called before and after each call of the listener.
        - `shutdown_timeout_s`: how long closing waits for the listener; so does the end of the interpreter for a plain
          one.
        - `namespace`: stands before the names of group and topics on the wire.
        - `mode`: "pull" shares the queues among the members; "pop" takes single messages from queues that are open to
          all members; "broker" does what the brokers are told for the group (`mqadmin setConsumeMode`). RocketMQ's
          capitals do as well, here and for the `model`.
        - `invisible_s`: how long a popped message is hidden from the others; it is extended while the listener works.
        - `trace`: True, or the name of a topic, writes a trace of everything that is consumed there.
        """
        check_texts(group=group, namespace=namespace)
        self._session = session_of(session, name_servers, namespace)
        self._namespace = self._session.namespace
        check_consumer_group(group)
        group = self._namespace.wrap(group)
        check_group(group)
        check_trace(trace)
        self._group = group
        self._listener = listener
        # The span only matters where messages finish out of order.
        limits = limits or (Limits(span=NEVER) if orderly else Limits())
        self._options = Options(
            is_broadcasting=choice_among("model", model, ("clustering", "broadcasting")) == "broadcasting",
            is_orderly=orderly,
            auto_commit=auto_commit,
            start=Start.of(from_where, now_ms()),
            concurrency=concurrency,
            batch_size=batch_size,
            max_reconsume_times=reconsume_times(max_reconsume_times),
            consume_timeout_s=consume_timeout_s,
            suspend_s=suspend_s,
            strategy=strategy,
            pull_batch_size=pull_batch_size,
            pull_interval_s=pull_interval_s,
            limits=limits,
            commit_interval_s=commit_interval_s,
            rebalance_interval_s=rebalance_interval_s,
            shutdown_timeout_s=shutdown_timeout_s,
            hooks=several("hooks", hooks),
            queues_changed=queues_changed,
            offsets_directory=offsets_directory,
            mode=choice_among("mode", mode, ("pull", "pop", "broker")),
            invisible_s=invisible_s,
        )
        check_push_options(self._options)
        self._tracer = open_tracer(self._session, group, "CONSUME", trace)
        if self._tracer is not None:
            traces = ConsumeTraces(self._tracer, self._session, consume_timeout_s)
            self._options = msgspec.structs.replace(self._options, hooks=(*self._options.hooks, traces))
        if queues_changed is not None:
            self._options = msgspec.structs.replace(self._options, queues_changed=self._unwrapping(queues_changed))
        self._subscriptions: dict[str, Subscription] = {}
        self._filters: dict[str, Filter] = {}
        self._classes: dict[str, FilterClass] = {}
        self._running = asyncio.Event()
        self._running.set()
        self._closed = asyncio.Event()  # closing has begun
        self._ended = asyncio.Event()  # and is done
        self._member: Membership | None = None
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._is_closed_by_listener = False

    @property
    def group(self) -> str:
        """Its group, with the namespace before it."""
        return self._group

    @property
    def client_id(self) -> str:
        """Who it is to the brokers."""
        return self._session.client_id

    @property
    def queues(self) -> list[MessageQueue]:
        """The queues that this member owns now."""
        owned = [] if self._member is None else self._member.queues
        return [self._namespace.unwrap_queue(queue) for queue in owned]

    def positions(self, topic: str) -> dict[MessageQueue, int]:
        """How far this member's queues of the topic are consumed: the offsets that are, or will be, committed."""
        offsets = {} if self._member is None else self._member.positions(self._namespace.wrap(topic))
        return {self._namespace.unwrap_queue(queue): offset for queue, offset in offsets.items()}

    def subscribe(
        self,
        topic: str,
        tag: str = "*",
        *,
        sql: str | None = None,
        filter: Filter | None = None,
        filter_class: type | tuple[str, str] | None = None,
    ) -> None:
        """Wants the messages of a topic with some tags (`a || b`), or by an SQL92 expression that the broker
        evaluates, or by a class that runs at a filter server (the class, or its name and source); `filter` is asked
        here for each of them. All members of a group must subscribe to the same.
        """
        check_texts(topic=topic, tag=tag)
        if filter is not None:
            check_plain_callback("the filter", filter, "message")
        topic = self._namespace.wrap(topic)
        check_topic(topic)
        version = max(now_ms(), *(each.sub_version + 1 for each in self._subscriptions.values()), 0)
        self._subscriptions[topic] = build_subscription(topic, tag=tag, sql=sql, version=version)
        self._filters.pop(topic, None)
        if filter is not None:
            self._filters[topic] = filter
        self._classes.pop(topic, None)
        if filter_class is not None:
            if tag != "*" or sql is not None:
                raise InvalidMessage(f"topic {topic!r}: a filter class takes the place of tag and sql")
            self._classes[topic] = uploaded = FilterClass.of(filter_class)
            self._subscriptions[topic].class_filter_mode = True
            self._subscriptions[topic].sub_string = uploaded.name
        self._announce(topic)

    def unsubscribe(self, topic: str) -> None:
        """Gives up the topic's queues."""
        topic = self._namespace.wrap(topic)
        self._classes.pop(topic, None)
        self._filters.pop(topic, None)
        if self._subscriptions.pop(topic, None) is not None:
            self._announce(None)

    def _unwrapping(self, changed: QueuesChanged) -> QueuesChanged:
        """What tells the user of changed queues, by the names that users know."""
        if not self._namespace:
            return changed
        tell, unwrap = changed, self._namespace
        return lambda topic, owned: tell(unwrap.unwrap(topic), [unwrap.unwrap_queue(queue) for queue in owned])

    def _announce(self, topic: str | None) -> None:
        if self._member is not None and not self._closed.is_set():
            self._member.announce(topic)

    def listen(self, listener: _AnyListener) -> _AnyListener:
        """Sets the listener; for use as a decorator."""
        if self._member is not None:
            raise ClientClosed("the listener must be set before the consumer starts")
        self._listener = listener
        return listener

    def pause(self) -> None:
        """Stops pulling and calling the listener; what it is working on goes on."""
        self._running.clear()

    def resume(self) -> None:
        """Goes on after a `pause`."""
        self._running.set()

    async def start(self) -> None:
        """Joins the group. Returns when the first queues are taken, or the listener has closed the consumer already.

        Raises ClientClosed if somebody else closes it meanwhile.
        """
        if self._member is not None:
            raise ClientClosed("a consumer is started once; make another one")
        if self._listener is None:
            raise InvalidMessage("the consumer has no listener: give it one, or decorate a function with listen")
        for listener in self._listener.of_topics.values() if isinstance(self._listener, Handlers) else [self._listener]:
            check_listener(listener, takes_batches=self._options.batch_size is not None)
        if not self._subscriptions:
            log.warning("%s starts without a subscription, and gets nothing until it subscribes", self._group)
        if not self._options.is_broadcasting:
            retries = retry_topic(self._group)
            self._subscriptions[retries] = build_subscription(retries, version=now_ms())
        await self._session.acquire()
        self._member = Membership(
            self._session,
            self._group,
            self._options,
            self._listener,
            self._subscriptions,
            self._filters,
            self._running,
            self._classes,
        )
        self._starting = Worker(
            self._start(self._member), loop=asyncio.get_running_loop(), name=f"start of {self._group}"
        )
        try:
            await self._starting
        except BaseException as e:
            was_closed = self._closed.is_set() and isinstance(e, asyncio.CancelledError) and not is_cancelled()
            await self.close()
            if not was_closed:
                raise
            if not self._is_closed_by_listener:
                raise ClientClosed("the consumer was closed before it had started") from None

    async def _start(self, member: Membership) -> None:
        if self._tracer is not None:
            await self._tracer.start()
        await member.start()

    async def close(self) -> None:
        """Finishes what the listener is working on, commits, and leaves the group.

        Called by the listener, or by a task that it started, it returns at once, since it can't wait for the listener
        to end; `wait_closed` tells others when all is done. Whoever gives up waiting does not stop the closing.
        """
        if self._member is None:
            return
        self._session.check_home()
        if self._closing is None:
            self._closed.set()
            self._member.halt()
            self._is_closed_by_listener = self._member.is_called_by_listener
            self._closing = asyncio.create_task(self._close(self._member))
            self._closing.add_done_callback(self._tell_failure)
        if not self._member.is_called_by_listener:
            await asyncio.shield(self._closing)

    async def _close(self, member: Membership) -> None:
        try:
            if self._starting is not None:
                self._starting.cancel()
                await asyncio.wait([self._starting])
            await member.stop()
        finally:
            try:
                if self._tracer is not None:
                    await self._tracer.close()
            finally:
                await self._session.release()
                self._ended.set()

    def _tell_failure(self, closing: asyncio.Task[None]) -> None:
        if not closing.cancelled() and (error := closing.exception()) is not None:
            log.error("%s: closing went wrong", self._group, exc_info=error)

    async def wait_closed(self) -> None:
        """Returns when the consumer was closed."""
        await self._ended.wait()

    async def commit(self) -> None:
        """Stores the offsets now, and not only every few seconds."""
        if self._member is not None:
            await self._member.commit()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
