"""The name servers, as far as this broker asks them something: one after the other, first the one that answered last.

They know what brokers told them, each by itself: what one does not know yet, or any more, the next one may.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from skylark.broker.config import BrokerConfig
from skylark.net.pool import Pool
from skylark.wire.bodies import BadBody
from skylark.wire.frame import Frame

T = TypeVar("T")


class NameServers:
    """Asks them over the connections of a pool."""

    def __init__(self, config: BrokerConfig, pool: Pool) -> None:
        self._config = config
        self._pool = pool
        self._last_good = ""

    async def ask(self, request: Frame, timeout_s: float, read: Callable[[Frame], T | None]) -> T:
        """What `read` makes of the first answer that is not None. Raises ConnectionError, which says why there is none.

        One that does not answer leaves time for the others.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        servers = [server for server in self._config.namesrv_addr.split(";") if server]
        servers.sort(key=lambda server: server != self._last_good)
        failures = []
        for left, server in zip(range(len(servers), 0, -1), servers, strict=True):
            try:
                answer = await self._pool.request(server, request, (deadline_s - loop.time()) / left)
                found = read(answer)
            except (OSError, BadBody) as e:
                failures.append(str(e))
                continue
            self._last_good = server
            if found is not None:
                return found
            failures.append(f"name server {server} does not know it")
        raise ConnectionError("; ".join(failures) or "no name server is known")
