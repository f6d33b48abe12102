"""What this process is doing right now, in words: the stack of every thread and of every task of the event loop.

It is what an operator gets who asks a consumer for its running info with a stack dump (`mqadmin consumerStatus -s`), in
the form of Apache's: a head line a thread or task, then a line a call, the innermost first, and an empty line.

    listener of orders_0                    TID: 140213 STATE: RUNNING
    listener of orders_0                    shop.orders.handle(orders.py:42)
    listener of orders_0                    threading.Thread.run(threading.py:982)

A task that waits shows the whole chain of coroutines that wait for each other; the task that runs is in the stack of
its thread.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import PurePath
from types import CoroutineType, FrameType
from typing import Final

MAX_DEPTH: Final = 64
MAX_TASKS: Final = 1_000


def dump() -> str:
    """All stacks. Called on the event loop, whose tasks are shown."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        _section(names.get(ident, "?"), f"TID: {ident} STATE: RUNNING", _calls(frame))
        for ident, frame in sorted(sys._current_frames().items())
    ]
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    parts += [_section(task.get_name(), "TASK STATE: WAITING", _waits(task)) for task in tasks[:MAX_TASKS]]
    if len(tasks) > MAX_TASKS:
        parts.append(f"and {len(tasks) - MAX_TASKS} more tasks\n")
    return "\n".join(part for part in parts if part)


def _section(name: str, state: str, calls: list[str]) -> str:
    """Nothing at all for what has no stack: a task that has not begun, or that is the one running."""
    if not calls:
        return ""
    return "".join(f"{name:<40}{line}\n" for line in (state, *calls))


def _calls(frame: FrameType | None) -> list[str]:
    calls: list[str] = []
    while frame is not None and len(calls) < MAX_DEPTH:
        calls.append(_in_words(frame))
        frame = frame.f_back
    return calls


def _waits(task: asyncio.Task[object]) -> list[str]:
    """From what the task waits in to its outermost coroutine."""
    return [_in_words(frame) for frame in reversed(list(_awaited_frames(task.get_coro())))]


def _awaited_frames(coroutine: object) -> Iterator[FrameType]:
    for _ in range(MAX_DEPTH):
        if not isinstance(coroutine, CoroutineType) or coroutine.cr_frame is None or coroutine.cr_running:
            return
        yield coroutine.cr_frame
        coroutine = coroutine.cr_await


def _in_words(frame: FrameType) -> str:
    code = frame.f_code
    module = frame.f_globals.get("__name__", "?")
    return f"{module}.{code.co_qualname}({PurePath(code.co_filename).name}:{frame.f_lineno})"
