"""What the ready-made pipelines ask a cluster before anything starts, so that a wrong name costs no start of Spark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from skylark.client.errors import RocketMQError, RouteNotFound
from skylark.client.validation import check_topic
from skylark.pipelines.errors import PipelineError
from skylark.spark.cluster import Cluster
from skylark.spark.queues import Queue

TIMEOUT_S: Final = 10.0


def existing(name_server: str, topics: Sequence[str]) -> list[Queue]:
    """The queues of the topics that can be read. Raises PipelineError for a topic that is not there."""
    if not topics:
        raise PipelineError("name a topic")
    try:
        for topic in topics:
            check_topic(topic)
        with Cluster(name_server, TIMEOUT_S) as cluster:
            return sorted(queue for topic in topics for queue in cluster.queues(topic))
    except RocketMQError as e:
        raise PipelineError(str(e)) from e


def is_there(name_server: str, topic: str) -> bool:
    try:
        with Cluster(name_server, TIMEOUT_S) as cluster:
            cluster.route(topic)
    except RouteNotFound:
        return False
    except RocketMQError as e:
        raise PipelineError(str(e)) from e
    return True
