"""Registrations in parts: Skylark's broker at Apache's name server, and Apache's broker at Skylark's."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import POLL_S, REQUEST_DEADLINE_S, ApacheServer, Process, apache_command, free_port, request

from broker.live import HOST, Live, live_broker
from skylark.nameserver.app import NameServer
from skylark.nameserver.config import NamesrvConfig
from skylark.wire.bodies import TopicConfigs, encode_body
from skylark.wire.codes import RequestCode
from skylark.wire.tables import TopicConfig

NAMES = [f"Topic-{number}" for number in range(30)]
IN_PARTS = {"enableSplitRegistration": "true", "splitRegistrationSize": "7"}


@pytest.fixture
def namesrv(java_parts: None, tmp_path: Path) -> Iterator[str]:
    """Apache's name server alone."""
    port = free_port()
    conf = tmp_path / "namesrv.conf"
    conf.write_text(f"listenPort={port}\nkvConfigPath={tmp_path / 'kv.json'}\nconfigStorePath={tmp_path / 'conf'}\n")
    command = apache_command("namesrv.NamesrvStartup", conf, tmp_path, ApacheServer.java_options)
    process = Process(command, log=tmp_path / "namesrv.log", ready="boot success", cwd=tmp_path)
    try:
        process.wait_ready()
        yield f"{HOST}:{port}"
    finally:
        process.kill()


def perms(namesrv: str, topic: str) -> list[int]:
    answer, body = request(
        namesrv, RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic, "acceptStandardJsonOnly": "true"}
    )
    return [queues["perm"] for queues in json.loads(body)["queueDatas"]] if answer["code"] == 0 else []


@pytest.mark.parametrize("compressed", ["false", "true"])
def test_apaches_name_server_takes_all_parts(namesrv: str, tmp_path: Path, compressed: str) -> None:
    async def create(broker: Live, perm: int) -> None:
        topics = [TopicConfig(name, read_queue_nums=2, write_queue_nums=2, perm=perm) for name in NAMES]
        body = encode_body(TopicConfigs(topic_config_list=topics))
        assert (await broker.ask(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body)).code == 0

    async def run() -> None:
        settings = IN_PARTS | {"compressedRegister": compressed, "namesrvAddr": namesrv}
        async with live_broker(tmp_path, **settings) as broker:
            for perm in (6, 4):  # a change reaches the topics of every part
                await create(broker, perm)
                for name in NAMES:
                    # Soon: the broker answers without a name server that takes long.
                    while await asyncio.to_thread(perms, namesrv, name) != [perm]:  # noqa: ASYNC110
                        await asyncio.sleep(POLL_S)

    asyncio.run(run())


def test_our_name_server_takes_the_parts_of_apaches_broker(java_parts: None, tmp_path: Path) -> None:
    async def run() -> None:
        name_server = NameServer(NamesrvConfig(kv_config_path=str(tmp_path / "kvConfig.json")))
        namesrv = f"{HOST}:{await name_server.start(HOST, 0)}"
        server = ApacheServer(tmp_path, **IN_PARTS, namesrvAddr=namesrv)
        server.namesrv_addr = namesrv
        conf = tmp_path / "broker.conf"
        conf.write_text(
            "".join(f"{key}={value}\n" for key, value in (ApacheServer.housekeeping | server._settings).items())
        )
        process = server._java("broker", "broker.BrokerStartup", conf)
        try:
            await asyncio.to_thread(process.wait_ready)
            # More of its own topics than fit in one part.
            await asyncio.to_thread(until_routed, namesrv, "TBW102", "SELF_TEST_TOPIC", "broker-a", "BenchmarkTest")
            await asyncio.to_thread(until_routed, namesrv, "SCHEDULE_TOPIC_XXXX", "OFFSET_MOVED_EVENT")
        finally:
            process.kill()
            await name_server.stop()

    asyncio.run(run())


def until_routed(namesrv: str, *topics: str) -> None:
    deadline = time.monotonic() + REQUEST_DEADLINE_S
    for topic in topics:
        while not perms(namesrv, topic):
            assert time.monotonic() < deadline, topic
            time.sleep(POLL_S)
