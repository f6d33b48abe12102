"""Messages that were stored once, sent again: at a rate, step by step.

A step is a handful of messages, which are made before the first is sent. They are sent, every acknowledgement is
awaited, and then the step is noted; of a step that fails in the middle, what was stored is noted. So what is noted was
stored, and a process that dies sends one step a second time and loses none.

A message keeps its body, keys, tags, ordering key and whatever properties its producer gave it. It does not keep what
the system set for its first way: unique id, delay, priority, transaction, retries.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, Generic, TypeVar

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from skylark.client.errors import BrokerError, InvalidMessage, RocketMQError
from skylark.client.sending import RETRY_CODES
from skylark.client.subscriptions import RETRY_PREFIX
from skylark.pipelines.errors import PipelineError
from skylark.pipelines.progress import stopped_by_signal
from skylark.spark.cluster import Cluster
from skylark.spark.outbox import Outbox, Pack
from skylark.spark.rows import Outgoing, is_own
from skylark.wire.frame import Frame
from skylark.wire.message import PROPERTY_KEYS, PROPERTY_TAGS, PROPERTY_UNIQUE_KEY

TIMEOUT_S: Final = 30.0  # so long a broker may be away, for a restart say
_STEP: Final = 1000
_STEPS_A_SECOND: Final = 10
_MAX_IN_FLIGHT: Final = 32
_LINE_EVERY_S: Final = 10.0

_T = TypeVar("_T")


class Resent(msgspec.Struct, frozen=True):
    """What was done in this run."""

    title: str
    messages: int
    seconds: float
    is_complete: bool

    def __str__(self) -> str:
        rate = self.messages / self.seconds if self.seconds else 0.0
        end = "" if self.is_complete else "; stopped: the same command goes on from here"
        return f"{self.title}: {_messages(self.messages)} sent in {self.seconds:.1f} s, {rate:,.0f} messages/s{end}"


class Pace:
    """Spreads messages over time. What was late, because Spark was sorting say, is not made up for by a rush."""

    def __init__(self, rate: int | None) -> None:
        self._rate = rate
        self._due_s = 0.0

    def wait_s(self, count: int, now_s: float) -> float:
        """How long to wait before the next so many."""
        if self._rate is None:
            return 0.0
        start_s = max(self._due_s, now_s)
        self._due_s = start_s + count / self._rate
        return start_s - now_s


def outgoing(
    topic: str, body: bytes, properties: Mapping[str, str], *, unique_key: str, ordering_key: str | int | None
) -> Outgoing:
    """The message to send for one that was stored. Those of one `ordering_key` go to one queue."""
    kept = {
        name: value
        for name, value in properties.items()
        if value and (is_own(name) or name in (PROPERTY_KEYS, PROPERTY_TAGS))
    }
    kept[PROPERTY_UNIQUE_KEY] = unique_key
    size_bytes = len(body) + sum(len(name) + len(value) + 2 for name, value in kept.items())
    return Outgoing(topic, body, kept, ordering_key, False, size_bytes)


def resend(
    items: Iterable[_T],
    make: Callable[[_T], Outgoing],
    note: Callable[[Sequence[_T]], None],
    *,
    cluster: Cluster,
    group: str,
    title: str,
    total: int | None,
    rate: int | None,
    stop: threading.Event | None = None,
    console: Console | None = None,
    refused: Callable[[_T, RocketMQError], None] | None = None,
) -> Resent:
    """Sends a message for each item until `stop` is set; `note` is told the items of each step when they are stored.

    Without `stop`, SIGINT and SIGTERM end it; the caller must be the main thread then.
    `rate` is in messages a second. Raises PipelineError when a broker is away for too long, or refuses a message; with
    `refused` that is told the item, and the others are sent.
    """
    console = console or Console(stderr=True)
    sender = _Sender(cluster, group, make, note, refused)
    began_s = time.monotonic()
    sent = 0
    is_complete = True
    pace = Pace(rate)
    with contextlib.ExitStack() as stack:
        told = stop if stop is not None else stack.enter_context(stopped_by_signal())
        show = stack.enter_context(_shown(console, title, total))
        for step in _steps(items, rate):
            told.wait(pace.wait_s(len(step), time.monotonic()))
            if told.is_set():
                is_complete = False
                break
            try:
                sent += sender.send(step)
            except RocketMQError as e:
                sent += sender.give_up()
                raise PipelineError(f"{e}; {_messages(sent)} sent before: the same command goes on from there") from e
            show(sent)
    done = Resent(title, sent, time.monotonic() - began_s, is_complete)
    console.print(str(done), soft_wrap=True, highlight=False, markup=False)
    return done


class _Sender(Generic[_T]):
    """Sends steps, and notes of each what was stored."""

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        make: Callable[[_T], Outgoing],
        note: Callable[[Sequence[_T]], None],
        refused: Callable[[_T, RocketMQError], None] | None,
    ) -> None:
        self._outbox = Outbox(cluster, group, TIMEOUT_S, max_in_flight=_MAX_IN_FLIGHT, on_stored=self._on_stored)
        self._make = make
        self._note = note
        self._refused = refused
        self._step: list[tuple[_T, Outgoing]] = []  # what is not noted yet
        self._stored: set[int] = set()  # the identities of messages of the step

    def send(self, items: Sequence[_T]) -> int:
        """How many were stored, and noted."""
        self._step = [(item, self._make(item)) for item in items]
        try:
            for _, message in self._step:
                self._put(message)
            self._outbox.flush()
        except (BrokerError, InvalidMessage) as e:
            if self._refused is None or not _is_refusal(e):
                raise
            self._drain()
            return self._note_stored() + self._send_one_by_one(self._refused)
        return self._note_stored()

    def give_up(self) -> int:
        """After an error: how many of the step were stored nevertheless, and are noted now."""
        self._drain()
        return self._note_stored()

    def _note_stored(self) -> int:
        """All of the step or, after an error, some; of one queue that is the first so many."""
        stored = [item for item, message in self._step if id(message) in self._stored]
        self._step = [(item, message) for item, message in self._step if id(message) not in self._stored]
        self._stored.clear()
        if stored:
            self._note(stored)
        return len(stored)

    def _send_one_by_one(self, refused: Callable[[_T, RocketMQError], None]) -> int:
        """A refusal is of a whole request: which message it is meant for shows when each goes alone."""
        sent = 0
        for item, message in list(self._step):
            try:
                self._put(message)
                self._outbox.flush()
            except (BrokerError, InvalidMessage) as e:
                if not _is_refusal(e):
                    raise
                refused(item, e)
            sent += self._note_stored()
        return sent

    def _drain(self) -> None:
        """Waits for what is on the way after one request failed, whatever the answers are, for a while."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            try:
                self._outbox.flush()
            except RocketMQError:
                continue  # each time with one request less
            return

    def _put(self, message: Outgoing) -> None:
        self._outbox.put(message)
        if message.topic.startswith(RETRY_PREFIX):
            self._outbox.flush()  # brokers take no batches there

    def _on_stored(self, pack: Pack, reply: Frame) -> None:
        self._stored.update(map(id, pack.messages))


def _is_refusal(error: BrokerError | InvalidMessage) -> bool:
    """Whether the broker will not take the message, now or later; else it was busy for too long."""
    return isinstance(error, InvalidMessage) or error.code not in RETRY_CODES


def _messages(count: int) -> str:
    return "1 message" if count == 1 else f"{count:,} messages"


def _steps(items: Iterable[_T], rate: int | None) -> Iterator[list[_T]]:
    """With a rate they are small, so that the messages come evenly."""
    size = _STEP if rate is None else max(1, min(_STEP, rate // _STEPS_A_SECOND))
    source = iter(items)
    while step := list(islice(source, size)):
        yield step


@contextlib.contextmanager
def _shown(console: Console, title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, a line now and then elsewhere."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
            task = progress.add_task(title, total=total)
            yield lambda sent: progress.update(task, completed=sent)
        return
    next_s = time.monotonic() + _LINE_EVERY_S

    def line(sent: int) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + _LINE_EVERY_S
            of = "" if total is None else f" of {total:,}"
            console.print(f"{title}: {sent:,}{of} messages", soft_wrap=True, highlight=False, markup=False)

    yield line
