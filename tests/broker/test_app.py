"""What the composition root does by itself: repeating work, and finding the address to tell clients."""

from __future__ import annotations

import asyncio
import logging

import pytest

from skylark.broker import app


def test_an_error_does_not_end_what_is_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app, "_HOUSEKEEPING_INTERVAL_S", 0)

    async def run() -> None:
        enough = asyncio.Event()
        calls = 0

        def work() -> float:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise ValueError("unforeseen")
            enough.set()
            return 60.0

        task = asyncio.create_task(app._repeat(work))
        await enough.wait()
        task.cancel()

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert "work failed, and is tried again" in caplog.text
    assert "unforeseen" in caplog.text


@pytest.mark.parametrize(
    ("host", "namesrv", "expected"),
    [
        ("127.0.0.1", "", "127.0.0.1"),
        ("example.test", "127.0.0.1:9876", "example.test"),
        ("0.0.0.0", "127.0.0.1:9876;10.0.0.1:9876", "127.0.0.1"),
        ("0.0.0.0", "no port", "127.0.0.1"),
    ],
)
def test_the_address_that_clients_are_told(host: str, namesrv: str, expected: str) -> None:
    assert app.advertised_address(host, namesrv) == expected
