"""The lines that the client guide installs Skylark with, in a new environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDES = sorted((ROOT / "docs").glob("*.md"))
LINE = re.compile(r"pip install ([^\s`#]+)")


def run(*command: str | Path) -> str:
    environment = os.environ | {"PIP_NO_COMPILE": "1"}  # much of what builds the wheel is never imported
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_installed_from_the_checkout(tmp_path: Path) -> None:
    what = re.findall(rf"^{LINE.pattern}", (ROOT / "docs" / "client.md").read_text(), re.M)
    assert what == [".", "'.[compression]'"]
    run(sys.executable, "-m", "venv", tmp_path)
    for argument in what:
        run(tmp_path / "bin" / "pip", "install", "--quiet", argument.strip("'"))
    assert "compiled" in run(tmp_path / "bin" / "skylark", "--version")
    run(tmp_path / "bin" / "python", "-c", "import lz4")


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_every_guide_installs_the_checkout_with_extras_that_it_has(guide: Path) -> None:
    extras = re.search(r"^\[project.optional-dependencies\]\n((?:.+\n)+)", (ROOT / "pyproject.toml").read_text(), re.M)
    assert extras is not None
    known = {line.partition(" ")[0] for line in extras[1].splitlines()}
    for argument in LINE.findall(guide.read_text()):
        assert re.fullmatch(r"'?\.(\[\w+\])?'?", argument), argument
        assert set(re.findall(r"\[(\w+)\]", argument)) <= known
