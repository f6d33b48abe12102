"""How much a trigger reads, and how that is parted among tasks: plain arithmetic, no network.

A cap is shared among the queues in proportion to what each has waiting, so that none starves and the oldest backlog
shrinks evenly. A task of a Python source costs tens of milliseconds, so small ranges share one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from skylark.spark.queues import Mark, Offsets, Queue, Range

SMALL: Final = 4_000
"""Rows that one task reads in about the time that starting it takes."""


def ranges_between(
    start: Mapping[Queue, int], end: Mapping[Queue, int], marks: Mapping[Queue, Mark] | None = None
) -> list[Range]:
    """What lies between; a queue that is not in `start` begins at 0."""
    marks = marks or {}
    found = (Range(queue, start.get(queue, 0), offset, marks.get(queue)) for queue, offset in sorted(end.items()))
    return [part for part in found if part.count > 0]


def backlog(start: Mapping[Queue, int], end: Mapping[Queue, int]) -> int:
    return sum(part.count for part in ranges_between(start, end))


def capped(start: Mapping[Queue, int], end: Mapping[Queue, int], most: int) -> Offsets:
    """An end at most `most` messages behind `start`, and at least one if there is one."""
    waiting = ranges_between(start, end)
    total = sum(part.count for part in waiting)
    if total <= most:
        return dict(end)
    # Whole shares first; what rounding left over goes to the queues that lost most by it.
    share = {part.queue: part.count * most // total for part in waiting}
    lost = sorted(waiting, key=lambda part: (-(part.count * most % total), part.queue))
    for part in lost[: most - sum(share.values())]:
        share[part.queue] += 1
    return {**end, **{part.queue: part.start + share[part.queue] for part in waiting}}


def tasks(
    ranges: Sequence[Range], *, min_partitions: int | None = None, max_records: int | None = None
) -> list[tuple[Range, ...]]:
    """What each task reads. Large ranges are split, small ones put together."""
    total = sum(part.count for part in ranges)
    if not total:
        return []
    most = max_records or total
    if min_partitions is not None:
        most = min(most, -(-total // min_partitions))
    pieces = [piece for part in ranges for piece in _split(part, most)]
    return _packed(pieces, min(SMALL, most))


def _split(part: Range, most: int) -> Iterable[Range]:
    """Parts of nearly equal size, none larger than `most`."""
    number = -(-part.count // most)
    bounds = [part.start + part.count * index // number for index in range(number + 1)]
    return (Range(part.queue, low, high, part.mark) for low, high in itertools.pairwise(bounds))


def _packed(pieces: Iterable[Range], room: int) -> list[tuple[Range, ...]]:
    packed: list[list[Range]] = []
    free = 0
    for piece in sorted(pieces, key=lambda piece: (piece.count, piece.queue, piece.start)):
        if piece.count > free:
            packed.append([])
            free = room
        packed[-1].append(piece)
        free -= piece.count
    return [tuple(task) for task in packed]
