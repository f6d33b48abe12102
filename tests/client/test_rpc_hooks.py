"""Hooks around every request of a session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from client.inbox import DEADLINE_S, eventually
from client.misbehaving import RAISED
from client.scripted import refuses, scripted_cluster
from skylark.client import session as session_module
from skylark.client.errors import BrokerError, InvalidMessage
from skylark.client.producer import Producer
from skylark.client.rpc_hooks import RpcHook
from skylark.client.session import Session
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame


class Noting(RpcHook):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int | None]] = []

    def before_request(self, address: str, request: Frame) -> None:
        self.seen.append((address, request.code, None))
        request.fields["Signature"] = "right"

    def after_response(self, address: str, request: Frame, response: Frame) -> None:
        self.seen.append((address, request.code, response.code))


class Failing(RpcHook):
    def before_request(self, address: str, request: Frame) -> None:
        raise SystemExit("before")

    def after_response(self, address: str, request: Frame, response: Frame) -> None:
        raise asyncio.CancelledError


def test_hooks_see_every_request_and_every_response(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        noting = Noting()
        async with (
            scripted_cluster("a", orders=1) as cluster,
            Session(cluster.namesrv, rpc_hooks=[Failing(), noting], namespace_v2="tenant") as session,
            Producer(session=session) as producer,
        ):
            (broker,) = cluster.brokers
            await producer.send("orders", b"x")
            broker.answer = refuses(ResponseCode.MESSAGE_ILLEGAL)
            with pytest.raises(BrokerError):
                await producer.send("orders", b"x")
            await producer.send_oneway("orders", b"x")
            assert noting.seen[:2] == [
                (cluster.namesrv, RequestCode.GET_ROUTEINFO_BY_TOPIC, None),
                (cluster.namesrv, RequestCode.GET_ROUTEINFO_BY_TOPIC, ResponseCode.SUCCESS),
            ]
            seen = [(code, answer) for address, code, answer in noting.seen if address == broker.address]
            sent = RequestCode.SEND_MESSAGE_V2
            assert seen == [
                (RequestCode.HEART_BEAT, None),
                (RequestCode.HEART_BEAT, ResponseCode.SUCCESS),
                (sent, None),
                (sent, ResponseCode.SUCCESS),
                (sent, None),
                (sent, ResponseCode.MESSAGE_ILLEGAL),
                (sent, None),
            ]
            fields = [(send.fields["Signature"], send.fields["ns"]) for send in broker.sends]
            assert fields[:2] == [("right", "tenant")] * 2
        assert {"before a request", "after a request"} == {
            " ".join(record.getMessage().split()[-3:]) for record in caplog.records if "failed" in record.getMessage()
        }

    asyncio.run(run())


def test_what_is_no_hook_is_refused() -> None:
    with pytest.raises(InvalidMessage, match=r"rpc_hooks has .*before_request and after_response"):
        Session(rpc_hooks=[print])  # type: ignore[list-item]


@pytest.mark.parametrize("act", RAISED.values(), ids=RAISED)
def test_what_a_hook_raises_changes_nothing(act: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    class Raising(RpcHook):
        def before_request(self, address: str, request: Frame) -> None:
            request.fields["Half"] = "done"
            act()

        def after_response(self, address: str, request: Frame, response: Frame) -> None:
            act()

    async def run() -> None:
        async with (
            scripted_cluster("a", orders=1) as cluster,
            Session(cluster.namesrv, rpc_hooks=[Raising()]) as session,
            Producer(session=session, retries=0, timeout_s=DEADLINE_S) as producer,
        ):
            await producer.send("orders", b"x")
            assert "Half" not in cluster.brokers[0].sends[0].fields

    asyncio.run(run())
    logged = [record.getMessage().rpartition(" failed ")[2] for record in caplog.records]
    assert logged.count("before a request") == logged.count("after a request") >= 3


def test_a_hook_that_sets_nonsense_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(RpcHook):
        def before_request(self, address: str, request: Frame) -> None:
            request.fields["Retries"] = 5  # type: ignore[assignment]

    class Asynchronous(RpcHook):
        async def before_request(self, address: str, request: Frame) -> None:  # type: ignore[override]
            """Nobody waits for it."""

    async def run() -> None:
        hooks = [Wrong(), Asynchronous()]
        async with (
            scripted_cluster("a", orders=1) as cluster,
            Session(cluster.namesrv, rpc_hooks=hooks) as session,
            Producer(session=session, retries=0, timeout_s=DEADLINE_S) as producer,
        ):
            await producer.send("orders", b"x")
            assert "Retries" not in cluster.brokers[0].sends[0].fields

    asyncio.run(run())
    assert "it set the field ('Retries', 5)" in caplog.text
    assert "is a coroutine function" in caplog.text


def test_a_hook_that_cancels_the_task_it_runs_in_ends_no_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "HEARTBEAT_INTERVAL_S", 0.01)
    monkeypatch.setattr(session_module, "ROUTE_INTERVAL_S", 0.01)
    cancelled: dict[int, int] = {}
    later: dict[int, int] = {}

    class Cancelling(RpcHook):
        def before_request(self, address: str, request: Frame) -> None:
            task = asyncio.current_task()
            if not has_begun.is_set() or task is None:
                return
            if cancelled.setdefault(request.code, 0) < 3:
                cancelled[request.code] += 1
                task.cancel()
            else:
                later[request.code] = later.get(request.code, 0) + 1

    async def run() -> None:
        async with (
            scripted_cluster("a", orders=1) as cluster,
            Session(cluster.namesrv, rpc_hooks=[Cancelling()]) as session,
            Producer(session=session) as producer,
        ):
            await producer.send("orders", b"x")
            has_begun.set()
            wanted = {RequestCode.HEART_BEAT, RequestCode.GET_ROUTEINFO_BY_TOPIC}
            await eventually(lambda: wanted <= later.keys())
            has_begun.clear()

    has_begun = asyncio.Event()
    asyncio.run(run())
