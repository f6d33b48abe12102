"""Compiles the modules that every message goes through, with mypyc, beside their sources.

    python tools/compile.py             unless they are compiled already; says so and goes on if there is no C compiler
    python tools/compile.py --beside    the same in a process of its own; prints the file that it locks meanwhile
    python tools/compile.py --remove    back to plain Python

Python imports a compiled module before the source of the same name, and SKYLARK_PURE=1 makes it import the source. Both
come from the same lines and pass the same tests. The library that they all share is put in place last: as long as it
is not there, a process that starts runs the sources, and goes on with them (see src/skylark/__init__.py).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
WORK = ROOT / ".cache" / "compile"
GROUP = "skylark"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
STAMP = WORK / f"sources{SUFFIX}.sha256"
STAGED = WORK / "staged"
LOCK = WORK / "lock"
LOG = WORK / "log"
SHARED = Path(f"{GROUP}__mypyc{SUFFIX}")

# mypyc leaves out the keywords of a class statement, which msgspec's structs need: no module here may define one.
MODULES = [
    Path("skylark") / f"{name}.py"
    for name in (
        "wire/binary_header", "wire/frame", "wire/framing", "wire/lookup", "wire/message", "wire/records",
        "wire/sending", "wire/typed", "net/account", "net/allowance", "net/connection", "net/suspended",
        "store/appended", "store/index", "store/dispatch", "store/commitlog", "store/consumequeue", "store/reading",
        "store/store", "selectors/cache", "selectors/nodes", "selectors/values",
        "broker/arrivals", "broker/filters", "broker/polling", "broker/pop", "broker/pull", "broker/put", "broker/send",
        "broker/tally", "broker/walks",
    )
]  # fmt: skip

# GCC's, with as many processes as there are cores.
ACROSS_FILES = ["-flto=auto", "-fno-semantic-interposition", "-fvisibility=hidden"]

# Where they lie below src/, and below the top of a wheel; the shared library comes last.
PRODUCTS = [*(module.with_suffix(SUFFIX) for module in MODULES), SHARED]


def say(text: str) -> None:
    print(f"compile: {text}", file=sys.stderr, flush=True)


def state() -> str:
    """What the compiled modules depend on, in one word: the sources whose types they use, and the Python."""
    digest = hashlib.sha256(sys.version.encode() + Path(__file__).read_bytes())
    for package in ("wire", "net", "store", "selectors", "broker", "config"):
        for path in sorted((SOURCE / "skylark" / package).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def is_done() -> bool:
    there = all((SOURCE / path).exists() for path in PRODUCTS)
    return there and STAMP.exists() and STAMP.read_text(encoding="ascii") == state()


def missing() -> str | None:
    """What is not on this machine to compile with."""
    if shutil.which(shlex.split(c_compiler())[0]) is None:
        return f"a C compiler ({c_compiler()})"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's header files"
    return next((name for name in ("mypyc", "setuptools") if importlib.util.find_spec(name) is None), None)


def c_compiler() -> str:
    return os.environ.get("CC") or (sysconfig.get_config_var("CC") or "cc").split()[0]


def links_across_files() -> bool:
    """Whether the C compiler does at link time what it does within a file. Then each module is a file of its own, and
    all cores compile; else all of them are one file, since calls between files would cost a twentieth more.
    """
    with tempfile.TemporaryDirectory() as directory:
        command = [*shlex.split(c_compiler()), "-shared", "-fPIC", *ACROSS_FILES, "-x", "c", os.devnull]
        return not subprocess.run([*command, "-o", f"{directory}/empty"], capture_output=True).returncode


def remove() -> None:
    STAMP.unlink(missing_ok=True)
    for path in reversed(PRODUCTS):
        (SOURCE / path).unlink(missing_ok=True)


def compile_all() -> None:
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    class Build(build_ext):
        """The sources of an extension are compiled side by side, the largest ones first."""

        def build_extensions(self) -> None:
            compile_some = self.compiler.compile

            def compile_each(sources: list[str], **options: Any) -> list[str]:
                sources = sorted(sources, key=lambda name: Path(name).stat().st_size, reverse=True)
                with ThreadPoolExecutor(os.cpu_count()) as threads:
                    objects = threads.map(lambda name: compile_some([name], **options), sources)
                    return list(itertools.chain.from_iterable(objects))

            self.compiler.compile = compile_each
            super().build_extensions()

    wanted, split = state(), links_across_files()
    os.chdir(SOURCE)
    extensions = mypycify(
        ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(WORK / "types"), *map(str, MODULES)],
        opt_level="2", debug_level="0", group_name=GROUP, target_dir=str(WORK / "c"), multi_file=split,
    )  # fmt: skip
    for extension in extensions if split else ():
        extension.extra_compile_args += ACROSS_FILES
        extension.extra_link_args += ["-O2", *ACROSS_FILES]
    command = Build(Distribution({"name": GROUP, "ext_modules": extensions}))
    command.build_lib = str(STAGED)
    command.build_temp = str(WORK / "objects")
    command.parallel = os.cpu_count()
    command.ensure_finalized()
    command.run()
    for path in PRODUCTS:
        (STAGED / path).replace(SOURCE / path)
    STAMP.write_text(wanted, encoding="ascii")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Nobody else compiles here."""
    WORK.mkdir(parents=True, exist_ok=True)
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process compiles here already; this one waits for its end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_needed() -> bool:
    """After this, nothing that is compiled differs from its source."""
    if is_done():
        for path in PRODUCTS:
            (SOURCE / path).touch()  # the same sources may have been written again, as git does
        return False
    remove()
    lack = missing()
    if lack is not None:
        say(f"{lack} is missing; Skylark runs as plain Python, up to three times slower")
    return lack is None


def ensure() -> bool:
    """Compile if it is needed; whether the compiled form is there."""
    with alone():
        if is_needed():
            compile_now()
        return is_done()


def compile_now() -> None:
    say(f"{len(MODULES)} modules with mypyc, which takes half a minute or more")
    begin_s = time.monotonic()
    compile_all()
    say(f"done in {time.monotonic() - begin_s:.0f} s: what starts from now on runs the compiled modules")


def beside() -> None:
    """Its process has the lock from the beginning, no terminal, and a file for what it says."""
    WORK.mkdir(parents=True, exist_ok=True)
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(LOCK)  # somebody is at it
            return
        if not is_needed():
            return
        with LOG.open("w") as log:
            descriptor = lock.fileno()
            subprocess.Popen(
                [sys.executable, __file__, f"--watch={descriptor}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[descriptor], start_new_session=True,
            )  # fmt: skip
    print(LOCK)


def watch(command: list[str], locked: int) -> None:
    """Runs what compiles, and says how it ended: one that is killed, as when memory runs out, can't say it itself."""
    status = subprocess.run(command, pass_fds=[locked]).returncode
    if status:
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        say(f"the compiler {how}" + ("; memory may have run out" if status == -signal.SIGKILL else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiles the modules that every message goes through.")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--beside", action="store_true", help="in a process of its own; prints the file that is locked")
    how.add_argument("--watch", type=int, metavar="DESCRIPTOR", help=argparse.SUPPRESS)
    how.add_argument("--locked", action="store_true", help=argparse.SUPPRESS)
    how.add_argument("--remove", action="store_true", help="remove what was compiled")
    options = parser.parse_args()
    if options.remove:
        remove()
    elif options.beside:
        beside()
    elif options.watch is not None:
        watch([sys.executable, __file__, "--locked"], options.watch)
    elif options.locked:
        compile_now()
    else:
        ensure()


if __name__ == "__main__":
    main()
