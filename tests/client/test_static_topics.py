"""Logical queues that move, and what requests say of namespaces and units, at servers that do as they are told."""

from __future__ import annotations

import asyncio

from client.scripted import ScriptedCluster, refuses, scripted_cluster, stored
from skylark.client.message import MessageQueue
from skylark.client.producer import Producer
from skylark.client.session import Session
from skylark.client.transactions import TransactionProducer
from skylark.net.connection import Connection
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import GetMaxOffset
from skylark.wire.typed import encode_header


def move(cluster: ScriptedCluster, leader: int) -> None:
    """The queues of topic t go to one of the brokers; the others refuse."""
    cluster.leaders["t"] = cluster.brokers[leader].name
    for index, broker in enumerate(cluster.brokers):
        broker.answer = stored if index == leader else refuses(ResponseCode.NOT_LEADER_FOR_QUEUE)


def test_a_send_follows_its_queue() -> None:
    """Bound to its queue or not: the number stays, the broker is another one."""

    async def main() -> None:
        async with scripted_cluster("broker-a", "broker-b", t=2) as cluster:
            move(cluster, 0)
            async with Producer(cluster.namesrv, "g") as producer:
                for options in ({}, {"ordering_key": "k"}, {"queue": MessageQueue("__syslo__global__", 1, "t")}):
                    first = await producer.send("t", b"m", **options)
                    assert first.queue.broker_name == "__syslo__global__"
                    move(cluster, 1)
                    again = await producer.send("t", b"m", **options)
                    assert again.queue.broker_name == "__syslo__global__"
                    if options:
                        assert again.queue == first.queue
                    move(cluster, 0)
                    await producer.send("t", b"m", **options)
            assert len(cluster.brokers[1].sends) == 6, "three that it stored, and three that it refused"

    asyncio.run(main())


def test_a_question_follows_its_queue() -> None:
    async def main() -> None:
        async with scripted_cluster("broker-a", "broker-b", t=1) as cluster, Session(cluster.namesrv) as session:
            cluster.leaders["t"] = "broker-a"
            [queue] = (await session.routes.get("t")).read_queues
            assert session.routes.broker_of(queue) == "broker-a"
            assert session.routes.broker_of(MessageQueue("broker-b", 0, "t")) == "broker-b"
            assert session.routes.broker_of(MessageQueue(queue.broker_name, 0, "other")) == "__syslo__none__"
            cluster.leaders["t"] = "broker-b"
            await session.routes.get("t", refresh=True)
            request = Frame(RequestCode.GET_MAX_OFFSET, encode_header(GetMaxOffset("t", 0)))
            assert (await session.ask_queue(queue, request)).code == ResponseCode.SUCCESS
            assert [frame.code for frame in cluster.brokers[1].others] == [RequestCode.GET_MAX_OFFSET]

    asyncio.run(main())


def test_namespace_and_unit_on_the_wire() -> None:
    async def main() -> None:
        async with scripted_cluster(**{"tenant%t": 1}) as cluster:
            [broker] = cluster.brokers
            session = Session(cluster.namesrv, namespace="tenant", namespace_v2="proxied", unit_mode=True)
            async with Producer(session=session, group="g") as producer:
                await producer.send("t", b"m")
            fields = broker.sends[0].fields
            assert (fields["a"], fields["b"], fields["k"]) == ("tenant%g", "tenant%t", "true")
            assert (fields["nsd"], fields["ns"]) == ("true", "proxied")
            assert {frame.fields.get("ns") for frame in broker.others} == {"proxied"}

    asyncio.run(main())


def test_a_transaction_ends_at_the_broker_that_has_it() -> None:
    """The queue of its message is a logical one, which no broker has the name of, and which may move meanwhile."""

    async def main() -> None:
        async with scripted_cluster("broker-a", "broker-b", t=1) as cluster:
            ends: list[tuple[str, str]] = []
            for broker in cluster.brokers:

                def end(request: Frame, _: Connection, name: str = broker.name) -> Frame:
                    ends.append((name, request.fields["bname"]))
                    return request.reply()

                broker._handlers[RequestCode.END_TRANSACTION] = end
            move(cluster, 0)
            async with TransactionProducer(cluster.namesrv, "g", checker=None) as producer:
                async with producer.transaction("t", b"m"):
                    pass
                async with producer.transaction("t", b"m") as transaction:
                    move(cluster, 1)
                    await producer.session.routes.get("t", refresh=True)
                    await transaction.rollback()
            assert ends == [("broker-a", "broker-a")] * 2

    asyncio.run(main())
