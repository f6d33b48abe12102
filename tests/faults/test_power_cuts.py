"""The power fails again and again, at any sync and between them: with synchronous flush nothing acknowledged is lost.

A few hundred cuts in every run; SKYLARK_POWER_CUTS for more (`make power-cuts`), SKYLARK_POWER_SEED to repeat one.
Each oracle below tells of one kind of file what a cut may not take from it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from faults.power import Disk, Life, cuts_wanted, live_through
from skylark.store import Store
from skylark.wire.message import Message
from skylark.wire.records import BatchPart, decode_record
from store.small_store import small_config

Queue = tuple[str, int]
QUEUES = [("a", 0), ("a", 1), ("b", 0)]


def key_of(body: bytes) -> bytes:
    return body.rstrip(b".")


class Oracle(Protocol):
    """Uses a store beside the messages that are sent to it, and knows what it must find again."""

    def opened(self, store: Store, now_ms: int) -> None:
        """Checks what a cut left."""

    def use(self, chance: random.Random, now_ms: int) -> None:
        """Does something."""

    def flushed(self) -> None:
        """Log, queues and what is beside them were brought to disk."""

    def closed(self) -> None: ...


class Queues:
    """Messages: each is in its queue once, in its place, and is found by its key."""

    def __init__(self) -> None:
        self.sent: dict[Queue, list[bytes | None]] = {}  # None: lost before it was acknowledged
        self.safe: dict[Queue, int] = {}
        self._number = 0
        self._deleting: str | None = None  # when the power failed

    def opened(self, store: Store, now_ms: int) -> None:
        self._store = store
        if self._deleting is not None and all(
            store.max_offset(*queue) == 0 for queue in self._queues_of(self._deleting)
        ):
            self._deleted(self._deleting)
        self._deleting = None
        for queue in {*store.queues(), *self.sent}:
            sent = self.sent.get(queue, [])
            found = [body for _, body in self._read(queue)]
            safe = self.safe.get(queue, 0)
            assert found[:safe] == sent[:safe], f"{queue}: acknowledged messages are lost"
            for offset, body in enumerate(found):
                assert body in (None, sent[offset]), f"{queue} at {offset}: not what was sent"
            self.sent[queue] = found
        self.check_keys(store)
        # What there is now was brought to disk by recovery, and is built upon.
        self.safe = {queue: len(sent) for queue, sent in self.sent.items()}

    def check_keys(self, store: Store) -> None:
        for (topic, queue_id), sent in self.sent.items():
            for offset in range(max(len(sent) - 3, 0), len(sent)):
                body = sent[offset]
                if body is None:
                    continue
                result = store.query(topic, key_of(body).decode(), 9, 0, 1 << 60)
                found = [decode_record(record) for record in result.slices]
                assert [(m.queue_id, m.queue_offset) for m in found] == [(queue_id, offset)]

    def _read(self, queue: Queue) -> Iterator[tuple[int, bytes | None]]:
        offset = 0
        while offset < self._store.max_offset(*queue):
            result = self._store.read(*queue, offset, 32)
            found = {m.queue_offset: m.body for m in map(decode_record, result.records)}
            assert result.next_offset > offset
            for place in range(offset, result.next_offset):
                yield place, found.get(place)
            offset = result.next_offset

    def _queues_of(self, topic: str) -> list[Queue]:
        return [queue for queue in self.sent if queue[0] == topic]

    def _deleted(self, topic: str) -> None:
        for queue in self._queues_of(topic):
            del self.sent[queue]
            self.safe.pop(queue, None)

    def use(self, chance: random.Random, now_ms: int) -> None:
        topic, queue_id = queue = chance.choice(QUEUES)
        if chance.random() < 0.02:
            self._deleting = topic
            self._store.delete_topic(topic)
            self._deleting = None
            self._deleted(topic)
            return
        bodies: list[bytes] = []
        for _ in range(chance.choice((1, 1, 1, 3, 12))):
            self._number += 1
            bodies.append(b"%d" % self._number + b"." * chance.choice((0, 0, 30, 500)))
        ends = (b"", b"\x02", b"\x02x\0")
        parts = [BatchPart(0, body, b"KEYS\x01" + key_of(body) + chance.choice(ends)) for body in bodies]
        if chance.random() < 0.1:
            self._store.append(Message(topic, queue_id, b"half", {}, sys_flag=4), now_ms)
        stored = self._store.append_batch(Message(topic, queue_id, b"", {}), parts, now_ms)
        assert stored.queue_offset == len(self.sent.get(queue, []))
        self.sent.setdefault(queue, []).extend(bodies)

    def flushed(self) -> None:
        self.safe = {queue: len(sent) for queue, sent in self.sent.items()}

    def closed(self) -> None:
        self.flushed()


class StoreLife(Life):
    """A store, whose flushes come when they come."""

    def __init__(self, directory: Path, disk: Disk, chance: random.Random) -> None:
        super().__init__(directory, disk, chance)
        self._oracles: list[Oracle] = [Queues()]
        self._store: Store | None = None

    def step(self) -> None:
        chance = self.chance
        store = self._store or self._open()
        self.now_ms += chance.randrange(2000)
        what = chance.random()
        if what < 0.7:
            chance.choice(self._oracles).use(chance, self.now_ms)
        elif what < 0.75:
            for _ in range(chance.choice((1, 2, 5))):
                store._queues.aside.turn()
        elif what < 0.9:
            if store._flusher.flush_log():
                self._oracles[0].flushed()
        elif what < 0.97:
            store._flusher.flush_derived(with_index=chance.random() < 0.3)
            for oracle in self._oracles:
                oracle.flushed()
        else:
            self._close(store)

    def finish(self) -> None:
        self._close(self._open())

    def abandon(self) -> None:
        old, self._store = self._store, None
        if old is not None:
            old.close()

    def _open(self) -> Store:
        self._store = Store.open(small_config(self.root, index_entries=60, segment_bytes=1 << 14))
        for oracle in self._oracles:
            oracle.opened(self._store, self.now_ms)
        return self._store

    def _close(self, store: Store) -> None:
        store.close()
        for oracle in self._oracles:
            oracle.closed()
        self._store = None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the flush thread's power
def test_nothing_acknowledged_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    live_through(monkeypatch, cuts_wanted(300), StoreLife)
