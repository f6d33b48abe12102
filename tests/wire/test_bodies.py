"""Bodies against what Apache's classes wrote for the same values, and against what other clients are known to send."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.wire.bodies import (
    BadBody,
    CheckClient,
    ClientConnection,
    ConsumerConnections,
    ConsumerData,
    ConsumerIds,
    ConsumerStatus,
    GroupForbidden,
    GroupList,
    Heartbeat,
    LockedQueues,
    LockRequest,
    MessageQueue,
    ProducerConnections,
    ProducerData,
    ProducerInfo,
    ProducerTable,
    ResetOffsets,
    ResetOffsetsForC,
    Subscription,
    SubscriptionAnswer,
    TopicConfigs,
    TopicList,
    decode_body,
    encode_body,
)
from skylark.wire.tables import TopicConfig

SUBSCRIPTION = Subscription(
    code_set=[2598919, 2598920],
    sub_string="TagA || TagB",
    sub_version=1700000000000,
    tags_set=["TagA", "TagB"],
    topic="TopicA",
)
SUBSCRIPTION_JSON = (
    '{"classFilterMode":false,"codeSet":[2598919,2598920],"expressionType":"TAG","subString":"TagA || TagB",'
    '"subVersion":1700000000000,"tagsSet":["TagA","TagB"],"topic":"TopicA"}'
)
QUEUE_3, QUEUE_4 = MessageQueue("broker-a", 3, "TopicA"), MessageQueue("broker-a", 4, "TopicA")
QUEUE_3_JSON = '{"brokerName":"broker-a","queueId":3,"topic":"TopicA"}'
QUEUE_4_JSON = '{"brokerName":"broker-a","queueId":4,"topic":"TopicA"}'
CONNECTION = ClientConnection(client_addr="127.0.0.1:5", client_id="c", language="JAVA", version=513)
CONNECTION_JSON = '{"clientAddr":"127.0.0.1:5","clientId":"c","language":"JAVA","version":513}'
CONSUMER = ConsumerData(
    consume_from_where="CONSUME_FROM_LAST_OFFSET",
    consume_type="CONSUME_PASSIVELY",
    group_name="g",
    message_model="CLUSTERING",
    subscription_data_set=[SUBSCRIPTION],
)
CONSUMER_JSON = (
    '{"consumeFromWhere":"CONSUME_FROM_LAST_OFFSET","consumeType":"CONSUME_PASSIVELY","groupName":"g",'
    f'"messageModel":"CLUSTERING","subscriptionDataSet":[{SUBSCRIPTION_JSON}],"unitMode":false}}'
)

WRITTEN_BY_APACHE = [
    (
        Heartbeat(
            client_id="10.0.0.1@77",
            consumer_data_set=[CONSUMER],
            heartbeat_fingerprint=123,
            producer_data_set=[ProducerData(group_name="pg")],
            without_sub=True,
        ),
        f'{{"clientID":"10.0.0.1@77","consumerDataSet":[{CONSUMER_JSON}],"heartbeatFingerprint":123,'
        '"producerDataSet":[{"groupName":"pg"}],"withoutSub":true}',
    ),
    (
        Subscription(topic="%RETRY%g", sub_string="*", sub_version=5),
        '{"classFilterMode":false,"codeSet":[],"expressionType":"TAG","subString":"*","subVersion":5,"tagsSet":[],'
        '"topic":"%RETRY%g"}',
    ),
    (
        CheckClient(client_id="c", group="g", namespace="n", subscription_data=SUBSCRIPTION),
        f'{{"clientId":"c","group":"g","namespace":"n","subscriptionData":{SUBSCRIPTION_JSON}}}',
    ),
    (
        LockRequest(client_id="c", consumer_group="g", mq_set=[QUEUE_3]),
        f'{{"clientId":"c","consumerGroup":"g","mqSet":[{QUEUE_3_JSON}],"onlyThisBroker":false}}',
    ),
    (LockedQueues(lock_ok_mq_set=[QUEUE_3]), f'{{"lockOKMQSet":[{QUEUE_3_JSON}]}}'),
    (LockedQueues(), '{"lockOKMQSet":[]}'),
    (ConsumerIds(consumer_id_list=["a", "b"]), '{"consumerIdList":["a","b"]}'),
    (
        ConsumerConnections(
            connection_set=[CONNECTION],
            consume_from_where="CONSUME_FROM_LAST_OFFSET",
            consume_type="CONSUME_PASSIVELY",
            message_model="CLUSTERING",
            subscription_table={"TopicA": SUBSCRIPTION},
        ),
        f'{{"connectionSet":[{CONNECTION_JSON}],"consumeFromWhere":"CONSUME_FROM_LAST_OFFSET",'
        '"consumeType":"CONSUME_PASSIVELY","messageModel":"CLUSTERING",'
        f'"subscriptionTable":{{"TopicA":{SUBSCRIPTION_JSON}}}}}',
    ),
    (ConsumerConnections(), '{"connectionSet":[],"subscriptionTable":{}}'),
    (ProducerConnections(connection_set=[CONNECTION]), f'{{"connectionSet":[{CONNECTION_JSON}]}}'),
    (
        ProducerTable(
            data={
                "pg": [
                    ProducerInfo(
                        client_id="c",
                        language="JAVA",
                        last_update_timestamp=1700000000000,
                        remote_ip="/127.0.0.1:5",
                        version=513,
                    )
                ]
            }
        ),
        '{"data":{"pg":[{"clientId":"c","language":"JAVA","lastUpdateTimestamp":1700000000000,'
        '"remoteIP":"/127.0.0.1:5","version":513}]}}',
    ),
    (SubscriptionAnswer(group="g", topic="T"), '{"group":"g","topic":"T"}'),
    (
        SubscriptionAnswer(group="g", subscription_data=SUBSCRIPTION, topic="T"),
        f'{{"group":"g","subscriptionData":{SUBSCRIPTION_JSON},"topic":"T"}}',
    ),
    (TopicList(topic_list=["t1", "t2"]), '{"topicList":["t1","t2"]}'),
    (
        TopicList(broker_addr="1.1.1.1:1", topic_list=["t1", "t2"]),
        '{"brokerAddr":"1.1.1.1:1","topicList":["t1","t2"]}',
    ),
    (GroupList(group_list=["g1"]), '{"groupList":["g1"]}'),
    (GroupForbidden(group="g", readable=True, topic="T"), '{"group":"g","readable":true,"topic":"T"}'),
    (
        TopicConfigs(topic_config_list=[TopicConfig(topic_name="T")]),
        '{"topicConfigList":[{"attributes":{},"order":false,"perm":6,"readQueueNums":16,'
        '"topicFilterType":"SINGLE_TAG","topicName":"T","topicSysFlag":0,"writeQueueNums":16}]}',
    ),
    (
        ResetOffsets(offset_table={QUEUE_3: 17, QUEUE_4: 18}),
        f'{{"offsetTable":{{{QUEUE_3_JSON}:17,{QUEUE_4_JSON}:18}}}}',
    ),
    (
        ResetOffsetsForC.of({QUEUE_3: 17}),
        '{"offsetTable":[{"brokerName":"broker-a","offset":17,"queueId":3,"topic":"TopicA"}]}',
    ),
    (
        ConsumerStatus(message_queue_table={QUEUE_3: 17, QUEUE_4: 18}),
        f'{{"consumerTable":{{}},"messageQueueTable":{{{QUEUE_3_JSON}:17,{QUEUE_4_JSON}:18}}}}',
    ),
    (
        ConsumerStatus(consumer_table={"c": {QUEUE_3: 17}}),
        f'{{"consumerTable":{{"c":{{{QUEUE_3_JSON}:17}}}},"messageQueueTable":{{}}}}',
    ),
]


@pytest.mark.parametrize(("body", "text"), WRITTEN_BY_APACHE, ids=lambda value: type(value).__name__)
def test_same_bytes_as_apache(body: msgspec.Struct, text: str) -> None:
    assert encode_body(body).decode() == text
    assert decode_body(type(body), text.encode()) == body


def test_heartbeat_of_the_go_client() -> None:
    # Sets of strings where Java has numbers, an enum in another case, null for an empty list.
    body = (
        b'{"clientID":"go@1","producerDataSet":[{"groupName":"p"}],"consumerDataSet":[{"groupName":"g",'
        b'"consumeType":"CONSUME_PASSIVELY","messageModel":"BroadCasting","consumeFromWhere":"CONSUME_FROM_LAST_OFFSET",'
        b'"subscriptionDataSet":[{"classFilterMode":false,"topic":"T","subString":"TagA","tagsSet":["TagA"],'
        b'"codeSet":["2598919"],"subVersion":1700000000000000000,"expressionType":"TAG"}],"unitMode":false},'
        b'{"groupName":"h","consumeType":"CONSUME_ACTIVELY","messageModel":"Clustering","subscriptionDataSet":null}]}'
    )
    beat = decode_body(Heartbeat, body)
    first, second = beat.consumer_data_set
    assert (first.message_model, second.message_model) == ("BROADCASTING", "CLUSTERING")
    assert first.subscription_data_set[0].code_set == [2598919]
    assert second.subscription_data_set == []
    assert (beat.heartbeat_fingerprint, beat.without_sub) == (0, False)


@pytest.mark.parametrize("kind", [None, "", "TAG"])
def test_no_type_means_tags(kind: str | None) -> None:
    assert Subscription(topic="T", expression_type=kind).is_by_tag
    assert not Subscription(topic="T", expression_type="SQL92").is_by_tag


@given(st.binary(max_size=200))
def test_other_bytes_are_refused_in_one_way(body: bytes) -> None:
    with pytest.raises(BadBody):
        decode_body(Heartbeat, body)


@given(st.dictionaries(st.builds(MessageQueue, st.text(), st.integers(0, 9), st.text()), st.integers(0, 2**63 - 1)))
def test_offsets_by_queue_round_trip(table: dict[MessageQueue, int]) -> None:
    body = ResetOffsets(offset_table=table)
    assert decode_body(ResetOffsets, encode_body(body)) == body
