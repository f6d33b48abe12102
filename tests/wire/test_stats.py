"""The bodies of statistics, byte for byte as Apache RocketMQ 5.5.0 writes them."""

from __future__ import annotations

from typing import Any

import pytest

from skylark.wire import fastjson
from skylark.wire.bodies import MessageQueue, Subscription
from skylark.wire.stats import (
    BrokerConsumeStats,
    BrokerStatsData,
    ConsumeOffset,
    ConsumeQueue,
    ConsumeQueueEntry,
    ConsumeStats,
    ConsumeTimeSpans,
    CorrectionOffsets,
    KeyValues,
    QueueTimeSpan,
    StatsItem,
    TopicOffset,
    TopicStats,
)

Q0, Q1 = MessageQueue("broker-a", 0, "T"), MessageQueue("broker-a", 1, "T")

CONSUME_STATS = ConsumeStats(
    offset_table={
        Q0: ConsumeOffset(broker_offset=9, consumer_offset=4, pull_offset=6, last_timestamp=1_700_000_000_000)
    }
)

# The right-hand sides were printed by `encode()` of Apache's classes.
BODIES = [
    (
        TopicStats(
            offset_table={
                Q1: TopicOffset(),
                Q0: TopicOffset(min_offset=1, max_offset=5, last_update_timestamp=1_700_000_000_000),
            },
            topic_put_tps=1.5,
        ),
        '{"offsetTable":{{"brokerName":"broker-a","queueId":1,"topic":"T"}:'
        '{"lastUpdateTimestamp":0,"maxOffset":0,"minOffset":0},'
        '{"brokerName":"broker-a","queueId":0,"topic":"T"}:'
        '{"lastUpdateTimestamp":1700000000000,"maxOffset":5,"minOffset":1}},"topicPutTps":1.5}',
    ),
    (
        CONSUME_STATS,
        '{"consumeTps":0.0,"offsetTable":{{"brokerName":"broker-a","queueId":0,"topic":"T"}:'
        '{"brokerOffset":9,"consumerOffset":4,"lastTimestamp":1700000000000,"pullOffset":6}}}',
    ),
    (ConsumeStats(), '{"consumeTps":0.0,"offsetTable":{}}'),
    (KeyValues(table={"a": 'b"c'}), '{"table":{"a":"b\\"c"}}'),
    (
        ConsumeTimeSpans(
            consume_time_span_set=[
                QueueTimeSpan(
                    message_queue=Q0,
                    min_time_stamp=-1,
                    min_time_stamp_str="1969-12-31#23:59:59:999",
                    max_time_stamp=3,
                    max_time_stamp_str="1970-01-01#00:00:00:003",
                    consume_time_stamp=2,
                    consume_time_stamp_str="1970-01-01#00:00:00:002",
                    delay_time=7,
                )
            ]
        ),
        '{"consumeTimeSpanSet":[{"consumeTimeStamp":2,"consumeTimeStampStr":"1970-01-01#00:00:00:002","delayTime":7,'
        '"maxTimeStamp":3,"maxTimeStampStr":"1970-01-01#00:00:00:003",'
        '"messageQueue":{"brokerName":"broker-a","queueId":0,"topic":"T"},'
        '"minTimeStamp":-1,"minTimeStampStr":"1969-12-31#23:59:59:999"}]}',
    ),
    (
        BrokerConsumeStats(
            broker_addr="127.0.0.1:10911",
            consume_stats_list=[{"g1": [CONSUME_STATS]}],
            total_diff=5,
            total_inflight_diff=2,
        ),
        '{"brokerAddr":"127.0.0.1:10911","consumeStatsList":[{"g1":[{"consumeTps":0.0,"offsetTable":'
        '{{"brokerName":"broker-a","queueId":0,"topic":"T"}:'
        '{"brokerOffset":9,"consumerOffset":4,"lastTimestamp":1700000000000,"pullOffset":6}}}]}],'
        '"totalDiff":5,"totalInflightDiff":2}',
    ),
    (
        CorrectionOffsets(correction_offsets={0: 5, 1: 9223372036854775807}),
        '{"correctionOffsets":{0:5,1:9223372036854775807}}',
    ),
    (
        BrokerStatsData(
            stats_minute=StatsItem(sum=5, tps=2.5, avgpt=1.0), stats_hour=StatsItem(), stats_day=StatsItem()
        ),
        '{"statsDay":{"avgpt":0.0,"sum":0,"tps":0.0},"statsHour":{"avgpt":0.0,"sum":0,"tps":0.0},'
        '"statsMinute":{"avgpt":1.0,"sum":5,"tps":2.5}}',
    ),
    (
        ConsumeQueue(
            max_queue_index=9,
            min_queue_index=1,
            queue_data=[ConsumeQueueEntry(physic_offset=10, physic_size=20, tags_code=-3)],
            filter_data="x is not online!",
        ),
        '{"filterData":"x is not online!","maxQueueIndex":9,"minQueueIndex":1,'
        '"queueData":[{"eval":false,"physicOffset":10,"physicSize":20,"tagsCode":-3}]}',
    ),
    (
        ConsumeQueue(
            max_queue_index=9,
            min_queue_index=1,
            queue_data=[ConsumeQueueEntry(physic_offset=10, physic_size=20, tags_code=-3)],
            filter_data="null",
            subscription_data=Subscription(
                topic="T", sub_string="TagA", tags_set=["TagA"], code_set=[2598919], sub_version=5
            ),
        ),
        '{"filterData":"null","maxQueueIndex":9,"minQueueIndex":1,'
        '"queueData":[{"eval":false,"physicOffset":10,"physicSize":20,"tagsCode":-3}],'
        '"subscriptionData":{"classFilterMode":false,"codeSet":[2598919],"expressionType":"TAG","subString":"TagA",'
        '"subVersion":5,"tagsSet":["TagA"],"topic":"T"}}',
    ),
]


@pytest.mark.parametrize(("body", "text"), BODIES, ids=[type(body).__name__ for body, _ in BODIES])
def test_written_and_read_as_apache_does(body: Any, text: str) -> None:
    assert fastjson.dumps(body).decode() == text
    assert fastjson.decode(text, type(body)) == body


def test_lag_and_messages_in_flight() -> None:
    assert CONSUME_STATS.lag == 5
    assert CONSUME_STATS.in_flight == 2
