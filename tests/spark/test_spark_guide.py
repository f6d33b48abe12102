"""docs/spark.md: its tables hold every option with its default, and its examples run, against both servers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession
from servers import Server

from skylark.spark.options import Reading, Writing
from skylark.spark.scanning import Scanning

GUIDE = Path(__file__).parents[2] / "docs" / "spark.md"
TEXT = GUIDE.read_text() if GUIDE.exists() else ""
TABLES: dict[str, type[msgspec.Struct]] = {
    "Options for reading": Reading,
    "Options for writing": Writing,
    "Options without a broker": Scanning,
}
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def rows(options: type[msgspec.Struct]) -> Iterator[str]:
    """The lines of the table that belong to the options."""
    described = msgspec.json.schema(options)["$defs"][options.__name__]["properties"]
    for item in msgspec.structs.fields(options):
        meaning = described[item.encode_name]["description"].replace("|", "\\|")
        default = "-" if item.default in (None, "") else f"`{str(item.default).lower()}`"
        yield f"| `{item.encode_name}` | {default} | {meaning} |"


@pytest.mark.parametrize("heading", TABLES)
def test_the_table_holds_every_option(heading: str) -> None:
    section = re.split(r"^#+ ", TEXT.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    assert re.findall(r"^\| `.*$", section, re.MULTILINE) == list(rows(TABLES[heading]))


def test_the_examples_run(spark: SparkSession, server: Server, topics: Any, tmp_path: Path) -> None:
    namesrv = server.namesrv_addr
    (tmp_path / "broker-a").symlink_to(server.store.parent)
    topics.create("orders", 2)
    topics.create("orders_dlq")
    topics.send("orders", '{"id": 1, "price": 9.5}', "oops", tag="new")
    sales = spark.createDataFrame([("1", "ann")], "id string, customer string")
    names: dict[str, Any] = {"spark": spark, "sales": sales, "__name__": "example"}
    for example in EXAMPLES:
        source = example.replace("localhost:9876", namesrv).replace("/data/", f"{tmp_path}/")
        exec(compile(source, str(GUIDE), "exec"), names)
