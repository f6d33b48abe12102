"""What name servers know of a broker: at its start, when topics change, and after its end."""

from __future__ import annotations

import asyncio
from pathlib import Path

from broker.live import DEADLINE_S, HOST, Live, live_broker
from skylark.broker.app import Broker
from skylark.broker.config import BrokerConfig
from skylark.nameserver.app import NameServer
from skylark.nameserver.config import NamesrvConfig
from skylark.net.pool import Pool
from skylark.wire import fastjson
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.routes import TopicRouteData


async def route(pool: Pool, namesrv: str, topic: str) -> Frame:
    return await pool.request(namesrv, Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic}), DEADLINE_S)


async def until_routed(pool: Pool, namesrv: str, topic: str) -> TopicRouteData:
    while True:
        answer = await route(pool, namesrv, topic)
        if answer.code == ResponseCode.SUCCESS:
            return fastjson.decode(answer.body, TopicRouteData)
        await asyncio.sleep(0)


def test_a_new_topic_is_routed_at_once_and_gone_after_the_end(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.send("Fresh")
            found = await until_routed(broker.pool, broker.namesrv, "Fresh")
            (data,) = found.broker_datas
            assert data.broker_addrs == {0: broker.address}
            assert [(q.broker_name, q.read_queue_nums, q.perm) for q in found.queue_datas] == [("broker-a", 4, 6)]
            await broker.stop()
            gone = await route(broker.pool, broker.namesrv, "Fresh")
            assert gone.code == ResponseCode.TOPIC_NOT_EXIST

    asyncio.run(run())


def test_every_name_server_is_told_and_a_missing_one_costs_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        servers = [NameServer(NamesrvConfig(kv_config_path=str(tmp_path / f"kv{i}.json"))) for i in range(2)]
        addresses = [f"{HOST}:{await server.start(HOST, 0)}" for server in servers]
        away = f"{HOST}:1"
        config = BrokerConfig(
            broker_name="broker-a",
            store_path_root_dir=str(tmp_path / "store"),
            mapped_file_size_commit_log=1 << 20,
            max_hash_slot_num=100,
            max_index_num=400,
            namesrv_addr=";".join([away, *addresses]),
        )
        broker = Broker(config)
        pool = Pool()
        try:
            port = await broker.start(HOST, 0)
            live = Live(broker, config, addresses[0], f"{HOST}:{port}", pool)
            await live.send("Everywhere")
            for address in addresses:
                found = await until_routed(pool, address, "Everywhere")
                assert found.broker_datas[0].broker_addrs == {0: live.address}
        finally:
            await broker.stop()
            pool.close()
            for server in servers:
                await server.stop()

    asyncio.run(run())


def test_a_broker_without_permission_to_write_says_so_in_its_routes(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, brokerPermission=4) as broker:
            found = await until_routed(broker.pool, broker.namesrv, "TBW102")
            assert [queue.perm & 6 for queue in found.queue_datas] == [4]

    asyncio.run(run())
