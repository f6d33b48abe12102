"""Streams as Spark drives them, against a cluster in memory: where they begin, what they lose. No Spark is started."""

from __future__ import annotations

import itertools
import json
import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest

from skylark.client.errors import BrokerError, NotReachable, RouteNotFound
from skylark.pipelines.checkpoints import moved_end
from skylark.spark import commits
from skylark.spark.bodies import Shape
from skylark.spark.cluster import Cluster
from skylark.spark.commits import commit
from skylark.spark.options import BadOption, batch_options
from skylark.spark.positions import DataLost
from skylark.spark.pulls import Pace
from skylark.spark.queues import Offsets, Position, Queue
from skylark.spark.source import BatchReader
from skylark.wire.frame import Frame
from spark.conftest import wait_until
from spark.topics_model import GROUP, NAME_SERVER, Model, ModelQueue, Query, install

A0 = Queue("t", "a", 0)
EARLIEST = {"subscribe": "t", "startingOffsets": "earliest"}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    model = install(monkeypatch, Model())
    model.create("t")
    return model


def texts(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def send(model: Model, first: int, end: int, **options: Any) -> None:
    model.send("t", *texts(*range(first, end)), **options)


# Where a stream begins.


@pytest.mark.parametrize("options", [{}, {"failOnDataLoss": False}, {"maxOffsetsPerTrigger": 1000}])
def test_messages_that_come_while_a_stream_starts_are_read_once(model: Model, options: dict[str, Any]) -> None:
    send(model, 0, 5)
    query = Query(subscribe="t", **options)
    assert query.plan()
    send(model, 5, 8)  # between the plan of the first batch and its run
    assert query.read() == []
    query.start()
    send(model, 8, 9)
    assert query.read() == []
    query.done = 1
    assert query.drain() == texts(5, 6, 7, 8)


def test_streams_that_start_while_messages_come(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more between any two requests: with the options that streams have by default, none is lost or doubled."""
    model.create("t", 2)
    answer, numbers = Model.answer, itertools.count()

    def busy(self: Model, address: str, request: Frame) -> Frame:
        number = next(numbers)
        self.send("t", b"%d" % number, queue_id=number % 2)
        return answer(self, address, request)

    monkeypatch.setattr(Model, "answer", busy)
    for _ in range(20):
        query = Query(subscribe="t")
        found: dict[str, list[int]] = {"0": [], "1": []}
        for _ in range(3):
            assert query.plan()
            rows = query.read()
            query.start()  # it ended in the middle of the batch, which comes again
            assert query.read() == rows
            query.done += 1
            for _, queue_id, offset, _ in rows:
                found[str(queue_id)].append(offset)
        first = json.loads(query.planned[0])["f"]["t"]["a"]
        assert all(some == list(range(first[queue], first[queue] + len(some))) for queue, some in found.items())
        assert all(found.values())


def test_a_first_batch_that_fails_comes_again_with_the_same_rows(model: Model) -> None:
    send(model, 0, 5)
    model.brokers["a"].committed["readers", "t", 0] = 2
    query = Query(subscribe="t", group="readers", startingOffsets="group")
    query.plan()
    rows = query.read()
    assert [row[3] for row in rows] == texts(2, 3, 4)
    model.brokers["a"].committed["readers", "t", 0] = 4
    query.start()
    assert query.read() == rows
    query.start(group="others", startingOffsets="latest")
    assert query.read() == rows


def test_where_a_stream_began_stays_in_its_checkpoint(model: Model) -> None:
    query = Query(subscribe="t")
    query.drain()
    send(model, 0, 3)
    query.drain()
    assert {json.dumps(json.loads(text)["f"]) for text in query.planned} == {'{"t": {"a": {"0": 0}}}'}
    assert not query.plan()


def test_a_checkpoint_of_an_older_version_goes_on(model: Model) -> None:
    send(model, 0, 5)
    query = Query(subscribe="t")
    query.planned = ['{"o": {"t": {"a": {"0": 3}}}, "v": 1}']
    query.done = 1
    assert query.drain() == texts(3, 4)
    assert Position.of(json.loads(query.planned[-1])).marks[A0].offset == 4
    # Its first batch was planned, and where that one starts is not known any more.
    query = Query(subscribe="t")
    query.planned = ['{"o": {"t": {"a": {"0": 3}}}, "v": 1}']
    with pytest.raises(
        DataLost, match=r"an older version of Skylark .* start with a new checkpoint, or set failOnData"
    ):
        query.read()
    query.start(failOnDataLoss=False)
    assert query.read() == []


def test_positions_that_are_set_by_hand(model: Model) -> None:
    send(model, 0, 5)
    query = Query(**EARLIEST)
    assert query.drain() == texts(0, 1, 2, 3, 4)
    query.planned[-1] = json.dumps(moved_end(json.loads(query.planned[-1]), {A0: 3}))
    query.start()
    assert query.drain() == texts(3, 4)


def test_a_batch_read_that_ends_before_it_begins(model: Model) -> None:
    """It had no rows, and said nothing."""
    send(model, 0, 5)
    given = {"nameServer": NAME_SERVER, "subscribe": "t", "startingOffsets": '{"t":{"a":{"0":4}}}'}
    for end, said in (("3", "queue 0 of topic t at broker a ends at 3 and begins at 4"), ("4", None)):
        reader = BatchReader(
            batch_options({**given, "endingOffsets": f'{{"t":{{"a":{{"0":{end}}}}}}}'}), Shape(["offset"])
        )
        with pytest.raises(BadOption, match=said) if said is not None else nullcontext():
            reader.partitions()


# What is lost.


@pytest.mark.parametrize("count", [2, 3, 4, 7])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_topic_that_is_made_again_is_not_read_from_its_middle(model: Model, count: int, restarts: bool) -> None:
    send(model, 0, 3)
    query = Query(**EARLIEST)
    assert query.drain() == texts(0, 1, 2)
    model.delete("t")
    model.create("t")
    send(model, 10, 10 + count)
    if restarts:
        query.start()
    elif count == 3:
        assert query.drain() == []  # nothing has moved: it shows with the next message
        send(model, 13, 14)
        count = 4
    with pytest.raises(DataLost, match=r"the topic was deleted and made again.*; set failOnDataLoss=false to go on"):
        query.drain()
    query.start(failOnDataLoss=False, maxOffsetsPerTrigger=2)
    assert query.drain() == texts(*range(10, 10 + count))
    query.start(failOnDataLoss=True)
    send(model, 20, 22)
    assert query.drain() == texts(20, 21)


@pytest.mark.parametrize("options", [{}, {"tags": "red"}])
def test_a_topic_that_is_made_again_between_plan_and_read(model: Model, options: dict[str, Any]) -> None:
    send(model, 0, 3, TAGS="red")
    query = Query(**EARLIEST, **options)
    query.plan()
    model.delete("t")
    model.create("t")
    send(model, 10, 16, TAGS="red")
    with pytest.raises(DataLost, match="made anew since the batch was planned"):
        query.read()
    query.start(failOnDataLoss=False)
    assert query.batch() == []
    assert query.drain() == texts(*range(10, 16))


def test_a_topic_that_is_made_again_under_a_range_that_ends_in_damage(model: Model) -> None:
    """What is known of the queue lies before the second part of the range then."""
    send(model, 0, 10)
    model.brokers["a"].topics["t"][0].records[9] = None
    query = Query(**EARLIEST, failOnDataLoss=False, minPartitions=2)
    query.plan()
    model.delete("t")
    model.create("t")
    send(model, 10, 21)
    assert query.batch() == []
    assert query.drain() == texts(*range(10, 21))


def test_a_tail_that_the_broker_lost_is_not_read_twice(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    send(model, 0, 5)
    query = Query(**EARLIEST)
    query.drain()
    queue = model.brokers["a"].topics["t"][0]
    model.brokers["a"].log_offset -= sum(len(record or b"") for record in queue.records[3:])
    del queue.records[3:]
    send(model, 10, 14)
    with pytest.raises(DataLost, match="or the broker lost messages"):
        query.drain()
    query.start(failOnDataLoss=False)
    assert query.drain() == texts(10, 11, 12, 13)
    assert "the message at offset 4 is another one now" in caplog.text


def test_messages_that_expire_before_they_are_read(model: Model) -> None:
    send(model, 0, 5)
    query = Query(**EARLIEST, maxOffsetsPerTrigger=2)
    assert query.batch() == texts(0, 1)
    model.brokers["a"].topics["t"][0].expire(3)
    with pytest.raises(DataLost, match="the messages from offset 2 to before 3 were deleted before they were read"):
        query.batch()
    query.start(failOnDataLoss=False)
    assert query.drain() == texts(3, 4)


def test_messages_that_expire_between_plan_and_read(model: Model) -> None:
    send(model, 0, 5)
    query = Query(**EARLIEST)
    query.plan()
    model.brokers["a"].topics["t"][0].expire(3)
    with pytest.raises(DataLost, match="offset 0 is to be read, but the queue holds 3 to 5"):
        query.read()
    query.start(failOnDataLoss=False)
    assert [row[2] for row in query.read()] == [3, 4]


def test_everything_that_was_read_may_expire(model: Model) -> None:
    send(model, 0, 5)
    query = Query(**EARLIEST)
    query.drain()
    model.brokers["a"].topics["t"][0].expire(5)
    send(model, 5, 7)
    assert query.drain() == texts(5, 6)


@pytest.mark.parametrize("damaged", [0, 4, 9, range(2, 9)])
def test_a_gap_is_a_loss(model: Model, damaged: int | range, caplog: pytest.LogCaptureFixture) -> None:
    send(model, 0, 10)
    gone = [damaged] if isinstance(damaged, int) else list(damaged)
    for offset in gone:
        model.brokers["a"].topics["t"][0].records[offset] = None
    query = Query(**EARLIEST, pullBatchSize=3)
    with pytest.raises(
        DataLost, match=rf"{len(gone)} of the messages from offset {gone[0]} to {gone[-1]} are not there"
    ):
        query.drain()
    query.start(failOnDataLoss=False)
    assert query.drain() == texts(*(number for number in range(10) if number not in gone))
    assert f"{len(gone)} of the messages from offset {gone[0]} to {gone[-1]} are not there" in caplog.text


def test_a_compacted_topic_has_gaps(model: Model) -> None:
    send(model, 0, 5)
    model.attributes = {"cleanup.policy": "COMPACTION"}
    model.brokers["a"].topics["t"][0].records[2] = None
    assert Query(**EARLIEST).drain() == texts(0, 1, 3, 4)


def test_what_a_filter_leaves_out_is_no_gap(model: Model) -> None:
    send(model, 0, 3, TAGS="red")
    send(model, 3, 6, TAGS="blue")
    model.brokers["a"].topics["t"][0].records[4] = None
    assert Query(**EARLIEST, tags="red").drain() == texts(0, 1, 2)


# What is away, and what is gone.


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Model:
    model = install(monkeypatch, Model("a", "b"))
    model.create("t")
    return model


def test_a_topic_of_a_pattern_that_is_deleted_with_unread_messages(model: Model) -> None:
    model.create("t2")
    send(model, 0, 5)
    query = Query(subscribePattern="t.*", startingOffsets="earliest", maxOffsetsPerTrigger=2)
    assert query.batch() == texts(0, 1)
    model.delete("t")
    with pytest.raises(DataLost, match=r"queue 0 of topic t at broker a: .*deleted.*not read.*failOnDataLoss=false"):
        query.batch()
    query.start()  # of a topic that it never saw nobody knows what was in it
    with pytest.raises(DataLost, match="queue 0 of topic t at broker a"):
        query.batch()
    query.start(failOnDataLoss=False)
    model.send("t2", "x")
    assert query.drain() == [b"x"]


def test_a_topic_of_a_pattern_that_is_deleted_after_it_was_read(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    model.create("t2")
    send(model, 0, 5)
    query = Query(subscribePattern="t.*", startingOffsets="earliest")
    query.drain()
    model.delete("t")
    model.send("t2", "x")
    assert query.drain() == [b"x"]
    assert "queue 0 of topic t at broker a: it was deleted after it was read up to offset 5" in caplog.text
    model.create("t")
    send(model, 10, 16)
    with pytest.raises(DataLost, match="made again"):
        query.drain()


def test_a_topic_that_comes_back_while_it_is_waited_for(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    model.create("t2")
    send(model, 0, 5)
    query = Query(subscribePattern="t.*", startingOffsets="earliest", maxOffsetsPerTrigger=2, timeout="60s")
    assert query.batch() == texts(0, 1)
    queues = model.brokers["a"].topics.pop("t")
    monkeypatch.setattr(time, "sleep", lambda _: model.brokers["a"].topics.update(t=queues))
    assert query.batch() == []
    assert query.drain() == texts(2, 3, 4)


def test_queues_that_are_taken_away(model: Model) -> None:
    model.create("t", 2)
    send(model, 0, 4, queue_id=1)
    query = Query(**EARLIEST, maxOffsetsPerTrigger=2)
    assert query.batch() == texts(0, 1)
    model.brokers["a"].topics["t"].pop()
    with pytest.raises(DataLost, match=r"queue 1 of topic t at broker a: .*deleted"):
        query.batch()


def test_a_broker_that_is_away_is_no_loss(two: Model) -> None:
    query = Query(subscribePattern="t.*", startingOffsets="earliest", maxOffsetsPerTrigger=4)
    send(two, 0, 4)
    send(two, 10, 14, broker="b")
    assert sorted(query.batch()) == texts(0, 1, 10, 11)
    two.brokers["b"].is_up = False
    assert query.batch() == texts(2, 3)
    two.brokers["b"].is_up = True
    assert query.batch() == texts(12, 13)


@pytest.mark.parametrize("named", [{"subscribe": "t,u"}, {"assign": '{"t":{"a":[0]},"u":{"b":[0]}}'}])
def test_a_topic_whose_only_broker_is_away_holds_up_no_other(two: Model, named: dict[str, str]) -> None:
    """With `subscribe` and `assign` the query waited for it, and ended."""
    two.create("u")
    del two.brokers["b"].topics["t"], two.brokers["a"].topics["u"]
    query = Query(**named, startingOffsets="earliest", maxOffsetsPerTrigger=2)
    send(two, 0, 3)
    two.send("u", *texts(10, 11, 12), broker="b")
    query.batch()
    two.brokers["b"].is_up = False
    assert query.drain() == texts(1, 2)
    two.brokers["a"].is_up = False
    with pytest.raises(NotReachable, match="topic t, u: none of its brokers is there"):
        query.drain()
    two.brokers["a"].is_up = two.brokers["b"].is_up = True
    assert query.drain() == texts(11, 12)
    two.delete("u")
    two.send("t", "x")
    assert query.drain() == [b"x"]  # of the other nothing is lost
    two.create("u")
    two.send("u", *texts(20, 21, 22, 23), broker="b")
    with pytest.raises(DataLost, match=r"queue 0 of topic u at broker b: .*the topic was deleted and made again"):
        query.drain()


def test_a_slave_that_is_behind_is_waited_for(model: Model) -> None:
    broker = model.brokers["a"]
    send(model, 0, 3)
    behind = ModelQueue()
    behind.records = list(broker.topics["t"][0].records)
    broker.slave = {"t": [behind]}
    send(model, 3, 6)
    query = Query(**EARLIEST, failOnDataLoss=False)
    query.plan()
    broker.is_up = False
    with pytest.raises(NotReachable, match="offset 3 is to be read, but its slave has only those up to 3"):
        query.read()
    broker.is_up = True
    assert query.batch() == texts(0, 1, 2, 3, 4, 5)
    broker.is_up = False
    assert query.drain() == []  # it ends before the stream is at: it is late, and nothing is lost
    broker.is_up = True
    send(model, 6, 7)
    assert query.drain() == texts(6)


def test_what_was_deleted_since_a_batch_was_planned(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    send(model, 0, 3)
    query = Query(**EARLIEST)
    query.plan()
    model.delete("t")
    with pytest.raises(DataLost, match="topic or queue were deleted"):
        query.read()
    query.start(failOnDataLoss=False)
    assert query.read() == []
    assert "offsets 0 to 2 are left out" in caplog.text


def test_a_stream_does_not_begin_where_there_is_no_topic(model: Model) -> None:
    query = Query(subscribe="nothing")
    with pytest.raises(RouteNotFound, match="topic 'nothing' does not exist"):
        query.plan()
    assert not query.planned


# What a pattern means.


def test_a_pattern_leaves_out_what_nobody_sent(model: Model) -> None:
    own = (
        "TBW102 SCHEDULE_TOPIC_XXXX RMQ_SYS_TRANS_HALF_TOPIC RMQ_SYS_TRANS_OP_HALF_TOPIC TRANS_CHECK_MAX_TIME_TOPIC "
        "SELF_TEST_TOPIC OFFSET_MOVED_EVENT BenchmarkTest rmq_sys_wheel_timer rmq_sys_REVIVE_LOG_model %RETRY%g %DLQ%g "
        "model model_REPLY_TOPIC a skylark_spark_ledger SKYLARK_REDRIVEN"
    )
    for topic in (*own.split(), "orders_REPLY_TOPIC"):
        model.create(topic)
        model.send(topic, topic)
    send(model, 0, 1)
    assert sorted(Query(subscribePattern=".*", startingOffsets="earliest").drain()) == [b"0", b"orders_REPLY_TOPIC"]
    assert Query(subscribe="%DLQ%g", startingOffsets="earliest").drain() == [b"%DLQ%g"]


# Groups.


def test_a_reset_of_the_group_is_for_consumers(model: Model) -> None:
    send(model, 0, 5)
    model.resets = {("readers", "t", 0): 0, (GROUP, "t", 0): 4}
    query = Query(**EARLIEST, group="readers", failOnDataLoss=False)
    assert query.drain() == texts(0, 1, 2, 3, 4)
    assert {group for group, _, _ in model.pulls} == {GROUP}
    assert ("readers", "t", 0) in model.resets


def test_a_broker_that_makes_no_groups_says_what_to_create(model: Model) -> None:
    send(model, 0, 5)
    model.may_create_groups = False
    with pytest.raises(BrokerError, match=rf"reads as group {GROUP}, .*: create it at every broker .*updateSubGroup"):
        Query(**EARLIEST).drain()


def test_commits_hold_up_no_batch_and_no_other_broker(two: Model) -> None:
    query = Query(**EARLIEST, group="readers")
    for first in (0, 2):
        send(two, first, first + 2)
        send(two, first, first + 2, broker="b")
        assert len(query.drain()) == 4
    two.brokers["b"].is_up = False
    two.create("gone")
    send(two, 4, 5)
    assert query.batch() == texts(4)
    query.stop()
    key = ("readers", "t", 0)
    assert two.brokers["a"].committed[key] == 4
    two.brokers["b"].is_up = True
    query.start()
    send(two, 5, 6)
    query.drain()
    wait_until(lambda: two.brokers["b"].committed.get(key) == 4)
    query.stop()


def test_a_broker_that_does_not_answer_takes_no_commit_from_others(two: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_offsets = Cluster.commit_offsets

    def silent(self: Cluster, group: str, offsets: Offsets) -> None:
        if any(queue.broker == "a" for queue in offsets):
            raise NotReachable("no answer from a")
        commit_offsets(self, group, offsets)

    monkeypatch.setattr(Cluster, "commit_offsets", silent)
    ends = {A0: 4, Queue("t", "b", 0): 7}
    with Cluster(NAME_SERVER, 1.0) as cluster:
        assert commit(cluster, "readers", ends) == {Queue("t", "b", 0): 7}
        with pytest.raises(NotReachable, match="no answer from a"):
            commit(cluster, "readers", {A0: 4})


def test_commits_are_made_beside_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    monkeypatch.setattr(commits, "commit", lambda *given: threads.append(threading.current_thread()) or {})
    waiting = commits.Commits(NAME_SERVER, "readers")
    waiting.reach({A0: 1})
    waiting.close()
    assert threads
    assert threading.current_thread() not in threads


def test_a_group_that_nobody_used_yet(model: Model) -> None:
    model.groups = set()
    query = Query(**EARLIEST, group="readers")
    for number in range(3):
        send(model, number, number + 1)
        assert query.drain() == texts(number)
    query.stop()
    assert model.brokers["a"].committed["readers", "t", 0] == 2


# How much a pull asks for.


def test_a_large_message_slows_only_itself_down(model: Model) -> None:
    model.most_count, model.most_bytes = 1000, 64 << 10
    model.send("t", "x" * (1 << 20))
    send(model, 0, 8000)
    query = Query(**EARLIEST, pullBatchSize=256)
    query.plan()
    model.pulls.clear()
    assert len(query.read()) == 8001
    assert len(model.pulls) < 80


@pytest.mark.parametrize("most", [1, 7, 32, 100])
def test_answers_that_are_shorter_than_was_asked_for(model: Model, most: int) -> None:
    model.most_count = most
    send(model, 0, 3000)
    query = Query(**EARLIEST, pullBatchSize=512)
    query.plan()
    model.pulls.clear()
    assert [row[2] for row in query.read()] == list(range(3000))
    assert len(model.pulls) < 1.2 * (3000 / most) + 40


def test_a_pace_slows_down_and_recovers() -> None:
    pace = Pace(512)

    def asks(limit: int, times: int) -> None:
        for _ in range(times):
            asked = pace.next(10_000)
            pace.took(asked, min(asked, limit))

    asks(1, 1)
    assert pace.count == 128
    asks(512, 4)
    assert pace.count == 512
    asks(32, 3)
    assert pace.count == 32
    asks(32, 1000)
    assert pace.count == 32
    asks(512, 200)
    assert pace.count == 512
