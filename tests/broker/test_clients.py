"""Connected clients: membership against a model, what members are told, and what tools ask about them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from broker.live import live_broker, messages_of
from skylark.broker import clients as module
from skylark.broker import relays
from skylark.broker.client_requests import handlers
from skylark.broker.clients import NEWCOMER_DELAY_S, Clients
from skylark.broker.config import BrokerConfig
from skylark.broker.groups import Groups
from skylark.broker.questions import Questions
from skylark.broker.topics import Topics
from skylark.net.connection import Connection, RequestFailed
from skylark.wire.bodies import (
    CheckClient,
    ConsumerConnections,
    ConsumerData,
    ConsumerStatus,
    Heartbeat,
    MessageQueue,
    ProducerData,
    Subscription,
    decode_body,
    encode_body,
)
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import message_id
from skylark.wire.records import encode_host
from skylark.wire.tables import SubscriptionGroupConfig, TopicConfig

NOW_MS = 1_700_000_000_000
TIMEOUT_MS = 120_000


class FakeConnection:
    """Notes what it is asked to send; answers requests as the test says."""

    def __init__(self, name: str, host: str = "10.0.0.1") -> None:
        self.name = name
        self.peer = (host, 50_000)
        self.told: list[Frame] = []
        self.told_after_s: list[float] = []
        self.asked: list[Frame] = []
        self.answer: Callable[[Frame], Frame] | Exception = ConnectionError("nobody answers")
        self.is_closed = False
        self.is_open = True
        self.is_writable = True

    def __repr__(self) -> str:
        return self.name

    def notify(self, request: Frame, after_s: float = 0.0) -> bool:
        self.told.append(request)
        self.told_after_s.append(after_s)
        return True

    async def writable(self) -> None:
        """At once."""

    async def request(self, request: Frame, timeout_s: float) -> Frame:
        self.asked.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(request)

    def close(self) -> None:
        self.is_closed = True

    @property
    def as_connection(self) -> Connection:
        return cast(Connection, self)

    def take_told(self) -> list[tuple[int, dict[str, str]]]:
        told = [(frame.code, frame.fields) for frame in self.told]
        self.told.clear()
        return told


CHANGED = (int(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED), {"consumerGroup": "g"})


def consumer(group: str = "g", *topics: str, version: int = 1, model: str = "CLUSTERING") -> ConsumerData:
    return ConsumerData(
        consume_from_where="CONSUME_FROM_LAST_OFFSET",
        consume_type="CONSUME_PASSIVELY",
        group_name=group,
        message_model=model,
        subscription_data_set=[
            Subscription(topic=topic, sub_string="*", sub_version=version) for topic in topics or ("T",)
        ],
    )


class Bench:
    """The tables of a broker and connections to it."""

    def __init__(self, directory: Path, **changes: object) -> None:
        self.now_ms = NOW_MS
        self.config = msgspec.structs.replace(BrokerConfig(broker_name="b"), **changes)
        self.topics = Topics(directory, self.config, lambda: self.now_ms)
        self.groups = Groups(directory, self.config, lambda: self.now_ms)
        self.clients = Clients(self.topics, self.groups, self.config)
        self.serve = handlers(self.clients, self.config, lambda: self.now_ms)

    def beat(
        self,
        peer: FakeConnection,
        *consumers: ConsumerData,
        producers: tuple[str, ...] = (),
        fingerprint: int = 0,
        without_sub: bool = False,
    ) -> bool:
        beat = Heartbeat(
            client_id=f"{peer.name}@1",
            consumer_data_set=list(consumers),
            producer_data_set=[ProducerData(group_name=name) for name in producers],
            heartbeat_fingerprint=fingerprint,
            without_sub=without_sub,
        )
        return self.clients.heartbeat(beat, peer.as_connection, "JAVA", 513, self.now_ms)

    def ask(self, code: RequestCode, fields: dict[str, str] | None = None, body: bytes = b"") -> Frame:
        answer = self.serve[code](Frame(code, fields or {}, body), FakeConnection("tool").as_connection)
        if isinstance(answer, Coroutine):
            answer = asyncio.run(answer)
        assert isinstance(answer, Frame)
        return answer

    def refused(self, code: RequestCode, fields: dict[str, str] | None = None, body: bytes = b"") -> tuple[int, str]:
        with pytest.raises(RequestFailed) as failure:
            self.ask(code, fields, body)
        return failure.value.code, failure.value.remark

    def is_empty(self) -> bool:
        tables = [table for table in vars(self.clients).values() if isinstance(table, dict)]
        return not any(tables) and not self.clients._characters


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def a() -> FakeConnection:
    return FakeConnection("a")


@pytest.fixture
def b() -> FakeConnection:
    return FakeConnection("b")


class ClientMachine(RuleBasedStateMachine):
    """Members come, go, fall silent and change their minds; a model knows who must be there and who must be told."""

    peers = st.integers(0, 3)
    groups = st.sampled_from(["g", "h"])
    topics = st.lists(st.sampled_from(["T", "U", "V"]), unique=True, min_size=1)

    def __init__(self) -> None:
        super().__init__()
        self.directory = TemporaryDirectory()
        self.bench = Bench(Path(self.directory.name))
        self.connections = [FakeConnection(f"c{i}") for i in range(4)]
        self.consumers: dict[str, dict[FakeConnection, int]] = {"g": {}, "h": {}}
        self.producers: dict[str, dict[FakeConnection, int]] = {"g": {}, "h": {}}
        self.subscribed: dict[str, set[str]] = {"g": set(), "h": set()}

    def teardown(self) -> None:
        self.directory.cleanup()

    def expect_told(self, *groups: str) -> None:
        expected = {
            connection: [group for group in groups if connection in self.consumers[group]]
            for connection in self.connections
        }
        for connection in self.connections:
            told = sorted(fields["consumerGroup"] for _, fields in connection.take_told())
            assert told == sorted(expected[connection])

    def leave(self, table: dict[str, dict[FakeConnection, int]], group: str, peer: FakeConnection) -> bool:
        if table[group].pop(peer, None) is None:
            return False
        if table is self.consumers and not table[group]:
            self.subscribed[group] = set()
        return True

    @rule(peer=peers, group=groups, topics=topics)
    def consume(self, peer: int, group: str, topics: list[str]) -> None:
        connection = self.connections[peer]
        is_changed = connection not in self.consumers[group] or self.subscribed[group] != set(topics)
        self.bench.beat(connection, consumer(group, *topics))
        self.consumers[group][connection] = self.bench.now_ms
        self.subscribed[group] = set(topics)
        self.expect_told(*[group] if is_changed else [])

    @rule(peer=peers, group=groups)
    def produce(self, peer: int, group: str) -> None:
        self.bench.beat(self.connections[peer], producers=(group,))
        self.producers[group][self.connections[peer]] = self.bench.now_ms
        self.expect_told()

    @rule(peer=peers, consumed=st.none() | groups, produced=st.none() | groups)
    def unregister(self, peer: int, consumed: str | None, produced: str | None) -> None:
        connection = self.connections[peer]
        self.bench.clients.unregister(connection.as_connection, consumed, produced)
        if produced is not None:
            self.leave(self.producers, produced, connection)
        left = consumed is not None and self.leave(self.consumers, consumed, connection)
        self.expect_told(*[consumed] if consumed is not None and left else [])

    def drop(self, connection: FakeConnection) -> list[str]:
        for group in ("g", "h"):
            self.leave(self.producers, group, connection)
        return [group for group in ("g", "h") if self.leave(self.consumers, group, connection)]

    @rule(peer=peers)
    def close(self, peer: int) -> None:
        connection = self.connections[peer]
        self.bench.clients.closed(connection.as_connection)
        self.expect_told(*self.drop(connection))
        self.connections[peer] = FakeConnection(connection.name)

    @rule(passed_ms=st.integers(0, TIMEOUT_MS // 2))
    def wait(self, passed_ms: int) -> None:
        self.bench.now_ms += passed_ms
        self.bench.clients.expire(self.bench.now_ms)
        silent = {
            connection
            for table in (*self.consumers.values(), *self.producers.values())
            for connection, seen_ms in table.items()
            if self.bench.now_ms - seen_ms > TIMEOUT_MS
        }
        for connection in silent:
            self.drop(connection)
            assert connection.is_closed
        for i, connection in enumerate(self.connections):
            if connection in silent:
                self.connections[i] = FakeConnection(connection.name)
            connection.take_told()

    @invariant()
    def agrees(self) -> None:
        clients = self.bench.clients
        for group in ("g", "h"):
            known = clients.group(group)
            members = list(known.members.values()) if known else []
            assert {repr(member.connection) for member in members} == {repr(peer) for peer in self.consumers[group]}
            assert set(known.subscriptions if known else ()) == self.subscribed[group]
            producers = {repr(member.connection) for member in clients.producers(group)}
            assert producers == {repr(peer) for peer in self.producers[group]}
        for topic in ("T", "U", "V"):
            assert clients.groups_of(topic) == {group for group in ("g", "h") if topic in self.subscribed[group]}
        if not any(self.consumers.values()) and not any(self.producers.values()):
            assert self.bench.is_empty()


TestClientMachine = ClientMachine.TestCase
TestClientMachine.settings = settings(max_examples=60, stateful_step_count=30)


class TestNotification:
    def test_members_hear_of_each_other(self, bench: Bench, a: FakeConnection, b: FakeConnection) -> None:
        bench.beat(a, consumer())
        assert a.take_told() == [CHANGED]
        bench.beat(b, consumer())
        assert a.take_told() == b.take_told() == [CHANGED]
        bench.beat(b, consumer())
        bench.clients.closed(b.as_connection)
        assert a.take_told() == [CHANGED]
        assert b.take_told() == []

    def test_a_newer_subscription_replaces_the_old_one(self, bench: Bench, a: FakeConnection) -> None:
        bench.beat(a, consumer(version=1))
        a.take_told()
        bench.beat(a, consumer(version=3))
        bench.beat(a, consumer(version=2))
        subscription = bench.clients.subscription("g", "T")
        assert subscription is not None
        assert subscription.sub_version == 3
        assert a.take_told() == []

    def test_broadcasting_groups_share_nothing(self, bench: Bench, a: FakeConnection, b: FakeConnection) -> None:
        bench.beat(a, consumer(model="BROADCASTING"))
        bench.beat(b, consumer(model="BROADCASTING"))
        bench.clients.closed(b.as_connection)
        assert a.take_told() == []

    def test_can_be_switched_off_for_the_broker(self, tmp_path: Path, a: FakeConnection) -> None:
        Bench(tmp_path, notify_consumer_ids_changed_enable=False).beat(a, consumer())
        assert a.take_told() == []

    def test_can_be_switched_off_for_a_group(self, bench: Bench, a: FakeConnection) -> None:
        bench.groups.put(SubscriptionGroupConfig("g", notify_consumer_ids_changed_enable=False))
        bench.beat(a, consumer())
        assert a.take_told() == []


class TestHeartbeat:
    def test_makes_the_retry_topic(self, bench: Bench, a: FakeConnection) -> None:
        bench.groups.put(SubscriptionGroupConfig("g", retry_queue_nums=3))
        bench.topics.put(TopicConfig("ordered", order=True))
        bench.beat(a, consumer("g", "ordered"))
        assert bench.topics.get("%RETRY%g") == TopicConfig("%RETRY%g", 3, 3, 6, order=True)
        data = consumer("h")
        data.unit_mode = True
        bench.beat(a, data)
        retry = bench.topics.get("%RETRY%h")
        assert retry is not None
        assert retry.topic_sys_flag == 2

    def test_for_a_group_that_may_not_be_is_passed_over(self, tmp_path: Path, a: FakeConnection) -> None:
        bench = Bench(tmp_path, auto_create_subscription_group=False)
        bench.beat(a, consumer(), producers=("p",))
        assert bench.clients.group("g") is None
        assert "%RETRY%g" not in bench.topics
        assert len(bench.clients.producers("p")) == 1

    def test_answers_the_first_form(self, bench: Bench, a: FakeConnection) -> None:
        body = encode_body(Heartbeat(client_id="x", consumer_data_set=[consumer()]))
        answer = bench.serve[RequestCode.HEART_BEAT](Frame(RequestCode.HEART_BEAT, body=body), a.as_connection)
        assert isinstance(answer, Frame)
        assert answer.fields == {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true"}

    def test_the_second_form_may_leave_subscriptions_out(self, bench: Bench, a: FakeConnection) -> None:
        assert not bench.beat(a, consumer(), fingerprint=7)
        bare = consumer()
        bare.subscription_data_set = []
        assert not bench.beat(a, bare, fingerprint=7, without_sub=True)
        assert bench.clients.subscription("g", "T") is not None

    def test_a_new_fingerprint_is_a_change(self, bench: Bench, a: FakeConnection, b: FakeConnection) -> None:
        bench.beat(a, consumer(), fingerprint=7)
        assert bench.beat(b, consumer(), fingerprint=8)
        assert not bench.beat(b, consumer(), fingerprint=8)

    def test_a_broker_that_knows_nothing_asks_for_the_subscriptions(self, bench: Bench, a: FakeConnection) -> None:
        bare = consumer()
        bare.subscription_data_set = []
        assert bench.beat(a, bare, fingerprint=7, without_sub=True)

    def test_a_connection_is_in_a_bounded_number_of_groups(
        self, bench: Bench, a: FakeConnection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "MAX_GROUPS_PER_CONNECTION", 3)
        bench.beat(a, consumer("g"), consumer("h"), producers=("p", "q", "x" * 256))
        bench.beat(a, consumer("g"), consumer("h"), consumer("i"), producers=("p", "q"))
        assert {group.name for group in bench.clients.consumer_groups()} == {"g", "h"}
        assert [name for name, _ in bench.clients.producer_groups()] == ["p"]


class TestSilence:
    def test_ends_a_membership(self, bench: Bench, a: FakeConnection, b: FakeConnection) -> None:
        bench.beat(a, consumer(), producers=("p",))
        bench.beat(b, consumer())
        for _ in range(5):
            bench.now_ms += 30_000
            bench.beat(b, consumer())
            b.take_told()
            bench.clients.expire(bench.now_ms)
        assert a.is_closed
        assert not b.is_closed
        assert b.take_told() == [CHANGED]
        assert bench.clients.producers("p") == []

    @pytest.mark.parametrize("jump_ms", [3_600_000, -3_600_000])
    def test_is_not_what_a_clock_says_that_jumped(self, bench: Bench, a: FakeConnection, jump_ms: int) -> None:
        bench.beat(a, consumer())
        bench.clients.expire(bench.now_ms)
        bench.now_ms += jump_ms
        for _ in range(4):
            bench.clients.expire(bench.now_ms)
            bench.now_ms += 30_000
        assert not a.is_closed
        bench.now_ms += 30_000
        bench.clients.expire(bench.now_ms)
        assert a.is_closed

    @pytest.mark.parametrize("timeout_ms", [1, 5_000, 19_999])
    def test_may_be_short(self, tmp_path: Path, a: FakeConnection, timeout_ms: int) -> None:
        bench = Bench(tmp_path, channel_expired_timeout=timeout_ms)
        bench.clients.expire(bench.now_ms)
        bench.beat(a, consumer())
        bench.clients.expire(bench.now_ms + timeout_ms)
        assert not a.is_closed
        for passed_ms in (10_000, 20_000):
            bench.clients.expire(bench.now_ms + timeout_ms + passed_ms)
        assert a.is_closed


class TestUnregister:
    def test_by_request(self, bench: Bench, a: FakeConnection, b: FakeConnection) -> None:
        bench.beat(a, consumer(), producers=("p",))
        bench.beat(b, consumer())
        a.take_told()
        fields = {"clientID": "b@1", "consumerGroup": "g"}
        code = RequestCode.UNREGISTER_CLIENT
        bench.serve[code](Frame(code, fields), b.as_connection)
        assert a.take_told() == [CHANGED]
        bench.serve[code](Frame(code, fields | {"producerGroup": "p"}), a.as_connection)
        assert bench.is_empty()

    def test_of_a_stranger_does_nothing(self, bench: Bench, a: FakeConnection, b: FakeConnection) -> None:
        bench.beat(a, consumer())
        a.take_told()
        bench.clients.unregister(b.as_connection, "g", "p")
        bench.clients.closed(b.as_connection)
        assert a.take_told() == []
        assert bench.clients.member("g", "a@1") is not None


class TestCheck:
    code = RequestCode.CHECK_CLIENT_CONFIG

    def body(self, kind: str | None) -> bytes:
        subscription = Subscription(topic="T", sub_string="a > 1", expression_type=kind)
        return encode_body(CheckClient(client_id="c", group="g", subscription_data=subscription))

    @pytest.mark.parametrize("kind", [None, "", "TAG"])
    def test_tags_are_fine(self, bench: Bench, kind: str | None) -> None:
        assert bench.ask(self.code, body=self.body(kind)).code == 0
        assert bench.ask(self.code).code == 0

    def test_expressions_are_off_by_default(self, bench: Bench) -> None:
        assert bench.refused(self.code, body=self.body("SQL92")) == (
            ResponseCode.SYSTEM_ERROR,
            "The broker does not support consumer to filter message by SQL92",
        )

    def test_expressions_are_checked(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path, enable_property_filter=True)
        bench.serve = handlers(bench.clients, bench.config, lambda: 0, lambda kind, text: None)
        assert bench.ask(self.code, body=self.body("SQL92")).code == 0
        bench.serve = handlers(bench.clients, bench.config, lambda: 0, lambda kind, text: f"{kind} can't read {text}")
        assert bench.refused(self.code, body=self.body("SQL92")) == (
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
            "SQL92 can't read a > 1",
        )


class TestQuestions:
    def test_consumer_ids(self, bench: Bench, a: FakeConnection, b: FakeConnection) -> None:
        code = RequestCode.GET_CONSUMER_LIST_BY_GROUP
        bench.beat(a, consumer())
        bench.beat(b, consumer())
        assert bench.ask(code, {"consumerGroup": "g"}).body == b'{"consumerIdList":["a@1","b@1"]}'
        assert bench.refused(code, {"consumerGroup": "x"}) == (
            ResponseCode.SYSTEM_ERROR,
            "no consumer for this group, x",
        )

    def test_consumer_connections(self, bench: Bench, a: FakeConnection) -> None:
        code = RequestCode.GET_CONSUMER_CONNECTION_LIST
        bench.beat(a, consumer())
        assert bench.ask(code, {"consumerGroup": "g"}).body == (
            b'{"connectionSet":[{"clientAddr":"a","clientId":"a@1","language":"JAVA","version":513}],'
            b'"consumeFromWhere":"CONSUME_FROM_LAST_OFFSET","consumeType":"CONSUME_PASSIVELY",'
            b'"messageModel":"CLUSTERING","subscriptionTable":{"T":{"classFilterMode":false,"codeSet":[],'
            b'"expressionType":"TAG","subString":"*","subVersion":1,"tagsSet":[],"topic":"T"}}}'
        )
        assert bench.refused(code, {"consumerGroup": "x"}) == (
            ResponseCode.CONSUMER_NOT_ONLINE,
            "the consumer group[x] not online",
        )

    def test_producer_connections(self, bench: Bench, a: FakeConnection) -> None:
        code = RequestCode.GET_PRODUCER_CONNECTION_LIST
        bench.beat(a, producers=("p",))
        assert bench.ask(code, {"producerGroup": "p"}).body == (
            b'{"connectionSet":[{"clientAddr":"a","clientId":"a@1","language":"JAVA","version":513}]}'
        )
        assert bench.refused(code, {"producerGroup": "x"}) == (
            ResponseCode.SYSTEM_ERROR,
            "the producer group[x] not exist",
        )

    def test_producer_table(self, bench: Bench, a: FakeConnection) -> None:
        bench.beat(a, producers=("p",))
        assert bench.ask(RequestCode.GET_ALL_PRODUCER_INFO).body == (
            b'{"data":{"p":[{"clientId":"a@1","language":"JAVA","lastUpdateTimestamp":1700000000000,'
            b'"remoteIP":"/a","version":513}]}}'
        )

    def test_subscription(self, bench: Bench, a: FakeConnection) -> None:
        code = RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER
        bench.beat(a, consumer())
        assert b'"subscriptionData":{"classFilterMode"' in bench.ask(code, {"group": "g", "topic": "T"}).body
        assert bench.ask(code, {"group": "g", "topic": "x"}).body == b'{"group":"g","topic":"x"}'


class TestReset:
    offsets = {MessageQueue("b", 0, "T"): 17}  # noqa: RUF012 (never changed)

    def test_is_pushed_to_every_member_in_its_form(self, bench: Bench, a: FakeConnection, b: FakeConnection) -> None:
        bench.beat(a, consumer())
        beat = Heartbeat(client_id="cpp", consumer_data_set=[consumer()])
        bench.clients.heartbeat(beat, b.as_connection, "CPP", 400, bench.now_ms)
        a.take_told()
        b.take_told()
        assert bench.clients.push_reset("g", "T", 5, self.offsets) == []
        (to_java,), (to_cpp,) = a.told, b.told
        assert to_java.code == RequestCode.RESET_CONSUMER_CLIENT_OFFSET
        assert (to_java.fields["topic"], to_java.fields["group"], to_java.fields["timestamp"]) == ("T", "g", "5")
        assert to_java.body == b'{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"T"}:17}}'
        assert to_cpp.body == b'{"offsetTable":[{"brokerName":"b","offset":17,"queueId":0,"topic":"T"}]}'

    def test_needs_members_that_understand(self, bench: Bench, a: FakeConnection) -> None:
        with pytest.raises(RequestFailed, match="Consumer not online, so can not reset offset, Group: g Topic: T"):
            bench.clients.push_reset("g", "T", 5, self.offsets)
        beat = Heartbeat(client_id="old", consumer_data_set=[consumer()])
        bench.clients.heartbeat(beat, a.as_connection, "JAVA", 27, bench.now_ms)
        with pytest.raises(RequestFailed, match="does not support this feature"):
            bench.clients.push_reset("g", "T", 5, self.offsets)


class FakeStore:
    """A log with one record, at offset 100."""

    def record_at(self, log_offset: int) -> memoryview | None:
        return memoryview(b"record") if log_offset == 100 else None


class TestRelays:
    fields = {"consumerGroup": "g", "clientId": "a@1", "jstackEnable": "true"}  # noqa: RUF012 (never changed)

    def ask(self, bench: Bench, code: RequestCode, fields: dict[str, str]) -> Frame:
        serve = relays.handlers(bench.clients, FakeStore(), bench.topics, bench.groups, bench.config, Questions())

        async def call() -> Frame:
            answer = serve[code](Frame(code, fields, opaque=9), FakeConnection("tool").as_connection)
            answer = await cast(Awaitable[Frame], answer)
            assert answer is not None
            return answer

        return asyncio.run(call())

    def test_running_info_comes_back_as_it_is(self, bench: Bench, a: FakeConnection) -> None:
        bench.beat(a, consumer())
        a.answer = lambda request: Frame(0, {"x": "y"}, b"info", remark="fine", opaque=77)
        answer = self.ask(bench, RequestCode.GET_CONSUMER_RUNNING_INFO, self.fields)
        assert (answer.code, answer.remark, answer.body, answer.opaque) == (0, "fine", b"info", 9)
        assert (a.asked[0].code, a.asked[0].fields) == (307, self.fields)

    def test_of_a_client_that_is_not_there(self, bench: Bench, a: FakeConnection) -> None:
        with pytest.raises(RequestFailed) as failure:
            self.ask(bench, RequestCode.GET_CONSUMER_RUNNING_INFO, self.fields)
        assert failure.value.remark == "The Consumer <g> <a@1> not online"

    @pytest.mark.parametrize(
        ("trouble", "code", "remark"),
        [
            (TimeoutError(), ResponseCode.CONSUME_MSG_TIMEOUT, "consumer <g> <a@1> Timeout: "),
            (ConnectionError("gone"), ResponseCode.SYSTEM_ERROR, "invoke consumer <g> <a@1> Exception: gone"),
        ],
    )
    def test_of_a_client_that_does_not_answer(
        self, bench: Bench, a: FakeConnection, trouble: Exception, code: int, remark: str
    ) -> None:
        bench.beat(a, consumer())
        a.answer = trouble
        with pytest.raises(RequestFailed) as failure:
            self.ask(bench, RequestCode.GET_CONSUMER_RUNNING_INFO, self.fields)
        assert failure.value.code == code
        assert failure.value.remark.startswith(remark)

    def test_a_message_to_consume_directly_goes_along(self, bench: Bench, a: FakeConnection) -> None:
        bench.beat(a, consumer())
        bench.topics.put(TopicConfig("T", topic_sys_flag=1))
        a.answer = lambda request: Frame(0, body=b"result")
        fields = {
            "consumerGroup": "g", "clientId": "a@1", "topic": "T", "msgId": message_id(encode_host("1.2.3.4", 5), 100),
        }  # fmt: skip
        assert self.ask(bench, RequestCode.CONSUME_MESSAGE_DIRECTLY, fields).body == b"result"
        (asked,) = a.asked
        assert asked.body == b"record"
        assert asked.fields == fields | {"brokerName": "b", "topicSysFlag": "1", "groupSysFlag": "0"}

    @pytest.mark.parametrize("name", ["", "nonsense", message_id(encode_host("1.2.3.4", 5), 101)])
    def test_no_such_message_to_consume_directly(self, bench: Bench, a: FakeConnection, name: str) -> None:
        bench.beat(a, consumer())
        fields = {"consumerGroup": "g", "clientId": "a@1", "topic": "T", "msgId": name}
        with pytest.raises(RequestFailed):
            self.ask(bench, RequestCode.CONSUME_MESSAGE_DIRECTLY, fields)

    def test_status_is_collected_from_those_who_answer(
        self, bench: Bench, a: FakeConnection, b: FakeConnection
    ) -> None:
        bench.beat(a, consumer())
        bench.beat(b, consumer())
        status = ConsumerStatus(message_queue_table={MessageQueue("b", 0, "T"): 5})
        a.answer = lambda request: Frame(0, body=encode_body(status))
        code = RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS
        assert self.ask(bench, code, {"topic": "T", "group": "g"}).body == (
            b'{"consumerTable":{"a@1":{{"brokerName":"b","queueId":0,"topic":"T"}:5}},"messageQueueTable":{}}'
        )
        assert (a.asked[0].code, a.asked[0].fields) == (221, {"topic": "T", "group": "g"})
        only_b = {"topic": "T", "group": "g", "clientAddr": "b@1"}
        assert self.ask(bench, code, only_b).body == b'{"consumerTable":{},"messageQueueTable":{}}'
        assert len(a.asked) == 1
        with pytest.raises(RequestFailed, match=r"No Any Consumer online in the consumer group: \[x\]"):
            self.ask(bench, code, {"topic": "T", "group": "x"})


def test_who_joins_is_told_after_its_heartbeat_was_answered(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first, second = FakeConnection("a"), FakeConnection("b")
    bench.beat(first, consumer())
    bench.beat(second, consumer())
    assert first.told_after_s == [NEWCOMER_DELAY_S, 0.0]
    assert second.told_after_s == [NEWCOMER_DELAY_S]


def test_members_that_subscribe_differently_are_reported_once(
    bench: Bench, a: FakeConnection, b: FakeConnection, caplog: pytest.LogCaptureFixture
) -> None:
    def divided() -> list[str]:
        return [record.getMessage() for record in caplog.records if "is divided" in record.getMessage()]

    bench.beat(a, consumer("g", "T"))
    bench.beat(b, consumer("g", "T", "%RETRY%g"))
    assert divided() == []
    bench.beat(b, consumer("g", "U"))
    assert divided() == [
        "group g is divided, and messages will not reach it: b@1 subscribes to U by TAG *, but a@1 to T by TAG *. A "
        "group has one subscription, that of the member heard last: let all its members subscribe to the same"
    ]
    caplog.clear()
    for _ in range(3):
        bench.beat(a, consumer("g", "T"))
        bench.beat(b, consumer("g", "U"))
    assert divided() == []
    with caplog.at_level("INFO"):
        bench.beat(b, consumer("g", "T"))
        assert "all members of group g subscribe to the same again" in caplog.text
        bench.beat(b, consumer("g", "U"))
    assert len(divided()) == 1


def test_only_who_says_that_it_leaves_has_left(bench: Bench, a: FakeConnection, b: FakeConnection) -> None:
    left: list[tuple[str, str]] = []
    bench.clients.on_leave = lambda group, client_id: left.append((group, client_id))
    bench.beat(a, consumer("g", "T"))
    bench.beat(b, consumer("g", "T"))
    bench.clients.closed(a.as_connection)
    assert left == []
    bench.clients.unregister(b.as_connection, "g", None)
    bench.clients.unregister(b.as_connection, "g", None)
    assert left == [("g", "b@1")]


def test_a_client_that_writes_enums_as_numbers_consumes(tmp_path: Path) -> None:
    beat = (
        b'{"clientID":"c@1","consumerDataSet":[{"consumeFromWhere":4,"consumeType":1,"groupName":"g","messageModel":1,'
        b'"subscriptionDataSet":[{"subString":"*","subVersion":"1","topic":"t"}]}]}'
    )

    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.send("t", b"for C++")
            assert (await broker.ask(RequestCode.HEART_BEAT, beat)).code == ResponseCode.SUCCESS
            # The pull brings no subscription: that of the heartbeat counts.
            (found,) = messages_of(await broker.pull("t", 0, group="g", sysFlag=0, subVersion=1))
            assert found.body == b"for C++"
            answer = await broker.ask(RequestCode.GET_CONSUMER_CONNECTION_LIST, consumerGroup="g")
            told = decode_body(ConsumerConnections, answer.body)
            assert (told.consume_from_where, told.consume_type, told.message_model) == (
                "CONSUME_FROM_FIRST_OFFSET",
                "CONSUME_PASSIVELY",
                "CLUSTERING",
            )

    asyncio.run(run())


def test_a_client_that_is_still_there_on_another_connection_has_not_left(bench: Bench) -> None:
    left: list[tuple[str, str]] = []
    bench.clients.on_leave = lambda group, client_id: left.append((group, client_id))
    one, two = FakeConnection("same"), FakeConnection("same")
    for peer in (one, two):
        bench.beat(peer, consumer("g", "T"), consumer("h", "T"))
    bench.clients.unregister(one.as_connection, "g", None)
    assert left == []
    bench.clients.unregister(two.as_connection, "g", None)
    assert left == [("g", "same@1")]
