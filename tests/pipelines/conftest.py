"""The Spark session and the servers of the Spark tests, for pipelines; and commands that run on that session."""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec
import pytest
from pyspark.sql import SparkSession

from skylark.cli.main import main
from spark.conftest import group, namesrv, server, spark, topic, topics

__all__ = ["group", "namesrv", "server", "spark", "topic", "topics"]


class Ran(msgspec.Struct):
    code: int
    out: str
    err: str


Skylark = Callable[..., Ran]


@pytest.fixture
def skylark(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Skylark:
    """Runs a command in this process, on the tests' Spark session, which Spark gives to whoever asks for one."""
    monkeypatch.setattr(SparkSession, "stop", lambda self: None)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["skylark", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ran(int(ended.value.code or 0), *capsys.readouterr())

    return run
