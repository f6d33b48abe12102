"""A store with pops in flight moves from Apache's server to Skylark and back; all Apache's with `--server apache`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from drivers import Driver, Event, Session, bodies, readable
from poppers import LONG_MS, MOMENT_MS, Popper
from servers import SERVERS, Server

TOPIC, FIFO, GROUP = "popped", "in_order", "poppers"
# Time enough to acknowledge and to extend, and over before the test is: what was extended must not come again then.
SHORT_MS = 10_000


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    started: list[Server] = []
    yield started
    for server in started:
        server.kill()


class Stage:
    """One server after the other over the same store."""

    def __init__(self, servers: list[Server], directory: Path, driver: Driver) -> None:
        self._servers = servers
        self._directory = directory
        self._driver = driver

    def start(self, kind: str) -> None:
        before = self._servers[-1] if self._servers else None
        if before is not None:
            self.session.close(wait=True)
            before.stop()
        # A receipt handle names the broker, which keeps its name when another server takes its place.
        directory = self._directory / f"{len(self._servers)}-{kind}"
        server = SERVERS[kind](directory, before, brokerName="broker-a", reviveInterval="200")  # type: ignore[call-arg]
        self._servers.append(server)
        server.start()
        self.session = Session(self._driver, server.namesrv_addr)
        self.producer = self.session.producer("sender")
        if before is None:
            self.producer.create_topic(TOPIC, 1)
            self.producer.create_topic(FIFO, 1)
        self.any = Popper(self.session, server, GROUP, TOPIC)
        self.fifo = Popper(self.session, server, GROUP, FIFO)

    def next_in_order(self) -> list[Event]:
        found: list[Event] = self.fifo.call("pop", order=True, queue=0, max=1, invisibleMs=LONG_MS, pollMs=0)[
            "messages"
        ]
        return found


def test_pops_in_flight_move_between_servers(
    servers: list[Server], tmp_path: Path, java_latest: Driver, server_kind: str
) -> None:
    stage = Stage(servers, tmp_path, java_latest)
    stage.start("apache")
    readable(stage.producer.send(TOPIC, "m", count=6))
    readable(stage.producer.send(FIFO, "f", count=4))
    acked, batch, extended, late, *lost = stage.any.call("pop", max=6, invisibleMs=SHORT_MS)["messages"]
    assert stage.any.ack(acked) == "OK"
    assert stage.any.call("batchAck", handles=batch["handle"])["status"] == "OK"
    extended["handle"] = stage.any.call("extend", handle=extended["handle"], invisibleMs=LONG_MS)["handle"]
    late["handle"] = stage.any.call("extend", handle=late["handle"], invisibleMs=LONG_MS)["handle"]
    (held,) = stage.next_in_order()
    assert stage.next_in_order() == []

    stage.start(server_kind)
    assert stage.next_in_order() == []
    assert stage.fifo.ack(held) == "OK"
    (held,) = stage.next_in_order()
    assert held["body"] == "f-1"
    assert stage.any.ack(extended) == "OK"
    (one,) = stage.any.pop(1)
    assert stage.any.ack(one) == "OK"
    (other,) = stage.any.pop(1, invisibleMs=3 * MOMENT_MS)
    assert sorted(bodies([one, other])) == sorted(bodies(lost))

    stage.start("apache")
    assert stage.next_in_order() == []
    assert stage.fifo.ack(held) == "OK"
    assert bodies(stage.next_in_order()) == ["f-2"]
    (last,) = stage.any.pop(1)
    assert (last["body"], last["reconsumeTimes"]) == (other["body"], 2)
    assert stage.any.ack(last) == "OK"
    assert stage.any.ack(late) == "OK"
    assert stage.any.is_empty()
    stage.session.close()
