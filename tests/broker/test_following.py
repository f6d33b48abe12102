"""One bad record of every kind in front of good ones, in every queue that something follows: the good ones arrive."""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.followers import PRODUCERS, Follower, Levels, Revival, Undecided, bodies_in, scribble, scribble_entry
from broker.pop_broker import GROUP, HOST, START_MS, TOPIC
from skylark.broker.halves import become_half
from skylark.broker.topics import DLQ_PREFIX, SCHEDULE_TOPIC, TRANSACTION_CHECK_TOPIC
from skylark.net.connection import RequestFailed
from skylark.wire.codes import ResponseCode
from skylark.wire.message import PROPERTIES_MAX_BYTES, Message
from skylark.wire.tables import SubscriptionGroupConfig, TopicConfig

GOOD = [b"one", b"two", b"three"]
DIGITS = "9" * 5_000
FOLLOWERS: list[Callable[[Path], Follower]] = [Levels, Undecided, Revival]

Damage = Callable[[Follower, int, int], None]
"""Damages the record at a log offset, which is the message at an offset of the queue."""


def _log(position: int, data: bytes) -> Damage:
    return lambda follower, log_offset, offset: scribble(follower.store, log_offset + position, data)


def _entry(data: bytes) -> Damage:
    return lambda follower, log_offset, offset: scribble_entry(follower.store, *follower.queue, offset, data)


DAMAGES: dict[str, Damage] = {
    "magic": _log(4, bytes(4)),
    "checksum": _log(8, b"\x12\x34\x56\x78"),
    "queue": _log(12, b"\x00\x00\x00\x07"),
    "queue offset": _log(20, b"\x7f" * 8),
    "a topic that is longer": _log(84, b"\x00\x00\x00\x01"),
    "hosts of another kind": _log(39, b"\x30"),
    "entry to another message": _entry(bytes(8)),
    "entry to nothing": _entry(b"\x00\x00\x00\x00\x00\x0f\xff\x00"),
}

ODD_PROPERTIES: dict[str, tuple[Callable[[Path], Follower], dict[str, str]]] = {
    "level: no topic": (Levels, {}),
    "level: no legal topic": (Levels, {"REAL_TOPIC": "../../x", "REAL_QID": "0"}),
    "level: its own topic": (Levels, {"REAL_TOPIC": "SCHEDULE_TOPIC_XXXX", "REAL_QID": "0"}),
    "level: the topic of halves": (Levels, {"REAL_TOPIC": "RMQ_SYS_TRANS_HALF_TOPIC", "REAL_QID": "0"}),
    "level: no queue": (Levels, {"REAL_TOPIC": TOPIC, "REAL_QID": DIGITS}),
    "level: a negative queue": (Levels, {"REAL_TOPIC": TOPIC, "REAL_QID": "-1"}),
    "half: digits as immunity": (Undecided, {"CHECK_IMMUNITY_TIME_IN_SECONDS": DIGITS, "REAL_TOPIC": TOPIC}),
    "half: digits as count": (Undecided, {"TRANSACTION_CHECK_TIMES": DIGITS, "REAL_TOPIC": TOPIC}),
    "half: digits as queue": (Undecided, {"REAL_TOPIC": TOPIC, "REAL_QID": DIGITS}),
    "half: no topic": (Undecided, {}),
    "half: no legal topic": (Undecided, {"REAL_TOPIC": "\u00e9" * 100, "REAL_QID": "0"}),
    "revive: digits as time": (Revival, {"TIMER_DELIVER_MS": DIGITS}),
    "revive: an acknowledgement that is none": (Revival, {"TAGS": "ack"}),
    "revive: acknowledgements that are none": (Revival, {"TAGS": "bAck"}),
    "revive: no tag": (Revival, {"TAGS": "x"}),
}  # fmt: skip


@pytest.mark.parametrize("follower_of", FOLLOWERS)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_record_does_not_hold_up_the_queue(
    tmp_path: Path, follower_of: Callable[[Path], Follower], damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    follower = follower_of(tmp_path)
    appended = follower.put_in_queue(b"bad")
    damage(follower, appended.log_offset, appended.queue_offset)
    for body in GOOD:
        follower.send(body)
    with caplog.at_level(logging.ERROR):
        assert [body for body in follower.handled() if body != b"bad"] == GOOD
    follower.store.close()


@pytest.mark.parametrize(("follower_of", "properties"), ODD_PROPERTIES.values(), ids=list(ODD_PROPERTIES))
def test_a_record_that_says_what_no_broker_says_does_not_hold_up_the_queue(
    tmp_path: Path, follower_of: Callable[[Path], Follower], properties: dict[str, str]
) -> None:
    follower = follower_of(tmp_path)
    follower.put_in_queue(b"bad", **properties)
    for body in GOOD:
        follower.send(body)
    assert [body for body in follower.handled() if body != b"bad"] == GOOD
    follower.store.close()


@pytest.mark.parametrize("follower_of", FOLLOWERS)
@pytest.mark.parametrize("why", ["properties", "body"])
def test_a_message_that_can_not_be_copied_does_not_hold_up_the_queue(
    tmp_path: Path, follower_of: Callable[[Path], Follower], why: str
) -> None:
    follower = follower_of(tmp_path)
    if why == "properties":
        # Whatever the broker adds when it parks the message: as much as there is room for, and not a byte more.
        follower.send(b"bad", p="x" * (PROPERTIES_MAX_BYTES - room_needed(follower)))
    else:
        follower.send(b"b" * 2_000)
    for body in GOOD:
        follower.send(body)
    if why == "body":
        follower.store.config.max_message_bytes = 1_000  # as an operator lowers maxMessageSize
    assert [body for body in follower.handled() if body[:1] != b"b"] == GOOD
    saved = {"properties": [b"bad"], "body": []}[why]
    if isinstance(follower, Levels):
        assert follower.handled() == saved + GOOD, "it fits without what the broker added"
    elif isinstance(follower, Undecided):
        assert follower.asked == saved + GOOD, "it is asked for once"
        assert bodies_in(follower.store, TRANSACTION_CHECK_TOPIC) == saved
    else:
        assert bodies_in(follower.store, DLQ_PREFIX + GROUP) == saved
    follower.store.close()


def room_needed(follower: Follower) -> int:
    """How much of the properties a message needs, in the queue, that has the property p."""
    if isinstance(follower, Revival):
        return len("p\x01\x02")
    follower.send(b"bad", p="1")
    topic, queue_id = follower.queue
    entry = follower.store.entry(topic, queue_id, follower.store.max_offset(topic, queue_id) - 1)
    assert entry is not None
    message = follower.store.message_at(entry.log_offset)
    assert message is not None
    size = sum(len(name) + len(value) + 2 for name, value in message.properties.items()) - 1
    if isinstance(follower, Levels):
        follower.delayed.table.offset_table[1] = 1  # the sample is not delivered
    else:
        assert isinstance(follower, Undecided)
        follower.halves.pass_to(1)
    return size


@pytest.mark.parametrize(
    ("ahead_ms", "is_immune"), [(0, True), (3_000_000, True), (4_000_000, False), (1 << 40, False)]
)
def test_a_half_from_a_clock_far_ahead_is_not_copied_for_ever(tmp_path: Path, ahead_ms: int, is_immune: bool) -> None:
    undecided = Undecided(tmp_path)
    wanted = {"UNIQ_KEY": "k", "TRAN_MSG": "true", "PGROUP": PRODUCERS, "CHECK_IMMUNITY_TIME_IN_SECONDS": "60"}
    message = Message(TOPIC, 0, b"ahead", wanted, born_timestamp_ms=START_MS + ahead_ms, born_host=HOST)
    become_half(message)
    undecided.put.one(message, START_MS)
    assert undecided.handled() == ([] if is_immune else [b"ahead"])
    undecided.store.close()


def test_large_messages_of_a_level_are_delivered_in_turns(tmp_path: Path) -> None:
    levels = Levels(tmp_path)
    for _ in range(8):
        levels.send(bytes(300_000))
    assert levels.delayed.deliver(START_MS + 1_000) == 0
    assert 1 <= levels.store.max_offset(TOPIC, 0) <= 4
    assert len(levels.handled()) == 8
    levels.store.close()


def test_a_batch_part_with_a_delay_that_is_no_number_comes_back(tmp_path: Path) -> None:
    follower = Revival(tmp_path)
    follower.send(b"odd", DELAY="soon")
    for body in GOOD:
        follower.send(body, DELAY="3")
    assert follower.handled() == [b"odd", *GOOD], "what was popped has waited already"
    follower.store.close()


POINT = {"c": GROUP, "d": [0], "it": 60_000, "n": 1, "pt": START_MS, "q": 0, "so": 0, "t": TOPIC}


@pytest.mark.parametrize(
    "change",
    [
        {"so": 10**30}, {"pt": 10**30}, {"q": 10**30}, {"d": [10**30]}, {"so": 2**63 - 1}, {"so": -5},
        {"n": 2_000_000_000, "d": []}, {"d": list(range(2_000))}, {"t": "../../x"}, {"c": ""}, {"it": 10**15},
        {"pt": 10**17},
    ],
    ids=str,
)  # fmt: skip
def test_a_check_point_that_no_pop_wrote_does_not_hold_up_the_queue(tmp_path: Path, change: dict[str, object]) -> None:
    """Above all one of the far future: it must neither stop the queue nor hide messages for ever."""
    follower = Revival(tmp_path)
    follower.put_in_queue(json.dumps(POINT | change).encode())
    for body in GOOD:
        follower.send(body)
    assert sorted(set(follower.handled())) == sorted(GOOD)
    assert follower.broker.popping._revive.pending_count == 0
    follower.store.close()


def break_topic(follower: Follower, topic: str) -> None:
    """No queue of the topic can be opened from now on: a file is where its directory should be."""
    (follower.store.config.root / "consumequeue" / topic).write_text("")


def test_a_topic_that_can_not_be_written_does_not_hold_up_a_delay_level(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    follower = Levels(tmp_path)
    break_topic(follower, "broken")
    follower.put_in_queue(b"bad", REAL_TOPIC="broken", REAL_QID="0")
    for body in GOOD:
        follower.send(body)
    with caplog.at_level(logging.ERROR):
        assert follower.handled() == GOOD
    assert "message 0 is passed over" in caplog.text
    follower.store.close()


def test_a_retry_topic_that_can_not_be_written_does_not_hold_up_revivals(tmp_path: Path) -> None:
    follower = Revival(tmp_path)
    break_topic(follower, f"%RETRY%{GROUP}_broken")
    follower.broker.topics.put(TopicConfig("broken", read_queue_nums=1, write_queue_nums=1))
    follower.broker.send("bad", topic="broken")
    assert follower.broker.pop(topic="broken")
    for body in GOOD:
        follower.send(body)
    assert follower.handled() == GOOD
    assert bodies_in(follower.store, DLQ_PREFIX + GROUP) == [b"bad"]
    follower.store.close()


def test_names_that_make_no_retry_topic_together_lead_to_the_dead_letters(tmp_path: Path) -> None:
    """Apache's groups may have 255 letters."""
    follower = Revival(tmp_path)
    group, topic = "G" * 200, "T" * 100
    follower.broker.topics.put(TopicConfig(topic, read_queue_nums=1, write_queue_nums=1))
    follower.broker.groups.put(SubscriptionGroupConfig(group_name=group))
    follower.broker.send("long", topic=topic)
    assert follower.broker.pop(consumer_group=group, topic=topic)
    for body in GOOD:
        follower.send(body)
    assert follower.handled() == GOOD
    assert bodies_in(follower.store, DLQ_PREFIX + group) == [b"long"]
    assert f"%RETRY%{group}_{topic}" not in follower.broker.topics
    follower.store.close()


def test_too_many_open_files_are_waited_for(tmp_path: Path) -> None:
    follower = Levels(tmp_path)
    for body in GOOD:
        follower.send(body)
    follower.delayed.deliver(START_MS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        waits_ms = follower.delayed.deliver(START_MS + 1_000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert waits_ms > 0
    assert follower.delayed.table.offset_table.get(1, 0) == 0
    assert follower.handled() == GOOD
    follower.store.close()


def test_a_queue_of_the_brokers_own_that_fails_is_no_fault_of_the_message(tmp_path: Path) -> None:
    follower = Levels(tmp_path)
    break_topic(follower, SCHEDULE_TOPIC)
    with pytest.raises(RequestFailed) as refused:
        follower.send(b"one")
    assert refused.value.code == ResponseCode.SERVICE_NOT_AVAILABLE
    follower.store.close()
