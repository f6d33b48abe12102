"""An event loop in a thread of its own, for servers: it goes on whatever the loops and threads of tests do."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")

Work = Callable[[], Coroutine[Any, Any, _T]]


def running_loop() -> asyncio.AbstractEventLoop:
    """The event loop that this runs on. Raises RuntimeError where it is none of asyncio's."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            "no event loop of asyncio runs here, and nothing else can wait for a cluster's servers in a coroutine: "
            "enter it by `with`, and use `cluster.run(...)`"
        ) from None


class Home:
    """It runs from its making to its end. The thread is a daemon: a test that forgets it still ends."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="skylark-local-cluster", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left))
        finally:
            self._loop.close()

    def run(self, work: Work[_T]) -> _T:
        """Runs `work` there and waits for it, blocking."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("what runs where the servers run can't block until they have done something: await it")
        return self._submit(work).result()

    async def reach(self, work: Work[_T]) -> _T:
        """Runs `work` there, and waits for it on the caller's loop, whichever that is."""
        if running_loop() is self._loop:
            return await work()
        return await asyncio.wrap_future(self._submit(work))

    async def end_after(self, work: Work[None]) -> None:
        """The last work; the thread ends with it, also when nobody waits for that any more."""
        done = self._submit(work)
        done.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        await asyncio.shield(asyncio.wrap_future(done))
        self._thread.join()

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _submit(self, work: Work[_T]) -> concurrent.futures.Future[_T]:
        if self._pid != os.getpid():
            raise RuntimeError("the cluster's servers are in the process that this one was forked from: use them there")
        if self._loop.is_closed():
            raise RuntimeError("the cluster has ended: make another one")
        return asyncio.run_coroutine_threadsafe(work(), self._loop)
