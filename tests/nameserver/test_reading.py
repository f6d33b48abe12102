"""Whose turn it is to have a large request read."""

from __future__ import annotations

import asyncio

import pytest

from skylark.nameserver import reading
from skylark.nameserver.reading import Busy, Turns


class Reader:
    """Reads for a host until it is told to end."""

    def __init__(self, turns: Turns, host: str, size_bytes: int = 1) -> None:
        self.end = asyncio.Event()
        self.is_reading = False
        self._task = asyncio.create_task(self._read(turns, host, size_bytes))

    async def _read(self, turns: Turns, host: str, size_bytes: int) -> None:
        async with turns.turn(host, size_bytes):
            self.is_reading = True
            await self.end.wait()
        self.is_reading = False

    async def done(self) -> None:
        self.end.set()
        await self._task

    def cancel(self) -> None:
        self._task.cancel()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_whoever_sends_a_lot_waits_for_itself_and_others_do_not() -> None:
    async def main() -> None:
        turns = Turns()
        greedy = [Reader(turns, "greedy") for _ in range(20)]
        await settled()
        honest = Reader(turns, "honest")
        await settled()
        assert [each.is_reading for each in greedy] == [True] + [False] * 19
        assert honest.is_reading
        # All places are taken now: who comes next has one request of each host before it, not all.
        other = Reader(turns, "other")
        await settled()
        assert not other.is_reading
        await greedy[0].done()
        await settled()
        assert other.is_reading
        assert not greedy[1].is_reading
        greedy[1].cancel()
        for each in (honest, other, greedy[2], *greedy[3:]):
            await each.done()
        assert turns._waiting == {}
        assert turns._of_host == {}

    asyncio.run(main())


def test_what_waits_is_bounded_and_shared_by_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_WAITING_BYTES", 100)

    async def main() -> None:
        turns = Turns()
        readers = [Reader(turns, "a", 30), Reader(turns, "a", 20)]
        await settled()
        for host, size_bytes in (("a", 1), ("b", 51)):
            with pytest.raises(Busy):
                await Reader(turns, host, size_bytes).done()
        readers.append(Reader(turns, "b", 50))
        await settled()
        with pytest.raises(Busy):
            await Reader(turns, "c", 1).done()
        for each in readers:
            await each.done()
        await Reader(turns, "a", 100).done()  # one is read, however much of the room it takes

    asyncio.run(main())
