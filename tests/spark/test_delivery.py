"""The sink against a cluster in memory: batches that come again, and what they find."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructType

from skylark.client.errors import BrokerError, NotReachable, RocketMQError
from skylark.spark.cluster import Cluster
from skylark.spark.halves import Halves
from skylark.spark.ledger import Ledger
from skylark.spark.options import BadOption, write_options
from skylark.spark.rows import BadRow
from skylark.spark.sink import BatchWriter, Delivery, OtherRows, Sent
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from spark.scripted import NAME_SERVER, Broker, World, play

TOPIC = "orders"
SCHEMA = StructType().add("body", StringType())


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """The ledger comes to broker a; the topic is at b."""
    world = play(monkeypatch, World(Broker("a"), Broker("b")))
    world.brokers["b"].put_topic(TOPIC, 2)
    return world


def delivery(**more: str) -> Delivery:
    given = {"nameServer": NAME_SERVER, "topic": TOPIC, "deliveryGuarantee": "exactly-once"}
    return Delivery(write_options(given | more), SCHEMA)


def tables(rows: range) -> Iterator[pa.RecordBatch]:
    return iter([pa.RecordBatch.from_pydict({"body": pa.array([str(row) for row in rows], pa.string())})])


def prepare(rows: range, batch: int = 0, tasks: int = 2, **more: str) -> tuple[Delivery, list[Sent]]:
    writer = delivery(**more)
    return writer, [writer.send(tables(rows[task::tasks]), "query", batch, task) for task in range(tasks)]


def write(rows: range, batch: int = 0, tasks: int = 2, **more: str) -> None:
    writer, sent = prepare(rows, batch, tasks, **more)
    writer.commit(sent, batch)


def delivered(world: World, topic: str = TOPIC) -> list[int]:
    return sorted(map(int, world.delivered_bodies(topic)))


def decide_only(writer: Delivery, sent: list[Sent], world: World) -> None:
    """What a driver does that dies after the decision."""

    class Died(BaseException):
        pass

    def dies(address: str, request: Frame) -> None:
        if b"manifest" in request.body:
            raise Died

    world.after = dies
    with pytest.raises(Died):
        writer.commit(sent, 0)
    world.after = lambda address, request: None


# A batch that comes again.


def test_in_other_tasks_it_is_the_same(world: World) -> None:
    for tasks in (1, 3, 2):
        write(range(10), tasks=tasks)
    assert delivered(world) == list(range(10))


@pytest.mark.parametrize("later", [range(20), range(5), range(10, 20), range(0)])
def test_with_other_rows_it_is_an_error(world: World, later: range) -> None:
    """An older checkpoint was restored: 20 rows came as batch 1, of which the ledger knew 10, and nothing was said."""
    write(range(10))
    with pytest.raises(OtherRows, match=r"decided with 10 rows for topic orders .* comes again with .*new checkpoint"):
        write(later)
    assert delivered(world) == list(range(10))


def test_a_batch_without_rows_is_decided_too(world: World) -> None:
    write(range(0), batch=0)
    write(range(10), batch=1)
    with pytest.raises(OtherRows):
        write(range(10), batch=0)
    assert delivered(world) == list(range(10))


def test_what_was_decided_may_be_kept(world: World) -> None:
    write(range(10))
    write(range(20), failOnOtherRows="false")
    assert delivered(world) == list(range(10))


def test_another_topic_is_an_error(world: World) -> None:
    write(range(10))
    with pytest.raises(OtherRows, match=r"for topic orders .* comes again with 10 rows for topic bills"):
        write(range(10), topic="bills")
    assert delivered(world, "bills") == []


def test_other_rows_beside_the_decision_are_never_sent(world: World) -> None:
    """Tasks that began before another driver decided, for other rows."""
    writer, sent = prepare(range(20))
    write(range(10))
    with pytest.raises(OtherRows):
        writer.commit(sent, 0)
    writer.abort(sent, 0)
    assert delivered(world) == list(range(10))
    assert sorted({half.fate for _, half in world.brokers["b"].halves}) == [8, 12]


def test_a_checkpoint_older_than_the_ledger_is_an_error(world: World) -> None:
    write(range(10), batch=0)
    world.brokers["a"].forget("skylark_spark_ledger")
    write(range(10, 20), batch=1, newLedger="true")
    with pytest.raises(OtherRows, match=r"batch 0 of query query is not in ledger .* but batch 1 is"):
        write(range(10), batch=0)
    assert delivered(world) == list(range(20))


def test_a_ledger_that_knows_nothing_of_a_stream_is_an_error(world: World) -> None:
    """It is another one, or has forgotten: the batch may be delivered already."""
    with pytest.raises(OtherRows, match="does not know batch 6 of query query, which came before batch 7"):
        write(range(10), batch=7)
    write(range(10), batch=7, newLedger="true")
    write(range(10, 20), batch=8)
    assert delivered(world) == list(range(20))


def test_a_ledger_of_old_knows_the_batch_before(world: World) -> None:
    delivery()
    entry = {"kind": "manifest", "attempts": [], "parts": []}
    with Cluster(NAME_SERVER, 30) as cluster:
        Ledger(cluster, "skylark_spark_ledger", "spark")._append(msgspec.msgpack.encode(entry), "query:6")
    write(range(10), batch=7)
    assert delivered(world) == list(range(10))


def test_a_decision_that_is_gone_is_an_error(world: World) -> None:
    write(range(10))
    writer, sent = prepare(range(10))
    assert all(task.was_decided for task in sent)
    world.brokers["a"].forget("skylark_spark_ledger")
    with pytest.raises(RocketMQError, match="had a decision for batch 0 of query query, and has none any more"):
        writer.commit(sent, 0)
    assert delivered(world) == list(range(10))


def test_a_manifest_of_old_is_carried_out(world: World) -> None:
    """It says nothing of its rows, so they can't be compared."""
    _, sent = prepare(range(10))
    attempts, parts = [task.attempt for task in sent], [part for task in sent for part in task.parts]
    entry = {"kind": "manifest", "attempts": attempts, "parts": parts}
    with Cluster(NAME_SERVER, 30) as cluster:
        Ledger(cluster, "skylark_spark_ledger", "spark")._append(msgspec.msgpack.encode(entry), "query:0")
    write(range(20))
    assert delivered(world) == list(range(10))


# What changed meanwhile.


def test_a_decided_batch_is_finished_with_another_group(world: World) -> None:
    writer, sent = prepare(range(10))
    decide_only(writer, sent, world)
    write(range(10), group="another")
    assert delivered(world) == list(range(10))


def test_a_decided_batch_is_finished_without_its_topic(world: World) -> None:
    writer, sent = prepare(range(10))
    decide_only(writer, sent, world)
    del world.brokers["b"].topics[TOPIC]
    write(range(10))
    assert all(half.fate for _, half in world.brokers["b"].halves)


def test_half_messages_that_are_gone_are_said(world: World) -> None:
    writer, sent = prepare(range(10))
    decide_only(writer, sent, world)
    world.brokers["b"]._by_offset.clear()
    with pytest.raises(RocketMQError, match="batch 0 of query query is decided and can't be delivered to its end"):
        write(range(10))


# A ledger that is away.


def test_a_ledger_that_is_away_is_waited_for(world: World) -> None:
    write(range(10))
    world.away("a", for_s=20)
    write(range(10))
    assert delivered(world) == list(range(10))


def test_no_second_ledger_is_made(world: World) -> None:
    """10 rows became 20, and when the first broker was back every start was refused."""
    write(range(10))
    world.away("a")
    with pytest.raises(NotReachable, match="the broker that has topic 'skylark_spark_ledger' is away"):
        write(range(10))
    world.back("a")
    write(range(10))
    assert delivered(world) == list(range(10))


def test_tasks_wait_for_the_ledger(world: World) -> None:
    writer = delivery()
    world.away("a", for_s=20)
    sent = writer.send(tables(range(10)), "query", 0, 0)
    world.away("a", for_s=20)
    writer.commit([sent], 0)
    assert delivered(world) == list(range(10))


def test_a_slave_is_not_asked_what_was_decided(world: World) -> None:
    """It may be behind, and not know the decision."""
    write(range(10))
    master = world.brokers["a"]
    master.number = 1
    asked: list[int] = []
    world.watch = lambda address, request: asked.append(request.code) if address == master.address else None
    world.plan(20, lambda: setattr(master, "number", 0))
    world.plan(20, lambda: asked.append(-1))
    write(range(10))
    assert asked[0] == -1
    assert delivered(world) == list(range(10))


def test_topics_that_the_driver_saw_are_waited_for(world: World) -> None:
    writer = delivery(deliveryGuarantee="at-least-once")
    world.away("b", for_s=20)
    writer.send(tables(range(10)), "query", 0, 0)
    assert delivered(world) == list(range(10))


def test_a_ledger_that_spark_may_not_read_is_said_before_anything_is_sent(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read as the producer group: with autoCreateSubscriptionGroup=false no decided batch came to its end."""
    answer = Broker.answer
    groups = set()

    def known_groups_only(self: Broker, request: Frame, now_ms: int) -> Frame:
        if request.code == RequestCode.PULL_MESSAGE and request.fields["consumerGroup"] not in groups:
            return request.reply(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "no group")
        return answer(self, request, now_ms)

    monkeypatch.setattr(Broker, "answer", known_groups_only)
    with pytest.raises(BrokerError, match=r"reads as group skylark-spark, .*updateSubGroup .* -g skylark-spark"):
        delivery()
    groups.add("skylark-spark")
    write(range(10))
    assert delivered(world) == list(range(10))


# What a task holds, and what it refuses.


def test_a_task_holds_few_places(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It held 137 bytes for each row."""
    monkeypatch.setattr("skylark.spark.halves.PART_HALVES", 16)
    most = 0
    stored = Halves.stored

    def watched(self: Halves, pack: object, reply: Frame) -> None:
        nonlocal most
        stored(self, pack, reply)  # type: ignore[arg-type]
        most = max(most, self.held_count)

    monkeypatch.setattr(Halves, "stored", watched)
    writer, sent = prepare(range(1000), tasks=1)
    assert most < 16
    assert len(sent[0].parts) == 63
    writer.commit(sent, 0)
    assert delivered(world) == list(range(1000))


def test_a_failed_task_rolls_back_what_it_noted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skylark.spark.halves.PART_HALVES", 16)

    def broken() -> Iterator[pa.RecordBatch]:
        yield from tables(range(100))
        raise ValueError("a row is broken")

    with pytest.raises(ValueError, match="a row is broken"):
        delivery(maxInFlight="1").send(broken(), "query", 0, 0)
    assert [half.fate for _, half in world.brokers["b"].halves].count(12) >= 99
    assert delivered(world) == []


def test_a_row_that_is_too_large_is_named(world: World) -> None:
    writer = delivery(maxBodyBytes="2")
    with pytest.raises(
        BadRow, match="row 100 of its partition can't be sent: its body has 3 bytes; the option maxBody"
    ):
        writer.send(tables(range(200)), "query", 0, 0)


def test_a_name_of_a_write_has_no_blanks(world: World) -> None:
    given = {"nameServer": NAME_SERVER, "topic": TOPIC, "deliveryGuarantee": "exactly-once", "writeId": "a b"}
    with pytest.raises(BadOption, match="option writeId='a b': expected a name without blanks"):
        BatchWriter(write_options(given), SCHEMA, overwrite=False)
