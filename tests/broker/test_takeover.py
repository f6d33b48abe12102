"""A broker over a store that Apache's broker wrote, or that another path leads to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.live import live_broker
from skylark.broker.fetched_tables import FetchFailed, fetch
from skylark.store.foreign import ForeignStore
from skylark.store.tables import (
    ConsumerOffsetTable,
    SubscriptionGroupTable,
    TopicTable,
    consumer_offsets_path,
    load,
    subscription_groups_path,
    topics_path,
)
from skylark.wire.codes import RequestCode

TOPICS = '{"topicConfigTable":{"batched":{"topicName":"batched","attributes":{"queue.type":"BatchCQ"}}}}'


def test_a_store_that_cannot_be_served_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "topics.json").write_text(TOPICS)

    async def start() -> None:
        async with live_broker(tmp_path):
            pass

    with pytest.raises(ForeignStore, match="BatchCQ cannot be served: batched"):
        asyncio.run(start())
    assert [path.name for path in tmp_path.rglob("*")] == ["config", "topics.json"]


def test_queue_files_have_the_size_that_apaches_have(tmp_path: Path) -> None:
    """Rounded up to whole entries."""

    async def send() -> None:
        async with live_broker(tmp_path, mappedFileSizeConsumeQueue=50) as live:
            await live.send("topic", b"x")

    asyncio.run(send())
    [queue] = (tmp_path / "consumequeue" / "topic").glob("*/*")
    assert queue.stat().st_size == 60


def test_topics_that_a_lost_table_leaves_behind_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def send() -> None:
        async with live_broker(tmp_path) as live:
            await live.send("forgotten", b"x")

    async def start() -> None:
        async with live_broker(tmp_path):
            pass

    asyncio.run(send())
    asyncio.run(start())
    assert "forgotten" not in caplog.text
    for path in (tmp_path / "config").glob("topics.json*"):
        path.unlink()
    asyncio.run(start())
    assert "forgotten: messages of topics that topics.json does not have" in caplog.text


def test_a_lost_table_of_offsets_is_told_where_there_are_messages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(*topics: str) -> None:
        async with live_broker(tmp_path) as live:
            for topic in topics:
                await live.send(topic)

    for topics in ((), ("t",), ()):  # nobody has consumed so far
        asyncio.run(run(*topics))
    assert "consumerOffset.json" not in caplog.text
    for path in (tmp_path / "config").glob("consumerOffset.json*"):
        path.unlink()
    asyncio.run(run())
    assert "neither consumerOffset.json nor its backup is there, but messages are" in caplog.text


def test_tables_are_fetched_from_a_broker_that_runs(tmp_path: Path) -> None:
    async def run() -> list[str]:
        async with live_broker(tmp_path / "a") as live:
            await live.send("topic", b"x")
            await live.heartbeat("group", "topic")
            await live.ask(
                RequestCode.UPDATE_CONSUMER_OFFSET, consumerGroup="group", topic="topic", queueId=0, commitOffset=1
            )
            return await fetch(live.address, tmp_path / "b")

    told = asyncio.run(run())
    assert [line.split(" in ")[1] for line in told] == [
        str(tmp_path / "b" / "config" / name)
        for name in ("topics.json", "subscriptionGroup.json", "consumerOffset.json")
    ]
    offsets = load(consumer_offsets_path(tmp_path / "b"), ConsumerOffsetTable)
    groups = load(subscription_groups_path(tmp_path / "b"), SubscriptionGroupTable)
    topics = load(topics_path(tmp_path / "b"), TopicTable)
    assert offsets is not None
    assert offsets.offset_table == {"topic@group": {0: 1}}
    assert groups is not None
    assert "group" in groups.subscription_group_table
    assert topics is not None
    assert topics.topic_config_table["topic"].read_queue_nums == 4


def test_without_a_broker_no_table_is_written(tmp_path: Path) -> None:
    with pytest.raises(FetchFailed, match=r"127\.0\.0\.1:1 does not answer"):
        asyncio.run(fetch("127.0.0.1:1", tmp_path))
    assert list(tmp_path.iterdir()) == []
