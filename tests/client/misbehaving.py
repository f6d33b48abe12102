"""What functions that users write may do wrong, as a table."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from skylark.client.listening import Acked, RetryLater, RollBack, Suspend


class Undecided:
    """As an array of numpy, which says neither yes nor no."""

    def __bool__(self) -> bool:
        raise ValueError("ambiguous")


class Unspeakable(BaseException):
    """It fails to say what it is, too."""

    def __str__(self) -> str:
        raise SystemExit(1)


class LikeNumpyFalse:
    def __bool__(self) -> bool:
        return False


class Stops:
    """An awaitable that raises StopAsyncIteration, which a coroutine function can't."""

    def __await__(self) -> Iterator[None]:
        raise StopAsyncIteration
        yield


def raising(error: BaseException | type[BaseException]) -> Callable[[], Any]:
    def act() -> Any:
        raise error

    return act


def cancel_this_task() -> None:
    """Where there is one."""
    if threading.current_thread() is threading.main_thread():
        task = asyncio.current_task()
        assert task is not None
        task.cancel()


def late_suspension() -> Suspend:
    suspension = Suspend(1)
    suspension.seconds = math.nan
    return suspension


async def coroutine(*_: object) -> None:
    """In the place of a plain function: nobody awaits it."""


class AtFirst:
    """A plain function that misbehaves in another way with each call, and then no more."""

    def __init__(self, then: Callable[..., Any], *wrong: Any) -> None:
        self._then = then
        self._acts = iter([*map(_ignoring_arguments, RAISED.values()), coroutine, *map(_giving, wrong)])
        self.count = len(RAISED) + 1 + len(wrong)
        self.is_over = False

    def __call__(self, *args: Any) -> Any:
        act = next(self._acts, None)
        if act is not None:
            return act(*args)
        self.is_over = True
        return self._then(*args)


def _ignoring_arguments(act: Callable[[], Any]) -> Callable[..., Any]:
    return lambda *_: act()


def _giving(value: Any) -> Callable[..., Any]:
    return lambda *_: value


async def generator() -> AsyncIterator[None]:
    yield


RAISED: dict[str, Callable[[], Any]] = {
    "Exception": raising(ValueError("oops")),
    "CancelledError": raising(asyncio.CancelledError),
    "CancelledError of futures": raising(concurrent.futures.CancelledError),
    "StopIteration": raising(StopIteration("done")),
    "StopAsyncIteration": raising(StopAsyncIteration),
    "GeneratorExit": raising(GeneratorExit),
    "SystemExit": lambda: sys.exit(3),
    "without a text": raising(Unspeakable),
    "group": raising(BaseExceptionGroup("both", [SystemExit(1), asyncio.CancelledError()])),
}
IN_THREADS_ONLY: dict[str, Callable[[], Any]] = {"KeyboardInterrupt": raising(KeyboardInterrupt)}

WRONG_ANSWERS: dict[str, Callable[[], Any]] = {
    "neither true nor false": Undecided,
    "no number": lambda: Acked("all"),  # type: ignore[arg-type]
    "no level": lambda: RetryLater("soon"),  # type: ignore[arg-type]
    "level below": lambda: RetryLater(-2),
    "level raised": raising(RetryLater(None)),  # type: ignore[arg-type]
    "no seconds": late_suspension,
    "no pause": lambda: RollBack("soon"),  # type: ignore[arg-type]
    "generator": generator,
    "awaitable": Stops,
}
"""Of a listener; each is logged."""

FALSE_ANSWERS: dict[str, Callable[[], Any]] = {
    "False": lambda: False,
    "as numpy's": LikeNumpyFalse,
    "zero": lambda: 0,
    "empty": list,
}
TRUE_ANSWERS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "cancels itself": cancel_this_task,
    "text": lambda: "yes",
    "number": lambda: 5,
}
