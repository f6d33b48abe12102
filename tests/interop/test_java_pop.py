"""POP consumption with Apache's Java client 5.5.0: push consumers that pop, and the requests one by one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drivers import EVENT_DEADLINE_S, Driver, Event, PushConsumer, Session, bodies, numbered, readable
from poppers import LONG_MS, MOMENT_MS, Popper
from servers import POLL_S, SERVERS, Server


@pytest.fixture
def session(java_latest: Driver, server: Server) -> Iterator[Session]:
    session = Session(java_latest, server.namesrv_addr)
    yield session
    session.close()


def start_popping(session: Session, server: Server, group: str, topic: str, **options: Any) -> PushConsumer:
    """A push consumer in a group that pops."""
    Popper(session, server, group, topic).call("mode", mode="POP")
    return session.consumer(group, topic, popInvisibleMs=LONG_MS, **options)


@pytest.fixture
def popper(session: Session, server: Server, topic: str, group: str) -> Popper:
    session.producer(group).create_topic(topic, 1)
    return Popper(session, server, group, topic)


def either(members: list[PushConsumer], count: int) -> list[Event]:
    """So many deliveries to any of the members."""
    taken: list[Event] = []
    deadline_s = time.monotonic() + EVENT_DEADLINE_S
    while len(taken) < count and time.monotonic() < deadline_s:
        taken += [event for member in members for event in member.seen()]
        time.sleep(POLL_S)
    return taken


def send(session: Session, topic: str, count: int, **options: Any) -> None:
    readable(session.producer(f"producer_{topic}").send(topic, "m", count=count, **options))


def test_push_consumers_that_pop_share_the_messages(session: Session, server: Server, topic: str, group: str) -> None:
    producer = session.producer(group)
    producer.create_topic(topic, 4)
    members = [start_popping(session, server, group, topic) for _ in range(2)]
    producer.send(topic, "m", count=40)
    assert sorted(bodies(either(members, 40))) == sorted(numbered("m", 40))


def test_a_refused_message_comes_again(session: Session, server: Server, topic: str, group: str) -> None:
    producer = session.producer(group)
    producer.create_topic(topic, 1)
    producer.send(topic, "again", tags="a", property={"mine": "kept"})
    consumer = start_popping(session, server, group, topic, fail=2, popDelaySeconds=1, expression="a")
    got = consumer.take(3)
    assert [event["reconsumeTimes"] for event in got] == [0, 1, 2]
    assert {(event["body"], event["topic"], event["tags"]) for event in got} == {("again", topic, "a")}


def test_what_is_popped_is_hidden_until_its_time_has_passed(session: Session, topic: str, popper: Popper) -> None:
    send(session, topic, 4)
    acked, *hidden = popper.pop(3)
    (left,) = popper.pop(1, invisibleMs=MOMENT_MS)
    assert sorted(bodies([acked, *hidden, left])) == numbered("m", 4)
    assert popper.ack(acked) == "OK"
    (again,) = popper.pop(1)
    assert (again["body"], again["reconsumeTimes"]) == (left["body"], 1)
    assert popper.is_empty()
    handles = ",".join(message["handle"] for message in (*hidden, again))
    assert popper.call("batchAck", handles=handles)["status"] == "OK"


def test_more_time_and_less(session: Session, topic: str, popper: Popper) -> None:
    send(session, topic, 2)
    longer, shorter = popper.pop(2)
    renewed = popper.call("extend", handle=longer["handle"], invisibleMs=2 * LONG_MS)
    assert renewed["status"] == "OK"
    assert popper.call("extend", handle=shorter["handle"], invisibleMs=MOMENT_MS)["status"] == "OK"
    (again,) = popper.pop(1)
    assert again["body"] == shorter["body"]
    assert popper.ack(again) == "OK"
    assert popper.call("ack", handle=renewed["handle"])["status"] == "OK"


def test_forged_acknowledgements_lose_nothing(session: Session, topic: str, popper: Popper) -> None:
    send(session, topic, 1)
    (taken,) = popper.pop(1, invisibleMs=MOMENT_MS)
    assert popper.call("ack", handle="forged")["status"] == "NO_EXIST"
    assert popper.call("ack", handle=taken["handle"], offset=99)["status"] == "NO_EXIST"
    assert popper.call("ack", handle=taken["handle"], queue=9)["status"] == "NO_EXIST"
    (again,) = popper.pop(1)
    assert again["body"] == taken["body"]
    assert popper.ack(again) == "OK"


def test_in_order_a_queue_is_blocked_until_it_is_acknowledged(session: Session, topic: str, popper: Popper) -> None:
    send(session, topic, 4)
    first, second = popper.pop(2, order=True, queue=0)
    assert [first["body"], second["body"]] == ["m-0", "m-1"]
    assert popper.call("pop", order=True, queue=0, pollMs=0)["messages"] == []
    assert popper.ack(first) == "OK"
    assert popper.call("pop", order=True, queue=0, pollMs=0)["messages"] == []
    assert popper.ack(second) == "OK"
    third, fourth = popper.pop(2, order=True, queue=0, invisibleMs=MOMENT_MS)
    assert [third["body"], fourth["body"]] == ["m-2", "m-3"]
    assert popper.ack(fourth) == "OK"
    # Its time passes: the one that was not acknowledged comes again, in its place.
    (again,) = popper.pop(1, order=True, queue=0)
    assert (again["body"], again["reconsumeTimes"]) == ("m-2", 1)


def test_a_filter_by_tag(session: Session, topic: str, popper: Popper) -> None:
    send(session, topic, 6, tags="a,b")
    taken = popper.pop(3, expression="b")
    assert sorted(bodies(taken)) == ["m-1", "m-3", "m-5"]
    assert {popper.ack(message) for message in taken} == {"OK"}


def test_a_restart_loses_nothing(java_latest: Driver, server_kind: str, tmp_path: Path, topic: str, group: str) -> None:
    server = SERVERS[server_kind](tmp_path)
    server.start()
    try:
        session = Session(java_latest, server.namesrv_addr)
        session.producer(group).create_topic(topic, 1)
        popper = Popper(session, server, group, topic)
        popper.call("mode", mode="POP")
        send(session, topic, 5)
        (acked,) = popper.pop(1)
        assert popper.ack(acked) == "OK"
        held = popper.call("pop", max=2, invisibleMs=5 * MOMENT_MS)["messages"]
        assert len(held) == 2
        session.close(wait=True)
        server.stop()
        server.start()
        session = Session(java_latest, server.namesrv_addr)
        consumer = session.consumer(group, topic, popInvisibleMs=LONG_MS)  # the mode is remembered
        got = consumer.take(4)
        assert sorted(bodies(got)) == sorted({*numbered("m", 5)} - {acked["body"]})
        assert sorted(event["body"] for event in got if event["reconsumeTimes"] == 1) == sorted(bodies(held))
        session.close()
    finally:
        server.kill()
