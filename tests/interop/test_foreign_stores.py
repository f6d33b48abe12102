"""Stores that Apache RocketMQ 5.5.0 wrote under settings by which it keeps things in another way.

Skylark serves such a store and gives it back, or refuses it with one line and leaves every file as it is. Where that
line says how the store can be served, the test does what it says.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from drivers import Driver, Event, Session, bodies, numbered, readable
from servers import Server, ServerError, clean_environment, request

UPDATE_AND_CREATE_TOPIC = 17
GET_TOPIC_CONFIG = 351
# Small files, so that comparing all of them takes no time; the queue files end within an entry.
SIZES = {
    "mappedFileSizeCommitLog": "65536",
    "mappedFileSizeConsumeQueue": "119",
    "mappedFileSizeTimerLog": "65536",
    "maxHashSlotNum": "1000",
    "maxIndexNum": "4000",
}
TAGGED, LATER = "tagged", "later"
READER = "reader"

Start = Callable[..., Server]


@pytest.fixture
def start(start: Start, server_kind: str) -> Start:
    """Starts servers with the same small files, whatever else is set."""
    if server_kind == "apache":
        pytest.skip("only Apache's server was asked for")
    return lambda kind, replaces=None, **settings: start(kind, replaces, **SIZES | settings)


def contents(server: Server) -> dict[str, str]:
    """The checksum of every file of the store, but for the lock."""
    files = (path for path in server.store.rglob("*") if path.is_file() and path.name not in ("lock", "LOCK"))
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def refusal(start: Start, replaces: Server, **settings: str) -> str:
    """The line that Skylark refuses a store with; every file is as it was."""
    before = contents(replaces)
    with pytest.raises(ServerError) as refused:
        start("skylark", replaces, **settings)
    assert contents(replaces) == before
    [line] = [line for line in str(refused.value).splitlines() if line.startswith("skylark: ")]
    return line


def make_topic(server: Server, topic: str, attributes: str) -> None:
    fields = {
        "topic": topic,
        "defaultTopic": "TBW102",
        "readQueueNums": "1",
        "writeQueueNums": "1",
        "perm": "6",
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0",
        "order": "false",
        "attributes": attributes,
    }
    answer, _ = request(server.broker_addr, UPDATE_AND_CREATE_TOPIC, fields)
    assert answer["code"] == 0, answer


def read_by(session: Session, group: str, count: int, **options: str) -> list[Event]:
    """Lets a group read so many."""
    consumer = session.consumer(group, TAGGED, from_="first", **options)
    taken = consumer.take(count)
    consumer.stop()
    return taken


def pulled(session: Session) -> list[str]:
    """The bodies of everything in the topic, queue by queue."""
    puller = session.puller("puller")
    found: list[Event] = []
    for queue in puller.call("puller.queues", topic=TAGGED)["queues"]:
        result = puller.call("pull", **queue, offset=0)
        while result["status"] == "FOUND":
            found += result["messages"]
            result = puller.call("pull", **queue, offset=result["next"])
    puller.stop()
    return bodies(found)


def write(session: Session) -> list[str]:
    """Forty messages, of which a group has read all, and twenty that it has not; all of them."""
    producer = session.producer("filler")
    producer.create_topic(TAGGED, 2)
    first = readable(producer.send(TAGGED, "read", count=40, mode="ordered", shards=2, tags="a,b", size=3000))
    reader = session.consumer(READER, TAGGED, from_="first")
    reader.take(40)
    reader.commit(first, READER)
    reader.stop()
    readable(producer.send(TAGGED, "left", count=20, mode="ordered", shards=2, tags="a,b", size=3000))
    return pulled(session)


def check_taken_over(session: Session, everything: list[str]) -> None:
    assert pulled(session) == everything
    left = [body for body in everything if body.startswith("left")]
    assert sorted(bodies(read_by(session, READER, 20))) == sorted(left)
    [sent] = session.producer("filler").send(TAGGED, "new", mode="ordered", shards=1)
    assert sent["offset"] == 30


def fetch_tables(server: Server) -> str:
    command = Path(sys.executable).with_name("skylark")
    return subprocess.run(
        [command, "fetch-tables", server.broker_addr, "--store", server.store],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_tags_in_extended_queues(start: Start, java_latest: Driver) -> None:
    """Served and given back; so are queue files whose size is not that of whole entries."""
    settings = {"enableConsumeQueueExt": "true", "mappedFileSizeConsumeQueueExt": "400", "enabledAppendPropCRC": "true"}
    first = start("apache", **settings)
    session = Session(java_latest, first.namesrv_addr)
    producer = session.producer("filler")
    for topic in (TAGGED, LATER):
        producer.create_topic(topic, 1)
    readable(producer.send(TAGGED, "m", count=30, tags="a,b,c"))
    producer.send(LATER, "pending", delayLevel=3)
    session.close(wait=True)
    first.stop()
    assert list((first.store / "consumequeue_ext" / TAGGED / "0").iterdir())

    second = start("skylark", first, **settings)
    session = Session(java_latest, second.namesrv_addr)
    of_one_tag = read_by(session, "of-one-tag", 10, expression="a")
    assert sorted(bodies(of_one_tag)) == sorted(f"m-{number}" for number in range(0, 30, 3))
    [late] = session.consumer("punctual", LATER, from_="first").take(1)
    assert late["storeTimestamp"] - late["bornTimestamp"] >= 10_000
    session.producer("filler").send(TAGGED, "n", count=6, tags="a,b,c")
    session.close(wait=True)
    second.stop()

    third = start("apache", first, **settings)
    session = Session(java_latest, third.namesrv_addr)
    of_another = {f"m-{number}" for number in range(1, 30, 3)} | {"n-1", "n-4"}
    assert set(bodies(read_by(session, "of-another", 12, expression="b"))) == of_another
    assert pulled(session) == [*(f"m-{number}" for number in range(30)), *(f"n-{number}" for number in range(6))]
    session.close()


def test_a_log_in_several_directories_and_tables_in_rocksdb(start: Start, java_latest: Driver, tmp_path: Path) -> None:
    directories = [tmp_path / "one", tmp_path / "two"]
    log_setting = {"storePathCommitLog": ",".join(map(str, directories))}
    first = start("apache", **log_setting, configManagerVersion="v2")
    session = Session(java_latest, first.namesrv_addr)
    everything = write(session)
    session.close(wait=True)
    told = fetch_tables(first)
    assert "topics in" in told
    first.stop()
    assert all(any(directory.iterdir()) for directory in directories)

    assert "is several directories" in refusal(start, first, **log_setting)
    assert "skylark fetch-tables" in refusal(start, first, configManagerVersion="v2")
    assert "config/rdb: topics, groups and offsets are kept in RocksDB" in refusal(start, first)
    (first.store / "config" / "rdb").rename(tmp_path / "rdb")
    assert "has no commit log, but there are consume queues" in refusal(start, first)
    for path in directories[1].iterdir():
        path.rename(directories[0] / path.name)

    second = start("skylark", first, storePathCommitLog=str(directories[0]))
    session = Session(java_latest, second.namesrv_addr)
    check_taken_over(session, everything)
    session.close()


def test_queues_and_tables_in_rocksdb(start: Start, java_latest: Driver, tmp_path: Path) -> None:
    first = start("apache", storeType="defaultRocksDB")
    session = Session(java_latest, first.namesrv_addr)
    everything = write(session)
    session.close(wait=True)
    fetch_tables(first)
    first.stop()

    assert "skylark fetch-tables" in refusal(start, first, storeType="defaultRocksDB")
    assert "config/topics" in refusal(start, first)
    for name in ("topics", "subscriptionGroups", "consumerOffsets", "metadata"):
        if (first.store / "config" / name).exists():
            (first.store / "config" / name).rename(tmp_path / name)
    line = refusal(start, first)
    assert "the consume queues are kept in RocksDB: move that directory away" in line
    queues = Path(line.split("cannot start: ")[1].split(":")[0])
    queues.rename(tmp_path / "queues")

    second = start("skylark", first)
    session = Session(java_latest, second.namesrv_addr)
    check_taken_over(session, everything)
    session.close()


def test_topics_that_only_apache_serves(start: Start, java_latest: Driver) -> None:
    first = start("apache")
    make_topic(first, "batched", "+queue.type=BatchCQ")
    make_topic(first, "compacted", "+cleanup.policy=COMPACTION")
    session = Session(java_latest, first.namesrv_addr)
    session.producer("filler").send("compacted", "c", keys="same")
    session.producer("filler").send("batched", "b", count=5, mode="batch")
    session.close(wait=True)
    first.stop()
    assert list((first.store / "batchconsumequeue" / "batched" / "0").iterdir())
    assert "topics with queue.type=BatchCQ cannot be served: batched: " in refusal(start, first)
    (first.store / "batchconsumequeue").rename(first.directory / "batchconsumequeue")
    assert "queue.type=BatchCQ" in refusal(start, first)  # by its attributes
    topics = first.store / "config" / "topics.json"
    topics.write_text(topics.read_text().replace("BatchCQ", "SimpleCQ"))
    assert "topics with cleanup.policy=COMPACTION cannot be served: compacted: " in refusal(start, first)


def test_a_topic_of_batches_is_a_simple_one_for_apaches_broker(start: Start, java_latest: Driver) -> None:
    first = start("skylark")
    make_topic(first, "batched", "+queue.type=BatchCQ")
    session = Session(java_latest, first.namesrv_addr)
    session.producer("filler").send("batched", "b", count=5, mode="batch")
    assert sorted(bodies(session.consumer("early", "batched", from_="first").take(5))) == numbered("b", 5)
    session.close(wait=True)
    first.stop()

    second = start("apache", first)
    session = Session(java_latest, second.namesrv_addr)
    session.producer("filler").send("batched", "c", count=5, mode="batch")
    found = session.consumer("late", "batched", from_="first").take(10)
    session.close(wait=True)
    second.stop()
    assert sorted(bodies(found)) == numbered("b", 5) + numbered("c", 5)

    third = start("skylark", second)
    answer, body = request(third.broker_addr, GET_TOPIC_CONFIG, {"topic": "batched"})
    assert answer["code"] == 0, answer
    assert json.loads(body)["attributes"] == {"queue.type": "BatchCQ"}
    session = Session(java_latest, third.namesrv_addr)
    found = session.consumer("last", "batched", from_="first").take(10)
    assert sorted(bodies(found)) == numbered("b", 5) + numbered("c", 5)
    session.close()
