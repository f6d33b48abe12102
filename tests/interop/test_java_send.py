"""Every way to send that Apache's Java client has, seen through its push consumer."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
from drivers import Event, Session, bodies, numbered


def by_queue(events: list[Event]) -> dict[int, list[Event]]:
    queues = defaultdict(list)
    for event in events:
        queues[event["queue"]].append(event)
    return queues


def test_a_message_arrives_as_it_was_sent(session: Session, topic: str, group: str) -> None:
    [sent] = session.producer(group).send(
        topic, "höllo ✓", tags="blue", keys="order-17", flag=7, property={"city": "Zürich"}
    )
    [got] = session.consumer(group, topic).take(1)

    assert sent["status"] == "SEND_OK"
    assert re.fullmatch(r"7F000001[0-9A-F]{24}", sent["offsetMsgId"])
    assert (got["body"], got["tags"], got["keys"], got["flag"]) == ("höllo ✓", "blue", "order-17", 7)
    assert got["properties"]["city"] == "Zürich"
    for name in ("msgId", "offsetMsgId", "topic", "broker", "queue", "offset"):
        assert got[name] == sent[name], name
    assert got["reconsumeTimes"] == 0
    assert got["storeTimestamp"] > 0


def test_synchronous_sends_fill_the_queues_in_sequence(session: Session, topic: str, group: str) -> None:
    sent = session.producer(group).send(topic, "m", count=24)
    got = session.consumer(group, topic).take(24)

    assert {result["status"] for result in sent} == {"SEND_OK"}
    assert sorted(bodies(got)) == sorted(numbered("m", 24))
    assert {result["queue"] for result in sent} == {0, 1, 2, 3}
    for results in by_queue(sent).values():
        assert [result["offset"] for result in results] == list(range(len(results)))


def test_asynchronous_sends_are_all_acknowledged(session: Session, topic: str, group: str) -> None:
    sent = session.producer(group).send(topic, "m", count=64, mode="async")
    got = session.consumer(group, topic).take(64)

    assert [result["status"] for result in sent] == ["SEND_OK"] * 64
    assert {result["msgId"] for result in sent} == {event["msgId"] for event in got}
    assert sorted(bodies(got)) == sorted(numbered("m", 64))


def test_one_way_sends_arrive(session: Session, topic: str, group: str) -> None:
    producer = session.producer(group)
    producer.create_topic(topic, 4)
    producer.send(topic, "m", count=16, mode="oneway")
    assert sorted(bodies(session.consumer(group, topic).take(16))) == sorted(numbered("m", 16))


def test_a_batch_is_stored_message_by_message(session: Session, topic: str, group: str) -> None:
    [sent] = session.producer(group).send(topic, "m", count=10, mode="batch", tags="a,b", keys="k")
    got = sorted(session.consumer(group, topic).take(10), key=lambda event: event["offset"])

    assert sent["status"] == "SEND_OK"
    assert bodies(got) == numbered("m", 10)
    assert [event["tags"] for event in got] == ["a", "b"] * 5
    assert [event["keys"] for event in got] == numbered("k", 10)
    assert [event["offset"] for event in got] == list(range(10))
    assert {event["queue"] for event in got} == {sent["queue"]}
    assert [event["offsetMsgId"] for event in got] == sent["offsetMsgId"].split(",")
    assert [event["msgId"] for event in got] == sent["msgId"].split(",")


def test_ordered_sends_keep_their_order_within_a_queue(session: Session, topic: str, group: str) -> None:
    session.producer(group).send(topic, "m", count=40, mode="ordered", shards=4)
    queues = by_queue(session.consumer(group, topic, mode="orderly").take(40))

    assert len(queues) == 4
    for queue, events in queues.items():
        assert bodies(events) == [f"m-{number}" for number in range(40) if number % 4 == queue]


def test_a_delayed_message_comes_after_its_delay(session: Session, topic: str, group: str) -> None:
    producer = session.producer(group)
    consumer = session.consumer(group, topic)
    producer.send(topic, "late", delayLevel=2, tags="slow", keys="k", property={"mine": "kept"})
    producer.send(topic, "soon", delayLevel=1)
    producer.send(topic, "now")
    got = {event["body"]: event for event in consumer.take(3)}

    assert got.keys() == {"now", "soon", "late"}
    soon, late = got["soon"], got["late"]
    assert soon["storeTimestamp"] - soon["bornTimestamp"] >= 1000
    assert late["storeTimestamp"] - late["bornTimestamp"] >= 5000
    assert (late["topic"], late["tags"], late["keys"]) == (topic, "slow", "k")
    assert late["properties"]["mine"] == "kept"
    as_sent = {body: (event["properties"].get("DELAY"), event["properties"]["WAIT"]) for body, event in got.items()}
    assert as_sent == {"now": (None, "true"), "soon": ("1", "true"), "late": ("2", "true")}


def test_everything_goes_through_the_vip_port_too(session: Session, topic: str, group: str) -> None:
    producer = session.producer(group, vip=True)
    consumer = session.consumer(group, topic, vip=True)
    sent = producer.send(topic, "m", count=8)
    sent += producer.send(topic, "n", count=8, mode="async")
    assert {result["status"] for result in sent} == {"SEND_OK"}
    assert sorted(bodies(consumer.take(16))) == sorted(numbered("m", 8) + numbered("n", 8))
    consumer.commit(sent, group)


@pytest.mark.parametrize("size", [5_000, 1_000_000])
def test_a_body_that_the_client_compresses_comes_back_whole(
    session: Session, topic: str, group: str, size: int
) -> None:
    session.producer(group).send(topic, "big", size=size)
    [got] = session.consumer(group, topic).take(1)
    assert got["body"] == "big" + "x" * (size - 3)


def test_a_new_topic_gets_the_queues_that_the_producer_asks_for(session: Session, topic: str, group: str) -> None:
    producer = session.producer(group, topicQueues=2)
    sent = producer.send(topic, "m", count=16)
    assert {result["queue"] for result in sent if result["offset"] > 0} == {0, 1}
