"""Request and reply between Apache's Java clients."""

from __future__ import annotations

import pytest
from drivers import Client, DriverError, Session


def test_a_request_gets_its_reply(session: Session, topic: str, group: str) -> None:
    session.producer(group).create_topic(topic, 2)
    responder = session.responder(group, topic, times=2)
    requester = session.requester(group)
    answer = requester.call("request", topic=topic, body="hello")
    assert (answer["body"], answer["topic"]) == ("re: hello", "DefaultCluster_REPLY_TOPIC")
    properties = answer["properties"]
    assert properties["MSG_TYPE"] == "reply"
    assert properties["TTL"] == "60000"
    assert int(properties["PUSH_REPLY_TIME"]) <= int(properties["ARRIVE_TIME"])
    assert [event["reply"] for event in responder.take(2)] == ["SEND_OK", "SEND_OK"], "the second has no effect"


def until_in_vain(requester: Client, topic: str) -> None:
    """Asks where nobody replies; again and for longer, if asking took all the time."""
    for timeout_ms in (300, 3_000, 30_000):
        with pytest.raises(DriverError) as failure:
            requester.call("request", topic=topic, body="hello", timeoutMs=timeout_ms)
        if f"wait reply message timeout, {timeout_ms} ms" in str(failure.value):
            return
    raise failure.value


def test_nobody_replies(session: Session, topic: str, group: str) -> None:
    session.producer(group).create_topic(topic, 2)
    requester = session.requester(group)
    until_in_vain(requester, topic)
    requester.stop()
    (event,) = session.responder(group, topic).take(1)
    assert "channel of" in event["reply"]
    assert "not found" in event["reply"]
