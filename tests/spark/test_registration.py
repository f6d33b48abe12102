"""What `register` does to a session of real Spark, besides the formats."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import SparkSession

from skylark import spark as rocketmq
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
