"""What the ledger's entries amount to, and how places travel."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.client.errors import RocketMQError
from skylark.spark.cluster import Cluster
from skylark.spark.content import Content
from skylark.spark.ledger import Aborted, Done, Entry, Ledger, Manifest, Places, Verdict, verdict
from spark.scripted import NAME_SERVER, Broker, World, play


def test_the_first_manifest_counts() -> None:
    first, second = Manifest(["a"], [1]), Manifest(["b"], [2])
    assert verdict([]).manifest is None
    assert verdict([first, second]).manifest == first
    assert not verdict([first, second]).is_done
    assert verdict([first, second, Done()]).is_done


def test_what_was_aborted_before_does_not_count() -> None:
    first, second = Manifest(["a", "b"], [1]), Manifest(["c"], [2])
    assert verdict([Aborted(["b"]), first]).manifest is None
    assert verdict([Aborted(["b"]), first, second]).manifest == second
    assert verdict([first, Aborted(["b"]), second]).manifest == first


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**60)), min_size=1))
def test_places_come_back(pairs: list[tuple[int, int]]) -> None:
    assert Places.pack("broker", "topic", [offset for pair in pairs for offset in pair], "group").pairs() == pairs


def test_a_ledger_of_old_can_be_read() -> None:
    """Entries as they were written before manifests said what their rows are, and places who sent them."""
    old = [{"kind": "manifest", "attempts": ["a"], "parts": [3]}, {"kind": "aborted", "attempts": ["b"]}]
    entries = [msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=Entry) for entry in [*old, {"kind": "done"}]]
    assert verdict(entries) == Verdict(Manifest(["a"], [3]), is_done=True)
    packed = Places.pack("broker", "topic", [1, 2]).packed
    part = msgspec.msgpack.encode({"broker": "broker", "topic": "topic", "packed": packed})
    assert msgspec.msgpack.decode(part, type=Places).group is None


def write_entries(patch: pytest.MonkeyPatch, count: int, gap_s: float) -> Ledger:
    """A ledger with a manifest, and behind it so many entries of the same batch."""
    world = play(patch, World(Broker("a")))
    ledger = Ledger(Cluster(NAME_SERVER, 30), "ledger", "spark")
    ledger.prepare()
    ledger.decide("query", 7, ["first"], [], Content(None, 0, b""))
    for number in range(count):
        world.pass_time(gap_s)
        ledger._append(msgspec.msgpack.encode(Aborted([f"{number}"])), "query:7")
    return ledger


def test_a_decision_is_found_behind_any_number_of_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker gives 64 entries at once, the newest."""
    found = write_entries(monkeypatch, 300, gap_s=1).verdict("query", 7)
    assert found.manifest is not None
    assert found.manifest.attempts == ["first"]


def test_entries_that_can_not_all_be_read_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RocketMQError, match="too many entries of one second under the key query:7"):
        write_entries(monkeypatch, 300, gap_s=0).verdict("query", 7)


def test_the_latest_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = write_entries(monkeypatch, 1, gap_s=1)
    assert ledger.latest("another") is None
    for batch in (8, 11, 9):
        ledger.decide("query", batch, ["x"], [], Content(None, 0, b""))
    assert ledger.latest("query") == 11


def test_a_query_that_is_named_like_a_batch_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch write `a` had nothing to send when the write `a:0` had sent the same rows: a `writeId` may be so."""
    ledger = write_entries(monkeypatch, 0, gap_s=0)
    ledger.decide("write-a:0", 0, ["x"], [], Content(None, 0, b""))
    assert ledger.verdict("write-a", 0).manifest is None
    assert ledger.latest("write-a") is None
    assert ledger.latest("write-a:0") == 0
