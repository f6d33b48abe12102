"""Messages that wait for a time of their own, and their recall."""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
import time
from pathlib import Path

import pytest

from broker.live import Live, MovableClock, live_broker, messages_of
from skylark.broker.config import BrokerConfig
from skylark.broker.put import Put
from skylark.broker.stats import Stats
from skylark.broker.timers import Timers
from skylark.net.connection import RequestFailed
from skylark.store import TIMER_TOPIC, Appended, QueueEntry, Store, StoreConfig, TimerStore
from skylark.wire import fastjson
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import PROPERTIES_MAX_BYTES, Message, StoredMessage
from skylark.wire.recall import RecallHandle
from skylark.wire.records import encode_host, encode_properties

NOW_MS = 1_700_000_000_000
DAY_MS = 24 * 3600 * 1000


class Small:
    """A store with timers, whose clock is an argument."""

    def __init__(self, root: Path, **settings: object) -> None:
        self.config = BrokerConfig(store_path_root_dir=str(root), broker_name="b", **settings)  # type: ignore[arg-type]
        self.store = Store.open(StoreConfig(root=root, segment_bytes=1 << 20, index_enabled=False))
        stats = Stats("c", NOW_MS, lambda topic: False)
        self.put = Put(self.store, self.config, stats)
        self.timers = Timers(self.config, self.store, self.put, root / "config" / "timermetrics", lambda topic: True)

    def send(self, body: bytes, now_ms: int, key: str = "", **properties: str) -> Appended:
        wanted = {"UNIQ_KEY": key or body.decode(), **properties}
        message = Message("t", 3, body, wanted, born_host=encode_host("127.0.0.1", 1))
        return self.put.one(message, now_ms)

    def recall(self, key: str, out_ms: int, now_ms: int) -> None:
        self.send(b"0", now_ms, key, TIMER_DEL_UNIQKEY=key, TIMER_DELIVER_MS=str(out_ms + 1))

    def turn(self, now_ms: int) -> list[bytes]:
        """Everything in the topic after all that is to be done now was done."""
        while self.timers.turn(now_ms):
            pass
        return [message.body for message in self.delivered()]

    def delivered(self, topic: str = "t", queue_id: int = 3) -> list[StoredMessage]:
        found = []
        for offset in range(self.store.min_offset(topic, queue_id), self.store.max_offset(topic, queue_id)):
            entry = self.store.entry(topic, queue_id, offset)
            assert entry is not None
            message = self.store.message_at(entry.log_offset)
            assert message is not None
            found.append(message)
        return found

    def close(self) -> None:
        self.store.close()
        self.timers.close()


def test_a_timer_comes_when_its_second_is_over_and_not_before(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.send(b"at", NOW_MS, TIMER_DELIVER_MS=str(NOW_MS + 5_000))
    small.send(b"sec", NOW_MS, TIMER_DELAY_SEC="5")
    small.send(b"ms", NOW_MS, TIMER_DELAY_MS="4001")
    small.send(b"later", NOW_MS, TIMER_DELAY_MS="5001")
    small.send(b"now", NOW_MS, TIMER_DELAY_SEC="-5")
    small.send(b"past", NOW_MS, TIMER_DELIVER_MS="12")
    assert small.turn(NOW_MS) == [b"now", b"past"]
    assert small.turn(NOW_MS + 4_999) == [b"now", b"past"]
    assert small.turn(NOW_MS + 5_000) == [b"now", b"past", b"at", b"sec", b"ms"]
    assert small.turn(NOW_MS + 5_999)[-1] == b"ms"
    assert small.turn(NOW_MS + 6_000)[-1] == b"later"
    assert small.turn(NOW_MS + 60_000)[-1] == b"later"
    assert small.timers.info(NOW_MS + 60_000)["timerCongestNum"] == "0"
    small.close()


def test_a_delivered_timer_has_what_apaches_has(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.send(b"x", NOW_MS, TAGS="a", TIMER_DELAY_MS="1500")
    (parked,) = small.delivered(TIMER_TOPIC, 0)
    assert parked.properties == {
        "UNIQ_KEY": "x", "TAGS": "a", "TIMER_DELAY_MS": "1500", "TIMER_OUT_MS": str(NOW_MS + 1000),
        "REAL_TOPIC": "t", "REAL_QID": "3",
    }  # fmt: skip
    small.turn(NOW_MS)
    small.turn(NOW_MS + 2100)
    (due,) = small.delivered()
    assert due.properties == {
        "UNIQ_KEY": "x", "TAGS": "a", "TIMER_DELAY_MS": "1500", "TIMER_OUT_MS": str(NOW_MS + 1000),
        "TIMER_ENQUEUE_MS": str(NOW_MS), "TIMER_DEQUEUE_MS": str(NOW_MS + 2100),
        "REAL_TOPIC": "t", "REAL_QID": "3",
    }  # fmt: skip
    small.close()


@pytest.mark.parametrize(
    "properties",
    [
        {"TIMER_DELAY_SEC": "259201"},
        {"TIMER_DELAY_MS": "259200001"},
        {"TIMER_DELIVER_MS": str(2**63 - 1)},
        {"TIMER_DELAY_SEC": str(2**63 - 1)},
        {"TIMER_DELAY_SEC": "5 s"},
        {"TIMER_DELAY_MS": "1_000"},
        {"TIMER_DELAY_SEC": "x", "TIMER_DELIVER_MS": str(NOW_MS + 1000)},
        {"TIMER_DELIVER_MS": "9" * 30},
        {"TIMER_DELIVER_MS": str(NOW_MS), "TIMER_DEL_UNIQKEY": "too late"},
    ],
)
def test_times_that_cannot_be_are_refused(tmp_path: Path, properties: dict[str, str]) -> None:
    small = Small(tmp_path)
    with pytest.raises(RequestFailed) as refused:
        small.send(b"x", NOW_MS, **properties)
    assert (refused.value.code, str(refused.value)) == (
        ResponseCode.MESSAGE_ILLEGAL,
        "timer message illegal, the delay time should not be bigger than the max delay 259200000ms; or if set del "
        "msg, the delay time should be bigger than the current time",
    )
    assert small.store.log_max_offset == 0
    small.close()


def test_a_level_goes_before_a_time(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.send(b"x", NOW_MS, DELAY="1", TIMER_DELAY_SEC="nonsense")
    assert small.store.max_offset("SCHEDULE_TOPIC_XXXX", 0) == 1
    small.close()


def test_timers_can_be_off_and_wait_then(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.send(b"x", NOW_MS, TIMER_DELAY_SEC="1")
    small.config.timer_wheel_enable = False
    with pytest.raises(RequestFailed) as refused:
        small.send(b"y", NOW_MS, TIMER_DELAY_SEC="1")
    assert (refused.value.code, str(refused.value)) == (
        ResponseCode.SYSTEM_ERROR,
        "accurate timer message is not enabled, timerWheelEnable is false",
    )
    assert small.turn(NOW_MS + 5000) == []
    small.config.timer_wheel_enable = True
    assert small.turn(NOW_MS + 6000) == []
    assert small.turn(NOW_MS + 7000) == [b"x"]
    small.close()


def test_too_many_at_one_moment_are_refused(tmp_path: Path) -> None:
    small = Small(tmp_path, timer_congest_num_each_slot=2)
    for number in range(4):
        small.send(b"%d" % number, NOW_MS, TIMER_DELAY_SEC="5")
    small.turn(NOW_MS)
    with pytest.raises(RequestFailed) as refused:
        small.send(b"x", NOW_MS, TIMER_DELAY_SEC="5")
    assert (refused.value.code, str(refused.value)) == (
        ResponseCode.SYSTEM_ERROR,
        "timer message is under flow control, max num limit is 4 or the current value is greater than 2 and less than "
        "4, trigger random flow control",
    )
    small.send(b"x", NOW_MS, TIMER_DELAY_SEC="6")
    small.close()


def test_a_timer_beyond_the_window_is_rolled(tmp_path: Path) -> None:
    small = Small(tmp_path, timer_roll_window_slot=10)
    small.send(b"far", NOW_MS, TIMER_DELAY_SEC="25")
    small.send(b"recalled", NOW_MS, TIMER_DELAY_SEC="25")
    small.recall("recalled", NOW_MS + 24_000, NOW_MS + 1)
    for second in range(25):
        assert small.turn(NOW_MS + second * 1000) == []
    assert small.turn(NOW_MS + 25_000) == [b"far"]
    (far,) = small.delivered()
    assert far.properties["TIMER_ROLL_TIMES"] == "2"
    assert far.properties["TIMER_OUT_MS"] == str(NOW_MS + 24_000)
    small.close()


def test_a_recalled_timer_never_comes(tmp_path: Path) -> None:
    small = Small(tmp_path)
    for body in (b"a", b"b", b"c"):
        small.send(body, NOW_MS, TIMER_DELAY_SEC="5")
    small.turn(NOW_MS)
    small.recall("b", NOW_MS + 4000, NOW_MS + 3999)
    assert small.turn(NOW_MS + 6000) == [b"a", b"c"]
    assert small.store.max_offset("t", 0) == 0, "a recall itself is not delivered"
    small.timers.save()
    metrics = fastjson.loads((tmp_path / "config" / "timermetrics").read_bytes())
    assert metrics["timingCount"]["t"]["count"] == 0
    small.close()


def test_a_turn_is_bounded_whatever_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Small(tmp_path)
    for _ in range(6):
        small.send(bytes(400_000), NOW_MS, "large", TIMER_DELAY_SEC="5")
    small.turn(NOW_MS)
    assert small.timers.turn(NOW_MS + 6000)
    assert 1 <= len(small.delivered()) <= 3
    assert len(small.turn(NOW_MS + 6000)) == 6
    monkeypatch.setattr("skylark.broker.timers._MOST_A_TURN", 4)
    for number in range(10):
        small.send(b"recalled", NOW_MS + 7000, str(number), TIMER_DELAY_SEC="5")
    for number in range(10):
        small.recall(str(number), NOW_MS + 11_000, NOW_MS + 7000)
    small.turn(NOW_MS + 7000)
    turns = 1
    while small.timers.turn(NOW_MS + 13_000):
        turns += 1
    assert turns >= 5
    assert len(small.delivered()) == 6
    small.close()


def test_a_recall_counts_for_timers_that_were_due_while_the_broker_was_down(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.send(b"gone", NOW_MS, TIMER_DELAY_SEC="2")
    small.send(b"stays", NOW_MS, TIMER_DELAY_SEC="2")
    small.recall("gone", NOW_MS + 1000, NOW_MS + 500)
    small.close()  # before any of it was put on the wheel
    small = Small(tmp_path)
    assert small.turn(NOW_MS + 60_000) == []
    assert small.turn(NOW_MS + 61_000) == [b"stays"]
    small.close()


def test_timers_survive_restarts_and_long_absences(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.send(b"1", NOW_MS, TIMER_DELAY_SEC="10")
    small.send(b"2", NOW_MS, TIMER_DELAY_SEC="259200")
    small.turn(NOW_MS)
    small.close()
    small = Small(tmp_path)
    assert small.turn(NOW_MS + 9_999) == []
    assert small.turn(NOW_MS + 10_000) == [b"1"]
    small.close()
    small = Small(tmp_path)
    assert small.turn(NOW_MS + 10_000) == [b"1"]
    small.send(b"3", NOW_MS + 8 * DAY_MS, TIMER_DELAY_SEC="5")
    assert small.turn(NOW_MS + 8 * DAY_MS) == [b"1", b"2"], "though it had to be rolled"
    assert small.turn(NOW_MS + 8 * DAY_MS + 5000) == [b"1", b"2", b"3"]
    small.close()


def test_what_is_no_timer_is_passed_over(tmp_path: Path) -> None:
    small = Small(tmp_path)
    host = encode_host("127.0.0.1", 1)
    odd = [{}, {"TIMER_OUT_MS": "-1"}, {"TIMER_OUT_MS": "9" * 40}, {"TIMER_OUT_MS": str(NOW_MS)},
           {"TIMER_OUT_MS": str(NOW_MS), "REAL_TOPIC": "../../x", "REAL_QID": "0"},
           {"TIMER_OUT_MS": str(NOW_MS), "REAL_TOPIC": "t", "REAL_QID": "-1"}]  # fmt: skip
    small.send(b"first", NOW_MS, TIMER_DELAY_SEC="1")
    small.turn(NOW_MS)
    for properties in (*odd, *({**properties, "TIMER_DELAY_SEC": "1"} for properties in odd)):
        small.put.one(Message(TIMER_TOPIC, 0, b"odd", dict(properties), born_host=host), NOW_MS)
    small.send(b"good", NOW_MS, TIMER_DELAY_SEC="1")
    small.turn(NOW_MS)
    assert small.turn(NOW_MS + 5000) == [b"first", b"good"]
    assert sorted(topic for topic, _ in small.store.queues()) == [TIMER_TOPIC, "t"]
    small.close()


LONG = "9" * 5000
HOST = encode_host("127.0.0.1", 1)


@pytest.mark.parametrize("window", [2 * 24 * 3600, 2])
@pytest.mark.parametrize(
    "properties",
    [
        {"TIMER_OUT_MS": LONG},
        {"TIMER_ROLL_TIMES": LONG},
        {"TIMER_ROLL_TIMES": "\u0663"},
        {"REAL_QID": LONG},
        {"REAL_QID": str(2**31)},
        {"TIMER_DELAY_MS": LONG, "TIMER_DELIVER_MS": LONG, "TIMER_ENQUEUE_MS": LONG, "TIMER_DEQUEUE_MS": LONG},
        {"DELAY": LONG},
        {"REAL_TOPIC": TIMER_TOPIC, "REAL_QID": "0"},
        {"REAL_TOPIC": "SCHEDULE_TOPIC_XXXX", "REAL_QID": "0", "DELAY": "1"},
        {"TIMER_DEL_UNIQKEY": LONG},
    ],
    ids=lambda properties: "+".join(properties) if isinstance(properties, dict) else str(properties),
)
def test_nothing_that_a_record_says_stops_those_behind_it(
    tmp_path: Path, properties: dict[str, str], window: int
) -> None:
    small = Small(tmp_path, timer_roll_window_slot=window)
    for _ in range(2):  # one that is followed, and one that is put on the wheel when it comes
        parked = {"TIMER_OUT_MS": str(NOW_MS + 4000), "REAL_TOPIC": "t", "REAL_QID": "9", **properties}
        small.store.append(Message(TIMER_TOPIC, 0, b"bad", parked, born_host=HOST), NOW_MS)
        small.turn(NOW_MS)
    small.send(b"good", NOW_MS, TIMER_DELAY_SEC="5")
    for second in range(6):
        bodies = small.turn(NOW_MS + second * 1000)
    assert bodies == [b"good"]
    end = small.store.log_max_offset
    small.turn(NOW_MS + 60_000)
    assert small.store.log_max_offset == end, "nothing goes round"
    small.close()


def test_a_slot_whose_count_is_damaged_loses_nothing(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.send(b"first", NOW_MS, TIMER_DELAY_SEC="5")
    small.turn(NOW_MS)
    with (tmp_path / "timerwheel").open("rb+") as file:
        file.seek((NOW_MS // 1000 + 4) % 1_209_600 * 32)
        file.write(struct.pack(">qqqi", NOW_MS // 1000 + 4, 0, 0, 2**31 - 1))
    small.send(b"second", NOW_MS, TIMER_DELAY_SEC="5")
    small.turn(NOW_MS)
    assert small.turn(NOW_MS + 60_000) == [b"first", b"second"]
    small.close()


def test_a_timer_that_nobody_foresaw_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put = TimerStore.put

    def put_but_the_second(
        self: TimerStore, out_ms: int, late_ms: int, entry: QueueEntry, *, is_recall: bool, topic_hash: int
    ) -> bool:
        if self.queue_offset == 1:
            raise struct.error("odd")
        return put(self, out_ms, late_ms, entry, is_recall=is_recall, topic_hash=topic_hash)

    monkeypatch.setattr(TimerStore, "put", put_but_the_second)
    small = Small(tmp_path)
    small.send(b"0", NOW_MS, TIMER_DELAY_SEC="5")
    small.turn(NOW_MS)
    assert small.send(b"1", NOW_MS, TIMER_DELAY_SEC="5").queue_offset == 1, "the send does not fail"
    small.send(b"2", NOW_MS, TIMER_DELAY_SEC="5")
    small.turn(NOW_MS)
    assert small.turn(NOW_MS + 60_000) == [b"0", b"2"]
    assert "rmq_sys_wheel_timer-0: message 1 is passed over: error('odd')" in caplog.text
    small.close()


@pytest.mark.parametrize("what", ["body", "size", "magic", "topic length", "queue entry"])
def test_a_damaged_record_stops_nothing(tmp_path: Path, what: str) -> None:
    small = Small(tmp_path)
    bad = small.send(b"damaged", NOW_MS, TIMER_DELAY_SEC="5")
    small.send(b"good", NOW_MS, TIMER_DELAY_SEC="5")
    small.close()
    at = {"size": 0, "magic": 4, "body": 88, "topic length": 88 + len(b"damaged")}
    path = tmp_path / "commitlog" / ("0" * 20)
    if what == "queue entry":
        path = tmp_path / "consumequeue" / TIMER_TOPIC / "0" / ("0" * 20)
    with path.open("rb+") as file:
        file.seek(bad.log_offsets[0] + at.get(what, 7))
        file.write(b"\x77")
    small = Small(tmp_path)
    small.turn(NOW_MS)
    assert small.turn(NOW_MS + 5000) == [b"good"]
    small.close()


def test_a_timer_with_hardly_any_room_for_properties_is_delivered(tmp_path: Path) -> None:
    small = Small(tmp_path, timer_roll_window_slot=2)
    small.send(b"?", NOW_MS, TIMER_DELAY_SEC="5", padding="x")
    (empty,) = small.delivered(TIMER_TOPIC, 0)
    room = PROPERTIES_MAX_BYTES - len(encode_properties({**empty.properties, "UNIQ_KEY": "full"}))
    with pytest.raises(RequestFailed):
        small.send(b"full", NOW_MS, TIMER_DELAY_SEC="5", padding="x" * (room + 2))
    small.send(b"full", NOW_MS, TIMER_DELAY_SEC="5", padding="x" * (room + 1))
    small.send(b"good", NOW_MS, TIMER_DELAY_SEC="5")
    for second in range(6):
        bodies = small.turn(NOW_MS + second * 1000)
    assert bodies == [b"?", b"full", b"good"]
    small.close()


def test_a_message_that_is_too_large_by_now_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = Small(tmp_path)
    small.send(b"x" * 1000, NOW_MS, "large", TIMER_DELAY_SEC="5")
    small.send(b"good", NOW_MS, TIMER_DELAY_SEC="5")
    small.store.config.max_message_bytes = 500
    small.turn(NOW_MS)
    assert small.turn(NOW_MS + 5000) == [b"good"]
    assert "is dropped: the message is illegal" in caplog.text
    small.close()


def test_timers_that_are_switched_off_do_not_expire(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.send(b"x", NOW_MS, TIMER_DELAY_SEC="5")
    small.send(b"y", NOW_MS, TIMER_DELAY_SEC="5")
    small.turn(NOW_MS)
    for _ in range(4):
        small.store.append(Message("u", 0, bytes(400_000), {}), NOW_MS)
    small.close()
    for file in (tmp_path / "commitlog").iterdir():
        os.utime(file, (0, 0))
    small = Small(tmp_path, timer_wheel_enable=False)
    small.store.delete_expired_soon()
    assert small.store.clean(NOW_MS).log_files == 0, "not before the first turn either"
    small.turn(NOW_MS)
    assert small.store.clean(NOW_MS).log_files == 0
    small.config.timer_wheel_enable = True
    assert small.turn(NOW_MS + 10_000) == [b"x", b"y"]
    small.config.timer_wheel_enable = False
    small.turn(NOW_MS + 10_000)
    assert small.store.clean(NOW_MS).log_files == 1, "none waits any more"
    small.close()


def test_timers_come_by_the_right_clock_after_it_was_ahead(tmp_path: Path) -> None:
    small = Small(tmp_path)
    small.send(b"first", NOW_MS, TIMER_DELAY_SEC="5")
    small.turn(NOW_MS)
    assert small.turn(NOW_MS + 3_600_000) == [b"first"], "early, by the wrong clock"
    small.send(b"second", NOW_MS + 3_000, TIMER_DELAY_SEC="5")
    small.turn(NOW_MS + 3_000)
    assert small.timers.delivered_to_ms(NOW_MS + 3_000) > NOW_MS + 3_000_000
    small.store.flush()
    small.turn(NOW_MS + 4_000)
    assert small.timers.delivered_to_ms(NOW_MS + 4_000) == NOW_MS + 4_000
    assert small.turn(NOW_MS + 7_999) == [b"first"]
    assert small.turn(NOW_MS + 8_000) == [b"first", b"second"]
    small.close()


def test_a_kill_under_load_repeats_one_message_at_most(tmp_path: Path) -> None:
    small = Small(tmp_path / "0", mapped_file_size_timer_log=1 << 16)
    sent = 0
    for life in range(3):
        for second in range(life * 10, life * 10 + 10):
            for _ in range(5):
                small.send(b"%d" % sent, NOW_MS + second * 1000, TIMER_DELAY_SEC="2")
                sent += 1
            small.turn(NOW_MS + second * 1000)
            if second % 3 == 0:
                small.store.flush()
        copy = tmp_path / str(life + 1)
        shutil.copytree(tmp_path / str(life), copy, ignore=shutil.ignore_patterns("lock"))
        small.close()
        small = Small(copy, mapped_file_size_timer_log=1 << 16)
    bodies = small.turn(NOW_MS + 60_000)
    assert set(bodies) == {b"%d" % number for number in range(sent)}
    assert len(bodies) <= sent + 3
    small.close()


async def recall(broker: Live, handle: str, topic: str = "t") -> Frame:
    return await broker.ask(RequestCode.RECALL_MESSAGE, topic=topic, recallHandle=handle, producerGroup="g")


def test_a_broker_delivers_and_recalls(tmp_path: Path) -> None:
    async def run() -> None:
        clock = MovableClock()
        async with live_broker(tmp_path, clock, recallMessageEnable="true", timerPrecisionMs=100) as broker:
            sent = await broker.send("t", b"stays", {"UNIQ_KEY": "A", "TIMER_DELAY_MS": "599900"})
            gone = await broker.send("t", b"gone", {"UNIQ_KEY": "B", "TIMER_DELAY_MS": "599900"})
            handle = RecallHandle.decode(gone.fields["recallHandle"])
            assert (handle.topic, handle.broker, handle.unique_key) == ("t", "broker-a", "B")
            answer = await recall(broker, gone.fields["recallHandle"])
            assert (answer.code, answer.fields["msgId"]) == (ResponseCode.SUCCESS, "B")
            clock.ahead_ms += 600_000
            (found,) = await broker.until_found("t")
            assert found.body == b"stays"
            assert found.store_timestamp_ms >= int(found.properties["TIMER_OUT_MS"]) + 100
            late = await recall(broker, sent.fields["recallHandle"])
            assert (late.code, late.remark) == (ResponseCode.ILLEGAL_OPERATION, "recall failed, timestamp invalid")
            await broker.send("t", b"last", {"TIMER_DELAY_MS": "100"})
            (found,) = await broker.until_found("t", 1)
            assert found.body == b"last"
            metrics = fastjson.loads((await broker.ask(RequestCode.GET_TIMER_METRICS)).body)
            assert metrics["timingCount"]["t"]["count"] == 0
            assert len((await broker.ask(RequestCode.GET_TIMER_CHECK_POINT)).body) == 56

    asyncio.run(run())


def test_bad_recalls_are_refused_with_apaches_words(tmp_path: Path) -> None:
    soon = str(time.time_ns() // 1_000_000 + 3_600_000)
    bad = {
        "": "recall handle is invalid",
        "%%%": "recall handle is invalid",
        RecallHandle("t", "broker-a", soon, "").encode()[:12]: "recall handle is invalid",
        RecallHandle("u", "broker-a", soon, "K").encode(): "recall failed, topic not match",
        RecallHandle("t", "broker-b", soon, "K").encode(): "recall failed, broker service not available",
        RecallHandle("t", "broker-a", "12", "K").encode(): "recall failed, timestamp invalid",
        RecallHandle("t", "broker-a", "soon", "K").encode(): "recall failed, timestamp invalid",
        RecallHandle("t", "broker-a", "9" * 30, "K").encode(): "recall failed, timestamp invalid",
    }

    async def run() -> None:
        async with live_broker(tmp_path, recallMessageEnable="true") as broker:
            await broker.send("t")
            for handle, remark in bad.items():
                if not handle:
                    continue  # the binary header has no empty values
                answer = await recall(broker, handle)
                assert (answer.code, answer.remark) == (ResponseCode.ILLEGAL_OPERATION, remark), handle
            answer = await recall(broker, RecallHandle("no", "broker-a", soon, "K").encode(), "no")
            assert (answer.code, answer.remark) == (
                ResponseCode.TOPIC_NOT_EXIST,
                "recall failed, the topic[no] not exist",
            )
            assert (await recall(broker, RecallHandle("t", "broker-a", soon, "K").encode())).code == 0
            assert [message.body for message in messages_of(await broker.pull("t", 0))] == [b"hello"]
        async with live_broker(tmp_path / "off") as broker:
            answer = await recall(broker, "x")
            assert (answer.code, answer.remark) == (
                ResponseCode.NO_PERMISSION,
                "recall failed, operation is forbidden",
            )

    asyncio.run(run())


def test_a_topic_that_can_not_be_written_does_not_hold_up_the_others(tmp_path: Path) -> None:
    small = Small(tmp_path)
    (tmp_path / "consumequeue" / "broken").write_text("")
    due = {"UNIQ_KEY": "bad", "TIMER_DELIVER_MS": str(NOW_MS + 2_000)}
    small.put.one(Message("broken", 0, b"bad", due, born_host=encode_host("127.0.0.1", 1)), NOW_MS)
    small.send(b"good", NOW_MS, TIMER_DELIVER_MS=str(NOW_MS + 2_000))
    small.turn(NOW_MS)
    assert small.turn(NOW_MS + 4_000) == [b"good"]
    small.close()
