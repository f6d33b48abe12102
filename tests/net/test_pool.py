"""Connections by address: shared, dialled again, and clear errors."""

from __future__ import annotations

import asyncio
import socket

import pytest

from relay import relay
from skylark.net import pool as module
from skylark.net.connection import Connection
from skylark.net.pool import Pool, abort_if_silent, split_address
from skylark.net.server import Server, bind
from skylark.wire.frame import Frame


def echo(request: Frame, _: Connection) -> Frame:
    return request.reply(body=request.body)


def test_requests_at_the_same_time_share_one_connection() -> None:
    async def run() -> None:
        server = Server({1: echo})
        address = f"127.0.0.1:{await server.start(bind('127.0.0.1', 0))}"
        pool = Pool()
        answers = await asyncio.gather(*(pool.request(address, Frame(1, body=b"%d" % i), 60.0) for i in range(8)))
        assert [answer.body for answer in answers] == [b"%d" % i for i in range(8)]
        assert len(server.connections) == 1
        pool.close()
        await server.stop()

    asyncio.run(run())


def test_a_closed_connection_is_dialled_again() -> None:
    async def run() -> None:
        server = Server({1: echo})
        address = f"127.0.0.1:{await server.start(bind('127.0.0.1', 0))}"
        pool = Pool()
        first = await pool.get(address)
        assert await pool.get(address) is first
        pool.drop(address)
        pool.drop(address)
        second = await pool.get(address)
        assert second is not first
        assert (await second.request(Frame(1, body=b"x"), 60.0)).body == b"x"
        pool.close()
        await server.stop()

    asyncio.run(run())


def test_the_server_can_ask_and_tell_the_client() -> None:
    async def run() -> None:
        told = asyncio.Event()

        def tell(request: Frame, _: Connection) -> None:
            told.set()

        server = Server({1: echo})
        address = f"127.0.0.1:{await server.start(bind('127.0.0.1', 0))}"
        pool = Pool({1: echo, 2: tell})
        await pool.request(address, Frame(1), 60.0)
        (connection,) = server.connections
        assert (await connection.request(Frame(1, body=b"back"), 60.0)).body == b"back"
        connection.notify(Frame(2))
        await told.wait()
        pool.close()
        await server.stop()

    asyncio.run(run())


def test_an_address_without_a_server_is_named_in_the_error() -> None:
    async def run() -> None:
        unused = bind("127.0.0.1", 0)  # bound and never listening: nobody else can take it
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        pool = Pool()
        for _ in range(2):
            with pytest.raises(ConnectionError, match=address):
                await pool.request(address, Frame(1))
        pool.close()
        unused.close()

    asyncio.run(run())


def test_a_server_that_does_not_answer_is_named_in_the_error() -> None:
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            address = f"127.0.0.1:{mute.getsockname()[1]}"
            pool = Pool()
            await pool.get(address)
            with pytest.raises(TimeoutError, match=f"no answer from {address} within 0.01 s"):
                await pool.request(address, Frame(1), 0.01)
            pool.close()

    asyncio.run(run())


def test_addresses() -> None:
    assert split_address("localhost:9876") == ("localhost", 9876)
    assert split_address("[::1]:9876") == ("::1", 9876)
    assert split_address("::1:9876") == ("::1", 9876)
    for wrong in ("::1", "[::1]", "fe80::a:b", "1:2:3:4:5:6:7:8"):
        with pytest.raises(ValueError, match=rf"has no port: .* \[{wrong.strip('[]')}\]:9876"):
            split_address(wrong)
    assert split_address("my_host-1.example.:1") == ("my_host-1.example.", 1)
    assert split_address("b\u00fccher.example:65535") == ("b\u00fccher.example", 65535)
    for wrong in ("", "localhost", ":9876", "localhost:", "localhost:x", "localhost:+1", "localhost:\u0661"):
        with pytest.raises(ValueError, match="host:port"):
            split_address(wrong)
    for wrong in ("localhost:0", "localhost:65536", "localhost:99999"):
        with pytest.raises(ValueError, match="from 1 to 65535"):
            split_address(wrong)
    for wrong in ("a..b:1", "a b:1", "http://a:1", "[:]:1", ".a:1", f"{'a' * 64}:1", f"{'a.' * 127}a:1", "[a]]:1"):
        with pytest.raises(ValueError, match="neither a name nor an IP address"):
            split_address(wrong)


# Peers that do not answer.


def test_a_connection_that_leads_nowhere_is_dialled_again() -> None:
    async def run() -> None:
        server = Server({1: echo})
        async with relay(f"127.0.0.1:{await server.start(bind('127.0.0.1', 0))}") as between:
            pool = Pool()
            assert (await pool.request(between.address, Frame(1, body=b"x"), 60.0)).body == b"x"
            between.cut()
            with pytest.raises(TimeoutError, match="no answer from"):
                await pool.request(between.address, Frame(1), 0.01)
            assert not pool.is_open(between.address)
            assert (await pool.request(between.address, Frame(1, body=b"y"), 60.0)).body == b"y"
            assert between.dials == 2
            pool.close()
        await server.stop()

    asyncio.run(run())


def test_the_first_request_on_a_new_connection_may_find_out() -> None:
    """The clock of an event loop may stand still between the dial and the request."""

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            address = f"127.0.0.1:{mute.getsockname()[1]}"
            pool = Pool()
            await pool.get(address)
            with pytest.raises(TimeoutError):
                await pool.request(address, Frame(1), 0.01)
            assert not pool.is_open(address)
            pool.close()

    asyncio.run(run())


def test_a_connection_on_which_something_came_meanwhile_is_spared() -> None:
    async def run() -> None:
        server = Server({1: echo})
        address = f"127.0.0.1:{await server.start(bind('127.0.0.1', 0))}"
        pool = Pool()
        connection = await pool.get(address)
        began_s = connection.last_received_s
        while connection.last_received_s == began_s:  # the clock of a loop may stand still for a while
            await pool.request(address, Frame(1), 60.0)
        abort_if_silent(connection, began_s)
        assert connection.is_open
        abort_if_silent(connection, connection.last_received_s)
        assert not connection.is_open
        pool.close()
        await server.stop()

    asyncio.run(run())


def test_the_dial_counts_as_part_of_the_request() -> None:
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
            address = f"127.0.0.1:{full.getsockname()[1]}"
            taken = [socket.socket() for _ in range(4)]  # nobody accepts, so that the next one is not let in
            for each in taken:
                each.setblocking(False)
                each.connect_ex(full.getsockname())
            pool = Pool(connect_timeout_s=3600.0)
            with pytest.raises(TimeoutError, match=f"no connection to {address} within 0.05 s"):
                await pool.request(address, Frame(1), 0.05)
            pool.close()
            for each in taken:
                each.close()

    asyncio.run(run())


def test_what_may_be_asked_twice_does_not_wait_for_a_silent_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        server = Server({1: echo})
        async with relay(f"127.0.0.1:{await server.start(bind('127.0.0.1', 0))}") as between:
            pool = Pool()
            assert (await pool.ask(between.address, Frame(1, body=b"x"), 60.0)).body == b"x"
            between.cut()
            monkeypatch.setattr(module, "SILENCE_S", 0.05)
            answers = await asyncio.gather(*(pool.ask(between.address, Frame(1, body=b"y"), 60.0) for _ in range(3)))
            assert [answer.body for answer in answers] == [b"y"] * 3
            assert between.dials == 2
            pool.close()
            with pytest.raises(ConnectionError, match="all closed"):
                await pool.request(between.address, Frame(1))
        await server.stop()

    asyncio.run(run())


def test_a_slow_answer_counts_although_it_was_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        may_answer, asked = asyncio.Event(), asyncio.Semaphore(0)

        async def slow(request: Frame, _: Connection) -> Frame:
            asked.release()
            await may_answer.wait()
            return request.reply(body=b"%d" % len(server.connections))

        server = Server({1: echo, 2: slow})
        address = f"127.0.0.1:{await server.start(bind('127.0.0.1', 0))}"
        pool = Pool()
        await pool.get(address)
        monkeypatch.setattr(module, "SILENCE_S", 0.05)
        asking = asyncio.create_task(pool.ask(address, Frame(2), 60.0))
        await asked.acquire()
        await asked.acquire()
        may_answer.set()
        assert (await asking).body == b"2", "both connections may bring it"
        pool.close()
        await server.stop()

    asyncio.run(run())
