"""Queue locks of orderly consumers: at any time, at most one client of a group holds a queue.

A lock lives for 60 s after its holder last asked for it; holders ask every 20 s. Locks are kept in memory only: after a
restart of the broker the first to ask gets the queue, as after an expiry. Time is whatever clock the caller uses
throughout, best one that never jumps.

A client whose connection breaks keeps its locks, for it may be back before they expire, and works on meanwhile.

Who leaves its group gives its locks back with that. Apache's Java client unlocks before it leaves, but passes over
queues that it was about to hand over, and may take others in between: those would stand still for the 60 s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Final

import msgspec

from skylark.broker.request_bodies import request_body
from skylark.broker.turns import ITEMS_PER_TURN, beside
from skylark.net.connection import Connection, Handler
from skylark.wire.bodies import LockedQueues, LockRequest, MessageQueue, encode_body
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame

log = logging.getLogger(__name__)

MAX_LIVE_MS: Final = 60_000
MAX_SIZE_BYTES: Final = 32 << 20
"""Of all locks, as estimated: names that many locks have in common count each time."""

_LOCK_BYTES: Final = 256  # of one, without its names
_SWEEP_INTERVAL_MS: Final = 1_000


class _Lock(msgspec.Struct):
    client_id: str
    renewed_ms: int


class Locks:
    """Who holds which queue, by group."""

    def __init__(self, max_live_ms: int = MAX_LIVE_MS, max_size_bytes: int = MAX_SIZE_BYTES) -> None:
        self._max_live_ms = max_live_ms
        self._max_size_bytes = max_size_bytes
        self.size_bytes = 0
        self._swept_ms = -_SWEEP_INTERVAL_MS
        self._locks: dict[str, dict[MessageQueue, _Lock]] = {}

    def lock_batch(self, group: str, client_id: str, queues: Iterable[MessageQueue], now_ms: int) -> set[MessageQueue]:
        """Takes or renews what it can; the queues that the client holds now."""
        locks = self._locks.get(group, {})
        held = set()
        refused: list[tuple[MessageQueue, str]] = []
        for queue in queues:
            lock = locks.get(queue)
            if lock is None:
                if not self._take_room(group, client_id, queue, now_ms):
                    refused.append((queue, "no room is left"))
                    continue
                locks[queue] = _Lock(client_id, now_ms)
            elif lock.client_id == client_id or self._is_expired(lock, now_ms):
                self.size_bytes += len(client_id) - len(lock.client_id)
                lock.client_id = client_id
                lock.renewed_ms = now_ms
            else:
                refused.append((queue, f"{lock.client_id} holds it"))
                continue
            held.add(queue)
        if refused:
            log.info("%.255s of %.255s can't lock %d queues: %s: %s", client_id, group, len(refused), *refused[0])
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
                self._remove(locks, group, queue)
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

    def expire(self, now_ms: int) -> None:
        """Forgets what its holders did not ask for again; called every few seconds."""
        self._swept_ms = now_ms
        for group, locks in list(self._locks.items()):
            for queue in [queue for queue, lock in locks.items() if self._is_expired(lock, now_ms)]:
                self._remove(locks, group, queue)
            if not locks:
                del self._locks[group]

    def _is_expired(self, lock: _Lock, now_ms: int) -> bool:
        return now_ms - lock.renewed_ms > self._max_live_ms

    def _take_room(self, group: str, client_id: str, queue: MessageQueue, now_ms: int) -> bool:
        """Whether one more lock may be kept; looks for expired ones, at most once a second, when the table is full."""
        size_bytes = _size_bytes(group, client_id, queue)
        if self.size_bytes + size_bytes > self._max_size_bytes:
            if now_ms - self._swept_ms >= _SWEEP_INTERVAL_MS:
                self.expire(now_ms)
            if self.size_bytes + size_bytes > self._max_size_bytes:
                return False
        self.size_bytes += size_bytes
        return True

    def _remove(self, locks: dict[MessageQueue, _Lock], group: str, queue: MessageQueue) -> None:
        self.size_bytes -= _size_bytes(group, locks.pop(queue).client_id, queue)


def _size_bytes(group: str, client_id: str, queue: MessageQueue) -> int:
    return _LOCK_BYTES + len(group) + len(client_id) + len(queue.topic) + len(queue.broker_name)


def handlers(locks: Locks, clock: Callable[[], int]) -> dict[int, Handler]:
    def lock(request: Frame, _: Connection) -> Frame | Awaitable[Frame]:
        wanted = request_body(LockRequest, request.body)
        if len(wanted.mq_set) > ITEMS_PER_TURN:
            return lock_many(request, wanted)
        held = locks.lock_batch(wanted.consumer_group, wanted.client_id, wanted.mq_set, clock())
        return request.reply(body=encode_body(LockedQueues(lock_ok_mq_set=list(held))))

    async def lock_many(request: Frame, wanted: LockRequest) -> Frame:
        held: list[MessageQueue] = []
        for part in _parts(wanted.mq_set):
            held += locks.lock_batch(wanted.consumer_group, wanted.client_id, part, clock())
            await asyncio.sleep(0)
        return request.reply(body=await beside(lambda: encode_body(LockedQueues(lock_ok_mq_set=held))))

    def unlock(request: Frame, _: Connection) -> Frame | Awaitable[Frame]:
        given = request_body(LockRequest, request.body)
        if len(given.mq_set) > ITEMS_PER_TURN:
            return unlock_many(request, given)
        locks.unlock_batch(given.consumer_group, given.client_id, given.mq_set)
        return request.reply()

    async def unlock_many(request: Frame, given: LockRequest) -> Frame:
        for part in _parts(given.mq_set):
            locks.unlock_batch(given.consumer_group, given.client_id, part)
            await asyncio.sleep(0)
        return request.reply()

    return {RequestCode.LOCK_BATCH_MQ: lock, RequestCode.UNLOCK_BATCH_MQ: unlock}


def _parts(queues: list[MessageQueue]) -> Iterator[list[MessageQueue]]:
    return (queues[at : at + ITEMS_PER_TURN] for at in range(0, len(queues), ITEMS_PER_TURN))
