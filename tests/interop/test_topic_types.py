"""What kinds of messages topics take: attributes set with Apache's mqadmin, and sends of both languages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from drivers import Driver, DriverError, Session
from mqadmin import Admin, make_topic
from servers import Server

from skylark.client.errors import BrokerError
from skylark.client.sync import Producer


@pytest.fixture
def session(java_latest: Driver, server: Server) -> Iterator[Session]:
    session = Session(java_latest, server.namesrv_addr)
    yield session
    session.close()


def with_attributes(server: Server, topic: str, attributes: str) -> list[str]:
    return ["updateTopic", "-b", server.broker_addr, "-t", topic, "-r", "4", "-w", "4", "-a", attributes]


REFUSALS = {
    "+message.type=ODD": "value is not in set",
    "+message.type=MIXED": "MIXED message type is not supported.",
    "+cleanup.policy=DELETE": "attempt to update an unchangeable attribute. key: cleanup.policy",
    "+queue.type=SimpleCQ": "attempt to update an unchangeable attribute. key: queue.type",
    "-message.type": "attempt to delete a nonexistent key: message.type",
    "+nonsense=1": "unsupported key: nonsense",
    "message.type=FIFO": "add/alter attribute format is wrong: message.type",
}


def test_attributes_that_a_topic_can_not_get(admin: Admin, server: Server, topic: str) -> None:
    make_topic(admin, server, topic)
    for attributes, remark in REFUSALS.items():
        assert remark in admin.refused(*with_attributes(server, topic, attributes))


def test_a_type_is_set_and_taken_away(admin: Admin, server: Server, topic: str) -> None:
    for attributes in ("+message.type=FIFO", "+message.type=PRIORITY", "-message.type"):
        assert f"create topic to {server.broker_addr} success." in admin(*with_attributes(server, topic, attributes))


def test_types_are_checked_when_switched_on(
    admin: Admin, server: Server, server_kind: str, session: Session, topic: str, group: str
) -> None:
    if server_kind == "apache":
        pytest.skip("with Apache it is the proxy that checks")

    def switch(value: str) -> None:
        admin("updateBrokerConfig", "-b", server.broker_addr, "-k", "enableTopicMessageTypeCheck", "-v", value)

    kinds = {"NORMAL": {}, "FIFO": {"shardingKey": "k"}, "DELAY": {"delayLevel": 1}, "PRIORITY": {"priority": 2}}
    for kind in kinds:
        admin(*with_attributes(server, f"{topic}_{kind}", f"+message.type={kind}"))
    java = session.producer(group)
    switch("true")
    try:
        with Producer(server.namesrv_addr, group) as python:
            for kind, options in kinds.items():
                java.send(f"{topic}_{kind}", "m", **options)
            python.send(f"{topic}_DELAY", b"m", delay_level=1)
            python.send(f"{topic}_PRIORITY", b"m", priority=1)
            python.send(f"{topic}_FIFO", b"m", ordering_key="k", properties={"__SHARDINGKEY": "k"})
            text = "TopicMessageType validate failed, the expected type is FIFO, but actual type is DELAY"
            with pytest.raises(DriverError, match=f"CODE: 13  DESC: {text}"):
                java.send(f"{topic}_FIFO", "m", delayLevel=1)
            with pytest.raises(BrokerError, match=text) as refused:
                python.send(f"{topic}_FIFO", b"m", delay_level=1)
            assert refused.value.code == 13
    finally:
        switch("false")
    java.send(f"{topic}_FIFO", "m", delayLevel=1)
