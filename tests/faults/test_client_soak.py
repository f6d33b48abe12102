"""A soak of the client: everything that happens to members over weeks, within a minute or an hour.

Members of all kinds come and go, some of them while they start. Brokers and name servers restart on other ports.
Listeners misbehave. In the end every message that was acknowledged was consumed by every group, orderly queues were
never worked on by two at a time, and nothing is left over: no task, no thread, no file descriptor, no object of a
client, and no memory that grows.

`SKYLARK_SOAK_S` says how long it lasts (`make soak` for an hour), `SKYLARK_SOAK_SEED` which one it is.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from faults.soak import HANG_S, KINDS, TOPIC, BrokerHome, Home, Member, NameServerHome, World, send_until
from patience import DEADLINE_S
from skylark.client import session as session_module
from skylark.client import sync
from skylark.client.assignment import Assignment
from skylark.client.errors import RocketMQError
from skylark.client.lite_pull_consumer import LitePullConsumer
from skylark.client.membership import Membership
from skylark.client.producer import Producer
from skylark.client.pull_consumer import PullConsumer
from skylark.client.pulling import PullLoop
from skylark.client.push_consumer import PushConsumer
from skylark.client.session import Session
from skylark.client.simple_consumer import SimpleConsumer

SOAK_S = float(os.environ.get("SKYLARK_SOAK_S", "25"))
SEED = int(os.environ.get("SKYLARK_SOAK_SEED") or random.randrange(1 << 31))
MAX_GROWTH_BYTES = 24 << 20
LASTING = (
    Session, Membership, Assignment, PullLoop, Producer, PushConsumer, LitePullConsumer, SimpleConsumer, PullConsumer,
)  # fmt: skip
BROKERS = 2


class Crowd:
    """The members of one group, which come and go."""

    def __init__(self, world: World, group: str) -> None:
        self._world = world
        self._most, self._make = KINDS[group]
        self._members: list[Member] = []
        world.ledger.groups[group] = bytearray()

    async def churn(self, over: asyncio.Event) -> None:
        chance = self._world.chance
        while not over.is_set():
            if len(self._members) < self._most and chance.random() < 0.6:
                await self._enter()
            elif self._members:
                await self._members.pop(chance.randrange(len(self._members))).close()
            await asyncio.sleep(chance.random() * 3)

    async def _enter(self) -> None:
        member = self._make(self._world)
        starting = asyncio.create_task(member.start())
        if self._world.chance.random() < 0.2:
            await asyncio.wait([starting], timeout=self._world.chance.random() * 0.05)
            starting.cancel()
        try:
            await starting
        except (RocketMQError, asyncio.CancelledError):
            return
        self._members.append(member)

    async def settle(self) -> None:
        while not self._members:
            await self._enter()

    async def close(self) -> None:
        while self._members:
            await self._members.pop().close()


async def restart(homes: list[Home], chance: random.Random, over: asyncio.Event, every_s: float) -> None:
    """One after the other, away for a moment."""
    turn = 0
    while not over.is_set():
        await asyncio.sleep(every_s * (0.5 + chance.random()))
        home, turn = homes[turn % len(homes)], turn + 1
        await home.stop()
        try:
            await asyncio.sleep(chance.random())
        finally:
            await home.start()


async def soak(directory: Path) -> None:
    world = World(SEED, directory)
    names = [NameServerHome(directory / f"names{number}") for number in range(2)]
    for each in names:
        await each.open()
    world.name_servers = ";".join(each.address for each in names)
    brokers = [BrokerHome(f"broker-{number}", directory, world.name_servers) for number in range(BROKERS)]
    for broker in brokers:
        await broker.start()
    world.shared = Session(world.name_servers)
    crowds = [Crowd(world, group) for group in KINDS]
    over = asyncio.Event()
    async with world.shared:
        await until_there(world.shared)
        work = [
            send_until(world, over),
            restart([*brokers], world.chance, over, 5.0),
            restart([*names], world.chance, over, 12.0),
            *(crowd.churn(over) for crowd in crowds),
        ]
        tasks = [asyncio.create_task(each) for each in work]
        sizes = await watch(tasks)
        over.set()
        await asyncio.gather(*tasks)
        world.misbehaves = 0
        for crowd in crowds:
            await crowd.settle()
        await until_consumed(world)
        for crowd in crowds:
            await crowd.close()
    assert not world.ledger.overlaps, f"SKYLARK_SOAK_SEED={SEED} shows it"
    assert sizes[-1] - sizes[0] < MAX_GROWTH_BYTES, sizes
    for home in (*brokers, *names):
        await home.close()
    world.shared = None


async def until_there(session: Session) -> None:
    """The topic is made by a first message, so that each group begins with the first of those that count."""
    async with asyncio.timeout(DEADLINE_S), Producer(group="first", session=session) as producer:
        while len({queue.broker_name for queue in await producer.queues(TOPIC)}) < BROKERS:
            await producer.send(TOPIC, b"0")
            await session.routes.get(TOPIC, refresh=True)


async def watch(tasks: list[asyncio.Task[None]]) -> list[int]:
    """The memory, at the end of each quarter but the first; a part of the soak that fails ends it."""
    sizes = []
    for quarter in range(4):
        done, _ = await asyncio.wait(tasks, timeout=SOAK_S / 4, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if quarter:
            gc.collect()
            sizes.append(own_bytes())
    return sizes


async def until_consumed(world: World) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S / 2):
            while world.ledger.missing():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    except TimeoutError:
        missing = {group: numbers[:20] for group, numbers in world.ledger.missing().items()}
        pytest.fail(f"of {sum(world.ledger.sent)} messages these were not consumed: {missing}; seed {SEED}")


def own_bytes() -> int:
    """Memory of this process that is no file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def clients_left() -> Counter[str]:
    """How many objects of each kind there are that a client has as long as it lives."""
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects() if isinstance(each, LASTING))


def files_open() -> Counter[str]:
    """What is behind the open descriptors, by kind."""
    found: Counter[str] = Counter()
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the look itself
            found[str(each.readlink()).partition("[")[0]] += 1
    del found["/dev/null"]  # libuv has one in reserve, from its first connection on
    return found


class LastLines(logging.Handler):
    """Of the log; pytest would keep all of it, which is memory that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=1000)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def text_record(*args: Any, **options: Any) -> logging.LogRecord:
    """What pytest keeps of the log must not keep what was spoken of there."""
    record = logging.LogRecord(*args, **options)
    record.msg, record.args = record.getMessage(), None
    if record.exc_info:
        record.exc_text, record.exc_info = logging.Formatter().formatException(record.exc_info), None
    return record


@pytest.fixture
def short_log() -> Iterator[None]:
    """What fails shows the last lines."""
    logger, handler = logging.getLogger("skylark"), LastLines()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    make = logging.getLogRecordFactory()
    logging.setLogRecordFactory(text_record)
    logger.addHandler(handler)
    logger.propagate = False
    yield
    logger.propagate = True
    logger.removeHandler(handler)
    logging.setLogRecordFactory(make)
    print(*handler.lines, sep="\n")


@pytest.mark.usefixtures("short_log")
@pytest.mark.timeout(SOAK_S + 2 * DEADLINE_S)
def test_members_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A name server that was just started knows a part of the brokers, and what it says counts until the next look.
    monkeypatch.setattr(session_module, "ROUTE_INTERVAL_S", 2.0)
    sync._background()  # lives as long as the process
    clients, threads, files = clients_left(), set(threading.enumerate()), files_open()

    async def main() -> None:
        await soak(tmp_path)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            pytest.fail(f"a task is left over: {task}; seed {SEED}")

    asyncio.run(main())
    for thread in set(threading.enumerate()) - threads:
        thread.join(2 * HANG_S)
        assert not thread.is_alive(), f"a thread is left over: {thread}; seed {SEED}"
    assert clients_left() - clients == Counter()
    assert files_open() - files == Counter(), f"seed {SEED}"
