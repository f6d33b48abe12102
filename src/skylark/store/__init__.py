"""The commit log and what is derived from it. `Store` is the only door."""

from skylark.store.api import (
    CleanReport,
    DiskFull,
    MessageTooLarge,
    NotWriteable,
    PropertiesTooLarge,
    QueryResult,
    QueueEntry,
    ReadResult,
    ReadStatus,
    StoreConfig,
    StoreError,
    StoreLocked,
)
from skylark.store.appended import Appended
from skylark.store.store import Listener, Store
from skylark.store.timerlog import TimerUnit
from skylark.store.timers import TIMER_TOPIC, DueSlot, TimerConfig, TimerStore

__all__ = [
    "TIMER_TOPIC",
    "Appended",
    "CleanReport",
    "DiskFull",
    "DueSlot",
    "Listener",
    "MessageTooLarge",
    "NotWriteable",
    "PropertiesTooLarge",
    "QueryResult",
    "QueueEntry",
    "ReadResult",
    "ReadStatus",
    "Store",
    "StoreConfig",
    "StoreError",
    "StoreLocked",
    "TimerConfig",
    "TimerStore",
    "TimerUnit",
]
