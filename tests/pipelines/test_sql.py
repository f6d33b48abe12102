"""`skylark sql` on the topics of both servers."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from servers import Server

from patience import DEADLINE_S
from skylark.client.sync import Producer
from skylark.pipelines.errors import PipelineError
from skylark.pipelines.sql import check, query
from skylark.testing import LocalCluster

BY_TAG = "select tags, count(*) as n, max(cast(body as string)) as last from {topic} group by tags order by tags"


@pytest.fixture
def filled(topics: Any, topic: str) -> str:
    topics.create(topic)
    topics.send(topic, "a", "b,c", tag="blue")
    topics.send(topic, "d", tag="red")
    return topic


def test_rows_as_a_table_as_json_and_as_csv(skylark: Any, namesrv: str, filled: str) -> None:
    statement = BY_TAG.format(topic=filled)
    table = skylark("sql", statement, "-n", namesrv)
    assert (table.code, table.err) == (0, "")
    assert [line.split() for line in table.out.splitlines()] == [
        ["tags", "n", "last"],
        ["blue", "2", "b,c"],
        ["red", "1", "d"],
    ]
    lines = skylark("sql", statement, "--json", "-n", namesrv).out.splitlines()
    assert [json.loads(line) for line in lines] == [
        {"tags": "blue", "n": 2, "last": "b,c"},
        {"tags": "red", "n": 1, "last": "d"},
    ]
    rows = skylark("sql", statement, "--csv", "--limit", 1, "-n", namesrv).out.splitlines()
    assert list(csv.reader(rows)) == [["tags", "n", "last"], ["blue", "2", "b,c"]]


def test_a_stream_ends_at_its_limit(skylark: Any, namesrv: str, filled: str) -> None:
    statement = f"select offset, cast(body as string) as text from {filled}"
    ran = skylark("sql", statement, "--stream", "--from", "earliest", "--limit", 2, "--json", "-n", namesrv)
    assert ran.code == 0
    rows = [json.loads(line) for line in ran.out.splitlines()]
    assert rows == [{"offset": 0, "text": "a"}, {"offset": 1, "text": "b,c"}]


@pytest.mark.parametrize(
    ("statement", "options", "message"),
    [
        ("select * from no_such_topic", (), "skylark: topic 'no_such_topic' does not exist at name server "),
        ("select * form {topic}", (), "skylark: [PARSE_SYNTAX_ERROR] Syntax error at or near 'topic_"),
        ("select tax from {topic}", (), "skylark: [UNRESOLVED_COLUMN.WITH_SUGGESTION] "),
        ("select 1/0 from {topic}", (), "skylark: [DIVIDE_BY_ZERO] "),
        ("select 1 from {topic}", ("--option", "tagz=a"), "skylark: unknown option 'tagz'"),
    ],
)
def test_mistakes_are_one_line(
    skylark: Any, namesrv: str, filled: str, statement: str, options: tuple[str, ...], message: str
) -> None:
    ran = skylark("sql", statement.format(topic=filled), *options, "-n", namesrv)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith(message)
    assert len(ran.err.splitlines()) == 1


def test_as_a_process(started: Callable[[str], Server]) -> None:
    """Only rows are on stdout, and nothing is on stderr."""
    server = started("skylark")
    command = [sys.executable, "-m", "skylark", "sql", "select upper('a') as a", "--csv", "-n", server.namesrv_addr]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a\nA\n", "")


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("select * from no_such_topic", "topic 'no_such_topic' does not exist at name server "),
        ("select * from Orders o join orders p on o.keys = p.keys", "'Orders' and 'orders' are two topics, and one "),
        ("select orders.tags from Orders", "'Orders' and 'orders' are two topics, and one table for Spark"),
        ("select * from orders join ORDERS", "topic 'ORDERS' does not exist at name server "),
    ],
)
def test_what_is_told_before_spark_starts(statement: str, message: str) -> None:
    with LocalCluster(topics={"orders": 1, "Orders": 1}) as cluster, pytest.raises(PipelineError) as told:
        check(statement, name_server=cluster.name_servers)
    assert str(told.value).startswith(message)


@pytest.mark.parametrize("option", [{"startingOffsets": "latest"}, {"maxOffsetsPerTrigger": "5"}])
def test_what_a_query_that_ends_does_not_take_is_told_before_spark_starts(option: dict[str, str]) -> None:
    with pytest.raises(PipelineError, match="is for streams"):
        check("select * from orders", name_server="127.0.0.1:1", options=option)


def test_what_spark_may_know_is_left_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    with LocalCluster(topics={"orders": 1, "Orders": 1}) as cluster:
        for statement, settings in (
            ("select Orders.tags, STORETIMESTAMP from Orders", {}),
            ("select ORDERS.tags from orders", {}),
            ("select * from no_such_topic", {"spark.sql.catalog.lake": "x"}),
            ("select * from orders, Orders", {"spark.sql.caseSensitive": "true"}),
        ):
            check(statement, name_server=cluster.name_servers, settings=settings)
        with pytest.raises(PipelineError, match="unknown option 'tagz'"):
            check("select * from orders", name_server=cluster.name_servers, options={"tagz": "a"})
        for file, text in (("spark-defaults.conf", " spark.sql.catalogImplementation hive\n"), ("hive-site.xml", "")):
            with pytest.raises(PipelineError, match="'no_such_topic' does not exist"):
                check("select * from no_such_topic", name_server=cluster.name_servers)
            (tmp_path / file).write_text(text)
            check("select * from no_such_topic", name_server=cluster.name_servers)
            (tmp_path / file).unlink()
    with pytest.raises(PipelineError, match=r"no connection to 127\.0\.0\.1:1"):
        check("select 1", name_server="127.0.0.1:1")


def test_topics_that_differ_in_case_are_never_mixed_up(spark: SparkSession) -> None:
    with LocalCluster(topics={"orders": 1, "Orders": 1}) as cluster:
        with Producer(cluster.name_servers, group="tests") as producer:
            for topic in ("orders", "Orders"):
                producer.send(topic, topic.encode())

        def bodies(statement: str) -> list[str]:
            return [row[0] for row in query(spark, statement, name_server=cluster.name_servers).collect()]

        for topic in ("Orders", "orders", "Orders"):
            assert bodies(f"select cast(body as string) from {topic}") == [topic]
        with pytest.raises(PipelineError, match="'Orders' and 'orders' are two topics"):
            bodies("select body from Orders union all select body from orders")
