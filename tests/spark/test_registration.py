"""What `register` does to a session of real Spark, besides the formats."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from patience import DEADLINE_S
from skylark import spark as rocketmq
from skylark.client.sync import Producer
from skylark.spark.registration import _leave
from skylark.testing import LocalCluster


@pytest.fixture
def context(spark: SparkSession) -> Iterator[Any]:
    """As it is where nobody chose a Python, and python3 is one without Skylark."""
    context = spark.sparkContext
    before, context.pythonExec = context.pythonExec, "/nowhere/python3"
    yield context
    context.pythonExec = before
    rocketmq.register(spark)


def test_the_workers_of_a_local_spark_run_this_python(
    spark: SparkSession, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON")
    rocketmq.register(spark)
    assert context.pythonExec == sys.executable
    with LocalCluster(topics={"orders": 1}) as cluster:
        options = {"nameServer": cluster.name_servers, "subscribe": "orders"}
        assert spark.read.format("rocketmq").options(**options).load().count() == 0


def test_a_python_that_was_chosen_stays(spark: SparkSession, context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/nowhere/python3")
    rocketmq.register(spark)
    assert context.pythonExec == "/nowhere/python3"


FIRST_SCRIPT = """\
import sys
from pyspark.sql import SparkSession
from skylark import spark as rocketmq

spark = SparkSession.builder.master("local[2]").config("spark.driver.host", "127.0.0.1").getOrCreate()
rocketmq.register(spark)
options = {"nameServer": sys.argv[1], "subscribe": "orders", "group": "first", "startingOffsets": "earliest"}
print("batch", spark.read.format("rocketmq").options(**options).load().count())
query = spark.readStream.format("rocketmq").options(**options).load().writeStream.format("noop").start()
query.processAllAvailable()
print("stream", sum(progress.numInputRows for progress in query.recentProgress))
"""


def test_a_script_outside_an_activated_environment_that_does_not_stop_spark(tmp_path: Path) -> None:
    """The python3 of the PATH has no Skylark; the script's has, and ends while its stream runs."""
    environment, path = tmp_path / "environment", tmp_path / "bin"
    venv.create(environment, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "all.pth").write_text("".join(f"{Path(place).resolve()}\n" for place in sys.path if place))
    path.mkdir()
    (path / "python3").write_text("#!/bin/sh\necho \"No module named 'skylark'\" >&2\nexit 1\n")
    (path / "python3").chmod(0o755)
    (tmp_path / "first.py").write_text(FIRST_SCRIPT)
    hidden = ("PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    others = [place for place in os.get_exec_path() if Path(place) != Path(sys.executable).parent]
    with LocalCluster(topics={"orders": 1}) as cluster:
        with Producer(cluster.name_servers, group="tests") as producer:
            producer.send("orders", b"hello")
        done = subprocess.run(
            [environment / "bin" / "python", "first.py", cluster.name_servers],
            cwd=tmp_path,
            env=variables | {"PATH": os.pathsep.join([str(path), *others])},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    assert (done.returncode, done.stdout) == (0, "batch 1\nstream 1\n"), done.stderr
    assert "StreamingQueryListenerBus" not in done.stderr


def test_a_session_that_was_stopped_is_left_alone() -> None:
    class Context:
        _jsc = None

    class Session:  # without the attribute `streams`
        sparkContext = Context()

    _leave(Session(), rocketmq.registration.GroupProgress())  # type: ignore[arg-type]
