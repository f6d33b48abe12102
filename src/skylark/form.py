"""Which form of Skylark runs: with the modules that every message goes through compiled, or as plain Python."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath

import skylark
from skylark.wire import frame


def is_compiled(module_file: str | None = frame.__file__) -> bool:
    """Whether a module that is among the compiled ones was loaded from something else than its source."""
    return PurePath(module_file or "").suffix != ".py"


def description() -> str:
    """Version, form and Python: what a report of a defect or of a measurement has to say."""
    import platform
    from importlib.metadata import version

    form = "compiled" if is_compiled() else "plain Python (slower)"
    return f"{version('skylark-mq')}, {form}, {platform.python_implementation()} {platform.python_version()}"


def complaint(environment: Mapping[str, str] = os.environ) -> str | None:
    """What to do about the slow form, in one line; nothing if this is the fast one."""
    if is_compiled():
        return None
    slow = "this is plain Python, up to three times slower than the compiled form"
    if environment.get("SKYLARK_COMPILING"):
        return f"{slow}, which is being made now"
    if environment.get("SKYLARK_PURE"):
        return f"{slow}, because SKYLARK_PURE is set"
    return f"{slow}: where there is a C compiler, `make compiled` in a checkout makes it, and so does pip install ."


def tell_when_compiled(tell: Callable[[str], None], environment: Mapping[str, str] = os.environ) -> None:
    """Calls `tell`, from a thread, when the compiler that works beside this process is done.

    SKYLARK_COMPILING names the file that it has locked until then; see tools/compile.py.
    """
    locked = environment.get("SKYLARK_COMPILING")
    if not locked:
        return

    def wait() -> None:
        with Path(locked).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
        if Path(skylark._COMPILED).exists():
            tell("the compiled form is there: the next start runs it")
        else:
            tell(f"the compiled form could not be made: {PurePath(locked).with_name('log')} says why")

    threading.Thread(target=wait, name="skylark-compiler", daemon=True).start()
