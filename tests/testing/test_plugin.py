"""The pytest fixture, from a project that is not this one and only has Skylark installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import skylark

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


SCOPES = """
import asyncio

import pytest

from skylark import Producer
from skylark.testing import LocalCluster


def of_scope(scope, loop):
    def fixture():
        with asyncio.Runner() as runner:
            cluster = LocalCluster()
            runner.run(cluster.__aenter__())
            yield cluster, runner.run if loop == "same" else asyncio.run
            runner.run(cluster.__aexit__())

    return pytest.fixture(fixture, scope=scope)


SCOPES = [(scope, loop) for scope in ("session", "module", "class", "function") for loop in ("same", "own")]
for scope, loop in SCOPES:
    globals()[f"{scope}_{loop}"] = of_scope(scope, loop)


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("name", [f"{scope}_{loop}" for scope, loop in SCOPES])
def test_of_any_scope(name, number, request):
    cluster, run = request.getfixturevalue(name)

    async def main():
        async with Producer(cluster.name_servers, group="g") as producer:
            await producer.send("orders", b"x")
            await cluster.broker.stop()
            await cluster.broker.start()
            await producer.send("orders", b"x")

    run(main())
"""


def run_pytest(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    temporary = project / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "PYTHON"))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments],
        cwd=project,
        env=environment | {"TMPDIR": str(temporary), "PYTHONPATH": str(Path(skylark.__file__).parents[1])},
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


def test_a_cluster_of_any_scope_serves_tests_with_loops_of_their_own_in_several_processes(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(PROJECT)
    (tmp_path / "test_scopes.py").write_text(SCOPES)
    done = run_pytest(tmp_path, "-n", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "18 passed" in done.stdout
    assert [path.name for path in (tmp_path / "tmp").glob("skylark-*")] == []
