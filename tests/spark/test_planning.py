"""Every message between two offsets is read by exactly one task, within the limits."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from skylark.pipelines.checkpoints import moved_end
from skylark.spark.planning import backlog, capped, ranges_between, tasks
from skylark.spark.queues import Mark, Position, Queue, Range, from_spark, to_spark

QUEUES = st.builds(Queue, st.sampled_from("ab"), st.sampled_from(["x", "y"]), st.integers(0, 3))
OFFSETS = st.dictionaries(QUEUES, st.integers(0, 20_000))
MARKS = st.dictionaries(QUEUES, st.builds(Mark, *[st.integers(0, 2**62)] * 3))
POSITIONS = st.builds(Position, offsets=OFFSETS, first=st.none() | OFFSETS, marks=MARKS, begins=OFFSETS)


@given(OFFSETS, OFFSETS, st.integers(1, 5000))
def test_a_cap_is_kept_and_never_goes_back(start: dict[Queue, int], more: dict[Queue, int], most: int) -> None:
    end = {queue: start.get(queue, 0) + count for queue, count in more.items()}
    limited = capped(start, end, most)
    assert backlog(start, limited) == min(most, backlog(start, end))
    assert limited.keys() == end.keys()
    assert all(start.get(queue, 0) <= limited[queue] <= end[queue] for queue in end)


def test_a_cap_is_shared_in_proportion() -> None:
    large, small = Queue("t", "b", 0), Queue("t", "b", 1)
    assert capped({}, {large: 9000, small: 1000}, 100) == {large: 90, small: 10}


@given(OFFSETS, st.none() | st.integers(1, 40), st.none() | st.integers(1, 9000))
def test_tasks_cover_everything_once(end: dict[Queue, int], at_least: int | None, most: int | None) -> None:
    ranges = ranges_between({}, end)
    planned = tasks(ranges, min_partitions=at_least, max_records=most)
    assert all(planned)
    pieces = sorted((piece for task in planned for piece in task), key=lambda piece: (piece.queue, piece.start))
    covered: dict[Queue, int] = {}
    for piece in pieces:
        assert piece.start == covered.get(piece.queue, 0)
        assert most is None or piece.count <= most
        covered[piece.queue] = piece.end
    assert covered == {part.queue: part.end for part in ranges}
    if most is not None:
        assert all(sum(piece.count for piece in task) <= max(most, 1) for task in planned)


@given(OFFSETS, st.integers(1, 40))
def test_there_are_as_many_tasks_as_asked_for(end: dict[Queue, int], at_least: int) -> None:
    ranges = ranges_between({}, end)
    total = sum(part.count for part in ranges)
    assert len(tasks(ranges, min_partitions=at_least)) >= min(at_least, total) * (total >= at_least**2)


def test_small_queues_share_a_task() -> None:
    ranges = [Range(Queue("t", "b", number), 0, 100) for number in range(16)]
    assert len(tasks(ranges)) == 1


@given(OFFSETS)
def test_offsets_survive_the_checkpoint_in_one_order(offsets: dict[Queue, int]) -> None:
    stored = to_spark(offsets, "g", "n")
    assert from_spark(stored) == offsets
    assert str(to_spark(dict(reversed(offsets.items())), "g", "n")) == str(stored)


@given(POSITIONS)
def test_a_position_survives_the_checkpoint_in_one_order(position: Position) -> None:
    text = json.dumps(position.to_spark("g", "n"))
    assert Position.of(json.loads(text)) == position
    assert from_spark(json.loads(text)) == position.offsets
    assert json.dumps(Position.of(json.loads(text)).to_spark("g", "n")) == text
    assert list(json.loads(text)) == sorted(json.loads(text))


@given(POSITIONS, OFFSETS)
def test_a_position_that_is_set_by_hand_has_no_marks(position: Position, offsets: dict[Queue, int]) -> None:
    moved = Position.of(moved_end(position.to_spark(None, None), offsets))
    assert moved.offsets == {**position.offsets, **offsets}
    assert moved.first == position.first
    assert not offsets.keys() & (moved.marks.keys() | moved.begins.keys())
    assert moved.marks.items() <= position.marks.items()
