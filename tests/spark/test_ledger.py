"""What the ledger's entries amount to, and how places travel."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from skylark.spark.ledger import Aborted, Done, Manifest, Places, verdict


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
    assert Places.pack("broker", "topic", pairs).pairs() == pairs
