"""Request and reply between Apache's Java clients."""

from __future__ import annotations

import pytest
from drivers import DriverError, Session


def test_a_request_gets_its_reply(session: Session, topic: str, group: str) -> None:
    session.producer(group).create_topic(topic, 2)
    responder = session.responder(group, topic, times=2)
    requester = session.requester(group)
    answer = requester.call("request", topic=topic, body="hello")
    assert (answer["body"], answer["topic"]) == ("re: hello", "DefaultCluster_REPLY_TOPIC")
    properties = answer["properties"]
    assert properties["MSG_TYPE"] == "reply"
    assert properties["TTL"] == "10000"
    assert int(properties["PUSH_REPLY_TIME"]) <= int(properties["ARRIVE_TIME"])
    assert [event["reply"] for event in responder.take(2)] == ["SEND_OK", "SEND_OK"], "the second has no effect"


def test_nobody_replies(session: Session, topic: str, group: str) -> None:
    session.producer(group).create_topic(topic, 2)
    requester = session.requester(group)
    with pytest.raises(DriverError, match="wait reply message timeout, 300 ms"):
        requester.call("request", topic=topic, body="hello", timeoutMs=300)
    requester.stop()
    (event,) = session.responder(group, topic).take(1)
    assert "channel of" in event["reply"]
    assert "not found" in event["reply"]
