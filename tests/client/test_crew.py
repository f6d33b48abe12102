"""Tasks of a consumer that only the consumer ends."""

from __future__ import annotations

import asyncio
import logging

import pytest

from client.inbox import eventually
from skylark.client import crew
from skylark.client.crew import Crew


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "_AGAIN_S", 0.0)


def test_work_that_ends_by_an_error_or_a_stray_cancellation_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        errors = [ValueError("oops"), asyncio.CancelledError()]
        done = asyncio.Event()

        async def work() -> None:
            if errors:
                raise errors.pop(0)
            done.set()

        await Crew("g").hire(work, "work")
        assert done.is_set()

    asyncio.run(main())
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "oops" in caplog.text


def test_somebody_who_cancels_one_task_does_not_end_it() -> None:
    async def main() -> None:
        begun: list[int] = []

        async def work() -> None:
            begun.append(1)
            if len(begun) == 1:
                await asyncio.Event().wait()

        task = Crew("g").hire(work, "work")
        await eventually(lambda: len(begun) == 1)
        task.cancel()
        await task
        assert len(begun) == 2

    asyncio.run(main())


def test_a_task_can_not_cancel_itself(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async def work() -> None:
            task = asyncio.current_task()
            assert task is not None
            assert not task.cancel()
            await asyncio.sleep(0)

        await Crew("g").hire(work, "work")

    asyncio.run(main())
    assert "was to be cancelled by what it called" in caplog.text


def test_the_end_of_the_loop_ends_everything(caplog: pytest.LogCaptureFixture) -> None:
    begun: list[int] = []

    async def work() -> None:
        begun.append(1)
        await asyncio.Event().wait()

    async def main() -> None:
        tasks = [Crew("g").hire(work, "work"), Crew("g").hire(work, "work")]
        await eventually(lambda: len(begun) == len(tasks))

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert len(begun) == 2
    assert caplog.text.count("all tasks were cancelled before it was closed") == 2


def test_a_task_that_does_not_end_is_left_behind(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "CANCEL_WAIT_S", 0.01)

    async def main() -> None:
        begun, enough = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            begun.set()
            while not enough.is_set():
                try:
                    await enough.wait()
                except asyncio.CancelledError:
                    continue

        employer = Crew("g")
        task = employer.hire(work, "work")
        await begun.wait()
        await employer.end()
        assert not task.done()
        enough.set()
        await task

    asyncio.run(main())
    assert "1 tasks do not end" in caplog.text
