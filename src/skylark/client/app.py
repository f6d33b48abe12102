"""Handlers declared by decorators, and a process that runs them until it is told to stop.

    app = App("localhost:9876")

    @app.consumer("orders", group="billing", tag="new || paid")
    async def handle(message: Message) -> None: ...

    app.run()

`run` ends on SIGTERM or SIGINT: nothing new is begun, what the handlers are working on is finished and committed, and
the groups are left. A second signal ends the process at once. In a program with an event loop of its own, `async with
app` does the same without touching signals.

All consumers and producers of an app share one session. Handlers of one group are one member of it, since members of a
group must subscribe to the same: each handler gets the messages of its topic.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any, Final, Self, TypeVar

from skylark.client.addresses import NameServers
from skylark.client.errors import ClientClosed, InvalidMessage, OtherEventLoop
from skylark.client.listening import Handlers, Listener
from skylark.client.membership import Filter
from skylark.client.options import check_callback
from skylark.client.producer import Producer
from skylark.client.push_consumer import PushConsumer
from skylark.client.session import Session, running_loop, session_of

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

_Handler = TypeVar("_Handler", bound=Listener)


class _Subscription:
    """A handler and what it wants."""

    def __init__(self, topic: str, tag: str, sql: str | None, filter: Filter | None, handler: Listener) -> None:
        self.topic = topic
        self.tag = tag
        self.sql = sql
        self.filter = filter
        self.handler = handler


class App:
    """The consumers and producers of one process."""

    def __init__(
        self,
        name_servers: NameServers = None,
        *,
        session: Session | None = None,
        namespace: str = "",
        **defaults: Any,
    ) -> None:
        """
        - `name_servers`: `host:port`, several joined by `;` or in a list, or an address server's URL; None leaves it
          to the environment.
        - `session`: what all share, in place of one of the app's own.
        - `namespace`: stands before the names of groups and topics on the wire.
        - the `defaults` are options of `PushConsumer` for all groups.
        """
        self._session = session_of(session, name_servers, namespace)
        self._defaults = defaults
        self._subscriptions: dict[str, list[_Subscription]] = {}
        self._options: dict[str, dict[str, Any]] = {}
        self._producers: list[Producer] = []
        self._running: AsyncExitStack | None = None
        self._is_stop_wanted = False
        self._end_serving: Callable[[], object] | None = None  # while `serve` runs
        self.consumers: dict[str, PushConsumer] = {}
        """group -> its consumer, while the app runs"""

    @property
    def session(self) -> Session:
        """What all its consumers and producers share."""
        return self._session

    def consumer(
        self,
        topic: str,
        *,
        group: str,
        tag: str = "*",
        sql: str | None = None,
        filter: Filter | None = None,
        **options: Any,
    ) -> Callable[[_Handler], _Handler]:
        """Declares the decorated function the handler of a topic. `options` are those of `PushConsumer`."""
        if self._running is not None:
            raise ClientClosed("handlers are declared before the app starts")
        subscriptions = self._subscriptions.setdefault(group, [])
        known = self._options.setdefault(group, dict(options))
        if options and options != known:
            raise InvalidMessage(
                f"group {group!r} has options already, with its first handler: {known or 'none'}; give them there"
            )
        if any(each.topic == topic for each in subscriptions):
            raise InvalidMessage(f"group {group!r} has a handler of topic {topic!r} already")
        if subscriptions and known.get("batch_size") is not None:
            raise InvalidMessage(f"group {group!r} takes batches, which have one handler: use another group")

        def declare(handler: _Handler) -> _Handler:
            check_callback("the handler", handler, "message")
            subscriptions.append(_Subscription(topic, tag, sql, filter, handler))
            return handler

        return declare

    def producer(self, group: str = "DEFAULT_PRODUCER", **options: Any) -> Producer:
        """A producer that starts and ends with the app, for handlers to send with."""
        if self._running is not None:
            raise ClientClosed("producers are declared before the app starts")
        producer = Producer(group=group, session=self._session, **options)
        self._producers.append(producer)
        return producer

    def run(self) -> None:
        """Runs until SIGTERM or SIGINT, then finishes what is in hand."""
        if asyncio._get_running_loop() is not None:
            raise OtherEventLoop("an event loop runs here already: use `await app.serve()`, or `async with app`")
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(self.serve())

    async def serve(self) -> None:
        """The same within a running event loop, whose signal handlers it sets for the time being.

        In another thread than the main one, which gets no signals, only `stop` ends it.
        """
        loop = running_loop()
        if self._running is not None or self._end_serving is not None:
            raise ClientClosed("the app runs already")
        stopping = asyncio.Event()
        self._end_serving = lambda: loop.call_soon_threadsafe(stopping.set)
        try:
            with _signals_call(self.stop):
                async with self:
                    if not self._is_stop_wanted:
                        await stopping.wait()
        finally:
            self._end_serving = None
            self._is_stop_wanted = False

    def stop(self) -> None:
        """Ends `serve` as a signal does, from any thread. A `serve` that has not begun yet ends when it has."""
        self._is_stop_wanted = True
        if (end_serving := self._end_serving) is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
                end_serving()

    async def __aenter__(self) -> Self:
        if self._running is not None:
            raise ClientClosed("the app runs already")
        stack = self._running = AsyncExitStack()
        try:
            await stack.enter_async_context(self._session)
            for producer in self._producers:
                await stack.enter_async_context(producer)
            for group, subscriptions in self._subscriptions.items():
                self.consumers[group] = consumer = self._build(group, subscriptions)
                await stack.enter_async_context(consumer)
        except BaseException:
            try:
                await stack.aclose()
            finally:
                self.consumers.clear()
                self._running = None
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        stack, self._running = self._running, None
        if stack is not None:
            # Together, so that slow handlers of several groups are waited for at the same time.
            try:
                await asyncio.gather(*(consumer.close() for consumer in self.consumers.values()))
            finally:
                self.consumers.clear()
                await stack.aclose()

    def _build(self, group: str, subscriptions: list[_Subscription]) -> PushConsumer:
        options = self._defaults | self._options[group]
        consumer = PushConsumer(group=group, session=self._session, listener=_dispatcher(subscriptions), **options)
        for each in subscriptions:
            consumer.subscribe(each.topic, each.tag, sql=each.sql, filter=each.filter)
        return consumer


@contextlib.contextmanager
def _signals_call(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call `stop`; a second one does what it does by default. Only the main thread gets signals."""
    loop = asyncio.get_running_loop()
    numbers = _SIGNALS if threading.current_thread() is threading.main_thread() else ()

    def restore() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)

    def received() -> None:
        restore()
        stop()

    for number in numbers:
        loop.add_signal_handler(number, received)
    try:
        yield
    finally:
        restore()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _dispatcher(subscriptions: list[_Subscription]) -> Listener | Handlers:
    """What a group calls: its only handler, or the one of each topic."""
    if len(subscriptions) == 1:
        return subscriptions[0].handler
    return Handlers({each.topic: each.handler for each in subscriptions})
