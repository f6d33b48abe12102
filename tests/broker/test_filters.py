"""SQL92 subscriptions at a running broker: pulls, waits, refusals, and the table that outlives the consumers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from broker.live import MAY_SUSPEND, Live, live_broker, messages_of
from skylark.broker.config import BrokerConfig
from skylark.broker.filterdata import FilterData, FilterTable
from skylark.broker.filters import message_filter, retry_filter
from skylark.selectors import compile_selector
from skylark.wire.bodies import CheckClient, ConsumerData, Heartbeat, Subscription, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import Message
from skylark.wire.records import encode_record

SQL = "SQL92"


def wanting(sql: str, version: int = 1, topic: str = "t", kind: str = SQL) -> Subscription:
    return Subscription(topic=topic, sub_string=sql, expression_type=kind, sub_version=version)


async def beat(broker: Live, *wanted: Subscription, group: str = "readers") -> Frame:
    data = ConsumerData(group_name=group, subscription_data_set=list(wanted))
    return await broker.ask(RequestCode.HEART_BEAT, encode_body(Heartbeat(client_id="c", consumer_data_set=[data])))


async def leave(broker: Live, group: str = "readers") -> None:
    await broker.ask(RequestCode.UNREGISTER_CLIENT, clientID="c", consumerGroup=group)


async def send_prices(broker: Live, *prices: int) -> None:
    for price in prices:
        await broker.send("t", b"%d" % price, {"price": str(price)})


async def pull_known(broker: Live, offset: int = 0, version: int = 1, **more: object) -> Frame:
    """A pull as a push consumer does it: the broker knows the subscription."""
    return await broker.pull("t", offset, **({"sysFlag": 0, "subVersion": version} | more))  # type: ignore[arg-type]


def test_a_pull_brings_its_expression(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, enablePropertyFilter=True) as broker:
            await send_prices(broker, *range(6))
            answer = await broker.pull("t", 0, tags="price > 3", expressionType=SQL)
            assert [each.body for each in messages_of(answer)] == [b"4", b"5"]
            assert answer.fields["nextBeginOffset"] == "6"
            nothing = await broker.pull("t", 0, tags="price > 9", expressionType=SQL)
            assert (nothing.code, nothing.fields["nextBeginOffset"]) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "6")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("sql", "kind", "reason"),
    [
        ("price >", SQL, "ends too early (at character 8)"),
        ("price = 'x", SQL, "can't be read (at character 9)"),
        ("(" * 20_000, SQL, "16384 are allowed"),
        ("NOT " * 500 + "a", SQL, "nested more than 200 deep"),
        ("price > 3", "XPATH", "XPATH is not a type of expressions"),
    ],
)
def test_a_pull_that_makes_no_sense(tmp_path: Path, sql: str, kind: str, reason: str) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, enablePropertyFilter=True) as broker:
            await send_prices(broker, 1)
            answer = await broker.pull("t", 0, tags=sql, expressionType=kind)
            assert answer.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
            assert reason in (answer.remark or "")
            check = CheckClient(client_id="c", group="g", subscription_data=wanting(sql, kind=kind))
            answer = await broker.ask(RequestCode.CHECK_CLIENT_CONFIG, encode_body(check))
            assert answer.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
            assert reason in (answer.remark or "")

    asyncio.run(run())


def test_a_broker_that_does_not_filter_by_sql(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await send_prices(broker, 1)
            await beat(broker, wanting("price > 3"))
            refusal = (ResponseCode.SYSTEM_ERROR, "The broker does not support consumer to filter message by SQL92")
            for answer in (
                await broker.pull("t", 0, tags="price > 3", expressionType=SQL),
                await pull_known(broker),
                await broker.ask(
                    RequestCode.CHECK_CLIENT_CONFIG, encode_body(CheckClient(subscription_data=wanting("price > 3")))
                ),
            ):
                assert (answer.code, answer.remark) == refusal

    asyncio.run(run())


def test_a_subscription_known_from_heartbeats(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, enablePropertyFilter=True) as broker:
            await send_prices(broker, *range(6))
            await beat(broker, wanting("price >"))
            assert (await pull_known(broker)).code == ResponseCode.FILTER_DATA_NOT_EXIST
            await beat(broker, wanting("price > 4", version=2))
            assert [each.body for each in messages_of(await pull_known(broker, version=2))] == [b"5"]
            assert (await pull_known(broker, version=3)).code == ResponseCode.SUBSCRIPTION_NOT_LATEST
            # A newer one that can't be understood takes the place of the old one; so does the one after it.
            await beat(broker, wanting("price ==", version=3))
            assert (await pull_known(broker, version=3)).code == ResponseCode.FILTER_DATA_NOT_EXIST
            await beat(broker, wanting("price < 2", version=4))
            assert [each.body for each in messages_of(await pull_known(broker, version=4))] == [b"0", b"1"]

    asyncio.run(run())


def test_a_waiting_pull_sleeps_until_a_message_matches(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, enablePropertyFilter=True) as broker:
            await send_prices(broker, 1)
            wait = asyncio.create_task(broker.pull("t", 1, tags="price > 3", expressionType=SQL, wait_ms=60_000))
            await asyncio.sleep(0)
            await send_prices(broker, *[0] * 20)
            assert not wait.done()
            await send_prices(broker, 7)
            assert [each.body for each in messages_of(await wait)] == [b"7"]

    asyncio.run(run())


def test_a_wait_that_ends_tells_how_far_it_looked(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, enablePropertyFilter=True, useServerSideResetOffset=True) as broker:
            await send_prices(broker, 1)
            await beat(broker, wanting("price > 3"))
            wait = asyncio.create_task(pull_known(broker, 1, sysFlag=MAY_SUSPEND, suspendTimeoutMillis=60_000))
            await asyncio.sleep(0)
            await send_prices(broker, 0, 0)
            await broker.heartbeat("others", "t")
            # A reset, of whichever group, ends it as its timeout does.
            reset = await broker.ask(
                RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, group="others", topic="t", timestamp=0, isForce="true"
            )
            assert reset.code == ResponseCode.SUCCESS
            answer = await wait
            assert (answer.code, answer.fields["nextBeginOffset"]) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "3")

    asyncio.run(run())


def test_the_table_outlives_consumers_and_broker(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, enablePropertyFilter=True) as broker:
            await beat(broker, wanting("price > 3", version=7))
            await leave(broker)
        table = json.loads((tmp_path / "config" / "consumerFilter.json").read_bytes())
        data = table["filterDataByTopic"]["t"]["groupFilterData"]["readers"]
        assert (data["expression"], data["expressionType"], data["clientVersion"]) == ("price > 3", SQL, 7)
        assert data["dead"]
        assert data["bloomFilterData"]["bitNum"] == 112
        async with live_broker(tmp_path, enablePropertyFilter=True) as broker:
            await send_prices(broker, 2, 4)
            await beat(broker, wanting("price > 3", version=7))
            assert [each.body for each in messages_of(await pull_known(broker, version=7))] == [b"4"]

    asyncio.run(run())


def test_entries_die_come_back_and_are_forgotten(tmp_path: Path) -> None:
    config = BrokerConfig(filter_data_clean_time_span=1000)
    table = FilterTable(tmp_path, config, 0)
    table.subscribed("g", [wanting("a = 1"), wanting("b = 1", topic="u")], 10)
    born = table.get("t", "g")
    assert born is not None
    table.subscribed("g", [wanting("a = 1", version=2)], 20)
    other = table.get("u", "g")
    assert not born.is_dead
    assert born.client_version == 2
    assert other is not None
    assert other.is_dead
    table.left("g", 30)
    assert born.is_dead
    table.subscribed("g", [wanting("a = 2", version=1)], 40)  # an older version does not count
    assert (born.is_dead, born.expression) == (True, "a = 1")
    table.subscribed("g", [wanting("a = 1", version=2)], 50)
    assert not born.is_dead
    table.clean(1020)
    assert table.get("u", "g") is None
    assert table.get("t", "g") is born
    table.save()
    again = FilterTable(tmp_path, config, 2000)
    loaded = again.get("t", "g")
    assert loaded is not None
    assert loaded.is_dead
    again.clean(2000 + 1000)
    assert again.get("t", "g") is None


def test_a_heartbeat_costs_what_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_ms, count = 1_700_000_000_000, 300
    table = FilterTable(tmp_path, BrokerConfig(), now_ms)
    wanted = [
        Subscription(topic=f"t{number}", sub_string="a = 1", sub_version=1, expression_type="SQL92")
        for number in range(count)
    ]
    looked_at = 0

    def counted(data: FilterData) -> bool:
        nonlocal looked_at
        looked_at += 1
        return data.dead_time >= data.born_time

    caplog.set_level("INFO")
    table.subscribed("g", wanted, now_ms)
    caplog.clear()
    table.subscribed("g", wanted[:2], now_ms + 1)
    assert [record.getMessage() for record in caplog.records] == ["g does not filter t10 and 297 more any more"]
    monkeypatch.setattr(FilterData, "is_dead", property(counted))
    table.subscribed("g", wanted[:2], now_ms + 2)
    assert looked_at < 10, "those that are dead already"
    table.subscribed("g", wanted[1:3], now_ms + 3)
    table.left("g", now_ms + 4)
    died = {data.topic: data.dead_time - now_ms for data in table._groups["g"].values()}
    assert died == {"t0": 3, "t1": 4, "t2": 4} | {f"t{number}": 1 for number in range(3, count)}
    table.clean(now_ms + 2 * BrokerConfig().filter_data_clean_time_span)
    assert (table._living, table._groups) == ({}, {})


def test_records_are_filtered_by_their_properties() -> None:
    for topic in ("t", "t" * 200):
        message = Message(topic=topic, queue_id=0, body=b"x" * 100, properties={"a": "1", "RETRY_TOPIC": "t"})
        record = encode_record(message, queue_offset=0, log_offset=0, store_timestamp_ms=0, store_host=bytes(8))
        accepts = message_filter(wanting("a = 1")).accepts
        assert accepts is not None
        assert accepts(record)
        refuses = message_filter(wanting("a = 2")).accepts
        assert refuses is not None
        assert not refuses(record)
        assert refuses(record[:80])  # damaged: the consumer is told, not spared
        by_topic = {"t": compile_selector("a = 2")}
        retried = retry_filter(by_topic.get).accepts
        assert retried is not None
        assert not retried(record)
        by_topic.clear()
        assert retried(record)
