"""The addresses of name servers: what is taken, and what is said of the rest."""

from __future__ import annotations

import pytest

from skylark.client.addresses import parse_name_servers
from skylark.client.errors import MessageNotFound, NotANameServer
from skylark.client.sync import PullConsumer, QueryClient
from skylark.net.pool import split_address
from skylark.testing import LocalCluster
from skylark.wire.records import encode_host


@pytest.mark.parametrize(
    ("given", "addresses"),
    [
        ("a:1", ["a:1"]),
        (" a:1 ;b:2, c:3 d:4\n", ["a:1", "b:2", "c:3", "d:4"]),
        ("a:1;", ["a:1"]),
        ("a:1;;b:2", ["a:1", "b:2"]),
        (";a:1;;", ["a:1"]),
        (["a:1", ""], ["a:1"]),
        ("http://a:1/", ["a:1"]),
        ("http://a:1;[::1]:2", ["a:1", "[::1]:2"]),
        (["a:1", " b:2 "], ["a:1", "b:2"]),
    ],
)
def test_addresses(given: str | list[str], addresses: list[str]) -> None:
    assert parse_name_servers(given) == addresses


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("", "no name server is given"),
        (" ", "no name server is given"),
        (";", "no name server is given"),
        ([], "no name server is given"),
        ("xx", "'xx' is not an address of the form host:port"),
        ("a:1;b:", "'b:' is not an address"),
        ("a :1", "'a' is not an address"),
        ("a..b:9876", "'a..b' is neither a name nor an IP address"),
        ("http://a", "'http://a'.* is not an address of the form host:port"),
        ("a:1/", "'a:1/' is not an address of the form host:port"),
        ("a:99999", "'a:99999' has no port that exists"),
    ],
)
def test_what_is_no_address(given: str | list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_name_servers(given)


def test_a_broker_is_no_name_server() -> None:
    with LocalCluster() as cluster:
        address = cluster.broker.address
        said = f"{address} is a broker, not a name server; give the name server's address"
        with PullConsumer(address) as consumer, pytest.raises(NotANameServer, match=said):
            consumer.queues("orders")


def test_a_name_server_is_no_broker() -> None:
    with LocalCluster() as cluster:
        host, port = split_address(cluster.name_servers)
        place = encode_host(host, port).hex().upper() + "0" * 16
        with QueryClient(cluster.name_servers) as client, pytest.raises(MessageNotFound, match="is no broker"):
            client.by_id(place)
