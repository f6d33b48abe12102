"""A topic at two brokers, of which one comes, dies, comes back and hangs while a stream reads it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from servers import Process, Server, free_port

from skylark.client.sync import Producer
from spark.test_source import DEADLINE_S, running

TIMEOUT_S = 4


class SecondBroker:
    """Skylark's, at the name server of either; on a port and a store that it keeps."""

    name = "broker-second"

    def __init__(self, directory: Path, namesrv: str) -> None:
        directory.mkdir()
        self.namesrv_addr = namesrv
        self.broker_addr = f"127.0.0.1:{free_port()}"
        self._directory = directory
        self.process: Process | None = None

    def start(self) -> Process:
        conf = self._directory / "broker.conf"
        conf.write_text(f"brokerName={self.name}\n")
        command = [sys.executable, "-m", "skylark", "broker", "-c", str(conf), "-n", self.namesrv_addr]
        command += ["--host", "127.0.0.1", "--port", self.broker_addr.rpartition(":")[2]]
        command += ["--store", str(self._directory / "store")]
        log = self._directory / "broker.log"
        self.process = Process(command, log=log, ready="ready broker=", cwd=self._directory)
        self.process.wait_ready()
        return self.process


@pytest.fixture
def second(tmp_path: Path, server: Server) -> Iterator[SecondBroker]:
    broker = SecondBroker(tmp_path / "second", server.namesrv_addr)
    yield broker
    if broker.process is not None and broker.process.running:
        os.kill(broker.process.pid, signal.SIGCONT)
        broker.process.stop()  # so that the name server forgets it at once


def send(namesrv: str, topic: str, body: str, *, to_second: bool) -> None:
    with Producer(namesrv, group="spark-tests") as producer:

        def pick(queues: Any, _: Any) -> Any:
            return next(queue for queue in queues if (queue.broker_name == SecondBroker.name) == to_second)

        producer.send(topic, body.encode(), select=pick)


def test_one_of_two_brokers(
    spark: SparkSession, server: Server, topics: Any, topic: str, second: SecondBroker, tmp_path: Path
) -> None:
    namesrv = server.namesrv_addr
    frame = spark.readStream.format("rocketmq").options(nameServer=namesrv, subscribe=topic, timeout=f"{TIMEOUT_S}s")
    topics.create(topic)

    with running(frame.load(), tmp_path / "checkpoint") as batches:

        def arrives(body: str, *, to_second: bool = False) -> None:
            send(namesrv, topic, body, to_second=to_second)
            deadline_s = time.monotonic() + DEADLINE_S
            while body not in batches.all:
                assert time.monotonic() < deadline_s
                batches.query.processAllAvailable()

        arrives("a")
        process = second.start()
        type(topics)(second).create(topic, total=2)
        arrives("b, of a broker that is new", to_second=True)
        process.kill()
        arrives("c, while it is gone")
        process = second.start()
        arrives("d, of the one that is back", to_second=True)

        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(PySparkException, match=f"{second.broker_addr} did not answer within"):
            batches.query.awaitTermination(DEADLINE_S)
        before = batches.all
    os.kill(process.pid, signal.SIGCONT)
    send(namesrv, topic, "e, after a restart of the query", to_second=True)
    with running(frame.load(), tmp_path / "checkpoint") as batches:
        assert [text[0] for text in sorted(before + batches.all)] == list("abcde")
