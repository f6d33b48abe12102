"""A name server and brokers on free ports of this machine, over a directory that goes away with them.

It is the real server, not a model of it: messages are stored, retried and rebalanced as in production. Only the files
are small, so that it starts in a few hundredths of a second.

`async with` runs it on the caller's event loop. `with` runs it on a loop of its own in a background thread, so that a
test that blocks does not stop the servers it waits for.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import string
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from skylark.broker.app import Broker
from skylark.broker.config import BrokerConfig, from_mapping
from skylark.broker.ports import bind_both
from skylark.nameserver.app import NameServer
from skylark.nameserver.config import NamesrvConfig
from skylark.net.pool import Pool
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import CreateTopic
from skylark.wire.typed import encode_header

_T = TypeVar("_T")

HOST: Final = "127.0.0.1"
MAX_BROKERS: Final = 26
_READ_AND_WRITE: Final = 6
_REQUEST_TIMEOUT_S: Final = 60.0

_SMALL: Final = {
    "mappedFileSizeCommitLog": str(16 << 20),
    "mappedFileSizeConsumeQueue": str(20 * 20_000),
    "maxHashSlotNum": "1000",
    "maxIndexNum": "4000",
    # A developer's disk may be fuller than a server's should be.
    "diskMaxUsedSpaceRatio": "95",
}


class LocalBroker:
    """One broker of the cluster. It can be stopped and started again, over the same store and on the same port."""

    def __init__(self, config: BrokerConfig) -> None:
        self._config = config
        self._broker: Broker | None = None
        self._port = 0
        self._reserved: list[socket.socket] = []

    @property
    def name(self) -> str:
        return self._config.broker_name

    @property
    def address(self) -> str:
        return f"{HOST}:{self._port}"

    @property
    def running(self) -> bool:
        return self._broker is not None

    async def start(self) -> None:
        if self._broker is None:
            broker = Broker(self._config)
            # Bound and never listened on, so that nobody else gets the ports while the broker is stopped. Other systems
            # don't let two sockets be bound to one port.
            if not self._reserved and sys.platform == "linux":
                self._reserved = [each for each in bind_both(HOST, 0) if each is not None]
                self._port = self._reserved[0].getsockname()[1]
            self._port = await broker.start(HOST, self._port)
            self._broker = broker

    async def stop(self) -> None:
        """Leaves the routes and closes the store; clients see their connections end."""
        broker, self._broker = self._broker, None
        if broker is not None:
            await broker.stop()

    async def leave(self) -> None:
        """Stops for good: the port is anybody's again."""
        await self.stop()
        for each in self._reserved:
            each.close()


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
        directory: Path | None = None,
    ) -> None:
        if not 1 <= brokers <= MAX_BROKERS:
            raise ValueError(f"a local cluster has 1 to {MAX_BROKERS} brokers, not {brokers}")
        self._count = brokers
        self._topics = dict(topics or {})
        self._settings = dict(settings or {})
        self._given = directory
        self._temporary: Path | None = None
        self._name_server: NameServer | None = None
        self._thread: _LoopThread | None = None
        self.name_servers = ""
        self.brokers: list[LocalBroker] = []

    @property
    def broker(self) -> LocalBroker:
        """The first broker, which is the only one unless you asked for more."""
        return self.brokers[0]

    # On the caller's event loop.

    async def __aenter__(self) -> Self:
        if self.name_servers:
            raise RuntimeError("a local cluster starts only once: make another one")
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stop()

    async def create_topic(self, name: str, queues: int = 8) -> None:
        """Creates a topic, or changes the number of its queues, on every broker that runs."""
        header = CreateTopic(name, "TBW102", queues, queues, _READ_AND_WRITE, "SINGLE_TAG", 0)
        pool = Pool()
        try:
            for broker in self.brokers:
                if broker.running:
                    request = Frame(RequestCode.UPDATE_AND_CREATE_TOPIC, encode_header(header))
                    answer = await pool.request(broker.address, request, _REQUEST_TIMEOUT_S)
                    if answer.code != ResponseCode.SUCCESS:
                        raise ValueError(f"{broker.name} does not create the topic {name!r}: {answer.remark}")
        finally:
            pool.close()

    # On a loop of its own.

    def __enter__(self) -> Self:
        self._thread = _LoopThread()
        try:
            self._thread.run(self.__aenter__)
        except BaseException:
            self._thread.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.run(self._stop)
        assert self._thread is not None
        self._thread.close()

    def run(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Runs `work` where the servers run and waits for it: `cluster.run(cluster.broker.stop)`.

        Only inside `with`; inside `async with` await it instead.
        """
        if self._thread is None:
            raise RuntimeError("this cluster runs on your own event loop: await the call instead of running it")
        return self._thread.run(work)

    async def _start(self) -> None:
        root = self._given
        if root is None:
            root = self._temporary = Path(tempfile.mkdtemp(prefix="skylark-"))
        name_server = NameServer(NamesrvConfig(kv_config_path=str(root / "namesrv" / "kvConfig.json")))
        self.name_servers = f"{HOST}:{await name_server.start(HOST, 0)}"
        self._name_server = name_server
        for letter in string.ascii_lowercase[: self._count]:
            broker = LocalBroker(self._broker_config(f"broker-{letter}", root))
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
            await self._name_server.stop()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


class _LoopThread:
    """An event loop in a daemon thread: a test that forgets the cluster still ends."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="skylark-local-cluster", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
