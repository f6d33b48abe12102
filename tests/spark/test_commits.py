"""Progress of a stream, committed to its group. No Spark is started."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from skylark.client.errors import BrokerError
from skylark.client.sync import Producer
from skylark.spark.bodies import Shape
from skylark.spark.cluster import Cluster
from skylark.spark.options import read_options
from skylark.spark.queues import Queue
from skylark.spark.source import BatchReader
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


def test_a_broker_that_makes_no_groups_by_itself() -> None:
    """Spark reads as a group of its own, and says what to create; progress is committed to the user's."""
    with LocalCluster(topics={"orders": 1}, settings={"autoCreateSubscriptionGroup": "false"}) as local:
        with Producer(local.name_servers, group="sender") as producer:
            producer.send("orders", b"a")
        options = {"nameServer": local.name_servers, "subscribe": "orders", "group": "readers"}
        reader = BatchReader(read_options(options), Shape(["body"]))
        with pytest.raises(BrokerError, match=r"updateSubGroup .* -g skylark-spark"):
            reader.partitions()
        with Cluster(local.name_servers, 10.0) as cluster:
            body = b'{"groupName":"skylark-spark"}'
            cluster.ask("broker-a", "orders", Frame(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body))
            rows = [
                row for task in reader.partitions() for batch in reader.read(task) for row in batch["body"].to_pylist()
            ]
            assert rows == [b"a"]
            with pytest.raises(BrokerError, match="Group readers not exist"):
                cluster.commit_offsets("readers", dict.fromkeys(cluster.queues("orders"), 1))


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
