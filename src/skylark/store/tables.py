"""A broker's tables as JSON files under `<store root>/config/`, in Apache's format and under Apache's names.

Each table is one file that is written anew as a whole: to `<name>.tmp`, synced, then put in place of `<name>`, whose
former content stays as `<name>.bak`. Whatever moment a crash chooses, there is a whole table to load: `<name>` is
never half written, and never missing once it was there (on file systems without hard links, its backup is there).

Damage that no crash explains must not keep a broker from starting without a way out: the backup is read instead; single
numbers that are out of range are left out with a warning (see `repair`); and if nothing can be read, the broker says
what to move away, unless the table is one that it can do without.

A file has one writer at a time, and `save` blocks: off the event loop, if the disk may be slow.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from skylark.store import repair
from skylark.wire import fastjson
from skylark.wire.numbers import Int, Long
from skylark.wire.tables import DataVersion, SubscriptionGroupConfig, TopicConfig

log = logging.getLogger(__name__)

T = TypeVar("T")

_SHOWN: Final = 20


class BadTable(Exception):
    """Neither the file of a table nor its backup can be read. Says which file, why, and what to do."""


class TopicTable(msgspec.Struct, rename="camel"):
    """topics.json"""

    data_version: DataVersion = msgspec.field(default_factory=DataVersion)
    topic_config_table: dict[str, TopicConfig] = {}


class SubscriptionGroupTable(msgspec.Struct, rename="camel"):
    """subscriptionGroup.json; the forbidden table is group -> topic -> bits of what is forbidden."""

    data_version: DataVersion = msgspec.field(default_factory=DataVersion)
    forbidden_table: dict[str, dict[str, Int]] = {}
    subscription_group_table: dict[str, SubscriptionGroupConfig] = {}


class ConsumerOffsetTable(msgspec.Struct, rename="camel"):
    """consumerOffset.json; the offset tables are "topic@group" -> queue -> offset.

    Apache also writes the topics of each group, which it derives from the offsets and does not read back.
    """

    data_version: DataVersion = msgspec.field(default_factory=DataVersion)
    offset_table: dict[str, dict[Int, Long]] = {}
    pull_offset_table: dict[str, dict[Int, Long]] = {}


class DelayOffsetTable(msgspec.Struct, rename="camel"):
    """delayOffset.json; delay level -> offset in that level's queue."""

    data_version: DataVersion = msgspec.field(default_factory=DataVersion)
    offset_table: dict[Int, Long] = {}


class TopicTimers(msgspec.Struct, rename="camel"):
    """How many timers of a topic wait, and since when that is so."""

    count: Long = 0
    timestamp_ms: Long = msgspec.field(name="timeStamp", default=0)


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


def load(path: Path, wanted: type[T], *, expendable: bool = False) -> T | None:
    """The table in the file, else the one in its backup, None when there is neither.

    A file that cannot be read although its backup can is set aside as `<name>.broken`, so that the next `save` does not
    make it the backup. Raises BadTable when a file is there but no whole table; one that is `expendable` is set aside
    too, and the broker starts without it.
    """
    damage: dict[Path, str] = {}
    for place in (path, _beside(path, ".bak")):
        try:
            table = _read(place, wanted)
        except fastjson.BadJson as error:
            damage[place] = str(error)
            continue
        if table is None:
            continue
        if place != path:
            log.warning("%s; using its backup %s", _trouble(path, damage), place.name)
        _set_aside(damage)
        return table
    if damage and not expendable:
        raise BadTable(_way_out(path, damage))
    if damage:
        log.error("%s; going on without it", _trouble(path, damage))
        _set_aside(damage)
    return None


def _trouble(path: Path, damage: dict[Path, str]) -> str:
    own = [] if path in damage else [f"{path} is missing or empty"]
    return "; ".join(own + [f"{place} is damaged: {reason}" for place, reason in damage.items()])


def _way_out(path: Path, damage: dict[Path, str]) -> str:
    places = " and ".join(place.name for place in damage)
    backup = "" if len(damage) > 1 or path not in damage else ", and it has no backup"
    return (
        f"{_trouble(path, damage)}{backup}. Put a good copy in its place, or move {places} out of {path.parent} to "
        f"start with an empty table"
    )


def _set_aside(damage: dict[Path, str]) -> None:
    for place in damage:
        place.replace(_beside(place, ".broken"))


def _read(path: Path, wanted: type[T]) -> T | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadTable(f"{path} can't be read: {error.strerror}. Make it readable, or move it away") from error
    # An empty file is what a crash leaves of the first write of a server that writes in place.
    if not data:
        return None
    try:
        return fastjson.decode(data, wanted)
    except fastjson.BadJson:
        table, left_out = repair.decode(data, wanted)
    shown = ", ".join(left_out[:_SHOWN]) + (", …" if len(left_out) > _SHOWN else "")
    log.warning("%s has %d numbers that are out of range, which are left out: %s", path, len(left_out), shown)
    return table


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
    try:
        with open(fd, "wb") as file:  # noqa: PTH123 (a descriptor, not a path)
            file.write(data)
            file.flush()
            os.fdatasync(fd)
    except OSError as e:
        e.filename = str(path)  # a full disk does not say which file it had no room for
        raise


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
