"""Compiles the modules that every message goes through, with mypyc, beside their sources.

    python tools/compile.py             unless they are compiled already; says so and goes on if there is no C compiler
    python tools/compile.py --remove    back to plain Python

Python imports a compiled module before the source of the same name, and SKYLARK_PURE=1 makes it import the source. Both
come from the same lines and pass the same tests.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
WORK = ROOT / ".cache" / "compile"
STAMP = WORK / "sources.sha256"
GROUP = "skylark"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")

# mypyc leaves out the keywords of a class statement, which msgspec's structs need: no module here may define one.
MODULES = [
    SOURCE / "skylark" / f"{name}.py"
    for name in (
        "wire/binary_header", "wire/frame", "wire/framing", "wire/lookup", "wire/message", "wire/records",
        "wire/sending", "wire/typed", "net/connection",
        "store/appended", "store/index", "store/dispatch", "store/commitlog", "store/consumequeue", "store/reading",
        "store/store", "selectors/nodes", "selectors/values",
        "broker/arrivals", "broker/filters", "broker/polling", "broker/pull", "broker/put", "broker/send",
        "broker/tally",
    )
]  # fmt: skip


def products() -> list[Path]:
    shared = SOURCE / f"{GROUP}__mypyc{SUFFIX}"
    return [shared, *(module.with_suffix(SUFFIX) for module in MODULES)]


def state() -> str:
    """What the compiled modules depend on, in one word: the sources whose types they use, and the Python."""
    digest = hashlib.sha256(sys.version.encode() + Path(__file__).read_bytes())
    for package in ("wire", "net", "store", "selectors", "broker", "config"):
        for path in sorted((SOURCE / "skylark" / package).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def missing() -> str | None:
    """What is not on this machine to compile with."""
    compiler = os.environ.get("CC") or (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"a C compiler ({compiler})"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's header files"
    return next((name for name in ("mypyc", "setuptools") if importlib.util.find_spec(name) is None), None)


def compile_all() -> None:
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    WORK.mkdir(parents=True, exist_ok=True)
    os.chdir(SOURCE)
    names = [str(module.relative_to(SOURCE)) for module in MODULES]
    extensions = mypycify(
        ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(WORK / "types"), *names],
        opt_level="2", debug_level="0", group_name=GROUP, target_dir=str(WORK / "c"),
    )  # fmt: skip
    command = build_ext(Distribution({"name": GROUP, "ext_modules": extensions}))
    command.build_lib = str(SOURCE)
    command.build_temp = str(WORK / "objects")
    command.ensure_finalized()
    command.run()


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiles the modules that every message goes through.")
    parser.add_argument("--remove", action="store_true", help="remove what was compiled")
    if parser.parse_args().remove:
        for path in [*products(), STAMP]:
            path.unlink(missing_ok=True)
        return
    wanted = state()
    if all(path.exists() for path in products()) and STAMP.exists() and STAMP.read_text() == wanted:
        for path in products():
            path.touch()  # the same sources may have been written again, as git does
        return
    for path in products():
        path.unlink(missing_ok=True)
    lack = missing()
    if lack is not None:
        print(f"compile: {lack} is missing; Skylark runs as plain Python, at about half the speed", file=sys.stderr)
        return
    print(f"compile: {len(MODULES)} modules with mypyc, which takes a minute", file=sys.stderr)
    compile_all()
    STAMP.write_text(wanted)


if __name__ == "__main__":
    main()
