"""The other brokers of the cluster, as far as this one has to ask them something.

Their addresses come from the name servers when they are first needed, and again when a broker can't be reached there.
"""

from __future__ import annotations

import logging

from skylark.broker.config import BrokerConfig
from skylark.broker.name_servers import NameServers
from skylark.net.connection import RequestFailed
from skylark.net.pool import Pool
from skylark.wire.bodies import decode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.routes import MASTER_ID, ClusterInfo

log = logging.getLogger(__name__)


class Neighbours:
    """Asks the masters of other broker names."""

    def __init__(self, config: BrokerConfig) -> None:
        self._config = config
        self._pool = Pool()
        self._name_servers = NameServers(config, self._pool)
        self._addresses: dict[str, str] = {}

    async def ask(self, broker: str, request: Frame) -> Frame:
        """The broker's answer, whatever its code. Raises RequestFailed."""
        timeout_s = self._config.forward_timeout / 1000
        try:
            address = self._addresses.get(broker) or await self._find(broker, timeout_s)
            return await self._pool.request(address, request, timeout_s)
        except OSError as e:
            self._addresses.pop(broker, None)
            # Whoever asks may have announced the broker himself: what there is at its address, or not, is not for him.
            log.warning("broker %s can't be asked for its part of a static topic: %s", broker, e)
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"broker {broker} can't be asked now") from e

    def close(self) -> None:
        self._pool.close()

    async def _find(self, broker: str, timeout_s: float) -> str:
        def read(answer: Frame) -> str | None:
            table = decode_body(ClusterInfo, answer.body).broker_addr_table
            self._addresses = {
                name: data.broker_addrs[MASTER_ID] for name, data in table.items() if MASTER_ID in data.broker_addrs
            }
            return self._addresses.get(broker)

        return await self._name_servers.ask(Frame(RequestCode.GET_BROKER_CLUSTER_INFO), timeout_s, read)
