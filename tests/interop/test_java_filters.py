"""Apache's Java consumers with SQL92 filters: push, lite pull and pull, and expressions that are refused."""

from __future__ import annotations

import pytest
from drivers import DriverError, Producer, Session, bodies, numbered, readable

SQL = "price BETWEEN 3 AND 6 AND (color IN ('red', 'blue') OR color IS NULL)"
COLORS = ["red", "green", None]


def send_colors(producer: Producer, topic: str, count: int = 9) -> list[str]:
    """Numbered messages with a price, two of three with a colour; those that the expression wants come back."""
    wanted = []
    for number in range(count):
        color = COLORS[number % 3]
        properties = {"price": str(number)} | ({"color": color} if color else {})
        sent = producer.send(topic, f"m-{number}", queue=0, property=properties)
        if 3 <= number <= 6 and color != "green":
            wanted.append(f"m-{number}")
    readable(sent)
    return wanted


def test_push(session: Session, topic: str, group: str) -> None:
    producer = session.producer(group)
    producer.create_topic(topic, 1)
    consumer = session.consumer(group, topic, sql=SQL)
    consumer.await_queues(1)
    wanted = send_colors(producer, topic)
    assert sorted(bodies(consumer.take(len(wanted)))) == wanted
    # What arrives while the consumer waits is filtered too.
    send_colors(producer, topic)
    assert sorted(bodies(consumer.take(len(wanted)))) == wanted
    assert consumer.seen() == []


def test_a_message_that_failed_comes_again(session: Session, topic: str, group: str) -> None:
    producer = session.producer(group)
    producer.create_topic(topic, 1)
    consumer = session.consumer(group, topic, sql="price = 3", fail=1, delayLevel=1)
    consumer.await_queues(1)
    send_colors(producer, topic)
    assert bodies(consumer.take(2)) == ["m-3", "m-3"]


def test_lite_pull(session: Session, topic: str, group: str) -> None:
    producer = session.producer(group)
    producer.create_topic(topic, 1)
    lite = session.lite(group, subscribe=topic, sql=SQL, from_="first")
    wanted = send_colors(producer, topic)
    got: list[str] = []
    while len(got) < len(wanted):
        got += bodies(lite.call("lite.poll")["messages"])
    assert got == wanted


def test_pull(session: Session, topic: str, group: str) -> None:
    producer = session.producer(group)
    producer.create_topic(topic, 1)
    wanted = send_colors(producer, topic)
    puller = session.puller(group)
    (queue,) = puller.call("puller.queues", topic=topic)["queues"]
    place = {"topic": topic, "broker": queue["broker"], "queue": queue["queue"]}
    found = puller.call("pull", **place, sql=SQL)
    assert (found["status"], bodies(found["messages"]), found["next"]) == ("FOUND", wanted, 9)
    nothing = puller.call("pull", **place, sql="price > 100")
    assert (nothing["status"], nothing["next"]) == ("NO_MATCHED_MSG", 9)


@pytest.mark.parametrize("sql", ["price >", "price = 'x", "price BETWEEN 5 AND 3", "color > 'red'"])
def test_an_expression_that_makes_no_sense(session: Session, topic: str, group: str, sql: str) -> None:
    session.producer(group).create_topic(topic, 1)
    with pytest.raises(DriverError, match="CODE: 23"):
        session.consumer(group, topic, sql=sql)


def test_tags(session: Session, topic: str, group: str) -> None:
    producer = session.producer(group)
    producer.create_topic(topic, 1)
    consumer = session.consumer(group, topic, expression="Aa || b")
    consumer.await_queues(1)
    for tag in ("Aa", "BB", "b", "c"):  # the first two have one hash code
        producer.send(topic, tag, count=2, tags=tag)
    assert sorted(bodies(consumer.take(4))) == numbered("Aa", 2) + numbered("b", 2)
    assert consumer.seen() == []
