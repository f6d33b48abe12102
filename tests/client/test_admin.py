"""Topics created from Python and from the command line, on chosen brokers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cli.commands import run_here
from skylark.client import sync
from skylark.client.admin import AdminClient
from skylark.client.errors import BrokerError, InvalidMessage, NotReachable, RouteNotFound
from skylark.client.producer import Producer
from skylark.testing import LocalCluster


async def places(cluster: LocalCluster, topic: str, count: int) -> list[tuple[str, int]]:
    """The queues of a topic, once the name server knows that many."""
    found: list[tuple[str, int]] = []
    async with Producer(cluster.name_servers) as producer:
        while len(found) != count:
            try:
                await producer._running_courier().route(topic, refresh=True)
                found = [(queue.broker_name, queue.queue_id) for queue in await producer.queues(topic)]
            except RouteNotFound:
                await asyncio.sleep(0)
    return found


def test_a_topic_is_created_where_it_is_wanted() -> None:
    async def run() -> None:
        settings = {"autoCreateTopicEnable": "false"}
        async with LocalCluster(brokers=3, settings=settings) as cluster, AdminClient(cluster.name_servers) as admin:
            brokers = await admin.brokers()
            assert [each.name for each in brokers] == ["broker-a", "broker-b", "broker-c"]
            assert [each.addresses[0] for each in brokers] == [each.address for each in cluster.brokers]

            assert await admin.create_topic("two", queues=2, brokers=["broker-c", "broker-a"]) == [
                "broker-c",
                "broker-a",
            ]
            assert await places(cluster, "two", 4) == [
                ("broker-a", 0), ("broker-a", 1), ("broker-c", 0), ("broker-c", 1)
            ]  # fmt: skip
            assert len(await admin.create_topic("all", queues=1, attributes={"message.type": "FIFO"})) == 3
            assert len(await places(cluster, "all", 3)) == 3
            assert len(await admin.create_topic("clustered", cluster=brokers[0].cluster)) == 3

    asyncio.run(run())


def test_what_can_not_be_created_is_refused_before_anything_is_changed() -> None:
    refusals: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"topic": "a b"}, InvalidMessage, "illegal characters"),
        ({"queues": 0}, InvalidMessage, "queues is 0; it must be between 1 and 65536"),
        ({"permission": "x"}, InvalidMessage, "permission is 'x'; it takes 'rw', 'r' or 'w'"),
        ({"brokers": "broker-a"}, InvalidMessage, "takes a list of names"),
        ({"brokers": []}, InvalidMessage, "takes a list of names"),
        ({"brokers": ["broker-a"], "cluster": "c"}, InvalidMessage, "exclude each other"),
        (
            {"brokers": ["broker-a", "broker-x"]},
            NotReachable,
            "no broker broker-x is registered; there are",
        ),
        ({"cluster": "other"}, NotReachable, "no broker of cluster other is registered"),
        ({"attributes": {"a": "b,c"}}, InvalidMessage, "hold none of"),
        ({"attributes": {"a": 3}}, InvalidMessage, "attribute a is 3; it must be a str"),
    ]

    async def run() -> None:
        async with LocalCluster() as cluster, AdminClient(cluster.name_servers) as admin:
            for options, kind, says in refusals:
                with pytest.raises(kind, match=says):
                    await admin.create_topic(**({"topic": "orders"} | options))
            with pytest.raises(BrokerError, match="unsupported key: unheard"):
                await admin.create_topic("orders", attributes={"unheard": "of"})

    asyncio.run(run())


def test_a_broker_that_goes_in_between_leaves_word_of_the_others() -> None:
    async def run() -> None:
        async with LocalCluster(brokers=2) as cluster, AdminClient(cluster.name_servers) as admin:
            brokers = await admin.brokers()

            async def as_before() -> Any:
                return brokers

            await cluster.brokers[1].stop()
            admin.brokers = as_before  # type: ignore[method-assign]
            with pytest.raises(NotReachable) as caught:
                await admin.create_topic("orders")
            assert caught.value.__notes__ == ["the topic is created at broker-a"]

    asyncio.run(run())


def test_the_blocking_twin() -> None:
    with LocalCluster() as cluster, sync.AdminClient(cluster.name_servers, namespace="tenant") as admin:
        assert admin.create_topic("orders", queues=1) == ["broker-a"]
        with sync.Producer(cluster.name_servers, namespace="tenant") as producer:
            assert producer.send("orders", b"x").queue.queue_id == 0


def test_on_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with LocalCluster(brokers=2) as cluster:
        create = ["topic", "create", "orders", "-n", cluster.name_servers]
        done = run_here(monkeypatch, capsys, *create, "--queues", "3", "--broker", "broker-b")
        assert done == (0, "topic orders has 3 queues on broker-b\n", "")
        done = run_here(monkeypatch, capsys, *create, "--queues", "1", "--attribute", "message.type=FIFO")
        assert done == (0, "topic orders has 1 queue on broker-a, broker-b\n", "")
        for wrong, says in (
            (["--broker", "broker-x"], "no broker broker-x is registered"),
            (["--attribute", "x"], "not of the form NAME=VALUE"),
            (["--permission", "x"], "it takes 'rw', 'r' or 'w'"),
        ):
            code, out, err = run_here(monkeypatch, capsys, *create, *wrong)
            assert (code, out) == (1, "")
            assert says in err
