"""Timers that wait while their store goes from Apache RocketMQ 5.5.0 to Skylark and back.

Each server takes some timers and recalls two before the next one opens its store, after a stop or a kill. Whichever
server has the store when a timer is due delivers it; recalled ones never come. The window is so short that timers are
rolled on their way, by one server or the other.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from drivers import Client, Driver, DriverError, Session
from servers import GET_MAX_OFFSET, POLL_S, REQUEST_DEADLINE_S, Server, request, wait_on_the_wheel

TOPIC = "Exchanged"
# Seconds: less than those that are rolled have to wait, and more than those that are recalled, also when their time is
# rounded up to the next second.
WINDOW = "8"
SETTINGS = {"recallMessageEnable": "true", "timerRollWindowSlot": WINDOW, "timerFlushIntervalMs": "1000"}
MARGIN_MS = 500
MARKED_OFFSETS = struct.Struct(">qq")  # of the broker, and of its master
Start = Callable[..., Server]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def wait_marked(server: Server) -> None:
    """Until the mark on disk says that the queue of timers is read to its end."""
    asked = {"topic": "rmq_sys_wheel_timer", "queueId": "0"}
    end = int(request(server.broker_addr, GET_MAX_OFFSET, asked)[0]["extFields"]["offset"])
    deadline = time.monotonic() + REQUEST_DEADLINE_S
    while min(MARKED_OFFSETS.unpack_from((server.store / "config" / "timercheck").read_bytes(), 16)) < end:
        assert time.monotonic() < deadline, "timers are not marked"
        time.sleep(POLL_S)


class Timers:
    """What was put: bodies and when they are due, and those that were recalled, in time or perhaps not."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.due_ms: dict[str, int] = {}
        self.recalled: set[str] = set()
        self.doubtful: set[str] = set()

    def put(self, server: Server, name: str) -> None:
        """Timers that are due while this server runs or the store moves, due later, and some that are recalled."""
        session = Session(self._driver, server.namesrv_addr)
        sender = session.timers("timers")
        self._recall(sender, server, name, 2_500, 5_000)
        while not any(body.startswith(name) for body in self.recalled):  # the machine is that slow
            self._recall(sender, server, name, 5_500)
        for body, delay_ms in ((f"{name}-soon", 1500), (f"{name}-late", 9_000), (f"{name}-later", 16_000)):
            self.due_ms[body] = now_ms() + delay_ms
            sender.call("timers.send", topic=TOPIC, body=body, delayMs=delay_ms)
        session.close()

    def _recall(self, sender: Client, server: Server, name: str, *delays_ms: int) -> None:
        """Well within the window: Apache's broker forgets a recall when it rolls its timer late.

        Marked on disk, for it forgets one as well when it reads the queue of timers again from before it, once the
        timer is due: it does so from the last mark that a killed broker left.
        """
        due_ms = {}
        for delay_ms in delays_ms:
            body = f"{name}-recalled-{len(self.recalled | self.doubtful | due_ms.keys())}"
            due_ms[body] = now_ms() + delay_ms
            sent = sender.call("timers.send", topic=TOPIC, body=body, delayMs=delay_ms)
            with suppress(DriverError):  # it is due already
                sender.call("timers.recall", topic=TOPIC, handle=sent["handle"])
        wait_on_the_wheel(server.broker_addr)
        wait_marked(server)
        for body, due in due_ms.items():
            (self.recalled if now_ms() + MARGIN_MS < due else self.doubtful).add(body)


@pytest.mark.parametrize("ends", [("stop", "kill"), ("kill", "stop")], ids="-".join)
def test_timers_survive_moves_between_servers(
    start: Start, java_latest: Driver, server_kind: str, ends: tuple[str, str]
) -> None:
    timers = Timers(java_latest)
    first = start("apache", **SETTINGS)
    timers.put(first, "apache")
    getattr(first, ends[0])()

    second = start(server_kind, first, **SETTINGS)
    timers.put(second, "skylark")
    getattr(second, ends[1])()

    third = start("apache", second, **SETTINGS)
    session = Session(java_latest, third.namesrv_addr)
    consumer = session.consumer("readers", TOPIC)
    missing = set(timers.due_ms)
    while missing:
        [event] = consumer.take(1)
        body = event["body"]
        assert body not in timers.recalled, "recalled, and came nevertheless"
        if body not in timers.doubtful:
            assert event["storeTimestamp"] >= timers.due_ms[body], event
            missing.discard(body)
    session.close()
