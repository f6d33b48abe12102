"""What `import skylark` gives, and what it costs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import skylark


def test_every_name_leads_somewhere() -> None:
    for name in skylark.__all__:
        assert getattr(skylark, name) is not None
    assert set(skylark.__all__) <= set(dir(skylark))


def test_other_names_do_not() -> None:
    with pytest.raises(AttributeError, match="Prodcuer"):
        skylark.Prodcuer  # type: ignore[attr-defined]  # noqa: B018


def test_importing_it_brings_nothing_along() -> None:
    program = "import sys, skylark; print(*(m for m in sys.modules if m.startswith(('skylark.', 'asyncio'))))"
    environment = {name: value for name, value in os.environ.items() if name != "SKYLARK_PURE"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"skylark.pure"}  # which sees to it that the sources are imported
