"""A million timers that wait, at Apache's server and at Skylark, one after the other on this machine.

    .venv/bin/python bench/pending_timers.py                   # a million each, some ten minutes
    .venv/bin/python bench/pending_timers.py --count 100000 --idle 10

Each server starts on an empty store. Timers are put that are due over the next day, from one Python producer with many
in flight; then the server is left alone, and then so many more are put that are due within seconds. The table shows how
fast they were put and what CPU that took the server, how much memory it has before and after (what is its own, and all
with the mapped files), its CPU while it only waits, and how long after its time each of the last timers was stored in
its topic. To the second is what both promise: a timer comes at the end of the second that it is due in.

The jars come from `tools/interop_setup.py java`. Everything is written to a temporary directory and removed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "interop"))

from servers import ApacheServer, Server, SkylarkServer, request

from skylark.client.lite_pull_consumer import LitePullConsumer
from skylark.client.producer import Producer

TOPIC = "PendingTimers"
SOON_TOPIC = "SoonTimers"
SERVER_OPTIONS = ["-Xms1g", "-Xmx2g", "-XX:+UseG1GC"]
GET_BROKER_RUNTIME_INFO = 28
DAY_MS = 24 * 3600 * 1000
HOUR_MS = 3600 * 1000
SOON_MS = 10_000
BODY = bytes(100)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> tuple[float, float]:
    """Memory of its own, and all that is resident."""
    status = dict(re.findall(r"(\w+):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()))
    return int(status["RssAnon"]) / 1024, int(status["VmRSS"]) / 1024


def runtime_info(server: Server) -> dict[str, str]:
    _, body = request(server.broker_addr, GET_BROKER_RUNTIME_INFO, {})
    table: dict[str, str] = json.loads(body)["table"]
    return table


def wait_on_the_wheel(server: Server) -> str:
    """Until all timers are on the wheel; how many the server says there are."""
    while int((info := runtime_info(server))["timerOffsetBehind"]) > 0:
        time.sleep(0.1)
    return info["timerCongestNum"]


async def put(server: Server, topic: str, due_ms: list[int]) -> float:
    """Puts timers, many in flight; how many a second."""
    async with Producer(server.namesrv_addr, group="timers", timeout_s=30.0, max_in_flight=512) as producer:
        await producer.send(topic, b"first")
        began = time.monotonic()
        for at_ms in due_ms:
            future = await producer.send_soon(topic, BODY, deliver_at=at_ms, properties={"due": str(at_ms)})
            future.add_done_callback(asyncio.Future.result)
        await producer.flush()
        return len(due_ms) / (time.monotonic() - began)


async def lags_ms(server: Server, count: int) -> list[int]:
    """How long after its time each of so many timers was stored in its topic."""
    dice = random.Random(count)
    start_ms = now_ms() + 2000
    await put(server, SOON_TOPIC, [start_ms + dice.randrange(SOON_MS) for _ in range(count)])
    found: list[int] = []
    async with LitePullConsumer(server.namesrv_addr, group="readers", from_where="first") as consumer:
        consumer.subscribe(SOON_TOPIC)
        async with asyncio.timeout(120):
            while len(found) < count:
                for message in await consumer.poll(timeout_s=1.0):
                    if "due" in message.properties:
                        found.append(message.store_timestamp_ms - int(message.properties["due"]))
    return found


def measure(kind: str, options: argparse.Namespace) -> dict[str, str]:
    with tempfile.TemporaryDirectory(prefix="skylark-bench-") as scratch:
        server: Server
        if kind == "apache":
            server = ApacheServer(Path(scratch))
            server.java_options = SERVER_OPTIONS
            server.housekeeping = {}
        else:
            server = SkylarkServer(Path(scratch))
        try:
            server.start()
            return run(server, options)
        finally:
            server.kill()


def run(server: Server, options: argparse.Namespace) -> dict[str, str]:
    dice = random.Random(1)
    asyncio.run(put(server, TOPIC, [now_ms() + DAY_MS] * 20_000))  # warm
    wait_on_the_wheel(server)
    before = memory_mib(server.broker_pid)
    cpu_before = cpu_seconds(server.broker_pid)
    due_ms = [now_ms() + HOUR_MS + dice.randrange(DAY_MS) for _ in range(options.count)]
    rate = asyncio.run(put(server, TOPIC, due_ms))
    pending = wait_on_the_wheel(server)
    put_cpu_s = (cpu_seconds(server.broker_pid) - cpu_before) / options.count * 100_000
    after = memory_mib(server.broker_pid)
    time.sleep(5)  # what it still flushes is not idling
    cpu_before = cpu_seconds(server.broker_pid)
    time.sleep(options.idle)
    idle = (cpu_seconds(server.broker_pid) - cpu_before) / options.idle * 100
    lags = sorted(asyncio.run(lags_ms(server, options.soon)))
    return {
        "timers that wait": f"{int(pending):,}",
        "put a second": f"{rate:,.0f}",
        "server CPU s for 100,000 put": f"{put_cpu_s:.1f}",
        "own memory before, after, MiB": f"{before[0]:.0f}, {after[0]:.0f}",
        "resident with files before, after, MiB": f"{before[1]:.0f}, {after[1]:.0f}",
        "CPU while they wait, % of a core": f"{idle:.1f}",
        "late by, ms: lowest": f"{lags[0]}",
        "late by, ms: median": f"{statistics.median(lags):.0f}",
        "late by, ms: 99 %": f"{lags[int(len(lags) * 0.99)]}",
        "late by, ms: highest": f"{lags[-1]}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="A million pending timers at Apache's server and at Skylark.")
    parser.add_argument("--count", type=int, default=1_000_000, help="timers that wait (default a million)")
    parser.add_argument("--soon", type=int, default=10_000, help="timers that fall due in ten seconds (default 10,000)")
    parser.add_argument("--idle", type=int, default=30, help="seconds to watch the server wait (default 30)")
    options = parser.parse_args()
    print(f"{options.count:,} timers of {len(BODY)} bytes, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}")
    results = {}
    for kind in ("apache", "skylark"):
        results[kind] = measure(kind, options)
        print(f"{kind}: {results[kind]}", flush=True)
    print(f"\n{'':44}{'Apache':>20}{'Skylark':>20}")
    for title in results["apache"]:
        print(f"{title:44}{results['apache'][title]:>20}{results['skylark'][title]:>20}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
