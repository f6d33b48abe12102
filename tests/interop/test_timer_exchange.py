"""Timers that wait while their store goes from Apache RocketMQ 5.5.0 to Skylark and back.

Each server takes some timers and recalls two before the next one opens its store, after a stop or a kill. Whichever
server has the store when a timer is due delivers it; recalled ones never come. The window is so short that timers are
rolled on their way, by one server or the other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from drivers import Driver, Session
from servers import SERVERS, Server, request

TOPIC = "Exchanged"
SETTINGS = {"recallMessageEnable": "true", "timerRollWindowSlot": "6", "timerFlushIntervalMs": "1000"}
TAKEN_UP_DEADLINE_S = 30.0
POLL_S = 0.05
GET_BROKER_RUNTIME_INFO = 28
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
    for delay_ms in (2_500, 5_000):  # within the window: Apache's broker forgets a recall when it rolls its timer late
        recalled = sender.call("timers.send", topic=TOPIC, body=f"{name}-recalled", delayMs=delay_ms)
        sender.call("timers.recall", topic=TOPIC, handle=recalled["handle"])
    session.close()
    return due_ms


def wait_on_the_wheel(server: Server) -> None:
    """Until all that is in the queue of timers is on the wheel of the server."""
    deadline = time.monotonic() + TAKEN_UP_DEADLINE_S
    while True:
        answer, body = request(server.broker_addr, GET_BROKER_RUNTIME_INFO, {})
        # Apache's broker may refuse the question in its first seconds.
        if answer["code"] == 0 and json.loads(body)["table"]["timerOffsetBehind"] == "0":
            return
        assert time.monotonic() < deadline, answer
        time.sleep(POLL_S)


@pytest.mark.parametrize("ends", [("stop", "kill"), ("kill", "stop")], ids="-".join)
def test_timers_survive_moves_between_servers(
    start: Start, java_latest: Driver, server_kind: str, ends: tuple[str, str]
) -> None:
    ours = "apache" if server_kind == "apache" else "skylark"
    first = start("apache")
    due_ms = put(java_latest, first, "apache")
    wait_on_the_wheel(first)
    getattr(first, ends[0])()

    second = start(ours, first)
    due_ms |= put(java_latest, second, "skylark")
    wait_on_the_wheel(second)
    getattr(second, ends[1])()

    third = start("apache", second)
    session = Session(java_latest, third.namesrv_addr)
    consumer = session.consumer("readers", TOPIC)
    missing = set(due_ms)
    while missing:
        [event] = consumer.take(1)
        assert event["body"] in due_ms, "recalled, and came nevertheless"
        assert event["storeTimestamp"] >= due_ms[event["body"]], event
        missing.discard(event["body"])
    session.close()
