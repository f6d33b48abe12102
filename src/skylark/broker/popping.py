"""The parts of POP consumption, joined: who hands out, who takes back, who waits, and what is kept about it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from skylark.broker.access import Access
from skylark.broker.acks import Acks
from skylark.broker.checkpoints import CheckPoints
from skylark.broker.config import BrokerConfig
from skylark.broker.groups import Groups
from skylark.broker.held import HeldTable
from skylark.broker.offset_rows import OffsetCopy
from skylark.broker.offsets import Offsets
from skylark.broker.orders import OrderCopy, Orders
from skylark.broker.peek import Peeks
from skylark.broker.polling import PopWaiters
from skylark.broker.pop import Pops
from skylark.broker.poprecovery import PopProgress, recover
from skylark.broker.put import Put
from skylark.broker.revive import Revive
from skylark.broker.stats import Stats
from skylark.broker.topics import Topics
from skylark.net.connection import Handler
from skylark.store import Listener, Store


class _Tables(msgspec.Struct):
    """What is written together: recovery goes on from where the log ended when the tables were captured."""

    offsets: OffsetCopy | None
    orders: OrderCopy | None
    log_end: int
    copies_needed: bool


class Popping:
    def __init__(
        self,
        config: BrokerConfig,
        store: Store,
        put: Put,
        topics: Topics,
        groups: Groups,
        offsets: Offsets,
        stats: Stats,
        clock: Callable[[], int],
        delivered_to_ms: Callable[[int], int],
        config_dir: Path,
    ) -> None:
        """Recovers what the tables do not know. `delivered_to_ms` is the time up to which timers were delivered."""
        self._config = config
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._store = store
        self._orders = Orders(config_dir)
        self.held: HeldTable[_Tables] = HeldTable(store, self._write, self._written)
        self._progress = PopProgress(config_dir, store)
        copied = set() if store.was_clean else recover(store, self._progress, offsets, self._orders)
        self._revive = Revive(config, store, put, topics, groups, offsets, stats, delivered_to_ms, copied)
        self._waiters = PopWaiters(config)
        self._notified = PopWaiters(config, latest_first=True)
        access = Access(config, topics, groups)
        points = CheckPoints(put, config, store)
        orders, waiters = self._orders, self._waiters
        self._handlers = {
            **Pops(
                config, store, put, topics, access, offsets, orders, points, waiters, stats, clock
            ).handlers(),
            **Acks(config, store, put, access, offsets, orders, points, waiters, clock).handlers(),
            **Peeks(
                config, store, topics, access, offsets, orders, waiters, self._notified, stats, clock
            ).handlers(),
        }  # fmt: skip

    def handlers(self) -> dict[int, Handler]:
        return self._handlers

    @property
    def listeners(self) -> tuple[Listener, ...]:
        """Who wants to be told of each message."""
        return self._waiters.notify, self._notified.notify

    def revive(self, now_ms: int) -> float:
        """Settles what is due. In how many seconds it wants to be called again."""
        return 0 if self._revive.turn(now_ms) else self._config.revive_interval / 1000

    def save(self, now_ms: int) -> None:
        """Writes consumer offsets and the state of pops in order, if they changed, once the log is on disk as far as it
        is now: else, after a power cut, a group stands behind messages whose check point is lost. Raises OSError.
        """
        self.held.save(lambda: self._capture(now_ms))

    def forget_topics(self, names: Collection[str]) -> None:
        self._orders.remove_topics(names)

    def _capture(self, now_ms: int) -> _Tables:
        self._revive.commit()
        self._orders.clean(self._topics, self._groups, now_ms)
        log_end, copies_needed = self._store.log_max_offset, not self._revive.is_caught_up
        return _Tables(self._offsets.capture(), self._orders.capture(), log_end, copies_needed)

    def _write(self, tables: _Tables) -> None:
        if tables.offsets is not None:
            self._offsets.write(tables.offsets)
        if tables.orders is not None:
            self._orders.write(tables.orders)
        self._progress.write(tables.log_end, copies_needed=tables.copies_needed)

    def _written(self, tables: _Tables) -> None:
        if tables.offsets is not None:
            self._offsets.written(tables.offsets)

    def close(self) -> None:
        """Ends the waiting."""
        self._waiters.close()
        self._notified.close()
