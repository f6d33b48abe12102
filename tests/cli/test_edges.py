"""Every command where little is as it should be: streams that are closed or full, bodies that are no text, addresses
that make no sense, servers that are not what they should be or say nothing.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.commands import SKYLARK, environment, run_here, started
from skylark.cli.main import app
from skylark.cli.messages import _until_stopped
from skylark.cli.serving import Failure
from skylark.client.lite_pull_consumer import LitePullConsumer
from skylark.client.message import Message
from skylark.client.sync import Producer
from skylark.testing import LocalCluster

TOPIC = "edges"
BINARY = b"\xff\xfe\x00 no text"
TIMEOUT_S = 240.0
PIPELINE = """\
name: p
source: {format: rocketmq, options: {nameServer: "%s", subscribe: nowhere}}
sink: {format: parquet, path: out}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(topics={TOPIC: 1}) as cluster:
        with Producer(cluster.name_servers) as producer:
            producer.send(TOPIC, BINARY, key="42")
        yield cluster


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command within this process, which costs less than one of its own."""
    monkeypatch.setenv("JAVA_HOME", "/nowhere")  # Spark would complain

    def run(*arguments: str) -> tuple[int, str, str]:
        return run_here(monkeypatch, capsys, *arguments)

    return run


ASKING = [
    ["send", TOPIC, "hello"],
    ["consume", TOPIC, "--group", "g"],
    ["tail", TOPIC],
    ["query", TOPIC, "--key", "42"],
    ["trace", "0" * 32],
    ["sql", "select 1"],
    ["pipeline", "etl", "select body from input", "--from", TOPIC, "--to", TOPIC, "--checkpoint", "c"],
    ["pipeline", "archive", TOPIC, "--to", "lake"],
    ["pipeline", "replay", ".", TOPIC],
    ["pipeline", "compact", TOPIC, "--to", "snapshot"],
    ["pipeline", "report", TOPIC],
    ["pipeline", "dlq", "inspect", "g"],
    ["pipeline", "dlq", "redrive", "g"],
]
asking = pytest.mark.parametrize("arguments", ASKING, ids=lambda arguments: " ".join(arguments[:3]))


@asking
def test_addresses_that_make_no_sense(run: Run, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ("xx", "a..b:1", "a:99999", "", " ", "a:", ":1", "a:1;b:", "a b:1"):
        code, out, err = run(*arguments, "-n", given)
        assert (code, out) == (2, "")
        assert re.fullmatch(r"skylark: Invalid value for '-n' / '--namesrv': .*\n", err), (given, err)
    monkeypatch.setenv("NAMESRV_ADDR", "xx")
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("skylark: Invalid value for NAMESRV_ADDR: 'xx' is not an address of the form host:port (see")


def test_every_command_looks_for_a_name_server_on_this_machine() -> None:
    commands = {" ".join(path): command for path, command in _commands((), typer.main.get_command(app))}
    defaults = {
        name: parameter.default
        for name, command in commands.items()
        for parameter in command.params
        if parameter.envvar == "NAMESRV_ADDR"
    }
    assert {"send", "sql", "pipeline etl", "pipeline report"} <= defaults.keys()
    assert set(defaults.values()) == {"127.0.0.1:9876"}


def _commands(path: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    below = getattr(command, "commands", None)
    if below is None:
        yield path, command
    for name, each in (below or {}).items():
        yield from _commands((*path, name), each)


@pytest.mark.parametrize("command", ["run", "validate", "submit --master yarn --print"])
def test_an_address_in_a_pipeline_that_makes_no_sense(
    run: Run, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.yaml").write_text(PIPELINE % "a..b:1")
    name, *options = command.split()
    code, out, err = run("pipeline", name, "p.yaml", *options)
    assert (code, out) == (1, "")
    assert re.fullmatch(r"skylark: p.yaml:2: source.options.nameServer: .*'a..b' is neither a name nor .*\n", err), err


@asking
def test_a_broker_in_place_of_a_name_server(
    cluster: LocalCluster, run: Run, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*arguments, "-n", cluster.broker.address)
    assert (code, out) == (1, "")
    said = f"{cluster.broker.address} is a broker, not a name server; give the name server's address"
    assert said in err
    assert len(err.splitlines()) == 1, err


def test_topics_are_looked_for_before_spark_starts(
    cluster: LocalCluster, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.yaml").write_text(PIPELINE % cluster.name_servers)
    code, out, err = run("pipeline", "run", "p.yaml")
    assert (code, out) == (1, "")
    assert re.fullmatch(r"skylark: p.yaml:2: source.options: topic 'nowhere' does not exist.*\n", err), err


def test_a_server_that_says_nothing(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        code, out, err = run("tail", TOPIC, "-n", f"127.0.0.1:{mute.getsockname()[1]}")
    assert (code, out) == (1, "")
    assert re.fullmatch(r"skylark: no name server answers: no answer from 127.0.0.1:\d+ within [\d.]+ s\n", err), err


def test_bodies_that_are_no_text(cluster: LocalCluster, run: Run) -> None:
    namesrv = ["-n", cluster.name_servers]
    for way in (
        ["query", TOPIC, "--key", "42"],
        ["tail", TOPIC, "--max", "1"],
        ["consume", TOPIC, "--group", "g", "--from", "first", "--max", "1"],
    ):
        code, out, err = run(*way, "--json", *namesrv)
        assert (code, err) == (0, "")
        message = json.loads(out)
        assert message["body"] is None
        assert base64.b64decode(message["body_base64"]) == BINARY
    code, out, err = run("query", TOPIC, "--key", "42", *namesrv)
    assert (code, err) == (0, "")
    assert "no text" in out


@pytest.mark.parametrize(
    ("command", "code", "out", "err"),
    [
        ("tail edges --max 1 >&-", 1, b"", b"skylark: stdout is closed; > /dev/null is the way to have no output\n"),
        ("tail edges --max 1 > /dev/full", 1, b"", b"skylark: cannot write to stdout: No space left on device\n"),
        ("query edges --key 42 > /dev/full", 1, b"", b"skylark: cannot write to stdout: No space left on device\n"),
        ("pipeline dlq inspect g > /dev/full", 1, b"", b"skylark: cannot write to stdout: No space left on device\n"),
        ("--help > /dev/full", 1, b"", b"skylark: cannot write to stdout: No space left on device\n"),
        ("--help | head -c 0", 0, b"", b""),
        ("send edges hello 2> /dev/full", 0, None, b""),
        ("send edges -f /dev/null 2> /dev/full", 0, b"", b""),
        ("tail nowhere 2> /dev/full", 1, b"", b""),
        ("tail edges --max 1 <&- 2>&-", 0, BINARY + b"\n", b""),
        ("send edges <&-", 1, b"", b"skylark: nothing to send: give BODY, --file, or pipe lines into stdin\n"),
        ("query edges --key 42 --json | head -c 0", 0, b"", b""),
        ("tail edges | head -c 0", 0, b"", b""),  # there is one message and no other will come
        ("consume edges --group leaves --from first | head -c 0", 0, b"", b""),
    ],
)
def test_streams_that_are_closed_or_full(
    cluster: LocalCluster, command: str, code: int, out: bytes | None, err: bytes, tmp_path: Path
) -> None:
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{SKYLARK} {command}"],
        cwd=tmp_path,
        env=environment(NAMESRV_ADDR=cluster.name_servers),
        capture_output=True,
        timeout=TIMEOUT_S,
    )
    assert (done.returncode, done.stdout if out is not None else None, done.stderr) == (code, out, err)


@pytest.mark.parametrize(
    "arguments",
    [["send", TOPIC, "hello"], ["query", TOPIC, "--key", "42"], ["pipeline", "dlq", "redrive", "g"]],
    ids=" ".join,
)
def test_ctrl_c_ends_the_wait_for_a_server(arguments: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with started(*arguments, "-n", address) as process:
            connection, _ = mute.accept()  # now it waits for an answer
            with connection:
                assert connection.recv(1)
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out, err) == (130, "", "skylark: stopped\n")


def test_no_messages_because_a_server_is_away_is_a_failure() -> None:
    class Away(LitePullConsumer):
        async def poll(self, timeout_s: float = 5.0, max_count: int = 32) -> list[Message]:
            return []

        def failures(self) -> list[str]:
            return ["group g can't read topic orders at broker-a"]

    async def messages() -> list[Message]:
        return [message async for message in _until_stopped(Away("127.0.0.1:1", group="g"), 2.5)]

    with pytest.raises(Failure, match=r"nothing came for 2\.5 s, but group g can't read topic orders at broker-a"):
        asyncio.run(messages())
