"""Queue locks of orderly consumers: at any time, at most one client of a group holds a queue.

A lock lives for 60 s after its holder last asked for it; holders ask every 20 s. Locks are kept in memory only: after a
restart of the broker the first to ask gets the queue, as after an expiry. Time is whatever clock the caller uses
throughout, best one that never jumps.

A client whose connection breaks keeps its locks, for it may be back before they expire, and works on meanwhile.

Who leaves its group gives its locks back with that. Apache's Java client unlocks before it leaves, but passes over
queues that it was about to hand over, and may take others in between: those would stand still for the 60 s.

What the locks take is bounded, and divided among the clients' hosts (`shares.py`). A lock that is held is always
renewed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Final

import msgspec

from skylark.broker.shares import Shares
from skylark.broker.turns import ITEMS_PER_TURN, beside, next_turn
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.net.request_bodies import request_body
from skylark.wire.bodies import LockedQueues, LockRequest, MessageQueue, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
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
    host: str
    """Whose share it counts for."""


class Locks:
    """Who holds which queue, by group."""

    def __init__(self, max_live_ms: int = MAX_LIVE_MS, max_size_bytes: int = MAX_SIZE_BYTES) -> None:
        self._max_live_ms = max_live_ms
        self._max_size_bytes = max_size_bytes
        self.size_bytes = 0
        self._shares = Shares()
        self._swept_ms = -_SWEEP_INTERVAL_MS
        self._locks: dict[str, dict[MessageQueue, _Lock]] = {}

    def lock_batch(
        self, group: str, client_id: str, queues: Iterable[MessageQueue], now_ms: int, host: str = ""
    ) -> set[MessageQueue]:
        """Takes or renews what it can; the queues that the client, which is on `host`, holds now."""
        locks = self._locks.get(group, {})
        held = set()
        refused: list[tuple[MessageQueue, str]] = []
        for queue in queues:
            lock = locks.get(queue)
            if lock is not None and lock.client_id != client_id:
                if not self._is_expired(lock, now_ms):
                    refused.append((queue, f"{lock.client_id} holds it"))
                    continue
                self._remove(locks, group, queue)
                lock = None
            if lock is None:
                if not self._take_room(group, client_id, queue, now_ms, host):
                    refused.append((queue, "no room is left"))
                    continue
                lock = locks[queue] = _Lock(client_id, now_ms, host)
            lock.renewed_ms = now_ms
            held.add(queue)
        if refused:
            log.info("%.255s of %.255s can't lock %d queues: %s: %s", client_id, group, len(refused), *refused[0])
        if locks:
            self._locks[group] = locks
        else:
            self._locks.pop(group, None)
        return held

    def lack_of_room(self, group: str, client_id: str, queue: MessageQueue, host: str) -> str | None:
        """What to do about a queue that could not be locked, if that is for lack of room."""
        if queue in self._locks.get(group, {}) or self._has_room(_size_bytes(group, client_id, queue), host):
            return None
        return (
            f"queue {queue.queue_id} of {queue.topic:.255s} can't be locked: the locks of the clients of {host} take "
            f"{self._shares.held(host)} of {self._max_size_bytes} bytes, and all locks {self.size_bytes}. Unlock "
            f"queues that are not consumed any more, or try again when their locks have expired, after "
            f"{self._max_live_ms // 1000} s"
        )

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

    def all(self) -> Iterator[tuple[str, str, str, MessageQueue, int]]:
        """Group, client, its host, queue, and when the lock was last renewed."""
        for group, locks in self._locks.items():
            for queue, lock in locks.items():
                yield group, lock.client_id, lock.host, queue, lock.renewed_ms

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

    def _take_room(self, group: str, client_id: str, queue: MessageQueue, now_ms: int, host: str) -> bool:
        """Whether one more lock may be kept; looks for expired ones, at most once a second, when there is no room."""
        size_bytes = _size_bytes(group, client_id, queue)
        if not self._has_room(size_bytes, host):
            if now_ms - self._swept_ms >= _SWEEP_INTERVAL_MS:
                self.expire(now_ms)
            if not self._has_room(size_bytes, host):
                return False
        self._count(size_bytes, host)
        return True

    def _has_room(self, size_bytes: int, host: str) -> bool:
        return self._shares.has_room(host, size_bytes, self._max_size_bytes - self.size_bytes - size_bytes)

    def _count(self, size_bytes: int, host: str) -> None:
        self.size_bytes += size_bytes
        self._shares.add(host, size_bytes)

    def _remove(self, locks: dict[MessageQueue, _Lock], group: str, queue: MessageQueue) -> None:
        lock = locks.pop(queue)
        self._count(-_size_bytes(group, lock.client_id, queue), lock.host)


def _size_bytes(group: str, client_id: str, queue: MessageQueue) -> int:
    return _LOCK_BYTES + len(group) + len(client_id) + len(queue.topic) + len(queue.broker_name)


def handlers(locks: Locks, clock: Callable[[], int]) -> dict[int, Handler]:
    def lock(request: Frame, connection: Connection) -> Frame | Awaitable[Frame]:
        wanted = request_body(LockRequest, request.body)
        host = connection.peer[0]
        if len(wanted.mq_set) > ITEMS_PER_TURN:
            return lock_many(request, wanted, host)
        held = locks.lock_batch(wanted.consumer_group, wanted.client_id, wanted.mq_set, clock(), host)
        remark = lack_of_room(wanted, wanted.mq_set, held, host)
        return request.reply(remark=remark, body=encode_body(answer(list(held), remark)))

    async def lock_many(request: Frame, wanted: LockRequest, host: str) -> Frame:
        held: list[MessageQueue] = []
        remark: str | None = None
        for part in _parts(wanted.mq_set):
            got = locks.lock_batch(wanted.consumer_group, wanted.client_id, part, clock(), host)
            remark = remark or lack_of_room(wanted, part, got, host)
            held += got
            await next_turn(host)
        locked = answer(held, remark)
        return request.reply(remark=remark, body=await beside(lambda: encode_body(locked)))

    def lack_of_room(wanted: LockRequest, asked: list[MessageQueue], held: set[MessageQueue], host: str) -> str | None:
        missing = next((queue for queue in asked if queue not in held), None)
        if missing is None:
            return None
        return locks.lack_of_room(wanted.consumer_group, wanted.client_id, missing, host)

    def answer(held: list[MessageQueue], remark: str | None) -> LockedQueues:
        """An error only if nothing is held: with one, clients take the locks that they asked for again as unknown."""
        if remark is not None and not held:
            raise RequestFailed(ResponseCode.SYSTEM_BUSY, remark)
        return LockedQueues(lock_ok_mq_set=held)

    def unlock(request: Frame, connection: Connection) -> Frame | Awaitable[Frame]:
        given = request_body(LockRequest, request.body)
        if len(given.mq_set) > ITEMS_PER_TURN:
            return unlock_many(request, given, connection.peer[0])
        locks.unlock_batch(given.consumer_group, given.client_id, given.mq_set)
        return request.reply()

    async def unlock_many(request: Frame, given: LockRequest, host: str) -> Frame:
        for part in _parts(given.mq_set):
            locks.unlock_batch(given.consumer_group, given.client_id, part)
            await next_turn(host)
        return request.reply()

    return {RequestCode.LOCK_BATCH_MQ: lock, RequestCode.UNLOCK_BATCH_MQ: unlock}


def _parts(queues: list[MessageQueue]) -> Iterator[list[MessageQueue]]:
    return (queues[at : at + ITEMS_PER_TURN] for at in range(0, len(queues), ITEMS_PER_TURN))
