"""One client id, its connections and what brokers ask of it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from client.scripted import HOST, ScriptedBroker, scripted_cluster
from relay import relay
from skylark.client import session as module
from skylark.client.addresses import parse_name_servers
from skylark.client.errors import ClientClosed, ForkedProcess, NotReachable, RequestTimeout, RocketMQError
from skylark.client.lite_pull_consumer import LitePullConsumer
from skylark.client.message import Message, MessageQueue
from skylark.client.producer import Producer
from skylark.client.pull_consumer import PullConsumer
from skylark.client.push_consumer import PushConsumer
from skylark.client.session import Session
from skylark.client.simple_consumer import SimpleConsumer
from skylark.net import pool
from skylark.net.connection import Connection
from skylark.net.server import bind
from skylark.wire import fastjson
from skylark.wire.bodies import ConsumerData, ConsumerStatus, Heartbeat, ResetOffsets, decode_body, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import Message as Outgoing
from skylark.wire.records import encode_record

LONG_S = 30.0
QUEUE = MessageQueue("broker-a", 0, "orders")


class Member:
    """A consumer that notes what it is told."""

    group = "billing"

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.rebalanced = asyncio.Event()

    def data(self) -> ConsumerData:
        return ConsumerData(group_name=self.group, consume_type="CONSUME_PASSIVELY", message_model="CLUSTERING")

    def rebalance_soon(self) -> None:
        self.rebalanced.set()

    def reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        self.told.append((topic, dict(offsets)))

    def positions(self, topic: str) -> dict[MessageQueue, int]:
        return {QUEUE: 7}

    def running_info(self) -> Mapping[str, object]:
        return {"properties": {"PROP_CONSUMER_START_TIMESTAMP": "1"}}

    async def consume_directly(self, message: Message) -> Mapping[str, object]:
        self.told.append(message.body)
        return {"order": False, "consumeResult": "CR_SUCCESS"}


async def nothing(_: Message) -> None:
    """A listener."""


def subscribed(consumer: PushConsumer | LitePullConsumer | SimpleConsumer) -> Any:
    consumer.subscribe("orders")
    return consumer


CLIENTS: dict[str, Callable[[Session], Any]] = {
    "producer": lambda session: Producer(group="g", session=session),
    "push": lambda session: subscribed(PushConsumer(group="g", session=session, listener=nothing)),
    "lite": lambda session: subscribed(LitePullConsumer(group="g", session=session)),
    "simple": lambda session: subscribed(SimpleConsumer(group="g", session=session)),
}


def beats(broker: ScriptedBroker) -> list[Heartbeat]:
    return [decode_body(Heartbeat, frame.body) for frame in broker.others if frame.code == RequestCode.HEART_BEAT]


def test_name_servers_are_parsed() -> None:
    assert parse_name_servers("a:1;b:2, http://c:3 ;") == ["a:1", "b:2", "c:3"]
    assert parse_name_servers(["a:1", "[::1]:2"]) == ["a:1", "[::1]:2"]
    for wrong in ("", "a", "a:b", [], ";"):
        with pytest.raises(ValueError, match="host:port"):
            parse_name_servers(wrong)


def test_the_client_id_is_made_as_apaches() -> None:
    assert Session(client_ip="10.0.0.1", instance="i").client_id == "10.0.0.1@i"
    assert Session(client_ip="10.0.0.1", instance="i", unit="u").client_id == "10.0.0.1@i@u"
    one, two = Session(client_ip="10.0.0.1"), Session(client_ip="10.0.0.1")
    assert one.client_id.startswith(f"10.0.0.1@{os.getpid()}#")
    assert one.client_id != two.client_id


def test_the_next_name_server_is_asked_when_one_is_down() -> None:
    async def run() -> None:
        with bind(HOST, 0) as nobody_listens:
            down = f"{HOST}:{nobody_listens.getsockname()[1]}"
            async with scripted_cluster("a", orders=1) as cluster:
                for name_servers in (f"{down};{cluster.namesrv}", f"{cluster.namesrv};{down}"):
                    async with Session(name_servers) as session:
                        assert (await session.routes.get("orders")).write_queues
                        good = session._name_server
                        await session.routes.get("orders", refresh=True)
                        assert session._name_server == good, "the good one is remembered"
                async with Session(down) as session:
                    with pytest.raises(NotReachable, match=down):
                        await session.routes.get("orders")

    asyncio.run(run())


def test_a_silent_name_server_leaves_time_for_the_others() -> None:
    async def run() -> None:
        with socket.create_server((HOST, 0)) as silent:
            address = f"{HOST}:{silent.getsockname()[1]}"
            async with scripted_cluster("a", orders=1) as cluster, Session([address, cluster.namesrv]) as session:
                session._name_server = 0
                request = Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "orders"})
                assert (await session.ask_name_server(request, 3)).code == ResponseCode.SUCCESS
            async with Session(address) as session:
                with pytest.raises(RequestTimeout, match=address):
                    await session.ask_name_server(request, 0.05)

    asyncio.run(run())


def test_a_name_server_that_is_reached_again_is_dialled_again() -> None:
    """A connection that leads nowhere does not end by itself."""

    async def run() -> None:
        request = Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "orders"})
        async with (
            scripted_cluster("a", orders=1) as cluster,
            relay(cluster.namesrv) as between,
            Session(between.address) as session,
        ):
            await session.ask_name_server(request, LONG_S)
            between.cut()
            with pytest.raises(RequestTimeout, match=f"no answer from {between.address} within 0.05 s"):
                await session.ask_name_server(request, 0.05)
            assert (await session.ask_name_server(request, LONG_S)).code == ResponseCode.SUCCESS
            assert between.dials == 2

    asyncio.run(run())


def test_a_short_wait_is_enough_to_leave_a_silent_name_server_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the session itself would wait for an answer."""

    async def run() -> None:
        async with (
            scripted_cluster("a", orders=1) as cluster,
            relay(cluster.namesrv) as between,
            Session(between.address, request_timeout_s=LONG_S) as session,
        ):
            await session.routes.get("orders")
            between.cut()
            monkeypatch.setattr(pool, "SILENCE_S", 0.05)
            async with asyncio.timeout(LONG_S / 2):
                await session.routes.get("orders", refresh=True)
            assert between.dials == 2

    asyncio.run(run())


def test_members_are_told_to_the_brokers() -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster, Session(cluster.namesrv) as session:
            (broker,) = cluster.brokers
            await session.routes.get("orders")
            await session.add_producer("makers")
            await session.add_producer("makers")
            member = Member()
            await session.add_consumer(member)
            last = beats(broker)[-1]
            assert last.client_id == session.client_id
            assert [data.group_name for data in last.producer_data_set] == ["makers"]
            assert [data.group_name for data in last.consumer_data_set] == ["billing"]
            with pytest.raises(RocketMQError, match="session of its own"):
                await session.add_consumer(Member())
            await session.remove_producer("makers")
            await session.remove_consumer(Member())  # not the one that joined
            await session.remove_consumer(member)
            await session.remove_consumer(member)
            await session.remove_producer("makers")
            left = [frame.fields for frame in broker.others if frame.code == RequestCode.UNREGISTER_CLIENT]
            assert left == [
                {"clientID": session.client_id, "consumerGroup": "billing"},
                {"clientID": session.client_id, "producerGroup": "makers"},
            ]

    asyncio.run(run())


def test_a_new_connection_begins_with_a_heartbeat() -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster, Session(cluster.namesrv) as session:
            (broker,) = cluster.brokers
            await session.routes.get("orders")
            await session.add_consumer(Member())
            before = await session.connect(broker.address, LONG_S)
            await broker.stop()
            with pytest.raises(ConnectionError):
                await before.request(Frame(RequestCode.GET_MAX_OFFSET), LONG_S)
            await broker.start()
            broker.others.clear()
            answer = await session.ask_broker("a", Frame(RequestCode.GET_MAX_OFFSET), LONG_S)
            assert answer.code == ResponseCode.SUCCESS
            assert [frame.code for frame in broker.others] == [RequestCode.HEART_BEAT, RequestCode.GET_MAX_OFFSET]

    asyncio.run(run())


def test_a_broker_that_does_not_hear_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster, Session(cluster.namesrv) as session:
            (broker,) = cluster.brokers
            await session.routes.get("orders")
            await broker.stop()
            await session.add_producer("makers")
            await session.heartbeat()
            warnings = [record for record in caplog.records if record.name == "skylark.client.session"]
            assert len(warnings) == 1
            assert broker.address in warnings[0].getMessage()

    asyncio.run(run())


def test_brokers_are_found_by_name_and_id() -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster, Session(cluster.namesrv) as session:
            with pytest.raises(NotReachable, match="no route"):
                session.broker_address("a")
            await session.routes.get("orders")
            session.routes._brokers = {"a": {0: "m:1", 2: "s:1"}, "b": {1: "s:2"}}
            assert session.broker_address("a") == "m:1"
            assert session.broker_address("a", 2) == "s:1"
            assert session.broker_address("a", None) == "m:1"
            assert session.broker_address("a", 9) == "m:1"
            assert session.broker_address("b", None) == "s:2"
            with pytest.raises(NotReachable, match="no master"):
                session.broker_address("b")

    asyncio.run(run())


def test_a_broker_that_hangs_does_not_hang_the_caller() -> None:
    async def run() -> None:
        with socket.create_server((HOST, 0)) as silent:
            address = f"{HOST}:{silent.getsockname()[1]}"
            async with scripted_cluster("a") as cluster, Session(cluster.namesrv) as session:
                with pytest.raises(RequestTimeout, match=address):
                    await session.ask_address(address, Frame(RequestCode.GET_MAX_OFFSET), 0.05)

    asyncio.run(run())


def test_a_connection_that_leads_nowhere_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        with socket.create_server((HOST, 0)) as silent:
            address = f"{HOST}:{silent.getsockname()[1]}"
            async with scripted_cluster("a") as cluster, Session(cluster.namesrv) as session:
                connection = await session.connect(address, LONG_S)
                with pytest.raises(RequestTimeout):
                    await session.ask_address(address, Frame(RequestCode.GET_MAX_OFFSET), 0.05)
                assert connection.is_open, "too short a time to tell"
                monkeypatch.setattr(module, "SILENCE_S", 0.01)
                with pytest.raises(RequestTimeout):
                    await session.ask_address(address, Frame(RequestCode.GET_MAX_OFFSET), 0.05)
                assert not connection.is_open

    asyncio.run(run())


async def connected(session: Session, broker: ScriptedBroker) -> Connection:
    """The broker's end of the connection to the client."""
    await session.connect(broker.address, LONG_S)
    await broker.until(RequestCode.HEART_BEAT)
    return broker.connections[-1]


def test_what_brokers_ask_reaches_the_member() -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster, Session(cluster.namesrv) as session:
            (broker,) = cluster.brokers
            member = Member()
            await session.routes.get("orders")
            await session.add_consumer(member)
            client = await connected(session, broker)

            client.notify(Frame(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "billing"}))
            async with asyncio.timeout(LONG_S):
                await member.rebalanced.wait()

            fields = {"group": "billing", "topic": "orders", "timestamp": "0", "isForce": "true"}
            body = encode_body(ResetOffsets(offset_table={QUEUE: 3}))
            client.notify(Frame(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, fields, body))
            answer = await client.request(
                Frame(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, {"group": "billing", "topic": "orders"}), LONG_S
            )
            assert member.told == [("orders", {QUEUE: 3})]
            assert decode_body(ConsumerStatus, answer.body).message_queue_table == {QUEUE: 7}

            fields = {"consumerGroup": "billing", "clientId": session.client_id}
            answer = await client.request(Frame(RequestCode.GET_CONSUMER_RUNNING_INFO, fields), LONG_S)
            assert fastjson.loads(answer.body)["properties"] == {"PROP_CONSUMER_START_TIMESTAMP": "1"}

            record = encode_record(
                Outgoing("orders", 0, b"once", {}),
                queue_offset=0, log_offset=0, store_timestamp_ms=1, store_host=bytes(8),
            )  # fmt: skip
            answer = await client.request(Frame(RequestCode.CONSUME_MESSAGE_DIRECTLY, fields, record), LONG_S)
            assert msgspec.json.decode(answer.body)["consumeResult"] == "CR_SUCCESS"
            assert member.told[-1] == b"once"

            fields["consumerGroup"] = "nobody"
            answer = await client.request(Frame(RequestCode.GET_CONSUMER_RUNNING_INFO, fields), LONG_S)
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert "<nobody> not exist" in (answer.remark or "")

    asyncio.run(run())


def test_it_ends_with_its_last_user() -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster:
            session = Session(cluster.namesrv)
            with pytest.raises(ClientClosed):
                await session.routes.get("orders")
            await session.acquire()
            await session.acquire()
            await session.release()
            assert (await session.routes.get("orders")).write_queues
            await session.release()
            await session.release()
            assert not session.is_running
            with pytest.raises(ClientClosed):
                await session.routes.get("orders", refresh=True)
            async with session:
                await session.routes.get("orders", refresh=True)

    asyncio.run(run())


def test_who_enters_while_the_last_one_leaves_has_a_session_of_its_own() -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster:
            [broker] = cluster.brokers
            session = Session(cluster.namesrv)
            for turn in range(50):
                await session.acquire()
                await session.routes.get("orders", refresh=True)
                leaving = asyncio.create_task(session.release())
                for _ in range(turn % 4):
                    await asyncio.sleep(0)
                async with session:
                    await session.connect(broker.address, LONG_S)
                    await leaving
                    assert session.is_running
                    assert session.ready_connection(broker.address) is not None
                    await session.routes.get("orders", refresh=True)
            assert not session.is_running

    asyncio.run(run())


def test_short_lived_producers_share_a_session() -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster:
            session = Session(cluster.namesrv)

            async def come_and_go(number: int) -> None:
                for _ in range(20):
                    async with Producer(group=f"g{number}", session=session) as producer:
                        await producer.send("orders", b"m", timeout_s=LONG_S)

            await asyncio.gather(*map(come_and_go, range(5)))
            assert len(cluster.brokers[0].sends) == 100
            assert not session.is_running
            assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_a_cancelled_end_is_an_end() -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster:
            session = Session(cluster.namesrv)
            await session.acquire()
            leaving = asyncio.create_task(session.release())
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            assert not session.is_running
            async with session:
                await session.routes.get("orders")

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["producer", "push", "lite", "simple"])
def test_a_cancelled_start_leaves_no_member_behind(kind: str) -> None:
    """The broker hears of it, is slow to answer, and is told then that the member is gone."""

    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster, Session(cluster.namesrv) as session:
            [broker] = cluster.brokers
            may_answer = asyncio.Event()

            async def beat(request: Frame, _: Connection) -> Frame:
                broker.others.append(request)
                broker.heard.setdefault(request.code, asyncio.Event()).set()
                await may_answer.wait()
                return request.reply()

            broker._handlers[RequestCode.HEART_BEAT] = beat
            broker._handlers[RequestCode.CHECK_CLIENT_CONFIG] = lambda request, _: request.reply()
            await session.routes.get("orders")
            starting = asyncio.create_task(CLIENTS[kind](session).start())
            await broker.until(RequestCode.HEART_BEAT)
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            may_answer.set()
            await broker.until(RequestCode.UNREGISTER_CLIENT)
            assert not session._producers
            assert not session._consumers
            assert session._users == 1

    asyncio.run(run())


def test_a_client_id_is_one_sessions_at_a_time() -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster, scripted_cluster("b", orders=1) as elsewhere:
            first, second = (Session(cluster.namesrv, instance="i") for _ in range(2))
            async with first:
                with pytest.raises(RocketMQError, match=f"{first.client_id} runs in this process already.*session="):
                    await second.acquire()
                assert not second.is_running
                async with Session(elsewhere.namesrv, instance="i"), Session(cluster.namesrv, instance="j"):
                    pass
            async with second:
                await second.routes.get("orders")

    asyncio.run(run())


def test_a_client_id_is_free_when_its_event_loop_is_over() -> None:
    """Also if nobody released the session then."""
    kept: list[Session] = []

    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster:
            session = Session(name_servers, instance="i")
            session.name_servers = [cluster.namesrv, name_servers]
            kept.append(session)
            await session.acquire()
            assert (await session.routes.get("orders")).write_queues

    name_servers = f"{HOST}:1"
    asyncio.run(run())
    asyncio.run(run())
    assert not any(session.is_alive for session in kept)


def test_a_child_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster, Session(cluster.namesrv) as session:
            with monkeypatch.context() as patch:
                patch.setattr(os, "getpid", lambda: -1)
                with pytest.raises(ForkedProcess):
                    await session.routes.get("orders")

    asyncio.run(run())


def test_who_asks_for_a_route_while_the_session_is_closed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        dialled = asyncio.Event()

        async def dial(*_: object) -> None:
            dialled.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(pool.Pool, "_dial", dial)
        consumer = PullConsumer("127.0.0.1:1", "g")
        await consumer.start()
        asking = asyncio.create_task(consumer.queues("orders"))
        await dialled.wait()
        await consumer.close()
        with pytest.raises(ClientClosed, match="route of topic 'orders'"):
            await asking

    asyncio.run(run())


def test_the_name_servers_may_change_while_they_are_asked() -> None:
    async def run() -> None:
        async with scripted_cluster("a", orders=1) as cluster, Session([f"{HOST}:1", cluster.namesrv]) as session:
            assert session._pool is not None
            session._name_server = 0
            ask = session._pool.ask

            async def ask_late(*args: Any) -> Frame:
                session.name_servers = [cluster.namesrv]  # as the address server says now
                return await ask(*args)

            session._pool.ask = ask_late  # type: ignore[method-assign]
            assert (await session.routes.get("orders")).write_queues

    asyncio.run(run())
