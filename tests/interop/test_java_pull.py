"""Apache's Java pull and lite-pull consumers, and the offset and message queries that they offer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from drivers import Client, DriverError, Event, Session, bodies, commit, numbered, queue_ids, readable, wait_indexed


def seed(session: Session, topic: str, group: str, count: int = 10, **options: object) -> list[Event]:
    """Messages m-0… in queue 0 of a topic with two queues."""
    producer = session.producer(group)
    producer.create_topic(topic, 2)
    return readable(producer.send(topic, "m", count=count, mode="ordered", shards=1, **options))


def test_pulling_walks_a_queue(session: Session, topic: str, group: str) -> None:
    place = {"topic": topic, "broker": seed(session, topic, group)[0]["broker"], "queue": 0}
    puller = session.puller(group)
    assert queue_ids(puller.call("puller.queues", topic=topic)["queues"]) == [0, 1]

    first = puller.call("pull", **place, offset=0, max=4)
    assert (first["status"], first["next"], first["min"], first["max"]) == ("FOUND", 4, 0, 10)
    assert bodies(first["messages"]) == numbered("m", 10)[:4]
    rest = puller.call("pull", **place, offset=first["next"])
    assert (rest["status"], rest["next"]) == ("FOUND", 10)
    assert bodies(rest["messages"]) == numbered("m", 10)[4:]
    end = puller.call("pull", **place, offset=10)
    assert (end["status"], end["next"]) == ("NO_NEW_MSG", 10)
    beyond = puller.call("pull", **place, offset=999)
    assert (beyond["status"], beyond["next"]) == ("OFFSET_ILLEGAL", 10)
    empty = puller.call("pull", **{**place, "queue": 1}, offset=0)
    assert (empty["status"], empty["next"], empty["messages"]) == ("NO_NEW_MSG", 0, [])


def test_pulling_with_a_tag(session: Session, topic: str, group: str) -> None:
    place = {"topic": topic, "broker": seed(session, topic, group, tags="a,b")[0]["broker"], "queue": 0}
    puller = session.puller(group)
    found = puller.call("pull", **place, offset=0, expression="b")
    assert (found["status"], found["next"]) == ("FOUND", 10)
    assert bodies(found["messages"]) == ["m-1", "m-3", "m-5", "m-7", "m-9"]
    none = puller.call("pull", **place, offset=0, expression="nobody")
    assert (none["status"], none["next"], none["messages"]) == ("NO_MATCHED_MSG", 10, [])


def test_a_waiting_pull_is_answered_by_an_arrival(session: Session, topic: str, group: str) -> None:
    place = {"topic": topic, "broker": seed(session, topic, group, 1)[0]["broker"], "queue": 0}
    puller = session.puller(group)
    producer = session.producer(group)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(puller.call, "pull", **place, offset=1, block=True)
        producer.send(topic, "news", mode="ordered", shards=1)
        answer = waiting.result()
    assert (answer["status"], bodies(answer["messages"])) == ("FOUND", ["news"])


def test_offsets_by_number_and_by_time(session: Session, topic: str, group: str) -> None:
    place = {"topic": topic, "broker": seed(session, topic, group)[0]["broker"], "queue": 0}
    puller = session.puller(group)
    messages = puller.call("pull", **place)["messages"]
    times = [message["storeTimestamp"] for message in messages]

    offsets = puller.call("puller.offsets", **place, time=times[5])
    assert (offsets["min"], offsets["max"]) == (0, 10)
    assert offsets["atTime"] == times.index(times[5])
    assert offsets["earliest"] == times[0]
    assert puller.call("puller.offsets", **place, time=0)["atTime"] == 0
    assert puller.call("puller.offsets", **place, time=times[-1] + 3_600_000)["atTime"] == 10


def test_a_committed_offset_is_kept_for_the_group(session: Session, topic: str, group: str) -> None:
    place = {"topic": topic, "broker": seed(session, topic, group)[0]["broker"], "queue": 0}
    first = session.puller(group)
    first.call("pull", **place)  # makes the group known: a broker takes no offsets of groups that it never met
    first.call("puller.commit", **place, offset=7)
    first.stop()
    second = session.puller(group)
    assert second.call("puller.offsets", **place)["committed"] == 7


def test_messages_are_found_by_id_and_by_key(session: Session, topic: str, group: str) -> None:
    sent = seed(session, topic, group, keys="key")
    puller = session.puller(group)
    wait_indexed(puller, topic, "key-9")
    for wanted in (sent[3]["offsetMsgId"], sent[3]["msgId"]):
        assert puller.call("puller.view", topic=topic, msgId=wanted)["message"]["body"] == "m-3"
    assert bodies(puller.call("puller.query", topic=topic, key="key-8")["messages"]) == ["m-8"]
    with pytest.raises(DriverError, match="query message by key finished, but no message"):
        puller.call("puller.query", topic=topic, key="no-such-key")


def test_a_pulled_message_can_be_sent_back(session: Session, topic: str, group: str) -> None:
    [sent] = seed(session, topic, group, 1)
    # The group must be known to the broker before it takes a message back.
    consumer = session.consumer(group, topic)
    consumer.take(1)
    puller = session.puller(f"{group}_reader")  # members of one group must agree on their subscriptions
    # The client knows the broker's address from a pull; without it, it would send a new message instead.
    puller.call("pull", topic=topic, broker=sent["broker"], queue=sent["queue"])
    puller.call("puller.back", topic=topic, msgId=sent["offsetMsgId"], broker=sent["broker"], group=group, level=1)
    [again] = consumer.take(1)
    assert (again["body"], again["reconsumeTimes"]) == ("m-0", 1)


def poll_all(lite: Client, count: int, first: Sequence[Event] = ()) -> list[Event]:
    """Polls until that many messages came, with those that came first."""
    messages = list(first)
    while len(messages) < count:
        messages += lite.call("lite.poll", timeout=1000)["messages"]
    return messages


def poll_from(lite: Client, count: int, to: object, **place: object) -> list[Event]:
    """Seeks, and polls until that many messages came.

    Apache's client may lose a seek: the pull task that it replaces reads the new offset, sees that it is cancelled, and
    ends, and the next one goes on at the old offset (`nextPullOffset`). So the seek is repeated until something comes.
    """
    first: list[Event] = []
    while not first:
        lite.call("lite.seek", **place, to=to)
        first = lite.call("lite.poll", timeout=5000)["messages"]
    return poll_all(lite, count, first)


def test_lite_pull_with_a_subscription(session: Session, topic: str, group: str) -> None:
    producer = session.producer(group)
    sent = producer.send(topic, "m", count=20, tags="a,b")
    lite = session.lite(group, subscribe=topic, expression="a", autoCommit=False)
    got = poll_all(lite, 10)
    assert sorted(bodies(got)) == sorted(numbered("m", 20)[::2])
    lite.call("lite.commit")
    broker = sent[0]["broker"]
    for queue in range(4):
        mine = [message["offset"] for message in got if message["queue"] == queue]
        noted = lite.call("lite.committed", topic=topic, broker=broker, queue=queue)["offset"]
        assert noted >= max(mine, default=-1) + 1
    commit(lambda: lite.call("lite.commit"), sent[::2], group)
    lite.stop()

    producer.send(topic, "more", count=4, tags="a")
    successor = session.lite(group, subscribe=topic, expression="a")
    assert sorted(bodies(poll_all(successor, 4))) == numbered("more", 4)


def test_lite_pull_members_share_the_queues(session: Session, topic: str, group: str) -> None:
    producer = session.producer(group)
    producer.create_topic(topic, 4)
    members = [session.lite(group, subscribe=topic) for _ in range(2)]
    producer.send(topic, "m", count=16, mode="ordered", shards=4)
    got: dict[str, Event] = {}
    while len(got) < 16:
        for member in members:
            found = member.call("lite.poll", timeout=200)["messages"]
            got |= {message["body"]: message for message in found}
    assert sorted(got) == sorted(numbered("m", 16))


def test_lite_pull_with_assigned_queues_and_seeks(session: Session, topic: str, group: str) -> None:
    place = {"topic": topic, "broker": seed(session, topic, group)[0]["broker"], "queue": 0}
    lite = session.lite(group, assign=topic, queue=0)
    assert bodies(poll_from(lite, 10, "begin", **place)) == numbered("m", 10)
    got = poll_from(lite, 4, 6, **place)
    assert bodies(got) == numbered("m", 10)[6:]
    time = got[2]["storeTimestamp"]
    found = lite.call("lite.offsetAt", **place, time=time)["offset"]
    assert found <= 8
    lite.call("lite.seek", **place, to="end")
    session.producer(group).send(topic, "news", mode="ordered", shards=1)
    assert bodies(poll_all(lite, 1)) == ["news"]
