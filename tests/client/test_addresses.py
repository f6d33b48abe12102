"""The addresses of name servers: what is taken, and what is said of the rest."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from skylark.client.addresses import AddressServer, locate, parse_name_servers
from skylark.client.errors import InvalidMessage, MessageNotFound, NotANameServer, NotReachable
from skylark.client.session import Session
from skylark.client.sync import Producer, PullConsumer, QueryClient
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
    with pytest.raises(InvalidMessage, match=complaint):  # an error of the client, as all are
        Producer(given)


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


def test_the_environment_tells_what_the_caller_does_not() -> None:
    assert locate(None, environment={}) == (["localhost:9876"], None)
    assert locate(None, environment={"NAMESRV_ADDR": "a:1;b:2", "ROCKETMQ_NAMESRV_DOMAIN": "x"})[0] == ["a:1", "b:2"]
    assert locate("c:3", environment={"NAMESRV_ADDR": "a:1"})[0] == ["c:3"]
    addresses, server = locate(
        None, "eu", {"ROCKETMQ_NAMESRV_DOMAIN": "names:80", "ROCKETMQ_NAMESRV_DOMAIN_SUBGROUP": "s"}
    )
    assert addresses == []
    assert server is not None
    assert server.url == "http://names:80/rocketmq/s-eu?nofix=1"
    assert AddressServer.of_domain("names").url == "http://names:8080/rocketmq/nsaddr"
    with pytest.raises(InvalidMessage, match="name_servers is 3"):
        locate(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'x' is not an address"):
        locate(None, environment={"NAMESRV_ADDR": "x"})


class Answers:
    """What an address server says, and what it was asked."""

    def __init__(self) -> None:
        self.status = 200
        self.text = ""
        self.paths: list[str] = []
        self.url = ""


@contextmanager
def address_server() -> Iterator[Answers]:
    answers = Answers()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers.paths.append(self.path)
            self.send_response(answers.status)
            self.end_headers()
            self.wfile.write(answers.text.encode())

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        answers.url = f"http://127.0.0.1:{server.server_port}/rocketmq/nsaddr"
        try:
            yield answers
        finally:
            server.shutdown()
            thread.join()


def test_an_address_server_is_asked_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(topics={"orders": 1}) as cluster, address_server() as answers:
        answers.text = f" {cluster.name_servers}\r\nsomething else\n"
        with Producer(answers.url) as producer:
            assert producer.send("orders", b"x").queue.queue_id == 0
        monkeypatch.delenv("NAMESRV_ADDR", raising=False)
        monkeypatch.setenv("ROCKETMQ_NAMESRV_DOMAIN", answers.url.split("/")[2])
        with Producer() as producer:
            assert producer.send("orders", b"x").queue.queue_id == 0
        assert answers.paths == ["/rocketmq/nsaddr"] * 2


def test_an_address_server_may_change_its_mind_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    with address_server() as answers:

        async def run() -> None:
            answers.text = "a:1"
            session = Session(answers.url)
            async with session:
                await session.look_up_name_servers()
                assert session.name_servers == ["a:1"]
                answers.text = "b:1;c:2"
                await session.look_up_name_servers()
                for answers.status, answers.text in ((500, "d:4"), (200, ""), (200, "<html>")):
                    await session.look_up_name_servers()
                    assert session.name_servers == ["b:1", "c:2"]
            assert len([each for each in caplog.records if "stay as they are" in each.getMessage()]) == 3
            answers.status = 500
            async with Session(answers.url) as session:
                with pytest.raises(NotReachable, match="can't be asked: HTTP Error 500"):
                    await session.routes.get("orders")

        asyncio.run(run())
