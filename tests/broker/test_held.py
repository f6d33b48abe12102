"""Tables of progress and the log: never ahead of it on disk, and never far behind it."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Protocol, cast

import pytest

from broker.followers import Levels, Undecided, bodies_in, open_store
from broker.live import live_broker
from broker.pop_broker import GROUP, START_MS, TOPIC, PopBroker, bodies
from skylark.broker.app import Broker
from skylark.broker.config import BrokerConfig
from skylark.broker.delay import Delayed
from skylark.broker.halves import GROUP as HALVES_GROUP
from skylark.broker.halves import Fate, store_again
from skylark.broker.held import HeldTable
from skylark.broker.offsets import UNKNOWN, Offsets
from skylark.broker.orders import Orders
from skylark.broker.put import Put
from skylark.broker.stats import Stats
from skylark.broker.topics import HALF_TOPIC, SCHEDULE_TOPIC
from skylark.net.connection import Connection
from skylark.store import Store, StoreConfig
from skylark.store.tables import DelayOffsetTable, load
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from skylark.wire.message import Message
from skylark.wire.pop import FROM_MIN, REVIVE_GROUP, PopMessage, revive_topic
from skylark.wire.records import decode_records
from skylark.wire.tables import SubscriptionGroupConfig, TopicConfig
from skylark.wire.typed import encode_header

ROUNDS, EACH = 12, 5
REVIVE_TOPIC = revive_topic("DefaultCluster")


class Load(Protocol):
    """A steady load of one kind, of which one table knows how far it has come."""

    store: Store

    def step(self) -> None:
        """One more message is done with."""

    def save(self) -> None:
        """What happens every `flushConsumerOffsetInterval`."""

    def saved(self, root: Path) -> int:
        """How many messages are done with, as a broker that starts in this directory sees it."""


class DelayedLoad(Levels):
    def step(self) -> None:
        self.send(b"x")
        self.handled()

    def save(self) -> None:
        self.delayed.save(START_MS)

    def saved(self, root: Path) -> int:
        table = load(root / "delayOffset.json", DelayOffsetTable)
        return 0 if table is None else table.offset_table.get(1, 0)


class HalvesLoad(Undecided):
    def step(self) -> None:
        self.send(b"x")
        self.halves.settle(self.halves.end_offset - 1, Fate.ROLLED_BACK, START_MS)
        self.halves.pass_ended(self.halves.end_offset)

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.held = HeldTable(self.store, self.offsets.write)

    def save(self) -> None:
        self.halves.save()
        self.held.save(self.offsets.capture)

    def saved(self, root: Path) -> int:
        return max(0, Offsets(root / "config").query(HALVES_GROUP, HALF_TOPIC, 0))


class PopLoad:
    def __init__(self, root: Path) -> None:
        self.broker = PopBroker(root, revive_queue_num=1)
        self.store = self.broker.store

    def step(self) -> None:
        self.broker.send("x")
        (taken,) = self.broker.pop()
        self.broker.ack(taken)
        self.broker.passes(65_000)

    def save(self) -> None:
        self.broker.popping.save(self.broker.now_ms)

    def saved(self, root: Path) -> int:
        return max(0, Offsets(root / "config").query(GROUP, TOPIC, 0))


class RevivalLoad(PopLoad):
    def saved(self, root: Path) -> int:
        """Of each message there are two records in the revive queue."""
        return (Offsets(root / "config").query(REVIVE_GROUP, REVIVE_TOPIC, 0) + 1) // 2


class OrderLoad(PopLoad):
    def step(self) -> None:
        self.broker.send("x")
        (taken,) = self.broker.pop(order=True)
        assert self.broker.ack(taken).code == 0

    def saved(self, root: Path) -> int:
        info = Orders(root / "config").get(TOPIC, GROUP, 0)
        return 0 if info is None else info.next_offset()


@pytest.mark.parametrize("load_of", [DelayedLoad, HalvesLoad, PopLoad, RevivalLoad, OrderLoad])
def test_a_kill_repeats_what_came_since_the_last_saves_and_no_more(
    tmp_path: Path, load_of: Callable[[Path], Load]
) -> None:
    """The log is flushed between two saves, but something is appended right before each: it never is all on disk."""
    running = load_of(tmp_path / "store")
    for done in range(ROUNDS):
        for _ in range(EACH):
            running.step()
        running.store.flush()
        running.step()
        running.save()
        killed = tmp_path / f"killed{done}"
        shutil.copytree(tmp_path / "store", killed)
        count = (done + 1) * (EACH + 1)
        assert count - 2 * (EACH + 1) <= running.saved(killed) <= count - 1, "one save may wait for its flush"
    running.store.close()


def test_no_offset_is_on_disk_before_the_check_point_that_it_stands_behind(tmp_path: Path) -> None:
    broker = PopBroker(tmp_path)
    broker.send("a", "b", "c", "d", "e")
    broker.save()
    assert len(broker.pop()) == 5
    broker.popping.save(broker.now_ms)
    assert Offsets(tmp_path / "config").query(GROUP, TOPIC, 0) == UNKNOWN, "a power cut now: they are popped again"
    broker.send("f")
    broker.store.flush()
    broker.popping.held.write()
    assert Offsets(tmp_path / "config").query(GROUP, TOPIC, 0) == 5
    broker.store.close()


def test_what_is_held_is_what_was_captured(tmp_path: Path) -> None:
    broker = PopBroker(tmp_path)
    broker.send("a", "b", "c")
    (a,) = broker.pop(order=True, max_msg_nums=1)
    broker.popping.save(broker.now_ms)
    broker.store.flush()
    broker.extend(a, 90_000)
    broker.ack(a)
    broker.popping.held.write()
    info = Orders(tmp_path / "config").get(TOPIC, GROUP, 0)
    assert info is not None
    assert (info.committed, info.visible_at) == (0, None)
    assert Offsets(tmp_path / "config").query(GROUP, TOPIC, 0) == 0
    broker.store.close()


def test_a_table_that_can_not_be_written_stays_held(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    written: list[str] = []
    broken = [OSError("the disk is full"), OSError("still")]

    def write(table: str) -> None:
        if broken:
            raise broken.pop()
        written.append(table)

    held: HeldTable[str] = HeldTable(store, write)
    with pytest.raises(OSError, match="still"):
        held.save(lambda: "first")
    with pytest.raises(OSError, match="full"):
        held.write()
    held.save(lambda: None)
    held.write()
    assert written == ["first"]
    store.close()


class Threaded:
    """A table that a thread writes when the test lets it."""

    def __init__(self, store: Store) -> None:
        self.may_write = threading.Event()
        self.failures: list[Exception] = []
        self.threads: list[int] = []
        self.tables: list[str] = []
        self.told: list[str] = []
        self.held: HeldTable[str] = HeldTable(store, self.write, self.told.append)
        self.held.write_in_background()

    def write(self, table: str) -> None:
        assert self.may_write.wait(60)
        self.threads.append(threading.get_ident())
        if self.failures:
            raise self.failures.pop()
        self.tables.append(table)

    async def ended(self) -> None:
        """Returns when no thread writes."""
        self.may_write.set()
        await self.held.write_at_once()
        self.held.write_in_background()


def test_a_thread_writes_one_table_after_the_other(tmp_path: Path) -> None:
    async def run() -> None:
        store = open_store(tmp_path)
        table = Threaded(store)
        table.held.save(lambda: "first")
        for _ in range(3):
            table.held.write()
            table.held.save(lambda: "too early")
        assert not table.told
        await table.ended()
        table.held.save(lambda: "second")
        await table.ended()
        assert table.tables == table.told == ["first", "second"]
        assert threading.get_ident() not in table.threads
        store.close()

    asyncio.run(run())


def test_a_table_that_a_thread_can_not_write_stays_held(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        store = open_store(tmp_path)
        table = Threaded(store)
        table.failures = [ValueError("a defect"), OSError("the disk is full")]
        for reason in ("full", "defect"):
            table.held.save(lambda: "first")
            await table.ended()
            assert reason in caplog.text
            assert not table.told
        table.held.save(lambda: "newer")
        await table.ended()
        assert table.told == ["first"]
        store.close()

    asyncio.run(run())


def test_who_stops_waits_for_the_thread_and_writes_the_rest_itself(tmp_path: Path) -> None:
    async def run() -> None:
        store = open_store(tmp_path)
        table = Threaded(store)
        table.held.save(lambda: "first")
        stopping = asyncio.create_task(table.held.write_at_once())
        await asyncio.sleep(0)
        assert not stopping.done()
        table.may_write.set()
        await stopping
        assert table.told == ["first"]
        table.held.save(lambda: "last")
        assert table.told == ["first", "last"]
        assert table.threads[1] == threading.get_ident()
        store.close()

    asyncio.run(run())


def test_offsets_ahead_of_their_queue_go_to_its_end(tmp_path: Path) -> None:
    offsets = Offsets(tmp_path)
    for queue_id, offset in enumerate((3, 5, 9)):
        offsets.commit("g", "t", queue_id, offset, "test")
    offsets.keep_within(lambda topic, queue_id: 5 if queue_id < 2 else 0)
    assert dict(offsets.of("g", "t")) == {0: 3, 1: 5, 2: 0}


def test_after_an_unclean_stop_no_group_is_ahead_of_the_log(tmp_path: Path) -> None:
    async def run() -> None:
        query: dict[str, object] = {"consumerGroup": "g", "topic": "t", "queueId": 0}
        async with live_broker(tmp_path) as broker:
            await broker.heartbeat("g", "t")
            await broker.send("t")
            await broker.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commitOffset=1, **query)
        table = Offsets(tmp_path / "config")
        table.commit("g", "t", 0, 9, "a table from before a power cut")
        table.save()
        (tmp_path / "abort").touch()
        async with live_broker(tmp_path) as broker:
            answer = await broker.ask(RequestCode.QUERY_CONSUMER_OFFSET, **query)
            assert answer.fields["offset"] == "1"

    asyncio.run(run())


@pytest.mark.parametrize("ahead", [0, 1, 7])
@pytest.mark.parametrize("kept", [0, 3])
def test_a_revive_queue_that_is_shorter_than_its_table_says_loses_no_check_point(
    tmp_path: Path, ahead: int, kept: int
) -> None:
    broker = PopBroker(tmp_path, revive_queue_num=1)
    for body in "abc"[:kept]:
        broker.send(body)
        broker.pop()
    broker.passes(65_000)
    end = broker.store.max_offset(REVIVE_TOPIC, 0)
    assert end == kept
    broker.offsets.commit(REVIVE_GROUP, REVIVE_TOPIC, 0, end + ahead, "a table from before the cut")
    broker.offsets.save()
    broker.store.close()
    again = PopBroker(tmp_path, broker.now_ms, revive_queue_num=1)
    before = len(bodies_in(again.store, f"%RETRY%{GROUP}_{TOPIC}"))
    again.send("d")
    again.pop(queue_id=0)
    again.passes(65_000)
    assert b"d" in bodies_in(again.store, f"%RETRY%{GROUP}_{TOPIC}")[before:]
    assert again.offsets.query(REVIVE_GROUP, REVIVE_TOPIC, 0) == again.store.max_offset(REVIVE_TOPIC, 0) - 1
    again.store.close()


def test_a_client_that_commits_for_the_revive_group_changes_nothing(tmp_path: Path) -> None:
    broker = PopBroker(tmp_path, revive_queue_num=1)
    broker.send("a")
    broker.pop()
    broker.passes(65_000)
    broker.offsets.commit(REVIVE_GROUP, REVIVE_TOPIC, 0, 1_000, "a client")
    broker.save()
    assert Offsets(tmp_path / "config").query(REVIVE_GROUP, REVIVE_TOPIC, 0) == 0
    broker.send("b")
    broker.pop(queue_id=0)
    broker.passes(65_000)
    assert sorted(bodies(broker.pop())) == ["a", "b"]
    broker.store.close()


def test_a_delay_level_without_an_entry_begins_where_its_queue_does(tmp_path: Path) -> None:
    config = StoreConfig(
        root=tmp_path, segment_bytes=4096, queue_entries_per_file=8, index_slots=100, index_entries=400
    )
    store = Store.open(config)
    put = Put(store, BrokerConfig(), Stats("c", START_MS))
    path = tmp_path / "delayOffset.json"
    delayed = Delayed(store, put, BrokerConfig().message_delay_level, path)
    for number in range(60):
        put.one(Message("t", 0, b"%d" % number, {"DELAY": "1"}), START_MS)
    four = int(datetime(2026, 3, 1, 4, 30).timestamp() * 1000)
    store.flush()
    for segment in sorted((tmp_path / "commitlog").iterdir())[:2]:
        os.utime(segment, (1, 1))
    store.clean(four)
    low = store.min_offset(SCHEDULE_TOPIC, 0)
    assert low > 0, "else this shows nothing"
    for _ in range(2):
        while delayed.deliver(four) == 0:
            pass
        assert bodies_in(store, "t") == [b"%d" % number for number in range(low, 60)]
        delayed.table.offset_table.clear()  # as in a table that has no entry; also at the start
        delayed.table.offset_table.update(
            Delayed(store, put, BrokerConfig().message_delay_level, path).table.offset_table
        )
        assert delayed.table.offset_table == {1: low}
        delayed.table.offset_table[1] = 60
    store.close()


def test_a_check_point_behind_a_gap_of_the_log_does_not_pass_over_what_lies_before(tmp_path: Path) -> None:
    broker = PopBroker(tmp_path / "running")
    broker.send("a", "b", "c")
    broker.save()
    (a,) = broker.pop(max_msg_nums=1)
    assert bodies(broker.pop(max_msg_nums=1)) == ["b"]
    lost = broker.store.entry("rmq_sys_wheel_timer", 0, 0)
    assert lost is not None
    shutil.copytree(tmp_path / "running", tmp_path / "cut")
    broker.store.close()
    with (tmp_path / "cut" / "commitlog" / f"{0:020}").open("r+b") as file:
        file.seek(lost.log_offset)
        file.write(bytes(lost.size_bytes))
    again = PopBroker(tmp_path / "cut", broker.now_ms)
    assert a.body in bodies(again.pop())
    again.store.close()


def _built(root: Path) -> Broker:
    """A broker that has come up to where it would serve."""
    config = BrokerConfig(store_path_root_dir=str(root), broker_ip1="127.0.0.1", mapped_file_size_commit_log=1 << 20)
    broker = Broker(config, clock=lambda: START_MS)
    broker._build(10911)
    return broker


class _Peer:
    peer = ("127.0.0.1", 40_000)


def _take_one(broker: Broker) -> list[bytes]:
    header = PopMessage(GROUP, TOPIC, -1, 1, 60_000, 0, 0, FROM_MIN)
    request = Frame(RequestCode.POP_MESSAGE, encode_header(header))
    answer = broker._handlers()[request.code](request, cast(Connection, _Peer()))
    assert isinstance(answer, Frame)
    return [message.body for message in decode_records(answer.body)]


def test_a_kill_after_a_power_cut_does_not_forget_the_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint passes it, and the check points behind it prove as little as before."""
    for module in ("timers", "timerwheel"):
        monkeypatch.setattr(f"skylark.store.{module}.SLOTS", 1_200)
    monkeypatch.setattr("skylark.store.timerwheel.FILE_BYTES", 1_200 * 32)

    async def live() -> None:
        first = _built(tmp_path / "first")
        first._topics.put(TopicConfig(TOPIC, 1, 1))
        first._groups.put(SubscriptionGroupConfig(group_name=GROUP))
        for body in (b"a", b"b", b"c"):
            first._put.one(Message(TOPIC, 0, body, {}), START_MS)
        first._store.flush()
        first._save_tables()
        flushed = (tmp_path / "first" / "checkpoint").read_bytes()
        assert [_take_one(first), _take_one(first)] == [[b"a"], [b"b"]]
        lost = first._store.entry("rmq_sys_wheel_timer", 0, 0)
        assert lost is not None
        shutil.copytree(tmp_path / "first", tmp_path / "cut")
        (tmp_path / "cut" / "checkpoint").write_bytes(flushed)  # the thread that flushes may have been here since
        with (tmp_path / "cut" / "commitlog" / f"{0:020}").open("r+b") as file:
            file.seek(lost.log_offset)
            file.write(bytes(lost.size_bytes))
        second = _built(tmp_path / "cut")
        second._store.flush()  # as its thread does every second
        shutil.copytree(tmp_path / "cut", tmp_path / "killed")
        third = _built(tmp_path / "killed")
        assert _take_one(third) == [b"a"]
        for broker in (first, second, third):
            broker._store.close()
            broker._timers.close()

    asyncio.run(live())


def test_a_copy_of_a_half_that_is_not_whole_does_not_stand_for_it(tmp_path: Path) -> None:
    """The index leads there if it was lost, and made again from a log that was closed properly since."""
    undecided = Undecided(tmp_path / "running")
    undecided.send(b"x")
    undecided.store.flush()
    half = undecided.halves.at(0)
    assert half is not None
    copy = store_again(undecided.put, half, half.properties | {"TRANSACTION_CHECK_TIMES": "1"}, HALF_TOPIC, START_MS)
    assert copy is not None
    undecided.send(b"lost")
    lost = undecided.halves.at(2)
    assert lost is not None
    undecided.send(b"behind")
    shutil.copytree(tmp_path / "running", tmp_path / "cut")
    undecided.store.close()
    with (tmp_path / "cut" / "commitlog" / f"{0:020}").open("r+b") as file:
        file.seek(copy.log_end_offset - 20)
        file.write(bytes(20 + lost.size_bytes))
    after_the_cut = Undecided(tmp_path / "cut")
    assert len(after_the_cut.store.query(HALF_TOPIC, "x", 9, 0, 1 << 60).slices) == 1
    after_the_cut.store.close()
    shutil.rmtree(tmp_path / "cut" / "index")
    again = Undecided(tmp_path / "cut")
    assert [record[-20:] for record in again.store.query(HALF_TOPIC, "x", 9, 0, 1 << 60).slices][1:] == [bytes(20)]
    assert again.handled() == [b"x", b"behind"]
    again.store.close()
