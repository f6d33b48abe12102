"""Pipelines in YAML: what is read, and that every error says file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from skylark.pipelines import spec
from skylark.pipelines.errors import Mistakes, PipelineError

WHOLE = """\
name: paid
source:
  format: rocketmq
  options:
    nameServer: localhost:9876
    subscribe: orders
    maxOffsetsPerTrigger: 1000
    failOnDataLoss: false
transforms:
  - sql: |
      select body
      from input
  - python: clean:drop_empty
sink:
  format: parquet
  path: lake/paid
  partitionBy: [tags]
trigger: 10s
spark:
  master: local[2]
  conf: {spark.sql.shuffle.partitions: 4}
"""


def parsed(text: str) -> spec.Declared:
    return spec.parse(text, "paid.yaml", Path("/pipelines"))


def test_a_whole_pipeline() -> None:
    declared = parsed(WHOLE)
    pipeline = declared.pipeline
    assert (pipeline.name, pipeline.source.format, pipeline.sink.partition_by) == ("paid", "rocketmq", ["tags"])
    assert pipeline.transforms[0].sql == "select body\nfrom input\n"
    assert spec.options_of(declared, "source")["maxOffsetsPerTrigger"] == "1000"
    assert spec.options_of(declared, "source")["failOnDataLoss"] == "false"
    assert spec.settings_of(declared) == {"spark.sql.shuffle.partitions": "4"}
    assert declared.checkpoint == "/pipelines/checkpoints/paid"
    assert declared.located("s3a://lake/paid") == "s3a://lake/paid"
    assert declared.located("lake") == "/pipelines/lake"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sink:", "sinks:", r"paid\.yaml:14: sinks: unknown key; did you mean sink\?"),
        ("  path: lake/paid", "  pfad: lake/paid", r"paid\.yaml:16: sink\.pfad: unknown key; there are format"),
        ("python: clean", "pythn: clean", r"paid\.yaml:13: transforms\[1\]\.pythn: unknown key; did you mean python"),
        ("format: parquet", "format: orc", r"paid\.yaml:15: sink\.format: expected rocketmq, parquet, table or "),
        ("path: lake/paid", "path: 7", r"paid\.yaml:16: sink\.path: expected a text, not a number"),
        ("partitionBy: [tags]", "partitionBy: tags", r"paid\.yaml:17: sink\.partitionBy: expected a list, not a text"),
        ("clean:drop_empty", "clean.drop_empty", r"paid\.yaml:13: transforms\[1\]\.python: .*module:function"),
        ("subscribe: orders", "subscribe: [orders]", r"paid\.yaml:6: source\.options\.subscribe: expected a text"),
        ("trigger: 10s", "trigger: 10", r"paid\.yaml:18: trigger: expected once, continuous or a time such as 10s$"),
        ("trigger: 10s", "trigger: often", r"paid\.yaml:18: trigger: expected once, continuous or a time"),
        ("name: paid\n", "", r"paid\.yaml:1: the key name is missing"),
        ("name: paid", "name: ../paid", r"paid\.yaml:1: name: expected letters, digits, dots"),
        ("  format: parquet\n", "", r"paid\.yaml:14: sink: the key format is missing"),
        ("  path: lake/paid\n", "", r"paid\.yaml:14: sink\.path: missing: the directory"),
        ("format: rocketmq\n", "format: csv\n  path: in\n", r"paid\.yaml:2: source\.schema: missing: a stream of csv"),
        ("format: rocketmq\n", "format: rocketmq\n  path: in\n", r"paid\.yaml:4: source\.path: a topic has no path"),
        (
            "format: rocketmq\n",
            "format: rocketmq-commitlog\n",
            r"paid\.yaml:2: source\.path: missing: the directory of a",
        ),
        ("  partitionBy: [tags]", "  mode: update", r"paid\.yaml:17: sink\.mode: parquet files can only be appended"),
        ("    subscribe: orders", "    nameServer: x", r"paid\.yaml:6: source\.options\.nameServer is given twice"),
        ("trigger: 10s", "trigger: [10s", r"paid\.yaml:19: .*expected"),
        ("trigger: 10s", "3: 10s", r"paid\.yaml:18: a key must be a text, not 3"),
        ("- python: clean:drop_empty", "- {}", r"paid\.yaml:13: transforms\[1\]: expected one of sql and python"),
    ],
)
def test_errors_say_where(old: str, new: str, message: str) -> None:
    assert old in WHOLE
    with pytest.raises(PipelineError, match=f"^{message}"):
        parsed(WHOLE.replace(old, new, 1))


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words"])
def test_what_is_no_mapping(text: str) -> None:
    with pytest.raises(PipelineError, match=r"^paid\.yaml:1: a pipeline is a mapping"):
        parsed(text)


def test_the_line_within_a_block() -> None:
    document = parsed(WHOLE).document
    assert str(document.error(("transforms", 0, "sql"), "no", line_within=2)) == "paid.yaml:12: transforms[0].sql: no"
    assert str(document.error(("transforms", 1, "sql"), "no", line_within=2)).startswith("paid.yaml:13: ")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"cannot read the pipeline .*none\.yaml: No such file"):
        spec.read(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(PipelineError, match="cannot read the pipeline"):
        spec.read(tmp_path / "bytes.yaml")
    (tmp_path / "large.yaml").write_bytes(b"#" * (1 << 20) + b"#")
    with pytest.raises(PipelineError, match="larger than a pipeline may be"):
        spec.read(tmp_path / "large.yaml")


def test_all_mistakes_are_told_at_once() -> None:
    text = WHOLE
    for old, new in (
        ("name: paid", "name: ../paid"),
        ("subscribe: orders", "subscribe: [orders]"),
        ("    failOnDataLoss: false", "    FAILONDATALOSS: false\n    failOnDataLoss: true"),
        ("python: clean:drop_empty", "pythn: x"),
        ("path: lake/paid", "path: 7"),
        ("trigger: 10s", "trigger: often"),
        ("master: local[2]", "mastr: local[2]"),
    ):
        assert old in text
        text = text.replace(old, new, 1)
    with pytest.raises(Mistakes) as told:
        parsed(text)
    assert [str(mistake).split(": ")[0] + " " + str(mistake).split(": ")[1] for mistake in told.value.errors] == [
        "paid.yaml:1 name",
        "paid.yaml:6 source.options.subscribe",
        "paid.yaml:9 source.options.failOnDataLoss",
        "paid.yaml:14 transforms[1].pythn",
        "paid.yaml:17 sink.path",
        "paid.yaml:19 trigger",
        "paid.yaml:21 spark.mastr",
    ]


def test_what_is_missing_everywhere() -> None:
    with pytest.raises(Mistakes) as told:
        parsed("source: {format: csv}\nsink: {format: table, partitionBy: 7}\ntransforms: [7, {}]\ntrigger: {}\n")
    assert sorted(map(str, told.value.errors)) == [
        "paid.yaml:1: source.path: missing: the directory of the csv files",
        "paid.yaml:1: source.schema: missing: a stream of csv needs it, as `id bigint, name string`",
        "paid.yaml:1: the key name is missing",
        "paid.yaml:2: sink.partitionBy: expected a list, not a number",
        "paid.yaml:3: transforms[0]: expected `sql: ...` or `python: module:function`",
        "paid.yaml:3: transforms[1]: expected one of sql and python",
        "paid.yaml:4: trigger: expected once, continuous or a time such as 10s",
    ]


def test_tables_are_named_as_spark_will_know_them() -> None:
    table = WHOLE.replace("format: parquet\n  path: lake/paid", "format: table\n  table: Paid")
    with pytest.raises(PipelineError, match=r"^paid\.yaml:16: sink\.table: .*this would be the table paid; write it"):
        parsed(table)
    parsed(table.replace("table: Paid", "table: paid"))
    parsed(table.replace("table: Paid", "table: lake.sales.Paid"))
    for setting in ("spark.sql.caseSensitive: true", "spark.sql.catalog.lake: x"):
        parsed(table.replace("conf: {", f"conf: {{{setting}, "))


@pytest.mark.parametrize("option", ["endingTimestamp: 5", "startingOffsets: first", "assign: orders"])
def test_what_a_stream_can_t_take_is_told_by_validate(option: str) -> None:
    old = "subscribe: orders" if "assign" in option else "failOnDataLoss: false"
    with pytest.raises(PipelineError, match=rf"paid\.yaml:\d: source\.options\.{option.split(':')[0]}: option "):
        parsed(WHOLE.replace(old, option))


def test_a_mistake_is_told_at_its_own_option() -> None:
    text = WHOLE.replace("maxOffsetsPerTrigger: 1000", "group: no body")
    text = text.replace("failOnDataLoss: false", "startingOffsets: first")
    with pytest.raises(Mistakes) as told:
        parsed(text)
    assert [str(mistake).split(": option ")[0] for mistake in told.value.errors] == [
        "paid.yaml:7: source.options.group",
        "paid.yaml:8: source.options.startingOffsets",
    ]


def test_all_wrong_options_are_told_at_once() -> None:
    text = WHOLE
    for old, new in (
        ("name: paid", "name: ../paid"),
        ("subscribe: orders", "subscribe: orders\n    pullBatchSise: 1\n    timeout: soon"),
        ("maxOffsetsPerTrigger: 1000", "maxOffsetsPerTrigger: many\n    badRecords: dlq\n    dlqTopic: orders"),
        ("format: parquet\n  path: lake/paid\n  partitionBy: [tags]", "format: rocketmq\n  options: {topik: paid}"),
    ):
        assert old in text
        text = text.replace(old, new, 1)
    with pytest.raises(Mistakes) as told:
        parsed(text)
    assert [str(mistake).partition("; ")[0][:66] for mistake in told.value.errors] == [
        "paid.yaml:1: name: expected letters, digits, dots and dashes",
        "paid.yaml:7: source.options.pullBatchSise: unknown option 'pullBat",
        "paid.yaml:8: source.options.timeout: option timeout='soon': expect",
        "paid.yaml:9: source.options.maxOffsetsPerTrigger: option maxOffset",
        "paid.yaml:11: source.options.dlqTopic: option dlqTopic='orders' is",
        "paid.yaml:18: sink: option nameServer is missing: the address of a",
        "paid.yaml:20: sink.options.topik: unknown option 'topik'",
    ]
