"""A demonstration: orders are produced while two streams read them, one that adds up and one that archives.

The numbers at the end are computed twice, by the stream as the orders came and from the archive afterwards; they agree
because every order is in both exactly once.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Final

import msgspec
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console
from rich.table import Table

from skylark.client.errors import RocketMQError
from skylark.client.sync import Producer
from skylark.pipelines.errors import PipelineError
from skylark.pipelines.progress import Totals, follow_all, stopped_by_signal
from skylark.spark.cluster import Cluster

TOPIC: Final = "orders"
DEADLINE_S: Final = 600.0  # far more than it takes on a busy machine
_SEND_TIMEOUT_S: Final = 60.0  # Spark starts meanwhile, and takes the machine
_COUNTRIES: Final = ("de", "fr", "it", "jp", "us")
_FIRST: Final = 50  # orders before the streams begin

_ORDERS: Final = """
select parsed.*, to_date(storeTimestamp) as date from (
  select from_json(cast(body as string), 'id int, country string, cents bigint') as parsed, storeTimestamp from {rows}
)
"""
_BY_COUNTRY: Final = "select country, count(*) as orders, sum(cents) as cents from {rows} group by country"


class Result(msgspec.Struct, frozen=True):
    """Orders and cents of each country: as the stream saw them, and as the archive has them."""

    streamed: dict[str, tuple[int, int]]
    archived: dict[str, tuple[int, int]]


def demonstrate(
    spark: SparkSession, name_server: str, directory: Path, count: int, console: Console, deadline_s: float = DEADLINE_S
) -> Result:
    """Runs it all; files go to `directory`. Raises PipelineError if it is stopped or takes too long."""
    streamed: dict[str, tuple[int, int]] = {}
    produce(name_server, TOPIC, orders(count, limit=_FIRST))  # so that the topic exists when the streams begin
    console.print(f"[bold]1[/bold] a topic [cyan]{TOPIC}[/cyan]; [bold]2[/bold] two streams read it; ", end="")
    console.print(f"[bold]3[/bold] {count:,} orders are produced meanwhile\n")
    rows = _orders(spark, name_server)
    totals = spark.sql(_BY_COUNTRY, rows=rows)
    begin: list[Callable[[], StreamingQuery]] = [
        lambda: _aggregation(totals, streamed, directory / "checkpoints" / "totals"),
        lambda: _archive(rows, directory / "archive", directory / "checkpoints" / "archive"),
    ]
    until_s = time.monotonic() + deadline_s
    with stopped_by_signal() as stop:
        work = _Work(name_server, count, stop)
        work.start()

        def is_over(done: Sequence[Totals]) -> bool:
            return has_read_all(done, work.total) or work.error is not None or time.monotonic() >= until_s

        try:
            queries = [start() for start in begin]
            titles = ["totals by country", "archive"]
            follow_all(queries, titles=titles, console=console, stop=stop, again=begin, until=is_over)
        finally:
            stop.set()
            work.join(timeout=10)
    if work.error is not None:
        raise work.error
    if sum(number for number, cents in streamed.values()) < count:
        raise PipelineError(f"the demonstration was stopped, or took longer than {deadline_s:.0f} s")
    archived = spark.sql(_BY_COUNTRY, rows=spark.read.parquet(str(directory / "archive")))
    return Result(streamed, _by_country(archived.collect()))


def show(result: Result, console: Console) -> None:
    table = Table(title="Orders by country", title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("country")
    for heading in ("orders", "revenue (stream)", "revenue (archive)"):
        table.add_column(heading, justify="right")
    for country in sorted(result.streamed.keys() | result.archived.keys()):
        number, cents = result.streamed.get(country, (0, 0))
        table.add_row(country, f"{number:,}", _money(cents), _money(result.archived.get(country, (0, 0))[1]))
    console.print()
    console.print(table)


def orders(count: int, *, limit: int | None = None, skip: int = 0) -> Iterator[tuple[str, bytes]]:
    """Keys and bodies, the same ones in every run: the first `limit` of `count`, behind the first `skip`."""
    chance = random.Random(7)
    for number in range(count if limit is None else min(limit, count)):
        country, cents = chance.choice(_COUNTRIES), chance.randrange(100, 50_000)
        if number >= skip:
            yield str(number), json.dumps({"id": number, "country": country, "cents": cents}).encode()


def produce(
    name_server: str, topic: str, made: Iterator[tuple[str, bytes]], stop: threading.Event | None = None
) -> None:
    try:
        with Producer(name_server, group="demo", timeout_s=_SEND_TIMEOUT_S) as producer:
            for key, body in made:
                if stop is not None and stop.is_set():
                    return
                producer.send(topic, body, tag="order", key=key)
    except RocketMQError as e:
        raise PipelineError(f"the orders can't be produced: {e}") from e


def has_read_all(done: Sequence[Totals], total: int | None) -> bool:
    """Whether each stream has come to the end of the topic, once it is known how many messages that has.

    It goes by offsets: a report of what a stream did may be lost when it is started again.
    """
    return total is not None and all(stream.read is not None and stream.read >= total for stream in done)


class _Work(threading.Thread):
    """Produces the orders. Whoever starts it looks at `error`, and at `total`: the messages that the topic has then."""

    def __init__(self, name_server: str, count: int, stop: threading.Event) -> None:
        super().__init__(name="skylark-demo", daemon=True)
        self._name_server = name_server
        self._count = count
        self._told = stop
        self.error: PipelineError | None = None
        self.total: int | None = None

    def run(self) -> None:
        try:
            produce(self._name_server, TOPIC, orders(self._count, skip=_FIRST), self._told)
            with Cluster(self._name_server, _SEND_TIMEOUT_S) as cluster:
                self.total = max(self._count, sum(cluster.max_offsets(cluster.queues(TOPIC)).values()))
        except PipelineError as e:
            self.error = e
        except RocketMQError as e:
            self.error = PipelineError(str(e))


def _orders(spark: SparkSession, name_server: str) -> DataFrame:
    reader = spark.readStream.format("rocketmq").option("nameServer", name_server)
    messages = reader.option("subscribe", TOPIC).option("startingOffsets", "earliest").load()
    return spark.sql(_ORDERS, rows=messages)


def _aggregation(totals: DataFrame, into: dict[str, tuple[int, int]], checkpoint: Path) -> StreamingQuery:
    def keep(rows: DataFrame, batch: int) -> None:
        into.update(_by_country(rows.collect()))

    writer = totals.writeStream.outputMode("complete").foreachBatch(keep).trigger(processingTime="1 second")
    return writer.option("checkpointLocation", str(checkpoint)).start()


def _archive(rows: DataFrame, path: Path, checkpoint: Path) -> StreamingQuery:
    writer = rows.writeStream.format("parquet").partitionBy("date").trigger(processingTime="2 seconds")
    return writer.option("path", str(path)).option("checkpointLocation", str(checkpoint)).start()


def _by_country(rows: list[Row]) -> dict[str, tuple[int, int]]:
    return {row["country"]: (row["orders"], row["cents"]) for row in rows}


def _money(cents: int) -> str:
    return f"{Decimal(cents) / 100:,.2f}"
