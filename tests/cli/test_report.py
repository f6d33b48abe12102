"""`skylark pipeline report` on the command line: mistakes are one line before Spark starts, and a whole run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from servers import Server

from skylark.cli.main import app
from skylark.cli.serving import Failure
from skylark.client.sync import Producer

TIMEOUT_S = 600.0
TOPIC = "reported_cli"


@pytest.fixture(scope="module")
def namesrv(started: Callable[[str], Server]) -> str:
    address = started("skylark").namesrv_addr
    with Producer(address) as producer:
        for number in range(3):
            producer.send(TOPIC, b"body", key=f"k{number % 2}")
    return address


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere"], "topic 'nowhere' does not exist"),
        ([TOPIC, "--group", "nobody"], f"there is no group 'nobody' that consumed {TOPIC}: no group consumes them"),
        ([TOPIC, "--group", "no body"], "illegal characters"),
        ([TOPIC, "--since", "soon"], "--since 'soon' is no time"),
        ([TOPIC, "--since", "99999d"], "--since '99999d' lies before 1970"),
        ([TOPIC, "--lake", "nowhere"], "nowhere is no directory"),
        ([TOPIC, "--since", "1h", "--until", "2h"], "(--until) must lie behind the time to begin at (--since)"),
        ([TOPIC, "--html", "no/where.html"], "--html no/where.html: expected a file in a directory that exists"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_said_before_spark_starts(
    namesrv: str, arguments: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAVA_HOME", "/nowhere")  # Spark would complain
    with pytest.raises(Failure, match=re.escape(error)):
        app(["pipeline", "report", *arguments, "-n", namesrv], standalone_mode=False)
    assert not list(tmp_path.iterdir()), "nothing was written"


def test_only_the_report_goes_to_stdout(namesrv: str, tmp_path: Path) -> None:
    arguments = [TOPIC, "-n", namesrv, "--since", "1h", "--json", "--html", "report.html", "--parquet", "figures"]
    done = subprocess.run(
        [sys.executable, "-m", "skylark", "pipeline", "report", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["topics"], found["throughput"][0]["messages"], found["groups"]) == ([TOPIC], 3, [])
    assert [(row["key"], row["messages"]) for row in found["keys"]] == [("k0", 2), ("k1", 1)]
    assert found["notes"]["lag"] == "no group has consumed these topics"
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert {path.name for path in (tmp_path / "figures").iterdir()} >= {"throughput", "buckets", "keys", "latency"}
    assert done.stderr.splitlines()[-1] == "report.html is written"
