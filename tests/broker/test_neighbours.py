"""What a broker asks the name servers: where another broker is, and which queues a topic has."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.routed import LONG_MS, SOON_S, broker_at, name_server, until
from relay import relay
from skylark.broker import assignment
from skylark.broker.config import BrokerConfig
from skylark.broker.neighbours import Neighbours
from skylark.net.connection import RequestFailed
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame


def test_a_neighbour_is_found_though_a_name_server_hangs(tmp_path: Path) -> None:
    async def run() -> None:
        async with name_server(tmp_path) as server, relay(server) as hung:
            hung.pause()
            async with broker_at(tmp_path, server):
                config = BrokerConfig(namesrv_addr=f"{hung.address};{server}", forward_timeout=100)
                neighbours = Neighbours(config)
                await until(lambda: is_found(neighbours))
                config.forward_timeout = LONG_MS
                dials = hung.dials
                for _ in range(3):
                    neighbours._addresses.clear()
                    assert await is_found(neighbours)
                assert hung.dials == dials, "the one that answered is asked first from then on"
                neighbours.close()

    async def is_found(neighbours: Neighbours) -> bool:
        try:
            return (await neighbours.ask("broker-a", Frame(RequestCode.GET_BROKER_CONFIG))).code == ResponseCode.SUCCESS
        except RequestFailed:
            return False

    asyncio.run(run())


def test_a_neighbour_that_only_one_name_server_knows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with name_server(tmp_path) as empty, name_server(tmp_path) as full, broker_at(tmp_path, full):
            neighbours = Neighbours(BrokerConfig(namesrv_addr=f"{empty};{full}", forward_timeout=LONG_MS))
            request = Frame(RequestCode.GET_BROKER_CONFIG)
            assert (await neighbours.ask("broker-a", request)).code == ResponseCode.SUCCESS
            unknown = f"name server {full} does not know it; name server {empty} does not know it"
            with pytest.raises(RequestFailed, match="broker broker-b can't be asked now"):
                await neighbours.ask("broker-b", request)
            assert caplog.messages[-1].endswith(unknown)
            neighbours.close()

    asyncio.run(run())


def test_the_queues_that_are_shared_out_outlive_a_name_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with (
            name_server(tmp_path) as server,
            relay(server) as between,
            broker_at(tmp_path / "a", between.address, load_balance_poll_name_server_interval=0) as broker,
            broker_at(tmp_path / "b", server, broker_name="broker-b") as other,
        ):
            await broker.send("Shared")
            await other.send("Shared")
            assert broker._broker is not None
            assignments = broker._broker._assignments
            while len(both := await assignments._queues("Shared") or []) < 8:  # until the other's are known
                pass
            assert {queue.broker_name for queue in both} == {"broker-a", "broker-b"}
            between.pause()
            monkeypatch.setattr(assignment, "_ROUTE_TIMEOUT_S", SOON_S)
            assert await assignments._queues("Shared") == both
            between.resume()

    asyncio.run(run())
