"""A driver is killed again and again while it writes: nothing is lost, and with exactly-once nothing is twice.

It is a driver without Spark, which starts so fast that it can die often; tests/pipelines/test_kill.py kills Spark's.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from servers import Server, SkylarkServer

from spark.test_sink import in_queues

DRIVER = Path(__file__).with_name("batches.py")
KILLS = 5
BATCHES, ROWS = 60, 100
DEADLINE_S = 120.0
LOOK_EVERY_S = 0.005


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


def progress_of(file: Path) -> int:
    return int(file.read_text()) if file.exists() else 0


@pytest.mark.parametrize(
    ("kind", "guarantee"), [("skylark", "at-least-once"), ("apache", "at-least-once"), ("skylark", "exactly-once")]
)
def test_deaths_at_any_step(
    started: Callable[[str], Server], kind: str, guarantee: str, topic: str, tmp_path: Path
) -> None:
    chance, progress = random.Random(guarantee), tmp_path / "progress"
    with server_for(guarantee, kind, started, tmp_path / "server") as server:
        arguments = (server.namesrv_addr, topic, guarantee, progress, BATCHES, ROWS)
        command = [sys.executable, str(DRIVER), *map(str, arguments)]
        for _ in range(KILLS):
            kill_under_way(command, progress, chance.uniform(0, 0.1))
        assert progress_of(progress) < BATCHES, "the kills came too late to matter"
        subprocess.run(command, check=True, timeout=DEADLINE_S)
        found = Counter(map(int, in_queues(server.namesrv_addr, topic)))
    assert found.keys() == set(range(BATCHES * ROWS))
    if guarantee == "exactly-once":
        assert set(found.values()) == {1}


def kill_under_way(command: list[str], progress: Path, delay_s: float) -> None:
    """A moment after it has finished a batch, so at some step of one of the next."""
    before, deadline_s = progress_of(progress), time.monotonic() + DEADLINE_S
    with subprocess.Popen(command) as driver:
        try:
            while progress_of(progress) <= before:
                assert driver.poll() is None, "the driver failed"
                assert time.monotonic() < deadline_s, "the driver is not getting on"
                time.sleep(LOOK_EVERY_S)
            time.sleep(delay_s)
        finally:
            driver.kill()
