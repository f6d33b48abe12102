"""The blocking twins, against both servers."""

from __future__ import annotations

import queue

from client.inbox import DEADLINE_S
from skylark.client.message import Message
from skylark.client.sync import LitePullConsumer, Producer, PushConsumer, SimpleConsumer


def test_messages_go_round_without_an_await(namesrv: str, topic: str, group: str) -> None:
    got: queue.Queue[bytes] = queue.Queue()
    with Producer(namesrv, group="senders", timeout_s=DEADLINE_S) as producer:
        producer.send(topic, b"first")
        consumer = PushConsumer(namesrv, group=group, from_where="first")
        consumer.subscribe(topic)

        @consumer.listen
        def handle(message: Message) -> None:
            got.put(message.body)

        with consumer:
            futures = [producer.send_soon(topic, b"%d" % number) for number in range(50)]
            assert len({future.result(DEADLINE_S).msg_id for future in futures}) == 50
            bodies = {got.get(timeout=DEADLINE_S) for _ in range(51)}
    assert bodies == {b"first", *(b"%d" % number for number in range(50))}


def test_a_for_loop(namesrv: str, topic: str, group: str) -> None:
    with Producer(namesrv, group="senders", timeout_s=DEADLINE_S) as producer:
        producer.send_batch(topic, [b"a", b"b", b"c"])
        consumer = LitePullConsumer(namesrv, group=group, from_where="first")
        consumer.subscribe(topic)
        got = []
        with consumer:
            for message in consumer:
                got.append(message.body)
                if len(got) == 3:
                    break
    assert got == [b"a", b"b", b"c"]


def test_messages_are_received_and_acknowledged(namesrv: str, topic: str, group: str) -> None:
    with Producer(namesrv, group="senders", timeout_s=DEADLINE_S) as producer:
        producer.send_batch(topic, [b"a", b"b", b"c"])
        consumer = SimpleConsumer(namesrv, group=group, from_where="first")
        consumer.subscribe(topic)
        with consumer:
            [first] = consumer.receive(max_messages=1)
            consumer.extend(first, 60)
            consumer.ack(first)
            got = []
            for message in consumer:
                got.append(message.body)
                consumer.ack([message])
                if len(got) == 2:
                    break
            assert consumer.receive(wait_s=0) == []
    assert sorted([first.body, *got]) == [b"a", b"b", b"c"]
