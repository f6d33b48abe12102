"""Fixtures of the interop tests: one server for all of them, one driver process for each client version.

pytest tests/interop                    # against Skylark
pytest tests/interop --server apache    # the same tests against Apache RocketMQ 5.5.0, which must pass them too
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from drivers import Driver, Session, java_driver
from mqadmin import Admin
from servers import SERVERS, SOON_ASKED, Server, fetch_apache


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--server", choices=sorted(SERVERS), default="skylark", help="which server the tests run against")


@pytest.fixture(scope="session")
def java_parts() -> None:
    """Apache's jars and the compiled drivers; quick when they are there."""
    fetch_apache()


@pytest.fixture(scope="session")
def server_kind(request: pytest.FixtureRequest) -> str:
    # The option is unknown when pytest collects from the top and reads this file late.
    kind: str = request.config.getoption("--server", default="skylark")
    return kind


@pytest.fixture(scope="session")
def server(server_kind: str, java_parts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = SERVERS[server_kind](tmp_path_factory.mktemp(server_kind), enablePropertyFilter="true", **SOON_ASKED)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def start(tmp_path: Path, java_parts: None) -> Iterator[Callable[..., Server]]:
    """Starts a server of a kind with settings, in the place of another if that is given; ends them all."""
    servers: list[Server] = []

    def start(kind: str, replaces: Server | None = None, **settings: str) -> Server:
        server = SERVERS[kind](tmp_path / f"{len(servers)}-{kind}", replaces, **settings)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.kill()


@pytest.fixture(scope="session", params=["5.5.0", "4.9.8"])
def java(
    request: pytest.FixtureRequest, java_parts: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Driver]:
    """A process with Apache's Java client, of each version in turn."""
    driver = java_driver(request.param, tmp_path_factory.mktemp(f"java-{request.param}"))
    yield driver
    driver.close()


@pytest.fixture(scope="module", params=["5.5.0", "4.9.8"])
def java_notified(
    request: pytest.FixtureRequest, java_parts: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Driver]:
    """Like `java`, but the clients look for changes of their group only when the broker tells them to."""
    directory = tmp_path_factory.mktemp(f"java-notified-{request.param}")
    driver = java_driver(request.param, directory, rebalance_interval_ms=600_000)
    yield driver
    driver.close()


@pytest.fixture(scope="session")
def java_latest(java_parts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """Apache's Java client 5.5.0, for tests that are about the server and need no second version."""
    driver = java_driver("5.5.0", tmp_path_factory.mktemp("java-latest"))
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def admin(java_parts: None, server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    """Apache's mqadmin."""
    driver = java_driver("5.5.0", tmp_path_factory.mktemp("mqadmin"), "skylark.AdminDriver")
    yield Admin(driver, server)
    driver.close()


@pytest.fixture
def session(java: Driver, server: Server) -> Iterator[Session]:
    session = Session(java, server.namesrv_addr)
    yield session
    session.close()


@pytest.fixture
def topic() -> str:
    return f"topic_{uuid.uuid4().hex[:12]}"


@pytest.fixture
def group() -> str:
    return f"group_{uuid.uuid4().hex[:12]}"
