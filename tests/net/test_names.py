"""Names of hosts are looked up in a few threads of their own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from skylark.net import names
from skylark.net.names import addresses_of
from skylark.net.pool import Pool
from skylark.wire.frame import Frame

DEADLINE_S = 60


class Resolver:
    """Answers for no name that hangs until it is let."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._go_on = threading.Event()
        self._real = socket.getaddrinfo

    def getaddrinfo(self, host: str, *args: Any, **kwargs: Any) -> Any:
        self.asked.append(host)
        if host.startswith("hangs"):
            self._go_on.wait(3 * DEADLINE_S)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return self._real("127.0.0.1", *args, **kwargs)

    def end(self) -> None:
        self._go_on.set()


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    made = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", made.getaddrinfo)
    monkeypatch.setattr(names, "_look_ups", names._LookUps())
    yield made
    made.end()
    for found in list(names._look_ups._found.values()):
        found.exception(DEADLINE_S)


async def given_up(pool: Pool, host: str) -> None:
    with pytest.raises(TimeoutError, match=f"no connection to {host}:1 within"):
        await pool.request(f"{host}:1", Frame(1), 0.01)


def test_names_that_nobody_answers_for_hold_up_nothing_else(resolver: Resolver) -> None:
    async def run() -> None:
        pool = Pool(connect_timeout_s=0.01)
        before = threading.active_count()
        hosts = [f"hangs{number}" for number in range(names.MAX_THREADS + 3)]
        for _ in range(2):
            await asyncio.gather(*(given_up(pool, host) for host in hosts))
        assert threading.active_count() - before <= names.MAX_THREADS
        assert sorted(resolver.asked) == sorted(set(resolver.asked)), "each is looked up once"
        assert await addresses_of("127.0.0.1") == ["127.0.0.1"]
        assert await addresses_of("::1") == ["::1"]
        work = asyncio.get_running_loop().run_in_executor(None, lambda: "done")
        assert await asyncio.wait_for(work, DEADLINE_S) == "done"
        pool.close()

    asyncio.run(run())


def test_who_asks_for_the_same_name_shares_the_answer(resolver: Resolver) -> None:
    async def run() -> None:
        asked = [asyncio.create_task(addresses_of("hangs")) for _ in range(3)]
        await asyncio.sleep(0)
        asked[0].cancel()
        resolver.end()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(answer) for answer in answers] == [asyncio.CancelledError, socket.gaierror, socket.gaierror]
        assert resolver.asked == ["hangs"]
        assert await addresses_of("there") == ["127.0.0.1"]

    asyncio.run(run())


def test_the_next_address_is_tried_when_one_takes_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [(0, 0, 0, "", (address, 0)) for address in ("127.0.0.2", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: entries)

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            pool = Pool()
            connection = await pool.get(f"two:{server.getsockname()[1]}")
            assert connection.peer == server.getsockname()
            pool.close()

    asyncio.run(run())
