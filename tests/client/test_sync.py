"""The blocking twins: the same names and parameters as the asyncio classes, one thread, errors, forks."""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from client.inbox import DEADLINE_S
from client.plain import send
from client.test_listener_edges import run_program
from skylark.client import lite_pull_consumer, producer, pull_consumer, push_consumer, sync
from skylark.client.errors import (
    CallbackFailed,
    ClientClosed,
    ForkedProcess,
    InvalidMessage,
    RocketMQError,
    RouteNotFound,
)
from skylark.client.message import Message, MessageQueue
from skylark.client.session import ConsumerMember, Session
from skylark.testing import LocalCluster

TWINS = {
    sync.Producer: producer.Producer,
    sync.PushConsumer: push_consumer.PushConsumer,
    sync.PullConsumer: pull_consumer.PullConsumer,
    sync.LitePullConsumer: lite_pull_consumer.LitePullConsumer,
}
# What consumers offer to their session and to each other, and nobody calls by hand.
INNER = {name for name in vars(ConsumerMember) if not name.startswith("_")} | {"pull_for"}


def public(kind: type) -> dict[str, Any]:
    return {
        name: value
        for parent in reversed(kind.__mro__)
        for name, value in vars(parent).items()
        if not name.startswith("_")
    }


@pytest.mark.parametrize(("twin", "original"), TWINS.items(), ids=lambda kind: kind.__module__ + kind.__name__)
def test_twins_have_the_same_names_and_parameters(twin: type, original: type) -> None:
    wanted = {name: value for name, value in public(original).items() if name not in INNER}
    # `group` is set by the constructor of the one, and read from it by the other.
    assert public(twin).keys() - {"group"} == wanted.keys() - {"group"}
    assert inspect.signature(twin) == inspect.signature(original)
    for name, value in wanted.items():
        if callable(value):
            blocking = getattr(twin, name)
            assert list(inspect.signature(blocking).parameters) == list(inspect.signature(value).parameters), name
            assert blocking.__doc__ == value.__doc__
    assert twin.__name__ == original.__name__


def fill(cluster: LocalCluster, queue: MessageQueue, *bodies: bytes) -> None:
    async def main() -> None:
        async with Session(cluster.name_servers) as session:
            await session.routes.get(queue.topic)
            await send(session, queue, *bodies)

    asyncio.run(main())


@pytest.fixture
def cluster(skylark_cluster: LocalCluster) -> LocalCluster:
    skylark_cluster.run(lambda: skylark_cluster.create_topic("orders", 2))
    return skylark_cluster


def test_pull(cluster: LocalCluster) -> None:
    with sync.PullConsumer(cluster.name_servers, group="audit") as consumer:
        queue, _ = consumer.queues("orders")
        fill(cluster, queue, b"a", b"b")
        assert [message.body for message in consumer.pull(queue, 0).messages] == [b"a", b"b"]
        assert consumer.committed(queue) is None
        consumer.commit(queue, 1)
        assert (consumer.committed(queue), consumer.min_offset(queue), consumer.max_offset(queue)) == (1, 0, 2)


def test_lite_pull_and_a_for_loop(cluster: LocalCluster) -> None:
    consumer = sync.LitePullConsumer(cluster.name_servers, group="g", from_where="first")
    consumer.subscribe("orders")
    with consumer:
        queue, other = consumer.assignment()
        fill(cluster, queue, b"a", b"b")
        got = []
        for message in consumer:
            got.append(message.body)
            if len(got) == 2:
                break
        assert got == [b"a", b"b"]
        consumer.pause([other])
        consumer.resume([other])
        consumer.seek_to_begin(queue)
        assert consumer.poll(DEADLINE_S, 1)[0].body == b"a"
        assert consumer.position(queue) == 1


def test_send(cluster: LocalCluster) -> None:
    with sync.Producer(cluster.name_servers, group="senders") as producer:
        assert producer.group == "senders"
        queue = producer.queues("orders")[0]
        receipt = producer.send("orders", b"a", queue=queue)
        soon = [producer.send_soon("orders", b"%d" % number, queue=queue) for number in range(10)]
        producer.flush()
        assert sorted(future.result(DEADLINE_S).queue_offset for future in soon) == list(range(1, 11))
        assert receipt.queue_offset == 0
        producer.send_oneway("orders", b"b")
        assert len(producer.send_batch("orders", [b"c", b"d"])) == 2
        with pytest.raises(InvalidMessage):
            producer.send_soon("orders", b"")


def test_messages_sent_soon_keep_their_order_and_come_before_what_follows(cluster: LocalCluster) -> None:
    with sync.Producer(cluster.name_servers, group="senders", max_in_flight=3) as producer:
        queue = producer.queues("orders")[0]
        soon = [producer.send_soon("orders", b"%d" % number, queue=queue) for number in range(50)]
        last = producer.send("orders", b"50", queue=queue)
        assert [future.result(DEADLINE_S).queue_offset for future in soon] == list(range(50))
        assert last.queue_offset == 50


def test_closing_sends_what_was_handed_over(cluster: LocalCluster) -> None:
    producer = sync.Producer(cluster.name_servers, group="senders")
    producer.start()
    soon = [producer.send_soon("orders", b"%d" % number) for number in range(200)]
    producer.close()
    assert len({future.result(0).msg_id for future in soon}) == 200
    with pytest.raises(ClientClosed):
        producer.send_soon("orders", b"too late")


def test_many_threads_send_soon(cluster: LocalCluster) -> None:
    with sync.Producer(cluster.name_servers, group="senders") as producer:
        ids: list[str] = []

        def work() -> None:
            soon = [producer.send_soon("orders", b"x") for _ in range(300)]
            ids.extend(future.result(DEADLINE_S).msg_id for future in soon)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(ids)) == 1200


def test_what_goes_wrong_on_the_way_is_in_the_future_and_the_next_goes_on(cluster: LocalCluster) -> None:
    def no_queue(*_: object) -> MessageQueue:
        raise SystemExit

    with sync.Producer(cluster.name_servers, group="senders") as producer:
        wrong = producer.send_soon("orders", b"a", select=no_queue)
        right = producer.send_soon("orders", b"b")
        with pytest.raises((SystemExit, CallbackFailed)):
            wrong.result(DEADLINE_S)
        assert right.result(DEADLINE_S).queue.topic == "orders"


def test_a_selector_that_cancels_its_task_ends_no_outbox(cluster: LocalCluster) -> None:
    def select(queues: Sequence[MessageQueue], _: Any) -> MessageQueue:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return queues[0]

    with sync.Producer(cluster.name_servers, group="senders", max_in_flight=1) as producer:
        selected = [producer.send_soon("orders", b"a", select=select) for _ in range(20)]  # most wait for room
        assert producer.send_soon("orders", b"b").result(DEADLINE_S).msg_id
        assert all(each.result(DEADLINE_S).msg_id for each in selected)
        producer.flush()


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, KeyboardInterrupt, ValueError])
def test_a_callback_that_fails_ends_no_outbox(
    cluster: LocalCluster, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    may_fail = threading.Event()

    def select(*_: object) -> MessageQueue:
        may_fail.wait(DEADLINE_S)
        raise LookupError

    def told(_: object) -> None:
        raise error

    with sync.Producer(cluster.name_servers, group="senders") as producer:
        failing = producer.send_soon("orders", b"a", select=select)
        failing.add_done_callback(told)
        may_fail.set()
        fine = producer.send_soon("orders", b"b")
        fine.add_done_callback(told)
        assert producer.send_soon("orders", b"c").result(DEADLINE_S).msg_id
        producer.flush()
        assert fine.result(0).msg_id
        assert isinstance(failing.exception(0), LookupError)
    assert caplog.text.count("what was to be called with a receipt failed") == 2


def test_closing_ends_although_threads_go_on_sending(cluster: LocalCluster) -> None:
    closed_under: list[type[Exception]] = []
    has_begun = threading.Event()
    kept: list[Any] = []
    with sync.Producer(cluster.name_servers, group="senders") as producer:

        def work() -> None:
            try:
                while True:
                    kept.append(producer.send_soon("orders", b"x"))
                    has_begun.set()
            except ClientClosed as e:
                closed_under.append(type(e))

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert has_begun.wait(DEADLINE_S)
    for thread in threads:
        thread.join()
    assert closed_under == [ClientClosed] * 2
    assert all(each.result(0).msg_id for each in kept), "what was taken was sent"


def test_an_outbox_is_emptied_of_what_is_there_and_not_of_what_comes_later(cluster: LocalCluster) -> None:
    is_over = threading.Event()
    with sync.Producer(cluster.name_servers, group="senders") as producer:

        def work() -> None:
            while not is_over.is_set():
                producer.send_soon("orders", b"x")

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        own = producer.send_soon("orders", b"own")
        producer.flush()
        is_over.set()
        assert own.done()
        for thread in threads:
            thread.join()


def test_push(cluster: LocalCluster) -> None:
    consumer = sync.PushConsumer(cluster.name_servers, group="g", from_where="first")
    consumer.subscribe("orders", tag="new")
    got: queue.Queue[tuple[bytes, str]] = queue.Queue()

    @consumer.listen
    def handle(message: Message) -> None:
        got.put((message.body, threading.current_thread().name))

    with consumer, sync.Producer(cluster.name_servers, group="senders") as producer:
        assert len([queue for queue in consumer.queues if queue.topic == "orders"]) == 2
        producer.send("orders", b"other", tag="old")
        producer.send("orders", b"hello", tag="new")
        body, thread = got.get(timeout=DEADLINE_S)
        assert body == b"hello"
        assert thread != "skylark-client"
    consumer.wait_closed()


def test_a_send_soon_that_fails_says_so() -> None:
    with LocalCluster() as cluster, sync.Producer(cluster.name_servers, group="senders", retries=0) as producer:
        producer.send("orders", b"a")
        cluster.run(cluster.broker.stop)
        with pytest.raises(RocketMQError):
            producer.send_soon("orders", b"b", timeout_s=1.0).result(DEADLINE_S)


def test_closing_ends_a_loop_in_another_thread(cluster: LocalCluster) -> None:
    consumer = sync.LitePullConsumer(cluster.name_servers, group="g")
    consumer.subscribe("orders")
    consumer.start()
    ended = threading.Event()

    def read() -> None:
        for _ in consumer:
            pass
        ended.set()

    thread = threading.Thread(target=read)
    thread.start()
    queue = consumer.assignment()[0]
    fill(cluster, queue, b"one")
    while consumer.position(queue) != 1:
        time.sleep(0.01)
    consumer.close()
    assert ended.wait(DEADLINE_S)
    thread.join()


def test_errors_are_the_same() -> None:
    consumer = sync.PullConsumer("127.0.0.1:1")
    with pytest.raises(ClientClosed):
        consumer.queues("orders")
    with pytest.raises(ValueError, match="host:port"):
        sync.PullConsumer("nowhere")


def test_errors_reach_the_caller(cluster: LocalCluster) -> None:
    with sync.PullConsumer(cluster.name_servers) as consumer, pytest.raises(RouteNotFound):
        consumer.queues("absent")


def test_one_thread_serves_all(cluster: LocalCluster) -> None:
    with sync.PullConsumer(cluster.name_servers), sync.PullConsumer(cluster.name_servers):
        assert [thread.name for thread in threading.enumerate()].count("skylark-client") == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_is_told_and_can_have_its_own(cluster: LocalCluster) -> None:
    with sync.PullConsumer(cluster.name_servers) as consumer:
        queues = consumer.queues("orders")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                try:
                    consumer.queues("orders")
                except ForkedProcess:
                    with sync.PullConsumer(cluster.name_servers) as own:
                        status = 0 if own.queues("orders") == queues else 2
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0


def test_a_child_hands_nothing_to_the_loop_of_its_parent(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sync.Producer(cluster.name_servers, group="senders") as producer:
        producer.send("orders", b"m")
        with monkeypatch.context() as child:
            child.setattr(producer._background, "pid", os.getpid() + 1)
            with pytest.raises(ForkedProcess):
                producer.send_soon("orders", b"m")


def test_a_hook_can_not_wait_for_its_own_loop() -> None:
    consumer = sync.PullConsumer("127.0.0.1:1")

    async def nested() -> None:
        consumer.close()

    with pytest.raises(RuntimeError, match="wait forever"):
        consumer._background.run(nested)


def test_what_ends_an_event_loop_does_not_end_that_of_the_clients(cluster: LocalCluster) -> None:
    with sync.Producer(cluster.name_servers, group="p") as producer:
        producer._background._loop.call_soon_threadsafe(sys.exit)
        assert producer.send("orders", b"m", timeout_s=DEADLINE_S).msg_id


def test_what_was_taken_is_sent_although_nobody_closes_the_producer(cluster: LocalCluster) -> None:
    program = """
        import sys
        from skylark.client.sync import Producer

        producer = Producer(sys.argv[1], group="p", timeout_s=60)
        producer.start()
        for number in range(2000):
            producer.send_soon("orders", b"%d" % number, ordering_key="all")
    """
    assert run_program(cluster, program) == ""
    with sync.PullConsumer(cluster.name_servers, group="audit") as consumer:
        assert sum(consumer.max_offset(queue) for queue in consumer.queues("orders")) == 2000


def test_what_could_not_be_sent_is_told_of_when_the_interpreter_ends(caplog: pytest.LogCaptureFixture) -> None:
    with sync.Producer("127.0.0.1:1", group="p", timeout_s=0.01) as producer:
        producer.send_soon("orders", b"lost")
        producer._finish()
    assert "p: the interpreter ends" in caplog.text
