"""The `skylark` command as a process: run to its end, or serving."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SKYLARK = Path(sys.executable).parent / "skylark"
ANY_PORTS = ["--namesrv-port", "0", "--broker-port", "0"]


def _environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "NAMESRV_ADDR"}
    # A fixed width and no colours, whatever terminal the tests run in.
    return kept | {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"} | variables


def skylark(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SKYLARK, *arguments], cwd=cwd, env=_environment(**variables), capture_output=True, text=True, timeout=60
    )


def assert_one_clear_line(done: subprocess.CompletedProcess[str], pattern: str) -> None:
    assert done.returncode != 0
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert re.search(pattern, done.stderr), done.stderr
    assert done.stderr.startswith("skylark: ")


class Serving:
    """A running command, up to its ready line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.output: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            self.output.append(line.rstrip("\n"))
            if line.startswith("ready "):
                return
        assert process.stderr is not None
        pytest.fail(f"ended without a ready line: {process.stderr.read()}")

    @property
    def ready(self) -> str:
        return self.output[-1]

    def stop(self, number: signal.Signals) -> tuple[int, str, str]:
        """Exit code, and what was written after the ready line."""
        self.process.send_signal(number)
        rest, errors = self.process.communicate(timeout=60)
        return self.process.returncode, rest, errors


@contextmanager
def serving(*arguments: str, cwd: Path, **variables: str) -> Iterator[Serving]:
    with subprocess.Popen(
        [SKYLARK, *arguments],
        cwd=cwd,
        env=_environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Serving(process)
        finally:
            process.kill()
