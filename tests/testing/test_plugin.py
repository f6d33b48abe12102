"""The pytest fixture, from a project that is not this one and only has Skylark installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROJECT = """
import socket


def connect(cluster):
    host, port = cluster.name_servers.split(":")
    socket.create_connection((host, int(port)), timeout=10).close()


def test_has_a_cluster(skylark_cluster):
    connect(skylark_cluster)
    skylark_cluster.run(lambda: skylark_cluster.create_topic("orders", 4))


def test_has_another_one(skylark_cluster):
    connect(skylark_cluster)
"""


def run_pytest(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    temporary = project / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "PYTHON"))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments],
        cwd=project,
        env=environment | {"TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_project_outside_gets_the_fixture(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(PROJECT)
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    assert [path.name for path in (tmp_path / "tmp").glob("skylark-*")] == []


def test_the_fixture_says_what_it_is(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "--fixtures")
    assert "A fresh name server and broker for this test" in done.stdout


def test_a_run_that_needs_no_cluster_loads_no_server(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(
        "import sys\n\ndef test_light():\n"
        "    assert not [m for m in sys.modules if m.startswith(('skylark.broker', 'skylark.store'))]\n"
    )
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
