"""Ordered topics: the name server tells clients which queues such a topic always has."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import pytest
from drivers import EVENT_DEADLINE_S, Driver, Session
from mqadmin import Admin
from servers import Server

from skylark.client.message import Message
from skylark.client.sync import Producer, PushConsumer

MESSAGES = 8


@pytest.fixture
def session(java_latest: Driver, server: Server) -> Iterator[Session]:
    session = Session(java_latest, server.namesrv_addr)
    yield session
    session.close()


@pytest.fixture
def ordered_topic(admin: Admin, server: Server, topic: str) -> Iterator[str]:
    """A topic with 4 queues that is marked as ordered, at a name server that tells clients so."""
    admin("updateNamesrvConfig", "-k", "orderMessageEnable", "-v", "true")
    made = admin("updateTopic", "-c", server.cluster, "-t", topic, "-r", "4", "-w", "4", "-o", "true")
    assert re.search(r"set cluster orderConf\. isOrder=true, orderConf=\[[^:]+:4\]", made)
    yield topic
    admin("updateOrderConf", "-t", topic, "-m", "delete")
    admin("updateNamesrvConfig", "-k", "orderMessageEnable", "-v", "false")


def order_conf(admin: Admin, topic: str) -> str | None:
    found = re.search(r'"orderTopicConf":\s*"(.*?)"', admin("topicRoute", "-t", topic))
    return None if found is None else found[1]


def test_producers_use_the_queues_that_the_topic_always_has(
    admin: Admin, server: Server, session: Session, ordered_topic: str, group: str
) -> None:
    configured = order_conf(admin, ordered_topic)
    assert configured is not None
    broker = configured.partition(":")[0]
    shown = admin("updateOrderConf", "-t", ordered_topic, "-m", "get")
    assert f"orderConf=[{broker}:4]" in shown
    admin("updateOrderConf", "-t", ordered_topic, "-m", "put", "-v", f"{broker}:2")
    assert order_conf(admin, ordered_topic) == f"{broker}:2"
    sent = session.producer(group).send(ordered_topic, "java", count=MESSAGES, mode="ordered", shards=4)
    assert sorted({each["queue"] for each in sent}) == [0, 1]
    with Producer(server.namesrv_addr, group=f"{group}_p") as producer:
        receipts = [
            producer.send(ordered_topic, f"python-{number}".encode(), ordering_key=number) for number in range(MESSAGES)
        ]
    assert sorted({receipt.queue.queue_id for receipt in receipts}) == [0, 1]
    admin("updateOrderConf", "-t", ordered_topic, "-m", "delete")
    assert order_conf(admin, ordered_topic) is None


def test_messages_of_each_queue_come_in_order_to_both(
    admin: Admin, server: Server, session: Session, ordered_topic: str, group: str
) -> None:
    sent = session.producer(f"{group}_p").send(ordered_topic, "m", count=MESSAGES, mode="ordered", shards=4)
    wanted = {queue: [f"m-{number}" for number in range(queue, MESSAGES, 4)] for queue in range(4)}
    assert sorted(each["queue"] for each in sent) == sorted(queue for queue in wanted for _ in wanted[queue])
    java: dict[int, list[str]] = {queue: [] for queue in range(4)}
    for event in session.consumer(f"{group}_java", ordered_topic, mode="orderly").take(MESSAGES):
        java[event["queue"]].append(event["body"])
    assert java == wanted
    python: dict[int, list[str]] = {queue: [] for queue in range(4)}
    complete = threading.Event()

    def listen(message: Message) -> None:
        python[message.queue_id].append(message.body.decode())
        if sum(map(len, python.values())) == MESSAGES:
            complete.set()

    consumer = PushConsumer(server.namesrv_addr, group, listener=listen, orderly=True, from_where="first")
    consumer.subscribe(ordered_topic)
    with consumer:
        assert complete.wait(EVENT_DEADLINE_S)
    assert python == wanted
