"""The filter servers that stand by this broker. They say so every 10 s; the name servers' routes name them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from skylark.broker.config import BrokerConfig
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.net.pool import split_address
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import RegisterFilterServer
from skylark.wire.typed import decode_header

log = logging.getLogger(__name__)

MAX_SERVERS: Final = 64
SILENT_AFTER_MS: Final = 30_000


class FilterServers:
    """Addresses of filter servers, by their connections."""

    def __init__(self, config: BrokerConfig, clock: Callable[[], int], changed: Callable[[], None]) -> None:
        """`clock` does not jump; `changed` is called when one comes, goes or gets another address."""
        self._config = config
        self._clock = clock
        self._changed = changed
        self._servers: dict[Connection, tuple[str, int]] = {}

    def addresses(self) -> list[str]:
        return sorted({address for address, _ in self._servers.values()})

    def handlers(self) -> dict[int, Handler]:
        return {RequestCode.REGISTER_FILTER_SERVER: self.register}

    def register(self, request: Frame, connection: Connection) -> Frame:
        address = decode_header(RegisterFilterServer, request).filter_server_addr
        try:
            split_address(address)
        except ValueError as e:
            raise RequestFailed(ResponseCode.INVALID_PARAMETER, str(e)) from None
        known = self._servers.get(connection)
        if known is None and len(self._servers) >= MAX_SERVERS:
            raise RequestFailed(ResponseCode.SYSTEM_BUSY, f"{MAX_SERVERS} filter servers are registered already")
        self._servers[connection] = (address, self._clock())
        if known is None or known[0] != address:
            log.info("filter server %s comes", address)
            self._changed()
        return request.reply(fields={"brokerName": self._config.broker_name, "brokerId": str(self._config.broker_id)})

    def closed(self, connection: Connection) -> None:
        server = self._servers.pop(connection, None)
        if server is not None:
            log.warning("filter server %s is gone", server[0])
            self._changed()

    def expire(self) -> None:
        """Forgets those that were silent for too long; called every few seconds."""
        oldest_ms = self._clock() - SILENT_AFTER_MS
        for connection, (_, heard_ms) in list(self._servers.items()):
            if heard_ms < oldest_ms:
                self.closed(connection)
                connection.close()
