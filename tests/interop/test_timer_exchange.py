"""Timers that wait while their store goes from Apache RocketMQ 5.5.0 to Skylark and back.

Each server takes some timers and recalls two before the next one opens its store, after a stop or a kill. Whichever
server has the store when a timer is due delivers it; recalled ones never come. The window is so short that timers are
rolled on their way, by one server or the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from drivers import Driver, Session
from servers import SERVERS, Server

TOPIC = "Exchanged"
SETTINGS = {"recallMessageEnable": "true", "timerRollWindowSlot": "6"}
TAKEN_UP_DEADLINE_S = 30.0
POLL_S = 0.05
UNIT_BYTES = 52
Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path, java_parts: None) -> Iterator[Start]:
    """Starts a server, in the place of another if that is given; ends them all."""
    servers: list[Server] = []

    def start(kind: str, replaces: Server | None = None) -> Server:
        server = SERVERS[kind](tmp_path / f"{len(servers)}-{kind}", replaces, **SETTINGS)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.kill()


def put(driver: Driver, server: Server, name: str) -> dict[str, int]:
    """Puts timers: due while this server runs or the store moves, due later, and one that is recalled."""
    session = Session(driver, server.namesrv_addr)
    sender = session.timers("timers")
    now_ms = time.time_ns() // 1_000_000
    due_ms = {}
    for body, delay_ms in ((f"{name}-soon", 1500), (f"{name}-late", 9_000), (f"{name}-later", 16_000)):
        due_ms[body] = now_ms + delay_ms
        sender.call("timers.send", topic=TOPIC, body=body, delayMs=delay_ms)
    for delay_ms in (5_000, 12_000):
        recalled = sender.call("timers.send", topic=TOPIC, body=f"{name}-recalled", delayMs=delay_ms)
        sender.call("timers.recall", topic=TOPIC, handle=recalled["handle"])
    session.close()
    return due_ms


def wait_on_the_wheel(server: Server, count: int) -> None:
    """Until the timer log of a server has so many units: what is on the wheel, not only in its queue."""
    deadline = time.monotonic() + TAKEN_UP_DEADLINE_S
    while True:
        files = sorted((server.store / "timerlog").glob("0*"))
        with files[0].open("rb") if files else Path("/dev/null").open("rb") as log:
            head = log.read((count + 1) * UNIT_BYTES)
        units = [head[at : at + 4] for at in range(0, len(head), UNIT_BYTES)]
        if units[count - 1 : count] == [UNIT_BYTES.to_bytes(4, "big")]:
            return
        assert time.monotonic() < deadline, f"{len(units)} units, {count} are wanted"
        time.sleep(POLL_S)


@pytest.mark.parametrize("ends", [("stop", "kill"), ("kill", "stop")], ids="-".join)
def test_timers_survive_moves_between_servers(
    start: Start, java_latest: Driver, server_kind: str, ends: tuple[str, str]
) -> None:
    ours = "apache" if server_kind == "apache" else "skylark"
    first = start("apache")
    due_ms = put(java_latest, first, "apache")
    wait_on_the_wheel(first, 7)
    getattr(first, ends[0])()

    second = start(ours, first)
    due_ms |= put(java_latest, second, "skylark")
    wait_on_the_wheel(second, 14)
    getattr(second, ends[1])()

    third = start("apache", second)
    session = Session(java_latest, third.namesrv_addr)
    consumer = session.consumer("readers", TOPIC)
    seen = consumer.take_until(lambda event: event["body"] == "skylark-later")
    session.close()
    assert {event["body"] for event in seen} == set(due_ms)
    for event in seen:
        assert event["storeTimestamp"] >= due_ms[event["body"]], event
