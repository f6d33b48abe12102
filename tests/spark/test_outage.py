"""A topic at two brokers, of which one comes, dies, comes back and hangs while a stream reads it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from servers import Process, Server, free_port

from patience import DEADLINE_S
from skylark.client.sync import Producer
from spark.conftest import wait_until
from spark.test_source import running

SILENT_S = 6  # as long as a stream waits for an answer that does not come


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
    with Producer(namesrv, group="spark-tests", timeout_s=DEADLINE_S) as producer:

        def pick(queues: Any, _: Any) -> Any:
            return next(queue for queue in queues if (queue.broker_name == SecondBroker.name) == to_second)

        producer.send(topic, body.encode(), select=pick)


def test_one_of_two_brokers(
    spark: SparkSession, server: Server, topics: Any, topic: str, second: SecondBroker, tmp_path: Path
) -> None:
    namesrv = server.namesrv_addr

    def frame(timeout_s: float) -> DataFrame:
        options = {"nameServer": namesrv, "subscribe": topic, "timeout": f"{timeout_s:.0f}s"}
        return spark.readStream.format("rocketmq").options(**options).load()

    topics.create(topic)
    with running(frame(DEADLINE_S), tmp_path / "checkpoint") as batches:

        def arrives(body: str, *, to_second: bool = False) -> None:
            send(namesrv, topic, body, to_second=to_second)
            wait_until(lambda: batches.query.processAllAvailable() or body in batches.all)

        arrives("a")
        process = second.start()
        type(topics)(second).create(topic, total=2)
        arrives("b, of a broker that is new", to_second=True)
        process.kill()
        arrives("c, while it is gone")
        process = second.start()
        arrives("d, of the one that is back", to_second=True)
        before = batches.all

    with running(frame(SILENT_S), tmp_path / "checkpoint") as batches:
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(PySparkException, match=f"{second.broker_addr} did not answer within"):
            batches.query.awaitTermination(DEADLINE_S)
    os.kill(process.pid, signal.SIGCONT)
    send(namesrv, topic, "e, after a restart of the query", to_second=True)
    with running(frame(DEADLINE_S), tmp_path / "checkpoint") as batches:
        wait_until(lambda: batches.query.processAllAvailable() or bool(batches.all))
        assert [text[0] for text in sorted(before + batches.all)] == list("abcde")
