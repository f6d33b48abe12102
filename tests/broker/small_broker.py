"""The parts of a broker that answer operators, on a real store, with a clock that stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from skylark.broker import admin, query, resets
from skylark.broker.arrivals import Arrivals
from skylark.broker.clients import Clients
from skylark.broker.config import BrokerConfig
from skylark.broker.groups import Groups
from skylark.broker.offsets import Offsets
from skylark.broker.stats import Stats
from skylark.broker.topics import Topics
from skylark.net.connection import Connection, RequestFailed
from skylark.store.api import StoreConfig
from skylark.store.appended import Appended
from skylark.store.store import Store
from skylark.wire import fastjson
from skylark.wire.bodies import ConsumerData, Heartbeat, MessageQueue, Subscription
from skylark.wire.frame import Frame
from skylark.wire.message import Message
from skylark.wire.records import encode_host
from skylark.wire.tables import SubscriptionGroupConfig, TopicConfig

START_MS = 1_700_000_000_000
BROKER_ADDR = "10.0.0.1:10911"

_Body = TypeVar("_Body", bound=msgspec.Struct)


class FakeConnection:
    """Keeps what it was to send, while its peer reads."""

    peer = ("127.0.0.1", 50_000)

    def __init__(self) -> None:
        self.sent: list[Frame] = []
        self.is_deaf = False
        self.is_deaf_later = False

    async def writable(self) -> None:
        """As if the peer read again, or not, after some time."""
        self.is_deaf = self.is_deaf_later

    def notify(self, request: Frame, after_s: float = 0.0) -> bool:
        if not self.is_deaf:
            self.sent.append(request)
        return not self.is_deaf

    def __repr__(self) -> str:
        return "127.0.0.1:50000"


class SmallBroker:
    def __init__(self, root: Path) -> None:
        self.now_ms = START_MS
        self.config = BrokerConfig(broker_name="broker-a", store_path_root_dir=str(root))
        tables = root / "config"
        tables.mkdir(parents=True)
        self.store = Store.open(
            StoreConfig(
                root=root,
                segment_bytes=1 << 20,
                queue_entries_per_file=100,
                store_host=encode_host("10.0.0.1", 10911),
                index_slots=100,
                index_entries=400,
            )
        )
        self.topics = Topics(tables, self.config, self.clock)
        self.groups = Groups(tables, self.config, self.clock)
        self.offsets = Offsets(tables)
        self.clients = Clients(topics=self.topics, groups=self.groups, config=self.config)
        self.stats = Stats(self.config.broker_cluster_name, START_MS, self.topics.is_system)
        self.changed: list[dict[str, str]] = []
        self.delay_offsets = {1: 3, 2: 0}
        self.delay_text = b'{"offsetTable":{1:3}}'
        self.handlers = {
            **query.handlers(self.store, self.clients, self.config),
            **resets.handlers(
                self.config, self.store, self.topics, self.groups, self.offsets, self.clients, Arrivals()
            ),
            **admin.handlers(
                self.config,
                self.store,
                self.topics,
                self.groups,
                self.offsets,
                self.clients,
                self.stats,
                self.clock,
                broker_addr=BROKER_ADDR,
                on_config_change=self.changed.append,
                delay_offsets=lambda: self.delay_offsets,
                delay_text=lambda: self.delay_text,
            ),
        }

    def clock(self) -> int:
        return self.now_ms

    def topic(self, name: str, queues: int = 2, **more: Any) -> None:
        self.topics.put(TopicConfig(name, read_queue_nums=queues, write_queue_nums=queues, **more))

    def group(self, name: str) -> None:
        self.groups.put(SubscriptionGroupConfig(group_name=name))

    def join(self, group: str, *topics: str, version: int = 500) -> FakeConnection:
        """A consumer of the topics comes online."""
        if group not in self.groups:
            self.group(group)
        connection = FakeConnection()
        data = ConsumerData(
            group_name=group,
            consume_type="CONSUME_PASSIVELY",
            message_model="CLUSTERING",
            consume_from_where="CONSUME_FROM_LAST_OFFSET",
            subscription_data_set=[Subscription(topic=topic, sub_string="*") for topic in topics],
        )
        beat = Heartbeat(client_id=f"client@{group}", consumer_data_set=[data])
        self.clients.heartbeat(beat, cast(Connection, connection), "JAVA", version, self.now_ms)
        connection.sent.clear()
        return connection

    def send(self, topic: str, queue_id: int = 0, body: bytes = b"body", **properties: str) -> Appended:
        """Stores a message, a second after the one before."""
        message = Message(topic, queue_id, body, properties, born_host=encode_host("10.0.0.2", 5000))
        appended = self.store.append(message, self.now_ms)
        self.now_ms += 1_000
        return appended

    def ask(self, code: int, body: bytes = b"", /, **fields: object) -> Frame:
        """The answer to a request; an error is an answer too."""
        request = Frame(code, {key: _text(value) for key, value in fields.items()}, body, opaque=7)
        handler = cast(Callable[[Frame, Any], Frame | Coroutine[Any, Any, Frame]], self.handlers[code])
        try:
            answer = handler(request, FakeConnection())
            return answer if isinstance(answer, Frame) else asyncio.run(answer)
        except RequestFailed as failure:
            return request.reply(failure.code, failure.remark)

    def ask_for(self, body: type[_Body], code: int, /, **fields: object) -> _Body:
        answer = self.ask(code, b"", **fields)
        assert answer.code == 0, answer.remark
        return fastjson.decode(answer.body, body)


def queue(topic: str, queue_id: int) -> MessageQueue:
    return MessageQueue("broker-a", queue_id, topic)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
