"""The `skylark` command: within this process, as a process run to its end, or serving."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skylark.cli.main import main

SKYLARK = Path(sys.executable).parent / "skylark"
ANY_PORTS = ["--namesrv-port", "0", "--broker-port", "0"]
# Only to end a test whose process hangs: a busy machine may take long for anything.
DEADLINE_S = 240.0
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"
_COMPLAINT = rf"{TIME} WARNING cli\.serving: this is plain Python, up to three times slower"


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "NAMESRV_ADDR"}
    # A fixed width and no colours, whatever terminal the tests run in.
    return kept | {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"} | variables


def skylark(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SKYLARK, *arguments],
        cwd=cwd,
        env=environment(**{"HOME": str(cwd)} | variables),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """The command within this process, which costs less than one of its own: exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["skylark", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


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
        self._errors: list[str] = []
        self._errors_ended = False
        self._more_errors = threading.Condition()
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        assert process.stdout is not None
        for line in process.stdout:
            self.output.append(line.rstrip("\n"))
            if line.startswith("ready "):
                return
        self._reader.join()
        pytest.fail(f"ended without a ready line: {''.join(self._errors)}")

    @property
    def ready(self) -> str:
        return self.output[-1]

    def until_told(self, pattern: str) -> re.Match[str]:
        """Waits for a line of the log."""
        with self._more_errors:
            self._more_errors.wait_for(lambda: self._told(pattern) or self._errors_ended, DEADLINE_S)
            told = self._told(pattern)
        assert told is not None, "".join(self._errors)
        return told

    def stop(self, number: signal.Signals) -> tuple[int, str, str]:
        """Exit code, and what was written: to stdout after the ready line, to stderr but for the complaints."""
        self.process.send_signal(number)
        assert self.process.stdout is not None
        rest = self.process.stdout.read()
        self.process.wait(DEADLINE_S)
        self._reader.join()
        complaints = self.complaints
        return self.process.returncode, rest, "".join(line for line in self._errors if line not in complaints)

    @property
    def complaints(self) -> list[str]:
        """What the slow form said of itself."""
        return [line for line in self._errors if re.match(_COMPLAINT, line)]

    def _told(self, pattern: str) -> re.Match[str] | None:
        return next(filter(None, (re.search(pattern, line) for line in self._errors)), None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._more_errors:
                self._errors.append(line)
                self._more_errors.notify_all()
        with self._more_errors:
            self._errors_ended = True
            self._more_errors.notify_all()


@contextmanager
def started(
    *arguments: str,
    cwd: Path | None = None,
    stdin: int | None = None,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
    **variables: str,
) -> Iterator[subprocess.Popen[str]]:
    """The command, which is over at the end: a test that fails does not wait for it."""
    home = {"HOME": str(cwd)} if cwd is not None else {}  # so that nothing is left in the user's
    with subprocess.Popen(
        [SKYLARK, *arguments],
        cwd=cwd,
        env=environment(**home | variables),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def serving(*arguments: str, cwd: Path, **variables: str) -> Iterator[Serving]:
    with started(*arguments, cwd=cwd, **variables) as process:
        yield Serving(process)


def without_reader() -> int:
    """The end of a pipe that nobody reads from; the caller closes it."""
    read, write = os.pipe()
    os.close(read)
    return write
