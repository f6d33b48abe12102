"""Progress of a stream, committed to its group. No Spark is started."""

from __future__ import annotations

from collections.abc import Sequence

from skylark.spark.cluster import Cluster
from skylark.spark.queues import Queue
from skylark.testing import LocalCluster
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame


class Watched(Cluster):
    """Notes how many commits are on their way at a time."""

    def __init__(self, name_server: str) -> None:
        super().__init__(name_server, 10.0)
        self.together: list[int] = []

    def _exchange(self, requests: Sequence[tuple[Queue, Frame]]) -> list[tuple[Queue, Frame]]:
        if any(request.code == RequestCode.UPDATE_CONSUMER_OFFSET for _, request in requests):
            self.together.append(len(requests))
        return super()._exchange(requests)


def test_a_groups_first_commit_comes_alone() -> None:
    """Of the first that come at once, Apache's broker forgets all but one."""
    with LocalCluster(topics={"orders": 4}) as local, Watched(local.name_servers) as cluster:
        queues = cluster.queues("orders")
        group = Frame(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, b'{"groupName":"readers"}')
        cluster.ask("broker-a", "orders", group)
        for round_ in range(2):
            cluster.commit_offsets("readers", dict.fromkeys(queues, round_))
            assert cluster.committed_offsets("readers", queues) == dict.fromkeys(queues, round_)
        assert cluster.together == [1, 3, 4]
