"""Work that takes long, in a thread, so that the event loop can answer others meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """What `work` gives. Comes back when it has ended, also to who was cancelled meanwhile.

    Nobody can stop a thread: so a lock that is held around this lets the next one in only when it is over.
    """
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        if not working.cancelled():
            working.exception()  # looked at, so that nobody complains that it was not
        raise
