"""kill -9 of the driver of an archive, at every step of a batch: each message is in the files once, for any reader.

The files are read with pyarrow, not with Spark, after every kill and at the end. One kill here; with the environment
variable SKYLARK_ARCHIVE_KILLS=10 there are ten, over 200,000 messages.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from servers import SkylarkServer

from skylark.client.sync import Producer

KILLS = int(os.environ.get("SKYLARK_ARCHIVE_KILLS", "1"))
MESSAGES, BATCH = (200_000, 5_000) if KILLS >= 10 else (12_000, 2_000)
TOPIC = "Archived"
DEADLINE_S = 240.0
LOOK_EVERY_S = 0.01


@pytest.fixture
def namesrv(tmp_path: Path) -> Iterator[str]:
    server = SkylarkServer(tmp_path / "server")
    server.start()
    yield server.namesrv_addr
    server.kill()


class Lake:
    """The directory from outside: what is there says which step the driver is at."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def offsets(self) -> int:
        return self._last("_archive/checkpoint/offsets/*")

    def staged(self) -> int:
        return self._last("_archive/staging/*/*/*", part=-3)

    def planned(self) -> int:
        return self._last("_archive/planned/*")

    def moved(self) -> int:
        return self._last("topic=*/date=*/*.parquet")

    def done(self) -> int:
        return self._last("_archive/done/*")

    def committed(self) -> int:
        return self._last("_archive/checkpoint/commits/*")

    def _last(self, pattern: str, part: int = -1) -> int:
        names = (path.parts[part] for path in self.path.glob(pattern))
        return max((int(found[0]) for name in names if (found := re.match(r"\d+", name))), default=-1)

    def numbers(self) -> list[int]:
        """What is in the bodies, as a reader that knows nothing of Spark finds it."""
        if self.moved() < 0:
            return []
        table = ds.dataset(self.path, format="parquet", partitioning="hive").to_table(columns=["body"])
        return sorted(map(int, table.column("body").to_pylist()))


def driver(namesrv: str, lake: Lake, log: Path) -> subprocess.Popen[bytes]:
    arguments = ["pipeline", "archive", TOPIC, "--to", str(lake.path), "--max-per-batch", str(BATCH), "-n", namesrv]
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "skylark", *arguments, "--master", "local[2]"],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def kill_when(
    process: subprocess.Popen[bytes], step: Callable[[], int], batches: int, delay_s: float, *, everything: bool
) -> None:
    """kill -9 when so many more batches have come to the step, and a random moment later."""
    goal = step() + batches
    deadline_s = time.monotonic() + DEADLINE_S
    while step() < goal:
        assert process.poll() is None, f"the driver ended by itself with {process.returncode}"
        assert time.monotonic() < deadline_s, f"the driver does not come to {step.__name__}"
        time.sleep(LOOK_EVERY_S)
    time.sleep(delay_s)
    if everything:
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()  # the JVM notices, and may finish what it is at
    process.wait()


@pytest.mark.timeout(1200)
def test_each_message_is_kept_once_whatever_is_killed(namesrv: str, tmp_path: Path) -> None:
    with Producer(namesrv, group="archived") as producer:
        for start in range(0, MESSAGES, 1000):
            producer.send_batch(TOPIC, [str(number).encode() for number in range(start, start + 1000)])
    lake, log, chance = Lake(tmp_path / "lake"), tmp_path / "driver.log", random.Random(7)
    lake.path.mkdir()
    steps = [lake.moved, lake.done, lake.planned, lake.staged, lake.offsets, lake.committed]
    processes = []
    try:
        for kill in range(KILLS):
            processes.append(driver(namesrv, lake, log))
            step, batches, delay_s = steps[kill % len(steps)], chance.randint(1, 3), chance.uniform(0, 0.04)
            try:
                kill_when(processes[-1], step, batches, delay_s, everything=bool(kill % 2))
            except AssertionError as e:
                raise AssertionError(f"{e}\n{log.read_text()}") from e
            kept = lake.numbers()
            print(f"kill {kill + 1} at {step.__name__} + {delay_s * 1000:.0f} ms: {len(kept)} messages in the files")
            assert len(kept) == len(set(kept)), f"doubles after a kill at {step.__name__}"
        processes.append(driver(namesrv, lake, log))
        assert processes[-1].wait(DEADLINE_S) == 0, log.read_text()
    finally:
        for process in processes:
            end(process)
    assert lake.numbers() == list(range(MESSAGES))
    assert not list(lake.path.glob("_archive/staging/*")), "what is done leaves nothing aside"


def end(process: subprocess.Popen[bytes]) -> None:
    """The driver and whatever it started, which is in its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
