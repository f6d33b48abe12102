"""Queue locks hold on over a restart of the broker, for as long as their holders rely on them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.live import Live, MovableClock, live_broker
from skylark.broker import kept_locks
from skylark.broker.kept_locks import RELIED_ON_MS
from skylark.broker.locks import MAX_LIVE_MS, Locks
from skylark.wire.bodies import LockedQueues, LockRequest, MessageQueue, decode_body, encode_body
from skylark.wire.codes import RequestCode

NOW_MS = 1_700_000_000_000
QUEUES = [MessageQueue("broker", number, "T") for number in range(2)]


def restarted(directory: Path, locks: Locks, steady_ms: int, *, down_ms: int) -> Locks:
    """The locks after a restart, whose steady clock begins at 7."""
    kept_locks.write(directory, locks, steady_ms, NOW_MS)
    again = Locks()
    kept_locks.take(directory, again, 7, NOW_MS + down_ms)
    assert not list(directory.iterdir())
    return again


@given(age_ms=st.integers(0, 2 * RELIED_ON_MS), down_ms=st.integers(-1000, 2 * RELIED_ON_MS))
def test_a_lock_is_kept_as_long_as_its_holder_relies_on_it(
    tmp_path_factory: pytest.TempPathFactory, age_ms: int, down_ms: int
) -> None:
    directory = tmp_path_factory.mktemp("kept")
    locks = Locks()
    locks.lock_batch("g", "a", QUEUES[:1], 1_000_000, "10.0.0.1")
    again = restarted(directory, locks, 1_000_000 + age_ms, down_ms=down_ms)
    left_ms = RELIED_ON_MS - age_ms - max(down_ms, 0)
    if left_ms > 0:
        assert again.lock_batch("g", "b", QUEUES, 7 + left_ms) == set(QUEUES[1:])
        assert again.lock_batch("h", "b", QUEUES, 7 + left_ms) == set(QUEUES)
    assert again.lock_batch("g", "c", QUEUES[:1], 7 + max(left_ms, 0) + 1) == set(QUEUES[:1])


def test_its_holder_renews_it_and_gives_it_back(tmp_path: Path) -> None:
    locks = Locks()
    locks.lock_batch("g", "a", QUEUES, 0)
    again = restarted(tmp_path, locks, 0, down_ms=1_000)
    assert again.lock_batch("g", "a", QUEUES, 10) == set(QUEUES)
    assert again.lock_batch("g", "b", QUEUES, 10 + MAX_LIVE_MS) == set()
    again.unlock_batch("g", "a", QUEUES)
    assert again.size_bytes == 0
    assert again.lock_batch("g", "b", QUEUES, 20) == set(QUEUES)


async def lock(live: Live, client: str) -> list[MessageQueue]:
    body = encode_body(LockRequest(client_id=client, consumer_group="g", mq_set=QUEUES))
    return decode_body(LockedQueues, (await live.ask(RequestCode.LOCK_BATCH_MQ, body)).body).lock_ok_mq_set


def test_a_restarted_broker_gives_a_queue_to_nobody_else(tmp_path: Path) -> None:
    async def run() -> None:
        clock = MovableClock()
        async with live_broker(tmp_path, clock) as live:
            assert len(await lock(live, "a")) == len(QUEUES)
        async with live_broker(tmp_path, clock) as live:
            assert await lock(live, "b") == []
            assert len(await lock(live, "a")) == len(QUEUES)
        clock.ahead_ms += RELIED_ON_MS
        async with live_broker(tmp_path, clock) as live:
            assert len(await lock(live, "b")) == len(QUEUES)

    asyncio.run(run())
