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
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, Self, TypeVar

from skylark.client import allocate
from skylark.client.consuming import NEVER
from skylark.client.errors import ClientClosed, InvalidMessage
from skylark.client.filter_classes import FilterClass
from skylark.client.listening import ConsumeHook, Listener
from skylark.client.membership import Filter, Membership, Options, now_ms
from skylark.client.popping import MAX_INVISIBLE_S, MIN_INVISIBLE_S
from skylark.client.pulling import Limits
from skylark.client.rebalance import QueuesChanged
from skylark.client.session import Session, session_of
from skylark.client.starting import FromWhere, Start
from skylark.client.subscriptions import build_subscription, retry_topic
from skylark.client.tracing import ConsumeTraces, open_tracer
from skylark.client.validation import check_group, check_topic
from skylark.wire.bodies import MessageQueue, Subscription

MAX_BATCH: Final = 1024

_AnyListener = TypeVar("_AnyListener", bound=Listener)


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
        namespace: str = "",
        mode: Literal["pull", "pop", "broker"] = "pull",
        invisible_s: float = 60.0,
        trace: bool | str = False,
    ) -> None:
        """
        - `listener`: takes a message, or a list if `batch_size` is given; may be set by `@consumer.listen` too.
        - `session`: shares the connections of a session; without one, the consumer has its own.
        - `model`: "clustering" shares the messages among the members, "broadcasting" gives every member all of them.
        - `orderly`: one message after the other a queue; one that fails holds up its queue until it succeeds.
        - `from_where`: where a group starts that has no offset yet: "last", "first", or a time (datetime, or epoch
          milliseconds).
        - `concurrency`: how many calls of the listener may run at once.
        - `max_reconsume_times`: after so many failed tries a message becomes a dead letter; None stands for the group's
          setting at the broker, 16 if nobody changed it, and for no limit when `orderly`.
        - `consume_timeout_s`: a message that takes longer is given back for another try.
        - `suspend_s`: how long an orderly queue pauses before it tries a message again.
        - `limits`: how much of each queue may wait in memory.
        - `shutdown_timeout_s`: how long closing waits for the listener.
        - `namespace`: stands before the names of group and topics on the wire.
        - `mode`: "pull" shares the queues among the members; "pop" takes single messages from queues that are open to
          all members; "broker" does what the brokers are told for the group (`mqadmin setConsumeMode`).
        - `invisible_s`: how long a popped message is hidden from the others; it is extended while the listener works.
        - `trace`: True, or the name of a topic, writes a trace of everything that is consumed there.
        """
        self._session = session_of(session, name_servers, namespace)
        self._namespace = self._session.namespace
        group = self._namespace.wrap(group)
        check_group(group)
        _check_range("concurrency", concurrency, 1, 1000)
        _check_range("pull_batch_size", pull_batch_size, 1, 1024)
        _check_mode(mode, model, invisible_s)
        _check_range("batch_size", 1 if batch_size is None else batch_size, 1, MAX_BATCH)
        self._group = group
        self._listener = listener
        self._tracer = open_tracer(self._session, group, "CONSUME", trace)
        if self._tracer is not None:
            hooks = (*hooks, ConsumeTraces(self._tracer, self._session, consume_timeout_s))
        self._options = Options(
            is_broadcasting=model == "broadcasting",
            is_orderly=orderly,
            start=Start.of(from_where, now_ms()),
            concurrency=concurrency,
            batch_size=batch_size,
            max_reconsume_times=max_reconsume_times,
            consume_timeout_s=consume_timeout_s,
            suspend_s=suspend_s,
            strategy=strategy,
            pull_batch_size=pull_batch_size,
            pull_interval_s=pull_interval_s,
            # The span only matters where messages finish out of order.
            limits=limits or (Limits(span=NEVER) if orderly else Limits()),
            commit_interval_s=commit_interval_s,
            rebalance_interval_s=rebalance_interval_s,
            shutdown_timeout_s=shutdown_timeout_s,
            hooks=tuple(hooks),
            queues_changed=self._unwrapping(queues_changed),
            offsets_directory=offsets_directory,
            mode=mode,
            invisible_s=invisible_s,
        )
        self._subscriptions: dict[str, Subscription] = {}
        self._filters: dict[str, Filter] = {}
        self._classes: dict[str, FilterClass] = {}
        self._running = asyncio.Event()
        self._running.set()
        self._closed = asyncio.Event()  # closing has begun
        self._ended = asyncio.Event()  # and is done
        self._member: Membership | None = None

    @property
    def group(self) -> str:
        return self._group

    @property
    def client_id(self) -> str:
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

    def _unwrapping(self, changed: QueuesChanged | None) -> QueuesChanged | None:
        """What tells the user of changed queues, by the names that users know."""
        if changed is None or not self._namespace:
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
        self._running.set()

    async def start(self) -> None:
        """Joins the group. Returns when the first queues are taken."""
        if self._member is not None:
            raise ClientClosed("a consumer is started once; make another one")
        if self._listener is None:
            raise InvalidMessage("the consumer has no listener: give it one, or decorate a function with listen")
        if not self._options.is_broadcasting:
            retries = retry_topic(self._group)
            self._subscriptions[retries] = build_subscription(retries, version=now_ms())
        await self._session.acquire()
        if self._tracer is not None:
            await self._tracer.start()
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
        try:
            await self._member.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Finishes what the listener is working on, commits, and leaves the group."""
        if self._member is None or self._closed.is_set():
            return
        self._closed.set()
        try:
            await self._member.stop()
        finally:
            if self._tracer is not None:
                await self._tracer.close()
            await self._session.release()
            self._ended.set()

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


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidMessage(f"{name} is {value}; it must be between {low} and {high}")


def _check_mode(mode: str, model: str, invisible_s: float) -> None:
    if mode not in ("pull", "pop", "broker"):
        raise InvalidMessage(f"mode is {mode!r}; it takes 'pull', 'pop' or 'broker'")
    if mode != "pull" and model == "broadcasting":
        raise InvalidMessage(f"a broadcasting consumer pulls by itself; its mode can't be {mode!r}")
    if not MIN_INVISIBLE_S <= invisible_s <= MAX_INVISIBLE_S:
        raise InvalidMessage(
            f"invisible_s is {invisible_s:g}; it must be between {MIN_INVISIBLE_S:g} and {MAX_INVISIBLE_S:g}"
        )
