"""What a host's requests take of the event loop's time: a part of each turn, which its connections share."""

from __future__ import annotations

import asyncio
import math
from typing import cast

import pytest

from net.test_connection import FakeTransport
from net.test_limits import WAIT, Event, turns
from skylark.net.allowance import Allowance
from skylark.net.connection import Connection, Handlers
from skylark.wire.frame import Frame
from skylark.wire.framing import encode_frame

ASK = 1


class Asked:
    """The opaques of requests, in the order in which they were handled."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def handle(self, request: Frame, _: Connection) -> Frame:
        self.order.append(request.opaque)
        return request.reply()


def served(handlers: Handlers, allowance: Allowance) -> tuple[Connection, FakeTransport]:
    connection, transport = Connection(handlers), FakeTransport()
    connection.connection_made(cast(asyncio.Transport, transport))
    connection.allowance = allowance
    allowance.join(connection)
    return connection, transport


def slow() -> Allowance:
    """Of a host for which each request takes its whole part of a turn."""
    return Allowance(turn_s=0.0)


def requests(*opaques: int) -> bytes:
    return b"".join(encode_frame(Frame(ASK, opaque=each)) for each in opaques)


def test_what_a_host_has_no_time_for_waits_for_the_next_turn() -> None:
    async def run() -> None:
        asked = Asked()
        connection, transport = served({ASK: asked.handle}, slow())
        connection.data_received(requests(0, 1, 2))
        assert asked.order == [0]
        assert not transport.reading  # what came meanwhile would wait as well
        connection.data_received(requests(3))
        assert asked.order == [0]
        await turns()
        assert asked.order == [0, 1, 2, 3]
        assert [frame.opaque for frame in transport.frames()] == [0, 1, 2, 3]
        assert transport.reading
        assert connection.held_bytes == 0

    asyncio.run(run())


def test_another_host_has_a_part_of_its_own() -> None:
    async def run() -> None:
        asked = Asked()
        busy, _ = served({ASK: asked.handle}, slow())
        other, _ = served({ASK: asked.handle}, slow())
        busy.data_received(requests(*range(10)))
        other.data_received(requests(99))
        assert asked.order == [0, 99]

    asyncio.run(run())


def test_the_connections_of_a_host_take_turns() -> None:
    async def run() -> None:
        asked = Asked()
        host = slow()
        first, second = (served({ASK: asked.handle}, host)[0] for _ in range(2))
        first.data_received(requests(0, 1, 2, 3))
        second.data_received(requests(10, 11))
        await turns()
        assert asked.order == [0, 1, 10, 2, 11, 3]

    asyncio.run(run())


def test_answers_that_an_event_brings_are_made_in_turns() -> None:
    async def run() -> None:
        event = Event(1)
        connection, transport = served({WAIT: event.suspend}, slow())
        for each in range(5):
            connection.data_received(encode_frame(Frame(WAIT, opaque=each)))
            await turns()
        event.come()
        await asyncio.sleep(0)
        assert event.made == 1
        await turns()
        assert [frame.opaque for frame in transport.frames()] == [0, 1, 2, 3, 4]
        assert event.passed_on == 0  # nobody is deaf
        assert connection.allowance.waiting == 0

    asyncio.run(run())


@pytest.mark.parametrize("closes", [False, True])
def test_what_a_peer_turns_out_not_to_take_is_passed_on_when_its_turn_comes(closes: bool) -> None:
    async def run() -> None:
        event = Event(1)
        connection, _ = served({WAIT: event.suspend}, slow())
        for each in range(3):
            connection.data_received(encode_frame(Frame(WAIT, opaque=each)))
            await turns()
        event.come()
        await asyncio.sleep(0)
        assert (event.made, event.passed_on) == (1, 0)
        if closes:
            connection.connection_lost(None)
        else:
            connection.pause_writing()
        await turns()
        assert (event.made, event.passed_on) == (1, 2)

    asyncio.run(run())


def test_an_event_that_comes_as_the_connection_closes_is_passed_on() -> None:
    async def run() -> None:
        event = Event(1)
        connection, _ = served({WAIT: event.suspend}, Allowance(turn_s=math.inf))
        connection.data_received(encode_frame(Frame(WAIT)))
        event.come()
        connection.connection_lost(None)
        await turns()
        assert (event.made, event.passed_on) == (0, 1)

    asyncio.run(run())


def test_a_closed_connection_gives_its_turn_away() -> None:
    async def run() -> None:
        asked = Asked()
        host = slow()
        gone, _ = served({ASK: asked.handle}, host)
        there, _ = served({ASK: asked.handle}, host)
        gone.data_received(requests(0, 1, 2))
        there.data_received(requests(10))
        gone.connection_lost(None)
        await turns()
        assert asked.order == [0, 10]
        assert host.unhandled.held_bytes == 0

    asyncio.run(run())


def test_small_requests_that_wait_count_for_what_they_take() -> None:
    async def run() -> None:
        asked, count = Asked(), 1000
        connection, _ = served({ASK: asked.handle}, slow())
        connection.data_received(requests(*range(count)))
        assert connection.held_bytes > 400 * (count - 1)

    asyncio.run(run())
