"""What all clients divide among themselves: who takes all it can leaves room for those who come later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.live import BRINGS_SUBSCRIPTION, DEADLINE_S, MAY_SUSPEND, Live, live_broker, messages_of
from broker.test_clients import Bench, FakeConnection, consumer
from skylark.broker import clients as clients_module
from skylark.broker import filterdata, groups, locks, waiting_filters
from skylark.broker.config import BrokerConfig
from skylark.broker.filterdata import FilterTable
from skylark.broker.filters import Filter, message_filter
from skylark.broker.locks import MAX_LIVE_MS, Locks
from skylark.broker.shares import Shares
from skylark.broker.waiting_filters import WaitingFilters
from skylark.net.connection import Connection, RequestFailed
from skylark.wire.bodies import (
    ConsumerData,
    Heartbeat,
    LockedQueues,
    LockRequest,
    MessageQueue,
    Subscription,
    decode_body,
    encode_body,
)
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame

GREEDY, MODEST = "10.0.0.1", "10.0.0.2"


def test_the_addresses_that_a_host_of_ipv6_can_have_share_one_part() -> None:
    shares = Shares()
    for number in range(8):
        host = f"2001:db8:1:2::{number}"
        assert shares.has_room(host, 1, 100 - number - 1)
        shares.add(host, 1)
    assert shares.held("2001:db8:1:2:ffff::1") == 8
    assert (shares.held("2001:db8:1:3::1"), shares.held("10.0.0.1")) == (0, 0)
    for number in range(8):
        shares.add(f"2001:db8:1:2:9::{number}", -1)
    assert shares._held == {}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), max_size=60))
def test_whoever_takes_all_it_can_leaves_as_much(takes: list[tuple[str, int]]) -> None:
    shares, used, limit = Shares(), 0, 1_000
    for host, more in takes:
        if shares.has_room(host, more, limit - used - more):
            shares.add(host, more)
            used += more
            assert shares.held(host) <= limit - used
    assert used == sum(shares.held(host) for host in "abc")
    for newcomer in "de":
        assert shares.has_room(newcomer, 1, limit - used - 1)
        assert shares.has_room("", limit - used, 0)


def test_what_is_given_back_is_free_and_what_does_not_grow_is_kept() -> None:
    shares = Shares()
    shares.add("a", 50)
    assert not shares.has_room("a", 1, 49)
    assert shares.has_room("a", 0, -10)
    shares.add("a", -50)
    assert shares.has_room("a", 50, 50)


class TestLocks:
    queues = tuple(MessageQueue("broker", number, "T") for number in range(100))

    def test_of_one_host_leave_room_for_others(self) -> None:
        table = Locks(max_size_bytes=10_000)
        taken = table.lock_batch("greedy", "a", self.queues, 0, GREEDY)
        assert 15 < len(taken) < 20
        assert table.lock_batch("modest", "b", self.queues[:3], 1, MODEST) == set(self.queues[:3])
        assert table.lock_batch("greedy", "a", self.queues, MAX_LIVE_MS, GREEDY) == taken
        table.release("greedy", "a")
        assert table.lock_batch("greedy", "a", self.queues[:5], MAX_LIVE_MS, GREEDY) == set(self.queues[:5])

    def test_that_somebody_else_takes_over_count_for_its_host(self) -> None:
        table = Locks(max_size_bytes=10_000)
        taken = table.lock_batch("g", "a", self.queues, 0, GREEDY)
        now_ms = MAX_LIVE_MS + 1
        assert table.lock_batch("g", "b", taken, now_ms, MODEST) == taken
        assert len(table.lock_batch("h", "a", self.queues, now_ms, GREEDY)) > 5
        table.release("g", "b")
        table.release("h", "a")
        assert table.size_bytes == 0

    def test_who_gets_none_is_told_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        table = Locks(max_size_bytes=600)
        serve = locks.handlers(table, lambda: 5)

        def ask(client: str, *queues: MessageQueue) -> Frame:
            body = encode_body(LockRequest(client_id=client, consumer_group="g", mq_set=list(queues)))
            answer = serve[RequestCode.LOCK_BATCH_MQ](Frame(0, body=body), FakeConnection(client).as_connection)
            assert isinstance(answer, Frame)
            return answer

        some = ask("a", *self.queues[:2])
        assert decode_body(LockedQueues, some.body).lock_ok_mq_set == [self.queues[0]]
        assert "queue 1 of T can't be locked" in (some.remark or "")
        with pytest.raises(RequestFailed, match="Unlock queues that are not consumed any more"):
            ask("a", self.queues[1])
        assert ask("b", self.queues[0]).body == b'{"lockOKMQSet":[]}'  # somebody else has it


class TestGroups:
    def test_of_one_host_leave_room_for_others(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bench = Bench(tmp_path)
        monkeypatch.setattr(groups, "MAX_AUTO_CREATED_GROUPS", len(bench.groups) + 10)
        greedy, modest = FakeConnection("a", GREEDY), FakeConnection("b", MODEST)
        bench.beat(greedy, *(consumer(f"greedy-{number}") for number in range(20)))
        assert [f"greedy-{number}" in bench.groups for number in range(20)] == [True] * 5 + [False] * 15
        with pytest.raises(RequestFailed, match=r"clients of 10\.0\.0\.1 have created 5 groups.*updateSubGroup"):
            bench.beat(greedy, consumer("greedy-6"))
        with pytest.raises(RequestFailed, match="Delete groups"):
            bench.groups.get("greedy-6", greedy.as_connection)
        bench.beat(modest, consumer("modest"))
        bench.beat(greedy, *(consumer(f"greedy-{number}") for number in range(5)))
        assert bench.clients.member("modest", "b@1") is not None
        assert bench.clients.member("greedy-4", "a@1") is not None

    def test_that_are_deleted_make_room(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bench, greedy = Bench(tmp_path), FakeConnection("a", GREEDY)
        monkeypatch.setattr(groups, "MAX_AUTO_CREATED_GROUPS", len(bench.groups) + 2)
        for name in ("one", "two"):
            assert bench.groups.get(name, greedy.as_connection) is not None
            bench.groups.delete(name)
        assert bench.groups.get("by the broker") is None  # the name
        for name in ("by-itself-1", "by-itself-2"):
            assert bench.groups.get(name) is not None
        assert bench.groups.get("by-itself-3") is None


class TestMembers:
    def test_of_one_host_leave_room_for_others(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(clients_module, "MAX_CHARACTERS", 4_000)
        bench, modest = Bench(tmp_path), FakeConnection("b", MODEST)
        greedy = [FakeConnection(f"a{number}", GREEDY) for number in range(10)]
        for peer in greedy[:3]:
            bench.beat(peer, consumer("g", "t" * 100), producers=("p",))
        for peer in greedy[3:]:
            with pytest.raises(RequestFailed, match="Subscribe to fewer topics"):
                bench.beat(peer, consumer("g", "t" * 100), producers=("p",))
        bench.beat(greedy[0], consumer("g", "t" * 100), producers=("p",))
        assert bench.beat(modest, consumer("h", "t" * 100), producers=("p",))
        assert bench.clients.member("h", "b@1") is not None
        assert len(bench.clients.producers("p")) == 4
        for peer in greedy:
            bench.clients.closed(peer.as_connection)
        bench.clients.unregister(modest.as_connection, "h", "p")
        assert bench.is_empty()
        bench.beat(greedy[0], consumer("g", "t" * 1_000))


def wanting(sql: str, topic: str = "t", version: int = 1) -> Subscription:
    return Subscription(topic=topic, sub_string=sql, expression_type="SQL92", sub_version=version)


class TestExpressions:
    def test_of_one_host_leave_room_for_others(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(filterdata, "MAX_EXPRESSION_BYTES", 2_000)
        table = FilterTable(tmp_path, BrokerConfig(), 0)
        many = [wanting(f"a = {'1' * 9}", f"t{number}") for number in range(20)]
        table.subscribed("greedy", many, 10, GREEDY)
        taken = [each for each in many if table.get(each.topic, "greedy") is not None]
        assert 5 < len(taken) < 8
        assert "take 894 of 2000 bytes" in (table.lack_of_room("greedy", many[-1], GREEDY) or "")
        table.subscribed("modest", [wanting("a = 1")], 20, MODEST)
        assert table.get("t", "modest") is not None
        assert table.lack_of_room("modest", wanting("a = 2"), MODEST) is None

    def test_a_new_one_without_room_leaves_the_old_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(filterdata, "MAX_EXPRESSION_BYTES", 500)
        table = FilterTable(tmp_path, BrokerConfig(), 0)
        table.subscribed("g", [wanting("a = 1")], 10, GREEDY)
        long = wanting(f"a = '{'1' * 200}'", version=2)
        table.subscribed("g", [long], 20, GREEDY)
        kept = table.get("t", "g")
        assert kept is not None
        assert (kept.expression, kept.client_version) == ("a = 1", 1)
        assert table.lack_of_room("g", long, GREEDY) is not None
        table.subscribed("g", [wanting("a = 2", version=3)], 30, GREEDY)
        kept = table.get("t", "g")
        assert kept is not None
        assert (kept.expression, kept.client_version) == ("a = 2", 3)

    def test_a_restart_does_not_make_them_somebody_elses(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(filterdata, "MAX_EXPRESSION_BYTES", 600)
        table = FilterTable(tmp_path, BrokerConfig(), 0)
        many = [wanting("a = 1", f"t{number}") for number in range(3)]
        table.subscribed("g", many, 10, GREEDY)
        table.save()
        again = FilterTable(tmp_path, BrokerConfig(), 20)
        again.subscribed("g", many, 30, GREEDY)
        assert [again.get(each.topic, "g") is not None for each in many] == [True, True, False]
        again.left("g", 40)
        again.clean(10**12)
        again.subscribed("g", many, 50, GREEDY)
        assert [again.get(each.topic, "g") is not None for each in many] == [True, True, False]

    def test_pulls_are_told_of_the_lack_of_room(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(filterdata, "MAX_EXPRESSION_BYTES", 430)

        async def run() -> None:
            async with live_broker(tmp_path, enablePropertyFilter=True) as live:
                await live.send("t", b"1", {"a": "1"})
                await beat(live.ask(RequestCode.HEART_BEAT, heartbeat("greedy", wanting("a = 1", "u"))))
                await beat(live.ask(RequestCode.HEART_BEAT, heartbeat("late", wanting("a = 1"))))
                refused = await live.pull("t", 0, group="late", sysFlag=0, subVersion=1)
                assert refused.code == ResponseCode.FILTER_DATA_NOT_EXIST
                assert "expressions of the clients of 127.0.0.1 take" in (refused.remark or "")
                modest = await dialled(live, "127.0.0.2")
                await beat(modest.request(Frame(RequestCode.HEART_BEAT, body=heartbeat("late", wanting("a = 1"))), 60))
                (found,) = messages_of(await live.pull("t", 0, group="late", sysFlag=0, subVersion=1))
                assert found.body == b"1"
                modest.close()

        asyncio.run(run())


async def beat(answer: Awaitable[Frame]) -> None:
    assert (await answer).code == ResponseCode.SUCCESS


def heartbeat(group: str, *wanted: Subscription) -> bytes:
    data = ConsumerData(group_name=group, subscription_data_set=list(wanted))
    return encode_body(Heartbeat(client_id=f"{group}@1", consumer_data_set=[data]))


async def dialled(live: Live, host: str) -> Connection:
    """A connection from another address of this machine."""
    address, port = live.address.split(":")
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: Connection({}, dialled=True), address, int(port), local_addr=(host, 0)
    )
    return connection


class TestWaitingPulls:
    def test_share_what_they_filter_by(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(waiting_filters, "MAX_CHARACTERS", 100)
        table = WaitingFilters()
        one = message_filter(wanting("a = 1"))
        same = Filter(accepts=one.accepts, text=one.text)
        first, second = table.take(one, GREEDY), table.take(same, MODEST)
        assert second.filter is one
        assert table.characters == 5
        tags = table.take(Filter(wants=frozenset({1, 2})), GREEDY)
        assert table.take(Filter(wants=frozenset({2, 1})), GREEDY) is tags
        assert (len(table), table.characters) == (2, 13)
        long = message_filter(wanting(f"a = '{'1' * 40}'"))
        with pytest.raises(RequestFailed, match=r"those of 10\.0\.0\.1 wait by 13 of 100") as refused:
            table.take(long, GREEDY)
        assert refused.value.code == ResponseCode.SYSTEM_BUSY
        for held in (first, second, tags, tags):
            table.give_back(held)
        assert (len(table), table.characters) == (0, 0)

    def test_that_each_wait_by_another_expression_are_bounded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(waiting_filters, "MAX_CHARACTERS", 40)

        async def run() -> None:
            async with live_broker(tmp_path, enablePropertyFilter=True) as live:
                await live.send("t")

                async def wait_by(version: int) -> Frame:
                    """The group changes its expression, and pulls."""
                    await beat(
                        live.ask(RequestCode.HEART_BEAT, heartbeat("g", wanting(f"a = {version}", version=version)))
                    )
                    return await live.pull(
                        "t", 1, group="g", sysFlag=MAY_SUSPEND, suspendTimeoutMillis=60_000, subVersion=version
                    )

                waiting = [asyncio.create_task(wait_by(1))]
                await until_wait(live, 1)
                for version in range(2, 5):
                    waiting.append(asyncio.create_task(wait_by(version)))
                    await until_wait(live, version)
                refused = await wait_by(5)
                assert refused.code == ResponseCode.SYSTEM_BUSY
                assert "no request can wait by one more filter" in (refused.remark or "")
                for number in range(1, 5):
                    await live.send("t", properties={"a": str(number)})
                for pull in waiting:
                    await asyncio.wait_for(pull, DEADLINE_S)
                again = asyncio.create_task(live.pull("t", 5, tags="b = 1", expressionType="SQL92", wait_ms=60_000))
                await until_wait(live, 1)
                again.cancel()

        asyncio.run(run())

    def test_pops_do_the_same(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(waiting_filters, "MAX_CHARACTERS", 10)

        async def run() -> None:
            async with live_broker(tmp_path) as live:
                await live.send("t")

                def pop(expression: str) -> Awaitable[Frame]:
                    return live.ask(
                        RequestCode.POP_MESSAGE, consumerGroup="g", topic="t", queueId=0, maxMsgNums=1,
                        invisibleTime=60_000, pollTime=60_000, bornTime=0, initMode=1, exp=expression, expType="SQL92",
                    )  # fmt: skip

                first, second, other = [asyncio.ensure_future(pop(sql)) for sql in ("a = 1", "a = 1", "a = 2")]
                refused = await other
                assert refused.code == ResponseCode.SYSTEM_BUSY
                assert "no request can wait by one more filter" in (refused.remark or "")
                for number in (1, 2):
                    await live.send("t", b"%d" % number, {"a": "1"})
                found = [messages_of(answer)[0].body for answer in await asyncio.gather(first, second)]
                assert found == [b"1", b"2"]

        asyncio.run(run())


async def until_wait(live: Live, pulls: int) -> None:
    assert live._broker is not None
    while True:
        if len(live._broker._arrivals) == pulls:
            return
        await asyncio.sleep(0)


def test_a_broker_without_sql_does_not_read_an_expression(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as live:
            await live.send("t")
            answer = await live.pull("t", 0, tags="a ==", expressionType="SQL92", sysFlag=BRINGS_SUBSCRIPTION)
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert answer.remark == "The broker does not support consumer to filter message by SQL92"

    asyncio.run(run())


class TestLongHeartbeats:
    """What comes on a connection while a heartbeat of many groups is taken in."""

    def beat(self, version: int = 1, topic: str = "T", count: int = 200) -> Frame:
        groups = [consumer(f"g{number}", topic, version=version) for number in range(count)]
        return Frame(RequestCode.HEART_BEAT, body=encode_body(Heartbeat(client_id="a", consumer_data_set=groups)))

    def served(self, bench: Bench, *requests: Frame) -> list[Frame]:
        peer = FakeConnection("a").as_connection

        async def run() -> list[Frame]:
            bench.topics.table.writer.write_in_background()
            bench.groups.table.writer.write_in_background()
            answers = [bench.serve[request.code](request, peer) for request in requests]
            return [answer if isinstance(answer, Frame) else await answer for answer in answers]  # type: ignore[misc]

        return asyncio.run(run())

    def test_a_group_that_is_left_meanwhile_stays_left(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path)
        leave = Frame(RequestCode.UNREGISTER_CLIENT, {"clientID": "a", "consumerGroup": "g199"})
        answers = self.served(bench, self.beat(), leave)
        assert [answer.code for answer in answers] == [0, 0]
        assert bench.clients.group("g198") is not None
        assert bench.clients.group("g199") is None

    def test_a_later_heartbeat_counts(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path)
        changed = Heartbeat(client_id="a", consumer_data_set=[consumer("g199", "U", version=2)])
        later = Frame(RequestCode.HEART_BEAT, body=encode_body(changed))
        self.served(bench, self.beat(), later)
        group = bench.clients.group("g199")
        assert group is not None
        assert list(group.subscriptions) == ["U"]

    def test_nothing_is_left_of_them(self, tmp_path: Path) -> None:
        bench, peer = Bench(tmp_path), FakeConnection("a").as_connection

        async def run() -> None:
            tasks = [bench.serve[RequestCode.HEART_BEAT](self.beat(), peer) for _ in range(3)]
            for task in tasks:
                assert isinstance(task, asyncio.Task)
                task.cancel()
            await asyncio.wait(tasks)  # type: ignore[type-var]
            answer = bench.serve[RequestCode.HEART_BEAT](self.beat(count=2), peer)
            assert isinstance(answer, Frame)

        asyncio.run(run())
