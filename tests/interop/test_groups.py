"""What operators do to consumer groups with Apache's mqadmin, while members of both languages consume."""

from __future__ import annotations

import json
import queue
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from drivers import EVENT_DEADLINE_S, Driver, Event, Session, numbered, readable
from drivers import PushConsumer as JavaConsumer
from mqadmin import Admin, columns, make_topic, value
from servers import POLL_S, Server, request

from skylark.client.listening import RetryLater
from skylark.client.message import Message, MessageQueue
from skylark.client.sync import LitePullConsumer, PushConsumer
from skylark.wire.bodies import ConsumerStatus, decode_body
from skylark.wire.codes import RequestCode

QUEUES = 2


@pytest.fixture
def session(java_latest: Driver, server: Server) -> Iterator[Session]:
    session = Session(java_latest, server.namesrv_addr)
    yield session
    session.close()


class Member:
    """A consumer of either language, seen by what it got."""

    def __init__(
        self,
        client_id: str,
        take: Callable[[int], list[str]],
        seen: Callable[[], list[str]],
        commit: Callable[[], object],
    ) -> None:
        self.client_id = client_id
        self.take = take
        self.seen = seen
        self.commit = commit


Join = Callable[..., Member]


@pytest.fixture(params=[True, False], ids=["java", "python"])
def is_java(request: pytest.FixtureRequest) -> bool:
    is_java: bool = request.param
    return is_java


@pytest.fixture
def join(is_java: bool, admin: Admin, server: Server, session: Session, topic: str, group: str) -> Iterator[Join]:
    """Makes a consumer of the topic, in each language in turn, that holds all queues."""
    opened: list[PushConsumer] = []

    def java(**options: Any) -> Member:
        consumer = session.consumer(options.pop("group", group), topic, **options)
        consumer.await_queues(QUEUES)
        return Member(
            client_of(admin, group, consumer),
            lambda count: sorted(event["body"] for event in consumer.take(count)),
            lambda: [event["body"] for event in consumer.seen()],
            lambda: consumer.call("consumer.persist"),
        )

    def python(**options: Any) -> Member:
        got: queue.SimpleQueue[str] = queue.SimpleQueue()
        fails = options.pop("fail", 0)

        def listen(message: Message) -> None:
            got.put(message.body.decode())
            if message.reconsume_times < fails:
                raise RetryLater

        consumer = PushConsumer(server.namesrv_addr, group, listener=listen, from_where="first", **options)
        consumer.subscribe(topic)
        consumer.start()
        opened.append(consumer)
        wait_for_queues(lambda: [each for each in consumer.queues if each.topic == topic])

        def seen() -> list[str]:
            return [got.get() for _ in range(got.qsize())]

        return Member(
            consumer.client_id,
            lambda count: sorted(got.get(timeout=EVENT_DEADLINE_S) for _ in range(count)),
            seen,
            consumer.commit,
        )

    make_topic(admin, server, topic, QUEUES)
    yield java if is_java else python
    for consumer in opened:
        consumer.close()


def wait_for_queues(owned: Callable[[], list[MessageQueue]]) -> None:
    deadline_s = time.monotonic() + EVENT_DEADLINE_S
    while len(owned()) < QUEUES:
        assert time.monotonic() < deadline_s, owned()
        time.sleep(POLL_S)


def client_of(admin: Admin, group: str, consumer: JavaConsumer) -> str:
    rows = columns(admin("consumerConnection", "-g", group))
    return next(row[0] for row in rows if row[0].endswith(f"@{consumer.name}"))


def send(session: Session, group: str, topic: str, prefix: str, count: int = 4) -> list[Event]:
    """Messages, one queue after the other."""
    return readable(session.producer(f"{group}_p").send(topic, prefix, count=count, mode="ordered", shards=QUEUES))


def consumed(server: Server, topic: str, group: str, count: int) -> None:
    """The group has taken so many messages, and is offline again."""
    got: queue.SimpleQueue[Message] = queue.SimpleQueue()
    consumer = PushConsumer(server.namesrv_addr, group, listener=got.put, from_where="first")
    consumer.subscribe(topic)
    with consumer:
        for _ in range(count):
            got.get(timeout=EVENT_DEADLINE_S)


def positions(admin: Admin, group: str, topic: str) -> list[int]:
    """How far the group has consumed each queue, by its last commit."""
    rows = [row for row in columns(admin("consumerProgress", "-g", group)) if row[0] == topic]
    return [int(row[4]) for row in sorted(rows, key=lambda row: int(row[2]))]


def await_positions(admin: Admin, member: Member, group: str, topic: str, wanted: list[int]) -> None:
    """Until the group has committed that much: a listener's return counts a moment later than it returns."""
    deadline_s = time.monotonic() + EVENT_DEADLINE_S
    member.commit()
    while (found := positions(admin, group, topic)) != wanted:
        assert time.monotonic() < deadline_s, found
        member.commit()


@pytest.fixture(params=[True, False], ids=["by the broker", "through its members"])
def resets_itself(request: pytest.FixtureRequest, admin: Admin, server: Server) -> Iterator[bool]:
    """The broker moves offsets itself or, as before 5.0, has the members of the group do it."""
    update = ("updateBrokerConfig", "-b", server.broker_addr, "-k", "useServerSideResetOffset", "-v")
    admin(*update, str(request.param).lower())
    yield request.param
    admin(*update, "true")


# Settings.


def test_every_setting_is_kept(admin: Admin, server: Server, group: str, tmp_path: Path) -> None:
    policy = '{"type":"EXPONENTIAL","exponentialRetryPolicy":{"initial":100,"max":900,"multiplier":3}}'
    flags = {
        "-s": "false", "-m": "true", "-d": "true", "-o": "true", "-q": "3", "-r": "5", "-p": policy,
        "-i": "0", "-w": "1", "-a": "false", "--attributes": "+priority.factor=30",
    }  # fmt: skip
    admin("updateSubGroup", "-b", server.broker_addr, "-g", group, *(word for pair in flags.items() for word in pair))
    shown = admin("getConsumerConfig", "-g", group)
    for name, wanted in {
        "consumeEnable": "false",
        "consumeFromMinEnable": "true",
        "consumeBroadcastEnable": "true",
        "consumeMessageOrderly": "true",
        "retryQueueNums": "3",
        "retryMaxTimes": "5",
        "brokerId": "0",
        "whichBrokerWhenConsumeSlowly": "1",
        "notifyConsumerIdsChangedEnable": "false",
        "attributes": "{priority.factor=30}",
    }.items():
        assert re.search(rf"^{name}\s*=\s*{re.escape(wanted)}\s*$", shown, re.MULTILINE), f"{name} in\n{shown}"
    assert "ExponentialRetryPolicy{initial=100, max=900, multiplier=3}" in shown
    admin("exportMetadata", "-b", server.broker_addr, "-g", "-f", str(tmp_path))
    [exported] = tmp_path.glob("*.json")
    table = json.loads(exported.read_text())["subscriptionGroupTable"]
    assert table[group]["retryMaxTimes"] == 5
    assert table[group]["groupRetryPolicy"]["exponentialRetryPolicy"] == {"initial": 100, "max": 900, "multiplier": 3}


def test_several_groups_from_a_file(admin: Admin, server: Server, group: str, tmp_path: Path) -> None:
    groups = [{"groupName": f"{group}_{number}", "retryMaxTimes": number} for number in range(2)]
    file = tmp_path / "groups.json"
    file.write_text(json.dumps(groups))
    admin("updateSubGroupList", "-b", server.broker_addr, "-f", str(file))
    for number in range(2):
        shown = admin("getConsumerConfig", "-g", f"{group}_{number}")
        assert re.search(rf"retryMaxTimes\s*=\s*{number}\s", shown)


@pytest.mark.parametrize(
    ("name", "attributes", "remark"),
    [
        ("bad*name", "+priority.factor=1", "contains illegal characters"),
        ("fine", "+priority.factor=101", "value is not in range(0, 100)"),
        ("fine", "+no.such=1", "unsupported key: no.such"),
    ],
)
def test_settings_that_are_refused(admin: Admin, server: Server, name: str, attributes: str, remark: str) -> None:
    update = ("updateSubGroup", "-b", server.broker_addr, "-g", name, "--attributes", attributes)
    assert remark in admin.refused(*update)


# Stopping and going on.


def test_a_group_is_stopped_and_goes_on(
    admin: Admin, server: Server, session: Session, topic: str, group: str, join: Join
) -> None:
    member = join()
    send(session, group, topic, "before")
    assert member.take(4) == numbered("before", 4)
    admin("updateSubGroup", "-b", server.broker_addr, "-g", group, "-s", "false")
    send(session, group, topic, "while")
    other = session.consumer(f"{group}_other", topic)  # when it has them, the stopped group could have had them
    other.take(8)
    assert member.seen() == []
    admin("updateSubGroup", "-b", server.broker_addr, "-g", group, "-s", "true")
    assert member.take(4) == numbered("while", 4)


# Offsets.


def test_a_running_group_is_sent_back_in_time(
    admin: Admin, server: Server, session: Session, topic: str, group: str, join: Join, resets_itself: bool
) -> None:
    member = join()
    send(session, group, topic, "m")
    assert member.take(4) == numbered("m", 4)
    await_positions(admin, member, group, topic, [2, 2])
    output = admin("resetOffsetByTime", "-g", group, "-t", topic, "-s", "0")
    assert sorted(row[1:] for row in columns(output)[-QUEUES:]) == [["0", "0"], ["1", "0"]]
    assert member.take(4) == numbered("m", 4)


def test_one_queue_goes_to_an_offset(
    admin: Admin, server: Server, session: Session, topic: str, group: str, join: Join
) -> None:
    member = join()
    send(session, group, topic, "m", 8)
    assert member.take(8) == numbered("m", 8)
    await_positions(admin, member, group, topic, [4, 4])
    at = ("-g", group, "-t", topic, "-s", "0", "-b", server.broker_addr, "-q", "1", "-o")
    assert "reset consumer offset to 3" in admin("resetOffsetByTime", *at, "3")
    assert member.take(1) == ["m-7"]
    outside = admin.refused("resetOffsetByTime", *at, "99")
    assert "Target offset 99 not in consume queue range [0-4]" in outside


def test_what_has_piled_up_is_skipped(
    admin: Admin, server: Server, session: Session, topic: str, group: str, join: Join
) -> None:
    admin("updateSubGroup", "-b", server.broker_addr, "-g", group, "-s", "false")
    send(session, group, topic, "old")
    member = join()
    output = admin("skipAccumulatedMessage", "-g", group, "-t", topic)
    assert sorted(row[1:] for row in columns(output)[-QUEUES:]) == [["0", "2"], ["1", "2"]]
    admin("updateSubGroup", "-b", server.broker_addr, "-g", group, "-s", "true")
    send(session, group, topic, "new")
    assert member.take(4) == numbered("new", 4)


def test_an_offline_group_is_moved(
    admin: Admin, server: Server, session: Session, topic: str, group: str, resets_itself: bool
) -> None:
    make_topic(admin, server, topic, QUEUES)
    send(session, group, topic, "m")
    consumed(server, topic, group, 4)
    assert positions(admin, group, topic) == [2, 2]
    admin("resetOffsetByTime", "-g", group, "-t", topic, "-s", "0")
    assert positions(admin, group, topic) == [0, 0]
    # A time that is yet to come is the end of the queue.
    admin("resetOffsetByTime", "-g", group, "-t", topic, "-s", str(int(time.time() * 1000) + 3_600_000))
    assert positions(admin, group, topic) == [2, 2]


def test_moves_of_what_is_not_there_are_refused(admin: Admin, server: Server, topic: str, group: str) -> None:
    make_topic(admin, server, topic, QUEUES)
    nobody = admin.refused("resetOffsetByTime", "-g", group, "-t", topic, "-s", "0")
    assert f"Group {group} does not exist" in nobody
    nothing = admin.refused("resetOffsetByTime", "-g", group, "-t", f"{topic}_no", "-s", "0")
    assert f"No topic route info in name server for the topic: {topic}_no" in nothing


def test_offsets_are_copied_to_another_group(
    admin: Admin, server: Server, session: Session, topic: str, group: str
) -> None:
    make_topic(admin, server, topic, QUEUES)
    send(session, group, topic, "m")
    consumed(server, topic, group, 4)
    heir = f"{group}_heir"
    admin("updateSubGroup", "-b", server.broker_addr, "-g", heir)
    assert "clone group offset success" in admin("cloneGroupOffset", "-s", group, "-d", heir, "-t", topic)
    send(session, group, topic, "new")
    assert sorted(event["body"] for event in session.consumer(heir, topic).take(4)) == numbered("new", 4)


# Members.


def test_a_message_is_consumed_by_a_named_client(
    admin: Admin, server: Server, session: Session, topic: str, group: str, join: Join
) -> None:
    member = join()
    [sent, *_] = send(session, group, topic, "m")
    assert member.take(4) == numbered("m", 4)
    asked = ("queryMsgById", "-t", topic, "-i", sent["offsetMsgId"], "-g", group, "-d")
    assert "consumeResult=CR_SUCCESS" in admin(*asked, member.client_id)
    assert member.take(1) == ["m-0"]
    assert f"The Consumer <{group}> <nobody> not online" in admin.refused(*asked, "nobody")


def test_a_client_says_that_it_could_not_consume_a_message(
    admin: Admin, server: Server, session: Session, topic: str, group: str, join: Join
) -> None:
    member = join(fail=1)
    [sent, *_] = send(session, group, topic, "m")
    output = admin("queryMsgById", "-t", topic, "-i", sent["offsetMsgId"], "-g", group, "-d", member.client_id)
    assert "consumeResult=CR_LATER" in output


def test_running_info_with_stacks(
    admin: Admin, server: Server, session: Session, topic: str, group: str, join: Join, is_java: bool
) -> None:
    member = join()
    output = admin("consumerStatus", "-g", group, "-i", member.client_id, "-s")
    assert "#Consumer jstack#" in output
    assert topic in output
    stacks = output.partition("#Consumer jstack#")[2]
    assert re.search(r"TID: \d+ STATE: \w+", stacks)
    if is_java:
        assert "RebalanceService" in stacks
    else:
        assert re.search(rf"^pull {topic}-0 .*skylark\.client\.pulling\.PullLoop\.run\(pulling\.py:\d+\)", stacks, re.M)
    assert f"The Consumer <{group}> <nobody> not online" in admin.refused("consumerStatus", "-g", group, "-i", "nobody")


def test_running_info_of_all_members(admin: Admin, server: Server, session: Session, topic: str, group: str) -> None:
    make_topic(admin, server, topic, QUEUES)
    session.consumer(group, topic).await_queues(QUEUES)
    consumer = PushConsumer(server.namesrv_addr, group, listener=lambda message: None)
    consumer.subscribe(topic)
    with consumer:
        output = admin("consumerStatus", "-g", group)
        assert consumer.client_id in output
        assert "Same subscription in the same group of consumer" in output


def test_where_the_members_stand(
    admin: Admin, server: Server, session: Session, topic: str, group: str, join: Join
) -> None:
    member = join()
    send(session, group, topic, "m")
    member.take(4)
    await_positions(admin, member, group, topic, [2, 2])
    # mqadmin has no command for it; dashboards ask like this.
    asked = {"group": group, "topic": topic, "clientAddr": member.client_id}
    header, body = request(server.broker_addr, RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, asked)
    assert header["code"] == 0
    [table] = decode_body(ConsumerStatus, body).consumer_table.values()
    assert sorted((mq.queue_id, offset) for mq, offset in table.items()) == [(0, 2), (1, 2)]


def test_running_info_of_a_lite_consumer(admin: Admin, server: Server, topic: str, group: str) -> None:
    make_topic(admin, server, topic, QUEUES)
    consumer = LitePullConsumer(server.namesrv_addr, group)
    consumer.subscribe(topic)
    with consumer:
        wait_for_queues(consumer.assignment)
        [client] = [row[0] for row in columns(admin("consumerConnection", "-g", group)) if "PYTHON" in row]
        output = admin("consumerStatus", "-g", group, "-i", client, "-s")
        assert "CONSUME_ACTIVELY" in output
        assert topic in output


def test_the_entries_of_a_queue(
    admin: Admin, server: Server, session: Session, topic: str, group: str, join: Join
) -> None:
    join()
    [sent, *_] = send(session, group, topic, "m")
    output = admin("queryCq", "-t", topic, "-q", "0", "-i", "0", "-c", "10", "-b", server.broker_addr, "-g", group)
    assert output.count("physicOffset") == 2
    assert int(sent["offsetMsgId"][16:], 16) == int(re.search(r"physicOffset=(\d+)", output)[1])  # type: ignore[index]
    missing = admin.refused("queryCq", "-t", topic, "-q", "9", "-i", "0", "-c", "10", "-b", server.broker_addr)
    assert f"9@{topic} is not exist!" in missing


# Dead letters.


def test_a_group_limits_how_often_a_message_is_tried(
    admin: Admin, server: Server, session: Session, topic: str, group: str, join: Join, is_java: bool
) -> None:
    """Apache's client names its own limit; ours leaves it to the group."""
    admin("updateSubGroup", "-b", server.broker_addr, "-g", group, "-r", "0")
    member = join(fail=99, **({"maxReconsumeTimes": 0} if is_java else {}))
    [sent] = send(session, group, topic, "bad", 1)
    assert member.take(1) == ["bad-0"]
    dead_letters = f"%DLQ%{group}"
    [dead] = session.consumer(f"{group}_undertaker", dead_letters).take(1)
    assert (dead["body"], dead["reconsumeTimes"]) == ("bad-0", 1)
    assert dead["properties"]["RETRY_TOPIC"] == topic
    assert dead["properties"]["ORIGIN_MESSAGE_ID"] == sent["offsetMsgId"]
    route = admin("topicRoute", "-t", dead_letters)
    assert re.search(r'"perm":6', route)
    assert value(admin("queryMsgById", "-t", dead_letters, "-i", dead["offsetMsgId"]), "Reconsume Times") == "1"
