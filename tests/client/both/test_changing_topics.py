"""Topics that are changed while producers and consumers of both languages work with them."""

from __future__ import annotations

import asyncio

from drivers import Session
from mqadmin import Admin
from servers import Server

from client.both.traffic import Traffic

READ, WRITE, BOTH = "4", "2", "6"


def change(admin: Admin, server: Server, topic: str, read: int, write: int) -> None:
    admin("updateTopic", "-b", server.broker_addr, "-t", topic, "-r", str(read), "-w", str(write))


def test_queues_come_and_go(
    server: Server, namesrv: str, admin: Admin, java_session: Session, topic: str, group: str
) -> None:
    async def main() -> None:
        change(admin, server, topic, 4, 4)
        async with Traffic(namesrv, java_session, topic, group) as traffic:
            await traffic.more()
            await asyncio.to_thread(change, admin, server, topic, 8, 8)
            await traffic.until(lambda: {m.queue_id for m in traffic.inbox.messages} == set(range(8)), refresh=True)
            await asyncio.to_thread(traffic.java_consumer.await_queues, 8)
            # Taken away from the producers first, so that what is in them is consumed before they go.
            await asyncio.to_thread(change, admin, server, topic, 8, 2)
            await traffic.until(
                lambda: all(len(ids) == 10 and max(ids) < 2 for ids in traffic.recent.values()), refresh=True
            )
            await traffic.all_consumed()
            await asyncio.to_thread(change, admin, server, topic, 2, 2)
            await traffic.until(
                lambda: len([q for q in traffic.consumer.queues if q.topic == topic]) == 2, refresh=True
            )
            await asyncio.to_thread(traffic.java_consumer.await_queues, 2)
            await traffic.more()
            await traffic.stop()
            await traffic.all_consumed()

    asyncio.run(main())


def test_permissions_change(
    server: Server, namesrv: str, admin: Admin, java_session: Session, topic: str, group: str
) -> None:
    def permit(perm: str) -> None:
        admin("updateTopicPerm", "-b", server.broker_addr, "-t", topic, "-p", perm)

    async def main() -> None:
        change(admin, server, topic, 4, 4)
        async with Traffic(namesrv, java_session, topic, group) as traffic:
            await traffic.more()
            await asyncio.to_thread(permit, READ)
            await traffic.until(lambda: not any(traffic.recent.values()), refresh=True)
            await traffic.all_consumed()
            await asyncio.to_thread(permit, WRITE)
            await traffic.until(lambda: not owned(traffic, topic) and all(traffic.recent.values()), refresh=True)
            await asyncio.to_thread(permit, BOTH)
            await traffic.until(lambda: owned(traffic, topic) == 4, refresh=True)
            await traffic.more()
            await traffic.stop()
            await traffic.all_consumed()

    asyncio.run(main())


def owned(traffic: Traffic, topic: str) -> int:
    return len([queue for queue in traffic.consumer.queues if queue.topic == topic])


def test_a_broker_drains_and_comes_back(
    server: Server, namesrv: str, admin: Admin, java_session: Session, topic: str, group: str
) -> None:
    async def main() -> None:
        change(admin, server, topic, 4, 4)
        async with Traffic(namesrv, java_session, topic, group) as traffic:
            await traffic.more()
            broker = traffic.consumer.queues[0].broker_name
            output = await asyncio.to_thread(admin, "wipeWritePerm", "-b", broker)
            assert f"wipe write perm of broker[{broker}] in name server[{namesrv}] OK" in output
            try:
                await traffic.until(lambda: not any(traffic.recent.values()), refresh=True)
                await traffic.all_consumed()
            finally:
                output = await asyncio.to_thread(admin, "addWritePerm", "-b", broker)
            assert f"add write perm of broker[{broker}] in name server[{namesrv}] OK" in output
            await traffic.until(lambda: all(traffic.recent.values()), refresh=True)
            await traffic.more()
            await traffic.stop()
            await traffic.all_consumed()

    asyncio.run(main())


def test_a_topic_is_deleted_and_made_again(
    server: Server, namesrv: str, admin: Admin, java_session: Session, topic: str, group: str
) -> None:
    """What it held is gone; who sends goes on, and who consumes gets what is sent from then on."""

    async def main() -> None:
        change(admin, server, topic, 4, 4)
        async with Traffic(namesrv, java_session, topic, group) as traffic:
            await traffic.more()
            await asyncio.to_thread(admin, "deleteTopic", "-c", server.cluster, "-t", topic)
            await asyncio.to_thread(change, admin, server, topic, 4, 4)
            before = set(traffic.sent)
            await traffic.until(lambda: all(len(ids) == 10 for ids in traffic.recent.values()), refresh=True)
            await traffic.every_queue_goes_on(before, 4)
            before = set(traffic.sent)
            await traffic.more()
            await traffic.stop()
            await traffic.all_consumed(traffic.sent - before)

    asyncio.run(main())
