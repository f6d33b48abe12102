"""What one client asks for many times at once: neither the event loop nor memory is its own meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, cast

import pytest

from broker.live import Live, live_broker
from broker.small_broker import SmallBroker
from broker.test_clients import Bench, FakeConnection, FakeStore, consumer
from skylark.broker import admin, client_requests, lines, member_news, progress, relays, send
from skylark.broker.arrivals import WOKEN_PER_TURN, Arrivals
from skylark.broker.clients import NEWCOMER_DELAY_S, Clients
from skylark.broker.config import BrokerConfig
from skylark.broker.lines import Lines
from skylark.broker.polling import ANY_QUEUE, PopWaiters
from skylark.broker.questions import Questions
from skylark.broker.turns import ITEMS_PER_TURN, Rota, steps
from skylark.net.connection import Connection, RequestFailed
from skylark.wire.bodies import ConsumerStatus, Heartbeat, MessageQueue, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.fastjson import MAX_LENIENT_BYTES
from skylark.wire.frame import Encoding, Frame

CODE = RequestCode.GET_CONSUME_STATS


def peer(name: str, host: str = "10.0.0.1") -> Connection:
    return FakeConnection(name, host).as_connection


# Requests that take long.


class Held:
    """A handler that does one request after the other only when it is let."""

    def __init__(self, code: int = CODE) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.ends: list[asyncio.Future[None]] = []
        self._lines = Lines()
        self.handler = self._lines.in_line({code: self._handle}, [code])[code]

    async def _handle(self, request: Frame, connection: Connection) -> Frame:
        self.begun.append(repr(connection))
        self.ends.append(asyncio.get_running_loop().create_future())
        await self.ends[-1]
        self.ended.append(repr(connection))
        return request.reply()

    def ask(self, connection: Connection) -> asyncio.Task[Frame]:
        return asyncio.ensure_future(cast(Awaitable[Frame], self.handler(Frame(CODE), connection)))  # type: ignore[arg-type]

    async def end(self) -> None:
        self.ends[-1].set_result(None)
        await turns()

    @property
    def hosts(self) -> int:
        return len(self._lines)


async def turns(count: int = 8) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_long_requests_of_a_host_are_done_one_at_a_time() -> None:
    async def run() -> None:
        held = Held()
        asked = [held.ask(peer("a")), held.ask(peer("b")), held.ask(peer("c"))]
        await turns()
        assert held.begun == ["a"]
        other = held.ask(peer("d", "10.0.0.2"))
        await turns()
        assert held.begun == ["a", "d"]
        held.ends[0].set_result(None)
        asked[1].cancel()  # whoever asked is gone
        await turns()
        assert held.begun == ["a", "d", "c"]
        held.ends[1].set_result(None)
        await held.end()
        assert [task.cancelled() for task in (*asked, other)] == [False, True, False, False]
        assert held.hosts == 0

    asyncio.run(run())


def test_a_host_of_ipv6_has_one_line_for_all_its_addresses() -> None:
    async def run() -> None:
        held = Held()
        asked = [held.ask(peer(name, f"2001:db8:1:2::{name}")) for name in "abc"]
        other = held.ask(peer("d", "2001:db8:1:3::1"))
        await turns()
        assert held.begun == ["a", "d"]
        for end in range(4):
            held.ends[end].set_result(None)
            await turns()
        assert [task.result().code for task in (*asked, other)] == [0, 0, 0, 0]
        assert held.hosts == 0

    asyncio.run(run())


@pytest.mark.parametrize("code", lines.CHANGES)
def test_a_change_that_was_begun_goes_on_in_its_place_when_its_client_is_gone(code: int) -> None:
    async def run() -> None:
        held = Held(code)
        gone = [FakeConnection(name) for name in "ab"]
        asked = [held.ask(connection.as_connection) for connection in gone]
        await turns()
        for connection, task in zip(gone, asked, strict=True):
            connection.is_open = False
            task.cancel()
        last = held.ask(peer("c"))
        await turns()
        assert (held.begun, held.ended) == (["a"], [])
        await held.end()
        assert (held.begun, held.ended) == (["a", "c"], ["a"])
        await held.end()
        assert (last.result().code, held.ended, held.hosts) == (0, ["a", "c"], 0)

    asyncio.run(run())


def test_large_bodies_do_not_wait(tmp_path: Path) -> None:
    large = bytes(MAX_LENIENT_BYTES + 1)

    async def run() -> list[Frame]:
        async with live_broker(tmp_path) as broker:
            await broker.heartbeat("g", "T")
            fields = {"topic": "T", "consumerGroup": "g", "group": "g", "clientId": "client@g"}
            codes = (
                RequestCode.GET_CONSUMER_RUNNING_INFO,
                RequestCode.CONSUME_MESSAGE_DIRECTLY,
                RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS,
                *lines.LONG,
            )
            return [await broker.ask(code, large, encoding=Encoding.JSON, **fields) for code in codes]

    answers = asyncio.run(run())
    assert {answer.code for answer in answers} == {ResponseCode.MESSAGE_ILLEGAL}


def test_a_line_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_IN_LINE", 2)

    async def run() -> None:
        held = Held()
        asked = [held.ask(peer("a")) for _ in range(3)]
        await turns()
        failure = asked[2].exception()
        assert isinstance(failure, RequestFailed)
        assert failure.code == ResponseCode.SYSTEM_BUSY
        assert "2 requests of 10.0.0.1 that take long are not done yet" in failure.remark
        await held.end()
        await held.end()
        assert (asked[0].result().code, asked[1].result().code, held.hosts) == (0, 0, 0)

    asyncio.run(run())


def test_a_broker_gathers_one_answer_for_a_host_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = most = 0
    gather = progress.Progress.consume_stats

    async def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        try:
            return await gather(*args, **kwargs)
        finally:
            at_once -= 1

    monkeypatch.setattr(progress.Progress, "consume_stats", counted)

    async def run() -> list[Frame]:
        async with live_broker(tmp_path) as broker:
            created = await broker.ask(
                RequestCode.UPDATE_AND_CREATE_TOPIC, topic="wide", defaultTopic="TBW102", perm=6, order=False,
                readQueueNums=4 * ITEMS_PER_TURN, writeQueueNums=1, topicFilterType="SINGLE_TAG",
            )  # fmt: skip
            assert created.code == 0
            return await asyncio.gather(
                *(broker.ask(CODE, consumerGroup="g", topic="wide", topicList="wide") for _ in range(8))
            )

    answers = asyncio.run(run())
    assert {(answer.code, len(answer.body)) for answer in answers} == {(0, len(answers[0].body))}
    assert most == 1


# Heartbeats.


def beat_of(groups: int, topics: int = 1) -> Frame:
    names = [f"T{number}" for number in range(topics)]
    consumers = [consumer(f"g{number}", *names) for number in range(groups)]
    return Frame(RequestCode.HEART_BEAT, body=encode_body(Heartbeat(client_id="a", consumer_data_set=consumers)))


def beats_on(bench: Bench, connection: Connection, request: Frame) -> asyncio.Task[Frame]:
    answer = bench.serve[request.code](request, connection)
    assert isinstance(answer, asyncio.Task)
    return answer


def test_large_heartbeats_of_a_host_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Heartbeat] = []
    really = client_requests.request_body

    def counted(kind: type[Heartbeat], body: bytes) -> Heartbeat:
        read.append(really(kind, body))
        return read[-1]

    async def run() -> None:
        bench = Bench(tmp_path)
        bench.topics.table.writer.write_in_background()
        bench.groups.table.writer.write_in_background()
        large, small = beat_of(200), beat_of(1)
        assert len(large.body) > client_requests._QUICK_BYTES
        beating = [beats_on(bench, connection, large) for connection in (peer("a"), peer("b"), peer("c"))]
        behind = peer("d")
        beating += [beats_on(bench, behind, large), beats_on(bench, behind, small)]
        await turns(3)
        assert len(read) == 1
        other = beats_on(bench, peer("e", "10.0.0.2"), large)
        await turns(3)
        assert len(read) == 2
        answers = await asyncio.gather(*beating, other)
        assert {answer.code for answer in answers} == {0}
        assert len(read) == 6
        await bench.topics.table.writer.written()
        await bench.groups.table.writer.written()

    monkeypatch.setattr(client_requests, "request_body", counted)
    asyncio.run(run())


def test_what_waits_for_a_heartbeat_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_requests, "MAX_WAITING", 3)

    async def run() -> None:
        bench, connection = Bench(tmp_path), peer("a")
        leave = Frame(RequestCode.UNREGISTER_CLIENT, {"clientID": "a", "consumerGroup": "g0"})
        beating = [beats_on(bench, connection, request) for request in (beat_of(200), leave, leave)]
        with pytest.raises(RequestFailed, match=r"3 heartbeats of 10.0.0.1 wait already"):
            beats_on(bench, connection, leave)
        other = beats_on(bench, peer("b", "10.0.0.2"), beat_of(200))
        beating[1].cancel()
        await asyncio.wait(beating)
        assert (beating[0].result().code, beating[2].result().code, (await other).code) == (0, 0, 0)
        await turns()
        await asyncio.gather(*(beats_on(bench, connection, beat_of(200)) for _ in range(3)))

    asyncio.run(run())


def test_a_heartbeat_that_takes_long_to_read_is_refused(tmp_path: Path) -> None:
    group = b'{"groupName":"g","consumeType":"CONSUME_PASSIVELY","subscriptionDataSet":[%s]}'
    subscriptions = b",".join([b'{"topic":"T"}'] * client_requests.MAX_OBJECTS)
    body = b'{"clientID":"a","producerDataSet":[],"consumerDataSet":[%s]}' % (group % subscriptions)

    async def run() -> None:
        bench = Bench(tmp_path)
        with pytest.raises(RequestFailed, match=f"may have up to {client_requests.MAX_OBJECTS}") as refused:
            await beats_on(bench, peer("a"), Frame(RequestCode.HEART_BEAT, body=body))
        assert refused.value.code == ResponseCode.MESSAGE_ILLEGAL

    asyncio.run(run())


def test_a_heartbeat_takes_turns_by_what_its_groups_subscribe_to(tmp_path: Path) -> None:
    async def run() -> int:
        bench, connection = Bench(tmp_path), peer("a")
        beating = beats_on(bench, connection, beat_of(12, topics=500))
        count = 0
        while not beating.done():
            await asyncio.sleep(0)
            count += 1
        assert beating.result().code == 0
        assert bench.clients.subscription("g11", "T499") is not None
        return count

    assert asyncio.run(run()) > 12 * 500 // client_requests._WEIGHT_PER_TURN


# Walks, and who is woken.


def test_walks_take_turns() -> None:
    async def run() -> int:
        looked = most = 0

        async def walk() -> None:
            nonlocal looked
            async for _ in steps(range(4 * ITEMS_PER_TURN)):
                looked += 1

        walks = [asyncio.ensure_future(walk()) for _ in range(10)]
        while not all(task.done() for task in walks):
            before = looked
            await asyncio.sleep(0)
            most = max(most, looked - before)
        return most

    assert asyncio.run(run()) <= ITEMS_PER_TURN


def test_hosts_take_turns() -> None:
    async def run() -> list[str]:
        rota, begun = Rota(asyncio.get_running_loop()), list[str]()
        for host in ("a", "a", "a", "b", "a", "b"):
            rota.turn(host).add_done_callback(lambda _, host=host: begun.append(host))
        rota.turn("c").cancel()
        await turns()
        return begun

    assert asyncio.run(run()) == ["a", "b", "a", "b", "a", "a"]


# First messages.


async def most_stored_in_a_turn(broker: Live, sends: list[tuple[str, int]]) -> int:
    """Sends all at once, and looks in each turn of the loop how many were stored in it."""
    assert broker._broker is not None
    store = broker._broker._store
    sending = asyncio.gather(*(broker.send(topic, queueId=queue_id) for topic, queue_id in sends))
    most = before = 0
    while not sending.done():
        await asyncio.sleep(0)
        stored = sum(store.max_offset(*queue) for queue in sends)
        most, before = max(most, stored - before), stored
    assert {answer.code for answer in await sending} == {ResponseCode.SUCCESS}
    assert before == len(sends)
    return most


def test_first_messages_of_many_topics_are_stored_in_turns(tmp_path: Path) -> None:
    async def run() -> int:
        async with live_broker(tmp_path) as broker:
            return await most_stored_in_a_turn(broker, [(f"New{number}", 0) for number in range(30)])

    assert asyncio.run(run()) == 1


def test_many_messages_of_a_new_topic_are_stored_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(1_000_000))
    monkeypatch.setattr(send, "perf_counter", lambda: next(seconds))  # each message takes longer than a turn may

    async def run() -> int:
        async with live_broker(tmp_path) as broker:
            return await most_stored_in_a_turn(broker, [("New", number) for number in range(4)])

    assert asyncio.run(run()) == 1


# Messages that meet many who wait.


class Tags(frozenset[int]):
    """Counts how often somebody looks whether a message has one of them."""

    looked = 0

    def __contains__(self, tag: object) -> bool:
        Tags.looked += 1
        return super().__contains__(tag)

    def __iter__(self) -> Any:
        Tags.looked += 1
        return super().__iter__()


def test_a_long_batch_looks_once_at_whoever_waits_for_other_tags() -> None:
    async def run() -> None:
        waiters = PopWaiters(BrokerConfig())
        for _ in range(50):
            assert waiters.wait("t", "g", ANY_QUEUE, Tags([7]), 60.0) is not None
        Tags.looked = 0
        waiters.notify("t", 0, 1, [8] * 1_000)
        assert Tags.looked <= 50
        waiters.close()

    asyncio.run(run())


def test_a_batch_wakes_as_many_as_it_has_messages_and_who_wants_them() -> None:
    async def run() -> None:
        waiters = PopWaiters(BrokerConfig(pop_long_polling_force_notify_interval=0))
        wanting = [waiters.wait("t", "g", ANY_QUEUE, frozenset([tag]), 60.0) for tag in (7, 8, 7, 7)]
        waiters.notify("t", 0, 1, [7, 7])
        assert [waiter is not None and waiter.arrived.done() for waiter in wanting] == [True, False, True, False]
        waiters.close()

    asyncio.run(run())


def test_pops_of_many_groups_are_woken_in_turns() -> None:
    async def run() -> None:
        waiters = PopWaiters(BrokerConfig())
        waiting = [waiters.wait("t", f"g{number}", ANY_QUEUE, None, 60.0) for number in range(3 * WOKEN_PER_TURN)]
        waiters.notify("t", 0, 0, [0])
        assert sum(waiter is not None and waiter.arrived.done() for waiter in waiting) == WOKEN_PER_TURN
        await turns()
        assert all(waiter is not None and waiter.arrived.result() for waiter in waiting)

    asyncio.run(run())


@pytest.mark.parametrize("tag_codes", [[0], [0] * 100], ids=["message", "batch"])
def test_many_pulls_of_a_queue_are_woken_in_turns(tag_codes: list[int]) -> None:
    async def run() -> None:
        arrivals = Arrivals()
        waiting = [arrivals.wait("t", 0, None, 60.0) for _ in range(3 * WOKEN_PER_TURN)]
        arrivals.notify("t", 0, 0, tag_codes)
        assert sum(waiter.arrived.done() for waiter in waiting) == WOKEN_PER_TURN
        await turns()
        assert all(waiter.arrived.result() for waiter in waiting)
        assert len(arrivals) == 0

    asyncio.run(run())


def test_pulls_whose_offset_is_moved_are_woken_in_turns() -> None:
    async def run() -> None:
        arrivals = Arrivals()
        waiting = [arrivals.wait("t", 0, None, 60.0) for _ in range(2 * WOKEN_PER_TURN)]
        arrivals.wake("t", 0)
        assert sum(waiter.arrived.done() for waiter in waiting) == WOKEN_PER_TURN
        await turns()
        assert not any(waiter.arrived.result() for waiter in waiting)

    asyncio.run(run())


# Clients that are asked for others.


def relayed(bench: Bench, questions: Questions, code: int, **fields: str) -> Awaitable[Frame]:
    serve = relays.handlers(bench.clients, FakeStore(), bench.topics, bench.groups, bench.config, questions)
    return cast(Awaitable[Frame], serve[code](Frame(code, fields), peer("tool")))


def test_what_members_tell_of_themselves_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(tmp_path)
    status = encode_body(ConsumerStatus(message_queue_table={MessageQueue("b", 0, "T"): 5}))
    for name, body in (("a", status), ("b", status + b" " * (MAX_LENIENT_BYTES - len(status))), ("c", status)):
        member = FakeConnection(name)
        member.answer = lambda _, body=body: Frame(0, body=body)
        bench.beat(member, consumer())
    code = RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS

    async def run() -> bytes:
        return (await relayed(bench, Questions(), code, topic="T", group="g")).body

    told = asyncio.run(run())
    assert (b'"a@1"' in told, b'"b@1"' in told, b'"c@1"' in told) == (True, False, True)
    assert f"b@1 of g does not tell where it stands: its answer has {MAX_LENIENT_BYTES} bytes" in caplog.text


def test_questions_that_nobody_answers_are_bounded(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.beat(FakeConnection("a"), consumer())
    code = RequestCode.GET_CONSUMER_RUNNING_INFO

    async def run() -> None:
        silent = asyncio.get_running_loop().create_future()

        async def request(*_: object) -> Frame:
            answer: Frame = await asyncio.shield(silent)
            return answer

        (member,) = (each for group in bench.clients.consumer_groups() for each in group.members.values())
        member.connection.request = request  # type: ignore[method-assign]
        questions = Questions(max_questions=4)
        asked = [
            asyncio.ensure_future(relayed(bench, questions, code, consumerGroup="g", clientId="a@1")) for _ in range(3)
        ]
        await turns()
        assert len(questions) == 2  # the host leaves as much
        failure = asked[2].exception()
        assert isinstance(failure, RequestFailed)
        assert failure.code == ResponseCode.SYSTEM_BUSY
        asked[0].cancel()
        silent.set_result(Frame(0, body=b"info"))
        assert (await asked[1]).body == b"info"
        assert len(questions) == 0

    asyncio.run(run())


# Members of many groups.


def test_members_are_told_in_turns_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_news, "TOLD_PER_TURN", 4)

    async def run() -> None:
        bench = Bench(tmp_path)
        bench.clients = Clients(
            bench.topics, bench.groups, bench.config, call_soon=asyncio.get_running_loop().call_soon
        )
        old = [FakeConnection(f"old{number}") for number in range(3)]
        groups = [consumer(f"g{number}") for number in range(4)]
        for member in old:
            bench.beat(member, *groups)
        await turns(20)
        for member in old:
            member.told.clear()
        first, second = FakeConnection("new"), FakeConnection("newer")
        bench.beat(first, *groups)
        bench.beat(second, *groups)
        assert sum(len(member.told) for member in old) <= 4
        await turns(20)
        for member in old:
            assert {request.fields["consumerGroup"] for request in member.told} == {"g0", "g1", "g2", "g3"}
        assert sum(len(member.told) for member in old) <= 15  # not 24: who is not told yet is told once
        assert set(first.told_after_s[:1] + second.told_after_s) == {NEWCOMER_DELAY_S}

    asyncio.run(run())


# Settings and others of any size.


def test_settings_of_any_length_are_refused(tmp_path: Path) -> None:
    small = SmallBroker(tmp_path)
    answer = small.ask(RequestCode.UPDATE_BROKER_CONFIG, b"k=v\n" * (admin._MAX_SETTINGS_BYTES // 4 + 1))
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert answer.remark is not None
    assert "may have up to" in answer.remark
