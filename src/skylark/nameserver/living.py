"""The brokers that live: found by cluster and address, by the connection they registered on, and counted by its host.

Connections and hosts are opaque here: they are only compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable
from typing import TypeVar

import msgspec

from skylark.wire.tables import DataVersion

DEFAULT_TIMEOUT_MS = 120_000

Token = object
Host = Hashable
T = TypeVar("T")


class Broker(msgspec.Struct, kw_only=True, frozen=True):
    """Who registers: one broker process."""

    cluster: str
    name: str
    id: int
    address: str
    ha_address: str = ""
    zone: str | None = None
    timeout_ms: int | None = None
    acting_master: bool | None = None  # None from brokers before 5.0.0, which know nothing of acting masters


class Live(msgspec.Struct):
    """A broker that registered, on the connection `token` of a remote host, and was not silent for too long since."""

    broker: Broker
    version: DataVersion
    token: Token
    host: Host
    last_seen_ms: int

    @property
    def expires_ms(self) -> int:
        timeout_ms = self.broker.timeout_ms
        return self.last_seen_ms + (DEFAULT_TIMEOUT_MS if timeout_ms is None else timeout_ms)


class Living:
    """(cluster, address) -> the broker there."""

    def __init__(self) -> None:
        self._brokers: dict[tuple[str, str], Live] = {}
        self._of_token: dict[Token, dict[tuple[str, str], Live]] = {}
        self._of_host: Counter[Host] = Counter()
        self._clusters: dict[str, Counter[str]] = {}  # broker name -> cluster

    def __len__(self) -> int:
        return len(self._brokers)

    def get(self, cluster: str, address: str) -> Live | None:
        return self._brokers.get((cluster, address))

    def all(self) -> Collection[Live]:
        return self._brokers.values()

    def on(self, token: Token) -> list[Live]:
        """Those that registered on a connection."""
        return list(self._of_token.get(token, {}).values())

    def count(self, host: Host) -> int:
        """How many registered from a host."""
        return self._of_host[host]

    def clusters(self, name: str) -> Collection[str]:
        """The clusters in which brokers of a name live."""
        return self._clusters.get(name, {}).keys()

    def put(self, live: Live) -> None:
        """Takes a broker in; it replaces the one at its address."""
        broker = live.broker
        key = broker.cluster, broker.address
        self.drop(*key)
        self._brokers[key] = live
        self._of_token.setdefault(live.token, {})[key] = live
        self._of_host[live.host] += 1
        self._clusters.setdefault(broker.name, Counter())[broker.cluster] += 1

    def drop(self, cluster: str, address: str) -> None:
        """Forgets the broker at an address, if there is one."""
        key = cluster, address
        live = self._brokers.pop(key, None)
        if live is None:
            return
        on_token = self._of_token[live.token]
        del on_token[key]
        if not on_token:
            del self._of_token[live.token]
        _count_down(self._of_host, live.host)
        clusters = self._clusters[live.broker.name]
        _count_down(clusters, cluster)
        if not clusters:
            del self._clusters[live.broker.name]


def _count_down(counter: Counter[T], key: T) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
