"""Bodies that are no text: JSON has no bytes, and they are not made a text that they are not."""

from __future__ import annotations

import base64
import io
import json

import msgspec
from pyspark.sql import SparkSession

from skylark.client.message import Message
from skylark.pipelines import dead_letters
from skylark.pipelines.rows import Printer, Style

BINARY = bytes(range(256))


def test_rows(spark: SparkSession) -> None:
    frame = spark.sql(
        f"select 1 as n, cast('text' as binary) as body, x'' as more, cast(null as binary) as none "
        f"union all select 2, x'{BINARY.hex()}', cast('more' as binary), null order by n"
    )
    out = io.StringIO()
    Printer(Style.JSON, out=out).show(frame)
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {"n": 1, "body": "text", "more": "", "none": None},
        {
            "n": 2,
            "body": None,
            "more": "more",
            "none": None,
            "body_base64": base64.b64encode(BINARY).decode(),
            "more_base64": None,
            "none_base64": None,
        },
    ]


def test_dead_letters() -> None:
    text = dead_letters._letter(Message(topic="orders", body=b"text"), None, False)
    assert (text.body, text.raw_body) == ("text", b"text")
    assert "body_base64" not in json.loads(msgspec.json.encode(text))
    binary = dead_letters._letter(Message(topic="orders", body=BINARY), None, False)
    assert binary.raw_body == BINARY
    found = json.loads(msgspec.json.encode(binary))
    assert (found["body"], base64.b64decode(found["body_base64"])) == (None, BINARY)
