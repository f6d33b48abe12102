"""kill -9 of a Spark driver while its pipelines are in the middle of batches, and how they go on after it.

Pipelines share a driver, since a start of Spark costs more than all that they do: into Parquet files and exactly once
into a topic, both on Skylark. One kill here; with the environment variable SKYLARK_PIPELINE_KILLS=3 there are three,
and another pipeline writes at least once into a topic on Apache's servers. Single writers are killed there in any case,
by `spark/test_sink_kill.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from servers import Server, SkylarkServer

from skylark.client.errors import RouteNotFound
from skylark.client.sync import Producer
from skylark.spark import positions
from skylark.spark.bodies import Shape
from skylark.spark.cluster import Cluster
from skylark.spark.options import read_options
from skylark.spark.planning import ranges_between
from skylark.spark.reading import read_ranges

KILLS = int(os.environ.get("SKYLARK_PIPELINE_KILLS", "1"))
MESSAGES, BATCH = 1200, 150
DEADLINE_S = 400.0
SOURCE = """\
name: {name}
source:
  format: rocketmq
  options: {{nameServer: "{namesrv}", subscribe: {topic}, startingOffsets: earliest, maxOffsetsPerTrigger: {batch}}}
transforms: [{{sql: select body from input}}]
"""
TO_FILES = "sink: {format: parquet, path: files}\n"
TO_TOPIC = 'sink: {{format: rocketmq, options: {{nameServer: "{namesrv}", topic: {topic}_{name}, {more}}}}}\n'


class Target:
    """A pipeline in a directory of its own, and what has come out of it."""

    def __init__(self, directory: Path, name: str, server: Server, topic: str, sink: str, more: str = "") -> None:
        self.name = name
        self.file = directory / f"{name}.yaml"
        self._checkpoint = directory / "checkpoints" / name
        self._files = directory / "files"
        self._namesrv = server.namesrv_addr
        self._topic = f"{topic}_{name}" if sink == TO_TOPIC else None
        if self._topic is not None:
            sink = sink.format(namesrv=self._namesrv, topic=topic, name=name, more=more)
        self.file.write_text(SOURCE.format(name=name, namesrv=self._namesrv, topic=topic, batch=BATCH) + sink)

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
        with Cluster(self._namesrv, 10.0) as cluster:
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

    def wait_for(self, is_so: Callable[[], bool], look_every_s: float = 0.02) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not is_so():
            if self._process.poll() is not None:
                told = self._log.read_text()
                assert "Python worker failed to connect back" in told, told
                self._start()
            assert time.monotonic() < deadline_s, self._log.read_text()
            time.sleep(look_every_s)

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
    with Producer(server.namesrv_addr, group="kill-tests") as producer:
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
def test_pipelines_go_on_after_kills(own: Server, started: Callable[[str], Server], topic: str, tmp_path: Path) -> None:
    fill(own, topic)
    exactly = "timeout: 30s, deliveryGuarantee: exactly-once"
    files = Target(tmp_path, "files", own, topic, TO_FILES)
    once = Target(tmp_path, "once", own, topic, TO_TOPIC, more=exactly)
    targets = [once, files]  # they start in this order, and all are under way when the last is
    if KILLS > 1:
        apache = started("apache")
        fill(apache, topic)
        targets.insert(1, Target(tmp_path, "repeated", apache, topic, TO_TOPIC, more="timeout: 30s"))
    chance, log = random.Random(11), tmp_path / "driver.log"
    command: list[str | Path] = [Path(__file__).with_name("several.py"), *(target.file for target in targets)]
    for _ in range(KILLS):
        with driver(command, log) as process:
            goal = files.batches_done + 1
            process.wait_for(lambda goal=goal: goal <= files.batches_done < files.batches_begun)
            time.sleep(chance.uniform(0, 0.3))
        assert files.batches_done < MESSAGES // BATCH, "the kill came too late to matter"
    with driver(command, log) as process:
        process.wait_for(lambda: all(len(target.numbers()) == MESSAGES for target in targets), look_every_s=0.5)
        assert process.terminate() == 0, log.read_text()
    told = re.findall(r"^(\w+): [\d,]+ rows in \d+ batch", log.read_text(), re.MULTILINE)
    assert sorted(told) == sorted(target.name for target in targets)
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
