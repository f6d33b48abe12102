"""One suite, two servers: what asks for `namesrv` here runs against Skylark and against Apache RocketMQ 5.5.0.

Each server is started once, with the first test that needs it.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType

import pytest
from drivers import Driver, Session, java_driver
from mqadmin import Admin
from servers import (
    APACHE_VERSION,
    GET_ROUTEINFO_BY_TOPIC,
    POLL_S,
    START_DEADLINE_S,
    ApacheServer,
    Process,
    Server,
    ServerError,
    apache_command,
    fetch_apache,
    free_port,
    request,
)

USERS_PATIENCE_S = 3.0
PATIENCE_S = 60.0


def patient_functions() -> Iterator[FunctionType]:
    """Everything in the client that gives up after 3 s unless it is told otherwise."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("skylark.client.")]
    for thing in {id(each): each for module in modules for each in vars(module).values()}.values():
        for function in vars(thing).values() if isinstance(thing, type) else [thing]:
            if isinstance(function, FunctionType) and function.__module__.startswith("skylark.client."):
                yield function


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients wait for a minute where users' wait for 3 s: a server on a busy machine is not one that fails."""

    def longer(default: object) -> object:
        return PATIENCE_S if default == USERS_PATIENCE_S else default

    for function in patient_functions():
        if function.__kwdefaults__:
            named = {name: longer(default) for name, default in function.__kwdefaults__.items()}
            monkeypatch.setattr(function, "__kwdefaults__", named)
        if function.__defaults__:
            monkeypatch.setattr(function, "__defaults__", tuple(map(longer, function.__defaults__)))


@pytest.fixture(scope="session", params=["skylark", "apache"])
def server(request: pytest.FixtureRequest, started: Callable[[str], Server]) -> Server:
    return started(request.param)


@pytest.fixture
def namesrv(server: Server) -> str:
    return server.namesrv_addr


@pytest.fixture(scope="session")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """A process with Apache's Java client 5.5.0."""
    fetch_apache()
    driver = java_driver(APACHE_VERSION, tmp_path_factory.mktemp("java"))
    yield driver
    driver.close()


@pytest.fixture
def java_session(java: Driver, namesrv: str) -> Iterator[Session]:
    """Java clients at the same server; they are gone after the test."""
    session = Session(java, namesrv)
    yield session
    session.close()


@pytest.fixture(scope="session")
def mqadmin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """A process with Apache's mqadmin 5.5.0."""
    fetch_apache()
    driver = java_driver(APACHE_VERSION, tmp_path_factory.mktemp("mqadmin"), "skylark.AdminDriver")
    yield driver
    driver.close()


@pytest.fixture
def admin(mqadmin: Driver, server: Server) -> Admin:
    return Admin(mqadmin, server)


@pytest.fixture
def second_broker(server: Server, tmp_path: Path) -> Iterator[SecondBroker]:
    """Another broker at the same name server; it is gone after the test."""
    broker = SecondBroker(server, tmp_path)
    broker.start()
    yield broker
    broker.kill()
    broker.wait_registered(present=False)


@pytest.fixture
def topic() -> str:
    return f"topic_{uuid.uuid4().hex[:12]}"


@pytest.fixture
def group() -> str:
    return f"group_{uuid.uuid4().hex[:12]}"


class SecondBroker:
    """A broker of the same kind as the server's. `start` after `kill` opens the same store again.

    It has a name of its own: Apache's name server takes a broker in at once only when it never met one of that name.
    """

    def __init__(self, server: Server, directory: Path) -> None:
        self.name = f"second-{uuid.uuid4().hex[:8]}"
        self._server = server
        self._directory = directory
        self._port = free_port()
        self._process: Process | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        settings = {
            "brokerClusterName": self._server.cluster,
            "brokerName": self.name,
            "brokerIP1": "127.0.0.1",
            "listenPort": str(self._port),
            "haListenPort": str(free_port()),
            "namesrvAddr": self._server.namesrv_addr,
            "storePathRootDir": str(self._directory / "store"),
            "storePathCommitLog": str(self._directory / "store" / "commitlog"),
            "diskMaxUsedSpaceRatio": "95",
        }
        is_apache = isinstance(self._server, ApacheServer)
        if is_apache:
            settings |= ApacheServer.housekeeping
        conf = self._directory / "second-broker.conf"
        conf.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        self._process = Process(
            apache_command("broker.BrokerStartup", conf, self._directory, ApacheServer.java_options)
            if is_apache
            else self._skylark_command(conf),
            log=self._directory / "second-broker.log",
            ready="boot success" if is_apache else r"ready broker=",
            cwd=self._directory,
        )
        self._process.wait_ready()
        self.wait_registered(present=True)

    def stop(self) -> None:
        """Cleanly, so that it tells the name server."""
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def wait_registered(self, *, present: bool) -> None:
        """Until the name server's routes have the broker, or have it no more."""
        deadline = time.monotonic() + START_DEADLINE_S
        while (self.name.encode() in self._route()) is not present:
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} at {self.address}: registered is not {present}")
            time.sleep(POLL_S)

    def _route(self) -> bytes:
        return request(self._server.namesrv_addr, GET_ROUTEINFO_BY_TOPIC, {"topic": "TBW102"})[1]

    def _skylark_command(self, conf: Path) -> list[str]:
        command = Path(sys.executable).with_name("skylark")
        return [str(command), "broker", "-c", str(conf), "--host", "127.0.0.1"]
