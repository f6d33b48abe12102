"""Rounds by turns. What is finished is kept in a file, and a run that is started again goes on behind it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
from servers import Server

from bench.suite.contenders import APACHE, BROKERS, CONTENDERS, SkylarkFleet, make_server
from bench.suite.figures import Sample
from bench.suite.measures import Measure
from bench.suite.workloads import ASYNC, Growth, Settings, Workload

ROOT = Path(__file__).resolve().parents[2]
Say = Callable[[str], None]
Maker = Callable[[Path], Server]
"""Makes a server in a directory."""


class Plan(msgspec.Struct, frozen=True):
    rounds: int
    seconds: float
    warm_seconds: float


FULL = Plan(rounds=5, seconds=1.5, warm_seconds=8.0)
QUICK = Plan(rounds=3, seconds=1.0, warm_seconds=6.0)
GROWTH_ROUNDS = 3
"""At most: a point of a curve has its neighbours beside it."""


class Measured(msgspec.Struct):
    """Contender -> its samples, one of each round."""

    samples: dict[str, list[Sample]]
    when: str = ""
    commit: str = ""


class Grown(msgspec.Struct):
    """Contender -> the samples at each point of the axis."""

    points: list[float]
    samples: dict[str, list[list[Sample]]]
    when: str = ""
    commit: str = ""


class Results(msgspec.Struct):
    machine: str = ""
    workloads: dict[str, Measured] = {}
    growths: dict[str, Grown] = {}
    clients: dict[str, Measured] = {}
    """Here the contenders are clients: the official one and ours."""
    brokers: dict[str, Measured] = {}
    """Here they are Skylark with one broker and with two."""
    took_s: dict[str, float] = {}
    """How long each measurement took, with its preparation."""


def read_results(path: Path) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results) if path.exists() else Results(machine=machine())


def write_results(path: Path, results: Results) -> None:
    """All or nothing: a run that is ended while it writes must not lose hours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    fresh.replace(path)


def machine() -> str:
    words = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    model = words[0] if words else platform.machine()
    kernel = ".".join(platform.release().split(".")[:2])
    systems = f"Linux {kernel}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores ({model}), {memory_gb:.0f} GB, {systems}"


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M")


def commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def side_by_side(settings: Settings) -> dict[str, Maker]:
    return {name: partial(make_server, name, settings=dict(settings)) for name in CONTENDERS}


@contextmanager
def running(makers: Mapping[str, Maker], directory: Path | None) -> Iterator[dict[str, Server]]:
    """The servers on empty stores; they and everything they wrote are gone afterwards."""
    home = Path(tempfile.mkdtemp(prefix="skylark-bench-", dir=directory))
    servers: dict[str, Server] = {}
    try:
        for number, (name, make) in enumerate(makers.items()):
            servers[name] = make(home / str(number))
            servers[name].start()
        yield servers
    finally:
        for server in servers.values():
            server.kill()
        shutil.rmtree(home, ignore_errors=True)


def in_turn(names: Iterable[str], number: int) -> list[str]:
    """The order changes from round to round, so that a drift of the machine hurts both."""
    return list(names) if number % 2 == 0 else list(names)[::-1]


def take_rounds(measure: Measure, servers: dict[str, Server], plan: Plan, say: Say) -> dict[str, list[Sample]]:
    for name, server in servers.items():
        say(f"{name}: preparing")
        measure.prepare(server)
        say(f"{name}: warming up")
        # Java compiles what runs often; Python has nothing to wait for but its caches.
        measure.warm(server, plan.warm_seconds if name == APACHE else plan.seconds)
    samples: dict[str, list[Sample]] = {name: [] for name in servers}
    for number in range(plan.rounds):
        for name in in_turn(servers, number):
            os.sync()  # what one has written is not to be paid for by the other
            say(f"round {number + 1} of {plan.rounds}: {name}")
            samples[name].append(measure.sample(servers[name], plan.seconds))
    return samples


def run_workload(workload: Workload, plan: Plan, directory: Path | None, say: Say) -> Measured:
    with running(side_by_side(workload.settings), directory) as servers:
        samples = take_rounds(workload.measure, servers, plan, say)
    return Measured(samples, now(), commit())


def run_brokers(measure: Measure, plan: Plan, directory: Path | None, say: Say) -> Measured:
    """Skylark with one broker beside Skylark with two."""
    makers = {name: partial(SkylarkFleet, brokers=count, settings=dict(ASYNC)) for count, name in enumerate(BROKERS, 1)}
    with running(makers, directory) as servers:
        return Measured(take_rounds(measure, servers, plan, say), now(), commit())


def run_growth(growth: Growth, plan: Plan, directory: Path | None, say: Say) -> Grown:
    grown = Grown([], {name: [] for name in CONTENDERS}, now(), commit())
    plan = msgspec.structs.replace(plan, rounds=min(plan.rounds, GROWTH_ROUNDS))
    with running(side_by_side(growth.settings), directory) as servers:
        for point, measure in growth.points:

            def say_where(text: str, where: str = f"{point:g} {growth.axis}: ") -> None:
                say(where + text)

            samples = take_rounds(measure, servers, plan, say_where)
            plan = msgspec.structs.replace(plan, warm_seconds=plan.seconds)  # the next point finds it warm
            grown.points.append(point)
            for name in CONTENDERS:
                grown.samples[name].append(samples[name])
    return grown
