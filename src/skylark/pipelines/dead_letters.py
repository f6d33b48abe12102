"""The dead letters of a consumer group: what they are, and back to where they came from.

A message that a group could not consume, however often it was tried, is in the topic %DLQ%GROUP. Its properties tell
the topic that it was sent to.

What was sent back is noted in the topic SKYLARK_REDRIVEN: an entry, with the group as its key, names dead letters by
broker and place in the log. So none is sent back twice, whoever asks, from wherever, and whichever filters were used
before. An entry is younger than the letters that it names, and brokers delete the oldest first: it outlives them.
"""

from __future__ import annotations

import base64
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

import msgspec
from rich.console import Console

from skylark.client.errors import RocketMQError, RouteNotFound
from skylark.client.message import Message
from skylark.client.query import TOOLS_GROUP
from skylark.client.subscriptions import DLQ_PREFIX, RETRY_PREFIX
from skylark.client.sync import PullConsumer
from skylark.client.validation import check_group, check_send_topic
from skylark.pipelines.errors import PipelineError
from skylark.pipelines.resending import TIMEOUT_S, Resent, outgoing, resend
from skylark.pipelines.span import ALWAYS, Span
from skylark.spark.cluster import Cluster
from skylark.spark.outbox import Outbox, Pack
from skylark.spark.queues import Queue
from skylark.spark.rows import Outgoing
from skylark.spark.sink import unique_keys
from skylark.wire.frame import Frame
from skylark.wire.message import (
    PROPERTY_DLQ_ORIGIN_TOPIC,
    PROPERTY_KEYS,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_SHARDING_KEY,
)

REDRIVEN_TOPIC: Final = "SKYLARK_REDRIVEN"
_PRODUCER: Final = "skylark-redrive"
_PULLED: Final = 256
_PAUSE_S: Final = 0.02


class Entry(msgspec.Struct, frozen=True):
    """Dead letters that were sent back: offsets in the log of a broker."""

    broker: str
    letters: list[int]


class Wanted(msgspec.Struct, frozen=True):
    """Which dead letters are meant; None means any."""

    tag: str | None = None
    key: str | None = None
    span: Span = ALWAYS

    def __contains__(self, message: Message) -> bool:
        return (
            self.tag in (None, message.tag)
            and (self.key is None or self.key in message.keys)
            and message.stored_at in self.span
        )


class Kind(msgspec.Struct):
    """Dead letters of one original topic and tag."""

    topic: str | None
    tag: str | None
    count: int = 0
    waiting: int = 0
    first_ms: int = 0
    last_ms: int = 0


class Letter(msgspec.Struct, frozen=True):
    """A dead letter, for whoever looks at it."""

    topic: str | None
    tag: str | None
    keys: list[str]
    reconsume_times: int
    stored_ms: int
    broker: str
    queue_id: int
    offset: int
    redriven: bool
    body: str | None
    body_base64: str | msgspec.UnsetType = msgspec.UNSET
    """In place of `body` where that is no UTF-8."""

    @property
    def raw_body(self) -> bytes:
        return base64.b64decode(self.body_base64) if self.body_base64 else (self.body or "").encode()


class Report(msgspec.Struct):
    """All dead letters of a group that are wanted, by kind, and the last of them."""

    group: str
    count: int
    waiting: int
    kinds: list[Kind]
    last: list[Letter]


def inspect(name_server: str, group: str, wanted: Wanted, last: int) -> Report:
    """Reads the dead letters; nothing changes. Raises PipelineError."""
    kinds: dict[tuple[str, str], Kind] = {}
    newest: deque[Letter] = deque(maxlen=last)
    with _Box(name_server, group) as box:
        for message in box.letters(wanted):
            topic, is_redriven = origin(message, group), box.is_redriven(message)
            kind = kinds.setdefault((topic or "", message.tag or ""), Kind(topic, message.tag))
            kind.count += 1
            kind.waiting += not is_redriven
            kind.first_ms = min(kind.first_ms or message.store_timestamp_ms, message.store_timestamp_ms)
            kind.last_ms = max(kind.last_ms, message.store_timestamp_ms)
            newest.append(_letter(message, topic, is_redriven))
    found = [kinds[name] for name in sorted(kinds)]
    return Report(group, sum(k.count for k in found), sum(k.waiting for k in found), found, list(newest))


def redrive(
    name_server: str,
    group: str,
    wanted: Wanted,
    *,
    to_topic: str | None = None,
    most: int | None = None,
    rate: int | None = None,
    stop: threading.Event | None = None,
    console: Console | None = None,
) -> Resent:
    """Sends dead letters to their original topic, or to `to_topic`, until `stop` or a signal. Raises PipelineError.

    To the retry topic of a group, a message goes with the name of its original topic, which its consumers then see.
    """
    with _Box(name_server, group) as box, Cluster(name_server, TIMEOUT_S) as cluster:
        waiting = (message for message in box.letters(wanted) if not box.is_redriven(message))
        redriven = _Redriven(cluster, group)
        done = resend(
            islice(waiting, most),
            _maker(cluster, group, to_topic),
            redriven.add,
            cluster=cluster,
            group=_PRODUCER,
            title=f"dead letters of {group}",
            total=None,
            rate=rate,
            stop=stop,
            console=console,
        )
        redriven.settle()
        return done


def origin(message: Message, group: str) -> str | None:
    """The topic that a dead letter was sent to at first."""
    for name in (PROPERTY_RETRY_TOPIC, PROPERTY_DLQ_ORIGIN_TOPIC):
        topic = message.properties.get(name)
        if topic and not topic.startswith(RETRY_PREFIX):
            return topic
        # Consumers that pop have a retry topic for each topic, of either of these names.
        for prefix in (f"{RETRY_PREFIX}{group}_", f"{RETRY_PREFIX}{group}+"):
            if topic and topic.startswith(prefix):
                return topic.removeprefix(prefix)
    return None


def read(consumer: PullConsumer, topic: str) -> Iterator[Message]:
    """All messages of a topic, which may be missing, up to where it ends now. Raises PipelineError."""
    try:
        for queue in consumer.queues(topic):
            offset, end = consumer.min_offset(queue), consumer.max_offset(queue)
            while offset < end:
                pulled = consumer.pull(queue, offset, _PULLED)
                yield from (message for message in pulled.messages if message.queue_offset < end)
                if pulled.next_offset <= offset:
                    break
                offset = pulled.next_offset
    except RouteNotFound:
        return
    except RocketMQError as e:
        raise PipelineError(str(e)) from e


def check_names(group: str, to_topic: str | None) -> None:
    """Raises PipelineError for names that nothing can have."""
    try:
        check_group(group)
        if to_topic is not None:
            check_send_topic(to_topic)
    except RocketMQError as e:
        raise PipelineError(str(e)) from e


class _Box:
    """The dead letters of a group, and which of them were sent back."""

    def __init__(self, name_server: str, group: str) -> None:
        self._group = group
        self._consumer = PullConsumer(name_server, TOOLS_GROUP, request_timeout_s=TIMEOUT_S / 3)
        self._redriven: set[tuple[str, int]] = set()

    def __enter__(self) -> _Box:
        self._consumer.start()
        for message in read(self._consumer, REDRIVEN_TOPIC):
            if message.properties.get(PROPERTY_KEYS) == self._group:
                entry = msgspec.json.decode(message.body, type=Entry)
                self._redriven.update((entry.broker, letter) for letter in entry.letters)
        return self

    def __exit__(self, *error: object) -> None:
        self._consumer.close()

    def letters(self, wanted: Wanted) -> Iterator[Message]:
        """Those that are there now, the oldest of each queue first."""
        return (message for message in read(self._consumer, DLQ_PREFIX + self._group) if message in wanted)

    def is_redriven(self, message: Message) -> bool:
        return (message.broker, message.log_offset) in self._redriven


class _Redriven:
    """Notes what was sent back."""

    def __init__(self, cluster: Cluster, group: str) -> None:
        self._cluster = cluster
        self._group = group
        self._outbox = Outbox(cluster, _PRODUCER, TIMEOUT_S, max_in_flight=1, on_stored=self._stored)
        self._ends: dict[Queue, int] = {}

    def add(self, messages: Sequence[Message]) -> None:
        self._prepare()
        for broker in sorted({message.broker for message in messages}):
            letters = [message.log_offset for message in messages if message.broker == broker]
            body = msgspec.json.encode(Entry(broker, letters))
            key = unique_keys("redriven", broker, str(letters[0])).of(0, 1)[0]
            labels = {PROPERTY_KEYS: self._group}
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

    def _stored(self, pack: Pack, reply: Frame) -> None:
        assert pack.queue is not None
        queue = Queue(pack.topic, pack.queue.broker_name, pack.queue.queue_id)
        self._ends[queue] = int(reply.fields["queueOffset"]) + 1

    def _prepare(self) -> None:
        try:
            self._cluster.route(REDRIVEN_TOPIC)
        except RouteNotFound:
            address = next(iter(self._cluster.brokers().values()))
            self._cluster.make_topic(REDRIVEN_TOPIC, address)


def _maker(cluster: Cluster, group: str, to_topic: str | None) -> Callable[[Message], Outgoing]:
    def make(message: Message) -> Outgoing:
        first = origin(message, group)
        topic = to_topic or first
        if topic is None:
            raise PipelineError(
                f"the dead letter at offset {message.queue_offset} of queue {message.queue_id} at {message.broker} "
                "does not tell its original topic: name a topic with --to-topic"
            )
        try:
            cluster.route(topic)
        except RouteNotFound as e:
            raise PipelineError(f"{e}; --to-topic names another") from e
        made = outgoing(
            topic,
            message.body,
            message.properties,
            unique_key=unique_keys("redrive", message.broker, str(message.log_offset)).of(0, 1)[0],
            ordering_key=message.properties.get(PROPERTY_SHARDING_KEY),
        )
        if topic.startswith(RETRY_PREFIX) and first is not None:
            made.properties[PROPERTY_RETRY_TOPIC] = first
        return made

    return make


def _letter(message: Message, topic: str | None, is_redriven: bool) -> Letter:
    text, coded = _text(message.body)
    return Letter(
        topic=topic,
        tag=message.tag,
        keys=message.keys,
        reconsume_times=message.reconsume_times,
        stored_ms=message.store_timestamp_ms,
        broker=message.broker,
        queue_id=message.queue_id,
        offset=message.queue_offset,
        redriven=is_redriven,
        body=text,
        body_base64=coded,
    )


def _text(body: bytes) -> tuple[str | None, str | msgspec.UnsetType]:
    """The body as text or, if it is none, in base64."""
    try:
        return body.decode(), msgspec.UNSET
    except UnicodeDecodeError:
        return None, base64.b64encode(body).decode()
