"""What was sent back of the dead letters: the topic SKYLARK_REDRIVEN.

An entry, with the group as its key, names dead letters by broker, place in the log and time of storing. So none is sent
back twice, whoever asks, from wherever, and whichever filters were used before. An entry is younger than the letters
that it names, and brokers delete the oldest first: it outlives them.

The topic is at one broker. While that is away nothing can be said of any letter, and none is sent: a second topic
would know nothing of the first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec

from skylark.client.errors import RocketMQError
from skylark.client.message import Message, MessageQueue
from skylark.client.sync import PullConsumer
from skylark.pipelines.errors import PipelineError
from skylark.pipelines.reading import messages_of
from skylark.pipelines.resending import TIMEOUT_S, outgoing
from skylark.spark.cluster import Cluster
from skylark.spark.outbox import Outbox, Pack
from skylark.spark.own_topics import REDRIVEN
from skylark.spark.queues import Queue
from skylark.spark.sink import unique_keys
from skylark.spark.sole import ensure_sole, find_sole
from skylark.wire.frame import Frame
from skylark.wire.message import PROPERTY_KEYS

REDRIVEN_TOPIC: Final = REDRIVEN
PRODUCER: Final = "skylark-redrive"
_PAUSE_S: Final = 0.02


class Entry(msgspec.Struct, frozen=True):
    """Dead letters that were sent back: offsets in the log of a broker, and when each was stored there.

    By the times a letter is told from one at the same place of a log that was begun anew; older entries have none.
    """

    broker: str
    letters: list[int]
    stored_ms: list[int] = []


class Redriven:
    """Knows what was sent back of a group's dead letters, and notes what is."""

    def __init__(self, cluster: Cluster, consumer: PullConsumer, group: str) -> None:
        """Raises PipelineError if the broker of the notes is away, or one of them can't be read."""
        self._cluster = cluster
        self._group = group
        self._outbox = Outbox(cluster, PRODUCER, TIMEOUT_S, max_in_flight=1, on_stored=self._stored)
        self._ends: dict[Queue, int] = {}
        self._known: set[tuple[str, int, int | None]] = set()
        try:
            queues = find_sole(cluster, REDRIVEN_TOPIC)
        except RocketMQError as e:
            raise PipelineError(f"what was sent back before can't be read: {e}") from e
        for queue in queues:
            for message, _ in messages_of(consumer, MessageQueue(queue.broker, queue.queue_id, queue.topic)):
                if message.properties.get(PROPERTY_KEYS) == group:
                    self._learn(message)

    def __contains__(self, letter: Message) -> bool:
        place = (letter.broker, letter.log_offset)
        return (*place, letter.store_timestamp_ms) in self._known or (*place, None) in self._known

    def prepare(self) -> None:
        """Before anything is sent: what can't be noted would be sent again. Raises PipelineError."""
        try:
            ensure_sole(self._cluster, REDRIVEN_TOPIC)
        except RocketMQError as e:
            raise PipelineError(f"what is sent back can't be noted, so nothing is sent: {e}") from e

    def add(self, letters: Sequence[Message]) -> None:
        for broker in sorted({letter.broker for letter in letters}):
            places = [(each.log_offset, each.store_timestamp_ms) for each in letters if each.broker == broker]
            entry = Entry(broker, [offset for offset, _ in places], [stored_ms for _, stored_ms in places])
            key = unique_keys("redriven", broker, str(places[0][0])).of(0, 1)[0]
            labels = {PROPERTY_KEYS: self._group}
            body = msgspec.json.encode(entry)
            self._outbox.put(outgoing(REDRIVEN_TOPIC, body, labels, unique_key=key, ordering_key=None))
        self._outbox.flush()

    def settle(self) -> None:
        """Waits until whoever comes next can read it: Apache's queues follow its log."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            there = self._cluster.max_offsets(self._ends)
            if all(there[queue] >= end for queue, end in self._ends.items()):
                return
            time.sleep(_PAUSE_S)

    def _learn(self, message: Message) -> None:
        try:
            entry = msgspec.json.decode(message.body, type=Entry)
        except msgspec.DecodeError as e:
            raise PipelineError(
                f"the message at offset {message.queue_offset} of topic {REDRIVEN_TOPIC} at broker {message.broker} "
                f"names no dead letters ({e}): somebody else wrote it, or a newer Skylark, which is to be used here too"
            ) from e
        times: Sequence[int | None] = entry.stored_ms or [None] * len(entry.letters)
        self._known.update((entry.broker, *place) for place in zip(entry.letters, times, strict=True))

    def _stored(self, pack: Pack, reply: Frame) -> None:
        assert pack.queue is not None
        queue = Queue(pack.topic, pack.queue.broker_name, pack.queue.queue_id)
        self._ends[queue] = int(reply.fields["queueOffset"]) + 1
