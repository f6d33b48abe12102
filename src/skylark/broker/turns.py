"""Long work for one request, in steps that leave the event loop to the others in between.

Walks over as many items as a client likes go in `steps`; what is left to encode then goes to a thread (`beside`). The
walks of all requests take turns, one in each turn of the loop, so that they hold up the others as little as one alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

from skylark.net.hosts import host_key

T = TypeVar("T")

ITEMS_PER_TURN: Final = 256


class Rota:
    """Who goes on when, on one event loop: one in each turn of it, and the hosts that ask one after the other."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether somebody waits for a turn."""
        return bool(self._waiting)

    def turn(self, host: str = "") -> asyncio.Future[None]:
        """Done when it is the turn of whoever asks."""
        begun: asyncio.Future[None] = self._loop.create_future()
        if not self._waiting:
            self._loop.call_soon(self._begin)
        self._waiting.setdefault(host_key(host), deque()).append(begun)
        return begun

    def _begin(self) -> None:
        begun = self._next()
        while begun is not None and begun.done():  # nobody waits for it any more
            begun = self._next()
        if begun is not None:
            begun.set_result(None)
        if self._waiting:
            self._loop.call_soon(self._begin)

    def _next(self) -> asyncio.Future[None] | None:
        if not self._waiting:
            return None
        host = next(iter(self._waiting))
        line = self._waiting.pop(host)
        begun = line.popleft()
        if line:
            self._waiting[host] = line  # behind the others
        return begun


_rotas: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, Rota]] = WeakKeyDictionary()


def next_turn(host: str = "") -> asyncio.Future[None]:
    """Done when others had their turn, of the requests of `host` and then of those of other hosts."""
    return _rota().turn(host)


def _rota() -> Rota:
    loop = asyncio.get_running_loop()
    rota = _rotas.get(loop)
    if rota is None:
        rota = _rotas[loop] = Rota(loop)
    return rota


class Turns:
    """Counts items for walks that are part of one: however short each is, the loop turns after some items of all."""

    def __init__(self, items_per_turn: int = ITEMS_PER_TURN) -> None:
        self._items_per_turn = items_per_turn
        self._count = 0

    async def through(self, items: Iterable[T]) -> AsyncIterator[T]:
        """The items; the loop turns after some of them, so that what they belong to may have changed."""
        if not self._count and _rota().is_busy:
            await next_turn()
        for item in items:
            yield item
            self._count += 1
            if self._count % self._items_per_turn == 0:
                await next_turn()


def steps(items: Iterable[T], items_per_turn: int = ITEMS_PER_TURN) -> AsyncIterator[T]:
    """One walk."""
    return Turns(items_per_turn).through(items)


async def beside(work: Callable[[], T]) -> T:
    """What `work` gives, which must not touch what the loop changes."""
    return await asyncio.get_running_loop().run_in_executor(None, work)
