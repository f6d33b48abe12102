"""What becomes of sends when a broker is away for a while, when nobody asks for their receipts, and elsewhere."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from client.inbox import DEADLINE_S, eventually
from client.scripted import never, refuses, scripted_cluster, stored
from skylark.client import courier, sync
from skylark.client.app import App
from skylark.client.errors import (
    BrokerError,
    ClientClosed,
    InvalidMessage,
    NotReachable,
    OtherEventLoop,
    RequestTimeout,
    SendsFailed,
)
from skylark.client.message import Message, MessageQueue, OutgoingMessage
from skylark.client.producer import Producer
from skylark.client.push_consumer import PushConsumer
from skylark.client.rpc_hooks import RpcHook
from skylark.client.sending import Sending
from skylark.client.session import Session
from skylark.client.validation import check_labels
from skylark.testing import LocalCluster
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame

LONG_S = 60.0
MORE_THAN_THE_RETRIES = 6  # which are two, and a route is asked for before each

Call = Callable[[Producer, MessageQueue], Awaitable[Any]]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the rounds of a send; that they grow up to this is all the same here."""
    monkeypatch.setattr(courier, "_MAX_PAUSE_S", 0.1)


async def send_soon(producer: Producer, _: MessageQueue) -> None:
    await (await producer.send_soon("orders", b"x", timeout_s=LONG_S))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda producer, queue: producer.send("orders", b"x", timeout_s=LONG_S), id="send"),
        pytest.param(
            lambda producer, queue: producer.send("orders", b"x", ordering_key="k", timeout_s=LONG_S), id="ordering_key"
        ),
        pytest.param(
            lambda producer, queue: producer.send(
                "orders", b"x", select=lambda queues, number: queues[number], arg=0, timeout_s=LONG_S
            ),
            id="select",
        ),
        pytest.param(lambda producer, queue: producer.send("orders", b"x", queue=queue, timeout_s=LONG_S), id="queue"),
        pytest.param(
            lambda producer, queue: producer.send_batch("orders", [b"x", b"y"], timeout_s=LONG_S), id="send_batch"
        ),
        pytest.param(send_soon, id="send_soon"),
    ],
)
def test_a_send_outlives_the_restart_of_its_broker(call: Call) -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster, Producer(cluster.namesrv) as producer:
            (broker,) = cluster.brokers
            (queue,) = await producer.queues("orders")
            await broker.stop()
            cluster.queries.clear()
            sent = asyncio.ensure_future(call(producer, queue))
            await eventually(lambda: sent.done() or len(cluster.queries) >= MORE_THAN_THE_RETRIES)
            assert not sent.done()
            broker.port = 0
            await broker.start()
            await sent
            assert len(broker.sends) == 1

    asyncio.run(run())


class RouteRequests(RpcHook):
    def __init__(self) -> None:
        self.count = 0

    def before_request(self, address: str, request: Frame) -> None:
        self.count += request.code == RequestCode.GET_ROUTEINFO_BY_TOPIC


def test_a_real_broker_that_restarts_takes_its_route_along_and_brings_it_back() -> None:
    async def run() -> None:
        asked = RouteRequests()
        async with (
            LocalCluster(topics={"orders": 1}) as cluster,
            Session(cluster.name_servers, rpc_hooks=[asked]) as session,
            Producer(session=session, timeout_s=LONG_S) as producer,
        ):
            await producer.send("orders", b"before")
            await cluster.broker.stop()
            asked.count = 0
            sends = [
                asyncio.create_task(producer.send("orders", b"x")),
                asyncio.create_task(producer.send("orders", b"x", ordering_key="k")),
                asyncio.create_task(producer.send_batch("orders", [b"x"])),
            ]
            await eventually(lambda: asked.count >= MORE_THAN_THE_RETRIES)
            assert not any(each.done() for each in sends)
            await cluster.broker.start()
            await asyncio.gather(*sends)

    asyncio.run(run())


@pytest.mark.parametrize("choice", [{}, {"ordering_key": "k"}])
def test_a_connection_that_breaks_while_the_answer_is_due_is_a_broker_that_is_away(choice: dict[str, Any]) -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster, Producer(cluster.namesrv) as producer:
            (broker,) = cluster.brokers
            await producer.send("orders", b"x", timeout_s=LONG_S)
            broker.answer = never
            sent = asyncio.create_task(producer.send("orders", b"y", timeout_s=LONG_S, **choice))
            await eventually(lambda: len(broker.sends) == 2)
            await broker.stop()
            cluster.queries.clear()
            await eventually(lambda: sent.done() or len(cluster.queries) >= MORE_THAN_THE_RETRIES)
            assert not sent.done()
            broker.port, broker.answer = 0, stored
            await broker.start()
            await sent

    asyncio.run(run())


def test_two_brokers_that_are_away_are_tried_in_rounds() -> None:
    async def run() -> None:
        async with scripted_cluster("a", "b", orders=1) as cluster, Producer(cluster.namesrv) as producer:
            await producer.queues("orders")
            for broker in cluster.brokers:
                await broker.stop()
            cluster.queries.clear()
            sent = asyncio.ensure_future(producer.send("orders", b"x", timeout_s=LONG_S))
            await eventually(lambda: sent.done() or len(cluster.queries) >= MORE_THAN_THE_RETRIES)
            assert not sent.done()
            cluster.brokers[1].port = 0
            await cluster.brokers[1].start()
            assert (await sent).queue.broker_name == "b"

    asyncio.run(run())


def test_a_topic_without_a_route_for_a_moment_is_waited_for() -> None:
    """A broker that ends takes its routes with it, and they come back with it."""

    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster, Producer(cluster.namesrv) as producer:
            (broker,) = cluster.brokers
            await producer.send("orders", b"x", timeout_s=LONG_S)
            await broker.stop()
            del cluster.topics["orders"]
            cluster.queries.clear()
            sent = asyncio.ensure_future(producer.send("orders", b"y", timeout_s=LONG_S))
            await eventually(lambda: sent.done() or len(cluster.queries) >= MORE_THAN_THE_RETRIES)
            assert not sent.done()
            broker.port, cluster.topics["orders"] = 0, 1
            await broker.start()
            await sent

    asyncio.run(run())


def test_without_retries_a_message_is_sent_once() -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster, Producer(cluster.namesrv, retries=0) as producer:
            await producer.queues("orders")
            await cluster.brokers[0].stop()
            with pytest.raises(NotReachable) as caught:
                await producer.send("orders", b"x", timeout_s=LONG_S)
            assert not hasattr(caught.value, "__notes__")

    asyncio.run(run())


def test_when_the_time_is_over_the_cause_is_told() -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster, Producer(cluster.namesrv) as producer:
            await producer.queues("orders")
            await cluster.brokers[0].stop()
            with pytest.raises(NotReachable, match="no connection") as caught:
                await producer.send("orders", b"x", ordering_key="k", timeout_s=1.0)
            assert any("times, at a" in note for note in caught.value.__notes__)

    asyncio.run(run())


@pytest.mark.parametrize("choice", [{"ordering_key": "k"}, {"select": lambda queues, _: queues[0]}])
def test_one_deadline_is_for_the_route_and_for_the_send(choice: dict[str, Any]) -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster, Producer(cluster.namesrv) as producer:
            cluster.gate = asyncio.Event()
            cluster.brokers[0].answer = never
            sent = asyncio.create_task(producer.send("orders", b"x", timeout_s=LONG_S, **choice))
            await eventually(lambda: bool(cluster.queries))
            latest_s = asyncio.get_running_loop().time() + LONG_S
            cluster.gate.set()
            await eventually(lambda: bool(cluster.brokers[0].sends))
            assert producer._courier is not None
            (sending,) = producer._courier._flying
            assert isinstance(sending, Sending)
            assert sending.deadline_s <= latest_s
            sent.cancel()
            cluster.brokers[0].answer = stored
            sending.abandon()
            producer._courier._finish(sending, None, None)
            producer._courier._flying.clear()

    asyncio.run(run())


def test_flush_tells_of_messages_that_failed_and_that_nobody_asks_about(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster, Producer(cluster.namesrv) as producer:
            cluster.brokers[0].answer = refuses(ResponseCode.MESSAGE_ILLEGAL, "first")
            await producer.send_soon("orders", b"1", timeout_s=LONG_S)
            await eventually(lambda: not producer._slots.count)
            cluster.brokers[0].answer = refuses(ResponseCode.MESSAGE_ILLEGAL, "later")
            for _ in range(2):
                await producer.send_soon("orders", b"2", timeout_s=LONG_S)
            with pytest.raises(SendsFailed, match=r"3 of the messages failed; the first: .*first") as caught:
                await producer.flush()
            assert caught.value.count == 3
            assert isinstance(caught.value.first, BrokerError)
            await producer.flush()  # what it told of is done with

            waited_for = await producer.send_soon("orders", b"3", timeout_s=LONG_S)
            results = asyncio.gather(waited_for, return_exceptions=True)
            await producer.flush()
            assert isinstance((await results)[0], BrokerError)

            answered_late: list[BaseException | None] = []
            future = await producer.send_soon("orders", b"4", timeout_s=LONG_S)
            await asyncio.wait([future])
            await producer.send_soon("orders", b"5", timeout_s=LONG_S)
            await eventually(lambda: not producer._slots.count)
            future.add_done_callback(lambda done: answered_late.append(done.exception()))
            with pytest.raises(SendsFailed, match="1 of the messages"):
                await producer.flush()
            assert len(answered_late) == 1

            await producer.send_soon("orders", b"6", timeout_s=LONG_S)
            with caplog.at_level(logging.ERROR, "skylark.client"):
                await producer.close()
            assert any("1 messages of DEFAULT_PRODUCER failed" in record.getMessage() for record in caplog.records)
            gc.collect()
            assert "Future exception was never retrieved" not in caplog.text

    asyncio.run(run())


def test_flush_of_the_blocking_twin_tells_of_them_too() -> None:
    with LocalCluster(topics={"orders": 1}) as cluster, sync.Producer(cluster.name_servers, retries=0) as producer:
        producer.send("orders", b"x")
        cluster.run(cluster.broker.stop)
        asked = producer.send_soon("orders", b"1")
        with pytest.raises(NotReachable):
            asked.result()
        producer.send_soon("orders", b"2")
        with pytest.raises(SendsFailed, match="1 of the messages"):
            producer.flush()
        producer.flush()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"queue": 1}, "queue is 1; it must be a MessageQueue"),
        ({"select": "first"}, "select is 'first'; it must be a function"),
        ({"timeout_s": "1"}, "timeout_s is '1'"),
        ({"timeout_s": -1}, "timeout_s is -1"),
    ],
)
def test_what_a_call_can_not_mean_is_refused_by_name(
    options: dict[str, Any], says: str, skylark_cluster: LocalCluster
) -> None:
    async def main() -> None:
        async with Producer(skylark_cluster.name_servers) as producer:
            with pytest.raises(InvalidMessage, match=says):
                await producer.send("orders", b"x", **options)
            with pytest.raises(InvalidMessage, match="the recall handle is None"):
                await producer.recall("orders", None)  # type: ignore[arg-type]

    asyncio.run(main())


def test_no_event_loop_of_asyncio_is_told_and_harms_nothing(skylark_cluster: LocalCluster) -> None:
    """As under trio, whose coroutines run without one."""
    producer = Producer(skylark_cluster.name_servers)
    consumer = PushConsumer(skylark_cluster.name_servers, "g", listener=print)
    app = App(skylark_cluster.name_servers)
    for start in (producer.start, consumer.start, app.__aenter__, app.serve):
        with pytest.raises(OtherEventLoop, match="no event loop of asyncio runs here"):
            start().send(None)

    async def main() -> None:
        async with producer, consumer, app:
            await producer.send("orders", b"x")

    asyncio.run(main())


def test_another_event_loop_is_told_at_once() -> None:
    with LocalCluster(topics={"orders": 1}) as cluster:
        producer = Producer(cluster.name_servers)
        consumer = PushConsumer(cluster.name_servers, "g", listener=print)
        consumer.subscribe("orders")
        home = asyncio.new_event_loop()
        home.run_until_complete(producer.start())
        home.run_until_complete(consumer.start())
        for use in (
            lambda: producer.send("orders", b"x"), producer.start, producer.flush, producer.close, consumer.close
        ):  # fmt: skip
            with pytest.raises(OtherEventLoop, match="works only there"):
                asyncio.run(use())
        home.run_until_complete(producer.send("orders", b"x"))
        home.run_until_complete(consumer.close())
        home.run_until_complete(producer.close())
        home.run_until_complete(producer.start())
        home.close()
        with pytest.raises(OtherEventLoop, match="is closed, and the client with it"):
            asyncio.run(producer.close())


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ({"tag": "a || b"}, "a message has one tag"),
        ({"tag": " a"}, "begins or ends with a blank"),
        ({"key": "a b"}, "give several keys as a list"),
        ({"delay_level": True}, "delay level True"),
    ],
)
def test_labels_that_would_become_something_else(labels: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidMessage, match=says):
        check_labels(**({"tag": None, "key": None, "properties": None} | labels))


def test_a_delay_level_that_most_brokers_do_not_have_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        check_labels(None, None, None, 29)
    assert len([record for record in caplog.records if "delay level 29 is beyond the 18" in record.getMessage()]) == 1


def test_a_forbidden_recall_names_the_setting() -> None:
    async def run() -> None:
        async with LocalCluster(topics={"orders": 1}) as cluster, Producer(cluster.name_servers) as producer:
            receipt = await producer.send("orders", b"x", delay_s=60)
            assert receipt.recall_handle is not None
            with pytest.raises(BrokerError, match="recallMessageEnable=true"):
                await producer.recall("orders", receipt.recall_handle)

    asyncio.run(run())


def test_an_unknown_group_names_the_setting(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        settings = {"autoCreateSubscriptionGroup": "false"}
        async with LocalCluster(topics={"orders": 1}, settings=settings) as cluster:
            consumer = PushConsumer(cluster.name_servers, "unknown", listener=print, from_where="first")
            consumer.subscribe("orders")
            async with consumer:
                await eventually(lambda: "autoCreateSubscriptionGroup=true" in caplog.text)

    asyncio.run(run())


def test_who_divides_its_group_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "skylark.client.session"]

    async def run() -> None:
        async with LocalCluster(topics={"orders": 1}) as cluster:
            first = PushConsumer(cluster.name_servers, "g", listener=print)
            first.subscribe("orders", "a")
            second = PushConsumer(cluster.name_servers, "g", listener=print)
            second.subscribe("orders", "b")
            async with first:
                assert told() == []
                async with second:
                    (said,) = told()
                    assert f"{second.client_id} subscribes to orders by TAG b, but {first.client_id}" in said
                    await second._session.heartbeat()
                    await first._session.heartbeat()
                    assert len(told()) == 1

    asyncio.run(run())


def test_flush_waits_for_what_was_sent_and_not_for_what_others_go_on_sending() -> None:
    async def main() -> None:
        async with (
            scripted_cluster("a", orders=1) as cluster,
            Producer(cluster.namesrv, timeout_s=DEADLINE_S) as producer,
        ):
            [broker] = cluster.brokers
            may_answer = asyncio.Event()

            async def answer(request: Frame) -> Frame:
                if request.body == b"late":
                    await may_answer.wait()
                return stored(request)

            broker.answer = answer
            own = await producer.send_soon("orders", b"own")
            flushing = asyncio.create_task(producer.flush())
            await asyncio.sleep(0)
            late = await producer.send_soon("orders", b"late")
            await flushing
            assert own.done()
            assert not late.done()
            may_answer.set()
            await producer.flush()
            assert late.done()

    asyncio.run(main())


def test_a_body_that_can_not_be_compressed_in_time_is_not_sent() -> None:
    async def main() -> None:
        async with scripted_cluster("a", orders=1) as cluster, Producer(cluster.namesrv) as producer:
            await producer.send("orders", b"x")
            loop = asyncio.get_running_loop()
            with ThreadPoolExecutor(1) as threads:
                loop.set_default_executor(threads)
                may_end = threading.Event()
                busy = loop.run_in_executor(None, may_end.wait, DEADLINE_S)
                with pytest.raises(RequestTimeout, match="compressed"):
                    await producer.send("orders", b"y" * 400_000, timeout_s=0.01)
                assert not busy.done()
                may_end.set()
                await busy
            assert len(cluster.brokers[0].sends) == 1

    asyncio.run(main())


def test_a_first_send_outlives_the_restart_of_the_name_server() -> None:
    async def main() -> None:
        async with (
            LocalCluster(topics={"orders": 1}) as cluster,
            Producer(cluster.name_servers, timeout_s=DEADLINE_S) as producer,
        ):
            await cluster.name_server.stop()
            failed = asyncio.Event()
            ask = producer.session.ask_name_server
            count = 0

            async def asked(*args: Any) -> Frame:
                nonlocal count
                count += 1
                if count == 6:  # more often than there are retries
                    failed.set()
                return await ask(*args)

            producer.session.routes._ask = asked
            sending = asyncio.create_task(producer.send("orders", b"x"))
            waiting = asyncio.create_task(failed.wait())
            await asyncio.wait([sending, waiting], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            await cluster.name_server.start()
            assert (await sending).msg_id

    asyncio.run(main())


@pytest.mark.parametrize("key", [(each for each in "ab"), 42], ids=["generator", "number"])
def test_keys_that_would_be_lost_are_refused(key: Any) -> None:
    with pytest.raises(InvalidMessage, match="several of them in a list"):
        check_labels(None, key, None)


@pytest.mark.parametrize("key", ["a\tb", "a\u3000b", "a\u00a0b"])
def test_a_key_stays_one_key(key: str) -> None:
    message = Message(topic="t", body=b"b", properties=OutgoingMessage(b"b", key=[key, "c"]).to_properties())
    assert message.keys == [key, "c"]


@pytest.mark.parametrize("is_answered", [False, True], ids=["in flight", "between attempts"])
def test_a_close_that_nobody_waits_for_ends_what_is_on_its_way(is_answered: bool) -> None:
    async def main() -> None:
        async with scripted_cluster("a", orders=1) as cluster, Session(cluster.namesrv) as session:
            [broker] = cluster.brokers
            producer = Producer(session=session, timeout_s=LONG_S, retries=1000)
            await producer.start()
            broker.answer = refuses(ResponseCode.SYSTEM_BUSY) if is_answered else never
            sending = asyncio.create_task(producer.send("orders", b"x"))
            await eventually(lambda: bool(broker.sends))
            closing = asyncio.create_task(producer.close())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait([closing])
            with pytest.raises(ClientClosed, match="closed before message"):
                await sending

    asyncio.run(main())
