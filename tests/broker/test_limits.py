"""What one client can ask for: the work of a request is bounded, or done in turns; what is kept is bounded by size."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import pytest

from broker.small_broker import SmallBroker
from broker.test_clients import Bench, FakeConnection, consumer
from skylark.broker import client_requests as requests_module
from skylark.broker import clients as clients_module
from skylark.broker import filterdata as filter_module
from skylark.broker import groups as groups_module
from skylark.broker import locks as locks_module
from skylark.broker import offset_room as room
from skylark.broker import offsets as offsets_module
from skylark.broker import progress
from skylark.broker.arrivals import Arrivals
from skylark.broker.config import BrokerConfig
from skylark.broker.filterdata import FilterTable
from skylark.broker.filters import message_filter, requested_filter
from skylark.broker.groups import Groups
from skylark.broker.locks import MAX_LIVE_MS, Locks
from skylark.broker.offsets import Offsets
from skylark.broker.turns import ITEMS_PER_TURN, steps
from skylark.net.connection import RequestFailed
from skylark.net.request_bodies import MAX_BODY_BYTES, MAX_UNUSUAL_BYTES, request_body
from skylark.selectors.cache import TextCache
from skylark.store.index import key_hash, topic_seed
from skylark.wire import fastjson
from skylark.wire.bodies import (
    Heartbeat,
    LockedQueues,
    LockRequest,
    MessageQueue,
    Subscription,
    decode_body,
    encode_body,
)
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.fastjson import MAX_LENIENT_BYTES
from skylark.wire.frame import Frame
from skylark.wire.pop import MAX_ACKS, BadBody, decode_bits, encode_bits
from skylark.wire.stats import ConsumeStats, TopicStats
from skylark.wire.tables import DataVersion, SubscriptionGroupConfig, TopicConfig

T = TypeVar("T")
PEER = FakeConnection("tool").as_connection
WIDE = 4 * ITEMS_PER_TURN


async def turns_of(work: Awaitable[T]) -> tuple[T, int]:
    """What the work gives, and how often the loop turned meanwhile."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.create_task(count())
    try:
        return await work, turns
    finally:
        counter.cancel()


def answered(small: SmallBroker, code: int, **fields: object) -> tuple[Frame, int]:
    handler = small.handlers[code]
    request = Frame(code, {key: str(value) for key, value in fields.items()})
    answer = handler(request, PEER)
    assert isinstance(answer, Coroutine)
    return asyncio.run(turns_of(answer))


@pytest.fixture
def small(tmp_path: Path) -> SmallBroker:
    broker = SmallBroker(tmp_path)
    broker.topic("WIDE", queues=WIDE)
    broker.group("g")
    return broker


class TestTurns:
    """Long walks let others work in between."""

    def test_topic_stats(self, small: SmallBroker) -> None:
        answer, turns = answered(small, RequestCode.GET_TOPIC_STATS_INFO, topic="WIDE")
        assert len(fastjson.decode(answer.body, TopicStats).offset_table) == WIDE
        assert turns >= WIDE // ITEMS_PER_TURN

    def test_a_topic_that_is_named_often_is_told_of_once(self, small: SmallBroker) -> None:
        answer, turns = answered(
            small, RequestCode.GET_CONSUME_STATS, consumerGroup="g", topic="", topicList="WIDE;" * 50
        )
        assert len(fastjson.decode(answer.body, ConsumeStats).offset_table) == WIDE
        assert WIDE // ITEMS_PER_TURN <= turns < 2 * WIDE

    @pytest.mark.parametrize(
        ("code", "fields"),
        [
            (RequestCode.GET_CONSUME_STATS, {"consumerGroup": "g0", "topic": "", "topicList": "narrow;" * 50}),
            (RequestCode.GET_BROKER_CONSUME_STATS, {"isOrder": "false"}),
            (RequestCode.QUERY_CORRECTION_OFFSET, {"topic": "T0", "compareGroup": "g1", "filterGroups": ""}),
        ],
    )
    def test_many_short_walks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, fields: dict[str, str]
    ) -> None:
        async def at_once(work: Callable[[], T]) -> T:
            return work()

        monkeypatch.setattr(progress, "beside", at_once)  # else the loop turns while a thread encodes
        small = SmallBroker(tmp_path)
        names = [f"T{number}" for number in range(40)]
        for name in names:
            small.topic(name, queues=16)
        for number in range(40):
            small.group(f"g{number}")
            for queue_id in range(16):
                small.offsets.commit(f"g{number}", "T0", queue_id, 1, "")
        if "topicList" in fields:
            fields = fields | {"topicList": ";".join(names)}
        answer, turns = answered(small, code, **fields)
        assert answer.code == 0
        assert turns >= 40 * 16 // ITEMS_PER_TURN

    def test_no_more_queues_than_an_answer_can_hold(self, small: SmallBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(progress, "_MAX_BODY_BYTES", 1_000)
        assert small.ask(RequestCode.GET_TOPIC_STATS_INFO, topic="WIDE").code == ResponseCode.INVALID_PARAMETER
        small.topic("OTHER", queues=2)
        small.offsets.commit("g", "WIDE", 0, 1, "")
        small.offsets.commit("g", "OTHER", 0, 1, "")
        asked = {"consumerGroup": "g", "topic": "", "topicList": "WIDE;OTHER"}
        assert small.ask(RequestCode.GET_CONSUME_STATS, **asked).code == ResponseCode.INVALID_PARAMETER
        asked["topicList"] = "OTHER"
        assert small.ask(RequestCode.GET_CONSUME_STATS, **asked).code == 0
        refused = small.ask(RequestCode.GET_BROKER_CONSUME_STATS, isOrder="false")
        assert refused.code == ResponseCode.INVALID_PARAMETER

    @pytest.mark.parametrize(
        ("code", "fields"),
        [
            (RequestCode.QUERY_CONSUME_TIME_SPAN, {"topic": "WIDE", "group": "g"}),
            (
                RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
                {"topic": "WIDE", "group": "g", "timestamp": 5, "isForce": True},
            ),
        ],
    )
    def test_others(self, small: SmallBroker, code: int, fields: dict[str, object]) -> None:
        answer, turns = answered(small, code, **fields)
        assert answer.code == 0
        assert turns >= WIDE // ITEMS_PER_TURN

    def test_locks(self) -> None:
        queues = [MessageQueue("b", number, "T") for number in range(WIDE)]
        locks = Locks()
        serve = locks_module.handlers(locks, lambda: 5)
        body = encode_body(LockRequest(client_id="c", consumer_group="g", mq_set=queues))

        def ask(code: RequestCode) -> tuple[Frame, int]:
            answer = serve[code](Frame(code, body=body), PEER)
            assert isinstance(answer, Coroutine)
            return asyncio.run(turns_of(answer))

        answer, turns = ask(RequestCode.LOCK_BATCH_MQ)
        assert set(decode_body(LockedQueues, answer.body).lock_ok_mq_set) == set(queues)
        assert turns >= WIDE // ITEMS_PER_TURN
        answer, turns = ask(RequestCode.UNLOCK_BATCH_MQ)
        assert turns >= WIDE // ITEMS_PER_TURN
        assert locks.size_bytes == 0

    def test_heartbeats(self, tmp_path: Path) -> None:
        bench, peer = Bench(tmp_path), FakeConnection("a")
        beat = Heartbeat(client_id="a", consumer_data_set=[consumer(f"g{number}") for number in range(200)])
        request = Frame(RequestCode.HEART_BEAT, body=encode_body(beat))

        async def run() -> None:
            bench.topics.table.writer.write_in_background()
            bench.groups.table.writer.write_in_background()
            answer = bench.serve[request.code](request, peer.as_connection)
            assert isinstance(answer, asyncio.Task)
            reply, turns = await turns_of(answer)
            assert reply.fields["IS_SUB_CHANGE"] == "true"
            assert turns >= 3

        asyncio.run(run())
        assert bench.clients.member("g199", "a") is not None
        bench.clients.closed(peer.as_connection)
        assert bench.is_empty()

    def test_steps_are_all_there_is(self) -> None:
        async def run() -> list[int]:
            return [number async for number in steps(range(7), 2)]

        assert asyncio.run(run()) == list(range(7))


class TestBodies:
    @pytest.mark.parametrize(
        ("body", "most"),
        [
            (b'{"clientID":"c","x":[' + b"1," * (MAX_BODY_BYTES // 2) + b"1]}", MAX_BODY_BYTES),
            (b'{"clientID":"c","x":[null,' + b"1," * (MAX_UNUSUAL_BYTES // 2) + b"1]}", MAX_UNUSUAL_BYTES),
            (b'{"clientID":"c","x":{' + b"1:1," * (MAX_UNUSUAL_BYTES // 4) + b"1:1}}", MAX_LENIENT_BYTES),
            (b'{"clientID":"c","x":{' + b"{}:1," * (MAX_LENIENT_BYTES // 5) + b"1:1}}", MAX_LENIENT_BYTES),
            (b'{"clientID":"c","x":{' + b"1:1," * (MAX_LENIENT_BYTES // 4) + b"1:null}}", MAX_LENIENT_BYTES),
            (b"{" * MAX_LENIENT_BYTES * 2, MAX_LENIENT_BYTES),
        ],
    )
    def test_one_that_takes_long_to_read_is_refused(self, body: bytes, most: int) -> None:
        with pytest.raises(RequestFailed, match=f"may have up to {most}"):
            request_body(Heartbeat, body)

    @pytest.mark.parametrize(
        "body",
        [
            b'{"clientID":"c","x":[' + b"1," * 100_000 + b"1]}",
            b'{"clientID":"c","x":[' + b"1," * 100_000 + b"null]}",
            b'{"clientID":"c","x":{' + b"1:1," * 100_000 + b"1:1}}",
            b'{"clientID":"c","x":{{}:1,1:null}}',
        ],
    )
    def test_others_are_read(self, body: bytes) -> None:
        assert request_body(Heartbeat, body).client_id == "c"

    def test_a_bit_set_names_few_messages(self) -> None:
        assert decode_bits(encode_bits(range(MAX_ACKS))) == list(range(MAX_ACKS))
        with pytest.raises(BadBody, match="names 1025 messages"):
            decode_bits(encode_bits(range(MAX_ACKS + 1)))


class TestLocks:
    def test_are_bounded_by_size_and_forgotten_in_time(self) -> None:
        locks = Locks(max_size_bytes=100_000)
        long = [MessageQueue("b" * 1_000, number, "t" * 8_000) for number in range(100)]
        held = locks.lock_batch("g", "c" * 1_000, long, 0)
        assert 0 < len(held) < 10
        assert locks.size_bytes <= 100_000
        locks.expire(MAX_LIVE_MS)
        assert locks.lock_batch("g", "other", list(held), MAX_LIVE_MS) == set()
        locks.expire(MAX_LIVE_MS + 1)
        assert locks.size_bytes == 0
        assert locks.__dict__["_locks"] == {}

    def test_a_new_holder_counts_by_its_own_name(self) -> None:
        locks = Locks()
        queue = MessageQueue("b", 0, "T")
        locks.lock_batch("g", "c" * 100, [queue], 0)
        locks.lock_batch("g", "d", [queue], MAX_LIVE_MS + 1)
        locks.release("g", "d")
        assert locks.size_bytes == 0


class TestSubscriptions:
    def test_of_a_connection_are_bounded_by_size(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(clients_module, "MAX_CHARACTERS_PER_CONNECTION", 400)
        monkeypatch.setattr(clients_module, "MAX_TOPICS_PER_GROUP", 3)
        bench, peer = Bench(tmp_path), FakeConnection("a")
        bench.beat(peer, consumer("g", "t" * 60))
        with pytest.raises(RequestFailed, match="its groups take 317 of 400 characters"):
            bench.beat(peer, consumer("h", "t" * 60))
        with pytest.raises(RequestFailed, match="subscribes to 4 topics, and up to 3 are taken"):
            bench.beat(peer, consumer("i", "a", "b", "c", "d"))
        assert [group.name for group in bench.clients.consumer_groups()] == ["g"]
        assert "h" not in bench.groups
        bench.beat(peer, consumer("g", "t" * 90))
        bench.clients.unregister(peer.as_connection, "g", None)
        bench.beat(peer, consumer("h", "t" * 60))
        assert [group.name for group in bench.clients.consumer_groups()] == ["h"]

    def test_a_connection_that_is_full_makes_no_groups(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(clients_module, "MAX_GROUPS_PER_CONNECTION", 1)
        monkeypatch.setattr(requests_module, "MAX_GROUPS_PER_CONNECTION", 1)
        bench, peer = Bench(tmp_path), FakeConnection("a")
        bench.beat(peer, consumer("g"), consumer("h"))
        assert "h" not in bench.groups
        beat = encode_body(Heartbeat(client_id="a", consumer_data_set=[consumer("g"), consumer("h")]))
        assert bench.refused(RequestCode.HEART_BEAT, body=beat)[0] == ResponseCode.SYSTEM_ERROR
        beat = encode_body(Heartbeat(client_id="a" * 1025))
        assert bench.refused(RequestCode.HEART_BEAT, body=beat)[0] == ResponseCode.SYSTEM_ERROR


def wanting(sql: str, topic: str = "t", version: int = 1) -> Subscription:
    return Subscription(topic=topic, sub_string=sql, expression_type="SQL92", sub_version=version)


class TestExpressions:
    def test_are_bounded_by_size_and_those_of_groups_that_are_gone_make_room(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(filter_module, "MAX_EXPRESSION_BYTES", 200)
        table = FilterTable(tmp_path, BrokerConfig(), 0)
        table.subscribed("g", [wanting("a = '12345678901234567890'")], 10)
        table.subscribed("h", [wanting("b = '12345678901234567890'")], 10)
        assert table.get("t", "g") is not None
        assert table.get("t", "h") is None
        table.left("g", 20)
        table.subscribed("h", [wanting("b = '12345678901234567890'")], 1_020)
        assert table.get("t", "h") is not None
        assert table.get("t", "g") is None

    def test_of_a_second_are_not_all_understood_at_once(self, tmp_path: Path) -> None:
        table = FilterTable(tmp_path, BrokerConfig(), 0)
        bad = [wanting(f"a === {'1' * 1000}", topic=f"t{number}") for number in range(20)]
        table.subscribed("g", bad, 10)
        kept = [each for each in bad if table.get(each.topic, "g") is not None]
        assert 0 < len(kept) < 20
        assert table.selector(kept[0].topic, "g") is None  # a pull finds out
        table.subscribed("h", [wanting("a = 1")], 2_000)
        assert table.selector("t", "h") is not None

    def test_the_same_expression_is_one_filter(self) -> None:
        one, other = message_filter(wanting("a = 5 OR b = 6")), message_filter(wanting("a = 5 OR b = 6", topic="u"))
        assert one.accepts is other.accepts
        assert requested_filter("a = 5 OR b = 6", "SQL92").accepts is one.accepts

    def test_a_cache_is_bounded_by_the_texts(self) -> None:
        cache: TextCache[str, int] = TextCache(10_000)
        cache.put("long", 9_000, 1)
        assert cache.get("long") is None
        for number in range(100):
            cache.put(f"k{number}", 1_000, number)
            assert cache.characters <= 10_000
        assert cache.get("k99") == 99
        assert cache.get("k0") is None

    def test_names_that_no_topic_has_are_not_remembered(self) -> None:
        before = topic_seed.cache_info().currsize
        assert key_hash("x" * 300, "k") == key_hash("x" * 300, "k")
        assert topic_seed.cache_info().currsize == before


class TestArrivals:
    """A message is told to all who wait, whatever they filter by."""

    @staticmethod
    def filters(count: int, evaluated: list[int], verdict: bool) -> list[Callable[[bytes], bool]]:
        def one(number: int) -> Callable[[bytes], bool]:
            def accepts(record: bytes) -> bool:
                evaluated.append(number)
                return verdict

            return accepts

        return [one(number) for number in range(count)]

    def test_an_expression_is_evaluated_once_for_all(self) -> None:
        async def run() -> None:
            evaluated: list[int] = []
            accepts = self.filters(1, evaluated, True)[0]
            arrivals = Arrivals(lambda topic, queue_id, offset: memoryview(b"record"))
            waiters = [arrivals.wait("T", 0, None, 60.0, accepts) for _ in range(100)]
            arrivals.notify("T", 0, 0, [0])
            assert all([await waiter.arrived for waiter in waiters])
            assert evaluated == [0]

        asyncio.run(run())

    def test_different_ones_are_evaluated_in_turns(self) -> None:
        async def run() -> None:
            evaluated: list[int] = []
            arrivals = Arrivals(lambda topic, queue_id, offset: memoryview(b"record"))
            waiters = [arrivals.wait("T", 0, None, 60.0, accepts) for accepts in self.filters(100, evaluated, True)]
            arrivals.notify("T", 0, 0, [0])
            assert len(evaluated) == 16
            assert all([await waiter.arrived for waiter in waiters])
            assert sorted(evaluated) == list(range(100))

        asyncio.run(run())

    def test_who_filters_looks_by_itself_at_a_long_batch(self) -> None:
        async def run() -> None:
            evaluated: list[int] = []
            arrivals = Arrivals(lambda topic, queue_id, offset: memoryview(b"record"))
            by_expression = arrivals.wait("T", 0, None, 60.0, self.filters(1, evaluated, False)[0])
            by_tag, by_other_tag = (arrivals.wait("T", 0, frozenset((code,)), 60.0) for code in (7, 8))
            arrivals.notify("T", 0, 0, [7] * 1_000)
            assert await by_expression.arrived
            assert await by_tag.arrived
            assert not by_other_tag.arrived.done()
            assert not evaluated
            arrivals.close()

        asyncio.run(run())


class TestTables:
    @pytest.fixture
    def offsets(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Offsets:
        """With room for 3 topics of a group, and 2 more of all groups."""
        monkeypatch.setattr(room, "GROUP_SHARE", 3 * room.LEAST_PER_TOPIC)
        monkeypatch.setattr(room, "MAX_OFFSETS", 2 * room.LEAST_PER_TOPIC)
        return Offsets(tmp_path)

    def fill(self, offsets: Offsets, *groups: str) -> None:
        for group in groups:
            with pytest.raises(RequestFailed, match=f"offset of {group} in T.-0 is not kept") as refusal:  # noqa: PT012
                for number in range(9):
                    offsets.commit(group, f"T{number}", 0, 5, "")
            assert refusal.value.code == ResponseCode.SYSTEM_ERROR
            assert "delete" in refusal.value.remark

    def test_who_takes_all_offsets_leaves_their_share_to_others(
        self, offsets: Offsets, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.fill(offsets, "taker", "takers_friend", "other")
        assert "the offset of other in T3-0 is not kept" in caplog.text, "else nobody sees it who commits one way"
        assert [len(offsets.topics_of(group)) for group in ("taker", "takers_friend", "other")] == [5, 3, 3]
        with pytest.raises(RequestFailed, match="the group has 24 offsets"):
            offsets.reset("other", "T3", 0, 5)
        assert not offsets.has_reset("other", "T3", 0)

    def test_what_is_kept_can_be_changed(self, offsets: Offsets, tmp_path: Path) -> None:
        self.fill(offsets, "taker", "other")
        offsets.commit("other", "T2", 0, 4, "")
        for queue_id in range(1, room.LEAST_PER_TOPIC):
            offsets.commit("other", "T2", queue_id, 4, "")
        offsets.reset("other", "T1", 0, 3)
        assert offsets.query("other", "T1", 0) == 3
        with pytest.raises(RequestFailed):
            offsets.commit("other", "T2", room.LEAST_PER_TOPIC, 4, "")
        offsets.save()
        again = Offsets(tmp_path)
        again.commit("other", "T2", 0, 9, "")
        with pytest.raises(RequestFailed):
            again.commit("other", "T3", 0, 9, "")

    def test_what_goes_makes_room(self, offsets: Offsets) -> None:
        self.fill(offsets, "taker", "other")
        offsets.remove_topics(["T0"])
        offsets.commit("other", "T3", 0, 5, "")
        offsets.commit("other", "T4", 0, 5, "")
        with pytest.raises(RequestFailed):
            offsets.commit("other", "T5", 0, 5, "")
        offsets.group_deleted("taker", with_offsets=True)
        offsets.commit("other", "T5", 0, 5, "")

    def test_the_broker_keeps_its_own_offsets_in_any_case(self, offsets: Offsets) -> None:
        self.fill(offsets, "taker")
        for number in range(9):
            offsets.commit("CID_RMQ_SYS_x", f"T{number}", 0, 5, "the broker")
            offsets.put("popping", f"T{number}", 0, 5)
        assert len(offsets.topics_of("CID_RMQ_SYS_x")) == len(offsets.topics_of("popping")) == 9

    def test_what_is_pulled_and_reset_takes_no_room(self, offsets: Offsets) -> None:
        for number in range(99):
            offsets.pulled("taker", f"T{number}", 0, 7)
        assert offsets.query_pulled("taker", "T98", 0) == 7
        offsets.commit("taker", "T0", 0, 5, "")
        for queue_id in range(room.LEAST_PER_TOPIC):
            offsets.reset("taker", "T0", queue_id, 5)
        self.fill(offsets, "taker", "other")
        assert [len(offsets.topics_of(group)) for group in ("taker", "other")] == [5, 3]

    def test_what_is_pulled_is_bounded(self, offsets: Offsets, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(offsets_module, "MAX_OFFSETS", 2 * room.LEAST_PER_TOPIC)
        for number in range(99):
            offsets.pulled("taker", f"T{number}", 0, 7)
        assert 1 <= len(offsets.copy().pulled) <= 2
        assert offsets.query_pulled("taker", "T98", 0) == 7

    def test_offsets_of_groups_that_do_not_exist_are_bounded(self, offsets: Offsets) -> None:
        for number in range(9):  # made, used and deleted, again and again
            offsets.commit(f"g{number}", "T", 0, 5, "")
            offsets.group_deleted(f"g{number}", with_offsets=False)
        assert offsets.groups_of("T") == {"g0", "g1"}
        with pytest.raises(RequestFailed, match="offsets of g0 in T are not copied"):
            offsets.clone("g0", "made_up", "T")
        offsets.clone("g0", "g1", "T")

    def test_what_is_forbidden_is_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(groups_module, "MAX_FORBIDDEN", 1)
        groups = Groups(tmp_path, BrokerConfig(), lambda: 5)
        serve = groups_module.handlers(groups, Offsets(tmp_path))
        code = RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN

        def forbid(group: str, topic: str, readable: str) -> None:
            answer = serve[code](Frame(code, {"group": group, "topic": topic, "readable": readable}), PEER)
            assert isinstance(answer, Coroutine)
            asyncio.run(answer)

        forbid("g", "T", "false")
        for group, topic in (("g", "U"), ("g", "t" * 300), ("../g", "T")):
            with pytest.raises(RequestFailed):
                forbid(group, topic, "false")
        forbid("g", "T", "true")
        forbid("h", "U", "false")
        groups.delete("h")
        forbid("i", "U", "false")

    def test_groups_are_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        groups = Groups(tmp_path, BrokerConfig(), lambda: 5)
        monkeypatch.setattr(groups_module, "MAX_GROUPS", len(groups))
        serve = groups_module.handlers(groups, Offsets(tmp_path))
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        body = encode_body(SubscriptionGroupConfig(group_name="g"))
        with pytest.raises(RequestFailed, match="delete some"):
            asyncio.run(cast("Coroutine[Any, Any, Frame]", serve[code](Frame(code, body=body), PEER)))

    def test_encoded_entries_are_the_same_table(self) -> None:
        table = {name: TopicConfig(name, attributes={"a\n\t": "\x00ä"}) for name in ("a", 'b"', "c\n\t")}

        class Plain(msgspec.Struct):
            a: DataVersion
            b: dict[str, TopicConfig]

        class Encoded(msgspec.Struct):
            a: DataVersion
            b: fastjson.EncodedMap

        for pretty in (False, True):
            for some in (table, {}):
                entries = [fastjson.encode_entry(name, topic, pretty=True) for name, topic in some.items()]
                encoded = fastjson.dumps(Encoded(DataVersion(), fastjson.EncodedMap(entries)), pretty=pretty)
                assert encoded == fastjson.dumps(Plain(DataVersion(), some), pretty=pretty)
