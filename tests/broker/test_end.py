"""A broker that ends while clients send: what it stored it has acknowledged."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.live import live_broker
from broker.routed import NEVER_S, SOON_S, broker_at, name_server
from client.inbox import eventually
from relay import relay
from skylark.broker import registration as module
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame


def test_first_messages_are_answered_though_the_broker_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"Topic-{number}" for number in range(10)]

    async def run() -> None:
        async with name_server(tmp_path) as server, relay(server) as between:
            async with broker_at(tmp_path, between.address) as broker:
                between.pause()
                monkeypatch.setattr(module, "MAX_WAIT_S", NEVER_S)
                sends = [asyncio.create_task(broker.send(name)) for name in names]
                assert broker._broker is not None
                topics = broker._broker._topics
                await eventually(lambda: names[-1] in topics)
                monkeypatch.setattr(module, "MAX_WAIT_S", SOON_S)
                await broker.stop()  # while each of them waits for the name server to know its topic
                answers = await asyncio.gather(*sends, return_exceptions=True)
                assert [getattr(answer, "code", answer) for answer in answers] == [ResponseCode.SUCCESS] * len(names)
            between.resume()

    asyncio.run(run())


def test_sends_that_do_not_end_while_the_broker_does(tmp_path: Path) -> None:
    """What is stored is acknowledged, up to the last message; what is not is refused, or sees its connection end."""

    async def run() -> None:
        async with live_broker(tmp_path, flushDiskType="SYNC_FLUSH") as broker:
            sends: list[asyncio.Task[Frame]] = []

            async def send_on() -> None:
                while True:
                    sends.append(asyncio.create_task(broker.send("Busy")))
                    await asyncio.sleep(0)

            sender = asyncio.create_task(send_on())
            await eventually(lambda: bool(sends) and sends[0].done())
            await broker.stop()
            sender.cancel()
            answers = await asyncio.gather(*sends, return_exceptions=True)
        codes = [answer.code for answer in answers if isinstance(answer, Frame)]
        assert set(codes) <= {ResponseCode.SUCCESS, ResponseCode.SERVICE_NOT_AVAILABLE}
        async with live_broker(tmp_path) as broker:
            newest = await broker.ask(RequestCode.GET_MAX_OFFSET, topic="Busy", queueId=0)
            assert int(newest.fields["offset"]) == codes.count(ResponseCode.SUCCESS)

    asyncio.run(run())
