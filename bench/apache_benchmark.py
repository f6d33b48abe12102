"""Apache's own benchmark, by turns against Apache's server and Skylark, on this machine.

    .venv/bin/python bench/apache_benchmark.py                  # 3 rounds, about five minutes
    .venv/bin/python bench/apache_benchmark.py --rounds 5 --threads 64 --size 1024
    .venv/bin/python bench/apache_benchmark.py --sync-flush

Runs `org.apache.rocketmq.example.benchmark.Producer` and `Consumer` of RocketMQ 5.5.0 unmodified. In each round each
server starts on an empty store and passes two phases: the producer alone, then producer and consumer together. The
order of the servers changes from round to round, so that a drift of the machine hurts both. The benchmark reports the
rate over its last ten seconds; the last report of a phase counts, the time before it is warm-up. The table shows the
median over the rounds, the range, and how many seconds of CPU the server took for 100,000 messages sent. Failed sends
or consumptions, and any error that a client prints, make the run fail.

The jars come from `tools/interop_setup.py java`. Everything is written to a temporary directory and removed.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "interop"))

from servers import (
    APACHE_VERSION,
    CACHE,
    JAVA_OPENS,
    ApacheServer,
    Server,
    SkylarkServer,
    clean_environment,
)

TOPIC = "SideBySide"
CLIENT_OPTIONS = ["-Xms512m", "-Xmx512m", "-XX:+UseG1GC"]
SERVER_OPTIONS = ["-Xms1g", "-Xmx2g", "-XX:+UseG1GC"]
PHASE_GRACE_S = 30
RATE = re.compile(r"(?:Send|Consume) TPS: (\d+)")
FAILURES = re.compile(r"(?:Send Failed|Response Failed|Consume Fail): (\d+)")
RESPONSE_MS = re.compile(r"Average RT\(ms\):\s*([\d.]+)")


@dataclass
class Phase:
    """What one phase measured; the consumer's rate is None when it had none."""

    send_rate: float
    response_ms: float
    consume_rate: float | None
    cpu_s: float


@dataclass
class Rounds:
    alone: list[Phase] = field(default_factory=list)
    together: list[Phase] = field(default_factory=list)


class BenchmarkError(Exception):
    """A client failed or did not report."""


class BenchmarkClient:
    """One of Apache's benchmark programs, running until it is ended."""

    def __init__(self, program: str, namesrv: str, home: Path, arguments: list[str]) -> None:
        self.program = program
        self.log = home / f"{program}-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            self._child = subprocess.Popen(
                [
                    *("java", *CLIENT_OPTIONS, *JAVA_OPENS, f"-Duser.home={home}"),
                    *("-cp", f"{CACHE / APACHE_VERSION}/*", f"org.apache.rocketmq.example.benchmark.{program}"),
                    *("-n", namesrv, "-t", TOPIC, "-ri", "1000", *arguments),
                ],
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def reports(self) -> list[str]:
        return [line for line in self.text().splitlines() if RATE.search(line)]

    def check(self) -> None:
        if self._child.poll() is not None:
            raise BenchmarkError(f"{self.program} ended by itself:\n{self.text()}")
        for line in self.text().splitlines():
            if "Exception" in line or any(int(count) for count in FAILURES.findall(line)):
                raise BenchmarkError(f"{self.program} failed: {line}")

    def end(self) -> None:
        self._child.kill()
        self._child.wait()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_phase(server: Server, home: Path, options: argparse.Namespace, *, consume: bool) -> Phase:
    """Run until every client has reported `--seconds` after its first report; the last reports count."""
    load = ["-w", str(options.threads), "-s", str(options.size)]
    clients = [BenchmarkClient("Producer", server.namesrv_addr, home, load)]
    if consume:
        group = f"side_by_side_{time.monotonic_ns()}"
        clients.append(BenchmarkClient("Consumer", server.namesrv_addr, home, ["-g", group]))
    deadline = time.monotonic() + 10 + options.seconds + PHASE_GRACE_S
    try:
        cpu_before, started = 0.0, 0.0
        while any(len(client.reports()) < options.seconds for client in clients):
            if time.monotonic() > deadline:
                raise BenchmarkError(f"no reports in time:\n{clients[0].text()}")
            for client in clients:
                client.check()
            if started == 0.0 and clients[0].reports():
                cpu_before, started = cpu_seconds(server.broker_pid), time.monotonic()
            time.sleep(0.1)
        cpu_s = cpu_seconds(server.broker_pid) - cpu_before
        elapsed_s = time.monotonic() - started
        send_report = clients[0].reports()[-1]
        send_rate = float(RATE.findall(send_report)[0])
        response = RESPONSE_MS.search(send_report)
        for client in clients:
            client.check()
        return Phase(
            send_rate=send_rate,
            response_ms=float(response[1]) if response is not None else float("nan"),
            consume_rate=float(RATE.findall(clients[1].reports()[-1])[0]) if consume else None,
            cpu_s=cpu_s / (send_rate * elapsed_s) * 100_000,
        )
    finally:
        for client in clients:
            client.end()


def make_server(kind: str, home: Path, options: argparse.Namespace) -> Server:
    flush = "SYNC_FLUSH" if options.sync_flush else "ASYNC_FLUSH"
    if kind == "apache":
        server = ApacheServer(home, flushDiskType=flush)
        server.java_options = SERVER_OPTIONS
        return server
    return SkylarkServer(home, flushDiskType=flush)


def run_round(kind: str, options: argparse.Namespace, results: Rounds) -> None:
    with tempfile.TemporaryDirectory(prefix="skylark-bench-") as scratch:
        home = Path(scratch)
        server = make_server(kind, home, options)
        try:
            server.start()
            results.alone.append(run_phase(server, home, options, consume=False))
            results.together.append(run_phase(server, home, options, consume=True))
        finally:
            server.kill()
    for name, phase in (("alone", results.alone[-1]), ("together", results.together[-1])):
        consumed = f", consumed {phase.consume_rate:,.0f}/s" if phase.consume_rate is not None else ""
        print(f"  {kind:8} {name:9} sent {phase.send_rate:,.0f}/s, {phase.response_ms:.2f} ms{consumed}", flush=True)


def summary(values: list[float]) -> str:
    return f"{statistics.median(values):>10,.1f}  ({min(values):,.1f} - {max(values):,.1f})"


def print_table(results: dict[str, Rounds]) -> None:
    print(f"\n{'median over the rounds (lowest - highest)':44}{'Apache':36}{'Skylark':36}")
    rows: list[tuple[str, Callable[[Rounds], list[float]]]] = [
        ("producer alone: messages/s", lambda rounds: [phase.send_rate for phase in rounds.alone]),
        ("producer alone: average response, ms", lambda rounds: [phase.response_ms for phase in rounds.alone]),
        ("producer alone: server CPU s / 100k sent", lambda rounds: [phase.cpu_s for phase in rounds.alone]),
        ("together: sent messages/s", lambda rounds: [phase.send_rate for phase in rounds.together]),
        ("together: consumed messages/s", lambda rounds: [phase.consume_rate or 0.0 for phase in rounds.together]),
        ("together: server CPU s / 100k sent", lambda rounds: [phase.cpu_s for phase in rounds.together]),
    ]
    for title, pick in rows:
        print(f"{title:44}{summary(pick(results['apache'])):36}{summary(pick(results['skylark'])):36}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Apache's benchmark by turns against Apache's server and Skylark.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=32, help="sending threads (default 32)")
    parser.add_argument("--size", type=int, default=128, help="bytes of a body (default 128)")
    parser.add_argument("--seconds", type=int, default=10, help="how long a phase goes on after its first report")
    parser.add_argument("--sync-flush", action="store_true", help="acknowledge after fdatasync, in both servers")
    options = parser.parse_args()
    results = {"apache": Rounds(), "skylark": Rounds()}
    print(f"{options.threads} threads, {options.size} bytes, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}")
    try:
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", flush=True)
            for kind in list(results) if number % 2 == 0 else reversed(results):
                run_round(kind, options, results[kind])
    except BenchmarkError as problem:
        print(problem, file=sys.stderr)
        return 1
    print_table(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
