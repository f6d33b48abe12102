"""Hooks around every request of a session."""

from __future__ import annotations

import asyncio

import pytest

from client.scripted import refuses, scripted_cluster
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
