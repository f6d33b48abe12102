"""`skylark send`, `consume` and `tail` as their users meet them: processes with pipes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.commands import started
from skylark.client.sync import PullConsumer
from skylark.testing import LocalCluster

SKYLARK = Path(sys.executable).parent / "skylark"
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster() as cluster:
        yield cluster


@pytest.fixture
def topic(cluster: LocalCluster, request: pytest.FixtureRequest) -> str:
    name = re.sub(r"\W", "_", request.node.name)
    cluster.run(lambda: cluster.create_topic(name, 2))
    return name


def skylark(cluster: LocalCluster | None, *arguments: str | Path, given: str | None = None) -> tuple[int, str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "NAMESRV_ADDR"}
    if cluster is not None:
        kept["NAMESRV_ADDR"] = cluster.name_servers
    done = subprocess.run(
        [SKYLARK, *arguments],
        env=kept | {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"},
        input=given,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    return done.returncode, done.stdout, done.stderr


def test_one_message(cluster: LocalCluster, topic: str) -> None:
    code, out, err = skylark(None, "send", topic, "hello", "--tag", "new", "--key", "42", "-n", cluster.name_servers)
    assert (code, err) == (0, "")
    assert re.fullmatch(r"[0-9A-F]{32} queue [01] of broker-a at offset 0\n", out)
    code, out, err = skylark(cluster, "tail", topic, "--max", "1", "--json")
    assert (code, err) == (0, "")
    message = json.loads(out)
    assert (message["body"], message["tag"], message["keys"]) == ("hello", "new", ["42"])


def test_a_body_of_any_bytes(cluster: LocalCluster, topic: str) -> None:
    assert skylark(cluster, "send", topic, os.fsdecode(b"\xff\xfe"))[0] == 0
    out = skylark(cluster, "tail", topic, "--max", "1", "--json")[1]
    assert json.loads(out)["body_base64"] == "//4="


def test_lines_of_stdin_and_of_a_file(cluster: LocalCluster, topic: str, tmp_path: Path) -> None:
    (tmp_path / "orders.txt").write_bytes(b"x\r\n\ny")
    (tmp_path / "one.txt").write_bytes(b"\n\r\nz\n")
    code, out, err = skylark(cluster, "send", topic, given="".join(f"{number}\n" for number in range(500)))
    assert (code, out) == (0, "")
    assert re.fullmatch(r"sent 500 messages in [\d.]+ s, [\d,]+ a second\n", err)
    code, _, err = skylark(cluster, "send", topic, "-f", tmp_path / "orders.txt")
    assert err.startswith("sent 2 messages, 1 blank line left out, in ")
    code, _, err = skylark(cluster, "send", topic, "-f", tmp_path / "one.txt")
    assert err.startswith("sent 1 message, 2 blank lines left out, in ")
    code, _, _ = skylark(cluster, "send", topic, "-f", tmp_path / "orders.txt", "--whole")
    arguments = ["consume", topic, "--group", "all", "--from", "first", "--max", "504", "--json"]
    code, out, err = skylark(cluster, *arguments)
    assert (code, err) == (0, "")
    bodies = sorted(json.loads(line)["body"] for line in out.splitlines())
    assert bodies == sorted([*map(str, range(500)), "x", "y", "z", "x\r\n\ny"])


def test_a_group_goes_on_where_it_was(cluster: LocalCluster, topic: str) -> None:
    skylark(cluster, "send", topic, given="a\nb\nc\n")
    arguments = ["consume", topic, "--group", "goes-on", "--from", "first"]
    first = skylark(cluster, *arguments, "--max", "2")[1].split()
    rest = skylark(cluster, *arguments, "--max", "1")[1].split()
    assert sorted(first + rest) == ["a", "b", "c"]
    assert skylark(cluster, *arguments, "--idle", "0.2")[:2] == (0, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_commits(cluster: LocalCluster, topic: str, number: signal.Signals) -> None:
    skylark(cluster, "send", topic, "hello")
    arguments = ["consume", topic, "--group", "stopped", "--from", "first", "-n", cluster.name_servers]
    with started(*arguments) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hello\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out, err) == (0, "", "")
    with PullConsumer(cluster.name_servers, group="stopped") as consumer:
        assert sum(consumer.committed(queue) or 0 for queue in consumer.queues(topic)) == 1


def test_tail_takes_the_last_ones_and_leaves_no_trace(cluster: LocalCluster, topic: str) -> None:
    cluster.run(lambda: cluster.create_topic(topic, 1))
    skylark(cluster, "send", topic, given="a\nb\nc\n")
    assert skylark(cluster, "tail", topic, "--last", "2", "--max", "2")[1].split() == ["b", "c"]
    assert skylark(cluster, "tail", topic, "--since", "1h", "--max", "3")[1].split() == ["a", "b", "c"]
    assert skylark(cluster, "tail", topic, "--last", "1", "--max", "1", "--tag", "*")[1].split() == ["c"]
    assert skylark(cluster, "tail", topic, "--last", "0", "--idle", "0.1")[:2] == (0, "")
    with PullConsumer(cluster.name_servers, group="TOOLS_CONSUMER") as consumer:
        assert [consumer.committed(queue) for queue in consumer.queues(topic)] == [None]


def test_whoever_has_enough_may_leave(cluster: LocalCluster, topic: str) -> None:
    skylark(cluster, "send", topic, given="line\n" * 1000)
    command = f"{SKYLARK} consume {topic} --group quick --from first --max 1000 | head -n 1"
    done = subprocess.run(
        ["bash", "-c", command],
        env=os.environ | {"NAMESRV_ADDR": cluster.name_servers},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (done.stdout, done.stderr) == ("line\n", "")


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["send", "orders", "hello", "-n", "127.0.0.1:1"], r"no connection to 127\.0\.0\.1:1.*skylark up starts one"),
        (["send", "orders", "hello", "-n", "nowhere"], "'nowhere' is not an address of the form host:port"),
        (["send", "or ders", "hello"], "or ders"),
        (["send", "orders", ""], "body"),
        (["send", "orders", "hello", "-f", "x"], "BODY or --file, not both"),
        (["send", "orders", "-f", "absent.txt"], r"cannot read absent\.txt: No such file"),
        (["consume", "absent", "--group", "g"], "do not know topic 'absent'"),
        (["consume", "absent"], r"Missing option '--group'.*see skylark consume --help"),
        (["send", "orders", "hello", "--delay", "soon"], "--delay 'soon' is not a length of time"),
        (["send", "orders", "hello", "--delay", "1s", "--delay-level", "1"], "exclude each other"),
        (["send", "orders", "hello", "--delay", "9d"], "should not be bigger than the max delay"),
        (["send", "orders", "x", "--tag", "\udcff"], r"--tag '\\udcff' is no text"),
        (["send", "orders", "x", "--key", "a", "--key", "\udcff"], r"--key '\\udcff' is no text"),
        (["send", "orders", "x", "--property", "a=\udcff"], r"--property 'a=\\udcff' is no text"),
        (["send", "orders", "x", "--deliver-at", "0001-01-01T00:00:00"], "--deliver-at 0001-01-01T00:00:00 is no time"),
        (["tail", "absent"], "do not know topic 'absent'"),
        (["tail", "orders", "--since", "soon"], "'soon' is not a length of time"),
        (["tail", "orders", "--since", "9" * 30 + "d"], "d' is not a length of time"),
        (["send", "orders", "x", "--delay", "9" * 5000 + "d"], "d' is not a length of time"),
    ],
)
def test_a_mistake_is_one_clear_line(cluster: LocalCluster, arguments: list[str], pattern: str) -> None:
    code, out, err = skylark(cluster, *arguments, given="")
    assert code != 0
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith("skylark: ")
    assert re.search(pattern, err), err


def test_a_topic_that_may_not_be_read_is_no_empty_one() -> None:
    with LocalCluster(topics={"orders": 1}, settings={"brokerPermission": "2"}) as cluster:
        for arguments in (["tail", "orders"], ["consume", "orders", "--group", "g", "--idle", "0.1"]):
            code, out, err = skylark(cluster, *arguments)
            assert (code, out) == (1, "")
            assert "it has no queue that can be read; see its permission" in err, err


def test_help_teaches() -> None:
    for command, example in [
        ("send", "seq 100000 | skylark send orders"),
        ("consume", "skylark consume orders --group billing"),
        ("tail", "skylark tail orders --since 10m"),
    ]:
        code, out, _ = skylark(None, command, "--help")
        assert code == 0
        assert example in out
