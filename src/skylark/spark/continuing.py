"""How a stream goes on from where it is: what is new in each queue, and what was lost since it looked last.

A loss is an error, or, with failOnDataLoss=false, a place in the queue where the next batch begins instead; both are
told. Only what is surely lost counts: what is away with its broker, or not yet at a slave, stays where it was.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from skylark.client.errors import NotReachable
from skylark.spark.cluster import Cluster
from skylark.spark.marks import first_new, made_anew
from skylark.spark.own_topics import is_own
from skylark.spark.positions import DataLost
from skylark.spark.queues import Offsets, Position, Queue

log = logging.getLogger(__name__)

_GO_ON: Final = "set failOnDataLoss=false to go on without them"


class Losses:
    """What was lost of the queues of a stream: raised, or told and gone round."""

    def __init__(self, cluster: Cluster, *, fail: bool) -> None:
        self._cluster = cluster
        self._fail = fail

    def begins(self, at: Position, ends: Offsets, checked: Iterable[Queue]) -> Offsets:
        """Where the next batch begins in queues in which it does not go on where the stream is.

        `ends` is changed for a queue that ends before the stream is at: at a slave, which is late, or anew. The queues
        to be `checked` are those that are looked at closely, besides those that moved.
        """
        late = {queue for queue in self._behind(at, ends) if not self._cluster.has_master(queue)}
        ends.update({queue: at.offsets[queue] for queue in late})
        moved = {queue for queue, end in ends.items() if end != at.offsets.get(queue, 0)} - late
        first = self._cluster.min_offsets(moved)
        begins = {queue: low for queue, low in first.items() if queue not in at.offsets}
        begins |= self._anew(at, ends, (moved | set(checked)) - late - begins.keys())
        expired = {
            queue: low
            for queue, low in first.items()
            if queue in at.offsets and queue not in begins and low > at.offsets[queue]
        }
        self._tell(
            [
                f"{queue}: the messages from offset {at.offsets[queue]} to before {low} were deleted before they were "
                "read"
                for queue, low in sorted(expired.items())
            ]
        )
        return begins | expired

    def missed(self, at: Position, missing: Sequence[Queue], seen: Mapping[Queue, int], told: set[Queue]) -> None:
        """Looks at queues of the stream that are not there: those that are away stay, those that are gone are told.

        A queue in which nothing waited when it was `seen` last has lost nothing that is known of.
        """
        gone = [queue for queue in self._deleted(missing) if queue not in told]
        unread = [queue for queue in gone if seen.get(queue) != at.offsets[queue]]
        if unread and self._fail:
            self._wait_for(unread)
            return  # all are back, and are looked at again
        for queue in gone:
            log.warning("%s: it was deleted after it was read up to offset %d", queue, at.offsets[queue])
        told.update(gone)

    def _behind(self, at: Position, ends: Mapping[Queue, int]) -> list[Queue]:
        return sorted(queue for queue, end in ends.items() if end < at.offsets.get(queue, 0))

    def _anew(self, at: Position, ends: Offsets, checked: Iterable[Queue]) -> Offsets:
        behind = self._behind(at, ends)
        marked = {queue: at.marks[queue] for queue in checked if queue in at.marks and queue not in behind}
        others = made_anew(self._cluster, marked)
        why = "the topic was deleted and made again, or the broker lost messages"
        self._tell(
            [
                f"{queue}: it was read up to offset {at.offsets[queue]} but ends at {ends[queue]}: {why}"
                for queue in behind
            ]
            + [
                f"{queue}: it was read up to offset {at.offsets[queue]}, but the message at offset "
                f"{marked[queue].offset} is another one now: {why}"
                for queue in others
            ]
        )
        lost = [*behind, *others]
        if not lost:
            return {}
        ends.update(self._cluster.max_offsets(lost))
        begins = first_new(self._cluster, lost, at.marks)
        return {queue: min(begins[queue], ends[queue]) for queue in lost}

    def _deleted(self, queues: Iterable[Queue]) -> list[Queue]:
        return [queue for queue in self._cluster.deleted(queues) if not is_own(queue.topic)]

    def _wait_for(self, queues: Sequence[Queue]) -> None:
        """A name server that was just started may know a broker before all of its topics."""

        def come_back() -> None:
            gone = self._deleted(queues)
            if gone:
                raise NotReachable(f"{gone[0]} is not there")

        try:
            self._cluster.retrying(come_back)
        except NotReachable as e:
            queue = queues[0]
            raise DataLost(
                f"{queue}: the topic or queue was deleted, perhaps with messages that were not read{_and_more(queues)} "
                f"({e}); {_GO_ON}"
            ) from None

    def _tell(self, losses: Sequence[str]) -> None:
        if losses and self._fail:
            raise DataLost(f"{losses[0]}{_and_more(losses)}; {_GO_ON}")
        for loss in losses:
            log.warning("%s", loss)


def _and_more(lost: Sequence[object]) -> str:
    return f", and so it is for {len(lost) - 1} more queues" if len(lost) > 1 else ""
