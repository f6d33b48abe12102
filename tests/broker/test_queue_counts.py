"""However many queues somebody says there are, nobody goes through more of them than a topic can have."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec
import pytest

from broker.live import Live, MovableClock, live_broker, messages_of
from skylark.broker import assignment
from skylark.broker.assignment import Assignments
from skylark.broker.topics import RETRY_PREFIX
from skylark.client.routes import build_route
from skylark.wire import fastjson
from skylark.wire.bodies import MessageQueue, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import RegisterBroker
from skylark.wire.mapping import MappingDetail
from skylark.wire.pop import QueryAssignment, QueryAssignmentResponse
from skylark.wire.routes import (
    BrokerData,
    QueueData,
    RegisterBrokerBody,
    TopicConfigWrapper,
    TopicQueueMappingInfo,
    TopicRouteData,
    encode_register_body,
)
from skylark.wire.tables import MAX_QUEUES, DataVersion, SubscriptionGroupConfig, TopicConfig
from skylark.wire.typed import encode_header

MANY = 2_000_000_000


async def set_group(broker: Live, name: str, retry_queues: int) -> Frame:
    config = SubscriptionGroupConfig(group_name=name, retry_queue_nums=retry_queues)
    return await broker.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, encode_body(config))


async def topic(broker: Live, name: str) -> TopicConfig:
    answer = await broker.ask(RequestCode.GET_TOPIC_CONFIG, topic=name)
    return fastjson.decode(answer.body, TopicConfig)


def test_a_group_with_too_many_retry_queues_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            refused = await set_group(broker, "g", MANY)
            assert refused.code == ResponseCode.INVALID_PARAMETER
            assert f"retryQueueNums goes up to {MAX_QUEUES}" in (refused.remark or "")
            assert (await set_group(broker, "g", -1)).code == 0
            await broker.heartbeat("g", "t")
            assert (await topic(broker, RETRY_PREFIX + "g")).read_queue_nums == 0

    asyncio.run(run())


def test_a_group_and_a_topic_of_an_older_version_have_no_more_queues_than_there_can_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tmp_path / "config"
    config.mkdir()
    group = {"groupName": "g", "retryQueueNums": MANY}
    (config / "subscriptionGroup.json").write_bytes(fastjson.dumps({"subscriptionGroupTable": {"g": group}}))
    huge = {"topicName": "t", "readQueueNums": MANY, "writeQueueNums": 3}
    (config / "topics.json").write_bytes(fastjson.dumps({"topicConfigTable": {"t": huge}}))

    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.heartbeat("g", "t")
            for name in (RETRY_PREFIX + "g", "t"):
                stats = await broker.ask(RequestCode.GET_TOPIC_STATS_INFO, topic=name)
                assert stats.body.count(b'"queueId":') == MAX_QUEUES
            assert (await topic(broker, "t")).write_queue_nums == 3

    asyncio.run(run())
    assert "topic TopicConfig(topic_name='t'" in caplog.text
    assert "group SubscriptionGroupConfig(group_name='g'" in caplog.text


def test_more_retry_queues_reach_the_retry_topic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        clock = MovableClock()
        async with live_broker(tmp_path, clock, messageDelayLevel="100s") as broker:
            assert (await set_group(broker, "g", 1)).code == 0
            await broker.heartbeat("g", "t")
            assert (await topic(broker, RETRY_PREFIX + "g")).write_queue_nums == 1
            assert (await set_group(broker, "g", 4)).code == 0
            await broker.send("t")
            (message,) = messages_of(await broker.pull("t", 0))
            monkeypatch.setattr(random, "randrange", lambda count: count - 1)
            back = {"offset": message.log_offset, "group": "g", "delayLevel": 1}
            assert (await broker.ask(RequestCode.CONSUMER_SEND_MSG_BACK, **back)).code == 0
            grown = await topic(broker, RETRY_PREFIX + "g")
            assert (grown.read_queue_nums, grown.write_queue_nums) == (4, 4)
            clock.ahead_ms += 100_000
            while True:
                pulled = await broker.pull(grown.topic_name, 0, group="g", queueId=3, wait_ms=10_000)
                if pulled.code == 0:
                    break
            # Fewer than before, and the topic keeps what it has: messages may wait there.
            assert (await set_group(broker, "g", 2)).code == 0
            await broker.heartbeat("g", "t")
            assert (await topic(broker, RETRY_PREFIX + "g")).read_queue_nums == 4

    asyncio.run(run())


async def register(broker: Live, name: str, topics: dict[str, TopicConfig]) -> None:
    """A broker that does not exist tells the name server of its topics."""
    header = RegisterBroker(
        broker_name=name, broker_addr="10.0.0.9:10911", cluster_name="c", ha_server_addr="10.0.0.9:10912", broker_id=0
    )
    wrapper = TopicConfigWrapper(topic_config_table=topics, data_version=DataVersion(counter=1))
    body = encode_register_body(RegisterBrokerBody(topic_config_serialize_wrapper=wrapper))
    request = Frame(RequestCode.REGISTER_BROKER, encode_header(header), body)
    assert (await broker.pool.request(broker.namesrv, request, 60)).code == 0


def test_a_registration_with_too_many_queues_stops_nobody(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            topics = {
                name: TopicConfig(name, read_queue_nums=MANY, write_queue_nums=MANY) for name in ("Wide", "Other")
            }
            for name in ("stranger-1", "stranger-2"):
                await register(broker, name, topics)
            asked = encode_body(
                QueryAssignment(client_id="c", consumer_group="g", message_model="BROADCASTING", topic="Wide")
            )
            answer = await broker.ask(RequestCode.QUERY_ASSIGNMENT, asked)
            found = fastjson.decode(answer.body, QueryAssignmentResponse).message_queue_assignments
            assert found is not None
            assert len(found) == MAX_QUEUES
            known = await broker.pool.request(
                broker.namesrv, Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "Wide"}), 60
            )
            for queues in fastjson.decode(known.body, TopicRouteData).queue_datas:
                assert (queues.read_queue_nums, queues.write_queue_nums) == (MAX_QUEUES, MAX_QUEUES)

    asyncio.run(run())


def test_one_topic_that_is_registered_by_itself_is_limited_too(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            queues = QueueData(broker_name="broker-a", perm=6, read_queue_nums=MANY, write_queue_nums=MANY)
            body = encode_body(TopicRouteData(queue_datas=[queues]))
            await broker.pool.request(
                broker.namesrv, Frame(RequestCode.REGISTER_TOPIC_IN_NAMESRV, {"topic": "Wide"}, body), 60
            )
            known = await broker.pool.request(
                broker.namesrv, Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "Wide"}), 60
            )
            (found,) = fastjson.decode(known.body, TopicRouteData).queue_datas
            assert (found.read_queue_nums, found.write_queue_nums) == (MAX_QUEUES, MAX_QUEUES)

    asyncio.run(run())


def test_what_the_broker_knows_of_routes_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment, "MAX_KNOWN_QUEUES", 10)

    def queues(name: str, count: int) -> list[MessageQueue]:
        return [MessageQueue("broker-a", number, name) for number in range(count)]

    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            assert broker._broker is not None
            known: Assignments = broker._broker._assignments
            for name, count in (("a", 4), ("b", 4), ("a", 6), ("c", 2), ("d", 20)):
                known._remember(name, 0, queues(name, count))
                assert known._known_queues == sum(len(each) for _, each in known._routes.values())
                assert name in known._routes
                assert known._known_queues <= 10 or list(known._routes) == [name]

    asyncio.run(run())


def test_a_client_takes_no_more_queues_than_a_topic_can_have() -> None:
    wide = TopicRouteData(
        broker_datas=[BrokerData(broker_addrs={0: f"{name}:1"}, broker_name=name) for name in "ab"],
        queue_datas=[QueueData(broker_name=name, perm=6, read_queue_nums=MANY, write_queue_nums=MANY) for name in "ab"],
    )
    route = build_route("t", wide)
    assert len(route.read_queues) == len(route.write_queues) == MAX_QUEUES
    for conf in (f"a:{MANY}", "a:9999999999", f"a:{'9' * 5000};b:1", "a:²;b:1"):
        ordered = build_route("t", msgspec.structs.replace(wide, order_topic_conf=conf))
        assert 1 <= len(ordered.write_queues) <= MAX_QUEUES
    logical = TopicQueueMappingInfo(topic="t", bname="a", total_queues=MANY, curr_id_map={0: 0})
    static = build_route("t", msgspec.structs.replace(wide, topic_queue_mapping_by_broker={"a": logical}))
    assert len(static.read_queues) == MAX_QUEUES


@pytest.mark.parametrize(("total", "number"), [(MANY, 0), (-1, 0), (2, MAX_QUEUES), (2, -1)])
def test_a_static_topic_has_no_more_queues_than_a_topic_can_have(tmp_path: Path, total: int, number: int) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            detail = MappingDetail(topic="t", bname="broker-a", epoch=1, total_queues=total, hosted_queues={number: []})
            answer = await broker.ask(
                RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC, encode_body(detail),
                topic="t", defaultTopic="TBW102", readQueueNums=1, writeQueueNums=1, perm=6,
                topicFilterType="SINGLE_TAG",
            )  # fmt: skip
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert str(MAX_QUEUES) in (answer.remark or "")

    asyncio.run(run())
