"""What name servers know of a broker: at its start, when topics change, and after its end."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.live import DEADLINE_S, HOST, Live, live_broker
from skylark.broker import announcement as announcement_module
from skylark.broker import registration as module
from skylark.broker.announcement import MAX_PART_BYTES, Announcement, estimated_bytes
from skylark.broker.app import Broker
from skylark.broker.config import BrokerConfig
from skylark.broker.registration import Registration
from skylark.broker.static_topics import StaticTopics
from skylark.broker.topics import Topics
from skylark.nameserver.app import NameServer
from skylark.nameserver.config import NamesrvConfig
from skylark.net.pool import Pool
from skylark.wire import fastjson
from skylark.wire.bodies import TopicConfigs, TopicList, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.framing import encode_frame
from skylark.wire.headers import QueryDataVersion, RegisterBroker
from skylark.wire.mapping import MappingDetail
from skylark.wire.routes import RegisterBrokerBody, TopicConfigWrapper, TopicRouteData, encode_register_body
from skylark.wire.tables import DataVersion, TopicConfig
from skylark.wire.typed import encode_header


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server is waited for, however busy the machine is."""
    monkeypatch.setattr(module, "MAX_WAIT_S", DEADLINE_S)


async def route(pool: Pool, namesrv: str, topic: str) -> Frame:
    return await pool.request(namesrv, Frame(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic}), DEADLINE_S)


async def until_routed(pool: Pool, namesrv: str, topic: str) -> TopicRouteData:
    while True:
        answer = await route(pool, namesrv, topic)
        if answer.code == ResponseCode.SUCCESS:
            return fastjson.decode(answer.body, TopicRouteData)
        await asyncio.sleep(0)


def test_a_new_topic_is_routed_at_once_and_gone_after_the_end(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.send("Fresh")
            found = await until_routed(broker.pool, broker.namesrv, "Fresh")
            (data,) = found.broker_datas
            assert data.broker_addrs == {0: broker.address}
            assert [(q.broker_name, q.read_queue_nums, q.perm) for q in found.queue_datas] == [("broker-a", 4, 6)]
            await broker.stop()
            gone = await route(broker.pool, broker.namesrv, "Fresh")
            assert gone.code == ResponseCode.TOPIC_NOT_EXIST

    asyncio.run(run())


def test_no_address_is_announced_that_nobody_listens_on(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            slave = RegisterBroker(
                broker_name="broker-a", broker_addr="h:1", cluster_name="DefaultCluster", ha_server_addr="", broker_id=1
            )
            body = encode_register_body(RegisterBrokerBody())
            request = Frame(RequestCode.REGISTER_BROKER, encode_header(slave), body)
            answer = await broker.pool.request(broker.namesrv, request, DEADLINE_S)
            assert answer.fields == {"masterAddr": broker.address}

    asyncio.run(run())


def test_every_name_server_is_told_and_a_missing_one_costs_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        servers = [NameServer(NamesrvConfig(kv_config_path=str(tmp_path / f"kv{i}.json"))) for i in range(2)]
        addresses = [f"{HOST}:{await server.start(HOST, 0)}" for server in servers]
        away = f"{HOST}:1"
        config = BrokerConfig(
            broker_name="broker-a",
            store_path_root_dir=str(tmp_path / "store"),
            mapped_file_size_commit_log=1 << 20,
            max_hash_slot_num=100,
            max_index_num=400,
            namesrv_addr=";".join([away, *addresses]),
        )
        broker = Broker(config)
        pool = Pool()
        try:
            port = await broker.start(HOST, 0)
            live = Live(broker, config, addresses[0], f"{HOST}:{port}", pool)
            await live.send("Everywhere")
            for address in addresses:
                found = await until_routed(pool, address, "Everywhere")
                assert found.broker_datas[0].broker_addrs == {0: live.address}
        finally:
            await broker.stop()
            pool.close()
            for server in servers:
                await server.stop()

    asyncio.run(run())


def test_a_name_server_that_accepts_and_does_not_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        with socket.create_server((HOST, 0)) as mute:
            address = f"{HOST}:{mute.getsockname()[1]}"
            config = BrokerConfig(namesrv_addr=address, register_broker_timeout_mills=10)
            topics = Topics(tmp_path, config, lambda: 0)
            registration = Registration(config, topics, "", "", StaticTopics(tmp_path, "broker-a", lambda: 0))
            await registration.start()
            await registration.stop()
            (message,) = caplog.messages
            reason = f"no (answer from|connection to) {address} within 0.01 s"
            assert re.fullmatch(f"name server {address} does not answer, and is tried again: {reason}", message)

    asyncio.run(run())


def test_a_broker_without_permission_to_write_says_so_in_its_routes(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, brokerPermission=4) as broker:
            found = await until_routed(broker.pool, broker.namesrv, "TBW102")
            assert [queue.perm & 6 for queue in found.queue_datas] == [4]

    asyncio.run(run())


# More topics than a frame can carry.


async def create(broker: Live, *names: str, perm: int = 6) -> Frame:
    topics = [TopicConfig(name, read_queue_nums=3, write_queue_nums=3, perm=perm) for name in names]
    return await broker.ask(
        RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, encode_body(TopicConfigs(topic_config_list=topics))
    )


async def routed(broker: Live) -> set[str]:
    request = Frame(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
    answer = await broker.pool.request(broker.namesrv, request, DEADLINE_S)
    return set(fastjson.decode(answer.body, TopicList).topic_list)


async def known_version(broker: Live) -> DataVersion:
    header = QueryDataVersion(
        broker_name="broker-a", broker_addr=broker.address, cluster_name="DefaultCluster", broker_id=0
    )
    request = Frame(RequestCode.QUERY_DATA_VERSION, encode_header(header), encode_body(DataVersion()))
    answer = await broker.pool.request(broker.namesrv, request, DEADLINE_S)
    return fastjson.decode(answer.body, DataVersion)


def split(**settings: object) -> dict[str, object]:
    return {"enableSplitRegistration": True, "splitRegistrationSize": 7} | settings


@pytest.mark.parametrize("settings", [split(), split(compressedRegister=True), {"compressedRegister": True}])
def test_a_registration_in_parts_is_as_good_as_a_whole_one(tmp_path: Path, settings: dict[str, object]) -> None:
    names = [f"Topic-{number}" for number in range(30)]

    async def run() -> None:
        async with live_broker(tmp_path, **settings) as broker:
            assert (await create(broker, *names)).code == ResponseCode.SUCCESS
            assert routed_of(names, await routed(broker)) == set(names)
            # A change is taken over whichever part it is in.
            for changed in (names[0], names[-1]):
                await create(broker, changed, perm=4)
                found = fastjson.decode((await route(broker.pool, broker.namesrv, changed)).body, TopicRouteData)
                assert [queues.perm for queues in found.queue_datas] == [4]
            (config,) = [await broker.ask(RequestCode.GET_ALL_TOPIC_CONFIG)]
            assert await known_version(broker) == fastjson.decode(config.body, TopicConfigWrapper).data_version
        async with live_broker(tmp_path, **settings) as broker:
            assert routed_of(names, await routed(broker)) == set(names)

    asyncio.run(run())


def routed_of(names: list[str], found: set[str]) -> set[str]:
    return found.intersection(names)


def test_a_name_server_that_drops_missing_topics_keeps_those_of_all_parts(tmp_path: Path) -> None:
    names = [f"Topic-{number}" for number in range(30)]

    async def run() -> None:
        config = NamesrvConfig(kv_config_path=str(tmp_path / "other.json"), delete_topic_with_broker_registration=True)
        name_server = NameServer(config)
        address = f"{HOST}:{await name_server.start(HOST, 0)}"
        try:
            async with live_broker(tmp_path, namesrvAddr=address, **split()) as broker:
                assert (await create(broker, *names)).code == ResponseCode.SUCCESS
                for name in names:
                    await until_routed(broker.pool, address, name)
        finally:
            await name_server.stop()

    asyncio.run(run())


def test_a_registration_that_arrived_in_parts_is_not_sent_again(tmp_path: Path) -> None:
    """Only topics that changed restore what an operator has wiped: rounds without a change leave it alone."""

    async def run() -> None:
        async with live_broker(tmp_path, **split()) as broker:
            assert (await create(broker, "Fresh", "Other")).code == ResponseCode.SUCCESS
            wipe = Frame(RequestCode.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": "broker-a"})
            await broker.pool.request(broker.namesrv, wipe, DEADLINE_S)
            assert broker._broker is not None
            (link,) = broker._broker._registration._links
            for is_changed, perm in ((False, 4), (True, 6)):
                await link._tell(is_changed)
                found = await until_routed(broker.pool, broker.namesrv, "Fresh")
                assert [queues.perm for queues in found.queue_datas] == [perm]

    asyncio.run(run())


names = st.integers(1, 255).map(lambda length: "%" * length)


@given(st.integers(1, 1_000), names, st.dictionaries(st.sampled_from(["a", "b" * 30]), st.text("xyz", max_size=200)))
@settings(max_examples=20, deadline=None)
def test_no_part_is_larger_than_it_is_said_to_be(count: int, prefix: str, attributes: dict[str, str]) -> None:
    """However many topics there are and however long their names: each part is estimated to be at least its size."""
    topics = [
        TopicConfig(f"{prefix}{number}", 10_000, 10_000, attributes=attributes, topic_filter_type="SINGLE_TAG")
        for number in range(count)
    ]
    body = RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigWrapper(
            topic_config_table={topic.topic_name: topic for topic in topics}
        )
    )
    estimated = sum(estimated_bytes(topic) for topic in topics)
    assert len(encode_register_body(body)) <= estimated + 1_000


def test_sixty_thousand_long_names_stay_within_the_frames_of_a_name_server(tmp_path: Path) -> None:
    async def run() -> None:
        config = BrokerConfig(broker_name="broker-a", store_path_root_dir=str(tmp_path))
        topics = Topics(tmp_path, config, lambda: 1_700_000_000_000)
        topics._topics |= {name: TopicConfig(name) for name in (f"{number:0127}" for number in range(60_000))}
        announcement = Announcement(
            config, topics, "10.0.0.1:10911", "10.0.0.1:10912", StaticTopics(tmp_path, "broker-a", lambda: 0)
        )
        parts, same = await asyncio.gather(announcement.parts(), announcement.parts())
        assert same is parts
        assert await announcement.parts() is parts, "all name servers are told the same"
        sizes = [estimated_bytes(topic) for topic in topics.all()]
        assert len(parts) == pytest.approx(sum(sizes) / MAX_PART_BYTES, abs=2)
        assert sum(len(part.topics) for part in parts) == len(topics)
        assert max([len(encode_frame(await part.request())) for part in (parts[0], parts[-1])]) < MAX_PART_BYTES
        versions = [part.version for part in parts]
        assert versions[-1] == topics.data_version
        assert len({version.timestamp_ms for version in versions}) == len(parts)

    asyncio.run(run())


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("permission", [6, 4])
def test_a_registration_is_put_together_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compressed: bool, permission: int
) -> None:
    """The table keeps its topics encoded: they are not encoded anew, unless the broker has other permissions."""
    config = BrokerConfig(broker_name="broker-a", compressed_register=compressed, broker_permission=permission)
    topics = Topics(tmp_path, config, lambda: 7)
    static_topics = StaticTopics(tmp_path, "broker-a", lambda: 0)
    topics.put(*(TopicConfig(f"T\u00e9{number}", 3, number, attributes={"+a": 'b\n\t"'}) for number in range(300)))
    static_topics.restore(
        "T\u00e97", MappingDetail(topic="T\u00e97", bname="broker-a", total_queues=1, hosted_queues={0: []})
    )
    topics.save()
    announcement = Announcement(config, topics, "h:1", "", static_topics)
    announcement.filter_servers = lambda: ["h:5"]
    encoded: list[str] = []
    threads: set[str] = set()
    encode, estimate = fastjson.encode_entry, announcement_module.estimated_bytes

    def encode_entry(key: str, value: TopicConfig, **form: bool) -> str:
        encoded.append(key)
        return encode(key, value, **form)

    def estimated(topic: TopicConfig) -> int:
        threads.add(threading.current_thread().name)
        return estimate(topic)

    monkeypatch.setattr(fastjson, "encode_entry", encode_entry)
    monkeypatch.setattr(announcement_module, "estimated_bytes", estimated)

    async def run() -> None:
        (part,) = await announcement.parts()
        first, second = await asyncio.gather(part.request(), part.request())
        assert first.body is second.body
        told = {
            topic.topic_name: topic
            if permission == 6
            else TopicConfig(topic.topic_name, topic.read_queue_nums, topic.write_queue_nums, topic.perm & permission)
            for topic in topics.all()
        }
        detail = static_topics.get("T\u00e97")
        assert detail is not None
        wrapper = TopicConfigWrapper(
            data_version=topics.data_version,
            topic_config_table=told,
            topic_queue_mapping_info_map={"T\u00e97": detail.info()},
        )
        whole = RegisterBrokerBody(filter_server_list=["h:5"], topic_config_serialize_wrapper=wrapper)
        assert first.body == encode_register_body(whole, compressed=compressed)
        assert first.fields["bodyCrc32"] == str(crc32(first.body) & 0x7FFFFFFF)

    asyncio.run(run())
    assert len(encoded) == (len(topics) if permission == 4 and not compressed else 0)
    assert threading.main_thread().name not in threads


def test_a_change_while_a_registration_is_put_together_is_in_the_next_one(tmp_path: Path) -> None:
    config = BrokerConfig(broker_name="broker-a")
    topics = Topics(tmp_path, config, lambda: 7)
    announcement = Announcement(config, topics, "h:1", "", StaticTopics(tmp_path, "broker-a", lambda: 0))

    async def run() -> None:
        first = asyncio.create_task(announcement.parts())
        while announcement._building is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # its topics are copied now
        topics.put(TopicConfig("Fresh"))
        announcement.changed()
        (now,) = await announcement.parts()
        (before,) = await first
        assert "Fresh" in now.topics
        assert "Fresh" not in before.topics
        assert [each.topics for each in await announcement.parts()] == [now.topics]

    asyncio.run(run())
