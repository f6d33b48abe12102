"""Name servers that hang, go silent, come back and disagree, and brokers that change: the routes are right again with
the next registration, and nobody waits for a name server that does not answer."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from broker.live import Live, live_broker
from broker.routed import (
    NEVER_S,
    SOON_S,
    broker_at,
    is_routed,
    name_server,
    port_of,
    route,
    until,
    until_gone,
    until_perm,
    until_routed,
)
from client.inbox import eventually
from patience import DEADLINE_S
from relay import relay
from skylark.broker import registration as module
from skylark.client.producer import Producer
from skylark.client.session import Session
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.tables import PERM_WRITE


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is given up because the machine is busy."""
    monkeypatch.setattr(module, "_QUESTION_S", NEVER_S)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection of long ago is found out soon."""
    monkeypatch.setattr(module, "_QUESTION_S", SOON_S)


# Name servers that do not answer.


@pytest.mark.usefixtures("patient")
def test_one_that_hangs_holds_up_neither_start_nor_sends_nor_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with name_server(tmp_path) as healthy, relay(healthy) as hung:
            hung.pause()
            monkeypatch.setattr(module, "MAX_WAIT_S", SOON_S)
            async with broker_at(tmp_path, hung.address, healthy) as broker:
                warning = f"name server {hung.address} has not answered for 0.05 s: nobody waits until it does"
                assert warning in caplog.messages
                await until(lambda: answers(broker, 1))
                # It has let the start wait, and nobody waits for it any more.
                monkeypatch.setattr(module, "MAX_WAIT_S", NEVER_S)
                await broker.send("Fresh")
                assert await is_routed(healthy, "Fresh"), "when the first message is acknowledged"

    asyncio.run(run())


@pytest.mark.usefixtures("patient")
def test_one_that_hangs_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with (
            name_server(tmp_path) as healthy,
            name_server(tmp_path) as other,
            relay(other) as between,
            broker_at(tmp_path, between.address, healthy) as broker,
        ):
            between.pause()
            monkeypatch.setattr(module, "MAX_WAIT_S", SOON_S)
            await broker.send("First")
            assert not await answers(broker, 0)
            await until(lambda: answers(broker, 1))
            monkeypatch.setattr(module, "MAX_WAIT_S", NEVER_S)
            await broker.send("Fresh")
            assert await is_routed(healthy, "Fresh")
            assert not await is_routed(other, "Fresh")
            between.resume()
            await until_routed(other, "Fresh")
            await until(lambda: answers(broker, 0))
            await broker.send("Later")
            assert await is_routed(other, "Later"), "it is waited for as before"

    asyncio.run(run())


async def answers(broker: Live, index: int) -> bool:
    """Whether the broker thinks so of one of its name servers."""
    assert broker._broker is not None
    return not broker._broker._registration._links[index].is_slow


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("force", [True, False])
def test_a_connection_that_leads_nowhere_is_replaced(tmp_path: Path, force: bool) -> None:
    """The name server has seen it end, and the broker was not told."""

    async def run() -> None:
        async with (
            name_server(tmp_path) as server,
            relay(server) as between,
            broker_at(tmp_path, between.address, force_register=force),
        ):
            between.cut()
            await eventually(lambda: between.dials > 1)
            await until_routed(server)

    asyncio.run(run())


@pytest.mark.usefixtures("impatient")
def test_one_that_comes_back_on_the_same_address(tmp_path: Path) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            async with name_server(tmp_path) as server:
                broker = await stack.enter_async_context(broker_at(tmp_path, server))
                await broker.send("Fresh")
            async with name_server(tmp_path, port_of(server)):
                await until_routed(server, "Fresh")
                await broker.stop()
                await until_gone(server)

    asyncio.run(run())


@pytest.mark.parametrize("force", [True, False])
def test_name_servers_that_disagree_agree_again(tmp_path: Path, force: bool) -> None:
    async def run() -> None:
        async with (
            name_server(tmp_path) as one,
            name_server(tmp_path) as other,
            broker_at(tmp_path, one, other, force_register=force) as broker,
        ):
            fields = {
                "brokerName": "broker-a",
                "brokerAddr": broker.address,
                "clusterName": "DefaultCluster",
                "brokerId": "0",
            }
            forget = Frame(RequestCode.UNREGISTER_BROKER, fields)
            await broker.pool.request(other, forget, DEADLINE_S)
            await until_routed(other)
            assert await is_routed(one)

    asyncio.run(run())


# Brokers that change.


def test_a_broker_drains_and_fills_again(tmp_path: Path) -> None:
    """As operators do it: mqadmin updateBrokerConfig -k brokerPermission -v 4."""

    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            for perm in (4, 6, 2, 0, 6):
                answer = await broker.ask(RequestCode.UPDATE_BROKER_CONFIG, f"brokerPermission={perm}".encode())
                assert answer.code == ResponseCode.SUCCESS
                await until_perm(broker.namesrv, perm)

    asyncio.run(run())


def test_producers_leave_a_broker_that_drains(tmp_path: Path) -> None:
    async def run() -> None:
        async with (
            name_server(tmp_path) as server,
            broker_at(tmp_path / "a", server) as drained,
            broker_at(tmp_path / "b", server, broker_name="broker-b") as other,
            Session(server, request_timeout_s=DEADLINE_S) as session,
            Producer(session=session, timeout_s=DEADLINE_S) as producer,
        ):
            for broker in (drained, other):
                await broker.send("Orders")
            await until(lambda: has_brokers(server, 2))
            used = {(await producer.send("Orders", b"x")).queue.broker_name for _ in range(8)}
            assert used == {"broker-a", "broker-b"}
            await drained.ask(RequestCode.UPDATE_BROKER_CONFIG, b"brokerPermission=4")
            await until(lambda: has_brokers(server, 1))
            await session.routes.refresh()  # as every 30 s
            used = {(await producer.send("Orders", b"x")).queue.broker_name for _ in range(8)}
            assert used == {"broker-b"}

    async def has_brokers(server: str, count: int) -> bool:
        found = await route(server, "Orders")
        return found is not None and sum(queues.perm & PERM_WRITE > 0 for queues in found.queue_datas) == count

    asyncio.run(run())


def test_a_broker_changes_and_its_end_was_not_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that hung, or whose network was away, knows the old one still."""
    monkeypatch.setattr(module, "MAX_WAIT_S", SOON_S)  # for what a goodbye that is lost is waited for

    async def run() -> None:
        async with name_server(tmp_path) as server, relay(server) as between:
            async with broker_at(tmp_path, between.address) as broker:
                await broker.send("Fresh")  # so that the version of the topics outlives the broker
                port = port_of(broker.address)
                between.cut(is_noticed=False)
            await until_perm(server, 6)
            async with broker_at(tmp_path, between.address, port=port, broker_permission=4):
                await until_perm(server, 4)
                between.cut(is_noticed=False)
            async with broker_at(tmp_path, between.address) as moved:
                await until_perm(server, 6)
                found = await route(server, "TBW102")
                assert found is not None
                assert [data.broker_addrs for data in found.broker_datas] == [{0: moved.address}]

    asyncio.run(run())
