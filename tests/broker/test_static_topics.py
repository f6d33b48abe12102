"""Static topics at one broker: what mappings it takes, and how it translates requests about logical queues."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.live import DEADLINE_S, HOST, Live, live_broker, messages_of
from skylark.broker import static_topics as module
from skylark.broker.logical_queues import _go_on, _Place
from skylark.broker.static_topics import BadMapping, StaticTopics, check_items
from skylark.net.connection import INTERNAL_ERROR, Connection
from skylark.net.pool import Pool
from skylark.net.server import Server, bind
from skylark.wire import fastjson
from skylark.wire.bodies import decode_body, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.mapping import (
    END,
    MappedTopicConfig,
    MappingDetail,
    MappingItem,
    MappingTable,
    item_after,
    item_at,
)
from skylark.wire.routes import TopicRouteData
from skylark.wire.stats import BrokerConsumeStats, ConsumeStats

A, B = "broker-a", "broker-b"


def item(gen: int, broker: str = A, queue: int = 0, logical: int = 0, **more: int) -> MappingItem:
    return MappingItem(gen=gen, bname=broker, queue_id=queue, logic_offset=logical, **more)


def detail(queues: dict[int, list[MappingItem]], epoch: int = 1, broker: str = A, total: int = 2) -> MappingDetail:
    return MappingDetail(topic="t", bname=broker, epoch=epoch, total_queues=total, hosted_queues=queues)


# What the records compute.


def test_offsets_of_an_item() -> None:
    moved = item(1, B, logical=10_000)
    assert moved.to_logical(5) == 10_005
    assert moved.to_physical(10_005) == 5
    assert moved.to_logical_within(5) == 10_005
    assert moved.delta == 10_000
    assert item(1, logical=-1).to_logical_within(5) == -1
    ended = item(0, end_offset=7)
    assert ended.is_ended
    assert ended.to_logical_within(99) == 7
    assert ended.max_logical == 7


def test_the_item_of_an_offset() -> None:
    items = [item(0), item(1, B, logical=10_000), item(2, A, 1, logical=-1)]
    assert item_at(items, 0) is items[0]
    assert item_at(items, 9_999) is items[0]
    assert item_at(items, 10_000) is items[1]
    assert item_at(items, END) is items[1], "the last one is not decided yet"
    assert item_at(items[1:], 5) is items[1], "before all, it is the first"
    assert item_at(items[2:], 5) is None
    assert item_after(items, items[0]) is items[1]
    assert item_after(items, items[1]) is None


def test_apaches_table_is_read_and_written() -> None:
    text = (
        b'{"dataVersion":{"counter":2,"stateVersion":0,"timestamp":1700000000000},"topicQueueMappingInfoMap":{"t":{'
        b'"bname":"broker-a","currIdMap":{},"dirty":false,"epoch":1700000001000,"hostedQueues":{0:[{"bname":"broker-a",'
        b'"endOffset":-1,"gen":0,"logicOffset":0,"queueId":0,"startOffset":0,"timeOfEnd":-1,"timeOfStart":-1}]},'
        b'"scope":"__global__","topic":"t","totalQueues":1}}}'
    )
    table = fastjson.decode(text, MappingTable)
    assert table.topic_queue_mapping_info_map["t"].hosted_queues == {0: [item(0)]}
    assert fastjson.dumps(table) == text


# What a broker takes.


def take(topics: StaticTopics, change: MappingDetail, *, force: bool = False) -> None:
    asyncio.run(topics.create("t", topics.checked("t", change, force=force)))


@pytest.mark.parametrize(
    ("items", "remark"),
    [
        ([item(-1)], "The field is illegal"),
        ([item(0, start_offset=5, end_offset=3)], "The endOffset is smaller"),
        ([item(0, logical=-1), item(1)], "The non-latest item has negative logic offset"),
        ([item(1), item(1, logical=10)], "The gen does not increase"),
        ([item(0, logical=10), item(1, logical=10)], "The base logic offset does not increase"),
        ([item(0, end_offset=20), item(1, logical=10)], "The max logic offset does not increase"),
    ],
)
def test_items_that_do_not_follow_each_other(items: list[MappingItem], remark: str) -> None:
    with pytest.raises(BadMapping, match=remark):
        check_items(items)


@pytest.mark.parametrize(
    ("change", "remark"),
    [
        (detail({0: [item(0)]}, epoch=0), "small epoch 0 < 1"),
        (detail({}), "equal epoch with null data"),
        (detail({0: []}, epoch=2), "The new item list is null or empty"),
        (detail({0: [item(0), item(1, B, logical=-1)]}), "The new leader is different but epoch equal"),
        (detail({0: [item(0, queue=3)]}, epoch=2), "can not be changed"),
        (detail({0: [item(0)]}, epoch=2, broker=B), "not of t in broker-a"),
        (msgspec.structs.replace(detail({0: [item(0)]}, epoch=2), scope="other"), "unmatched scope"),
    ],
)
def test_what_was_said_is_not_contradicted(tmp_path: Path, change: MappingDetail, remark: str) -> None:
    topics = StaticTopics(tmp_path, A, lambda: 5)
    take(topics, detail({0: [item(0)]}))
    with pytest.raises(BadMapping, match=remark):
        take(topics, change)
    assert StaticTopics(tmp_path, A, lambda: 5).all() == {"t": detail({0: [item(0)]})}


def test_a_queue_moves_and_its_place_is_decided_once(tmp_path: Path) -> None:
    topics = StaticTopics(tmp_path, A, lambda: 5)
    take(topics, detail({0: [item(0)], 1: [item(0, queue=1)]}))
    take(topics, detail({0: [item(0), item(1, B, logical=-1)]}, epoch=2))
    mapping = topics.get("t")
    assert mapping is not None
    assert mapping.info().curr_id_map == {1: 1}, "it leads what it was not told anything new of"
    take(topics, detail({**mapping.hosted_queues, 0: [item(0), item(1, B, logical=10)]}, epoch=2))
    again = detail({**mapping.hosted_queues, 0: [item(0), item(1, B, logical=20)]}, epoch=2)
    with pytest.raises(BadMapping, match="can not be changed"):
        take(topics, again)
    take(topics, again, force=True)
    topics.delete("t")
    assert not StaticTopics(tmp_path, A, lambda: 5)


# What an empty pull leads to.

NOT_FOUND, RETRY, MOVED = (
    ResponseCode.PULL_NOT_FOUND,
    ResponseCode.PULL_RETRY_IMMEDIATELY,
    ResponseCode.PULL_OFFSET_MOVED,
)


@pytest.mark.parametrize(
    ("at", "requested", "bounds", "code", "expected"),
    [
        (0, 7, (0, 7), NOT_FOUND, (RETRY, 10_000)),  # the end of the first leads to the second
        (0, 1, (3, 7), MOVED, (MOVED, 3)),  # nothing is before the first
        (1, 1, (3, 7), MOVED, (RETRY, 10_003)),
        (1, 7, (0, 7), NOT_FOUND, (RETRY, 20_000)),
        (2, 7, (0, 7), NOT_FOUND, (NOT_FOUND, 20_007)),  # the end of the leader is where to wait
        (2, 9, (0, 7), MOVED, (MOVED, 20_007)),
    ],
)
def test_where_a_pull_goes_on(
    at: int, requested: int, bounds: tuple[int, int], code: int, expected: tuple[int, int]
) -> None:
    items = [item(0), item(1, B, logical=10_000), item(2, logical=20_000)]
    place = _go_on(_Place(code, items[at], requested, *bounds), items, requested)
    assert (place.code, int(place.fields(items[-1])["nextBeginOffset"])) == expected


@given(st.integers(0, 30), st.integers(0, 30), st.sampled_from([NOT_FOUND, RETRY]))
def test_a_pull_never_goes_back(requested: int, end: int, code: int) -> None:
    items = [item(0), item(1, B, logical=10_000)]
    place = _Place(code, items[0], max(requested, 0), 0, end)
    following = int(_go_on(place, items, requested).fields(items[-1])["nextBeginOffset"])
    assert following >= min(requested, end)


# A broker, and two.


async def create(broker: Live, mapping: MappingDetail, queues: int = 2, **more: object) -> Frame:
    return await broker.ask(
        RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC,
        encode_body(mapping),
        topic=mapping.topic,
        defaultTopic="TBW102",
        readQueueNums=queues,
        writeQueueNums=queues,
        perm=6,
        topicFilterType="SINGLE_TAG",
        topicSysFlag=0,
        order=False,
        **more,
    )


async def offset(broker: Live, code: int, **fields: object) -> int:
    answer = await broker.ask(code, topic="t", **fields)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return int(answer.fields["offset"])


def test_requests_about_a_logical_queue(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            mapping = detail({5: [item(0, queue=1)]}, total=8)
            assert (await create(broker, mapping)).code == ResponseCode.SUCCESS
            for queue in (5, -1):  # -1: any that it leads
                answer = await broker.send("t", b"m", queueId=queue)
                assert (answer.code, answer.fields["queueId"]) == (ResponseCode.SUCCESS, "5")
            assert len(messages_of(await broker.pull("t", 0, queueId=5))) == 2
            assert len(messages_of(await broker.pull("t", 0, queueId=1, lo=False))) == 2, "physical, by its own number"
            assert await offset(broker, RequestCode.GET_MAX_OFFSET, queueId=5) == 2
            for code in (RequestCode.GET_MAX_OFFSET, RequestCode.GET_MIN_OFFSET):
                refused = await broker.ask(code, topic="t", queueId=0)
                assert refused.code == ResponseCode.NOT_LEADER_FOR_QUEUE
                assert refused.remark is not None
                assert "t-0" in refused.remark
            assert (await broker.send("t", b"m", queueId=0)).code == ResponseCode.NOT_LEADER_FOR_QUEUE
            assert (await broker.pull("t", 0, queueId=0)).code == ResponseCode.NOT_LEADER_FOR_QUEUE
            plain = decode_body(MappedTopicConfig, (await broker.ask(RequestCode.GET_TOPIC_CONFIG, topic="t")).body)
            assert plain.mapping_detail is None
            asked = await broker.ask(RequestCode.GET_TOPIC_CONFIG, topic="t", lo=True)
            assert decode_body(MappedTopicConfig, asked.body).mapping_detail == mapping
            route = await broker.pool.request(broker.namesrv, Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"}))
            mappings = decode_body(TopicRouteData, route.body).topic_queue_mapping_by_broker
            assert mappings == {A: mapping.info()}
            await broker.ask(RequestCode.DELETE_TOPIC_IN_BROKER, topic="t")
            assert (await broker.ask(RequestCode.GET_TOPIC_CONFIG, topic="t")).code == ResponseCode.TOPIC_NOT_EXIST

    asyncio.run(run())


def test_a_group_without_an_offset_is_nowhere_in_a_static_topic(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await create(broker, detail({0: [item(0)], 1: [item(0, queue=1)]}))
            await broker.heartbeat("g", "t")
            await broker.send("t", b"one")
            committed = {"consumerGroup": "g", "topic": "t", "queueId": 0, "commitOffset": 1}
            await broker.ask(RequestCode.UPDATE_CONSUMER_OFFSET, **committed)
            answer = await broker.ask(RequestCode.GET_CONSUME_STATS, consumerGroup="g", topic="t")
            stats = fastjson.decode(answer.body, ConsumeStats).offset_table
            places = {q.queue_id: (at.broker_offset, at.consumer_offset, at.pull_offset) for q, at in stats.items()}
            # An admin client looks for -1 in the queues that the logical queue was in before.
            assert places == {0: (1, 1, 1), 1: (0, -1, -1)}
            answer = await broker.ask(RequestCode.GET_BROKER_CONSUME_STATS, isOrder=False)
            assert fastjson.decode(answer.body, BrokerConsumeStats).total_diff == 0

    asyncio.run(run())


@pytest.mark.parametrize("table", ["topics", "topicQueueMapping"])
def test_a_static_topic_has_its_mapping_or_is_as_before(tmp_path: Path, table: str) -> None:
    async def of(broker: Live) -> tuple[int, MappingDetail | None]:
        answer = await broker.ask(RequestCode.GET_TOPIC_CONFIG, topic="t", lo=True)
        assert answer.code == ResponseCode.SUCCESS
        config = decode_body(MappedTopicConfig, answer.body)
        return config.read_queue_nums, config.mapping_detail

    async def run() -> None:
        first, second = detail({0: [item(0)]}), detail({0: [item(0)], 1: [item(0, queue=1)]}, epoch=2)
        blocker = tmp_path / "config" / f"{table}.json.tmp"
        async with live_broker(tmp_path) as broker:
            blocker.mkdir()
            refused = await create(broker, first)
            assert refused.code == ResponseCode.SYSTEM_ERROR
            assert "can't be written: Is a directory" in (refused.remark or "")
            assert (await broker.ask(RequestCode.GET_TOPIC_CONFIG, topic="t")).code == ResponseCode.TOPIC_NOT_EXIST
            blocker.rmdir()
            assert (await broker.send("t", b"m", queueId=3)).code == ResponseCode.SUCCESS, "no queue is mapped"
            assert (await create(broker, first, queues=4)).code == ResponseCode.SUCCESS
            blocker.mkdir()
            assert (await create(broker, second, queues=5)).code == ResponseCode.SYSTEM_ERROR
            assert await of(broker) == (4, first)
            blocker.rmdir()
        async with live_broker(tmp_path) as broker:
            assert await of(broker) == (4, first)
            assert (await create(broker, second, queues=5)).code == ResponseCode.SUCCESS
            assert await of(broker) == (5, second)

    asyncio.run(run())


def test_a_change_goes_on_to_its_end_when_whoever_asked_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_mapped, may_go_on = asyncio.Event(), asyncio.Event()
    write = StaticTopics.create

    async def written(self: StaticTopics, topic: str, mapping: MappingDetail) -> None:
        await write(self, topic, mapping)
        is_mapped.set()
        await may_go_on.wait()

    monkeypatch.setattr(StaticTopics, "create", written)

    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            asked = asyncio.ensure_future(create(broker, detail({0: [item(0)]})))
            await is_mapped.wait()
            broker.pool.close()
            with pytest.raises(ConnectionError):
                await asked
            other = Pool(connect_timeout_s=DEADLINE_S)
            question = Frame(RequestCode.GET_TOPIC_CONFIG, {"topic": "t", "lo": "true"})
            assert (await other.request(broker.address, question, DEADLINE_S)).code == ResponseCode.TOPIC_NOT_EXIST
            may_go_on.set()
            answer = await other.request(broker.address, question, DEADLINE_S)
            while answer.code != ResponseCode.SUCCESS:
                answer = await other.request(broker.address, question, DEADLINE_S)
            other.close()
            assert decode_body(MappedTopicConfig, answer.body).mapping_detail is not None

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_mappings_have_room_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SIZE_BYTES", 4_096)

    async def run() -> None:
        small, large = ({0: [item(gen, logical=gen) for gen in range(count)]} for count in (2, 12))
        other = msgspec.structs.replace(detail(large), topic="u")
        async with live_broker(tmp_path) as broker:
            assert (await create(broker, detail(large))).code == ResponseCode.SUCCESS
            refused = await create(broker, other)
            assert refused.code == ResponseCode.INVALID_PARAMETER
            assert (refused.remark or "").startswith("u is too large")
            assert (await broker.ask(RequestCode.GET_TOPIC_CONFIG, topic="u")).code == ResponseCode.TOPIC_NOT_EXIST
        async with live_broker(tmp_path) as broker:
            assert (await create(broker, other)).code == ResponseCode.INVALID_PARAMETER, "after a start too"
            smaller = msgspec.structs.replace(other, hosted_queues=small)
            assert (await create(broker, smaller)).code == ResponseCode.SUCCESS
            assert (await broker.ask(RequestCode.DELETE_TOPIC_IN_BROKER, topic="t")).code == ResponseCode.SUCCESS
            third = msgspec.structs.replace(other, topic="v")
            assert (await create(broker, third)).code == ResponseCode.SUCCESS

    asyncio.run(run())


def test_bad_mappings_are_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            stranger = await create(broker, detail({}, broker="elsewhere"))
            assert stranger.code == ResponseCode.SYSTEM_ERROR
            nonsense = await broker.ask(
                RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC, b"{", topic="t", defaultTopic="TBW102", readQueueNums=1,
                writeQueueNums=1, perm=6, topicFilterType="SINGLE_TAG",
            )  # fmt: skip
            assert nonsense.code == ResponseCode.SYSTEM_ERROR
            named = msgspec.structs.replace(detail({}), topic="TBW102")
            assert (await create(broker, named)).code == ResponseCode.INVALID_PARAMETER
            assert (await broker.ask(RequestCode.GET_TOPIC_CONFIG, topic="t")).code == ResponseCode.TOPIC_NOT_EXIST

    asyncio.run(run())


def test_a_leader_answers_for_what_another_broker_holds(tmp_path: Path) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            old = await stack.enter_async_context(live_broker(tmp_path / "a"))
            new = await stack.enter_async_context(
                live_broker(tmp_path / "b", brokerName=B, namesrvAddr=old.namesrv, forwardTimeout=120_000)
            )
            await create(old, detail({0: [item(0)]}))
            for number in range(3):
                await old.send("t", b"old%d" % number)
            commit = {"consumerGroup": "g", "topic": "t", "queueId": 0}
            await old.heartbeat("g", "t")
            await new.heartbeat("g", "t")
            await old.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commitOffset=2, **commit)
            moved = [item(0), item(1, B, queue=1, logical=-1)]
            await create(new, detail({0: moved}, epoch=2, broker=B))
            undecided = await new.send("t", b"new0")
            assert undecided.fields["queueOffset"] == "-1"
            await create(old, detail({0: moved}, epoch=2))
            assert (await old.send("t", b"late")).code == ResponseCode.NOT_LEADER_FOR_QUEUE
            moved = [item(0), item(1, B, queue=1, logical=100)]
            await create(new, detail({0: moved}, epoch=2, broker=B))
            assert (await new.send("t", b"new1")).fields["queueOffset"] == "101"

            first = await new.pull("t", 0)
            assert [message.body for message in messages_of(first)] == [b"old0", b"old1", b"old2"]
            assert (first.fields["nextBeginOffset"], first.fields["offsetDelta"]) == ("3", "0")
            between = await new.pull("t", 3, wait_ms=10_000)
            assert (between.code, between.fields["nextBeginOffset"]) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "100")
            second = await new.pull("t", 100)
            assert [message.body for message in messages_of(second)] == [b"new0", b"new1"]
            assert (second.fields["nextBeginOffset"], second.fields["offsetDelta"]) == ("102", "100")

            assert await offset(new, RequestCode.GET_MIN_OFFSET, queueId=0) == 0
            assert await offset(new, RequestCode.GET_MAX_OFFSET, queueId=0) == 102
            assert await offset(new, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, queueId=0, timestamp=0) == 0
            assert await offset(new, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, queueId=0, timestamp=2**42) == 102
            earliest = await new.ask(RequestCode.GET_EARLIEST_MSG_STORETIME, topic="t", queueId=0)
            assert int(earliest.fields["timestamp"]) > 0
            assert await offset(new, RequestCode.QUERY_CONSUMER_OFFSET, consumerGroup="g", queueId=0) == 2
            for committed in (3, 101):
                await new.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commitOffset=committed, **commit)
                asked = await offset(new, RequestCode.QUERY_CONSUMER_OFFSET, consumerGroup="g", queueId=0)
                assert asked == committed
            await old.stop()
            gone = await new.pull("t", 0)
            assert gone.code == ResponseCode.SYSTEM_ERROR
            assert gone.remark == f"broker {A} can't be asked now", "nothing about its address"

    asyncio.run(run())


@pytest.mark.parametrize(
    "fields",
    [{}, {"offset": "many"}, {"offset": str(2**63 - 1)}, {"offset": "-5"}, {"nextBeginOffset": "1", "minOffset": "x"}],
)
def test_whatever_another_broker_answers_it_is_no_internal_error(tmp_path: Path, fields: dict[str, str]) -> None:
    """Anybody can register as a broker, and a static topic leads there."""

    def answer(request: Frame, _: Connection) -> Frame:
        return request.reply(fields=dict(fields))

    async def run() -> None:
        stranger = Server(dict.fromkeys(RequestCode, answer))
        port = await stranger.start(bind(HOST, 0))
        async with live_broker(tmp_path) as broker:
            register = {
                "brokerName": B,
                "brokerAddr": f"{HOST}:{port}",
                "clusterName": "c",
                "haServerAddr": "",
                "brokerId": "0",
            }
            await broker.pool.request(broker.namesrv, Frame(RequestCode.REGISTER_BROKER, register))
            await create(broker, detail({0: [item(0, B, end_offset=10), item(1, logical=100)]}))
            await broker.heartbeat("g", "t")
            for code in (
                RequestCode.GET_MIN_OFFSET, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, RequestCode.QUERY_CONSUMER_OFFSET,
            ):  # fmt: skip
                told = await broker.ask(code, topic="t", queueId=0, timestamp=0, consumerGroup="g")
                assert told.code == ResponseCode.SYSTEM_ERROR
                assert "that is no offset" in (told.remark or "")
            pulled = await broker.pull("t", 0)
            assert pulled.remark != INTERNAL_ERROR
        await stranger.stop()

    asyncio.run(run())
