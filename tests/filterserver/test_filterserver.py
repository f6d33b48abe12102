"""Filter classes at a filter server beside a running broker: what they let through, and what they can't break."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from zlib import crc32

import pytest

from broker.live import HOST, Live, live_broker, messages_of
from client.inbox import Inbox, eventually
from relay import relay
from skylark.client.errors import BrokerError, NotReachable
from skylark.client.producer import Producer
from skylark.client.push_consumer import PushConsumer
from skylark.filterserver import app
from skylark.filterserver.app import FilterServer
from skylark.filterserver.child import Order
from skylark.filterserver.classes import FORGOTTEN_AFTER_MS, MAX_SOURCE_BYTES
from skylark.filterserver.config import FiltersrvConfig
from skylark.filterserver.worker import ClassFailed, Worker
from skylark.net.server import Server, bind
from skylark.wire.bodies import decode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.routes import TopicRouteData

CLASS_FILTER = 8
EVEN = """
class Even:
    def match(self, message):
        return int(message.body) % 2 == 0
"""
LOOPING = EVEN.replace("return", "while message.body == b'3': pass\n        return")
EATING = EVEN.replace("return", "if message.body == b'3': bytearray(1 << 30)\n        return")
DYING = EVEN.replace("return", "import os\n        if message.body == b'3': os._exit(7)\n        return")
RAISING = EVEN.replace("return", "if message.body == b'3': raise KeyError('three')\n        return")


class Standing:
    """A broker and a filter server beside it."""

    def __init__(self, broker: Live, address: str, clock_ms: list[int]) -> None:
        self.broker = broker
        self.address = address
        self.clock_ms = clock_ms

    async def upload(self, source: str | bytes, name: str = "my.Even", group: str = "readers", **more: object) -> Frame:
        body = source.encode() if isinstance(source, str) else source
        fields = {"consumerGroup": group, "topic": "t", "className": name, "classCRC": crc32(body) & 0x7FFFFFFF} | more
        request = Frame(
            RequestCode.REGISTER_MESSAGE_FILTER_CLASS, {key: str(value) for key, value in fields.items()}, body
        )
        return await self.broker.pool.request(self.address, request, 120)

    async def pull(self, offset: int = 0, group: str = "readers", wait_ms: int = 0) -> Frame:
        fields = {
            "consumerGroup": group, "topic": "t", "queueId": 0, "queueOffset": offset, "maxMsgNums": 32,
            "sysFlag": CLASS_FILTER | (2 if wait_ms else 0), "commitOffset": 0, "suspendTimeoutMillis": wait_ms,
            "subVersion": 1,
        }  # fmt: skip
        request = Frame(RequestCode.PULL_MESSAGE, {key: str(value) for key, value in fields.items()})
        return await self.broker.pool.request(self.address, request, 120)

    async def send(self, *numbers: int) -> None:
        for number in numbers:
            await self.broker.send("t", b"%d" % number)

    async def route_servers(self) -> list[str]:
        request = Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"})
        answer = await self.broker.pool.request(self.broker.namesrv, request)
        return decode_body(TopicRouteData, answer.body).filter_server_table.get(self.broker.address, [])

    async def until_routed(self, is_there: bool) -> None:
        while bool(await self.route_servers()) is not is_there:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def standing(root: Path, **settings: object) -> AsyncIterator[Standing]:
    async with live_broker(root) as broker:
        clock_ms = [0]
        # A class that decides must not seem to loop because the machine is busy.
        wanted = {"client_upload_filter_class_enable": True, "filter_timeout_millis": 60_000} | settings
        config = FiltersrvConfig(connect_which_broker=broker.address, **wanted)  # type: ignore[arg-type]
        server = FilterServer(config, clock=lambda: clock_ms[0])
        port = await server.start(HOST, 0)
        try:
            yield Standing(broker, f"{HOST}:{port}", clock_ms)
        finally:
            await server.stop()


async def noted(address: str) -> None:
    """Starts and stops a filter server of what is no broker."""
    server = FilterServer(FiltersrvConfig(connect_which_broker=address))
    await server.start(HOST, 0)
    await server.stop()


def test_a_server_that_knows_no_filter_servers(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        other = Server({})
        address = f"{HOST}:{await other.start(bind(HOST, 0))}"
        await noted(address)
        await other.stop()
        assert caplog.messages == [f"broker {address} does not know this filter server: request type 301 not supported"]

    asyncio.run(run())


def test_a_broker_that_does_not_answer(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_REQUEST_S", 0.01)
    with socket.create_server((HOST, 0)) as mute:
        address = f"{HOST}:{mute.getsockname()[1]}"
        asyncio.run(noted(address))
    (message,) = caplog.messages
    reason = f"no (answer from|connection to) {address} within 0.01 s"
    assert re.fullmatch(f"broker {address} does not know this filter server: {reason}", message)


def test_a_broker_that_is_reached_again_is_dialled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that leads nowhere does not end by itself."""
    monkeypatch.setattr(app, "RETRY_INTERVAL_S", 0.01)
    monkeypatch.setattr(app, "REGISTER_INTERVAL_S", 0.01)

    async def run() -> None:
        async with live_broker(tmp_path) as broker, relay(broker.address) as between:
            server = FilterServer(FiltersrvConfig(connect_which_broker=between.address))
            await server.start(HOST, 0)
            monkeypatch.setattr(app, "_REQUEST_S", 0.05)
            between.cut()
            await eventually(lambda: between.dials > 1 and server._is_registered)
            await server.stop()

    asyncio.run(run())


def bodies(answer: Frame) -> list[bytes]:
    return [each.body for each in messages_of(answer)]


def test_a_class_decides(tmp_path: Path) -> None:
    async def run() -> None:
        async with standing(tmp_path) as here:
            await here.send(*range(5))
            assert (await here.pull()).remark == "Find Filter class failed, not registered"
            for _ in range(2):
                assert (await here.upload(EVEN)).code == ResponseCode.SUCCESS
            answer = await here.pull()
            assert (bodies(answer), answer.fields["nextBeginOffset"]) == ([b"0", b"2", b"4"], "5")
            odd = await here.pull(3)
            assert (bodies(odd), odd.fields["nextBeginOffset"]) == ([b"4"], "5")
            await here.send(7)
            none = await here.pull(5)
            assert (none.code, none.fields["nextBeginOffset"]) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "6")
            waiting = asyncio.create_task(here.pull(6, wait_ms=20_000))
            await asyncio.sleep(0)
            await here.send(8)
            assert bodies(await waiting) == [b"8"]
            moved = await here.pull(99)
            assert (moved.code, moved.fields["nextBeginOffset"]) == (ResponseCode.PULL_OFFSET_MOVED, "7")
            # Another class of the same consumers takes the place of the first.
            assert (await here.upload(EVEN.replace("== 0", "== 1"))).code == ResponseCode.SUCCESS
            assert bodies(await here.pull()) == [b"1", b"3", b"7"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("source", "name", "reason"),
    [
        ("class Even:\n  def match(", "my.Even", "SyntaxError"),
        ("Even = 5", "my.Even", "has no class Even"),
        ("class Odd: pass", "my.Even", "has no class Even"),
        ("class Even: pass", "my.Even", "has no method match"),
        ("class Even:\n  def __init__(self): 1 / 0", "my.Even", "ZeroDivisionError"),
        ("raise SystemExit", "my.Even", "SystemExit"),
        ("x = bytearray(1 << 30)", "my.Even", "MemoryError"),
        ("import os; os._exit(3)", "my.Even", "ended by itself, with status 3"),
        (EVEN, "my.Even; import os", "is not the name of a class"),
        (EVEN, "x" * 300, "is not the name of a class"),
        ("#" * (MAX_SOURCE_BYTES + 1), "my.Even", "65536 are allowed"),
        ("", "my.Even", "1 to 65536 are allowed"),
        (b"\xff\xfe", "my.Even", "is not UTF-8"),
    ],
)
def test_a_class_that_is_not_taken(tmp_path: Path, source: str | bytes, name: str, reason: str) -> None:
    async def run() -> None:
        async with standing(tmp_path) as here:
            answer = await here.upload(source, name)
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert reason in (answer.remark or "")

    asyncio.run(run())


def test_a_class_that_loops_while_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skylark.filterserver.worker._START_S", 1.0)

    async def run() -> None:
        async with standing(tmp_path, filter_timeout_millis=10) as here:
            answer = await here.upload("while True: pass")
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert "my.Even" in (answer.remark or "")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (LOOPING, "did not decide within 2 s, and was stopped"),
        (EATING, "MemoryError"),
        (DYING, "ended by itself, with status 7"),
        (RAISING, "fails for the message at offset 3: KeyError: 'three'"),
    ],
)
def test_a_class_that_fails_loses_nothing_and_harms_nobody(tmp_path: Path, source: str, reason: str) -> None:
    settings = {"filter_timeout_millis": 2000} if source == LOOPING else {}

    async def run() -> None:
        async with standing(tmp_path, **settings) as here:
            await here.send(*range(6))
            await here.upload(source)
            await here.upload(EVEN, group="others")
            failed, fine = await asyncio.gather(here.pull(), here.pull(group="others"))
            assert failed.code == ResponseCode.SYSTEM_ERROR
            assert reason in (failed.remark or "")
            assert bodies(fine) == [b"0", b"2", b"4"]
            resting = await here.pull()
            assert resting.code == ResponseCode.SYSTEM_ERROR
            assert "tried again in" in (resting.remark or "")
            # The same class decides about what does not break it, once it has rested.
            here.clock_ms[0] += 60_000
            assert bodies(await here.pull(4)) == [b"4"]
            # A better one gets everything.
            await here.upload(EVEN)
            assert bodies(await here.pull()) == [b"0", b"2", b"4"]

    asyncio.run(run())


def test_the_status_of_a_process_is_its_own_though_its_end_is_seen_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output of a process has ended, and so has the process, but the thread that waits for it comes last."""
    is_stopped = threading.Event()
    waitpid = os.waitpid

    def late(pid: int, options: int) -> tuple[int, int]:
        if threading.current_thread().name.startswith("asyncio-waitpid"):
            assert is_stopped.wait(60)
        return waitpid(pid, options)

    class Ended(Worker):
        def kill(self) -> None:
            if self.is_alive:
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            super().kill()
            is_stopped.set()

    monkeypatch.setattr(os, "waitpid", late)
    with pytest.raises(ClassFailed, match="ended by itself, with status 7"):
        asyncio.run(Ended.start(Order("my.Even", "import os; os._exit(7)", "broker-a", 256 << 20, 60.0)))


def test_members_that_upload_their_class_at_once_share_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    start = Worker.start

    async def noted(order: Order) -> Worker:
        started.append(order.class_name)
        return await start(order)

    monkeypatch.setattr(Worker, "start", noted)

    async def run() -> None:
        async with standing(tmp_path) as here:
            await here.send(*range(3))
            answers = await asyncio.gather(*(here.upload(EVEN) for _ in range(6)))
            assert {answer.code for answer in answers} == {ResponseCode.SUCCESS}
            assert started == ["my.Even"]
            assert bodies(await here.pull()) == [b"0", b"2"]

    asyncio.run(run())


def test_uploads_are_refused_unless_switched_on(tmp_path: Path) -> None:
    async def run() -> None:
        async with standing(tmp_path, client_upload_filter_class_enable=False) as here:
            answer = await here.upload(EVEN)
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert "clientUploadFilterClassEnable=true" in (answer.remark or "")

    asyncio.run(run())


def test_a_checksum_and_a_number_of_classes(tmp_path: Path) -> None:
    async def run() -> None:
        async with standing(tmp_path, max_filter_classes=1) as here:
            assert "fails its checksum" in ((await here.upload(EVEN, classCRC=5)).remark or "")
            assert (await here.upload(EVEN)).code == ResponseCode.SUCCESS
            refused = await here.upload(EVEN, group="others")
            assert "maxFilterClasses" in (refused.remark or "")

    asyncio.run(run())


def test_what_nobody_uses_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "REGISTER_INTERVAL_S", 0.011)

    async def run() -> None:
        async with standing(tmp_path) as here:
            await here.upload(EVEN)
            here.clock_ms[0] += FORGOTTEN_AFTER_MS + 1
            while (await here.pull()).remark != "Find Filter class failed, not registered":
                await asyncio.sleep(0.01)
                here.clock_ms[0] += FORGOTTEN_AFTER_MS + 1

    asyncio.run(run())


def test_routes_name_the_filter_servers(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.send("t")
            server = FilterServer(FiltersrvConfig(connect_which_broker=broker.address))
            here = Standing(broker, f"{HOST}:{await server.start(HOST, 0)}", [])
            await here.until_routed(True)
            assert await here.route_servers() == [here.address]
            await server.stop()
            await here.until_routed(False)
            for address in (f"{HOST}:1", f"{HOST}:2"):  # one that moved leaves its old address
                answer = await broker.ask(RequestCode.REGISTER_FILTER_SERVER, filterServerAddr=address)
                assert answer.code == ResponseCode.SUCCESS
                while await here.route_servers() != [address]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            bad = await broker.ask(RequestCode.REGISTER_FILTER_SERVER, filterServerAddr="nowhere")
            assert bad.code == ResponseCode.INVALID_PARAMETER

    asyncio.run(run())


class Odd:
    def match(self, message):  # type: ignore[no-untyped-def]
        return int(message.body) % 2 == 1


def test_our_consumer_uploads_its_class_and_pulls_through_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with standing(tmp_path) as here:
            await here.send(0)
            await here.until_routed(True)
            inbox = Inbox()
            consumer = PushConsumer(here.broker.namesrv, "readers", listener=inbox, from_where="first")
            consumer.subscribe("t", filter_class=Odd)
            async with consumer, Producer(here.broker.namesrv) as producer:
                for number in range(10):
                    await producer.send("t", b"%d" % number)
                await inbox.wait(5)
                assert sorted(inbox.bodies) == [b"1", b"3", b"5", b"7", b"9"]
                # What was filtered out is behind the consumer too.
                await eventually(lambda: sum(consumer.positions("t").values()) == 11)

    asyncio.run(run())


def test_our_consumer_does_not_start_without_its_filter(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.send("t")
            consumer = PushConsumer(broker.namesrv, "readers", listener=print)
            consumer.subscribe("t", filter_class=Odd)
            with pytest.raises(NotReachable, match="skylark filtersrv"):
                await consumer.start()
        async with standing(tmp_path / "second") as here:
            await here.send(1)
            await here.until_routed(True)
            consumer = PushConsumer(here.broker.namesrv, "readers", listener=print)
            consumer.subscribe("t", filter_class=("my.Even", "class Even: pass"))
            with pytest.raises(BrokerError, match="no method match"):
                await consumer.start()

    asyncio.run(run())
