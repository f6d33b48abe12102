"""The stacks of a process: its threads and what its tasks wait in."""

from __future__ import annotations

import asyncio
import threading

from skylark.client.stacks import dump


async def waits_inside(gate: asyncio.Event) -> None:
    await waits_deeper(gate)


async def waits_deeper(gate: asyncio.Event) -> None:
    await gate.wait()


def test_threads_and_tasks_are_shown_with_their_calls() -> None:
    release = threading.Event()
    begun = threading.Event()

    def busy() -> None:
        begun.set()
        release.wait()

    async def main() -> str:
        gate = asyncio.Event()
        task = asyncio.create_task(waits_inside(gate), name="the waiting one")
        await asyncio.sleep(0)
        text = dump()
        gate.set()
        await task
        return text

    thread = threading.Thread(target=busy, name="the busy one")
    thread.start()
    begun.wait()
    try:
        text = asyncio.run(main())
    finally:
        release.set()
        thread.join()
    lines = text.splitlines()
    assert f"{'the busy one':<40}TID: {thread.ident} STATE: RUNNING" in lines
    assert any(line.startswith("the busy one") and ".busy(test_stacks.py:" in line for line in lines)
    head = lines.index(f"{'the waiting one':<40}TASK STATE: WAITING")
    calls = [line.removeprefix(f"{'the waiting one':<40}").partition("(")[0] for line in lines[head + 1 : head + 4]]
    assert calls == ["asyncio.locks.Event.wait", f"{__name__}.waits_deeper", f"{__name__}.waits_inside"]
    assert lines[head + 4 : head + 5] in ([], [""])
    # The one that made the dump is running: it is in the stack of its thread.
    assert sum(".dump(stacks.py:" in line for line in lines) == 1
