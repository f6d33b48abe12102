"""Apache's Java push consumer: concurrent and orderly, clustering and broadcasting, filters, retries, rebalance."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
from drivers import Driver, PushConsumer, Session, bodies, numbered
from servers import Server


@pytest.mark.parametrize("mode", ["concurrent", "orderly"])
def test_members_of_a_group_share_the_messages(session: Session, topic: str, group: str, mode: str) -> None:
    producer = session.producer(group)
    producer.create_topic(topic, 4)
    members = [session.consumer(group, topic, mode=mode) for _ in range(2)]
    for member in members:
        member.await_queues(2)
    producer.send(topic, "m", count=40, mode="ordered", shards=4)

    shares = [member.take(20) for member in members]
    assert sorted(bodies(itertools.chain(*shares))) == sorted(numbered("m", 40))
    assert not any(member.seen() for member in members)


def test_broadcasting_gives_every_member_every_message(session: Session, topic: str, group: str) -> None:
    producer = session.producer(group)
    producer.create_topic(topic, 4)
    members = [session.consumer(group, topic, model="broadcasting") for _ in range(2)]
    producer.send(topic, "m", count=20)
    for member in members:
        assert sorted(bodies(member.take(20))) == sorted(numbered("m", 20))
        assert member.seen() == []


def test_orderly_broadcasting(session: Session, topic: str, group: str) -> None:
    # One member: Apache's client locks its queues here too, and a second would wait a minute for a lock to expire.
    producer = session.producer(group)
    producer.send(topic, "m", count=20, mode="ordered", shards=4)
    got = session.consumer(group, topic, mode="orderly", model="broadcasting").take(20)
    for queue in range(4):
        assert [event["body"] for event in got if event["queue"] == queue] == numbered("m", 20)[queue::4]


def test_orderly_members_keep_each_queue_in_order(session: Session, topic: str, group: str) -> None:
    producer = session.producer(group)
    producer.create_topic(topic, 4)
    members = [session.consumer(group, topic, mode="orderly") for _ in range(2)]
    for member in members:
        member.await_queues(2)
    producer.send(topic, "m", count=80, mode="ordered", shards=4)

    for member in members:
        queues = defaultdict(list)
        for event in member.take(40):
            queues[event["queue"]].append(event["body"])
        assert len(queues) == 2
        for queue, seen in queues.items():
            assert seen == [f"m-{number}" for number in range(80) if number % 4 == queue]


def test_a_tag_filter_lets_only_its_tags_through(session: Session, topic: str, group: str) -> None:
    session.producer(group).send(topic, "m", count=30, tags="a,b,c")
    consumer = session.consumer(group, topic, expression="a || c")
    got = consumer.take(20)
    assert {event["tags"] for event in got} == {"a", "c"}
    assert sorted(bodies(got)) == sorted(f"m-{number}" for number in range(30) if number % 3 != 1)
    assert consumer.seen() == []


def test_messages_that_arrive_while_the_consumer_waits_are_filtered_too(
    session: Session, topic: str, group: str
) -> None:
    producer = session.producer(group)
    producer.create_topic(topic, 1)
    consumer = session.consumer(group, topic, expression="a")
    consumer.await_queues(1)
    producer.send(topic, "m", count=6, tags="b,a")
    assert sorted(bodies(consumer.take(3))) == ["m-1", "m-3", "m-5"]
    assert consumer.seen() == []


def test_two_topics_in_one_consumer(session: Session, topic: str, group: str) -> None:
    other = f"{topic}_other"
    producer = session.producer(group)
    producer.send(topic, "here", count=4)
    producer.send(other, "there", count=4)
    got = session.consumer(group, topic, alsoTopic=other).take(8)
    assert {(event["topic"], event["body"]) for event in got} == {
        *((topic, body) for body in numbered("here", 4)),
        *((other, body) for body in numbered("there", 4)),
    }


def test_a_group_goes_on_where_it_stopped(session: Session, topic: str, group: str) -> None:
    producer = session.producer(group)
    early = producer.send(topic, "early", count=12)
    first = session.consumer(group, topic)
    first.take(12)
    first.commit(early, group)
    first.stop()
    producer.send(topic, "later", count=8)
    second = session.consumer(group, topic)
    assert sorted(bodies(second.take(8))) == sorted(numbered("later", 8))
    assert second.seen() == []


def test_a_new_group_that_wants_the_end_still_gets_a_young_topic_whole(
    session: Session, topic: str, group: str
) -> None:
    # The broker answers offset 0 while the first message of the queue is still in memory.
    session.producer(group).send(topic, "m", count=8)
    consumer = session.consumer(group, topic, from_="last")
    assert sorted(bodies(consumer.take(8))) == sorted(numbered("m", 8))


def test_a_refused_message_comes_again(session: Session, topic: str, group: str) -> None:
    [sent] = session.producer(group).send(topic, "again", tags="a", keys="k", property={"mine": "kept"})
    first, second = session.consumer(group, topic, fail=1, delayLevel=1, expression="a").take(2)

    assert [first["reconsumeTimes"], second["reconsumeTimes"]] == [0, 1]
    assert (second["topic"], second["body"], second["tags"], second["keys"]) == (topic, "again", "a", "k")
    assert first["msgId"] == second["msgId"] == sent["msgId"]
    assert second["properties"]["mine"] == "kept"
    assert second["properties"]["ORIGIN_MESSAGE_ID"] == sent["offsetMsgId"]
    assert (second["properties"]["DELAY"], second["properties"]["WAIT"]) == ("1", "false")
    assert second["storeTimestamp"] - first["storeTimestamp"] >= 1000


def dead_letters(session: Session, group: str) -> PushConsumer:
    return session.consumer(f"{group}_undertaker", f"%DLQ%{group}")


def test_a_message_refused_too_often_becomes_a_dead_letter(session: Session, topic: str, group: str) -> None:
    [sent] = session.producer(group).send(topic, "doomed", tags="a", keys="k", property={"mine": "kept"})
    consumer = session.consumer(group, topic, fail=99, delayLevel=1, maxReconsumeTimes=2)
    assert [event["reconsumeTimes"] for event in consumer.take(3)] == [0, 1, 2]

    [letter] = dead_letters(session, group).take(1)
    assert (letter["topic"], letter["body"], letter["tags"], letter["keys"]) == (f"%DLQ%{group}", "doomed", "a", "k")
    assert letter["properties"]["mine"] == "kept"
    assert letter["properties"]["ORIGIN_MESSAGE_ID"] == sent["offsetMsgId"]
    assert letter["properties"]["RETRY_TOPIC"] == topic
    assert letter["msgId"] == sent["msgId"]
    assert consumer.seen() == []


def test_an_orderly_consumer_stays_at_a_refused_message(session: Session, topic: str, group: str) -> None:
    session.producer(group).send(topic, "m", count=3, mode="ordered", shards=1)
    got = session.consumer(group, topic, mode="orderly", fail=2).take(9)
    assert [(event["body"], event["reconsumeTimes"]) for event in got] == [
        (body, times) for body in numbered("m", 3) for times in range(3)
    ]


def test_an_orderly_consumer_gives_up_into_the_dead_letters(session: Session, topic: str, group: str) -> None:
    session.producer(group).send(topic, "m", count=2, mode="ordered", shards=1)
    consumer = session.consumer(group, topic, mode="orderly", fail=99, maxReconsumeTimes=1)
    letters = dead_letters(session, group).take(2)
    assert sorted(bodies(letters)) == numbered("m", 2)
    # On a slow machine the client may have to try more than once to hand a message back.
    got = [(event["body"], event["reconsumeTimes"]) for event in consumer.seen() if event["reconsumeTimes"] < 2]
    assert got == [("m-0", 0), ("m-0", 1), ("m-1", 0), ("m-1", 1)]


def test_queues_move_as_members_come_and_go(java_notified: Driver, server: Server, topic: str, group: str) -> None:
    """The clients here never look by themselves whether the group changed: the broker has to tell them."""
    session = Session(java_notified, server.namesrv_addr)
    producer = session.producer(group)
    producer.create_topic(topic, 8)

    def settled(members: list[PushConsumer], shares: list[int]) -> None:
        held = [member.await_queues(share) for member, share in zip(members, shares, strict=True)]
        assert sorted(itertools.chain(*held)) == list(range(8))

    first = session.consumer(group, topic)
    settled([first], [8])
    second = session.consumer(group, topic)
    settled([first, second], [4, 4])
    third = session.consumer(group, topic)
    settled([first, second, third], [3, 3, 2])
    producer.send(topic, "three", count=24, mode="ordered", shards=8)
    got = first.take(9) + second.take(9) + third.take(6)
    assert sorted(bodies(got)) == sorted(numbered("three", 24))

    first.stop()
    settled([second, third], [4, 4])
    third.stop()
    settled([second], [8])
    producer.send(topic, "one", count=16, mode="ordered", shards=8)
    # A queue that moved may bring again what its last owner had not reported yet; nothing may be missing.
    missing = set(numbered("one", 16))
    while missing:
        missing -= set(bodies(second.take(1)))
    session.close()
