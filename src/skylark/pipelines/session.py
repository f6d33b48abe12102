"""The Spark session of a pipeline: on this machine by default, on a cluster by its master URL.

What usually goes wrong is checked first and said plainly: no Java, or one that is too old. Spark's own log is off, its
clock is UTC, and its Python processes run the interpreter of the caller, where Skylark and pyarrow are.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark import java_gateway
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from skylark.pipelines.errors import PipelineError, reason
from skylark.pipelines.settings import without_settings
from skylark.spark import register

OLDEST_JAVA: Final = 17
QUIET_LOG: Final = f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties')}"
_JAVA_TIMEOUT_S: Final = 30
_NOISE: Final = (
    b"WARNING: Using incubator modules",
    b"WARNING: package sun.security.action not in java.base",
    b"Setting default log level to",
    b"To adjust logging level use",
    b"Using Spark's default log4j profile",
)
_LAST_LINES: Final = 3

SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.stopTimeout": "60s",
}
_LOCAL: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # 200, Spark's default, is for clusters: on one machine most of them would be empty tasks.
    "spark.sql.shuffle.partitions": str(min(8, os.cpu_count() or 1)),
}


def spark_session(
    master: str | None = "local[*]",
    name: str = "skylark",
    *,
    conf: Mapping[str, str] | None = None,
    verbose: bool = False,
) -> SparkSession:
    """A session with Skylark's formats. `master=None` leaves master and settings to spark-submit. Raises PipelineError.

    `conf` goes before what is set here. Whoever asks for the session stops it.
    """
    check_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    settings = {"spark.app.name": name}
    if master is not None:
        settings |= {**SETTINGS, "spark.master": master, "spark.driver.extraJavaOptions": QUIET_LOG}
        if master.startswith("local"):
            settings |= _LOCAL
    builder = SparkSession.builder
    for key, value in {**settings, **(conf or {})}.items():
        builder = builder.config(key, value)
    with _filtered_stderr() as stderr, _started_well():
        try:
            session = builder.getOrCreate()
        except (PySparkException, Py4JError) as e:
            raise PipelineError(f"Spark does not start: {' '.join([reason(e), *stderr.last])}") from e
    logging.getLogger().addFilter(_is_news)
    session.sparkContext.setLogLevel("WARN" if verbose else "OFF")
    # It would print every wrong SQL statement with the stacks of both languages, although the error is raised as well.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL + 1)
    register(session)
    return session


@contextlib.contextmanager
def session(
    master: str | None = "local[*]",
    name: str = "skylark",
    *,
    conf: Mapping[str, str] | None = None,
    verbose: bool = False,
) -> Iterator[SparkSession]:
    """The same, stopped at the end. What fails in Spark meanwhile is a PipelineError."""
    spark = spark_session(master, name, conf=conf, verbose=verbose)
    try:
        yield spark
    except (PySparkException, Py4JError) as e:
        raise PipelineError(reason(e)) from e
    finally:
        spark.stop()


def _is_news(record: logging.LogRecord) -> bool:
    """Py4J logs that Ctrl-C interrupts it, with the stack, although that is raised as well."""
    return "while sending command" not in str(record.msg)


@contextlib.contextmanager
def _started_well() -> Iterator[None]:
    """The JVM is started without settings on its command line, where others would read them.

    Ctrl-C meanwhile would leave a JVM that waits for ever for the driver that started it.
    """
    started: list[subprocess.Popen[bytes]] = []
    aside = tempfile.TemporaryDirectory(prefix="skylark-spark-")

    class Remembered(subprocess.Popen[bytes]):
        def __init__(self, call: Sequence[str], **named: Any) -> None:
            super().__init__(without_settings(call, Path(aside.name) / "spark.conf"), **named)
            started.append(self)

    original = java_gateway.Popen  # type: ignore[attr-defined]
    java_gateway.Popen = Remembered  # type: ignore[attr-defined, assignment]
    try:
        yield
    except KeyboardInterrupt:
        for process in started:
            process.kill()
            process.wait()
        raise
    finally:
        java_gateway.Popen = original  # type: ignore[attr-defined]
        aside.cleanup()


def check_java() -> None:
    """Raises PipelineError unless Spark will find a Java that it can run on."""
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    where = f"JAVA_HOME={home}" if home else "the PATH"
    needed = f"Spark needs Java {OLDEST_JAVA} or newer"
    if java is None:
        raise PipelineError(
            f"{needed}, and there is no java on the PATH; install one (Debian: openjdk-17-jre-headless)"
        )
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_JAVA_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as e:
        raise PipelineError(f"{needed}, and the one of {where} does not run: {e}") from e
    version = re.search(r'version "(?:1\.)?(\d+)', told.stderr)
    if version and int(version[1]) < OLDEST_JAVA:
        raise PipelineError(f"{needed}, and {where} has Java {version[1]}; name a newer one with JAVA_HOME")


class _Stderr:
    """Passes on what Spark's processes write to stderr, without the lines that each start brings."""

    def __init__(self, to: int, lines: int) -> None:
        self._to = to
        self.last: collections.deque[str] = collections.deque(maxlen=lines)

    def copy(self, source: int) -> None:
        with os.fdopen(source, "rb") as pipe:
            for line in pipe:
                if not line.startswith(_NOISE):
                    self.last.append(line.decode(errors="replace").strip())
                    os.write(self._to, line)
        os.close(self._to)


@contextlib.contextmanager
def _filtered_stderr() -> Iterator[_Stderr]:
    """Processes started inside get a stderr that is filtered as long as they live; ours is untouched afterwards."""
    sys.stderr.flush()
    own = os.dup(2)
    source, sink = os.pipe()
    filtered = _Stderr(own, _LAST_LINES)
    os.dup2(sink, 2)
    os.close(sink)
    threading.Thread(target=filtered.copy, args=(source,), name="skylark-spark-stderr", daemon=True).start()
    try:
        yield filtered
    finally:
        os.dup2(own, 2)
