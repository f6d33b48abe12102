"""The ready-made pipelines on the command line: what makes no sense is one line, before Spark starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import SkylarkServer

from skylark.cli.main import app
from skylark.cli.serving import Failure
from skylark.client.sync import Producer

TIMEOUT_S = 240.0


@pytest.fixture(scope="module")
def namesrv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = SkylarkServer(tmp_path_factory.mktemp("skylark"))
    server.start()
    with Producer(server.namesrv_addr) as producer:
        producer.send("orders", b"1")
    yield server.namesrv_addr
    server.kill()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["archive", "nowhere", "--to", "lake"], "topic 'nowhere' does not exist"),
        (["archive", "or ders", "--to", "lake"], "illegal characters"),
        (["archive", "orders", "--to", "lake", "--every", "soon"], "every='soon'"),
        (["replay", "lake", "orders"], "lake is no directory"),
        (["replay", ".", "nowhere"], "topic 'nowhere' does not exist"),
        (["replay", ".", "orders", "--from", "soon"], "--from 'soon' is no time"),
        (["replay", ".", "orders", "--from", "2026-02-01", "--to-time", "2026-01-31T12:00"], "nothing is between them"),
        (["compact", "nowhere", "--to", "snapshot"], "topic 'nowhere' does not exist"),
        (["compact", "orders"], "say where the latest messages go: --to PATH or --to-topic TOPIC"),
        (["compact", "orders", "--to", "snapshot", "--to-topic", "orders"], "--to PATH or --to-topic TOPIC"),
        (["compact", "orders", "--to-topic", "orders", "--keep-deleted"], "--keep-deleted needs --to"),
        (["compact", "orders", "--to-topic", "nowhere"], "topic 'nowhere' does not exist"),
        (["compact", "orders", "--lake", "lake", "--to", "snapshot"], "lake is no directory"),
        (["dlq", "inspect", "bil ling"], "illegal characters"),
        (["dlq", "redrive", "billing", "--to-time", "soon"], "--to-time 'soon' is no time"),
        (["dlq", "redrive", "billing", "--to-topic", "or ders"], "illegal characters"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_said_before_spark_starts(
    namesrv: str, arguments: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NAMESRV_ADDR", namesrv)
    monkeypatch.setenv("JAVA_HOME", "/nowhere")  # Spark would complain
    with pytest.raises(Failure, match=re.escape(error)):
        app(["pipeline", *arguments], standalone_mode=False)
    assert not list(tmp_path.iterdir()), "nothing was written"


def test_a_name_server_that_is_not_there(tmp_path: Path) -> None:
    done = run(["archive", "orders", "--to", "lake"], "127.0.0.1:1", tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "no connection to 127.0.0.1:1" in done.stderr


def run(arguments: list[str], namesrv: str, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "skylark", "pipeline", *arguments]
    environment = {**os.environ, "NAMESRV_ADDR": namesrv, "JAVA_HOME": "/nowhere"}  # Spark would complain
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=directory, env=environment, timeout=TIMEOUT_S
    )
