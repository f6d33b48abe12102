"""The topic table, the rules for names and attributes, and the requests that mqadmin sends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.broker import topics as module
from skylark.broker.attributes import TOPIC_ATTRIBUTES, BadAttribute, alter, parse_changes
from skylark.broker.config import BrokerConfig
from skylark.broker.offsets import Offsets
from skylark.broker.static_topics import StaticTopics
from skylark.broker.topics import (
    PERM_INHERIT,
    PERM_READ,
    PERM_WRITE,
    TOPICS_PER_TURN,
    Topics,
    handlers,
    validate_topic,
)
from skylark.net.connection import Connection, RequestFailed
from skylark.wire import fastjson
from skylark.wire.bodies import BadBody, TopicConfigs, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.tables import TopicConfig

PEER = cast(Connection, "1.2.3.4:5")
RW = PERM_READ | PERM_WRITE
PUBLISHED = (
    RequestCode.UPDATE_AND_CREATE_TOPIC,
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST,
    RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC,
)
CREATE = {
    "topic": "T",
    "defaultTopic": "TBW102",
    "readQueueNums": "8",
    "writeQueueNums": "4",
    "perm": "6",
    "topicFilterType": "SINGLE_TAG",
    "order": "false",
}


def config(**changes: object) -> BrokerConfig:
    return msgspec.structs.replace(BrokerConfig(broker_name="broker-a"), **changes)


class Bench:
    """A topic table with its requests."""

    def __init__(self, directory: Path, **changes: object) -> None:
        self.topics = Topics(directory, config(**changes), lambda: 1_700_000_000_000)
        self.offsets = Offsets(directory)
        self.deleted: list[str] = []
        self.published_topics: list[int] = []
        self.static_topics = StaticTopics(directory, "broker-a", lambda: 1_700_000_000_000)
        self.serve = handlers(self.topics, self.offsets, self.deleted.extend, self.published, self.static_topics)

    async def published(self) -> None:
        self.published_topics.append(len(self.topics))

    def ask(self, code: RequestCode, fields: dict[str, str] | None = None, body: bytes = b"") -> Frame:
        answer = self.serve[code](Frame(code, fields or {}, body), PEER)
        if isinstance(answer, Frame):
            return answer
        assert isinstance(answer, Coroutine)
        answer = asyncio.run(answer)
        assert isinstance(answer, Frame)
        if code in PUBLISHED:
            assert self.published_topics[-1] == len(self.topics), "answered after the name servers know"
        return answer

    def refused(self, code: RequestCode, fields: dict[str, str] | None = None, body: bytes = b"") -> tuple[int, str]:
        with pytest.raises(RequestFailed) as failure:
            self.ask(code, fields, body)
        return failure.value.code, failure.value.remark


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


ILLEGAL = "contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"


@pytest.mark.parametrize(
    ("name", "remark"),
    [
        ("Topic_1-a%|", None),
        ("a" * 127, None),
        ("%RETRY%" + "a" * 248, None),
        ("", "The specified topic is blank."),
        ("  ", "The specified topic is blank."),
        ("../../x", f"The specified topic: ../../x, {ILLEGAL}"),
        ("a.b", f"The specified topic: a.b, {ILLEGAL}"),
        ("tópico", f"The specified topic: tópico, {ILLEGAL}"),
        ("a\n", f"The specified topic: a\n, {ILLEGAL}"),
        ("a" * 128, f"The specified topic: {'a' * 128}, is longer than topic max length: 127"),
        (
            "%DLQ%" + "a" * 251,
            f"The specified topic is DLQ or Retry topic: %DLQ%{'a' * 251}, and it's longer than topic max length: 255",
        ),
    ],
)
def test_names(name: str, remark: str | None) -> None:
    assert validate_topic(name) == remark


@given(st.text())
def test_a_valid_name_is_a_plain_directory_name(name: str) -> None:
    if validate_topic(name) is None:
        assert Path(name).name == name
        assert name not in (".", "..")


def test_builtin_topics(bench: Bench) -> None:
    table = {topic.topic_name: (topic.write_queue_nums, topic.perm) for topic in bench.topics.all()}
    assert table == {
        "TBW102": (8, RW | PERM_INHERIT),
        "SELF_TEST_TOPIC": (1, RW),
        "BenchmarkTest": (1024, RW),
        "DefaultCluster": (16, RW | PERM_INHERIT),
        "broker-a": (1, RW | PERM_INHERIT),
        "OFFSET_MOVED_EVENT": (1, RW),
        "SCHEDULE_TOPIC_XXXX": (18, RW),
        "DefaultCluster_REPLY_TOPIC": (1, RW),
        "rmq_sys_REVIVE_LOG_DefaultCluster": (8, RW),
        "rmq_sys_SYNC_BROKER_MEMBER_broker-a": (1, PERM_INHERIT),
        "RMQ_SYS_TRANS_HALF_TOPIC": (1, RW),
        "RMQ_SYS_TRANS_OP_HALF_TOPIC": (1, RW),
        "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC": (1, RW),
        "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC": (1, RW),
        "rmq_sys_wheel_timer": (1, RW),
    }
    assert bench.topics.is_system("DefaultCluster")
    assert bench.topics.is_system("rmq_sys_anything")
    assert not bench.topics.is_system("T")


def test_the_trace_topic_is_an_option(tmp_path: Path) -> None:
    topics = Topics(tmp_path, config(trace_topic_enable=True, auto_create_topic_enable=False), lambda: 0)
    assert "RMQ_SYS_TRACE_TOPIC" in topics
    assert "TBW102" not in topics


class TestCreationBySending:
    def test_inherits_from_the_default_topic(self, bench: Bench) -> None:
        topic = bench.topics.inherited("T", "TBW102", 4, 1)
        assert topic == TopicConfig("T", 4, 4, RW, topic_sys_flag=1)
        assert "T" not in bench.topics

    @pytest.mark.parametrize(("asked", "given"), [(100, 8), (-1, 0)])
    def test_the_queues_are_bounded_by_the_default_topic(self, bench: Bench, asked: int, given: int) -> None:
        topic = bench.topics.inherited("T", "TBW102", asked, 0)
        assert topic is not None
        assert topic.write_queue_nums == given

    def test_needs_a_default_topic_that_lets_inherit(self, bench: Bench, tmp_path: Path) -> None:
        assert bench.topics.inherited("T", "NOPE", 4, 0) is None
        assert bench.topics.inherited("T", "BenchmarkTest", 4, 0) is None
        bench.topics.put(TopicConfig("written"))
        # Auto creation was on when the file was written, so that TBW102 is in it.
        switched_off = Topics(tmp_path, config(auto_create_topic_enable=False), lambda: 0)
        assert "TBW102" in switched_off
        assert switched_off.inherited("T", "TBW102", 4, 0) is None

    def test_is_bounded(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MAX_AUTO_CREATED_TOPICS", len(bench.topics) + 1)
        assert bench.topics.inherited("T", "TBW102", 4, 0) is not None
        bench.topics.put(TopicConfig("T"))
        assert bench.topics.inherited("U", "TBW102", 4, 0) is None

    def test_one_host_leaves_room_for_others(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MAX_AUTO_CREATED_TOPICS", len(bench.topics) + 20)
        made: dict[str, int] = {}
        for host in ("10.0.0.1", "10.0.0.2", "10.0.0.3"):
            for number in range(30):
                topic = bench.topics.inherited(f"{host[-1]}-{number}", "TBW102", 4, 0, host)
                if topic is not None:
                    bench.topics.take_share(topic.topic_name, host)
                    bench.topics.put(topic)
                    made[host] = number + 1
        assert made == {"10.0.0.1": 10, "10.0.0.2": 5, "10.0.0.3": 2}
        bench.topics.delete("1-0")
        assert bench.topics.has_room_for_senders("10.0.0.3")
        bench.topics.delete("1-0")
        assert bench.topics.fullness("10.0.0.1").startswith("clients of 10.0.0.1 have made 9 topics")

    def test_for_send_back(self, bench: Bench) -> None:
        topic = bench.topics.create_for_send_back("%RETRY%g", 1, RW, 2)
        assert topic == TopicConfig("%RETRY%g", 1, 1, RW, topic_sys_flag=2)
        assert bench.topics.create_for_send_back("%RETRY%g", 1, RW, 2, order=True).order
        assert bench.topics.create_for_send_back("%RETRY%g", 1, RW, 2).order


class TestTable:
    def test_survives_a_restart(self, bench: Bench, tmp_path: Path) -> None:
        bench.topics.put(TopicConfig("T", 3, 5, PERM_READ, attributes={"message.type": "FIFO"}))
        again = Topics(tmp_path, config(), lambda: 7)
        assert again.get("T") == bench.topics.get("T")
        assert again.data_version == bench.topics.data_version
        assert again.data_version.counter == 1

    def test_the_file_is_apaches(self, bench: Bench, tmp_path: Path) -> None:
        for topic in list(bench.topics.all()):
            bench.topics.delete(topic.topic_name)
        bench.topics.put(TopicConfig("T"))
        assert (tmp_path / "topics.json").read_text() == (
            '{\n\t"dataVersion":{\n\t\t"counter":16,\n\t\t"stateVersion":0,\n\t\t"timestamp":1700000000000\n\t},\n'
            '\t"topicConfigTable":{\n\t\t"T":{\n\t\t\t"attributes":{},\n\t\t\t"order":false,\n\t\t\t"perm":6,\n'
            '\t\t\t"readQueueNums":16,\n\t\t\t"topicFilterType":"SINGLE_TAG",\n\t\t\t"topicName":"T",\n'
            '\t\t\t"topicSysFlag":0,\n\t\t\t"writeQueueNums":16\n\t\t}\n\t}\n}'
        )

    def test_every_change_is_told_and_counted(self, bench: Bench) -> None:
        told: list[list[str]] = []
        bench.topics.on_change = lambda changed: told.append([topic.topic_name for topic in changed])
        bench.topics.put(TopicConfig("T"), TopicConfig("U"))
        bench.topics.mark_ordered(["T", "nowhere"])
        bench.topics.mark_ordered(["T"])
        bench.topics.delete("T")
        bench.topics.delete("T")
        assert told == [["T", "U"], ["T"], []]
        assert bench.topics.data_version.counter == 3

    def test_a_refusing_disk_is_tried_again(self, bench: Bench, tmp_path: Path) -> None:
        blocker = tmp_path / "topics.json.tmp"
        blocker.mkdir()
        bench.topics.put(TopicConfig("T"))
        assert "T" in bench.topics
        with pytest.raises(OSError, match="topics"):
            bench.topics.save()
        blocker.rmdir()
        bench.topics.save()
        assert "T" in Topics(tmp_path, config(), lambda: 0)


class TestUpdate:
    code = RequestCode.UPDATE_AND_CREATE_TOPIC

    def test_creates_and_changes(self, bench: Bench) -> None:
        assert bench.ask(self.code, CREATE).code == 0
        assert bench.topics.get("T") == TopicConfig("T", 8, 4, 6)
        bench.ask(self.code, CREATE | {"perm": "4", "order": "true"})
        assert bench.topics.get("T") == TopicConfig("T", 8, 4, 4, order=True)

    def test_the_same_again_changes_nothing(self, bench: Bench) -> None:
        bench.ask(self.code, CREATE)
        bench.ask(self.code, CREATE)
        assert bench.topics.data_version.counter == 1

    @pytest.mark.parametrize(
        ("changes", "code", "remark"),
        [
            ({"topic": "../../x"}, ResponseCode.INVALID_PARAMETER, f"The specified topic: ../../x, {ILLEGAL}"),
            (
                {"topic": "SCHEDULE_TOPIC_XXXX"},
                ResponseCode.INVALID_PARAMETER,
                "The topic[SCHEDULE_TOPIC_XXXX] is conflict with system topic.",
            ),
            (
                {"topic": "broker-a"},
                ResponseCode.INVALID_PARAMETER,
                "The topic[broker-a] is conflict with system topic.",
            ),
            (
                {"attributes": "+message.type=MIXED"},
                ResponseCode.INVALID_PARAMETER,
                "MIXED message type is not supported.",
            ),
            ({"topicFilterType": "X"}, ResponseCode.SYSTEM_ERROR, "topicFilterType = [X] value invalid"),
            (
                {"attributes": "message.type"},
                ResponseCode.SYSTEM_ERROR,
                "delete attribute format is wrong: message.type",
            ),
            ({"attributes": "+nope=1"}, ResponseCode.SYSTEM_ERROR, "unsupported key: nope"),
            (
                {"attributes": "+reserve.time=5"},
                ResponseCode.SYSTEM_ERROR,
                "Update topic reserveTime not supported",
            ),
        ],
    )
    def test_refusals(self, bench: Bench, changes: dict[str, str], code: int, remark: str) -> None:
        assert bench.refused(self.code, CREATE | changes) == (code, remark)
        assert bench.topics.data_version.counter == 0

    @pytest.mark.parametrize("changes", [{"readQueueNums": "-1"}, {"writeQueueNums": "70000"}, {"perm": "8"}])
    def test_numbers_out_of_range(self, bench: Bench, changes: dict[str, str]) -> None:
        code, remark = bench.refused(self.code, CREATE | changes)
        assert code == ResponseCode.INVALID_PARAMETER
        assert next(iter(changes.values())) in remark

    def test_attributes_add_up(self, bench: Bench) -> None:
        bench.ask(self.code, CREATE | {"attributes": "+message.type=FIFO,+cleanup.policy=DELETE"})
        bench.ask(self.code, CREATE)
        bench.ask(self.code, CREATE | {"attributes": "-message.type"})
        topic = bench.topics.get("T")
        assert topic is not None
        assert topic.attributes == {"cleanup.policy": "DELETE"}

    def test_list_is_all_or_nothing(self, bench: Bench) -> None:
        code = RequestCode.UPDATE_AND_CREATE_TOPIC_LIST
        good, bad = TopicConfig("T", 2, 2), TopicConfig("a b")
        refused = bench.refused(code, body=encode_body(TopicConfigs(topic_config_list=[good, bad])))
        assert refused[0] == ResponseCode.INVALID_PARAMETER
        assert "T" not in bench.topics
        bench.ask(code, body=encode_body(TopicConfigs(topic_config_list=[good, TopicConfig("U")])))
        assert bench.topics.get("T") == good
        assert "U" in bench.topics
        assert bench.topics.data_version.counter == 1


@pytest.mark.parametrize(
    ("current", "changes", "reason"),
    [
        (None, {"-message.type": ""}, "only add attribute is supported while creating topic. key: message.type"),
        ({}, {"-message.type": ""}, "attempt to delete a nonexistent key: message.type"),
        ({}, {"+queue.type": "SimpleCQ"}, "attempt to update an unchangeable attribute. key: queue.type"),
        (None, {"+queue.type": "X"}, "value is not in set: [SimpleCQ, BatchCQ]"),
        (None, {"+reserve.time": "-2"}, "value is not in range(-1, 9223372036854775807)"),
        (None, {"+reserve.time": "x"}, 'For input string: "x"'),
        ({}, {"message.type": "FIFO"}, "wrong format key: essage.type"),
        (None, {"+": "x"}, "kv string format wrong."),
        (None, {"++a": "x"}, "kv string format wrong."),
        (
            {"message.type": "FIFO"},
            {"+message.type": "DELAY", "-message.type": ""},
            "alter duplication key. key: message.type",
        ),
    ],
)
def test_attribute_changes_that_cannot_be(current: dict[str, str] | None, changes: dict[str, str], reason: str) -> None:
    with pytest.raises(BadAttribute) as failure:
        alter(TOPIC_ATTRIBUTES, current, changes)
    assert str(failure.value) == reason


@pytest.mark.parametrize(
    ("text", "changes"),
    [(None, {}), ("", {}), ("+a=1,-b", {"+a": "1", "-b": ""}), ("+a=x=y", {"+a": "x=y"})],
)
def test_attribute_syntax(text: str | None, changes: dict[str, str]) -> None:
    assert parse_changes(text) == changes


@pytest.mark.parametrize("text", ["a=1", "a", "+a=1,+a=2", "+a=1,"])
def test_bad_attribute_syntax(text: str) -> None:
    with pytest.raises(BadAttribute):
        parse_changes(text)


class TestDelete:
    code = RequestCode.DELETE_TOPIC_IN_BROKER

    def test_takes_queues_offsets_and_retry_topics_along(self, bench: Bench) -> None:
        for name in ("T", "%RETRY%g+T", "%RETRY%g_T", "%RETRY%g_U"):
            bench.topics.put(TopicConfig(name))
        bench.offsets.commit("g", "T", 0, 5, "peer")
        assert bench.ask(self.code, {"topic": "T"}).code == 0
        assert bench.deleted == ["%RETRY%g+T", "%RETRY%g_T", "T"]
        assert "T" not in bench.topics
        assert "%RETRY%g_U" in bench.topics
        assert bench.offsets.query("g", "T", 0) == -1

    def test_takes_turns_with_many_retry_topics(self, bench: Bench) -> None:
        groups = [f"g{number}" for number in range(60)]
        bench.topics.put(TopicConfig("T"), *(TopicConfig(f"%RETRY%{group}+T") for group in groups))
        for group in groups:
            bench.offsets.commit(group, "T", 0, 5, "peer")
        turn, deleted = 0, bench.deleted

        async def delete() -> None:
            nonlocal turn
            answer = bench.serve[self.code](Frame(self.code, {"topic": "T"}), PEER)
            assert isinstance(answer, Coroutine)
            deleting = asyncio.create_task(answer)
            while not deleting.done():
                turn += 1
                before = len(deleted)
                await asyncio.sleep(0)
                assert len(deleted) - before <= TOPICS_PER_TURN + 1
                assert ("T" in bench.topics) == (bench.offsets.query("g0", "T", 0) == 5), "both at once, and last"
            assert (await deleting).code == 0

        asyncio.run(delete())
        assert turn > 3
        assert (len(deleted), deleted[-1]) == (61, "T")
        assert not bench.offsets.groups_of("T")

    @pytest.mark.parametrize("name", ["../../x", "..", "TBW102", "rmq_sys_x"])
    def test_refuses_what_is_not_the_users(self, bench: Bench, name: str) -> None:
        assert bench.refused(self.code, {"topic": name})[0] == ResponseCode.INVALID_PARAMETER
        assert bench.deleted == []


class TestQuestions:
    def test_get(self, bench: Bench) -> None:
        bench.topics.put(TopicConfig("T"))
        answer = bench.ask(RequestCode.GET_TOPIC_CONFIG, {"topic": "T", "lo": "true"})
        assert answer.body == (
            b'{"attributes":{},"order":false,"perm":6,"readQueueNums":16,"topicFilterType":"SINGLE_TAG",'
            b'"topicName":"T","topicSysFlag":0,"writeQueueNums":16}'
        )
        assert bench.refused(RequestCode.GET_TOPIC_CONFIG, {"topic": "X"}) == (
            ResponseCode.TOPIC_NOT_EXIST,
            "No topic in this broker. topic: X",
        )

    def test_all(self, bench: Bench) -> None:
        answer = bench.ask(RequestCode.GET_ALL_TOPIC_CONFIG)
        body = fastjson.loads(answer.body)
        assert sorted(body) == [
            "dataVersion", "mappingDataVersion", "topicConfigTable", "topicQueueMappingDetailMap",
            "topicQueueMappingInfoMap",
        ]  # fmt: skip
        assert len(body["topicConfigTable"]) == len(bench.topics) == int(answer.fields["totalTopicNum"])

    def test_pages(self, bench: Bench) -> None:
        seen: list[str] = []
        version = ""
        while len(seen) < len(bench.topics):
            fields = {"topicSeq": str(len(seen)), "maxTopicNum": "4", "dataVersion": version}
            body = fastjson.loads(bench.ask(RequestCode.GET_ALL_TOPIC_CONFIG, fields).body)
            version = fastjson.dumps(body["dataVersion"]).decode()
            seen += body["topicConfigTable"]
        assert seen == sorted(topic.topic_name for topic in bench.topics.all())
        bench.topics.put(TopicConfig("A"))
        fields = {"topicSeq": "8", "maxTopicNum": "4", "dataVersion": version}
        body = fastjson.loads(bench.ask(RequestCode.GET_ALL_TOPIC_CONFIG, fields).body)
        assert next(iter(body["topicConfigTable"])) == "A"

    def test_a_bad_version_is_the_askers_fault(self, bench: Bench) -> None:
        with pytest.raises(BadBody):
            bench.ask(RequestCode.GET_ALL_TOPIC_CONFIG, {"topicSeq": "1", "dataVersion": "{"})

    def test_system_topics(self, bench: Bench) -> None:
        names = fastjson.loads(bench.ask(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER).body)["topicList"]
        assert {"TBW102", "DefaultCluster", "broker-a", "CHECKPOINT_TOPIC", "rmq_sys_wheel_timer"} <= set(names)
