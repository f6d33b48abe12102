"""Name servers and brokers that register with them often, and what the routes say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from broker.live import HOST, Live
from patience import DEADLINE_S
from skylark.broker.app import Broker
from skylark.broker.config import BrokerConfig
from skylark.nameserver.app import NameServer
from skylark.nameserver.config import NamesrvConfig
from skylark.net.pool import Pool
from skylark.wire import fastjson
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.routes import TopicRouteData

NEVER_S = 3600.0
SOON_S = 0.05
PERIOD_MS = 20
LONG_MS = round(DEADLINE_S * 1000)


@asynccontextmanager
async def name_server(root: Path, port: int = 0) -> AsyncIterator[str]:
    server = NameServer(NamesrvConfig(kv_config_path=str(root / "kvConfig.json")))
    address = f"{HOST}:{await server.start(HOST, port)}"
    try:
        yield address
    finally:
        await server.stop()


@asynccontextmanager
async def broker_at(root: Path, *servers: str, port: int = 0, **settings: object) -> AsyncIterator[Live]:
    """A broker that registers every 20 ms, and gives a name server any time to take it in."""
    wanted: dict[str, object] = {
        "broker_name": "broker-a",
        "store_path_root_dir": str(root / "store"),
        "mapped_file_size_commit_log": 1 << 20,
        "max_hash_slot_num": 100,
        "max_index_num": 400,
        "namesrv_addr": ";".join(servers),
        "register_name_server_period": PERIOD_MS,
        "register_broker_timeout_mills": LONG_MS,
    }
    config = BrokerConfig(**(wanted | settings))  # type: ignore[arg-type]
    broker = Broker(config)
    pool = Pool(connect_timeout_s=DEADLINE_S)
    live = Live(broker, config, servers[0], f"{HOST}:{await broker.start(HOST, port)}", pool)
    try:
        yield live
    finally:
        await live.stop()
        pool.close()


async def route(server: str, topic: str) -> TopicRouteData | None:
    pool = Pool()
    try:
        request = Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic})
        answer = await pool.request(server, request, DEADLINE_S)
    finally:
        pool.close()
    return fastjson.decode(answer.body, TopicRouteData) if answer.code == ResponseCode.SUCCESS else None


async def until(is_true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def until_routed(server: str, topic: str = "TBW102") -> None:
    await until(lambda: is_routed(server, topic))


async def until_gone(server: str, topic: str = "TBW102") -> None:
    async def is_gone() -> bool:
        return not await is_routed(server, topic)

    await until(is_gone)


async def is_routed(server: str, topic: str = "TBW102") -> bool:
    return await route(server, topic) is not None


async def until_perm(server: str, perm: int) -> None:
    async def has_perm() -> bool:
        found = await route(server, "TBW102")
        return found is not None and [queues.perm & 6 for queues in found.queue_datas] == [perm]

    await until(has_perm)


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])
