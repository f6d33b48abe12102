"""The lives of a queue: a topic that was deleted and made again begins at offset 0 once more, in the same lake.

A file of the archive has messages of one life of a queue. Files are looked at in the order in which their messages were
stored. One that begins where offsets were seen already begins a new life, with one exception: a broker's clock that was
put back. Its files don't overlap with those that are there, and their numbers say that they were archived before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from skylark.pipelines.errors import PipelineError

FIRST: Final = 0


class Portion(msgspec.Struct, frozen=True):
    """The messages of a queue in a file: offsets from `first` to `last`, and when they were stored."""

    broker: str
    queue_id: int
    file: str
    first: int
    last: int
    count: int
    from_ms: int
    to_ms: int

    @property
    def number(self) -> int | None:
        """That of the batch, if the archive wrote the file."""
        name = self.file.rpartition("/")[2]
        return int(name[:8]) if name[:8].isdecimal() and name[8:9] == "-" else None


class Life(msgspec.Struct):
    """One life of a queue."""

    portions: list[Portion]

    @property
    def from_ms(self) -> int:
        return min(portion.from_ms for portion in self.portions)

    def takes(self, portion: Portion) -> bool:
        if portion.first > max(each.last for each in self.portions):
            return True
        if any(portion.first <= each.last and each.first <= portion.last for each in self.portions):
            return False
        numbers = [each.number for each in self.portions if each.first > portion.last]
        return portion.number is not None and all(number is None or portion.number < number for number in numbers)


Lives = dict[tuple[str, int], list[Life]]


def lives_of(portions: Iterable[Portion]) -> Lives:
    """The lives of each queue (broker and number), in their order. Raises PipelineError for mixed files."""
    found: Lives = {}
    for portion in sorted(portions, key=lambda each: (each.from_ms, each.first, each.file)):
        if portion.count > portion.last - portion.first + 1:
            raise PipelineError(
                f"{portion.file} has more messages of queue {portion.queue_id} at broker {portion.broker} than offsets"
                ", so their order can't be told: it is no file of archive; put the files back that it was made of"
            )
        lives = found.setdefault((portion.broker, portion.queue_id), [])
        if lives and lives[-1].takes(portion):
            lives[-1].portions.append(portion)
        else:
            lives.append(Life([portion]))
    return found


def later(lives: Lives) -> list[tuple[str, int, str, int]]:
    """Broker, queue, file and number of the life, for all that is not in the first life of its queue."""
    return [
        (*queue, portion.file, number)
        for queue, of_queue in lives.items()
        for number, life in enumerate(of_queue)
        for portion in life.portions
        if number != FIRST
    ]
