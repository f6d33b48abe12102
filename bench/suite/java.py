"""Apache's own benchmark, unmodified: `Producer` and `Consumer` of org.apache.rocketmq.example.benchmark, 5.5.0.

It reports the rate over its last ten seconds, once a second; the last report counts, the time before it is warm-up.
Failed sends or consumptions, and any error that a client prints, make the measurement fail.
"""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import msgspec
from servers import APACHE_VERSION, CACHE, JAVA_OPENS, Server, clean_environment

from bench.suite.contenders import cpu_seconds

CLIENT_OPTIONS = ("-Xms512m", "-Xmx512m", "-XX:+UseG1GC")
REPORT_DEADLINE_S = 60
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
        for line in self.text().splitlines():
            if "Exception" in line or any(int(count) for count in _FAILURES.findall(line)):
                raise ClientFailed(f"{self.name} failed: {line}")

    def end(self) -> None:
        self._child.kill()
        self._child.wait()


def run_programs(server: Server, topic: str, threads: int, body_bytes: int, reports: int, *, consume: bool) -> Report:
    """Run until every program has reported so often; the last reports count."""
    home = server.directory
    load = ["-w", str(threads), "-s", str(body_bytes)]
    programs = [Program("Producer", server.namesrv_addr, topic, home, load)]
    if consume:
        group = f"side_by_side_{time.monotonic_ns()}"
        programs.append(Program("Consumer", server.namesrv_addr, topic, home, ["-g", group]))
    deadline = time.monotonic() + REPORT_DEADLINE_S + reports
    try:
        cpu_before_s, began_s = 0.0, 0.0
        while any(len(program.reports()) < reports for program in programs):
            if time.monotonic() > deadline:
                raise ClientFailed(f"no reports in time:\n{programs[0].text()}")
            for program in programs:
                program.check()
            if began_s == 0.0 and programs[0].reports():
                cpu_before_s, began_s = cpu_seconds(server.pids), time.monotonic()
            time.sleep(0.1)
        cpu_s, elapsed_s = cpu_seconds(server.pids) - cpu_before_s, time.monotonic() - began_s
        for program in programs:
            program.check()
        last = programs[0].reports()[-1]
        sent_rate = float(_RATE.findall(last)[0])
        response = _RESPONSE_MS.search(last)
        return Report(
            sent_rate,
            float(response[1]) if response is not None else float("nan"),
            float(_RATE.findall(programs[1].reports()[-1])[0]) if consume else None,
            cpu_s / (sent_rate * elapsed_s) * 100_000,
        )
    finally:
        for program in programs:
            program.end()
