"""The name server's tables: which brokers live, which topics they offer, which names form a cluster.

Pure: time comes as `now_ms` (of any clock that never jumps), and the connection a broker registered on is an opaque
token that is only compared. Nothing here is written to disk; brokers register again every 30 s.

Invariants, after every call:
- a name without addresses is in no table, and every address belongs to a broker of that name that lives;
- a topic without queues is in no table, and every queue belongs to a broker name that is known;
- a cluster without broker names is in no table;
- there are at most MAX_BROKERS, and what they offer takes at most MAX_BYTES. One connection, whatever it registers,
  takes a part of both.

The answers reference the tables: encode them before the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import msgspec

from skylark.nameserver.offers import Offers, text_bytes
from skylark.wire.bodies import TopicList
from skylark.wire.routes import (
    MASTER_ID,
    BrokerData,
    BrokerMemberGroup,
    ClusterInfo,
    QueueData,
    RegisterBrokerBody,
    RegisterBrokerResult,
    TopicConfigWrapper,
    TopicRouteData,
)
from skylark.wire.tables import MAX_QUEUES, PERM_READ, PERM_WRITE, DataVersion, TopicConfig

DEFAULT_TIMEOUT_MS = 120_000
UNIT_FLAG = 1
UNIT_SUBSCRIPTION_FLAG = 2

MAX_BROKERS: Final = 4096
MAX_BROKERS_PER_CONNECTION: Final = 64
MAX_BYTES: Final = 256 << 20
MAX_BYTES_PER_CONNECTION: Final = 64 << 20
"""Some 100,000 topics, or 75,000 whose names are as long as they may be."""
MAX_BROKER_BYTES: Final = 16 << 10
"""Of a broker's names, addresses and filter servers."""
_FILTER_SERVER_BYTES: Final = 100

Token = object


class NoRoom(Exception):
    """What is to be registered would take too much; the text says of what."""


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


class _Live(msgspec.Struct):
    broker: Broker
    version: DataVersion
    token: Token
    last_seen_ms: int

    @property
    def expires_ms(self) -> int:
        timeout_ms = self.broker.timeout_ms
        return self.last_seen_ms + (DEFAULT_TIMEOUT_MS if timeout_ms is None else timeout_ms)


class Routes:
    """All that a name server knows of its brokers."""

    def __init__(self) -> None:
        self._offers = Offers()
        self._brokers: dict[str, BrokerData] = {}  # by broker name
        self._clusters: dict[str, set[str]] = {}  # cluster -> broker names
        self._live: dict[tuple[str, str], _Live] = {}  # by (cluster, address)
        self._filter_servers: dict[tuple[str, str], list[str]] = {}

    # Brokers come, stay and go.

    def register(
        self,
        broker: Broker,
        body: RegisterBrokerBody,
        token: Token,
        now_ms: int,
        *,
        drop_all_but: Collection[str] | None = None,
    ) -> RegisterBrokerResult | None:
        """Takes a broker and its topics in. None: refused, a single topic can't be the first thing a broker tells.

        Topics of the broker that are not in `drop_all_but` are removed from its routes. Raises NoRoom: then a broker
        that was there before lives on with what it had.
        """
        topics = body.topic_config_serialize_wrapper
        group = self._brokers.get(broker.name)
        live = self._live.get((broker.cluster, broker.address))
        # One address holds one id: a slave that became master leaves its old id.
        addresses = (
            {i: a for i, a in group.broker_addrs.items() if a != broker.address or i == broker.id} if group else {}
        )
        if self._is_outdated(broker, addresses.get(broker.id), topics.data_version):
            if live is not None:
                self.unregister(broker.cluster, live.broker.name, broker.address)
            return RegisterBrokerResult()
        is_first = broker.id not in addresses
        if is_first and len(topics.topic_config_table) == 1:
            return None
        self.check_room(broker, body, token, now_ms)
        if live is not None and live.broker.name != broker.name:
            # A broker that was given another name: nobody is left to take the old one out of the routes.
            self.unregister(broker.cluster, live.broker.name, broker.address)
        addresses[broker.id] = broker.address
        if group is None:
            group = self._brokers[broker.name] = BrokerData(
                broker_addrs={}, broker_name=broker.name, cluster=broker.cluster
            )
        group.broker_addrs = dict(sorted(addresses.items()))
        group.enable_acting_master = bool(broker.acting_master)
        group.zone_name = broker.zone
        self._clusters.setdefault(broker.cluster, set()).add(broker.name)

        is_prime_slave = broker.acting_master is not None and broker.id != MASTER_ID and broker.id == min(addresses)
        if broker.id == MASTER_ID or is_prime_slave:
            read_only = is_prime_slave and group.enable_acting_master
            self._take_topics(broker, topics, is_first=is_first, read_only=read_only, drop_all_but=drop_all_but)
        return self._mark_alive(broker, body, token, now_ms)

    def check_room(self, broker: Broker, body: RegisterBrokerBody, token: Token, now_ms: int) -> None:
        """Raises NoRoom if there is none for this registration, which counts as a sign of life then."""
        try:
            self._check_room(broker, body, token)
        except NoRoom:
            live = self._live.get((broker.cluster, broker.address))
            if live is not None and live.broker.name == broker.name:
                live.last_seen_ms = now_ms
            raise

    def heartbeat(self, cluster: str, address: str, now_ms: int) -> None:
        live = self._live.get((cluster, address))
        if live is not None:
            live.last_seen_ms = now_ms

    def version(self, cluster: str, address: str) -> DataVersion | None:
        """The version of the topics that this broker registered last: with another one it must register again."""
        live = self._live.get((cluster, address))
        return None if live is None else live.version

    def rival(self, broker: Broker) -> tuple[str, int] | None:
        """The other address that lives under this broker's name and id, if there is one, and when it was last seen."""
        group = self._brokers.get(broker.name)
        address = None if group is None else group.broker_addrs.get(broker.id)
        if group is None or address is None or address == broker.address:
            return None
        live = self._live.get((group.cluster, address))
        return None if live is None else (address, live.last_seen_ms)

    def unregister(self, cluster: str, name: str, address: str) -> None:
        """Takes a broker out; one that lives at this address under another name stays."""
        live = self._live.get((cluster, address))
        if live is None or live.broker.name != name:
            return
        del self._live[cluster, address]
        self._filter_servers.pop((cluster, address), None)
        group = self._brokers.get(name)
        if group is None:
            return
        group.broker_addrs = {i: a for i, a in group.broker_addrs.items() if a != address}
        if not group.broker_addrs:
            self._forget_name(name)
        elif group.enable_acting_master and MASTER_ID not in group.broker_addrs:
            self.wipe_write_perm(name)

    def closed(self, token: Token) -> list[Broker]:
        """Drops the brokers that registered on a connection which is gone, and returns them."""
        return self._drop(lambda live: live.token is token)

    def expire(self, now_ms: int) -> list[tuple[Broker, Token]]:
        """Drops the brokers that were silent for too long, and returns them with the connections to close."""
        tokens = {key: live.token for key, live in self._live.items()}
        gone = self._drop(lambda live: live.expires_ms < now_ms)
        return [(broker, tokens[broker.cluster, broker.address]) for broker in gone]

    # Topics, one by one.

    def register_topic(self, topic: str, queues: list[QueueData]) -> bool:
        """Adds a topic's queues; False, and nothing happens, if one names an unknown broker. Raises NoRoom."""
        if not queues or any(queue.broker_name not in self._brokers for queue in queues):
            return False
        for queue in queues:
            growth = self._offers.growth_bytes(queue.broker_name, [topic], {})
            self._check_bytes({queue.broker_name}, growth)
            queue.read_queue_nums = min(queue.read_queue_nums, MAX_QUEUES)
            queue.write_queue_nums = min(queue.write_queue_nums, MAX_QUEUES)
            self._offers.put(topic, queue)
        return True

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Removes a topic's routes: all, or those to the brokers of one cluster."""
        for name in list(self._offers.of(topic)):
            if not cluster or name in self._clusters.get(cluster, ()):
                self._offers.drop(topic, name)

    def wipe_write_perm(self, name: str) -> int:
        """No more sends to a broker; the number of topics it has."""
        return self._change_perm(name, lambda perm: perm & ~PERM_WRITE)

    def add_write_perm(self, name: str) -> int:
        """Reads and writes again, and nothing else, as Apache has it; the number of topics it has."""
        return self._change_perm(name, lambda _: PERM_READ | PERM_WRITE)

    # Answers.

    def route(self, topic: str) -> TopicRouteData | None:
        queues = self._offers.of(topic)
        if not queues:
            return None
        groups = [self._brokers[name] for name in sorted(queues)]
        filter_servers = {}
        for group in groups:
            for address in group.broker_addrs.values():
                servers = self._filter_servers.get((group.cluster, address))
                if servers:
                    filter_servers[address] = servers
        return TopicRouteData(
            broker_datas=groups,
            filter_server_table=dict(sorted(filter_servers.items())),
            queue_datas=[queues[name] for name in sorted(queues)],
            topic_queue_mapping_by_broker=self._offers.mappings_of(topic),
        )

    def cluster_info(self) -> ClusterInfo:
        return ClusterInfo(
            broker_addr_table={name: self._brokers[name] for name in sorted(self._brokers)},
            cluster_addr_table={cluster: sorted(self._clusters[cluster]) for cluster in sorted(self._clusters)},
        )

    def members(self, cluster: str, name: str) -> BrokerMemberGroup:
        group = self._brokers.get(name)
        return BrokerMemberGroup(
            broker_addrs={} if group is None else group.broker_addrs, broker_name=name, cluster=cluster
        )

    def topics(self) -> TopicList:
        return TopicList(topic_list=sorted(self._offers.topics()))

    def topics_of_cluster(self, cluster: str) -> TopicList:
        names = self._clusters.get(cluster, set())
        return TopicList(topic_list=sorted({topic for name in names for topic in self._offers.topics_of(name)}))

    def topics_by_flag(self, accepts: Callable[[int], bool]) -> TopicList:
        """The topics whose system flag, as their first broker has it, is accepted."""
        offers = ((topic, self._offers.of(topic)) for topic in self._offers.topics())
        return TopicList(
            topic_list=sorted(topic for topic, queues in offers if accepts(queues[min(queues)].topic_sys_flag))
        )

    def system_topics(self) -> TopicList:
        """Every cluster and broker name is a topic; and an address to ask for the others."""
        names = {*self._clusters, *(name for names in self._clusters.values() for name in names)}
        first = next(
            (address for _, group in sorted(self._brokers.items()) for address in group.broker_addrs.values()), None
        )
        return TopicList(broker_addr=first, topic_list=sorted(names))

    # Steps.

    def _is_outdated(self, broker: Broker, holder: str | None, version: DataVersion) -> bool:
        """Whether another address holds the broker's id with a newer state (an epoch): the old master came back."""
        if holder is None or holder == broker.address:
            return False
        live = self._live.get((broker.cluster, holder))
        return live is not None and live.version.state_version > version.state_version

    def _check_room(self, broker: Broker, body: RegisterBrokerBody, token: Token) -> None:
        own_bytes = _own_bytes(broker, body)
        if own_bytes > MAX_BROKER_BYTES:
            raise NoRoom(f"the broker's names and filter servers take {own_bytes} bytes of at most {MAX_BROKER_BYTES}")
        key = broker.cluster, broker.address
        if key not in self._live and len(self._live) >= MAX_BROKERS:
            raise NoRoom(f"{MAX_BROKERS} brokers are registered already")
        others = [live.broker.name for each, live in self._live.items() if live.token is token and each != key]
        if len(others) >= MAX_BROKERS_PER_CONNECTION:
            raise NoRoom(f"{MAX_BROKERS_PER_CONNECTION} brokers are registered on this connection already")
        topics = body.topic_config_serialize_wrapper
        names = (topic.topic_name for topic in topics.topic_config_table.values())
        growth = self._offers.growth_bytes(broker.name, names, topics.topic_queue_mapping_info_map)
        self._check_bytes({broker.name, *others}, growth)

    def _check_bytes(self, names: Collection[str], growth: int) -> None:
        """Raises NoRoom if the broker names, which have one connection, may not offer so many bytes more."""
        if growth <= 0:
            return
        held = sum(map(self._offers.bytes_of, names))
        if held + growth > MAX_BYTES_PER_CONNECTION:
            raise NoRoom(
                f"the topics take {held + growth} bytes of at most {MAX_BYTES_PER_CONNECTION} for one connection"
            )
        if self._offers.size_bytes + growth > MAX_BYTES:
            raise NoRoom(f"the topics of all brokers take {self._offers.size_bytes} bytes of at most {MAX_BYTES}")

    def _take_topics(
        self,
        broker: Broker,
        topics: TopicConfigWrapper,
        *,
        is_first: bool,
        read_only: bool,
        drop_all_but: Collection[str] | None,
    ) -> None:
        if drop_all_but is not None and not topics.topic_queue_mapping_info_map:
            for topic in [topic for topic in self._offers.topics_of(broker.name) if topic not in drop_all_but]:
                self._offers.drop(topic, broker.name)
        is_changed = is_first or self.version(broker.cluster, broker.address) != topics.data_version
        known = self._offers.topics_of(broker.name)
        for config in topics.topic_config_table.values():
            # With the version unchanged, a known topic keeps its permission: it may have been wiped by an operator.
            if is_changed or config.topic_name not in known:
                self._offers.put(config.topic_name, _queue_data(broker.name, config, read_only=read_only))
        if is_changed:
            for topic, mapping in topics.topic_queue_mapping_info_map.items():
                if mapping.bname in (None, broker.name):
                    self._offers.put_mapping(topic, broker.name, mapping)

    def _mark_alive(self, broker: Broker, body: RegisterBrokerBody, token: Token, now_ms: int) -> RegisterBrokerResult:
        key = broker.cluster, broker.address
        self._live[key] = _Live(broker, body.topic_config_serialize_wrapper.data_version, token, now_ms)
        if body.filter_server_list:
            self._filter_servers[key] = body.filter_server_list
        else:
            self._filter_servers.pop(key, None)
        master = self._brokers[broker.name].broker_addrs.get(MASTER_ID)
        live = None if master is None else self._live.get((broker.cluster, master))
        if broker.id == MASTER_ID or live is None:
            return RegisterBrokerResult()
        return RegisterBrokerResult(ha_server_addr=live.broker.ha_address or None, master_addr=master)

    def _drop(self, is_gone: Callable[[_Live], bool]) -> list[Broker]:
        gone = [live.broker for live in self._live.values() if is_gone(live)]
        for broker in gone:
            self.unregister(broker.cluster, broker.name, broker.address)
        return gone

    def _forget_name(self, name: str) -> None:
        del self._brokers[name]
        for cluster, names in list(self._clusters.items()):
            names.discard(name)
            if not names:
                del self._clusters[cluster]
        self._offers.drop_name(name)

    def _change_perm(self, name: str, change: Callable[[int], int]) -> int:
        for queue in self._offers.queues_of(name):
            queue.perm = change(queue.perm)
        return len(self._offers.topics_of(name))


def _own_bytes(broker: Broker, body: RegisterBrokerBody) -> int:
    """What a broker takes besides its topics."""
    texts = (broker.cluster, broker.name, broker.address, broker.ha_address, broker.zone, *body.filter_server_list)
    return sum(map(text_bytes, texts)) + _FILTER_SERVER_BYTES * len(body.filter_server_list)


def _queue_data(name: str, config: TopicConfig, *, read_only: bool) -> QueueData:
    """What clients are told; those of Apache would loop over any number of queues."""
    return QueueData(
        broker_name=name,
        perm=config.perm & ~PERM_WRITE if read_only else config.perm,
        read_queue_nums=min(config.read_queue_nums, MAX_QUEUES),
        topic_sys_flag=config.topic_sys_flag,
        write_queue_nums=min(config.write_queue_nums, MAX_QUEUES),
    )
