"""Stores that hold what only Apache's broker can serve are known before anything is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from skylark.store import foreign
from skylark.store.foreign import ForeignStore


def put(root: Path, name: str, content: bytes = b"x") -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("config/rdb/CURRENT", "config/rdb: topics, groups and offsets are kept in RocksDB.*skylark fetch-tables"),
        ("config/metadata/CURRENT", "config/metadata: topics, groups and offsets"),
        ("config/topics/CURRENT", "config/topics: topics, groups and offsets"),
        ("config/subscriptionGroups/CURRENT", "config/subscriptionGroups: topics"),
        ("config/consumerOffsets/CURRENT", "config/consumerOffsets: topics"),
        ("consumequeue_rocksdb/CURRENT", "consumequeue_rocksdb: the consume queues.* move that directory away"),
        ("consumequeue/CURRENT", "consumequeue: the consume queues are kept in RocksDB"),
        ("kvStore/CURRENT", "kvStore: check points of pops.*mqadmin exportPopRecord"),
        ("dledger-n0/data/00000000000000000000", "dledger-n0/data: the log is a DLedger"),
        ("batchconsumequeue/batched/0/00000000000000000000", "queue.type=BatchCQ cannot be served: batched: .*deleteT"),
        ("compaction/compactionLog/latest/0/0", "cleanup.policy=COMPACTION cannot be served: latest: "),
        ("consumequeue/%LMQ%a/0/00000000000000000000", "light message queues cannot be served: %LMQ%a: "),
    ],
)
def test_files_that_cannot_be_served(tmp_path: Path, file: str, line: str) -> None:
    put(tmp_path, file)
    with pytest.raises(ForeignStore, match=line) as refused:
        foreign.check(tmp_path, {})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("key", "value"), [("queue.type", "BatchCQ"), ("cleanup.policy", "COMPACTION")])
def test_topics_that_cannot_be_served_are_named_without_a_file_of_theirs(tmp_path: Path, key: str, value: str) -> None:
    attributes = {f"t{number:02}": {key: value} for number in range(12)} | {"plain": {key: "another"}}
    line = f"{key}={value} cannot be served: t00, t01, .*, t09 and 2 more: "
    with pytest.raises(ForeignStore, match=line) as refused:
        foreign.check(tmp_path, attributes)
    assert "plain" not in str(refused.value)


def test_a_usual_store_of_apache_is_taken(tmp_path: Path) -> None:
    """Also with what it makes in any case, and what deleted topics leave behind."""
    foreign.check(tmp_path, {})
    for name in ("rocksdbstore/CURRENT", "config/topics.json", "commitlog/0", "consumequeue/t/0/0", "timerlog/0"):
        put(tmp_path, name)
    for name in ("batchconsumequeue/gone/0", "compaction/compactionLog", "config/rdb", "consumequeue/%LMQ%gone/0"):
        (tmp_path / name).mkdir(parents=True)
    foreign.check(tmp_path, {"t": {"queue.type": "SimpleCQ", "cleanup.policy": "DELETE", "message.type": "NORMAL"}})
