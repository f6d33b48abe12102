"""From a client's start to its end: each happens once, whatever is cancelled or called at the same time.

- Closed while it starts, its start is ended first: nothing goes on behind the end.
- A start that fails or is cancelled ends what it had begun.
- Whoever gives up waiting for the end does not stop it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from skylark.client.calling import is_cancelled
from skylark.client.crew import Worker
from skylark.client.errors import ClientClosed

log = logging.getLogger(__name__)

Step = Callable[[], Coroutine[Any, Any, None]]


class Life:
    """The one start and the one end of a client."""

    def __init__(self, name: str, end: Step) -> None:
        """`end` undoes whatever the start has done so far."""
        self._name = name
        self._end = end
        self._starting: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    async def begin(self, start: Step) -> None:
        """Raises ClientClosed if it is ended meanwhile."""
        self._starting = Worker(start(), loop=asyncio.get_running_loop(), name=f"start of {self._name}")
        try:
            await self._starting
        except BaseException as e:
            was_ended = self._ending is not None and isinstance(e, asyncio.CancelledError) and not is_cancelled()
            await self.end()
            if not was_ended:
                raise
            raise ClientClosed("the consumer was closed before it had started") from None

    async def end(self) -> None:
        """Returns when it has ended."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end_all(), name=f"end of {self._name}")
            self._ending.add_done_callback(self._tell_failure)
        await asyncio.shield(self._ending)

    async def _end_all(self) -> None:
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        await self._end()

    def _tell_failure(self, ending: asyncio.Task[None]) -> None:
        if not ending.cancelled() and (error := ending.exception()) is not None:
            log.error("%s: closing went wrong", self._name, exc_info=error)
