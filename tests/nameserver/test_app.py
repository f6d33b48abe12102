"""A name server on a real socket, asked as brokers, clients and operators ask it."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from skylark.nameserver import brokers, handlers, reading, routes
from skylark.nameserver.app import NameServer
from skylark.nameserver.config import NamesrvConfig
from skylark.nameserver.living import Broker
from skylark.nameserver.routes import Routes
from skylark.nameserver.threads import in_thread
from skylark.net.pool import Pool
from skylark.wire.bodies import decode_body, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Encoding, Frame
from skylark.wire.routes import (
    RegisterBrokerBody,
    TopicConfigWrapper,
    TopicRouteData,
    decode_register_body,
    encode_register_body,
)
from skylark.wire.tables import DataVersion, TopicConfig

VERSION = DataVersion(counter=3, timestamp_ms=5)
TOPICS = {name: TopicConfig(topic_name=name, read_queue_nums=8, write_queue_nums=9) for name in ("A", "B")}
BODY = RegisterBrokerBody(
    topic_config_serialize_wrapper=TopicConfigWrapper(data_version=VERSION, topic_config_table=TOPICS)
)
BROKER = {"clusterName": "c", "brokerName": "a", "brokerAddr": "h:1", "brokerId": "0", "haServerAddr": "h:2"}


class Client:
    """Asks one name server over one connection."""

    def __init__(self, port: int) -> None:
        self._pool = Pool()
        self._address = f"127.0.0.1:{port}"

    async def ask(
        self, code: int, fields: dict[str, str] | None = None, body: bytes = b"", version: int = 513
    ) -> Frame:
        return await self._pool.request(self._address, Frame(code, fields or {}, body, version=version), 60.0)

    async def register(self, body: bytes | None = None, **fields: str) -> Frame:
        data = encode_register_body(BODY) if body is None else body
        return await self.ask(RequestCode.REGISTER_BROKER, {**BROKER, **fields}, data)

    async def route(self, topic: str = "B", version: int = 513, **fields: str) -> Frame:
        return await self.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic, **fields}, version=version)

    async def topics(self, code: int = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, **fields: str) -> list[str]:
        names: list[str] = json.loads((await self.ask(code, fields)).body)["topicList"]
        return names

    def close(self) -> None:
        self._pool.close()


class Clock:
    now_ms = 1_000

    def __call__(self) -> int:
        return self.now_ms


@asynccontextmanager
async def serving(
    directory: Path, clock: Callable[[], int] | None = None, **settings: Any
) -> AsyncIterator[tuple[NameServer, Client]]:
    server = NameServer(NamesrvConfig(kv_config_path=str(directory / "kvConfig.json"), **settings), clock or Clock())
    client = Client(await server.start("127.0.0.1", 0))
    try:
        yield server, client
    finally:
        client.close()
        await server.stop()


@pytest.fixture
def asking(tmp_path: Path) -> Callable[..., None]:
    """Runs a conversation with a fresh name server."""

    def run(conversation: Callable[[Client], Coroutine[Any, Any, None]], **settings: Any) -> None:
        async def main() -> None:
            async with serving(tmp_path, **settings) as (_, client):
                await conversation(client)

        asyncio.run(main())

    return run


def test_a_route_has_apaches_bytes(asking: Callable[..., None]) -> None:
    standard = (
        b'{"brokerDatas":[{"brokerAddrs":{"0":"h:1"},"brokerName":"a","cluster":"c","enableActingMaster":false}],'
        b'"filterServerTable":{},"queueDatas":[{"brokerName":"a","perm":6,"readQueueNums":8,"topicSysFlag":0,'
        b'"writeQueueNums":9}]}'
    )
    loose = standard.replace(b'"0":', b"0:")

    async def conversation(client: Client) -> None:
        assert (await client.register()).code == ResponseCode.SUCCESS
        assert (await client.route()).body == standard
        assert (await client.route(version=401)).body == standard
        assert (await client.route(version=400)).body == loose
        assert (await client.route(version=400, acceptStandardJsonOnly="true")).body == standard
        cluster = await client.ask(RequestCode.GET_BROKER_CLUSTER_INFO)
        assert cluster.body == (
            b'{"brokerAddrTable":{"a":{"brokerAddrs":{0:"h:1"},"brokerName":"a","cluster":"c",'
            b'"enableActingMaster":false}},"clusterAddrTable":{"c":["a"]}}'
        )

    asking(conversation)


def test_an_answer_of_many_brokers_is_encoded_beside_the_loop(
    asking: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []

    async def noted(work: Callable[[], Any]) -> Any:
        threads.append(True)
        return await in_thread(work)

    monkeypatch.setattr(handlers, "in_thread", noted)

    async def conversation(client: Client) -> None:
        for number in range(3):
            await client.register(brokerName=f"b{number}", brokerAddr=f"h:{number}")

        async def answers() -> list[Frame]:
            zone = {"__ZONE_NAME": "z", "__ZONE_MODE": "true"}
            routes = [client.route(), client.route(version=400), client.route("B", 513, **zone), client.route("None")]
            return [*await asyncio.gather(*routes), await client.ask(RequestCode.GET_BROKER_CLUSTER_INFO)]

        before = await answers()
        assert threads == []
        monkeypatch.setattr(handlers, "_MOST_NAMES_AT_ONCE", 2)
        after = await answers()
        assert len(threads) == 4
        assert [(each.code, each.remark, each.body) for each in after] == [
            (each.code, each.remark, each.body) for each in before
        ]
        monkeypatch.setattr(reading, "MOST_WAITING_BYTES", 0)
        assert (await client.ask(RequestCode.GET_BROKER_CLUSTER_INFO)).code == ResponseCode.SYSTEM_BUSY

    asking(conversation)


def test_many_topics_are_looked_through_in_turns_and_not_sorted(
    asking: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "_MOST_TOPICS_AT_ONCE", 10)
    sizes: list[int] = []
    look = Routes.topics_by_flag

    def noted(self: Routes, topics: list[str], accepts: Callable[[int], bool]) -> list[str]:
        sizes.append(len(topics))
        return look(self, topics, accepts)

    monkeypatch.setattr(Routes, "topics_by_flag", noted)
    body = many(25)
    for topic in body.topic_config_serialize_wrapper.topic_config_table.values():
        topic.topic_sys_flag = 1
    names = list(body.topic_config_serialize_wrapper.topic_config_table)

    async def conversation(client: Client) -> None:
        await client.register(encode_register_body(body))
        assert sorted(await client.topics()) == names
        assert sorted(await client.topics(RequestCode.GET_TOPICS_BY_CLUSTER, cluster="c")) == names
        assert sorted(await client.topics(RequestCode.GET_UNIT_TOPIC_LIST)) == names
        assert sizes == [10, 10, 5]
        assert await client.topics(RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST) == []
        monkeypatch.setattr(reading, "MOST_WAITING_BYTES", 0)
        assert (await client.ask(RequestCode.GET_UNIT_TOPIC_LIST)).code == ResponseCode.SYSTEM_BUSY

    asking(conversation)


def test_a_host_has_one_list_of_many_topics_made_at_a_time(
    asking: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "_MOST_TOPICS_AT_ONCE", 10)
    looks: list[str] = []
    look = Routes.topics_by_flag

    def noted(self: Routes, topics: list[str], accepts: Callable[[int], bool]) -> list[str]:
        looks.append(topics[0])
        return look(self, topics, accepts)

    monkeypatch.setattr(Routes, "topics_by_flag", noted)

    async def conversation(client: Client) -> None:
        await client.register(encode_register_body(many(25)))
        await asyncio.gather(*(client.topics(RequestCode.GET_UNIT_TOPIC_LIST) for _ in range(4)))
        assert looks == looks[:3] * 4
        assert len(set(looks)) == 3

    asking(conversation)


def test_a_topic_without_a_route(asking: Callable[..., None]) -> None:
    async def conversation(client: Client) -> None:
        answer = await client.route("Nope")
        assert answer.code == ResponseCode.TOPIC_NOT_EXIST
        assert answer.remark == (
            "No topic route info in name server for the topic: Nope"
            "\nSee https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."
        )

    asking(conversation)


def test_a_registration_is_checked_and_may_be_compressed(asking: Callable[..., None]) -> None:
    plain, compressed = encode_register_body(BODY), encode_register_body(BODY, compressed=True)

    async def conversation(client: Client) -> None:
        wrong = await client.register(bodyCrc32="77")
        assert (wrong.code, wrong.remark) == (ResponseCode.SYSTEM_ERROR, "crc32 not match")
        assert (await client.register(b"{{{")).code == ResponseCode.SYSTEM_ERROR
        assert (await client.register(brokerId="x")).code == ResponseCode.SYSTEM_ERROR
        alone = RegisterBrokerBody(
            topic_config_serialize_wrapper=TopicConfigWrapper(topic_config_table={"A": TOPICS["A"]})
        )
        early = await client.register(encode_register_body(alone))
        assert (early.code, early.remark) == (ResponseCode.SYSTEM_ERROR, "register broker failed")
        assert await client.topics() == []
        assert (await client.register(bodyCrc32=str(crc32(plain) & 0x7FFFFFFF))).code == 0
        answer = await client.register(compressed, compressed="true", brokerName="b", brokerAddr="h:3")
        assert answer.code == 0
        assert await client.topics() == ["A", "B"]
        assert await client.topics(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS) == ["a", "b", "c"]

    asking(conversation)


def many(count: int, counter: int = 3, name: str = "topic-{:06d}") -> RegisterBrokerBody:
    names = [name.format(number) for number in range(count)]
    table = {each: TopicConfig(topic_name=each, read_queue_nums=1, write_queue_nums=1) for each in names}
    version = DataVersion(counter=counter, timestamp_ms=5)
    return RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigWrapper(data_version=version, topic_config_table=table)
    )


@pytest.mark.parametrize("compressed", [False, True])
def test_a_registration_of_many_topics_is_read_beside_the_loop_and_taken_by_parts(
    asking: Callable[..., None], monkeypatch: pytest.MonkeyPatch, compressed: bool
) -> None:
    monkeypatch.setattr(brokers, "MAX_LENIENT_BYTES", 1_000)
    monkeypatch.setattr(brokers, "_MOST_TOPICS_AT_ONCE", 10)
    sizes: list[int] = []
    take = Routes.register

    def noted(self: Routes, broker: Broker, body: RegisterBrokerBody, *rest: Any, **more: Any) -> Any:
        sizes.append(len(body.topic_config_serialize_wrapper.topic_config_table))
        return take(self, broker, body, *rest, **more)

    monkeypatch.setattr(Routes, "register", noted)

    async def conversation(client: Client) -> None:
        body = encode_register_body(many(41), compressed=compressed)
        assert (await client.register(body, compressed=str(compressed).lower())).code == ResponseCode.SUCCESS
        assert sizes == [10, 10, 10, 10, 1]
        assert len(await client.topics()) == 41
        answer = await client.ask(
            RequestCode.QUERY_DATA_VERSION, BROKER, encode_body(DataVersion(counter=3, timestamp_ms=5))
        )
        assert answer.fields["changed"] == "false"
        # The same again leaves wiped permissions as they are.
        await client.ask(RequestCode.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": "a"})
        sizes.clear()
        await client.register(body, compressed=str(compressed).lower())
        assert sizes == [10, 10, 10, 10, 1]
        assert json.loads((await client.route("topic-000000")).body)["queueDatas"][0]["perm"] == 4
        # With deleteTopicWithBrokerRegistration, what is missing is dropped once, not in every part.
        fewer = encode_register_body(many(35, counter=4), compressed=compressed)
        assert (await client.register(fewer, compressed=str(compressed).lower())).code == ResponseCode.SUCCESS
        assert len(await client.topics()) == 35

    asking(conversation, delete_topic_with_broker_registration=True)


def test_large_registrations_that_wait_to_be_read_are_bounded(
    asking: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokers, "MAX_LENIENT_BYTES", 1_000)

    async def conversation(client: Client) -> None:
        body = encode_register_body(many(41))
        monkeypatch.setattr(reading, "MOST_WAITING_BYTES", 4 * len(body))
        answers = await asyncio.gather(*(client.register(body) for _ in range(5)))
        codes = [ResponseCode.SUCCESS] * 2 + [ResponseCode.SYSTEM_BUSY] * 3
        assert [answer.code for answer in answers] == codes
        assert (await client.register(body)).code == ResponseCode.SUCCESS

    asking(conversation)


def test_a_registration_that_is_cut_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brokers, "MAX_LENIENT_BYTES", 1_000)
    begun, go_on = threading.Event(), threading.Event()

    def held(*args: Any, **more: Any) -> RegisterBrokerBody:
        begun.set()
        assert go_on.wait(60)
        return decode_register_body(*args, **more)

    monkeypatch.setattr(brokers, "decode_register_body", held)

    async def main() -> None:
        async with serving(tmp_path) as (server, client):
            watcher = Client(int(client._address.split(":")[1]))
            registering = asyncio.create_task(client.register(encode_register_body(many(41))))
            await asyncio.to_thread(begun.wait, 60)
            assert await watcher.topics() == []  # others are answered meanwhile
            client.close()
            with pytest.raises(ConnectionError):
                await registering
            while len(server._server.connections) > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            # The thread goes on; another one would have as much to hold in memory, and waits for its end.
            begun.clear()
            waiting = asyncio.create_task(watcher.register(encode_register_body(many(41))))
            for _ in range(10):
                assert await watcher.topics() == []
            assert not begun.is_set()
            go_on.set()
            assert (await waiting).code == ResponseCode.SUCCESS
            assert len(await watcher.topics()) == 41
            watcher.close()

    asyncio.run(main())


def test_a_registration_without_room_is_refused_and_the_broker_stays(
    asking: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(routes, "MAX_BYTES", 100_000)

    async def conversation(client: Client) -> None:
        await client.register()
        for size in (100, 2_000):  # at once, and by parts
            for _ in range(2):
                refused = await client.register(encode_register_body(many(size)))
                assert refused.code == ResponseCode.SYSTEM_ERROR
                assert "half of what others leave" in (refused.remark or "")
        queues = json.dumps({"queueDatas": [{"brokerName": "a"}]}).encode()
        topic = {"topic": "x" * 50_000}
        assert (await client.ask(RequestCode.REGISTER_TOPIC_IN_NAMESRV, topic, queues)).code == 1
        assert await client.topics() == ["A", "B"]
        assert len(caplog.messages) == 1
        assert "can't register topics of broker a: with these topics" in caplog.text

    asking(conversation)


def test_a_few_compressed_bytes_are_not_millions_of_topics(asking: Callable[..., None]) -> None:
    def bomb(line: bytes, count: int) -> bytes:
        item = len(line).to_bytes(4, "big") + line
        head = b"\0\0\0\2{}" + count.to_bytes(4, "big")
        return zlib.compress(head + item * count, 9)

    async def conversation(client: Client) -> None:
        for line, count, reason in (
            (b"t 1 1 6", 100_001, "topics, of 100000 at most"),
            (b"t" * 1_000, 17_000, "larger than 16777216"),
        ):
            answer = await client.register(bomb(line, count), compressed="true")
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert reason in (answer.remark or "")

    asking(conversation)


def test_bodies_that_never_say_much_are_not_read_when_they_are_large(asking: Callable[..., None]) -> None:
    async def conversation(client: Client) -> None:
        large = b"{" + b"1:1," * 20_000 + b"1:1}"
        for code, fields in (
            (RequestCode.QUERY_DATA_VERSION, BROKER),
            (RequestCode.REGISTER_TOPIC_IN_NAMESRV, {"topic": "t"}),
        ):
            answer = await client.ask(code, fields, large)
            assert answer.code == ResponseCode.MESSAGE_ILLEGAL
            assert "32768" in (answer.remark or "")

    asking(conversation)


def test_a_slave_learns_where_its_master_is(asking: Callable[..., None]) -> None:
    async def conversation(client: Client) -> None:
        assert (await client.register()).fields == {}
        answer = await client.register(brokerId="1", brokerAddr="h:3", haServerAddr="h:4")
        assert answer.fields == {"masterAddr": "h:1", "haServerAddr": "h:2"}
        member = {"clusterName": "c", "brokerName": "a"}
        group = await client.ask(RequestCode.GET_BROKER_MEMBER_GROUP, member)
        assert group.body == (b'{"brokerMemberGroup":{"brokerAddrs":{0:"h:1",1:"h:3"},"brokerName":"a","cluster":"c"}}')

    asking(conversation)


def test_the_data_version_decides_whether_to_register_again(asking: Callable[..., None]) -> None:
    async def conversation(client: Client) -> None:
        async def changed(version: DataVersion) -> tuple[str, bytes]:
            answer = await client.ask(RequestCode.QUERY_DATA_VERSION, BROKER, encode_body(version))
            return answer.fields["changed"], answer.body

        assert await changed(VERSION) == ("true", b"")
        await client.register()
        held = b'{"counter":3,"stateVersion":0,"timestamp":5}'
        assert await changed(VERSION) == ("false", held)
        assert await changed(DataVersion(counter=4, timestamp_ms=5)) == ("true", held)

    asking(conversation)


def test_a_broker_goes_by_unregistering_and_by_closing(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as (server, client):
            await client.register()
            assert (await client.ask(RequestCode.UNREGISTER_BROKER, BROKER)).code == 0
            assert await client.topics() == []
            await client.register()
            watcher = Client(int(client._address.split(":")[1]))
            assert await watcher.topics() == ["A", "B"]
            gone = asyncio.Event()
            forget = server._routes.closed
            server._routes.closed = lambda token: (forget(token), gone.set())[0]  # type: ignore[method-assign]
            client.close()
            await gone.wait()
            assert await watcher.topics() == []
            watcher.close()

    asyncio.run(main())


def test_two_brokers_of_one_name_are_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        clock = Clock()
        async with serving(tmp_path, clock) as (_, client):
            await client.register()
            await client.ask(RequestCode.UNREGISTER_BROKER, BROKER)
            await client.register(brokerAddr="h:3")  # a restart on another port
            await client.register(brokerAddr="h:5", brokerId="1")
            assert caplog.messages == []
            clock.now_ms += 7_000
            for address in ("h:4", "h:3", "h:4"):
                await client.register(brokerAddr=address)
            assert caplog.messages == [
                "broker a (id 0) now registers from h:4 instead of h:3, which was seen 7 s ago: "
                "two brokers of one name? set brokerName"
            ]

    caplog.set_level(logging.WARNING)
    asyncio.run(main())


def test_a_silent_broker_is_dropped_and_a_heartbeat_keeps_it(tmp_path: Path) -> None:
    async def main() -> None:
        clock = Clock()
        async with serving(tmp_path, clock) as (server, client):
            watcher = Client(int(client._address.split(":")[1]))
            await client.register()
            clock.now_ms += 100_000
            assert (await client.ask(RequestCode.BROKER_HEARTBEAT, BROKER)).code == 0
            clock.now_ms += 120_000
            server.scan()
            assert await watcher.topics() == ["A", "B"]
            clock.now_ms += 1
            server.scan()
            assert await watcher.topics() == []
            watcher.close()

    asyncio.run(main())


def test_a_broker_may_ask_for_a_shorter_lease(tmp_path: Path) -> None:
    async def main() -> None:
        clock = Clock()
        async with serving(tmp_path, clock) as (server, client):
            watcher = Client(int(client._address.split(":")[1]))
            await client.register(heartbeatTimeoutMillis="10000")
            clock.now_ms += 10_001
            server.scan()
            assert await watcher.topics() == []
            watcher.close()

    asyncio.run(main())


def test_name_servers_are_independent(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path / "one") as (_, one), serving(tmp_path / "two") as (_, two):
            await one.register()
            assert await one.topics() == ["A", "B"]
            assert await two.topics() == []

    asyncio.run(main())


def test_write_permission_is_wiped_and_restored(asking: Callable[..., None]) -> None:
    async def conversation(client: Client) -> None:
        async def perm() -> int:
            return int(json.loads((await client.route()).body)["queueDatas"][0]["perm"])

        await client.register()
        assert (await client.ask(RequestCode.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": "a"})).fields == {
            "wipeTopicCount": "2"
        }
        assert await perm() == 4
        assert (await client.ask(RequestCode.ADD_WRITE_PERM_OF_BROKER, {"brokerName": "a"})).fields == {
            "addTopicCount": "2"
        }
        assert await perm() == 6

    asking(conversation)


def test_topics_are_registered_and_deleted_one_by_one(asking: Callable[..., None]) -> None:
    async def conversation(client: Client) -> None:
        await client.register()
        for name, broker, flag in (("U", "a", 1), ("S", "a", 2), ("X", "nobody", 0)):
            queue = {"brokerName": broker, "perm": 6, "readQueueNums": 1, "writeQueueNums": 1, "topicSysFlag": flag}
            data = json.dumps({"queueDatas": [queue]}).encode()
            assert (await client.ask(RequestCode.REGISTER_TOPIC_IN_NAMESRV, {"topic": name}, data)).code == 0
        assert await client.topics() == ["A", "B", "S", "U"]
        assert await client.topics(RequestCode.GET_UNIT_TOPIC_LIST) == ["U"]
        assert await client.topics(RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST) == ["S"]
        assert await client.topics(RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST) == ["S"]
        for fields in ({"topic": "A"}, {"topic": "B", "clusterName": "c"}, {"topic": "U", "clusterName": "d"}):
            assert (await client.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, fields)).code == 0
        assert await client.topics(RequestCode.GET_TOPICS_BY_CLUSTER, cluster="c") == ["S", "U"]
        assert await client.topics(RequestCode.GET_TOPICS_BY_CLUSTER, cluster="d") == []

    asking(conversation)


def test_the_order_of_a_topic_is_told_to_clients_and_brokers_and_survives_a_restart(tmp_path: Path) -> None:
    order = {"namespace": "ORDER_TOPIC_CONFIG", "key": "B", "value": "a:4"}

    async def first() -> None:
        async with serving(tmp_path) as (_, client):
            assert (await client.ask(RequestCode.PUT_KV_CONFIG, order)).code == 0
            assert (await client.register()).body == b'{"table":{"B":"a:4"}}'
            assert b"orderTopicConf" not in (await client.route()).body

    async def second() -> None:
        async with serving(tmp_path, order_message_enable=True, return_order_topic_config_to_broker=False) as (
            _,
            client,
        ):
            assert (await client.register()).body == b""
            assert json.loads((await client.route()).body)["orderTopicConf"] == "a:4"
            assert b"orderTopicConf" not in (await client.route("A")).body

    asyncio.run(first())
    asyncio.run(second())


def test_kv_config(asking: Callable[..., None]) -> None:
    async def conversation(client: Client) -> None:
        missing = await client.ask(RequestCode.GET_KV_CONFIG, {"namespace": "n", "key": "k"})
        assert (missing.code, missing.remark) == (ResponseCode.QUERY_NOT_FOUND, "No config item, Namespace: n Key: k")
        nothing = await client.ask(RequestCode.GET_KVLIST_BY_NAMESPACE, {"namespace": "n"})
        assert (nothing.code, nothing.remark) == (ResponseCode.QUERY_NOT_FOUND, "No config item, Namespace: n")
        await client.ask(RequestCode.PUT_KV_CONFIG, {"namespace": "n", "key": "k", "value": "v"})
        found = await client.ask(RequestCode.GET_KV_CONFIG, {"namespace": "n", "key": "k"})
        assert found.fields == {"value": "v"}
        await client.ask(RequestCode.DELETE_KV_CONFIG, {"namespace": "n", "key": "k"})
        empty = await client.ask(RequestCode.GET_KVLIST_BY_NAMESPACE, {"namespace": "n"})
        assert (empty.code, empty.body) == (0, b'{"table":{}}')

    asking(conversation)


def test_a_kv_value_that_can_not_be_written_is_not_confirmed(tmp_path: Path) -> None:
    async def main() -> None:
        directory = tmp_path / "file"
        directory.write_text("not a directory")
        async with serving(tmp_path) as (server, client):
            server._kv._path = directory / "kvConfig.json"
            answer = await client.ask(RequestCode.PUT_KV_CONFIG, {"namespace": "n", "key": "k", "value": "v"})
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert "could not be written" in (answer.remark or "")

    asyncio.run(main())


def test_the_configuration_can_be_read_and_partly_changed(asking: Callable[..., None]) -> None:
    async def conversation(client: Client) -> None:
        async def update(text: str) -> tuple[int, str | None]:
            answer = await client.ask(RequestCode.UPDATE_NAMESRV_CONFIG, body=text.encode())
            return answer.code, answer.remark

        async def settings() -> list[str]:
            return (await client.ask(RequestCode.GET_NAMESRV_CONFIG)).body.decode().splitlines()

        before = await settings()
        assert before == sorted(before)
        assert "enableTopicList=true" in before
        assert await update("kvConfigPath=/x\n") == (ResponseCode.NO_PERMISSION, "Can not update config in black list.")
        for refused in ("listenPort=1", "nosuchkey=1", "enableTopicList=false\nlistenPort=1"):
            assert (await update(refused))[0] == ResponseCode.NO_PERMISSION
        code, remark = await update("enableTopicList=maybe")
        assert code == ResponseCode.SYSTEM_ERROR
        assert "enableTopicList" in (remark or "")
        assert await settings() == before
        assert await update("enableTopicList=false\nenableAllTopicList=false") == (0, None)
        for code in (RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, RequestCode.GET_UNIT_TOPIC_LIST):
            answer = await client.ask(code)
            assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "disable")
        assert await update("") == (0, None)

    asking(conversation)


def test_changed_settings_are_told_to_who_keeps_them(tmp_path: Path) -> None:
    kept: list[dict[str, str]] = []

    async def main() -> None:
        config = NamesrvConfig(kv_config_path=str(tmp_path / "kvConfig.json"))
        server = NameServer(config, on_config_change=kept.append)
        client = Client(await server.start("127.0.0.1", 0))
        for text in (b"enableTopicList=false\norderMessageEnable=false", b"enableTopicList=false", b"listenPort=1"):
            await client.ask(RequestCode.UPDATE_NAMESRV_CONFIG, body=text)
        client.close()
        await server.stop()

    asyncio.run(main())
    assert kept == [{"enableTopicList": "false"}]


def test_apaches_settings_without_effect_are_kept_and_that_is_said(asking: Callable[..., None]) -> None:
    async def conversation(client: Client) -> None:
        answer = await client.ask(RequestCode.UPDATE_NAMESRV_CONFIG, body=b"notifyMinBrokerIdChanged = true")
        assert (answer.code, answer.remark) == (0, "without effect in Skylark: notifyMinBrokerIdChanged")
        shown = (await client.ask(RequestCode.GET_NAMESRV_CONFIG)).body.decode().splitlines()
        assert "notifyMinBrokerIdChanged=true" in shown
        assert shown == sorted(shown)
        for refused in (b"useTLS=true", b"metricsPromExporterPort=1", b"bindAddress=1"):
            assert (await client.ask(RequestCode.UPDATE_NAMESRV_CONFIG, body=refused)).code == 16
        wrong = await client.ask(RequestCode.UPDATE_NAMESRV_CONFIG, body=b"notifyMinBrokerIdChanged=perhaps")
        assert wrong.code == ResponseCode.SYSTEM_ERROR

    asking(conversation)


def test_clients_of_a_zone_see_its_brokers(asking: Callable[..., None]) -> None:
    async def conversation(client: Client) -> None:
        async def names(**fields: str) -> list[str]:
            route = decode_body(TopicRouteData, (await client.route(**fields)).body)
            return [queue.broker_name for queue in route.queue_datas]

        await client.register(__ZONE_NAME="east")
        await client.register(__ZONE_NAME="west", brokerName="b", brokerAddr="h:5")
        assert await names() == ["a", "b"]
        assert await names(__ZONE_MODE="true", __ZONE_NAME="East") == ["a"]
        assert await names(__ZONE_MODE="false", __ZONE_NAME="east") == ["a", "b"]
        assert await names(__ZONE_MODE="true", __ZONE_NAME="north") == []

    asking(conversation)


def test_binary_requests_get_binary_answers(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as (_, client):
            request = Frame(RequestCode.GET_BROKER_CLUSTER_INFO, encoding=Encoding.BINARY)
            answer = await client._pool.request(client._address, request, 60.0)
            assert answer.encoding == Encoding.BINARY
            assert answer.body == b'{"brokerAddrTable":{},"clusterAddrTable":{}}'

    asyncio.run(main())


def test_a_port_in_use_is_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as (_, client):
            port = int(client._address.split(":")[1])
            with pytest.raises(OSError, match="in use"):
                await NameServer(NamesrvConfig(kv_config_path=str(tmp_path / "kv.json"))).start("127.0.0.1", port)

    asyncio.run(main())
