"""Long work for one request, in steps that leave the event loop to the others in between.

Walks over as many items as a client likes go in `steps`; what is left to encode then goes to a thread (`beside`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final, TypeVar

T = TypeVar("T")

ITEMS_PER_TURN: Final = 256


async def steps(items: Iterable[T], items_per_turn: int = ITEMS_PER_TURN) -> AsyncIterator[T]:
    """The items; the loop turns after some of them, so that what they belong to may have changed."""
    for number, item in enumerate(items, 1):
        yield item
        if number % items_per_turn == 0:
            await asyncio.sleep(0)


async def beside(work: Callable[[], T]) -> T:
    """What `work` gives, which must not touch what the loop changes."""
    return await asyncio.get_running_loop().run_in_executor(None, work)
