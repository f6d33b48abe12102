"""What a lite pull consumer does about what goes wrong: it says so once, goes on where it can, and loses nothing."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from client.inbox import DEADLINE_S, eventually
from client.plain import send
from client.test_lite_pull_consumer import drain, orders
from skylark.client import compression, queue_reading, queue_sharing
from skylark.client.allocate import average
from skylark.client.errors import BrokerError, InvalidMessage, RouteNotFound
from skylark.client.lite_pull_consumer import LitePullConsumer
from skylark.client.message import MessageQueue
from skylark.client.producer import Producer
from skylark.client.pulling import Limits
from skylark.client.push_consumer import PushConsumer
from skylark.client.rpc_hooks import RpcHook
from skylark.client.session import Session
from skylark.testing import LocalCluster
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from skylark.wire.message import SYS_COMPRESSED, SYS_COMPRESSION_ZSTD

QUEUES = 4


def test_a_broker_that_is_away_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with (
            LocalCluster(topics={"orders": QUEUES}) as cluster,
            LitePullConsumer(cluster.name_servers, group="g", from_where="first", auto_commit=False) as consumer,
        ):
            consumer.assign(await consumer.queues("orders"))
            async with Producer(cluster.name_servers) as producer:
                await producer.send("orders", b"1")
            while not await consumer.poll(60.0):
                pass
            assert consumer.failures() == []
            await cluster.broker.stop()
            await eventually(lambda: consumer._failures.part_count() == QUEUES)
            (failure,) = consumer.failures()
            assert failure.startswith("group g can't read topic orders at broker-a, and goes on trying: ")
            await cluster.broker.start()
            async with Producer(cluster.name_servers) as producer:
                for queue in await consumer.queues("orders"):  # a read that gets something ends at once
                    await producer.send("orders", b"2", queue=queue)
            await eventually(lambda: not consumer.failures())

    with caplog.at_level(logging.INFO, logger="skylark.client.lite_pull_consumer"):
        asyncio.run(run())
    said = [record.getMessage() for record in caplog.records if record.name == "skylark.client.lite_pull_consumer"]
    assert sum("can't read topic orders" in text for text in said) == 1, said
    assert sum("read topic orders at broker-a works again" in text for text in said) == 1, said


async def dead_letters(consumer: LitePullConsumer) -> MessageQueue:
    """The name server hears of them a moment later than the client that made one."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return (await consumer.queues("%DLQ%g"))[0]
            except RouteNotFound:
                await asyncio.sleep(0.02)


def test_what_nobody_can_read_is_a_dead_letter(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with orders() as (session, cluster, (queue,)):
            await send(session, queue, b"not zlib", tag="t", sys_flag=SYS_COMPRESSED)
            await send(session, queue, b"fine")
            async with LitePullConsumer(cluster.name_servers, group="g", from_where="first") as consumer:
                consumer.assign([queue])
                assert await drain(consumer, 1) == [b"fine"]
            async with LitePullConsumer(cluster.name_servers, group="g") as consumer:
                assert await consumer.committed(queue) == 2
                assert await consumer.max_offset(await dead_letters(consumer)) == 1

    asyncio.run(main())
    assert "the message at offset 0 of" in caplog.text
    assert "is a dead letter of g now" in caplog.text


def test_a_queue_waits_for_a_codec_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(codec: compression.Codec) -> Any:
        raise ImportError(codec)

    async def main() -> None:
        async with orders(2) as (session, cluster, (queue, other)):
            await send(session, queue, b"before")
            await send(session, queue, b"packed", sys_flag=SYS_COMPRESSED | SYS_COMPRESSION_ZSTD)
            await send(session, queue, b"behind")
            await send(session, other, b"elsewhere")
            monkeypatch.setattr(compression, "_module", not_installed)
            async with LitePullConsumer(cluster.name_servers, group="g", from_where="first") as consumer:
                consumer.assign([queue, other])
                assert sorted(await drain(consumer, 2)) == [b"before", b"elsewhere"]
                await eventually(lambda: any("the message at offset 1" in text for text in consumer.failures()))
                (failure,) = consumer.failures()
                assert "zstd" in failure
                assert consumer.position(consumer.assignment()[0]) == 1
            async with LitePullConsumer(cluster.name_servers, group="g") as consumer:
                assert await consumer.committed(queue) == 1

    asyncio.run(main())


def test_sql_that_is_none_is_refused_at_the_start() -> None:
    async def main() -> None:
        async with LocalCluster(topics={"orders": 1}, settings={"enablePropertyFilter": "true"}) as cluster:
            subscribing = LitePullConsumer(cluster.name_servers, group="g")
            subscribing.subscribe("orders", sql="price >")
            assigned = LitePullConsumer(cluster.name_servers, group="h")
            assigned.assign([MessageQueue("broker-a", 0, "orders")], sql="price >")
            for consumer in (subscribing, assigned):
                with pytest.raises(BrokerError):
                    await consumer.start()
                assert consumer.assignment() == []
            right = LitePullConsumer(cluster.name_servers, group="h")
            right.subscribe("orders", sql="price > 1")
            async with right:
                assert len(right.assignment()) == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"pull_batch_size": 2000}, "pull_batch_size is 2000"),
        ({"pull_batch_size": 0}, "pull_batch_size is 0"),
        ({"pull_batch_size": "32"}, "pull_batch_size is '32'"),
        ({"max_cached_messages": 0}, "max_cached_messages is 0"),
        ({"limits": Limits(messages=0)}, "limits.messages is 0"),
        ({"limits": 5}, "limits is 5"),
        ({"commit_interval_s": 0}, "commit_interval_s is 0"),
        ({"rebalance_interval_s": float("inf")}, "rebalance_interval_s is inf"),
        ({"auto_commit": "false"}, "auto_commit is 'false'"),
        ({"strategy": "average"}, "strategy is 'average'"),
        ({"strategy": lambda queues: queues}, "strategy .* is called with 3 arguments"),
        ({"trace": 1}, "trace is 1"),
        ({"group": "DEFAULT_CONSUMER"}, "give the group a name"),
    ],
)
def test_options_that_can_not_work_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidMessage, match=what):
        LitePullConsumer(**{"group": "g"} | options)


def test_a_tag_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="tag is None"):
        LitePullConsumer(group="g").subscribe("orders", None)  # type: ignore[arg-type]


def test_a_consumer_without_a_topic_says_so_when_it_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with LocalCluster(topics={"t": 1}) as cluster, LitePullConsumer(cluster.name_servers, "g") as consumer:
            queues = await consumer.queues("t")  # what to assign is asked for after the start
            assert not caplog.records
            for _ in range(2):
                assert await consumer.poll(0) == []
            [told] = caplog.records
            assert "g has no topic" in told.getMessage()
            consumer.assign(queues)
            assert await consumer.poll(0) == []
            assert caplog.records == [told]

    asyncio.run(main())


def test_a_strategy_or_a_hook_that_cancels_its_task_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cancels whatever task it runs in, in whichever request, and then no more."""
    monkeypatch.setattr(queue_sharing, "UNBALANCED_PAUSE_S", 0.01)
    left: dict[str | int, int] = {
        "strategy": 1, RequestCode.PULL_MESSAGE: 1, RequestCode.UPDATE_CONSUMER_OFFSET: 1,
    }  # fmt: skip

    def cancel_once(what: str | int) -> None:
        task = asyncio.current_task()
        if left.get(what) and task is not None and has_begun.is_set():
            left[what] -= 1
            task.cancel()

    def strategy(member: str, queues: Sequence[MessageQueue], members: Sequence[str]) -> list[MessageQueue]:
        cancel_once("strategy")
        return average(member, queues, members)

    class Cancelling(RpcHook):
        def before_request(self, address: str, request: Frame) -> None:
            cancel_once(request.code)

    async def main() -> None:
        async with (
            LocalCluster(topics={"orders": 1}) as cluster,
            Session(cluster.name_servers) as session,
            Session(cluster.name_servers, rpc_hooks=[Cancelling()]) as hooked,
        ):
            [queue] = (await session.routes.get("orders")).read_queues
            consumer = LitePullConsumer(
                session=hooked, group="g", from_where="first", strategy=strategy, commit_interval_s=0.01,
                rebalance_interval_s=0.01,
            )  # fmt: skip
            consumer.subscribe("orders")
            async with consumer:
                await send(session, queue, b"0")
                assert [message.body for message in await consumer.poll(DEADLINE_S)] == [b"0"]
                has_begun.set()
                for body in (b"1", b"2", b"3"):
                    await send(session, queue, body)
                    assert [message.body for message in await consumer.poll(DEADLINE_S)] == [body]
                await eventually(lambda: not any(left.values()))
                await send(session, queue, b"4")
                assert [message.body for message in await consumer.poll(DEADLINE_S)] == [b"4"]
                offset = 0
                async with asyncio.timeout(DEADLINE_S):
                    while offset < 4:
                        offset = await consumer.committed(queue) or 0
                        await asyncio.sleep(0.01)

    has_begun = asyncio.Event()
    asyncio.run(main())


def test_paused_queues_do_not_starve_the_others() -> None:
    async def main() -> None:
        async with orders(3) as (session, cluster, queues):
            for queue in queues:
                await send(session, queue, *(b"%d" % number for number in range(20)))
            consumer = LitePullConsumer(cluster.name_servers, group="g", from_where="first", max_cached_messages=20)
            async with consumer:
                consumer.assign(queues[:2])
                await drain(consumer, 4)
                consumer.pause(queues[:2])
                consumer.assign(queues)
                assert await drain(consumer, 20) == [b"%d" % number for number in range(20)]

    asyncio.run(main())


def test_another_tag_for_the_same_queues_counts_from_here_on() -> None:
    async def main() -> None:
        async with orders() as (session, cluster, (queue,)):
            for tag in ("a", "b", "a", "b"):
                await send(session, queue, tag.encode(), tag=tag)
            async with LitePullConsumer(cluster.name_servers, group="g", from_where="first") as consumer:
                consumer.assign([queue], tag="a")
                assert [message.body for message in await consumer.poll(DEADLINE_S, 1)] == [b"a"]
                consumer.assign([queue], tag="b")
                await consumer.commit()
                assert await consumer.committed(queue) == 1
                assert await drain(consumer, 2) == [b"b", b"b"]
                consumer.assign([queue], tag="b")
                assert await consumer.poll(0) == []
                await consumer.commit()
                assert await consumer.committed(queue) == 4

    asyncio.run(main())


def nonsense(*_: object) -> Any:
    return [MessageQueue("nowhere", 0, "orders")]


def cancels(*_: object) -> Any:
    raise asyncio.CancelledError


def exits(*_: object) -> Any:
    raise SystemExit


def stops(*_: object) -> Any:
    raise StopIteration


def fails(*_: object) -> Any:
    raise ZeroDivisionError


@pytest.mark.parametrize("bad", [fails, cancels, stops, exits, nonsense, lambda *_: None])
def test_a_strategy_that_fails_once_is_asked_again(
    bad: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skylark.client.queue_sharing.UNBALANCED_PAUSE_S", 0.01)
    calls: list[str] = []

    def strategy(client_id: str, queues: list[MessageQueue], _: list[str]) -> Any:
        calls.append(client_id)
        return bad(client_id, queues) if len(calls) == 1 else queues

    async def main() -> None:
        async with orders(2) as (_, cluster, queues):
            consumer = LitePullConsumer(cluster.name_servers, group="g", strategy=strategy)
            consumer.subscribe("orders")
            async with consumer:
                await eventually(lambda: consumer.assignment() == queues)

    asyncio.run(main())
    assert "sharing the queues of orders failed" in caplog.text


def test_a_reader_that_meets_a_defect_says_so_and_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_reading, "FIRST_PAUSE_S", 0.01)

    async def main() -> None:
        async with (
            orders() as (session, cluster, (queue,)),
            LitePullConsumer(cluster.name_servers, group="g", from_where="first") as consumer,
        ):
            begin = consumer._reading._first_offset
            failures = iter([ZeroDivisionError("first"), KeyError("second")])

            async def unlucky(queue: MessageQueue) -> int:
                for error in failures:
                    raise error
                return await begin(queue)

            consumer._reading._first_offset = unlucky
            consumer.assign([queue])
            await send(session, queue, b"a")
            assert [message.body for message in await consumer.poll(DEADLINE_S)] == [b"a"]
            await eventually(lambda: not consumer.failures())

    asyncio.run(main())
    assert "ZeroDivisionError('first')" in caplog.text
    assert caplog.text.count("goes on trying") == 1


def test_a_topic_that_may_not_be_read_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with LocalCluster(topics={"orders": QUEUES}, settings={"brokerPermission": "2"}) as cluster:
            asking = LitePullConsumer(cluster.name_servers, group="asks")
            asking.subscribe("orders")
            pushed = PushConsumer(cluster.name_servers, group="is_pushed", listener=lambda _: None)
            pushed.subscribe("orders")
            async with asking, pushed:
                await eventually(lambda: "is_pushed can't share out topic orders" in caplog.text)
                (failure,) = asking.failures()
                assert re.match("group asks: reading orders is not possible: .*no queue that can be read", failure)

    with caplog.at_level(logging.WARNING, logger="skylark.client"):
        asyncio.run(run())
    assert caplog.text.count("it has no queue that can be read; see its permission") == 2
