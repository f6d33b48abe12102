"""The tools that `make` runs: what they say when somebody else is at it, and when they are killed."""

import fcntl
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tool_{name}", TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "compile: the compiler was ended by SIGKILL; memory may have run out\n"),
        ("import os; os.kill(os.getpid(), 15)", "compile: the compiler was ended by SIGTERM\n"),
        ("raise SystemExit(3)", "compile: the compiler ended with exit status 3\n"),
        ("", ""),
    ],
)
def test_how_the_compiler_ended_is_said_for_it(
    end: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "lock").open("w") as lock:
        loaded("compile").watch([sys.executable, "-c", end], lock.fileno())
    assert capsys.readouterr().err == said


def test_what_compiles_keeps_the_lock(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        descriptor = lock.fileno()
        loaded("compile").watch([sys.executable, "-c", f"import os; os.write({descriptor}, b'held')"], descriptor)
    assert (tmp_path / "lock").read_text() == "held"


def test_who_waits_for_another_compiler_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, said = loaded("compile"), list[str]()
    monkeypatch.setattr(tool, "WORK", tmp_path)
    monkeypatch.setattr(tool, "LOCK", tmp_path / "lock")
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def say(text: str) -> None:
            said.append(text)
            fcntl.flock(lock, fcntl.LOCK_UN)  # the other one ends

        monkeypatch.setattr(tool, "say", say)
        with tool.alone():
            pass
        with tool.alone():
            pass
    assert said == ["another process compiles here already; this one waits for its end"]


def test_who_waits_for_another_set_up_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, said = loaded("setup"), list[str]()
    done = tmp_path / ".up-done"
    done.touch()
    os.utime(done, (0, 0))
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "VENV", tmp_path)
    (tmp_path / ".cache").mkdir()
    with (tmp_path / ".cache" / "setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def say(text: str) -> None:
            said.append(text)
            done.touch()  # the other one has it installed, and ends
            fcntl.flock(lock, fcntl.LOCK_UN)

        monkeypatch.setattr(tool, "say", say)
        assert tool.main(["up"]) == 0
    assert said == ["another process installs into .venv already; this one waits for its end"]
