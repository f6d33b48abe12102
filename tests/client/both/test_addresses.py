"""A broker's address given as a name server's, against both servers."""

from __future__ import annotations

import pytest
from servers import Server

from skylark.client.errors import NotANameServer
from skylark.client.sync import Producer, PullConsumer


def test_a_broker_is_no_name_server(server: Server, topic: str) -> None:
    said = f"{server.broker_addr} is a broker, not a name server; give the name server's address"
    with PullConsumer(server.broker_addr) as consumer, pytest.raises(NotANameServer, match=said):
        consumer.queues(topic)


def test_a_broker_among_the_name_servers_is_no_harm(server: Server, topic: str) -> None:
    for given in ([server.broker_addr, server.namesrv_addr], [server.namesrv_addr, server.broker_addr]):
        with Producer(given) as producer:
            producer.send(topic, b"hello")
