"""The name server's tables: which brokers live, which topics they offer, which names form a cluster.

Pure: time comes as `now_ms` (of any clock that never jumps), and the connection a broker registered on is an opaque
token. Nothing here is written to disk; brokers register again every 30 s.

Invariants, after every call:
- a name without addresses is in no table, and every address belongs to a broker of that name that lives;
- a topic without queues is in no table, and every queue belongs to a broker name that is known;
- a cluster without broker names is in no table;
- there are at most MAX_BROKERS, and what they offer takes at most MAX_BYTES. The brokers of one remote host take at
  most half of what those of the others leave, so that nobody can take all: connections cost nothing, hosts do. A broker
  that registers again is not counted again, and what it had stays its own, however full it is.

The answers reference the tables: encode them before the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

from skylark.nameserver.living import Broker, Host, Live, Living, Token
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

UNIT_FLAG = 1
UNIT_SUBSCRIPTION_FLAG = 2

MAX_BROKERS: Final = 4096
MAX_BYTES: Final = 256 << 20
"""Of topics; a single host, that is, may offer 200,000, or 150,000 whose names are as long as they may be."""
MAX_BROKER_BYTES: Final = 4 << 10
"""Of a broker's names, addresses and filter servers, which are in every route of its topics."""
_FILTER_SERVER_BYTES: Final = 100


class NoRoom(Exception):
    """What is to be registered would take too much; the text says of what."""


class Routes:
    """All that a name server knows of its brokers."""

    def __init__(self, host_of: Callable[[Any], Host] = lambda token: token) -> None:
        """`host_of` tells where a connection comes from; without it, each counts as a host of its own."""
        self._host_of = host_of
        self._offers = Offers()
        self._brokers: dict[str, BrokerData] = {}  # by broker name
        self._clusters: dict[str, set[str]] = {}  # cluster -> broker names
        self._live = Living()
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
        live = self._live.get(broker.cluster, broker.address)
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
        self.check_room(broker, body, self.growth_bytes(broker, body), token, now_ms)
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
            host = self._host_of(token)
            self._take_topics(broker, topics, host, is_first=is_first, read_only=read_only, drop_all_but=drop_all_but)
        return self._mark_alive(broker, body, token, now_ms)

    def growth_bytes(self, broker: Broker, body: RegisterBrokerBody) -> int:
        """How much more would be offered after this registration."""
        topics = body.topic_config_serialize_wrapper
        names = (topic.topic_name for topic in topics.topic_config_table.values())
        return self._offers.growth_bytes(broker.name, names, topics.topic_queue_mapping_info_map)

    def check_room(
        self, broker: Broker, body: RegisterBrokerBody, growth_bytes: int, token: Token, now_ms: int
    ) -> None:
        """Raises NoRoom if there is none for this registration, or for what it is a part of and would offer so much
        more; it counts as a sign of life then.
        """
        try:
            self._check_room(broker, body, growth_bytes, self._host_of(token))
        except NoRoom:
            live = self._live.get(broker.cluster, broker.address)
            if live is not None and live.broker.name == broker.name:
                live.last_seen_ms = now_ms
            raise

    def heartbeat(self, cluster: str, address: str, now_ms: int) -> None:
        live = self._live.get(cluster, address)
        if live is not None:
            live.last_seen_ms = now_ms

    def version(self, cluster: str, address: str) -> DataVersion | None:
        """The version of the topics that this broker registered last: with another one it must register again."""
        live = self._live.get(cluster, address)
        return None if live is None else live.version

    def rival(self, broker: Broker) -> tuple[str, int] | None:
        """The other address that lives under this broker's name and id, if there is one, and when it was last seen."""
        group = self._brokers.get(broker.name)
        address = None if group is None else group.broker_addrs.get(broker.id)
        if group is None or address is None or address == broker.address:
            return None
        live = self._live.get(group.cluster, address)
        return None if live is None else (address, live.last_seen_ms)

    def unregister(self, cluster: str, name: str, address: str) -> None:
        """Takes a broker out; one that lives at this address under another name stays."""
        live = self._live.get(cluster, address)
        if live is None or live.broker.name != name:
            return
        self._live.drop(cluster, address)
        self._filter_servers.pop((cluster, address), None)
        group = self._brokers.get(name)
        if group is None:
            return
        had_master = MASTER_ID in group.broker_addrs
        group.broker_addrs = {i: a for i, a in group.broker_addrs.items() if a != address}
        if not group.broker_addrs:
            self._forget_name(name, {cluster, *self._live.clusters(name)})
            return
        if cluster not in self._live.clusters(name):
            self._leave_cluster(name, cluster)
        if group.enable_acting_master and had_master and MASTER_ID not in group.broker_addrs:
            self.wipe_write_perm(name)  # once: nothing is left to take when slaves follow

    def closed(self, token: Token) -> list[Broker]:
        """Drops the brokers that registered on a connection which is gone, and returns them."""
        return self._drop(self._live.on(token))

    def expire(self, now_ms: int) -> list[tuple[Broker, Token]]:
        """Drops the brokers that were silent for too long, and returns them with the connections to close."""
        gone = [live for live in self._live.all() if live.expires_ms < now_ms]
        self._drop(gone)
        return [(live.broker, live.token) for live in gone]

    # Topics, one by one.

    def register_topic(self, topic: str, queues: list[QueueData], token: Token) -> bool:
        """Adds a topic's queues; False, and nothing happens, if one names an unknown broker. Raises NoRoom.

        They count for the host that registers them, whosever they are.
        """
        if not queues or any(queue.broker_name not in self._brokers for queue in queues):
            return False
        host = self._host_of(token)
        for queue in queues:
            self._check_bytes(host, self._offers.growth_bytes(queue.broker_name, [topic], {}))
            queue.read_queue_nums = min(queue.read_queue_nums, MAX_QUEUES)
            queue.write_queue_nums = min(queue.write_queue_nums, MAX_QUEUES)
            self._offers.put(topic, queue, host)
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

    def count_offers(self, topic: str) -> int:
        """How many broker names offer a topic, and how many of its logical queues they have."""
        mappings = self._offers.mappings_of(topic)
        queues = 0 if mappings is None else sum(len(mapping.curr_id_map) for mapping in mappings.values())
        return len(self._offers.of(topic)) + queues

    def count_names(self) -> int:
        return len(self._brokers)

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

    def count_topics(self) -> int:
        return len(self._offers.topics())

    def topics(self) -> list[str]:
        """All topics, in no order: there may be some hundred thousand."""
        return list(self._offers.topics())

    def topics_of_cluster(self, cluster: str) -> list[str]:
        """In no order either."""
        topics: set[str] = set()
        for name in self._clusters.get(cluster, ()):
            topics.update(self._offers.topics_of(name))
        return list(topics)

    def topics_by_flag(self, topics: Iterable[str], accepts: Callable[[int], bool]) -> list[str]:
        """Those of some topics whose system flag, as their first broker has it, is accepted."""
        offers = ((topic, self._offers.of(topic)) for topic in topics)
        return [topic for topic, queues in offers if queues and accepts(queues[min(queues)].topic_sys_flag)]

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
        live = self._live.get(broker.cluster, holder)
        return live is not None and live.version.state_version > version.state_version

    def _check_room(self, broker: Broker, body: RegisterBrokerBody, growth_bytes: int, host: Host) -> None:
        own_bytes = _own_bytes(broker, body)
        if own_bytes > MAX_BROKER_BYTES:
            raise NoRoom(f"the broker's names and filter servers take {own_bytes} bytes of at most {MAX_BROKER_BYTES}")
        if self._live.get(broker.cluster, broker.address) is None:
            self._check_count(host)
        self._check_bytes(host, growth_bytes)

    def _check_count(self, host: Host) -> None:
        """Raises NoRoom if one more broker of the host is too much."""
        if len(self._live) >= MAX_BROKERS:
            raise NoRoom(f"{MAX_BROKERS} brokers are registered already")
        count = self._live.count(host)
        if count and count >= (MAX_BROKERS - len(self._live) + count) // 2:
            raise NoRoom(f"the brokers of this host have their half of what others leave of {MAX_BROKERS} places")

    def _check_bytes(self, host: Host, growth: int) -> None:
        """Raises NoRoom if brokers of the host may not offer so many bytes more."""
        if growth <= 0:
            return
        held = self._offers.bytes_of(host)
        if held + growth > (MAX_BYTES - self._offers.size_bytes + held) // 2:
            raise NoRoom(
                f"with these topics, the brokers of this host would have more than half of what others leave "
                f"of {MAX_BYTES} bytes"
            )

    def _take_topics(
        self,
        broker: Broker,
        topics: TopicConfigWrapper,
        host: Host,
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
                self._offers.put(config.topic_name, _queue_data(broker.name, config, read_only=read_only), host)
        if is_changed:
            for topic, mapping in topics.topic_queue_mapping_info_map.items():
                if mapping.bname in (None, broker.name):
                    self._offers.put_mapping(topic, broker.name, mapping, host)

    def _mark_alive(self, broker: Broker, body: RegisterBrokerBody, token: Token, now_ms: int) -> RegisterBrokerResult:
        key = broker.cluster, broker.address
        version = body.topic_config_serialize_wrapper.data_version
        self._live.put(Live(broker, version, token, self._host_of(token), now_ms))
        if body.filter_server_list:
            self._filter_servers[key] = body.filter_server_list
        else:
            self._filter_servers.pop(key, None)
        master = self._brokers[broker.name].broker_addrs.get(MASTER_ID)
        live = None if master is None else self._live.get(broker.cluster, master)
        if broker.id == MASTER_ID or live is None:
            return RegisterBrokerResult()
        return RegisterBrokerResult(ha_server_addr=live.broker.ha_address or None, master_addr=master)

    def _drop(self, gone: list[Live]) -> list[Broker]:
        for live in gone:
            self.unregister(live.broker.cluster, live.broker.name, live.broker.address)
        return [live.broker for live in gone]

    def _forget_name(self, name: str, clusters: Collection[str]) -> None:
        del self._brokers[name]
        for cluster in clusters:
            self._leave_cluster(name, cluster)
        self._offers.drop_name(name)

    def _leave_cluster(self, name: str, cluster: str) -> None:
        names = self._clusters.get(cluster, set())
        names.discard(name)
        if not names:
            self._clusters.pop(cluster, None)

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
