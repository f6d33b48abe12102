"""A driver is killed at each of its steps while it writes: nothing is lost, and with exactly-once nothing is twice.

It is a driver without Spark, which starts so fast that it can die often; tests/pipelines/test_kill.py kills Spark's.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from servers import Server, SkylarkServer

from patience import DEADLINE_S
from spark.conftest import wait_until
from spark.test_sink import in_queues

DRIVER = Path(__file__).with_name("batches.py")
ROWS = {"at-least-once": 1100, "exactly-once": 200}  # half a task's are more than one request
STEPS = {
    "at-least-once": ["sending", "task", "committed", "noted"],
    "exactly-once": ["sending", "task", "part", "manifest", "ended", "done", "committed", "noted"],
}


@contextmanager
def server_for(guarantee: str, kind: str, started: Callable[[str], Server], directory: Path) -> Iterator[Server]:
    """Half messages that nobody ends would go on being asked for, so they get a server that goes away with them."""
    if guarantee == "at-least-once":
        yield started(kind)
        return
    server = SkylarkServer(directory)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("kind", "guarantee"), [("skylark", "at-least-once"), ("apache", "at-least-once"), ("skylark", "exactly-once")]
)
def test_deaths_at_every_step(
    started: Callable[[str], Server], kind: str, guarantee: str, topic: str, tmp_path: Path
) -> None:
    steps, rows = STEPS[guarantee], ROWS[guarantee]
    written = set(range((len(steps) + 2) * rows))
    with server_for(guarantee, kind, started, tmp_path / "server") as server:
        arguments = (server.namesrv_addr, topic, guarantee, tmp_path / "progress", rows, *steps)
        subprocess.run([sys.executable, str(DRIVER), *map(str, arguments)], check=True, timeout=DEADLINE_S)
        # Apache's queues follow its log.
        wait_until(lambda: set(map(int, in_queues(server.namesrv_addr, topic))) == written)
        found = Counter(map(int, in_queues(server.namesrv_addr, topic)))
    assert found.keys() == written
    if guarantee == "exactly-once":
        assert set(found.values()) == {1}
    else:
        assert max(found.values()) > 1, "a batch that was under way is written again"
