"""The parts of a broker that POP consumption needs, on a real store, with a clock and timers that a test moves."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Collection, Coroutine
from pathlib import Path
from typing import Any, cast

import msgspec

from skylark.broker.config import BrokerConfig
from skylark.broker.groups import Groups
from skylark.broker.offsets import Offsets
from skylark.broker.popping import Popping
from skylark.broker.put import Put
from skylark.broker.static_topics import StaticTopics
from skylark.broker.stats import Stats
from skylark.broker.topics import Topics, handlers
from skylark.net.connection import Connection, RequestFailed
from skylark.store import Appended, Store, StoreConfig
from skylark.wire import pop
from skylark.wire.bodies import encode_body
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from skylark.wire.message import PROPERTY_POP_CK, PROPERTY_REAL_TOPIC, PROPERTY_TIMER_DELIVER_MS, Message, StoredMessage
from skylark.wire.records import decode_records, encode_host
from skylark.wire.tables import SubscriptionGroupConfig, TopicConfig
from skylark.wire.typed import encode_header
from store.small_store import finish_deleting

START_MS = 1_700_000_000_000
HOST = encode_host("10.0.0.1", 10911)
TOPIC, GROUP = "orders", "workers"


class ParkingPut(Put):
    """Keeps timers in a list, and their records in the timers' topic, until a test lets the time pass."""

    parked: list[tuple[int, Message]]

    def one(self, message: Message, now_ms: int) -> Appended:
        due = message.properties.get(PROPERTY_TIMER_DELIVER_MS)
        if due is None or int(due) <= now_ms:
            return super().one(message, now_ms)
        self.parked.append((int(due), message))
        properties = message.properties | {PROPERTY_REAL_TOPIC: message.topic}
        record = Message("rmq_sys_wheel_timer", 0, message.body, properties, born_host=message.born_host)
        return self._store.append(record, now_ms)


class Popped(msgspec.Struct):
    """A message in a consumer's hands."""

    message: StoredMessage
    handle: pop.ReceiptHandle
    order_count: int = 0

    @property
    def body(self) -> str:
        return self.message.body.decode()


class PopBroker:
    def __init__(
        self, root: Path, now_ms: int = START_MS, parked: list[tuple[int, Message]] | None = None, **settings: Any
    ) -> None:
        self.root = root
        self.now_ms = now_ms
        self.settings = settings
        self.config = BrokerConfig(broker_name="broker-a", store_path_root_dir=str(root), **settings)
        tables = root / "config"
        tables.mkdir(parents=True, exist_ok=True)
        self.store = Store.open(
            StoreConfig(
                root=root,
                segment_bytes=1 << 20,
                queue_entries_per_file=1000,
                store_host=HOST,
                index_enabled=False,
                flush_interval_ms=3_600_000,  # a flush is what a test asks for
                queue_flush_interval_ms=3_600_000,
            )
        )
        self.topics = Topics(tables, self.config, self.clock)
        self.groups = Groups(tables, self.config, self.clock)
        self.offsets = Offsets(tables)
        if not self.store.was_clean:
            self.offsets.keep_within(self.store.max_offset)
        stats = Stats(self.config.broker_cluster_name, START_MS, self.topics.is_system)
        self.put = ParkingPut(self.store, self.config, stats)
        self.put.parked = parked or []
        self.popping = Popping(
            self.config,
            self.store,
            self.put,
            self.topics,
            self.groups,
            self.offsets,
            stats,
            self.clock,
            lambda now_ms: now_ms,
            tables,
        )
        self.store.listeners = self.popping.listeners
        if TOPIC not in self.topics:
            self.topics.put(TopicConfig(TOPIC, read_queue_nums=1, write_queue_nums=1))
            self.groups.put(SubscriptionGroupConfig(group_name=GROUP, retry_max_times=3))

    def clock(self) -> int:
        return self.now_ms

    def killed(self, root: Path) -> PopBroker:
        """The broker that starts on what this one, killed now, leaves on disk."""
        self.topics.save()
        self.groups.save()
        shutil.copytree(self.root, root)
        return PopBroker(root, self.now_ms, list(self.put.parked), **self.settings)

    def make_topic_anew(self) -> None:
        """Deletes the topic as an operator does, and creates it again."""

        def forget(names: Collection[str]) -> None:
            self.store.delete_topics(names)
            finish_deleting(self.store)
            self.popping.forget_topics(names)

        async def published() -> None:
            pass

        static_topics = StaticTopics(self.root / "config", self.config.broker_name, self.clock)
        serve = handlers(self.topics, self.offsets, forget, published, static_topics)
        request = Frame(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": TOPIC})
        answer = serve[request.code](request, cast(Connection, _Peer()))
        assert isinstance(answer, Coroutine)
        asyncio.run(answer)
        self.topics.put(TopicConfig(TOPIC, read_queue_nums=1, write_queue_nums=1))

    def save(self) -> None:
        self.store.flush()
        self.popping.save(self.now_ms)

    def send(self, *bodies: str, topic: str = TOPIC, queue_id: int = 0, **properties: str) -> None:
        for body in bodies:
            self.store.append(Message(topic, queue_id, body.encode(), dict(properties), born_host=HOST), self.now_ms)

    def passes(self, ms: int) -> None:
        """Lets time pass: timers fall due, and what nobody acknowledged is revived."""
        self.now_ms += ms
        due = sorted((entry for entry in self.put.parked if entry[0] <= self.now_ms), key=lambda entry: entry[0])
        self.put.parked = [entry for entry in self.put.parked if entry[0] > self.now_ms]
        for _, message in due:
            self.store.append(message, self.now_ms)
        while self.popping.revive(self.now_ms) == 0:
            pass

    # Requests.

    def ask(self, code: int, header: msgspec.Struct | None = None, body: bytes = b"") -> Frame:
        """The answer, which must not have to wait; an error is an answer too."""
        request = Frame(code, encode_header(header) if header is not None else {}, body)
        try:
            answer = self.popping.handlers()[code](request, cast(Connection, _Peer()))
        except RequestFailed as failure:
            return request.reply(failure.code, failure.remark)
        assert isinstance(answer, Frame)
        return answer

    async def ask_and_wait(self, code: int, header: msgspec.Struct) -> Frame:
        answer = self.popping.handlers()[code](Frame(code, encode_header(header)), cast(Connection, _Peer()))
        return answer if isinstance(answer, Frame) else cast(Frame, await cast(Awaitable[Frame], answer))

    def header(self, **more: Any) -> pop.PopMessage:
        header = pop.PopMessage(GROUP, TOPIC, -1, 32, 60_000, 0, 0, pop.FROM_MIN)
        return msgspec.structs.replace(header, **more)

    def pop(self, **more: Any) -> list[Popped]:
        return popped(self.ask(RequestCode.POP_MESSAGE, self.header(**more)))

    def ack(self, taken: Popped, *, group: str = GROUP) -> Frame:
        header = pop.AckMessage(
            group,
            pop.real_topic(TOPIC, GROUP, taken.handle.kind),
            taken.handle.queue_id,
            taken.handle.encode(),
            taken.handle.offset,
        )
        return self.ask(RequestCode.ACK_MESSAGE, header)

    def batch_ack(self, *taken: Popped) -> Frame:
        acks = pop.BatchAck.of(TOPIC, GROUP, [each.handle for each in taken])
        return self.ask(RequestCode.BATCH_ACK_MESSAGE, None, encode_body(pop.BatchAckMessage(acks, "broker-a")))

    def extend(self, taken: Popped, invisible_ms: int, *, suspend: bool = False) -> Popped:
        header = pop.ChangeInvisibleTime(
            GROUP,
            pop.real_topic(TOPIC, GROUP, taken.handle.kind),
            taken.handle.queue_id,
            taken.handle.encode(),
            taken.handle.offset,
            invisible_ms,
            suspend=suspend,
        )
        answer = self.ask(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, header)
        assert answer.code == 0, answer.remark
        renewed = msgspec.convert(answer.fields, pop.ChangeInvisibleTimeResponse, strict=False)
        return Popped(taken.message, pop.renewed(taken.handle, renewed))


class _Peer:
    peer = ("10.0.0.9", 50_000)

    def __repr__(self) -> str:
        return "10.0.0.9:50000"


def popped(answer: Frame) -> list[Popped]:
    """What a pop brought."""
    if answer.code:
        return []
    header = msgspec.convert(answer.fields, pop.PopMessageResponse, strict=False)
    counts = pop.parse_order_counts(header.order_count_info)
    taken = []
    for message in decode_records(answer.body):
        place = (message.topic, message.queue_id, message.queue_offset)
        own = message.properties.get(PROPERTY_POP_CK)
        handle = pop.ReceiptHandle.parse(own) if own else pop.handles_of(header, "broker-a", [place])[0]
        taken.append(Popped(message, handle, pop.order_count(counts, *place)))
    return taken


def bodies(taken: list[Popped]) -> list[str]:
    return [each.body for each in taken]


async def turns(count: int = 5) -> None:
    """Lets what was woken run."""
    for _ in range(count):
        await asyncio.sleep(0)
