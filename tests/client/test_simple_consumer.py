"""Simple consumers and the time of their messages: who gets one can count on it, and what is acknowledged stays so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest

from client.inbox import DEADLINE_S, numbered
from client.plain import send
from client.test_sync import fill
from skylark.client import popping, sync
from skylark.client.errors import InvalidMessage
from skylark.client.message import Message
from skylark.client.receipts import Receipts
from skylark.client.session import Session
from skylark.client.simple_consumer import SimpleConsumer
from skylark.testing import LocalCluster
from skylark.wire.bodies import MessageQueue
from skylark.wire.pop import FROM_MIN


@asynccontextmanager
async def two_consumers(*bodies: bytes) -> AsyncIterator[tuple[SimpleConsumer, SimpleConsumer]]:
    """Of one group, which hide messages for a second; a topic with one queue has the bodies."""
    async with LocalCluster(topics={"orders": 1}) as cluster:
        async with Session(cluster.name_servers) as session:
            await session.routes.get("orders")
            await send(session, MessageQueue("broker-a", 0, "orders"), *bodies)
        one, other = (SimpleConsumer(cluster.name_servers, "g", from_where="first", invisible_s=1.0) for _ in range(2))
        one.subscribe("orders")
        other.subscribe("orders")
        async with one, other:
            yield one, other


async def next_of(consumer: SimpleConsumer) -> Message:
    """The next message, and no other is taken."""
    async with asyncio.timeout(DEADLINE_S):
        while not (messages := await consumer.receive(max_messages=1, wait_s=60)):
            pass
    return messages[0]


def test_what_waits_behind_a_message_in_hand_is_kept_hidden() -> None:
    async def main() -> None:
        async with two_consumers(*numbered(6)) as (one, other):
            assert (await anext(one)).body == b"m0"  # and the others wait
            for times in (1, 2):  # the time of all of them is over now, and again
                message = await next_of(other)
                assert (message.body, message.reconsume_times) == (b"m0", times)
            await other.ack(message)
            for body in numbered(6)[1:]:
                message = await anext(one)
                assert (message.body, message.reconsume_times) == (body, 0)
                await one.ack(message)

    asyncio.run(main())


def test_what_is_too_old_is_not_handed_out() -> None:
    async def main() -> None:
        async with two_consumers(*numbered(3)) as (one, other):
            first = await anext(one)
            assert [caught.message.body for caught in one._iterated] == [b"m1", b"m2"]
            for caught in one._iterated:
                caught.hidden_at_s -= 60.0  # as if the loop had stood still
            await one.ack(first)
            again = sorted([(await next_of(other)) for _ in range(2)], key=lambda message: message.body)
            assert [(message.body, message.reconsume_times) for message in again] == [(b"m1", 1), (b"m2", 1)]
            await other.ack(again)
            assert await one.receive(wait_s=0) == []
            assert not one._sources.pile

    asyncio.run(main())


def test_a_receive_that_is_cancelled_keeps_what_it_was_about_to_give() -> None:
    async def main() -> None:
        async with two_consumers(b"a") as (one, _):
            message = await next_of(one)
            from skylark.client.sources import Caught

            one._sources.pile.append(Caught(message, asyncio.get_running_loop().time() - 0.5))
            receiving = asyncio.create_task(one.receive(wait_s=0))
            await asyncio.sleep(0)
            receiving.cancel()
            await asyncio.wait([receiving])
            assert [caught.message.body for caught in one._sources.pile] == [b"a"]

    asyncio.run(main())


@pytest.mark.parametrize("first", ["extend", "ack", "extend and give up"])
def test_an_extension_does_not_overtake_an_acknowledgement(first: str) -> None:
    async def main() -> None:
        async with two_consumers(b"done", b"marker") as (one, other):
            done, marker = await one.receive(invisible_s=30.0)
            if first == "extend":
                await asyncio.gather(one.extend(done, 1.0), one.ack(done))
            elif first == "ack":
                await asyncio.gather(one.ack(done), one.extend(done, 1.0))
            else:
                extending = asyncio.create_task(one.extend(done, 1.0))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                extending.cancel()
                await asyncio.wait([extending])
                await one.ack(done)
            await one.extend(done, 1.0)
            await one.extend(marker, 2.0)
            assert (await next_of(other)).body == b"marker"

    asyncio.run(main())


def test_an_acknowledgement_waits_for_every_extension_that_began_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ack([a, b])` waits for one of b; one of a begins; both handles are the new ones then."""

    async def main() -> None:
        may_answer = {"a": asyncio.Event(), "b": asyncio.Event()}
        acknowledged: list[str] = []

        async def change(_: object, group: str, message: Message, *args: object, counts: bool) -> None:
            await may_answer[message.body.decode()].wait()
            message.receipt_handle += " anew"

        async def ack(_: object, group: str, messages: Sequence[Message], timeout_s: float) -> None:
            acknowledged.extend(message.receipt_handle for message in messages)

        monkeypatch.setattr(popping, "change_invisible", change)
        monkeypatch.setattr(popping, "ack", ack)
        a, b = (Message(topic="t", body=name.encode(), receipt_handle=name) for name in "ab")
        receipts = Receipts(None, "g", 1.0)  # type: ignore[arg-type]
        extending = [asyncio.create_task(receipts.extend(b, 1000))]
        await asyncio.sleep(0)
        acking = asyncio.create_task(receipts.ack([a, b]))
        await asyncio.sleep(0)
        extending.append(asyncio.create_task(receipts.extend(a, 1000)))
        await asyncio.sleep(0)
        may_answer["b"].set()
        await extending[0]
        for _ in range(10):
            await asyncio.sleep(0)
        assert not acknowledged
        may_answer["a"].set()
        await asyncio.gather(*extending, acking)
        assert acknowledged == ["a anew", "b anew"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"group": "DEFAULT_CONSUMER"}, "give the group a name"),
        ({"fifo": "no"}, "fifo is 'no'"),
        ({"invisible_s": "30"}, "invisible_s is '30'"),
        ({"from_where": "FIRST"}, "from_where is 'FIRST'"),
    ],
)
def test_options_that_can_not_work_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidMessage, match=what):
        SimpleConsumer(**{"group": "g"} | options)


def test_rocketmqs_names_mean_the_same() -> None:
    assert SimpleConsumer(group="g", from_where="CONSUME_FROM_FIRST_OFFSET")._init_mode == FROM_MIN


# The blocking twin, whose threads are dealt many messages at once.


@pytest.fixture
def orders(skylark_cluster: LocalCluster) -> LocalCluster:
    skylark_cluster.run(lambda: skylark_cluster.create_topic("orders", 1))
    fill(skylark_cluster, MessageQueue("broker-a", 0, "orders"), *numbered(40))
    return skylark_cluster


def blocking(cluster: LocalCluster, **options: Any) -> sync.SimpleConsumer:
    consumer = sync.SimpleConsumer(cluster.name_servers, "g", from_where="first", **options)
    consumer.subscribe("orders")
    return consumer


def test_a_thread_crosses_to_the_loop_once_for_many_messages(
    orders: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with blocking(orders) as consumer:
        run, crossings = consumer._background.run, 0

        def count(work: Any) -> Any:
            nonlocal crossings
            crossings += 1
            return run(work)

        with monkeypatch.context() as patch:
            patch.setattr(consumer._background, "run", count)
            messages = [next(consumer) for _ in range(40)]
        assert [message.body for message in messages] == numbered(40)
        assert crossings <= 5
        consumer.ack(messages)


def test_what_a_thread_was_dealt_is_kept_hidden_and_goes_to_who_waits(orders: LocalCluster) -> None:
    with blocking(orders) as consumer:
        assert next(consumer).body == b"m0"
        inner = consumer._inner
        [hand] = inner._dealt.values()
        dealt = [caught.message.body for caught in hand]
        assert len(dealt) == 15
        with ThreadPoolExecutor(1) as thread:
            others = [thread.submit(next, consumer).result(DEADLINE_S).body for _ in range(39)]
        assert sorted(others) == sorted(numbered(40)[1:])
        assert not hand


def test_what_waited_in_a_thread_for_too_long_is_looked_at_again(orders: LocalCluster) -> None:
    with blocking(orders, invisible_s=60) as consumer:
        assert next(consumer).body == b"m0"
        [hand] = consumer._inner._dealt.values()
        hand[0].hidden_at_s -= 100.0  # its time is over
        handle = hand[1].message.receipt_handle
        hand[1].hidden_at_s -= 20.0  # it has less than it should
        message = next(consumer)
        assert message.body == b"m2"
        assert message.receipt_handle != handle


def test_what_no_thread_has_looked_at_is_given_back_at_the_end(orders: LocalCluster) -> None:
    with blocking(orders, invisible_s=3600) as consumer:
        consumer.ack(next(consumer))
    with pytest.raises(StopIteration):
        next(consumer)
    with blocking(orders) as consumer:
        again = [next(consumer) for _ in range(39)]
    assert sorted(message.body for message in again) == sorted(numbered(40)[1:])
    assert {message.reconsume_times for message in again} == {0}
