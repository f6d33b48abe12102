"""What operators see and change: runtime info, settings, positions of topics and groups, cleaning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from broker.small_broker import BROKER_ADDR, START_MS, SmallBroker, queue
from skylark.broker.config import UPDATABLE_KEYS
from skylark.config import properties
from skylark.wire import fastjson
from skylark.wire.bodies import GroupList, TopicList
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.stats import (
    BrokerConsumeStats,
    BrokerStatsData,
    ConsumeOffset,
    ConsumeStats,
    ConsumeTimeSpans,
    CorrectionOffsets,
    KeyValues,
    TopicOffset,
    TopicStats,
)

# What Apache's broker 5.5.0 answers with, without the keys that hold a path.
APACHE_RUNTIME_KEYS = """
    EndTransactionQueueSize EndTransactionThreadPoolQueueCapacity ackThreadPoolQueueCapacity
    ackThreadPoolQueueHeadWaitTimeMills ackThreadPoolQueueSize bootTimestamp brokerActive brokerVersionDesc
    commitLogDirCapacity commitLogDiskRatio commitLogMaxOffset commitLogMinOffset consumeQueueDiskRatio
    dispatchBehindBytes dispatchMaxBuffer earliestMessageTimeStamp getFoundTps getMessageEntireTimeMax getMissTps
    getTotalTps getTransferredTps litePullThreadPoolQueueCapacity litePullThreadPoolQueueHeadWaitTimeMills
    litePullThreadPoolQueueSize msgGetTotalTodayMorning msgGetTotalTodayNow msgGetTotalYesterdayMorning
    msgPutTotalTodayMorning msgPutTotalTodayNow msgPutTotalYesterdayMorning pageCacheLockTimeMills
    pullThreadPoolQueueCapacity pullThreadPoolQueueHeadWaitTimeMills pullThreadPoolQueueSize putLatency99 putLatency999
    putMessageAverageSize putMessageDistributeTime putMessageEntireTimeMax putMessageFailedTimes putMessageSizeTotal
    putMessageTimesTotal putTps queryThreadPoolQueueCapacity queryThreadPoolQueueHeadWaitTimeMills
    queryThreadPoolQueueSize remainHowManyDataToFlush remainTransientStoreBufferNumbs runtime
    sendThreadPoolQueueCapacity sendThreadPoolQueueHeadWaitTimeMills sendThreadPoolQueueSize
    startAcceptSendRequestTimeStamp timerCongestNum timerDequeueTps timerEnqueueTps timerOffsetBehind timerReadBehind
""".split()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[SmallBroker]:
    broker = SmallBroker(tmp_path / "store")
    yield broker
    broker.store.close()


# Runtime info.


def runtime_info(broker: SmallBroker) -> dict[str, str]:
    return broker.ask_for(KeyValues, RequestCode.GET_BROKER_RUNTIME_INFO).table


def test_runtime_info_has_every_name_that_tools_ask_for(broker: SmallBroker) -> None:
    info = runtime_info(broker)
    assert set(APACHE_RUNTIME_KEYS) <= info.keys()
    assert (info["brokerVersionDesc"], info["implementation"]) == ("V5_5_0", "skylark")
    assert info["earliestMessageTimeStamp"] == "-1"
    assert info["putTps"] == "0.0 0.0 0.0"
    assert 0 < float(info["commitLogDiskRatio"]) <= 1
    assert info["commitLogDirCapacity"].startswith("Total : ")


def test_runtime_info_counts(broker: SmallBroker) -> None:
    appended = broker.send("T", body=b"x" * 100)
    broker.stats.put("T", 1, appended.size_bytes)
    broker.stats.put("SCHEDULE_TOPIC_XXXX", 1, 100)
    broker.stats.got("G", "T", 1, appended.size_bytes)
    broker.stats.missed()
    broker.stats.put_failed()
    broker.now_ms = START_MS + 10_000
    broker.stats.tick(broker.now_ms)
    broker.now_ms = START_MS + 90_061_000
    info = runtime_info(broker)
    assert info["runtime"] == "[ 1 days, 1 hours, 1 minutes, 1 seconds ]"
    assert info["bootTimestamp"] == str(START_MS)
    assert info["putTps"] == "0.2 0.2 0.2"
    assert info["getTotalTps"] == "0.2 0.2 0.2"
    assert info["getFoundTps"] == "0.1 0.1 0.1"
    assert info["getTransferredTps"] == "0.1 0.1 0.1"
    assert info["putMessageTimesTotal"] == "2"
    assert info["putMessageSizeTotal"] == str(appended.size_bytes + 100)
    assert info["putMessageFailedTimes"] == "1"
    assert info["msgPutTotalTodayNow"] == "1"
    assert info["msgGetTotalTodayNow"] == "1"
    assert info["earliestMessageTimeStamp"] == str(START_MS)
    assert info["commitLogMaxOffset"] == str(appended.log_end_offset)


def test_runtime_info_shows_delay_levels(broker: SmallBroker) -> None:
    broker.send("SCHEDULE_TOPIC_XXXX", 0, DELAY="1")
    info = runtime_info(broker)
    assert info["scheduleMessageOffset_1"] == "3,1"
    assert info["scheduleMessageOffset_2"] == "0,0"


def test_the_table_of_delay_levels(broker: SmallBroker) -> None:
    assert broker.ask(RequestCode.GET_ALL_DELAY_OFFSET).body == b'{"offsetTable":{1:3}}'
    broker.delay_text = b""
    answer = broker.ask(RequestCode.GET_ALL_DELAY_OFFSET)
    assert (answer.code, answer.remark) == (1, "No delay offset in this broker")


# Settings.


def test_settings_are_shown_as_lines(broker: SmallBroker) -> None:
    answer = broker.ask(RequestCode.GET_BROKER_CONFIG)
    settings = properties.parse(answer.body.decode())
    assert settings["brokerName"] == "broker-a"
    assert settings["autoCreateTopicEnable"] == "true"
    assert answer.fields == {"version": f'{{"counter":0,"stateVersion":0,"timestamp":{START_MS}}}'}


def test_settings_change_together(broker: SmallBroker) -> None:
    answer = broker.ask(RequestCode.UPDATE_BROKER_CONFIG, b"fileReservedTime=48\nautoCreateTopicEnable = false\n")
    assert answer.code == ResponseCode.SUCCESS
    assert broker.config.file_reserved_time == 48
    assert broker.config.auto_create_topic_enable is False
    assert broker.changed == [{"fileReservedTime": "48", "autoCreateTopicEnable": "false"}]
    version = fastjson.loads(broker.ask(RequestCode.GET_BROKER_CONFIG).fields["version"])
    assert version["counter"] == 1


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("storePathRootDir=/etc", ResponseCode.NO_PERMISSION, "storePathRootDir cannot be changed"),
        ("brokerConfigPath=/etc/passwd", ResponseCode.NO_PERMISSION, "brokerConfigPath"),
        ("fileReservedTim=1", ResponseCode.NO_PERMISSION, "did you mean fileReservedTime?"),
        ("maxMessageSize=lots", ResponseCode.INVALID_PARAMETER, "maxMessageSize='lots' is not allowed"),
        ("deleteWhen=25", ResponseCode.INVALID_PARAMETER, "hours of the day"),
        ("brokerPermission=3", ResponseCode.INVALID_PARAMETER, "2 (write), 4 (read), 6 (both) or 0 (neither)"),
        ("brokerIP2=10.0.0.1", ResponseCode.NO_PERMISSION, "brokerIP2 cannot be changed"),
        ("waitTimeMillsInSendQueue=/etc", ResponseCode.INVALID_PARAMETER, "expected true, false or a number"),
        ("metricsExporterType=PROM", ResponseCode.INVALID_PARAMETER, "expected true, false or a number"),
        ("aclEnable=true", ResponseCode.NO_PERMISSION, "not supported yet: expected false"),
    ],
)
def test_a_refused_setting_changes_nothing(broker: SmallBroker, line: str, code: int, words: str) -> None:
    answer = broker.ask(RequestCode.UPDATE_BROKER_CONFIG, f"fileReservedTime=48\n{line}\n".encode())
    assert answer.code == code
    assert answer.remark is not None
    assert words in answer.remark
    assert broker.config.file_reserved_time == 72
    assert broker.changed == []


def test_settings_as_they_are_may_be_sent_back(broker: SmallBroker) -> None:
    body = broker.ask(RequestCode.GET_BROKER_CONFIG).body + b"fileReservedTime=24\n"
    assert broker.ask(RequestCode.UPDATE_BROKER_CONFIG, body).code == ResponseCode.SUCCESS
    assert broker.changed == [{"fileReservedTime": "24"}]


def test_apaches_settings_without_effect_are_kept_and_that_is_said(broker: SmallBroker) -> None:
    lines = {
        "waitTimeMillsInSendQueue": "500", "enablePopBufferMerge": "true", "popConsumerKVServiceEnable": "TRUE",
        "estimateAccumulation": "false", "enableSingleTopicRegister": "true",
    }  # fmt: skip
    body = "".join(f"{key} = {value}\n" for key, value in lines.items()).encode()
    answer = broker.ask(RequestCode.UPDATE_BROKER_CONFIG, body + b"enableSplitRegistration=true\naclEnable=false\n")
    assert answer.code == ResponseCode.SUCCESS
    assert answer.remark == f"without effect in Skylark: {', '.join(lines)}"
    assert broker.changed == [{"enableSplitRegistration": "true", **lines}]
    shown = broker.ask(RequestCode.GET_BROKER_CONFIG).body
    assert properties.parse(shown.decode()).items() >= lines.items()
    assert broker.ask(RequestCode.UPDATE_BROKER_CONFIG, shown).code == ResponseCode.SUCCESS
    assert len(broker.changed) == 1


def test_a_message_size_that_no_request_has_is_taken_with_a_warning(
    broker: SmallBroker, caplog: pytest.LogCaptureFixture
) -> None:
    assert broker.ask(RequestCode.UPDATE_BROKER_CONFIG, b"maxMessageSize=33554432").code == ResponseCode.SUCCESS
    assert broker.config.max_message_size == 32 << 20
    assert "maxMessageSize=33554432 is more than a request can carry: it has at most 16777216 bytes" in caplog.text


@pytest.mark.parametrize("body", [b"\xff\xfe=1", b"deleteWhen=\\u12"])
def test_settings_that_cannot_be_read(broker: SmallBroker, body: bytes) -> None:
    assert broker.ask(RequestCode.UPDATE_BROKER_CONFIG, body).code == ResponseCode.INVALID_PARAMETER


def test_no_path_or_address_can_be_changed() -> None:
    assert not [key for key in UPDATABLE_KEYS if "path" in key.lower() or "addr" in key.lower()]


# Topics and groups.


def test_topic_stats(broker: SmallBroker) -> None:
    broker.topic("T")
    broker.send("T", 0)
    broker.send("T", 0)
    broker.stats.put("T", 20, 1)
    broker.stats.tick(broker.now_ms)
    stats = broker.ask_for(TopicStats, RequestCode.GET_TOPIC_STATS_INFO, topic="T")
    assert stats.topic_put_tps == 2.0
    assert stats.offset_table == {
        queue("T", 0): TopicOffset(min_offset=0, max_offset=2, last_update_timestamp=START_MS + 1_000),
        queue("T", 1): TopicOffset(),
    }


@pytest.mark.parametrize("code", [RequestCode.GET_TOPIC_STATS_INFO, RequestCode.QUERY_CONSUME_TIME_SPAN])
def test_stats_of_no_topic(broker: SmallBroker, code: int) -> None:
    answer = broker.ask(code, topic="no", group="G")
    assert (answer.code, answer.remark) == (ResponseCode.TOPIC_NOT_EXIST, "topic[no] not exist")


def consumed(broker: SmallBroker) -> None:
    """G has consumed 1 of 2 messages of T, and pulled both; and it has an offset in U, which is empty."""
    broker.topic("T", 1)
    broker.topic("U", 1, order=True)
    broker.group("G")
    broker.send("T")
    broker.send("T")
    broker.offsets.commit("G", "T", 0, 1, "test")
    broker.offsets.pulled("G", "T", 0, 2)
    broker.offsets.commit("G", "U", 0, 0, "test")


IN_T = ConsumeOffset(broker_offset=2, consumer_offset=1, pull_offset=2, last_timestamp=START_MS)


def test_consume_stats_of_an_offline_group_show_all_it_consumed(broker: SmallBroker) -> None:
    consumed(broker)
    broker.stats.got("G", "T", 10, 1)
    broker.stats.tick(broker.now_ms)
    stats = broker.ask_for(ConsumeStats, RequestCode.GET_CONSUME_STATS, consumerGroup="G")
    assert stats.offset_table == {queue("T", 0): IN_T, queue("U", 0): ConsumeOffset()}
    assert stats.consume_tps == 1.0


def test_consume_stats_of_an_online_group_show_what_it_subscribes_to(broker: SmallBroker) -> None:
    consumed(broker)
    broker.join("G", "T")
    ask = RequestCode.GET_CONSUME_STATS
    assert broker.ask_for(ConsumeStats, ask, consumerGroup="G").offset_table == {queue("T", 0): IN_T}
    assert broker.ask_for(ConsumeStats, ask, consumerGroup="G", topic="U").offset_table == {}
    listed = broker.ask_for(ConsumeStats, ask, consumerGroup="G", topicList="U;no;")
    assert listed.offset_table == {queue("U", 0): ConsumeOffset()}


def test_consume_stats_of_an_unknown_group_are_empty(broker: SmallBroker) -> None:
    assert broker.ask_for(ConsumeStats, RequestCode.GET_CONSUME_STATS, consumerGroup="no") == ConsumeStats()


def test_consume_stats_of_the_whole_broker(broker: SmallBroker) -> None:
    consumed(broker)
    stats = broker.ask_for(BrokerConsumeStats, RequestCode.GET_BROKER_CONSUME_STATS, isOrder=False)
    assert (stats.broker_addr, stats.total_diff, stats.total_inflight_diff) == (BROKER_ADDR, 1, 1)
    by_group = {group: topics for entry in stats.consume_stats_list for group, topics in entry.items()}
    assert [s.offset_table for s in by_group["G"]] == [{queue("T", 0): IN_T}, {queue("U", 0): ConsumeOffset()}]
    ordered = broker.ask_for(BrokerConsumeStats, RequestCode.GET_BROKER_CONSUME_STATS, isOrder=True)
    assert ordered.total_diff == 0


def test_who_consumes_what(broker: SmallBroker) -> None:
    consumed(broker)
    broker.join("H", "T")
    groups = broker.ask_for(GroupList, RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, topic="T")
    assert groups.group_list == ["G", "H"]
    topics = broker.ask_for(TopicList, RequestCode.QUERY_TOPICS_BY_CONSUMER, group="G")
    assert topics == TopicList(topic_list=["T", "U"], broker_addr=BROKER_ADDR)


def test_time_spans(broker: SmallBroker) -> None:
    consumed(broker)
    broker.now_ms = START_MS + 5_000
    (span,) = broker.ask_for(
        ConsumeTimeSpans, RequestCode.QUERY_CONSUME_TIME_SPAN, topic="T", group="G"
    ).consume_time_span_set
    assert span.message_queue == queue("T", 0)
    assert (span.min_time_stamp, span.max_time_stamp) == (START_MS, START_MS + 1_000)
    assert (span.consume_time_stamp, span.delay_time) == (START_MS, 4_000)
    assert span.max_time_stamp_str is not None
    assert span.max_time_stamp_str.endswith(":21:000")


def test_time_spans_of_a_group_that_never_consumed_and_of_an_empty_queue(broker: SmallBroker) -> None:
    consumed(broker)
    broker.now_ms = START_MS + 5_000
    ask = RequestCode.QUERY_CONSUME_TIME_SPAN
    (span,) = broker.ask_for(ConsumeTimeSpans, ask, topic="T", group="new").consume_time_span_set
    assert (span.consume_time_stamp, span.delay_time) == (START_MS, 5_000)
    (span,) = broker.ask_for(ConsumeTimeSpans, ask, topic="U", group="G").consume_time_span_set
    assert (span.min_time_stamp, span.max_time_stamp, span.delay_time) == (-1, -1, 0)


def test_correction_offsets(broker: SmallBroker) -> None:
    consumed(broker)
    broker.offsets.commit("H", "T", 0, 2, "test")
    ask = RequestCode.QUERY_CORRECTION_OFFSET

    def offsets(**fields: object) -> dict[int, int]:
        return broker.ask_for(CorrectionOffsets, ask, topic="T", **fields).correction_offsets

    assert offsets(compareGroup="H") == {0: 1}
    assert offsets(compareGroup="H", filterGroups="G") == {0: 2}
    assert offsets(compareGroup="G", filterGroups="G") == {0: 2**63 - 1}
    assert broker.offsets.groups_of("T") == {"G", "H"}


def test_counters_by_name(broker: SmallBroker) -> None:
    broker.stats.put("T", 30, 300)
    broker.stats.tick(START_MS)
    data = broker.ask_for(BrokerStatsData, RequestCode.VIEW_BROKER_STATS_DATA, statsName="TOPIC_PUT_NUMS", statsKey="T")
    assert (data.stats_minute.sum, data.stats_minute.tps, data.stats_minute.avgpt) == (30, 3.0, 30.0)
    assert data.stats_day.sum == 30
    answer = broker.ask(RequestCode.VIEW_BROKER_STATS_DATA, statsName="TOPIC_PUT_NUMS", statsKey="no")
    assert (answer.code, answer.remark) == (1, "The stats <TOPIC_PUT_NUMS> <no> not exist")


# Cleaning.


def test_queues_of_topics_that_are_gone_are_deleted(broker: SmallBroker) -> None:
    broker.topic("T")
    for topic in ("T", "gone", "SCHEDULE_TOPIC_XXXX"):
        broker.send(topic)
    assert broker.ask(RequestCode.CLEAN_UNUSED_TOPIC).code == ResponseCode.SUCCESS
    assert {topic for topic, _ in broker.store.queues()} == {"T", "SCHEDULE_TOPIC_XXXX"}


def test_many_such_topics_take_turns(broker: SmallBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        broker.send(f"gone{number:02}")
    turns: list[list[str]] = []
    delete = broker.store.delete_topics

    class Watched:
        """The store, which tells how many topics it deletes at once; meanwhile somebody makes one of them anew."""

        def __getattr__(self, name: str) -> object:
            return getattr(broker.store, name)

        def delete_topics(self, topics: list[str]) -> bool:
            turns.append(topics)
            broker.topic("gone30")
            return delete(topics)

    admin = cast(Any, broker.handlers[RequestCode.CLEAN_UNUSED_TOPIC]).__self__
    monkeypatch.setattr(admin, "_store", Watched())
    assert broker.ask(RequestCode.CLEAN_UNUSED_TOPIC).code == ResponseCode.SUCCESS
    assert [len(topics) for topics in turns] == [16, 15, 8]
    assert broker.store.topics() == {"gone30"}


def test_expired_segments_are_deleted_at_any_hour(broker: SmallBroker) -> None:
    for _ in range(40):
        broker.send("T", body=b"x" * 65_536)
    broker.store.flush()
    broker.store.config.delete_when = ""
    # The age of a segment is that of its file, which was written just now by the system's clock.
    newest = max(path.stat().st_mtime_ns for path in Path(broker.config.store_path_root_dir).rglob("commitlog/*"))
    broker.now_ms = newest // 1_000_000 + 73 * 3_600_000
    assert broker.ask(RequestCode.DELETE_EXPIRED_COMMITLOG).code == ResponseCode.SUCCESS
    assert broker.store.log_min_offset > 0
    assert broker.ask(RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE).code == ResponseCode.SUCCESS
    assert broker.store.max_offset("T", 0) == 40
