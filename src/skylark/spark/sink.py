"""The Spark sink `rocketmq`: tables and streams written to topics.

    orders.select("body", "keys").write.format("rocketmq").mode("append") \\
        .option("nameServer", "localhost:9876").option("topic", "orders").save()

At-least-once: a task ends when every one of its messages is acknowledged. A task that Spark runs again sends again,
with the same unique keys as long as it has the same rows in the same order: consumers can tell duplicates by them.

Exactly-once, with Skylark: see `ledger`. A batch that Spark runs again, after a death of the driver say, is either
decided, then its tasks send nothing and the driver finishes it; or it is not, then all that was sent for it before is
never delivered. Either way the tasks read their rows: the driver compares what they are with what was decided.

Spark builds a writer beside the driver, pickles it, and calls `write` in the workers, `commit` and `abort` in yet
another process: so a writer holds no connection.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from skylark.client.errors import InvalidMessage, RocketMQError, RouteNotFound
from skylark.spark.cluster import Cluster
from skylark.spark.content import Content, Tally, total
from skylark.spark.halves import Halves
from skylark.spark.ledger import Ledger, Manifest, require_skylark, runtime_info
from skylark.spark.options import BadOption, Writing
from skylark.spark.outbox import Outbox
from skylark.spark.rows import BadRow, Outgoing, Rows
from skylark.spark.settings import Compacted

log = logging.getLogger(__name__)

_WITHOUT_TIMERS: Final = ("V3_", "V4_")
"""Versions of Apache's brokers that ignore a delay in milliseconds."""

_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"
_THE_ONLY_BATCH: Final = 0
_NEW_CHECKPOINT: Final = "Start with a new checkpoint, from the position that you want (startingOffsets)"


class OtherRows(RocketMQError):
    """A batch that was decided comes again with other rows."""


@dataclass
class Sent(WriterCommitMessage):
    """What a task hands to the driver."""

    query: str
    attempt: str = ""
    content: Content | None = None
    """what its rows were; only with exactly-once"""
    parts: list[int] = field(default_factory=list)
    """the entries of the ledger with the places of its half messages"""
    was_decided: bool = False
    """it found the batch decided and sent nothing"""


class Delivery:
    """What batch and stream writers have in common. Made beside the driver, before the tasks."""

    def __init__(self, options: Writing, schema: StructType) -> None:
        self._options = options
        self._rows = Rows(schema, options)
        with self._cluster() as cluster:
            if options.is_exactly_once:
                Ledger(cluster, options.ledger_topic, options.group).prepare()
            self._existing = frozenset([options.topic] if options.topic and _exists(cluster, options.topic) else ())

    def send(
        self, batches: Iterator[pa.RecordBatch], query: str, batch: int, partition: int, *, is_later: bool = False
    ) -> Sent:
        """A task's part: sends the rows, or prepares them. Returns when all are acknowledged.

        `is_later` says that there were batches of this query before, so its topics should be there.
        """
        with self._cluster() as cluster:
            if self._options.is_exactly_once:
                return self._prepare_all(cluster, batches, query, batch, partition, is_later)
            outbox = self._outbox(cluster, partition, is_later)
            self._send_all(cluster, batches, unique_keys(query, str(batch), str(partition)), outbox.put)
            outbox.flush()
            return Sent(query)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
        """The driver's part: decides, unless that is done already, and has everything delivered."""
        sent = [message for message in messages if isinstance(message, Sent)]
        if not self._options.is_exactly_once or not sent:
            return
        query = sent[0].query
        with self._cluster() as cluster:
            ledger = Ledger(cluster, self._options.ledger_topic, self._options.group)
            manifest, is_done = self._decided(ledger, query, batch, sent)
            if not is_done:
                ledger.finish(query, batch, manifest)
            for task in sent:
                if task.attempt not in manifest.attempts:
                    ledger.roll_back(task.parts)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
        """Rolls back what surely no manifest names. What can't be done here, the broker does when it gives up."""
        sent = [message for message in messages if isinstance(message, Sent) and message.parts]
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
                        ledger.roll_back(task.parts)
        except RocketMQError as e:
            log.warning("half messages of batch %d of query %s are left to the broker: %s", batch, query, e)

    def _decided(self, ledger: Ledger, query: str, batch: int, sent: Sequence[Sent]) -> tuple[Manifest, bool]:
        """The decision for a batch, made now if there is none, and whether it is carried out.

        Raises OtherRows if it is for other rows than these.
        """
        given = total(self._options.topic, (task.content for task in sent if task.content is not None))
        found = ledger.verdict(query, batch)
        if found.manifest is None:
            if any(task.was_decided for task in sent):
                raise RocketMQError(
                    f"ledger {self._options.ledger_topic!r} had a decision for batch {batch} of query {query}, and has "
                    "none any more: nothing is sent, since it may be delivered already; see to the broker of the ledger"
                )
            self._check_known(ledger, query, batch)
            attempts = [task.attempt for task in sent]
            found = ledger.decide(query, batch, attempts, [part for task in sent for part in task.parts], given)
        if found.manifest is None:
            raise RocketMQError(
                f"the decision for batch {batch} of query {query} is not in ledger "
                f"{self._options.ledger_topic!r}: the batch was aborted meanwhile, or the broker of the ledger has "
                "messageIndexEnable=false"
            )
        decided = found.manifest.content
        if decided is not None and decided != given:
            self._refuse(query, batch, decided, given)
        return found.manifest, found.is_done

    def _check_known(self, ledger: Ledger, query: str, batch: int) -> None:
        """Raises OtherRows if this batch may have been decided, and the ledger does not know."""
        latest = ledger.latest(query)
        if latest is not None and latest > batch:
            raise OtherRows(
                f"batch {batch} of query {query} is not in ledger {self._options.ledger_topic!r}, but batch {latest} "
                "is: the checkpoint is older than what the ledger remembers (fileReservedTime), and its rows may be "
                f"delivered already. Nothing was sent. {_NEW_CHECKPOINT}"
            )
        is_known = batch == 0 or latest == batch - 1 or ledger.verdict(query, batch - 1).manifest is not None
        if not is_known and not self._options.new_ledger:
            raise OtherRows(
                f"ledger {self._options.ledger_topic!r} does not know batch {batch - 1} of query {query}, which came "
                f"before batch {batch}: it was another ledger, or has forgotten it (fileReservedTime), or the query "
                "was not written exactly once until now. So it can't tell whether this batch is delivered already, "
                "and nothing was sent. If it is not, or may come twice, go on once with newLedger=true"
            )

    def _refuse(self, query: str, batch: int, decided: Content, given: Content) -> None:
        differs = (
            f"batch {batch} of query {query} was decided with {decided}, and comes again with {given}. "
            "Nothing of the latter was sent"
        )
        if not self._options.fail_on_other_rows:
            log.warning("%s: failOnOtherRows=false", differs)
            return
        raise OtherRows(
            f"{differs}. Either its checkpoint was restored or copied, the writeId was used before, the topic was "
            f"changed, or the query gives other rows each time (rand(), uuid()). {_NEW_CHECKPOINT}, or another "
            "writeId; if what was decided is what you want, go on with failOnOtherRows=false"
        )

    def _cluster(self) -> Cluster:
        return Cluster(self._options.name_server, self._options.timeout_s)

    def _outbox(self, cluster: Cluster, partition: int, is_later: bool, halves: Halves | None = None) -> Outbox:
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
            max_body_bytes=self._options.max_body_bytes,
            existing=self._existing,
            is_later=is_later,
        )

    def _send_all(
        self,
        cluster: Cluster,
        batches: Iterator[pa.RecordBatch],
        keys: UniqueKeys,
        put: Callable[[Outgoing], None],
    ) -> None:
        compacted = Compacted(cluster)
        count = 0
        for batch in batches:
            row = count
            for message in self._rows.messages(batch, keys.of(count, batch.num_rows), count, compacted.holds):
                try:
                    put(message)
                except InvalidMessage as e:
                    raise BadRow(f"row {row} of its partition can't be sent: {e}") from None
                row += 1
            count += batch.num_rows

    def _prepare_all(
        self,
        cluster: Cluster,
        batches: Iterator[pa.RecordBatch],
        query: str,
        batch: int,
        partition: int,
        is_later: bool,
    ) -> Sent:
        ledger = Ledger(cluster, self._options.ledger_topic, self._options.group)
        attempt = uuid.uuid4().hex
        # Each attempt has keys of its own: by them the broker tells transactions apart.
        keys = unique_keys(query, str(batch), str(partition), attempt)
        tally = Tally(self._options.topic)
        if ledger.verdict(query, batch).manifest is not None:
            self._send_all(cluster, batches, keys, tally.add)
            return Sent(query, attempt, tally.content, was_decided=True)
        halves = Halves(ledger, self._options.group)
        outbox = self._outbox(cluster, partition, is_later, halves)

        def put(message: Outgoing) -> None:
            outbox.put(message)
            tally.add(message)

        try:
            self._send_all(cluster, batches, keys, put)
            outbox.flush()
            halves.note_all()
        except Exception:
            self._give_up(halves)
            raise
        return Sent(query, attempt, tally.content, halves.parts)

    @staticmethod
    def _give_up(halves: Halves) -> None:
        try:
            halves.roll_back()
        except RocketMQError as e:
            log.warning("half messages are left to the broker: %s", e)


def _exists(cluster: Cluster, topic: str) -> bool:
    try:
        cluster.route(topic)
    except RouteNotFound:
        return False
    return True


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
        if options.write_id is not None and len(options.write_id.split()) != 1:
            raise BadOption(f"option writeId={options.write_id!r}: expected a name without blanks")
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
        return self._delivery.send(iterator, query, int(batch), task.partitionId(), is_later=int(batch) > 0)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._delivery.commit(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._delivery.abort(messages, batchId)


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "Spark writes within a task"
    return task
