"""Installs what a make target needs into .venv: pinned by hash, with the package itself in editable form.

    python tools/setup.py up      what a broker needs, and what compiles it
    python tools/setup.py demo    also Spark
    python tools/setup.py dev     also everything that the tests and the checks need

Each is a superset of the one before. One line says what is fetched; while pip works, another says how far it is. Only
the standard library is used, because it runs before anything is installed.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
# Name -> what it is for, and roughly how much is fetched.
SETS = {
    "up": ("the broker and its compiler", "30 MB"),
    "demo": ("the broker and Spark", "550 MB"),
    "dev": ("Spark, the tests and the checks", "600 MB"),
}
SAY_EVERY_S = 10.0


class SetupError(Exception):
    """What is wrong, for the user."""


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


class Progress:
    """How far pip is: a line that changes on a terminal, and otherwise one now and then."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._begin_s = self._said_s = time.monotonic()
        self._collected = 0

    def follow(self, line: str) -> None:
        word, _, rest = line.strip().partition(" ")
        if word == "Collecting":
            self._collected += 1
            self._show(f"{min(self._collected, self._total)} of {self._total} packages, {rest.split()[0]}")
        elif line.startswith("Installing collected"):
            self._show("everything is there, installing")

    def _show(self, text: str) -> None:
        now_s = time.monotonic()
        if sys.stderr.isatty():
            print(f"\r\033[Ksetup: {text}", end="", file=sys.stderr, flush=True)
        elif now_s - self._said_s >= SAY_EVERY_S:
            self._said_s = now_s
            say(f"{text}, after {now_s - self._begin_s:.0f} s")

    def end(self) -> None:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def pip(*arguments: str, progress: Progress | None = None) -> None:
    """Run pip to its end; its output is shown when it fails."""
    # What is imported is compiled then; compiling everything now takes longer than fetching it.
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--no-compile", *arguments]
    output = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            output.append(line)
            if progress is not None:
                progress.follow(line)
    if progress is not None:
        progress.end()
    if child.returncode:
        raise SetupError(f"pip failed with exit status {child.returncode}:\n{''.join(output[-30:]).rstrip()}")


def has_pip() -> bool:
    """Whether the environment is there as a whole: it gets pip last."""
    check = "import pip, sys; sys.exit(sys.prefix == sys.base_prefix)"
    return PYTHON.exists() and not subprocess.run([PYTHON, "-c", check], capture_output=True).returncode


def packages(lock: Path) -> int:
    lines = lock.read_text(encoding="utf-8").splitlines()
    return len({line.partition("==")[0] for line in lines if line[:1].isalpha() and "== 'win32'" not in line})


def install(name: str) -> None:
    purpose, size = SETS[name]
    lock = ROOT / "requirements" / f"{name}.txt"
    count = packages(lock)
    say(f"{count} packages for {purpose} go into .venv, about {size} to fetch")
    begin_s = time.monotonic()
    if not has_pip():
        venv.create(VENV, with_pip=True, symlinks=True, clear=True)
    pip("--progress-bar", "off", "--require-hashes", "-r", str(lock), progress=Progress(count))
    pip("--no-deps", "--no-build-isolation", "--editable", ".")
    say(f"done in {time.monotonic() - begin_s:.0f} s")
    names = list(SETS)
    for smaller in names[: names.index(name) + 1]:
        (VENV / f".{smaller}-done").touch()


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in SETS:
        print(f"usage: setup.py {'|'.join(SETS)}", file=sys.stderr)
        return 2
    done = VENV / f".{arguments[0]}-done"
    before = done.stat().st_mtime_ns if done.exists() else 0
    ROOT.joinpath(".cache").mkdir(exist_ok=True)
    try:
        with (ROOT / ".cache" / "setup.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another process installs into .venv already; this one waits for its end")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if done.exists() and done.stat().st_mtime_ns > before:
                return 0  # somebody else did it meanwhile
            install(arguments[0])
    except SetupError as problem:
        say(str(problem))
        return 1
    except KeyboardInterrupt:
        say("stopped; the same command goes on where this ended")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
