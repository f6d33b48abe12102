"""`skylark pipeline`, `skylark sql` and `skylark demo` as processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SKYLARK = Path(sys.executable).parent / "skylark"
VALID = """\
name: numbers
source: {format: rocketmq, options: {nameServer: "127.0.0.1:1", subscribe: numbers}}
transforms: [{sql: select cast(body as string) as text from input}]
sink: {format: parquet, path: out}
"""


def skylark(*arguments: str | Path, cwd: Path, timeout_s: int = 240) -> tuple[int, str, str]:
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
    done = subprocess.run(
        [sys.executable, "-c", script, "pipeline", "validate", "p.yaml"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1
    assert done.stderr.startswith("skylark: pipelines need Spark")
    assert done.stderr.endswith("pip install 'skylark-mq[spark]'\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pipeline", "run", "none.yaml"), "skylark: cannot read the pipeline none.yaml: No such file or directory\n"),
        (("pipeline", "validate", "bad.yaml"), "skylark: bad.yaml:4: sinc: unknown key; did you mean sink?\n"),
        (("pipeline", "run", "good.yaml", "--conf", "x"), "--conf: expected NAME=VALUE, not 'x'"),
        (("sql", "select 1", "--json", "--csv", "-n", "x:1"), "--json: it excludes --csv"),
        (("pipeline", "submit", "good.yaml"), "Missing option '--master'"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(VALID)
    (tmp_path / "bad.yaml").write_text(VALID.replace("sink:", "sinc:"))
    code, out, err = skylark(*arguments, cwd=tmp_path)
    assert code != 0
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_submission_written_out(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(VALID)
    code, out, err = skylark("pipeline", "submit", "good.yaml", "--master", "yarn", "--print", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert "--master yarn" in out
    assert "skylark-package.zip" in out
    assert (tmp_path / "skylark-package.zip").exists()


def test_validate(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(VALID)
    code, out, err = skylark("pipeline", "validate", "good.yaml", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert out == "good.yaml: numbers is valid; its sink gets\n  text string\n"


def test_demo(tmp_path: Path) -> None:
    code, out, err = skylark("demo", "--orders", "300", "--keep", tmp_path / "demo", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert "revenue (archive)" in out
    assert list((tmp_path / "demo" / "archive").glob("date=*/*.parquet"))
