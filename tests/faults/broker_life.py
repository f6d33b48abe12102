"""A broker whose power fails again and again, and what its clients are to it.

It has no server, and nothing happens by itself: its clock stands until a step moves it. An answer counts when the log
is on disk up to where it ended then, which is what SYNC_FLUSH waits for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, Protocol, TypeVar, cast

import msgspec

from faults.power import Disk, Life
from skylark.broker.app import Broker
from skylark.broker.config import BrokerConfig
from skylark.net.connection import Connection, RequestFailed
from skylark.store import Appended, Store
from skylark.wire.frame import Frame
from skylark.wire.message import Message, StoredMessage
from skylark.wire.records import decode_record
from skylark.wire.tables import SubscriptionGroupConfig, TopicConfig
from skylark.wire.typed import encode_header

TOPIC, QUEUES, LATER, TRANSACTED = "orders", 2, "later", "transacted"
WORKERS, IN_ORDER, READERS = "workers", "in-order", "readers"
LEVELS_MS = (1_000, 5_000, 30_000)

T = TypeVar("T")


class Unanswered(Generic[T]):
    """What was done, with the end of the log then."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, T]] = []

    def add(self, log_end: int, what: T) -> None:
        self._waiting.append((log_end, what))

    def take(self, flushed: int) -> list[T]:
        """What is answered by now."""
        answered = [what for log_end, what in self._waiting if log_end <= flushed]
        self._waiting = [entry for entry in self._waiting if entry[0] > flushed]
        return answered

    def forget(self) -> list[T]:
        lost = [what for _, what in self._waiting]
        self._waiting.clear()
        return lost


class Client(Protocol):
    def use(self) -> None:
        """Does something."""

    def answered(self, flushed: int) -> None:
        """The log is on disk up to there."""

    def cut(self) -> None:
        """What was not answered never will be."""

    def opened(self) -> None:
        """Checks what the broker has now."""

    def look_for_all(self) -> None:
        """Waits, by the broker's clock, for everything that is to come."""


class BrokerLife(Life):
    """A broker without its server. Nothing happens by itself: the clock stands until a step moves it."""

    peer = ("127.0.0.1", 40_000)
    """It is its own client."""

    def __init__(self, directory: Path, disk: Disk, chance: random.Random) -> None:
        super().__init__(directory, disk, chance)
        self.broker: Broker | None = None
        self.number = 0
        self.clients: list[Client] = []

    @property
    def store(self) -> Store:
        assert self.broker is not None
        return self.broker._store

    def step(self) -> None:
        broker = self.broker
        if broker is None:
            self._open()
            return
        chance = self.chance
        what = chance.random()
        if what < 0.6:
            self.now_ms += chance.randrange(1, 500)
            chance.choice(self.clients).use()
        elif what < 0.75:
            self.passes(chance.choice((100, 1_000, 3_000, 20_000)))
        elif what < 0.87:
            broker._store._flusher.flush_log()
        elif what < 0.9:
            broker._store._flusher.flush_derived(with_index=chance.random() < 0.3)
        elif what < 0.95:
            broker._save_tables()
        elif what < 0.99:
            broker._write_held()
        else:
            self._close(broker)
            return
        self._answer()

    def finish(self) -> None:
        broker = self._open()
        self._look_for_all()
        self._close(broker)
        self._close(self._open())

    def abandon(self) -> None:
        self._answer()
        for client in self.clients:
            client.cut()
        broker, self.broker = self.broker, None
        if broker is not None and hasattr(broker, "_timers"):
            broker._store.close()
            broker._timers.close()

    def _answer(self) -> None:
        if hasattr(self.broker, "_store"):
            for client in self.clients:
                client.answered(self.store.flushed_offset)

    def _open(self) -> Broker:
        self.broker = broker = Broker(_config(self.root), clock=lambda: self.now_ms)
        broker._build(10911)
        broker._topics.on_change = None
        self._handlers = broker._handlers()
        if TOPIC not in broker._topics:
            broker._topics.put(*(TopicConfig(name, QUEUES, QUEUES) for name in (TOPIC, LATER, TRANSACTED)))
        for group in (WORKERS, IN_ORDER, READERS):
            if group not in broker._groups:
                broker._groups.put(SubscriptionGroupConfig(group_name=group, retry_max_times=1 << 20))
        for client in self.clients:
            client.opened()
        if self.chance.random() < 0.15:
            self._look_for_all()
        return broker

    def _look_for_all(self) -> None:
        for client in self.clients:
            client.look_for_all()

    def _close(self, broker: Broker) -> None:
        """As `Broker.stop` ends."""
        broker._write_ops()
        broker._store.flush()
        self._answer()
        broker._save_tables()
        broker._store.close()
        broker._timers.close()
        self.broker = None
        for client in self.clients:
            client.cut()

    # For the clients.

    def passes(self, ms: int) -> None:
        """Time passes, and what the broker does by the clock is done, in any order."""
        self.now_ms += ms
        broker = self.broker
        assert broker is not None
        works = [broker._deliver, broker._deliver_timers, broker._revive, broker._write_ops, broker._check_transactions]
        self.chance.shuffle(works)
        for work in works:
            while work() == 0:
                pass

    def body(self) -> bytes:
        self.number += 1
        return b"%d" % self.number

    def put(self, message: Message) -> Appended:
        assert self.broker is not None
        return self.broker._put.one(message, self.now_ms)

    def ask(self, code: int, header: msgspec.Struct) -> Frame:
        request = Frame(code, encode_header(header))
        try:
            answer = self._handlers[code](request, cast(Connection, self))
        except RequestFailed as failure:
            return request.reply(failure.code, failure.remark)
        assert isinstance(answer, Frame)
        return answer

    def messages(self, topic: str, queue_id: int) -> list[StoredMessage]:
        """All of a queue. It may have gaps, where a message was lost before it was acknowledged."""
        found: list[StoredMessage] = []
        offset = 0
        while offset < self.store.max_offset(topic, queue_id):
            result = self.store.read(topic, queue_id, offset, 32)
            assert result.next_offset > offset
            found.extend(map(decode_record, result.records))
            offset = result.next_offset
        return found

    def messages_of(self, topic: str) -> Iterator[StoredMessage]:
        for queue_id in range(QUEUES):
            yield from self.messages(topic, queue_id)


def _config(root: Path) -> BrokerConfig:
    return BrokerConfig(
        broker_name="broker-a",
        broker_ip1="127.0.0.1",
        store_path_root_dir=str(root),
        flush_interval_commit_log=3_600_000,
        mapped_file_size_commit_log=1 << 15,
        mapped_file_size_consume_queue=400,
        mapped_file_size_timer_log=4096,
        max_hash_slot_num=50,
        max_index_num=200,
        message_delay_level=" ".join(f"{ms // 1000}s" for ms in LEVELS_MS),
        timer_roll_window_slot=100,
        revive_queue_num=2,
        transaction_check_max=1 << 20,
        file_reserved_time=1 << 20,
    )
