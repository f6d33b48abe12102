"""`skylark send` with many lines: how it ends when a server dies, a signal comes, or what it reads is of no use."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cli.commands import ANY_PORTS, Serving, serving, skylark, started, without_reader
from skylark.cli.sending import _Tally
from skylark.client.sync import LitePullConsumer
from skylark.testing import LocalCluster

TIMEOUT_S = 240.0
TOPIC = "lines"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster() as cluster:
        yield cluster


@contextmanager
def sending(
    namesrv: str, topic: str, given: int = subprocess.PIPE, stderr: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    """The command, with a stdin that stays open."""
    with started("send", topic, "-n", namesrv, stdin=given, stderr=stderr) as process:
        yield process


def write(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.flush()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and stderr of a process whose stdin is still open."""
    process.wait(TIMEOUT_S)
    assert process.stderr is not None
    return process.returncode, process.stderr.read()


def wait_for_messages(namesrv: str, topic: str, count: int = 1) -> None:
    with LitePullConsumer(namesrv, group=f"{topic}-looks", from_where="first") as consumer:
        consumer.subscribe(topic)
        while count > 0:
            count -= len(consumer.poll(TIMEOUT_S))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_it_while_no_line_comes(cluster: LocalCluster, number: signal.Signals, code: int) -> None:
    topic = f"stopped-{number.name}"
    cluster.run(lambda: cluster.create_topic(topic, 1))
    with sending(cluster.name_servers, topic) as process:
        write(process, "a\n")
        wait_for_messages(cluster.name_servers, topic)
        process.send_signal(number)
        assert ended(process) == (code, "skylark: stopped; 1 message is stored\n")


def test_a_signal_counts_also_when_nobody_reads_stderr(cluster: LocalCluster) -> None:
    cluster.run(lambda: cluster.create_topic("unheard", 1))
    stderr = without_reader()
    try:
        with sending(cluster.name_servers, "unheard", stderr=stderr) as process:
            write(process, "a\n")
            wait_for_messages(cluster.name_servers, "unheard")
            process.send_signal(signal.SIGINT)
            assert process.wait(TIMEOUT_S) == 130
    finally:
        os.close(stderr)


def test_the_count_goes_up_when_an_answer_comes() -> None:
    async def counts() -> list[int]:
        told: list[int] = []
        tally = _Tally(told.append)
        receipt: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        tally.watch(receipt)
        assert told == []
        receipt.set_result("stored")
        await asyncio.sleep(0)
        return told

    assert asyncio.run(counts()) == [1]


def test_blank_lines_are_told_also_when_it_ends_early() -> None:
    async def said() -> str:
        tally = _Tally(lambda _: None)
        tally.stored, tally.blank = 1, 2
        return str(tally)

    assert asyncio.run(said()) == "1 message is stored, 2 blank lines left out"


def kill(server: Serving) -> None:
    server.process.kill()
    server.process.wait(TIMEOUT_S)


def namesrv_of(server: Serving) -> str:
    return server.ready.split()[1].removeprefix("namesrv=")


def test_a_server_that_dies_is_noticed_while_no_line_comes(tmp_path: Path) -> None:
    with serving("up", *ANY_PORTS, cwd=tmp_path) as server, sending(namesrv_of(server), TOPIC) as process:
        write(process, "a\n")
        wait_for_messages(namesrv_of(server), TOPIC)
        kill(server)
        write(process, "b\n")
        code, err = ended(process)
    assert code == 1
    assert re.fullmatch(r"skylark: .*; 1 message is stored, (1 not|of 1 it is not known)\n", err), err


def test_a_server_that_dies_in_the_middle_is_one_line(tmp_path: Path) -> None:
    with serving("up", *ANY_PORTS, cwd=tmp_path) as server, subprocess.Popen(["yes"], stdout=subprocess.PIPE) as yes:
        try:
            assert yes.stdout is not None
            with sending(namesrv_of(server), TOPIC, yes.stdout.fileno()) as process:
                # So many are never on their way at once: it has heard that some are stored.
                wait_for_messages(namesrv_of(server), TOPIC, 1025)
                kill(server)
                code, err = ended(process)
        finally:
            yes.kill()
    assert code == 1
    found = re.fullmatch(r"skylark: .*; ([\d,]+) messages? (is|are) stored(, [\d,]+ not)?(, of .* not known)?\n", err)
    assert found is not None, err
    assert int(found[1].replace(",", "")) > 0


@pytest.mark.parametrize(
    ("arguments", "data", "complaint"),
    [
        ([], b"a\n\n" + bytes(16 * 1024 * 1024), "line 3 has more than 16,711,680 bytes"),
        (["--whole"], bytes(16 * 1024 * 1024), "has more than 16,711,680 bytes"),
        (["--whole"], os.urandom(4 * 1024 * 1024 + 1), "msg body length limit 4194304B"),  # says the broker
        (["--key", "k" * 40_000], b"a\n", "line 1: "),
    ],
)
def test_a_line_that_is_no_message(
    cluster: LocalCluster, tmp_path: Path, arguments: list[str], data: bytes, complaint: str
) -> None:
    (tmp_path / "data").write_bytes(data)
    done = skylark("send", TOPIC, "-f", "data", *arguments, cwd=tmp_path, NAMESRV_ADDR=cluster.name_servers)
    assert (done.returncode, done.stdout) == (1, "")
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_what_can_not_be_read(cluster: LocalCluster, tmp_path: Path) -> None:
    done = skylark("send", TOPIC, "-f", ".", cwd=tmp_path, NAMESRV_ADDR=cluster.name_servers)
    assert (done.returncode, done.stderr) == (1, "skylark: cannot read .: Is a directory; 0 messages are stored\n")
