"""What peers that do not read, or do not finish what they began, can make a server hold; and that others, who do, get
all of theirs."""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from net.test_connection import FakeTransport
from net.test_server import ECHO, HANDLERS, Peer, serving
from skylark.net.allowance import GAUGE_BYTES, MAX_WAITING_OF_HOST, Allowance, Gauge
from skylark.net.connection import MAX_PUSHED_BYTES, MAX_WAITING_BYTES, Connection, Handlers, RequestFailed
from skylark.net.server import Server
from skylark.net.suspended import Suspended
from skylark.wire.codes import ResponseCode
from skylark.wire.frame import MAX_FRAME_BYTES, Frame
from skylark.wire.framing import FrameDecoder, encode_frame

WAIT, SWALLOW, TURNS = 50, 51, 50
MIB = 1 << 20


class Event:
    """What suspended requests wait for; each is answered with a body of that size."""

    def __init__(self, size_bytes: int) -> None:
        self._body = bytes(size_bytes)
        self._waiting: list[asyncio.Future[bool]] = []
        self.made = 0
        self.passed_on = 0
        self.expected = 0
        self.all_wait = asyncio.Event()

    def suspend(self, request: Frame, _: Connection) -> Awaitable[Frame | None]:
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        if len(self._waiting) == self.expected:
            self.all_wait.set()
        return Suspended(future, lambda: self._answer(request), self._pass_on)

    def _answer(self, request: Frame) -> Frame:
        self.made += 1
        return request.reply(body=self._body)

    def _pass_on(self) -> None:
        self.passed_on += 1

    def come(self) -> None:
        for future in self._waiting:
            future.set_result(True)


async def turns() -> None:
    """Lets everything happen that needs no peer."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    """Waits for what no event tells of."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def until_blocked(server: Server) -> None:
    """Waits until a peer does not take what is written."""
    await until(lambda: any(connection.buffered_bytes for connection in server.connections))


async def small_peer(port: int) -> Peer:
    """One for whom the kernel keeps little."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 14)
    return Peer(reader, writer)


def held_bytes(server: Server) -> int:
    """In transports and decoders, and what the server itself believes, whichever is more."""
    connections = list(server.connections)
    really = sum(each.buffered_bytes + each._decoder.held_bytes for each in connections)
    return max(really, sum(each.held_bytes for each in connections))


def served(handlers: Handlers) -> tuple[Connection, FakeTransport]:
    """A connection with an allowance of its own, and all the time that a busy machine may make it need."""
    connection, transport = Connection(handlers), FakeTransport()
    connection.connection_made(cast(asyncio.Transport, transport))
    connection.allowance = Allowance(turn_s=math.inf)
    connection.allowance.join(connection)
    return connection, transport


class TestSuspended:
    def test_answers_for_a_peer_that_does_not_read_are_not_made(self) -> None:
        async def run() -> None:
            event, count = Event(MIB), 32
            event.expected = count
            async with serving({WAIT: event.suspend}) as (server, port):
                peer = await small_peer(port)
                peer.write(b"".join(encode_frame(Frame(WAIT, opaque=each)) for each in range(count)))
                await event.all_wait.wait()
                event.come()
                await turns()
                assert event.made < count // 2  # what the kernel takes
                assert event.passed_on >= count // 2
                assert held_bytes(server) <= 2 * MIB
                got = [await peer.receive() for _ in range(count)]
                assert sorted(each.opaque for each in got) == [*range(count)]
                assert {len(each.body) for each in got} == {MIB}
                peer.close()

        asyncio.run(run())

    def test_all_peers_of_a_host_share_a_bound_and_get_their_answers(self) -> None:
        async def run() -> None:
            event, count = Event(4 * MIB), 10
            event.expected = count
            async with serving({**HANDLERS, WAIT: event.suspend}) as (server, port):
                peers = [await small_peer(port) for _ in range(count)]
                for peer in peers:
                    peer.write(encode_frame(Frame(WAIT)))
                await event.all_wait.wait()
                event.come()
                await turns()
                assert event.made <= GAUGE_BYTES // (4 * MIB) + 1
                assert held_bytes(server) <= GAUGE_BYTES + 5 * MIB
                got = await asyncio.gather(*(peer.receive() for peer in peers))
                assert {len(each.body) for each in got} == {4 * MIB}
                assert (await peers[0].ask(Frame(ECHO))).code == 0
                for peer in peers:
                    peer.close()

        asyncio.run(run())

    def test_requests_are_handled_while_late_answers_have_no_room(self) -> None:
        async def run() -> None:
            event, count = Event(4 * MIB), 12
            event.expected = count
            async with serving({**HANDLERS, WAIT: event.suspend}) as (server, port):
                deaf = [await small_peer(port) for _ in range(count)]
                for peer in deaf:
                    peer.write(encode_frame(Frame(WAIT)))
                await event.all_wait.wait()
                event.come()
                await turns()
                (allowance,) = server._allowances.values()
                assert (allowance.late.is_open, allowance.unread.is_open) == (False, True)
                busy = await Peer.connect(port)
                assert (await busy.ask(Frame(ECHO))).code == 0
                made = event.made
                while event.made == made:
                    allowance.check()
                    await turns()
                for peer in (busy, *deaf):
                    peer.close()

        asyncio.run(run())

    def test_of_a_peer_that_left_nothing_remains(self) -> None:
        async def run() -> None:
            event, gone = Event(4 * MIB), asyncio.Event()
            event.expected = 8
            async with serving({WAIT: event.suspend}, closed=lambda _: gone.set()) as (server, port):
                peer = await small_peer(port)
                peer.write(b"".join(encode_frame(Frame(WAIT)) for _ in range(8)) + bytes(3))
                await event.all_wait.wait()
                (allowance,) = server._allowances.values()
                assert allowance.waiting == 8
                event.come()
                await turns()
                peer.close()
                await gone.wait()
                assert (allowance.waiting, allowance.unread.held_bytes, allowance.unhandled.held_bytes) == (0, 0, 0)
                assert not server._allowances

        asyncio.run(run())

    def test_a_host_with_too_many_is_refused(self) -> None:
        async def run() -> None:
            event = Event(1)
            connection, transport = served({WAIT: event.suspend})
            connection.allowance.waiting = MAX_WAITING_OF_HOST - 1
            connection.data_received(encode_frame(Frame(WAIT, opaque=1)) + encode_frame(Frame(WAIT, opaque=2)))
            (refusal,) = transport.frames()
            assert (refusal.opaque, refusal.code) == (2, ResponseCode.SYSTEM_BUSY)
            assert [each.cancelled() for each in event._waiting] == [False, True]

        asyncio.run(run())

    def test_as_many_wait_as_fit(self) -> None:
        async def run() -> None:
            event = Event(1)
            connection, transport = served({WAIT: event.suspend})
            body = bytes(MAX_WAITING_BYTES // 4)
            connection.data_received(b"".join(encode_frame(Frame(WAIT, body=body, opaque=each)) for each in range(7)))
            assert len(event._waiting) == 4
            assert not transport.reading
            event.come()
            await turns()
            assert len(transport.frames()) == 4
            assert len(event._waiting) == 7
            assert transport.reading
            for future in event._waiting[4:]:
                future.set_result(True)
            await turns()
            assert sorted(each.opaque for each in transport.frames()) == [*range(7)]
            assert connection.held_bytes == 0

        asyncio.run(run())

    def test_answers_that_are_made_already_count(self) -> None:
        async def run() -> None:
            ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            connection, transport = served(
                {WAIT: lambda request, _: Suspended(ready, request.reply, held_bytes=MAX_WAITING_BYTES)}
            )
            connection.data_received(encode_frame(Frame(WAIT)) * 2)
            assert MAX_WAITING_BYTES <= connection.held_bytes < MAX_WAITING_BYTES + 1000
            ready.set_result(True)
            await turns()
            assert len(transport.frames()) == 2
            assert connection.held_bytes == 0

        asyncio.run(run())

    def test_a_failure_is_answered(self) -> None:
        async def run() -> None:
            def fail() -> Frame:
                raise RequestFailed(ResponseCode.NO_PERMISSION, "not any more")

            ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            connection, transport = served({WAIT: lambda request, _: Suspended(ready, fail)})
            connection.data_received(encode_frame(Frame(WAIT)))
            ready.set_result(True)
            await transport.wrote.wait()
            (answer,) = transport.frames()
            assert (answer.code, answer.remark) == (ResponseCode.NO_PERMISSION, "not any more")

        asyncio.run(run())

    def test_may_be_suspended_again_and_awaited(self) -> None:
        async def run() -> None:
            loop = asyncio.get_running_loop()
            first, second = loop.create_future(), loop.create_future()
            request = Frame(WAIT)

            def again() -> Awaitable[Frame | None]:
                return Suspended(second, lambda: request.reply(body=b"at last"))

            connection, transport = served({WAIT: lambda request, _: Suspended(first, again)})
            connection.data_received(encode_frame(request))
            waiting = asyncio.ensure_future(Suspended(first, again))
            first.set_result(True)
            await turns()
            assert not transport.written
            second.set_result(True)
            await transport.wrote.wait()
            assert [each.body for each in transport.frames()] == [b"at last"]
            answer = await waiting
            assert answer is not None
            assert answer.body == b"at last"

        asyncio.run(run())


class TestUnfinishedFrames:
    def test_of_a_host_are_bounded_and_all_of_them_can_be_finished(self) -> None:
        async def run() -> None:
            most = 0

            def swallow(request: Frame, _: Connection) -> Frame:
                nonlocal most
                most = max(most, held_bytes(server))
                return request.reply(body=b"%d" % len(request.body))

            async with serving({SWALLOW: swallow}) as (server, port):
                peers = [await Peer.connect(port) for _ in range(16)]
                request = encode_frame(Frame(SWALLOW, body=bytes(4 * MIB)))
                for peer in peers:
                    peer.write(request)
                got = await asyncio.gather(*(peer.receive() for peer in peers))
                assert {each.body for each in got} == {b"%d" % (4 * MIB)}
                assert most <= GAUGE_BYTES + MAX_FRAME_BYTES
                (allowance,) = server._allowances.values()
                assert (allowance.unhandled.held_bytes, allowance.reader) == (0, None)
                for peer in peers:
                    peer.close()

        asyncio.run(run())

    def test_that_nobody_finishes_cost_their_connections(self) -> None:
        async def run() -> None:
            gone = asyncio.Event()
            async with serving(closed=lambda _: gone.set()) as (server, port):
                start = struct.pack(">I", 4 * MIB) + bytes(2 * MIB)
                peers = [await Peer.connect(port) for _ in range(12)]
                for peer in peers:
                    peer.write(start)
                await until(lambda: any(not each.unhandled.is_open for each in server._allowances.values()))
                await turns()
                assert held_bytes(server) <= GAUGE_BYTES + 4 * MIB
                (allowance,) = server._allowances.values()
                while not allowance.unhandled.is_open:
                    allowance.check()
                    await turns()
                await gone.wait()
                honest = await Peer.connect(port)
                assert (await honest.ask(Frame(ECHO))).code == 0
                for peer in (*peers, honest):
                    peer.close()

        asyncio.run(run())

    def test_of_those_who_come_later_are_bounded_too(self) -> None:
        async def run() -> None:
            async with serving() as (server, port):
                first = await Peer.connect(port)
                first.write(struct.pack(">I", MAX_FRAME_BYTES) + bytes(MAX_FRAME_BYTES - 1))
                second = await Peer.connect(port)
                second.write(struct.pack(">I", 4 * MIB) + bytes(MIB))
                await until(lambda: any(not each.unhandled.is_open for each in server._allowances.values()))
                others = [await Peer.connect(port) for _ in range(100)]
                for peer in others:
                    peer.write(struct.pack(">I", 4 * MIB) + bytes(MIB))
                for _ in range(10):
                    await turns()
                assert held_bytes(server) <= 2 * GAUGE_BYTES + MIB
                for peer in (first, second, *others):
                    peer.close()

        asyncio.run(run())

    def test_are_not_finished_on_top_of_requests_that_the_server_works_at(self) -> None:
        async def run() -> None:
            at_work = 0
            may_end = asyncio.Event()

            async def work(request: Frame, _: Connection) -> Frame:
                nonlocal at_work
                at_work += 1
                await may_end.wait()
                return request.reply(body=b"%d" % len(request.body))

            async with serving({SWALLOW: work}) as (server, port):
                count, frame = 16, encode_frame(Frame(SWALLOW, body=bytes(4 * MIB)))
                peers = [await Peer.connect(port) for _ in range(count)]
                for peer in peers:
                    peer.write(frame[:MIB])
                await until(
                    lambda: len(server.connections) == count and all(c.is_amid_frame for c in server.connections)
                )
                (allowance,) = server._allowances.values()
                for peer in peers:
                    peer.write(frame[MIB:])
                await until(lambda: allowance._awaits_work or at_work == count)
                assert allowance.unhandled.held_bytes <= GAUGE_BYTES + MAX_FRAME_BYTES
                allowance.check()  # nobody is to blame for what the server does not get done
                may_end.set()
                got = await asyncio.gather(*(peer.receive() for peer in peers))
                assert {each.body for each in got} == {b"%d" % (4 * MIB)}
                await until(lambda: not allowance.unhandled.held_bytes)
                for peer in peers:
                    peer.close()

        asyncio.run(run())

    def test_do_not_keep_a_connection_open(self) -> None:
        async def run() -> None:
            gone = asyncio.Event()
            async with serving(idle_s=1000.0, closed=lambda _: gone.set()) as (server, port):
                peer = await Peer.connect(port)
                await peer.ask(Frame(ECHO))
                (connection,) = server.connections
                connection.last_frame_s -= 1001.0
                peer.write(b"\0")
                await until(lambda: connection.is_amid_frame)
                server._sweep()
                await gone.wait()
                peer.close()

        asyncio.run(run())


class TestPeersThatDoNotRead:
    @pytest.mark.parametrize("end", ["sweep", "close"])
    def test_are_got_rid_of(self, end: str) -> None:
        async def run() -> None:
            gone = asyncio.Event()
            async with serving(idle_s=1000.0, closed=lambda _: gone.set()) as (server, port):
                peer = await small_peer(port)
                peer.write(encode_frame(Frame(ECHO, body=bytes(12 * MIB))))
                await until_blocked(server)
                (connection,) = server.connections
                await turns()
                if end == "close":
                    connection.close(0.0)
                else:
                    connection.is_silent(0.0)
                    connection.last_frame_s -= 1001.0
                    server._sweep()
                await gone.wait()
                peer.close()

        asyncio.run(run())

    def test_but_take_something_are_kept(self) -> None:
        async def run() -> None:
            async with serving(idle_s=1000.0) as (server, port):
                peer = await small_peer(port)
                peer.write(encode_frame(Frame(ECHO, body=bytes(12 * MIB))))
                await until_blocked(server)
                (connection,) = server.connections
                connection.last_frame_s -= 1001.0
                server._sweep()  # it took what the kernel has
                assert connection.is_open
                assert len((await peer.receive()).body) == 12 * MIB
                server._sweep()
                assert connection.is_open
                peer.close()

        asyncio.run(run())

    def test_lose_notifications(self) -> None:
        async def run() -> None:
            connection, transport = served({})
            connection.pause_writing()
            sent = [connection.notify(Frame(40, body=bytes(1000))) for _ in range(1000)]
            await turns()
            assert 10_000 < len(transport.written) <= MAX_PUSHED_BYTES
            assert sum(sent) == len(transport.frames())
            connection.resume_writing()
            transport.written.clear()
            assert connection.notify(Frame(40))
            await turns()
            assert len(transport.frames()) == 1

        asyncio.run(run())

    def test_are_asked_when_they_read(self) -> None:
        async def run() -> None:
            connection, transport = served({})
            connection.pause_writing()
            asked = [asyncio.create_task(connection.request(Frame(40, body=bytes(MIB)), 60.0)) for _ in range(3)]
            await turns()
            assert not transport.written
            connection.resume_writing()
            await turns()
            assert len(transport.frames()) == 3
            connection.connection_lost(None)
            for task in asked:
                with pytest.raises(ConnectionError):
                    await task

        asyncio.run(run())

    def test_lose_large_answers_that_came_late(self) -> None:
        async def run() -> None:
            event = asyncio.Event()

            async def late(request: Frame, _: Connection) -> Frame:
                await event.wait()
                return request.reply(body=bytes(MIB if request.opaque else 10))

            connection, transport = served({9: late})
            connection.data_received(b"".join(encode_frame(Frame(9, opaque=each)) for each in range(3)))
            connection.pause_writing()
            event.set()
            await turns()
            assert [(each.opaque, each.code) for each in sorted(transport.frames(), key=lambda each: each.opaque)] == [
                (0, ResponseCode.SUCCESS),
                (1, ResponseCode.SYSTEM_BUSY),
                (2, ResponseCode.SYSTEM_BUSY),
            ]

        asyncio.run(run())

    def test_a_request_behind_unread_answers_waits(self) -> None:
        async def run() -> None:
            connection, transport = served(HANDLERS)
            connection.pause_writing()
            connection.data_received(encode_frame(Frame(ECHO, body=bytes(MIB))))
            assert connection.held_bytes > MIB
            assert not transport.written
            connection.resume_writing()
            assert len(transport.frames()) == 1
            assert connection.held_bytes == 0

        asyncio.run(run())


class TestAnswersThatAreTooLong:
    @pytest.mark.parametrize(
        "answer",
        [
            lambda request: request.reply(fields={"ids": "x" * (1 << 24)}),
            lambda request: request.reply(body=bytes(MAX_FRAME_BYTES)),
        ],
        ids=["header", "body"],
    )
    def test_are_replaced_by_an_error(self, answer: Callable[[Frame], Frame]) -> None:
        async def run() -> None:
            connection, transport = served({**HANDLERS, 9: lambda request, _: answer(request)})
            connection.data_received(encode_frame(Frame(9, opaque=1)) + encode_frame(Frame(ECHO, opaque=2)))
            long, other = FrameDecoder().feed(bytes(transport.written))
            assert (long.opaque, long.code) == (1, ResponseCode.SYSTEM_ERROR)
            assert "answer" in (long.remark or "")
            assert (other.opaque, other.code) == (2, 0)

        asyncio.run(run())


def test_a_gauge_opens_again_when_half_is_free() -> None:
    gauge = Gauge(10)
    changed = [(gauge.add(change), gauge.is_open) for change in (10, 1, -1, -4, -1, 5, 1)]
    assert changed == [
        (False, True), (True, False), (False, False), (False, False), (True, True), (False, True), (True, False),
    ]  # fmt: skip
