"""The route tables: what each request does to them, and invariants that no sequence of requests may break."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from skylark.nameserver import routes as limits
from skylark.nameserver.living import DEFAULT_TIMEOUT_MS, Broker
from skylark.nameserver.offers import TOPIC_BYTES, offer_bytes
from skylark.nameserver.routes import UNIT_FLAG, NoRoom, Routes
from skylark.wire.routes import (
    BrokerData,
    QueueData,
    RegisterBrokerBody,
    RegisterBrokerResult,
    TopicConfigWrapper,
    TopicQueueMappingInfo,
)
from skylark.wire.tables import DataVersion, TopicConfig

MASTER = Broker(cluster="c", name="a", id=0, address="h:1", ha_address="h:2", acting_master=False)
SLAVE = msgspec.structs.replace(MASTER, id=1, address="h:3", ha_address="h:4")
OTHER = Broker(cluster="c", name="b", id=0, address="h:5", acting_master=False)
CONNECTION, ANOTHER = object(), object()


def body(*topics: str, counter: int = 1, state: int = 0, perm: int = 6, **more: Any) -> RegisterBrokerBody:
    table = {topic: TopicConfig(topic_name=topic, read_queue_nums=4, write_queue_nums=4, perm=perm) for topic in topics}
    wrapper = TopicConfigWrapper(
        topic_config_table=table, data_version=DataVersion(counter=counter, state_version=state), **more
    )
    return RegisterBrokerBody(topic_config_serialize_wrapper=wrapper)


def with_brokers(*brokers: Broker, topics: RegisterBrokerBody | None = None) -> Routes:
    routes = Routes()
    for broker in brokers:
        assert routes.register(broker, topics or body("t1", "t2"), CONNECTION, 0) is not None
    return routes


def addresses(routes: Routes, topic: str) -> dict[str, dict[int, str]]:
    route = routes.route(topic)
    return {} if route is None else {group.broker_name: group.broker_addrs for group in route.broker_datas}


def perms(routes: Routes, topic: str) -> dict[str, int]:
    route = routes.route(topic)
    return {} if route is None else {queue.broker_name: queue.perm for queue in route.queue_datas}


def test_a_registered_broker_has_routes() -> None:
    route = with_brokers(MASTER).route("t1")
    assert route is not None
    assert route.broker_datas == [BrokerData(broker_addrs={0: "h:1"}, broker_name="a", cluster="c")]
    assert route.queue_datas == [QueueData(broker_name="a", perm=6, read_queue_nums=4, write_queue_nums=4)]
    assert with_brokers(MASTER).route("t3") is None


def test_a_slave_is_told_of_its_master() -> None:
    routes = with_brokers(MASTER)
    assert routes.register(SLAVE, body("t1", "t2"), ANOTHER, 0) == RegisterBrokerResult("h:2", "h:1")
    assert addresses(routes, "t1") == {"a": {0: "h:1", 1: "h:3"}}


def test_a_master_without_replication_has_no_address_for_it() -> None:
    routes = with_brokers(msgspec.structs.replace(MASTER, ha_address=""))
    assert routes.register(SLAVE, body("t1", "t2"), ANOTHER, 0) == RegisterBrokerResult(None, "h:1")


def test_a_slave_alone_has_no_master_and_its_topics_can_be_read() -> None:
    routes = Routes()
    assert routes.register(SLAVE, body("t1", "t2"), CONNECTION, 0) == RegisterBrokerResult()
    assert addresses(routes, "t1") == {"a": {1: "h:3"}}


def test_a_slave_of_a_version_without_acting_masters_brings_no_topics() -> None:
    routes = with_brokers(msgspec.structs.replace(SLAVE, acting_master=None))
    assert routes.route("t1") is None


def test_a_slave_beside_its_master_brings_no_topics() -> None:
    routes = with_brokers(MASTER)
    routes.register(SLAVE, body("t1", "t9"), ANOTHER, 0)
    assert routes.route("t9") is None


def test_an_acting_master_can_only_be_read() -> None:
    master, slave = (msgspec.structs.replace(broker, acting_master=True) for broker in (MASTER, SLAVE))
    assert perms(with_brokers(slave), "t1") == {"a": 4}
    routes = with_brokers(master, slave)
    assert perms(routes, "t1") == {"a": 6}
    routes.unregister("c", "a", "h:1")
    assert perms(routes, "t1") == {"a": 4}
    assert addresses(routes, "t1") == {"a": {1: "h:3"}}


def test_only_the_end_of_a_master_makes_its_topics_read_only() -> None:
    master, first = (msgspec.structs.replace(broker, acting_master=True) for broker in (MASTER, SLAVE))
    routes = with_brokers(master, first, *(msgspec.structs.replace(first, id=i, address=f"h:{i}") for i in (20, 21)))
    routes.unregister("c", "a", "h:1")
    assert perms(routes, "t1") == {"a": 4}
    routes.add_write_perm("a")
    looks: list[int] = []
    change = Routes.wipe_write_perm
    with pytest.MonkeyPatch.context() as patch:  # a look at every topic for each of many slaves takes long
        patch.setattr(Routes, "wipe_write_perm", lambda self, name: looks.append(1) or change(self, name))
        routes.closed(CONNECTION)
    assert looks == []


def test_a_slave_that_becomes_master_leaves_its_old_id() -> None:
    routes = with_brokers(MASTER, SLAVE)
    routes.unregister("c", "a", "h:1")
    routes.register(msgspec.structs.replace(SLAVE, id=0), body("t1", "t2"), CONNECTION, 0)
    assert addresses(routes, "t1") == {"a": {0: "h:3"}}


def test_a_master_with_an_older_state_does_not_take_the_name_back() -> None:
    routes = with_brokers(MASTER, topics=body("t1", "t2", state=7))
    usurper = msgspec.structs.replace(MASTER, address="h:9")
    assert routes.register(usurper, body("t1", "t2", state=6), ANOTHER, 0) == RegisterBrokerResult()
    assert addresses(routes, "t1") == {"a": {0: "h:1"}}
    assert routes.version("c", "h:9") is None
    routes.register(usurper, body("t1", "t2", state=7), ANOTHER, 0)
    assert addresses(routes, "t1") == {"a": {0: "h:9"}}


def test_the_end_of_an_address_that_was_replaced_does_not_end_its_successor() -> None:
    routes = with_brokers(MASTER)
    routes.register(msgspec.structs.replace(MASTER, address="h:9"), body("t1", "t2"), ANOTHER, 0)
    routes.closed(CONNECTION)
    assert addresses(routes, "t1") == {"a": {0: "h:9"}}


def test_an_address_that_gets_another_name_leaves_the_old_one() -> None:
    routes = with_brokers(MASTER, SLAVE)
    renamed = msgspec.structs.replace(MASTER, name="b")
    routes.register(renamed, body("t2", "t3"), CONNECTION, 0)
    assert addresses(routes, "t2") == {"a": {1: "h:3"}, "b": {0: "h:1"}}
    routes.register(msgspec.structs.replace(SLAVE, name="b"), body("t2", "t3"), CONNECTION, 0)
    assert set(routes.cluster_info().broker_addr_table) == {"b"}
    assert addresses(routes, "t1") == {}
    # The old process says goodbye late: that is not the end of the new one.
    routes.unregister("c", "a", "h:1")
    assert addresses(routes, "t3") == {"b": {0: "h:1", 1: "h:3"}}
    routes.closed(CONNECTION)
    assert routes.cluster_info().broker_addr_table == {}


def test_an_address_that_is_refused_as_another_broker_leaves_the_routes() -> None:
    routes = with_brokers(MASTER, topics=body("t1", "t2", state=7))
    for other in (OTHER, SLAVE):
        routes.register(other, body("t1", "t2", state=7), CONNECTION, 0)
        usurper = msgspec.structs.replace(MASTER, address=other.address)
        assert routes.register(usurper, body("t1", "t2", state=6), ANOTHER, 0) == RegisterBrokerResult()
        assert addresses(routes, "t1") == {"a": {0: "h:1"}}


def test_a_broker_of_another_cluster_does_not_say_goodbye_for_this_one() -> None:
    routes = with_brokers(MASTER)
    routes.unregister("d", "a", "h:1")
    assert addresses(routes, "t1") == {"a": {0: "h:1"}}


def test_a_host_takes_half_of_the_room_that_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BYTES", 8 * (TOPIC_BYTES + 2))
    routes = with_brokers(MASTER)
    with pytest.raises(NoRoom, match="half of what others leave"):
        routes.register(OTHER, body("t1", "t2", "t3"), CONNECTION, 0)
    with pytest.raises(NoRoom, match="half of what others leave"):
        routes.register(MASTER, body("t1", "t2", "t3", "t4", "t5", counter=2), CONNECTION, 60_000)
    assert routes.register_topic("t3", [QueueData(broker_name="a")], CONNECTION)
    assert routes.register_topic("t4", [QueueData(broker_name="a")], CONNECTION)
    with pytest.raises(NoRoom, match="half of what others leave"):
        routes.register_topic("t5", [QueueData(broker_name="a")], CONNECTION)
    assert routes.topics() == ["t1", "t2", "t3", "t4"]
    # It has lost nothing, lives on as long as it asks for more, and can register what it has.
    assert routes.expire(DEFAULT_TIMEOUT_MS + 60_000) == []
    assert routes.register(MASTER, body("t1", "t2"), CONNECTION, 60_000) is not None
    assert addresses(routes, "t1") == {"a": {0: "h:1"}}
    # Half of the rest is for the next one, and so on.
    routes.register(OTHER, body("t1", "t2"), ANOTHER, 0)
    assert not routes.register_topic("t3", [], ANOTHER)
    with pytest.raises(NoRoom, match="half of what others leave"):
        routes.register_topic("t3", [QueueData(broker_name=OTHER.name)], ANOTHER)
    third = msgspec.structs.replace(OTHER, name="d", address="h:6")
    with pytest.raises(NoRoom, match="half of what others leave"):
        routes.register(third, body("t1", "t2"), object(), 0)
    routes.closed(ANOTHER)
    routes.register(third, body("t1", "t2"), object(), 0)


def test_a_host_that_fills_all_it_can_leaves_room_for_brokers_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BROKERS", 64)
    routes = Routes(lambda token: str(token).partition("-")[0])

    def register(number: int, host: str) -> None:
        broker = msgspec.structs.replace(OTHER, name=f"{host}{number}", address=f"{host}:{number}")
        routes.register(broker, body("t1", "t2"), f"{host}-{number}", 0)

    for host, most in (("greedy", 32), ("second", 16), ("third", 8)):
        for number in range(most):
            register(number, host)
        with pytest.raises(NoRoom, match="half of what others leave"):
            register(most, host)
    register(0, "honest")
    register(7, "greedy")  # who is there already can always register again


def test_topics_that_another_host_registers_do_not_count_for_the_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BYTES", 16 * (TOPIC_BYTES + 2))
    routes = with_brokers(MASTER)
    for number in range(7):
        assert routes.register_topic(f"x{number}", [QueueData(broker_name="a")], ANOTHER)
    with pytest.raises(NoRoom, match="half of what others leave"):
        routes.register_topic("x7", [QueueData(broker_name="a")], ANOTHER)
    routes.register(MASTER, body("t1", "t2", "t3", "t4", counter=2), CONNECTION, 0)
    assert routes.route("t4") is not None


def test_a_cluster_that_a_broker_named_goes_with_it() -> None:
    routes = with_brokers(MASTER)
    for number in range(3):
        routes.register(
            msgspec.structs.replace(MASTER, cluster=f"x{number}", id=1, address="h:7"), body("t1", "t2"), CONNECTION, 0
        )
        routes.unregister(f"x{number}", MASTER.name, "h:7")
    assert list(routes.cluster_info().cluster_addr_table) == [MASTER.cluster]


@pytest.mark.parametrize(("letter", "count"), [("t", 1), ("t", 255), ("\u00e9", 100), ("\u4e2d", 100)])
def test_what_topics_take_is_not_more_than_what_they_count_for(letter: str, count: int) -> None:
    routes = Routes()
    tracemalloc.start()
    try:
        for number in range(4):
            broker = msgspec.structs.replace(MASTER, name=f"n{number}", address=f"h:{number}")
            names = [f"{letter * count}{number % 2}-{topic}" for topic in range(500)]
            mapping = TopicQueueMappingInfo(topic=names[0], curr_id_map={each: each for each in range(1000, 1100)})
            routes.register(broker, body(*names, topic_queue_mapping_info_map={names[0]: mapping}), CONNECTION, 0)
        del names, mapping
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken <= routes._offers.size_bytes


def test_brokers_are_counted_and_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BROKERS", 4)
    third, fourth = (msgspec.structs.replace(OTHER, name=name, address=name) for name in ("x", "y"))
    routes = with_brokers(MASTER, OTHER, MASTER)
    with pytest.raises(NoRoom, match="this host have their half of what others leave of 4 places"):
        routes.register(third, body("t1", "t2"), CONNECTION, 0)
    routes.register(third, body("t1", "t2"), ANOTHER, 0)
    routes.register(fourth, body("t1", "t2"), object(), 0)
    with pytest.raises(NoRoom, match="4 brokers are registered already"):
        routes.register(msgspec.structs.replace(OTHER, name="z", address="z"), body("t1", "t2"), object(), 0)
    routes.register(third, body("t1", "t2"), ANOTHER, 0)
    heavy = body("t1", "t2")
    heavy.filter_server_list = ["f:1"] * 1000
    for broker, told in (
        (MASTER, heavy),
        (msgspec.structs.replace(MASTER, ha_address="x" * 20_000), body("t1", "t2")),
    ):
        with pytest.raises(NoRoom, match="names and filter servers"):
            routes.register(broker, told, CONNECTION, 0)


def test_a_mapping_that_nothing_would_take_out_again_is_passed_over() -> None:
    foreign = TopicQueueMappingInfo(bname="b", topic="t1", total_queues=1, curr_id_map={0: 0})
    nowhere = TopicQueueMappingInfo(bname="a", topic="t9", total_queues=1, curr_id_map={0: 0})
    routes = with_brokers(MASTER, topics=body("t1", "t2", topic_queue_mapping_info_map={"t1": foreign, "t9": nowhere}))
    route = routes.route("t1")
    assert route is not None
    assert route.topic_queue_mapping_by_broker is None
    assert routes.route("t9") is None


def test_one_topic_alone_is_refused_before_the_broker_is_known() -> None:
    routes = Routes()
    assert routes.register(MASTER, body("t1"), CONNECTION, 0) is None
    assert routes.cluster_info().cluster_addr_table == {}
    routes = with_brokers(MASTER)
    assert routes.register(MASTER, body("t3", counter=2), CONNECTION, 0) is not None
    assert {"t1", "t2", "t3"} == set(routes.topics())


def test_topics_that_are_no_longer_named_stay_unless_told_otherwise() -> None:
    routes = with_brokers(MASTER, OTHER)
    routes.register(MASTER, body("t2", "t3", counter=2), CONNECTION, 0)
    assert set(addresses(routes, "t1")) == {"a", "b"}
    routes.register(MASTER, body("t2", "t3", counter=3), CONNECTION, 0, drop_all_but={"t2", "t3"})
    assert set(addresses(routes, "t1")) == {"b"}


def test_wiped_permissions_last_until_the_brokers_topics_change() -> None:
    routes = with_brokers(MASTER, OTHER, topics=body("t1", "t2", perm=7))
    assert routes.wipe_write_perm("a") == 2
    assert perms(routes, "t1") == {"a": 5, "b": 7}
    routes.register(MASTER, body("t1", "t2", perm=7), CONNECTION, 0)
    assert perms(routes, "t1") == {"a": 5, "b": 7}
    assert routes.add_write_perm("a") == 2
    assert perms(routes, "t1") == {"a": 6, "b": 7}
    routes.register(MASTER, body("t1", "t2", perm=7, counter=2), CONNECTION, 0)
    assert perms(routes, "t1") == {"a": 7, "b": 7}
    assert routes.wipe_write_perm("nobody") == routes.add_write_perm("nobody") == 0


def test_a_broker_is_dropped_after_its_silence() -> None:
    routes = with_brokers(MASTER, msgspec.structs.replace(OTHER, timeout_ms=10_000))
    assert routes.expire(10_000) == []
    assert [broker.name for broker, _ in routes.expire(10_001)] == ["b"]
    routes.heartbeat("c", "h:1", 5_000)
    assert routes.expire(DEFAULT_TIMEOUT_MS + 5_000) == []
    assert routes.expire(DEFAULT_TIMEOUT_MS + 5_001) == [(MASTER, CONNECTION)]
    assert routes.topics() == []
    assert routes.cluster_info().broker_addr_table == {}
    routes.heartbeat("c", "h:1", 0)  # of a broker that is unknown: nothing happens


def test_a_broker_is_dropped_with_its_last_connection() -> None:
    routes = with_brokers(MASTER, OTHER)
    routes.register(MASTER, body("t1", "t2"), ANOTHER, 0)
    assert routes.closed(CONNECTION) == [OTHER]
    assert set(addresses(routes, "t1")) == {"a"}
    assert routes.closed(ANOTHER) == [MASTER]
    assert routes.route("t1") is None


def test_a_version_is_known_until_the_broker_goes() -> None:
    routes = with_brokers(MASTER)
    assert routes.version("c", "h:1") == DataVersion(counter=1)
    assert routes.version("c", "h:7") is None
    routes.unregister("c", "a", "h:1")
    assert routes.version("c", "h:1") is None


def test_single_topics_are_added_and_deleted() -> None:
    routes = with_brokers(MASTER, OTHER)
    assert routes.register_topic(
        "t9", [QueueData(broker_name="a", perm=6), QueueData(broker_name="b", perm=6)], CONNECTION
    )
    assert not routes.register_topic("t8", [QueueData(broker_name="a"), QueueData(broker_name="nobody")], CONNECTION)
    assert not routes.register_topic("t8", [], CONNECTION)
    assert routes.route("t8") is None
    assert set(addresses(routes, "t9")) == {"a", "b"}
    routes.delete_topic("t9", "nowhere")
    assert set(addresses(routes, "t9")) == {"a", "b"}
    routes.delete_topic("t9", "c")
    assert routes.route("t9") is None
    routes.delete_topic("t1")
    assert routes.topics() == ["t2"]


def test_filter_servers_and_mappings_are_part_of_the_route() -> None:
    mapping = TopicQueueMappingInfo(bname="a", topic="t1", total_queues=2, curr_id_map={0: 0})
    topics = body("t1", "t2", topic_queue_mapping_info_map={"t1": mapping})
    topics.filter_server_list = ["f:1"]
    routes = with_brokers(MASTER, topics=topics)
    route = routes.route("t1")
    assert route is not None
    assert route.filter_server_table == {"h:1": ["f:1"]}
    assert route.topic_queue_mapping_by_broker == {"a": mapping}
    assert [routes.count_offers(topic) for topic in ("t1", "t2", "t3")] == [2, 1, 0]  # logical queues count
    routes.register(MASTER, body("t1", "t2"), CONNECTION, 0)
    route = routes.route("t1")
    assert route is not None
    assert route.filter_server_table == {}


def test_lists_of_topics() -> None:
    routes = with_brokers(MASTER, msgspec.structs.replace(OTHER, cluster="d"), topics=body("t1", "t2"))
    routes.register_topic("u", [QueueData(broker_name="b", topic_sys_flag=UNIT_FLAG)], CONNECTION)
    assert sorted(routes.topics_of_cluster("c")) == ["t1", "t2"]
    assert sorted(routes.topics_of_cluster("d")) == ["t1", "t2", "u"]
    assert routes.topics_of_cluster("e") == []
    assert routes.topics_by_flag([*routes.topics(), "gone"], lambda flag: flag == UNIT_FLAG) == ["u"]
    system = routes.system_topics()
    assert (system.topic_list, system.broker_addr) == (["a", "b", "c", "d"], "h:1")
    assert routes.members("c", "a").broker_addrs == {0: "h:1"}
    assert routes.members("c", "nobody").broker_addrs == {}


NAMES = st.sampled_from("ab")
TOPICS = st.sampled_from(["t1", "t2", "t3"])
TOKENS = st.integers(0, 2)
brokers = st.builds(
    Broker,
    cluster=st.sampled_from("cd"),
    name=NAMES,
    id=st.integers(0, 2),
    address=st.sampled_from(["h:1", "h:2", "h:3"]),
    timeout_ms=st.none() | st.integers(1, 20),
    acting_master=st.none() | st.booleans(),
)


class Tables(RuleBasedStateMachine):
    """Any requests in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.routes = Routes()
        self.tokens = [object() for _ in range(3)]
        self.now_ms = 0

    @rule(
        broker=brokers,
        topics=st.sets(TOPICS),
        counter=st.integers(0, 1),
        state=st.integers(0, 1),
        token=TOKENS,
        drop=st.booleans(),
        mapped=st.dictionaries(TOPICS, st.integers(0, 3)),
    )
    def register(
        self,
        broker: Broker,
        topics: set[str],
        counter: int,
        state: int,
        token: int,
        drop: bool,
        mapped: dict[str, int],
    ) -> None:
        infos = {t: TopicQueueMappingInfo(topic=t, curr_id_map=dict.fromkeys(range(n), 0)) for t, n in mapped.items()}
        told = body(*sorted(topics), counter=counter, state=state, topic_queue_mapping_info_map=infos)
        known = self.routes.members("", broker.name).broker_addrs
        kept = topics if drop else None
        result = self.routes.register(broker, told, self.tokens[token], self.now_ms, drop_all_but=kept)
        now = self.routes.members("", broker.name).broker_addrs
        if result is None:
            assert now == known
        elif self.routes.version(broker.cluster, broker.address) is not None:
            assert now[broker.id] == broker.address
            assert list(now.values()).count(broker.address) == 1

    @rule(broker=brokers)
    def unregister(self, broker: Broker) -> None:
        live = self.routes._live.get(broker.cluster, broker.address)
        self.routes.unregister(broker.cluster, broker.name, broker.address)
        if live is not None and live.broker.name == broker.name:
            assert broker.address not in self.routes.members("", broker.name).broker_addrs.values()

    @rule(token=TOKENS)
    def close(self, token: int) -> None:
        for broker in self.routes.closed(self.tokens[token]):
            assert self.routes.version(broker.cluster, broker.address) is None
        assert self.routes.closed(self.tokens[token]) == []

    @rule(passed_ms=st.integers(0, 30))
    def expire(self, passed_ms: int) -> None:
        self.now_ms += passed_ms
        self.routes.expire(self.now_ms)
        assert self.routes.expire(self.now_ms) == []

    @rule(topic=TOPICS, name=NAMES, token=TOKENS)
    def register_topic(self, topic: str, name: str, token: int) -> None:
        self.routes.register_topic(topic, [QueueData(broker_name=name, perm=6)], self.tokens[token])

    @rule(topic=TOPICS, cluster=st.none() | st.sampled_from("cd"))
    def delete_topic(self, topic: str, cluster: str | None) -> None:
        self.routes.delete_topic(topic, cluster)
        assert cluster is not None or self.routes.route(topic) is None

    @rule(name=NAMES)
    def wipe(self, name: str) -> None:
        self.routes.wipe_write_perm(name)
        assert all(perms(self.routes, topic).get(name, 0) & 2 == 0 for topic in self.routes.topics())

    @invariant()
    def every_name_has_addresses_and_a_cluster(self) -> None:
        info = self.routes.cluster_info()
        assert all(group.broker_addrs for group in info.broker_addr_table.values())
        assert all(info.cluster_addr_table.values())
        assert {name for names in info.cluster_addr_table.values() for name in names} == set(info.broker_addr_table)
        living = {(live.broker.cluster, live.broker.name) for live in self.routes._live.all()}
        assert living.issuperset((c, name) for c, names in info.cluster_addr_table.items() for name in names)

    @invariant()
    def every_broker_is_counted_for_its_host(self) -> None:
        hosts = [live.host for live in self.routes._live.all()]
        assert [self.routes._live.count(token) for token in self.tokens] == [hosts.count(t) for t in self.tokens]
        assert sum(len(self.routes._live.on(token)) for token in self.tokens) == len(hosts) == len(self.routes._live)

    @invariant()
    def every_address_is_that_of_a_broker_that_lives(self) -> None:
        living = {(live.broker.name, live.broker.address) for live in self.routes._live.all()}
        for name, group in self.routes.cluster_info().broker_addr_table.items():
            assert living.issuperset((name, address) for address in group.broker_addrs.values())

    @invariant()
    def what_is_offered_is_counted(self) -> None:
        counted = 0
        for topic in self.routes.topics():
            route = self.routes.route(topic)
            assert route is not None
            mappings = route.topic_queue_mapping_by_broker or {}
            for queue in route.queue_datas:
                counted += offer_bytes(topic, mappings.get(queue.broker_name))
            assert set(mappings) <= {queue.broker_name for queue in route.queue_datas}
        offers = self.routes._offers
        assert offers.size_bytes == counted
        assert sum(map(offers.bytes_of, self.tokens)) == counted

    @invariant()
    def every_topic_has_queues_of_known_brokers(self) -> None:
        for topic in self.routes.topics():
            route = self.routes.route(topic)
            assert route is not None
            names = [queue.broker_name for queue in route.queue_datas]
            assert names
            assert names == [group.broker_name for group in route.broker_datas]


TestTables = Tables.TestCase
