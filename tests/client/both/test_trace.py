"""Traces, against both servers: Python and Java write them, Python and Apache's mqadmin read them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator

import pytest
from drivers import Driver, Event, java_driver
from drivers import Session as JavaSession
from servers import APACHE_VERSION

from client.inbox import DEADLINE_S, Inbox
from client.plain import create_topic
from skylark.client.listening import RetryLater
from skylark.client.message import OutgoingMessage
from skylark.client.producer import Producer
from skylark.client.push_consumer import PushConsumer
from skylark.client.query import QueryClient
from skylark.client.session import Session
from skylark.client.sync import QueryClient as BlockingQueryClient
from skylark.client.traces import TraceEvent
from skylark.wire.trace import ConsumeCode, MessageType, Pub, SubAfter, SubBefore


@pytest.fixture(scope="module")
def mqadmin(java: Driver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    driver = java_driver(APACHE_VERSION, tmp_path_factory.mktemp("mqadmin"), "skylark.AdminDriver")
    yield driver
    driver.close()


def read_by_apache(mqadmin: Driver, namesrv: str, msg_id: str, topic: str | None = None) -> list[list[str]]:
    """The rows that queryMsgTraceById prints."""
    command = ["queryMsgTraceById", "-i", msg_id, *(["-t", topic] if topic else []), "-n", namesrv]
    output: str = mqadmin.call("admin", args="\n".join(command))["output"]
    return [line.split() for line in output.splitlines() if re.match(r"(Pub|Sub)\s", line)]


async def until(client: QueryClient, msg_id: str, done: Callable[[list[TraceEvent]], bool], topic: str) -> None:
    """Apache's server indexes what it has stored a moment later."""
    deadline = time.monotonic() + DEADLINE_S
    while not done(events := await client.trace(msg_id, trace_topic=topic)):
        assert time.monotonic() < deadline, events
        await asyncio.sleep(0.05)


def test_python_writes_and_both_read(namesrv: str, topic: str, group: str, mqadmin: Driver) -> None:
    async def run() -> str:
        failing = Inbox(lambda message: RetryLater(1) if message.reconsume_times == 0 else None)
        async with Session(namesrv) as session, QueryClient(session=session) as query:
            await create_topic(session, topic, 1)
            async with Producer(session=session, group="traced", trace=True) as producer:
                receipt = await producer.send(topic, b"hello", tag="t", key=["k1", "k2"])
                batch = await producer.send_batch(
                    topic, [OutgoingMessage(b"one", key="b1"), b"two"], timeout_s=DEADLINE_S
                )
                later = await producer.send(topic, b"later", delay_level=1)
            consumer = PushConsumer(session=session, group=group, listener=failing, from_where="first", trace=True)
            consumer.subscribe(topic)
            async with consumer:
                await failing.until(lambda: failing.bodies.count(b"hello") == 2)
            msg_id = receipt.msg_id
            await until(query, msg_id, lambda events: len(events) == 5, "RMQ_SYS_TRACE_TOPIC")
            events = await query.trace(msg_id)
            assert [event.what for event in events] == ["sent", "consuming", "consumed", "consuming", "consumed"]
            pub = events[0].record
            assert isinstance(pub, Pub)
            assert (pub.group, pub.topic, pub.tags, pub.keys) == ("traced", topic, "t", "k1 k2")
            assert (pub.body_length, pub.offset_msg_id, pub.is_success) == (5, receipt.offset_msg_id, True)
            assert pub.store_host == session.broker_address(receipt.queue.broker_name)
            first, failed, again, done = (event.record for event in events[1:])
            assert isinstance(first, SubBefore)
            assert isinstance(failed, SubAfter)
            assert isinstance(again, SubBefore)
            assert isinstance(done, SubAfter)
            assert (failed.is_success, failed.code, failed.request_id) == (False, ConsumeCode.FAILED, first.request_id)
            assert (done.is_success, done.group, again.retries, again.keys) == (True, group, 1, "k1 k2")
            for each, length in zip(batch, (3, 3), strict=True):
                await until(query, each.msg_id, lambda events: bool(events), "RMQ_SYS_TRACE_TOPIC")
                (pub, *_) = [event.record for event in await query.trace(each.msg_id)]
                assert isinstance(pub, Pub)
                assert (pub.msg_id, pub.body_length, pub.offset_msg_id) == (each.msg_id, length, each.offset_msg_id)
            await until(query, later.msg_id, lambda events: bool(events), "RMQ_SYS_TRACE_TOPIC")
            (pub, *_) = [event.record for event in await query.trace(later.msg_id)]
            assert isinstance(pub, Pub)
            assert pub.message_type == MessageType.DELAY
            return msg_id

    msg_id = asyncio.run(run())
    rows = read_by_apache(mqadmin, namesrv, msg_id)
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("Pub", "traced", "success"),
        ("Sub", group, "failed"),
        ("Sub", group, "success"),
    ]


def test_java_writes_and_both_read(
    namesrv: str, topic: str, group: str, java_session: JavaSession, mqadmin: Driver
) -> None:
    trace_topic = f"{topic}_traces"
    producer = java_session.producer(group, trace=trace_topic)
    producer.create_topic(topic, 1)
    producer.create_topic(trace_topic, 1)
    consumer = java_session.consumer(group, topic, trace=trace_topic)

    async def traced(query: QueryClient) -> tuple[Event, list[TraceEvent]]:
        """A message and its three records, of which Apache's client loses some when the machine is busy."""
        while True:
            (sent,) = await asyncio.to_thread(producer.send, topic, "hello", keys="k")
            await asyncio.to_thread(consumer.take, 1)
            for _ in range(100):
                events = await query.trace(sent["msgId"], trace_topic=trace_topic)
                if len(events) == 3:
                    return sent, events
                await asyncio.sleep(0.1)

    async def run() -> Event:
        async with QueryClient(namesrv) as query:
            sent, events = await traced(query)
            assert [(event.what, event.group) for event in events] == [
                ("sent", group),
                ("consuming", group),
                ("consumed", group),
            ]
            pub = events[0].record
            assert isinstance(pub, Pub)
            assert (pub.keys, pub.tags, pub.offset_msg_id) == ("k", None, sent["offsetMsgId"])
            return sent

    sent = asyncio.run(run())
    for client in (producer, consumer):  # what writes traces is shared by all clients of a process
        client.stop()
    rows = read_by_apache(mqadmin, namesrv, sent["msgId"], trace_topic)
    assert [(row[0], row[1], row[-1]) for row in rows] == [("Pub", group, "success"), ("Sub", group, "success")]


def test_nothing_is_known_of_a_message(namesrv: str) -> None:
    with BlockingQueryClient(namesrv) as query:
        assert query.trace("7F0000010B6A18B4AAC2123456780000", trace_topic="TBW102") == []
