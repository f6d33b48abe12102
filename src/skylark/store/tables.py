"""A broker's tables as JSON files under `<store root>/config/`, in Apache's format and under Apache's names.

Each table is one file that is written anew as a whole: to `<name>.tmp`, synced, then put in place of `<name>`, whose
former content stays as `<name>.bak`. Whatever moment a crash chooses, there is a whole table to load: `<name>` is
never half written, and never missing once it was there (on file systems without hard links, its backup is there).

A file has one writer at a time, and `save` blocks: off the event loop, if the disk may be slow.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from skylark.wire import fastjson
from skylark.wire.tables import DataVersion, SubscriptionGroupConfig, TopicConfig

log = logging.getLogger(__name__)

T = TypeVar("T")


class BadTable(Exception):
    """Neither the file of a table nor its backup can be read. Says which file and why."""


class TopicTable(msgspec.Struct, rename="camel"):
    """topics.json"""

    data_version: DataVersion = msgspec.field(default_factory=DataVersion)
    topic_config_table: dict[str, TopicConfig] = {}


class SubscriptionGroupTable(msgspec.Struct, rename="camel"):
    """subscriptionGroup.json; the forbidden table is group -> topic -> bits of what is forbidden."""

    data_version: DataVersion = msgspec.field(default_factory=DataVersion)
    forbidden_table: dict[str, dict[str, int]] = {}
    subscription_group_table: dict[str, SubscriptionGroupConfig] = {}


class ConsumerOffsetTable(msgspec.Struct, rename="camel"):
    """consumerOffset.json; the offset tables are "topic@group" -> queue -> offset.

    Apache also writes the topics of each group, which it derives from the offsets and does not read back.
    """

    data_version: DataVersion = msgspec.field(default_factory=DataVersion)
    offset_table: dict[str, dict[int, int]] = {}
    pull_offset_table: dict[str, dict[int, int]] = {}


class DelayOffsetTable(msgspec.Struct, rename="camel"):
    """delayOffset.json; delay level -> offset in that level's queue."""

    data_version: DataVersion = msgspec.field(default_factory=DataVersion)
    offset_table: dict[int, int] = {}


class TopicTimers(msgspec.Struct, rename="camel"):
    """How many timers of a topic wait, and since when that is so."""

    count: int = 0
    timestamp_ms: int = msgspec.field(name="timeStamp", default=0)


class TimerMetrics(msgspec.Struct, rename="camel"):
    """timermetrics; topic -> its timers."""

    data_version: DataVersion = msgspec.field(default_factory=DataVersion)
    timing_count: dict[str, TopicTimers] = {}


def config_directory(root: Path) -> Path:
    return root / "config"


def topics_path(root: Path) -> Path:
    return config_directory(root) / "topics.json"


def subscription_groups_path(root: Path) -> Path:
    return config_directory(root) / "subscriptionGroup.json"


def consumer_offsets_path(root: Path) -> Path:
    return config_directory(root) / "consumerOffset.json"


def delay_offsets_path(root: Path) -> Path:
    return config_directory(root) / "delayOffset.json"


def timer_metrics_path(root: Path) -> Path:
    return config_directory(root) / "timermetrics"


def load(path: Path, wanted: type[T]) -> T | None:
    """The table in the file, else the one in its backup, None when there is neither.

    A file that cannot be read although its backup can is set aside as `<name>.broken`, so that the next `save` does not
    make it the backup. Raises BadTable when a file is there but no whole table.
    """
    try:
        table = _read(path, wanted)
    except fastjson.BadJson as error:
        backup = _load_backup(path, wanted, f"cannot read {path}: {error}")
        if backup is None:
            raise BadTable(f"{path} is damaged and has no backup: {error}") from None
        path.replace(_beside(path, ".broken"))
        return backup
    if table is None:
        return _load_backup(path, wanted, f"{path} is missing or empty")
    return table


def _load_backup(path: Path, wanted: type[T], trouble: str) -> T | None:
    backup_path = _beside(path, ".bak")
    try:
        table = _read(backup_path, wanted)
    except fastjson.BadJson as error:
        raise BadTable(f"{trouble}; its backup {backup_path} is damaged too: {error}") from None
    if table is not None:
        log.warning("%s; using its backup %s", trouble, backup_path.name)
    return table


def _read(path: Path, wanted: type[T]) -> T | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    # An empty file is what a crash leaves of the first write of a server that writes in place.
    return fastjson.decode(data, wanted) if data else None


def save(path: Path, table: msgspec.Struct) -> None:
    """Replaces the file by the table, keeping the former one as backup. It is on disk on return. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = _beside(path, ".tmp")
    _write_synced(fresh, fastjson.dumps(table, pretty=True))
    _keep_backup(path)
    fresh.replace(path)
    _sync_directory(path.parent)


def _write_synced(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    with open(fd, "wb") as file:  # noqa: PTH123 (a descriptor, not a path)
        file.write(data)
        file.flush()
        os.fdatasync(fd)


def _keep_backup(path: Path) -> None:
    if not path.exists():
        return
    backup = _beside(path, ".bak")
    link = _beside(path, ".bak.tmp")
    with suppress(FileNotFoundError):
        link.unlink()
    try:
        link.hardlink_to(path)
    except OSError:
        # No hard links here: then the file moves away for a moment, as Apache does it.
        path.replace(backup)
        return
    link.replace(backup)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
