"""A broker name without a master: what a slave can do, and how a route that has changed is noticed.

The slave is a real broker, which the route of a name server of the test's own has under the id 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from client.inbox import Inbox, numbered
from client.plain import send
from skylark.client.errors import NotReachable, RouteNotFound
from skylark.client.message import MessageQueue
from skylark.client.offsets import committed
from skylark.client.pull_consumer import PullConsumer
from skylark.client.push_consumer import PushConsumer
from skylark.client.session import Session
from skylark.net.connection import Connection
from skylark.net.server import Server, bind
from skylark.testing import LocalCluster
from skylark.wire.bodies import encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.routes import BrokerData, QueueData, TopicRouteData

HOST = "127.0.0.1"
LONG_S = 60.0


class Names:
    """A name server that says of one broker name what a test wants it to."""

    def __init__(self, addresses: dict[int, str]) -> None:
        self.addresses = addresses
        self.asked = 0

    def tell(self, request: Frame, _: Connection) -> Frame:
        self.asked += 1
        if request.fields["topic"] not in ("orders", "%RETRY%g"):
            return request.reply(ResponseCode.TOPIC_NOT_EXIST, "no")
        brokers = [BrokerData(broker_addrs=dict(self.addresses), broker_name="broker-a")] if self.addresses else []
        queues = [QueueData(broker_name="broker-a", perm=6, read_queue_nums=1, write_queue_nums=1)]
        return request.reply(body=encode_body(TopicRouteData(broker_datas=brokers, queue_datas=queues)))


@asynccontextmanager
async def slave_with(count: int) -> AsyncIterator[tuple[LocalCluster, Names, str]]:
    """Messages at a broker, and a name server that has it as a slave."""
    async with LocalCluster(topics={"orders": 1}) as cluster, Session(cluster.name_servers) as session:
        [queue] = (await session.routes.get("orders")).read_queues
        await send(session, queue, *numbered(count))
        names = Names({1: cluster.broker.address})
        server = Server({RequestCode.GET_ROUTEINFO_BY_TOPIC: names.tell})
        address = f"{HOST}:{await server.start(bind(HOST, 0))}"
        try:
            yield cluster, names, address
        finally:
            await server.stop(grace_s=0)


def test_consumption_goes_on_at_a_slave() -> None:
    async def main() -> None:
        async with slave_with(10) as (_, _, name_servers):
            for expected in (numbered(10), []):
                inbox = Inbox()
                consumer = PushConsumer(name_servers, "g", listener=inbox, from_where="first")
                consumer.subscribe("orders")
                async with consumer:
                    await inbox.wait(len(expected))
                    [queue] = [each for each in consumer.queues if each.topic == "orders"]
                assert inbox.bodies == expected, "what was consumed is committed, at the slave"
            async with Session(name_servers) as session:
                await session.routes.get("orders")
                assert await committed(session, "g", queue, LONG_S, is_strict=True) == 10

    asyncio.run(main())


def test_a_pull_consumer_reads_and_commits_at_a_slave() -> None:
    async def main() -> None:
        async with slave_with(3) as (_, _, name_servers), PullConsumer(name_servers, "g") as consumer:
            [queue] = await consumer.queues("orders")
            pulled = await consumer.pull(queue, 0, 32)
            assert [message.body for message in pulled.messages] == numbered(3)
            await consumer.commit(queue, 2)
            assert await consumer.committed(queue) == 2

    asyncio.run(main())


def test_the_id_is_chosen_as_rocketmqs_client_does() -> None:
    async def main() -> None:
        names = Names({0: "m:1", 1: "s:1", 3: "s:3"})
        server = Server({RequestCode.GET_ROUTEINFO_BY_TOPIC: names.tell})
        address = f"{HOST}:{await server.start(bind(HOST, 0))}"
        queue = MessageQueue("broker-a", 0, "orders")
        async with Session(address) as session:
            await session.routes.get("orders")
            assert [await session.readable_id(queue, wanted) for wanted in (0, 1, 2, 3, 4)] == [0, 1, 3, 3, 0]
            names.addresses = {1: "s:1", 2: "s:2"}
            await session.routes.get("orders", refresh=True)
            asked = names.asked
            assert [await session.readable_id(queue, wanted) for wanted in (0, 1, 2, 3)] == [1, 1, 2, 1]
            assert names.asked == asked
            names.addresses = {0: "m:1"}
            assert await session.readable_id(queue, may_be_outdated=False) == 0, "the route was asked for anew"
            assert names.asked == asked + 1
            for gone in ({}, None):
                names.addresses = gone or {}
                with pytest.raises(NotReachable, match="no route leads to broker broker-b"):
                    await session.readable_id(MessageQueue("broker-b", 0, "orders"))
            with pytest.raises((NotReachable, RouteNotFound)):
                await session.readable_id(MessageQueue("broker-c", 0, "nowhere"))
        await server.stop(grace_s=0)

    asyncio.run(main())


def test_a_queue_without_an_address_has_its_route_asked_for_at_once() -> None:
    async def main() -> None:
        async with slave_with(0) as (_, names, name_servers), Session(name_servers) as session:
            addresses, names.addresses = names.addresses, {}
            await session.routes.get("orders")
            names.addresses = addresses
            queue = MessageQueue("broker-a", 0, "orders")
            assert await session.readable_id(queue) == 1
            assert session.routes.brokers == {"broker-a": addresses}

    asyncio.run(main())


def test_a_broker_that_moved_is_found_by_who_pulls_from_it() -> None:
    """Not only when routes are refreshed, every half a minute."""

    async def main() -> None:
        async with slave_with(2) as (cluster, names, name_servers):
            inbox = Inbox()
            consumer = PushConsumer(name_servers, "g", listener=inbox, from_where="first")
            consumer.subscribe("orders")
            async with consumer, Session(cluster.name_servers) as session:
                await inbox.wait(2)
                await cluster.broker.leave()
                broker = cluster.broker
                broker._reserved, broker._port = [], 0
                await broker.start()
                names.addresses = {0: broker.address}
                [queue] = (await session.routes.get("orders", refresh=True)).read_queues
                await send(session, queue, b"later")
                await inbox.until(lambda: b"later" in inbox.bodies)

    asyncio.run(main())
