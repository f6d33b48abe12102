"""kill -9 of a broker while timers are put, recalled and fall due, again and again.

Each round sends timers for the next seconds, many in flight, recalls some of them, and kills the process when some
are acknowledged, some recalled, and a random number has come. In the end everything acknowledged has come, none before
its time, and none whose recall was acknowledged. What was sent but not acknowledged may come or not.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from faults.test_kill import ROUNDS, broker_process
from patience import DEADLINE_S
from skylark.net.pool import Pool
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Encoding, Frame
from skylark.wire.headers import GetMaxOffset, PullMessage, SendMessageV2
from skylark.wire.message import StoredMessage
from skylark.wire.records import decode_records, encode_properties
from skylark.wire.typed import encode_header

TOPIC = "KilledTimers"
IN_FLIGHT = 16
MAX_DELAY_MS = 3000
LAST = b"last"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Load:
    """Numbered timers: when they are due at the earliest, which are acknowledged, and which are recalled."""

    def __init__(self, dice: random.Random) -> None:
        self.due_ms: dict[bytes, int] = {}
        self.acknowledged: set[bytes] = set()
        self.recalls_sent: set[bytes] = set()
        self.recalled: set[bytes] = set()
        self._dice = dice

    async def send(self, pool: Pool, address: str, body: bytes, delay_ms: int) -> str:
        properties = {"UNIQ_KEY": body.decode(), "TIMER_DELAY_MS": str(delay_ms)}
        header = SendMessageV2("killers", TOPIC, "TBW102", 1, 0, 0, now_ms(), 0)
        header.properties = encode_properties(properties).decode()
        request = Frame(RequestCode.SEND_MESSAGE_V2, encode_header(header), body, encoding=Encoding.BINARY)
        self.due_ms[body] = now_ms() + delay_ms
        answer = await pool.request(address, request, DEADLINE_S)
        assert answer.code == ResponseCode.SUCCESS, answer
        self.acknowledged.add(body)
        return answer.fields["recallHandle"]

    async def run(self, pool: Pool, address: str) -> None:
        """Sends, and recalls one in five, until the connection breaks."""
        while True:
            body = b"%d" % len(self.due_ms)
            handle = await self.send(pool, address, body, self._dice.randrange(200, MAX_DELAY_MS))
            if self._dice.random() < 0.2:
                self.recalls_sent.add(body)
                fields = {"topic": TOPIC, "recallHandle": handle, "producerGroup": "killers"}
                request = Frame(RequestCode.RECALL_MESSAGE, fields, encoding=Encoding.BINARY)
                answer = await pool.request(address, request, DEADLINE_S)
                if answer.code == ResponseCode.SUCCESS:
                    self.recalled.add(body)
                else:  # its second has begun
                    assert answer.remark == "recall failed, timestamp invalid", answer

    async def until_killed(self, store: Path, *options: str) -> None:
        async with broker_process(store, *options) as (process, address):
            pool = Pool()
            senders = [asyncio.create_task(self.run(pool, address)) for _ in range(IN_FLIGHT)]
            enough = asyncio.create_task(self._until_enough(pool, address))
            await asyncio.wait([enough, *senders], return_when=asyncio.FIRST_COMPLETED)
            process.kill()
            results = await asyncio.gather(*senders, return_exceptions=True)
            await asyncio.gather(enough, return_exceptions=True)
            pool.close()
            assert all(isinstance(result, ConnectionError) for result in results), results

    async def _until_enough(self, pool: Pool, address: str) -> None:
        acknowledged, recalled = len(self.acknowledged) + 11, len(self.recalled) + 1
        came = await count(pool, address) + self._dice.randrange(1, 300)
        while (  # noqa: ASYNC110
            len(self.acknowledged) < acknowledged or len(self.recalled) < recalled or await count(pool, address) < came
        ):
            await asyncio.sleep(0.005)


async def count(pool: Pool, address: str) -> int:
    """How many have come."""
    request = Frame(RequestCode.GET_MAX_OFFSET, encode_header(GetMaxOffset(TOPIC, 0)))
    return int((await pool.request(address, request, DEADLINE_S)).fields.get("offset", 0))


async def read_until_last(address: str) -> list[StoredMessage]:
    found: list[StoredMessage] = []
    pool = Pool()
    async with asyncio.timeout(DEADLINE_S):
        while not found or found[-1].body != LAST:
            header = PullMessage("readers", TOPIC, 0, len(found), 32, 2 | 4, 0, 10_000, 0, subscription="*")
            answer = await pool.request(address, Frame(RequestCode.PULL_MESSAGE, encode_header(header)), DEADLINE_S)
            if answer.code == ResponseCode.SUCCESS:
                found += decode_records(answer.body)
    pool.close()
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("flush", ["async"])
def test_what_is_due_comes_in_time_and_what_is_recalled_never(tmp_path: Path, flush: str) -> None:
    conf = tmp_path / "broker.conf"
    conf.write_text("recallMessageEnable=true\n")
    options = (flush, "-c", str(conf))

    async def run() -> None:
        load = Load(random.Random(flush))
        for _ in range(ROUNDS):
            await load.until_killed(tmp_path / "store", *options)
        async with broker_process(tmp_path / "store", *options) as (_, address):
            pool = Pool()
            await load.send(pool, address, LAST, MAX_DELAY_MS + 1000)
            pool.close()
            found = await read_until_last(address)
        times: dict[bytes, int] = {}
        for message in found:
            assert message.store_timestamp_ms >= load.due_ms[message.body], "before its time"
            times[message.body] = times.get(message.body, 0) + 1
        assert load.recalled.isdisjoint(times), "recalled, and came nevertheless"
        assert load.acknowledged - load.recalls_sent <= times.keys(), "lost"
        assert len(load.acknowledged) > 10 * ROUNDS
        assert load.recalled
        doubled = sum(times.values()) - len(times)
        assert doubled <= ROUNDS, "more than the one in hand at each kill came twice"

    asyncio.run(run())
