"""A name server: the composition of route tables, KV config, handlers and a listening socket.

Name servers don't know of each other: brokers register with each of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from skylark.nameserver.config import NamesrvConfig
from skylark.nameserver.handlers import handlers
from skylark.nameserver.kvconfig import KVConfig
from skylark.nameserver.routes import Routes
from skylark.net.connection import Connection
from skylark.net.server import Server, bind, host_of, refused
from skylark.wire.codes import NAME_SERVER_CODES, RequestCode

log = logging.getLogger(__name__)

# Controllers have codes of their own, which Apache's name server may answer.
_BROKER_CODES: Final = {code for code in RequestCode if not code.name.startswith("CONTROLLER")} - NAME_SERVER_CODES
_HINT: Final = "this is a name server; give the address of a broker (port 10911 by default)"


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class NameServer:
    """One name server. `clock` gives milliseconds and never jumps: a changed wall clock ends no broker's lease."""

    def __init__(
        self,
        config: NamesrvConfig,
        clock: Callable[[], int] = monotonic_ms,
        on_config_change: Callable[[dict[str, str]], None] = lambda changed: None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._routes = Routes(host_of)
        self._kv = KVConfig(Path(config.kv_config_path))
        table = handlers(self._routes, self._kv, config, clock, on_config_change)
        self._server = Server(
            refused(_BROKER_CODES, _HINT) | table,
            closed=self._closed,
            idle_s=config.server_channel_max_idle_time_seconds,
        )
        self._scan: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens and returns the port. Raises OSError, or ConfigError if the stored KV config can't be used."""
        self._kv.load()
        listening = await self._server.start(bind(host, port))
        self._schedule_scan()
        return listening

    async def stop(self) -> None:
        if self._scan is not None:
            self._scan.cancel()
        await self._server.stop()

    def scan(self) -> None:
        """Drops the brokers that were silent for too long, and their connections."""
        for broker, connection in self._routes.expire(self._clock()):
            log.warning("broker %s (id %d) at %s is silent and dropped", broker.name, broker.id, broker.address)
            if isinstance(connection, Connection):
                connection.close()

    def _closed(self, connection: Connection) -> None:
        for broker in self._routes.closed(connection):
            log.warning(
                "broker %s (id %d) at %s is gone: its connection closed", broker.name, broker.id, broker.address
            )

    def _schedule_scan(self) -> None:
        delay_s = self._config.scan_not_active_broker_interval / 1000
        self._scan = asyncio.get_running_loop().call_later(delay_s, self._scan_again)

    def _scan_again(self) -> None:
        self.scan()
        self._schedule_scan()
