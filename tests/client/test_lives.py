"""Starts, ends and cancellations at the same time: nothing is left over, and nobody else is harmed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from client.inbox import DEADLINE_S, eventually
from client.scripted import ScriptedBroker, ScriptedCluster, scripted_cluster
from skylark.client.errors import ClientClosed, OtherEventLoop, RocketMQError
from skylark.client.lite_pull_consumer import LitePullConsumer
from skylark.client.message import Message
from skylark.client.producer import Producer
from skylark.client.push_consumer import PushConsumer
from skylark.client.session import Session
from skylark.client.simple_consumer import SimpleConsumer
from skylark.client.transactions import TransactionProducer
from skylark.net.connection import Connection
from skylark.testing import LocalCluster
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame


async def ignore(_: Message) -> None:
    """A listener."""


def push(session: Session) -> PushConsumer:
    consumer = PushConsumer(session=session, group="g", listener=ignore)
    consumer.subscribe("orders")
    return consumer


def lite(session: Session) -> LitePullConsumer:
    consumer = LitePullConsumer(session=session, group="g")
    consumer.subscribe("orders")
    return consumer


def simple(session: Session) -> SimpleConsumer:
    consumer = SimpleConsumer(session=session, group="g")
    consumer.subscribe("orders")
    return consumer


def producer(session: Session) -> Producer:
    return Producer(session=session, group="g")


KINDS: dict[str, Callable[[Session], Any]] = {"push": push, "lite": lite, "simple": simple, "producer": producer}


class Slow:
    """A broker's answers to one kind of request, which it keeps until it may give them."""

    def __init__(self, broker: ScriptedBroker, code: int) -> None:
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        broker._handlers[code] = self._answer

    async def _answer(self, request: Frame, _: Connection) -> Frame:
        self.asked.set()
        await self.may_answer.wait()
        return request.reply()


@asynccontextmanager
async def shared_session() -> AsyncIterator[tuple[ScriptedCluster, ScriptedBroker, Session]]:
    """It has a connection to its broker already."""
    async with (
        scripted_cluster("a", orders=1) as cluster,
        Session(cluster.namesrv) as session,
        Producer(session=session, group="first") as first,
    ):
        await first.send("orders", b"x")
        yield cluster, cluster.brokers[0], session


def run(main: Any) -> None:
    async def within() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await main()

    asyncio.run(within())


@pytest.mark.parametrize("kind", ["push", "lite", "simple"])
def test_who_leaves_does_not_take_the_next_member_along(kind: str) -> None:
    """The start of one is cancelled; while it leaves, another of the same group enters on the same session."""

    async def main() -> None:
        async with shared_session() as (_, broker, session):
            slow_beats = Slow(broker, RequestCode.HEART_BEAT)
            starting = asyncio.create_task(KINDS[kind](session).start())
            await slow_beats.asked.wait()
            slow_leave = Slow(broker, RequestCode.UNREGISTER_CLIENT)
            starting.cancel()
            await slow_leave.asked.wait()
            slow_beats.may_answer.set()
            newcomer = push(session)
            entering = asyncio.create_task(newcomer.start())
            await eventually(lambda: session._consumers.get("g") is not None)
            slow_leave.may_answer.set()
            await asyncio.wait([starting])
            assert session._consumers.get("g") is newcomer._member
            entering.cancel()
            await asyncio.wait([entering])

    run(main)


@pytest.mark.parametrize("waits_for", ["route", "heartbeat"])
@pytest.mark.parametrize("kind", ["push", "lite", "simple"])
def test_closed_while_it_starts_it_leaves_nothing_behind(kind: str, waits_for: str) -> None:
    async def main() -> None:
        async with shared_session() as (cluster, broker, session):
            before, users = asyncio.all_tasks(), session._users
            consumer = KINDS[kind](session)
            if waits_for == "route":
                cluster.gate = may_answer = asyncio.Event()
                session.routes._routes.clear()
                cluster.queries.clear()
                starting = asyncio.create_task(consumer.start())
                await eventually(lambda: bool(cluster.queries))
            else:
                slow = Slow(broker, RequestCode.HEART_BEAT)
                may_answer = slow.may_answer
                starting = asyncio.create_task(consumer.start())
                await slow.asked.wait()
            closing = asyncio.create_task(consumer.close())
            await asyncio.sleep(0)
            may_answer.set()
            await closing
            with pytest.raises(ClientClosed):
                await starting
            await eventually(lambda: asyncio.all_tasks() <= before)
            assert "g" not in session._consumers
            assert session._users == users

    run(main)


def test_a_producer_that_is_closed_while_it_starts_has_not_joined() -> None:
    async def main() -> None:
        async with shared_session() as (_, broker, session):
            users = session._users
            slow = Slow(broker, RequestCode.HEART_BEAT)
            closed = producer(session)
            starting = asyncio.create_task(closed.start())
            await slow.asked.wait()
            await closed.close()
            slow.may_answer.set()
            with pytest.raises(ClientClosed):
                await starting
            assert "g" not in session._producers
            assert session._users == users

    run(main)


@pytest.mark.parametrize("kind", KINDS)
def test_who_gives_up_waiting_for_the_end_does_not_stop_it(kind: str) -> None:
    async def main() -> None:
        async with shared_session() as (_, broker, session):
            users = session._users
            client = KINDS[kind](session)
            await client.start()
            slow = Slow(broker, RequestCode.UNREGISTER_CLIENT)
            closing = asyncio.create_task(client.close())
            await slow.asked.wait()
            closing.cancel()
            await asyncio.wait([closing])
            slow.may_answer.set()
            await client.close()
            assert "g" not in session._consumers
            assert session._users == users

    run(main)


def test_a_producer_without_a_checker_leaves_that_of_another_alone() -> None:
    async def main() -> None:
        async with shared_session() as (_, broker, session):
            options: dict[str, Any] = {"session": session}
            async with TransactionProducer(None, "shop", checker=lambda _: True, **options):
                checker = session._checkers["shop"]
                slow = Slow(broker, RequestCode.HEART_BEAT)
                second = TransactionProducer(None, "shop", checker=None, **options)
                starting = asyncio.create_task(second.start())
                await slow.asked.wait()
                starting.cancel()
                await asyncio.wait([starting])
                slow.may_answer.set()
                assert session._checkers["shop"] == checker

    run(main)


def test_a_transaction_producer_whose_start_is_cancelled_has_not_joined() -> None:
    async def main() -> None:
        async with scripted_cluster("a", orders=1) as cluster, Session(cluster.namesrv) as session:
            cluster.gate = asyncio.Event()
            one = TransactionProducer(None, "shop", checker=lambda _: True, topics=["orders"], session=session)
            starting = asyncio.create_task(one.start())
            await eventually(lambda: bool(cluster.queries))
            starting.cancel()
            await asyncio.wait([starting])
            cluster.gate.set()
            assert (session._checkers, session._producers, session._users) == ({}, {}, 1)
            async with TransactionProducer(None, "shop", checker=lambda _: True, topics=["orders"], session=session):
                pass

    run(main)


def test_who_enters_a_session_does_not_share_the_request_of_who_left() -> None:
    async def main() -> None:
        async with scripted_cluster("a", orders=1) as cluster:
            session = Session(cluster.namesrv)
            await session.acquire()
            cluster.gate = asyncio.Event()
            asking = asyncio.create_task(session.routes.get("orders"))
            await eventually(lambda: bool(cluster.queries))
            leaving = asyncio.create_task(session.release())
            await asyncio.sleep(0)
            async with session:
                cluster.gate.set()
                assert (await session.routes.get("orders")).write_queues
            await asyncio.wait([leaving, asking])
            assert asking.exception() is not None

    run(main)


@pytest.mark.parametrize("make", [lite, simple])
def test_a_consumer_on_another_event_loop_is_told(
    make: Callable[[Session], Any], skylark_cluster: LocalCluster
) -> None:
    async def start() -> Any:
        async with Producer(skylark_cluster.name_servers) as sender:
            await sender.send("orders", b"x")
        consumer = make(Session(skylark_cluster.name_servers))
        await consumer.start()
        return consumer

    async def ask(consumer: Any) -> None:
        with pytest.raises(OtherEventLoop):
            await (consumer.poll() if isinstance(consumer, LitePullConsumer) else consumer.receive())
        with pytest.raises(OtherEventLoop):
            await anext(consumer)
        with pytest.raises(OtherEventLoop):
            await consumer.close()

    loop = asyncio.new_event_loop()
    consumer = loop.run_until_complete(start())
    asyncio.run(ask(consumer))
    loop.run_until_complete(consumer.close())
    loop.close()


def test_one_client_id_at_one_address_server_is_one_sessions() -> None:
    async def main() -> None:
        first, second = (Session("http://names:8080/rocketmq/nsaddr", instance="i") for _ in range(2))
        elsewhere = Session("http://others:8080/rocketmq/nsaddr", instance="i")
        async with first:
            with pytest.raises(RocketMQError, match="runs in this process already"):
                await second.acquire()
            async with elsewhere:
                pass

    run(main)
