"""Groups of Apache's Java client and of the Python client: they share queues, hand them over and know each other's
offsets.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from typing import Any

import pytest
from drivers import Driver, Event, Session, bodies, numbered
from drivers import PushConsumer as JavaConsumer
from servers import Server

from skylark.client.message import Message, MessageQueue
from skylark.client.offsets import RemoteOffsets
from skylark.client.producer import Producer
from skylark.client.push_consumer import PushConsumer
from skylark.client.session import Session as ClientSession

QUEUES = 8
CHANGES = 20
DEADLINE_S = 180.0


class Deliveries:
    """What all members got: (time, queue, number), in the order of the machine's clock."""

    def __init__(self) -> None:
        self._python: list[tuple[int, int, int]] = []
        self._java: list[JavaConsumer] = []
        self._from_java: list[tuple[int, int, int]] = []

    async def listen(self, message: Message) -> None:
        self._python.append((time.time_ns() // 1_000_000, message.queue_id, int(message.body)))

    def watch(self, consumer: JavaConsumer) -> None:
        self._java.append(consumer)

    def _collect(self) -> None:
        for consumer in self._java:
            self._from_java += [(event["at"], event["queue"], int(event["body"])) for event in consumer.seen()]

    def all(self) -> list[tuple[int, int, int]]:
        self._collect()
        return sorted(self._python + self._from_java)

    def numbers(self) -> set[int]:
        return {number for _, _, number in self.all()}

    def shares(self) -> tuple[int, int]:
        """How many the Python members got, and how many the Java members."""
        self._collect()
        return len(self._python), len(self._from_java)


async def produce(producer: Producer, queues: list[MessageQueue], wanted: asyncio.Event) -> int:
    """Sends numbers, one queue after the other, until nobody wants more; how many there were."""
    for number in itertools.count():
        if not wanted.is_set():
            return number
        queue = queues[number % len(queues)]
        await producer.send(queue.topic, str(number).encode(), queue=queue, timeout_s=DEADLINE_S)
        await asyncio.sleep(0.01)
    raise AssertionError("unreachable")


async def eventually(done: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not done():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


class Members:
    """Those of both languages that are in the group now."""

    def __init__(self, java: Session, namesrv: str, group: str, topic: str, orderly: bool, got: Deliveries) -> None:
        self._java_session = java
        self._namesrv = namesrv
        self._group = group
        self._topic = topic
        self._orderly = orderly
        self._got = got
        self.python: list[PushConsumer] = []
        self.java: list[JavaConsumer] = []

    async def join_python(self) -> None:
        consumer = PushConsumer(
            self._namesrv,
            self._group,
            listener=self._got.listen,
            orderly=self._orderly,
            from_where="first",
            rebalance_interval_s=2.0,
        )
        consumer.subscribe(self._topic)
        await consumer.start()
        self.python.append(consumer)

    async def join_java(self) -> None:
        mode = "orderly" if self._orderly else "concurrent"
        joined = await asyncio.to_thread(self._java_session.consumer, self._group, self._topic, mode=mode)
        self._got.watch(joined)
        self.java.append(joined)

    async def change(self, choice: random.Random) -> None:
        """One member comes or goes; each language keeps between one and three."""
        is_python = choice.random() < 0.5
        members: list[Any] = self.python if is_python else self.java
        leaves = len(members) > 1 and (len(members) == 3 or choice.random() < 0.5)
        if not leaves:
            await (self.join_python() if is_python else self.join_java())
        elif is_python:
            await self.python.pop(choice.randrange(len(self.python))).close()
        else:
            await asyncio.to_thread(self.java.pop(choice.randrange(len(self.java))).stop)

    async def leave(self) -> None:
        for consumer in self.python:
            await consumer.close()
        for joined in self.java:
            await asyncio.to_thread(joined.stop)


async def first_deliveries_in_order(got: Deliveries) -> None:
    queues: dict[int, list[int]] = defaultdict(list)
    seen: set[int] = set()
    for _, queue, number in got.all():
        if number not in seen:
            seen.add(number)
            queues[queue].append(number)
    for queue, numbers in queues.items():
        assert numbers == sorted(numbers), f"queue {queue} was overtaken"


@pytest.mark.parametrize("orderly", [False, True], ids=["concurrent", "orderly"])
def test_members_of_both_languages_come_and_go(
    java_latest: Driver, server: Server, topic: str, group: str, orderly: bool
) -> None:
    """Nothing is lost and nothing overtaken while the queues move, 20 times, under a steady stream of messages."""
    java = Session(java_latest, server.namesrv_addr)
    java.producer(f"{group}_p").create_topic(topic, QUEUES)
    choice = random.Random(7)

    async def main() -> None:
        got = Deliveries()
        members = Members(java, server.namesrv_addr, group, topic, orderly, got)
        wanted = asyncio.Event()
        wanted.set()
        async with ClientSession(server.namesrv_addr) as session, Producer(group=group, session=session) as producer:
            queues = (await session.routes.get(topic)).write_queues
            assert len(queues) == QUEUES
            await members.join_java()
            await members.join_python()
            sending = asyncio.create_task(produce(producer, queues, wanted))
            for _ in range(CHANGES):
                await members.change(choice)
                before = got.shares()
                # Both languages must go on consuming before the next change.
                await eventually(lambda before=before: all(n > b for n, b in zip(got.shares(), before, strict=True)))
            wanted.clear()
            count = await sending
            await eventually(lambda: len(got.numbers()) == count)
            if orderly:
                await first_deliveries_in_order(got)
            offsets = RemoteOffsets(session, group)
            wanted_offsets = [len(range(number, count, QUEUES)) for number in range(QUEUES)]
            # A Java member that leaves while a listener returns does not commit what that listener got.
            async with asyncio.timeout(DEADLINE_S):
                while [await offsets.fetch(queue) for queue in queues] != wanted_offsets:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            await members.leave()
            assert [await offsets.fetch(queue) for queue in queues] == wanted_offsets

    asyncio.run(main())
    java.close()


def test_the_share_of_each_is_what_the_other_leaves(
    java_latest: Driver, server: Server, topic: str, group: str
) -> None:
    java = Session(java_latest, server.namesrv_addr)
    java.producer(f"{group}_p").create_topic(topic, QUEUES)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            got = Deliveries()
            members = Members(java, server.namesrv_addr, group, topic, False, got)
            stack.push_async_callback(members.leave)
            for size in range(1, 5):
                await (members.join_python() if size % 2 else members.join_java())

                def shares() -> list[int]:
                    python = [
                        queue.queue_id for each in members.python for queue in each.queues if queue.topic == topic
                    ]
                    return sorted(python + [queue["queue"] for each in members.java for queue in held(each, topic)])

                await eventually(lambda: shares() == list(range(QUEUES)))

    asyncio.run(main())
    java.close()


def held(consumer: JavaConsumer, topic: str) -> list[Any]:
    queues: list[Any] = consumer.call("consumer.queues", topic=topic)["queues"]
    return queues


@pytest.mark.parametrize("orderly", [False, True], ids=["concurrent", "orderly"])
def test_offsets_of_one_are_picked_up_by_the_other(
    java_latest: Driver, server: Server, topic: str, group: str, orderly: bool
) -> None:
    java = Session(java_latest, server.namesrv_addr)
    producer = java.producer(f"{group}_p")
    producer.create_topic(topic, QUEUES)
    mode = "orderly" if orderly else "concurrent"
    got: list[str] = []

    async def listen(message: Message) -> None:
        got.append(message.body.decode())

    async def python_turn(count: int) -> None:
        consumer = PushConsumer(
            server.namesrv_addr, group, listener=listen, orderly=orderly, from_where="first", rebalance_interval_s=1.0
        )
        consumer.subscribe(topic)
        async with consumer:
            await eventually(lambda: len(got) >= count)

    def send(prefix: str) -> list[Event]:
        return producer.send(topic, prefix, count=40, mode="ordered", shards=QUEUES)

    sent = send("first")
    consumer = java.consumer(group, topic, mode=mode)
    assert sorted(bodies(consumer.take(40))) == sorted(numbered("first", 40))
    consumer.commit(sent, group)
    consumer.stop()

    send("second")
    asyncio.run(python_turn(40))
    assert sorted(got) == sorted(numbered("second", 40))

    send("third")
    consumer = java.consumer(group, topic, mode=mode)
    assert sorted(bodies(consumer.take(40))) == sorted(numbered("third", 40))
    assert consumer.seen() == []
    java.close()
