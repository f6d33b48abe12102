"""Apache's Go client v2: sends, push and pull consumers, filters, retries, rebalance, topic administration.

The Go client looks for new routes every 30 s and its consumers refuse to start without one, so topics are created
before their consumers, the retry topic too where a test waits for a retry.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator

import pytest
from drivers import Client, Driver, DriverError, Event, PushConsumer, Session, bodies, commit, numbered, readable
from servers import CACHE, ROOT, Server


@pytest.fixture(scope="module")
def go(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """A process with Apache's Go client, built when a source changed."""
    setup = [sys.executable, str(ROOT / "tools" / "interop_setup.py"), "go"]
    done = subprocess.run(setup, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(done.stderr, pytrace=False)
    directory = tmp_path_factory.mktemp("go")
    # Broadcasting consumers keep their offsets in files, which belong neither in the home nor in the next run.
    offsets = f"rocketmq.client.localOffsetStoreDir={directory / 'offsets'}"
    driver = Driver(["env", offsets, f"HOME={directory}", str(CACHE / "driver-go")], log=directory / "driver.log")
    yield driver
    driver.close()


@pytest.fixture
def session(go: Driver, server: Server) -> Iterator[Session]:
    session = Session(go, server.namesrv_addr)
    yield session
    session.close()


class Admin:
    def __init__(self, driver: Driver, server: Server) -> None:
        self._driver = driver
        self._addresses = {"namesrv": server.namesrv_addr, "brokerAddr": server.broker_addr}

    def create(self, topic: str, queues: int = 4) -> None:
        self._driver.call("admin.createTopic", topic=topic, queues=queues, **self._addresses)

    def delete(self, topic: str) -> None:
        self._driver.call("admin.deleteTopic", topic=topic, **self._addresses)

    def topics(self) -> list[str]:
        names: list[str] = self._driver.call("admin.topics", **self._addresses)["topics"]
        return names

    def queues(self, topic: str) -> list[Event]:
        queues: list[Event] = self._driver.call("admin.queues", topic=topic, **self._addresses)["queues"]
        return sorted(queues, key=lambda queue: queue["queue"])

    def groups(self) -> list[str]:
        names: list[str] = self._driver.call("admin.groups", **self._addresses)["groups"]
        return names


@pytest.fixture
def admin(go: Driver, server: Server) -> Admin:
    return Admin(go, server)


def by_queue(events: list[Event]) -> dict[int, list[Event]]:
    queues = defaultdict(list)
    for event in events:
        queues[event["queue"]].append(event)
    return queues


def poll(client: Client, count: int) -> list[Event]:
    """What a pull consumer gets until it has that many messages."""
    got: list[Event] = []
    while len(got) < count:
        got += client.call("lite.poll", timeout=1000)["messages"]
    return got


# --- sending ----------------------------------------------------------------------------------------------------------
def test_a_message_arrives_as_it_was_sent(session: Session, topic: str, group: str) -> None:
    [sent] = session.producer(group).send(
        topic, "höllo ✓", tags="blue", keys="order-17", flag=7, property={"city": "Zürich"}
    )
    [got] = session.consumer(group, topic).take(1)

    assert sent["status"] == "SEND_OK"
    assert (got["body"], got["tags"], got["keys"], got["flag"]) == ("höllo ✓", "blue", "order-17", 7)
    assert got["properties"]["city"] == "Zürich"
    for name in ("msgId", "offsetMsgId", "topic", "queue", "offset"):
        assert got[name] == sent[name], name


def test_synchronous_sends_fill_the_queues_in_sequence(session: Session, admin: Admin, topic: str, group: str) -> None:
    admin.create(topic)
    sent = session.producer(group).send(topic, "m", count=24)
    assert {result["status"] for result in sent} == {"SEND_OK"}
    assert {result["queue"] for result in sent} == {0, 1, 2, 3}
    for results in by_queue(sent).values():
        assert [result["offset"] for result in results] == list(range(len(results)))
    assert sorted(bodies(session.consumer(group, topic).take(24))) == sorted(numbered("m", 24))


def test_asynchronous_sends_are_all_acknowledged(session: Session, admin: Admin, topic: str, group: str) -> None:
    admin.create(topic)
    sent = session.producer(group).send(topic, "m", count=64, mode="async")
    got = session.consumer(group, topic).take(64)
    assert [result["status"] for result in sent] == ["SEND_OK"] * 64
    assert {result["msgId"] for result in sent} == {event["msgId"] for event in got}
    assert sorted(bodies(got)) == sorted(numbered("m", 64))


def test_one_way_sends_arrive(session: Session, admin: Admin, topic: str, group: str) -> None:
    admin.create(topic)
    session.producer(group).send(topic, "m", count=16, mode="oneway")
    assert sorted(bodies(session.consumer(group, topic).take(16))) == sorted(numbered("m", 16))


def test_a_batch_is_stored_message_by_message(session: Session, admin: Admin, topic: str, group: str) -> None:
    admin.create(topic)
    [sent] = session.producer(group).send(topic, "m", count=10, mode="batch", tags="a,b", keys="k")
    got = sorted(session.consumer(group, topic).take(10), key=lambda event: event["offset"])

    assert sent["status"] == "SEND_OK"
    assert bodies(got) == numbered("m", 10)
    assert [event["tags"] for event in got] == ["a", "b"] * 5
    assert [event["keys"] for event in got] == numbered("k", 10)
    assert [event["offset"] for event in got] == list(range(10))
    assert {event["queue"] for event in got} == {sent["queue"]}
    assert [event["offsetMsgId"] for event in got] == sent["offsetMsgId"].split(",")


def test_a_sharding_key_keeps_its_messages_in_one_queue_and_in_order(
    session: Session, admin: Admin, topic: str, group: str
) -> None:
    admin.create(topic)
    session.producer(group, selector="hash").send(topic, "m", count=40, mode="ordered", shards=4)
    shards = defaultdict(list)
    for event in session.consumer(group, topic, mode="orderly").take(40):
        shards[event["properties"]["SHARDING_KEY"]].append(event)

    assert len(shards) == 4
    for shard, events in shards.items():
        assert len({event["queue"] for event in events}) == 1
        assert bodies(events) == [f"m-{number}" for number in range(40) if f"shard-{number % 4}" == shard]


def test_a_producer_may_name_the_queue(session: Session, admin: Admin, topic: str, group: str) -> None:
    admin.create(topic)
    [queue] = [each for each in admin.queues(topic) if each["queue"] == 3]
    sent = session.producer(group, selector="manual").send(topic, "m", count=5, broker=queue["broker"], queue=3)
    assert [(result["queue"], result["offset"]) for result in sent] == [(3, offset) for offset in range(5)]


def test_a_delayed_message_comes_after_its_delay(session: Session, admin: Admin, topic: str, group: str) -> None:
    admin.create(topic)
    consumer = session.consumer(group, topic)
    producer = session.producer(group)
    producer.send(topic, "soon", delayLevel=1, tags="slow", property={"mine": "kept"})
    producer.send(topic, "now")
    got = {event["body"]: event for event in consumer.take(2)}

    assert got.keys() == {"now", "soon"}
    soon = got["soon"]
    assert soon["storeTimestamp"] - soon["bornTimestamp"] >= 1000
    assert (soon["topic"], soon["tags"], soon["properties"]["mine"]) == (topic, "slow", "kept")


def test_a_body_that_the_client_compresses_comes_back_whole(
    session: Session, admin: Admin, topic: str, group: str
) -> None:
    admin.create(topic)
    session.producer(group).send(topic, "big", size=200_000)
    [got] = session.consumer(group, topic).take(1)
    assert got["body"] == "big" + "x" * (200_000 - 3)


# --- push consumers ---------------------------------------------------------------------------------------------------
def send_to_each_queue(session: Session, admin: Admin, topic: str, count: int) -> list[str]:
    """Send `qN-0`, `qN-1`… to every queue N of the topic; all bodies."""
    producer = session.producer(f"{topic}_producer", selector="manual")
    for queue in admin.queues(topic):
        producer.send(topic, f"q{queue['queue']}", count=count, broker=queue["broker"], queue=queue["queue"])
    return [body for queue in admin.queues(topic) for body in numbered(f"q{queue['queue']}", count)]


def test_members_of_a_group_share_the_messages(session: Session, admin: Admin, topic: str, group: str) -> None:
    admin.create(topic)
    members = [session.consumer(group, topic) for _ in range(2)]
    for member in members:
        member.await_queues(2)
    sent = send_to_each_queue(session, admin, topic, 10)
    shares = [member.take(20) for member in members]
    assert sorted(bodies(itertools.chain(*shares))) == sorted(sent)


def test_orderly_members_keep_each_queue_in_order(session: Session, admin: Admin, topic: str, group: str) -> None:
    # The Go client never unlocks a queue that it gives away, so here every member has its queues from the beginning.
    admin.create(topic)
    members = [session.consumer(group, topic, mode="orderly", share=share) for share in ("0,1", "2,3")]
    sent = send_to_each_queue(session, admin, topic, 10)
    shares = [by_queue(member.take(20)) for member in members]
    assert [sorted(share) for share in shares] == [[0, 1], [2, 3]]
    assert [body for share in shares for queue in sorted(share) for body in bodies(share[queue])] == sent


def test_broadcasting_gives_every_member_every_message(session: Session, admin: Admin, topic: str, group: str) -> None:
    # Not tried orderly: the Go client then still wants the queue's lock, which only one member can have.
    admin.create(topic)
    members = [session.consumer(group, topic, model="broadcasting") for _ in range(2)]
    session.producer(group).send(topic, "m", count=20)
    for member in members:
        assert sorted(bodies(member.take(20))) == sorted(numbered("m", 20))
        assert member.seen() == []


def test_a_tag_filter_lets_only_its_tags_through(session: Session, admin: Admin, topic: str, group: str) -> None:
    admin.create(topic)
    producer = session.producer(group)
    producer.send(topic, "early", count=30, tags="a,b,c")
    consumer = session.consumer(group, topic, expression="a || c")
    early = consumer.take(20)
    producer.send(topic, "later", count=30, tags="a,b,c")
    later = consumer.take(20)

    for prefix, events in (("early", early), ("later", later)):
        assert {event["tags"] for event in events} == {"a", "c"}
        assert sorted(bodies(events)) == sorted(f"{prefix}-{number}" for number in range(30) if number % 3 != 1)
    assert consumer.seen() == []


def test_a_group_goes_on_where_it_stopped(session: Session, admin: Admin, topic: str, group: str) -> None:
    admin.create(topic, 1)
    producer = session.producer(group)
    early = producer.send(topic, "early", count=12)
    # With one thread and one queue every delivery acknowledges the one before it; the last may still be unacknowledged.
    first = session.consumer(group, topic, threads=1)
    first.take(12)
    first.stop()
    commit(lambda: None, early[:-1], group)
    producer.send(topic, "later", count=8)
    got = bodies(session.consumer(group, topic, threads=1).take_until(lambda event: event["body"] == "later-7"))
    assert got[-8:] == numbered("later", 8)
    assert got[:-8] in ([], ["early-11"])


def dead_letters(session: Session, group: str) -> PushConsumer:
    return session.consumer(f"{group}_undertaker", f"%DLQ%{group}")


def test_a_message_refused_too_often_becomes_a_dead_letter(
    session: Session, admin: Admin, topic: str, group: str
) -> None:
    admin.create(topic, 1)
    admin.create(f"%RETRY%{group}", 1)
    [sent] = session.producer(group).send(topic, "doomed", tags="a", keys="k", property={"mine": "kept"})
    consumer = session.consumer(group, topic, fail=99, delayLevel=1, maxReconsumeTimes=1)
    first, second = consumer.take(2)
    [letter] = dead_letters(session, group).take(1)

    assert [first["reconsumeTimes"], second["reconsumeTimes"]] == [0, 1]
    assert (second["topic"], second["body"], second["tags"], second["keys"]) == (topic, "doomed", "a", "k")
    assert second["storeTimestamp"] - first["storeTimestamp"] >= 1000
    assert (letter["topic"], letter["body"], letter["tags"], letter["keys"]) == (f"%DLQ%{group}", "doomed", "a", "k")
    assert letter["properties"]["mine"] == "kept"
    assert letter["properties"]["ORIGIN_MESSAGE_ID"] == sent["offsetMsgId"]
    assert letter["properties"]["RETRY_TOPIC"] == topic
    assert consumer.seen() == []


def test_an_orderly_consumer_stays_at_a_refused_message(session: Session, admin: Admin, topic: str, group: str) -> None:
    admin.create(topic, 1)
    session.producer(group).send(topic, "m", count=3)
    got = session.consumer(group, topic, mode="orderly", fail=2).take(9)
    assert [(event["body"], event["reconsumeTimes"]) for event in got] == [
        (body, times) for body in numbered("m", 3) for times in range(3)
    ]


def test_queues_move_as_members_come_and_go(session: Session, admin: Admin, topic: str, group: str) -> None:
    admin.create(topic, 8)

    def settled(*members: PushConsumer) -> None:
        held = [member.await_queues(8 // len(members)) for member in members]
        assert sorted(itertools.chain(*held)) == list(range(8))

    first = session.consumer(group, topic)
    settled(first)
    second = session.consumer(group, topic)
    settled(first, second)
    first.stop()
    settled(second)
    session.producer(group).send(topic, "m", count=16)
    assert sorted(bodies(second.take(16))) == sorted(numbered("m", 16))


# --- pull consumers ---------------------------------------------------------------------------------------------------
def test_a_pull_consumer_polls_what_its_group_has_not_seen(
    session: Session, admin: Admin, topic: str, group: str
) -> None:
    admin.create(topic)
    producer = session.producer(group)
    early = producer.send(topic, "early", count=12)
    first = session.lite(group, subscribe=topic)
    assert sorted(bodies(poll(first, 12))) == sorted(numbered("early", 12))
    commit(lambda: first.call("lite.commit", topic=topic), early, group)
    first.stop()

    producer.send(topic, "later", count=8)
    second = session.lite(group, subscribe=topic)
    assert sorted(bodies(poll(second, 8))) == sorted(numbered("later", 8))


def test_a_pull_consumer_reads_a_queue_from_any_offset(session: Session, admin: Admin, topic: str, group: str) -> None:
    admin.create(topic, 1)
    [queue] = admin.queues(topic)
    readable(session.producer(group).send(topic, "m", count=10))
    puller = session.lite(group, subscribe=topic)

    found = puller.call("pull", **queue, offset=4, max=3)
    assert (found["status"], found["next"], found["min"], found["max"]) == ("FOUND", 7, 0, 10)
    assert bodies(found["messages"]) == ["m-4", "m-5", "m-6"]
    beyond = puller.call("pull", **queue, offset=50)
    assert (beyond["status"], beyond["next"]) == ("OFFSET_ILLEGAL", 10)


# --- administration ---------------------------------------------------------------------------------------------------
def test_topics_are_created_and_deleted(admin: Admin, topic: str) -> None:
    admin.create(topic, 3)
    assert topic in admin.topics()
    assert sorted(queue["queue"] for queue in admin.queues(topic)) == [0, 1, 2]
    admin.delete(topic)
    assert topic not in admin.topics()


def test_a_topic_without_a_route_is_an_error(session: Session, go: Driver, server: Server, topic: str) -> None:
    with pytest.raises(DriverError, match="not exist"):
        go.call("admin.queues", namesrv=server.namesrv_addr, topic=topic)


def test_the_group_of_a_consumer_is_listed(session: Session, admin: Admin, topic: str, group: str) -> None:
    admin.create(topic)
    session.consumer(group, topic).await_queues(4)
    assert group in admin.groups()
