"""Processes that hold Apache's clients, steered by the tests.

The conversation, the same for every language: in, one command a line as a query string (`id=7&op=send&topic=t`); out,
one JSON object a line, either the answer to a command (`{"id": "7", "ok": true, …}`, or with `ok` false and `error`) or
an event (`{"event": "consumed", "consumer": "c1", …}`). The operations and their arguments are those of
`java/src/skylark/*.java`, for the newest client also `java/latest`. A process ends when its input does.
"""

from __future__ import annotations

import itertools
import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from servers import APACHE_VERSION, CACHE, POLL_S, clean_environment, committed_offset, wait_readable

# Only what hangs takes so long, on the slowest machine too.
ANSWER_DEADLINE_S = 180.0
EVENT_DEADLINE_S = 180.0
UNWANTED = "-"

Event = dict[str, Any]


class DriverError(Exception):
    """The client in the driver failed: its exception's text."""


class Driver:
    """One driver process. `call` waits for an answer; deliveries are read through the consumers that it makes."""

    def __init__(self, command: Sequence[str], *, log: Path) -> None:
        self._log = log
        self._ids = itertools.count(1)
        self._names = itertools.count(1)
        self._lock = threading.Lock()
        self._answers: dict[str, queue.SimpleQueue[Event]] = {}
        self._deliveries: dict[str, queue.SimpleQueue[Event]] = {}
        self._ready = threading.Event()
        with log.open("ab") as errors:
            self._child = subprocess.Popen(
                command,
                cwd=log.parent,  # some commands of mqadmin write files where they are
                env=clean_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            event = json.loads(line)
            if event.get("event") == "ready":
                self._ready.set()
            elif event.get("event") == "consumed":
                self._deliveries[event["consumer"]].put(event)
            elif event["id"] in self._answers:
                self._answers[event["id"]].put(event)
        self._ready.set()
        for waiting in list(self._answers.values()):
            waiting.put({"ok": False, "error": f"the driver ended:\n{self._log.read_text(errors='replace')[-4000:]}"})

    def call(self, op: str, /, **arguments: Any) -> Event:
        """Run one operation; arguments that are None are left out, `from_` is `from`, a dict `x` is several `x.key`."""
        self._ready.wait(ANSWER_DEADLINE_S)
        number = str(next(self._ids))
        answers = self._answers[number] = queue.SimpleQueue()
        self._write({"id": number, "op": op, **_flat(arguments)})
        try:
            answer = answers.get(timeout=ANSWER_DEADLINE_S)
        except queue.Empty:
            raise DriverError(f"{op} was not answered within {ANSWER_DEADLINE_S} s") from None
        finally:
            del self._answers[number]
        if not answer["ok"]:
            raise DriverError(f"{op}: {answer['error']}")
        return answer

    def tell(self, op: str, **arguments: Any) -> None:
        """Start an operation whose answer nobody waits for."""
        self._write({"id": UNWANTED, "op": op, **_flat(arguments)})

    def _write(self, command: Mapping[str, str]) -> None:
        assert self._child.stdin is not None
        with self._lock:
            self._child.stdin.write(urlencode(command) + "\n")
            self._child.stdin.flush()

    def name(self, kind: str) -> str:
        # Padded, because a group hands out its queues in the order of its members' names.
        return f"{kind}{next(self._names):04d}"

    def deliveries(self, consumer: str) -> queue.SimpleQueue[Event]:
        return self._deliveries.setdefault(consumer, queue.SimpleQueue())

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(60)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._reader.join()
        assert self._child.stdout is not None
        self._child.stdout.close()


def _flat(arguments: Mapping[str, object]) -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in arguments.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": text for key, text in value.items()}
        elif value is not None:
            flat[name.rstrip("_")] = str(value).lower() if isinstance(value, bool) else str(value)
    return flat


def java_driver(version: str, directory: Path, main: str | None = None, *, rebalance_interval_ms: int = 200) -> Driver:
    """A driver around Apache's Java client of that version; it writes logs and offsets into the directory only.

    By itself the client looks every 20 s whether its queues changed, which would make up most of the tests' time.
    """
    if main is None:
        main = "skylark.LatestDriver" if version == APACHE_VERSION else "skylark.Driver"
    return Driver(
        [
            *("java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Duser.home={directory}"),
            f"-Djava.io.tmpdir={directory}",
            *(f"-Drocketmq.client.logRoot={directory}/logs", "-Drocketmq.client.logLevel=WARN"),
            f"-Drocketmq.client.localOffsetStoreDir={directory}/offsets",
            f"-Drocketmq.client.rebalance.waitInterval={rebalance_interval_ms}",
            *("-Drocketmq.client.rebalance.minInterval=100", "-Dcom.rocketmq.remoting.client.connect.timeout=60000"),
            *("-cp", f"{CACHE / f'driver-{version}'}:{CACHE / version}/*", main),
        ],
        log=directory / f"{main}-{version}.log",
    )


class Session:
    """Clients of one test against one server; closing it shuts them all down."""

    def __init__(self, driver: Driver, namesrv: str) -> None:
        self.driver = driver
        self.namesrv = namesrv
        self._stops: dict[str, str] = {}

    def _open(self, op: str, arguments: dict[str, Any]) -> str:
        name = self.driver.name(op)
        self.driver.deliveries(name)  # there before the first one comes
        self.driver.call(op, namesrv=self.namesrv, name=name, **arguments)
        self._stops[name] = f"{op}.stop"
        return name

    def producer(self, group: str, **options: Any) -> Producer:
        return Producer(self, self._open("producer", {"group": group, **options}))

    def consumer(self, group: str, topic: str, **options: Any) -> PushConsumer:
        """A push consumer, started. Options: mode, model, expression, from_, fail, delayLevel, maxReconsumeTimes…"""
        return PushConsumer(self, self._open("consumer", {"group": group, "topic": topic, **options}), topic)

    def requester(self, group: str) -> Client:
        return Client(self, self._open("requester", {"group": group}))

    def responder(self, group: str, topic: str, **options: Any) -> PushConsumer:
        """Replies `re: BODY` to every request; deliveries tell in `reply` how that went. Option: times."""
        return PushConsumer(self, self._open("responder", {"group": group, "topic": topic, **options}), topic)

    def timers(self, group: str) -> Client:
        """Sends with a time of delivery; only the newest version can."""
        return Client(self, self._open("timers", {"group": group}))

    def transactor(self, group: str, topic: str | None = None) -> Transactor:
        """A transaction producer, started; with a topic, brokers can ask it before it has sent anything."""
        return Transactor(self, self._open("transactor", {"group": group, "topic": topic}))

    def puller(self, group: str) -> Client:
        return Client(self, self._open("puller", {"group": group}))

    def lite(self, group: str, **options: Any) -> Client:
        return Client(self, self._open("lite", {"group": group, **options}))

    def stop(self, name: str) -> None:
        self.driver.call(self._stops.pop(name), name=name)

    def close(self, *, wait: bool = False) -> None:
        """Shut all clients down; Apache's takes seconds for it, so only who needs it waits."""
        if wait:
            for name in list(self._stops):
                self.stop(name)
        for name, op in self._stops.items():
            self.driver.tell(op, name=name)
        self._stops.clear()


class Client:
    """A client in the driver, by its name there."""

    def __init__(self, session: Session, name: str) -> None:
        self.session = session
        self.name = name

    def call(self, op: str, **arguments: Any) -> Event:
        return self.session.driver.call(op, name=self.name, **arguments)

    def stop(self) -> None:
        self.session.stop(self.name)


class Producer(Client):
    def send(self, topic: str, body: str, **options: Any) -> list[Event]:
        """Send and give the results; asynchronous failures are raised like the others."""
        answer = self.call("send", topic=topic, body=body, **options)
        if answer.get("errors"):
            raise DriverError(str(answer["errors"]))
        results: list[Event] = answer["results"]
        return results

    def create_topic(self, topic: str, queues: int) -> None:
        """Again where the client gave up before it asked: it waits 3 s for another thread that connects."""
        deadline = time.monotonic() + EVENT_DEADLINE_S
        while True:
            try:
                self.call("topic", topic=topic, queues=queues)
                return
            except DriverError as error:
                if "connect to null failed" not in str(error) or time.monotonic() > deadline:
                    raise


class Transactor(Client):
    def __init__(self, session: Session, name: str) -> None:
        super().__init__(session, name)
        self._questions = session.driver.deliveries(name)

    def send(self, topic: str, body: str, state: str, **options: Any) -> Event:
        """A message in a transaction that ends as told: COMMIT_MESSAGE, ROLLBACK_MESSAGE or UNKNOW."""
        return self.call("transact", topic=topic, body=body, state=state, **options)

    def answer(self, body: str, state: str) -> None:
        """What is said when the broker asks for that message."""
        self.call("transactor.answer", body=body, state=state)

    def until_asked(self, *bodies: str) -> list[Event]:
        """Waits until the broker has asked for all of these; everything that it asked for."""
        asked: list[Event] = []
        while not {event["body"] for event in asked}.issuperset(bodies):
            try:
                asked.append(self._questions.get(timeout=EVENT_DEADLINE_S))
            except queue.Empty:
                raise AssertionError(f"asked for {[event['body'] for event in asked]}, not for {bodies}") from None
        return asked


class PushConsumer(Client):
    def __init__(self, session: Session, name: str, topic: str) -> None:
        super().__init__(session, name)
        self.topic = topic
        self._deliveries = session.driver.deliveries(name)

    def take(self, count: int) -> list[Event]:
        """The next deliveries, exactly that many, in the order that the listener got them."""
        taken: list[Event] = []
        try:
            while len(taken) < count:
                taken.append(self._deliveries.get(timeout=EVENT_DEADLINE_S))
        except queue.Empty:
            bodies = [event["body"][:80] for event in taken]
            raise AssertionError(f"{self.name} got {len(taken)} of {count} messages: {bodies}") from None
        return taken

    def take_until(self, done: Callable[[Event], bool]) -> list[Event]:
        """Deliveries up to and including the first that satisfies the condition."""
        taken = self.take(1)
        while not done(taken[-1]):
            taken += self.take(1)
        return taken

    def commit(self, sent: list[Event], group: str) -> None:
        """Until the broker knows that the group has consumed all of that."""
        commit(lambda: self.call("consumer.persist"), sent, group)

    def seen(self) -> list[Event]:
        """What was delivered and not taken, without waiting."""
        events = []
        while not self._deliveries.empty():
            events.append(self._deliveries.get())
        return events

    def await_queues(self, count: int) -> list[int]:
        """Wait until the consumer holds that many queues of its topic; their numbers."""
        answer = self.call("consumer.awaitQueues", topic=self.topic, count=count)
        return queue_ids(answer["queues"])


def readable(sent: list[Event]) -> list[Event]:
    """What was sent, as soon as a pull finds all of it."""
    for (topic, queue_id), count in ends(sent).items():
        wait_readable(broker_of(sent), topic, queue_id, count)
    return sent


def commit(persist: Callable[[], object], sent: list[Event], group: str) -> None:
    """Commits until the broker knows that the group has consumed all of that.

    Clients commit one-way, and Apache's broker may answer others before it has read that. Of the first commits of a
    group to several queues of a topic it forgets all but one, if they come at once.
    """
    deadline = time.monotonic() + EVENT_DEADLINE_S
    for (topic, queue_id), count in ends(sent).items():
        while (found := committed_offset(broker_of(sent), topic, queue_id, group)) < count:
            assert time.monotonic() < deadline, f"{topic} {queue_id}: {found} of {count}"
            persist()
            time.sleep(POLL_S)


def ends(sent: list[Event]) -> dict[tuple[str, int], int]:
    """The offset behind the last of these messages in each queue."""
    found: dict[tuple[str, int], int] = {}
    for each in sent:
        place = (each["topic"], each["queue"])
        found[place] = max(found.get(place, 0), each["offset"] + 1)
    return found


def broker_of(sent: list[Event]) -> str:
    """The address of the broker that stored these messages."""
    host = sent[0]["offsetMsgId"]
    return f"{'.'.join(str(byte) for byte in bytes.fromhex(host[:8]))}:{int(host[8:16], 16)}"


def wait_indexed(puller: Client, topic: str, key: str) -> None:
    """Until a message is found by its key: Apache's broker indexes what it has stored a moment later."""
    deadline = time.monotonic() + EVENT_DEADLINE_S
    while True:
        try:
            puller.call("puller.query", topic=topic, key=key)
            return
        except DriverError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def queue_ids(queues: Iterable[Event]) -> list[int]:
    return [each["queue"] for each in queues]


def bodies(events: Iterable[Event]) -> list[str]:
    return [event["body"] for event in events]


def numbered(prefix: str, count: int) -> list[str]:
    """The bodies that a send of `count` messages makes."""
    return [f"{prefix}-{number}" for number in range(count)]
