"""Random lives of a stream against a cluster in memory: each message once, or an error that says what was lost.

Messages are sent, expire and are damaged, topics are deleted and made again, brokers go and come, batches fail and come
again, queries end and are started again. What was read is compared with what was sent.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skylark.client.errors import RocketMQError
from skylark.spark.positions import DataLost
from skylark.spark.queues import Offsets, Position, Queue
from spark.topics_model import Model, Query, install

LIVES = int(os.environ.get("SKYLARK_STREAM_LIVES", "400"))
QUEUES = 2


class Life:
    """A stream, and what it must have read. Each message has a body of its own."""

    def __init__(self, model: Model, *, fails: bool, options: dict[str, Any]) -> None:
        self.model = model
        self.begins_late = options["startingOffsets"] == "latest"
        self.sent = 0
        self.excused: set[bytes] = set()  # what need not be read, though nothing says so
        self.held: dict[Queue, set[bytes]] = {}  # what each queue got since it was made
        self.lost: set[bytes] = set()  # what can't be read any more
        self.accepted: list[bytes] = []
        self.failed: list[bytes] | None = None  # the rows of the batch that comes again
        self.has_begun = False
        self.was_made_again = False
        self.fails = fails
        self.model.create("other")
        self.model.create("t", QUEUES)
        self.query = Query(failOnDataLoss=fails, **options)

    # What happens around the stream.

    def send(self, count: int, queue_id: int, broker: str) -> None:
        for number in range(self.sent, self.sent + count):
            body = f"<message {number}>"
            self.model.send("t", body, queue_id=queue_id, broker=broker)
            self.held.setdefault(Queue("t", broker, queue_id), set()).add(body.encode())
        self.sent += count

    def make_again(self, count: int) -> None:
        position = self.position
        for queue, bodies in self.held.items():
            self.lost |= bodies
            if not position.get(queue):
                self.excused |= bodies  # nothing of the queue is known by which it could be told from the next
        self.held = {}
        self.was_made_again = True
        self.model.delete("t")
        self.model.create("t", QUEUES)
        for number in range(count):
            self.send(1, number % QUEUES, "a")

    def expire(self, count: int, queue_id: int, broker: str) -> None:
        before = self.bodies()
        records = self.model.brokers[broker].topics["t"][queue_id].records
        if records[count:] and not any(records[count:]):
            return  # of a queue in which nothing is whole nothing is known
        self.model.brokers[broker].topics["t"][queue_id].expire(count)
        gone = before[Queue("t", broker, queue_id)] - self.bodies()[Queue("t", broker, queue_id)]
        self.lost |= gone
        queue = Queue("t", broker, queue_id)
        if queue not in self.position:
            self.excused |= gone  # a queue that is new begins with what is there
        elif self.model.brokers[broker].topics["t"][queue_id].low == self.position[queue]:
            self.excused |= self.lost  # as if what was read had expired, and nothing else had ever been there

    def damage(self, index: int, queue_id: int) -> None:
        before = self.bodies()
        queue = self.model.brokers["a"].topics["t"][queue_id]
        if self.was_made_again and queue.low + index < self.position.get(Queue("t", "a", queue_id), 0):
            return  # it may be the very message that shows that the queue was made anew
        if index < len(queue.records) and any(queue.records[:index] + queue.records[index + 1 :]):
            queue.records[index] = None
        self.lost |= set().union(*before.values()) - set().union(*self.bodies().values())

    def toggle(self) -> None:
        self.model.brokers["b"].is_up = not self.model.brokers["b"].is_up

    def start(self) -> None:
        self.query.start()
        self.has_begun = bool(self.query.planned)

    # What the stream does.

    def batch(self, *, is_done: bool) -> bool:
        """Whether there was one. A query that fails is started again, and without failOnDataLoss once it said so."""
        try:
            return self._batch(is_done=is_done)
        except DataLost:
            assert self.fails
            self.fails = False
            self.excused |= self.lost
            self.query.start(failOnDataLoss=False)
        except RocketMQError:
            assert not self.model.brokers["b"].is_up
            self.start()
        return True

    def _batch(self, *, is_done: bool) -> bool:
        if not self.has_begun:
            away = {name for name, broker in self.model.brokers.items() if not broker.is_up}
            later = set().union(*(some for queue, some in self.bodies().items() if queue.broker in away))
            self.excused = self.everything - later if self.begins_late else set(self.lost)
        self.has_begun = True
        if not self.query.plan():
            return False
        rows = [row[3] for row in self.query.read()]
        if self.failed is not None:
            assert set(rows) <= set(self.failed)
            assert not self.fails or sorted(rows) == sorted(self.failed)
        self.failed = rows
        if is_done:
            self.query.done += 1
            self.failed = None
            self.accepted += rows
        return True

    def finish(self) -> None:
        self.model.brokers["b"].is_up = True
        self.start()
        while self.batch(is_done=True):
            pass
        doubled = [body for body, count in Counter(self.accepted).items() if count > 1]
        assert not doubled
        missing = self.everything - set(self.accepted) - self.excused
        assert not (missing - self.lost), "they are there and were not read"
        assert not missing or not self.fails, "they are lost and nobody said so"

    @property
    def everything(self) -> set[bytes]:
        return {f"<message {number}>".encode() for number in range(self.sent)}

    @property
    def position(self) -> Offsets:
        return Position.of(json.loads(self.query.planned[-1])).offsets if self.query.planned else {}

    def bodies(self) -> dict[Queue, set[bytes]]:
        return {
            Queue("t", broker.name, number): set(_bodies(queue.records))
            for broker in self.model.brokers.values()
            for number, queue in enumerate(broker.topics["t"])
        }


def _bodies(records: Iterable[bytes | None]) -> Iterable[bytes]:
    for record in records:
        if record is not None:
            yield record[(at := record.index(b"<message")) : record.index(b">", at) + 1]


WHERE = (st.integers(0, QUEUES - 1), st.sampled_from("ab"))
SENDS = st.tuples(st.just("send"), st.integers(1, 5), *WHERE)
BATCHES = st.tuples(st.just("batch"), st.booleans())
STEPS = st.one_of(
    SENDS,
    SENDS,
    BATCHES,
    BATCHES,
    st.tuples(st.just("start")),
    st.tuples(st.just("make_again"), st.integers(0, 12)),
    st.tuples(st.just("expire"), st.integers(1, 6), *WHERE),
    st.tuples(st.just("damage"), st.integers(0, 6), st.integers(0, QUEUES - 1)),
    st.tuples(st.just("toggle")),
)
TOPICS = st.sampled_from([{"subscribePattern": "t|other"}, {"subscribe": "t,other"}])
OPTIONS = st.fixed_dictionaries(
    {"startingOffsets": st.sampled_from(["earliest", "latest"])},
    optional={
        "maxOffsetsPerTrigger": st.integers(1, 6),
        "pullBatchSize": st.integers(1, 4),
        "minPartitions": st.just(3),
    },
)


@pytest.mark.parametrize("fails", [True, False])
def test_each_message_once_or_an_error(fails: bool) -> None:
    @settings(max_examples=LIVES)
    @given(OPTIONS, TOPICS, st.lists(STEPS, max_size=25))
    def live(options: dict[str, Any], topics: dict[str, str], steps: list[tuple[Any, ...]]) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            life = Life(install(monkeypatch, Model("a", "b")), fails=fails, options=options | topics)
            for name, *arguments in steps:
                if name == "batch":
                    life.batch(is_done=arguments[0])
                else:
                    getattr(life, name)(*arguments)
            life.finish()

    live()
