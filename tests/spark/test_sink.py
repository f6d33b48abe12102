"""Tables and streams written by real Spark to both servers."""

from __future__ import annotations

import re
import socket
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructType
from servers import SERVERS, Server, SkylarkServer, request

from patience import DEADLINE_S
from skylark.client.choosing import select_by_hash
from skylark.client.errors import NotReachable
from skylark.client.message import MessageQueue
from skylark.client.routes import TopicRoute
from skylark.client.sync import Producer
from skylark.spark import positions
from skylark.spark.bodies import Shape
from skylark.spark.cluster import Cluster
from skylark.spark.content import total
from skylark.spark.ledger import Ledger
from skylark.spark.options import BadOption, read_options, write_options
from skylark.spark.outbox import Outbox
from skylark.spark.planning import ranges_between
from skylark.spark.reading import read_ranges
from skylark.spark.rows import Outgoing
from skylark.spark.sink import Delivery, Sent
from skylark.wire.codes import RequestCode
from spark.conftest import Topics, wait_for


def send(namesrv: str, topic: str, *texts: str, tag: str | None = None) -> None:
    """To a topic that is new. Returns when the messages can be read."""
    with Producer(namesrv, group="spark-tests", timeout_s=DEADLINE_S) as producer:
        for text in texts:
            producer.send(topic, text.encode(), tag=tag, key=f"key-{text}", properties={"n": text})
    wait_for(namesrv, topic, len(texts))


def read(spark: SparkSession, namesrv: str, topic: str, total: int) -> DataFrame:
    """All messages of a topic, as soon as there are so many."""
    wait_for(namesrv, topic, total)
    return spark.read.format("rocketmq").options(nameServer=namesrv, subscribe=topic).load()


def bodies(frame: DataFrame) -> list[str]:
    return sorted(bytes(row.body).decode() for row in frame.select("body").collect())


def write(frame: DataFrame, namesrv: str, **options: Any) -> None:
    frame.write.format("rocketmq").mode("append").options(nameServer=namesrv, **options).save()


def count(namesrv: str, topic: str) -> int:
    with Cluster(namesrv, DEADLINE_S) as cluster:
        return sum(cluster.max_offsets(cluster.queues(topic)).values())


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address that is taken, so that nobody can come to listen there."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{silent.getsockname()[1]}"


# Batches.


def test_every_column_arrives(spark: SparkSession, namesrv: str, topic: str) -> None:
    frame = spark.range(3000).select(
        F.lit(topic).alias("topic"),
        F.col("id").cast("string").alias("body"),
        F.when(F.col("id") % 2 == 0, "even").alias("tags"),
        F.array(F.lit("all"), F.col("id").cast("string")).alias("keys"),
        F.create_map(F.lit("n"), F.col("id").cast("string"), F.lit("UNIQ_KEY"), F.lit("x")).alias("properties"),
    )
    write(frame, namesrv)
    rows = {int(row.body): row for row in read(spark, namesrv, topic, 3000).collect()}
    assert sorted(rows) == list(range(3000))
    assert len({row.queueId for row in rows.values()}) == 4
    assert len({row.msgId for row in rows.values()}) == 3000
    assert (rows[7].tags, rows[8].tags, rows[7]["keys"], rows[7].properties["n"]) == (None, "even", "all 7", "7")


def test_the_option_names_the_topic(spark: SparkSession, namesrv: str, topic: str) -> None:
    write(spark.sql("select binary('a') as body, 'elsewhere' as topic"), namesrv, topic=topic)
    assert bodies(read(spark, namesrv, topic, 1)) == ["a"]


def test_rows_of_one_key_stay_in_order(spark: SparkSession, namesrv: str, topic: str) -> None:
    write(spark.sql("select 'first' as body"), namesrv, topic=topic)  # so that the topic has its queues
    frame = spark.range(2000).coalesce(1).selectExpr("string(id) as body", "concat('key-', id % 7) as orderingKey")
    write(frame, namesrv, topic=topic)
    with Cluster(namesrv, DEADLINE_S) as cluster:
        queues = cluster.route(topic).write_queues
    rows = read(spark, namesrv, topic, 2001).where("body != 'first'").orderBy("queueId", "offset").collect()
    for key in range(7):
        of_key = [row for row in rows if int(row.body) % 7 == key]
        assert [int(row.body) for row in of_key] == list(range(key, 2000, 7))
        assert {row.queueId for row in of_key} == {select_by_hash(queues, f"key-{key}").queue_id}


def test_delayed_rows_come_later(spark: SparkSession, namesrv: str, topic: str) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    due = {"later": now + timedelta(seconds=3), "now": None, "soon": now + timedelta(seconds=2)}
    write(spark.createDataFrame(list(due.items()), "body string, delay timestamp"), namesrv, topic=topic)
    rows = {bytes(row.body).decode(): row for row in read(spark, namesrv, topic, 3).collect()}
    assert rows.keys() == due.keys()
    for body in ("soon", "later"):
        assert rows[body].storeTimestamp.replace(tzinfo=UTC) >= due[body]


def test_a_copy_of_a_topic(spark: SparkSession, namesrv: str, topic: str) -> None:
    """What was read can be written: the system's own properties are left behind."""
    send(namesrv, topic, "a", "b", tag="red")
    write(read(spark, namesrv, topic, 2).select("body", "properties"), namesrv, topic=topic + "_copy")
    rows = read(spark, namesrv, topic + "_copy", 2).collect()
    assert sorted((bytes(row.body), row.tags, row["keys"], row.properties["n"]) for row in rows) == [
        (b"a", "red", "key-a", "a"),
        (b"b", "red", "key-b", "b"),
    ]


@pytest.mark.parametrize(
    ("columns", "options", "complaint"),
    [
        ("'a' as body", {}, "option topic is missing"),
        ("'a' as body", {"topic": "t", "tagz": "x"}, "unknown option 'tagz'"),
        ("'a' as body, 1 as offset", {"topic": "t"}, "column 'offset' is not one that can be written"),
        ("1 as body", {"topic": "t"}, "column 'body' is int"),
        ("'a' as body", {"topic": "t", "deliveryGuarantee": "exactly-once"}, "option writeId is missing"),
    ],
)
def test_what_is_wrong_is_said(
    spark: SparkSession, namesrv: str, columns: str, options: dict[str, str], complaint: str
) -> None:
    with pytest.raises(Exception, match=re.escape(complaint)):
        write(spark.sql(f"select {columns}"), namesrv, **options)


def test_a_body_that_is_null_is_refused(spark: SparkSession, topics: Any, namesrv: str, topic: str) -> None:
    topics.create(topic)
    with pytest.raises(Exception, match="row 0 of its partition can't be sent: its body is null"):
        write(spark.sql("select string(null) as body"), namesrv, topic=topic)


def test_a_topic_is_not_overwritten(spark: SparkSession, namesrv: str, topic: str) -> None:
    writing = spark.sql("select 'a' as body").write.format("rocketmq").mode("overwrite")
    with pytest.raises(Exception, match="can't be overwritten"):
        writing.options(nameServer=namesrv, topic=topic).save()


def test_nobody_there(spark: SparkSession, nobody: str) -> None:
    with pytest.raises(Exception, match=f"no connection to {nobody}"):
        write(spark.sql("select 'a' as body"), nobody, topic="t", timeout="1s")


# Streams.


def copy_stream(spark: SparkSession, namesrv: str, source: str, target: str, at: Path, **options: str) -> None:
    frame = (
        spark.readStream.format("rocketmq")
        .options(nameServer=namesrv, subscribe=source, startingOffsets="earliest", maxOffsetsPerTrigger="50")
        .load()
    )
    query = (
        frame.select("body", "keys")
        .writeStream.format("rocketmq")
        .options(nameServer=namesrv, topic=target, checkpointLocation=str(at), **options)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def test_a_stream(spark: SparkSession, namesrv: str, topic: str, tmp_path: Path) -> None:
    send(namesrv, topic, *map(str, range(120)))
    copy_stream(spark, namesrv, topic, topic + "_copy", tmp_path)
    send(namesrv, topic, "120")
    wait_for(namesrv, topic, 121)
    copy_stream(spark, namesrv, topic, topic + "_copy", tmp_path)
    assert bodies(read(spark, namesrv, topic + "_copy", 121)) == sorted(map(str, range(121)))


def test_exactly_once_is_for_skylark(
    spark: SparkSession, server: Server, namesrv: str, topic: str, tmp_path: Path
) -> None:
    send(namesrv, topic, *map(str, range(120)))
    if isinstance(server, SkylarkServer):
        copy_stream(spark, namesrv, topic, topic + "_copy", tmp_path, deliveryGuarantee="exactly-once")
        assert bodies(read(spark, namesrv, topic + "_copy", 120)) == sorted(map(str, range(120)))
        frame = spark.range(10).selectExpr("string(id) as body")
        for _ in range(2):
            write(frame, namesrv, topic=topic + "_b", deliveryGuarantee="exactly-once", writeId=topic)
        assert bodies(read(spark, namesrv, topic + "_b", 10)) == [str(n) for n in range(10)]
    else:
        with pytest.raises(Exception, match="is not a Skylark broker but V5_5_0"):
            copy_stream(spark, namesrv, topic, topic + "_copy", tmp_path, deliveryGuarantee="exactly-once")


# The parts of a write, without Spark.


@pytest.fixture(scope="module")
def skylark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = SERVERS["skylark"](tmp_path_factory.mktemp("skylark"))
    server.start()
    yield server.namesrv_addr
    server.kill()


def table(*texts: str) -> Iterator[pa.RecordBatch]:
    return iter([pa.RecordBatch.from_pydict({"body": pa.array(texts)})])


class Write:
    """One batch of a query with two tasks."""

    def __init__(self, namesrv: str, topic: str, guarantee: str = "exactly-once") -> None:
        given = {"nameServer": namesrv, "topic": topic, "deliveryGuarantee": guarantee, "timeout": f"{DEADLINE_S:.0f}s"}
        self.options = write_options(given)
        self.delivery = Delivery(self.options, StructType().add("body", StringType()))
        self.query = uuid.uuid4().hex

    def run_tasks(self) -> list[Sent]:
        return [self.delivery.send(table(f"{n}a", f"{n}b"), self.query, 0, n) for n in range(2)]

    def decide_only(self, sent: list[Sent]) -> None:
        """What a driver does that dies right after the decision."""
        with Cluster(self.options.name_server, DEADLINE_S) as cluster:
            parts = [part for task in sent for part in task.parts]
            content = total(self.options.topic, (task.content for task in sent if task.content is not None))
            found = self.ledger(cluster).decide(self.query, 0, [task.attempt for task in sent], parts, content)
            assert found.manifest is not None

    def ledger(self, cluster: Cluster) -> Ledger:
        return Ledger(cluster, self.options.ledger_topic, self.options.group)


def test_a_task_that_is_run_again_sends_the_same_keys(skylark: str, topic: str) -> None:
    work = Write(skylark, topic, "at-least-once")
    work.run_tasks()
    work.run_tasks()
    with Cluster(skylark, DEADLINE_S) as cluster:
        assert sum(cluster.max_offsets(cluster.queues(topic)).values()) == 8
    keys = Counter(read_keys(skylark, topic))
    assert set(keys.values()) == {2}
    assert len(keys) == 4


def read_keys(namesrv: str, topic: str) -> list[str]:
    options = read_options({"nameServer": namesrv, "subscribe": topic})
    with Cluster(namesrv, DEADLINE_S) as cluster:
        queues = positions.queues_of(cluster, options)
        ranges = ranges_between(cluster.min_offsets(queues), cluster.max_offsets(queues))
    found: list[str] = []
    for batch in read_ranges(options, Shape(["msgId"]), ranges):
        found += batch.column(0).to_pylist()
    return found


def test_empty_bodies(server: Server, topic: str) -> None:
    """Alone and in a batch with others."""
    given = {"nameServer": server.namesrv_addr, "topic": topic}
    delivery = Delivery(write_options(given), StructType().add("body", StringType()))
    for texts in ([""], ["", "a", ""]):
        delivery.send(table(*texts), topic, 0, 0)
    wait_for(server.namesrv_addr, topic, 4)
    assert sorted(in_queues(server.namesrv_addr, topic)) == ["", "", "", "a"]


@pytest.mark.apache
def test_null_deletes_a_key_of_a_compacted_topic(started: Callable[[str], Server], topic: str) -> None:
    server = started("apache")
    header = {"topic": topic, "defaultTopic": "TBW102", "readQueueNums": "1", "writeQueueNums": "1", "perm": "6"}
    header |= {"topicFilterType": "SINGLE_TAG", "order": "false", "attributes": "+cleanup.policy=COMPACTION"}
    assert request(server.broker_addr, RequestCode.UPDATE_AND_CREATE_TOPIC, header)[0]["code"] == 0
    schema = StructType().add("body", StringType()).add("keys", StringType())
    delivery = Delivery(write_options({"nameServer": server.namesrv_addr, "topic": topic}), schema)
    columns = {"body": pa.array(["a", None]), "keys": pa.array(["k", "k"])}
    delivery.send(iter([pa.RecordBatch.from_pydict(columns)]), topic, 0, 0)


def test_nothing_is_seen_before_the_decision(skylark: str, topic: str) -> None:
    work = Write(skylark, topic)
    sent = work.run_tasks()
    assert count(skylark, topic) == 0
    work.delivery.commit(sent, 0)
    assert count(skylark, topic) == 4
    work.delivery.commit(sent, 0)
    assert count(skylark, topic) == 4


def test_a_decided_batch_is_finished_by_its_rerun(skylark: str, topic: str) -> None:
    work = Write(skylark, topic)
    work.decide_only(work.run_tasks())
    assert count(skylark, topic) == 0
    again = work.run_tasks()
    assert all(task.was_decided and not task.parts for task in again)
    work.delivery.commit(again, 0)
    assert count(skylark, topic) == 4


def test_of_two_drivers_one_decides(skylark: str, topic: str) -> None:
    work = Write(skylark, topic)
    first, second = work.run_tasks(), work.run_tasks()
    work.decide_only(second)
    work.delivery.commit(first, 0)
    work.delivery.commit(second, 0)
    assert count(skylark, topic) == 4


def test_an_undecided_batch_is_sent_anew(skylark: str, topic: str) -> None:
    work = Write(skylark, topic)
    work.run_tasks()
    work.delivery.commit(work.run_tasks(), 0)
    assert count(skylark, topic) == 4


def test_what_was_aborted_stays_so(skylark: str, topic: str) -> None:
    work = Write(skylark, topic)
    sent = work.run_tasks()
    work.delivery.abort([sent[0], None], 0)
    with pytest.raises(Exception, match="was aborted meanwhile"):
        work.delivery.commit(sent, 0)
    work.delivery.commit(work.run_tasks(), 0)
    assert count(skylark, topic) == 4


def test_an_abort_does_not_undo_a_decision(skylark: str, topic: str) -> None:
    work = Write(skylark, topic)
    sent = work.run_tasks()
    work.decide_only(sent)
    work.delivery.abort(sent, 0)
    work.delivery.commit(work.run_tasks(), 0)
    assert count(skylark, topic) == 4


def test_what_the_broker_gave_up_is_committed_all_the_same(tmp_path: Path, topic: str) -> None:
    soon = {"transactionTimeOut": "10", "transactionCheckInterval": "50", "transactionCheckMax": "1"}
    server = SERVERS["skylark"](tmp_path / "server", **soon)
    server.start()
    try:
        work = Write(server.namesrv_addr, topic)
        sent = work.run_tasks()
        wait_for(server.namesrv_addr, "TRANS_CHECK_MAX_TIME_TOPIC", 4)
        assert count(server.namesrv_addr, topic) == 0
        work.decide_only(sent)
        for _ in range(2):
            work.delivery.commit(work.run_tasks(), 0)
        assert count(server.namesrv_addr, topic) == 4
    finally:
        server.kill()


def test_a_ledger_has_one_queue(skylark: str, topic: str) -> None:
    send(skylark, topic, "a")
    given = {"nameServer": skylark, "topic": topic, "deliveryGuarantee": "exactly-once", "ledgerTopic": topic}
    with pytest.raises(BadOption, match=r"the topic has 4 queues \(at broker .*\), and a ledger has exactly one"):
        Delivery(write_options(given), StructType().add("body", StringType()))


class Halfway(Cluster):
    """A cluster one of whose two brokers is down."""

    def __init__(self, namesrv: str, dead: str, *, is_all_down: bool = False) -> None:
        super().__init__(namesrv, DEADLINE_S)
        self.dead = dead
        self.is_all_down = is_all_down

    def route(self, topic: str, *, refresh: bool = False) -> TopicRoute:
        found = super().route(topic, refresh=refresh)
        dead = [MessageQueue("dead", number, topic) for number in range(4)]
        return TopicRoute(
            topic=topic,
            write_queues=dead if self.is_all_down else [*dead, *found.write_queues],
            read_queues=found.read_queues,
            brokers={**found.brokers, "dead": {0: self.dead}},
        )


def messages(topic: str, total: int) -> list[Outgoing]:
    return [Outgoing(topic, b"x", {"UNIQ_KEY": str(n)}, None, False, 100) for n in range(total)]


def in_queues(namesrv: str, topic: str) -> list[str]:
    """The bodies, queue by queue in their order."""
    options = read_options({"nameServer": namesrv, "subscribe": topic})
    with Cluster(namesrv, DEADLINE_S) as cluster:
        queues = positions.queues_of(cluster, options)
        ranges = ranges_between(cluster.min_offsets(queues), cluster.max_offsets(queues))
    batches = [batch for part in ranges for batch in read_ranges(options, Shape(["body"]), [part])]
    return [body.decode() for batch in batches for body in batch.column(0).to_pylist()]


@pytest.mark.parametrize(
    ("kind", "guarantee"), [("skylark", "at-least-once"), ("skylark", "exactly-once"), ("apache", "at-least-once")]
)
def test_nothing_overtakes_within_a_key(
    started: Callable[[str], Server], kind: str, guarantee: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests on one connection may be carried out in any order by Apache's threads, so here each row is one."""
    server = started(kind)
    monkeypatch.setattr("skylark.spark.outbox._PACK_MESSAGES", 1)
    Topics(server).create(topic, 2)
    given = {"nameServer": server.namesrv_addr, "topic": topic, "deliveryGuarantee": guarantee}
    delivery = Delivery(write_options(given), StructType().add("body", StringType()).add("orderingKey", StringType()))
    columns = {"body": [str(n) for n in range(2000)], "orderingKey": [f"key-{n % 7}" for n in range(2000)]}
    delivery.commit([delivery.send(iter([pa.RecordBatch.from_pydict(columns)]), topic, 0, 0)], 0)
    wait_for(server.namesrv_addr, topic, 2000)
    found = list(map(int, in_queues(server.namesrv_addr, topic)))
    for key in range(7):
        assert [number for number in found if number % 7 == key] == list(range(key, 2000, 7))


def test_another_broker_takes_over(skylark: str, topic: str, nobody: str) -> None:
    send(skylark, topic, "a")
    with Halfway(skylark, nobody) as cluster:
        outbox = Outbox(cluster, "spark", DEADLINE_S, max_in_flight=2)
        for message in messages(topic, 1000):
            outbox.put(message)
        outbox.flush()
    assert count(skylark, topic) == 1001


def test_a_broker_that_is_down_is_named(skylark: str, topic: str, nobody: str) -> None:
    send(skylark, topic, "a")
    with Halfway(skylark, nobody, is_all_down=True) as cluster:
        outbox = Outbox(cluster, "spark", 1.0, max_in_flight=2)
        outbox.put(messages(topic, 1)[0])
        with pytest.raises(NotReachable, match=f"topic {topic}: no connection to {nobody}"):
            outbox.flush()
