"""The ready-made pipelines as docs/pipelines.md shows them: its commands run, with real Spark, against both servers."""

from __future__ import annotations

import io
import shlex
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession
from rich.console import Console

from patience import DEADLINE_S
from pipelines.conftest import Ran, Skylark
from pipelines.test_dead_letters import bury, stored
from skylark.client.message import Message
from skylark.pipelines.replay import Checkpoint, replay
from skylark.pipelines.resending import outgoing
from skylark.spark.cluster import Cluster
from skylark.spark.outbox import Outbox
from spark.conftest import Topics

GUIDE = Path(__file__).parents[2] / "docs" / "pipelines.md"
Run = Callable[[str], Ran]


def examples(heading: str) -> list[str]:
    """The commands of a section."""
    section = GUIDE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    block = section.split("```")[1].replace("\\\n", "")
    return block.strip().splitlines()


@pytest.fixture
def run(skylark: Skylark, namesrv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in a directory of its own, and well."""
    monkeypatch.chdir(tmp_path)

    def run(command: str) -> Ran:
        # The JVM stays in the directory that it was started in.
        for path in ("lake", "snapshots/"):
            command = command.replace(f" {path}", f" {tmp_path}/{path}")
        name, *words = shlex.split(command.replace("localhost:9876", namesrv))
        assert name == "skylark"
        ran = skylark(*words)
        assert ran.code == 0, ran.err
        return ran

    return run


def by_queue(messages: list[Message]) -> dict[int, list[tuple[Any, ...]]]:
    """queue -> its messages in their order, without what is new about one that is sent again."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    for message in messages:
        found.setdefault(message.queue_id, []).append(
            (message.body, message.tag, message.keys, message.properties["color"])
        )
    return found


def ids(messages: list[Message]) -> Counter[str]:
    return Counter(message.msg_id for message in messages)


def test_topics_as_files_and_back(
    spark: SparkSession,
    namesrv: str,
    topics: Topics,
    topic: str,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (topic, f"{topic}-again", f"{topic}-killed"):
        topics.create(name, 2)
    for queue_id in (0, 1, 0):
        bodies = [f"{queue_id}-{number}" for number in range(20)]
        topics.send(topic, *bodies, queue_id=queue_id, tag="new", key=["1", "2"], properties={"color": "red"})
    for command in examples("Topics as files, and back"):
        # The messages are of today, and no day of the example's.
        run(command.replace("orders", topic).replace("2026-", "2000-"))
    first, again = stored(namesrv, topic, 60), stored(namesrv, f"{topic}-again", 60)
    assert by_queue(again) == by_queue(first)
    assert ids(again).keys().isdisjoint(ids(first))

    def replay_again() -> int:
        console, target = Console(file=io.StringIO()), f"{topic}-killed"
        return replay(
            spark, str(tmp_path / "lake"), namesrv, target, rate=200, stop=threading.Event(), console=console
        ).messages  # in steps of 20

    writes = iter([True, True, False])
    write = Checkpoint.write

    def die_before_the_second_step_is_noted(*arguments: Any) -> None:
        if not next(writes):
            raise KeyboardInterrupt
        write(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "write", die_before_the_second_step_is_noted)
        with pytest.raises(KeyboardInterrupt):
            replay_again()
    assert replay_again() == 40
    assert Counter(ids(stored(namesrv, f"{topic}-killed", 80)).values()) == {1: 40, 2: 20}, "one step was sent twice"
    assert replay_again() == 0


def test_the_latest_of_each_key(namesrv: str, topics: Topics, topic: str, run: Run, tmp_path: Path) -> None:
    for name in (topic, f"{topic}-latest"):
        topics.create(name, 2)
    topics.send(topic, "ann 1", queue_id=1, key="ann")
    topics.send(topic, "bob 1", "bob 2", queue_id=0, key="bob", tag="new", properties={"color": "red"})
    topics.send(topic, "ann 2", queue_id=0, key="ann")
    topics.send(topic, "cid 1", queue_id=0, key="cid")
    topics.send(topic, "cid closed", queue_id=0, key="cid", tag="closed")
    topics.send(topic, "dan 1", queue_id=0, key="dan")
    topics.send(topic, "nobody", queue_id=0)
    with Cluster(namesrv, timeout_s=DEADLINE_S) as cluster:
        outbox = Outbox(cluster, "tests", DEADLINE_S, max_in_flight=1)
        # Apache's brokers take a message without a body in a batch only.
        for key, body in (("dan", b""), ("fay", b"fay 1")):
            outbox.put(outgoing(topic, body, {"KEYS": key}, unique_key="0" * 32, ordering_key=0))
        outbox.flush()
    topics.send(topic, "eve 1", queue_id=0, key="eve")  # those in the batch are readable when this one is
    to_files, to_topic, from_lake = (
        line.replace("customers", topic).replace("orders", topic) for line in examples("The latest of each key")
    )
    snapshot = tmp_path / "snapshots" / topic

    run(to_files)
    assert bodies(snapshot) == {
        "ann": b"ann 2",
        "bob": b"bob 2",
        "cid": b"cid closed",
        "eve": b"eve 1",
        "fay": b"fay 1",
    }
    run(to_topic)
    latest = {" ".join(message.keys): message for message in stored(namesrv, f"{topic}-latest", 4)}
    assert {key: message.body for key, message in latest.items()} == {
        "ann": b"ann 2",
        "bob": b"bob 2",
        "eve": b"eve 1",
        "fay": b"fay 1",
    }
    assert (latest["bob"].tag, latest["bob"].properties["color"]) == ("new", "red")

    topics.send(topic, "ann 3", queue_id=1, key="ann")
    run(f"skylark pipeline archive {topic} --to lake -n {namesrv}")
    run(from_lake)
    assert bodies(snapshot) == {
        "ann": b"ann 3",
        "bob": b"bob 2",
        "cid": b"cid closed",
        "dan": b"",
        "eve": b"eve 1",
        "fay": b"fay 1",
    }
    assert [path.name for path in snapshot.parent.iterdir()] == [topic], "nothing is left beside it"


def bodies(snapshot: Path) -> dict[str, bytes]:
    """As a reader finds them that knows nothing of Spark."""
    table = ds.dataset(snapshot, format="parquet").to_table(columns=["keys", "body"])
    assert table.num_rows == len(set(table.column("keys").to_pylist()))
    return dict(zip(table.column("keys").to_pylist(), table.column("body").to_pylist(), strict=True))


def test_dead_letters(namesrv: str, topic: str, group: str, run: Run) -> None:
    bury(namesrv, group, topic, "new:1", "paid:2", "paid:3")
    told = [run(line.replace("billing", group).replace("2026-", "2000-")) for line in examples("Dead letters")]
    assert f"group {group}: 3 dead letters, 3 waiting" in told[0].out
    assert '"body":"paid:' in told[1].out
    assert f"3 of 3 dead letters would be sent\n  of 1 with tag new from {topic} to {topic}\n" in told[2].out
    for text, count in zip(told[3:], ("1 message", "2 messages", "0 messages"), strict=True):
        assert f"dead letters of {group}: {count} sent" in text.err
    assert Counter(message.body for message in stored(namesrv, topic, 6)) == {b"new:1": 2, b"paid:2": 2, b"paid:3": 2}
