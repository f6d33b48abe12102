"""Static topics: two brokers of the server, Apache's mqadmin and Java client, and this client, while queues move."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator

import pytest
from drivers import Driver, DriverError, Session, java_driver
from drivers import Producer as JavaProducer
from servers import Server, request

from client.both.conftest import SecondBroker
from client.inbox import Inbox
from skylark.client.errors import RocketMQError
from skylark.client.listening import RetryLater
from skylark.client.message import Message, MessageQueue
from skylark.client.producer import Producer
from skylark.client.pull_consumer import PullConsumer
from skylark.client.push_consumer import PushConsumer
from skylark.client.session import Session as ClientSession

GET_BROKER_CLUSTER_INFO = 106
LOGICAL = "__syslo__global__"
QUEUES = 4
DEADLINE_S = 90.0

Admin = Callable[..., str]


@pytest.fixture(scope="module")
def mqadmin(java: Driver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    driver = java_driver("5.5.0", tmp_path_factory.mktemp("mqadmin"), "skylark.AdminDriver")
    yield driver
    driver.close()


@pytest.fixture
def admin(mqadmin: Driver, namesrv: str) -> Admin:
    def run(*command: str) -> str:
        output: str = mqadmin.call("admin", args="\n".join([*command, "-n", namesrv]))["output"]
        assert "\tat " not in output, output  # a stack trace
        return output

    return run


@pytest.fixture
def first_broker(server: Server, second_broker: SecondBroker) -> str:
    """The name of the server's own broker."""
    _, body = request(server.namesrv_addr, GET_BROKER_CLUSTER_INFO, {})
    text = body.decode().replace("{0:", '{"0":')
    [name] = set(json.loads(text)["brokerAddrTable"]) - {second_broker.name}
    return name


async def produce(send: Callable[[str], asyncio.Future[None]], prefix: str, wanted: asyncio.Event) -> list[str]:
    """Sends numbered bodies until nobody wants more; those whose send succeeded."""
    sent = []
    for number in itertools.count():
        if not wanted.is_set():
            break
        body = f"{prefix}-{number}"
        try:
            await send(body)
        except (DriverError, RocketMQError):
            await asyncio.sleep(0.1)  # its queue has just moved
            continue
        sent.append(body)
        await asyncio.sleep(0.005)
    return sent


def test_queues_move_under_load(
    namesrv: str, admin: Admin, first_broker: str, second_broker: SecondBroker, java_session: Session, topic: str,
    group: str,
) -> None:  # fmt: skip
    async def main() -> None:
        await asyncio.to_thread(admin, "updateStaticTopic", "-t", topic, "-qn", str(QUEUES), "-b", first_broker)
        inbox = Inbox()
        session = ClientSession(namesrv)
        consumer = PushConsumer(group=f"{group}_python", session=session, listener=inbox, from_where="first")
        consumer.subscribe(topic)
        java = java_session.consumer(f"{group}_java", topic)
        java_producer = java_session.producer(f"{group}_p")
        async with consumer, Producer(session=session) as producer:
            assert {q for q in consumer.queues if q.topic == topic} == {
                MessageQueue(LOGICAL, number, topic) for number in range(QUEUES)
            }
            await asyncio.to_thread(java.await_queues, QUEUES)

            def by_java(body: str) -> asyncio.Future[None]:
                return asyncio.ensure_future(asyncio.to_thread(send_with_java, java_producer, topic, body))

            def by_python(body: str) -> asyncio.Future[None]:
                return asyncio.ensure_future(send_with_python(producer, topic, body))

            wanted = asyncio.Event()
            wanted.set()
            producing = asyncio.gather(produce(by_java, "java", wanted), produce(by_python, "python", wanted))
            await inbox.wait(40)
            await asyncio.to_thread(admin, "remappingStaticTopic", "-t", topic, "-b", second_broker.name)
            await inbox.wait(len(inbox.messages) + 40)
            both = f"{first_broker},{second_broker.name}"
            await asyncio.to_thread(admin, "remappingStaticTopic", "-t", topic, "-b", both)
            await inbox.wait(len(inbox.messages) + 40)
            wanted.clear()
            sent = {body for bodies in await producing for body in bodies}
            await inbox.until(lambda: {message.body.decode() for message in inbox.messages} >= sent)
            seen: set[str] = set()
            while not seen >= sent:
                seen |= {event["body"] for event in await asyncio.to_thread(java.take, 1)}
            assert {message.broker for message in inbox.messages} == {LOGICAL}
            assert {message.queue_id for message in inbox.messages} == set(range(QUEUES))
        await check_offsets(namesrv, f"{group}_python", topic, len(sent))

    asyncio.run(main())


def send_with_java(producer: JavaProducer, topic: str, body: str) -> None:
    [result] = producer.send(topic, body)
    assert result["queue"] in range(QUEUES)


async def send_with_python(producer: Producer, topic: str, body: str) -> None:
    receipt = await producer.send(topic, body.encode())
    assert receipt.queue.broker_name == LOGICAL


async def check_offsets(namesrv: str, group: str, topic: str, count: int) -> None:
    """A reader from the begin finds everything in rising order, up to where the group has committed."""
    async with PullConsumer(namesrv, group) as reader:
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
            assert await reader.committed(queue) == end
            assert await reader.offset_for_time(queue, 0) == offsets[0]
            total += len(offsets)
        assert total >= count


def test_a_failed_message_of_a_logical_queue_comes_again(
    namesrv: str, admin: Admin, first_broker: str, second_broker: SecondBroker, java_session: Session, topic: str,
    group: str,
) -> None:  # fmt: skip
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
            await inbox.wait(4)
            assert sorted(inbox.bodies) == [b"m0", b"m0", b"m1", b"m1"]
            await ordered.wait(2)

    asyncio.run(main())
