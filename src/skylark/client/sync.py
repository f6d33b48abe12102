"""The client for code that blocks: the same classes, with the same names, parameters and errors, without `await`.

    from skylark.client.sync import Producer

    with Producer("localhost:9876", group="orders") as producer:
        receipt = producer.send("orders", b"hello", tag="new", key="42")

Nothing is done twice here: every twin owns one of the asyncio objects and runs its methods on an event loop in a
background thread, one for the whole process, started when it is first needed. What is called for every message crosses
between the threads in batches (`handover`, `holding`). Twins may be used from many threads.
A twin belongs to the process that made it: a child after a fork gets `ForkedProcess` and makes its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import datetime
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload
from weakref import WeakSet

from skylark.client import (
    admin,
    lite_pull_consumer,
    producer,
    pull_consumer,
    push_consumer,
    query,
    simple_consumer,
    transactions,
)
from skylark.client.choosing import Select, choice_of
from skylark.client.errors import ForkedProcess, RocketMQError
from skylark.client.handover import Handed, Outboxes, Parcel
from skylark.client.holding import calling_thread
from skylark.client.listening import Listener
from skylark.client.message import Message, MessageQueue, Receipt
from skylark.client.read_ahead import Hand
from skylark.client.simple_consumer import is_young
from skylark.client.sources import Caught
from skylark.client.threads import at_end

log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_AnyListener = TypeVar("_AnyListener", bound=Listener)

__all__ = [
    "AdminClient",
    "LitePullConsumer",
    "Producer",
    "PullConsumer",
    "PushConsumer",
    "QueryClient",
    "SimpleConsumer",
    "Transaction",
    "TransactionProducer",
]


class _Background:
    """An event loop in a daemon thread, for everything that blocks in this process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._serve, name="skylark-client", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                self._loop.run_forever()
            except BaseException:
                # sys.exit() in a task or callback, say: all clients of the process live on this loop.
                log.exception("the event loop of the blocking clients goes on after an error")
            else:
                return

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def is_here(self) -> bool:
        """Whether the loop's own thread asks."""
        return threading.current_thread() is self._thread

    def check_process(self) -> None:
        """Raises ForkedProcess in a child, where nothing runs on the loop."""
        if self.pid != os.getpid():
            raise ForkedProcess(
                f"this client was made by process {self.pid} and is used by {os.getpid()}, forked from it; "
                f"make a client of its own in the child, after the fork"
            )

    def run(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Runs `work` on the loop and waits for it. A Ctrl-C while waiting cancels it."""
        self.check_process()
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "a blocking client can't be used where blocking clients call you on their own event loop (a coroutine "
                "as listener, a hook, a callback): it would wait forever; a plain function as listener may use it"
            )
        future = asyncio.run_coroutine_threadsafe(_outcome_of(work), self._loop)
        try:
            result, error = future.result()
        finally:
            future.cancel()  # does nothing to one that is done
        if error is not None:
            raise error
        return cast(_T, result)


async def _outcome_of(work: Callable[[], Coroutine[Any, Any, _T]]) -> tuple[_T | None, BaseException | None]:
    """What the work came to. What is no Exception, raised by a hook or selector, is for the caller and not the loop."""
    try:
        return await work(), None
    except asyncio.CancelledError:
        raise
    except BaseException as e:
        return None, e


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()  # there is none for this platform
    return uvloop.new_event_loop()


_starting = threading.Lock()
_shared: _Background | None = None


def _background() -> _Background:
    global _shared
    with _starting:
        if _shared is None and hasattr(os, "register_at_fork"):
            # A lock that another thread held at the time of a fork would stay locked in the child.
            os.register_at_fork(after_in_child=lambda: _starting._at_fork_reinit())  # type: ignore[attr-defined]
        if _shared is None or _shared.pid != os.getpid():
            _shared = _Background()
        return _shared


class _Twin:
    """A blocking client: the asyncio one, and the loop that it lives on."""

    _inner: Any
    _background: _Background
    _outboxes: Outboxes  # of producers

    @property
    def group(self) -> str:
        """Its group, with the namespace before it."""
        return str(self._inner.group)

    def __enter__(self) -> Self:
        self._background.run(self._inner.__aenter__)
        return self

    def __exit__(self, *error: object) -> None:
        self._background.run(lambda: self._inner.__aexit__(*error))


def _made_like(kind: Callable[_P, Any]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, _P], None]]:
    """Gives a twin the constructor of its asyncio class; what is decorated comes after it, without arguments."""

    def decorate(begin: Callable[..., None]) -> Callable[Concatenate[Any, _P], None]:
        def make(self: _Twin, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
            async def build() -> Any:
                return kind(*args, **kwargs)

            self._background = _background()
            self._inner = self._background.run(build)
            begin(self)

        functools.update_wrapper(make, _constructor(kind))
        return make

    return decorate


def _constructor(kind: Any) -> Any:
    return kind.__init__


class _Method(Generic[_P, _T]):
    """A method of the asyncio class, that runs on its loop while the caller waits."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        functools.update_wrapper(self, method)

    def __set_name__(self, owner: type, name: str) -> None:
        assert name in (self._method.__name__, "_leave"), (
            f"{owner.__name__}.{name} is the twin of {self._method.__name__}"
        )

    @overload
    def __get__(self, twin: None, owner: type) -> Self: ...

    @overload
    def __get__(self, twin: _Twin, owner: type) -> Callable[_P, _T]: ...

    def __get__(self, twin: _Twin | None, owner: type) -> Self | Callable[_P, _T]:
        return self if twin is None else functools.partial(self, twin)

    def __call__(self, twin: _Twin, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        async def call() -> Any:
            result = self._method(twin._inner, *args, **kwargs)
            return await result if inspect.isawaitable(result) else result

        result: _T = twin._background.run(call)
        return result


def _waits(method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]) -> _Method[_P, _T]:
    """The twin of a coroutine method."""
    return _Method(method)


def _calls(method: Callable[Concatenate[Any, _P], _T]) -> _Method[_P, _T]:
    """The twin of a plain method: the loop's state is only touched on the loop's thread."""
    return _Method(method)


class _InTurn(_Method[_P, _T]):
    """The twin of a producer's method, that comes after what the thread has sent before."""

    def __call__(self, twin: _Twin, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        outbox = twin._outboxes.own

        async def call() -> Any:
            if outbox.is_busy:
                await outbox.emptied()
            return await self._method(twin._inner, *args, **kwargs)

        result: _T = twin._background.run(call)
        return result


class _AfterAll(_Method[_P, _T]):
    """The twin of a producer's method, that comes after what all threads have sent before."""

    def __call__(self, twin: _Twin, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        async def call() -> Any:
            await twin._outboxes.emptied()
            return await self._method(twin._inner, *args, **kwargs)

        result: _T = twin._background.run(call)
        return result


class _Last(_Method[_P, _T]):
    """The twin of a producer's method that ends it: what threads go on sending is refused, so that there is an end."""

    def __call__(self, twin: _Twin, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        async def call() -> Any:
            with twin._outboxes.closed():
                await twin._outboxes.emptied()
                return await self._method(twin._inner, *args, **kwargs)

        result: _T = twin._background.run(call)
        return result


class _Soon(_Method[_P, _T]):
    """The twin of `send_soon`: the thread gets the message ready, and the loop sends it."""

    def __call__(self, twin: _Twin, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        twin._background.check_process()
        if twin._background.is_here:
            raise RuntimeError(
                "a blocking client can't be used where blocking clients call you on their own event loop (a coroutine "
                "as listener, a hook, a callback): send from a plain listener, or from a thread of yours"
            )
        hand_over: Any = _hand_over
        result: _T = hand_over(twin, *args, **kwargs)
        return result


def _hand_over(
    twin: _Twin,
    topic: str,
    body: bytes,
    *,
    tag: str | None = None,
    key: str | Sequence[str] | None = None,
    properties: dict[str, str] | None = None,
    delay_level: int = 0,
    delay_s: float | None = None,
    deliver_at: datetime | int | None = None,
    priority: int | None = None,
    queue: MessageQueue | None = None,
    select: Select | None = None,
    arg: Any = None,
    ordering_key: str | int | None = None,
    flag: int = 0,
    wait_stored: bool = True,
    compress: bool = True,
    timeout_s: float | None = None,
) -> concurrent.futures.Future[Receipt]:
    inner: producer.Producer = twin._inner
    inner._open_courier()
    sending = inner._packing.pack(
        topic, body, tag, key, properties, delay_level, flag, wait_stored, priority, delay_s, deliver_at, ordering_key
    )
    choice = choice_of(queue, select, arg, ordering_key)
    handed: Handed[Receipt] = Handed()
    twin._outboxes.own.put(Parcel(sending, compress, choice, timeout_s, handed))
    return handed


def _in_turn(method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]) -> _Method[_P, _T]:
    return _InTurn(method)


def _after_all(method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]) -> _Method[_P, _T]:
    return _AfterAll(method)


def _last(method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]) -> _Method[_P, _T]:
    return _Last(method)


def _soon(
    method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, asyncio.Future[_T]]],
) -> _Method[_P, concurrent.futures.Future[_T]]:
    return _Soon(method)


class _ForThread(_Method[_P, _T]):
    """The twin of a method that counts what the caller holds as done: the caller is the thread."""

    def __call__(self, twin: _Twin, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        thread = threading.current_thread()

        async def call() -> Any:
            calling_thread.set(thread)
            return await self._method(twin._inner, *args, **kwargs)

        try:
            result: _T = twin._background.run(call)
        except KeyboardInterrupt:
            twin._background.loop.call_soon_threadsafe(twin._inner._interrupted, thread)
            raise
        return result


def _for_thread(method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]) -> _Method[_P, _T]:
    return _ForThread(method)


class Producer(_Twin):
    """Sends messages; see `skylark.client.producer`."""

    @_made_like(producer.Producer)
    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._outboxes = Outboxes(self._inner, self._background.loop)
        _producers.add(self)

    def _finish(self) -> None:
        """For the end of the interpreter, where nobody closed it: what was taken is still sent, or told of."""
        if self._background.pid != os.getpid() or self._inner._courier is None:
            return

        async def send_rest() -> None:
            await self._outboxes.emptied()
            await self._inner.flush()

        rest = asyncio.run_coroutine_threadsafe(send_rest(), self._background.loop)
        try:
            rest.result(self._inner._timeout_s)
        except TimeoutError:
            log.error("%s: the interpreter ends before all messages of send_soon were acknowledged", self.group)
        except RocketMQError as e:
            log.error("%s: the interpreter ends, and nobody asked for what was sent: %s", self.group, e)

    def __exit__(self, *error: object) -> None:
        async def leave() -> None:
            with self._outboxes.closed():
                await self._outboxes.emptied()
                await self._inner.__aexit__(*error)

        self._background.run(leave)

    start = _waits(producer.Producer.start)
    close = _last(producer.Producer.close)
    send = _in_turn(producer.Producer.send)
    send_soon = _soon(producer.Producer.send_soon)
    send_oneway = _in_turn(producer.Producer.send_oneway)
    send_batch = _in_turn(producer.Producer.send_batch)
    flush = _after_all(producer.Producer.flush)
    request = _in_turn(producer.Producer.request)
    reply = _in_turn(producer.Producer.reply)
    recall = _waits(producer.Producer.recall)
    queues = _waits(producer.Producer.queues)


_producers: WeakSet[Producer] = WeakSet()


def _finish_sending() -> None:
    for each in list(_producers):
        each._finish()


at_end(_finish_sending)


class Transaction:
    """One transaction, for `with`. Made by `TransactionProducer.transaction`."""

    def __init__(self, inner: transactions.Transaction, background: _Background) -> None:
        self._inner = inner
        self._background = background

    @property
    def id(self) -> str:
        """The `msg_id` of the message: what the transaction leaves behind should be found by it."""
        return self._inner.id

    @property
    def half(self) -> transactions.HalfMessage:
        """The message as it waits, within the block."""
        return self._inner.half

    def commit(self) -> None:
        """Ends the transaction before the end of the block."""
        self._background.run(self._inner.commit)

    def rollback(self) -> None:
        """Drops the message before the end of the block."""
        self._background.run(self._inner.rollback)

    def leave(self) -> None:
        """The end of the block does nothing any more: the checker tells how it ended."""

        async def leave() -> None:
            self._inner.leave()

        self._background.run(leave)

    def __enter__(self) -> Self:
        self._background.run(self._inner.__aenter__)
        return self

    def __exit__(self, *error: Any) -> None:
        self._background.run(lambda: self._inner.__aexit__(*error))


class TransactionProducer(Producer):
    """Messages that wait for the end of a transaction; see `skylark.client.transactions`."""

    @_made_like(transactions.TransactionProducer)
    def __init__(self) -> None:
        self._begin()

    start = _waits(transactions.TransactionProducer.start)
    close = _last(transactions.TransactionProducer.close)
    prepare = _in_turn(transactions.TransactionProducer.prepare)
    commit = _waits(transactions.TransactionProducer.commit)
    roll_back = _waits(transactions.TransactionProducer.roll_back)

    def transaction(self, *args: Any, **options: Any) -> Transaction:
        """A block that commits the message by its success and rolls it back by an exception."""
        return Transaction(self._inner.transaction(*args, **options), self._background)


class PushConsumer(_Twin):
    """Calls you with messages; see `skylark.client.push_consumer`. A plain listener runs in a thread of a pool."""

    @_made_like(push_consumer.PushConsumer)
    def __init__(self) -> None: ...

    @property
    def client_id(self) -> str:
        """Who it is to the brokers."""
        return str(self._inner.client_id)

    @property
    def queues(self) -> list[MessageQueue]:
        """The queues that this member owns now."""
        return list(self._background.run(self._read_queues))

    async def _read_queues(self) -> list[MessageQueue]:
        owned: list[MessageQueue] = self._inner.queues
        return owned

    subscribe = _calls(push_consumer.PushConsumer.subscribe)
    unsubscribe = _calls(push_consumer.PushConsumer.unsubscribe)
    pause = _calls(push_consumer.PushConsumer.pause)
    resume = _calls(push_consumer.PushConsumer.resume)
    start = _waits(push_consumer.PushConsumer.start)
    close = _waits(push_consumer.PushConsumer.close)
    wait_closed = _waits(push_consumer.PushConsumer.wait_closed)
    commit = _waits(push_consumer.PushConsumer.commit)

    def listen(self, listener: _AnyListener) -> _AnyListener:
        """Sets the listener; for use as a decorator."""
        self._inner.listen(listener)
        return listener


class PullConsumer(_Twin):
    """Reads messages by queue and offset; see `skylark.client.pull_consumer`."""

    @_made_like(pull_consumer.PullConsumer)
    def __init__(self) -> None: ...

    start = _waits(pull_consumer.PullConsumer.start)
    close = _waits(pull_consumer.PullConsumer.close)
    queues = _waits(pull_consumer.PullConsumer.queues)
    pull = _waits(pull_consumer.PullConsumer.pull)
    min_offset = _waits(pull_consumer.PullConsumer.min_offset)
    max_offset = _waits(pull_consumer.PullConsumer.max_offset)
    offset_for_time = _waits(pull_consumer.PullConsumer.offset_for_time)
    committed = _waits(pull_consumer.PullConsumer.committed)
    commit = _waits(pull_consumer.PullConsumer.commit)


class _Iterating(_Twin):
    """A twin whose asyncio class gives message after message."""

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        try:
            message: Message = self._background.run(self._inner.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None
        return message


class SimpleConsumer(_Iterating):
    """Messages on request, acknowledged one by one; see `skylark.client.simple_consumer`."""

    @_made_like(simple_consumer.SimpleConsumer)
    def __init__(self) -> None:
        self._own = threading.local()  # what the calling thread was dealt

    def __next__(self) -> Message:
        while True:
            hand: deque[Caught] | None = getattr(self._own, "hand", None) or self._deal()
            if hand is None:
                raise StopIteration
            self._own.hand = hand
            try:
                caught = hand.popleft()
            except IndexError:  # the loop needed it elsewhere, right now
                continue
            if is_young(caught):
                return caught.message
            for message in self._fresh([caught]):
                return message

    start = _waits(simple_consumer.SimpleConsumer.start)
    close = _waits(simple_consumer.SimpleConsumer.close)
    subscribe = _calls(simple_consumer.SimpleConsumer.subscribe)
    unsubscribe = _calls(simple_consumer.SimpleConsumer.unsubscribe)
    receive = _waits(simple_consumer.SimpleConsumer.receive)
    ack = _waits(simple_consumer.SimpleConsumer.ack)
    _deal = _for_thread(simple_consumer.SimpleConsumer._deal)
    _fresh = _waits(simple_consumer.SimpleConsumer._fresh)
    extend = _waits(simple_consumer.SimpleConsumer.extend)


class LitePullConsumer(_Iterating):
    """Messages on request, `for message in consumer`; see `skylark.client.lite_pull_consumer`."""

    @_made_like(lite_pull_consumer.LitePullConsumer)
    def __init__(self) -> None:
        self._own = threading.local()  # the hand of the calling thread

    def __next__(self) -> Message:
        hand: Hand | None = getattr(self._own, "hand", None)
        if hand is None or not hand.rest:
            hand = self._own.hand = self._deal()
            if hand is None:
                raise StopIteration
        try:
            message = hand.current = hand.rest.popleft()
        except IndexError:  # the loop needed it elsewhere, right now
            return self.__next__()
        return message

    def __exit__(self, *error: Any) -> None:
        self._leave(*error)

    start = _waits(lite_pull_consumer.LitePullConsumer.start)
    close = _waits(lite_pull_consumer.LitePullConsumer.close)
    subscribe = _calls(lite_pull_consumer.LitePullConsumer.subscribe)
    unsubscribe = _calls(lite_pull_consumer.LitePullConsumer.unsubscribe)
    assign = _calls(lite_pull_consumer.LitePullConsumer.assign)
    assignment = _calls(lite_pull_consumer.LitePullConsumer.assignment)
    failures = _calls(lite_pull_consumer.LitePullConsumer.failures)
    queues = _waits(lite_pull_consumer.LitePullConsumer.queues)
    poll = _for_thread(lite_pull_consumer.LitePullConsumer.poll)
    seek = _waits(lite_pull_consumer.LitePullConsumer.seek)
    seek_to_begin = _waits(lite_pull_consumer.LitePullConsumer.seek_to_begin)
    seek_to_end = _waits(lite_pull_consumer.LitePullConsumer.seek_to_end)
    position = _calls(lite_pull_consumer.LitePullConsumer.position)
    min_offset = _waits(lite_pull_consumer.LitePullConsumer.min_offset)
    max_offset = _waits(lite_pull_consumer.LitePullConsumer.max_offset)
    offset_for_time = _waits(lite_pull_consumer.LitePullConsumer.offset_for_time)
    committed = _waits(lite_pull_consumer.LitePullConsumer.committed)
    commit = _for_thread(lite_pull_consumer.LitePullConsumer.commit)
    _deal = _for_thread(lite_pull_consumer.LitePullConsumer._deal)
    _leave = _for_thread(lite_pull_consumer.LitePullConsumer.__aexit__)
    pause = _calls(lite_pull_consumer.LitePullConsumer.pause)
    resume = _calls(lite_pull_consumer.LitePullConsumer.resume)


class QueryClient(_Twin):
    """Looks messages up; see `skylark.client.query`."""

    @_made_like(query.QueryClient)
    def __init__(self) -> None: ...

    start = _waits(query.QueryClient.start)
    close = _waits(query.QueryClient.close)
    by_key = _waits(query.QueryClient.by_key)
    by_unique_key = _waits(query.QueryClient.by_unique_key)
    by_id = _waits(query.QueryClient.by_id)
    by_offset = _waits(query.QueryClient.by_offset)
    by_time = _waits(query.QueryClient.by_time)
    trace = _waits(query.QueryClient.trace)
    queues = _waits(query.QueryClient.queues)


class AdminClient(_Twin):
    """Looks at a cluster and changes it; see `skylark.client.admin`."""

    @_made_like(admin.AdminClient)
    def __init__(self) -> None: ...

    start = _waits(admin.AdminClient.start)
    close = _waits(admin.AdminClient.close)
    brokers = _waits(admin.AdminClient.brokers)
    create_topic = _waits(admin.AdminClient.create_topic)
