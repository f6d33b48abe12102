"""A broker over a store that Apache's broker wrote, or that another path leads to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.live import live_broker
from skylark.store.foreign import ForeignStore

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
