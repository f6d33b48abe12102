"""The producer against both servers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from client.inbox import DEADLINE_S
from client.plain import create_topic
from skylark.client.errors import BrokerError, NotReachable, RocketMQError
from skylark.client.message import Message, MessageQueue, OutgoingMessage, Receipt, SendStatus
from skylark.client.producer import Producer
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import PullMessage, ViewMessage
from skylark.wire.records import decode_record, decode_records, parse_message_id
from skylark.wire.typed import encode_header

if TYPE_CHECKING:
    from drivers import Session as JavaSession

    from client.both.conftest import SecondBroker


async def view(producer: Producer, receipt: Receipt) -> Message:
    """The message as the broker stored it."""
    _, offset = parse_message_id(receipt.offset_msg_id)
    request = Frame(RequestCode.VIEW_MESSAGE_BY_ID, encode_header(ViewMessage(offset)))
    answer = await producer.session.ask_broker(receipt.queue.broker_name, request, DEADLINE_S)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return Message.from_record(decode_record(answer.body), receipt.queue.broker_name)


async def first_message(producer: Producer, queue: MessageQueue) -> Message:
    """Waits, by long polling, until the queue has a message."""
    header = PullMessage("readers", queue.topic, queue.queue_id, 0, 32, 2 | 4, 0, 10_000, 0, subscription="*")
    while True:
        request = Frame(RequestCode.PULL_MESSAGE, encode_header(header))
        answer = await producer.session.ask_broker(queue.broker_name, request, DEADLINE_S)
        if answer.code == ResponseCode.SUCCESS:
            return Message.from_record(next(decode_records(answer.body)), queue.broker_name)


def test_a_message_is_stored_as_it_was_sent(namesrv: str, topic: str) -> None:
    async def run() -> None:
        async with Producer(namesrv, group="senders", timeout_s=DEADLINE_S) as producer:
            receipt = await producer.send(
                topic, "grüße".encode(), tag="new", key=["42", "43"], properties={"colour": "röt"}, flag=7
            )
            assert receipt.status is SendStatus.OK
            assert receipt.queue.topic == topic
            assert receipt.queue_offset == 0
            message = await view(producer, receipt)
            assert message.body.decode() == "grüße"
            assert (message.topic, message.queue_id, message.queue_offset) == (topic, receipt.queue.queue_id, 0)
            assert (message.tag, message.keys, message.flag) == ("new", ["42", "43"], 7)
            assert message.properties["colour"] == "röt"
            assert (message.msg_id, message.offset_msg_id) == (receipt.msg_id, receipt.offset_msg_id)
            assert message.born_at <= message.stored_at

    asyncio.run(run())


def test_queues_take_turns(namesrv: str, topic: str) -> None:
    async def run() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S) as producer:
            await create_topic(producer.session, topic, 4)
            receipts = [await producer.send(topic, b"x") for _ in range(12)]
            assert Counter(receipt.queue.queue_id for receipt in receipts) == dict.fromkeys(range(4), 3)
            assert all((after.queue.queue_id - before.queue.queue_id) % 4 == 1 for before, after in pairwise(receipts))

    asyncio.run(run())


def test_a_message_goes_to_the_queue_that_is_asked_for(namesrv: str, topic: str) -> None:
    async def run() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S) as producer:
            await create_topic(producer.session, topic, 4)
            queues = await producer.queues(topic)
            receipt = await producer.send(topic, b"x", queue=queues[2])
            assert receipt.queue == queues[2]
            receipt = await producer.send(topic, b"x", select=lambda queues, number: queues[number], arg=3)
            assert receipt.queue == queues[3]
            same = [await producer.send(topic, b"x", ordering_key="customer-7") for _ in range(3)]
            assert len({receipt.queue for receipt in same}) == 1
            assert [receipt.queue_offset - same[0].queue_offset for receipt in same] == [0, 1, 2]
            assert (await view(producer, same[0])).properties["__SHARDINGKEY"] == "customer-7"

    asyncio.run(run())


def test_a_batch_is_split_at_the_size_limit(namesrv: str, topic: str) -> None:
    async def run() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S, max_message_bytes=4096) as producer:
            await create_topic(producer.session, topic, 1)
            bodies = [bytes([number]) * 1000 for number in range(1, 11)]
            messages = [OutgoingMessage(body, tag=f"tag{body[0]}", key=f"key{body[0]}") for body in bodies]
            receipts = await producer.send_batch(topic, messages)
            assert [receipt.queue_offset for receipt in receipts] == [*range(10)]
            assert len({receipt.msg_id for receipt in receipts}) == 10
            for receipt, sent in zip(receipts, messages, strict=True):
                message = await view(producer, receipt)
                assert (message.body, message.tag, message.keys) == (sent.body, sent.tag, [sent.key])
                assert message.msg_id == receipt.msg_id

    asyncio.run(run())


def test_a_oneway_message_arrives(namesrv: str, topic: str) -> None:
    async def run() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S) as producer:
            (queue,) = await create_topic(producer.session, topic, 1)
            await producer.send_oneway(topic, b"x", queue=queue)
            async with asyncio.timeout(DEADLINE_S):
                assert (await first_message(producer, queue)).body == b"x"

    asyncio.run(run())


@pytest.mark.parametrize("codec", ["zlib", "lz4", "zstd"])
def test_large_bodies_are_compressed(namesrv: str, topic: str, codec: str) -> None:
    async def run() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S, compression=codec) as producer:
            body = b"all work and no play " * 1000
            message = await view(producer, await producer.send(topic, body))
            assert message.body == body
            assert message.size_bytes < 2000
            plain = await view(producer, await producer.send(topic, body, compress=False))
            assert plain.body == body
            assert plain.size_bytes > len(body)

    asyncio.run(run())


@pytest.mark.parametrize("codec", ["zlib", "lz4", "zstd"])
def test_apaches_client_reads_what_is_sent(
    namesrv: str, topic: str, group: str, codec: str, java_session: JavaSession
) -> None:
    body = "all work and no play " * 1000

    async def run() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S, compression=codec) as producer:
            await create_topic(producer.session, topic, 1)
            await producer.send(topic, body.encode(), tag="new", key="42", properties={"colour": "red"})
            await producer.send_batch(topic, [b"one", OutgoingMessage(b"two", tag="new")])

    asyncio.run(run())
    consumer = java_session.consumer(group, topic, from_="first")
    large, *small = sorted(consumer.take(3), key=lambda event: -len(event["body"]))  # listeners run side by side
    assert (large["body"], large["tags"], large["keys"]) == (body, "new", "42")
    assert large["properties"]["colour"] == "red"
    assert {event["body"] for event in small} == {"one", "two"}


def test_many_are_in_flight_and_no_more_than_allowed(namesrv: str, topic: str) -> None:
    async def run() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S, max_in_flight=50) as producer:
            await create_topic(producer.session, topic, 4)
            futures: list[asyncio.Future[Receipt]] = []
            for number in range(500):
                futures.append(await producer.send_soon(topic, str(number).encode()))
                assert sum(not future.done() for future in futures) <= 50
            await producer.flush()
            places = {(future.result().queue.queue_id, future.result().queue_offset) for future in futures}
            assert places == {(queue_id, offset) for queue_id in range(4) for offset in range(125)}

    asyncio.run(run())


def test_a_delayed_message_waits_at_the_broker(namesrv: str, topic: str) -> None:
    async def run() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S) as producer:
            (queue,) = await create_topic(producer.session, topic, 1)
            message = await view(producer, await producer.send(topic, b"later", delay_level=1))
            assert message.topic == "SCHEDULE_TOPIC_XXXX"
            assert message.properties["REAL_TOPIC"] == topic
            async with asyncio.timeout(DEADLINE_S):
                assert (await first_message(producer, queue)).body == b"later"

    asyncio.run(run())


def test_the_brokers_refusal_is_told(namesrv: str, topic: str) -> None:
    async def run() -> None:
        async with Producer(
            namesrv, timeout_s=DEADLINE_S, max_message_bytes=8 << 20, compression=None, retries=0
        ) as producer:
            with pytest.raises(BrokerError) as caught:
                await producer.send(topic, random.Random(1).randbytes(5 << 20))
            assert caught.value.code == ResponseCode.MESSAGE_ILLEGAL
            assert caught.value.remark
            assert (await producer.send(topic, b"x")).status is SendStatus.OK

    asyncio.run(run())


def test_sends_go_on_at_the_other_broker(namesrv: str, topic: str, second_broker: SecondBroker) -> None:
    async def run() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S) as producer:
            await create_topic(producer.session, topic, 4)
            receipts = [await producer.send(topic, b"x") for _ in range(8)]
            assert len({receipt.queue.broker_name for receipt in receipts}) == 2

            second_broker.kill()
            futures = [await producer.send_soon(topic, str(number).encode()) for number in range(200)]
            receipts = await asyncio.gather(*futures)
            assert {receipt.status for receipt in receipts} == {SendStatus.OK}
            assert second_broker.name not in {receipt.queue.broker_name for receipt in receipts}

    asyncio.run(run())


def test_nothing_acknowledged_is_lost_when_a_broker_is_killed_meanwhile(
    namesrv: str, topic: str, second_broker: SecondBroker
) -> None:
    async def run() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S, max_in_flight=64) as producer:
            await create_topic(producer.session, topic, 2)
            futures: list[asyncio.Future[Receipt]] = []
            for number in range(600):
                if number == 300:
                    second_broker.kill()
                futures.append(await producer.send_soon(topic, str(number).encode()))
            receipts = await asyncio.gather(*futures)
            survivors = [receipt for receipt in receipts if receipt.queue.broker_name != second_broker.name]
            assert len({(receipt.queue, receipt.queue_offset) for receipt in survivors}) == len(survivors) > 300
            for receipt in random.Random(2).sample(survivors, 20):
                assert (await view(producer, receipt)).msg_id == receipt.msg_id

    asyncio.run(run())


def test_a_broker_that_comes_back_is_used_again(namesrv: str, topic: str, second_broker: SecondBroker) -> None:
    async def run() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S) as producer:
            queues = await create_topic(producer.session, topic, 1)
            (queue,) = [queue for queue in queues if queue.broker_name == second_broker.name]
            await producer.send(topic, b"before", queue=queue)
            second_broker.kill()
            with pytest.raises(NotReachable):  # a send waits for a broker that is away until its time is over
                await producer.send(topic, b"meanwhile", queue=queue, timeout_s=5.0)
            await asyncio.to_thread(second_broker.start)
            receipt = await producer.send(topic, b"after", queue=queue)
            assert receipt.queue == queue
            assert (await view(producer, receipt)).body == b"after"

    asyncio.run(run())


def test_wrong_messages_are_refused_before_they_are_sent(namesrv: str, topic: str) -> None:
    async def run() -> None:
        async with Producer(namesrv, timeout_s=DEADLINE_S) as producer:
            for wrong in ({"topic": "a b"}, {"topic": "t" * 128}, {"body": b""}, {"body": bytes((4 << 20) + 1)}):
                with pytest.raises(ValueError, match=r"allowed|at least"):
                    await producer.send(**({"topic": topic, "body": b"x"} | wrong))  # type: ignore[arg-type]
            with pytest.raises(RocketMQError):
                await producer.send_batch(topic, [b"x", b""])
            assert producer.session.routes.known_for_send(topic) is None, "nothing was asked for, either"

    asyncio.run(run())
