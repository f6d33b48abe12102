"""Thousands of sequences of the model in every run.

`SKYLARK_SINK_SEQUENCES` says how many, `SKYLARK_SINK_SEED` which is the first.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from skylark.spark import sole
from skylark.spark.cluster import Cluster
from skylark.spark.halves import Halves
from skylark.spark.ledger import Places
from skylark.wire.message import SYS_TRANSACTION_COMMIT
from spark.model import Model, Violation, world_of
from spark.scripted import play

SEQUENCES = int(os.environ.get("SKYLARK_SINK_SEQUENCES", "2000"))
FIRST = int(os.environ.get("SKYLARK_SINK_SEED", "0"))


def run(seed: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    model = Model(seed, play(monkeypatch, world_of(seed)))
    try:
        model.run()
    except Exception as e:
        e.add_note(f"SKYLARK_SINK_SEED={seed} SKYLARK_SINK_SEQUENCES=1")
        raise
    return model.seen


def run_all(seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += run(seed, monkeypatch)
    return seen


def test_each_row_once_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = run_all(range(FIRST, FIRST + SEQUENCES), monkeypatch)
    if SEQUENCES >= 1000:
        wanted = ("Died", "OtherRows", "away too long", "task", "late", "restore", "fork", "second_driver", "committed")
        assert all(seen[kind] >= 20 for kind in wanted), seen


@pytest.mark.parametrize("kind", ["dies", "dies after"])
def test_a_death_at_every_request(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        last = 0
        while Model(seed, play(monkeypatch, world_of(seed))).death(kind, last):
            last += 1
        assert last >= 20


def unmarked(cluster: Cluster, topic: str, address: str, perm: int, put: Any = sole._put) -> None:
    if perm:
        put(cluster, topic, address, perm)


def without_group(broker: str, topic: str, offsets: Any, group: str, pack: Any = Places.pack) -> Places:
    return pack(broker, topic, offsets)  # type: ignore[no-any-return]


def at_once(self: Halves, broker: str, decision: int = SYS_TRANSACTION_COMMIT, note: Any = Halves._note) -> None:
    self._ledger.end(self._places(broker), decision)
    note(self, broker)


@pytest.mark.parametrize(
    ("place", "defect"),
    [
        ("sink.Delivery._refuse", lambda *given: None),
        ("sole._put", unmarked),
        ("ledger.Places.pack", without_group),
        ("halves.Halves._note", at_once),
        ("sink.Ledger.finish", lambda *given: None),
    ],
)
def test_the_model_finds(place: str, defect: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be wrong without each of the parts that make it right."""
    monkeypatch.setattr(f"skylark.spark.{place}", defect)
    with pytest.raises(Violation):
        run_all(range(2000), monkeypatch)
