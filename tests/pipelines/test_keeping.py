"""A model of the archive: random sequences of messages, runs, deaths at every step, checkpoints that are deleted,
restored and copied, and topics made anew, against the real state machine of files and marks.

Whatever happens, no message is twice in what can be seen of the lake; and after a run that ends well, each message that
the broker has is in it, and none was lost without an error that said so.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from pipelines.lakes import TOPIC, Broker, DataLost, Died, Disk, Driver, Row, move_by_hand
from skylark.pipelines.errors import PipelineError
from skylark.pipelines.keeping import CHECKPOINT, STATE, Keeper
from skylark.spark.queues import Queue

SEQUENCES = int(os.environ.get("SKYLARK_ARCHIVE_MODELS", "3000"))
EVENTS = 14
WAYS_ON = (STATE, CHECKPOINT)


class World:
    """A lake, its broker, and what may happen to them."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.disk = Disk()
        self.broker = Broker(self.chance.randint(1, 2))
        self.saved: list[tuple[str, dict[str, str | tuple[Row, ...]]]] = []
        self.missing: set[Row] = set()  # expired although the archive had begun with its queue
        self.passed_over: set[Row] = set()  # by hand
        self.queries = 0
        self.told: list[str] = []

    def event(self) -> None:
        happens: list[Callable[[], None]] = [
            *([self.send] * 4),
            *([self.run_and_die] * 5),
            *([self.run] * 2),
            self.expire,
            self.make_anew,
            self.delete,
            self.save,
            self.restore,
            self.copy_from_another_archive,
            self.move_by_hand,
        ]
        self.chance.choice(happens)()
        rows = self.disk.rows()
        assert len(rows) == len(set(rows)), "a message is in the lake twice"

    def send(self) -> None:
        self.broker.send(self.chance.choice(list(self.broker.logs)), self.chance.randint(1, 6))

    def run(self) -> None:
        self.drive(skip_lost=False)

    def run_and_die(self) -> None:
        self.disk.left = self.chance.randint(0, 25)
        self.drive(skip_lost=self.chance.random() < 0.2)
        self.disk.left = None

    def drive(self, *, skip_lost: bool) -> str | None:
        """What went wrong, if anything did."""
        self.queries += 1
        driver = Driver(
            self.disk,
            self.broker,
            skip_lost=skip_lost,
            most=self.chance.randint(1, 8),
            split=self.chance.randint(1, 4),
        )
        try:
            driver.run(f"query-{self.queries}")
        except Died:
            return "died"
        except PipelineError as error:
            self.missing.clear()  # it was told; or it is refused, and the next run looks again
            self.told.append(str(error))
            return str(error)
        finally:
            if skip_lost:
                self.missing.clear()
        rows = set(self.disk.rows())
        excused = self.passed_over | self.broker.unknown
        assert rows | excused >= set(self.broker.there()), "a run that ended well left messages out"
        if self.disk.names(f"{CHECKPOINT}/offsets"):  # else there was nothing to read, and the first batch will tell
            assert rows | excused >= self.missing, "messages expired, and nothing said so"
        return None

    def expire(self) -> None:
        queue = self.chance.choice(list(self.broker.logs))
        before = set(self.broker.there())
        self.broker.expire(queue, self.chance.randint(1, 4))
        rows = self.disk.rows()
        last = max((row.place for row in rows if row.queue == queue), default=-1)
        if any(row.place == last for row in self.broker.logs[queue].rows):  # the archive had begun with it
            gone = before - set(self.broker.there())
            self.missing |= {row for row in gone - set(rows) if row.place > last}

    def make_anew(self) -> None:
        self.broker.make_anew()
        self.missing.clear()

    def delete(self) -> None:
        """By hand: nobody dies of it."""
        self._without(self.chance.choice(WAYS_ON))

    def save(self) -> None:
        name = self.chance.choice(WAYS_ON)
        self.saved.append((name, self._copy(self.disk, name)))

    def restore(self) -> None:
        if self.saved:
            name, files = self.chance.choice(self.saved)
            self._without(name)
            self.disk.files |= files

    def copy_from_another_archive(self) -> None:
        """Its checkpoint, which may be ahead of this lake."""
        other = Disk()
        self.queries += 1
        Driver(other, self.broker, skip_lost=True, most=self.chance.randint(1, 8)).run(f"query-{self.queries}")
        self._without(CHECKPOINT)
        self.disk.files |= self._copy(other, CHECKPOINT)

    def move_by_hand(self) -> None:
        """A stream that is stopped between two batches is to go on from somewhere else."""
        logs = (self.disk.names(f"{CHECKPOINT}/{log}") for log in ("offsets", "commits"))
        planned, done = ([int(name) for name in names if name.isdigit()] for names in logs)
        if not done or max(planned) != max(done):
            return
        queue, log = self.chance.choice(list(self.broker.logs.items()))
        offset = self.chance.randint(log.low, len(log.rows))
        self.passed_over |= set(log.rows[:offset])
        move_by_hand(self.disk, {queue: offset})

    def _without(self, name: str) -> None:
        self.disk.files = {each: held for each, held in self.disk.files.items() if not each.startswith(f"{name}/")}

    @staticmethod
    def _copy(disk: Disk, name: str) -> dict[str, str | tuple[Row, ...]]:
        return {each: held for each, held in disk.files.items() if each.startswith(f"{name}/")}

    def go_on_as_told(self) -> None:
        """Whoever does what the errors say gets on."""
        for _ in range(4):
            error = self.drive(skip_lost=False)
            if error is None:
                return
            named = [name for name in WAYS_ON if f"delete {self.disk.root}/{name}:" in error]
            if named:
                self._without(named[0])
            else:
                assert "--skip-lost" in error or "failOnDataLoss=false" in error, error
                skipping = self.drive(skip_lost=True)
                if skipping is None:
                    return
        raise AssertionError(f"the errors lead nowhere: {self.told}")


@pytest.mark.parametrize("part", range(10))
def test_each_message_is_kept_once_or_an_error_says_what_to_do(part: int) -> None:
    for seed in range(part * SEQUENCES // 10, (part + 1) * SEQUENCES // 10):
        world = World(seed)
        try:
            for _ in range(EVENTS):
                world.event()
            world.go_on_as_told()
        except AssertionError as error:
            raise AssertionError(f"sequence {seed}: {error}") from error
        rows = world.disk.rows()
        assert len(rows) == len(set(rows)), f"sequence {seed}"


def test_a_death_at_every_step_of_a_run() -> None:
    for deaths in range(120):
        disk, broker = Disk(), Broker(2)
        for queue in broker.logs:
            broker.send(queue, 7)
        disk.left = deaths
        try:
            Driver(disk, broker).run("query")
        except Died:
            assert len(disk.rows()) == len(set(disk.rows()))
        disk.left = None
        Driver(disk, broker).run("query")
        assert disk.rows() == broker.there()
        assert not disk.exists(f"{STATE}/staging"), "what is done leaves nothing aside"


def test_a_state_that_is_restored_after_the_lake_went_on_without_it() -> None:
    """As it was at every step of a run: also with a plan of rows that the lake has by now in other files."""
    for deaths in range(40):
        disk, broker = Disk(), Broker(2)
        for queue in broker.logs:
            broker.send(queue, 7)
        disk.left = deaths
        with suppress(Died):
            Driver(disk, broker).run("query-1")
        disk.left = None
        saved = {name: held for name, held in disk.files.items() if name.startswith(f"{STATE}/")}
        for state, query in (({}, "query-2"), (saved, "query-3")):
            disk.delete(STATE)
            disk.files |= state
            try:
                Driver(disk, broker).run(query)
            except PipelineError:  # as it tells
                disk.delete(CHECKPOINT)
                Driver(disk, broker).run("query-4")
            assert disk.rows() == broker.there(), deaths


def test_what_is_passed_over_by_hand_is_no_gap() -> None:
    """An archive that a message stopped could not be helped: the checkpoint did not belong to it, it said."""
    disk, broker = Disk(), Broker(1)
    (queue,) = broker.logs
    broker.send(queue, 5)
    Driver(disk, broker).run("query-1")
    broker.send(queue, 5)
    move_by_hand(disk, {queue: 6})
    Driver(disk, broker).run("unused")
    assert [row.offset for row in disk.rows()] == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    for offset in (7, 2):  # twice, and back: what the lake has is not kept again
        move_by_hand(disk, {queue: offset})
    Driver(disk, broker).run("unused")
    assert disk.rows() == broker.there()
    broker.send(queue, 1)
    disk.delete(f"{STATE}/kept")
    with pytest.raises(PipelineError, match="does not belong to what is kept there"):
        Driver(disk, broker).run("unused")


def test_a_lake_of_an_earlier_version_goes_on() -> None:
    """Its marks are empty files that name the number of a batch only; its plans name no batch."""
    disk, broker = Disk(), Broker(1)
    (queue,) = broker.logs
    broker.send(queue, 5)
    Driver(disk, broker).run("query-1")
    rows = tuple(disk.rows())
    disk.files = {name: held for name, held in disk.files.items() if name.startswith(f"{CHECKPOINT}/")}
    for held_at in ("place", "staged"):
        old = Disk()
        old.files = dict(disk.files)
        place = f"topic={TOPIC}/date=2026-01-31/00000000-0000-query-1.parquet"
        if held_at == "place":
            old.files[place] = rows
            old.files[f"{STATE}/done/0"] = ""
        else:
            old.files[f"{STATE}/staging/0/abc/part.parquet"] = rows
            old.files[f"{STATE}/planned/0"] = (
                f'{{"staged":"{STATE}/staging/0/abc","moves":{{"part.parquet":"{place}"}}}}'
            )
            del old.files[f"{CHECKPOINT}/commits/0"]
        Driver(old, broker).run("unused")
        broker.send(queue, 2)
        Driver(old, broker).run("unused")
        assert old.rows() == broker.there()
        assert not old.exists(f"{STATE}/done")
        broker.logs[queue].rows = list(rows)


def test_a_filtered_lake_of_an_earlier_version_goes_on() -> None:
    """The rows do not tell how far it was read."""
    disk, broker = Disk(), Broker(1)
    (queue,) = broker.logs
    broker.send(queue, 5)
    Driver(disk, broker).run("query-1")
    rows = tuple(disk.rows())
    disk.files = {name: held for name, held in disk.files.items() if name.startswith(f"{CHECKPOINT}/")}
    disk.files[f"topic={TOPIC}/date=2026-01-31/00000000-0000-query-1.parquet"] = rows[:3]
    disk.files[f"{STATE}/done/0"] = ""
    broker.send(queue, 2)
    Driver(disk, broker).run("unused")
    assert [row.offset for row in disk.rows()] == [0, 1, 2, 5, 6]


def test_what_the_archive_lost_in_an_earlier_version_comes_with_a_new_checkpoint() -> None:
    disk, broker = Disk(), Broker(1)
    (queue,) = broker.logs
    broker.send(queue, 5)
    disk.files[f"topic={TOPIC}/date=2026-01-31/00000000-0000-query-1.parquet"] = (broker.there()[0], broker.there()[4])
    disk.files[f"{STATE}/done/0"] = ""
    Driver(disk, broker).run("query-2")
    assert disk.rows() == broker.there()


def test_messages_that_expired_while_the_checkpoint_was_away_are_told() -> None:
    disk, broker = Disk(), Broker(1)
    (queue,) = broker.logs
    broker.send(queue, 5)
    Driver(disk, broker).run("query-1")
    broker.send(queue, 5)
    broker.expire(queue, 7)
    disk.delete(CHECKPOINT)
    with pytest.raises(PipelineError, match=r"up to offset 5, and the oldest .* is at 7.*--skip-lost"):
        Driver(disk, broker).run("query-2")
    Driver(disk, broker, skip_lost=True).run("unused")
    assert [row.offset for row in disk.rows()] == [0, 1, 2, 3, 4, 7, 8, 9]


def test_a_file_of_a_plan_that_was_taken_away_is_told() -> None:
    disk, broker = Disk(), Broker(1)
    broker.send(Queue(TOPIC, "broker-a", 0), 3)
    keep = Keeper._move
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Keeper, "_move", lambda *arguments: disk.delete(f"{STATE}/staging") or keep(*arguments))
        with pytest.raises(PipelineError, match=rf"neither aside nor in its place.*delete lake/{STATE}: "):
            Driver(disk, broker).run("query-1")
    disk.delete(STATE)
    Driver(disk, broker).run("query-2")
    assert disk.rows() == broker.there()


def test_a_source_that_reads_nothing_anew_is_told_from_one_that_lost() -> None:
    disk, broker = Disk(), Broker(1)
    broker.send(Queue(TOPIC, "broker-a", 0), 3)
    Driver(disk, broker).run("query-1")
    broker.make_anew()
    broker.send(Queue(TOPIC, "broker-a", 0), 5)
    with pytest.raises(DataLost):
        Driver(disk, broker).run("unused")
    disk.delete(CHECKPOINT)
    Driver(disk, broker).run("query-2")
    assert len(disk.rows()) == 8
