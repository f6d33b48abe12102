"""What a user is told when Spark cannot start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from skylark.pipelines.errors import PipelineError
from skylark.pipelines.session import check_java, spark_session


def java_that_says(directory: Path, text: str) -> None:
    (directory / "bin").mkdir()
    script = directory / "bin" / "java"
    script.write_text(f"#!/bin/sh\necho '{text}' >&2\n")
    script.chmod(0o755)


def test_no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PipelineError, match="Java 17 or newer, and there is no java on the PATH"):
        check_java()


def test_a_java_home_without_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(PipelineError, match=f"JAVA_HOME={tmp_path} does not run"):
        check_java()


def test_an_old_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java_that_says(tmp_path, 'openjdk version "1.8.0_392"')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(PipelineError, match=r"has Java 8; name a newer one with JAVA_HOME"):
        check_java()


def test_a_java_that_is_new_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java_that_says(tmp_path, 'openjdk version "25" 2025-09-16')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    check_java()


def test_what_spark_submit_was_told_stays(spark: SparkSession) -> None:
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        assert spark_session(None).conf.get("spark.sql.session.timeZone") == "Europe/Berlin"
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_the_session_knows_the_formats(spark: SparkSession, capfd: pytest.CaptureFixture[str]) -> None:
    session = spark_session("local[2]")
    assert session.conf.get("spark.sql.session.timeZone") == "UTC"
    with pytest.raises(Exception, match="one of the options subscribe"):
        session.read.format("rocketmq").option("nameServer", "127.0.0.1:1").load().collect()
    os.write(2, b"stderr is ours\n")
    assert capfd.readouterr().err == "stderr is ours\n"
