"""An answer that is made when its peer takes it, not when it could be."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from skylark.wire.frame import Frame


class Suspended:
    """An answer that waits for an event: `answer` makes it once `ready` is done and the peer takes it.

    Until then a peer that does not read costs nothing but the request, and `held_bytes` if the answer is made already.
    If it does not read when the event comes, `pass_on` is called: somebody else may want to know of it.
    """

    def __init__(
        self,
        ready: asyncio.Future[Any],
        answer: Callable[[], Frame | Awaitable[Frame | None] | None],
        pass_on: Callable[[], object] | None = None,
        held_bytes: int = 0,
    ) -> None:
        self.ready = ready
        self.answer = answer
        self.pass_on = pass_on
        self.held_bytes = held_bytes

    def give_away(self) -> None:
        """The peer does not take it: who else wants to know of the event is told, once."""
        pass_on, self.pass_on = self.pass_on, None
        if pass_on is not None:
            pass_on()

    def __await__(self) -> Generator[Any, None, Frame | None]:
        return self._wait().__await__()

    async def _wait(self) -> Frame | None:
        """The answer for whoever is no connection."""
        await self.ready
        answer = self.answer()
        return answer if answer is None or isinstance(answer, Frame) else await answer
