"""A real server on a real socket: answers, and what happens to peers that misbehave, and to their neighbours."""

from __future__ import annotations

import asyncio
import resource
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from skylark.net.connection import INTERNAL_ERROR, Connection, Handlers, RequestFailed
from skylark.net.server import Server, bind
from skylark.wire.codes import ResponseCode
from skylark.wire.frame import MAX_FRAME_BYTES, ONEWAY_FLAG, Encoding, Frame
from skylark.wire.framing import FrameDecoder, encode_frame
from skylark.wire.headers import GetRouteInfo
from skylark.wire.typed import decode_header

ECHO, REFUSE, FAIL, TYPED, SILENT = 1, 2, 3, 4, 5


def echo(request: Frame, _: Connection) -> Frame:
    return request.reply(fields=request.fields, body=request.body)


def refuse(request: Frame, _: Connection) -> Frame:
    raise RequestFailed(ResponseCode.NO_PERMISSION, "not for you")


def fail(request: Frame, _: Connection) -> Frame:
    raise KeyError("surprise")


def typed(request: Frame, _: Connection) -> Frame:
    return request.reply(remark=decode_header(GetRouteInfo, request).topic)


HANDLERS: Handlers = {ECHO: echo, REFUSE: refuse, FAIL: fail, TYPED: typed, SILENT: lambda request, connection: None}


class Peer:
    """A client that writes whatever bytes it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._decoder = FrameDecoder()
        self._frames: list[Frame] = []

    @classmethod
    async def connect(cls, port: int) -> Peer:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def receive(self) -> Frame:
        while not self._frames:
            data = await self._reader.read(65536)
            if not data:
                raise EOFError
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    async def ask(self, request: Frame) -> Frame:
        self.write(encode_frame(request))
        return await self.receive()

    async def until_closed(self) -> None:
        try:
            while await self._reader.read(65536):
                pass
        except ConnectionError:
            pass

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def serving(handlers: Handlers = HANDLERS, **options: Any) -> AsyncIterator[tuple[Server, int]]:
    server = Server(handlers, **options)
    port = await server.start(bind("127.0.0.1", 0))
    try:
        yield server, port
    finally:
        await server.stop()


@pytest.mark.parametrize("encoding", Encoding)
def test_a_request_is_answered_in_its_encoding(encoding: Encoding) -> None:
    async def run() -> None:
        async with serving() as (_, port):
            peer = await Peer.connect(port)
            reply = await peer.ask(Frame(ECHO, {"a": "b"}, b"body", 42, encoding=encoding))
            assert (reply.code, reply.fields, reply.body) == (0, {"a": "b"}, b"body")
            assert (reply.opaque, reply.encoding, reply.is_response) == (42, encoding, True)
            peer.close()

    asyncio.run(run())


def test_requests_that_come_byte_by_byte_and_in_one_piece_are_answered_in_order() -> None:
    async def run() -> None:
        async with serving() as (_, port):
            peer = await Peer.connect(port)
            stream = b"".join(encode_frame(Frame(ECHO, opaque=i, encoding=Encoding(i % 2))) for i in range(6))
            for byte in stream:
                peer.write(bytes([byte]))
                await asyncio.sleep(0)
            peer.write(stream)
            assert [(await peer.receive()).opaque for _ in range(12)] == [*range(6), *range(6)]
            peer.close()

    asyncio.run(run())


@pytest.mark.parametrize("encoding", Encoding)
def test_an_unknown_code_is_answered_in_the_encoding_of_the_request(encoding: Encoding) -> None:
    async def run() -> None:
        async with serving() as (_, port):
            peer = await Peer.connect(port)
            reply = await peer.ask(Frame(4711, opaque=9, encoding=encoding))
            assert reply.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
            assert (reply.remark, reply.opaque) == (" request type 4711 not supported", 9)
            assert reply.encoding == encoding
            assert (await peer.ask(Frame(ECHO))).code == 0
            peer.close()

    asyncio.run(run())


@pytest.mark.parametrize("code", [ECHO, REFUSE, FAIL, SILENT, 4711])
def test_a_oneway_request_is_never_answered(code: int) -> None:
    async def run() -> None:
        async with serving() as (_, port):
            peer = await Peer.connect(port)
            peer.write(encode_frame(Frame(code, opaque=1, flag=ONEWAY_FLAG)))
            assert (await peer.ask(Frame(ECHO, opaque=2))).opaque == 2
            peer.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("code", "answer", "remark"),
    [
        (REFUSE, ResponseCode.NO_PERMISSION, "not for you"),
        (FAIL, ResponseCode.SYSTEM_ERROR, INTERNAL_ERROR),
        (TYPED, ResponseCode.SYSTEM_ERROR, "topic"),
    ],
)
def test_a_failed_request_is_answered_with_a_code_and_a_remark(code: int, answer: int, remark: str) -> None:
    async def run() -> None:
        async with serving() as (_, port):
            peer = await Peer.connect(port)
            reply = await peer.ask(Frame(code))
            assert reply.code == answer
            assert remark in (reply.remark or "")
            assert (await peer.ask(Frame(ECHO))).code == 0
            peer.close()

    asyncio.run(run())


def test_a_request_whose_fields_are_no_map_is_answered() -> None:
    async def run() -> None:
        async with serving() as (_, port):
            peer = await Peer.connect(port)
            header = b'{"code":%d,"opaque":5,"extFields":[1]}' % TYPED
            peer.write(struct.pack(">II", 4 + len(header), len(header)) + header)
            reply = await peer.receive()
            assert (reply.opaque, reply.code) == (5, ResponseCode.SYSTEM_ERROR)
            assert "fields" in (reply.remark or "")
            peer.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(struct.pack(">I", MAX_FRAME_BYTES + 1), id="oversized"),
        pytest.param(struct.pack(">I", 3), id="too short"),
        pytest.param(struct.pack(">II", 8, 100) + b"{}{}", id="header longer than the frame"),
        pytest.param(struct.pack(">II", 8, 7 << 24 | 4) + b"1234", id="unknown encoding"),
        pytest.param(struct.pack(">II", 6, 2) + b"{}", id="bad JSON header"),
        pytest.param(struct.pack(">II", 6, 1 << 24 | 2) + b"12", id="bad binary header"),
        pytest.param(
            struct.pack(">II", 100_004, 100_000) + b'{"code":1,"extFields":{"a":'.ljust(100_000, b"["), id="deep"
        ),
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", id="HTTP"),
    ],
)
def test_garbage_closes_that_connection_and_no_other(garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with serving() as (_, port):
            good, bad = await Peer.connect(port), await Peer.connect(port)
            assert (await bad.ask(Frame(ECHO))).code == 0
            bad.write(garbage)
            await bad.until_closed()
            assert (await good.ask(Frame(ECHO, body=b"still here"))).body == b"still here"
            good.close()
            bad.close()

    asyncio.run(run())
    assert "closing 127.0.0.1:" in caplog.text


def test_a_slow_answer_does_not_hold_up_others() -> None:
    async def run() -> None:
        gate = asyncio.Event()

        async def slow(request: Frame, _: Connection) -> Frame:
            await gate.wait()
            return request.reply()

        async with serving({**HANDLERS, 9: slow}) as (_, port):
            peer = await Peer.connect(port)
            peer.write(encode_frame(Frame(9, opaque=1)))
            assert (await peer.ask(Frame(ECHO, opaque=2))).opaque == 2
            gate.set()
            assert (await peer.receive()).opaque == 1
            peer.close()

    asyncio.run(run())


def test_a_closed_connection_cancels_what_it_waited_for() -> None:
    async def run() -> None:
        started, cancelled = asyncio.Event(), asyncio.Event()

        async def forever(request: Frame, _: Connection) -> Frame:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            raise AssertionError

        closed: list[Connection] = []
        async with serving({9: forever}, closed=closed.append) as (server, port):
            peer = await Peer.connect(port)
            peer.write(encode_frame(Frame(9)))
            await started.wait()
            peer.close()
            await cancelled.wait()
            assert len(closed) == 1
            assert not server.connections

    asyncio.run(run())


def test_connections_beyond_the_cap_are_closed() -> None:
    async def run() -> None:
        gone = asyncio.Event()
        async with serving(max_connections=1, closed=lambda _: gone.set()) as (_, port):
            first = await Peer.connect(port)
            assert (await first.ask(Frame(ECHO))).code == 0
            second = await Peer.connect(port)
            await second.until_closed()
            assert (await first.ask(Frame(ECHO))).code == 0
            await gone.wait()
            gone.clear()
            first.close()
            await gone.wait()
            third = await Peer.connect(port)
            assert (await third.ask(Frame(ECHO))).code == 0
            second.close()
            third.close()

    asyncio.run(run())


def test_a_host_leaves_connections_for_others() -> None:
    async def run() -> None:
        async def ask(host: str) -> bool:
            """On one more connection, which stays open, whether it is served."""
            peer = Peer(*await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0)))
            peers.append(peer)
            try:
                return (await peer.ask(Frame(ECHO))).code == 0
            except (EOFError, ConnectionError):
                return False

        peers: list[Peer] = []
        async with serving(max_connections=8) as (_, port):
            assert [await ask("127.0.0.2") for _ in range(6)] == [True] * 4 + [False] * 2
            assert [await ask("127.0.0.3") for _ in range(3)] == [True] * 2 + [False]
            assert [await ask(f"127.0.0.{host}") for host in (4, 5, 6)] == [True, True, False]
            for peer in peers:
                peer.close()

    asyncio.run(run())


def test_a_host_leaves_descriptors_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with serving() as (server, port):
            monkeypatch.setattr(resource, "getrlimit", lambda _: (2, 2))
            first, second = [await Peer.connect(port) for _ in range(2)]
            await second.until_closed()
            assert (await first.ask(Frame(ECHO))).code == 0
            assert len(server.connections) == 1
            first.close()
            second.close()

    asyncio.run(run())


def test_silent_connections_are_swept() -> None:
    async def run() -> None:
        async with serving(idle_s=0.02) as (_, port):
            peer = await Peer.connect(port)
            await peer.until_closed()
            peer.close()

    asyncio.run(run())


def test_only_silent_connections_are_swept() -> None:
    async def run() -> None:
        gone = asyncio.Event()
        async with serving(idle_s=1000.0, closed=lambda _: gone.set()) as (server, port):
            silent = await Peer.connect(port)
            await silent.ask(Frame(ECHO))
            (connection,) = server.connections
            lively = await Peer.connect(port)
            await lively.ask(Frame(ECHO))
            connection.last_frame_s -= 1001.0
            server._sweep()
            await silent.until_closed()
            await gone.wait()
            assert (await lively.ask(Frame(ECHO))).code == 0
            silent.close()
            lively.close()

    asyncio.run(run())


def test_stop_lets_requests_in_hand_finish() -> None:
    async def run() -> None:
        started, gate = asyncio.Event(), asyncio.Event()

        async def slow(request: Frame, _: Connection) -> Frame:
            started.set()
            await gate.wait()
            return request.reply(body=b"done")

        server = Server({9: slow})
        bound = bind("127.0.0.1", 0)
        # Bound and never listening: nobody else gets the port when the server has left it.
        with bind("127.0.0.1", bound.getsockname()[1]):
            port = await server.start(bound)
            peer = await Peer.connect(port)
            peer.write(encode_frame(Frame(9)))
            await started.wait()
            stopping = asyncio.create_task(server.stop(grace_s=60.0))
            await asyncio.sleep(0)
            gate.set()
            assert (await peer.receive()).body == b"done"
            await peer.until_closed()
            await stopping
            with pytest.raises(ConnectionRefusedError):
                await Peer.connect(port)
            peer.close()

    asyncio.run(run())


def test_stop_drops_requests_that_do_not_end() -> None:
    async def run() -> None:
        started = asyncio.Event()

        async def forever(request: Frame, _: Connection) -> Frame:
            started.set()
            await asyncio.Event().wait()
            raise AssertionError

        async with serving({9: forever}) as (server, port):
            peer = await Peer.connect(port)
            peer.write(encode_frame(Frame(9)))
            await started.wait()
            await server.stop(grace_s=0.0)
            await peer.until_closed()
            peer.close()

    asyncio.run(run())


def test_missing_descriptors_are_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with serving() as (server, _):
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            try:
                for _ in range(3):
                    server._look_for_descriptors()
                assert len(caplog.records) == 1
                server._say_again_s -= 60.0
                server._look_for_descriptors()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    asyncio.run(run())
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["clients are turned away"] * 2


@pytest.mark.parametrize("host", ["a..b", "b\u00fc..cher"])
def test_a_host_that_is_unknown_is_named(host: str) -> None:
    with pytest.raises(socket.gaierror, match=host):
        bind(host, 0)


def test_a_port_in_use_is_an_error() -> None:
    async def run() -> None:
        async with serving() as (_, port):
            with pytest.raises(OSError, match="in use"):
                await Server(HANDLERS).start(bind("127.0.0.1", port))

    asyncio.run(run())
