"""A consumer in the driver that pops, acknowledges and extends by single requests."""

from __future__ import annotations

import time
from typing import Any

from drivers import EVENT_DEADLINE_S, Client, Event, Session
from servers import GET_ROUTEINFO_BY_TOPIC, Server, request

# What is popped for long stays hidden for the whole test, on the slowest machine too; what is popped for a moment comes
# again, however soon that is.
LONG_MS = 300_000
MOMENT_MS = 1_000


class Popper:
    """A consumer of one group and topic that makes each request by itself."""

    def __init__(self, session: Session, server: Server, group: str, topic: str) -> None:
        self._client = Client(session, session._open("popper", {"group": f"popper_{group}"}))
        body = request(server.namesrv_addr, GET_ROUTEINFO_BY_TOPIC, {"topic": topic})[1].decode()
        self._place = {
            "broker": server.broker_addr,
            "brokerName": body.split('"brokerName":"')[1].split('"')[0],
            "group": group,
            "topic": topic,
        }

    def call(self, op: str, **arguments: Any) -> Event:
        return self._client.call(f"popper.{op}", **(self._place | arguments))

    def pop(self, count: int, **options: Any) -> list[Event]:
        """That many messages, however many pops it takes."""
        taken: list[Event] = []
        deadline_s = time.monotonic() + EVENT_DEADLINE_S
        while len(taken) < count:
            assert time.monotonic() < deadline_s, taken
            wanted = {"invisibleMs": LONG_MS, "max": count - len(taken)} | options
            taken += self.call("pop", **wanted)["messages"]
        return taken

    def ack(self, message: Event) -> str:
        return str(self.call("ack", handle=message["handle"])["status"])

    def is_empty(self) -> bool:
        return self.call("pop", pollMs=0)["messages"] == []
