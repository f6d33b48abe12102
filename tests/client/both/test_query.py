"""Looking messages up, against both servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import pytest
from drivers import Session as JavaSession

from client.inbox import DEADLINE_S
from client.plain import create_topic, until_readable
from skylark.client import sync
from skylark.client.errors import (
    BrokerError,
    InvalidMessage,
    MessageNotFound,
    NotReachable,
    RequestTimeout,
    RouteNotFound,
)
from skylark.client.message import Message, MessageQueue, OutgoingMessage, Receipt
from skylark.client.producer import Producer
from skylark.client.query import QueryClient
from skylark.client.session import Session
from skylark.wire.message import message_id
from skylark.wire.records import encode_host, parse_message_id

_Found = TypeVar("_Found")


async def indexed(ask: Callable[[], Awaitable[_Found]], done: Callable[[_Found], bool]) -> _Found:
    """Apache's server indexes what it has stored a moment later."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            found = await ask()
            if done(found):
                return found
        except MessageNotFound:
            if time.monotonic() > deadline:
                raise
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def fill(session: Session, topic: str) -> list[Receipt]:
    await create_topic(session, topic, 2)
    async with Producer(session=session, timeout_s=DEADLINE_S) as producer:
        queues = await producer.queues(topic)
        receipts = [
            await producer.send(topic, b"%d" % n, key=["all", f"k{n}"], tag=f"t{n}", queue=queues[n % 2])
            for n in range(4)
        ]
        receipts += await producer.send_batch(topic, [OutgoingMessage(b"in a batch", key="b")], queue=queues[0])
        for queue, count in zip(queues, (3, 2), strict=True):
            await until_readable(session, queue, count)
        return receipts


def test_by_key_and_by_id(namesrv: str, topic: str) -> None:
    async def run() -> None:
        async with Session(namesrv) as session, QueryClient(session=session) as query:
            receipts = await fill(session, topic)
            found = await indexed(lambda: query.by_key(topic, "all"), lambda found: len(found) == 4)
            assert [message.body for message in found] == [b"0", b"1", b"2", b"3"]
            assert [message.body for message in await query.by_key(topic, "all", max_count=1)] in ([b"0"], [b"3"])
            assert [message.body for message in await query.by_key(topic, "k2")] == [b"2"]
            assert await query.by_key(topic, "k") == []
            assert await query.by_key(topic, "all", end=datetime(2020, 1, 1, tzinfo=UTC)) == []
            for receipt in receipts:
                by_unique_key = await indexed(
                    lambda msg_id=receipt.msg_id: query.by_unique_key(topic, msg_id), lambda found: True
                )
                for message in (by_unique_key, await query.by_id(receipt.offset_msg_id)):
                    assert (message.msg_id, message.offset_msg_id) == (receipt.msg_id, receipt.offset_msg_id)
                    assert (message.queue, message.queue_offset) == (receipt.queue, receipt.queue_offset)

    asyncio.run(run())


def test_by_offset_and_by_time(namesrv: str, topic: str) -> None:
    async def run() -> None:
        async with Session(namesrv) as session, QueryClient(session=session) as query:
            before = datetime.now(UTC) - timedelta(seconds=1)
            receipts = await fill(session, topic)
            messages: list[Message] = [await query.by_offset(each.queue, each.queue_offset) for each in receipts]
            assert [message.body for message in messages] == [b"0", b"1", b"2", b"3", b"in a batch"]
            found = await query.by_time(topic, before)
            assert sorted(message.body for message in found) == sorted(message.body for message in messages)
            times = [message.store_timestamp_ms for message in found]
            assert times == sorted(times)
            assert [m.body for m in await query.by_time(topic, before, max_count=2)] == [m.body for m in found[:2]]
            assert await query.by_time(topic, 0, before) == []
            assert await query.by_time(topic, times[-1] + 1) == []

    asyncio.run(run())


def test_questions_that_make_no_sense(namesrv: str, topic: str) -> None:
    async def run() -> None:
        async with (
            Session(namesrv) as session,
            QueryClient(session=session) as query,
            QueryClient(session=session, request_timeout_s=1.0) as impatient,
        ):
            receipts = await fill(session, topic)
            queue = receipts[0].queue
            for text in ("", "garbage", "7F00000100002A9F00000000000000", "Z" * 32, " " * 32):
                with pytest.raises(InvalidMessage, match="is no message id"):
                    await query.by_id(text)
            with pytest.raises(InvalidMessage, match="a unique key"):
                await query.by_id(receipts[0].msg_id)
            host, _ = parse_message_id(receipts[0].offset_msg_id)
            with pytest.raises(MessageNotFound, match="can not find message by the offset, 1234567890123"):
                await query.by_id(message_id(host, 1234567890123))
            with pytest.raises((MessageNotFound, RequestTimeout)):  # in the middle of a record; Apache's says nothing
                await impatient.by_id(message_id(host, parse_message_id(receipts[1].offset_msg_id)[1] + 3))
            with pytest.raises(NotReachable, match=r"belongs to a broker at 127\.0\.0\.1:1"):
                await query.by_id(message_id(encode_host("127.0.0.1", 1), 0))
            with pytest.raises(MessageNotFound, match="has no offset 9: it has 0 to 2"):
                await query.by_offset(queue, 9)
            with pytest.raises(InvalidMessage, match="0 or more"):
                await query.by_offset(queue, -1)
            with pytest.raises(BrokerError, match="queueId"):
                await query.by_offset(MessageQueue(queue.broker_name, 99, topic), 0)
            with pytest.raises(InvalidMessage, match="in the future"):
                await query.by_time(topic, datetime.now(UTC) + timedelta(hours=1))
            with pytest.raises(InvalidMessage, match="behind"):
                await query.by_time(topic, 5, 5)
            with pytest.raises(MessageNotFound, match="unique key"):
                await query.by_unique_key(topic, "7F0000010B6A18B4AAC2123456780000")
            with pytest.raises(RouteNotFound):
                await query.by_key("nowhere", "k")

    asyncio.run(run())


def test_the_blocking_twin_finds_what_java_sent(
    namesrv: str, topic: str, group: str, java_session: JavaSession
) -> None:
    (sent,) = java_session.producer(group).send(topic, "hello", keys="k", tags="t")
    with sync.QueryClient(namesrv) as query:
        message = query.by_id(sent["offsetMsgId"])
        assert (message.body, message.msg_id, message.keys, message.tag) == (b"hello", sent["msgId"], ["k"], "t")
        assert query.by_offset(query.queues(topic)[sent["queue"]], sent["offset"]).msg_id == sent["msgId"]
