"""Every request code of broker and name server, every field at its limits, in both forms: see `every_request`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from store.small_store import MEMORY

TESTS = Path(__file__).parents[1]


def begin(root: str, form: dict[str, str]) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "faults.every_request", root]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path} | form, stdout=subprocess.PIPE)


def test_whatever_is_asked_both_forms_answer_alike_and_nothing_breaks() -> None:
    found: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory(dir=MEMORY) as own, TemporaryDirectory(dir=MEMORY) as sources:
        walks = {"own": begin(own, {}), "sources": begin(sources, {"SKYLARK_PURE": "1"})}
        for name, process in walks.items():
            out, _ = process.communicate(timeout=600)
            assert process.returncode == 0
            found[name] = json.loads(out)
    assert [f"{name}: {each}" for name, walk in found.items() for each in walk["complaints"]] == []
    answers, others = found["own"]["answers"], found["sources"]["answers"]
    assert answers.keys() == others.keys()
    assert [(each, answers[each], others[each]) for each in answers if answers[each] != others[each]] == []
