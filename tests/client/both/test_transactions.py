"""The transaction producer against both servers, with consumers and producers of both languages."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from servers import Server, SkylarkServer

from client.inbox import DEADLINE_S, Inbox, eventually
from skylark.client.errors import BrokerError
from skylark.client.message import Message
from skylark.client.push_consumer import PushConsumer
from skylark.client.transactions import HalfMessage, TransactionProducer
from skylark.wire.codes import ResponseCode

if TYPE_CHECKING:
    from drivers import Session as JavaSession

COMMIT, UNKNOWN = "COMMIT_MESSAGE", "UNKNOW"


class Ledger:
    """What a shop knows: the ids of transactions that succeeded."""

    def __init__(self) -> None:
        self.kept: set[str] = set()
        self.asked: list[str] = []
        self.topics: set[str] = set()

    def check(self, message: Message) -> bool:
        self.asked.append(message.msg_id)
        self.topics.add(message.topic)
        return message.msg_id in self.kept


def producer_at(namesrv: str, group: str, ledger: Ledger) -> TransactionProducer:
    return TransactionProducer(namesrv, group, checker=ledger.check, timeout_s=DEADLINE_S)


def stored_bodies(inbox: Inbox) -> list[bytes]:
    """The bodies of what came, by its place in the store: a consumer may get one message twice, the store may not."""
    return sorted({message.offset_msg_id: message.body for message in inbox.messages}.values())


def test_blocks_and_open_ends_are_delivered_to_python(server: Server, topic: str, group: str) -> None:
    namesrv = server.namesrv_addr

    async def run() -> None:
        ledger, inbox = Ledger(), Inbox()
        async with producer_at(namesrv, group, ledger) as producer:
            async with producer.transaction(topic, b"good", tag="blue", key="k", properties={"mine": "kept"}) as good:
                ledger.kept.add(good.id)
            with pytest.raises(ZeroDivisionError):
                async with producer.transaction(topic, b"bad"):
                    raise ZeroDivisionError
            late, never = await producer.prepare(topic, b"late"), await producer.prepare(topic, b"never")
            ledger.kept.add(late.msg_id)
            consumer = PushConsumer(namesrv, group, listener=inbox, from_where="first")
            consumer.subscribe(topic)
            async with consumer:
                messages = {message.body: message for message in await inbox.wait(2)}
                await eventually(lambda: {late.msg_id, never.msg_id} <= set(ledger.asked))
                await producer.send(topic, b"last")
                await inbox.until(lambda: b"last" in inbox.bodies)
        if isinstance(server, SkylarkServer):  # Apache's, when slow, asks for what has ended, and delivers it again
            assert stored_bodies(inbox) == [b"good", b"last", b"late"]
            assert good.id not in ledger.asked
        assert set(inbox.bodies) == {b"good", b"last", b"late"}
        message = messages[b"good"]
        assert (message.msg_id, message.tag, message.keys) == (good.id, "blue", ["k"])
        assert message.properties["mine"] == "kept"
        assert ledger.topics == {topic}

    asyncio.run(run())


def test_python_commits_and_java_consumes(namesrv: str, topic: str, group: str, java_session: JavaSession) -> None:
    async def run() -> None:
        ledger = Ledger()
        async with producer_at(namesrv, group, ledger) as producer:
            async with producer.transaction(topic, b"good"):
                pass
            half = await producer.prepare(topic, b"open")
            ledger.kept.add(half.msg_id)
            consumer = java_session.consumer(group, topic)
            events = await asyncio.to_thread(consumer.take, 2)
            assert {event["body"]: event["msgId"] for event in events}["open"] == half.msg_id

    asyncio.run(run())


def test_java_prepares_and_python_is_asked(namesrv: str, topic: str, group: str, java_session: JavaSession) -> None:
    """Producers of one group end each other's transactions, whatever their language."""

    async def run() -> None:
        inbox = Inbox()
        transactor = java_session.transactor(group)
        await asyncio.to_thread(transactor.send, topic, "decided", COMMIT)
        await asyncio.to_thread(transactor.stop)
        transactor = java_session.transactor(f"{group}_other")
        open_one = await asyncio.to_thread(transactor.send, topic, "open", UNKNOWN)
        await asyncio.to_thread(transactor.stop)

        def check(message: Message) -> bool:
            assert message.body == b"open"
            return message.msg_id == open_one["msgId"]

        producer = TransactionProducer(namesrv, f"{group}_other", checker=check, topics=[topic], timeout_s=DEADLINE_S)
        consumer = PushConsumer(namesrv, group, listener=inbox, from_where="first")
        consumer.subscribe(topic)
        async with producer, consumer:
            await inbox.wait(2)
        assert stored_bodies(inbox) == [b"decided", b"open"]

    asyncio.run(run())


def test_a_stranger_cannot_end_a_transaction(namesrv: str, topic: str, group: str) -> None:
    async def run() -> None:
        inbox = Inbox()
        async with producer_at(namesrv, group, Ledger()) as producer:
            half = HalfMessage.decode((await producer.prepare(topic, b"mine", check_after_s=600)).encode())
            stranger = HalfMessage.decode(half.encode().replace(f'"{group}"', '"strangers"'))
            with pytest.raises(BrokerError, match="The producer group wrong") as refusal:
                await producer.commit(stranger)
            assert refusal.value.code == ResponseCode.SYSTEM_ERROR
            await producer.commit(half)
            consumer = PushConsumer(namesrv, group, listener=inbox, from_where="first")
            consumer.subscribe(topic)
            async with consumer:
                await inbox.wait(1)
        assert stored_bodies(inbox) == [b"mine"]

    asyncio.run(run())
