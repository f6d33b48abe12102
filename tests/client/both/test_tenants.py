"""Namespaces, units and priorities: Apache's Java client on one side and this one on the other, both ways round."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from drivers import Session, bodies, numbered
from servers import Server, request

from client.inbox import DEADLINE_S, Inbox
from client.plain import create_topic, until_readable
from skylark.client.listening import RetryLater
from skylark.client.message import Message
from skylark.client.producer import Producer
from skylark.client.pull_consumer import PullConsumer
from skylark.client.push_consumer import PushConsumer
from skylark.client.session import Session as ClientSession
from skylark.client.simple_consumer import SimpleConsumer

GET_CONSUMER_LIST_BY_GROUP = 38
GET_UNIT_TOPIC_LIST = 311
GET_HAS_UNIT_SUB_TOPIC_LIST = 312
GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST = 313
PRIORITY = "_SYS_MSG_PRIORITY_"


@asynccontextmanager
async def member(session: ClientSession, group: str, topic: str, listener: Any) -> AsyncIterator[PushConsumer]:
    consumer = PushConsumer(group=group, session=session, listener=listener, from_where="first")
    consumer.subscribe(topic)
    async with consumer:
        yield consumer


@asynccontextmanager
async def popping(namesrv: str, group: str, topic: str) -> AsyncIterator[SimpleConsumer]:
    consumer = SimpleConsumer(namesrv, group)
    consumer.subscribe(topic)
    async with consumer:
        yield consumer


async def stored(namesrv: str, topic: str, count: int) -> list[Message]:
    """What a topic holds, by its whole name, as soon as it holds so much."""
    async with PullConsumer(namesrv, "readers") as reader, asyncio.timeout(DEADLINE_S):
        while True:
            found: list[Message] = []
            for queue in await reader.queues(topic):
                found += (await reader.pull(queue, 0)).messages
            if len(found) >= count:
                return found
            await asyncio.sleep(0.05)


def listed(server: Server, code: int) -> list[str]:
    answer, body = request(server.namesrv_addr, code, {})
    assert answer["code"] == 0
    topics: list[str] = json.loads(body)["topicList"]
    return topics


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not done():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def test_names_of_a_namespace_meet(namesrv: str, java_session: Session, topic: str, group: str) -> None:
    tenant = f"tenant_{uuid.uuid4().hex[:6]}"

    async def main() -> None:
        producer = java_session.producer(f"{group}_p", namespace=tenant)
        sent = await asyncio.to_thread(producer.send, topic, "java", count=8)
        assert {each["topic"] for each in sent} == {topic}
        inbox = Inbox()
        session = ClientSession(namesrv, namespace=tenant)
        async with member(session, group, topic, inbox) as consumer:
            assert consumer.group == f"{tenant}%{group}"
            messages = await inbox.wait(8)
            assert {message.topic for message in messages} == {topic}
            assert {queue.topic for queue in consumer.queues} >= {topic}
        java = java_session.consumer(f"{group}_java", topic, namespace=tenant)
        async with Producer(namesrv, f"{group}_q", namespace=tenant) as ours:
            queues = await ours.queues(topic)
            receipts = [await ours.send(topic, body.encode()) for body in numbered("python", 4)]
            receipts.append(await ours.send(topic, b"chosen", queue=queues[0]))
            receipts += await ours.send_batch(topic, [b"batch-0", b"batch-1"], ordering_key="k")
            assert {receipt.queue.topic for receipt in receipts} == {topic}
        events = await asyncio.to_thread(java.take, 15)
        wanted = [*numbered("java", 8), *numbered("python", 4), "chosen", "batch-0", "batch-1"]
        assert sorted(bodies(events)) == sorted(wanted)
        assert {event["topic"] for event in events} == {topic}
        # Who belongs to no namespace, or to another, finds nothing under the plain name.
        assert len(await stored(namesrv, f"{tenant}%{topic}", 15)) == 15

    asyncio.run(main())


def test_a_namespace_keeps_retries_and_dead_letters(
    namesrv: str, java_session: Session, topic: str, group: str
) -> None:
    tenant = f"tenant_{uuid.uuid4().hex[:6]}"

    def once_more(message: Message) -> object:
        return RetryLater(1) if not message.reconsume_times else None

    async def main() -> None:
        async with Producer(namesrv, namespace=tenant) as ours:
            await ours.send(topic, b"again")
        inbox = Inbox(once_more)
        async with member(ClientSession(namesrv, namespace=tenant), group, topic, inbox):
            java = java_session.consumer(f"{group}_j", topic, namespace=tenant, fail=1, delayLevel=1)
            messages = await inbox.wait(2)
            assert [(message.topic, message.reconsume_times) for message in messages] == [(topic, 0), (topic, 1)]
            events = await asyncio.to_thread(java.take, 2)
            assert [(event["topic"], event["reconsumeTimes"]) for event in events] == [(topic, 0), (topic, 1)]
        java_session.consumer(f"{group}_d", topic, namespace=tenant, fail=99, delayLevel=-1)
        giving_up = Inbox(lambda message: RetryLater(-1))
        async with member(ClientSession(namesrv, namespace=tenant), f"{group}_e", topic, giving_up):
            for dead in (f"{group}_d", f"{group}_e"):
                await until(lambda dead=dead: has_topic(namesrv, f"%DLQ%{tenant}%{dead}"))
        [buried] = await stored(namesrv, f"%RETRY%{tenant}%{group}", 1)
        assert buried.properties["RETRY_TOPIC"] == f"{tenant}%{topic}"

    asyncio.run(main())


def has_topic(namesrv: str, topic: str) -> bool:
    return request(namesrv, 105, {"topic": topic})[0]["code"] == 0


def test_a_namespace_in_a_field_of_its_own_leaves_the_names(
    namesrv: str, java_session: Session, topic: str, group: str
) -> None:
    async def main() -> None:
        session = ClientSession(namesrv, namespace_v2="tenant")
        java = java_session.producer(f"{group}_p", namespaceV2="tenant")
        await asyncio.to_thread(java.send, topic, "java", count=4)
        inbox = Inbox()
        async with member(session, group, topic, inbox), Producer(session=session) as ours:
            await ours.send(topic, b"python")
            await inbox.wait(5)
        consumer = java_session.consumer(f"{group}_j", topic, namespaceV2="tenant")
        assert len(await asyncio.to_thread(consumer.take, 5)) == 5

    asyncio.run(main())


def test_units(server: Server, namesrv: str, java_session: Session, topic: str, group: str) -> None:
    """A unit is part of the client id; unit mode marks topics and the retry topics of groups at the name server."""
    groups = [f"{group}_python", f"{group}_java"]

    async def main() -> None:
        session = ClientSession(namesrv, unit="eu", unit_mode=True)
        java = java_session.producer(f"{group}_p", unit="eu", unitMode=True)
        await asyncio.to_thread(java.send, f"{topic}_java", "m")
        inbox = Inbox()
        async with Producer(session=session) as ours:
            await ours.send(topic, b"m")
            async with member(session, groups[0], topic, inbox):
                consumer = java_session.consumer(groups[1], topic, unit="eu", unitMode=True)
                await inbox.wait(1)
                await asyncio.to_thread(consumer.take, 1)
                for name in groups:
                    _, body = request(server.broker_addr, GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": name})
                    [client_id] = json.loads(body)["consumerIdList"]
                    assert client_id.endswith("@eu")
                retries = {f"%RETRY%{name}" for name in groups}
                await until(lambda: {topic, f"{topic}_java"} <= set(listed(server, GET_UNIT_TOPIC_LIST)))
                await until(lambda: retries <= set(listed(server, GET_HAS_UNIT_SUB_TOPIC_LIST)))
                assert retries <= set(listed(server, GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST))
                assert not retries & set(listed(server, GET_UNIT_TOPIC_LIST))

    asyncio.run(main())


def test_priorities_lead_to_queues(namesrv: str, java_session: Session, topic: str, group: str) -> None:
    async def main() -> None:
        session = ClientSession(namesrv)
        inbox = Inbox()
        async with Producer(session=session) as ours:
            await create_topic(session, topic, 4)
            java = java_session.consumer(f"{group}_j", topic)
            receipts = [await ours.send(topic, b"python", priority=priority) for priority in (0, 2, 99)]
            assert [receipt.queue.queue_id for receipt in receipts] == [0, 2, 3]
            producer = java_session.producer(f"{group}_p")
            sent = [await asyncio.to_thread(producer.send, topic, "java", priority=each) for each in (1, 7)]
            assert [each["queue"] for [each] in sent] == [1, 3]
            async with member(session, group, topic, inbox):
                messages = await inbox.wait(5)
            assert sorted(message.priority for message in messages) == [0, 1, 2, 7, 99]
            events = await asyncio.to_thread(java.take, 5)
            assert sorted(int(event["properties"][PRIORITY]) for event in events) == [0, 1, 2, 7, 99]
            assert all(min(int(event["properties"][PRIORITY]), 3) == event["queue"] for event in events)

    asyncio.run(main())


def test_pops_take_the_highest_priority_first(namesrv: str, topic: str, group: str) -> None:
    async def main() -> None:
        session = ClientSession(namesrv)
        async with Producer(session=session) as producer:
            queues = await create_topic(session, topic, 4, attributes="+message.type=PRIORITY")
            async with popping(namesrv, group, topic) as consumer:
                await consumer.receive(wait_s=1)  # the group begins here
            for priority in (1, 3, 0, 2):
                await producer.send(topic, b"%d" % priority, priority=priority)
            for queue in queues:
                await until_readable(session, queue, 1)
            got: list[Message] = []
            async with popping(namesrv, group, topic) as consumer, asyncio.timeout(DEADLINE_S):
                while len(got) < 4:
                    got += await consumer.receive(max_messages=1, wait_s=5)
                assert [message.body for message in got] == [b"3", b"2", b"1", b"0"]
                await consumer.ack(got)

    asyncio.run(main())
