"""`skylark pipeline`, `skylark sql` and `skylark demo` as processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from skylark.testing import LocalCluster

SKYLARK = Path(sys.executable).parent / "skylark"
TIMEOUT_S = 600
VALID = """\
name: numbers
source: {format: rocketmq, options: {nameServer: "127.0.0.1:1", subscribe: numbers}}
transforms: [{sql: select cast(body as string) as text from input}]
sink: {format: parquet, path: out}
"""


def skylark(*arguments: str | Path, cwd: Path, timeout_s: int = TIMEOUT_S) -> tuple[int, str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "NAMESRV_ADDR"}
    done = subprocess.run(
        [SKYLARK, *arguments],
        cwd=cwd,
        env=kept | {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return done.returncode, done.stdout, done.stderr


def test_without_the_extra(tmp_path: Path) -> None:
    script = "import sys; sys.modules['pyspark'] = None; from skylark.cli.main import main; main()"
    (tmp_path / "p.yaml").write_text(VALID)

    def validate(file: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, "pipeline", "validate", file]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    for file, reason in (("none.yaml", "No such file or directory"), (".", "Is a directory")):
        assert validate(file).stderr == f"skylark: cannot read the pipeline {file}: {reason}\n"
    done = validate("p.yaml")
    assert done.returncode == 1
    assert done.stderr.startswith("skylark: pipelines need Spark")
    assert done.stderr.endswith("pip install '.[spark]' in a checkout of Skylark\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pipeline", "run", "none.yaml"), "skylark: cannot read the pipeline none.yaml: No such file or directory\n"),
        (("pipeline", "validate", "bad.yaml"), "skylark: bad.yaml:4: sinc: unknown key; did you mean sink?\n"),
        (("pipeline", "run", "good.yaml", "--conf", "x"), "--conf: expected NAME=VALUE, not 'x'"),
        (("sql", "select 1", "--json", "--csv", "-n", "x:1"), "--json: it excludes --csv"),
        (("sql", "select 1", "--from", "latest", "-n", "x:1"), "--from: latest needs --stream"),
        (("pipeline", "submit", "good.yaml"), "Missing option '--master'"),
        (
            ("pipeline", "submit", "kept.yaml", "--master", "yarn", "--deploy-mode", "cluster", "--print"),
            "skylark: kept.yaml:4: sink.path: with --deploy-mode cluster, ",
        ),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(VALID)
    (tmp_path / "bad.yaml").write_text(VALID.replace("sink:", "sinc:"))
    (tmp_path / "kept.yaml").write_text(VALID + "checkpoint: s3a://kept/numbers\n")
    code, out, err = skylark(*arguments, cwd=tmp_path)
    assert code != 0
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_all_mistakes_have_a_line(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(VALID.replace("sink:", "sinc:").replace("name: numbers", "name: ../numbers"))
    code, out, err = skylark("pipeline", "validate", "bad.yaml", cwd=tmp_path)
    assert (code, out) == (1, "")
    assert [line.split(": ")[:3] for line in err.splitlines()] == [
        ["skylark", "bad.yaml:1", "name"],
        ["skylark", "bad.yaml:4", "sinc"],
    ]


def test_a_submission_written_out(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(VALID)
    secret = ("--conf", "spark.hadoop.fs.s3a.secret.key=hidden")
    code, out, err = skylark("pipeline", "submit", "good.yaml", "--master", "yarn", "--print", *secret, cwd=tmp_path)
    assert (code, err) == (0, "")
    assert "--master yarn" in out
    assert "skylark-package.zip" in out
    assert (tmp_path / "skylark-package.zip").exists()
    assert f"--properties-file {tmp_path}/skylark-package.conf" in out
    assert "hidden" not in out
    assert "spark.hadoop.fs.s3a.secret.key=hidden\n" in (tmp_path / "skylark-package.conf").read_text()


def test_validate(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(VALID)
    code, out, err = skylark("pipeline", "validate", "good.yaml", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert out == "good.yaml: numbers is valid; its sink gets\n  text string\n"


def test_demo(tmp_path: Path) -> None:
    code, out, err = skylark("demo", "--orders", "300", "--keep", tmp_path / "demo", cwd=tmp_path)
    assert code == 0, err
    assert [line for line in err.splitlines() if "this is plain Python" not in line] == []  # its server may say that
    assert "revenue (archive)" in out
    assert list((tmp_path / "demo").rglob("archive/date=*/*.parquet"))


FAKE_JAVA = """\
#!/bin/bash
case "$*" in
  -version) echo 'openjdk version "17"' >&2 ;;
  *launcher.Main*) printf '\\0\\n%s\\0jvm\\0' "$0" ;;  # the command to run, for spark-class
  *) echo $$ > "${0%/*}/started"; exec sleep 1000 ;;
esac
"""


def test_ctrl_c_while_spark_starts_leaves_no_jvm_behind(tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(FAKE_JAVA)
    java.chmod(0o755)
    os.mkfifo(java.with_name("started"))
    with (
        LocalCluster() as cluster,
        subprocess.Popen(
            [SKYLARK, "sql", "select 1", "-n", cluster.name_servers],
            env={**os.environ, "JAVA_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            jvm = int(java.with_name("started").read_text())
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (130, "", "skylark: stopped\n")
    with pytest.raises(ProcessLookupError):
        os.kill(jvm, 0)
