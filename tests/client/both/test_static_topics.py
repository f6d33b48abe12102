"""Static topics: two brokers of the server, Apache's mqadmin and Java client, and this client, while queues move."""

from __future__ import annotations

import asyncio
import json

import pytest
from drivers import Session
from mqadmin import Admin, columns
from servers import Server, SkylarkServer, request

from client.both.conftest import SecondBroker
from client.both.traffic import Traffic
from client.inbox import DEADLINE_S, Inbox
from skylark.client import returning
from skylark.client.listening import RetryLater
from skylark.client.message import Message, MessageQueue
from skylark.client.producer import Producer
from skylark.client.pull_consumer import PullConsumer
from skylark.client.push_consumer import PushConsumer
from skylark.client.session import Session as ClientSession

GET_BROKER_CLUSTER_INFO = 106
LOGICAL = "__syslo__global__"
QUEUES = 4


@pytest.fixture
def first_broker(server: Server, second_broker: SecondBroker) -> str:
    """The name of the server's own broker."""
    _, body = request(server.namesrv_addr, GET_BROKER_CLUSTER_INFO, {})
    text = body.decode().replace("{0:", '{"0":')
    [name] = set(json.loads(text)["brokerAddrTable"]) - {second_broker.name}
    return name


def test_queues_move_under_load(
    server: Server, namesrv: str, admin: Admin, first_broker: str, second_broker: SecondBroker, java_session: Session,
    topic: str, group: str,
) -> None:  # fmt: skip
    async def main() -> None:
        admin("updateStaticTopic", "-t", topic, "-qn", str(QUEUES), "-b", first_broker)
        async with Traffic(namesrv, java_session, topic, group) as traffic:
            await traffic.more()
            owned = {queue for queue in traffic.consumer.queues if queue.topic == topic}
            assert owned == {MessageQueue(LOGICAL, number, topic) for number in range(QUEUES)}
            await asyncio.to_thread(traffic.java_consumer.await_queues, QUEUES)
            await asyncio.to_thread(admin, "remappingStaticTopic", "-t", topic, "-b", second_broker.name)
            await traffic.more()
            both = f"{first_broker},{second_broker.name}"
            await asyncio.to_thread(admin, "remappingStaticTopic", "-t", topic, "-b", both)
            await traffic.more()
            await traffic.stop()
            await traffic.all_consumed()
            assert {message.broker for message in traffic.inbox.messages} == {LOGICAL}
            assert {message.queue_id for message in traffic.inbox.messages} == set(range(QUEUES))
        await check_offsets(server, f"{group}_python", topic, len(traffic.sent))

    asyncio.run(main())


async def check_offsets(server: Server, group: str, topic: str, count: int) -> None:
    """A reader from the begin finds everything in rising order, up to where the group has committed.

    Apache's brokers were seen to fail in passing such an offset on ("cannot find addr for broker"), and to
    answer with one of another stretch of the queue afterwards: what they keep is not looked at.
    """
    async with PullConsumer(server.namesrv_addr, group) as reader:
        total = 0
        for queue in await reader.queues(topic):
            offset, end = await reader.min_offset(queue), await reader.max_offset(queue)
            offsets: list[int] = []
            async with asyncio.timeout(DEADLINE_S):
                while offset < end:
                    pulled = await reader.pull(queue, offset)
                    offsets += [message.queue_offset for message in pulled.messages]
                    assert pulled.next_offset > offset
                    offset = pulled.next_offset
            assert offsets == sorted(set(offsets))
            if isinstance(server, SkylarkServer):
                assert await reader.committed(queue) == end
            assert await reader.offset_for_time(queue, 0) == offsets[0]
            total += len(offsets)
        assert total >= count


def test_a_failed_message_of_a_logical_queue_comes_again(
    namesrv: str, admin: Admin, first_broker: str, second_broker: SecondBroker, java_session: Session, topic: str,
    group: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # It is sent anew, and would be due in 10 s.
    monkeypatch.setattr(returning, "_FIRST_RETRY_LEVEL", 1)

    def once_more(message: Message) -> object:
        return RetryLater(1) if not message.reconsume_times else None

    async def main() -> None:
        both = f"{first_broker},{second_broker.name}"
        await asyncio.to_thread(admin, "updateStaticTopic", "-t", topic, "-qn", "2", "-b", both)
        inbox = Inbox(once_more)
        session = ClientSession(namesrv)
        consumer = PushConsumer(group=group, session=session, listener=inbox, from_where="first", orderly=False)
        consumer.subscribe(topic)
        ordered = Inbox()
        orderly = PushConsumer(namesrv, f"{group}_o", listener=ordered, from_where="first", orderly=True)
        orderly.subscribe(topic)
        async with consumer, orderly, Producer(session=session) as producer:
            for queue in await producer.queues(topic):
                await producer.send(topic, b"m%d" % queue.queue_id, queue=queue)
            rows = columns(await asyncio.to_thread(admin, "topicStatus", "-t", topic))
            assert [row[:4] for row in rows if row[0] == LOGICAL] == [[LOGICAL, str(n), "0", "1"] for n in range(2)]
            await inbox.wait(4)
            assert sorted(inbox.bodies) == [b"m0", b"m0", b"m1", b"m1"]
            await ordered.wait(2)

    asyncio.run(main())
