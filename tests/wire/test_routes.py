"""Bodies about routes: the bytes that Apache's name server 5.5.0 writes, and registrations in both forms."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skylark.wire import routes
from skylark.wire.bodies import BadBody, decode_body, encode_body
from skylark.wire.routes import (
    V3_0_11,
    V5_0_0,
    BrokerData,
    ClusterInfo,
    QueueData,
    RegisterBrokerBody,
    TopicConfigWrapper,
    TopicQueueMappingInfo,
    TopicRouteData,
    decode_register_body,
    encode_register_body,
    encode_standard,
)
from skylark.wire.tables import DataVersion, TopicConfig

# Answers of Apache's name server to GET_ROUTEINFO_BY_TOPIC, from a client of today and from one before 4.9.4.
STANDARD_ROUTE = (
    b'{"brokerDatas":[{"brokerAddrs":{"0":"1.1.1.1:1","1":"1.1.1.1:3"},"brokerName":"b2","cluster":"C2",'
    b'"enableActingMaster":true}],"filterServerTable":{"1.1.1.1:1":["f:1"]},"queueDatas":[{"brokerName":"b2","perm":6,'
    b'"readQueueNums":8,"topicSysFlag":0,"writeQueueNums":9}],"topicQueueMappingByBroker":{"b2":{"bname":"b2",'
    b'"currIdMap":{"0":1,"3":4},"dirty":false,"epoch":5,"scope":"__global__","topic":"B","totalQueues":8}}}'
)
LOOSE_ROUTE = STANDARD_ROUTE.replace(b'"0":', b"0:").replace(b'"1":"', b'1:"').replace(b'"3":', b"3:")
CLUSTER = (
    b'{"brokerAddrTable":{"b3":{"brokerAddrs":{0:"1.1.1.1:5"},"brokerName":"b3","cluster":"C2",'
    b'"enableActingMaster":false}},"clusterAddrTable":{"C2":["b2","b3"]}}'
)
ROUTE = TopicRouteData(
    broker_datas=[
        BrokerData(
            broker_addrs={0: "1.1.1.1:1", 1: "1.1.1.1:3"}, broker_name="b2", cluster="C2", enable_acting_master=True
        )
    ],
    filter_server_table={"1.1.1.1:1": ["f:1"]},
    queue_datas=[QueueData(broker_name="b2", perm=6, read_queue_nums=8, write_queue_nums=9)],
    topic_queue_mapping_by_broker={
        "b2": TopicQueueMappingInfo(bname="b2", curr_id_map={0: 1, 3: 4}, epoch=5, topic="B", total_queues=8)
    },
)

LARGE = b" " * (32 << 10)  # behind a registration, lets it be read as a large one is

names = st.text("abcXYZ09_-%", min_size=1, max_size=12)
counts = st.integers(0, 2**31 - 1)
longs = st.integers(0, 2**63 - 1)
mappings = st.builds(
    TopicQueueMappingInfo,
    bname=names,
    curr_id_map=st.dictionaries(counts, counts, max_size=3),
    epoch=longs,
    topic=names,
    total_queues=counts,
)
registrations = st.builds(
    RegisterBrokerBody,
    filter_server_list=st.lists(names, max_size=2),
    topic_config_serialize_wrapper=st.builds(
        TopicConfigWrapper,
        data_version=st.builds(DataVersion, state_version=longs, timestamp_ms=longs, counter=longs),
        topic_config_table=st.lists(
            st.builds(TopicConfig, topic_name=names, read_queue_nums=counts, write_queue_nums=counts, perm=counts)
        ).map(lambda topics: {topic.topic_name: topic for topic in topics}),
        topic_queue_mapping_info_map=st.lists(mappings, max_size=2).map(lambda infos: {i.topic: i for i in infos}),
    ),
)


def test_a_route_is_written_as_apache_writes_it() -> None:
    assert encode_standard(ROUTE) == STANDARD_ROUTE
    assert encode_body(ROUTE) == LOOSE_ROUTE
    assert decode_body(TopicRouteData, STANDARD_ROUTE) == decode_body(TopicRouteData, LOOSE_ROUTE) == ROUTE


def test_what_is_not_set_is_left_out_and_what_is_set_is_in_its_place() -> None:
    empty = b'{"brokerDatas":[],"filterServerTable":{},"queueDatas":[]}'
    assert encode_standard(TopicRouteData()) == encode_body(TopicRouteData()) == empty
    ordered = msgspec.structs.replace(TopicRouteData(), order_topic_conf="a:4")
    expected = b'{"brokerDatas":[],"filterServerTable":{},"orderTopicConf":"a:4","queueDatas":[]}'
    assert encode_standard(ordered) == encode_body(ordered) == expected


def test_a_cluster_is_written_as_apache_writes_it() -> None:
    broker = BrokerData(broker_addrs={0: "1.1.1.1:5"}, broker_name="b3", cluster="C2")
    info = ClusterInfo(broker_addr_table={"b3": broker}, cluster_addr_table={"C2": ["b2", "b3"]})
    assert encode_body(info) == CLUSTER
    assert decode_body(ClusterInfo, CLUSTER) == info


@given(registrations, st.booleans())
def test_a_registration_comes_back(body: RegisterBrokerBody, compressed: bool) -> None:
    data = encode_register_body(body, compressed=compressed)
    assert decode_register_body(data, compressed=compressed, version=V5_0_0) == body


@given(registrations)
@settings(max_examples=30)
def test_a_large_registration_is_read_item_by_item(body: RegisterBrokerBody) -> None:
    data = encode_register_body(body) + LARGE
    assert decode_register_body(data, compressed=False, version=V5_0_0) == body
    topics = body.topic_config_serialize_wrapper
    alone = decode_register_body(encode_body(topics) + LARGE, compressed=False, version=V3_0_11 - 1)
    assert alone == RegisterBrokerBody(topic_config_serialize_wrapper=topics)


def test_of_a_large_registration_nothing_is_kept_that_routes_do_not_tell() -> None:
    data = (
        b'{"filterServerList":null,"other":[[]],"topicConfigSerializeWrapper":{"topicQueueMappingDetailMap":{"t":[{}]},'
        b'"topicConfigTable":{"t":{"attributes":{"a":"b"},"topicName":"t","order":true,"perm":"4","topicSysFlag":null,'
        b'"topicFilterType":"SINGLE_TAG"}}}}'
    )
    body = decode_register_body(data + LARGE, compressed=False, version=V5_0_0)
    assert body == RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigWrapper(topic_config_table={"t": TopicConfig("t", perm=4)})
    )


INFOS = b"topicQueueMappingInfoMap"


def wrapped(table: bytes, name: bytes = b"topicConfigTable") -> bytes:
    return b'{"topicConfigSerializeWrapper":{"' + name + b'":{' + table + b"}}}" + LARGE


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (wrapped(b",".join(b'"%d":{}' % number for number in range(101))), "more than 100 topics"),
        (wrapped(b'"t":{"attributes":{"a":"' + b"x" * 300_000 + b'"}}'), "more than 262144 bytes"),
        (wrapped(b"\"t\":{'topicName':'t'}"), "not standard JSON"),
        (wrapped(b'"t":{"perm":"x"}'), "perm"),
        (wrapped(b'"s":{"currIdMap":{0:1}},"t":{"currIdMap":{0:0,1:1}}', INFOS), "more than 4 queues"),
        (b"{" + LARGE, "a name is missing"),
    ],
)
def test_a_large_registration_is_refused_for_what_takes_too_long_or_too_much(
    data: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_TOPICS", 100)
    monkeypatch.setattr(routes, "MAX_LOGICAL_QUEUES", 4)
    with pytest.raises(BadBody, match=reason):
        decode_register_body(data, compressed=False, version=V5_0_0)


@given(registrations)
def test_a_compressed_registration_is_recognised_without_being_announced(body: RegisterBrokerBody) -> None:
    data = encode_register_body(body, compressed=True)
    assert decode_register_body(data, compressed=False, version=V5_0_0) == body


def test_brokers_before_5_0_0_send_no_mappings() -> None:
    body = RegisterBrokerBody()
    inflated = zlib.decompress(encode_register_body(body, compressed=True))
    data = zlib.compress(inflated[:-4])
    assert decode_register_body(data, compressed=True, version=V5_0_0 - 1) == body
    with pytest.raises(BadBody):
        decode_register_body(data, compressed=True, version=V5_0_0)


def test_brokers_before_3_0_11_send_their_topics_alone() -> None:
    topics = TopicConfigWrapper(topic_config_table={"t": TopicConfig(topic_name="t")})
    body = decode_register_body(encode_body(topics), compressed=False, version=V3_0_11 - 1)
    assert body == RegisterBrokerBody(topic_config_serialize_wrapper=topics)


def test_a_registration_without_a_body_has_no_topics() -> None:
    assert decode_register_body(b"", compressed=False, version=V5_0_0) == RegisterBrokerBody()


@given(st.binary(max_size=60), st.booleans(), st.booleans())
def test_any_bytes_are_a_registration_or_refused(data: bytes, deflated: bool, compressed: bool) -> None:
    try:
        body = decode_register_body(zlib.compress(data) if deflated else data, compressed=compressed, version=V5_0_0)
    except BadBody:
        return
    assert isinstance(body, RegisterBrokerBody)


@given(registrations, st.data())
def test_a_damaged_registration_is_a_registration_or_refused(body: RegisterBrokerBody, data: st.DataObject) -> None:
    inflated = bytearray(zlib.decompress(encode_register_body(body, compressed=True)))
    inflated[data.draw(st.integers(0, len(inflated) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(inflated[: data.draw(st.integers(0, len(inflated)))])
    try:
        decode_register_body(zlib.compress(cut), compressed=True, version=V5_0_0)
    except BadBody:
        return


def test_inflating_stops_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_INFLATED_BYTES", 1 << 20)
    with pytest.raises(BadBody, match="larger than 1048576"):
        decode_register_body(zlib.compress(bytes(1 << 24), 9), compressed=True, version=V5_0_0)
