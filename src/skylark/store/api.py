"""What the store's callers see of it besides `Store`: its settings, its answers and its errors."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path

import msgspec

from skylark.wire.records import encode_host

DEFAULT_DELAY_LEVELS = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class StoreError(Exception):
    """The store cannot do what was asked; the text says why."""


class MessageTooLarge(StoreError):
    """The body is over the limit, or the record does not fit into a log segment."""


class PropertiesTooLarge(StoreError):
    """The encoded properties are over 32767 bytes."""


class NotWriteable(StoreError):
    """The store takes no messages now: closed, fenced after a failed flush, its log can't be written, the disk is
    nearly full, or too many files are open. Whatever else an append raises concerns the one message or its queue.
    """


class DiskFull(NotWriteable):
    """No disk space could be reserved; nothing was written, and the next append tries again."""


class StoreLocked(StoreError):
    """Another process has the directory open."""


def parse_delay_levels(text: str) -> tuple[int, ...]:
    """The delays in milliseconds behind a `messageDelayLevel` setting; level 1 is the first.

    >>> parse_delay_levels("1s 2m")
    (1000, 120000)
    """
    try:
        return tuple(int(word[:-1]) * _UNIT_MS[word[-1]] for word in text.split())
    except (ValueError, KeyError) as error:
        raise StoreError(f"messageDelayLevel={text!r}: words like 30s, 5m, 1h or 1d are allowed") from error


class StoreConfig(msgspec.Struct, kw_only=True):
    """Settings of a store; Apache's defaults. Sizes of existing files must not be changed."""

    root: Path
    commit_log_dir: Path | None = None  # <root>/commitlog
    segment_bytes: int = 1 << 30
    queue_entries_per_file: int = 300_000
    store_host: bytes = encode_host("127.0.0.1", 10911)
    max_message_bytes: int = 4 << 20
    delay_levels: str = DEFAULT_DELAY_LEVELS

    flush_sync: bool = False
    flush_interval_ms: int = 500
    queue_flush_interval_ms: int = 1000
    index_flush_interval_ms: int = 10_000

    file_reserved_hours: int = 72
    delete_when: str = "04"
    delete_batch_max: int = 10
    clean_forcibly: bool = True
    disk_max_used_ratio: int = 75  # taken as 10 to 95
    disk_clean_forcibly_ratio: int = 85  # taken as 30 to 85
    disk_warning_ratio: int = 90  # taken as 35 to 90
    disk_usage: Callable[[Path], float] | None = None  # used part of the disk, 0 to 1; asked of the system by default

    index_enabled: bool = True
    index_slots: int = 5_000_000
    index_entries: int = 20_000_000

    max_transfer_bytes_in_memory: int = 256 << 10
    max_transfer_count_in_memory: int = 32
    max_transfer_bytes_on_disk: int = 64 << 10
    max_transfer_count_on_disk: int = 8
    max_filter_bytes: int = 16_000  # of queue entries looked at in one read
    memory_ratio: int = 40  # percent of physical memory that the newest part of the log is thought to be in
    physical_memory_bytes: int | None = None
    max_mapped_queue_files: int = 4096


class QueueEntry(msgspec.Struct):
    log_offset: int
    size_bytes: int
    tag_code: int


class ReadStatus(enum.Enum):
    FOUND = enum.auto()
    NO_MATCHED_MESSAGE = enum.auto()
    MESSAGE_WAS_REMOVING = enum.auto()
    OFFSET_FOUND_NULL = enum.auto()
    OFFSET_OVERFLOW_BADLY = enum.auto()
    OFFSET_OVERFLOW_ONE = enum.auto()
    OFFSET_TOO_SMALL = enum.auto()
    NO_MATCHED_LOGIC_QUEUE = enum.auto()
    NO_MESSAGE_IN_QUEUE = enum.auto()


class ReadResult(msgspec.Struct):
    """The answer to a read."""

    status: ReadStatus
    next_offset: int
    min_offset: int
    max_offset: int
    records: list[bytes] = []
    size_bytes: int = 0
    from_disk: bool = False  # so far behind that a slave should be asked

    @property
    def count(self) -> int:
        return len(self.records)


class LogRecord(msgspec.Struct, gc=False):
    """A record that was found whole in the log. `size_bytes` 0: the rest of the segment is blank."""

    log_offset: int
    size_bytes: int
    topic: str = ""
    queue_id: int = 0
    queue_offset: int = 0
    sys_flag: int = 0
    store_ms: int = 0
    properties_data: bytes = b""

    @property
    def may_be_torn(self) -> bool:
        """Whether its end may be zeros that a crash left: append ends no properties with one (see `BatchPart`)."""
        return self.properties_data.endswith(b"\0")


class QueryResult(msgspec.Struct):
    slices: list[memoryview]
    index_last_update_timestamp: int
    index_last_update_phyoffset: int


class CleanReport(msgspec.Struct):
    """What a turn of retention deleted. `more`: the round goes on with the next turn, which should come soon."""

    log_files: int = 0
    queue_files: int = 0
    index_files: int = 0
    more: bool = False
