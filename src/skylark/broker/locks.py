"""Queue locks of orderly consumers: at any time, at most one client of a group holds a queue.

A lock lives for 60 s after its holder last asked for it; holders ask every 20 s. Locks are kept in memory only: after a
restart of the broker the first to ask gets the queue, as after an expiry. Time is whatever clock the caller uses
throughout, best one that never jumps.

Who leaves its group gives its locks back with that. Apache's Java client unlocks before it leaves, but passes over
queues that it was about to hand over, and may take others in between: those would stand still for the 60 s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from skylark.net.connection import Connection, Handler
from skylark.wire.bodies import LockedQueues, LockRequest, MessageQueue, decode_body, encode_body
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame

log = logging.getLogger(__name__)

MAX_LIVE_MS: Final = 60_000
MAX_LOCKS: Final = 1_000_000
_SWEEP_INTERVAL_MS: Final = 1_000


class _Lock(msgspec.Struct):
    client_id: str
    renewed_ms: int


class Locks:
    """Who holds which queue, by group."""

    def __init__(self, max_live_ms: int = MAX_LIVE_MS, max_locks: int = MAX_LOCKS) -> None:
        self._max_live_ms = max_live_ms
        self._max_locks = max_locks
        self._count = 0
        self._swept_ms = -_SWEEP_INTERVAL_MS
        self._locks: dict[str, dict[MessageQueue, _Lock]] = {}

    def lock_batch(self, group: str, client_id: str, queues: Iterable[MessageQueue], now_ms: int) -> set[MessageQueue]:
        """Takes or renews what it can; the queues that the client holds now."""
        locks = self._locks.get(group, {})
        held = set()
        for queue in queues:
            lock = locks.get(queue)
            if lock is None:
                if not self._has_room(now_ms):
                    continue
                locks[queue] = _Lock(client_id, now_ms)
                self._count += 1
            elif lock.client_id == client_id or self._is_expired(lock, now_ms):
                lock.client_id = client_id
                lock.renewed_ms = now_ms
            else:
                log.info("%s of %s can't lock %s: %s holds it", client_id, group, queue, lock.client_id)
                continue
            held.add(queue)
        if locks:
            self._locks[group] = locks
        return held

    def unlock_batch(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Gives back what the client holds; what others hold stays theirs."""
        locks = self._locks.get(group)
        if locks is None:
            return
        for queue in queues:
            lock = locks.get(queue)
            if lock is not None and lock.client_id == client_id:
                del locks[queue]
                self._count -= 1
        if not locks:
            del self._locks[group]

    def release(self, group: str, client_id: str) -> None:
        """Gives back all that the client holds in the group."""
        held = [queue for queue, lock in self._locks.get(group, {}).items() if lock.client_id == client_id]
        if held:
            log.info("%s left %s and did not unlock %d queues", client_id, group, len(held))
            self.unlock_batch(group, client_id, held)

    def all_expired(self, group: str, now_ms: int) -> bool:
        """Whether nobody of the group holds any queue: its consumers are not orderly, or not there."""
        return all(self._is_expired(lock, now_ms) for lock in self._locks.get(group, {}).values())

    def _is_expired(self, lock: _Lock, now_ms: int) -> bool:
        return now_ms - lock.renewed_ms > self._max_live_ms

    def _has_room(self, now_ms: int) -> bool:
        """Whether one more lock may be kept; looks for expired ones, at most once a second, when the table is full."""
        if self._count >= self._max_locks and now_ms - self._swept_ms >= _SWEEP_INTERVAL_MS:
            self._swept_ms = now_ms
            for group, locks in list(self._locks.items()):
                for queue in [queue for queue, lock in locks.items() if self._is_expired(lock, now_ms)]:
                    del locks[queue]
                    self._count -= 1
                if not locks:
                    del self._locks[group]
        return self._count < self._max_locks


def handlers(locks: Locks, clock: Callable[[], int]) -> dict[int, Handler]:
    def lock(request: Frame, _: Connection) -> Frame:
        wanted = decode_body(LockRequest, request.body)
        held = locks.lock_batch(wanted.consumer_group, wanted.client_id, wanted.mq_set, clock())
        return request.reply(body=encode_body(LockedQueues(lock_ok_mq_set=list(held))))

    def unlock(request: Frame, _: Connection) -> Frame:
        given = decode_body(LockRequest, request.body)
        locks.unlock_batch(given.consumer_group, given.client_id, given.mq_set)
        return request.reply()

    return {RequestCode.LOCK_BATCH_MQ: lock, RequestCode.UNLOCK_BATCH_MQ: unlock}
