"""kill -9 of a broker under load, again and again: nothing acknowledged is lost, doubled or out of order.

Each round sends numbered messages to four queues, many in flight, until a random number of them is acknowledged, and
kills the process at that moment. After the last round, every queue is read from its beginning. Messages that were sent
but not acknowledged may be there or not: once at the most, and in their place.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from patience import DEADLINE_S
from skylark.net.pool import Pool
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Encoding, Frame
from skylark.wire.headers import PullMessage, SendMessageV2
from skylark.wire.records import decode_records
from skylark.wire.typed import encode_header

ROUNDS = int(os.environ.get("SKYLARK_KILLS", "4"))  # of kill -9; 20 before a release
QUEUES = 4
IN_FLIGHT = 16
TOPIC = "Killed"


@asynccontextmanager
async def broker_process(store: Path, flush: str, *more: str) -> AsyncIterator[tuple[Process, str]]:
    """The real command on free ports; whatever happens, it is gone in the end."""
    arguments = ["up", "--namesrv-port", "0", "--broker-port", "0", "--store", str(store), "--flush", flush]
    arguments += more
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "skylark", *arguments, stdout=PIPE, stderr=PIPE
    )
    try:
        yield process, await _ready(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ready(process: Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        async for line in process.stdout:
            if line.startswith(b"ready "):
                return line.decode().split("broker=")[1].strip()
    assert process.stderr is not None
    raise AssertionError((await process.stderr.read()).decode())


class Load:
    """Numbered messages: `acknowledged[queue]` has the numbers that the broker confirmed, `sent[queue]` is the next."""

    def __init__(self) -> None:
        self.sent = [0] * QUEUES
        self.acknowledged: list[list[int]] = [[] for _ in range(QUEUES)]

    @property
    def count(self) -> int:
        return sum(map(len, self.acknowledged))

    async def until_killed(self, process: Process, address: str, after: int) -> None:
        """Sends until so many more are acknowledged, then kills the broker while the rest is in flight."""
        pool = Pool()
        goal = self.count + after
        connection = await pool.get(address)
        enough = asyncio.Event()
        pending: list[list[tuple[int, asyncio.Task[Frame]]]] = [[] for _ in range(QUEUES)]

        async def sender(queue_id: int) -> None:
            while True:
                while len(pending[queue_id]) < IN_FLIGHT:
                    number = self.sent[queue_id]
                    self.sent[queue_id] += 1
                    header = SendMessageV2("killers", TOPIC, "TBW102", QUEUES, queue_id, 0, number, 0)
                    request = Frame(
                        RequestCode.SEND_MESSAGE_V2,
                        encode_header(header),
                        b"%d" % number,
                        encoding=Encoding.BINARY,
                    )
                    pending[queue_id].append((number, asyncio.create_task(connection.request(request, DEADLINE_S))))
                    await asyncio.sleep(0)
                number, task = pending[queue_id].pop(0)
                answer = await task
                assert answer.code == ResponseCode.SUCCESS, answer
                self.acknowledged[queue_id].append(number)
                if self.count >= goal:
                    enough.set()

        senders = [asyncio.create_task(sender(queue_id)) for queue_id in range(QUEUES)]
        await enough.wait()
        process.send_signal(signal.SIGKILL)
        await process.wait()
        results = await asyncio.gather(*senders, return_exceptions=True)
        await asyncio.gather(*(task for queue in pending for _, task in queue), return_exceptions=True)
        pool.close()
        assert all(isinstance(result, ConnectionError) for result in results), results


async def read_queue(pool: Pool, address: str, queue_id: int) -> list[int]:
    numbers: list[int] = []
    offset = 0
    while True:
        header = PullMessage("readers", TOPIC, queue_id, offset, 32, 4, 0, 0, 0, subscription="*")
        answer = await pool.request(address, Frame(RequestCode.PULL_MESSAGE, encode_header(header)), DEADLINE_S)
        if answer.code == ResponseCode.PULL_NOT_FOUND:
            return numbers
        assert answer.code == ResponseCode.SUCCESS, answer
        for message in decode_records(answer.body):
            assert message.queue_offset == offset
            numbers.append(int(message.body))
            offset += 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("flush", ["sync", "async"])
def test_nothing_acknowledged_is_lost_doubled_or_out_of_order(tmp_path: Path, flush: str) -> None:
    async def run() -> None:
        dice = random.Random(flush)
        load = Load()
        for _ in range(ROUNDS):
            async with broker_process(tmp_path, flush) as (process, address):
                await load.until_killed(process, address, after=dice.randrange(1, 1500))
        async with broker_process(tmp_path, flush) as (_, address):
            pool = Pool()
            found = [await read_queue(pool, address, queue_id) for queue_id in range(QUEUES)]
            pool.close()
        for numbers, acknowledged in zip(found, load.acknowledged, strict=True):
            assert numbers == sorted(set(numbers)), "doubled or out of order"
            assert set(acknowledged) <= set(numbers), "lost"
        assert load.count > ROUNDS

    asyncio.run(run())
