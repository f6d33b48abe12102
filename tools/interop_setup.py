"""Fetch and build what the interop tests and the benchmarks need: Apache's jars, the Java drivers, the Go programs.

    python tools/interop_setup.py            # everything
    python tools/interop_setup.py java       # only the jars and the Java drivers
    python tools/interop_setup.py --relock   # accept the jars that Maven resolves now as the locked ones

Everything lands under `.cache/interop/`:

    5.5.0/ 4.9.8/            the jars, exactly those of tests/interop/java/jars-<version>.sha256
    driver-5.5.0/ -4.9.8/    the compiled Java driver
    driver-go                the compiled Go driver
    load                     the compiled load generator of the benchmarks

Running it again costs a second: jars are checked against the lock, drivers are rebuilt only when a source changed. A
jar that is missing, extra or different from the lock is an error and nothing is kept. Compilers that are missing are
installed with apt-get when that is possible. Only the standard library is used, so it runs before any set-up.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "interop"
JAVA = ROOT / "tests" / "interop" / "java"
GO = ROOT / "tests" / "interop" / "go"
LOAD = ROOT / "bench" / "load"
JAVA_VERSIONS = ("5.5.0", "4.9.8")
LATEST_VERSION = "5.5.0"
MAVEN_ATTEMPTS = 3

# Program -> Debian packages that have it, the first that the distribution knows is taken.
PROGRAMS = {
    "javac": ("openjdk-17-jdk-headless", "openjdk-21-jdk-headless", "default-jdk-headless"),
    "mvn": ("maven",),
    "go": ("golang-go",),
}


class SetupError(Exception):
    """What is missing or wrong, in one line for the user."""


def say(text: str) -> None:
    print(f"interop: {text}", flush=True)


def run(command: list[str], *, cwd: Path = ROOT, what: str, env: dict[str, str] | None = None) -> None:
    """Run to the end; on failure show the output, which is noise otherwise."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SetupError(f"{what} failed with exit status {done.returncode}:\n{done.stdout.rstrip()}")


def program(name: str) -> str:
    """Where the program is, looking also where Go's own installer puts it."""
    found = shutil.which(name) or shutil.which(name, path="/usr/local/go/bin")
    if found is None:
        raise SetupError(f"{name} is not installed")
    return found


def ensure_programs(names: Iterable[str]) -> None:
    missing = []
    for name in names:
        try:
            program(name)
        except SetupError:
            missing.append(name)
    if not missing:
        return
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        packages = " ".join(PROGRAMS[name][0] for name in missing)
        raise SetupError(f"{', '.join(missing)} not found; install it, on Debian with: apt-get install {packages}")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    say("updating the package lists")
    run([apt, "update", "-q"], what="apt-get update", env=quiet)
    for name in missing:
        package = next(candidate for candidate in PROGRAMS[name] if known_to_apt(candidate))
        say(f"installing {package} for {name}")
        run([apt, "install", "-q", "-y", "--no-install-recommends", package], what=f"installing {package}", env=quiet)


def known_to_apt(package: str) -> bool:
    shown = subprocess.run(["apt-cache", "policy", package], capture_output=True, text=True, check=False).stdout
    return "Candidate:" in shown and "Candidate: (none)" not in shown


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lock_path(version: str) -> Path:
    return JAVA / f"jars-{version}.sha256"


def read_lock(version: str) -> dict[str, str]:
    lines = lock_path(version).read_text(encoding="ascii").split("\n")
    return dict(line.split("  ") for line in lines if line)  # name, two spaces, digest


def write_lock(version: str, directory: Path) -> None:
    lines = [f"{jar.name}  {sha256(jar)}\n" for jar in sorted(directory.iterdir())]
    lock_path(version).write_text("".join(lines), encoding="ascii")
    say(f"locked {len(lines)} jars of {version}")


def lock_complaints(version: str, directory: Path) -> list[str]:
    """How the directory differs from the lock; empty when it is what was locked."""
    locked = read_lock(version)
    present = {path.name: path for path in directory.iterdir()} if directory.is_dir() else {}
    complaints = [f"{name} is missing" for name in sorted(locked.keys() - present.keys())]
    complaints += [f"{name} is not in the lock" for name in sorted(present.keys() - locked.keys())]
    complaints += [
        f"{name} differs from the lock"
        for name in sorted(locked.keys() & present.keys())
        if sha256(present[name]) != locked[name]
    ]
    return complaints


def ensure_jars(version: str, *, relock: bool) -> None:
    directory = CACHE / version
    if not relock and not lock_complaints(version, directory):
        return
    say(f"downloading RocketMQ {version}")
    incoming = CACHE / f"{version}.incoming"
    shutil.rmtree(incoming, ignore_errors=True)
    pom = JAVA / f"pom-{version}.xml"
    command = [program("mvn"), "-q", "-B", "-f", str(pom), "dependency:copy-dependencies"]
    for attempt in range(1, MAVEN_ATTEMPTS + 1):
        try:
            run([*command, f"-DoutputDirectory={incoming}"], what=f"resolving {pom.name}")
            break
        except SetupError:
            if attempt == MAVEN_ATTEMPTS:
                raise
            say(f"resolving {pom.name} failed, trying again")
    if relock:
        write_lock(version, incoming)
    complaints = lock_complaints(version, incoming)
    if complaints:
        shutil.rmtree(incoming)
        raise SetupError(f"the jars of {version} are not the locked ones: {'; '.join(complaints)}")
    shutil.rmtree(directory, ignore_errors=True)
    incoming.rename(directory)
    say(f"RocketMQ {version}: {len(read_lock(version))} jars verified")


def fingerprint(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.relative_to(ROOT)} {sha256(path)}\n".encode())
    return digest.hexdigest()


def build_once(target: Path, sources: list[Path], build: Callable[[], None]) -> None:
    """Build unless the target was built from exactly these sources."""
    stamp = target.with_name(f"{target.name}.built-from")
    wanted = fingerprint(sources)
    if target.exists() and stamp.exists() and stamp.read_text(encoding="ascii") == wanted:
        return
    say(f"building {target.name}")
    stamp.unlink(missing_ok=True)
    build()
    stamp.write_text(wanted, encoding="ascii")


def ensure_java_driver(version: str) -> None:
    sources = list((JAVA / "src").rglob("*.java"))
    if version == LATEST_VERSION:
        sources += (JAVA / "latest").rglob("*.java")
    target = CACHE / f"driver-{version}"

    def build() -> None:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        options = ["--release", "17", "-encoding", "UTF-8", "-nowarn", "-cp", f"{CACHE / version}/*", "-d", str(target)]
        run([program("javac"), *options, *map(str, sorted(sources))], what=f"compiling the driver for {version}")

    build_once(target, [*sources, lock_path(version)], build)


def ensure_java(*, relock: bool = False) -> None:
    ensure_programs(["javac", "mvn"])
    for version in JAVA_VERSIONS:
        ensure_jars(version, relock=relock)
        ensure_java_driver(version)


def build_go(module: Path, name: str) -> None:
    ensure_programs(["go"])
    target = CACHE / name
    sources = [path for path in module.rglob("*") if path.suffix in {".go", ".mod", ".sum"}]
    build_once(
        target,
        sources,
        lambda: run([program("go"), "build", "-o", str(target), "."], cwd=module, what=f"building {name}"),
    )


def ensure_go(*, relock: bool = False) -> None:
    del relock  # go.sum is Go's own lock
    build_go(GO, "driver-go")


def ensure_load(*, relock: bool = False) -> None:
    del relock  # it depends on nothing
    build_go(LOAD, "load")


PARTS: dict[str, Callable[..., None]] = {"java": ensure_java, "go": ensure_go, "load": ensure_load}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Fetch and build what the interop tests need.")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"which of {', '.join(PARTS)}; all by default")
    parser.add_argument("--relock", action="store_true", help="write the lock files from what Maven resolves now")
    options = parser.parse_args(arguments)
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; there are {', '.join(PARTS)}")
    CACHE.mkdir(parents=True, exist_ok=True)
    try:
        # Two test runs in one checkout must not build the same thing at once.
        with (CACHE / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for part in options.parts or PARTS:
                PARTS[part](relock=options.relock)
    except SetupError as problem:
        print(f"interop: {problem}", file=sys.stderr)
        return 1
    say("ready")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
