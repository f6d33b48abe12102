"""The in-process cluster as the tests of other programs use it."""

from __future__ import annotations

import asyncio
import doctest
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from skylark.net.pool import Pool, split_address
from skylark.testing import LocalCluster, cluster
from skylark.wire.bodies import decode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.routes import TopicRouteData


async def route(name_servers: str, topic: str) -> TopicRouteData | None:
    pool = Pool()
    try:
        fields = {"topic": topic, "acceptStandardJsonOnly": "true"}
        answer = await pool.request(name_servers, Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, fields), 60.0)
    finally:
        pool.close()
    return decode_body(TopicRouteData, answer.body) if answer.code == ResponseCode.SUCCESS else None


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary directories are made, so that what is left behind can be seen."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_topics_are_on_every_broker_and_nothing_is_left(temporary: Path) -> None:
    async def main() -> None:
        async with LocalCluster(brokers=2, topics={"orders": 3}) as local:
            assert [broker.name for broker in local.brokers] == ["broker-a", "broker-b"]
            found = await route(local.name_servers, "orders")
            assert found is not None
            assert {(queues.broker_name, queues.write_queue_nums) for queues in found.queue_datas} == {
                ("broker-a", 3),
                ("broker-b", 3),
            }
            assert {data.broker_addrs[0] for data in found.broker_datas} == {b.address for b in local.brokers}
            await local.create_topic("more", 1)
            assert await route(local.name_servers, "more") is not None

    asyncio.run(main())
    assert list(temporary.iterdir()) == []


def test_a_broker_goes_and_comes_back_where_it_was() -> None:
    async def main() -> None:
        async with LocalCluster(topics={"orders": 2}) as local:
            before = local.broker.address
            await local.broker.stop()
            assert not local.broker.running
            assert await route(local.name_servers, "orders") is None
            await local.broker.stop()
            await local.broker.start()
            assert local.broker.address == before
            found = await route(local.name_servers, "orders")
            assert found is not None
            assert found.queue_datas[0].write_queue_nums == 2

    asyncio.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port can't be kept")
def test_nobody_gets_the_port_of_a_stopped_broker() -> None:
    with LocalCluster() as local:
        local.run(local.broker.stop)
        host, port = split_address(local.broker.address)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port))
        local.run(local.broker.start)
        socket.create_connection((host, port)).close()


def test_blocking_code_has_it_in_a_thread(temporary: Path) -> None:
    with LocalCluster() as local:
        local.run(lambda: local.create_topic("orders", 5))
        found = asyncio.run(route(local.name_servers, "orders"))
        assert found is not None
        assert found.queue_datas[0].read_queue_nums == 5
        local.run(local.broker.stop)
    assert list(temporary.iterdir()) == []


def test_a_directory_of_your_own_stays(tmp_path: Path) -> None:
    with LocalCluster(directory=tmp_path, settings={"defaultTopicQueueNums": "2"}):
        pass
    assert (tmp_path / "broker-a" / "commitlog").is_dir()


def blocking(local: LocalCluster) -> Callable[[], Coroutine[None, None, None]]:
    async def work() -> None:
        local.run(local.broker.stop)

    return work


def test_entered_twice_it_refuses_and_goes_on() -> None:
    async def main(local: LocalCluster) -> None:
        with pytest.raises(RuntimeError, match="only once"):
            async with local:
                pass
        with pytest.raises(RuntimeError, match="only once"), local:
            pass
        await local.create_topic("orders", 1)
        assert await route(local.name_servers, "orders") is not None

    async def outer() -> None:
        async with LocalCluster() as local:
            await main(local)

    asyncio.run(outer())
    with LocalCluster() as local:
        asyncio.run(main(local))
        local.run(local.broker.stop)
        local.run(local.broker.start)
    assert not [thread for thread in threading.enumerate() if thread.name == "skylark-local-cluster"]


def test_the_name_server_goes_and_comes_back_with_all_routes() -> None:
    async def main() -> None:
        async with LocalCluster(brokers=2, topics={"orders": 2}) as local:
            await local.brokers[1].stop()
            before = local.name_server.address
            await local.name_server.stop()
            assert not local.name_server.running
            with pytest.raises(ConnectionError):
                await route(local.name_servers, "orders")
            await local.name_server.start()
            assert local.name_server.address == local.name_servers == before
            found = await route(local.name_servers, "orders")
            assert found is not None
            assert [queues.broker_name for queues in found.queue_datas] == ["broker-a"]
            await local.brokers[1].start()
            found = await route(local.name_servers, "orders")
            assert found is not None
            assert len(found.queue_datas) == 2

    asyncio.run(main())


def test_it_serves_whichever_loop_asks() -> None:
    """As where a fixture has the loop of a session, and each test one of its own."""
    local = LocalCluster(topics={"orders": 1})

    async def use() -> None:
        assert await route(local.name_servers, "orders") is not None
        await local.broker.stop()
        assert await route(local.name_servers, "orders") is None
        await local.broker.start()
        await local.name_server.stop()
        await local.name_server.start()
        assert await route(local.name_servers, "orders") is not None

    with asyncio.Runner() as session:
        session.run(local.__aenter__())
        for _ in range(2):
            asyncio.run(use())
        session.run(use())
        session.run(local.__aexit__())


def test_what_can_not_be_is_said(temporary: Path) -> None:
    with pytest.raises(ValueError, match="1 to 26 brokers, not 0"):
        LocalCluster(brokers=0)
    with pytest.raises(Exception, match="listenPort='high'"), LocalCluster(settings={"listenPort": "high"}):
        pass
    with pytest.raises(ValueError, match="does not create the topic 'a b'"), LocalCluster(topics={"a b": 1}):
        pass
    with pytest.raises(RuntimeError, match="does not run"):
        LocalCluster().run(lambda: local.create_topic("x"))
    with LocalCluster() as local, pytest.raises(RuntimeError, match="await it"):
        local.run(blocking(local))
    with pytest.raises(RuntimeError, match="has ended"):
        local.run(local.broker.start)
    with pytest.raises(ValueError, match="topics is \\['orders'\\]; it takes names"):
        LocalCluster(topics=["orders"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="maxMessageSize is 65536; it takes text"):
        LocalCluster(settings={"maxMessageSize": 65536})  # type: ignore[dict-item]
    with pytest.raises(RuntimeError, match="does not run"):
        _ = LocalCluster().broker
    with pytest.raises(RuntimeError, match="no broker of the cluster runs"):
        asyncio.run(local.create_topic("x"))
    assert list(temporary.iterdir()) == []


def test_without_an_event_loop_of_asyncio_it_is_for_with() -> None:
    """As under trio, whose coroutines run without one."""
    local = LocalCluster()
    with pytest.raises(RuntimeError, match="enter it by `with`"):
        local.__aenter__().send(None)
    with local:
        for work in (local.broker.stop, lambda: local.create_topic("x")):
            with pytest.raises(RuntimeError, match="no event loop of asyncio"):
                work().send(None)


def test_a_forked_process_is_told_that_the_servers_are_not_there() -> None:
    with LocalCluster() as local:
        child = os.fork()
        if child == 0:
            try:
                local.run(local.broker.stop)
            except RuntimeError as error:
                os._exit(42 if "forked" in str(error) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
        assert local.broker.running


def test_the_examples_run() -> None:
    assert doctest.testmod(cluster).failed == 0
