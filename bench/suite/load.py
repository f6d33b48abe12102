"""The load generator: a job goes to its standard input, a result comes back; the fields are bench/load/main.go's."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec

PROGRAM = Path(__file__).resolve().parents[2] / ".cache" / "interop" / "load"


class Queue(msgspec.Struct):
    id: int
    from_: int = msgspec.field(default=0, name="from")
    to: int = 0


class Job(msgspec.Struct, kw_only=True):
    kind: str
    address: str = ""
    encoding: str = "json"
    topic: str = ""
    topics: int = 1
    queues: list[Queue] = []
    group: str = "bench"
    groups: int = 1
    body_bytes: int = 0
    properties: list[tuple[str, str]] = []
    connections: int = 1
    in_flight: int = 1
    batch: int = 1
    one_way: int = 0
    rate: int = 0
    delay_ms: int = 0
    pull_messages: int = 32
    subscription: str = "*"
    once: bool = False
    warm_seconds: float = 0
    seconds: float = 0
    messages: int = 0


class Latency(msgspec.Struct):
    p50: float
    p90: float
    p99: float
    p999: float
    max: float
    mean: float


class Result(msgspec.Struct):
    messages: int
    looked_at: int
    seconds: float
    errors: dict[str, int]
    remark: str
    latency_ms: Latency | None
    cpu_seconds: float


class LoadFailed(Exception):
    """The generator gave up; what it said."""


def run(job: Job, *, when_ready: Callable[[], None] = lambda: None) -> Result:
    """Runs the job to its end; `when_ready` is called when everything is connected and the load begins."""
    with subprocess.Popen(
        [str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        try:
            child.stdin.write(msgspec.json.encode(job))
            child.stdin.close()
            if child.stdout.readline():
                when_ready()
            answer, problem = child.stdout.read(), child.stderr.read()
        except BaseException:
            child.kill()
            raise
        if child.wait() != 0:
            raise LoadFailed(problem.decode().strip())
        return msgspec.json.decode(answer, type=Result)
