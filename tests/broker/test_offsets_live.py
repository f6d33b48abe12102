"""Consumer offsets of a whole broker: which queues they are kept of, and how they come to the disk."""

from __future__ import annotations

import asyncio
from pathlib import Path

from broker.live import Live, live_broker
from skylark.broker.offsets import Offsets
from skylark.store.tables import ConsumerOffsetTable
from skylark.wire import fastjson
from skylark.wire.codes import RequestCode, ResponseCode


async def commit(broker: Live, topic: str, queue_id: int, offset: int = 1) -> int:
    fields: dict[str, object] = {"consumerGroup": "g", "topic": topic, "queueId": queue_id, "commitOffset": offset}
    return (await broker.ask(RequestCode.UPDATE_CONSUMER_OFFSET, **fields)).code


async def make(broker: Live, topic: str, read: int, write: int) -> None:
    answer = await broker.ask(
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        topic=topic,
        defaultTopic="TBW102",
        readQueueNums=read,
        writeQueueNums=write,
        perm=6,
        topicFilterType="SINGLE_TAG",
    )
    assert answer.code == 0, answer.remark


async def on_disk(root: Path, offset: int) -> None:
    while True:
        if Offsets(root / "config").query("g", "T", 0) == offset:
            return
        await asyncio.sleep(0.01)


def test_offsets_are_kept_of_queues_that_exist(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.heartbeat("g", "T")
            await make(broker, "T", 2, 8)
            assert await commit(broker, "T", 7) == 0, "it may be read soon"
            assert await commit(broker, "T", 8) == ResponseCode.INVALID_PARAMETER
            assert await commit(broker, "%RETRY%g", 0) == 0
            assert await commit(broker, "%RETRY%g", 5) == ResponseCode.INVALID_PARAMETER
            for queue_id in (5, 6):
                assert (await broker.send("T", queueId=queue_id)).code == 0
            assert await commit(broker, "T", 6) == 0
            await make(broker, "T", 1, 1)
            assert await commit(broker, "T", 5) == 0, "what is there is consumed to the end"
            assert await commit(broker, "T", 7, 2) == 0, "what is kept can be changed"
            assert await commit(broker, "T", 4) == ResponseCode.INVALID_PARAMETER
            answer = await broker.ask(RequestCode.GET_ALL_CONSUMER_OFFSET)
            table = fastjson.decode(answer.body, ConsumerOffsetTable).offset_table
            assert table == {"T@g": {5: 1, 6: 1, 7: 2}, "%RETRY%g@g": {0: 1}}
        assert dict(Offsets(tmp_path / "config").of("g", "T")) == {5: 1, 6: 1, 7: 2}

    asyncio.run(run())


def test_offsets_come_to_the_disk_while_the_broker_runs(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, flushConsumerOffsetInterval=1, flushIntervalCommitLog=1) as broker:
            await broker.heartbeat("g", "T")
            await make(broker, "T", 1, 1)
            for offset in range(1, 4):
                await broker.send("T")
                assert await commit(broker, "T", 0, offset) == 0
                await on_disk(tmp_path, offset)

    asyncio.run(run())
