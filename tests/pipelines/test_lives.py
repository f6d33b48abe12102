"""Queues that were made anew, in a lake: which messages are of which life, and how far a replay is in them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.pipelines.errors import PipelineError
from skylark.pipelines.lives import Portion, later, lives_of
from skylark.pipelines.replay import Place, Progress, all_queues

QUEUE = ("broker-a", 0)


def portion(number: int | None, first: int, last: int, from_ms: int, to_ms: int) -> Portion:
    name = "part-0.parquet" if number is None else f"{number:08d}-0000-3f2a9c1e5b7d0a64.parquet"
    return Portion(*QUEUE, f"date=2026-01-31/{name}", first, last, last - first + 1, from_ms, to_ms)


def offsets(*portions: Portion) -> list[list[tuple[int, int]]]:
    return [sorted((each.first, each.last) for each in life.portions) for life in lives_of(portions).get(QUEUE, [])]


def test_a_queue_that_begins_again_lives_again() -> None:
    first, second, third = portion(1, 0, 9, 100, 109), portion(2, 10, 19, 110, 119), portion(3, 0, 4, 200, 204)
    assert offsets(third, second, first) == [[(0, 9), (10, 19)], [(0, 4)]]
    assert later(lives_of([first, second, third])) == [(*QUEUE, third.file, 1)]


def test_the_first_messages_of_a_life_may_be_gone() -> None:
    """The older life lost its beginning, so that no offset is there twice."""
    assert offsets(portion(1, 500, 600, 100, 200), portion(2, 0, 40, 300, 340)) == [[(500, 600)], [(0, 40)]]


def test_a_clock_that_was_put_back_begins_no_life() -> None:
    assert offsets(portion(1, 0, 9, 500, 509), portion(2, 10, 19, 100, 119)) == [[(0, 9), (10, 19)]]


def test_messages_that_were_added_later_are_where_they_belong() -> None:
    """What an earlier version had lost came with a new checkpoint."""
    assert offsets(portion(1, 0, 9, 100, 109), portion(2, 20, 29, 120, 129), portion(3, 10, 19, 110, 119)) == [
        [(0, 9), (10, 19), (20, 29)]
    ]


def test_files_of_nobody_knows_whom_go_by_their_times() -> None:
    assert offsets(portion(None, 50, 60, 100, 200), portion(None, 0, 40, 300, 340)) == [[(50, 60)], [(0, 40)]]


def test_a_file_that_mixes_lives_is_refused() -> None:
    mixed = Portion(*QUEUE, "part-0.parquet", 0, 9, 15, 100, 200)
    with pytest.raises(PipelineError, match=r"part-0.parquet has more messages .* put the files back"):
        lives_of([mixed])


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=5), min_size=1, max_size=4), st.randoms())
def test_lives_are_told_however_files_are_listed(sizes: list[list[int]], chance: object) -> None:
    """sizes of batches, by life"""
    portions, expected, number, time_ms = [], [], 0, 0
    for life in sizes:
        at, of_life = 0, []
        for size in life:
            number, time_ms = number + 1, time_ms + 10
            of_life.append((at, at + size - 1))
            portions.append(portion(number, at, at + size - 1, time_ms, time_ms + 9))
            at += size
        expected.append(of_life)
    chance.shuffle(portions)  # type: ignore[attr-defined]
    assert offsets(*portions) == expected


def progress(*queues: tuple[str, int, int], times: list[tuple[int, int]] | None = None) -> Progress:
    origin = {"path": "p", "topic": "t", "name_server": "n", "target": "x", "span": {}}
    return msgspec.convert({"origin": origin, "run": "r", "queues": queues, "times": times or []}, Progress)


def test_a_replay_goes_on_in_the_life_that_it_was_in() -> None:
    first, second = portion(1, 0, 9, 100, 109), portion(3, 0, 4, 200, 204)
    both = lives_of([first, second])[QUEUE]
    at_end_of_first = progress((*QUEUE, 10), times=[(100, 109)])
    assert at_end_of_first.place(QUEUE, both) == Place(0, 10), "the later life is left"
    assert progress((*QUEUE, 3), times=[(200, 202)]).place(QUEUE, both) == Place(1, 3)
    assert progress((*QUEUE, 3), times=[(200, 202)]).place(QUEUE, both[1:]) == Place(0, 3), "old files were removed"
    assert at_end_of_first.place(QUEUE, both[1:]) == Place(0, 0), "and so was all of the life that it was in"
    assert at_end_of_first.place(("broker-a", 1), both) == Place(0, 0)


def test_a_checkpoint_of_an_earlier_version_is_read() -> None:
    first, second = portion(1, 0, 9, 100, 109), portion(3, 0, 4, 200, 204)
    old = progress((*QUEUE, 4))
    assert old.place(QUEUE, lives_of([first])[QUEUE]) == Place(0, 4)
    with pytest.raises(PipelineError, match=r"made anew.*--restart"):
        old.place(QUEUE, lives_of([first, second])[QUEUE])


def test_queues_without_a_message_count() -> None:
    assert all_queues([("b", 1), ("a", 2), ("a", 0)]) == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)]
