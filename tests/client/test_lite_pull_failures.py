"""What a lite pull consumer says while a broker is away: once, for all queues, and what it can't do now."""

from __future__ import annotations

import asyncio
import logging

import pytest

from client.inbox import eventually
from skylark.client.lite_pull_consumer import LitePullConsumer
from skylark.client.producer import Producer
from skylark.testing import LocalCluster

QUEUES = 4


def test_a_broker_that_is_away_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with (
            LocalCluster(topics={"orders": QUEUES}) as cluster,
            LitePullConsumer(cluster.name_servers, group="g", from_where="first", auto_commit=False) as consumer,
        ):
            consumer.assign(await consumer.queues("orders"))
            async with Producer(cluster.name_servers) as producer:
                await producer.send("orders", b"1")
            while not await consumer.poll(60.0):
                pass
            assert consumer.failures() == []
            await cluster.broker.stop()
            await eventually(lambda: sum(len(failing.parts) for failing in consumer._failing.values()) == QUEUES)
            (failure,) = consumer.failures()
            assert failure.startswith("group g can't read topic orders at broker-a, and goes on trying: ")
            await cluster.broker.start()
            async with Producer(cluster.name_servers) as producer:
                for queue in await consumer.queues("orders"):  # a read that gets something ends at once
                    await producer.send("orders", b"2", queue=queue)
            await eventually(lambda: not consumer.failures())

    with caplog.at_level(logging.INFO, logger="skylark.client.lite_pull_consumer"):
        asyncio.run(run())
    said = [record.getMessage() for record in caplog.records if record.name == "skylark.client.lite_pull_consumer"]
    assert sum("can't read topic orders" in text for text in said) == 1, said
    assert sum("read topic orders at broker-a works again" in text for text in said) == 1, said
