"""Numbers beyond Java's: no request brings one into a table; a broker with bad tables starts, or says what to do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from broker.live import HOST, Live, live_broker, text
from skylark.broker.app import Broker
from skylark.broker.config import BrokerConfig
from skylark.nameserver.app import NameServer
from skylark.nameserver.config import NamesrvConfig
from skylark.net.connection import INTERNAL_ERROR
from skylark.net.pool import Pool
from skylark.store.tables import BadTable
from skylark.wire import bodies, fastjson, headers, mapping, pop, routes, tables
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Encoding, Frame
from wire.poisoned import sample, variants

HUGE = 10**30
LONG_MAX, LONG_MIN, INT_MAX, INT_MIN = 2**63 - 1, -(2**63), 2**31 - 1, -(2**31)

HEADERS: dict[int, type[msgspec.Struct]] = {
    RequestCode.SEND_MESSAGE: headers.SendMessage,
    RequestCode.SEND_MESSAGE_V2: headers.SendMessageV2,
    RequestCode.SEND_BATCH_MESSAGE: headers.SendMessageV2,
    RequestCode.PULL_MESSAGE: headers.PullMessage,
    RequestCode.QUERY_MESSAGE: headers.QueryMessage,
    RequestCode.QUERY_CONSUMER_OFFSET: headers.QueryConsumerOffset,
    RequestCode.UPDATE_CONSUMER_OFFSET: headers.UpdateConsumerOffset,
    RequestCode.UPDATE_AND_CREATE_TOPIC: headers.CreateTopic,
    RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC: headers.CreateTopic,
    RequestCode.GET_ALL_TOPIC_CONFIG: headers.GetAllTopicConfig,
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: headers.GetAllSubscriptionGroup,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: headers.SearchOffset,
    RequestCode.GET_MAX_OFFSET: headers.GetMaxOffset,
    RequestCode.GET_MIN_OFFSET: headers.GetMinOffset,
    RequestCode.GET_EARLIEST_MSG_STORETIME: headers.GetEarliestMsgStoretime,
    RequestCode.VIEW_MESSAGE_BY_ID: headers.ViewMessage,
    RequestCode.CONSUMER_SEND_MSG_BACK: headers.ConsumerSendMsgBack,
    RequestCode.END_TRANSACTION: headers.EndTransaction,
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: headers.ResetOffset,
    RequestCode.QUERY_CONSUME_QUEUE: headers.QueryConsumeQueue,
    RequestCode.POP_MESSAGE: pop.PopMessage,
    RequestCode.ACK_MESSAGE: pop.AckMessage,
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME: pop.ChangeInvisibleTime,
    RequestCode.NOTIFICATION: pop.Notification,
    RequestCode.POLLING_INFO: pop.PollingInfo,
    RequestCode.PEEK_MESSAGE: pop.PeekMessage,
}
BODIES: dict[int, type[msgspec.Struct]] = {
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: bodies.TopicConfigs,
    RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC: mapping.MappingDetail,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: tables.SubscriptionGroupConfig,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: bodies.GroupConfigs,
    RequestCode.HEART_BEAT: bodies.Heartbeat,
    RequestCode.CHECK_CLIENT_CONFIG: bodies.CheckClient,
    RequestCode.LOCK_BATCH_MQ: bodies.LockRequest,
    RequestCode.UNLOCK_BATCH_MQ: bodies.LockRequest,
    RequestCode.SET_MESSAGE_REQUEST_MODE: pop.SetMessageRequestMode,
    RequestCode.BATCH_ACK_MESSAGE: pop.BatchAckMessage,
}
NAME_SERVER_HEADERS: dict[int, type[msgspec.Struct]] = {
    RequestCode.REGISTER_BROKER: headers.RegisterBroker,
    RequestCode.UNREGISTER_BROKER: headers.UnregisterBroker,
    RequestCode.QUERY_DATA_VERSION: headers.QueryDataVersion,
    RequestCode.BROKER_HEARTBEAT: headers.BrokerHeartbeat,
}
NAME_SERVER_BODIES: dict[int, type[msgspec.Struct]] = {
    RequestCode.REGISTER_BROKER: routes.RegisterBrokerBody,
    RequestCode.QUERY_DATA_VERSION: tables.DataVersion,
    RequestCode.REGISTER_TOPIC_IN_NAMESRV: routes.TopicRouteData,
}
# A request that waits for messages is answered when they come, so its time to wait stays as it is here.
WAITS = {"pollTime", "bornTime", "suspendTimeoutMillis"}


def fields_of(header: type[msgspec.Struct] | None) -> dict[str, Any]:
    fields: dict[str, Any] = dict(sample(inspect.type_info(header))) if header is not None else {}
    return fields | ({"pollTime": 0} if "pollTime" in fields else {})


def texts(fields: dict[str, Any]) -> dict[str, str]:
    return {key: text(value) for key, value in fields.items()}


async def refused(pool: Pool, address: str, request: Frame, name: str) -> None:
    answer = await pool.request(address, request, 60)
    assert answer.code != 0, (request, name)
    assert name in (answer.remark or ""), (request, name, answer.remark)
    assert (answer.remark or "").startswith("bad "), (request, answer.remark)


async def try_all(
    pool: Pool, address: str, by_code: dict[int, type[msgspec.Struct]], body_by_code: dict[int, type[msgspec.Struct]]
) -> None:
    for code, header in by_code.items():
        for name, fields in variants(inspect.type_info(header), HUGE):
            for encoding in Encoding:
                await refused(pool, address, Frame(code, texts(fields), encoding=encoding), name)
    headers_of_all = HEADERS | NAME_SERVER_HEADERS | {RequestCode.REGISTER_TOPIC_IN_NAMESRV: headers.RegisterTopic}
    for code, kind in body_by_code.items():
        for name, body in variants(inspect.type_info(kind), HUGE):
            fields = fields_of(headers_of_all.get(code)) | {"bodyCrc32": 0, "compressed": False}
            await refused(pool, address, Frame(code, texts(fields), fastjson.dumps(body)), name)


def test_a_number_out_of_range_is_refused_by_its_field_and_never_stored(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await fill(broker)
            await try_all(broker.pool, broker.address, HEADERS, BODIES)
        assert files_with(tmp_path, str(HUGE)) == []
        async with live_broker(tmp_path) as broker:
            assert (await broker.ask(RequestCode.QUERY_CONSUMER_OFFSET, **OWN_OFFSET)).fields == {"offset": "3"}

    asyncio.run(run())


def test_the_name_server_refuses_numbers_out_of_range(tmp_path: Path) -> None:
    async def run() -> None:
        name_server = NameServer(NamesrvConfig(kv_config_path=str(tmp_path / "kvConfig.json")))
        address = f"{HOST}:{await name_server.start(HOST, 0)}"
        pool = Pool()
        try:
            await try_all(pool, address, NAME_SERVER_HEADERS, NAME_SERVER_BODIES)
            answer = await pool.request(address, Frame(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER))
            assert fastjson.loads(answer.body)["topicList"] == []
        finally:
            pool.close()
            await name_server.stop()

    asyncio.run(run())


@pytest.mark.parametrize("limits", [(INT_MAX, LONG_MAX), (INT_MIN, LONG_MIN)])
def test_the_largest_and_smallest_numbers_are_answered_and_do_no_harm(tmp_path: Path, limits: tuple[int, int]) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await fill(broker)
            for limit in limits:
                for code, header in HEADERS.items():
                    for name, fields in variants(inspect.type_info(header), limit):
                        if name not in WAITS:
                            request = Frame(code, texts(fields | fields_of(header) | {name: fields[name]}))
                            answer = await broker.pool.request(broker.address, request, 60)
                            assert answer.remark != INTERNAL_ERROR, (request, answer.remark)
        async with live_broker(tmp_path) as broker:
            assert (await broker.send("text")).code == 0

    asyncio.run(run())


OWN_OFFSET = {"consumerGroup": "text", "topic": "text", "queueId": 0}


async def fill(broker: Live) -> None:
    """A topic and a group that the samples name, with messages and an offset."""
    created = await broker.ask(
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        topic="text", defaultTopic="TBW102", readQueueNums=2, writeQueueNums=2, perm=6, topicFilterType="SINGLE_TAG",
    )  # fmt: skip
    assert created.code == 0
    group = fastjson.dumps(tables.SubscriptionGroupConfig(group_name="text"))
    assert (await broker.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, group)).code == 0
    for queue_id in (0, 1):
        assert (await broker.send("text", queueId=queue_id)).code == 0
    assert (await broker.ask(RequestCode.UPDATE_CONSUMER_OFFSET, **OWN_OFFSET, commitOffset=3)).code == 0


def files_with(root: Path, number: str) -> list[str]:
    return [path.name for path in (root / "config").iterdir() if number in path.read_text(errors="replace")]


# Tables of an older version, and tables that are damaged.


def test_a_broker_starts_with_tables_that_an_older_version_wrote(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old: dict[str, Any] = {
        "consumerOffset.json": {"offsetTable": {"text@text": {0: 3, 1: HUGE, HUGE: 5}}},
        "consumerOrderInfo.json": {"table": {"text@text": {0: {"o": [0], "popTime": 1, "i": HUGE}}}},
        "topicQueueMapping.json": {
            "topicQueueMappingInfoMap": {
                "static": {
                    "topic": "static",
                    "bname": "broker-a",
                    "hostedQueues": {0: [{"startOffset": HUGE}], HUGE: []},
                }
            }
        },
        "subscriptionGroup.json": {
            "subscriptionGroupTable": {"text": {"groupName": "text", "retryQueueNums": HUGE, "retryMaxTimes": 7}}
        },
        "topics.json": {"topicConfigTable": {"text": {"topicName": "text", "readQueueNums": 2, "topicSysFlag": HUGE}}},
        "messageRequestMode.json": {"messageRequestModeMap": {"text": {"text": {"popShareQueueNum": HUGE}}}},
        "delayOffset.json": {"offsetTable": {1: HUGE}},
    }
    (tmp_path / "config").mkdir()
    for name, table in old.items():
        for file in (name, f"{name}.bak"):
            (tmp_path / "config" / file).write_bytes(fastjson.dumps(table, pretty=True))

    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            for name in old:
                assert f"{name} has" in caplog.text
            assert (await broker.ask(RequestCode.QUERY_CONSUMER_OFFSET, **OWN_OFFSET)).fields == {"offset": "3"}
            group = await broker.ask(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, group="text")
            config = fastjson.decode(group.body, tables.SubscriptionGroupConfig)
            assert (config.retry_max_times, config.retry_queue_nums) == (7, 1)

    asyncio.run(run())


@pytest.mark.parametrize("name", ["topics.json", "subscriptionGroup.json", "consumerOffset.json"])
def test_a_broker_without_a_readable_table_says_what_to_do(tmp_path: Path, name: str) -> None:
    async def start() -> None:
        async with live_broker(tmp_path):
            pass

    asyncio.run(start())
    table = tmp_path / "config" / name
    table.write_bytes(b'{"half')
    table.with_name(f"{name}.bak").write_bytes(b"\0" * 100)
    with pytest.raises(BadTable, match=rf"{name} is damaged.*move {name} and {name}\.bak out of"):
        asyncio.run(start())
    table.rename(tmp_path / "aside")
    table.with_name(f"{name}.bak").rename(tmp_path / "aside too")
    asyncio.run(start())


@pytest.mark.parametrize("name", ["consumerOrderInfo.json", "consumerFilter.json", "timermetrics"])
def test_a_broker_goes_on_without_a_table_that_it_can_do_without(tmp_path: Path, name: str) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / name).write_bytes(b'{"half')

    async def start() -> None:
        async with live_broker(tmp_path) as broker:
            assert (await broker.send("t")).code == 0

    asyncio.run(start())
    assert (tmp_path / "config" / f"{name}.broken").read_bytes() == b'{"half'


def test_a_start_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    """The port is free again, and so is the store."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "topics.json").write_bytes(b"{")

    async def run() -> None:
        broker = Broker(BrokerConfig(broker_name="broker-a", store_path_root_dir=str(tmp_path)))
        with pytest.raises(BadTable):
            await broker.start(HOST, 0)

    asyncio.run(run())
    assert not (tmp_path / "commitlog").exists()
