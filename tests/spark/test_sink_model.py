"""Thousands of sequences of the model in every run.

`SKYLARK_SINK_SEQUENCES` says how many, `SKYLARK_SINK_SEED` which is the first.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from spark.model import Model, world_of
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


def test_each_row_once_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + SEQUENCES):
        seen += run(seed, monkeypatch)
    if SEQUENCES >= 1000:
        wanted = ("Died", "OtherRows", "away too long", "task", "late", "restore", "fork", "second_driver", "committed")
        assert all(seen[kind] >= 20 for kind in wanted), seen
