"""The VIP port of a broker: served like its own, shared limits, and what happens when another program has it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from pathlib import Path

import pytest

from broker.live import HOST, live_broker, messages_of
from skylark.broker import ports
from skylark.broker.app import Broker
from skylark.broker.config import from_mapping
from skylark.broker.ports import bind_both, listen_on_vip
from skylark.net.pool import Pool, split_address
from skylark.net.server import Server, bind
from skylark.testing import LocalCluster
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame


def vip_of(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) - 2}"


def test_the_vip_port_serves_what_the_other_one_serves(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            own = broker.address
            broker.address = vip_of(own)
            assert (await broker.send("t", b"through the VIP port")).code == ResponseCode.SUCCESS
            (seen,) = messages_of(await broker.pull("t", 0))
            broker.address = own
            assert messages_of(await broker.pull("t", 0)) == [seen]
            await broker.stop()
            for address in (own, vip_of(own)):
                with pytest.raises(ConnectionRefusedError):
                    await asyncio.open_connection(*split_address(address))

    asyncio.run(run())


def test_brokers_of_a_local_cluster_have_one_each_and_get_it_back() -> None:
    async def run() -> None:
        async with LocalCluster(2) as cluster:
            pool = Pool()
            for again in (False, True):
                for broker in cluster.brokers:
                    if again:
                        await broker.stop()
                        await broker.start()
                    asked = Frame(RequestCode.GET_BROKER_RUNTIME_INFO)
                    assert (await pool.request(vip_of(broker.address), asked, 60)).code == ResponseCode.SUCCESS
            pool.close()

    asyncio.run(run())


def test_a_broker_does_without_when_another_program_has_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run(own: socket.socket, other: socket.socket) -> None:
        other.listen()
        port = own.getsockname()[1]  # stays bound, so that nobody else gets it
        config = from_mapping({"storePathRootDir": str(tmp_path), "maxHashSlotNum": "1000"}, source="test")
        broker = Broker(config)
        with caplog.at_level(logging.WARNING, "skylark.broker.ports"):
            assert await broker.start(HOST, port) == port
        pool = Pool()
        answer = await pool.request(f"{HOST}:{port}", Frame(RequestCode.GET_BROKER_RUNTIME_INFO), 60)
        assert answer.code == ResponseCode.SUCCESS
        pool.close()
        await broker.stop()
        (line,) = [record.getMessage() for record in caplog.records if record.name == "skylark.broker.ports"]
        assert f"the VIP port {port - 2}, two below listenPort, is not served: Address already in use" in line
        assert "choose another listenPort" in line

    own, other = bind_both(HOST, 0)
    assert other is not None
    with own, other:
        asyncio.run(run(own, other))


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_port_that_is_taken_only_after_it_was_bound(caplog: pytest.LogCaptureFixture, loop: str) -> None:
    """Two sockets may be bound to a port as long as none listens."""

    async def run(own: socket.socket, vip: socket.socket) -> None:
        for bound in (own, vip):
            stack.enter_context(bind(HOST, bound.getsockname()[1])).listen()
        with pytest.raises(OSError, match="Address already in use"):
            await Server({}).start(own)
        await listen_on_vip(Server({}), vip)

    new_loop = pytest.importorskip(loop).new_event_loop
    own, vip = bind_both(HOST, 0)
    assert vip is not None
    with contextlib.ExitStack() as stack, asyncio.Runner(loop_factory=new_loop) as runner, own, vip:
        runner.run(run(own, vip))
    assert "is not served: Address already in use" in caplog.text


def test_the_lowest_ports_have_none_below_them(caplog: pytest.LogCaptureFixture) -> None:
    try:
        own, vip = bind_both(HOST, 2)
    except OSError:
        pytest.skip("only root may listen there")
    own.close()
    assert vip is None
    assert "the VIP port 0, two below listenPort, is not served: ports begin at 1" in caplog.text


def test_a_port_that_another_broker_has_bound_is_never_the_vip_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker listens only when its store is open: until then the system would let others have its port too."""
    upper, lower = bind_both(HOST, 0)
    assert lower is not None
    first_choice, taken = upper.getsockname()[1], lower.getsockname()[1]
    upper.close()
    lower.close()
    choices = [first_choice]

    def choose(host: str, port: int, *, unshared: bool = False) -> socket.socket:
        return bind(host, port or (choices.pop() if choices else 0), unshared=unshared)

    monkeypatch.setattr(ports, "bind", choose)
    with bind(HOST, taken) as opening:
        own, vip = bind_both(HOST, 0)
        assert vip is not None
        with own, vip:
            assert not choices
            assert own.getsockname()[1] != first_choice
            vip.listen()
            opening.listen()


def test_connections_to_both_ports_count_together() -> None:
    async def run() -> None:
        server = Server({}, max_connections=4)
        own, vip = bind_both(HOST, 0)
        assert vip is not None
        ports = [each.getsockname()[1] for each in (own, vip)]
        assert ports[0] - ports[1] == 2
        await server.start(own)
        await server.also_listen(vip)
        peers = [await asyncio.open_connection(HOST, port) for port in (*ports, ports[1])]
        reads = [asyncio.create_task(ended(reader)) for reader, _ in peers]
        await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        assert [read.done() for read in reads].count(True) == 1, "one is more than the limit"
        assert len(server.connections) == 2
        await server.stop()
        await asyncio.wait(reads)
        for _, writer in peers:
            writer.close()

    asyncio.run(run())


async def ended(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
