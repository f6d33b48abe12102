"""Timers and their recall against both servers, from Python and from Java."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime

import pytest
from drivers import Client, DriverError
from drivers import Session as JavaSession
from servers import Server, wait_on_the_wheel

from client.inbox import DEADLINE_S, Inbox
from client.plain import create_topic
from skylark.client.errors import BrokerError, InvalidMessage
from skylark.client.message import MessageQueue
from skylark.client.producer import Producer
from skylark.client.push_consumer import PushConsumer
from skylark.client.session import Session
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import SendMessageV2
from skylark.wire.recall import RecallHandle
from skylark.wire.records import encode_properties
from skylark.wire.typed import encode_header

DAY_MS = 24 * 3600 * 1000
RECALLED_MS = 2_500


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Timers:
    """What was sent: bodies and when they are due, and those that were recalled too late to be sure of them."""

    def __init__(self, server: Server, topic: str) -> None:
        self._address = server.broker_addr
        self._topic = topic
        self.due_ms: dict[bytes, int] = {}
        self.doubtful: set[bytes] = set()

    async def send(self, producer: Producer) -> None:
        now = now_ms()
        self.due_ms |= {b"py-delay": now + 1200, b"py-at": now + 2000, b"py-ms": now + 1700}
        await producer.send(self._topic, b"py-delay", delay_s=1.2)
        await producer.send(self._topic, b"py-at", deliver_at=datetime.fromtimestamp((now + 2000) / 1000, UTC))
        await producer.send(self._topic, b"py-ms", deliver_at=now + 1700)

    async def recall(self, producer: Producer) -> None:
        async def recall(body: bytes) -> None:
            sent = await producer.send(self._topic, body, delay_s=RECALLED_MS / 1000)
            assert sent.recall_handle is not None
            with suppress(BrokerError):  # it is due already
                assert await producer.recall(self._topic, sent.recall_handle) == sent.msg_id

        while not await self._in_time(recall):
            pass

    def send_from_java(self, sender: Client) -> None:
        now = now_ms()
        self.due_ms |= {b"java-sec": now + 1000, b"java-ms": now + 1700, b"java-at": now + 2000}
        sender.call("timers.send", topic=self._topic, body="java-sec", delaySec=1)
        sender.call("timers.send", topic=self._topic, body="java-ms", delayMs=1700)
        sender.call("timers.send", topic=self._topic, body="java-at", deliverMs=now + 2000)

    async def recall_from_java(self, sender: Client) -> None:
        def call(body: bytes) -> None:
            sent = sender.call("timers.send", topic=self._topic, body=body.decode(), delayMs=RECALLED_MS)
            with suppress(DriverError):
                recalled = sender.call("timers.recall", topic=self._topic, handle=sent["handle"])
                assert recalled["msgId"] == sent["msgId"]

        async def recall(body: bytes) -> None:
            await asyncio.to_thread(call, body)

        while not await self._in_time(recall):
            pass

    async def _in_time(self, recall: Callable[[bytes], Awaitable[None]]) -> bool:
        """Whether timer and recall were both on the broker's wheel before the timer was due."""
        body = b"recalled-%d" % now_ms()
        due_ms = now_ms() + RECALLED_MS
        await recall(body)
        await asyncio.to_thread(wait_on_the_wheel, self._address)
        if now_ms() + 500 < due_ms:
            return True
        self.doubtful.add(body)
        return False


def test_timers_come_in_time_and_recalled_ones_never(
    server: Server, namesrv: str, topic: str, group: str, java_session: JavaSession
) -> None:
    """Each producer sends timers of every kind and recalls one; each consumer gets those of both."""
    timers = Timers(server, topic)

    async def main() -> None:
        inbox = Inbox()
        async with Session(namesrv) as session:
            await create_topic(session, topic)
        consumer = PushConsumer(namesrv, group, listener=inbox, from_where="first")
        consumer.subscribe(topic)
        java_consumer = await asyncio.to_thread(java_session.consumer, f"{group}_java", topic)
        sender = await asyncio.to_thread(java_session.timers, "timers")
        async with consumer, Producer(namesrv, group="senders") as producer:
            await asyncio.to_thread(timers.send_from_java, sender)
            await timers.send(producer)
            await timers.recall_from_java(sender)
            await timers.recall(producer)
            timers.due_ms[b"last"] = now_ms() + RECALLED_MS + 500
            await producer.send(topic, b"last", delay_s=(RECALLED_MS + 500) / 1000)
            await inbox.until(lambda: timers.due_ms.keys() <= set(inbox.bodies))
            seen: list[str] = []
            while not {body.decode() for body in timers.due_ms} <= set(seen):
                seen += [event["body"] for event in await asyncio.to_thread(java_consumer.take, 1)]
        wanted = sorted(timers.due_ms)
        assert sorted(body for body in inbox.bodies if body not in timers.doubtful) == wanted
        assert sorted(body for body in map(str.encode, seen) if body not in timers.doubtful) == wanted
        for message in inbox.messages:
            if message.body not in timers.doubtful:
                assert message.store_timestamp_ms >= timers.due_ms[message.body], message
                assert int(message.properties["TIMER_DEQUEUE_MS"]) >= timers.due_ms[message.body]
                assert message.properties["TIMER_OUT_MS"].endswith("000")

    asyncio.run(main())


async def refused(producer: Producer, queue: MessageQueue, properties: dict[str, str]) -> tuple[int, str | None]:
    """The answer to a message with properties that the client itself would not send."""
    header = SendMessageV2("g", queue.topic, "TBW102", 4, queue.queue_id, 0, now_ms(), 0)
    header.properties = encode_properties({"UNIQ_KEY": "K", **properties}).decode()
    request = Frame(RequestCode.SEND_MESSAGE_V2, encode_header(header), b"x")
    answer = await producer.session.ask_broker(queue.broker_name, request, DEADLINE_S)
    return answer.code, answer.remark


def test_times_that_cannot_be_are_refused_alike(namesrv: str, topic: str) -> None:
    async def main() -> None:
        async with Producer(namesrv, group="senders", timeout_s=DEADLINE_S) as producer:
            queue = (await producer.send(topic, b"at once", deliver_at=1)).queue
            for properties in (
                {"TIMER_DELAY_SEC": "259201"},
                {"TIMER_DELAY_MS": "soon"},
                {"TIMER_DELIVER_MS": str(now_ms() + 4 * DAY_MS)},
                {"TIMER_DELIVER_MS": "9" * 30},
                {"TIMER_DELIVER_MS": "5", "TIMER_DEL_UNIQKEY": "X"},
            ):
                assert await refused(producer, queue, properties) == (
                    ResponseCode.MESSAGE_ILLEGAL,
                    "timer message illegal, the delay time should not be bigger than the max delay 259200000ms; or if "
                    "set del msg, the delay time should be bigger than the current time",
                ), properties
            assert (await refused(producer, queue, {"TIMER_DELAY_SEC": "-5"}))[0] == ResponseCode.SUCCESS
            with pytest.raises(BrokerError, match="max delay 259200000ms"):
                await producer.send(topic, b"x", delay_s=4 * 24 * 3600)

    asyncio.run(main())


def test_recalls_that_cannot_be_are_refused_alike(namesrv: str, topic: str) -> None:
    async def main() -> None:
        async with Producer(namesrv, group="senders", timeout_s=DEADLINE_S) as producer:
            sent = await producer.send(topic, b"x", delay_s=60)
            handle = RecallHandle.decode(sent.recall_handle or "")
            assert (handle.topic, handle.broker, handle.unique_key) == (topic, sent.queue.broker_name, sent.msg_id)
            forged = {
                RecallHandle("other", handle.broker, handle.time, "K"): "recall failed, topic not match",
                RecallHandle(topic, handle.broker, "1", "K"): "recall failed, timestamp invalid",
                RecallHandle(topic, handle.broker, "soon", "K"): "recall failed, timestamp invalid",
                RecallHandle(topic, handle.broker, str(now_ms() + 4 * DAY_MS), "K"): "recall failed, timestamp invalid",
                RecallHandle(topic, "nobody", handle.time, "K"): "recall failed, broker service not available",
            }
            for bad, remark in forged.items():
                with pytest.raises(BrokerError) as error:
                    await producer.recall(topic, bad.encode())
                assert (error.value.code, error.value.remark) == (ResponseCode.ILLEGAL_OPERATION, remark)
            with pytest.raises(InvalidMessage, match="recall handle is invalid"):
                await producer.recall(topic, "nonsense")
            for garbage in ("nonsense", "%%%", "djEgYQ=="):
                fields = {"topic": topic, "recallHandle": garbage, "producerGroup": "g"}
                request = Frame(RequestCode.RECALL_MESSAGE, fields)
                answer = await producer.session.ask_broker(sent.queue.broker_name, request, DEADLINE_S)
                assert (answer.code, answer.remark) == (ResponseCode.ILLEGAL_OPERATION, "recall handle is invalid")
            assert await producer.recall(topic, sent.recall_handle or "") == sent.msg_id

    asyncio.run(main())
