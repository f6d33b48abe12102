"""Filters by tag and by SQL92 of our consumers, against both servers and beside Apache's Java client."""

from __future__ import annotations

import asyncio

import pytest
from drivers import Session, bodies

from client.inbox import DEADLINE_S, Inbox
from client.plain import create_topic, until_readable
from skylark.client.errors import BrokerError
from skylark.client.lite_pull_consumer import LitePullConsumer
from skylark.client.producer import Producer
from skylark.client.pull_consumer import PullConsumer, PullStatus
from skylark.client.push_consumer import PushConsumer
from skylark.wire.codes import ResponseCode

SQL = "price >= 3 AND region STARTSWITH 'eu'"


async def send_prices(producer: Producer, topic: str, count: int = 6) -> list[bytes]:
    """Prices from 0 on, every other in the EU; those that the expression wants come back."""
    (queue,) = (await producer.session.routes.get(topic)).write_queues
    for number in range(count):
        properties = {"price": str(number), "region": "eu-1" if number % 2 else "us-1"}
        await producer.send(topic, b"%d" % number, properties=properties, queue=queue)
    return [b"%d" % number for number in range(count) if number >= 3 and number % 2]


def test_a_push_consumer_gets_what_its_expression_wants(namesrv: str, topic: str, group: str) -> None:
    async def run() -> None:
        inbox = Inbox()
        async with Producer(namesrv, timeout_s=DEADLINE_S) as producer:
            await create_topic(producer.session, topic, 1)
            consumer = PushConsumer(namesrv, group, listener=inbox)
            consumer.subscribe(topic, sql=SQL)
            async with consumer:
                wanted: list[bytes] = []
                for _ in range(2):
                    wanted += await send_prices(producer, topic)
                    await inbox.wait(len(wanted))
                    assert sorted(inbox.bodies) == sorted(wanted)

    asyncio.run(run())


@pytest.mark.parametrize("sql", ["price >", "price = 'x", "(price = 1"])
def test_a_bad_expression_is_refused_at_the_start(namesrv: str, topic: str, group: str, sql: str) -> None:
    async def run() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S) as producer:
            await create_topic(producer.session, topic, 1)
        consumer = PushConsumer(namesrv, group, listener=print)
        consumer.subscribe(topic, sql=sql)
        with pytest.raises(BrokerError) as refused:
            await consumer.start()
        assert refused.value.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED

    asyncio.run(run())


def test_pulls_by_expression(namesrv: str, topic: str, group: str) -> None:
    async def run() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S) as producer:
            (queue,) = await create_topic(producer.session, topic, 1)
            wanted = await send_prices(producer, topic)
            async with PullConsumer(group=group, session=producer.session) as consumer:
                await until_readable(producer.session, queue, 6)
                pulled = await consumer.pull(queue, 0, sql=SQL)
                assert [message.body for message in pulled.messages] == wanted
                nothing = await consumer.pull(queue, 0, sql="price IS NULL")
                assert (nothing.status, nothing.next_offset) == (PullStatus.NO_MATCHED_MESSAGE, 6)

    asyncio.run(run())


def test_lite_pulls_by_expression(namesrv: str, topic: str, group: str) -> None:
    async def run() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S) as producer:
            await create_topic(producer.session, topic, 1)
            consumer = LitePullConsumer(namesrv, group, from_where="first")
            consumer.subscribe(topic, sql=SQL)
            async with consumer:
                wanted = await send_prices(producer, topic)
                got: list[bytes] = []
                async with asyncio.timeout(DEADLINE_S):
                    while len(got) < len(wanted):
                        got += [message.body for message in await consumer.poll()]
                assert got == wanted

    asyncio.run(run())


def test_what_java_sends_is_filtered_for_us(namesrv: str, topic: str, group: str, java_session: Session) -> None:
    async def run() -> None:
        inbox = Inbox()
        java = java_session.producer(group)
        java.create_topic(topic, 1)
        consumer = PushConsumer(namesrv, group, listener=inbox, from_where="first")
        consumer.subscribe(topic, sql="price > 3")
        async with consumer:
            for number in range(6):
                java.send(topic, str(number), property={"price": str(number)})
            await inbox.wait(2)
            assert sorted(inbox.bodies) == [b"4", b"5"]

    asyncio.run(run())


@pytest.mark.parametrize("wanted", [{"sql": SQL}, {"expression": "odd"}])
def test_what_we_send_is_filtered_for_java(
    namesrv: str, topic: str, group: str, java_session: Session, wanted: dict[str, str]
) -> None:
    async def run() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S) as producer:
            (queue,) = await create_topic(producer.session, topic, 1)
            java = java_session.consumer(group, topic, from_="first", **wanted)
            for number in range(6):
                properties = {"price": str(number), "region": "eu-1"}
                tag = "odd" if number % 2 else "even"
                await producer.send(topic, b"%d" % number, tag=tag, properties=properties, queue=queue)
            got = await asyncio.to_thread(java.take, 3)
            assert sorted(bodies(got)) == (["3", "4", "5"] if "sql" in wanted else ["1", "3", "5"])

    asyncio.run(run())
