"""The archive with real Spark: a checkpoint that was deleted, restored or copied, days that are UTC, and queues that
were made anew or are empty.

What it does in every order of failures is in test_keeping.py, without Spark. One such sequence runs here with Spark;
with the environment variable SKYLARK_ARCHIVE_SEQUENCES=30 there are so many.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession

from pipelines.conftest import Skylark
from pipelines.test_dead_letters import stored
from skylark.pipelines.files import Files
from skylark.pipelines.keeping import CHECKPOINT, STATE
from skylark.pipelines.lake import Lake
from skylark.pipelines.span import span
from skylark.spark.columns import SCHEMA
from spark.conftest import Topics

SEQUENCES = int(os.environ.get("SKYLARK_ARCHIVE_SEQUENCES", "1"))
EVENTS = 6
STEPS = 40  # that a run takes at the files, at most

pytestmark = pytest.mark.parametrize("server", ["skylark"], indirect=True)


def kept(lake: Path) -> list[str]:
    """The bodies, as a reader finds them that knows nothing of Spark."""
    if not any(lake.glob("topic=*/date=*/*.parquet")):
        return []
    table = ds.dataset(lake, format="parquet", partitioning="hive").to_table(columns=["body"])
    return sorted(body.decode() for body in table.column("body").to_pylist())


def test_a_checkpoint_that_is_deleted_or_restored_loses_and_doubles_nothing(
    skylark: Skylark, namesrv: str, topics: Topics, topic: str, tmp_path: Path
) -> None:
    lake, state = tmp_path / "lake", tmp_path / "lake" / "_archive"
    sent: list[str] = []

    def send(*bodies: str) -> None:
        topics.send(topic, *bodies, queue_id=0)
        sent.extend(bodies)

    def archive() -> None:
        ran = skylark("pipeline", "archive", topic, "--to", lake, "-n", namesrv)
        assert ran.code == 0, ran.err
        assert kept(lake) == sorted(sent)

    topics.create(topic, 2)
    send("a1", "a2")
    archive()
    shutil.rmtree(state / "checkpoint")
    send("b1", "b2")
    archive()
    shutil.copytree(state / "checkpoint", tmp_path / "saved checkpoint")
    shutil.copytree(state, tmp_path / "saved state")
    send("c1")
    archive()
    shutil.rmtree(state / "checkpoint")
    shutil.copytree(tmp_path / "saved checkpoint", state / "checkpoint")
    send("d1", "d2")
    archive()
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "saved state", state)
    send("e1")
    archive()
    shutil.rmtree(state)
    send("f1")
    archive()


def test_a_checkpoint_of_another_archive_is_refused(
    skylark: Skylark, namesrv: str, topics: Topics, topic: str, tmp_path: Path
) -> None:
    lake, other = tmp_path / "lake", tmp_path / "other"
    archive = ("pipeline", "archive", topic, "-n", namesrv, "--to")
    topics.create(topic)
    topics.send(topic, "a1")
    assert skylark(*archive, lake).code == 0
    assert skylark(*archive, other).code == 0
    topics.send(topic, "b1")
    assert skylark(*archive, other).code == 0
    shutil.rmtree(lake / "_archive" / "checkpoint")
    shutil.copytree(other / "_archive" / "checkpoint", lake / "_archive" / "checkpoint")
    topics.send(topic, "c1")
    ran = skylark(*archive, lake)
    assert ran.code == 1
    assert f"delete file:{lake}/_archive/checkpoint" in ran.err, "it says what to do"
    shutil.rmtree(lake / "_archive" / "checkpoint")
    assert skylark(*archive, lake).code == 0
    assert kept(lake) == ["a1", "b1", "c1"]


def test_days_are_those_of_utc_whatever_the_session_says(
    spark: SparkSession, skylark: Skylark, namesrv: str, topics: Topics, topic: str, tmp_path: Path
) -> None:
    topics.create(topic)
    topics.send(topic, "now")
    days, conf = set(), "spark.sql.session.timeZone"
    try:
        for zone in ("Pacific/Kiritimati", "Etc/GMT+12"):  # 14 hours before UTC and 12 behind: in one it is another day
            lake = tmp_path / zone.replace("/", "-")
            ran = skylark("pipeline", "archive", topic, "--to", lake, "--conf", f"{conf}={zone}", "-n", namesrv)
            assert ran.code == 0, ran.err
            days |= {path.name for path in lake.glob("topic=*/date=*")}
            table = ds.dataset(lake, format="parquet", partitioning="hive").to_table(columns=["storeTimestamp"])
            day = f"{table.column('storeTimestamp').to_pylist()[0]:%Y-%m-%d}"
            # Lakes of earlier versions have it in the day before, or after.
            (before,) = lake.glob("topic=*/date=*")
            for days_off in (-1, 0, 1):
                moved = before.with_name(f"date={date.fromisoformat(day) + timedelta(days_off)}")
                before = before.rename(moved)
                assert Lake(spark, str(lake)).messages(topic, span(day, None)).count() == 1
                assert Lake(spark, str(lake)).messages(topic, span("2001-01-01", day)).count() == 0
    finally:
        spark.conf.set(conf, "UTC")
    assert days == {f"date={day}"}


def put(spark: SparkSession, lake: Path, topic: str, number: int, rows: list[tuple[str, int, int, str, int]]) -> None:
    """A batch of a lake, as archive puts it there: broker, queue, offset, text of key and body, second of storing."""
    made = [
        (topic, broker, queue, offset, bytearray(text.encode()), None, text.partition(" ")[0], {}, None,
         datetime.fromtimestamp(at_s, UTC), 0, f"{broker}-{queue}-{offset}-{at_s}")
        for broker, queue, offset, text, at_s in rows
    ]  # fmt: skip
    aside, place = lake.with_name("aside"), lake / f"topic={topic}" / "date=2026-01-31"
    spark.createDataFrame(made, SCHEMA).drop("topic").coalesce(1).write.mode("overwrite").parquet(str(aside))
    place.mkdir(parents=True, exist_ok=True)
    (file,) = aside.glob("*.parquet")
    file.rename(place / f"{number:08d}-0000-3f2a9c1e5b7d0a64.parquet")


def test_what_a_topic_had_after_it_was_made_anew_comes_last(
    spark: SparkSession, skylark: Skylark, namesrv: str, topics: Topics, topic: str, tmp_path: Path
) -> None:
    lake, again = tmp_path / "lake", topics.create(f"{topic}-again", 4)
    a, b = "broker-a", "broker-b"  # queue 0 of the first had no message
    put(
        spark,
        lake,
        topic,
        1,
        [(a, 1, 0, "ann 1", 10), (a, 1, 1, "ann 2", 11), (a, 1, 2, "bob 1", 12), (b, 0, 0, "b", 5)],
    )
    compact = ("pipeline", "compact", topic, "--lake", lake, "--to", tmp_path / "snapshot")
    replay = ("pipeline", "replay", lake, again, "--checkpoint", tmp_path / "replay.json", "-n", namesrv)
    assert skylark(*replay).code == 0
    put(spark, lake, topic, 2, [(a, 1, 0, "cid 1", 20), (a, 1, 1, "ann 3", 21)])
    for command in (compact, replay, replay):
        ran = skylark(*command)
        assert ran.code == 0, ran.err
    table = ds.dataset(tmp_path / "snapshot", format="parquet").to_table(columns=["body"])
    assert sorted(table.column("body").to_pylist()) == [b"ann 3", b"b", b"bob 1", b"cid 1"]
    by_queue: dict[int, list[str]] = {}
    for message in stored(namesrv, again, 6):
        by_queue.setdefault(message.queue_id, []).append(message.body.decode())
    assert by_queue == {1: ["ann 1", "ann 2", "bob 1", "cid 1", "ann 3"], 2: ["b"]}


class Killed(Exception):
    """What stands for the death of the process: Spark does not note the end of the batch."""


def die_after(steps: int, patched: pytest.MonkeyPatch) -> None:
    """At the files."""
    left = [steps]

    def dying(work: Callable[..., object]) -> Callable[..., object]:
        def step(*arguments: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return work(*arguments)

        return step

    for name in ("write", "rename", "delete"):
        patched.setattr(Files, name, dying(getattr(Files, name)))


def meddle(lake: Path, saved: list[tuple[str, Path]], chance: random.Random) -> None:
    """Deletes, saves or restores what is not the rows'."""
    name, what = chance.choice((STATE, CHECKPOINT)), chance.choice(("delete", "save", "restore"))
    if what == "save" and (lake / name).exists():
        saved.append((name, lake.with_name(f"saved-{len(saved)}")))
        shutil.copytree(lake / name, saved[-1][1])
    elif what == "restore" and saved:
        name, before = chance.choice(saved)
        shutil.rmtree(lake / name, ignore_errors=True)
        shutil.copytree(before, lake / name)
    elif what == "delete":
        shutil.rmtree(lake / name, ignore_errors=True)


@pytest.mark.parametrize("seed", range(SEQUENCES))
@pytest.mark.timeout(1800)
def test_a_sequence_of_failures(
    skylark: Skylark, namesrv: str, topics: Topics, topic: str, tmp_path: Path, seed: int
) -> None:
    """As in test_keeping.py: a run dies at any of its steps, and checkpoints are deleted and restored."""
    lake, chance, sent = tmp_path / "lake", random.Random(seed), 0
    saved: list[tuple[str, Path]] = []
    topics.create(topic, 2)

    def archive() -> str | None:
        ran = skylark(
            "pipeline", "archive", topic, "--to", lake, "--max-per-batch", chance.randint(3, 9), "-n", namesrv
        )
        assert len(kept(lake)) == len(set(kept(lake))), "a message is in the lake twice"
        return None if ran.code == 0 else ran.err

    for _ in range(EVENTS):
        for queue_id in range(2):
            count = chance.randint(1, 6)
            topics.send(topic, *map(str, range(sent, sent + count)), queue_id=queue_id)
            sent += count
        with pytest.MonkeyPatch.context() as patched:
            die_after(chance.randint(0, STEPS), patched)
            archive()
        meddle(lake, saved, chance)
    told = archive()
    if told is not None:
        (wrong,) = [name for name in (STATE, CHECKPOINT) if f"/{name}: the next run" in told]
        shutil.rmtree(lake / wrong)
        assert archive() is None
    assert kept(lake) == sorted(map(str, range(sent)))
