"""Progress of streams, committed to their groups: for the operators' tools, and never at the expense of the stream.

What did not move is not committed again. What has no route now, because its broker is away or its topic was deleted,
is left out, and a broker that does not answer keeps none of the others waiting for good. The group catches up later.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Final

from skylark.client.errors import RocketMQError
from skylark.spark.cluster import Cluster
from skylark.spark.queues import Offsets, Queue

log = logging.getLogger(__name__)

TIMEOUT_S: Final = 5.0


def commit(cluster: Cluster, group: str, offsets: Mapping[Queue, int]) -> Offsets:
    """Moves the group forward where that can be done now; what of it was done. Raises RocketMQError if nothing was."""
    done: Offsets = {}
    failure: RocketMQError | None = None
    reachable = [queue for queue in sorted(offsets) if cluster.has_route(queue)]
    for broker in sorted({queue.broker for queue in reachable}):
        part = {queue: offsets[queue] for queue in reachable if queue.broker == broker}
        try:
            cluster.commit_offsets(group, part)
            done.update(part)
        except RocketMQError as e:
            failure = failure or e
            log.warning("the progress of group %s at broker %s can't be committed: %s", group, broker, e)
    if failure is not None and not done:
        raise failure
    return done


class Commits:
    """Commits in a thread of its own; only the newest offsets, if they come faster than they can be committed."""

    def __init__(self, name_server: str, group: str) -> None:
        self._name_server = name_server
        self._group = group
        self._done: Offsets = {}
        self._wanted: Offsets = {}
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"commits of {group}", daemon=True)
        self._thread.start()

    def reach(self, offsets: Offsets) -> None:
        """Returns at once."""
        with self._changed:
            self._wanted = offsets
            self._changed.notify()

    def close(self) -> None:
        """Returns when what is wanted was tried once more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(2 * TIMEOUT_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._wanted and not self._closed:
                    self._changed.wait()
                wanted, self._wanted = self._wanted, {}
                if not wanted:
                    return
            self._commit({queue: offset for queue, offset in wanted.items() if self._done.get(queue) != offset})

    def _commit(self, moved: Offsets) -> None:
        if not moved:
            return
        try:
            with Cluster(self._name_server, TIMEOUT_S) as cluster:
                self._done |= commit(cluster, self._group, moved)
        except RocketMQError as e:
            # The stream itself goes on by its checkpoint; the group catches up with the next batch.
            log.warning("the progress of group %s can't be committed: %s", self._group, e)
