"""Every test of this directory runs on both event loops that Skylark is served on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

FACTORIES: dict[str, Callable[[], asyncio.AbstractEventLoop] | None] = {"asyncio": None}
try:
    import uvloop
except ImportError:
    pass
else:
    FACTORIES["uvloop"] = uvloop.new_event_loop


@pytest.fixture(autouse=True, params=FACTORIES)
def _event_loop_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(main: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=FACTORIES[request.param]) as runner:
            return runner.run(main)

    monkeypatch.setattr(asyncio, "run", run)
