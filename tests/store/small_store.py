"""A store with tiny files, so that a few messages fill several of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skylark.store import NotWriteable, ReadStatus, Store, StoreConfig
from skylark.wire.message import Message, StoredMessage
from skylark.wire.records import decode_record

# Where a test has no use for a real disk: a sync takes no time there.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
START_MS = 1_700_000_000_000
SEGMENT_BYTES = 2048
ENTRIES_PER_FILE = 8


def small_config(root: Path, **changes: Any) -> StoreConfig:
    settings: dict[str, Any] = {
        "segment_bytes": SEGMENT_BYTES,
        "queue_entries_per_file": ENTRIES_PER_FILE,
        "index_slots": 50,
        "index_entries": 200,
        "flush_interval_ms": 60_000,  # tests flush when they mean to
        "disk_usage": lambda path: 0.1,
    }
    return StoreConfig(root=root, **{**settings, **changes})


@contextmanager
def small_store(root: Path, **changes: Any) -> Iterator[Store]:
    store = Store.open(small_config(root, **changes))
    try:
        yield store
    finally:
        store.close()


def finish_deleting(store: Store) -> None:
    """Returns when the files of deleted topics are gone."""
    while store._queues.aside.turn():
        pass


def flushed(store: Store, log_end_offset: int) -> asyncio.Future[None]:
    """Done when the log is on disk up to there."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(failure: str | None) -> None:
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(NotWriteable(failure))

    store.when_flushed(log_end_offset, done)
    return future


def a_message(body: bytes = b"body", topic: str = "topic", queue_id: int = 0, **properties: str) -> Message:
    return Message(topic, queue_id, body, properties)


def fill(store: Store, count: int, topic: str = "topic", queue_id: int = 0, size: int = 100) -> None:
    """Appends messages whose bodies say their queue offset, a second apart."""
    for _ in range(count):
        offset = store.max_offset(topic, queue_id)
        body = f"{topic}-{queue_id}-{offset}".encode().ljust(size, b".")
        store.append(a_message(body, topic, queue_id, KEYS=f"k{offset}"), START_MS + 1000 * offset)


def drain(store: Store, topic: str = "topic", queue_id: int = 0) -> list[StoredMessage]:
    """All messages of a queue, read as a consumer does, with their offsets checked."""
    messages: list[StoredMessage] = []
    offset = store.min_offset(topic, queue_id)
    while offset < store.max_offset(topic, queue_id):
        result = store.read(topic, queue_id, offset, 32)
        assert result.status is ReadStatus.FOUND
        for record in result.records:
            message = decode_record(record)
            assert (message.topic, message.queue_id, message.queue_offset) == (topic, queue_id, offset)
            messages.append(message)
            offset += 1
        assert result.next_offset == offset
    return messages


def bodies(store: Store, topic: str = "topic", queue_id: int = 0) -> list[bytes]:
    return [message.body.rstrip(b".") for message in drain(store, topic, queue_id)]


def expected_bodies(count: int, topic: str = "topic", queue_id: int = 0, start: int = 0) -> list[bytes]:
    return [f"{topic}-{queue_id}-{offset}".encode() for offset in range(start, count)]
