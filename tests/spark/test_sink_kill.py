"""The driver is killed again and again while it writes: nothing is lost, and with exactly-once nothing is twice."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers import SERVERS

from skylark.client.errors import RouteNotFound
from skylark.spark import positions
from skylark.spark.cluster import Cluster
from skylark.spark.options import read_options
from skylark.spark.planning import ranges_between
from skylark.spark.reading import Wanted, read_ranges

DRIVER = Path(__file__).with_name("batches.py")
KILLS = 6
BATCHES = 30
ROWS = 200
DEADLINE_S = 240.0
LOOK_S = 0.02


@pytest.fixture
def namesrv(tmp_path: Path) -> Iterator[str]:
    server = SERVERS["skylark"](tmp_path / "server")
    server.start()
    yield server.namesrv_addr
    server.kill()


def count(cluster: Cluster, topic: str) -> int:
    try:
        return sum(cluster.max_offsets(cluster.queues(topic)).values())
    except RouteNotFound:
        return 0


def bodies(namesrv: str, topic: str) -> Counter[int]:
    options = read_options({"nameServer": namesrv, "subscribe": topic})
    with Cluster(namesrv, 10.0) as cluster:
        queues = positions.queues_of(cluster, options)
        ranges = ranges_between(cluster.min_offsets(queues), cluster.max_offsets(queues))
    found: Counter[int] = Counter()
    for batch in read_ranges(Wanted(options, ["body"]), ranges):
        found.update(int(body) for body in batch.column(0).to_pylist())
    return found


def tree(root: int) -> list[int]:
    """The processes below a process."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = []
    wanted = [root]
    while wanted:
        below = children.get(wanted.pop(), [])
        found += below
        wanted += below
    return found


def run_driver(command: list[str], directory: Path, is_enough: Callable[[], bool], with_workers: bool) -> None:
    """Until it is done, or killed when it is enough. Where Spark itself gives up, on a busy machine, it begins anew."""
    until = time.monotonic() + DEADLINE_S
    output = directory / "driver.log"
    while True:
        with output.open("a") as log:
            driver = subprocess.Popen(command, start_new_session=True, stderr=log)
        try:
            while driver.poll() is None and not is_enough():
                assert time.monotonic() < until, f"the driver is not getting on: {output.read_text()}"
                time.sleep(LOOK_S)
        finally:
            if driver.poll() is None:
                kill(driver, with_workers)
        if driver.returncode == 0 or is_enough():
            return


def kill(driver: subprocess.Popen[bytes], with_workers: bool) -> None:
    """Its Python workers live in a group of their own: they die with it, or some time after it."""
    workers = tree(driver.pid) if with_workers else []
    os.killpg(driver.pid, signal.SIGKILL)
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    driver.wait()


@pytest.mark.parametrize("guarantee", ["at-least-once", "exactly-once"])
def test_deaths_at_any_step(namesrv: str, tmp_path: Path, guarantee: str) -> None:
    """The steps of a driver without Spark, which starts so fast that it can die often."""
    command = [sys.executable, str(DRIVER), namesrv, "plain", guarantee, str(tmp_path)]
    command += [str(BATCHES), str(ROWS)]
    total = BATCHES * ROWS
    chance = random.Random(guarantee)
    with Cluster(namesrv, 10.0) as cluster:
        for _ in range(KILLS):
            enough = count(cluster, "plain") + chance.randrange(1, total // (2 * KILLS))
            run_driver(command, tmp_path, lambda enough=enough: count(cluster, "plain") >= enough, with_workers=False)
    run_driver(command, tmp_path, lambda: False, with_workers=False)
    found = bodies(namesrv, "plain")
    assert set(found) == set(range(total))
    if guarantee == "exactly-once":
        assert max(found.values()) == 1
    else:
        assert max(found.values()) > 1, "no kill came while a batch was under way"
