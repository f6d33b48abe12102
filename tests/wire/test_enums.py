"""Enums in JSON bodies: by name in any case, and by number, as Apache's fastjson reads them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.wire import enums, fastjson
from skylark.wire.bodies import BadBody, ConsumerConnections, ConsumerData, Heartbeat, TopicConfigs, decode_body
from skylark.wire.enums import JavaEnum
from skylark.wire.pop import QueryAssignment, QueueAssignment, SetMessageRequestMode
from skylark.wire.routes import RegisterBrokerBody, decode_register_body
from skylark.wire.tables import GroupRetryPolicy, SubscriptionGroupConfig, TopicConfig

EVERY = [each for each in vars(enums).values() if isinstance(each, JavaEnum)]
QUEUE = {"brokerName": "a", "queueId": 0, "topic": "t"}

# A body, the name of the field in JSON and in the struct, what is written for it, and the name that it has then.
FIELDS: list[tuple[type[msgspec.Struct], dict[str, Any], str, str, list[str]]] = [
    (ConsumerData, {"groupName": "g"}, "consumeType", "consume_type", ["CONSUME_ACTIVELY", "CONSUME_PASSIVELY"]),
    (ConsumerData, {"groupName": "g"}, "messageModel", "message_model", ["BROADCASTING", "CLUSTERING"]),
    (
        ConsumerData,
        {"groupName": "g"},
        "consumeFromWhere",
        "consume_from_where",
        [
            "CONSUME_FROM_LAST_OFFSET",
            "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST",
            "CONSUME_FROM_MIN_OFFSET",
            "CONSUME_FROM_MAX_OFFSET",
            "CONSUME_FROM_FIRST_OFFSET",
            "CONSUME_FROM_TIMESTAMP",
        ],
    ),
    (ConsumerConnections, {}, "messageModel", "message_model", ["BROADCASTING", "CLUSTERING"]),
    (TopicConfig, {}, "topicFilterType", "topic_filter_type", ["SINGLE_TAG", "MULTI_TAG"]),
    (GroupRetryPolicy, {}, "type", "type", ["EXPONENTIAL", "CUSTOMIZED"]),
    (QueryAssignment, {}, "messageModel", "message_model", ["BROADCASTING", "CLUSTERING"]),
    (SetMessageRequestMode, {}, "mode", "mode", ["PULL", "POP"]),
    (QueueAssignment, {"messageQueue": QUEUE}, "mode", "mode", ["PULL", "POP"]),
]


@pytest.mark.parametrize(("kind", "rest", "field", "name", "constants"), FIELDS)
def test_a_constant_is_read_by_name_and_by_number_and_written_by_name(
    kind: type[msgspec.Struct], rest: dict[str, Any], field: str, name: str, constants: list[str]
) -> None:
    for number, constant in enumerate(constants):
        spellings = (
            constant,
            constant.lower(),
            constant.title(),
            *(constant.replace("_", by) for by in ("", "-", " ")),
        )
        for written in (*spellings, number, str(number), float(number)):
            read = decode_body(kind, fastjson.dumps(rest | {field: written}))
            assert getattr(read, name) == constant, written
            assert fastjson.loads(fastjson.dumps(read))[field] == constant


@pytest.mark.parametrize(("kind", "rest", "field", "name", "constants"), FIELDS)
def test_an_unknown_number_makes_a_body_bad_and_the_field_is_named(
    kind: type[msgspec.Struct], rest: dict[str, Any], field: str, name: str, constants: list[str]
) -> None:
    for number in (99, -1, 2**31 - 1, 2**31, 2**63):
        with pytest.raises(BadBody, match=field):
            decode_body(kind, fastjson.dumps(rest | {field: number}))


def test_an_unknown_name_counts_as_none_given() -> None:
    data = decode_body(ConsumerData, b'{"groupName":"g","consumeType":"x","messageModel":"","consumeFromWhere":null}')
    assert data == ConsumerData(group_name="g")
    assert decode_body(GroupRetryPolicy, b'{"type":"x"}').type == "CUSTOMIZED"


def test_an_unknown_name_that_somebody_sets_stays_for_the_complaint() -> None:
    assert decode_body(SetMessageRequestMode, b'{"mode":"x"}').mode == "x"
    assert decode_body(TopicConfig, b'{"topicFilterType":"x"}').topic_filter_type == "x"


def test_the_heartbeat_of_the_cpp_client() -> None:
    beat = decode_body(
        Heartbeat,
        b'{"clientID":"10.0.0.1@77","consumerDataSet":[{"consumeFromWhere":0,"consumeType":1,"groupName":"g",'
        b'"messageModel":1,"subscriptionDataSet":[{"codeSet":["42"],"subString":"a","subVersion":"1700000000000",'
        b'"tagsSet":["a"],"topic":"t"}]}],"producerDataSet":[{"groupName":"p"}]}\n',
    )
    (data,) = beat.consumer_data_set
    assert (data.consume_from_where, data.consume_type, data.message_model) == (
        "CONSUME_FROM_LAST_OFFSET",
        "CONSUME_PASSIVELY",
        "CLUSTERING",
    )


def test_enums_deep_inside_of_a_body() -> None:
    topics = b'{"topicConfigList":[{"topicName":"t","topicFilterType":1}]}'
    assert decode_body(TopicConfigs, topics).topic_config_list[0].topic_filter_type == "MULTI_TAG"
    group = decode_body(SubscriptionGroupConfig, b'{"groupName":"g","groupRetryPolicy":{"type":0}}')
    assert group.group_retry_policy.type == "EXPONENTIAL"
    table = b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"t":{"topicName":"t","topicFilterType":1}}}}'
    body: RegisterBrokerBody = decode_register_body(table, compressed=False, version=500)
    assert body.topic_config_serialize_wrapper.topic_config_table["t"].topic_filter_type == "MULTI_TAG"


@given(st.sampled_from(EVERY), st.text() | st.integers() | st.none())
def test_whatever_is_read_is_a_constant_or_none_or_refused(kind: JavaEnum, value: str | int | None) -> None:
    try:
        name = kind.read(value)
    except ValueError:
        return
    assert name is None or kind.read(name) == name
