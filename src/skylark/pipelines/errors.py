"""What goes wrong in a pipeline and can be put right by its user, as one sentence.

Spark wraps the error of a Python source in its own, that in a Py4J one, and adds the stacks of two languages. What a
user needs is the innermost message: the one that names the option or the address.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from pyspark.errors import PySparkException

_LINE_OF_OURS: Final = re.compile(r"^(?:Caused by: )?skylark(?:\.\w+)+: (.+)$")
_TOO_SLOW: Final = "Python worker failed to connect back"
_LONGEST: Final = 600  # of what Spark says; ours end with what to do


class PipelineError(Exception):
    """Something that the user can put right; its text is all that they see."""


class Mistakes(PipelineError):
    """Several at once."""

    def __init__(self, errors: Sequence[PipelineError]) -> None:
        super().__init__("; ".join(map(str, errors)))
        self.errors = tuple(errors)


def as_one(errors: Sequence[PipelineError]) -> PipelineError:
    """One as it is, more as Mistakes; what is wrong with source and sink alike is told once."""
    different = list({str(error): error for error in errors}.values())
    return different[0] if len(different) == 1 else Mistakes(different)


def raise_all(errors: Sequence[PipelineError]) -> None:
    """Raises them, if there are any."""
    if errors:
        raise as_one(errors)


def is_too_busy(error: PipelineError) -> bool:
    """Whether Spark gave up a Python process that had not started yet, which another try may bring."""
    return _TOO_SLOW in str(error)


def reason(error: BaseException) -> str:
    """The sentence in `error` that says what to put right."""
    text = str(error)
    for line in text.splitlines():
        ours = _LINE_OF_OURS.match(line.strip())
        if ours:
            return " ".join(ours[1].split())
    if _TOO_SLOW in text:
        return (
            f"{_TOO_SLOW}: Spark waits 10 s for a Python process to start; this machine is too busy for that now, or "
            "PYSPARK_PYTHON names a Python that does not start"
        )
    if isinstance(error, PySparkException):
        return _short(_without_stack(text))
    return _short(text or type(error).__name__)


def _without_stack(text: str) -> str:
    """Spark's message up to where stacks, query plans and the end of its own context begin."""
    kept = []
    for line in text.splitlines():
        if re.match(r"\s*(at |JVM stacktrace|Traceback|==+ |'?[A-Z]\w+ \[|[+:]- |SQLSTATE)", line) or line == ";":
            break
        kept.append(line)
    return re.sub(r"\s*SQLSTATE: \w+", "", " ".join(kept))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
