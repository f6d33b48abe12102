"""Real Spark against both servers: one Spark session for all tests, each server started once."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql import SparkSession
from servers import Server, request

from patience import DEADLINE_S
from skylark import spark as rocketmq
from skylark.client.errors import RouteNotFound
from skylark.client.sync import Producer
from skylark.spark.cluster import Cluster
from skylark.spark.queues import Queue
from skylark.wire.codes import RequestCode


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2]")
        .appName("tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    rocketmq.register(session)
    yield session
    session.stop()


@pytest.fixture(scope="session", params=["skylark", "apache"])
def server(request: pytest.FixtureRequest, started: Callable[[str], Server]) -> Server:
    return started(request.param)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def wait_for(namesrv: str, topic: str, total: int) -> None:
    """Until so many messages of a topic can be read: Apache's queues follow its log."""
    with Cluster(namesrv, timeout_s=DEADLINE_S) as cluster:

        def arrived() -> bool:
            try:
                return sum(cluster.max_offsets(cluster.queues(topic)).values()) >= total
            except RouteNotFound:
                return False

        wait_until(arrived)


class Topics:
    """Makes, fills and deletes topics of a server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def create(self, topic: str, queues: int = 1, total: int | None = None) -> str:
        """Also changes the number of queues of one that is there; returns when the name server knows.

        `total` is the number of queues at all brokers, if there are others.
        """
        header = {
            "topic": topic,
            "defaultTopic": "TBW102",
            "readQueueNums": str(queues),
            "writeQueueNums": str(queues),
            "perm": "6",
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": "0",
            "order": "false",
        }
        assert request(self._server.broker_addr, RequestCode.UPDATE_AND_CREATE_TOPIC, header)[0]["code"] == 0
        with Cluster(self._server.namesrv_addr, timeout_s=DEADLINE_S) as cluster:
            while len(cluster.queues(topic, must_exist=True)) != (total or queues):
                time.sleep(0.05)
        return topic

    def delete(self, topic: str) -> None:
        for address, code in (
            (self._server.broker_addr, RequestCode.DELETE_TOPIC_IN_BROKER),
            (self._server.namesrv_addr, RequestCode.DELETE_TOPIC_IN_NAMESRV),
        ):
            assert request(address, code, {"topic": topic})[0]["code"] == 0

    def send(self, topic: str, *bodies: bytes | str, queue_id: int | None = None, **options: Any) -> None:
        """Returns when the messages can be read."""
        select = None if queue_id is None else (lambda queues, arg: queues[queue_id])
        with Producer(self._server.namesrv_addr, group="spark-tests", timeout_s=DEADLINE_S) as producer:
            receipts = [
                producer.send(topic, body.encode() if isinstance(body, str) else body, select=select, **options)
                for body in bodies
            ]
        # Apache's queues follow its log.
        ends = {
            Queue(topic, receipt.queue.broker_name, receipt.queue.queue_id): receipt.queue_offset
            for receipt in receipts
        }
        with Cluster(self._server.namesrv_addr, timeout_s=DEADLINE_S) as cluster:
            while any(offset <= ends[queue] for queue, offset in cluster.max_offsets(ends).items()):
                time.sleep(0.02)

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """queue id -> where the group stands."""
        with Cluster(self._server.namesrv_addr, timeout_s=DEADLINE_S) as cluster:
            found = cluster.committed_offsets(group, cluster.queues(topic))
        return {queue.queue_id: offset for queue, offset in found.items()}


@pytest.fixture
def topics(server: Server) -> Topics:
    return Topics(server)


@pytest.fixture
def namesrv(server: Server) -> str:
    return server.namesrv_addr


@pytest.fixture
def topic() -> str:
    return f"topic_{uuid.uuid4().hex[:12]}"


@pytest.fixture
def group() -> str:
    return f"group_{uuid.uuid4().hex[:12]}"
