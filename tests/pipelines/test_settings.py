"""Spark's settings, which may be credentials: in a file of their owner, as Java reads it, and on no command line."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.config import properties
from skylark.pipelines.errors import Mistakes, PipelineError
from skylark.pipelines.session import spark_session
from skylark.pipelines.settings import options, text, without_settings, write
from skylark.pipelines.spec import parse
from skylark.pipelines.submit import check_paths

SECRET = "ABC/def+ghi=="
NAMES = st.text(alphabet="abc.=: #!\\", min_size=1, max_size=10)
VALUES = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=30)


@given(st.dictionaries(NAMES, VALUES | st.sampled_from(["a\nb", "  a", "\\", "\t", "#"]), max_size=5))
def test_java_reads_what_was_meant(settings: dict[str, str]) -> None:
    assert properties.parse(text(settings)) == settings


def test_only_the_owner_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "spark.conf"
    path.write_text("for everybody")
    path.chmod(0o644)
    write(path, {"spark.hadoop.fs.s3a.secret.key": SECRET})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert properties.parse(path.read_text()) == {"spark.hadoop.fs.s3a.secret.key": SECRET}


def test_a_call_without_settings(tmp_path: Path) -> None:
    path = tmp_path / "spark.conf"
    call = ["spark-submit", "--conf", "spark.a=b=c", "--conf", "spark.d=", "--conf", "odd", "pyspark-shell"]
    assert without_settings(call, path) == ["spark-submit", *options(path), "pyspark-shell"]
    assert properties.parse(path.read_text()) == {"spark.a": "b=c", "spark.d": "", "odd": ""}
    for call in (["spark-submit", "pyspark-shell"], ["spark-submit", "--conf", "a=b", "--properties-file", "mine"]):
        assert without_settings(call, path) == call


JAVA = """\
#!/bin/bash
case "$*" in
  -version) echo 'openjdk version "17"' >&2; exit ;;
esac
echo "$@" >> "${0%/*}/calls"
while [ $# -gt 0 ]; do
  [ "$1" = --properties-file ] && cp -p "$2" "${0%/*}/settings" && echo "$2" > "${0%/*}/place"
  shift
done
exit 1
"""


def test_spark_is_started_without_credentials_on_a_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(JAVA)
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)
    monkeypatch.setattr("pyspark.SparkContext._gateway", None)
    monkeypatch.setattr("pyspark.SparkContext._jvm", None)
    monkeypatch.setattr("pyspark.sql.SparkSession._instantiatedSession", None)
    with pytest.raises(PipelineError, match="Spark does not start"):
        spark_session("local[1]", conf={"spark.hadoop.fs.s3a.secret.key": SECRET})
    calls = java.with_name("calls").read_text()
    assert "SparkSubmit" in calls
    assert SECRET not in calls
    settings = properties.parse(java.with_name("settings").read_text())
    assert settings["spark.hadoop.fs.s3a.secret.key"] == SECRET
    assert stat.S_IMODE(java.with_name("settings").stat().st_mode) == 0o600
    assert not os.path.lexists(java.with_name("place").read_text().strip())


IN_CLUSTER = """\
name: paid
source: {format: rocketmq, options: {nameServer: "x:1", subscribe: orders}}
sink: {format: parquet, path: "hdfs:///lake/paid"}
checkpoint: /shared/checkpoints/paid
"""


def test_what_a_driver_in_the_cluster_would_lose(tmp_path: Path) -> None:
    check_paths(parse(IN_CLUSTER, "paid.yaml", tmp_path))
    (tmp_path / "commitlog").mkdir()
    batch = re.sub("source: .*", f"source: {{format: rocketmq-commitlog, path: {tmp_path}}}", IN_CLUSTER)
    check_paths(parse(re.sub("checkpoint: .*", "", batch), "paid.yaml", tmp_path))
    with pytest.raises(PipelineError, match=r"^paid\.yaml:1: checkpoint: with --deploy-mode cluster, where the stream"):
        check_paths(parse(re.sub("checkpoint: .*", "", IN_CLUSTER), "paid.yaml", tmp_path))
    with pytest.raises(Mistakes) as told:
        check_paths(parse(IN_CLUSTER.replace("hdfs:///", "").replace("/shared/", ""), "paid.yaml", tmp_path))
    assert [str(error).split(": ")[1] for error in told.value.errors] == ["sink.path", "checkpoint"]
