"""Apache's own benchmark, unmodified: `Producer` and `Consumer` of org.apache.rocketmq.example.benchmark, 5.5.0.

It reports the rate over its last ten seconds, once a second and for the first time after ten; the third report counts.
What it says has failed is counted; a client that ends by itself or gets nothing done makes the measurement fail.
"""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import msgspec
from servers import APACHE_VERSION, CACHE, JAVA_OPENS, Server, clean_environment

from bench.suite.contenders import cpu_seconds, stored

CLIENT_OPTIONS = ("-Xms512m", "-Xmx512m", "-XX:+UseG1GC")
REPORTS = 3
REPORT_DEADLINE_S = 90.0
_RATE = re.compile(r"(?:Send|Consume) TPS: (\d+)")
_FAILURES = re.compile(r"(?:Send Failed|Response Failed|Consume Fail): (\d+)")
_RESPONSE_MS = re.compile(r"Average RT\(ms\):\s*([\d.]+)")


class ClientFailed(Exception):
    """A client failed or did not report."""


class Report(msgspec.Struct):
    """What the programs said in the end, and the server's CPU time for 100,000 messages that were sent."""

    sent_rate: float
    response_ms: float
    consumed_rate: float | None
    failed_percent: float
    cpu_s: float


class Program:
    """One of the benchmark programs, running until it is ended."""

    def __init__(self, name: str, namesrv: str, topic: str, home: Path, arguments: list[str]) -> None:
        self.name = name
        self._log = home / f"{name}-{time.monotonic_ns()}.log"
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                [
                    *("java", *CLIENT_OPTIONS, *JAVA_OPENS, f"-Duser.home={home}"),
                    *("-cp", f"{CACHE / APACHE_VERSION}/*", f"org.apache.rocketmq.example.benchmark.{name}"),
                    *("-n", namesrv, "-t", topic, "-ri", "1000", *arguments),
                ],
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def reports(self) -> list[str]:
        return [line for line in self.text().splitlines() if _RATE.search(line)]

    def check(self) -> None:
        if self._child.poll() is not None:
            raise ClientFailed(f"{self.name} ended by itself:\n{self.text()}")

    def end(self) -> None:
        self._child.kill()
        self._child.wait()


def run_programs(server: Server, topic: str, queues: int, threads: int, body_bytes: int, *, consume: bool) -> Report:
    """Run until every program has reported often enough; the last reports count."""
    before, cpu_before_s = stored(server, topic, queues), cpu_seconds(server.pids)
    home, load = server.directory, ["-w", str(threads), "-s", str(body_bytes)]
    programs = [Program("Producer", server.namesrv_addr, topic, home, load)]
    if consume:
        group = f"side_by_side_{time.monotonic_ns()}"
        programs.append(Program("Consumer", server.namesrv_addr, topic, home, ["-g", group]))
    try:
        wait_for_reports(programs)
        cpu_s, sent = cpu_seconds(server.pids) - cpu_before_s, stored(server, topic, queues) - before
    finally:
        for program in programs:
            program.end()
    last = [program.reports()[REPORTS - 1] for program in programs]
    response = _RESPONSE_MS.search(last[0])
    failed = sum(int(count) for line in last for count in _FAILURES.findall(line))
    if sent == 0:
        raise ClientFailed(f"no message was stored:\n{programs[0].text()}")
    return Report(
        float(_RATE.findall(last[0])[0]),
        float(response[1]) if response is not None else float("nan"),
        float(_RATE.findall(last[1])[0]) if consume else None,
        failed / (failed + sent) * 100,
        cpu_s / sent * 100_000,
    )


def wait_for_reports(programs: list[Program]) -> None:
    deadline_s = time.monotonic() + REPORT_DEADLINE_S
    while any(len(program.reports()) < REPORTS for program in programs):
        if time.monotonic() > deadline_s:
            raise ClientFailed(f"no reports in time:\n{programs[0].text()}")
        for program in programs:
            program.check()
        time.sleep(0.1)
    for program in programs:
        program.check()
