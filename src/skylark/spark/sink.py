"""The Spark sink `rocketmq`: tables and streams written to topics.

    orders.select("body", "keys").write.format("rocketmq").mode("append") \\
        .option("nameServer", "localhost:9876").option("topic", "orders").save()

At-least-once: a task ends when every one of its messages is acknowledged. A task that Spark runs again sends again,
with the same unique keys as long as it has the same rows in the same order: consumers can tell duplicates by them.

Exactly-once, with Skylark: see `ledger`. A batch that Spark runs again, after a death of the driver say, is either
decided, then its tasks send nothing and the driver finishes it; or it is not, then all that was sent for it before is
never delivered.

Spark builds a writer beside the driver, pickles it, and calls `write` in the workers, `commit` and `abort` in yet
another process: so a writer holds no connection.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from skylark.client.errors import RocketMQError
from skylark.spark.cluster import Cluster
from skylark.spark.ledger import Ledger, Places, require_skylark, runtime_info
from skylark.spark.options import BadOption, Writing
from skylark.spark.outbox import Outbox, Pack
from skylark.spark.rows import Rows
from skylark.wire.frame import Frame
from skylark.wire.records import parse_message_id

log = logging.getLogger(__name__)

_WITHOUT_TIMERS: Final = ("V3_", "V4_")
"""Versions of Apache's brokers that ignore a delay in milliseconds."""

_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"
_THE_ONLY_BATCH: Final = 0


@dataclass
class Sent(WriterCommitMessage):
    """What a task hands to the driver."""

    query: str
    attempt: str = ""
    count: int = 0
    places: list[Places] = field(default_factory=list)
    """of its half messages; none if the batch was decided before"""


class Delivery:
    """What batch and stream writers have in common."""

    def __init__(self, options: Writing, schema: StructType) -> None:
        self._options = options
        self._rows = Rows(schema, options)
        if options.is_exactly_once:
            with self._cluster() as cluster:
                Ledger(cluster, options.ledger_topic, options.group).prepare()

    def send(self, batches: Iterator[pa.RecordBatch], query: str, batch: int, partition: int) -> Sent:
        """A task's part: sends the rows, or prepares them. Returns when all are acknowledged."""
        with self._cluster() as cluster:
            if self._options.is_exactly_once:
                return self._prepare_all(cluster, batches, query, batch, partition)
            outbox = self._outbox(cluster, partition)
            count = self._send_all(outbox, batches, unique_keys(query, str(batch), str(partition)))
            return Sent(query, count=count)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
        """The driver's part: decides, unless that is done already, and has everything delivered."""
        sent = [message for message in messages if isinstance(message, Sent)]
        if not self._options.is_exactly_once or not sent:
            return
        query = sent[0].query
        with self._cluster() as cluster:
            ledger = Ledger(cluster, self._options.ledger_topic, self._options.group)
            found = ledger.verdict(query, batch)
            if found.manifest is None:
                if not any(task.count for task in sent):
                    return
                attempts = [task.attempt for task in sent]
                found = ledger.decide(query, batch, attempts, (part for task in sent for part in task.places))
            if found.manifest is None:
                raise RocketMQError(
                    f"the decision for batch {batch} of query {query} is not in ledger "
                    f"{self._options.ledger_topic!r}: the batch was aborted meanwhile, or the broker of the ledger has "
                    "messageIndexEnable=false"
                )
            if not found.is_done:
                ledger.finish(query, batch, found.manifest)
            for task in sent:
                if task.attempt not in found.manifest.attempts:
                    ledger.roll_back(task.places)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
        """Rolls back what surely no manifest names. What can't be done here, the broker does when it gives up."""
        sent = [message for message in messages if isinstance(message, Sent) and message.places]
        if not sent:
            return
        query = sent[0].query
        try:
            with self._cluster() as cluster:
                ledger = Ledger(cluster, self._options.ledger_topic, self._options.group)
                found = ledger.abort(query, batch, [task.attempt for task in sent])
                decided = found.manifest.attempts if found.manifest is not None else []
                for task in sent:
                    if task.attempt not in decided:
                        ledger.roll_back(task.places)
        except RocketMQError as e:
            log.warning("half messages of batch %d of query %s are left to the broker: %s", batch, query, e)

    def _cluster(self) -> Cluster:
        return Cluster(self._options.name_server, self._options.timeout_s)

    def _outbox(self, cluster: Cluster, partition: int, halves: Halves | None = None) -> Outbox:
        def check(broker: str, topic: str) -> None:
            if halves is not None or self._rows.has_delays:
                info = runtime_info(cluster, broker, topic)
                if halves is not None:
                    require_skylark(broker, info)
                version = info.get("brokerVersionDesc", "")
                if self._rows.has_delays and version.startswith(_WITHOUT_TIMERS):
                    raise BadOption(
                        f"column 'delay': broker {broker} is {version}, which has no timers; those from 5.0.0 on have"
                    )

        return Outbox(
            cluster,
            self._options.group,
            self._options.timeout_s,
            max_in_flight=self._options.max_in_flight,
            first_turn=partition,
            halves=halves is not None,
            on_stored=halves.stored if halves is not None else lambda pack, reply: None,
            on_broker=check,
        )

    def _send_all(self, outbox: Outbox, batches: Iterator[pa.RecordBatch], keys: UniqueKeys) -> int:
        count = 0
        for batch in batches:
            for message in self._rows.messages(batch, keys.of(count, batch.num_rows), count):
                outbox.put(message)
            count += batch.num_rows
        outbox.flush()
        return count

    def _prepare_all(
        self, cluster: Cluster, batches: Iterator[pa.RecordBatch], query: str, batch: int, partition: int
    ) -> Sent:
        ledger = Ledger(cluster, self._options.ledger_topic, self._options.group)
        attempt = uuid.uuid4().hex
        if ledger.verdict(query, batch).manifest is not None:
            return Sent(query, attempt)
        halves = Halves()
        try:
            # Each attempt has keys of its own: by them the broker tells transactions apart.
            keys = unique_keys(query, str(batch), str(partition), attempt)
            count = self._send_all(self._outbox(cluster, partition, halves), batches, keys)
        except Exception:
            self._give_up(ledger, halves)
            raise
        return Sent(query, attempt, count, halves.places())

    @staticmethod
    def _give_up(ledger: Ledger, halves: Halves) -> None:
        """Nobody else knows of these half messages, so nobody can have decided for them."""
        try:
            ledger.roll_back(halves.places())
        except RocketMQError as e:
            log.warning("half messages are left to the broker: %s", e)


class Halves:
    """Where the half messages of a task are."""

    def __init__(self) -> None:
        self._pairs: dict[str, list[tuple[int, int]]] = {}
        self._topics: dict[str, str] = {}

    def stored(self, pack: Pack, reply: Frame) -> None:
        pair = int(reply.fields["queueOffset"]), parse_message_id(reply.fields["msgId"])[1]
        self._pairs.setdefault(pack.broker, []).append(pair)
        self._topics.setdefault(pack.broker, pack.topic)

    def places(self) -> list[Places]:
        return [Places.pack(broker, self._topics[broker], pairs) for broker, pairs in self._pairs.items()]


class UniqueKeys:
    """The unique keys of a task's rows, in the form of Apache's: 16 bytes in hex.

    8 bytes for the task and 4 for the row, around 4 that are zero: there Apache's tools look for milliseconds since
    the month began, and find messages that were sent since.
    """

    def __init__(self, task: bytes) -> None:
        self._task = task.hex().upper()

    def of(self, first_row: int, count: int) -> list[str]:
        task = self._task
        return [
            f"{task}{row >> 16 & 0xFFFF:04X}00000000{row & 0xFFFF:04X}" for row in range(first_row, first_row + count)
        ]


def unique_keys(*task: str) -> UniqueKeys:
    return UniqueKeys(hashlib.blake2b("\0".join(task).encode(), digest_size=8).digest())


class BatchWriter(DataSourceArrowWriter):
    def __init__(self, options: Writing, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise BadOption('a topic can\'t be overwritten; write with mode("append")')
        if options.is_exactly_once and options.write_id is None:
            raise BadOption(
                "option writeId is missing: with deliveryGuarantee=exactly-once a batch write needs a name, by which "
                "it is recognised when it is run again"
            )
        self._delivery = Delivery(options, schema)
        self._name = f"write-{options.write_id or uuid.uuid4().hex}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._delivery.send(iterator, self._name, _THE_ONLY_BATCH, _task().partitionId())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._delivery.commit(messages, _THE_ONLY_BATCH)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._delivery.abort(messages, _THE_ONLY_BATCH)


class StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: Writing, schema: StructType) -> None:
        if options.write_id is not None:
            raise BadOption("option writeId is for batch writes; a stream is recognised by its checkpoint")
        self._delivery = Delivery(options, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task = _task()
        query, batch = task.getLocalProperty(_QUERY_ID), task.getLocalProperty(_BATCH_ID)
        if query is None or batch is None:
            raise RuntimeError("Spark did not tell a task of a stream its query and batch")
        return self._delivery.send(iterator, query, int(batch), task.partitionId())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._delivery.commit(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._delivery.abort(messages, batchId)


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "Spark writes within a task"
    return task
