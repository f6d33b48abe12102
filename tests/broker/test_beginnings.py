"""Where a group begins that has no offset: what its clients are told, and that a message in between is not missed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from broker.live import live_broker, messages_of
from skylark.broker.beginnings import NOWHERE, Beginnings
from skylark.broker.clients import Clients
from skylark.broker.config import BrokerConfig
from skylark.broker.groups import Groups
from skylark.broker.topics import Topics
from skylark.net.connection import Connection
from skylark.wire.bodies import ConsumerData, Heartbeat, Subscription, encode_body
from skylark.wire.codes import RequestCode, ResponseCode

LAST, FIRST = "CONSUME_FROM_LAST_OFFSET", "CONSUME_FROM_FIRST_OFFSET"
PUSH, PULL = "CONSUME_PASSIVELY", "CONSUME_ACTIVELY"


class Queue:
    """One queue, with messages from one offset to another."""

    def __init__(self, first: int, end: int, *, from_disk: bool = False) -> None:
        self._first = first
        self._end = end
        self._from_disk = from_disk

    def max_offset(self, topic: str, queue_id: int) -> int:
        return self._end

    def is_cached(self, topic: str, queue_id: int, offset: int) -> bool:
        return self._first <= offset < self._end and not self._from_disk


class Peer:
    """A connection that is told of its group."""

    peer = ("10.0.0.1", 50_000)

    def notify(self, *_: object) -> None:
        pass


EMPTY, YOUNG, TRIMMED, OLD = Queue(0, 0), Queue(0, 5), Queue(7, 9), Queue(0, 9, from_disk=True)


def beat(where: str, kind: str, topic: str = "T") -> Heartbeat:
    data = ConsumerData(
        group_name="g", consume_type=kind, message_model="CLUSTERING", consume_from_where=where,
        subscription_data_set=[Subscription(topic=topic, sub_string="*")],
    )  # fmt: skip
    return Heartbeat(client_id="client", consumer_data_set=[data])


@pytest.mark.parametrize(
    ("where", "kind", "expected"),
    [
        (LAST, PUSH, {"empty": 0, "young": 0, "trimmed": 9, "old": 9}),
        (LAST, PULL, {"empty": 0, "young": 0, "trimmed": NOWHERE, "old": NOWHERE}),
        (FIRST, PUSH, {"empty": NOWHERE, "young": 0, "trimmed": NOWHERE, "old": NOWHERE}),
        (None, None, {"empty": NOWHERE, "young": 0, "trimmed": NOWHERE, "old": NOWHERE}),
    ],
    ids=["pushed from the last", "pulled from the last", "pushed from the first", "no member"],
)
def test_what_is_told(tmp_path: Path, where: str | None, kind: str | None, expected: dict[str, int]) -> None:
    config = BrokerConfig(broker_name="b")
    clients = Clients(Topics(tmp_path, config, lambda: 0), Groups(tmp_path, config, lambda: 0), config)
    member, tool = cast(Connection, Peer()), cast(Connection, Peer())
    if where is not None and kind is not None:
        clients.heartbeat(beat(where, kind), member, "JAVA", 500, 0)
    queues = {"empty": EMPTY, "young": YOUNG, "trimmed": TRIMMED, "old": OLD}
    assert {name: Beginnings(queue, clients).find(member, "g", "T", 0) for name, queue in queues.items()} == expected
    # A retry topic is read from its beginning, and who is no member decides by itself.
    assert Beginnings(TRIMMED, clients).find(member, "g", "%RETRY%g", 0) == NOWHERE
    assert Beginnings(EMPTY, clients).find(tool, "g", "T", 0) == NOWHERE


def test_a_message_that_comes_while_a_group_starts_reaches_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with live_broker(tmp_path) as live:
            await live.ask(RequestCode.HEART_BEAT, encode_body(beat(LAST, PUSH)))
            asked = {"consumerGroup": "g", "topic": "T", "queueId": 0}
            answer = await live.ask(RequestCode.QUERY_CONSUMER_OFFSET, **asked)
            await live.send("T", b"first")
            if answer.code == ResponseCode.QUERY_NOT_FOUND:  # as clients do
                answer = await live.ask(RequestCode.GET_MAX_OFFSET, topic="T", queueId=0)
            found = await live.pull("T", int(answer.fields["offset"]), group="g")
            assert [message.body for message in messages_of(found)] == [b"first"]

    asyncio.run(scenario())
