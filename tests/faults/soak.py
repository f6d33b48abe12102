"""Servers that come back elsewhere, listeners that behave badly, and members that come and go.

Name servers have an address that stays, as behind a service of Kubernetes, and another port behind it after each
restart. Brokers are at another port each time, over the same store, and tell the name servers where.

A group has a ledger: which messages were acknowledged to their senders, and which of them the group is done with.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Final, Protocol

from relay import Relay
from skylark.broker.app import Broker
from skylark.broker.config import from_mapping
from skylark.client import sync
from skylark.client.errors import ClientClosed, RocketMQError
from skylark.client.lite_pull_consumer import LitePullConsumer
from skylark.client.message import Message, Receipt
from skylark.client.producer import Producer
from skylark.client.pull_consumer import PullConsumer
from skylark.client.push_consumer import PushConsumer
from skylark.client.session import Session
from skylark.client.simple_consumer import SimpleConsumer
from skylark.nameserver.app import NameServer
from skylark.nameserver.config import NamesrvConfig
from skylark.net.pool import split_address

HOST: Final = "127.0.0.1"
TOPIC: Final = "orders"
QUEUES: Final = 3
INVISIBLE_S: Final = 4.0
SHUTDOWN_S: Final = 2.0
HANG_S: Final = 3.0

_SETTINGS: Final = {
    "mappedFileSizeCommitLog": str(16 << 20),
    "mappedFileSizeConsumeQueue": str(20 * 20_000),
    "maxHashSlotNum": "1000",
    "maxIndexNum": "4000",
    "diskMaxUsedSpaceRatio": "95",
    "registerNameServerPeriod": "10000",
    "messageDelayLevel": " ".join(["1s"] * 18),
    "defaultTopicQueueNums": str(QUEUES),
}


# Servers.


class NameServerHome:
    """An address that stays, with a name server behind it that does not."""

    def __init__(self, directory: Path) -> None:
        self._config = NamesrvConfig(kv_config_path=str(directory / "kvConfig.json"))
        self._server: NameServer | None = None
        self._front = Relay("127.0.0.1:1")

    @property
    def address(self) -> str:
        return self._front.address

    async def open(self) -> None:
        await self._front.start()
        await self.start()

    async def start(self) -> None:
        self._server = NameServer(self._config)
        self._front._target = split_address(f"{HOST}:{await self._server.start(HOST, 0)}")

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop()

    async def close(self) -> None:
        await self.stop()
        await self._front.stop()


class BrokerHome:
    """A store, and a broker over it that listens at another port after each start."""

    def __init__(self, name: str, directory: Path, name_servers: str) -> None:
        self._settings = _SETTINGS | {
            "brokerName": name, "storePathRootDir": str(directory / name), "namesrvAddr": name_servers,
        }  # fmt: skip
        self._broker: Broker | None = None

    async def start(self) -> None:
        broker = Broker(from_mapping(self._settings, source="settings"))
        await broker.start(HOST, 0)
        self._broker = broker

    async def stop(self) -> None:
        broker, self._broker = self._broker, None
        if broker is not None:
            await broker.stop()

    close = stop


class Home(Protocol):
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def close(self) -> None: ...


# What a listener may do instead of its work. Each takes the message, and is called for its first try only.


async def _raises(_: Message) -> object:
    raise ValueError("a listener's own mistake")


async def _refuses(_: Message) -> object:
    return False


async def _hangs(_: Message) -> object:
    await asyncio.sleep(HANG_S)
    raise TimeoutError("after a long time")


async def _raises_what_is_not_said(_: Message) -> object:
    raise StopAsyncIteration


async def _cancels(_: Message) -> object:
    raise asyncio.CancelledError


async def _cancels_itself(_: Message) -> object:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)
    return False


async def _exits(_: Message) -> object:
    sys.exit("a listener's own end")


def _stops_iterating_plainly(_: Message) -> object:
    raise StopIteration


def _exits_plainly(_: Message) -> object:
    sys.exit("a listener's own end")


def _cancels_plainly(_: Message) -> object:
    raise concurrent.futures.CancelledError


def _raises_plainly(_: Message) -> object:
    raise KeyError("a plain listener's mistake")


def _hangs_plainly(_: Message) -> object:
    threading.Event().wait(HANG_S)
    return False


MISBEHAVIOUR: list[Callable[[Message], Awaitable[object]]] = [
    _raises, _refuses, _hangs, _raises_what_is_not_said, _cancels, _cancels_itself, _exits,
]  # fmt: skip
PLAIN_MISBEHAVIOUR: list[Callable[[Message], object]] = [
    _raises_plainly, lambda _: False, _hangs_plainly, _stops_iterating_plainly, _exits_plainly, _cancels_plainly,
]  # fmt: skip
NONSENSE: Final[list[object]] = [None, True, 7, "done", b"", [], object(), float("nan")]
"""What a listener may say of a message that it is done with."""


# Members.


class Ledger:
    """What was acknowledged to senders, as bits by the number of the message; groups have such bits of their own."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.groups: dict[str, bytearray] = {}
        self.overlaps: list[str] = []
        self._busy: set[tuple[str, str, int]] = set()
        self._guard = threading.Lock()

    def acknowledged(self, number: int) -> None:
        with self._guard:
            self._mark(self.sent, number)

    def done(self, group: str, message: Message) -> None:
        with self._guard:
            self._mark(self.groups.setdefault(group, bytearray()), int(message.body))

    def missing(self) -> dict[str, list[int]]:
        wanted = [number for number, is_sent in enumerate(self.sent) if is_sent]
        found = {
            group: [number for number in wanted if number >= len(done) or not done[number]]
            for group, done in self.groups.items()
        }
        return {group: numbers for group, numbers in found.items() if numbers}

    def enter(self, group: str, message: Message) -> tuple[str, str, int]:
        """Somebody works on the queue of an orderly group."""
        place = (group, message.broker, message.queue_id)
        if place in self._busy:
            self.overlaps.append(f"{group} works twice on queue {place[2]} of {place[1]}, at message {message.body!r}")
        self._busy.add(place)
        return place

    def leave(self, place: tuple[str, str, int]) -> None:
        self._busy.discard(place)

    @staticmethod
    def _mark(bits: bytearray, number: int) -> None:
        if number >= len(bits):
            bits.extend(bytes(number + 1 - len(bits)))
        bits[number] = 1


class Member(Protocol):
    async def start(self) -> None: ...
    async def close(self) -> None: ...


Make = Callable[["World"], Member]


class World:
    """What members are made of."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.chance = random.Random(seed)
        self.directory = directory
        self.ledger = Ledger()
        self.name_servers = ""
        self.numbers = itertools.count()  # of messages; threads take them too
        self.shared: Session | None = None
        self.misbehaves = 0.05

    def bad(self, message: Message) -> bool:
        return message.reconsume_times == 0 and self.chance.random() < self.misbehaves

    def session(self) -> dict[str, Any]:
        """Now one of its own, now the one of several, where the second member of a group is refused."""
        if self.shared is not None and self.chance.random() < 0.3:
            return {"session": self.shared}
        return {"name_servers": self.name_servers}


def push(group: str, *, behaves: bool = False, **options: Any) -> Make:
    def make(world: World) -> Member:
        async def listener(message: Message) -> object:
            if not behaves and world.bad(message):
                return await world.chance.choice(MISBEHAVIOUR)(message)
            if world.chance.random() < 0.1:
                await asyncio.sleep(world.chance.random() * 0.02)
            world.ledger.done(group, message)
            return world.chance.choice(NONSENSE)

        own = {"offsets_directory": world.directory / group} | options
        return _push(world, group, listener, world.session(), own)

    return make


def plain_push(group: str) -> Make:
    def make(world: World) -> Member:
        def listener(message: Message) -> object:
            if world.bad(message):
                return world.chance.choice(PLAIN_MISBEHAVIOUR)(message)
            world.ledger.done(group, message)
            return None

        return _push(world, group, listener, world.session(), {})

    return make


def orderly_push(group: str) -> Make:
    def make(world: World) -> Member:
        async def listener(message: Message) -> object:
            place = world.ledger.enter(group, message)
            try:
                await asyncio.sleep(world.chance.random() * 0.005)
                if world.bad(message):
                    return await world.chance.choice(MISBEHAVIOUR)(message)
                world.ledger.done(group, message)
                return world.chance.choice(NONSENSE)
            finally:
                world.ledger.leave(place)

        return _push(world, group, listener, world.session(), {"orderly": True, "suspend_s": 0.1})

    return make


def _push(
    world: World, group: str, listener: Callable[[Message], object], session: dict[str, Any], options: dict[str, Any]
) -> Member:
    consumer = PushConsumer(
        group=group,
        listener=listener,
        from_where="first",
        concurrency=8,
        consume_timeout_s=HANG_S,
        shutdown_timeout_s=SHUTDOWN_S,
        rebalance_interval_s=5.0,
        commit_interval_s=1.0,
        **session,
        **options,
    )
    consumer.subscribe(TOPIC)
    return consumer


class LiteMember:
    def __init__(self, world: World, group: str) -> None:
        self._world, self._group = world, group
        self._consumer = LitePullConsumer(
            world.name_servers, group, from_where="first", commit_interval_s=1.0, rebalance_interval_s=5.0
        )
        self._consumer.subscribe(TOPIC)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._consumer.start()
        self._task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        async for message in self._consumer:
            self._world.ledger.done(self._group, message)

    async def close(self) -> None:
        await self._consumer.close()
        if self._task is not None:
            await self._task  # iteration ends with the consumer


class TaskMember:
    """A consumer, and the task that works with it until it is cancelled."""

    def __init__(self, consumer: SimpleConsumer | PullConsumer, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._started, self._do = consumer, work
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._started.start()
        self._task = asyncio.create_task(self._do())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._started.close()


class SimpleMember(TaskMember):
    def __init__(self, world: World, group: str) -> None:
        self._world, self._group = world, group
        self._consumer = SimpleConsumer(world.name_servers, group, from_where="first", invisible_s=INVISIBLE_S)
        self._consumer.subscribe(TOPIC)
        super().__init__(self._consumer, self._work)

    async def _work(self) -> None:
        while True:
            try:
                for message in await self._consumer.receive(max_messages=32, wait_s=5):
                    if self._world.bad(message):
                        continue  # it comes again when its time is over
                    self._world.ledger.done(self._group, message)
                    await self._consumer.ack(message)
            except RocketMQError:
                await asyncio.sleep(0.1)


class PullMember(TaskMember):
    """Goes on where its group has committed, queue after queue."""

    def __init__(self, world: World, group: str) -> None:
        self._world, self._group = world, group
        self._consumer = PullConsumer(world.name_servers, group)
        super().__init__(self._consumer, self._work)

    async def _work(self) -> None:
        consumer = self._consumer
        while True:
            try:
                for queue in await consumer.queues(TOPIC):
                    pulled = await consumer.pull(queue, await consumer.committed(queue) or 0, wait_s=0.1)
                    for message in pulled.messages:
                        self._world.ledger.done(self._group, message)
                    await consumer.commit(queue, pulled.next_offset)
            except RocketMQError:
                await asyncio.sleep(0.1)


# Members that block. Each has a thread of its own beside that of all blocking clients.


class BlockingMember:
    """A blocking consumer, and what its thread does with it until it is closed."""

    def __init__(self, consumer: Any, work: Callable[[], None] | None = None) -> None:
        self._consumer = consumer
        self._thread = None if work is None else threading.Thread(target=work, name="blocking member")

    async def start(self) -> None:
        starting = asyncio.ensure_future(asyncio.to_thread(self._consumer.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])  # nobody cancels what a thread calls
            starting.exception()
            await asyncio.to_thread(self._consumer.close)
            raise
        if self._thread is not None:
            self._thread.start()

    async def close(self) -> None:
        await asyncio.to_thread(self._consumer.close)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)


def blocking_push(group: str) -> Make:
    def make(world: World) -> Member:
        def listener(message: Message) -> object:
            if world.bad(message):
                return world.chance.choice(PLAIN_MISBEHAVIOUR)(message)
            world.ledger.done(group, message)
            return None

        consumer = sync.PushConsumer(
            world.name_servers, group, listener=listener, from_where="first", concurrency=4, consume_timeout_s=HANG_S,
            shutdown_timeout_s=SHUTDOWN_S, rebalance_interval_s=5.0, commit_interval_s=1.0,
        )  # fmt: skip
        consumer.subscribe(TOPIC)
        return BlockingMember(consumer)

    return make


def blocking_lite(group: str) -> Make:
    def make(world: World) -> Member:
        consumer = sync.LitePullConsumer(
            world.name_servers, group, from_where="first", commit_interval_s=1.0, rebalance_interval_s=5.0
        )
        consumer.subscribe(TOPIC)

        def work() -> None:
            for message in consumer:
                world.ledger.done(group, message)

        return BlockingMember(consumer, work)

    return make


def blocking_single(group: str) -> Make:
    def make(world: World) -> Member:
        consumer = sync.SimpleConsumer(world.name_servers, group, from_where="first", invisible_s=INVISIBLE_S)
        consumer.subscribe(TOPIC)

        def work() -> None:
            while True:
                try:
                    for message in consumer:
                        if not world.bad(message):
                            world.ledger.done(group, message)
                            consumer.ack(message)
                    return
                except ClientClosed:
                    return
                except RocketMQError:
                    time.sleep(0.1)

        return BlockingMember(consumer, work)

    return make


KINDS: Final[dict[str, tuple[int, Make]]] = {
    # group -> how many members at most, and how one is made
    "crowd": (3, push("crowd")),
    "threads": (2, plain_push("threads")),
    "line": (3, orderly_push("line")),
    "pops": (2, push("pops", mode="pop", invisible_s=INVISIBLE_S)),
    "everyone": (1, push("everyone", model="broadcasting", behaves=True)),  # what fails there is not tried again
    "lite": (2, lambda world: LiteMember(world, "lite")),
    "single": (2, lambda world: SimpleMember(world, "single")),
    "pulls": (1, lambda world: PullMember(world, "pulls")),
    "blocking": (2, blocking_push("blocking")),
    "blocking-lite": (2, blocking_lite("blocking-lite")),
    "blocking-single": (1, blocking_single("blocking-single")),
}


async def send_until(world: World, over: asyncio.Event, interval_s: float = 0.01) -> None:
    """Numbered messages, by producers that live for a moment only, on a session that ends with the last of them."""
    session = Session(world.name_servers)

    async def send(count: int) -> None:
        try:
            async with Producer(group="senders", session=session, timeout_s=5.0, retries=5) as producer:
                for own in itertools.islice(world.numbers, count):
                    try:
                        await producer.send(TOPIC, b"%d" % own)
                    except RocketMQError:
                        continue  # nothing is promised
                    world.ledger.acknowledged(own)
                    await asyncio.sleep(interval_s)
        except RocketMQError:
            await asyncio.sleep(interval_s)

    async def send_on() -> None:
        while not over.is_set():
            await send(world.chance.randrange(1, 40))

    async def send_blocking() -> None:
        while not over.is_set():
            await asyncio.to_thread(send_soon, world, world.chance.randrange(1, 40))
            await asyncio.sleep(20 * interval_s)  # what it takes the others to send as many

    await asyncio.gather(send_on(), send_on(), send_blocking())


def send_soon(world: World, count: int) -> None:
    """The same by a blocking producer: as many at once."""
    sent: list[tuple[int, concurrent.futures.Future[Receipt]]] = []
    try:
        with sync.Producer(world.name_servers, group="blocking-senders", timeout_s=5.0, retries=5) as producer:
            for own in itertools.islice(world.numbers, count):
                sent.append((own, producer.send_soon(TOPIC, b"%d" % own)))
            producer.flush()
    except RocketMQError:
        pass  # each message tells by itself
    for own, receipt in sent:
        if receipt.exception(timeout=0) is None:
            world.ledger.acknowledged(own)
