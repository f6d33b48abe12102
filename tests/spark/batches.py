"""A driver without Spark that writes batch after batch as Spark's does: tasks, commit, then its own note of progress.

batches.py NAME_SERVER TOPIC GUARANTEE PROGRESS_FILE ROWS STEP...

It lives once for each step, and once more to the end. In each of its lives it does a batch, the one that was under way
when it died before, and is killed at the step in the next. A life is a process of its own, forked from one that has
imported everything, so that many cost little; it says when it has come to its step, and waits there for its end.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
from pyspark.sql.types import StringType, StructType

from skylark.spark.ledger import Entry, Ledger, Places
from skylark.spark.options import write_options
from skylark.spark.sink import Delivery

TASKS = 2
Step = Callable[[str], None]


class Driver:
    """The batches, and at which of them it is. `step` is called at every step by its name."""

    def __init__(self, given: dict[str, str], progress: Path, rows: int, step: Step) -> None:
        self._given = given
        self._progress = progress
        self._rows = rows
        self._step = step

    @property
    def next_batch(self) -> int:
        return int(self._progress.read_text()) if self._progress.exists() else 0

    def write(self, batch: int) -> None:
        schema = StructType().add("body", StringType())
        sent = []
        for task in range(TASKS):
            delivery = Delivery(write_options(self._given), schema)
            sent.append(delivery.send(self._tables(batch, task), self._given["topic"], batch, task))
            self._step("task")
        Delivery(write_options(self._given), schema).commit(sent, batch)
        self._step("committed")
        new = self._progress.with_suffix(".new")
        new.write_text(str(batch + 1))
        new.replace(self._progress)
        self._step("noted")

    def _tables(self, batch: int, task: int) -> Iterator[pa.RecordBatch]:
        """The rows of a task in two parts; between them the first is on its way."""
        texts = [str(number) for number in range(batch * self._rows + task, (batch + 1) * self._rows, TASKS)]
        half = len(texts) // 2
        yield pa.RecordBatch.from_pydict({"body": pa.array(texts[:half])})
        self._step("sending")
        yield pa.RecordBatch.from_pydict({"body": pa.array(texts[half:])})


def watch_ledger(step: Step) -> None:
    """Steps within a commit: part, manifest and done, when each is in the ledger, and ended when a task's rows are."""
    append, end = Ledger._append, Ledger.end

    def watched_append(self: Ledger, body: bytes, key: str | None = None) -> int:
        offset = append(self, body, key)
        step("part" if key is None else type(msgspec.msgpack.decode(body, type=Entry)).__name__.lower())
        return offset

    def watched_end(self: Ledger, places: Places, decision: int) -> None:
        end(self, places, decision)
        step("ended")

    Ledger._append = watched_append  # type: ignore[method-assign]
    Ledger.end = watched_end  # type: ignore[method-assign]


def live_until(wanted: str, given: dict[str, str], progress: Path, rows: int) -> None:
    """A life that is killed at the step."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        live(wanted, tell, given, progress, rows)
    os.close(tell)
    with os.fdopen(told, "rb") as pipe:
        came = pipe.read(1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not came:
        sys.exit(f"a driver ended before it came to the step {wanted}")


def live(wanted: str, tell: int, given: dict[str, str], progress: Path, rows: int) -> None:
    is_last = False

    def step(name: str) -> None:
        if is_last and name == wanted:
            os.write(tell, b".")
            signal.pause()

    try:
        watch_ledger(step)
        driver = Driver(given, progress, rows, step)
        driver.write(driver.next_batch)
        is_last = True
        driver.write(driver.next_batch)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def main() -> None:
    name_server, topic, guarantee, progress, rows, *steps = sys.argv[1:]
    given = {"nameServer": name_server, "topic": topic, "deliveryGuarantee": guarantee}
    for step in steps:
        live_until(step, given, Path(progress), int(rows))
    driver = Driver(given, Path(progress), int(rows), lambda name: None)
    while (batch := driver.next_batch) < len(steps) + 2:
        driver.write(batch)


if __name__ == "__main__":
    main()
