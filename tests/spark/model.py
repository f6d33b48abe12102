"""The exactly-once sink under everything that can happen to it: a model of Spark around the real code, without Spark.

Rows of a source, numbered, go in batches through `Delivery` to a cluster in memory. What Spark does around it is done
here: a checkpoint notes the end of a batch before its tasks run, and that it is committed when it is. Tasks fail and
are tried again; an attempt that was given up goes on to its end, also after the commit; a batch that comes again has
its rows in other tasks. A driver dies between any two requests, or goes on beside the one that took its place. Brokers
go and come back, answers are lost. Checkpoints are restored and copied.

Two things must hold, at every moment: no row is delivered twice, and when a batch ends without an error, every row up
to its end is delivered.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql.types import StringType, StructType

from skylark.client.errors import NotReachable, RequestTimeout, RocketMQError
from skylark.spark.options import BadOption, Writing, write_options
from skylark.spark.sink import Delivery, OtherRows, Sent
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from spark.scripted import NAME_SERVER, Broker, World

TOPIC = "orders"
_SCHEMA = StructType().add("body", StringType())
_TIMEOUT_S = 30
_MOST_BATCHES = 40
_TRANSIENT = (NotReachable, RequestTimeout)


class Died(BaseException):
    """The end of a driver's process, with its tasks."""


class TaskDied(Exception):
    """The end of a task."""


class Overtaken(Exception):
    """Another driver wrote to the checkpoint: Spark ends the query."""


class Violation(AssertionError):
    """What must not be."""


@dataclass(eq=False)
class Checkpoint:
    """Spark's: the end of each batch that was planned, and which were committed. A copy is another one."""

    ends: dict[int, int] = field(default_factory=dict)
    commits: set[int] = field(default_factory=set)

    def copy(self) -> Checkpoint:
        return Checkpoint(dict(self.ends), set(self.commits))


@dataclass
class Trouble:
    """What goes wrong at requests to come, by their number."""

    random: random.Random
    world: World
    in_requests: int = -1
    kind: str = ""
    other: Callable[[], None] = lambda: None

    def set(self, kind: str, in_requests: int) -> None:
        self.kind, self.in_requests = kind, in_requests

    def clear(self) -> None:
        self.in_requests = -1

    def before(self, address: str, request: Frame) -> None:
        if self.in_requests < 0:
            return
        self.in_requests -= 1
        if self.in_requests >= 0:
            return
        if self.kind == "dies":
            raise Died
        if self.kind == "other":
            self.other()
        elif self.kind == "away":
            broker = self.random.choice(list(self.world.brokers))
            self.world.away(broker, for_s=self.random.choice((5, 20, 100)))
        elif self.kind == "hangs":
            self._hang(address, request)
        elif self.kind in ("lost", "dies after"):
            self.in_requests = -2  # in `after`

    def _hang(self, address: str, request: Frame) -> None:
        """A broker does not answer for a while. What it was asked it does afterwards, when nobody waits for it."""
        broker = next((each for each in self.world.brokers.values() if each.address == address), None)
        if broker is not None:
            self.world.away(broker.name, for_s=self.random.choice((10, 29, 31, 60)))
            if request.code == RequestCode.UPDATE_AND_CREATE_TOPIC:
                return  # done that late, a mark could close a ledger: what `sole` says is not promised for this
            in_s = self.random.choice((1, 35, 62, 100))
            self.world.plan(in_s, lambda: broker.answer(request, int(self.world.now_s * 1000)))

    def after(self, address: str, request: Frame) -> None:
        if self.in_requests == -2:
            self.in_requests = -1
            if self.kind == "dies after":
                raise Died
            raise ConnectionError("the answer is lost")


class Model:
    """One sequence."""

    def __init__(self, seed: int, world: World) -> None:
        self.random = random.Random(seed)
        self.world = world
        self.rows = 0
        self.seen: Counter[str] = Counter()
        """what happened, by kind"""
        self.trouble = Trouble(self.random, world)
        world.watch, world.after = self.trouble.before, self.trouble.after
        self.checkpoints = [Checkpoint()]
        self.snapshots: list[Checkpoint] = []
        self.options = {"group": "spark"}
        self._is_nested = False

    def run(self) -> None:
        self._first_start()
        for _ in range(self.random.randint(4, 14)):
            if not self.checkpoints:
                break
            action, weight = zip(*self._actions().items(), strict=True)
            name = self.random.choices(action, weight)[0]
            self.seen[name] += 1
            getattr(self, f"_{name}")()
            self._check_once()
        self._heal()
        for checkpoint in list(self.checkpoints):
            for _ in range(_MOST_BATCHES):
                if checkpoint not in self.checkpoints or self._is_complete(checkpoint):
                    break
                self._life(checkpoint)
            else:
                raise Violation("a stream does not come to its end")
        self._check_once()

    def _actions(self) -> dict[str, int]:
        return {
            "produce": 6, "batch": 5, "dying_batch": 8, "troubled_batch": 6, "second_driver": 3, "away": 2, "back": 3,
            "snapshot": 2, "restore": 2 if self.snapshots else 0, "fork": 1, "new_group": 3, "new_broker": 1,
            "topic_anew": 1,
        }  # fmt: skip

    # What happens.

    def _first_start(self) -> None:
        """All brokers are there when the ledger is made, however often whoever makes it dies."""
        for _ in range(self.random.randint(0, 2)):
            self.trouble.set(self.random.choice(("dies", "dies after")), self.random.randint(0, 8))
            with suppress(Died):
                Delivery(self._writing(), _SCHEMA)
            self.trouble.clear()
        self._meet()

    def _produce(self) -> None:
        self.rows += self.random.choice((1, 2, 3, 7))

    def _batch(self) -> None:
        self._life(self._some())

    def _dying_batch(self) -> None:
        self.trouble.set(self.random.choice(("dies", "dies after")), self.random.randint(0, 40))
        self._life(self._some())

    def _troubled_batch(self) -> None:
        self.trouble.set(self.random.choice(("lost", "away", "hangs")), self.random.randint(0, 40))
        self._life(self._some())

    def _second_driver(self) -> None:
        """In the middle of one driver's batch another one runs, with the same checkpoint or a copy."""
        checkpoint, other = self._some(), self._some()
        self.trouble.other = lambda: self._life(other)
        self.trouble.set("other", self.random.randint(0, 40))
        self._life(checkpoint)

    def _away(self) -> None:
        self.world.away(self.random.choice(list(self.world.brokers)))

    def _back(self) -> None:
        for name in self.world.brokers:
            self.world.back(name)

    def _snapshot(self) -> None:
        self.snapshots.append(self._some().copy())

    def _restore(self) -> None:
        self.checkpoints[self.random.randrange(len(self.checkpoints))] = self.random.choice(self.snapshots).copy()

    def _fork(self) -> None:
        if len(self.checkpoints) < 3:
            self.checkpoints.append(self._some().copy())

    def _new_group(self) -> None:
        self.options["group"] = "other" if self.options["group"] == "spark" else "spark"

    def _new_broker(self) -> None:
        """A write begins while it is there together with the others."""
        if len(self.world.brokers) < 3:
            broker = Broker(f"broker-{len(self.world.brokers)}")
            self.world.brokers[broker.name] = broker
            self._meet()

    def _topic_anew(self) -> None:
        """The topic is deleted and made again, with other queues."""
        for broker in self.world.brokers.values():
            broker.topics.pop(TOPIC, None)
        self.random.choice(list(self.world.brokers.values())).put_topic(TOPIC, self.random.randint(1, 3))

    def death(self, kind: str, in_requests: int) -> bool:
        """Whether a first batch had so many requests that its driver died at that one; then the next one ended it."""
        self._meet()
        self.rows, checkpoint = 5, self.checkpoints[0]
        self.trouble.set(kind, in_requests)
        self._life(checkpoint)
        self._check_once()
        if not self._is_complete(checkpoint):
            self._life(checkpoint)
        if not self._is_complete(checkpoint):
            raise Violation("the next driver does not end the batch")
        return self.seen["Died"] > 0

    def _meet(self) -> None:
        self._back()
        Delivery(self._writing(), _SCHEMA)

    def _some(self) -> Checkpoint:
        return self.random.choice(self.checkpoints)

    def _heal(self) -> None:
        self.trouble.clear()
        self._back()
        self.world.pass_time(1_000)

    # Spark.

    def _life(self, checkpoint: Checkpoint) -> None:
        """A driver that does one batch, and how it ends."""
        is_outer, self._is_nested = not self._is_nested, True
        try:
            self._write_batch(checkpoint)
        except (Died, Overtaken, TaskDied) as e:
            self.seen[type(e).__name__] += 1
        except OtherRows:
            self.seen["OtherRows"] += 1
            if checkpoint in self.checkpoints:
                self.checkpoints.remove(checkpoint)
        except _TRANSIENT:
            self.seen["away too long"] += 1
        except (RocketMQError, BadOption) as e:
            if "was aborted meanwhile" not in str(e):
                raise Violation(f"an error that nothing calls for: {e}") from e
            self.seen["aborted"] += 1
        finally:
            if is_outer:
                self._is_nested = False
                self.trouble.clear()

    def _write_batch(self, checkpoint: Checkpoint) -> None:
        batch = max(checkpoint.ends, default=-1)
        if batch in checkpoint.commits or batch < 0:
            batch += 1
            if self.rows == checkpoint.ends.get(batch - 1, 0) and self.random.random() < 0.8:
                return  # mostly Spark runs no batch without rows
            checkpoint.ends[batch] = self.rows
        start, end = checkpoint.ends.get(batch - 1, 0), checkpoint.ends[batch]
        delivery = Delivery(self._writing(), _SCHEMA)
        sent: list[Sent | None] = []
        late: list[Callable[[], object]] = []
        try:
            for task, rows in enumerate(self._split(start, end)):
                sent.append(self._task(delivery, batch, task, rows, late))
            delivery.commit(sent, batch)
        except Exception:
            delivery.abort(sent, batch)
            raise
        if checkpoint.ends.get(batch) != end:
            raise Overtaken
        checkpoint.commits.add(batch)
        self.seen["committed"] += 1
        self._check_all(end)
        for attempt in late:
            attempt()
        self._check_once()

    def _task(
        self, delivery: Delivery, batch: int, task: int, rows: list[int], late: list[Callable[[], object]]
    ) -> Sent:
        """Attempts until one succeeds; what an attempt has sent that nobody asks for any more is there all the same."""
        for _ in range(4):
            fate = self.random.choices(("done", "fails", "unheard", "late"), (12, 2, 1, 1))[0]
            if fate == "late":
                late.append(lambda: self._late(delivery, batch, task, rows))
                continue
            try:
                sent = delivery.send(self._tables(rows, fails=fate == "fails"), "query", batch, task)
            except TaskDied:
                self.seen["task"] += 1
                continue
            if fate == "done":
                return sent
        return delivery.send(self._tables(rows, fails=False), "query", batch, task)

    def _late(self, delivery: Delivery, batch: int, task: int, rows: list[int]) -> None:
        """An attempt that was given up and goes on after the commit."""
        self.seen["late"] += 1
        try:
            delivery.send(self._tables(rows, fails=False), "query", batch, task)
        except RocketMQError:
            return

    def _tables(self, rows: list[int], *, fails: bool) -> Iterator[pa.RecordBatch]:
        half = len(rows) // 2
        yield _table(rows[:half])
        if fails:
            raise TaskDied
        yield _table(rows[half:])

    def _split(self, start: int, end: int) -> list[list[int]]:
        rows = list(range(start, end))
        self.random.shuffle(rows)
        tasks = self.random.randint(1, 3)
        return [rows[task::tasks] for task in range(tasks)]

    def _writing(self) -> Writing:
        given = {"nameServer": NAME_SERVER, "topic": TOPIC, "timeout": f"{_TIMEOUT_S}s"}
        return write_options(given | {"deliveryGuarantee": "exactly-once"} | self.options)

    # What must hold.

    def _is_complete(self, checkpoint: Checkpoint) -> bool:
        last = max(checkpoint.ends, default=-1)
        return not self.rows or (last in checkpoint.commits and checkpoint.ends[last] == self.rows)

    def _delivered(self) -> Counter[int]:
        return Counter(int(body) for body in self.world.delivered_bodies(TOPIC))

    def _check_once(self) -> None:
        twice = [row for row, times in self._delivered().items() if times > 1]
        if twice:
            raise Violation(f"rows {twice} are delivered twice")

    def _check_all(self, end: int) -> None:
        lost = set(range(end)) - self._delivered().keys()
        if lost:
            raise Violation(f"rows {sorted(lost)} are not delivered, and the batch ended well")


def _table(rows: list[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"body": pa.array([str(row) for row in rows], pa.string())})


def world_of(seed: int) -> World:
    """One to three brokers, of which the first has the topic."""
    brokers = [Broker(f"broker-{number}") for number in range(random.Random(seed).randint(1, 3))]
    for broker in brokers[:2]:
        broker.put_topic(TOPIC, 2)
    return World(*brokers)
