"""Calling what users wrote: listeners, hooks, filters, strategies, checkers.

Such a function may raise anything, also what is no Exception: CancelledError, SystemExit. Let through, these would end
whatever task, thread or event loop it was called in, and with it the work for everybody else. Here they become failures
like any other. Only a Ctrl-C goes through, which reaches a program in its main thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import CoroutineType
from typing import Any, TypeVar

from skylark.client.errors import CallbackFailed

_T = TypeVar("_T")


def failure_of(error: BaseException) -> Exception:
    """The error as one that only tells that a call failed. Raises KeyboardInterrupt in the main thread."""
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise error
    # A future, and a coroutine that it leaves, make something else of StopIteration.
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failure = CallbackFailed(f"it raised {_text_of(error)}")
    failure.__cause__ = error
    return failure


def _text_of(error: BaseException) -> str:
    """Its name, and what it says, which a class of the user's may fail to."""
    name = type(error).__name__
    try:
        return f"{name}({error})"
    except BaseException:
        return name


def call(function: Callable[..., _T], *args: Any) -> _T:
    """What a plain function returns. Raises Exceptions only."""
    try:
        result = function(*args)
    except BaseException as e:
        raise failure_of(e) from None
    if isinstance(result, CoroutineType):
        result.close()
        raise CallbackFailed(f"{function!r} is a coroutine function, and a plain one is called here")
    return result


def caught(function: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    """What a function returns, or what it raised."""
    try:
        return function(*args), None
    except BaseException as e:
        return None, failure_of(e)


def running_task() -> asyncio.Task[Any] | None:
    """The task that runs now; None also where no event loop does."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def is_cancelled() -> bool:
    """Whether somebody wants the task that runs now to end."""
    task = running_task()
    return task is not None and task.cancelling() > 0


def forget_cancels(task: asyncio.Task[Any]) -> None:
    """After a cancellation that was not meant for the task."""
    while task.cancelling():
        task.uncancel()
