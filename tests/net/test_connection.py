"""A connection's own requests, and when it stops to read from a peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from skylark.net.connection import INTERNAL_ERROR, MAX_HEADER_BYTES, MAX_WAITING_REQUESTS, Connection, Handlers
from skylark.wire.codes import ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.framing import FrameDecoder, encode_frame
from skylark.wire.typed import BadBody


class FakeTransport:
    """Remembers what was written and whether the connection wants to read."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.writes = 0
        self.wrote = asyncio.Event()
        self.reading = True
        self.aborted = False

    def get_extra_info(self, name: str) -> Any:
        return ("::ffff:10.0.0.7", 4321) if name == "peername" else None

    def write(self, data: bytes) -> None:
        self.written += data
        self.writes += 1
        self.wrote.set()

    def set_write_buffer_limits(self, high: int) -> None:
        self.high = high

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True

    close = abort

    def frames(self) -> list[Frame]:
        return FrameDecoder().feed(bytes(self.written))


def connected(
    handlers: Handlers, closed: Callable[[Connection], None] | None = None
) -> tuple[Connection, FakeTransport]:
    connection, transport = Connection(handlers, closed=closed), FakeTransport()
    connection.connection_made(cast(asyncio.Transport, transport))
    return connection, transport


def test_the_peers_address_is_known() -> None:
    async def run() -> None:
        connection, _ = connected({})
        assert connection.peer == ("10.0.0.7", 4321)
        assert connection.peer_host == bytes([10, 0, 0, 7, 0, 0, 0x10, 0xE1])
        assert repr(connection) == "10.0.0.7:4321"

    asyncio.run(run())


def test_the_answers_of_one_read_leave_in_one_write() -> None:
    async def run() -> None:
        connection, transport = connected({1: lambda request, _: request.reply()})
        connection.data_received(b"".join(encode_frame(Frame(1, opaque=i)) for i in range(5)))
        assert transport.writes == 1
        assert [frame.opaque for frame in transport.frames()] == [*range(5)]

    asyncio.run(run())


def test_a_long_header_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        connection, transport = connected({1: lambda request, _: request.reply()})
        connection.data_received(encode_frame(Frame(1, {"x": "y" * MAX_HEADER_BYTES}, opaque=1)))
        connection.data_received(encode_frame(Frame(1, {"x": "y"}, b"y" * MAX_HEADER_BYTES, opaque=2)))
        refused, taken = transport.frames()
        assert (refused.opaque, refused.code) == (1, ResponseCode.MESSAGE_ILLEGAL)
        assert (refused.remark or "").endswith(f"and may have up to {MAX_HEADER_BYTES}")
        assert (taken.opaque, taken.code) == (2, ResponseCode.SUCCESS)
        assert not transport.aborted
        connection.data_received(encode_frame(Frame(1, {"x": "y" * (1 << 20)}, opaque=3)))
        assert transport.aborted
        assert "which may have up to 1048576" in caplog.text

    asyncio.run(run())


def test_a_peer_that_does_not_read_is_not_read_from() -> None:
    async def run() -> None:
        connection, transport = connected({})
        connection.pause_writing()
        assert not transport.reading
        connection.resume_writing()
        assert transport.reading

    asyncio.run(run())


def test_a_peer_with_too_many_waiting_requests_is_not_read_from() -> None:
    async def run() -> None:
        first, others = asyncio.Event(), asyncio.Event()

        async def slow(request: Frame, _: Connection) -> Frame:
            await (others if request.opaque else first).wait()
            return request.reply()

        connection, transport = connected({1: slow})
        for number in range(MAX_WAITING_REQUESTS):
            assert transport.reading
            connection.data_received(encode_frame(Frame(1, opaque=number)))
        assert not transport.reading
        # While the peer reads no answers either, an answered request alone does not open the tap again.
        connection.pause_writing()
        first.set()
        await transport.wrote.wait()
        await asyncio.sleep(0)  # the turn in which the connection learns that the request is done
        assert not transport.reading
        connection.resume_writing()
        assert transport.reading
        others.set()
        await connection.drained()
        await asyncio.sleep(0)
        assert [frame.opaque for frame in transport.frames()] == [*range(MAX_WAITING_REQUESTS)]

    asyncio.run(run())


def test_a_request_gets_its_own_response() -> None:
    async def run() -> None:
        connection, transport = connected({})
        asked = [asyncio.create_task(connection.request(Frame(code), 60.0)) for code in (7, 8)]
        await transport.wrote.wait()
        assert transport.writes == 1, "requests of one turn leave together"
        first, second = transport.frames()
        assert first.opaque != second.opaque
        connection.data_received(encode_frame(second.reply(body=b"8")) + encode_frame(first.reply(body=b"7")))
        assert [(await task).body for task in asked] == [b"7", b"8"]

    asyncio.run(run())


def test_a_response_that_nobody_waits_for_is_passed_over() -> None:
    async def run() -> None:
        connection, transport = connected({})
        connection.data_received(encode_frame(Frame(1, opaque=99).reply()))
        assert not transport.written
        assert connection.is_open

    asyncio.run(run())


def test_a_request_fails_when_the_connection_closes() -> None:
    async def run() -> None:
        closed: list[Connection] = []
        connection, _ = connected({}, closed.append)
        asked = asyncio.create_task(connection.request(Frame(1), 60.0))
        await asyncio.sleep(0)
        connection.connection_lost(None)
        with pytest.raises(ConnectionError, match=r"10\.0\.0\.7:4321"):
            await asked
        with pytest.raises(ConnectionError):
            await connection.request(Frame(1), 60.0)
        assert closed == [connection]
        assert not connection.is_open
        connection.notify(Frame(1))  # nothing happens

    asyncio.run(run())


def test_a_request_without_an_answer_times_out() -> None:
    async def run() -> None:
        connection, transport = connected({})
        with pytest.raises(TimeoutError):
            await connection.request(Frame(1), 0.0)
        (late,) = transport.frames()
        connection.data_received(encode_frame(late.reply()))
        assert connection.is_open

    asyncio.run(run())


def test_a_notification_is_a_oneway_request() -> None:
    async def run() -> None:
        connection, transport = connected({})
        connection.notify(Frame(40))
        await transport.wrote.wait()
        (frame,) = transport.frames()
        assert frame.is_oneway
        assert not frame.is_response

    asyncio.run(run())


def test_a_dialled_connection_is_read_from_while_its_peer_does_not_read() -> None:
    async def run() -> None:
        connection, transport = Connection({}, dialled=True), FakeTransport()
        connection.connection_made(cast(asyncio.Transport, transport))
        connection.pause_writing()
        assert transport.reading
        writer = asyncio.create_task(connection.writable())
        await asyncio.sleep(0)
        assert not writer.done()
        connection.resume_writing()
        await writer

    asyncio.run(run())


def test_a_forgotten_request_is_not_settled() -> None:
    async def run() -> None:
        connection, transport = connected({})
        settled: list[Frame | ConnectionError] = []
        kept = connection.begin(Frame(7), settled.append)
        forgotten = connection.begin(Frame(8), settled.append)
        connection.forget(forgotten)
        await transport.wrote.wait()
        connection.data_received(b"".join(encode_frame(frame.reply()) for frame in transport.frames()))
        assert [frame.opaque for frame in settled if isinstance(frame, Frame)] == [kept]

    asyncio.run(run())


class Odd(Exception):
    """Nobody thought of it."""


@pytest.mark.parametrize("is_later", [False, True])
def test_an_error_that_nobody_thought_of_is_told_to_the_log_alone(
    caplog: pytest.LogCaptureFixture, is_later: bool
) -> None:
    def fail(request: Frame, _: Connection) -> Any:
        async def later() -> Frame:
            raise Odd("a secret")

        if is_later:
            return later()
        raise Odd("a secret")

    async def main() -> None:
        connection, transport = connected({1: fail})
        connection.data_received(encode_frame(Frame(1, {}, opaque=5)))
        await transport.wrote.wait()
        (answer,) = transport.frames()
        assert (answer.code, answer.remark, answer.opaque) == (1, INTERNAL_ERROR, 5)

    asyncio.run(main())
    assert "Odd: a secret" in caplog.text


def test_a_request_with_a_bad_body_is_answered_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Compiled code once did not take one for a bad header, and logged a traceback for each."""

    def fail(request: Frame, _: Connection) -> Frame:
        raise BadBody("bad body: it is no JSON")

    async def main() -> None:
        connection, transport = connected({1: fail})
        connection.data_received(encode_frame(Frame(1, {})))
        (answer,) = transport.frames()
        assert (answer.code, answer.remark) == (1, "bad body: it is no JSON")

    asyncio.run(main())
    assert caplog.records == []
