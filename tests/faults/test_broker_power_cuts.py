"""The power of a broker fails again and again: with synchronous flush nothing acknowledged is lost.

Messages are sent, delayed by a level or by a timer, popped, popped in order, acknowledged, pulled and committed,
prepared and ended in transactions.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from faults.broker_clients import Producer, Reader, Scheduler, Sender, Workers
from faults.broker_life import IN_ORDER, WORKERS, BrokerLife
from faults.power import Disk, cuts_wanted, live_through

WHEEL_SLOTS = 1_200


def _begin(directory: Path, disk: Disk, chance: random.Random) -> BrokerLife:
    life = BrokerLife(directory, disk, chance)
    sender = Sender(life)
    workers = Workers(life, sender, WORKERS, order=False)
    in_order = Workers(life, sender, IN_ORDER, order=True)
    life.clients = [sender, Scheduler(life), workers, in_order, Reader(life), Producer(life)]
    return life


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the flush thread's power
def test_a_broker_loses_nothing_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    # A wheel of minutes, not of weeks: it is copied at each of its syncs, and its slots are used again and again.
    for module in ("timers", "timerwheel"):
        monkeypatch.setattr(f"skylark.store.{module}.SLOTS", WHEEL_SLOTS)
    monkeypatch.setattr("skylark.store.timerwheel.FILE_BYTES", WHEEL_SLOTS * 32)
    monkeypatch.setattr("skylark.store.timers.MAX_WINDOW_SLOTS", WHEEL_SLOTS // 2 - 60)

    async def run() -> None:
        live_through(monkeypatch, cuts_wanted(200), _begin)

    asyncio.run(run())  # a broker is built where there is an event loop, which is not used here
