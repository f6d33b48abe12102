"""Messages in transactions: Apache's TransactionMQProducer, its consumers, and ends that nobody should send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from drivers import Driver, Event, Session, bodies
from servers import SOON_ASKED, Server, request

COMMIT, ROLL_BACK, UNKNOWN = "COMMIT_MESSAGE", "ROLLBACK_MESSAGE", "UNKNOW"
END_TRANSACTION = 37
SYSTEM_ERROR = 1
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"

Start = Callable[..., Server]


def test_commits_are_delivered_and_what_is_open_is_asked_for(
    session: Session, server_kind: str, topic: str, group: str
) -> None:
    transactor = session.transactor(group)
    for body, answer in (("late", COMMIT), ("never", ROLL_BACK)):
        transactor.answer(body, answer)
    sent = transactor.send(topic, "good", COMMIT, tags="blue", keys="k", property={"mine": "kept"})
    assert transactor.send(topic, "bad", ROLL_BACK)["state"] == ROLL_BACK
    open_ones = [transactor.send(topic, body, UNKNOWN, tags="red") for body in ("late", "never")]
    consumer = session.consumer(group, topic)
    good, late = sorted(consumer.take(2), key=lambda event: event["body"])

    assert (sent["status"], sent["transactionId"]) == ("SEND_OK", sent["msgId"])
    assert bodies([good, late]) == ["good", "late"]
    assert (good["msgId"], good["queue"], good["tags"], good["keys"]) == (sent["msgId"], sent["queue"], "blue", "k")
    assert good["properties"]["mine"] == "kept"
    asked = transactor.until_asked("never", "late")
    # A broker that is slow asks for these too.
    asked = [event for event in asked if event["body"] not in ("good", "bad")]
    assert {event["properties"]["UNIQ_KEY"] for event in asked} == {result["msgId"] for result in open_ones}
    assert {(event["topic"], event["tags"]) for event in asked} == {(topic, "red")}
    assert all(int(event["properties"]["TRANSACTION_CHECK_TIMES"]) > 0 for event in asked)
    transactor.send(topic, "last", COMMIT)
    rest = bodies(consumer.take_until(lambda event: event["body"] == "last") + consumer.seen())
    if server_kind == "apache":  # when slow, it asks again for what has just been committed, and delivers it again
        rest = [body for body in rest if body != "late"]
    assert rest == ["last"]


def half_of(session: Session, server: Server, topic: str, sent: Event) -> dict[str, str]:
    """What a producer would send to end the transaction, except for the decision."""
    puller = session.puller("halves")
    queue = {"topic": HALF_TOPIC, "broker": broker_of(session, topic), "queue": 0}
    result = puller.call("pull", **queue, offset=sent["offset"], block=True)
    half = result["messages"][0]
    assert half["properties"]["REAL_TOPIC"] == topic
    return {
        "producerGroup": half["properties"]["PGROUP"],
        "tranStateTableOffset": str(half["offset"]),
        "commitLogOffset": str(half["logOffset"]),
        "commitOrRollback": "8",
        "msgId": sent["msgId"],
        "transactionId": sent["msgId"],
        "fromTransactionCheck": "false",
    }


def broker_of(session: Session, topic: str) -> str:
    name: str = session.puller("finder").call("puller.queues", topic=topic)["queues"][0]["broker"]
    return name


def test_a_transaction_is_not_ended_by_a_stranger_or_by_nonsense(
    java_latest: Driver, server: Server, topic: str, group: str
) -> None:
    session = Session(java_latest, server.namesrv_addr)
    transactor = session.transactor(group)
    sent = transactor.send(topic, "open", UNKNOWN, property={"CHECK_IMMUNITY_TIME_IN_SECONDS": "600"})
    [plain] = session.producer(f"{group}-plain").send(topic, "plain")
    end = half_of(session, server, topic, sent)
    plain_offset = str(int(plain["offsetMsgId"][16:], 16))

    def answer(**wrong: str) -> Any:
        return request(server.broker_addr, END_TRANSACTION, end | wrong)[0]

    stranger = answer(producerGroup="strangers")
    assert (stranger["code"], "The producer group wrong" in stranger["remark"]) == (SYSTEM_ERROR, True)
    number = answer(tranStateTableOffset=str(int(end["tranStateTableOffset"]) + 1))
    assert (number["code"], "transaction state table offset wrong" in number["remark"]) == (SYSTEM_ERROR, True)
    beyond = answer(commitLogOffset=str(1 << 40))
    assert (beyond["code"], "Find prepared transaction message failed" in beyond["remark"]) == (SYSTEM_ERROR, True)
    for wrong in (
        {"commitLogOffset": plain_offset, "tranStateTableOffset": str(plain["offset"])},
        {"commitLogOffset": "-1"},
        {"commitOrRollback": "4"},
        {"commitLogOffset": "soon"},
    ):
        assert answer(**wrong)["code"] == SYSTEM_ERROR, wrong

    consumer = session.consumer(group, topic)
    assert bodies(consumer.take(1)) == ["plain"]
    assert answer()["code"] == 0
    assert bodies(consumer.take(1)) == ["open"]
    assert answer(commitOrRollback="0x")["code"] == SYSTEM_ERROR
    session.close()


def test_skylark_ends_a_transaction_once(
    java_latest: Driver, server: Server, server_kind: str, topic: str, group: str
) -> None:
    if server_kind == "apache":
        pytest.skip("Apache's broker delivers a message again when its transaction is committed again")
    session = Session(java_latest, server.namesrv_addr)
    transactor = session.transactor(group)
    good = half_of(session, server, topic, transactor.send(topic, "good", COMMIT))
    consumer = session.consumer(group, topic)
    assert bodies(consumer.take(1)) == ["good"]
    bad = half_of(session, server, topic, transactor.send(topic, "bad", UNKNOWN)) | {"commitOrRollback": "12"}
    codes = [
        request(server.broker_addr, END_TRANSACTION, end)[0]["code"]
        for end in (good, bad, bad, good | {"commitOrRollback": "12"}, bad | {"commitOrRollback": "8"})
    ]
    assert codes == [0, 0, 0, 604, 604]
    transactor.send(topic, "last", COMMIT)
    assert bodies(consumer.take(1)) == ["last"]
    assert consumer.seen() == []
    session.close()


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_open_transactions_go_to_the_other_server_and_back(
    start: Start, java_latest: Driver, server_kind: str, end: str
) -> None:
    """Each part leaves some open; the next one is asked for them, and delivers exactly what was committed."""
    kinds = ["apache", server_kind, "apache"]
    topic, group = "orders", "shop"
    server = None
    for number, kind in enumerate(kinds):
        server = start(kind, server, **SOON_ASKED)
        session = Session(java_latest, server.namesrv_addr)
        transactor = session.transactor(group, topic if number else None)
        for earlier in range(number):
            transactor.answer(f"bad {earlier}", ROLL_BACK)  # whoever is killed may forget a roll back, and asks again
            transactor.answer(f"open {earlier}", COMMIT)
            transactor.answer(f"good {earlier}", COMMIT)
        transactor.send(topic, f"good {number}", COMMIT)
        transactor.send(topic, f"bad {number}", ROLL_BACK)
        consumer = session.consumer("reader", topic)
        expected = {f"good {number}"} | ({f"open {number - 1}"} if number else set())
        got: list[str] = []
        while not expected <= set(got):
            got += bodies(consumer.take(1))
        if number:
            transactor.until_asked(f"open {number - 1}")
        if number == len(kinds) - 1:
            break
        consumer.stop()
        transactor.send(topic, f"open {number}", UNKNOWN)
        transactor.send(topic, f"never {number}", UNKNOWN)
        if end == "stop":
            session.close(wait=True)
            server.stop()
        else:
            server.kill()
            session.close()

    puller = session.puller("auditor")
    found: list[str] = []
    for queue in puller.call("puller.queues", topic=topic)["queues"]:
        result = puller.call("pull", **queue, offset=0)
        while result["status"] == "FOUND":
            found += bodies(result["messages"])
            result = puller.call("pull", **queue, offset=result["next"])
    committed = ["good 0", "good 1", "good 2", "open 0", "open 1"]
    assert sorted(set(found)) == committed
    if end == "stop" and server_kind == "skylark":
        # What Skylark delivered, it delivered once. Apache's server, when slow or killed, asks for what has ended too.
        assert (found.count("good 1"), found.count("open 0")) == (1, 1)
    session.close()
