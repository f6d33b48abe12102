"""kill -9 of a Spark driver while its pipelines are held in the middle of batches, and how they go on after it.

Pipelines share a driver, since a start of Spark costs more than all that they do: into Parquet files and exactly once
into a topic, both on Skylark. One kill here; with the environment variable SKYLARK_PIPELINE_KILLS=3 there are three,
and another pipeline writes at least once into a topic on Apache's servers. Single writers are killed there in any case,
by `spark/test_sink_kill.py`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from rich.console import Console
from servers import Server, SkylarkServer

from patience import DEADLINE_S
from skylark.client.errors import RouteNotFound
from skylark.client.sync import Producer
from skylark.pipelines import spec
from skylark.pipelines.progress import follow_all
from skylark.pipelines.running import start
from skylark.spark import positions
from skylark.spark.bodies import Shape
from skylark.spark.cluster import Cluster
from skylark.spark.options import read_options
from skylark.spark.planning import ranges_between
from skylark.spark.reading import read_ranges
from spark.conftest import wait_until

KILLS = int(os.environ.get("SKYLARK_PIPELINE_KILLS", "1"))
MESSAGES, BATCH = 1200, 150
# Messages at which pipelines are held: in the third batch, in the seventh and in the last.
HELD_AT = [600, 850, 890]
SOURCE = """\
name: {name}
source:
  format: rocketmq
  options: {{nameServer: "{namesrv}", subscribe: {topic}, startingOffsets: earliest, maxOffsetsPerTrigger: {batch}}}
transforms: [{{sql: select body from input}}, {{python: "gate_{name}:gated"}}]
"""
TO_FILES = "sink: {format: parquet, path: files}\n"
TO_TOPIC = 'sink: {{format: rocketmq, options: {{nameServer: "{namesrv}", topic: {topic}_{name}, {more}}}}}\n'


GATE = """\
import pathlib, time
from pyspark.sql import functions as f

DIRECTORY, NAME = pathlib.Path({directory!r}), {name!r}

@f.udf(returnType="binary", useArrow=False)
def held(body):
    number = int(body)
    gate = DIRECTORY / f"gate-{{number}}"
    if gate.exists():
        (DIRECTORY / f"{{NAME}}-at-{{number}}").touch()
        while gate.exists():
            time.sleep(0.05)
    return body

def gated(rows):
    return rows.select(held("body").alias("body"))
"""


class Target:
    """A pipeline in a directory of its own, and what has come out of it."""

    def __init__(self, directory: Path, name: str, server: Server, topic: str, sink: str, more: str = "") -> None:
        self.name = name
        self.file = directory / f"{name}.yaml"
        self._directory = directory
        self._checkpoint = directory / "checkpoints" / name
        self._files = directory / "files"
        self._namesrv = server.namesrv_addr
        self._topic = f"{topic}_{name}" if sink == TO_TOPIC else None
        if self._topic is not None:
            sink = sink.format(namesrv=self._namesrv, topic=topic, name=name, more=more)
        (directory / f"gate_{name}.py").write_text(GATE.format(directory=str(directory), name=name))
        self.file.write_text(SOURCE.format(name=name, namesrv=self._namesrv, topic=topic, batch=BATCH) + sink)

    def is_held(self, number: int) -> bool:
        """Whether it waits at a message: it does so while there is the file `gate-NUMBER`."""
        return (self._directory / f"{self.name}-at-{number}").exists()

    @property
    def batches_begun(self) -> int:
        return len(list(self._checkpoint.glob("offsets/[0-9]*")))

    @property
    def batches_done(self) -> int:
        return len(list(self._checkpoint.glob("commits/[0-9]*")))

    def numbers(self) -> Counter[int]:
        return Counter(map(int, self._in_topic() if self._topic is not None else self._in_files()))

    def _in_files(self) -> Iterator[bytes]:
        """The files that Spark's own list names: those of a batch that was killed are not among them."""
        lists = [log.read_text().splitlines()[1:] for log in self._files.glob("_spark_metadata/[0-9]*")]
        # Now and then a list repeats those before it.
        for name in {json.loads(line)["path"].rpartition("/")[2] for lines in lists for line in lines}:
            yield from pq.read_table(self._files / name).column("body").to_pylist()

    def _in_topic(self) -> Iterator[bytes]:
        options = read_options({"nameServer": self._namesrv, "subscribe": str(self._topic)})
        with Cluster(self._namesrv, DEADLINE_S) as cluster:
            try:
                queues = positions.queues_of(cluster, options)
            except RouteNotFound:
                return
            ranges = ranges_between(cluster.min_offsets(queues), cluster.max_offsets(queues))
        for batch in read_ranges(options, Shape(["body"]), ranges):
            yield from batch.column(0).to_pylist()


class Driver:
    """A driver process. It is started again where Spark itself gives up, as it does when Python starts too slowly."""

    def __init__(self, arguments: list[str | Path], log: Path) -> None:
        self._command = [sys.executable, *map(str, arguments)]
        self._log = log
        self._start()

    def _start(self) -> None:
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output, start_new_session=True)

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not is_so():
            if self._process.poll() is not None:
                told = self._log.read_text()
                assert "Python worker failed to connect back" in told, told
                self._start()
            assert time.monotonic() < deadline_s, self._log.read_text()
            time.sleep(0.02)

    def terminate(self) -> int:
        self._process.terminate()
        return self._process.wait(DEADLINE_S)

    def kill(self) -> None:
        """With the JVM. Python workers have a group of their own: they notice, and may finish what they are at."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def driver(arguments: list[str | Path], log: Path) -> Iterator[Driver]:
    process = Driver(arguments, log)
    try:
        yield process
    finally:
        process.kill()


def fill(server: Server, topic: str) -> None:
    with Producer(server.namesrv_addr, group="kill-tests", timeout_s=DEADLINE_S) as producer:
        for start in range(0, MESSAGES, 100):
            producer.send_batch(topic, [str(number).encode() for number in range(start, start + 100)])


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Server]:
    """A server that goes away with the half messages that killed drivers leave."""
    server = SkylarkServer(tmp_path / "server")
    server.start()
    yield server
    server.kill()


@pytest.mark.timeout(1200)
def test_pipelines_go_on_after_kills(
    own: Server, started: Callable[[str], Server], spark: SparkSession, topic: str, tmp_path: Path
) -> None:
    fill(own, topic)
    patient = f"timeout: {DEADLINE_S:.0f}s"
    files = Target(tmp_path, "files", own, topic, TO_FILES)
    once = Target(tmp_path, "once", own, topic, TO_TOPIC, more=f"{patient}, deliveryGuarantee: exactly-once")
    targets = [once, files]
    if KILLS > 1:
        apache = started("apache")
        fill(apache, topic)
        targets.append(Target(tmp_path, "repeated", apache, topic, TO_TOPIC, more=patient))
    command: list[str | Path] = [Path(__file__).with_name("several.py"), *(target.file for target in targets)]
    for number in HELD_AT[:KILLS]:
        gate = tmp_path / f"gate-{number}"
        gate.touch()
        with driver(command, tmp_path / "driver.log") as process:
            process.wait_for(lambda number=number: all(target.is_held(number) for target in targets))
            assert all(target.batches_done < target.batches_begun for target in targets)
        gate.unlink()
    queries = [start(spec.read(target.file), spark, once=True) for target in targets]
    names = [target.name for target in targets]
    follow_all(queries, titles=names, console=Console(file=io.StringIO()), stop=threading.Event())
    wait_until(lambda: all(len(target.numbers()) == MESSAGES for target in targets))  # Apache's queues follow its log
    assert set(files.numbers().values()) == {1}
    assert set(once.numbers().values()) == {1}


@pytest.mark.timeout(1200)
def test_the_command_ends_well_when_it_is_told_to(started: Callable[[str], Server], topic: str, tmp_path: Path) -> None:
    server = started("skylark")
    fill(server, topic)
    files = Target(tmp_path, "files", server, topic, TO_FILES)
    log = tmp_path / "driver.log"
    with driver(["-m", "skylark", "pipeline", "run", files.file, "--master", "local[2]"], log) as process:
        process.wait_for(lambda: files.batches_done >= 1)
        assert process.terminate() == 0, log.read_text()
    *progress, summary = log.read_text().splitlines()
    assert all(re.match(r"files: [\d,]+ rows, ", line) for line in progress)  # and nothing else is said
    assert re.match(r"files: [\d,]+ rows in \d+ batch", summary)
    assert set(files.numbers().values()) == {1}
