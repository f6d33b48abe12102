"""What follows a queue of the broker's own, each on a real store, with a clock that stands still until it is to move.

A test puts something bad into the queue, in front of what is good, and looks whether the good arrives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, cast

from broker.pop_broker import GROUP, HOST, START_MS, TOPIC, PopBroker
from skylark.broker.checkback import CheckBack
from skylark.broker.clients import Clients
from skylark.broker.config import BrokerConfig
from skylark.broker.delay import Delayed
from skylark.broker.groups import Groups
from skylark.broker.halves import Halves, become_half
from skylark.broker.offsets import Offsets
from skylark.broker.put import Put
from skylark.broker.stats import Stats
from skylark.broker.topics import HALF_TOPIC, SCHEDULE_TOPIC, Topics
from skylark.net.connection import Connection
from skylark.store import Appended, Store, StoreConfig
from skylark.wire.bodies import Heartbeat, ProducerData
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from skylark.wire.message import Message
from skylark.wire.pop import revive_topic
from skylark.wire.records import decode_record

PRODUCERS = "owners"


class Follower(Protocol):
    """`queue` is what it follows."""

    store: Store
    queue: tuple[str, int]

    def send(self, body: bytes, **properties: str) -> None:
        """Something that gets into the queue in the proper way, as a client has it done."""

    def put_in_queue(self, body: bytes, **properties: str) -> Appended:
        """Anything, straight into the queue."""

    def handled(self) -> list[bytes]:
        """Lets it become time for everything in the queue; what came out of it."""


class Levels:
    """The queue of the first delay level: messages go to their topic."""

    queue = SCHEDULE_TOPIC, 0

    def __init__(self, root: Path) -> None:
        self.config = BrokerConfig()
        self.store = open_store(root)
        self.put = Put(self.store, self.config, Stats("c", START_MS))
        self.delayed = Delayed(self.store, self.put, self.config.message_delay_level, root / "delayOffset.json")

    def send(self, body: bytes, **properties: str) -> None:
        self.put.one(Message(TOPIC, 0, body, {"DELAY": "1", **properties}, born_host=HOST), START_MS)

    def put_in_queue(self, body: bytes, **properties: str) -> Appended:
        return self.store.append(Message(*self.queue, body, {"DELAY": "1", **properties}, born_host=HOST), START_MS)

    def handled(self) -> list[bytes]:
        while self.delayed.deliver(START_MS + 1_000) == 0:
            pass
        return bodies_in(self.store, TOPIC)


class Undecided:
    """The queue of halves: a producer is asked about each."""

    queue = HALF_TOPIC, 0

    def __init__(self, root: Path) -> None:
        self.config = BrokerConfig(transaction_time_out=1, transaction_check_interval=1_000)
        self.store = open_store(root)
        tables = root / "config"
        tables.mkdir(exist_ok=True)
        topics, groups = Topics(tables, self.config, now), Groups(tables, self.config, now)
        clients = Clients(topics, groups, self.config)
        self.put = Put(self.store, self.config, Stats("c", START_MS))
        self.offsets = Offsets(tables)
        self.halves = Halves(self.store, self.put, self.offsets, self.config, HOST)
        self.check_back = CheckBack(self.halves, self.store, self.put, topics, clients, self.config, START_MS)
        self.asked: list[bytes] = []
        beat = Heartbeat(client_id="c", producer_data_set=[ProducerData(group_name=PRODUCERS)])
        clients.heartbeat(beat, cast(Connection, self), "JAVA", 500, START_MS)

    is_writable = True
    peer = ("10.0.0.9", 50_000)

    def notify(self, request: Frame, after_s: float = 0.0) -> None:
        """As the connection of the producer."""
        if request.code == RequestCode.CHECK_TRANSACTION_STATE:
            self.asked.append(decode_record(request.body).body)

    def send(self, body: bytes, **properties: str) -> None:
        wanted = {"UNIQ_KEY": body.decode()[:40], "TRAN_MSG": "true", "PGROUP": PRODUCERS, **properties}
        message = Message(TOPIC, 0, body, wanted, born_timestamp_ms=START_MS, born_host=HOST)
        become_half(message)
        self.put.one(message, START_MS)

    def put_in_queue(self, body: bytes, **properties: str) -> Appended:
        wanted = {"UNIQ_KEY": body.decode(), "PGROUP": PRODUCERS, **properties}
        message = Message(*self.queue, body, wanted, born_timestamp_ms=START_MS, born_host=HOST)
        return self.store.append(message, START_MS)

    def handled(self) -> list[bytes]:
        while self.check_back.run(START_MS + 10_000) == 0:
            pass
        return self.asked


class Revival:
    """A queue of the revive topic: what was popped comes back in the group's retry topic."""

    queue = revive_topic("DefaultCluster"), 0

    def __init__(self, root: Path) -> None:
        self.broker = PopBroker(root, revive_queue_num=1)
        self.config = self.broker.config
        self.store = self.broker.store

    def send(self, body: bytes, **properties: str) -> None:
        self.broker.send(body.decode(), **properties)
        assert self.broker.pop(), "each by a pop of its own"

    def put_in_queue(self, body: bytes, **properties: str) -> Appended:
        return self.store.append(Message(*self.queue, body, {"TAGS": "ck", **properties}, born_host=HOST), START_MS)

    def handled(self) -> list[bytes]:
        self.broker.passes(59_500)
        self.broker.passes(3_000)
        return bodies_in(self.store, f"%RETRY%{GROUP}_{TOPIC}")


def open_store(root: Path) -> Store:
    return Store.open(
        StoreConfig(
            root=root,
            segment_bytes=1 << 20,
            queue_entries_per_file=100,
            store_host=HOST,
            index_slots=100,
            index_entries=400,
            flush_interval_ms=3_600_000,  # a flush is what a test asks for
            queue_flush_interval_ms=3_600_000,
        )
    )


def now() -> int:
    return START_MS


def bodies_in(store: Store, topic: str, queue_id: int = 0) -> list[bytes]:
    found: list[bytes] = []
    offset = store.min_offset(topic, queue_id)
    while offset < store.max_offset(topic, queue_id):
        result = store.read(topic, queue_id, offset, 32)
        found += [decode_record(record).body for record in result.records]
        offset = result.next_offset
    return found


def scribble(store: Store, log_offset: int, data: bytes) -> None:
    """Changes bytes of the log behind the store's back."""
    with (store.config.root / "commitlog" / f"{0:020}").open("r+b") as file:
        file.seek(log_offset)
        file.write(data)


def scribble_entry(store: Store, topic: str, queue_id: int, offset: int, data: bytes) -> None:
    with (store.config.root / "consumequeue" / topic / str(queue_id) / f"{0:020}").open("r+b") as file:
        file.seek(offset * 20)
        file.write(data)
