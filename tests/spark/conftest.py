"""Real Spark against both servers: one Spark session for all tests, each server started once."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession
from servers import ROOT, SERVERS, Server

from skylark import spark as rocketmq


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2]")
        .appName("tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    rocketmq.register(session)
    yield session
    session.stop()


@pytest.fixture(scope="session", params=["skylark", "apache"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A name server and a broker in processes of their own."""
    if request.param == "apache":
        setup = [sys.executable, str(ROOT / "tools" / "interop_setup.py"), "java"]
        done = subprocess.run(setup, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.fail(done.stderr, pytrace=False)
    server = SERVERS[request.param](tmp_path_factory.mktemp(request.param), enablePropertyFilter="true")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def namesrv(server: Server) -> str:
    return server.namesrv_addr


@pytest.fixture
def topic() -> str:
    return f"topic_{uuid.uuid4().hex[:12]}"


@pytest.fixture
def group() -> str:
    return f"group_{uuid.uuid4().hex[:12]}"
