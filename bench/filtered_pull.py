"""What it costs to find one message in a thousand: pulls that filter by tag and by SQL, from Apache and Skylark.

    .venv/bin/python bench/filtered_pull.py                       # 200,000 messages, 5 rounds
    .venv/bin/python bench/filtered_pull.py --messages 1000000 --rounds 3

Both servers run at the same time and hold the same messages in one queue; one in a thousand has the tag and the price
that is asked for. In each round each server is read from end to end by each filter, in an order that changes from round
to round, by one pull after the other from one Python client. The table shows the median over the rounds, the range, and
the CPU time that the server took, in milliseconds for 100,000 messages looked at.

The jars come from `tools/interop_setup.py java`. Everything is written to a temporary directory and removed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "interop"))

from servers import SERVERS, Server

from skylark.client.message import OutgoingMessage
from skylark.client.producer import Producer
from skylark.client.pull_consumer import PullConsumer, PullStatus

TOPIC = "FilteredPull"
EVERY = 1000
BATCH = 400
BODY = b"x" * 200
FILTERS: dict[str, dict[str, str]] = {
    "tag": {"tag": "rare"},
    "SQL": {"sql": "price > 100 AND region = 'eu'"},
}


@dataclass
class Measured:
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    pulls: int = 0


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def message(number: int) -> OutgoingMessage:
    is_rare = number % EVERY == EVERY // 2
    properties = {"price": "150" if is_rare else str(number % 100), "region": "eu", "customer": str(number)}
    return OutgoingMessage(BODY, tag="rare" if is_rare else "common", properties=properties)


async def fill(server: Server, count: int) -> None:
    async with Producer(server.namesrv_addr, timeout_s=30) as producer:
        await producer.send(TOPIC, b"makes the topic")
        queue = (await producer.session.routes.get(TOPIC, refresh=True)).write_queues[0]
        for first in range(0, count, BATCH):
            await producer.send_batch(TOPIC, [message(number) for number in range(first, first + BATCH)], queue=queue)
        async with PullConsumer(session=producer.session) as consumer:
            while await consumer.max_offset(queue) < count:  # noqa: ASYNC110 (Apache's queues follow its log)
                await asyncio.sleep(0.1)


async def read(server: Server, count: int, wanted: dict[str, str]) -> tuple[float, float, int]:
    """Seconds, CPU seconds of the server and pulls for a whole queue."""
    async with PullConsumer(server.namesrv_addr, "filtered_pull") as consumer:
        queue = (await consumer.queues(TOPIC))[0]
        offset = await consumer.max_offset(queue) - count
        found = pulls = 0
        began_s, began_cpu_s = time.perf_counter(), cpu_seconds(server.broker_pid)
        while True:
            pulled = await consumer.pull(queue, offset, 32, **wanted)  # type: ignore[arg-type]
            pulls += 1
            found += len(pulled.messages)
            if pulled.status is PullStatus.NO_NEW_MESSAGE:
                break
            offset = pulled.next_offset
        spent = time.perf_counter() - began_s, cpu_seconds(server.broker_pid) - began_cpu_s, pulls
        if found != count // EVERY:
            raise SystemExit(f"{type(server).__name__} gave {found} of {count // EVERY} messages")
        return spent


async def run(servers: dict[str, Server], options: argparse.Namespace) -> None:
    count = options.messages // BATCH * BATCH
    for server in servers.values():
        await fill(server, count)
    measured = {(name, kind): Measured() for name in servers for kind in FILTERS}
    for number in range(options.rounds + 1):  # the first is the warm-up
        order = list(measured) if number % 2 else list(reversed(measured))
        for name, kind in order:
            seconds, cpu_s, pulls = await read(servers[name], count, FILTERS[kind])
            if number:
                record = measured[name, kind]
                record.seconds.append(seconds)
                record.cpu_seconds.append(cpu_s)
                record.pulls = pulls
    print(f"{count} messages, one in {EVERY} wanted; median of {options.rounds} rounds (range)")
    print(f"{'filter':8}{'server':10}{'looked at/s':>14}{'(range)':>22}{'CPU ms/100k':>14}{'pulls':>8}")
    for kind in FILTERS:
        for name in servers:
            record = measured[name, kind]
            rates = sorted(count / seconds for seconds in record.seconds)
            cpu_ms = statistics.median(record.cpu_seconds) * 1000 * 100_000 / count
            spread = f"({rates[0]:,.0f} to {rates[-1]:,.0f})"
            print(f"{kind:8}{name:10}{statistics.median(rates):14,.0f}{spread:>22}{cpu_ms:14,.0f}{record.pulls:8}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="filtered-pull-") as home:
        servers = {
            name: kind(Path(home) / name, enablePropertyFilter="true")  # type: ignore[call-arg]
            for name, kind in SERVERS.items()
        }
        try:
            for server in servers.values():
                server.start()
            asyncio.run(run(servers, options))
        finally:
            for server in servers.values():
                server.kill()


if __name__ == "__main__":
    main()
