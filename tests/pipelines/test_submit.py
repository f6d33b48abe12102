"""Pipelines on a cluster: the call, and a real standalone Spark cluster of a master and two workers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.sql import SparkSession

from patience import DEADLINE_S
from skylark.client.sync import Producer
from skylark.pipelines.submit import Submission, command, settings, write_package
from skylark.testing import LocalCluster

SKYLARK = Path(sys.executable).parent / "skylark"
SPARK_HOME = Path(pyspark.__file__).parent
STOP_S = 20.0
POLL_S = 0.2


def test_the_call(tmp_path: Path) -> None:
    file = tmp_path / "orders.yaml"
    package = tmp_path / "skylark.zip"
    base = Submission(file=file, name="orders", master="spark://head:7077", conf={"spark.executor.memory": "1g"})
    call = command(base, package, tmp_path / "spark.conf")
    assert call[1:9] == shlex.split(
        f"--master spark://head:7077 --deploy-mode client --name orders --py-files {package}"
    )
    assert call[9:12] == ["--properties-file", str(tmp_path / "spark.conf"), "--load-spark-defaults"]
    assert settings(base)["spark.executor.memory"] == "1g"
    assert not [part for part in call if "1g" in part or part == "--conf"]
    assert call[-1] == str(file)
    far = Submission(file=file, name="o", master="yarn", deploy_mode="cluster", environment="env.tar.gz", once=True)
    packed = command(far, package, tmp_path / "spark.conf")
    assert packed[packed.index("--archives") + 1] == "env.tar.gz#environment"
    assert settings(far)["spark.pyspark.python"] == "./environment/bin/python"
    assert "spark.pyspark.driver.python" not in settings(far)
    assert packed[packed.index("--files") + 1] == str(file)
    assert packed[-2:] == ["orders.yaml", "--once"]


def test_the_package_imports(tmp_path: Path) -> None:
    package = write_package(tmp_path / "skylark.zip")
    names = zipfile.ZipFile(package).namelist()
    assert {"skylark/spark/source.py", "pyspark_rocketmq/__init__.py", "skylark/pipelines/log4j2.properties"} <= {
        *names
    }
    told = subprocess.run(
        [sys.executable, "-c", "import skylark.spark.source as s; print(s.__file__)"],
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.startswith(str(package))
    assert package.read_bytes() == write_package(tmp_path / "again.zip").read_bytes()


class Daemon:
    """Spark's master or a worker, in a session of its own, with little memory."""

    def __init__(self, directory: Path, name: str, main: str, *arguments: str) -> None:
        self.log = directory / f"{name}.log"
        environment = {
            **os.environ,
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",  # it would take a port that others may have
        }
        with self.log.open("wb") as log:
            self._child = subprocess.Popen(
                [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{main}", *arguments],
                env=environment,
                cwd=directory,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self, pattern: str) -> str:
        """What it has written to its log, as soon as it has."""
        until_s = time.monotonic() + DEADLINE_S
        while (found := re.search(pattern, self.log.read_text())) is None:
            assert self._child.poll() is None, self.log.read_text()
            assert time.monotonic() < until_s, self.log.read_text()
            time.sleep(POLL_S)
        return found[1]

    def stop(self) -> None:
        """A worker ends its executors with it; what is left after a while is killed with the session."""
        self._child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()


class Standalone:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = self._page = ""
        self._daemons: list[Daemon] = []

    def start(self) -> None:
        listening = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        master = Daemon(self.directory, "master", "master.Master", *listening)
        self._daemons.append(master)
        self.url = master.said(r"Starting Spark master at (spark://\S+)")
        page_port = master.said(r"service 'MasterUI' on port (\d+)")
        self._page = f"http://127.0.0.1:{page_port}/json/"
        for name in ("worker-1", "worker-2"):
            room = ("--cores", "1", "--memory", "1g", "--work-dir", str(self.directory / name))
            self._daemons.append(Daemon(self.directory, name, "worker.Worker", *listening, *room, self.url))
        self.wait_for("two workers", lambda state: state["aliveworkers"] == 2)

    def wait_for(self, what: str, holds: Any) -> dict[str, Any]:
        until_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < until_s:
            # Until the page for programs is there, Spark answers with the one for people, which is no JSON.
            with (
                contextlib.suppress(OSError, json.JSONDecodeError),
                urllib.request.urlopen(self._page, timeout=DEADLINE_S) as page,
            ):
                state: dict[str, Any] = json.load(page)
                if holds(state):
                    return state
            time.sleep(POLL_S)
        pytest.fail(f"no sign of {what}: {[daemon.log.read_text()[-2000:] for daemon in self._daemons]}")

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.stop()


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[Standalone]:
    standalone = Standalone(tmp_path)
    try:
        standalone.start()
        yield standalone
    finally:
        standalone.stop()


PIPELINE = """\
name: submitted
source:
  format: rocketmq
  options: {{nameServer: "{namesrv}", subscribe: numbers, startingOffsets: earliest, minPartitions: 4}}
transforms:
  - python: squares:squared
sink:
  format: parquet
  path: out
"""
SQUARES = """\
import os
from pyspark.sql import functions as f

@f.udf("bigint")
def square(text):
    return int(text) ** 2

@f.udf("string")
def where(text):
    return os.getcwd()

def squared(rows):
    text = f.col("body").cast("string")
    return rows.select(square(text).alias("square"), where(text).alias("place"))
"""


@pytest.mark.timeout(900)
def test_a_pipeline_on_a_real_cluster(spark: SparkSession, standalone: Standalone, tmp_path: Path) -> None:
    (tmp_path / "pipeline.yaml").write_text("")
    (tmp_path / "squares.py").write_text(SQUARES)
    with LocalCluster(topics={"numbers": 4}) as cluster:
        with Producer(cluster.name_servers, group="tests") as producer:
            for number in range(200):
                producer.send("numbers", str(number).encode())
        (tmp_path / "pipeline.yaml").write_text(PIPELINE.format(namesrv=cluster.name_servers))
        settings = {
            "spark.executor.memory": "512m",
            "spark.driver.memory": "512m",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            # Both workers must have come before the first task, or one of them could do all the work.
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "600s",
        }
        conf = [part for key, value in settings.items() for part in ("--conf", f"{key}={value}")]
        call = [SKYLARK, "pipeline", "submit", tmp_path / "pipeline.yaml", "--master", standalone.url, "--once"]
        done = subprocess.run(
            [*call, "--python", sys.executable, *conf],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S * 2,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "submitted: 200 rows in 1 batch" in done.stdout  # spark-submit joins what the driver writes
    rows = spark.read.parquet(str(tmp_path / "out")).collect()
    assert sorted(row.square for row in rows) == [number**2 for number in range(200)]
    assert {Path(row.place).relative_to(tmp_path).parts[0] for row in rows} == {"worker-1", "worker-2"}
    state = standalone.wait_for("the finished application", lambda state: state["completedapps"])
    assert state["completedapps"][0]["name"] == "submitted"
