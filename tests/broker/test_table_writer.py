"""Tables on their way to the disk: nothing waits on the event loop, and nothing is there before it is on disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.live import Live, live_broker, messages_of
from skylark.broker import table_writer as module
from skylark.broker import topics as topics_module
from skylark.broker.config import BrokerConfig
from skylark.broker.groups import Groups
from skylark.broker.table_writer import TableWriter
from skylark.broker.topics import Topics
from skylark.net.connection import RequestFailed
from skylark.store.tables import SubscriptionGroupTable, TopicTable, load, save
from skylark.wire.bodies import ConsumerData, GroupConfigs, Heartbeat, TopicConfigs, decode_body, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.tables import SubscriptionGroupConfig, TopicConfig

CREATE = {
    "topic": "T", "defaultTopic": "TBW102", "readQueueNums": 8, "writeQueueNums": 8, "perm": 6,
    "topicFilterType": "SINGLE_TAG", "order": False,
}  # fmt: skip


class Number(msgspec.Struct):
    number: int


class Counted:
    """A table that is a number, and how often it was copied."""

    def __init__(self, path: Path) -> None:
        self.number = 0
        self.copies = 0
        self.writer = TableWriter(path, self.capture)

    def capture(self) -> Callable[[], msgspec.Struct]:
        self.copies += 1
        table = Number(self.number)
        return lambda: table

    def change(self) -> None:
        self.number += 1
        self.writer.changed()


class SlowDisk:
    """`save` of the tables, which waits for the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.saved: list[str] = []
        self.is_writing = threading.Event()
        self.may_go_on = threading.Event()
        monkeypatch.setattr(module, "save", self.save)

    def save(self, path: Path, table: msgspec.Struct) -> None:
        self.is_writing.set()
        assert self.may_go_on.wait(60)
        save(path, table)
        self.saved.append(path.name)

    async def begun(self) -> None:
        assert await asyncio.to_thread(self.is_writing.wait, 60)


def test_changes_are_written_together_and_in_the_end_all_of_them(tmp_path: Path) -> None:
    async def run() -> None:
        table = Counted(tmp_path / "table.json")
        table.writer.write_in_background()
        for _ in range(200):
            table.change()
        await table.writer.written()
        assert table.copies <= 2
        assert load(tmp_path / "table.json", Number) == Number(200)
        await table.writer.written()
        assert table.copies <= 2

    asyncio.run(run())


def test_a_stop_does_not_wait_for_the_loop_and_no_older_copy_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        disk = SlowDisk(monkeypatch)
        table = Counted(tmp_path / "table.json")
        table.writer.write_in_background()
        table.change()
        await disk.begun()
        table.change()
        disk.may_go_on.set()
        table.writer.write_at_once()
        table.writer.save()
        assert load(tmp_path / "table.json", Number) == Number(2)
        await table.writer.written()
        assert load(tmp_path / "table.json", Number) == Number(2)

    asyncio.run(run())


def test_a_failure_is_told_and_tried_again(tmp_path: Path) -> None:
    async def run() -> None:
        table = Counted(tmp_path / "table.json")
        table.writer.write_in_background()
        blocker = tmp_path / "table.json.tmp"
        blocker.mkdir()
        table.change()
        with pytest.raises(IsADirectoryError):
            await table.writer.written()
        blocker.rmdir()
        table.writer.save()  # as every few seconds
        await table.writer.written()
        assert load(tmp_path / "table.json", Number) == Number(1)

    asyncio.run(run())


def test_a_topic_is_there_once_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        disk = SlowDisk(monkeypatch)
        topics = Topics(tmp_path, BrokerConfig(), lambda: 5)
        topics.table.writer.write_in_background()
        told: list[list[str]] = []
        topics.on_change = lambda changed: told.append([topic.topic_name for topic in changed])
        version = msgspec.structs.replace(topics.data_version)
        creating = asyncio.create_task(topics.create(TopicConfig("T")))
        impatient = asyncio.create_task(topics.create(TopicConfig("U")))
        await disk.begun()
        assert "T" not in topics
        assert topics.data_version == version, "a name server must not know this version without the topic"
        impatient.cancel()
        disk.may_go_on.set()
        await creating
        assert topics.get("T") == TopicConfig("T")
        await topics.table.writer.written()
        assert "U" in topics  # nobody waits for it any more, but it is on disk
        assert told == [["T"], ["U"]]
        assert topics.data_version != version
        stored = load(tmp_path / "topics.json", TopicTable)
        assert stored is not None
        assert {"T", "U"} <= stored.topic_config_table.keys()

    asyncio.run(run())


def test_who_asks_for_the_same_topic_meanwhile_gets_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        disk = SlowDisk(monkeypatch)
        topics = Topics(tmp_path, BrokerConfig(), lambda: 5)
        topics.table.writer.write_in_background()
        first = asyncio.create_task(topics.create(TopicConfig("T")))
        await disk.begun()
        second = asyncio.create_task(topics.create(TopicConfig("T")))
        third = asyncio.create_task(topics.create(TopicConfig("T", 2, 2)))
        await asyncio.sleep(0)
        disk.may_go_on.set()
        await asyncio.gather(first, second, third)
        assert topics.get("T") == TopicConfig("T", 2, 2)

    asyncio.run(run())


def test_only_so_many_changes_of_one_topic_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_IDLERS", 2)

    async def run() -> None:
        disk = SlowDisk(monkeypatch)
        topics = Topics(tmp_path, BrokerConfig(), lambda: 5)
        topics.table.writer.write_in_background()
        changes = [asyncio.create_task(topics.create(TopicConfig("T", queues, queues))) for queues in range(1, 5)]
        other = asyncio.create_task(topics.create(TopicConfig("U")))
        await disk.begun()
        with pytest.raises(RequestFailed, match="2 changes of topic T wait already") as failure:
            await changes[3]
        assert failure.value.code == ResponseCode.SYSTEM_BUSY
        disk.may_go_on.set()
        await asyncio.gather(*changes[:3], other)
        assert topics.get("T") == TopicConfig("T", 3, 3)
        await topics.create(TopicConfig("T", 5, 5))
        assert "U" in topics

    asyncio.run(run())


def test_a_topic_that_is_deleted_on_its_way_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        disk = SlowDisk(monkeypatch)
        topics = Topics(tmp_path, BrokerConfig(), lambda: 5)
        topics.table.writer.write_in_background()
        creating = asyncio.create_task(topics.create(TopicConfig("T")))
        await disk.begun()
        topics.delete("T")
        disk.may_go_on.set()
        await creating
        assert "T" not in topics
        topics.table.writer.write_at_once()
        topics.save()
        stored = load(tmp_path / "topics.json", TopicTable)
        assert stored is None or "T" not in stored.topic_config_table

    asyncio.run(run())


CHANGES = st.lists(
    st.tuples(st.sampled_from(["create", "put", "delete", "break", "mend"]), st.sampled_from("abc"), st.integers(1, 3))
)


@settings(max_examples=25)
@given(changes=CHANGES)
def test_memory_and_disk_agree_whatever_the_disk_does(
    changes: list[tuple[str, str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("tables")
    blocker = directory / "subscriptionGroup.json.tmp"
    groups = Groups(directory, BrokerConfig(), lambda: 5)
    expected = {group.group_name: group for group in groups.all()}

    async def create(group: SubscriptionGroupConfig) -> None:
        if blocker.exists():
            with pytest.raises(RequestFailed, match="can't be written"):
                await groups.create(group)
        else:
            await groups.create(group)
            expected[group.group_name] = group
            assert group.group_name in on_disk()

    def on_disk() -> dict[str, SubscriptionGroupConfig]:
        stored = load(directory / "subscriptionGroup.json", SubscriptionGroupTable)
        return stored.subscription_group_table if stored is not None else {}

    for what, name, number in changes:
        group = SubscriptionGroupConfig(group_name=name, retry_queue_nums=number)
        match what:
            case "create":
                asyncio.run(create(group))
            case "put":
                groups.put(group)
                expected[name] = group
            case "delete":
                groups.delete(name)
                expected.pop(name, None)
            case "break":
                blocker.mkdir(exist_ok=True)
            case _ if blocker.exists():
                blocker.rmdir()
        assert {group.group_name: group for group in groups.all()} == expected
    if blocker.exists():
        blocker.rmdir()
    groups.save()
    assert {group.group_name: group for group in Groups(directory, BrokerConfig(), lambda: 5).all()} == expected


# A whole broker.


def many_groups(count: int) -> bytes:
    data = [ConsumerData(group_name=f"group-{number}", message_model="CLUSTERING") for number in range(count)]
    return encode_body(Heartbeat(client_id="client", consumer_data_set=data))


def test_a_heartbeat_of_many_new_groups_writes_the_tables_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            disk = SlowDisk(monkeypatch)
            assert (await broker.ask(RequestCode.HEART_BEAT, many_groups(200))).code == 0
            disk.may_go_on.set()
        assert disk.saved.count("subscriptionGroup.json") <= 4
        assert disk.saved.count("topics.json") <= 4
        groups = load(tmp_path / "config" / "subscriptionGroup.json", SubscriptionGroupTable)
        topics = load(tmp_path / "config" / "topics.json", TopicTable)
        assert groups is not None
        assert "group-199" in groups.subscription_group_table
        assert topics is not None
        assert "%RETRY%group-199" in topics.topic_config_table

    asyncio.run(run())


async def refused(broker: Live, code: int, body: bytes = b"", **fields: object) -> str:
    answer = await broker.ask(code, body, **fields)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    return answer.remark or ""


def test_a_full_disk_is_an_answer(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            blockers = [tmp_path / "config" / f"{name}.json.tmp" for name in ("topics", "subscriptionGroup")]
            for blocker in blockers:
                blocker.mkdir()
            group = SubscriptionGroupConfig(group_name="g")
            for code, body, fields in (
                (RequestCode.UPDATE_AND_CREATE_TOPIC, b"", CREATE),
                (RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, TopicConfigs(topic_config_list=[TopicConfig("T")]), {}),
                (RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, group, {}),
                (RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, GroupConfigs(group_config_list=[group]), {}),
            ):
                remark = await refused(broker, code, body if isinstance(body, bytes) else encode_body(body), **fields)
                assert "can't be written: Is a directory" in remark
            first = await broker.send("new")
            assert first.code == ResponseCode.SYSTEM_ERROR
            for topic in ("T", "new"):
                assert (
                    await broker.ask(RequestCode.GET_TOPIC_CONFIG, topic=topic)
                ).code == ResponseCode.TOPIC_NOT_EXIST
            for blocker in blockers:
                blocker.rmdir()
            assert (await broker.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, **CREATE)).code == 0
            sent = await broker.send("new")
            assert (sent.code, sent.fields["queueOffset"]) == (0, "0")

    asyncio.run(run())


def test_what_is_deleted_on_a_full_disk_is_said_to_come_back(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            assert (await broker.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, **CREATE)).code == 0
            blocker = tmp_path / "config" / "topics.json.tmp"
            blocker.mkdir()
            remark = await refused(broker, RequestCode.DELETE_TOPIC_IN_BROKER, topic="T")
            assert remark.startswith("T is deleted, but comes back with the next start")
            blocker.rmdir()
        stored = load(tmp_path / "config" / "topics.json", TopicTable)
        assert stored is not None
        assert "T" not in stored.topic_config_table

    asyncio.run(run())


def test_retry_topics_and_dead_letters_are_made_anew_from_their_messages(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            for topic in ("%RETRY%g", "%DLQ%g", "T"):
                assert (await broker.send(topic)).code == 0
        for name in ("topics.json", "topics.json.bak"):
            (tmp_path / "config" / name).unlink(missing_ok=True)
        async with live_broker(tmp_path) as broker:
            for topic, code in (("%RETRY%g", 0), ("%DLQ%g", 0), ("T", ResponseCode.TOPIC_NOT_EXIST)):
                assert (await broker.ask(RequestCode.GET_TOPIC_CONFIG, topic=topic)).code == code

    asyncio.run(run())


def test_retry_topics_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, autoCreateTopicEnable=False) as broker:
            assert (await broker.send("%RETRY%a")).code == 0
            monkeypatch.setattr(topics_module, "MAX_AUTO_CREATED_TOPICS", 0)
            assert (await broker.send("%RETRY%b")).code == ResponseCode.TOPIC_NOT_EXIST
            assert (await broker.send("%RETRY%a")).code == 0
            assert (await broker.heartbeat("c", "T")).code == 0
            assert (await broker.ask(RequestCode.GET_TOPIC_CONFIG, topic="%RETRY%c")).code == 0
            monkeypatch.setattr(topics_module, "MAX_TOPICS", 0)
            assert (await broker.heartbeat("d", "T")).code == 0
            answer = await broker.ask(RequestCode.GET_TOPIC_CONFIG, topic="%RETRY%d")
            assert answer.code == ResponseCode.TOPIC_NOT_EXIST
            answer = await broker.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, **CREATE)
            assert answer.code == ResponseCode.INVALID_PARAMETER
            assert "delete some" in (answer.remark or "")

    asyncio.run(run())


def test_messages_of_a_new_topic_are_stored_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.send("another")  # from now on there is a connection
            sends = []
            for number in range(300):  # some come while the topic is written, the others after it
                sends.append(asyncio.create_task(broker.send("new", b"%d" % number)))
                await asyncio.sleep(0)
            assert {answer.code for answer in await asyncio.gather(*sends)} == {ResponseCode.SUCCESS}
            stored: list[int] = []
            while len(stored) < len(sends):
                stored += [int(message.body) for message in messages_of(await broker.pull("new", len(stored)))]
            assert stored == list(range(len(sends)))

    asyncio.run(run())


def test_senders_who_want_different_queues_of_a_new_topic_get_one_topic(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.send("another")
            sends = [broker.send("new", queueId=nums - 1, defaultTopicQueueNums=nums) for nums in (8, 4)]
            assert [answer.code for answer in await asyncio.gather(*sends)] == [ResponseCode.SUCCESS] * 2
            for queue_id in (7, 3):
                assert len(messages_of(await broker.pull("new", 0, queueId=queue_id))) == 1

    asyncio.run(run())


def test_changes_of_one_topic_build_on_each_other(tmp_path: Path) -> None:
    def change(broker: Live, queues: int, attributes: str) -> Awaitable[Frame]:
        return broker.ask(
            RequestCode.UPDATE_AND_CREATE_TOPIC, topic="t", defaultTopic="TBW102", readQueueNums=queues,
            writeQueueNums=queues, perm=6, topicFilterType="SINGLE_TAG", topicSysFlag=0, order="false",
            attributes=attributes,
        )  # fmt: skip

    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.send("another")
            await change(broker, 4, "")
            answers = await asyncio.gather(change(broker, 4, "+message.type=FIFO"), change(broker, 8, ""))
            assert [answer.code for answer in answers] == [ResponseCode.SUCCESS] * 2
            found = decode_body(TopicConfig, (await broker.ask(RequestCode.GET_TOPIC_CONFIG, topic="t")).body)
            assert (found.read_queue_nums, found.attributes) == (8, {"message.type": "FIFO"})

    asyncio.run(run())
