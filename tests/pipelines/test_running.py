"""Declared pipelines checked and run by real Spark, against both servers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from rich.console import Console
from servers import Server, SkylarkServer

from skylark.client.sync import Producer
from skylark.pipelines import spec
from skylark.pipelines.checking import check
from skylark.pipelines.checkpoints import held
from skylark.pipelines.errors import Mistakes, PipelineError
from skylark.pipelines.progress import Summary
from skylark.pipelines.running import run
from skylark.testing import LocalCluster
from spark.conftest import Topics, wait_for


def declare(directory: Path, text: str) -> spec.Declared:
    (directory / "pipeline.yaml").write_text(text)
    return spec.read(directory / "pipeline.yaml")


def run_once(declared: spec.Declared, spark: SparkSession) -> Summary:
    return run(declared, spark, once=True, console=Console(file=io.StringIO()))


TO_FILES = """\
name: upper
source:
  format: rocketmq
  options: {{nameServer: "{namesrv}", subscribe: {topic}, startingOffsets: earliest, timeout: 100s}}
transforms:
  - sql: select cast(body as string) as text, tags from input
  - python: {module}:shout
  - sql: |
      select text,
        tags
      from input where text <> 'DROPPED'
sink:
  format: parquet
  path: out
  partitionBy: [tags]
"""
FUNCTIONS = """\
from pyspark.sql import functions as f

@f.udf("string")
def loud(text):
    return text.upper()

def shout(rows):
    return rows.withColumn("text", loud("text"))

def fails(rows):
    raise RuntimeError("not today")

def number(rows):
    return 7
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    """A module beside the pipeline, of a name that no other test has imported."""
    name = f"functions_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    return name


def test_topic_to_files_and_on_from_there(
    spark: SparkSession, namesrv: str, topics: Topics, topic: str, module: str, tmp_path: Path
) -> None:
    topics.send(topic, "one", "two", tag="a")
    topics.send(topic, "dropped", tag="b")
    declared = declare(tmp_path, TO_FILES.format(namesrv=namesrv, topic=topic, module=module))
    summary = run_once(declared, spark)
    assert (summary.rows, summary.lag) == (3, 0)
    topics.send(topic, "three", tag="b")
    assert run_once(declared, spark).rows == 1
    found = {(row.text, row.tags) for row in spark.read.parquet(str(tmp_path / "out")).collect()}
    assert found == {("ONE", "a"), ("TWO", "a"), ("THREE", "b")}
    assert run_once(declared, spark).rows == 0


TO_TOPIC = """\
name: payments
source:
  format: rocketmq
  options: {{nameServer: "{namesrv}", subscribe: {topic}, startingOffsets: earliest, maxOffsetsPerTrigger: 2}}
transforms:
  - sql: select upper(cast(body as string)) as body, keys, 'paid' as tags from input where tags = 'payment'
sink:
  format: rocketmq
  options: {{nameServer: "{namesrv}", topic: {topic}_paid, deliveryGuarantee: exactly-once}}
"""


def sent_on(spark: SparkSession, namesrv: str, topic: str, total: int) -> list[tuple[str, str, str]]:
    wait_for(namesrv, topic, total)
    frame = spark.read.format("rocketmq").options(nameServer=namesrv, subscribe=topic).load()
    return sorted((bytes(row.body).decode(), row.tags, row["keys"]) for row in frame.collect())


def test_topic_to_topic(
    spark: SparkSession, server: Server, namesrv: str, topic: str, topics: Topics, tmp_path: Path
) -> None:
    topics.create(topic, 2)
    topics.send(topic, "a", "b", "c", tag="payment", key="k")
    topics.send(topic, "d", tag="refund", key="k")
    text = TO_TOPIC.format(namesrv=namesrv, topic=topic)
    if not isinstance(server, SkylarkServer):
        with pytest.raises(PipelineError, match=r"is not a Skylark broker but V5_5_0.*at-least-once works with every"):
            run_once(declare(tmp_path, text), spark)
        text = text.replace("exactly-once", "at-least-once")
    declared = declare(tmp_path, text)
    summary = run_once(declared, spark)
    assert (summary.rows, summary.batches, summary.lag) == (4, 2, 0)
    topics.send(topic, "e", tag="payment", key="k")
    assert run_once(declared, spark).rows == 1
    assert sent_on(spark, namesrv, f"{topic}_paid", 4) == [(text, "paid", "k") for text in "ABCE"]


def test_topic_to_topic_by_command(
    spark: SparkSession, skylark: Any, namesrv: str, topic: str, topics: Topics, tmp_path: Path
) -> None:
    topics.create(topic)
    topics.send(topic, "a", "b", tag="payment", key="k")
    statement = "select body, keys, 'paid' as tags from input where tags = 'payment'"
    place = ("--from", topic, "--to", f"{topic}_paid", "--checkpoint", tmp_path / "kept", "-n", namesrv)
    command = ("pipeline", "etl", statement, *place, "--once")
    first = skylark(*command)
    assert (first.code, first.out) == (0, ""), first.err
    assert first.err.splitlines()[-1].startswith(f"{topic}-to-{topic}_paid: 2 rows in 1 batch")  # after its progress
    topics.send(topic, "c", tag="payment", key="k")
    assert skylark(*command, "--sink-option", "maxInFlight=1", "--option", "pullBatchSize=1").code == 0
    assert sent_on(spark, namesrv, f"{topic}_paid", 3) == [(text, "paid", "k") for text in "abc"]
    wrong = skylark(*command, "--sink-option", "topik=x")
    assert (wrong.code, wrong.out) == (1, "")
    assert wrong.err.startswith("skylark: skylark pipeline etl: unknown option 'topik'; did you mean topic")


def test_a_topic_that_is_not_there(spark: SparkSession, namesrv: str, module: str, tmp_path: Path) -> None:
    declared = declare(tmp_path, TO_FILES.format(namesrv=namesrv, topic="no_such_topic", module=module))
    with pytest.raises(PipelineError, match="topic 'no_such_topic' does not exist at name server"):
        run_once(declared, spark)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("subscribe: ", "subscibe: ", r":4: source\.options\.subscibe: unknown option .* did you mean subscribe"),
        ("timeout: 100s", "timeout: soon", r":4: source\.options\.timeout: option timeout='soon': expected a number"),
        ("cast(body", "cast(bodi", r":6: transforms\[0\]\.sql: \[UNRESOLVED_COLUMN.*`bodi`"),
        ("as text, tags from", "as text, tags form", r":6: transforms\[0\]\.sql: \[PARSE_SYNTAX_ERROR"),
        ("        tags\n", "        tax\n", r":10: transforms\[2\]\.sql: \[UNRESOLVED_COLUMN.*`tax`"),
        ("from input where", "from other where", r":11: transforms\[2\]\.sql: \[TABLE_OR_VIEW_NOT_FOUND.*`other`"),
        (":shout", ":whisper", r":7: transforms\[1\]\.python: module \w+ has no function whisper"),
        (":shout", ":fails", r":7: transforms\[1\]\.python: \w+:fails raised RuntimeError: not today"),
        (":shout", ":number", r":7: transforms\[1\]\.python: \w+:number returned int, not a DataFrame"),
        ("python: ", "python: no", r":7: transforms\[1\]\.python: module no\w+ can't be imported"),
        ("[tags]", "[tax]", r":15: sink\.partitionBy\[0\]: there is no column tax, only text, tags"),
        ("text <> 'DROPPED'", "text <> 'x' group by 1, 2", r":12: sink.*mode: .*[aA]ppend"),
        (
            "format: parquet\n  path: out\n  partitionBy: [tags]",
            'format: rocketmq\n  options: {nameServer: "x:1", topic: paid}',
            r":13: sink\.format: column 'text' is not one that can be written",
        ),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    spark: SparkSession, module: str, tmp_path: Path, old: str, new: str, message: str
) -> None:
    text = TO_FILES.format(namesrv="127.0.0.1:1", topic="orders", module=module)
    assert old in text
    with pytest.raises(PipelineError, match=rf"pipeline\.yaml{message}"):
        check(declare(tmp_path, text.replace(old, new, 1)), spark)


def test_checking_tells_the_columns(spark: SparkSession, module: str, tmp_path: Path) -> None:
    columns = check(declare(tmp_path, TO_FILES.format(namesrv="127.0.0.1:1", topic="orders", module=module)), spark)
    assert columns.simpleString() == "struct<text:string,tags:string>"
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "checkpoints").exists()


FILES = """\
name: files
source:
  format: json
  path: in
  schema: id bigint, name string
transforms:
  - sql: select name, count(*) as n from input group by name
sink:
  format: console
  mode: complete
"""


def test_files_to_the_terminal(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows.json").write_text('{"id": 1, "name": "ann"}\n{"id": 2, "name": "ann"}\n')
    summary = run_once(declare(tmp_path, FILES), spark)
    assert summary.rows == 2
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [["name", "n"], ["ann", "2"]]
    with pytest.raises(PipelineError, match=r"pipeline\.yaml:5: source\.schema: "):
        check(declare(tmp_path, FILES.replace("id bigint", "id biggest")), spark)
    parquet = FILES.replace("json", "parquet").replace("  schema: id bigint, name string\n", "")
    with pytest.raises(PipelineError, match=r"pipeline\.yaml:4: source\.path: .*none"):
        check(declare(tmp_path, parquet.replace("path: in", "path: none")), spark)


FROM_STORE = """\
name: history
source:
  format: rocketmq-commitlog
  path: "{store}"
  options: {{topics: {topic}, bodyFormat: json, bodySchema: "id int, price double"}}
transforms:
  - sql: select value.id, value.price from input where value.price > 1
sink:
  format: parquet
  path: out
"""


def test_a_store_to_files(spark: SparkSession, server: Server, topic: str, topics: Topics, tmp_path: Path) -> None:
    topics.create(topic)
    topics.send(topic, *(f'{{"id": {number}, "price": {number}.5}}' for number in range(4)))
    declared = declare(tmp_path, FROM_STORE.format(store=server.store, topic=topic))
    assert run_once(declared, spark).rows == 3
    assert sorted(map(tuple, spark.read.parquet(str(tmp_path / "out")).collect())) == [(n, n + 0.5) for n in (1, 2, 3)]
    with pytest.raises(PipelineError, match=r"history: .*PATH_ALREADY_EXISTS"):
        run_once(declared, spark)
    topics.send(topic, "oops")
    (tmp_path / "pipeline.yaml").write_text(
        (tmp_path / "pipeline.yaml").read_text().replace("path: out", "path: again")
    )
    with pytest.raises(PipelineError, match=rf"history: queue 0 of topic {topic} .* is not json: "):
        run_once(spec.read(tmp_path / "pipeline.yaml"), spark)


OF_JSON = """\
name: numbers
source:
  format: rocketmq
  options:
    nameServer: "{namesrv}"
    subscribe: numbers
    startingOffsets: earliest
    bodyFormat: json
    bodySchema: id int
transforms:
  - sql: select value.id from input
sink:
  format: parquet
  path: out
"""


def test_a_message_that_cannot_be_read_is_skipped_and_others_are_read_again(
    spark: SparkSession, skylark: Any, tmp_path: Path
) -> None:
    """What the tests of offsets say of a model, of Spark: it takes what they write, and batches have their numbers."""
    with LocalCluster(topics={"numbers": 1}) as cluster, Producer(cluster.name_servers, group="tests") as producer:
        declared = declare(tmp_path, OF_JSON.format(namesrv=cluster.name_servers))
        producer.send("numbers", b'{"id": 0}')
        assert run_once(declared, spark).rows == 1
        for body in (b'{"id": 1}', b"oops", b'{"id": 3}'):
            producer.send("numbers", body)
        skip = ("pipeline", "offsets", "skip", tmp_path / "pipeline.yaml", "--offset", 2, "--yes")
        for told in ("batch 1, which did not finish, begins at 1; it ends at 2 instead of 4", "from 2 to 3, 1 offset"):
            with pytest.raises(PipelineError, match=r"^queue 0 of topic numbers .* at offset 2 is not json"):
                run_once(declared, spark)
            ran = skylark(*skip)
            assert ran.code == 0, ran.err
            assert told in ran.out
        assert run_once(declared, spark).rows == 1

        def ids() -> list[int]:
            return sorted(row.id for row in spark.read.parquet(str(tmp_path / "out")).collect())

        assert ids() == [0, 1, 3]
        moved = skylark("pipeline", "offsets", "set", tmp_path / "pipeline.yaml", "--to", 3, "--yes")
        assert moved.code == 0, moved.err
        assert run_once(declared, spark).rows == 1
        assert ids() == [0, 1, 3, 3]
        elsewhere = tmp_path / "elsewhere.yaml"
        elsewhere.write_text((tmp_path / "pipeline.yaml").read_text().replace("path: out", "path: others"))
        with pytest.raises(PipelineError, match=r"wrote to out until now, .* be missing in others"):
            run_once(spec.read(elsewhere), spark)
        with held(Path(declared.checkpoint)), pytest.raises(PipelineError, match="runs in process"):
            run_once(declared, spark)


def test_all_that_spark_finds_is_told_at_once(spark: SparkSession, module: str, tmp_path: Path) -> None:
    text = TO_FILES.format(namesrv="127.0.0.1:1", topic="orders", module=module)
    for old, new in (("cast(body", "cast(bodi"), (":shout", ":whisper"), ("from input where", "form input where")):
        text = text.replace(old, new, 1)
    with pytest.raises(Mistakes) as told:
        check(declare(tmp_path, text), spark)
    places = [str(mistake).removeprefix(f"{tmp_path}/pipeline.yaml:")[:22] for mistake in told.value.errors]
    assert places == ["6: transforms[0].sql: ", "7: transforms[1].pytho", "11: transforms[2].sql:"]
