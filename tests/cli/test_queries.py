"""`skylark query` and `skylark trace` as their users meet them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator

import pytest
from rich.console import Console

from cli.commands import run_here
from skylark.cli.queries import message_table
from skylark.client.message import Message, Receipt
from skylark.client.sync import Producer
from skylark.testing import LocalCluster

TOPIC = "orders"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(topics={TOPIC: 2}, settings={"enablePropertyFilter": "true"}) as cluster:
        yield cluster


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def skylark(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command within this process, which costs less than one of its own."""

    def run(*arguments: str) -> tuple[int, str, str]:
        return run_here(monkeypatch, capsys, *arguments, "-n", cluster.name_servers)

    return run


@pytest.fixture(scope="module")
def sent(cluster: LocalCluster) -> Receipt:
    with Producer(cluster.name_servers, group="shop", trace=True) as producer:
        producer.send(TOPIC, b"\x00 binary\n" + b"x" * 100)
        return producer.send(TOPIC, b"hello", tag="new", key=["42", "43"])


def test_every_way_leads_to_the_message(skylark: Run, sent: Receipt) -> None:
    place = ["--queue", str(sent.queue.queue_id), "--offset", str(sent.queue_offset)]
    for way in (
        [TOPIC, "--key", "42"],
        [TOPIC, "--unique-key", sent.msg_id],
        ["--id", sent.offset_msg_id],
        [TOPIC, *place],
        [TOPIC, *place, "--broker", sent.queue.broker_name],
    ):
        code, out, err = skylark("query", *way, "--json")
        assert (code, err) == (0, ""), way
        message = json.loads(out)
        assert (message["msg_id"], message["body"], message["keys"]) == (sent.msg_id, "hello", ["42", "43"])


def test_a_table(skylark: Run, sent: Receipt) -> None:
    code, out, err = skylark("query", TOPIC, "--time", "10m")
    assert (code, err) == (0, "")
    heading, *rows = out.splitlines()
    assert heading.split() == ["Message", "id", "Broker", "Queue", "Offset", "Stored", "Tag", "Keys", "Body"]
    assert len(rows) == 2
    assert [sent.msg_id, "broker-a", str(sent.queue.queue_id)] in [row.split()[:3] for row in rows]
    assert any(row.split()[-4:] == ["new", "42", "43", "hello"] for row in rows)
    code, out, _ = skylark("query", TOPIC, "--time", "2020-01-01T00:00", "--until", "10m ago")
    assert (code, out) == (1, "")


def test_an_id_is_whole_on_a_narrow_terminal() -> None:
    message = Message(topic=TOPIC, body=b"hello " * 20, properties={"UNIQ_KEY": "7F" * 16}, broker="broker-a")
    shown = io.StringIO()
    Console(file=shown, width=80).print(message_table([message]))
    assert "7F" * 16 in shown.getvalue()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([TOPIC], "give one of --key, --unique-key, --id, --offset, --time"),
        ([TOPIC, "--key", "1", "--id", "2"], "not --key and --id"),
        (["--key", "1"], "--key needs the topic"),
        ([TOPIC, "--key", "nobody"], "topic orders has no such message"),
        ([TOPIC, "--unique-key", "0" * 32], "no message of topic 'orders' has the unique key"),
        (["--id", "garbage"], "'garbage' is no message id"),
        (["--id", "7F000001000000010000000000000000"], "belongs to a broker at 127.0.0.1:1"),
        (
            ["--id", "7F00000100070000000000000000ABCD"],
            "for the id that send prints: skylark query TOPIC --unique-key ID",
        ),
        ([TOPIC, "--offset", "1"], "--offset needs --queue: topic orders has 2 queues"),
        ([TOPIC, "--queue", "7", "--offset", "1"], "it has 0 at broker-a, 1 at broker-a"),
        ([TOPIC, "--queue", "0", "--offset", "1000"], "has no offset 1000: it has"),
        ([TOPIC, "--time", "yesterday"], "--time 'yesterday' is no time"),
        ([TOPIC, "--time", "2999-01-01"], "in the future"),
        ([TOPIC, "--time", "9" * 5000 + "d"], "is no time"),
        ([TOPIC, "--key", "1", "--until", "9" * 30], "is no time"),
        ([TOPIC, "--key", "1", "--queue", "0"], "--queue and --broker go with --offset, not with --key"),
        ([TOPIC, "--unique-key", "1", "--until", "10m"], "--until goes with --time and --key, not with --unique-key"),
        (["nowhere", "--key", "1"], "nowhere"),
    ],
)
def test_a_question_without_an_answer_is_one_line(
    skylark: Run, sent: Receipt, arguments: list[str], complaint: str
) -> None:
    code, out, err = skylark("query", *arguments)
    assert (code, out) == (1, "")
    assert complaint in err
    assert err.count("\n") == 1


def test_a_trace(skylark: Run, sent: Receipt) -> None:
    code, out, err = skylark("trace", sent.msg_id)
    assert (code, err) == (0, "")
    heading, row = out.splitlines()
    assert heading.split() == ["What", "Group", "Client", "Time", "Cost", "Result"]
    assert row.split()[:3] == ["sent", "shop", "127.0.0.1"]
    assert row.split()[-1] == "success"
    code, out, err = skylark("trace", sent.msg_id, "--json")
    record = json.loads(out)
    assert (record["kind"], record["msg_id"], record["keys"]) == ("Pub", sent.msg_id, "42 43")
    code, out, err = skylark("trace", "0" * 32)
    assert (code, out) == (1, "")
    assert "has no trace of message" in err
    code, out, err = skylark("trace", "0" * 32, "--trace-topic", "nowhere")
    assert (code, out) == (1, "")
    assert err.startswith("skylark: nothing was traced: topic nowhere does not exist; trace=True"), err


def test_properties_and_sql(skylark: Run) -> None:
    for price in ("5", "50"):
        code, _, err = skylark("send", TOPIC, f"costs {price}", "--property", f"price={price}", "--property", "a=b=c")
        assert (code, err) == (0, "")
    code, out, err = skylark("query", TOPIC, "--time", "10m", "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert {"b=c"} == {message["properties"]["a"] for message in found if message["body"].startswith("costs")}
    code, out, err = skylark("send", TOPIC, "x", "--property", "price")
    assert (code, err) == (1, "skylark: --property 'price' is no property: expected NAME=VALUE\n")
    dear = ["--sql", "price > 10", "--max", "1"]
    assert skylark("consume", TOPIC, "--group", "dear", "--from", "first", *dear) == (0, "costs 50\n", "")
    assert skylark("tail", TOPIC, *dear) == (0, "costs 50\n", "")
    code, out, err = skylark("consume", TOPIC, "--group", "wrong", "--sql", "price >", "--idle", "1")
    assert (code, out) == (1, "")
    assert "can't be understood" in err
