"""What it costs to have 10,000 pops in flight, by turns with Apache's server and with Skylark, on this machine.

    .venv/bin/python bench/pops_in_flight.py                    # 2 rounds, about two minutes
    .venv/bin/python bench/pops_in_flight.py --pops 50000 --rounds 3

In each round each server starts on an empty store and gets as many messages as there are pops. Clients on a few
connections pop them one by one, so that each is a check point of its own, and then acknowledge all. The table shows the
rates, the broker's resident memory while everything is in flight, and by how much the part of it grew that is not
mapped from files. The client is the same for both and written in Python: it takes the other core.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "interop"))

from servers import ApacheServer, Server, SkylarkServer

from skylark.net.pool import Pool
from skylark.wire import pop
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from skylark.wire.headers import SendMessageV2
from skylark.wire.records import decode_records, encode_batch
from skylark.wire.typed import encode_header

TOPIC, GROUP, QUEUES = "InFlight", "in_flight", 8
INVISIBLE_MS = 600_000
BATCH = 100
BODY = b"x" * 128


class Measured(msgspec.Struct):
    pops_s: float
    acks_s: float
    grown_mb: float
    memory_mb: float


class BenchmarkError(Exception):
    """The server refused, or something came twice or not at all."""


def memory_mb(pid: int, kind: str) -> float:
    """`VmRSS` is all of it, `RssAnon` what is not mapped from files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(kind))


async def ask(pool: Pool, address: str, code: int, header: msgspec.Struct, body: bytes = b"") -> Frame:
    answer = await pool.request(address, Frame(code, encode_header(header), body), 30.0)
    if answer.code:
        raise BenchmarkError(f"{RequestCode(code).name} was answered with {answer.code}: {answer.remark}")
    return answer


async def fill(pool: Pool, address: str, count: int) -> None:
    body = encode_batch([(0, BODY, {})] * BATCH)
    for number in range(count // BATCH):
        queue_id = number % QUEUES
        header = SendMessageV2("filler", TOPIC, "TBW102", QUEUES, queue_id, 0, 0, 0, "", 0, False, True)
        await ask(pool, address, RequestCode.SEND_BATCH_MESSAGE, header, body)


async def pop_all(pools: list[Pool], address: str, broker_name: str, count: int) -> list[pop.ReceiptHandle]:
    taken: list[pop.ReceiptHandle] = []
    header = pop.PopMessage(GROUP, TOPIC, -1, 1, INVISIBLE_MS, 10_000, 0, pop.FROM_MIN)
    begun = 0

    async def work(pool: Pool) -> None:
        nonlocal begun
        while begun < count:
            begun += 1
            answer = await ask(pool, address, RequestCode.POP_MESSAGE, header)
            told = msgspec.convert(answer.fields, pop.PopMessageResponse, strict=False)
            places = [(each.topic, each.queue_id, each.queue_offset) for each in decode_records(answer.body)]
            taken.extend(pop.handles_of(told, broker_name, places))

    await asyncio.gather(*(work(pool) for pool in pools for _ in range(4)))
    if len({(handle.queue_id, handle.offset) for handle in taken}) != count:
        raise BenchmarkError(f"{len(taken)} messages popped, {count} sent")
    return taken


async def ack_all(pools: list[Pool], address: str, handles: list[pop.ReceiptHandle]) -> None:
    left = list(handles)

    async def work(pool: Pool) -> None:
        while left:
            handle = left.pop()
            header = pop.AckMessage(GROUP, TOPIC, handle.queue_id, handle.encode(), handle.offset)
            await ask(pool, address, RequestCode.ACK_MESSAGE, header)

    await asyncio.gather(*(work(pool) for pool in pools for _ in range(4)))


async def measure(server: Server, count: int) -> Measured:
    pools = [Pool() for _ in range(4)]
    try:
        await fill(pools[0], server.broker_addr, count)
        await pop_all(pools, server.broker_addr, "broker-a", 0)
        before_mb = memory_mb(server.broker_pid, "RssAnon")
        began_s = time.monotonic()
        handles = await pop_all(pools, server.broker_addr, "broker-a", count)
        popped_s = time.monotonic()
        grown_mb = memory_mb(server.broker_pid, "RssAnon") - before_mb
        in_flight_mb = memory_mb(server.broker_pid, "VmRSS")
        await ack_all(pools, server.broker_addr, handles)
        acked_s = time.monotonic()
    finally:
        for pool in pools:
            pool.close()
    return Measured(count / (popped_s - began_s), count / (acked_s - popped_s), grown_mb, in_flight_mb)


def run(kind: str, count: int) -> Measured:
    with tempfile.TemporaryDirectory() as home:
        made = {"apache": ApacheServer, "skylark": SkylarkServer}[kind]
        server = made(Path(home), brokerName="broker-a", defaultTopicQueueNums=str(QUEUES))
        server.start()
        try:
            return asyncio.run(measure(server, count))
        finally:
            server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pops", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    results: dict[str, list[Measured]] = {"apache": [], "skylark": []}
    for number in range(options.rounds):
        kinds = ["apache", "skylark"] if number % 2 == 0 else ["skylark", "apache"]
        for kind in kinds:
            results[kind].append(run(kind, options.pops))
            print(f"round {number + 1}: {kind}: {results[kind][-1]}", file=sys.stderr)
    print(f"{options.pops} pops in flight, median of {options.rounds} rounds")
    print(f"{'':10}{'pops/s':>10}{'acks/s':>10}{'grown MB':>10}{'memory MB':>11}")
    for kind, rounds in results.items():
        middle = [statistics.median(getattr(each, name) for each in rounds) for name in Measured.__struct_fields__]
        print(f"{kind:10}{middle[0]:>10.0f}{middle[1]:>10.0f}{middle[2]:>10.1f}{middle[3]:>11.1f}")


if __name__ == "__main__":
    main()
