"""What Apache's broker keeps in a store in a way that Skylark cannot serve.

Apache's settings choose other ways to keep queues, tables and check points, and a broker that knows only the usual way
would find none of them: it would start without topics, count queues from 0 again, and write what Apache's broker cannot
read afterwards. So a store is looked at before anything in it is opened or written, whatever the settings say: the
broker does not start, and says what to do. RocksDB directories are known by their file CURRENT.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from skylark.store.api import StoreError

FETCH_TABLES: Final = (
    "run `skylark fetch-tables HOST:PORT --store DIR` while Apache's broker runs, stop it, and move the RocksDB "
    "directories below DIR/config away"
)
REBUILD_QUEUES: Final = "move that directory away, and they are built again from the log"
_TABLES: Final = ("rdb", "metadata", "topics", "subscriptionGroups", "consumerOffsets")
_QUEUES: Final = ("consumequeue_rocksdb", "consumequeue")
_LMQ_PREFIX: Final = "%LMQ%"
_UNSUPPORTED: Final = {
    ("queue.type", "BatchCQ"): "batchconsumequeue",
    ("cleanup.policy", "COMPACTION"): "compaction/compactionLog",
}
_NAMES_SHOWN: Final = 10


class ForeignStore(StoreError):
    """The store holds what cannot be served; the text says what, and what to do."""


def check(root: Path, attributes: Mapping[str, Mapping[str, str]]) -> None:
    """Raises `ForeignStore` for a store that cannot be served. `attributes` are those of each topic in its table."""
    for problem in _problems(root, attributes):
        raise ForeignStore(f'{problem} (see "Taking over Apache\'s store" in docs/configuration.md)')


def _problems(root: Path, attributes: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    if tables := [root / "config" / name for name in _TABLES if _is_rocksdb(root / "config" / name)]:
        yield f"{_joined(tables)}: topics, groups and offsets are kept in RocksDB, not in JSON files: {FETCH_TABLES}"
    for queues in (root / name for name in _QUEUES):
        if _is_rocksdb(queues):
            yield f"{queues}: the consume queues are kept in RocksDB: {REBUILD_QUEUES}"
    if _is_rocksdb(root / "kvStore"):
        yield (
            f"{root / 'kvStore'}: check points of pops are kept in RocksDB: run mqadmin exportPopRecord while Apache's "
            "broker runs, stop it, and move that directory away"
        )
    if (dledger := sorted(root.glob("dledger-*/data"))) and any(map(_has_files_below, dledger)):
        yield f"{_joined(dledger)}: the log is a DLedger, which cannot be read: let Apache's broker serve this store"
    for (key, value), directory in _UNSUPPORTED.items():
        names = {name for name, its in attributes.items() if its.get(key) == value}
        if topics := sorted(names | _topics_with_files(root / directory)):
            yield (
                f"{root}: topics with {key}={value} cannot be served: {_joined(topics)}: consume them to the end, "
                "delete them with Apache's broker (mqadmin deleteTopic), stop it, and move what is left of them in "
                f"{root / directory} away"
            )
    if light := sorted(_topics_with_files(root / "consumequeue", _LMQ_PREFIX)):
        yield (
            f"{root}: light message queues cannot be served: {_joined(light)}: consume them to the end with Apache's "
            "broker, stop it, and move their directories away"
        )


def _joined(names: list[Path] | list[str]) -> str:
    shown = [str(name) for name in names[:_NAMES_SHOWN]]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def _is_rocksdb(directory: Path) -> bool:
    return (directory / "CURRENT").is_file()


def _topics_with_files(directory: Path, prefix: str = "") -> set[str]:
    """The topics that have a queue with files there: of a deleted topic, directories may be left."""
    topics = [topic for topic in _directories(directory) if topic.name.startswith(prefix)]
    return {topic.name for topic in topics if any(map(_has_files_below, _directories(topic)))}


def _directories(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _has_files_below(directory: Path) -> bool:
    return any(files for _, _, files in os.walk(directory))
