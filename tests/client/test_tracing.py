"""What is traced, and what happens when a trace can't be written."""

from __future__ import annotations

import asyncio
from pathlib import Path

from broker.live import live_broker
from client.inbox import Inbox
from client.scripted import never, refuses, scripted_cluster
from skylark.client.lite_pull_consumer import LitePullConsumer
from skylark.client.message import Message
from skylark.client.producer import Producer
from skylark.client.push_consumer import PushConsumer
from skylark.client.query import QueryClient
from skylark.client.tracing import MAX_PENDING, Tracer
from skylark.client.transactions import TransactionProducer
from skylark.wire.codes import ResponseCode
from skylark.wire.trace import MessageType, Pub, Recall, SubAfter, decode_traces

RECALL = Recall(time_ms=1, region="r", group="g", topic="t", msg_id="M")


def test_a_broker_that_wants_no_traces_gets_none(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, traceOn=False, traceTopicEnable=True) as broker:
            inbox = Inbox()
            consumer = PushConsumer(broker.namesrv, "g", listener=inbox, from_where="first", trace=True)
            consumer.subscribe("t")
            async with Producer(broker.namesrv, trace=True) as producer:
                receipt = await producer.send("t", b"hello")
                assert not receipt.is_traced
                async with consumer:
                    await inbox.wait(1)
            async with QueryClient(broker.namesrv) as query:
                assert await query.trace(receipt.msg_id) == []
                assert await query.by_time("RMQ_SYS_TRACE_TOPIC", 0) == []

    asyncio.run(run())


def test_traces_are_no_messages_to_trace(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            async with Producer(broker.namesrv, group="g", trace="traces") as producer:
                receipt = await producer.send("t", b"hello")
            async with QueryClient(broker.namesrv) as query:
                (message,) = await query.by_time("traces", 0)
                assert message.keys == [receipt.msg_id]
                assert [trace.msg_id for trace in decode_traces(message.body.decode())] == [receipt.msg_id]

    asyncio.run(run())


def test_a_listener_that_raises_is_told_apart(tmp_path: Path) -> None:
    async def run() -> None:
        failed = asyncio.Event()

        async def fail(_: object) -> None:
            failed.set()
            raise RuntimeError("no")

        async with live_broker(tmp_path) as broker:
            async with Producer(broker.namesrv, group="g") as producer:
                receipt = await producer.send("t", b"hello")
            consumer = PushConsumer(broker.namesrv, "g", listener=fail, from_where="first", trace=True)
            consumer.subscribe("t")
            async with consumer:
                await failed.wait()
            async with QueryClient(broker.namesrv) as query:
                events = await query.trace(receipt.msg_id)
                assert [(event.what, event.result) for event in events] == [
                    ("consuming", ""),
                    ("consumed", "failed (exception)"),
                ]

    asyncio.run(run())


def test_sending_goes_on_when_traces_cannot_be_written() -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1, traces=1) as cluster:
            broker = cluster.brokers[0]
            stored = broker.answer
            broker.answer = lambda request: (
                request.reply(ResponseCode.NO_PERMISSION, "no") if request.fields["b"] == "traces" else stored(request)
            )
            async with Producer(cluster.namesrv, trace="traces", timeout_s=30) as producer:
                for _ in range(50):
                    await producer.send("orders", b"x")

    asyncio.run(run())


def test_a_close_that_is_given_up_leaves_no_tracer_behind() -> None:
    async def run() -> None:
        async with scripted_cluster("a", t=1, traces=1) as cluster:
            before = asyncio.all_tasks()
            producer = Producer(cluster.namesrv, trace="traces")
            await producer.start()
            await producer.queues("t")
            assert producer._tracer is not None
            flushing, go_on = asyncio.Event(), asyncio.Event()

            async def flush() -> None:
                flushing.set()
                await go_on.wait()

            producer._tracer._flush = flush  # type: ignore[method-assign]
            closing = asyncio.create_task(producer.close())
            await flushing.wait()
            closing.cancel()
            await asyncio.wait([closing])
            assert asyncio.all_tasks() <= before
            assert not producer.session.companion.is_running

    asyncio.run(run())


def test_what_is_pending_is_bounded() -> None:
    async def run() -> None:
        async with scripted_cluster("a", traces=1) as cluster:
            cluster.brokers[0].answer = never
            tracer = Tracer(Producer(cluster.namesrv, timeout_s=0.1, retries=0), "traces")
            await tracer.start()
            tracer.add([RECALL] * (MAX_PENDING + 5))
            assert tracer.dropped == 5
            cluster.brokers[0].answer = refuses(ResponseCode.NO_PERMISSION)
            await tracer.close()

    asyncio.run(run())


def test_records_whose_keys_are_too_long_together_go_apart(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            keys = ["k" * 3000 + str(number) for number in range(18)]
            tracer = Tracer(Producer(broker.namesrv), "traces")
            await tracer.start()
            tracer.add(
                SubAfter(request_id="r", msg_id=f"M{i}", cost_ms=1, is_success=True, keys=key)
                for i, key in enumerate(keys)
            )
            await tracer.close()
            async with QueryClient(broker.namesrv) as query:
                found = await query.by_time("traces", 0)
                records = [record for message in found for record in decode_traces(message.body.decode())]
                assert sorted(record.msg_id for record in records) == sorted(f"M{i}" for i in range(18))
                assert len(found) == 2

    asyncio.run(run())


def test_the_end_of_a_transaction_is_traced_and_who_told_it(tmp_path: Path) -> None:
    async def run() -> None:
        asked = asyncio.Event()

        async def checker(message: Message) -> bool | None:
            if message.body == b"paid":
                return None  # on a slow machine it is asked for too, before its end is known
            asked.set()
            return False

        settings = {"transactionTimeOut": 100, "transactionCheckInterval": 100}
        async with live_broker(tmp_path, **settings) as broker:
            async with TransactionProducer(broker.namesrv, "shop", checker=checker, trace=True) as producer:
                async with producer.transaction("t", b"paid", key="k") as committed:
                    pass
                forgotten = await producer.prepare("t", b"unpaid", key="k")
                await asked.wait()
                await asyncio.sleep(0)  # the answer leaves with its trace
            async with QueryClient(broker.namesrv) as query:
                told = [
                    [(event.what, event.result) for event in await query.trace(msg_id)]
                    for msg_id in (committed.id, forgotten.msg_id)
                ]
                # A broker that is slow to hear the answer asks again.
                assert [list(dict.fromkeys(events)) for events in told] == [
                    [("sent", "success"), ("transaction ended", "commit_message")],
                    [("sent", "success"), ("transaction ended", "rollback_message after a check")],
                ]
                (sent, *_) = await query.trace(committed.id)
                assert isinstance(sent.record, Pub)
                assert sent.record.message_type == MessageType.TRANSACTION_HALF

    asyncio.run(run())


def test_what_is_polled_is_traced(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            async with Producer(broker.namesrv) as producer:
                receipt = await producer.send("t", b"hello")
            async with LitePullConsumer(broker.namesrv, "g", from_where="first", trace=True) as consumer:
                consumer.subscribe("t")
                assert (await anext(consumer)).msg_id == receipt.msg_id
            async with QueryClient(broker.namesrv) as query:
                assert [(event.what, event.group) for event in await query.trace(receipt.msg_id)] == [
                    ("consuming", "g"),
                    ("consumed", "g"),
                ]

    asyncio.run(run())


def test_a_recall_is_traced(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, recallMessageEnable=True) as broker:
            async with Producer(broker.namesrv, "g", trace=True) as producer:
                receipt = await producer.send("t", b"later", delay_s=600)
                assert receipt.recall_handle is not None
                await producer.recall("t", receipt.recall_handle)
            async with QueryClient(broker.namesrv) as query:
                events = await query.trace(receipt.msg_id)
                assert [(event.what, event.result) for event in events] == [
                    ("sent", "success"),
                    ("recalled", "success"),
                ]

    asyncio.run(run())
