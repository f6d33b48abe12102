"""kill -9 of the driver of an archive, at every step of a batch: each message is in the files once, for any reader.

The files are read with pyarrow, not with Spark, after every kill and at the end. One kill here; with the environment
variable SKYLARK_ARCHIVE_KILLS=10 there are ten, over 200,000 messages.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from servers import SkylarkServer

from patience import DEADLINE_S
from pipelines.conftest import Skylark
from skylark.client.sync import Producer

KILLS = int(os.environ.get("SKYLARK_ARCHIVE_KILLS", "1"))
MOST = 2  # batches until a kill
MESSAGES, BATCH = (200_000, 5_000) if KILLS >= 10 else ((KILLS * MOST + 2) * 1_000, 1_000)
STEPS = ["moved", "done", "planned", "writing", "begun", "staged"]
TOPIC = "Archived"
DRIVER = Path(__file__).with_name("held.py")
LOOK_EVERY_S = 0.02


@pytest.fixture
def namesrv(tmp_path: Path) -> Iterator[str]:
    server = SkylarkServer(tmp_path / "server")
    server.start()
    yield server.namesrv_addr
    server.kill()


def kept(lake: Path) -> list[int]:
    """What is in the bodies, as a reader that knows nothing of Spark finds it."""
    if not list(lake.glob("topic=*/date=*/*.parquet")):
        return []
    table = ds.dataset(lake, format="parquet", partitioning="hive").to_table(columns=["body"])
    return sorted(map(int, table.column("body").to_pylist()))


class Driver:
    """The command, held when it has come to a step for so many times."""

    def __init__(self, arguments: list[str], step: str, times: int, directory: Path) -> None:
        self._log = directory / "driver.log"
        self._file = directory / "held"
        self._file.unlink(missing_ok=True)
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(DRIVER), step, str(times), str(self._file), *arguments, "--master", "local[2]"],
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_held(self) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not self._file.exists():
            assert self._process.poll() is None, f"it ended with {self._process.returncode}\n{self._log.read_text()}"
            assert time.monotonic() < deadline_s, f"it does not come to the step\n{self._log.read_text()}"
            time.sleep(LOOK_EVERY_S)

    def kill(self) -> None:
        """The JVM notices, and may finish what it is at."""
        self._process.kill()
        self._process.wait()

    def kill_all(self) -> None:
        """It and whatever it started, which is in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.mark.timeout(1200)
def test_each_message_is_kept_once_whatever_is_killed(skylark: Skylark, namesrv: str, tmp_path: Path) -> None:
    with Producer(namesrv, group="archived", timeout_s=DEADLINE_S) as producer:
        for start in range(0, MESSAGES, 1000):
            producer.send_batch(TOPIC, [str(number).encode() for number in range(start, start + 1000)])
    lake, chance = tmp_path / "lake", random.Random(7)
    command = ["pipeline", "archive", TOPIC, "--to", str(lake), "--max-per-batch", str(BATCH), "-n", namesrv]
    drivers = []
    try:
        for number in range(KILLS):
            step, times = STEPS[number % len(STEPS)], chance.randint(1, MOST)
            drivers.append(Driver(command, step, times, tmp_path))
            drivers[-1].wait_held()
            (drivers[-1].kill_all if number % 2 else drivers[-1].kill)()
            found = kept(lake)
            print(f"kill {number + 1} at {step}: {len(found)} messages in the files")
            assert len(found) == len(set(found)), f"doubles after a kill at {step}"
            assert len(found) < MESSAGES, "the kill came too late to matter"
        ran = skylark(*command)
        assert ran.code == 0, ran.err
    finally:
        for driver in drivers:
            driver.kill_all()
    assert kept(lake) == list(range(MESSAGES))
    assert not list(lake.glob("_archive/staging/*")), "what is done leaves nothing aside"
