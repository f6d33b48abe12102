"""The transaction producer against a broker in this process."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from broker.live import Live, live_broker, messages_of
from client.inbox import DEADLINE_S, eventually
from client.scripted import scripted_cluster
from skylark import sync
from skylark.client.errors import BrokerError, ClientClosed, InvalidMessage, RequestTimeout, RocketMQError
from skylark.client.message import Message
from skylark.client.session import Session
from skylark.client.transactions import HalfMessage, TransactionProducer
from skylark.testing import LocalCluster
from skylark.wire.codes import ResponseCode

QUICKLY = {"transactionTimeOut": 1, "transactionCheckInterval": 20}


class Oracle:
    """A checker that says what it is told to, and notes what it was asked."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.asked: list[Message] = []
        self.came = asyncio.Event()

    async def __call__(self, message: Message) -> Any:
        self.asked.append(message)
        self.came.set()
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer


def producer_at(broker: Live, oracle: Any = None, **options: Any) -> TransactionProducer:
    return TransactionProducer(broker.namesrv, "shop", checker=oracle, timeout_s=DEADLINE_S, **options)


async def bodies_of(broker: Live, topic: str) -> list[bytes]:
    """Everything that was delivered, from the oldest on."""
    found = []
    for queue_id in range(4):
        answer = await broker.pull(topic, 0, queueId=queue_id)
        if answer.code == ResponseCode.SUCCESS:
            found += messages_of(answer)
    return [message.body for message in sorted(found, key=lambda message: message.log_offset)]


async def until_delivered(broker: Live, *expected: bytes) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while sorted(await bodies_of(broker, "orders")) != sorted(expected):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_a_block_commits_by_success_and_rolls_back_by_an_exception(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker, producer_at(broker) as producer:
            async with producer.transaction("orders", b"good", tag="t", key="k", properties={"p": "v"}) as transaction:
                assert await bodies_of(broker, "orders") == []
                assert transaction.id == transaction.half.msg_id
            with pytest.raises(ZeroDivisionError):
                async with producer.transaction("orders", b"bad"):
                    raise ZeroDivisionError
            with pytest.raises(asyncio.CancelledError):
                async with producer.transaction("orders", b"cancelled"):
                    raise asyncio.CancelledError
            assert await bodies_of(broker, "orders") == [b"good"]

    asyncio.run(run())


def test_a_block_may_end_its_transaction_itself(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker, producer_at(broker) as producer:
            async with producer.transaction("orders", b"no") as transaction:
                await transaction.rollback()
            with contextlib.suppress(ZeroDivisionError):
                async with producer.transaction("orders", b"yes") as transaction:
                    await transaction.commit()
                    raise ZeroDivisionError
            async with producer.transaction("orders", b"left") as transaction:
                transaction.leave()
            assert await bodies_of(broker, "orders") == [b"yes"]

    asyncio.run(run())


def test_the_steps_by_themselves_in_two_processes(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            async with producer_at(broker) as producer:
                halves = [await producer.prepare("orders", b"%d" % number, ordering_key=1) for number in range(3)]
                texts = [half.encode() for half in halves]
                assert pickle.loads(pickle.dumps(halves)) == halves
            async with producer_at(broker) as another:
                first, second, third = map(HalfMessage.decode, texts)
                await another.commit(first)
                await another.commit(first)
                await another.roll_back(second)
                with pytest.raises(BrokerError, match="was rolled back already") as refusal:
                    await another.commit(second)
                assert refusal.value.code == ResponseCode.ILLEGAL_OPERATION
                with pytest.raises(BrokerError, match="table offset wrong"):
                    await another.commit(HalfMessage.decode(third.encode().replace(third.offset_msg_id, "0" * 32)))
                assert await bodies_of(broker, "orders") == [b"0"]
            with pytest.raises(ClientClosed):
                await another.commit(third)
        with pytest.raises(ValueError, match="JSON"):
            HalfMessage.decode("nonsense")
        with pytest.raises(InvalidMessage, match="no half message"):
            HalfMessage.decode(None)  # type: ignore[arg-type]

    asyncio.run(run())


@pytest.mark.parametrize("known", [True, False])
def test_the_checker_is_asked_until_it_knows(tmp_path: Path, known: bool) -> None:
    async def run() -> None:
        oracle = Oracle(None, OSError("no database"), "perhaps", known)
        async with live_broker(tmp_path, **QUICKLY) as broker, producer_at(broker, oracle) as producer:
            half = await producer.prepare("orders", b"open", key="k")
            await eventually(lambda: not oracle.answers)
            await producer.send("orders", b"after")
            assert {message.msg_id for message in oracle.asked} == {half.msg_id}
            assert (oracle.asked[0].topic, oracle.asked[0].body, oracle.asked[0].keys) == ("orders", b"open", ["k"])
            await until_delivered(broker, b"after", *([b"open"] if known else []))

    asyncio.run(run())


def test_the_checker_is_not_asked_for_an_open_block(tmp_path: Path) -> None:
    async def run() -> None:
        oracle = Oracle(False)
        async with live_broker(tmp_path, **QUICKLY) as broker, producer_at(broker, oracle) as producer:
            async with producer.transaction("orders", b"slow"):
                other = await producer.prepare("orders", b"other")
                await oracle.came.wait()
                assert {message.msg_id for message in oracle.asked} == {other.msg_id}
            assert await bodies_of(broker, "orders") == [b"slow"]

    asyncio.run(run())


def test_a_producer_that_comes_back_is_asked_for_what_another_left(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, **QUICKLY) as broker:
            async with producer_at(broker) as gone:
                half = await gone.prepare("orders", b"left")
            oracle = Oracle(True)
            async with producer_at(broker, oracle, topics=["orders", "bad name"]):
                await oracle.came.wait()
                assert oracle.asked[0].msg_id == half.msg_id
                await until_delivered(broker, b"left")

    asyncio.run(run())


def test_one_checker_a_group_and_session(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker, Session(broker.namesrv) as session:
            async with TransactionProducer("unused", "shop", checker=Oracle(), session=session):
                second = TransactionProducer("unused", "shop", checker=Oracle(), session=session)
                with pytest.raises(RocketMQError, match="a session of its own"):
                    await second.start()
            async with second:
                with pytest.raises(InvalidMessage, match="check_after_s"):
                    await second.prepare("orders", b"x", check_after_s=-1)

    asyncio.run(run())


def test_the_blocking_twin() -> None:
    threads: list[str] = []

    def checker(message: Message) -> bool:
        threads.append(threading.current_thread().name)
        return True

    with LocalCluster() as cluster:
        with sync.TransactionProducer(cluster.name_servers, "shop", checker=checker) as producer:
            with producer.transaction("orders", b"one") as transaction:
                assert transaction.id == transaction.half.msg_id
            with pytest.raises(ZeroDivisionError), producer.transaction("orders", b"two"):
                raise ZeroDivisionError
            with producer.transaction("orders", b"three") as transaction:
                transaction.rollback()
            with producer.transaction("orders", b"four") as transaction:
                transaction.commit()
            with producer.transaction("orders", b"five") as transaction:
                transaction.leave()
            producer.commit(producer.prepare("orders", b"six"))
            producer.roll_back(producer.prepare("orders", b"seven"))
        with sync.PullConsumer(cluster.name_servers, "readers") as reader:
            found = [message.body for queue in reader.queues("orders") for message in reader.pull(queue, 0).messages]
        assert sorted(found) == [b"four", b"one", b"six"]


def test_the_end_of_a_transaction_takes_no_longer_than_it_may() -> None:
    """Also if a route has to be asked for, and the name server is slow."""

    async def run() -> None:
        async with (
            scripted_cluster("a", orders=1) as cluster,
            TransactionProducer(cluster.namesrv, "shop", checker=None) as producer,
        ):
            cluster.gate = asyncio.Event()
            half = HalfMessage(
                topic="orders", group="shop", broker="elsewhere", msg_id="1", offset_msg_id="0" * 32, half_offset=0
            )
            with pytest.raises(RequestTimeout, match=r"no route of topic 'orders' within 0\.01 s"):
                await producer.commit(half, timeout_s=0.01)
            cluster.gate.set()

    asyncio.run(run())


def test_a_producer_that_is_started_again_is_asked_again(tmp_path: Path) -> None:
    async def run() -> None:
        asked: list[bytes] = []

        def checker(message: Message) -> bool:
            asked.append(message.body)
            return True

        async with live_broker(tmp_path, **QUICKLY) as broker:
            producer = producer_at(broker, checker)
            for body in (b"1", b"2"):
                async with producer:
                    await producer.prepare("orders", body)
                    await eventually(lambda body=body: body in asked)  # type: ignore[misc]
            await until_delivered(broker, b"1", b"2")

    asyncio.run(run())


def test_a_close_that_is_cancelled_while_a_checker_runs_is_a_close(tmp_path: Path) -> None:
    async def run() -> None:
        asked, may_end = asyncio.Event(), asyncio.Event()

        async def checker(_: Message) -> bool:
            asked.set()
            while not may_end.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await may_end.wait()
            return True

        async with live_broker(tmp_path, **QUICKLY) as broker, Session(broker.namesrv) as session:
            producer = TransactionProducer(None, "shop", checker=checker, session=session)
            await producer.start()
            await producer.prepare("orders", b"m")
            await asked.wait()
            closing = asyncio.create_task(producer.close())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait([closing])
            may_end.set()
            assert (session._checkers, session._producers, session._users) == ({}, {}, 1)

    asyncio.run(run())
