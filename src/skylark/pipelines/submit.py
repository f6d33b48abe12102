"""A pipeline on a Spark cluster: the spark-submit call for it, written out or run.

Skylark itself travels with the call as a zip of its sources. What it needs that is compiled (pyarrow, numpy, msgspec)
must be on the cluster: as an interpreter that is installed there (`python`), or as a packed environment that Spark
unpacks beside every executor (`environment`, made by venv-pack or conda-pack).
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import pyspark

import skylark
from skylark.pipelines.checking import BATCH_ONLY
from skylark.pipelines.errors import PipelineError, raise_all
from skylark.pipelines.session import QUIET_LOG, SETTINGS, check_java
from skylark.pipelines.settings import options as of_file
from skylark.pipelines.settings import write
from skylark.pipelines.spec import Declared

_UNPACKED: Final = "environment"
_OLDEST_ZIP_DATE: Final = (1980, 1, 1, 0, 0, 0)


class Submission(msgspec.Struct, kw_only=True, frozen=True):
    """Where and with what a pipeline runs."""

    file: Path
    name: str
    master: str
    deploy_mode: str = "client"
    python: str | None = None
    environment: str | None = None
    py_files: Sequence[str] = ()
    conf: Mapping[str, str] = {}
    once: bool = False


def command(submission: Submission, package: Path, settings_file: Path) -> list[str]:
    """The call, with Skylark's sources in the zip file `package`, and `settings` in a file."""
    in_cluster = submission.deploy_mode == "cluster"
    call = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit")]
    call += ["--master", submission.master, "--deploy-mode", submission.deploy_mode, "--name", submission.name]
    call += ["--py-files", ",".join([str(package), *submission.py_files])]
    if submission.environment is not None:
        call += ["--archives", f"{submission.environment}#{_UNPACKED}"]
    if in_cluster:
        call += ["--files", str(submission.file)]
    call += of_file(settings_file)
    call.append(str(Path(__file__).with_name("submitted.py")))
    # In a cluster the driver finds the file in its working directory, where --files put it.
    call.append(submission.file.name if in_cluster else str(submission.file))
    return [*call, "--once"] if submission.once else call


def settings(submission: Submission) -> dict[str, str]:
    """Spark's, which go into a file: they may be credentials."""
    found = {**SETTINGS, **submission.conf}
    if submission.environment is not None:
        found.setdefault("spark.pyspark.python", f"./{_UNPACKED}/bin/python")
    elif submission.python is not None:
        found.setdefault("spark.pyspark.python", submission.python)
    if submission.deploy_mode != "cluster":
        found.setdefault("spark.pyspark.driver.python", sys.executable)
        found.setdefault("spark.driver.extraJavaOptions", QUIET_LOG)
    return found


def write_settings(path: Path, submission: Submission) -> Path:
    try:
        return write(path, settings(submission))
    except OSError as e:
        raise PipelineError(f"cannot write {path}: {e.strerror}") from e


def check_paths(declared: Declared) -> None:
    """A driver in the cluster runs in a directory that goes with it. Raises Mistakes for what would be in there."""
    pipeline, document = declared.pipeline, declared.document
    is_stream = pipeline.source.format not in BATCH_ONLY
    mistakes = [
        document.error(
            key,
            f"with --deploy-mode cluster, {what} would be in a directory that goes with the driver: give a URL or "
            "an absolute path that the whole cluster sees and that lasts",
        )
        for key, path, what in (
            (("source", "path"), pipeline.source.path, "the files"),
            (("sink", "path"), pipeline.sink.path, "the files"),
            (
                ("checkpoint",),
                pipeline.checkpoint or ("" if is_stream else None),
                "where the stream is, the checkpoint,",
            ),
        )
        if path is not None and not re.match(r"^(/|[a-z][a-z0-9+.-]*:)", path)
    ]
    raise_all(mistakes)


def written_out(call: Sequence[str]) -> str:
    """The call as a line for a shell."""
    return shlex.join(call)


def run(call: Sequence[str]) -> int:
    """Runs the call to its end, and gives its exit code. Raises PipelineError if it can't start."""
    check_java()
    try:
        # spark-submit gets a Ctrl-C of the terminal itself, and so does the driver, which stops cleanly.
        with subprocess.Popen(call, env=_environment()) as child:
            while True:
                try:
                    return child.wait()
                except KeyboardInterrupt:
                    continue
    except OSError as e:
        raise PipelineError(f"cannot run {call[0]}: {e.strerror}") from e


def write_package(path: Path) -> Path:
    """Skylark's sources as a zip that Python imports from, the same bytes for the same sources."""
    sources = Path(skylark.__file__).parent
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as package:
            for root in (sources, *sources.parent.glob("pyspark_rocketmq*")):
                for file in sorted(root.rglob("*")):
                    if file.suffix in (".py", ".lark", ".properties"):
                        entry = zipfile.ZipInfo(str(file.relative_to(sources.parent)), _OLDEST_ZIP_DATE)
                        package.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED)
    except OSError as e:
        raise PipelineError(f"cannot write {path}: {e.strerror}") from e
    return path


def _environment() -> dict[str, str]:
    """Without what would send spark-submit to another Spark than the installed one."""
    return {key: value for key, value in os.environ.items() if key not in ("SPARK_HOME", "PYSPARK_PYTHON")}
