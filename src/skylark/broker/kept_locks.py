"""The queue locks of a broker that was stopped, which hold on after its restart.

A member goes on working on a queue while its broker is away: it relies on a lock for 30 s. A restarted broker without
locks would give the queue to whoever asks first, and two members would work on it.

Until it is renewed, a lock that was kept lasts only as long as its holder may rely on it: who was started together with
the broker does not wait the whole minute for queues whose holder is gone. The table is written when the
broker is stopped and taken away when it starts: it is true once. After a kill there is none.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import msgspec

from skylark.broker.locks import MAX_LIVE_MS, Locks
from skylark.store.tables import load, save
from skylark.wire.bodies import MessageQueue
from skylark.wire.numbers import Long

log = logging.getLogger(__name__)

RELIED_ON_MS: Final = 35_000
"""Clients rely on a lock for 30 s, from when they hear of it."""


class _Held(msgspec.Struct, rename="camel"):
    """What a client holds in a group."""

    group: str
    client_id: str
    host: str
    queues: list[tuple[MessageQueue, Long]]  # and how long ago each was renewed


class _Table(msgspec.Struct, rename="camel"):
    """queueLocks.json"""

    stopped_ms: Long = 0
    held: list[_Held] = []


def write(directory: Path, locks: Locks, steady_ms: int, now_ms: int) -> None:
    """Writes who holds what and may go on relying on it. Raises OSError."""
    held: dict[tuple[str, str, str], _Held] = {}
    for group, client_id, host, queue, renewed_ms in locks.all():
        if (age_ms := steady_ms - renewed_ms) < RELIED_ON_MS:
            key = group, client_id, host
            held.setdefault(key, _Held(*key, [])).queues.append((queue, age_ms))
    if held:
        save(_path(directory), _Table(now_ms, list(held.values())))


def take(directory: Path, locks: Locks, steady_ms: int, now_ms: int) -> None:
    """Gives clients the locks back that the last stop wrote, and takes that table away. Raises BadTable."""
    path = _path(directory)
    table = load(path, _Table, expendable=True) or _Table()
    try:
        path.unlink(missing_ok=True)
    except OSError as e:
        log.warning("%s can't be taken away, and counts again after the next start: %s", path, e)
    down_ms = max(now_ms - table.stopped_ms, 0)
    for held in table.held:
        for queue, age_ms in held.queues:
            left_ms = RELIED_ON_MS - age_ms - down_ms
            if left_ms > 0:
                renewed_ms = steady_ms + left_ms - MAX_LIVE_MS
                locks.lock_batch(held.group, held.client_id, [queue], renewed_ms, held.host)


def _path(directory: Path) -> Path:
    return directory / "queueLocks.json"
