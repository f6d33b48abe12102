"""The tasks of one consumer, which only the consumer ends.

A task that ends by an error, or because somebody else cancelled it, is logged and started again: a queue, a worker or a
commit that silently stood still would be found by its lag only. Where everything is cancelled, as by the end of
`asyncio.run`, nothing is started again. To tell that apart there is one task more, which nobody has a handle of.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Generic, TypeVar

from skylark.client.calling import forget_cancels

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_AGAIN_S: Final = 1.0
CANCEL_WAIT_S: Final = 3.0
"""So long a task may take to end after it was cancelled."""

Work = Callable[[], Coroutine[Any, Any, None]]


class Worker(asyncio.Task[_T], Generic[_T]):
    """A task that what it calls can't cancel: `asyncio.current_task().cancel()` in a listener does nothing."""

    def cancel(self, msg: Any | None = None) -> bool:
        if asyncio.current_task(self.get_loop()) is self:
            log.error("%s: it was to be cancelled by what it called, and goes on", self.get_name())
            return False
        return super().cancel(msg)


class Crew:
    """Starts tasks, and starts them again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._workers: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._is_dismissed = False
        self._has_complained = False

    @property
    def is_ending(self) -> bool:
        """Whether a cancellation is meant: by the owner, or by somebody who cancels everything."""
        if self._is_dismissed:
            return True
        if self._watch is None or not (self._watch.cancelling() or self._watch.done()):
            return False
        if not self._has_complained:
            self._has_complained = True
            log.warning("%s: all tasks were cancelled before it was closed; it stops, and commits nothing", self._name)
        return True

    def hire(self, work: Work, what: str, *, until: Callable[[], bool] = lambda: False) -> Worker[None]:
        """Runs `work` to its end; as long as not `until`, an error or a cancellation is none."""
        loop = asyncio.get_running_loop()
        if self._watch is None:
            self._watch = asyncio.create_task(_forever(), name=f"watch of {self._name}")
        worker = Worker(self._keep(work, what, until), loop=loop, name=f"{what} of {self._name}")
        self._workers.add(worker)
        worker.add_done_callback(self._workers.discard)
        return worker

    async def _keep(self, work: Work, what: str, until: Callable[[], bool]) -> None:
        again = False
        while not (again and (self.is_ending or until())):
            try:
                if again:
                    await asyncio.sleep(_AGAIN_S)
                await work()
                return
            except asyncio.CancelledError:
                if self.is_ending or until():
                    raise
                task = asyncio.current_task()
                assert task is not None
                forget_cancels(task)
                log.error("%s: its %s was cancelled from outside and is started again", self._name, what)
            except Exception:
                log.exception("%s: its %s ended by an error and is started again", self._name, what)
            again = True

    def dismiss(self) -> None:
        """From now on a cancellation is meant."""
        self._is_dismissed = True

    async def end(self) -> None:
        """Cancels what runs, and waits for it, but not for ever."""
        self.dismiss()
        tasks = [*self._workers, *([self._watch] if self._watch is not None else [])]
        for task in tasks:
            task.cancel()
        late = await wait_for_end(tasks)
        if late:
            log.error("%s: %d tasks do not end although they were cancelled; they are left behind", self._name, late)


async def wait_for_end(cancelled: Sequence[asyncio.Task[Any]]) -> int:
    """Waits for tasks that were cancelled; how many still run, because what they called does not let go."""
    others = [task for task in cancelled if task is not asyncio.current_task()]
    if not others:
        return 0
    _, late = await asyncio.wait(others, timeout=CANCEL_WAIT_S)
    return len(late)


async def _forever() -> None:
    await asyncio.get_running_loop().create_future()
