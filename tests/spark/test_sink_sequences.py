"""Random sequences for the exactly-once sink with real Spark and real brokers; the model without Spark has many more.

`SKYLARK_SINK_SPARK=24` runs so many instead of one, `SKYLARK_SINK_SEED` says which is the first.

Python processes of a stream's tasks and of its commit end themselves before or after any entry in the ledger, and
before or after they end transactions, as if the driver was killed there. The broker of target and ledger is killed and
comes back, checkpoints are restored. Each row is delivered once, or an error says what to do.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType
from servers import Server

from patience import DEADLINE_S
from skylark.spark.ledger import Ledger, Places
from skylark.spark.options import write_options
from skylark.spark.sink import Sent, StreamWriter
from skylark.spark.source import RocketMQ
from spark.conftest import Topics
from spark.test_outage import SecondBroker
from spark.test_sink import in_queues

SEQUENCES = int(os.environ.get("SKYLARK_SINK_SPARK", "1"))
FIRST = int(os.environ.get("SKYLARK_SINK_SEED", "0"))
STEPS = ("write", "snapshot", "dies", "outage", "restore")
"""of the first sequence; the others have steps at random"""
_DEAD = "dead"

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Spark's workers can't import tests


def watched(death: Path) -> type[RocketMQ]:
    """The format `rocketmq-watched`: a process that uses it dies when the steps in the file are counted down."""

    class Watched(RocketMQ):
        @classmethod
        def name(cls) -> str:
            return "rocketmq-watched"

        def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
            class Writer(StreamWriter):
                def write(self, iterator: Iterator[object]) -> Sent:
                    watch(death)
                    return super().write(iterator)  # type: ignore[arg-type, return-value]

                def commit(self, messages: list[object], batchId: int) -> None:
                    watch(death)
                    super().commit(messages, batchId)  # type: ignore[arg-type]

                def abort(self, messages: list[object], batchId: int) -> None:
                    if death.read_text() != _DEAD:  # who is dead does not abort
                        super().abort(messages, batchId)  # type: ignore[arg-type]

            return Writer(write_options(self.options), schema)

    return Watched


def watch(death: Path) -> None:
    append, end = Ledger._append, Ledger.end
    if hasattr(Ledger, "_watched"):
        return
    Ledger._watched = True  # type: ignore[attr-defined]

    def step() -> None:
        left = death.read_text()
        if left == _DEAD or left == "1":
            death.write_text(_DEAD)
            os._exit(1)
        if left:
            death.write_text(str(int(left) - 1))

    def watched_append(self: Ledger, body: bytes, keys: str | None = None) -> int:
        step()
        offset = append(self, body, keys)
        step()
        return offset

    def watched_end(self: Ledger, places: Places, decision: int) -> None:
        step()
        end(self, places, decision)
        step()

    Ledger._append = watched_append  # type: ignore[method-assign]
    Ledger.end = watched_end  # type: ignore[method-assign]


class Sequence:
    """One stream and what happens to it."""

    def __init__(self, spark: SparkSession, seed: int, server: Server, second: SecondBroker, directory: Path) -> None:
        self.random = random.Random(seed)
        self.source, self.target = f"source_{seed}", f"target_{seed}"
        self.rows = 0
        self._is_first = seed == 0
        self.is_refused = False
        self._spark = spark
        self._server = server
        self._second = second
        self._checkpoint, self._snapshot = directory / "checkpoint", directory / "snapshot"
        self._death = directory / "death"
        self._death.write_text("")
        spark.dataSource.register(watched(self._death))
        self._topics = Topics(server)
        self._topics.create(self.source, 2)
        Topics(second).create(self.target, 2)  # type: ignore[arg-type]

    def run(self) -> None:
        choices = ("dies", "dies", "dies", "outage", "snapshot", "restore", "write")
        steps = STEPS if self._is_first else self.random.choices(choices, k=8)
        for step in steps:
            if self.is_refused:
                break
            self._produce()
            self._step(step)
            self._check(is_complete=False)
        while not self.is_refused and not self._write():
            pass
        self._check(is_complete=not self.is_refused)

    def _step(self, name: str) -> None:
        if name == "dies":
            self._death.write_text(str(self.random.randint(1, 14)))
            self._write()
            self._death.write_text("")
        elif name == "outage":
            self._outage()
        elif name == "snapshot" and self._checkpoint.exists():
            shutil.rmtree(self._snapshot, ignore_errors=True)
            shutil.copytree(self._checkpoint, self._snapshot)
            self._write()
        elif name == "restore" and self._snapshot.exists():
            shutil.rmtree(self._checkpoint)
            shutil.copytree(self._snapshot, self._checkpoint)
            self._write()
        else:
            self._write()

    def _outage(self) -> None:
        assert self._second.process is not None
        self._second.process.kill()
        back = threading.Timer(3.0, self._second.start)
        back.start()
        self._write()
        back.join(DEADLINE_S)

    def _produce(self) -> None:
        count = self.random.randint(1, 30)
        self._topics.send(self.source, *map(str, range(self.rows, self.rows + count)))
        self.rows += count

    def _write(self) -> bool:
        """Whether the stream came to the end of its source."""
        options = {"nameServer": self._server.namesrv_addr, "timeout": f"{DEADLINE_S:.0f}s"}
        rows = (
            self._spark.readStream.format("rocketmq")
            .options(subscribe=self.source, startingOffsets="earliest", **options)
            .option("maxOffsetsPerTrigger", self.random.choice((7, 20, 1000)))
            .load()
            .select("body")
            .repartition(self.random.randint(1, 2))
        )
        query = (
            rows.writeStream.format("rocketmq-watched")
            .options(topic=self.target, deliveryGuarantee="exactly-once", ledgerTopic="sequences", **options)
            .option("checkpointLocation", str(self._checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        try:
            query.awaitTermination()
        except PySparkException as e:
            self.is_refused = "comes again with" in str(e)
            if not self.is_refused and self._death.read_text() != _DEAD:
                raise
            return False
        return True

    def _check(self, *, is_complete: bool) -> None:
        try:
            found = Counter(map(int, in_queues(self._server.namesrv_addr, self.target)))
        except Exception:
            assert not is_complete
            return
        assert not found or max(found.values()) == 1
        if is_complete:
            assert found.keys() == set(range(self.rows))


@pytest.fixture
def second(tmp_path: Path, started: Callable[[str], Server]) -> Iterator[SecondBroker]:
    broker = SecondBroker(tmp_path / "second", started("skylark").namesrv_addr)
    broker.start()
    yield broker
    if broker.process is not None and broker.process.running:
        broker.process.stop()


def test_sequences(spark: SparkSession, started: Callable[[str], Server], second: SecondBroker, tmp_path: Path) -> None:
    for seed in range(FIRST, FIRST + SEQUENCES):
        directory = tmp_path / f"sequence-{seed}"
        directory.mkdir()
        try:
            Sequence(spark, seed, started("skylark"), second, directory).run()
        except Exception as e:
            e.add_note(f"SKYLARK_SINK_SEED={seed} SKYLARK_SINK_SPARK=1")
            raise
