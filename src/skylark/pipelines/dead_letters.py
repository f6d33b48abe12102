"""The dead letters of a consumer group: what they are, and back to where they came from.

A message that a group could not consume, however often it was tried, is in the topic %DLQ%GROUP. Its properties tell
the topic that it was sent to.

What was sent back is noted (see `redriven`), and no letter is sent twice. One that can't be sent stays where it is and
is told; the others are sent.
"""

from __future__ import annotations

import base64
import threading
from collections import deque
from collections.abc import Iterator
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
from skylark.pipelines.reading import Read, has_topic, messages
from skylark.pipelines.redriven import PRODUCER, Redriven
from skylark.pipelines.resending import TIMEOUT_S, Resent, outgoing, resend
from skylark.pipelines.span import ALWAYS, Span
from skylark.spark.cluster import Cluster
from skylark.spark.rows import Outgoing
from skylark.spark.sink import unique_keys
from skylark.wire.message import PROPERTY_DLQ_ORIGIN_TOPIC, PROPERTY_RETRY_TOPIC, PROPERTY_SHARDING_KEY

_MOST_REASONS: Final = 10


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
    unreadable: str | msgspec.UnsetType = msgspec.UNSET
    """Why the body, which is as it was sent then, can't be inflated."""

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
        for message, unreadable in box.letters(wanted):
            topic, is_redriven = origin(message, group), message in box.redriven
            kind = kinds.setdefault((topic or "", message.tag or ""), Kind(topic, message.tag))
            kind.count += 1
            kind.waiting += not is_redriven
            kind.first_ms = min(kind.first_ms or message.store_timestamp_ms, message.store_timestamp_ms)
            kind.last_ms = max(kind.last_ms, message.store_timestamp_ms)
            newest.append(_letter(message, topic, is_redriven, unreadable))
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
    The error comes at the end if there are letters that can't be sent.
    """
    with _Box(name_server, group) as box:
        left = Left()
        maker = _Maker(box.cluster, group, to_topic, left)
        waiting = (read for read in box.letters(wanted) if read[0] not in box.redriven)
        box.redriven.prepare()
        done = resend(
            islice(maker.made(waiting), most),
            lambda made: made[1],
            lambda step: box.redriven.add([letter for letter, _ in step]),
            refused=lambda made, error: left.add(made[0], str(error)),
            cluster=box.cluster,
            group=PRODUCER,
            title=f"dead letters of {group}",
            total=None,
            rate=rate,
            stop=stop,
            console=console,
        )
        box.redriven.settle()
        left.tell()
        return done


class Left:
    """Letters that can't be sent, and why."""

    def __init__(self) -> None:
        self._first: dict[str, Message] = {}
        self._count = 0

    def add(self, letter: Message, reason: str) -> None:
        self._count += 1
        if len(self._first) < _MOST_REASONS:
            self._first.setdefault(reason, letter)

    def tell(self) -> None:
        """Raises PipelineError if there are any."""
        if not self._count:
            return
        letters = "1 dead letter is" if self._count == 1 else f"{self._count:,} dead letters are"
        reasons = "; ".join(f"{_place(letter)}: {reason}" for reason, letter in self._first.items())
        raise PipelineError(f"{letters} not sent and stay as they are, the first of each kind: {reasons}")


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

    redriven: Redriven

    def __init__(self, name_server: str, group: str) -> None:
        self._group = group
        self._consumer = PullConsumer(name_server, TOOLS_GROUP, request_timeout_s=TIMEOUT_S / 3)
        self.cluster = Cluster(name_server, TIMEOUT_S)

    def __enter__(self) -> _Box:
        self._consumer.start()
        try:
            has_topic(self._consumer, DLQ_PREFIX + self._group)  # so that no name server is waited for in vain
            self.redriven = Redriven(self.cluster, self._consumer, self._group)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.cluster.close()
        self._consumer.close()

    def letters(self, wanted: Wanted) -> Iterator[Read]:
        """Those that are there now, the oldest of each queue first."""
        return (read for read in messages(self._consumer, DLQ_PREFIX + self._group) if read[0] in wanted)


class _Maker:
    """Makes the messages to send; letters of which none can be made are left, and told."""

    def __init__(self, cluster: Cluster, group: str, to_topic: str | None, left: Left) -> None:
        self._cluster = cluster
        self._group = group
        self._to_topic = to_topic
        self._left = left
        self._reasons: dict[str, str] = {}  # topic -> why nothing can be sent to it

    def made(self, letters: Iterator[Read]) -> Iterator[tuple[Message, Outgoing]]:
        for letter, unreadable in letters:
            first = origin(letter, self._group)
            topic = self._to_topic or first
            if unreadable is not None:
                self._left.add(letter, unreadable)
            elif topic is None:
                self._left.add(letter, "it does not tell its original topic: name a topic with --to-topic")
            elif reason := self._closed(topic):
                self._left.add(letter, f"{reason}; --to-topic names another")
            else:
                yield letter, _made(letter, first, topic)

    def _closed(self, topic: str) -> str:
        """Why nothing can be sent to it; empty if it can."""
        if topic not in self._reasons:
            try:
                is_open = bool(self._cluster.route(topic).write_queues)
                closed = f"topic {topic!r} takes no messages: it may only be read, or its brokers are away"
                self._reasons[topic] = "" if is_open else closed
            except RouteNotFound as e:
                self._reasons[topic] = str(e)
            except RocketMQError as e:
                raise PipelineError(str(e)) from e
        return self._reasons[topic]


def _made(letter: Message, first: str | None, topic: str) -> Outgoing:
    made = outgoing(
        topic,
        letter.body,
        letter.properties,
        unique_key=unique_keys("redrive", letter.broker, str(letter.log_offset)).of(0, 1)[0],
        ordering_key=letter.properties.get(PROPERTY_SHARDING_KEY),
    )
    if topic.startswith(RETRY_PREFIX) and first is not None:
        made.properties[PROPERTY_RETRY_TOPIC] = first
    return made


def _place(letter: Message) -> str:
    return f"offset {letter.queue_offset} of queue {letter.queue_id} at {letter.broker}"


def _letter(message: Message, topic: str | None, is_redriven: bool, unreadable: str | None = None) -> Letter:
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
        unreadable=msgspec.UNSET if unreadable is None else unreadable,
    )


def _text(body: bytes) -> tuple[str | None, str | msgspec.UnsetType]:
    """The body as text or, if it is none, in base64."""
    try:
        return body.decode(), msgspec.UNSET
    except UnicodeDecodeError:
        return None, base64.b64encode(body).decode()
