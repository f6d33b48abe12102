"""Dead letters: what can't be given as a row is sent on as it was, and nothing that it holds stands in the way."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows
from servers import Server

from patience import DEADLINE_S
from skylark.client.sync import Producer
from skylark.spark import ddl
from skylark.spark.bodies import Format, Shape
from skylark.spark.cluster import Cluster
from skylark.spark.columns import NAMES
from skylark.spark.letters import Letter, Letters, Undeliverable, letters_of
from skylark.spark.options import BadOption, read_options
from skylark.spark.queues import Queue
from skylark.spark.records import Records
from skylark.spark.source import BatchReader, StreamReader
from skylark.testing import LocalCluster
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from skylark.wire.message import (
    PROPERTIES_MAX_BYTES,
    PROPERTY_UNIQUE_KEY,
    SYS_COMPRESSED,
    SYS_INNER_BATCH,
    SYS_NEED_UNWRAP,
    Message,
)
from skylark.wire.records import decode_properties, encode_batch, encode_properties, encode_record
from spark.conftest import wait_for

JSON = Shape([*NAMES, "value"], Format("json", b"id int"), ddl.parse("id int"))
ALL = Shape(NAMES)
TOO_LATE_MS = 2**62


def read(name_server: str, topic: str, shape: Shape = ALL, **options: Any) -> list[dict[str, Any]]:
    given = {"nameServer": name_server, "subscribe": topic, **options}
    reader = BatchReader(read_options(given), shape)
    return [row for task in reader.partitions() for batch in reader.read(task) for row in batch.to_pylist()]


def dlq(topic: str) -> dict[str, str]:
    return {"badRecords": "dlq", "dlqTopic": topic}


def put(
    name_server: str,
    topic: str,
    body: bytes,
    properties: dict[str, str] | None = None,
    *,
    sys_flag: int = 0,
    born_ms: int = 1_767_225_600_000,
) -> None:
    """A message that no client checked, in the topic's first queue."""
    fields = {
        **{"a": "tests", "b": topic, "c": "TBW102", "d": "1", "e": "0", "f": str(sys_flag), "g": str(born_ms)},
        **{"h": "0", "j": "0", "k": "false"},
    }
    properties = properties or {}
    request = Frame(RequestCode.SEND_MESSAGE_V2, {**fields, "i": encode_properties(properties).decode()}, body)
    if not body:
        request = Frame(RequestCode.SEND_BATCH_MESSAGE, {**fields, "m": "true"}, encode_batch([(0, b"", properties)]))
    with Cluster(name_server, DEADLINE_S) as cluster:
        queue = cluster.queues(topic)[0]
        cluster.ask(queue.broker, topic, request)


def by_origin(rows: Sequence[dict[str, Any]]) -> list[tuple[bytes, dict[str, str]]]:
    """The letters in the order of the messages that they were."""
    letters = [(row["body"], dict(row["properties"])) for row in rows]
    return sorted(letters, key=lambda letter: int(letter[1]["badRecordOffset"]))


def test_every_kind_of_bad_message_is_sent_on_as_it_was(server: Server, topics: Any, topic: str) -> None:
    name_server, dead = server.namesrv_addr, f"{topic}_dead"
    topics.create(topic)
    topics.create(dead)
    much = {f"p{number}": "x" * 1_000 for number in range(32)}  # within 500 bytes of the most that there may be
    odd = {
        "TAGS": "a || b",
        "KEYS": " k1  k2 ",
        "blank": " ",
        "line": "a\nb",
        "MAX_OFFSET": "9",
        "badRecordTopic": "before",
    }
    put(name_server, topic, b'{"id": 1}')
    put(name_server, topic, b'{"id": 2}', odd, born_ms=TOO_LATE_MS)
    put(name_server, topic, b"never compressed", sys_flag=SYS_COMPRESSED)
    put(name_server, topic, b"")
    put(name_server, topic, b"oops", much)
    put(name_server, topic, zlib.compress(b"oops" * 1000), {PROPERTY_UNIQUE_KEY: "7F000001"}, sys_flag=SYS_COMPRESSED)
    put(name_server, topic, b'{"id": 3}')
    wait_for(name_server, topic, 7)

    assert [row["value"]["id"] for row in read(name_server, topic, JSON, **dlq(dead))] == [1, 3]
    wait_for(name_server, dead, 5)
    found = by_origin(read(name_server, dead))
    assert [body for body, _ in found] == [b'{"id": 2}', b"never compressed", b"", b"oops", b"oops" * 1000]
    late, plain, empty, full, packed = [properties for _, properties in found]
    assert "bornTimestamp is 4611686018427387904 ms" in late["badRecordReason"]
    assert [late[name] for name in ("TAGS", "KEYS", "blank", "line")] == ["a || b", " k1  k2 ", " ", "a\nb"]
    assert late.get("MAX_OFFSET") != "9"
    assert late["badRecordTopic"] == topic
    assert plain["badRecordSysFlag"] == "1"
    assert "malformed" in empty["badRecordReason"] or "truncated" in empty["badRecordReason"]
    assert int(full["badRecordPropertiesLeftOut"]) + sum(name in full for name in much) == 32
    assert len(encode_properties(full)) <= PROPERTIES_MAX_BYTES
    assert packed[PROPERTY_UNIQUE_KEY] == packed["badRecordId"] == "7F000001"


def test_a_letter_is_within_the_limits_whatever_its_message_holds() -> None:
    queue = Queue("t" * 127, "b" * 200, 2**31 - 1)
    much = "ß" * 16_000
    for properties in ({PROPERTY_UNIQUE_KEY: much}, {"TAGS": much}, {"KEYS": much}, {"x": much}, {}):
        message = Message("t", 0, b"body", properties, sys_flag=SYS_INNER_BATCH | SYS_NEED_UNWRAP)
        data = encode_record(message, queue_offset=2**63 - 1, log_offset=0, store_timestamp_ms=0, store_host=bytes(8))
        (letter,) = letters_of(Records(data), queue, {0: "a\x01b\x02" + much})
        for each in (letter, letter.bare()):
            encoded = encode_properties(each.properties)
            assert len(encoded) < PROPERTIES_MAX_BYTES - 500
            assert decode_properties(encoded) == each.properties
        assert (letter.body, letter.sys_flag, letter.properties["badRecordSysFlag"]) == (b"body", 0, "192")
        left_out = letter.properties.get("badRecordPropertiesLeftOut")
        assert left_out == ("1" if properties.keys() & {"TAGS", "KEYS", "x"} else None)


def test_a_letter_that_is_too_large_for_its_broker_goes_without_its_body(tmp_path: Path) -> None:
    body = random.Random(1).randbytes(5000)
    with LocalCluster(topics={"orders": 1}, directory=tmp_path) as cluster:
        put(cluster.name_servers, "orders", body, {"n": "1"})
        put(cluster.name_servers, "orders", b"small")
    with LocalCluster(topics={"dead": 1}, directory=tmp_path, settings={"maxMessageSize": "1000"}) as cluster:
        assert read(cluster.name_servers, "orders", JSON, **dlq("dead")) == []
        (large, small) = by_origin(read(cluster.name_servers, "dead"))
    assert (large[0], small[0]) == (b"", b"small")
    assert (large[1]["badRecordBodyLeftOut"], large[1]["badRecordOffset"]) == ("5000", "0")


def test_letters_go_round_a_broker_that_is_away() -> None:
    letters = [Letter(b"x", 0, {PROPERTY_UNIQUE_KEY: str(number)}) for number in range(4)]
    with LocalCluster(2, topics={"dead": 1}) as cluster:
        options = read_options({"nameServer": cluster.name_servers, "subscribe": "t", **dlq("dead")})
        sender = Letters(options)
        sender.send(iter(letters[:2]))
        asyncio.run(cluster.brokers[0].stop())
        sender.send(iter(letters[2:3]))
        sender.send(iter(letters[3:]))
        sender.close()
        asyncio.run(cluster.brokers[0].start())
        found = read(cluster.name_servers, "dead")
    assert sorted(row["msgId"] for row in found) == ["0", "1", "2", "3"]


def test_letters_that_can_not_be_sent_are_an_error_that_names_the_option() -> None:
    sender = Letters(read_options({"nameServer": "127.0.0.1:1", "subscribe": "t", "timeout": "1s", **dlq("dead")}))
    with pytest.raises(Undeliverable, match=r"option dlqTopic='dead': .* badRecords=drop goes on without"):
        sender.send(iter([Letter(b"x", 0, {PROPERTY_UNIQUE_KEY: "1"})]))


def test_one_broker_without_a_spark() -> None:
    """What the source does that needs no server of its own."""
    with LocalCluster(topics={"orders": 1, "dead": 1}) as cluster:
        name_server = cluster.name_servers
        put(name_server, "orders", b"never compressed", sys_flag=SYS_COMPRESSED)
        with Producer(name_server) as producer:
            for number in range(20):
                producer.send("orders", b"x", properties={"n": str(number)})
        given = {"nameServer": name_server, "subscribe": "orders", "startingOffsets": "earliest", **dlq("dead")}
        stream = StreamReader(read_options({**given, "maxBytesPerTrigger": "4"}), ALL)
        stream.latestOffset(stream.initialOffset(), ReadMaxRows(1))  # looks at a few bodies
        assert read(name_server, "dead") == []
        assert len(read(name_server, "orders", **dlq("dead"))) == 20
        assert len(read(name_server, "dead")) == 1
        with pytest.raises(BadOption, match=r"sqlFilter='n > 3': broker .* refuses it: .*enablePropertyFilter=true"):
            read(name_server, "orders", sqlFilter="n > 3")
