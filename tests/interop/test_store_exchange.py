"""One store directory, two servers: what Apache RocketMQ 5.5.0 wrote opens in Skylark, and the other way round.

The first server is filled through Apache's Java client and then stopped, or killed; the second opens the same
directory on the same addresses. Everything is compared as the client sees it. With `--server apache` Apache's server
takes both parts.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable

import pytest
from drivers import Client, Driver, Event, Session, bodies, numbered, queue_ids
from servers import Server, request

PERSIST_DEADLINE_S = 120.0
POLL_S = 0.05
GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201

PLAIN, BATCH, BIG, WORK, REFUSED, LATER = "plain", "batch", "big", "work", "refused", "later"
WORKER, REFUSER, READER = "worker", "refuser", "reader"
SENT = [PLAIN, BATCH, BIG, WORK, REFUSED]
# Topics that the broker writes by itself, from delays and retries. A killed broker may repeat the last of them.
DERIVED = [LATER, f"%RETRY%{REFUSER}", f"%DLQ%{REFUSER}"]

Content = dict[str, dict[int, list[Event]]]
Start = Callable[..., Server]


def content(puller: Client, topics: list[str]) -> Content:
    """Every message of the topics, by queue, without what is not in the store."""
    everything: Content = {}
    for topic in topics:
        for queue in puller.call("puller.queues", topic=topic)["queues"]:
            messages: list[Event] = []
            result = puller.call("pull", **queue, offset=0)
            while result["status"] == "FOUND":
                messages += result["messages"]
                result = puller.call("pull", **queue, offset=result["next"])
            for message in messages:
                del message["broker"], message["properties"]["MIN_OFFSET"], message["properties"]["MAX_OFFSET"]
            everything.setdefault(topic, {})[queue["queue"]] = messages
    return everything


def place(puller: Client, topic: str, queue: int) -> Event:
    found = puller.call("puller.queues", topic=topic)["queues"]
    return {"topic": topic, "broker": found[0]["broker"], "queue": queue}


def fill(session: Session) -> None:
    """Messages of every kind: consumed, left over, refused, delayed."""
    producer = session.producer("filler")
    for topic, queues in ((PLAIN, 4), (WORK, 2), (REFUSED, 1), (LATER, 1)):
        producer.create_topic(topic, queues)
    producer.send(PLAIN, "p", count=40, mode="ordered", shards=4, tags="a,b", keys="key", property={"mine": "yes"})
    producer.send(BATCH, "b", count=10, mode="batch", tags="a,b", keys="batch")
    producer.send(BIG, "x", size=200_000, flag=3)

    producer.send(WORK, "done", count=10, mode="ordered", shards=2)
    worker = session.consumer(WORKER, WORK)
    worker.take(10)
    worker.stop()
    producer.send(WORK, "left", count=6, mode="ordered", shards=2)

    producer.send(REFUSED, "no", tags="a", keys="unwanted")
    refuser = session.consumer(REFUSER, REFUSED, fail=99, delayLevel=1, maxReconsumeTimes=1)
    undertaker = session.consumer("undertaker", f"%DLQ%{REFUSER}")
    refuser.take(2)
    undertaker.take(1)
    refuser.stop()
    undertaker.stop()

    producer.send(LATER, "soon", delayLevel=1)
    punctual = session.consumer("punctual", LATER)
    punctual.take(1)
    punctual.stop()


def wait_for_offsets(server: Server, wanted: dict[str, dict[str, int]]) -> None:
    """Wait until the table of offsets on disk has these; brokers write it every few seconds."""
    path = server.store / "config" / "consumerOffset.json"
    deadline = time.monotonic() + PERSIST_DEADLINE_S
    while True:
        try:
            text = path.read_text()
        except FileNotFoundError:  # Apache's broker removes it for a moment while it writes another
            text = "{}"
        # The queues' numbers are keys without quotes in Apache's JSON.
        table = json.loads(re.sub(r"([{,]\s*)(\d+)\s*:", r'\1"\2":', text)).get("offsetTable", {})
        if all(wanted[key].items() <= table.get(key, {}).items() for key in wanted):
            return
        assert time.monotonic() < deadline, f"{wanted} not in {table}"
        time.sleep(POLL_S)


def write(session: Session, server: Server) -> tuple[Content, Event]:
    """Fill the server; all messages, and what it says about the offsets of one queue at the time of one message."""
    fill(session)
    puller = session.puller(READER)
    messages = content(puller, SENT + DERIVED)
    puller.call("puller.commit", **place(puller, PLAIN, 0), offset=7)
    offsets = offsets_at(puller, messages[PLAIN][0][5])
    wait_for_offsets(server, {f"{PLAIN}@{READER}": {"0": 7}, f"{WORK}@{WORKER}": {"0": 5, "1": 5}})
    session.producer("filler").send(LATER, "pending", delayLevel=3)
    return messages, offsets


def offsets_at(puller: Client, message: Event) -> Event:
    answer = puller.call("puller.offsets", **place(puller, PLAIN, 0), time=message["storeTimestamp"])
    return {name: answer[name] for name in ("min", "max", "atTime", "earliest", "committed")}


def check_messages(puller: Client, before: Content) -> None:
    after = content(puller, SENT + DERIVED)
    for topic in SENT:
        assert after[topic] == before[topic], topic
    for topic in DERIVED:
        assert after[topic].keys() == before[topic].keys(), topic
        for queue, messages in before[topic].items():
            assert after[topic][queue][: len(messages)] == messages, (topic, queue)
    assert bodies(after[f"%DLQ%{REFUSER}"][0])[0] == "no"


def check_queries(puller: Client, message: Event) -> None:
    for wanted in (message["offsetMsgId"], message["msgId"]):
        assert puller.call("puller.view", topic=PLAIN, msgId=wanted)["message"]["body"] == message["body"]
    assert bodies(puller.call("puller.query", topic=PLAIN, key="key-17")["messages"]) == ["p-17"]
    assert bodies(puller.call("puller.query", topic=BATCH, key="batch-3")["messages"]) == ["b-3"]


def check_groups(session: Session, server: Server) -> None:
    _, body = request(server.broker_addr, GET_ALL_SUBSCRIPTIONGROUP_CONFIG, {})
    assert {WORKER, REFUSER, READER} <= json.loads(body)["subscriptionGroupTable"].keys()
    worker = session.consumer(WORKER, WORK)
    assert sorted(bodies(worker.take(6))) == numbered("left", 6)
    assert worker.seen() == []
    session.consumer("latecomer", LATER).take_until(lambda event: event["body"] == "pending")


def check_writes(session: Session, puller: Client) -> None:
    producer = session.producer("filler")
    assert queue_ids(producer.call("producer.queues", topic=PLAIN)["queues"]) == [0, 1, 2, 3]
    [sent] = producer.send(PLAIN, "next", mode="ordered", shards=1, keys="fresh")
    assert (sent["queue"], sent["offset"]) == (0, 10)
    assert puller.call("puller.view", topic=PLAIN, msgId=sent["offsetMsgId"])["message"]["body"] == "next"


@pytest.mark.parametrize("end", ["stop", "kill"])
@pytest.mark.parametrize("writer", ["apache", "skylark"])
def test_a_store_moves_to_the_other_server(
    start: Start, java_latest: Driver, server_kind: str, writer: str, end: str
) -> None:
    reader = {"apache": "skylark", "skylark": "apache"}[writer]
    if server_kind == "apache":
        if writer == "skylark":
            pytest.skip("only Apache's server was asked for")
        reader = "apache"

    first = start(writer)
    session = Session(java_latest, first.namesrv_addr)
    messages, offsets = write(session, first)
    if end == "stop":
        session.close(wait=True)
        first.stop()
    else:
        first.kill()
        session.close()

    second = start(reader, first)
    session = Session(java_latest, second.namesrv_addr)
    puller = session.puller(READER)
    message = messages[PLAIN][0][5]
    check_messages(puller, messages)
    assert offsets_at(puller, message) == offsets
    check_queries(puller, message)
    check_groups(session, second)
    check_writes(session, puller)
    session.close()
