"""What it costs to read a topic with Spark, beside a plain client loop and beside a Parquet scan of the same rows.

    .venv/bin/python bench/spark_read.py                                  # 1,000,000 messages, 5 rounds
    .venv/bin/python bench/spark_read.py --messages 100000 --rounds 3 --server apache --markdown spark_read.md

A server of its own is filled with messages of 128 bytes with a tag, a key and two properties in four queues. In each
round each reader reads them all, with all 12 columns, in an order that changes from round to round:

- raw loop: one process that pulls and builds the same Arrow batches, a queue after the other, without Spark;
- batch, stream: Spark reads the topic and throws the rows away (format noop; the stream by AvailableNow);
- parquet: Spark scans the same rows from Parquet files in the same way.

The CPU time of the readers is that of this process, Spark's JVM and its Python workers, without the server's. The last
part measures a trigger of 1,000 rows beside Spark's own rate source. Tables show medians over the rounds and the range.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "interop"))

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import DataStreamWriter
from servers import SERVERS, Server

from skylark.client.message import OutgoingMessage
from skylark.client.producer import Producer
from skylark.pipelines.session import spark_session
from skylark.spark import columns
from skylark.spark.bodies import Shape
from skylark.spark.cluster import Cluster
from skylark.spark.options import read_options
from skylark.spark.source import BatchReader

TOPIC = "SparkRead"
QUEUES = 4
BATCH = 500
BODY = b"x" * 128
TRIGGER_ROWS = 1_000
TRIGGERS = 8


@dataclass
class Measured:
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


@dataclass
class Rig:
    """What the readers work with; another reader is one more function in READERS."""

    spark: SparkSession
    server: Server
    directory: Path
    messages: int
    runs: int = 0

    @property
    def options(self) -> dict[str, str]:
        return {"nameServer": self.server.namesrv_addr, "subscribe": TOPIC, "startingOffsets": "earliest"}

    def new_directory(self) -> Path:
        self.runs += 1
        return self.directory / f"run-{self.runs}"


def read_raw(rig: Rig) -> None:
    reader = BatchReader(read_options(rig.options), Shape(columns.NAMES))
    rows = sum(batch.num_rows for task in reader.partitions() for batch in reader.read(task))
    assert rows == rig.messages, rows


def read_batch(rig: Rig) -> None:
    drain(rig.spark.read.format("rocketmq").options(**rig.options).load())


def read_stream(rig: Rig) -> None:
    frame = rig.spark.readStream.format("rocketmq").options(**rig.options).load()
    query = noop(frame, rig).trigger(availableNow=True).start()
    query.awaitTermination()
    rows = sum(progress.numInputRows for progress in query.recentProgress)
    assert rows == rig.messages, rows


def read_parquet(rig: Rig) -> None:
    drain(rig.spark.read.parquet(str(rig.directory / "parquet")))


READERS: dict[str, Callable[[Rig], None]] = {
    "raw loop": read_raw,
    "batch": read_batch,
    "stream": read_stream,
    "parquet": read_parquet,
}


def drain(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def noop(frame: DataFrame, rig: Rig) -> DataStreamWriter:
    return frame.writeStream.format("noop").option("checkpointLocation", str(rig.new_directory()))


def message(number: int) -> OutgoingMessage:
    properties = {"customer": str(number % 1000), "region": "eu"}
    return OutgoingMessage(BODY, tag=f"tag-{number % 5}", key=f"order-{number}", properties=properties)


async def fill(server: Server, count: int) -> None:
    async with Producer(server.namesrv_addr, timeout_s=30) as producer:
        await producer.send(TOPIC, BODY)  # makes the topic; the first row
        queues = (await producer.session.routes.get(TOPIC, refresh=True)).write_queues[:QUEUES]
        for batch, first in enumerate(range(1, count, BATCH)):
            messages = [message(number) for number in range(first, min(first + BATCH, count))]
            await producer.send_batch(TOPIC, messages, queue=queues[batch % len(queues)])
    with Cluster(server.namesrv_addr, timeout_s=30) as cluster:
        while sum(cluster.max_offsets(cluster.queues(TOPIC)).values()) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.1)  # Apache's queues follow its log


def processes(pid: int) -> Iterator[int]:
    yield pid
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in tasks.read_text().split():
            yield from processes(int(child))


def cpu_seconds(without: int) -> float:
    """Of this process and everything that it started, but the server."""
    ticks = 0
    for pid in processes(os.getpid()):
        if pid == without:
            continue
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue
        ticks += sum(int(fields[index]) for index in (11, 12, 13, 14))  # with those of children that ended
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(rig: Rig, rounds: int) -> dict[str, Measured]:
    measured = {name: Measured() for name in READERS}
    names = list(READERS)
    for number in range(rounds + 1):  # the first warms up the JVM and is not counted
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began_s, began_cpu_s = time.perf_counter(), cpu_seconds(rig.server.broker_pid)
            READERS[name](rig)
            took_s, took_cpu_s = time.perf_counter() - began_s, cpu_seconds(rig.server.broker_pid) - began_cpu_s
            print(f"round {number} {name}: {took_s:.2f} s, CPU {took_cpu_s:.2f} s", file=sys.stderr)
            if number:
                measured[name].seconds.append(took_s)
                measured[name].cpu_seconds.append(took_cpu_s)
    return measured


def measure_triggers(rig: Rig, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a trigger of 1,000 rows, without the first of each query."""
    topic = rig.spark.readStream.format("rocketmq").options(**rig.options)
    streams = {
        "rocketmq": topic.option("maxOffsetsPerTrigger", str(TRIGGER_ROWS)).option("minPartitions", "2").load(),
        "rate": rig.spark.readStream.format("rate-micro-batch")
        .options(rowsPerBatch=str(TRIGGER_ROWS), numPartitions="2")
        .load(),
    }
    found: dict[str, list[float]] = {name: [] for name in streams}
    for _ in range(rounds):
        for name, frame in streams.items():
            query = noop(frame, rig).trigger(processingTime="0 seconds").start()
            while query.lastProgress is None or query.lastProgress.batchId < TRIGGERS:
                time.sleep(0.02)
            query.stop()
            kept = [progress for progress in query.recentProgress if progress.numInputRows and progress.batchId > 1]
            found[name].append(statistics.median(progress.durationMs["triggerExecution"] for progress in kept))
    return found


def table(rig: Rig, measured: dict[str, Measured], triggers: dict[str, list[float]]) -> str:
    def rows_a_second(name: str) -> float:
        return rig.messages / statistics.median(measured[name].seconds)

    lines = [
        f"{rig.messages:,} messages of {len(BODY)} bytes, 12 columns, {os.cpu_count()} cores, "
        f"{len(measured['parquet'].seconds)} rounds, medians (range)",
        "",
        "| reader | rows/s | CPU µs a row | of the raw loop | of the Parquet scan |",
        "|---|---|---|---|---|",
    ]
    for name, found in measured.items():
        cpu_us = [seconds * 1e6 / rig.messages for seconds in found.cpu_seconds]
        lines.append(
            f"| {name} | {rows_a_second(name):,.0f} ({rig.messages / max(found.seconds):,.0f}-"
            f"{rig.messages / min(found.seconds):,.0f}) | {statistics.median(cpu_us):.2f} "
            f"({min(cpu_us):.2f}-{max(cpu_us):.2f}) | {rows_a_second(name) / rows_a_second('raw loop'):.2f} "
            f"| {rows_a_second(name) / rows_a_second('parquet'):.2f} |"
        )
    lines += ["", f"| trigger of {TRIGGER_ROWS:,} rows | ms | of the rate source's |", "|---|---|---|"]
    rate_ms = statistics.median(triggers["rate"])
    for name, times_ms in triggers.items():
        lines.append(
            f"| {name} | {statistics.median(times_ms):.0f} ({min(times_ms):.0f}-{max(times_ms):.0f}) "
            f"| {statistics.median(times_ms) / rate_ms:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server", choices=sorted(SERVERS), default="skylark")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = SERVERS[arguments.server](Path(directory) / "server")
        server.start()
        try:
            asyncio.run(fill(server, arguments.messages))
            rig = Rig(spark_session(f"local[{arguments.cores}]"), server, Path(directory), arguments.messages)
            rig.spark.read.format("rocketmq").options(**rig.options).load().write.parquet(f"{directory}/parquet")
            text = table(rig, measure(rig, arguments.rounds), measure_triggers(rig, arguments.rounds))
            rig.spark.stop()
        finally:
            server.kill()
    print(text)
    if arguments.markdown is not None:
        arguments.markdown.write_text(text)


if __name__ == "__main__":
    main()
