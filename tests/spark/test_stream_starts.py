"""Streams that start, with the options that they have by default, on a topic that is being written to."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from patience import DEADLINE_S
from skylark.client.sync import Producer
from spark.conftest import wait_until

STARTS = int(os.environ.get("SKYLARK_STREAM_STARTS", "2"))
MESSAGES_PER_S = 300
ROWS = 100


@contextmanager
def being_sent(namesrv: str, topic: str) -> Iterator[None]:
    """Messages come into the topic all the time."""
    is_over = threading.Event()
    with Producer(namesrv, group="spark-tests", timeout_s=DEADLINE_S) as producer:

        def send() -> None:
            began_s, number = time.monotonic(), 0
            while not is_over.wait(max(0.0, began_s + number / MESSAGES_PER_S - time.monotonic())):
                producer.send(topic, f"{number}".encode())
                number += 1

        thread = threading.Thread(target=send)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def read_some(frame: DataFrame, checkpoint: Path, offsets: dict[int, list[int]], rows: int) -> None:
    """Notes the offsets of each queue until there are so many. A query that ends by itself has failed."""

    def note(batch: DataFrame, _: int) -> None:
        for row in batch.collect():
            offsets.setdefault(row.queueId, []).append(row.offset)

    query = frame.writeStream.foreachBatch(note).option("checkpointLocation", str(checkpoint)).start()
    wait_until(lambda: sum(map(len, offsets.values())) >= rows or not query.isActive)
    assert query.exception() is None
    query.stop()


def test_no_row_is_lost_or_doubled_by_a_start(
    spark: SparkSession, topics: Any, namesrv: str, topic: str, tmp_path: Path
) -> None:
    topics.create(topic, 2)
    topics.send(topic, *map(str, range(20)))
    with being_sent(namesrv, topic):
        for number in range(STARTS):
            frame = (
                spark.readStream.format("rocketmq")
                .options(nameServer=namesrv, subscribe=topic)
                .schema("queueId int, offset bigint")
                .load()
            )
            checkpoint = tmp_path / str(number)
            offsets: dict[int, list[int]] = {}
            read_some(frame, checkpoint, offsets, ROWS)
            # What a batch that did not end gave comes again.
            (first,) = json.loads((checkpoint / "offsets" / "0").read_text().splitlines()[2])["f"][topic].values()
            done = max(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdigit())
            (ends,) = json.loads((checkpoint / "offsets" / str(done)).read_text().splitlines()[2])["o"][topic].values()
            kept = {queue: [each for each in some if each < ends[str(queue)]] for queue, some in offsets.items()}
            read_some(frame, checkpoint, kept, 2 * ROWS)
            assert {str(queue) for queue in kept} == first.keys()
            for queue, some in kept.items():
                assert some == list(range(first[str(queue)], first[str(queue)] + len(some)))
