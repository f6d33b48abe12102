"""Push consumers against Skylark and against Apache RocketMQ."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from client.inbox import DEADLINE_S, Inbox, eventually, numbered
from client.plain import create_topic, send
from skylark.client import allocate
from skylark.client.errors import BrokerError
from skylark.client.listening import Acked, RetryLater, Suspend
from skylark.client.message import Message, MessageQueue
from skylark.client.offsets import RemoteOffsets
from skylark.client.producer import Producer
from skylark.client.push_consumer import PushConsumer
from skylark.client.session import Session
from skylark.wire import fastjson
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame

if TYPE_CHECKING:
    from client.both.conftest import SecondBroker


@asynccontextmanager
async def member(namesrv: str, group: str, topic: str, listener: Any, **options: Any) -> AsyncIterator[PushConsumer]:
    tag = options.pop("tag", "*")
    options.setdefault("from_where", "first")
    consumer = PushConsumer(namesrv, group, listener=listener, **options)
    consumer.subscribe(topic, tag)
    async with consumer:
        yield consumer


def owned(consumer: PushConsumer, topic: str) -> set[MessageQueue]:
    return {queue for queue in consumer.queues if queue.topic == topic}


async def fill(session: Session, queues: list[MessageQueue], bodies: list[bytes], tag: str | None = None) -> None:
    """Message after message to one queue after the other."""
    for number, body in enumerate(bodies):
        await send(session, queues[number % len(queues)], body, tag=tag)


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize(
    "strategy",
    [allocate.average, allocate.average_by_circle, allocate.consistent_hash()],
    ids=["avg", "circle", "hash"],
)
def test_members_share_the_messages(
    namesrv: str, topic: str, group: str, orderly: bool, strategy: allocate.Strategy
) -> None:
    async def main() -> None:
        inbox = Inbox()
        async with Session(namesrv) as session, AsyncExitStack() as stack:
            queues = await create_topic(session, topic, 8)
            members = [
                await stack.enter_async_context(
                    member(namesrv, group, topic, inbox, orderly=orderly, strategy=strategy, rebalance_interval_s=1)
                )
                for _ in range(3)
            ]
            ids = sorted((each.client_id for each in members), key=allocate.java_order)
            for each in members:
                share = set(strategy(each.client_id, queues, ids))
                await eventually(lambda each=each, share=share: owned(each, topic) == share)
            await fill(session, queues, numbered(80))
            await inbox.wait(80)
            assert sorted(inbox.bodies) == sorted(numbered(80))
            if orderly:
                for queue_id in range(8):
                    assert inbox.in_queue(queue_id) == numbered(80)[queue_id::8]

    asyncio.run(main())


def test_a_group_goes_on_where_it_stopped(namesrv: str, topic: str, group: str) -> None:
    async def main() -> None:
        first, second = Inbox(), Inbox()
        async with Session(namesrv) as session:
            queues = await create_topic(session, topic)
            await fill(session, queues, numbered(20))
            async with member(namesrv, group, topic, first):
                await first.wait(20)
            await fill(session, queues, numbered(8, "later"))
            async with member(namesrv, group, topic, second):
                await second.wait(8)
        assert sorted(second.bodies) == sorted(numbered(8, "later"))

    asyncio.run(main())


def test_broadcasting_gives_every_member_everything_and_remembers_it(
    namesrv: str, topic: str, group: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with Session(namesrv) as session:
            queues = await create_topic(session, topic)
            await fill(session, queues, numbered(12))
            for round_ in range(2):
                inboxes = [Inbox(), Inbox()]
                async with AsyncExitStack() as stack:
                    for number, inbox in enumerate(inboxes):
                        own = Session(namesrv, instance=f"{group}-{number}")
                        await stack.enter_async_context(
                            member(
                                namesrv,
                                group,
                                topic,
                                inbox,
                                session=own,
                                model="broadcasting",
                                offsets_directory=tmp_path,
                            )
                        )
                    if round_:
                        await fill(session, queues, numbered(4, "again"))
                    for inbox in inboxes:
                        await inbox.wait(4 if round_ else 12)
                        assert sorted(inbox.bodies) == sorted(numbered(4, "again") if round_ else numbered(12))

    asyncio.run(main())
    assert len(list(tmp_path.glob("*/*/offsets.json"))) == 2


def test_tags_and_a_filter_of_ones_own(namesrv: str, topic: str, group: str) -> None:
    async def main() -> None:
        inbox = Inbox()
        async with Session(namesrv) as session:
            queues = await create_topic(session, topic, 2)
            # The last message of each queue is one of those wanted: what follows it is only passed when a wait ends.
            for number in range(28):
                await send(session, queues[number % 2], b"%d" % number, tag="abc"[number % 3])
            consumer = PushConsumer(namesrv, group, listener=inbox, from_where="first")
            consumer.subscribe(topic, "a || c", filter=lambda message: int(message.body) < 15)
            async with consumer:
                await inbox.wait(10)
                offsets = RemoteOffsets(session, group)
                await eventually(lambda: len(consumer.positions(topic)) == 2)
                await eventually(lambda: sum(consumer.positions(topic).values()) == 28)
            assert {int(body) for body in inbox.bodies} == {n for n in range(15) if n % 3 != 1}
            assert [await offsets.fetch(queue) for queue in queues] == [14, 14]

    asyncio.run(main())


def test_a_refused_message_comes_again(namesrv: str, topic: str, group: str) -> None:
    def answer(message: Message) -> object:
        return RetryLater(1) if message.reconsume_times == 0 else None

    async def main() -> None:
        inbox = Inbox(answer)
        async with Producer(namesrv, "senders") as producer, Session(namesrv) as session:
            await create_topic(session, topic)
            receipt = await producer.send(topic, b"again", tag="a", key="k", properties={"mine": "kept"})
            async with member(namesrv, group, topic, inbox, tag="a"):
                first, second = await inbox.wait(2)
        assert [first.reconsume_times, second.reconsume_times] == [0, 1]
        assert (second.topic, second.body, second.tag, second.keys) == (topic, b"again", "a", ["k"])
        assert first.msg_id == second.msg_id == receipt.msg_id
        assert second.properties["mine"] == "kept"
        assert second.properties["ORIGIN_MESSAGE_ID"] == receipt.offset_msg_id

    asyncio.run(main())


@pytest.mark.parametrize("orderly", [False, True])
def test_a_message_refused_too_often_becomes_a_dead_letter(namesrv: str, topic: str, group: str, orderly: bool) -> None:
    async def main() -> None:
        inbox, letters = Inbox(lambda _: Suspend(0.01) if orderly else RetryLater(1)), Inbox()
        async with Session(namesrv) as session:
            queues = await create_topic(session, topic, 1)
            await send(session, queues[0], b"doomed", tag="a")
            async with member(namesrv, group, topic, inbox, orderly=orderly, max_reconsume_times=1):
                async with member(
                    namesrv, f"{group}_undertaker", f"%DLQ%{group}", letters, rebalance_interval_s=0.5
                ) as undertaker:
                    await inbox.wait(2)
                    await letters.wait(1)
                    assert undertaker.group == f"{group}_undertaker"
                assert [message.reconsume_times for message in inbox.messages][:2] == ([1, 1] if orderly else [0, 1])
                offsets = RemoteOffsets(session, group)
            assert await offsets.fetch(queues[0]) == 1
        [letter] = letters.messages
        assert (letter.body, letter.tag, letter.properties["RETRY_TOPIC"]) == (b"doomed", "a", topic)

    asyncio.run(main())


def test_an_orderly_consumer_stays_at_a_refused_message(namesrv: str, topic: str, group: str) -> None:
    seen: list[tuple[bytes, int]] = []

    def answer(message: Message) -> object:
        seen.append((message.body, message.reconsume_times))
        if message.reconsume_times < 2:
            raise Suspend(0.02)
        return True

    async def main() -> None:
        inbox = Inbox(answer)
        async with Session(namesrv) as session:
            queues = await create_topic(session, topic, 1)
            await fill(session, queues, numbered(3))
            async with member(namesrv, group, topic, inbox, orderly=True):
                await inbox.wait(9)
        assert seen == [(body, times) for body in numbered(3) for times in range(3)]

    asyncio.run(main())


def test_a_batch_may_be_acknowledged_in_part(namesrv: str, topic: str, group: str) -> None:
    batches: list[list[tuple[bytes, int]]] = []
    inbox_changed = threading.Event()

    def listen(messages: list[Message]) -> Acked | None:
        batches.append([(message.body, message.reconsume_times) for message in messages])
        inbox_changed.set()
        return Acked(2, delay_level=1) if messages[0].reconsume_times == 0 else None

    async def main() -> None:
        async with Session(namesrv) as session:
            queues = await create_topic(session, topic, 1)
            await fill(session, queues, numbered(4))
            async with member(namesrv, group, topic, listen, batch_size=8):
                await eventually(lambda: sum(len(batch) for batch in batches) >= 6)
        again = {body for batch in batches for body, times in batch if times == 1}
        assert again == {b"m2", b"m3"}

    asyncio.run(main())


def test_plain_functions_run_in_threads(namesrv: str, topic: str, group: str) -> None:
    together = threading.Barrier(4, timeout=DEADLINE_S)
    got: list[bytes] = []

    def listen(message: Message) -> None:
        together.wait()
        got.append(message.body)

    async def main() -> None:
        async with Session(namesrv) as session:
            queues = await create_topic(session, topic, 2)
            await fill(session, queues, numbered(8))
            async with member(namesrv, group, topic, listen, concurrency=4):
                await eventually(lambda: len(got) == 8)
        assert sorted(got) == sorted(numbered(8))

    asyncio.run(main())


def test_a_paused_consumer_gets_nothing(namesrv: str, topic: str, group: str) -> None:
    async def main() -> None:
        paused, witness = Inbox(), Inbox()
        async with Session(namesrv) as session:
            queues = await create_topic(session, topic, 1)
            async with (
                member(namesrv, group, topic, paused) as consumer,
                member(namesrv, f"{group}_witness", topic, witness),
            ):
                await fill(session, queues, numbered(1))
                await paused.wait(1)
                consumer.pause()
                await fill(session, queues, numbered(5, "later"))
                await witness.wait(6)
                assert len(paused.messages) == 1
                consumer.resume()
                await paused.wait(6)

    asyncio.run(main())


def test_where_a_new_group_starts(namesrv: str, topic: str, group: str) -> None:
    async def main() -> None:
        late = Inbox()
        async with Session(namesrv) as session:
            queues = await create_topic(session, topic, 1)
            await fill(session, queues, numbered(3, "old"))
            # A store keeps time in milliseconds.
            await asyncio.sleep(0.01)
            between = datetime.now(UTC)
            await asyncio.sleep(0.01)
            await fill(session, queues, numbered(3, "new"))
            async with member(namesrv, group, topic, late, from_where=between):
                await late.wait(3)
        assert late.bodies == numbered(3, "new")

    asyncio.run(main())


def test_an_offset_that_does_not_exist_is_corrected(namesrv: str, topic: str, group: str) -> None:
    async def main() -> None:
        inbox = Inbox()
        async with Session(namesrv) as session:
            queues = await create_topic(session, topic, 1)
            await fill(session, queues, numbered(5))
            async with member(namesrv, group, topic, Inbox()):
                pass
            offsets = RemoteOffsets(session, group)
            offsets.update(queues[0], 1_000)
            await offsets.persist(queues)
            async with member(namesrv, group, topic, inbox) as consumer:
                await eventually(lambda: consumer.positions(topic).get(queues[0]) == 5)
                await fill(session, queues, [b"after"])
                await inbox.wait(1)
            assert inbox.bodies == [b"after"]
            assert await offsets.fetch(queues[0]) == 6

    asyncio.run(main())


def test_an_operator_moves_a_group_back(namesrv: str, topic: str, group: str) -> None:
    async def main() -> None:
        inbox = Inbox()
        async with Session(namesrv) as session:
            queues = await create_topic(session, topic, 2)
            await fill(session, queues, numbered(10))
            async with member(namesrv, group, topic, inbox) as consumer:
                await inbox.wait(10)
                await consumer.commit()
                fields = {"topic": topic, "group": group, "timestamp": "0", "isForce": "true"}
                answer = await session.ask_broker(
                    queues[0].broker_name, Frame(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, fields)
                )
                assert answer.code == 0, answer.remark
                # The broker tells it with the next pull, so the waiting ones are woken.
                await fill(session, queues, numbered(2, "wake"))
                await inbox.until(lambda: all(inbox.bodies.count(body) == 2 for body in numbered(10)))

    asyncio.run(main())


@pytest.mark.parametrize("orderly", [False, True])
def test_operators_ask_a_consumer_through_its_broker(namesrv: str, topic: str, group: str, orderly: bool) -> None:
    def answer(message: Message) -> object:
        if message.body == b"bad":
            raise ValueError("not this one")
        return None

    async def main() -> None:
        inbox = Inbox(answer)
        async with Producer(namesrv, "senders") as producer, Session(namesrv) as session:
            queues = await create_topic(session, topic, 2)
            receipt = await producer.send(topic, b"good")
            async with member(namesrv, group, topic, inbox, orderly=orderly) as consumer:
                await inbox.wait(1)
                who = {"consumerGroup": group, "clientId": consumer.client_id}
                broker = queues[0].broker_name
                info = await session.ask_broker(broker, Frame(RequestCode.GET_CONSUMER_RUNNING_INFO, who))
                assert info.code == 0, info.remark
                told = fastjson.loads(info.body)
                assert {each["topic"] for each in told["subscriptionSet"]} >= {topic}
                assert len([queue for queue in told["mqTable"] if queue["topic"] == topic]) == 2
                assert told["properties"]["PROP_CONSUMEORDERLY"] == str(orderly).lower()
                directly = who | {"msgId": receipt.offset_msg_id, "brokerName": broker, "topic": topic}
                taken = await session.ask_broker(broker, Frame(RequestCode.CONSUME_MESSAGE_DIRECTLY, directly))
                assert taken.code == 0, taken.remark
                result = fastjson.loads(taken.body)
                assert (result["consumeResult"], result["order"]) == ("CR_SUCCESS", orderly)
                assert len(inbox.messages) == 2

    asyncio.run(main())


def test_a_filter_that_the_broker_refuses_fails_the_start(namesrv: str, topic: str, group: str) -> None:
    async def main() -> None:
        async with Session(namesrv) as session:
            await create_topic(session, topic, 1)
            consumer = PushConsumer(namesrv, group, listener=Inbox())
            consumer.subscribe(topic, sql="a > > 5")
            with pytest.raises(BrokerError):
                await consumer.start()

    asyncio.run(main())


def test_queues_move_as_members_come_and_go(namesrv: str, topic: str, group: str) -> None:
    """Nobody looks by itself whether the group changed: the broker has to tell."""

    async def main() -> None:
        inbox = Inbox()
        async with Session(namesrv) as session:
            queues = await create_topic(session, topic, 8)

            async def settled(members: list[PushConsumer], shares: list[int]) -> None:
                await eventually(lambda: [len(owned(each, topic)) for each in members] == shares)
                assert set().union(*(owned(each, topic) for each in members)) == set(queues)

            options = {"rebalance_interval_s": 600.0}
            async with member(namesrv, group, topic, inbox, **options) as first:
                await settled([first], [8])
                async with member(namesrv, group, topic, inbox, **options) as second:
                    members = sorted([first, second], key=lambda each: allocate.java_order(each.client_id))
                    await settled(members, [4, 4])
                    async with member(namesrv, group, topic, inbox, **options) as third:
                        members = sorted([*members, third], key=lambda each: allocate.java_order(each.client_id))
                        await settled(members, [3, 3, 2])
                        await fill(session, queues, numbered(24))
                        await inbox.wait(24)
                    await settled([first, second], [4, 4])
                await settled([first], [8])
                await fill(session, queues, numbered(16, "one"))
                await inbox.until(lambda: set(numbered(16, "one")) <= set(inbox.bodies))

    asyncio.run(main())


def test_a_large_message_comes_inflated(namesrv: str, topic: str, group: str) -> None:
    async def main() -> None:
        inbox = Inbox()
        async with Producer(namesrv, "senders") as producer, Session(namesrv) as session:
            await create_topic(session, topic, 1)
            await producer.send(topic, b"large " * 100_000)
            async with member(namesrv, group, topic, inbox):
                await inbox.wait(1)
        assert inbox.bodies == [b"large " * 100_000]

    asyncio.run(main())


def test_a_broker_goes_away_and_comes_back(namesrv: str, second_broker: SecondBroker, topic: str, group: str) -> None:
    async def main() -> None:
        inbox = Inbox()
        async with Session(namesrv) as session:
            queues = await create_topic(session, topic, 2)
            lasting = {queue for queue in queues if queue.broker_name != second_broker.name}
            assert len(queues) == 2 * len(lasting) == 4

            async def route_is(wanted: set[MessageQueue]) -> None:
                async with asyncio.timeout(DEADLINE_S):
                    while set((await session.routes.get(topic, refresh=True)).read_queues) != wanted:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)

            async with member(namesrv, group, topic, inbox, session=session) as consumer:
                await fill(session, queues, numbered(4))
                await inbox.wait(4)
                await asyncio.to_thread(second_broker.kill)
                await route_is(lasting)
                await eventually(lambda: owned(consumer, topic) == lasting)
                await fill(session, sorted(lasting, key=lambda queue: queue.queue_id), numbered(4, "without"))
                await inbox.until(lambda: set(numbered(4, "without")) <= set(inbox.bodies))

                await asyncio.to_thread(second_broker.start)
                await route_is(set(queues))
                await eventually(lambda: owned(consumer, topic) == set(queues))
                await fill(session, queues, numbered(4, "again"))
                await inbox.until(lambda: set(numbered(4, "again")) <= set(inbox.bodies))

    asyncio.run(main())
