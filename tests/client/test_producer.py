"""What a producer does when brokers are slow, refuse or go away: scripted brokers on real sockets."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from client.inbox import eventually
from client.scripted import HOST, never, refuses, scripted_cluster, stored
from skylark.client.choosing import select_by_hash
from skylark.client.errors import (
    BatchInterrupted,
    BrokerError,
    ClientClosed,
    ForkedProcess,
    InvalidMessage,
    NotReachable,
    RequestTimeout,
    RouteNotFound,
)
from skylark.client.message import MessageQueue, OutgoingMessage, SendStatus
from skylark.client.producer import Producer
from skylark.client.sending import SendContext, SendHook, Slots, UniqueIds
from skylark.client.session import Session
from skylark.net.server import bind
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.records import decode_batch, decode_properties

LONG_S = 30.0


def test_every_broker_gets_its_turn_from_the_start() -> None:
    async def run() -> None:
        async with scripted_cluster("a", "b", orders=1) as cluster, Producer(cluster.namesrv) as producer:
            for _ in range(6):
                await producer.send("orders", b"x", timeout_s=LONG_S)
            assert [len(broker.sends) for broker in cluster.brokers] == [3, 3]

    asyncio.run(run())


def test_a_send_goes_to_another_broker_when_one_refuses() -> None:
    async def run() -> None:
        async with scripted_cluster("a", "b", orders=2) as cluster, Producer(cluster.namesrv) as producer:
            cluster.brokers[0].answer = refuses(ResponseCode.SYSTEM_BUSY)
            for _ in range(8):
                assert (await producer.send("orders", b"x", timeout_s=LONG_S)).queue.broker_name == "b"
            assert cluster.brokers[0].sends

    asyncio.run(run())


@pytest.mark.parametrize("code", [ResponseCode.MESSAGE_ILLEGAL, ResponseCode.NO_MESSAGE])
def test_a_refusal_for_the_messages_own_fault_is_final(code: int) -> None:
    async def run() -> None:
        async with scripted_cluster("a", "b", orders=1) as cluster, Producer(cluster.namesrv) as producer:
            for broker in cluster.brokers:
                broker.answer = refuses(code, "too long")
            with pytest.raises(BrokerError, match="too long") as caught:
                await producer.send("orders", b"x", timeout_s=LONG_S)
            assert (caught.value.code, caught.value.remark) == (code, "too long")
            assert sum(len(broker.sends) for broker in cluster.brokers) == 1

    asyncio.run(run())


def test_retries_end() -> None:
    async def run() -> None:
        async with scripted_cluster("a", "b", orders=1) as cluster, Producer(cluster.namesrv) as producer:
            for broker in cluster.brokers:
                broker.answer = refuses(ResponseCode.SYSTEM_ERROR, "broken")
            with pytest.raises(BrokerError, match="broken") as caught:
                await producer.send("orders", b"x", timeout_s=LONG_S)
            assert sum(len(broker.sends) for broker in cluster.brokers) == 3
            assert any("3 times" in note for note in caught.value.__notes__)
            ids = {decode_properties(send.fields["i"])["UNIQ_KEY"] for b in cluster.brokers for send in b.sends}
            assert len(ids) == 1, "every attempt carries the same id"

    asyncio.run(run())


def test_a_connection_that_breaks_is_not_the_end() -> None:
    async def run() -> None:
        async with scripted_cluster("a", "b", orders=1) as cluster, Producer(cluster.namesrv) as producer:

            def hang_up(request: Frame) -> None:
                for broker in cluster.brokers:
                    broker.answer = stored
                for connection in cluster.brokers[0].connections + cluster.brokers[1].connections:
                    connection.abort()

            for broker in cluster.brokers:
                broker.answer = hang_up
            assert (await producer.send("orders", b"x", timeout_s=LONG_S)).status is SendStatus.OK

    asyncio.run(run())


def test_the_timeout_bounds_the_whole_call() -> None:
    async def run() -> None:
        async with scripted_cluster("a", "b", orders=1) as cluster, Producer(cluster.namesrv) as producer:
            for broker in cluster.brokers:
                broker.answer = never
            with pytest.raises(RequestTimeout):
                await producer.send("orders", b"x", timeout_s=0.05)
            assert sum(len(broker.sends) for broker in cluster.brokers) <= 1

    asyncio.run(run())


def test_a_name_server_that_does_not_answer_is_named() -> None:
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            address = f"127.0.0.1:{mute.getsockname()[1]}"
            async with Producer(address) as producer:
                with pytest.raises(RequestTimeout, match=f"{address}.* told in time where topic 'orders' is"):
                    await producer.send("orders", b"x", timeout_s=0.05)

    asyncio.run(run())


def test_an_attempt_may_have_a_timeout_of_its_own() -> None:
    async def run() -> None:
        async with (
            scripted_cluster("a", "b", orders=1) as cluster,
            Producer(cluster.namesrv, attempt_timeout_s=0.5, retries=20, timeout_s=LONG_S) as producer,
        ):
            cluster.brokers[0].answer = never
            receipts = [await producer.send("orders", b"x") for _ in range(4)]
            assert {receipt.queue.broker_name for receipt in receipts} == {"b"}
            assert cluster.brokers[0].sends

    asyncio.run(run())


def test_a_slow_broker_is_avoided() -> None:
    async def run() -> None:
        async with (
            scripted_cluster("a", "b", orders=2) as cluster,
            Producer(
                cluster.namesrv, avoid_slow_brokers=True, attempt_timeout_s=2, retries=20, timeout_s=LONG_S
            ) as producer,
        ):
            cluster.brokers[0].answer = never
            for _ in range(8):
                assert (await producer.send("orders", b"x")).queue.broker_name == "b"
            assert len(cluster.brokers[0].sends) == 1

    asyncio.run(run())


def test_a_bound_message_is_not_sent_elsewhere() -> None:
    async def run() -> None:
        async with scripted_cluster("a", "b", orders=1) as cluster, Producer(cluster.namesrv) as producer:
            for broker in cluster.brokers:
                broker.answer = refuses(ResponseCode.SYSTEM_BUSY)
            (first, _) = await producer.queues("orders")
            with pytest.raises(BrokerError):
                await producer.send("orders", b"x", queue=first, timeout_s=LONG_S)
            assert [len(broker.sends) for broker in cluster.brokers] == [1, 0]

    asyncio.run(run())


def test_a_single_broker_that_restarts_elsewhere_is_found() -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster, Producer(cluster.namesrv) as producer:
            (broker,) = cluster.brokers
            await producer.send("orders", b"x", timeout_s=LONG_S)
            await broker.stop()
            broker.port = 0
            await broker.start()
            assert (await producer.send("orders", b"y", timeout_s=LONG_S)).status is SendStatus.OK

    asyncio.run(run())


def test_a_stored_but_unsafe_message_is_told_or_sent_again() -> None:
    async def run() -> None:
        async with scripted_cluster("a", "b", orders=1) as cluster:

            def unflushed(request: Frame) -> Frame:
                answer = stored(request)
                answer.code = ResponseCode.FLUSH_DISK_TIMEOUT
                return answer

            for broker in cluster.brokers:
                broker.answer = unflushed
            async with Producer(cluster.namesrv) as producer:
                receipt = await producer.send("orders", b"x", timeout_s=LONG_S)
                assert receipt.status is SendStatus.FLUSH_DISK_TIMEOUT
            cluster.brokers[1].answer = stored
            async with Producer(cluster.namesrv, retry_not_stored=True) as producer:
                for _ in range(2):
                    receipt = await producer.send("orders", b"x", timeout_s=LONG_S)
                    assert (receipt.status, receipt.queue.broker_name) == (SendStatus.OK, "b")

    asyncio.run(run())


def test_a_missing_topic_says_what_to_do() -> None:
    async def run() -> None:
        async with scripted_cluster("a") as cluster, Producer(cluster.namesrv) as producer:
            with pytest.raises(RouteNotFound, match=r"or its broker is down, .* autoCreateTopicEnable"):
                await producer.send("orders", b"x")
            cluster.topics["TBW102"] = 8
            receipt = await producer.send("orders", b"x", timeout_s=LONG_S)
            assert receipt.queue.queue_id < 4

    asyncio.run(run())


def test_no_name_server_is_said() -> None:
    async def run() -> None:
        with bind(HOST, 0) as nobody_listens:
            async with Producer(f"{HOST}:{nobody_listens.getsockname()[1]}") as producer:
                with pytest.raises(NotReachable, match="name server"):
                    await producer.send("orders", b"x")

    asyncio.run(run())


def test_what_is_in_flight_is_bounded() -> None:
    async def run() -> None:
        async with (
            scripted_cluster("a", orders=1) as cluster,
            Producer(cluster.namesrv, max_in_flight=3, timeout_s=LONG_S) as producer,
        ):
            (broker,) = cluster.brokers
            gate = asyncio.Event()

            async def later(request: Frame) -> Frame:
                await gate.wait()
                return stored(request)

            broker.answer = later
            futures = [await producer.send_soon("orders", b"x") for _ in range(3)]
            with pytest.raises(RequestTimeout, match="max_in_flight"):
                await producer.send("orders", b"x", timeout_s=0.01)
            fourth = asyncio.create_task(producer.send_soon("orders", b"x"))
            await broker.until(RequestCode.SEND_MESSAGE_V2)
            assert not fourth.done()
            gate.set()
            futures.append(await fourth)
            await producer.flush()
            assert all(future.done() for future in futures)
            assert len(broker.sends) == 4

    asyncio.run(run())


def test_a_cancelled_call_gives_its_place_back() -> None:
    async def run() -> None:
        async with (
            scripted_cluster("a", orders=1) as cluster,
            Producer(cluster.namesrv, max_in_flight=1, timeout_s=LONG_S) as producer,
        ):
            (broker,) = cluster.brokers
            await producer.send("orders", b"x")
            broker.answer = never
            call = asyncio.create_task(producer.send("orders", b"x", timeout_s=0.1))
            await eventually(lambda: len(broker.sends) == 2 or call.done())
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            broker.answer = stored
            assert (await producer.send("orders", b"x")).status is SendStatus.OK

    asyncio.run(run())


def test_closing_waits_for_what_is_on_its_way() -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster:
            async with Producer(cluster.namesrv, timeout_s=LONG_S) as producer:
                futures = [await producer.send_soon("orders", b"x") for _ in range(20)]
            assert [future.result().status for future in futures] == [SendStatus.OK] * 20
            with pytest.raises(ClientClosed):
                await producer.send("orders", b"x")
            (left,) = (frame for frame in cluster.brokers[0].others if frame.code == RequestCode.UNREGISTER_CLIENT)
            assert left.fields["producerGroup"] == "DEFAULT_PRODUCER"

    asyncio.run(run())


def test_a_batch_that_stops_in_the_middle_says_what_is_stored() -> None:
    async def run() -> None:
        async with (
            scripted_cluster("a", orders=1) as cluster,
            Producer(cluster.namesrv, max_message_bytes=1000, timeout_s=LONG_S) as producer,
        ):
            (broker,) = cluster.brokers

            def first_only(request: Frame) -> Frame:
                return (
                    stored(request) if len(broker.sends) == 1 else request.reply(ResponseCode.MESSAGE_ILLEGAL, "full")
                )

            broker.answer = first_only
            with pytest.raises(BatchInterrupted, match="2 of 4 messages") as caught:
                await producer.send_batch("orders", [bytes([65 + number]) * 400 for number in range(4)])
            assert [receipt.queue_offset for receipt in caught.value.receipts] == [5, 6]
            with pytest.raises(InvalidMessage, match="message 1 takes"):
                await producer.send_batch("orders", [b"x", b"y" * 990])
            assert len(broker.sends) == 2, "nothing of a wrong batch is sent"
            assert [len(decode_batch(send.body)) for send in broker.sends] == [2, 2]

    asyncio.run(run())


def test_hooks_see_every_attempt_and_may_add_properties() -> None:
    class Recorder(SendHook):
        def __init__(self) -> None:
            self.seen: list[tuple[str, int, bool]] = []

        def before_send(self, context: SendContext) -> None:
            context.properties["traced"] = "yes"
            self.seen.append(("before", context.attempt, False))

        def after_send(self, context: SendContext) -> None:
            self.seen.append(("after", context.attempt, context.error is not None))
            raise RuntimeError("a hook's own trouble")

    async def run() -> None:
        hook = Recorder()
        async with (
            scripted_cluster("a", "b", orders=1) as cluster,
            Producer(cluster.namesrv, hooks=[hook], timeout_s=LONG_S) as producer,
        ):
            queues = await producer.queues("orders")
            receipt = await producer.send("orders", b"x", queue=queues[0])
            assert receipt.status is SendStatus.OK
            assert hook.seen == [("before", 1, False), ("after", 1, False)]
            hook.seen.clear()
            cluster.brokers[0].answer = cluster.brokers[1].answer = refuses(ResponseCode.SYSTEM_BUSY)
            with pytest.raises(BrokerError):
                await producer.send("orders", b"x")
            assert [attempt for _, attempt, _ in hook.seen] == [1, 1, 2, 2, 3, 3]
            assert all(
                decode_properties(send.fields["i"])["traced"] == "yes" for b in cluster.brokers for send in b.sends
            )

    asyncio.run(run())


def test_two_producers_share_a_session() -> None:
    async def run() -> None:
        async with (
            scripted_cluster("a", orders=1) as cluster,
            Session(cluster.namesrv, instance="shared") as session,
            Producer(group="one", session=session) as one,
            Producer(group="two", session=session) as two,
        ):
            await one.send("orders", b"x", timeout_s=LONG_S)
            await two.send("orders", b"x", timeout_s=LONG_S)
            assert len(cluster.brokers[0].connections) == 1
            assert session.client_id.endswith("@shared")

    asyncio.run(run())


def test_after_a_fork_the_child_is_told() -> None:
    told, untold = 42, 43

    async def run() -> int:
        async with scripted_cluster("a", orders=1) as cluster, Producer(cluster.namesrv) as producer:
            await producer.send("orders", b"x", timeout_s=LONG_S)
            pid = os.fork()
            if pid == 0:
                try:
                    asyncio.run(producer.send("orders", b"x"))
                except ForkedProcess:
                    os._exit(told)
                finally:
                    os._exit(untold)
            _, status = await asyncio.to_thread(os.waitpid, pid, 0)
            assert (await producer.send("orders", b"x", timeout_s=LONG_S)).status is SendStatus.OK
            return os.waitstatus_to_exitcode(status)

    assert asyncio.run(run()) == told


def test_arguments_that_exclude_each_other() -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster, Producer(cluster.namesrv) as producer:
            (queue,) = await producer.queues("orders")
            with pytest.raises(InvalidMessage, match="exclude"):
                await producer.send("orders", b"x", queue=queue, ordering_key="k")
            with pytest.raises(InvalidMessage, match="not a queue of topic"):
                await producer.send("orders", b"x", queue=MessageQueue("a", 0, "other"))

    asyncio.run(run())


def test_the_hash_picks_as_javas_does() -> None:
    queues = [MessageQueue("a", number, "t") for number in range(7)]
    # "order-42".hashCode() is 1234104453 (mod 7: 5), "polygenelubricants".hashCode() the smallest int there is.
    assert select_by_hash(queues, -8).queue_id == 1
    assert select_by_hash(queues, 1 << 40).queue_id == (1 << 8) % 7
    assert select_by_hash(queues, "polygenelubricants").queue_id == (1 << 31) % 7
    assert select_by_hash(queues, "ab").queue_id == (97 * 31 + 98) % 7


def test_unique_ids_differ_and_tell_their_time() -> None:
    ids = UniqueIds("10.1.2.3", 77)
    made = [ids.take(1_700_000_000_000) for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(len(each) == 32 and each.startswith("0A010203004D") for each in made)
    assert int(ids.take(1_700_000_000_250)[20:28], 16) - int(made[0][20:28], 16) == 250


def test_slots_are_handed_on_when_a_waiter_gives_up() -> None:
    async def run() -> None:
        slots = Slots(1, 100)
        crowd = slots.take(10)
        first, second = (asyncio.create_task(slots.wait(10)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        slots.give_back(10, crowd)
        await second
        assert slots.has_room(200), "one message always fits"

    asyncio.run(run())


def test_a_batch_takes_plain_bodies_and_messages() -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster, Producer(cluster.namesrv) as producer:
            assert await producer.send_batch("orders", []) == []
            await producer.send_batch("orders", [b"x", OutgoingMessage(b"y", tag="t", key="k")], timeout_s=LONG_S)
            (send,) = cluster.brokers[0].sends
            (_, first, _), (_, second, properties) = decode_batch(send.body)
            assert (first, second, properties["TAGS"], properties["KEYS"]) == (b"x", b"y", "t", "k")

    asyncio.run(run())
