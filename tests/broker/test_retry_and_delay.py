"""Messages that come later: sent back by a consumer, or sent with a delay."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from broker.live import Live, MovableClock, live_broker, messages_of
from skylark.broker.config import BrokerConfig
from skylark.broker.delay import Delayed
from skylark.broker.put import Put
from skylark.broker.stats import Stats
from skylark.store import Store, StoreConfig
from skylark.wire.bodies import LockRequest, MessageQueue, decode_body, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import Message, StoredMessage
from skylark.wire.records import encode_host
from skylark.wire.stats import BrokerStatsData

NOW_MS = 1_700_000_000_000


async def send_back(broker: Live, message: StoredMessage, **more: object) -> Frame:
    fields: dict[str, object] = {"offset": message.log_offset, "group": "g", "delayLevel": 1, "originTopic": "t"}
    return await broker.ask(RequestCode.CONSUMER_SEND_MSG_BACK, **(fields | more))


def test_a_message_sent_back_comes_again_and_dies_in_the_end(tmp_path: Path) -> None:
    async def run() -> None:
        clock = MovableClock()
        async with live_broker(tmp_path, clock, messageDelayLevel="100s 200s") as broker:
            sent = await broker.send("t", b"hard", {"TAGS": "a", "UNIQ_KEY": "U" * 32})
            (first,) = messages_of(await broker.pull("t", 0))
            assert (await send_back(broker, first, maxReconsumeTimes=1)).code == ResponseCode.SUCCESS
            clock.ahead_ms += 100_000
            (again,) = await broker.until_found("%RETRY%g", group="g")
            assert (again.body, again.reconsume_times) == (b"hard", 1)
            assert again.properties["RETRY_TOPIC"] == "t"
            assert again.properties["ORIGIN_MESSAGE_ID"] == sent.fields["msgId"]
            assert again.properties["UNIQ_KEY"] == "U" * 32
            assert (again.properties["DELAY"], again.properties["WAIT"]) == ("1", "false")
            assert (await send_back(broker, again, maxReconsumeTimes=1)).code == ResponseCode.SUCCESS
            (dead,) = await broker.until_found("%DLQ%g")
            assert (dead.body, dead.reconsume_times) == (b"hard", 2)
            assert dead.properties["ORIGIN_MESSAGE_ID"] == sent.fields["msgId"]
            assert "DELAY" not in dead.properties

    asyncio.run(run())


def test_a_delayed_message_comes_with_the_properties_it_was_sent_with(tmp_path: Path) -> None:
    async def run() -> None:
        clock = MovableClock()
        async with live_broker(tmp_path, clock, messageDelayLevel="100s 200s") as broker:
            given = {"DELAY": "1", "TAGS": "a", "UNIQ_KEY": "U" * 32, "WAIT": "true", "mine": "x"}
            await broker.send("t", b"later", given)
            clock.ahead_ms += 100_000
            (late,) = await broker.until_found("t")
            assert late.properties.items() >= (given | {"REAL_TOPIC": "t", "REAL_QID": "0"}).items()
            # What has waited is tried again when its consumer says, not when its sender said.
            assert (await send_back(broker, late, delayLevel=2)).code == ResponseCode.SUCCESS
            clock.ahead_ms += 200_000
            (again,) = await broker.until_found("%RETRY%g", group="g")
            assert (again.body, again.properties["DELAY"]) == (b"later", "2")

    asyncio.run(run())


def test_send_back_straight_to_the_dead_letters(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.send("t", b"bad")
            (message,) = messages_of(await broker.pull("t", 0))
            await send_back(broker, message, delayLevel=-1)
            (dead,) = await broker.until_found("%DLQ%g")
            assert dead.body == b"bad"
            lost = await send_back(broker, message, offset=message.log_offset + 1)
            assert (lost.code, lost.remark) == (
                ResponseCode.SYSTEM_ERROR,
                f"look message by offset failed, {message.log_offset + 1}",
            )

    asyncio.run(run())


def test_each_dead_letter_is_told_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.send("t", b"bad", {"UNIQ_KEY": "A" * 32})
            await broker.send("t", b"large", {"UNIQ_KEY": "B" * 32, "p": "x" * 32_600})
            for message in messages_of(await broker.pull("t", 0)):
                assert (await send_back(broker, message, delayLevel=-1 if message.body == b"bad" else 0)).code == 0
            tired: dict[str, object] = {"reconsumeTimes": 3, "maxReconsumeTimes": 2}
            for origin in ("t", "x" * 30_000):  # a name that is no topic's takes no memory
                await broker.send("%RETRY%g", b"tired", {"UNIQ_KEY": "C" * 32, "RETRY_TOPIC": origin}, **tired)
            assert broker._broker is not None
            stats = broker._broker._stats
            stats.tick(stats.started_ms + 10_000)
            for topic, count in (("t", 3), ("%RETRY%g", 1)):
                key = f"null@{topic}@g@SEND_BACK_TO_DLQ"
                answer = await broker.ask(
                    RequestCode.VIEW_BROKER_STATS_DATA, statsName="SNDBCK2DLQ_TIMES", statsKey=key
                )
                assert decode_body(BrokerStatsData, answer.body).stats_minute.sum == count

    asyncio.run(run())
    told = [record.getMessage() for record in caplog.records if "dead letter" in record.getMessage()]
    assert told[0] == f"message {'A' * 32} of topic t, tried 1 times, is a dead letter of group g now, at offset 0"
    assert told[1].startswith(
        f"message {'B' * 32} of topic t, tried 1 times, is a dead letter of group g now, at offset 1"
    )
    assert "it can't be tried again: the message is illegal" in told[1]
    assert [line.partition(" is a ")[0] for line in told[2:]] == [
        f"message {'C' * 32} of topic {topic}, tried 3 times," for topic in ("t", "%RETRY%g")
    ]


def test_a_group_whose_name_makes_no_retry_topic_has_dead_letters_only(tmp_path: Path) -> None:
    async def run() -> None:
        group = "G" * 250
        table = {"subscriptionGroupTable": {group: {"groupName": group}}}  # of Apache's broker, which allows 255
        (tmp_path / "config").mkdir()
        (tmp_path / "config" / "subscriptionGroup.json").write_text(json.dumps(table))
        async with live_broker(tmp_path) as broker:
            await broker.send("t", b"bad")
            (message,) = messages_of(await broker.pull("t", 0))
            assert (await send_back(broker, message, group=group)).code == ResponseCode.SUCCESS
            (dead,) = await broker.until_found("%DLQ%" + group)
            assert dead.body == b"bad"

    asyncio.run(run())


def test_a_message_that_has_no_room_for_a_retry_goes_to_the_dead_letters(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            assert (await broker.send("t", b"large", {"p": "x" * 32_600})).code == ResponseCode.SUCCESS
            (message,) = messages_of(await broker.pull("t", 0))
            assert (await send_back(broker, message)).code == ResponseCode.SUCCESS
            (dead,) = await broker.until_found("%DLQ%g")
            assert (dead.body, dead.properties, dead.reconsume_times) == (b"large", message.properties, 1)

    asyncio.run(run())


def test_a_retry_that_a_client_sends_itself_obeys_the_limit(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.send("%RETRY%g", b"tired", reconsumeTimes=3, maxReconsumeTimes=2)
            (dead,) = await broker.until_found("%DLQ%g")
            assert dead.body == b"tired"
            await broker.send("%RETRY%g", b"fresh", reconsumeTimes=1, maxReconsumeTimes=2)
            (fresh,) = await broker.until_found("%RETRY%g")
            assert fresh.body == b"fresh"

    asyncio.run(run())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    config = StoreConfig(
        root=tmp_path, segment_bytes=1 << 20, queue_entries_per_file=100, index_slots=100, index_entries=400
    )
    return Store.open(config)


class Clockwork:
    """Delays on a real store, by a clock that the test moves."""

    def __init__(self, store: Store, path: Path) -> None:
        self.store = store
        self.put = Put(store, BrokerConfig(), Stats("c", NOW_MS))
        self.path = path
        self.delayed = self.load()

    def load(self) -> Delayed:
        return Delayed(self.store, self.put, BrokerConfig().message_delay_level, self.path)

    def send(self, body: bytes, level: int, now_ms: int) -> None:
        message = Message("t", 3, body, {"DELAY": str(level), "TAGS": "x"}, born_host=encode_host("127.0.0.1", 1))
        self.put.one(message, now_ms)

    def delivered(self) -> list[bytes]:
        result = self.store.read("t", 3, 0, 100)
        return [m.body for m in map(self.store.message_at, self.offsets(len(result.records))) if m is not None]

    def offsets(self, count: int) -> list[int]:
        entries = (self.store.entry("t", 3, i) for i in range(count))
        return [entry.log_offset for entry in entries if entry is not None]


def test_nothing_is_delivered_early_and_everything_in_order(store: Store, tmp_path: Path) -> None:
    clock = Clockwork(store, tmp_path / "delayOffset.json")
    clock.send(b"5s", 2, NOW_MS)
    clock.send(b"1s", 1, NOW_MS)
    clock.send(b"1s later", 1, NOW_MS + 500)
    clock.send(b"beyond the last level", 99, NOW_MS)
    seen = []
    for now_ms in (NOW_MS, NOW_MS + 999, NOW_MS + 1000, NOW_MS + 1499, NOW_MS + 1500, NOW_MS + 5000):
        clock.delayed.deliver(now_ms)
        seen.append(clock.delivered())
    assert seen == [[], [], [b"1s"], [b"1s"], [b"1s", b"1s later"], [b"1s", b"1s later", b"5s"]]
    clock.delayed.deliver(NOW_MS + 7_200_000)
    assert clock.delivered()[-1] == b"beyond the last level"
    store.close()


def test_the_next_turn_comes_when_the_next_message_is_due(store: Store, tmp_path: Path) -> None:
    clock = Clockwork(store, tmp_path / "delayOffset.json")
    assert clock.delayed.deliver(NOW_MS) == 100
    clock.send(b"5s", 2, NOW_MS)
    for number in range(501):
        clock.send(b"%d" % number, 1, NOW_MS + number // 500 * 30)
    assert clock.delayed.deliver(NOW_MS) == 100
    assert clock.delayed.deliver(NOW_MS + 990) == 10
    assert clock.delayed.deliver(NOW_MS + 1000) == 0, "a turn is bounded"
    assert clock.delayed.deliver(NOW_MS + 1000) == 30
    assert clock.delayed.deliver(NOW_MS + 1030) == 100
    store.close()


def test_the_levels_share_a_turn(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skylark.broker.delay._MOST_A_TURN", 3)
    clock = Clockwork(store, tmp_path / "delayOffset.json")
    for level in (1, 2, 18):
        for number in range(4):
            clock.send(b"%d-%d" % (level, number), level, NOW_MS)
    late_ms, sizes = NOW_MS + 10_000_000, []
    while clock.delayed.deliver(late_ms) == 0:
        sizes.append(len(clock.delivered()))
    assert sizes == [3, 6, 9, 12]
    assert clock.delivered()[:9:3] == [b"1-0", b"2-0", b"18-0"], "who had no part in a turn comes first in the next"
    store.close()


def test_progress_is_kept_and_never_runs_ahead_of_the_disk(store: Store, tmp_path: Path) -> None:
    clock = Clockwork(store, tmp_path / "delayOffset.json")
    clock.send(b"one", 1, NOW_MS)
    clock.delayed.deliver(NOW_MS + 1000)
    store.flush()
    clock.delayed.save(NOW_MS + 1000)
    clock.delayed = clock.load()
    clock.send(b"two", 1, NOW_MS + 2000)
    clock.delayed.deliver(NOW_MS + 3000)
    assert clock.delivered() == [b"one", b"two"], "what was delivered before the restart is not delivered again"
    store.close()


def test_a_clock_that_was_set_back_does_not_hold_messages(store: Store, tmp_path: Path) -> None:
    clock = Clockwork(store, tmp_path / "delayOffset.json")
    clock.send(b"from the future", 1, NOW_MS + 3_600_000)
    clock.delayed.deliver(NOW_MS)
    assert clock.delivered() == [b"from the future"]
    store.close()


def test_an_offset_outside_the_queue_is_corrected(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "delayOffset.json"
    path.write_text('{"dataVersion":{"counter":1,"stateVersion":0,"timestamp":1},"offsetTable":{1:77}}')
    clock = Clockwork(store, path)
    clock.send(b"one", 1, NOW_MS)
    clock.delayed.deliver(NOW_MS + 1000)
    assert clock.delivered() == [b"one"]
    store.close()


def test_a_retry_of_an_orderly_group_goes_to_the_dead_letters(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.send("t")
            queues = [MessageQueue("broker-a", 0, "t")]
            body = encode_body(LockRequest(consumer_group="g", client_id="c", mq_set=queues))
            await broker.ask(RequestCode.LOCK_BATCH_MQ, body)
            await broker.send("%RETRY%g", b"stuck", reconsumeTimes=1, maxReconsumeTimes=16)
            (dead,) = await broker.until_found("%DLQ%g")
            assert dead.body == b"stuck"

    asyncio.run(run())
