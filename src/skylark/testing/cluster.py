"""A name server and brokers on free ports of this machine, over a directory that goes away with them.

It is the real server, not a model of it: messages are stored, retried and rebalanced as in production. Only the files
are small, so that it starts in a few hundredths of a second.

The servers run on an event loop of their own in a background thread, with `async with` as with `with`: a test that
blocks does not stop the servers it waits for, and a cluster of a whole session serves tests that each have a loop of
their own. What is awaited here may be awaited on any loop.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import string
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, Generic, Protocol, Self, TypeVar

from skylark.broker.app import Broker
from skylark.broker.config import BrokerConfig, from_mapping
from skylark.broker.ports import bind_both
from skylark.nameserver.app import NameServer
from skylark.nameserver.config import NamesrvConfig
from skylark.net.pool import Pool
from skylark.net.server import bind
from skylark.testing.home import Home, running_loop
from skylark.wire.bodies import decode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import CreateTopic
from skylark.wire.routes import ClusterInfo
from skylark.wire.typed import encode_header

_T = TypeVar("_T")

HOST: Final = "127.0.0.1"
MAX_BROKERS: Final = 26
_READ_AND_WRITE: Final = 6
_REQUEST_TIMEOUT_S: Final = 60.0
_NOT_RUNNING: Final = "the cluster does not run: use it within `with` or `async with`"

_SMALL: Final = {
    "mappedFileSizeCommitLog": str(16 << 20),
    "mappedFileSizeConsumeQueue": str(20 * 20_000),
    "maxHashSlotNum": "1000",
    "maxIndexNum": "4000",
    # A developer's disk may be fuller than a server's should be.
    "diskMaxUsedSpaceRatio": "95",
}


class _Server(Protocol):
    async def start(self, host: str, port: int) -> int:
        """Serves, and returns the port."""

    async def stop(self) -> None: ...


_AnyServer = TypeVar("_AnyServer", bound=_Server)


class _LocalServer(Generic[_AnyServer]):
    """A server that can be stopped and started again, over the same files and on the same port."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._server: _AnyServer | None = None
        self._port = 0
        self._reserved: list[socket.socket] = []

    def _make(self) -> _AnyServer:
        raise NotImplementedError

    def _reserve(self) -> list[socket.socket]:
        """Bound sockets for its ports, that of clients first."""
        raise NotImplementedError

    async def _started(self, server: _AnyServer) -> None:
        """What there is to wait for when it serves."""

    @property
    def address(self) -> str:
        return f"{HOST}:{self._port}"

    @property
    def running(self) -> bool:
        return self._server is not None

    async def start(self) -> None:
        """Does nothing when it runs."""
        await self._home.reach(self._start)

    async def stop(self) -> None:
        """Does nothing when it does not run; clients see their connections end."""
        await self._home.reach(self._stop)

    async def leave(self) -> None:
        """Stops for good: the port is anybody's again."""
        await self.stop()
        for each in self._reserved:
            each.close()

    async def _start(self) -> None:
        if self._server is None:
            server = self._make()
            # Bound and never listened on, so that nobody else gets the ports while it is stopped. Other systems don't
            # let two sockets be bound to one port.
            if not self._reserved and sys.platform == "linux":
                self._reserved = self._reserve()
                self._port = self._reserved[0].getsockname()[1]
            self._port = await server.start(HOST, self._port)
            self._server = server
            await self._started(server)

    async def _stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop()


class LocalNameServer(_LocalServer[NameServer]):
    """The name server of the cluster. It forgets all routes when it stops; brokers that run tell it when it starts."""

    def __init__(self, home: Home, config: NamesrvConfig, brokers: list[LocalBroker]) -> None:
        super().__init__(home)
        self._config = config
        self._brokers = brokers

    def _make(self) -> NameServer:
        return NameServer(self._config)

    def _reserve(self) -> list[socket.socket]:
        return [bind(HOST, 0)]

    async def _started(self, _: NameServer) -> None:
        async with asyncio.timeout(_REQUEST_TIMEOUT_S):
            await self._hear_of_brokers()

    async def _hear_of_brokers(self) -> None:
        pool = Pool()
        try:
            while True:
                missing = {broker.name: broker for broker in self._brokers if broker.running}
                answer = await pool.request(
                    self.address, Frame(RequestCode.GET_BROKER_CLUSTER_INFO), _REQUEST_TIMEOUT_S
                )
                for name in decode_body(ClusterInfo, answer.body).broker_addr_table:
                    missing.pop(name, None)
                if not missing:
                    return
                await asyncio.gather(*(broker.register() for broker in missing.values()))
        finally:
            pool.close()


class LocalBroker(_LocalServer[Broker]):
    """One broker of the cluster. It can be stopped and started again, over the same store and on the same port."""

    def __init__(self, home: Home, config: BrokerConfig) -> None:
        super().__init__(home)
        self._config = config

    @property
    def name(self) -> str:
        """By which the name server knows it."""
        return self._config.broker_name

    def _make(self) -> Broker:
        return Broker(self._config)

    def _reserve(self) -> list[socket.socket]:
        return [each for each in bind_both(HOST, 0) if each is not None]

    async def register(self) -> None:
        """Tells the name server of itself now, and not only every 30 s."""
        await self._home.reach(self._register)

    async def _register(self) -> None:
        if self._server is not None:
            await self._server.register()


class LocalCluster:
    """A name server and `brokers` brokers, named broker-a, broker-b and so on.

    `topics` are created at the start, name -> queues on each broker; others come into being with their first message.
    `settings` are keys of Apache's `broker.conf`. Messages are in `directory`, or in a temporary one that is removed
    at the end.

    >>> with LocalCluster(topics={"orders": 4}) as cluster:
    ...     len(cluster.brokers)
    1
    """

    def __init__(
        self,
        brokers: int = 1,
        *,
        topics: Mapping[str, int] | None = None,
        settings: Mapping[str, str] | None = None,
        directory: Path | str | None = None,
    ) -> None:
        if not 1 <= brokers <= MAX_BROKERS:
            raise ValueError(f"a local cluster has 1 to {MAX_BROKERS} brokers, not {brokers}")
        if not isinstance(topics or {}, Mapping):
            raise ValueError(f"topics is {topics!r}; it takes names with numbers of queues, as in {{'orders': 4}}")
        for key, value in (settings or {}).items():
            if not isinstance(value, str):
                raise ValueError(f"the setting {key} is {value!r}; it takes text, as in broker.conf")
        self._count = brokers
        self._topics = dict(topics or {})
        self._settings = dict(settings or {})
        self._given = None if directory is None else Path(directory)
        self._temporary: Path | None = None
        self._home: Home | None = None
        self._name_server: LocalNameServer | None = None
        self.name_servers = ""
        self.brokers: list[LocalBroker] = []

    @property
    def broker(self) -> LocalBroker:
        """The first broker, which is the only one unless you asked for more."""
        if not self.brokers:
            raise RuntimeError(_NOT_RUNNING)
        return self.brokers[0]

    @property
    def name_server(self) -> LocalNameServer:
        """The name server; `name_servers` is its address, which stays the same."""
        if self._name_server is None:
            raise RuntimeError(_NOT_RUNNING)
        return self._name_server

    async def __aenter__(self) -> Self:
        running_loop()
        home = self._enter()
        try:
            await home.reach(self._start)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._home is not None:
            await self._home.end_after(self._stop)

    def __enter__(self) -> Self:
        home = self._enter()
        try:
            home.run(self._start)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._home is not None:
            try:
                self._home.run(self._stop)
            finally:
                self._home.end()

    def _enter(self) -> Home:
        if self._home is not None:
            raise RuntimeError("a local cluster starts only once: make another one")
        self._home = Home()
        return self._home

    def run(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Runs `work` where the servers run and waits for it: `cluster.run(cluster.broker.stop)`.

        It is for code that blocks; a coroutine awaits the call instead.
        """
        if self._home is None:
            raise RuntimeError(_NOT_RUNNING)
        return self._home.run(work)

    async def create_topic(self, name: str, queues: int = 8) -> None:
        """Creates a topic, or changes the number of its queues, on every broker that runs."""
        running_loop()
        running = [broker for broker in self.brokers if broker.running]
        if not running:
            raise RuntimeError("no broker of the cluster runs that could create the topic")
        header = CreateTopic(name, "TBW102", queues, queues, _READ_AND_WRITE, "SINGLE_TAG", 0)
        pool = Pool()
        try:
            for broker in running:
                request = Frame(RequestCode.UPDATE_AND_CREATE_TOPIC, encode_header(header))
                answer = await pool.request(broker.address, request, _REQUEST_TIMEOUT_S)
                if answer.code != ResponseCode.SUCCESS:
                    raise ValueError(f"{broker.name} does not create the topic {name!r}: {answer.remark}")
        finally:
            pool.close()

    async def _start(self) -> None:
        assert self._home is not None
        root = self._given
        if root is None:
            root = self._temporary = Path(tempfile.mkdtemp(prefix="skylark-"))
        config = NamesrvConfig(kv_config_path=str(root / "namesrv" / "kvConfig.json"))
        self._name_server = LocalNameServer(self._home, config, self.brokers)
        await self._name_server.start()
        self.name_servers = self._name_server.address
        for letter in string.ascii_lowercase[: self._count]:
            broker = LocalBroker(self._home, self._broker_config(f"broker-{letter}", root))
            self.brokers.append(broker)
            await broker.start()
        for name, queues in self._topics.items():
            await self.create_topic(name, queues)

    def _broker_config(self, name: str, root: Path) -> BrokerConfig:
        own = {"brokerName": name, "storePathRootDir": str(root / name), "namesrvAddr": self.name_servers}
        return from_mapping(_SMALL | self._settings | own, source="settings")

    async def _stop(self) -> None:
        for broker in reversed(self.brokers):
            await broker.leave()
        if self._name_server is not None:
            await self._name_server.leave()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
