"""A consumer in the driver that pops, acknowledges and extends by single requests."""

from __future__ import annotations

from typing import Any

from drivers import Client, Event, Session
from servers import GET_ROUTEINFO_BY_TOPIC, Server, request

INVISIBLE_MS = 2_000
_MOST_POPS = 100


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
        for _ in range(_MOST_POPS):
            if len(taken) >= count:
                break
            taken += self.call("pop", **({"invisibleMs": INVISIBLE_MS, "max": count - len(taken)} | options))[
                "messages"
            ]
        assert len(taken) == count, taken
        return taken

    def ack(self, message: Event) -> str:
        return str(self.call("ack", handle=message["handle"])["status"])

    def is_empty(self) -> bool:
        return self.call("pop", pollMs=0)["messages"] == []
