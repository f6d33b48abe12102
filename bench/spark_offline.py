"""What it costs to read a broker's store without the broker, beside a Parquet scan of the same rows.

    .venv/bin/python bench/spark_offline.py                                   # 1,000,000 messages, 5 rounds
    .venv/bin/python bench/spark_offline.py --messages 100000 --rounds 3 --markdown spark_offline.md

A store is filled with messages of 128 bytes with a tag, a key and two properties in four queues. In each round each
reader reads them all, with all 12 columns, in an order that changes from round to round, and throws the rows away:

- commit log: Spark reads the store's directory (format rocketmq-commitlog);
- without checksums: the same with checkCrc=false, as Parquet's pages are not checked either;
- one message in a hundred: a queue of another topic is asked for, and the rest is skipped;
- parquet: Spark scans the same rows from Parquet files.

The CPU time is that of this process, Spark's JVM and its Python workers. The table shows medians and the range.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from skylark.pipelines.session import spark_session
from skylark.store import Store, StoreConfig
from skylark.wire.message import Message
from skylark.wire.records import encode_host

TOPIC, RARE_TOPIC = "SparkOffline", "Rare"
QUEUES = 4
BODY = b"x" * 128
HOST = encode_host("127.0.0.1", 10911)


@dataclass
class Measured:
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


@dataclass
class Rig:
    spark: SparkSession
    directory: Path

    def log(self, **options: str) -> DataFrame:
        return self.spark.read.format("rocketmq-commitlog").options(**options).load(str(self.directory / "store"))

    def parquet(self) -> DataFrame:
        return self.spark.read.parquet(str(self.directory / "parquet"))


READERS: dict[str, Callable[[Rig], DataFrame]] = {
    "commit log": lambda rig: rig.log(),
    "without checksums": lambda rig: rig.log(checkCrc="false"),
    "one message in a hundred": lambda rig: rig.log(topics=RARE_TOPIC),
    "parquet": lambda rig: rig.parquet(),
}


def fill(root: Path, count: int) -> None:
    store = Store.open(StoreConfig(root=root))
    now_ms = time.time_ns() // 1_000_000
    for number in range(count):
        properties = {
            "KEYS": f"order-{number}", "TAGS": f"tag-{number % 5}", "UNIQ_KEY": f"7F000001{number:024X}",
            "WAIT": "true", "customer": str(number % 1000), "region": "eu",
        }  # fmt: skip
        topic = TOPIC if number % 100 else RARE_TOPIC
        message = Message(topic, number % QUEUES, BODY, properties, born_timestamp_ms=now_ms, born_host=HOST)
        store.append(message, now_ms + number // 100)
    store.close()


def processes(pid: int) -> Iterator[int]:
    yield pid
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in tasks.read_text().split():
            yield from processes(int(child))


def cpu_seconds() -> float:
    """Of this process and everything that it started."""
    ticks = 0
    for pid in processes(os.getpid()):
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
            began_s, began_cpu_s = time.perf_counter(), cpu_seconds()
            READERS[name](rig).write.format("noop").mode("overwrite").save()
            took_s, took_cpu_s = time.perf_counter() - began_s, cpu_seconds() - began_cpu_s
            print(f"round {number} {name}: {took_s:.2f} s, CPU {took_cpu_s:.2f} s", file=sys.stderr)
            if number:
                measured[name].seconds.append(took_s)
                measured[name].cpu_seconds.append(took_cpu_s)
    return measured


def table(measured: dict[str, Measured], count: int) -> str:
    lines = [
        f"{count:,} messages of {len(BODY)} bytes, 12 columns, {os.cpu_count()} cores, "
        f"{len(measured['parquet'].seconds)} rounds, medians (range)",
        "",
        "| reader | rows/s looked at | CPU µs a row | of the Parquet scan |",
        "|---|---|---|---|",
    ]
    for name, found in measured.items():
        rows_a_second = [count / seconds for seconds in found.seconds]
        cpu_us = [seconds * 1e6 / count for seconds in found.cpu_seconds]
        share = statistics.median(measured["parquet"].seconds) / statistics.median(found.seconds)
        lines.append(
            f"| {name} | {statistics.median(rows_a_second):,.0f} ({min(rows_a_second):,.0f}-{max(rows_a_second):,.0f}) "
            f"| {statistics.median(cpu_us):.2f} ({min(cpu_us):.2f}-{max(cpu_us):.2f}) | {share:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rig = Rig(spark_session(f"local[{arguments.cores}]"), Path(directory))
        fill(rig.directory / "store", arguments.messages)
        rig.log().write.parquet(str(rig.directory / "parquet"))
        assert rig.parquet().count() == arguments.messages
        text = table(measure(rig, arguments.rounds), arguments.messages)
        rig.spark.stop()
    print(text)
    if arguments.markdown is not None:
        arguments.markdown.write_text(text)


if __name__ == "__main__":
    main()
