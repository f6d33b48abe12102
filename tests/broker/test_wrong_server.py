"""A broker's address given where a name server's belongs, and the other way round: the answer says what to do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.live import HOST, live_broker
from skylark.broker.app import Broker
from skylark.broker.config import BrokerConfig
from skylark.nameserver.config import NamesrvConfig
from skylark.nameserver.handlers import handlers
from skylark.nameserver.kvconfig import KVConfig
from skylark.nameserver.routes import Routes
from skylark.wire.codes import NAME_SERVER_CODES, RequestCode, ResponseCode
from skylark.wire.frame import Frame


def test_a_broker_asked_for_a_route_says_what_it_is(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            for code in NAME_SERVER_CODES:
                answer = await broker.ask(code, topic="Orders")
                assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
                assert answer.remark == (
                    f" request type {int(code)} not supported: this is a broker; "
                    f"give the address of a name server (this one registers with {broker.namesrv})"
                )
            unknown = await broker.ask(4711)
            assert unknown.remark == " request type 4711 not supported"

    asyncio.run(run())


def test_a_name_server_that_gets_a_message_says_what_it_is(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            for code in (RequestCode.SEND_MESSAGE_V2, RequestCode.PULL_MESSAGE, RequestCode.HEART_BEAT):
                answer = await broker.pool.request(broker.namesrv, Frame(code, {}), 60.0)
                assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
                assert answer.remark == (
                    f" request type {int(code)} not supported: this is a name server; "
                    "give the address of a broker (port 10911 by default)"
                )

    asyncio.run(run())


def test_the_codes_of_a_name_server_are_those_that_ours_answers(tmp_path: Path) -> None:
    table = handlers(Routes(), KVConfig(tmp_path / "kv.json"), NamesrvConfig(), lambda: 0)
    assert set(table) == NAME_SERVER_CODES


def test_a_broker_that_registers_with_a_broker_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with live_broker(tmp_path / "first") as first:
            config = BrokerConfig(
                store_path_root_dir=str(tmp_path / "second"),
                mapped_file_size_commit_log=1 << 20,
                max_hash_slot_num=100,
                max_index_num=400,
                namesrv_addr=first.address,
            )
            second = Broker(config)
            await second.start(HOST, 0)
            await second.stop()
            told = f"{first.address} is no name server but, it seems, a broker: correct -n or namesrvAddr"
            assert [message for message in caplog.messages if first.address in message] == [told]

    asyncio.run(run())
