"""kill -9 of a broker in the middle of transactions, again and again.

Each round prepares numbered messages and commits, rolls back or leaves them, many at a time, and kills the broker when
a random number of ends is acknowledged. After the restart all that is undecided is asked for at the producer. A number
tells what becomes of it: 0 is committed, 1 rolled back, 2 left and committed when asked for, 3 left and rolled back
when asked for (modulo 4). In the end:

- what was committed and acknowledged is there, once, and is never asked for again
- what was rolled back is not there, and if that was acknowledged it is never asked for again
- what was prepared and acknowledged, but not ended, is asked for and ends as the answer says, once
- what was ended without an acknowledgement ends as it was meant to, once: either the end was stored or it is asked for
"""

from __future__ import annotations

import asyncio
import random
import signal
from asyncio.subprocess import Process
from collections import Counter
from pathlib import Path

import pytest

from faults.test_kill import ROUNDS, broker_process
from patience import DEADLINE_S
from skylark.broker.app import wall_clock_ms
from skylark.net.connection import Connection
from skylark.net.pool import Pool
from skylark.wire.bodies import Heartbeat, ProducerData, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import CheckTransactionState, EndTransaction, PullMessage, SendMessageV2
from skylark.wire.records import decode_record, decode_records, encode_properties, parse_message_id
from skylark.wire.typed import decode_header, encode_header

WORKERS = 12
TOPIC, GROUP = "Killed", "killers"
COMMIT, ROLL_BACK = 8, 12
SETTINGS = "transactionTimeOut=1\ntransactionCheckInterval=100\ntransactionCheckMax=1000000\n"


def is_committed(number: int) -> bool:
    return number % 4 in (0, 2)


class Load:
    """Numbered transactions, and what the broker said about them."""

    def __init__(self) -> None:
        self.next = 0
        self.prepared: set[int] = set()  # acknowledged, as are those that ended
        self.ended: set[int] = set()
        self.asked: Counter[int] = Counter()
        self.asked_in_vain: list[int] = []
        self._busy: set[int] = set()  # in a worker's hands, which will end them
        self._settled: set[int] = set()  # had ended before this broker was started

    async def until_killed(self, process: Process, address: str, ends: int) -> None:
        """Works until so many more are ended, then kills the broker while the rest is in flight."""
        self._busy.clear()
        self._settled = set(self.ended)
        goal = len(self.ended) + ends
        enough = asyncio.Event()
        pool = Pool({RequestCode.CHECK_TRANSACTION_STATE: self.answer})
        await join(pool, address)

        async def worker() -> None:
            while True:
                number = self.next
                self.next += 1
                self._busy.add(number)
                half = await prepare(pool, address, number)
                self.prepared.add(number)
                if number % 4 < 2:
                    await end(pool, address, half, COMMIT if is_committed(number) else ROLL_BACK)
                    self.ended.add(number)
                self._busy.discard(number)
                if len(self.ended) >= goal:
                    enough.set()

        workers = [asyncio.create_task(worker()) for _ in range(WORKERS)]
        await enough.wait()
        process.send_signal(signal.SIGKILL)
        await process.wait()
        results = await asyncio.gather(*workers, return_exceptions=True)
        pool.close()
        assert all(isinstance(result, OSError) for result in results), results

    async def until_settled(self, address: str) -> list[int]:
        """Answers the broker until all is decided; what was delivered then."""
        self._busy.clear()
        self._settled = set(self.ended)
        pool = Pool({RequestCode.CHECK_TRANSACTION_STATE: self.answer})
        await join(pool, address)
        wanted = {number for number in self.prepared if is_committed(number)}
        left = {number for number in self.prepared if number % 4 > 1}
        async with asyncio.timeout(DEADLINE_S):
            while not (left <= self.asked.keys() and wanted <= set(await delivered(pool, address))):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            # A last one, which is answered when the broker has asked for it twice: by then it has asked for all.
            last = self.next + -self.next % 4
            self._busy.add(last)
            await prepare(pool, address, last)
            while self.asked[last] < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            # The broker answers in turn: what it asked for before it had our decision has come when this returns.
            await join(pool, address)
            self.asked.clear()
            while self.asked[last] < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        numbers = await delivered(pool, address)
        pool.close()
        assert self.asked.keys() == {last}, "the broker asks for what has ended"
        return numbers

    def answer(self, request: Frame, connection: Connection) -> None:
        question = decode_header(CheckTransactionState, request)
        number = int(decode_record(request.body).body)
        self.asked[number] += 1
        if number in self._settled:
            self.asked_in_vain.append(number)
        if number in self._busy:
            return
        header = EndTransaction(
            GROUP,
            question.tran_state_table_offset,
            question.commit_log_offset,
            COMMIT if is_committed(number) else ROLL_BACK,
            question.msg_id or "",
            from_transaction_check=True,
        )
        connection.notify(Frame(RequestCode.END_TRANSACTION, encode_header(header)))


async def join(pool: Pool, address: str) -> None:
    beat = Heartbeat(client_id="killers@1", producer_data_set=[ProducerData(group_name=GROUP)])
    answer = await pool.request(address, Frame(RequestCode.HEART_BEAT, {}, encode_body(beat)), DEADLINE_S)
    assert answer.code == ResponseCode.SUCCESS


async def prepare(pool: Pool, address: str, number: int) -> EndTransaction:
    key = f"{number:032X}"
    properties = encode_properties({"TRAN_MSG": "true", "PGROUP": GROUP, "UNIQ_KEY": key}).decode()
    header = SendMessageV2(GROUP, TOPIC, "TBW102", 1, 0, 4, wall_clock_ms(), 0, properties)
    request = Frame(RequestCode.SEND_MESSAGE_V2, encode_header(header), b"%d" % number)
    answer = await pool.request(address, request, DEADLINE_S)
    assert answer.code == ResponseCode.SUCCESS, answer
    return EndTransaction(GROUP, int(answer.fields["queueOffset"]), parse_message_id(answer.fields["msgId"])[1], 0, key)


async def end(pool: Pool, address: str, half: EndTransaction, decision: int) -> None:
    half.commit_or_rollback = decision
    answer = await pool.request(address, Frame(RequestCode.END_TRANSACTION, encode_header(half)), DEADLINE_S)
    assert answer.code == ResponseCode.SUCCESS, answer


async def delivered(pool: Pool, address: str) -> list[int]:
    numbers: list[int] = []
    while True:
        header = PullMessage("readers", TOPIC, 0, len(numbers), 32, 4, 0, 0, 0, subscription="*")
        answer = await pool.request(address, Frame(RequestCode.PULL_MESSAGE, encode_header(header)), DEADLINE_S)
        if answer.code == ResponseCode.PULL_NOT_FOUND:
            return numbers
        assert answer.code == ResponseCode.SUCCESS, answer
        numbers += [int(message.body) for message in decode_records(answer.body)]


@pytest.mark.timeout(600)
def test_transactions_end_once_and_as_they_were_meant_to(tmp_path: Path) -> None:
    settings = tmp_path / "broker.conf"
    settings.write_text(SETTINGS)
    store = tmp_path / "store"

    async def run() -> None:
        dice = random.Random(37)
        load = Load()
        for _ in range(ROUNDS):
            async with broker_process(store, "async", "-c", str(settings)) as (process, address):
                await load.until_killed(process, address, ends=dice.randrange(1, 200))
        async with broker_process(store, "async", "-c", str(settings)) as (_, address):
            numbers = await load.until_settled(address)
        doubled = [number for number, times in Counter(numbers).items() if times > 1]
        assert doubled == []
        assert [number for number in numbers if not is_committed(number)] == []
        assert {number for number in load.prepared if is_committed(number)} <= set(numbers)
        assert load.asked_in_vain == []

    asyncio.run(run())
