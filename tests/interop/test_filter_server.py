"""Apache's Java clients through Skylark's filter server: 4.9.8 uploads the source of a Python class and pulls through
it; 5.5.0, which lost the upload, pulls through a class that another member has uploaded.

Apache's own broker has no filter servers any more, so there is nothing to compare with.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from drivers import Driver, Session, bodies, java_driver
from servers import GET_ROUTEINFO_BY_TOPIC, POLL_S, Process, Server, request

from client.inbox import Inbox, eventually
from skylark.client.producer import Producer
from skylark.client.push_consumer import PushConsumer

NAME = "shop.Expensive"
SOURCE = '''
class Expensive:
    """Not even SQL could say this."""

    def match(self, message):
        return sum(map(int, message.properties["prices"].split("+"))) > 10
'''
ENDLESS = SOURCE.replace("return", "while True: pass\n        return")
PRICES = ["1+2", "5+6", "4+4", "9+9"]


@pytest.fixture(scope="module")
def filter_server(server_kind: str, server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    if server_kind != "skylark":
        pytest.skip("Apache's broker 5.5.0 knows no filter servers")
    directory = tmp_path_factory.mktemp("filtersrv")
    command = Path(sys.executable).with_name("skylark")
    process = Process(
        [str(command), "filtersrv", "-b", server.broker_addr, "--host", "127.0.0.1", "--upload"],
        log=directory / "filtersrv.log",
        ready=r"ready filtersrv=(\S+)",
        cwd=directory,
    )
    process.wait_ready()
    yield process
    process.stop()


@pytest.fixture(scope="module")
def java_old(java_parts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    driver = java_driver("4.9.8", tmp_path_factory.mktemp("java-old"))
    yield driver
    driver.close()


@pytest.fixture
def old(java_old: Driver, server: Server, filter_server: Process) -> Iterator[Session]:
    session = Session(java_old, server.namesrv_addr)
    yield session
    session.close()


def make_topic(session: Session, group: str, topic: str, queues: int = 1) -> None:
    session.producer(group).create_topic(topic, queues)
    while b'filterServerTable":{}' in request(session.namesrv, GET_ROUTEINFO_BY_TOPIC, {"topic": topic})[1]:
        time.sleep(POLL_S)


def send_prices(session: Session, group: str, topic: str) -> None:
    producer = session.producer(f"{group}_sends")
    for prices in PRICES:
        producer.send(topic, prices, property={"prices": prices})


def test_java_uploads_a_python_class(old: Session, topic: str, group: str) -> None:
    make_topic(old, group, topic)
    consumer = old.consumer(group, topic, filterClass=NAME, source=SOURCE, from_="first")
    send_prices(old, group, topic)
    assert sorted(bodies(consumer.take(2))) == ["5+6", "9+9"]
    send_prices(old, group, topic)
    assert sorted(bodies(consumer.take(2))) == ["5+6", "9+9"]
    assert consumer.seen() == []


def test_a_class_that_never_ends_stops_only_its_own_consumers(
    old: Session, server: Server, topic: str, group: str
) -> None:
    async def run() -> None:
        make_topic(old, group, topic)
        stuck = old.consumer(f"{group}_stuck", topic, filterClass=NAME, source=ENDLESS, from_="first")
        inbox = Inbox()
        consumer = PushConsumer(server.namesrv_addr, group, listener=inbox, from_where="first")
        consumer.subscribe(topic, filter_class=(NAME, SOURCE))
        async with consumer:
            await asyncio.to_thread(send_prices, old, group, topic)
            await inbox.wait(2)
            assert sorted(inbox.bodies) == [b"5+6", b"9+9"]
        assert stuck.seen() == []
        # Nothing is lost: when the class is put right, its consumers get everything.
        await asyncio.to_thread(stuck.stop)
        repaired = old.consumer(f"{group}_stuck", topic, filterClass=NAME, source=SOURCE, from_="first")
        assert sorted(bodies(await asyncio.to_thread(repaired.take, 2))) == ["5+6", "9+9"]

    asyncio.run(run())


def test_the_newest_java_pulls_through_what_python_uploaded(
    old: Session, java_latest: Driver, server: Server, topic: str, group: str
) -> None:
    async def run() -> None:
        make_topic(old, group, topic, 2)
        inbox = Inbox()
        ours = PushConsumer(server.namesrv_addr, group, listener=inbox, from_where="first")
        ours.subscribe(topic, filter_class=(NAME, SOURCE))
        session = Session(java_latest, server.namesrv_addr)
        async with ours, Producer(server.namesrv_addr) as producer:
            theirs = session.consumer(group, topic, filterClass=NAME, source=SOURCE, from_="first")
            await asyncio.to_thread(theirs.await_queues, 1)
            await eventually(lambda: sum(queue.topic == topic for queue in ours.queues) == 1)
            for queue in (await producer.session.routes.get(topic)).write_queues:
                for prices in PRICES * 3:
                    await producer.send(topic, prices.encode(), properties={"prices": prices}, queue=queue)
            got: list[str] = []

            def all_came() -> bool:
                got.extend(bodies(theirs.seen()))
                return len(got) + len(inbox.messages) >= 12

            await eventually(all_came)
            assert got
            assert inbox.messages
            assert sorted(got + [body.decode() for body in inbox.bodies]) == ["5+6"] * 6 + ["9+9"] * 6
        session.close()

    asyncio.run(run())
