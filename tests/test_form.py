"""Which form runs, and what is said about the slow one."""

import fcntl
import queue
from pathlib import Path

import pytest

import skylark
from skylark import form


def test_what_is_not_loaded_from_a_source_is_compiled() -> None:
    assert form.is_compiled("/x/skylark/wire/frame.cpython-311-x86_64-linux-gnu.so")
    assert form.is_compiled("C:\\skylark\\wire\\frame.pyd")
    assert not form.is_compiled("/x/skylark/wire/frame.py")


@pytest.mark.parametrize(
    ("environment", "advice"),
    [
        ({}, "where there is a C compiler, `make compiled` in a checkout makes it, and so does pip install ."),
        ({"SKYLARK_COMPILING": "lock"}, "which is being made now"),
        ({"SKYLARK_COMPILING": "", "SKYLARK_PURE": "1"}, "because SKYLARK_PURE is set"),
    ],
)
def test_the_slow_form_says_what_to_do(
    environment: dict[str, str], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form, "is_compiled", lambda: False)
    complaint = form.complaint(environment)
    assert complaint is not None
    assert complaint.startswith("this is plain Python, up to three times slower")
    assert complaint.endswith(advice)


def test_the_fast_form_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "is_compiled", lambda: True)
    assert form.complaint({}) is None


@pytest.mark.parametrize(
    ("made", "text"),
    [(True, "the compiled form is there: the next start runs it"), (False, "log says why")],
)
def test_the_end_of_the_compiler_is_told(
    made: bool, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, told = tmp_path / "library.so", queue.SimpleQueue[str]()
    monkeypatch.setattr(skylark, "_COMPILED", str(library))
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        form.tell_when_compiled(told.put, {"SKYLARK_COMPILING": lock.name})
        assert told.empty()
        if made:
            library.touch()
    assert told.get(timeout=60).endswith(text)
