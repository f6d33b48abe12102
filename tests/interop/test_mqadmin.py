"""The everyday commands of Apache's mqadmin 5.5.0, and what they print."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator

import pytest
from drivers import Driver, Event, Session, bodies, numbered, readable, wait_indexed
from mqadmin import Admin, columns, make_topic, value
from servers import Server


@pytest.fixture
def session(java_latest: Driver, server: Server) -> Iterator[Session]:
    session = Session(java_latest, server.namesrv_addr)
    yield session
    session.close()


def route_of(admin: Admin, topic: str) -> Event:
    """The route as the command prints it: JSON, but for the bare numbers that are keys."""
    text = admin("topicRoute", "-t", topic)
    route: Event = json.loads(re.sub(r"^(\s*)(\d+):", r'\1"\2":', text, flags=re.MULTILINE))
    return route


def test_update_topic_on_a_broker(admin: Admin, server: Server, topic: str) -> None:
    output = make_topic(admin, server, topic, 6)
    assert f"create topic to {server.broker_addr} success." in output
    assert f"topicName={topic}, readQueueNums=6, writeQueueNums=6, perm=RW-" in output


def test_update_topic_on_a_cluster(admin: Admin, server: Server, topic: str) -> None:
    output = admin("updateTopic", "-c", server.cluster, "-t", topic, "-r", "3", "-w", "2", "-p", "4")
    assert f"create topic to {server.broker_addr} success." in output
    route = route_of(admin, topic)
    [queue] = route["queueDatas"]
    assert (queue["readQueueNums"], queue["writeQueueNums"], queue["perm"]) == (3, 2, 4)


def test_topic_list(admin: Admin, server: Server, topic: str) -> None:
    make_topic(admin, server, topic)
    topics = admin("topicList").split()
    assert topic in topics
    assert {"TBW102", "SCHEDULE_TOPIC_XXXX", "OFFSET_MOVED_EVENT"} <= set(topics)


def test_topic_list_with_clusters(admin: Admin, server: Server, session: Session, topic: str, group: str) -> None:
    make_topic(admin, server, topic)
    session.consumer(group, topic).await_queues(4)
    assert [server.cluster, topic, group] in columns(admin("topicList", "-c"))


def test_topic_route(admin: Admin, server: Server, topic: str) -> None:
    make_topic(admin, server, topic, 5)
    route = route_of(admin, topic)
    [broker] = route["brokerDatas"]
    assert broker["brokerAddrs"] == {"0": server.broker_addr}
    assert broker["cluster"] == server.cluster
    [queue] = route["queueDatas"]
    assert queue == {
        "brokerName": broker["brokerName"],
        "perm": 6,
        "readQueueNums": 5,
        "topicSysFlag": 0,
        "writeQueueNums": 5,
    }
    listed = columns(admin("topicRoute", "-t", topic, "-l"))
    assert [server.cluster, broker["brokerName"], f"{{0={server.broker_addr}}}", "5", "5", "6"] in listed


def test_topic_status(admin: Admin, server: Server, session: Session, topic: str, group: str) -> None:
    make_topic(admin, server, topic)
    [sent] = readable(session.producer(group).send(topic, "m", mode="ordered", shards=1))
    rows = columns(admin("topicStatus", "-t", topic))
    times = re.compile(r"\d{4}-\d\d-\d\d")
    assert [row[1:4] for row in rows[:4]] == [["0", "0", "1"], ["1", "0", "0"], ["2", "0", "0"], ["3", "0", "0"]]
    assert rows[0][0] == sent["broker"]
    assert times.match(rows[0][4])


def test_cluster_list(admin: Admin, server: Server) -> None:
    [row] = columns(admin("clusterList"))
    assert row[0] == server.cluster
    assert row[2:4] == ["0", server.broker_addr]
    more = columns(admin("clusterList", "-m"))
    assert [each[0] for each in more] == [server.cluster]


def test_broker_status(admin: Admin, server: Server) -> None:
    output = admin("brokerStatus", "-b", server.broker_addr)
    for name in ("putMessageTimesTotal", "getMessageEntireTimeMax", "msgPutTotalTodayNow", "bootTimestamp"):
        assert re.fullmatch(r"\d+", value(output, name)), name
    for name in ("runtime", "putTps", "getTotalTps", "pageCacheLockTimeMills", "sendThreadPoolQueueSize"):
        assert value(output, name) != "", name
    assert "commitLogDirCapacity" in output


def test_update_sub_group(admin: Admin, server: Server, group: str) -> None:
    output = admin("updateSubGroup", "-b", server.broker_addr, "-g", group, "-r", "3", "-q", "2")
    assert f"create subscription group to {server.broker_addr} success." in output
    assert f"groupName={group}" in output
    output = admin("updateSubGroup", "-c", server.cluster, "-g", group, "-r", "4")
    assert "retryMaxTimes=4" in output
    config = admin("getConsumerConfig", "-g", group)
    assert re.search(r"retryMaxTimes\s*=\s*4", config), config


def consumed(session: Session, topic: str, group: str, count: int = 8) -> list[Event]:
    """Messages that the group has taken and reported."""
    sent = session.producer(group).send(topic, "m", count=count, mode="ordered", shards=4, keys="key", tags="a")
    consumer = session.consumer(group, topic)
    consumer.take(count)
    consumer.commit(sent, group)
    consumer.stop()
    return sent


def test_consumer_progress(admin: Admin, server: Server, session: Session, topic: str, group: str) -> None:
    make_topic(admin, server, topic)
    sent = consumed(session, topic, group)
    readable(session.producer(group).send(topic, "more", count=4, mode="ordered", shards=4))
    output = admin("consumerProgress", "-g", group)
    rows = [row for row in columns(output) if row[0] == topic]
    assert [row[1:5] for row in rows] == [[sent[0]["broker"], str(queue), "3", "2"] for queue in range(4)]
    assert value(output, "Consume Diff Total") == "4"


def test_consumer_progress_of_all_groups(
    admin: Admin, server: Server, session: Session, topic: str, group: str
) -> None:
    make_topic(admin, server, topic)
    session.consumer(group, topic).await_queues(4)
    rows = {row[0]: row for row in columns(admin("consumerProgress"))}
    assert rows[group][1] == "1"
    assert "CLUSTERING" in rows[group]


def test_consumer_connection(admin: Admin, server: Server, session: Session, topic: str, group: str) -> None:
    make_topic(admin, server, topic)
    consumer = session.consumer(group, topic, expression="a || b")
    consumer.await_queues(4)
    output = admin("consumerConnection", "-g", group)
    [client] = [row for row in columns(output) if row[0].endswith(f"@{consumer.name}")]
    assert client[2] == "JAVA"
    assert client[3] == "V5_5_0"
    assert re.search(rf"^{topic}\s+a \|\| b$", output, re.MULTILINE)
    assert re.search(rf"^%RETRY%{group}\s+\*$", output, re.MULTILINE)
    assert value(output, "ConsumeType") == "CONSUME_PASSIVELY"
    assert value(output, "MessageModel") == "CLUSTERING"
    assert value(output, "ConsumeFromWhere") == "CONSUME_FROM_FIRST_OFFSET"


def test_consumer_running_info(admin: Admin, server: Server, session: Session, topic: str, group: str) -> None:
    make_topic(admin, server, topic)
    consumer = session.consumer(group, topic)
    consumer.await_queues(4)
    client = next(row[0] for row in columns(admin("consumerConnection", "-g", group)) if f"@{consumer.name}" in row[0])
    output = admin("consumerStatus", "-g", group, "-i", client)
    assert "#Consumer Properties#" in output
    assert topic in output


def test_producer_connection(admin: Admin, session: Session, topic: str, group: str) -> None:
    producer = session.producer(group)
    producer.send(topic, "m")
    # The client tells its groups to a broker on the heartbeat that follows the first route.
    producer.call("producer.heartbeat")
    [row] = columns(admin("producerConnection", "-g", group, "-t", topic))
    assert row[0] == "0001"
    assert row[1].endswith(f"@{producer.name}")
    assert row[3:] == ["JAVA", "V5_5_0"]


@pytest.fixture
def sent(session: Session, topic: str, group: str) -> Event:
    """One message with everything on it."""
    [sent] = session.producer(group).send(topic, "the body", tags="blue", keys="order-1", property={"mine": "yes"})
    wait_indexed(session.puller(group), topic, "order-1")
    return sent


def test_query_message_by_id(admin: Admin, topic: str, sent: Event) -> None:
    output = admin("queryMsgById", "-t", topic, "-i", sent["offsetMsgId"], "-f", "UTF-8")
    assert value(output, "OffsetID") == sent["offsetMsgId"]
    assert value(output, "Topic") == topic
    assert value(output, "Tags") == "[blue]"
    assert value(output, "Keys") == "[order-1]"
    assert value(output, "Queue ID") == str(sent["queue"])
    assert value(output, "Queue Offset") == "0"
    assert value(output, "Message Body") == "the body"
    assert "mine=yes" in value(output, "Properties")


def test_query_message_by_key(admin: Admin, topic: str, sent: Event) -> None:
    rows = columns(admin("queryMsgByKey", "-t", topic, "-k", "order-1"))
    assert [row[:3] for row in rows] == [[sent["msgId"], str(sent["queue"]), "0"]]


def test_query_message_by_unique_key(admin: Admin, topic: str, sent: Event) -> None:
    output = admin("queryMsgByUniqueKey", "-t", topic, "-i", sent["msgId"])
    assert value(output, "Topic") == topic
    assert value(output, "Tags") == "[blue]"
    assert value(output, "Queue ID") == str(sent["queue"])


def test_print_messages(admin: Admin, server: Server, session: Session, topic: str, group: str) -> None:
    make_topic(admin, server, topic)
    readable(session.producer(group).send(topic, "m", count=12, tags="a,b"))
    output = admin("printMsg", "-t", topic, "-d", "true")
    assert sorted(re.findall(r"BODY: (\S+)", output)) == sorted(numbered("m", 12))
    assert output.count("minOffset=0, maxOffset=3, ") == 4
    filtered = admin("printMsg", "-t", topic, "-d", "true", "-s", "b")
    assert sorted(re.findall(r"BODY: (\S+)", filtered)) == sorted(numbered("m", 12)[1::2])


def test_query_message_by_offset(admin: Admin, topic: str, sent: Event) -> None:
    place = ("-b", sent["broker"], "-i", str(sent["queue"]))
    output = admin("queryMsgByOffset", "-t", topic, *place, "-o", "0", "-f", "UTF-8")
    assert value(output, "OffsetID") == sent["offsetMsgId"]
    assert value(output, "Message Body") == "the body"
    assert "OffsetID" not in admin("queryMsgByOffset", "-t", topic, *place, "-o", "5"), "an offset outside the queue"


def test_query_message_by_tag(admin: Admin, topic: str, sent: Event) -> None:
    rows = columns(admin("queryMsgByKey", "-t", topic, "-k", "blue", "-p", "T"))
    assert [row[:3] for row in rows] == [[sent["msgId"], str(sent["queue"]), "0"]]


def test_print_messages_of_a_queue(admin: Admin, server: Server, session: Session, topic: str, group: str) -> None:
    make_topic(admin, server, topic)
    sent = readable(session.producer(group).send(topic, "m", count=8, mode="ordered", shards=2, tags="a,b,b,a"))
    output = admin("printMsgByQueue", "-t", topic, "-a", sent[0]["broker"], "-i", "1", "-d", "true", "-p", "true")
    assert re.findall(r"BODY: (\S+)", output) == ["m-1", "m-3", "m-5", "m-7"]
    counts = admin("printMsgByQueue", "-t", topic, "-a", sent[0]["broker"], "-i", "0", "-f", "true")
    assert sorted(re.findall(r"Tag: (\S+)\s+Count: (\d+)", counts)) == [("a", "2"), ("b", "2")]


def test_consume_messages(admin: Admin, server: Server, session: Session, topic: str, group: str) -> None:
    make_topic(admin, server, topic, 2)
    sent = readable(session.producer(group).send(topic, "m", count=6, mode="ordered", shards=2))
    # The tool can do this once in its life: its consumer is a field of the command.
    output = admin("consumeMessage", "-t", topic, "-b", sent[0]["broker"], "-i", "1", "-o", "1", "-c", "2")
    assert re.findall(r"BODY: (\S+)", output) == ["m-3", "m-5"]


def test_reset_offset_of_a_resting_group(
    admin: Admin, server: Server, session: Session, topic: str, group: str
) -> None:
    make_topic(admin, server, topic)
    consumed(session, topic, group)
    output = admin("resetOffsetByTime", "-g", group, "-t", topic, "-s", "0")
    assert sorted(row[1:] for row in columns(output)[-4:]) == [[str(queue), "0"] for queue in range(4)]
    again = session.consumer(group, topic).take(8)
    assert sorted(bodies(again)) == numbered("m", 8)


def test_reset_offset_of_a_running_group(
    admin: Admin, server: Server, session: Session, topic: str, group: str
) -> None:
    make_topic(admin, server, topic)
    session.producer(group).send(topic, "m", count=8, mode="ordered", shards=4)
    consumer = session.consumer(group, topic)
    consumer.take(8)
    consumer.call("consumer.persist")
    before = str(int(time.time() * 1000) - 3_600_000)
    admin("resetOffsetByTime", "-g", group, "-t", topic, "-s", before)
    assert sorted(bodies(consumer.take(8))) == numbered("m", 8)


def test_delete_topic(admin: Admin, server: Server, session: Session, topic: str, group: str) -> None:
    make_topic(admin, server, topic)
    session.producer(group).send(topic, "m")
    output = admin("deleteTopic", "-c", server.cluster, "-t", topic)
    assert f"delete topic [{topic}] from cluster [{server.cluster}] success." in output
    assert f"delete topic [{topic}] from NameServer success." in output
    assert topic not in admin("topicList").split()
    make_topic(admin, server, topic)
    assert [row[1:4] for row in columns(admin("topicStatus", "-t", topic))[:4]] == [
        [str(queue), "0", "0"] for queue in range(4)
    ]


def test_delete_sub_group(admin: Admin, server: Server, session: Session, topic: str, group: str) -> None:
    make_topic(admin, server, topic)
    consumed(session, topic, group)
    output = admin("deleteSubGroup", "-b", server.broker_addr, "-g", group, "-r", "true")
    assert f"delete subscription group [{group}] from broker [{server.broker_addr}] success." in output
    # Without its offsets the group starts over.
    assert sorted(bodies(session.consumer(group, topic).take(8))) == numbered("m", 8)


def test_broker_config(admin: Admin, server: Server) -> None:
    output = admin("getBrokerConfig", "-b", server.broker_addr)
    assert value(output, "brokerClusterName") == server.cluster
    assert value(output, "listenPort") == server.broker_addr.rpartition(":")[2]
    assert value(output, "flushDiskType") in {"ASYNC_FLUSH", "SYNC_FLUSH"}

    before = value(output, "fileReservedTime")
    try:
        changed = admin("updateBrokerConfig", "-b", server.broker_addr, "-k", "fileReservedTime", "-v", "73")
        assert f"update broker config success, {server.broker_addr}" in changed
        assert value(admin("getBrokerConfig", "-b", server.broker_addr), "fileReservedTime") == "73"
    finally:
        admin("updateBrokerConfig", "-c", server.cluster, "-k", "fileReservedTime", "-v", before)
    assert value(admin("getBrokerConfig", "-c", server.cluster), "fileReservedTime") == before
