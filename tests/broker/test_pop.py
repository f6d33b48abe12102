"""Pops, acknowledgements, changes of time and what comes back, with a clock that the tests move."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.pop_broker import GROUP, START_MS, TOPIC, PopBroker, Popped, bodies, popped, turns
from skylark.broker import offset_room, revive
from skylark.broker.checkpoints import CheckPoints
from skylark.broker.walks import QUEUES_PER_TURN
from skylark.net.connection import RequestFailed
from skylark.store import Appended
from skylark.wire import pop
from skylark.wire.bodies import encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import PROPERTY_FIRST_POP_TIME, StoredMessage
from skylark.wire.records import decode_record
from skylark.wire.tables import TopicConfig

RETRY = f"%RETRY%{GROUP}_{TOPIC}"
LATER_MS = 65_000


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[PopBroker]:
    made = PopBroker(tmp_path / "store")
    yield made
    made.store.close()


def stored(broker: PopBroker, topic: str, queue_id: int = 0) -> list[StoredMessage]:
    result = broker.store.read(topic, queue_id, 0, 32)
    return [decode_record(record) for record in result.records]


def test_what_is_popped_is_nobody_elses(broker: PopBroker) -> None:
    broker.send("a", "b", "c")
    assert bodies(broker.pop(max_msg_nums=2)) == ["a", "b"]
    assert bodies(broker.pop()) == ["c"]
    assert broker.pop() == []


def test_the_answer_tells_offsets_and_times(broker: PopBroker) -> None:
    broker.send("a", "b", "c")
    answer = broker.ask(RequestCode.POP_MESSAGE, broker.header(max_msg_nums=2))
    assert answer.remark == "FOUND"
    assert answer.fields == {
        "popTime": str(START_MS),
        "invisibleTime": "60000",
        "reviveQid": "1",
        "restNum": "1",
        "startOffsetInfo": "0 0 0",
        "msgOffsetInfo": "0 0 0,1",
    }


def test_what_nobody_acknowledges_comes_back_from_the_retry_topic(broker: PopBroker) -> None:
    broker.send("a", "b", TAGS="red")
    first, second = broker.pop()
    assert broker.ack(first).code == 0
    broker.passes(59_000)
    assert broker.pop() == []
    broker.passes(LATER_MS - 59_000)
    (again,) = broker.pop()
    assert (again.body, again.message.topic, again.message.reconsume_times) == ("b", TOPIC, 1)
    assert again.message.tags == "red"
    assert again.message.properties[PROPERTY_FIRST_POP_TIME] == str(START_MS)
    assert again.handle.kind == "1"
    assert again.handle.broker_name == second.handle.broker_name
    assert broker.ack(again).code == 0
    broker.passes(LATER_MS)
    assert broker.pop() == []


def test_a_batch_of_acknowledgements(broker: PopBroker) -> None:
    broker.send("a", "b", "c", "d")
    a, b, c, d = broker.pop()
    assert broker.batch_ack(a, c, d).code == 0
    broker.passes(LATER_MS)
    (again,) = broker.pop()
    assert again.body == b.body
    assert broker.batch_ack(again).code == 0
    broker.passes(LATER_MS)
    assert broker.pop() == []


def test_a_batch_of_nothing(broker: PopBroker) -> None:
    assert broker.ask(RequestCode.BATCH_ACK_MESSAGE).code == ResponseCode.NO_MESSAGE
    assert broker.ask(RequestCode.BATCH_ACK_MESSAGE, None, b'{"acks":[]}').code == ResponseCode.NO_MESSAGE


def test_more_time_for_one_message(broker: PopBroker) -> None:
    broker.send("a", "b")
    a, _ = broker.pop()
    broker.passes(30_000)
    longer = broker.extend(a, 120_000)
    broker.passes(35_000)
    assert bodies(broker.pop()) == ["b"]
    broker.passes(62_000)
    assert bodies(broker.pop(invisible_time=600_000)) == ["b"]  # its second retry
    assert broker.ack(longer).code == 0
    broker.passes(60_000)
    assert broker.pop() == []


def test_more_time_passes_too(broker: PopBroker) -> None:
    broker.send("a")
    (a,) = broker.pop()
    broker.extend(a, 10_000)
    broker.passes(12_000)
    (again,) = broker.pop()
    assert (again.body, again.message.reconsume_times) == ("a", 1)


def test_a_suspended_message_does_not_count_as_tried(broker: PopBroker) -> None:
    broker.send("a")
    (a,) = broker.pop()
    broker.extend(a, 10_000, suspend=True)
    broker.passes(12_000)
    assert broker.pop()[0].message.reconsume_times == 0


def test_the_time_of_a_message_may_be_changed_again_and_again(broker: PopBroker) -> None:
    broker.send("a")
    (taken,) = broker.pop(invisible_time=10_000)
    for _ in range(20):
        broker.passes(8_000)
        taken = broker.extend(taken, 10_000)
    assert broker.pop() == []
    assert broker.ack(taken).code == 0
    broker.passes(LATER_MS)
    assert broker.pop() == []


def test_dead_letters_after_the_groups_limit(broker: PopBroker, caplog: pytest.LogCaptureFixture) -> None:
    broker.send("a")
    seen = []
    for _ in range(6):
        seen += [taken.message.reconsume_times for taken in broker.pop()]
        broker.passes(LATER_MS)
    assert seen == [0, 1, 2, 3]
    (dead,) = stored(broker, f"%DLQ%{GROUP}")
    assert (dead.body, dead.reconsume_times) == (b"a", 4)
    assert f"of topic {TOPIC}, tried 4 times, is a dead letter of group {GROUP} now, at offset 0" in caplog.text


def test_two_groups_pop_by_themselves(broker: PopBroker) -> None:
    broker.send("a")
    assert bodies(broker.pop()) == ["a"]
    assert bodies(broker.pop(consumer_group="others")) == ["a"]


def test_a_tag_filter_and_what_lies_between(broker: PopBroker) -> None:
    for number in range(6):
        broker.send(f"{number}", TAGS="even" if number % 2 == 0 else "odd")
    taken = broker.pop(exp="even", exp_type="TAG")
    assert bodies(taken) == ["0", "2", "4"]
    assert [each.handle.offset for each in taken] == [0, 2, 4]
    assert broker.batch_ack(taken[0], taken[2]).code == 0
    broker.passes(LATER_MS)
    assert bodies(broker.pop(exp="even", exp_type="TAG")) == ["2"]


def test_a_filter_by_properties(broker: PopBroker) -> None:
    for number in range(6):
        broker.send(f"{number}", amount=str(number))
    taken = broker.pop(exp="amount > 3", exp_type="SQL92")
    assert bodies(taken) == ["4", "5"]
    assert broker.batch_ack(taken[0]).code == 0
    broker.passes(LATER_MS)
    assert bodies(broker.pop(exp="amount > 3", exp_type="SQL92")) == ["5"]


def test_an_expression_that_is_none(broker: PopBroker) -> None:
    answer = broker.ask(RequestCode.POP_MESSAGE, broker.header(exp="a > ", exp_type="SQL92"))
    assert answer.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED


def test_the_new_names_of_retry_topics(tmp_path: Path) -> None:
    broker = PopBroker(tmp_path, enable_retry_topic_v2=True)
    broker.send("a")
    broker.pop()
    broker.passes(LATER_MS)
    assert f"%RETRY%{GROUP}+{TOPIC}" in broker.topics
    (again,) = broker.pop()
    assert (again.body, again.handle.kind) == ("a", "2")
    assert broker.ack(again).code == 0
    broker.passes(LATER_MS)
    assert broker.pop() == []
    broker.store.close()


def test_the_actual_retry_topic(tmp_path: Path) -> None:
    broker = PopBroker(tmp_path, pop_response_return_actual_retry_topic=True)
    broker.send("a")
    broker.pop()
    broker.passes(LATER_MS)
    (again,) = broker.pop()
    assert (again.message.topic, again.handle.kind) == (RETRY, "1")
    assert broker.ack(again).code == 0
    broker.passes(LATER_MS)
    assert broker.pop() == []
    broker.store.close()


def test_a_retry_queue_for_each_queue(tmp_path: Path) -> None:
    broker = PopBroker(tmp_path, use_separate_retry_queue=True)
    broker.topics.put(TopicConfig(TOPIC, read_queue_nums=3, write_queue_nums=3))
    broker.send("a", queue_id=2)
    broker.pop()
    broker.passes(LATER_MS)
    (copy,) = stored(broker, RETRY, 2)
    assert copy.body == b"a"
    broker.store.close()


def test_an_operators_reset(broker: PopBroker) -> None:
    broker.send("a", "b")
    assert len(broker.pop()) == 2
    broker.offsets.reset(GROUP, TOPIC, 0, 1)
    assert bodies(broker.pop()) == ["b"]


def test_where_a_new_group_begins(broker: PopBroker) -> None:
    broker.send("a", "b", "c")
    assert bodies(broker.pop(consumer_group="first", init_mode=pop.FROM_MIN)) == ["a", "b", "c"]
    assert bodies(broker.pop(consumer_group="fresh", init_mode=pop.FROM_MAX)) == ["a", "b", "c"]
    broker.config.init_pop_offset_by_check_msg_in_mem = False
    assert bodies(broker.pop(consumer_group="last", init_mode=pop.FROM_MAX)) == ["c"]


def test_a_check_point_that_comes_twice_revives_once(broker: PopBroker) -> None:
    broker.send("a", "b")
    a, _ = broker.pop()
    broker.ack(a)
    broker.put.parked += [entry for entry in broker.put.parked if entry[1].tags == pop.CHECK_POINT_TAG]
    broker.passes(LATER_MS)
    assert bodies(broker.pop()) == ["b"]
    assert broker.pop() == []


def test_a_topic_that_is_gone_is_not_revived(broker: PopBroker) -> None:
    broker.send("a")
    broker.pop()
    broker.topics.delete(TOPIC)
    broker.passes(LATER_MS)
    assert RETRY not in broker.topics


# Bad input.


def test_requests_that_are_refused(broker: PopBroker) -> None:
    def code(**more: object) -> int:
        return broker.ask(RequestCode.POP_MESSAGE, broker.header(**more)).code

    assert code(max_msg_nums=33) == ResponseCode.INVALID_PARAMETER
    assert code(topic="nowhere") == ResponseCode.TOPIC_NOT_EXIST
    assert code(queue_id=1) == ResponseCode.INVALID_PARAMETER
    assert code(born_time=START_MS - 1_000, poll_time=400) == ResponseCode.POLLING_TIMEOUT
    broker.config.broker_permission = 2
    assert code() == ResponseCode.NO_PERMISSION


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"extra_info": "forged"}, ResponseCode.SYSTEM_ERROR),
        ({"extra_info": "0 1 2 x 0 broker-a 0 0"}, ResponseCode.SYSTEM_ERROR),
        ({"extra_info": "0 1 2 8 0 broker-a 0 0"}, ResponseCode.MESSAGE_ILLEGAL),
        ({"extra_info": "0 1 2 -1 0 broker-a 0 0"}, ResponseCode.MESSAGE_ILLEGAL),
        ({"extra_info": "0 1 2 0 0 broker-b 0 0"}, ResponseCode.MESSAGE_ILLEGAL),
        ({"offset": 99}, ResponseCode.NO_MESSAGE),
        ({"queue_id": 7}, ResponseCode.MESSAGE_ILLEGAL),
        ({"topic": "nowhere"}, ResponseCode.TOPIC_NOT_EXIST),
        ({"lite_topic": "lite"}, ResponseCode.INVALID_PARAMETER),
    ],
)
def test_forged_acknowledgements_lose_nothing(broker: PopBroker, change: dict[str, object], code: int) -> None:
    broker.send("a")
    (a,) = broker.pop()
    fields = {"consumer_group": GROUP, "topic": TOPIC, "queue_id": 0, "extra_info": a.handle.encode(), "offset": 0}
    answer = broker.ask(RequestCode.ACK_MESSAGE, pop.AckMessage(**(fields | change)))  # type: ignore[arg-type]
    assert answer.code == code
    assert answer.remark
    changed = pop.ChangeInvisibleTime(**(fields | change), invisible_time=1)  # type: ignore[arg-type]
    assert broker.ask(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, changed).code in (code, 0)
    broker.passes(LATER_MS)
    assert bodies(broker.pop()) == ["a"]


def test_a_handle_of_another_pop_or_group_does_nothing(broker: PopBroker) -> None:
    broker.send("a")
    (a,) = broker.pop()
    stale = Popped(a.message, pop.ReceiptHandle(0, START_MS - 5, 60_000, a.handle.revive_queue, "0", "broker-a", 0, 0))
    assert broker.ack(stale).code == 0
    assert broker.ack(a, group="others").code == 0
    broker.passes(LATER_MS)
    assert bodies(broker.pop()) == ["a"]


def test_a_batch_with_something_forged_counts_for_the_rest(broker: PopBroker) -> None:
    broker.send("a")
    (a,) = broker.pop()
    good = pop.BatchAck.of(TOPIC, GROUP, [a.handle])
    bad = pop.BatchAck("AQ==", GROUP, 1, 1, 0, "7", 0, 0, TOPIC)
    body = encode_body(pop.BatchAckMessage([bad, *good], "broker-a"))
    assert broker.ask(RequestCode.BATCH_ACK_MESSAGE, None, body).code == ResponseCode.SYSTEM_ERROR
    broker.passes(LATER_MS)
    assert broker.pop() == []


# Waiting.


def test_a_pop_waits_for_a_message(broker: PopBroker) -> None:
    async def main() -> None:
        header = broker.header(poll_time=10_000)
        waiting = [asyncio.create_task(broker.ask_and_wait(RequestCode.POP_MESSAGE, header)) for _ in range(2)]
        await turns()
        info = pop.PollingInfo(GROUP, TOPIC, -1)
        assert broker.ask(RequestCode.POLLING_INFO, info).fields == {"pollingNum": "2"}
        broker.send("a")
        assert bodies(popped(await waiting[0])) == ["a"]
        assert not waiting[1].done()
        broker.popping.close()
        with pytest.raises(RequestFailed, match="shutting down"):
            await waiting[1]
        broker.send("b")  # who took it now could not acknowledge it before the restart
        assert broker.ask(RequestCode.POP_MESSAGE, header).code == ResponseCode.SERVICE_NOT_AVAILABLE

    asyncio.run(main())


def test_one_arrival_wakes_one_and_what_is_left_the_next(broker: PopBroker) -> None:
    async def main() -> None:
        header = broker.header(poll_time=10_000, max_msg_nums=1)
        waiting = [asyncio.create_task(broker.ask_and_wait(RequestCode.POP_MESSAGE, header)) for _ in range(3)]
        await turns()
        broker.send("a", "b", "c")
        answers = await asyncio.gather(*waiting)
        assert sorted(body for answer in answers for body in bodies(popped(answer))) == ["a", "b", "c"]

    asyncio.run(main())


def test_a_revived_message_wakes_too(broker: PopBroker) -> None:
    async def main() -> None:
        broker.send("a")
        broker.pop()
        waiting = asyncio.create_task(
            broker.ask_and_wait(RequestCode.POP_MESSAGE, broker.header(poll_time=100_000, exp="other", exp_type="TAG"))
        )
        for_all = asyncio.create_task(broker.ask_and_wait(RequestCode.POP_MESSAGE, broker.header(poll_time=100_000)))
        await turns()
        broker.passes(LATER_MS)
        await turns()
        broker.send("b")
        assert bodies(popped(await for_all))[0] in ("a", "b")
        waiting.cancel()

    asyncio.run(main())


def test_no_more_wait_than_there_is_room_for(broker: PopBroker) -> None:
    async def main() -> None:
        broker.config.max_pop_polling_size = 1
        header = broker.header(poll_time=10_000)
        waiting = asyncio.create_task(broker.ask_and_wait(RequestCode.POP_MESSAGE, header))
        await turns()
        assert broker.ask(RequestCode.POP_MESSAGE, header).code == ResponseCode.POLLING_FULL
        waiting.cancel()
        await turns()
        assert broker.ask(RequestCode.POLLING_INFO, pop.PollingInfo(GROUP, TOPIC, -1)).fields["pollingNum"] == "0"

    asyncio.run(main())


def test_notification(broker: PopBroker) -> None:
    async def main() -> None:
        header = pop.Notification(GROUP, TOPIC, -1, 10_000, 0)
        waiting = asyncio.create_task(broker.ask_and_wait(RequestCode.NOTIFICATION, header))
        await turns()
        assert not waiting.done()
        broker.send("a")
        assert (await waiting).fields == {"hasMsg": "true", "pollingFull": "false"}
        assert broker.ask(RequestCode.NOTIFICATION, header).fields["hasMsg"] == "true"
        broker.pop()
        at_once = pop.Notification(GROUP, TOPIC, -1, 0, 0)
        assert broker.ask(RequestCode.NOTIFICATION, at_once).fields["hasMsg"] == "false"

    asyncio.run(main())


def test_who_waits_for_a_notification_when_the_broker_ends_is_refused(broker: PopBroker) -> None:
    async def main() -> None:
        header = pop.Notification(GROUP, TOPIC, -1, 10_000, 0)
        waiting = asyncio.create_task(broker.ask_and_wait(RequestCode.NOTIFICATION, header))
        await turns()
        broker.popping.close()
        with pytest.raises(RequestFailed, match="shutting down"):
            await waiting
        broker.send("a")  # a pop would be refused too
        assert broker.ask(RequestCode.NOTIFICATION, header).code == ResponseCode.SERVICE_NOT_AVAILABLE

    asyncio.run(main())


def test_peek_takes_nothing(broker: PopBroker) -> None:
    broker.send("a", "b")
    header = pop.PeekMessage(TOPIC, -1, 1, GROUP)
    for _ in range(2):
        answer = broker.ask(RequestCode.PEEK_MESSAGE, header)
        assert decode_record(answer.body).body == b"a"
        assert answer.fields["restNum"] == "2"
    assert len(broker.pop()) == 2
    assert broker.ask(RequestCode.PEEK_MESSAGE, header).code == ResponseCode.PULL_NOT_FOUND


def test_pops_in_flight_are_not_in_memory(tmp_path: Path) -> None:
    broker = PopBroker(tmp_path)
    broker.send(*("x" for _ in range(2_000)))
    taken = [broker.pop(max_msg_nums=1, invisible_time=600_000)[0] for _ in range(2_000)]
    assert broker.popping._revive.pending_count == 0
    for each in taken[::2]:
        broker.ack(each)
    broker.passes(602_000)
    assert broker.popping._revive.pending_count == 0
    again = 0
    while found := broker.pop():
        again += len(found)
    assert again == 1_000
    broker.store.close()


@pytest.mark.parametrize(("pops", "each", "size", "most"), [(30, 32, 1, 500 + 32), (8, 1, 300_000, 4)])
def test_a_turn_of_revivals_is_bounded(tmp_path: Path, pops: int, each: int, size: int, most: int) -> None:
    broker = PopBroker(tmp_path, revive_queue_num=1)
    for _ in range(pops):
        broker.send(*("x" * size for _ in range(each)))
        assert len(broker.pop()) == each
    retry = f"%RETRY%{GROUP}_{TOPIC}"
    broker.now_ms += 59_500
    for _, message in broker.put.parked:
        broker.store.append(message, broker.now_ms)
    broker.now_ms += 3_000
    turns = 1
    before = 0
    while broker.popping.revive(broker.now_ms) == 0 and turns < 100:
        copies = broker.store.max_offset(retry, 0)
        assert copies - before <= most
        before = copies
        turns += 1
    assert turns > 1
    assert broker.store.max_offset(retry, 0) == pops * each
    broker.store.close()


def test_check_points_are_read_only_as_fast_as_they_are_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a broker was away any number of them may be due at once."""
    pops, each = 60, 4
    broker = PopBroker(tmp_path, revive_queue_num=1)
    broker.send(*(str(number) for number in range(pops * each)))
    taken = []
    for _ in range(pops):
        taken.append(broker.pop(max_msg_nums=each, invisible_time=600_000))
        broker.now_ms += 3_000
    broker.batch_ack(*taken[-1][1:])
    broker.batch_ack(*taken[0][1:])
    broker.now_ms += 600_000
    for _, message in sorted(broker.put.parked, key=lambda entry: entry[0]):
        broker.store.append(message, broker.now_ms)
    monkeypatch.setattr(revive, "_MOST_PENDING", 10)
    monkeypatch.setattr(revive, "_MOST_A_TURN", 10)
    monkeypatch.setattr(revive, "_MOST_COPIES_A_TURN", each)
    most = turns = 0
    while broker.popping.revive(broker.now_ms) == 0 and turns < 1000:
        most = max(most, broker.popping._revive.pending_count)
        turns += 1
    assert most <= 2 * 10
    assert broker.popping._revive.pending_count == 0
    assert broker.store.max_offset(RETRY, 0) == (pops - 2) * each + 2
    broker.store.close()


def test_a_group_without_room_for_its_offsets_is_told_so(broker: PopBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    broker.topics.put(TopicConfig(TOPIC, read_queue_nums=2, write_queue_nums=2))
    broker.send("a", queue_id=0)
    broker.send("b", queue_id=1)
    for name, value in (("LEAST_PER_TOPIC", 1), ("GROUP_SHARE", 1), ("MAX_OFFSETS", 0)):
        monkeypatch.setattr(offset_room, name, value)
    broker.offsets.put(GROUP, TOPIC, 0, 0)
    answer = broker.ask(RequestCode.POP_MESSAGE, broker.header(queue_id=1))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark is not None
    assert answer.remark.startswith(f"the offset of {GROUP} in {TOPIC}-1 is not kept: the group has 1 offsets")
    (a,) = broker.pop()
    assert a.body == "a", "a queue that has an offset is popped"
    broker.passes(LATER_MS)
    assert bodies(broker.pop()) == ["a"], "the broker makes room for what it gives out again"
    assert broker.ask(RequestCode.POP_MESSAGE, broker.header()).code == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize("order", [False, True])
def test_what_one_queue_gave_is_not_held_back_by_another(
    broker: PopBroker, monkeypatch: pytest.MonkeyPatch, order: bool
) -> None:
    """Its messages are the consumer's already: without the answer they would be nobody's until their time is over."""
    broker.topics.put(TopicConfig(TOPIC, read_queue_nums=2, write_queue_nums=2))
    broker.send("a", queue_id=0)
    broker.send("b", queue_id=1)
    really = CheckPoints._write
    written: list[int] = []

    def write(points: CheckPoints, queue_id: int, *rest: Any) -> Appended:
        written.append(queue_id)
        if len(written) == 2:
            raise RequestFailed(ResponseCode.SERVICE_NOT_AVAILABLE, "the disk is full")
        return really(points, queue_id, *rest)

    monkeypatch.setattr(CheckPoints, "_write", write)
    first = broker.pop(order=order)
    assert len(first) == 1
    assert sorted(bodies(first + broker.pop(order=order))) == ["a", "b"], "what was refused is there for the next"


def test_an_attempt_id_is_bounded(broker: PopBroker) -> None:
    broker.send("a")
    answer = broker.ask(RequestCode.POP_MESSAGE, broker.header(order=True, attempt_id="x" * 129))
    assert (answer.code, answer.remark) == (
        ResponseCode.INVALID_PARAMETER,
        "attemptId has 129 characters, and may have 128",
    )
    assert bodies(broker.pop(order=True, attempt_id="x" * 128)) == ["a"]


# Topics of many queues.

WIDE = 20 * QUEUES_PER_TURN


@pytest.fixture
def wide(broker: PopBroker) -> PopBroker:
    broker.topics.put(TopicConfig(TOPIC, read_queue_nums=WIDE, write_queue_nums=WIDE))
    return broker


class Turns:
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.count += 1

    async def of(self, answer: Awaitable[Frame]) -> tuple[Frame, int]:
        """The answer, and how many turns it took."""
        before = self.count
        return await answer, self.count - before

    def stop(self) -> None:
        self._task.cancel()


def test_a_topic_of_many_queues_is_looked_through_in_turns(wide: PopBroker) -> None:
    async def main() -> None:
        clock = Turns()
        for code, header in (
            (RequestCode.POP_MESSAGE, wide.header()),
            (RequestCode.PEEK_MESSAGE, pop.PeekMessage(TOPIC, -1, 1, GROUP)),
            (RequestCode.NOTIFICATION, pop.Notification(GROUP, TOPIC, -1, 0, 0)),
        ):
            answer, took = await clock.of(wide.ask_and_wait(code, header))
            assert not answer.body
            assert answer.fields.get("hasMsg", "false") == "false"
            assert took >= WIDE // QUEUES_PER_TURN
        wide.send("a", queue_id=WIDE // 3)
        for code, header in (
            (RequestCode.NOTIFICATION, pop.Notification(GROUP, TOPIC, -1, 0, 0)),
            (RequestCode.PEEK_MESSAGE, pop.PeekMessage(TOPIC, -1, 1, GROUP)),
            (RequestCode.POP_MESSAGE, wide.header()),
        ):
            answer = await wide.ask_and_wait(code, header)
            assert answer.fields.get("hasMsg") == "true" or decode_record(answer.body).body == b"a"
        assert len(wide.popping._waiters) == len(wide.popping._notified) == 0
        clock.stop()

    asyncio.run(main())


@pytest.mark.parametrize("code", [RequestCode.POP_MESSAGE, RequestCode.NOTIFICATION])
def test_a_message_for_a_queue_that_was_passed_is_found(
    wide: PopBroker, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "randrange", lambda _: 0)
    wide.config.priority_order_asc = False  # from the first queue on

    async def main() -> None:
        header: msgspec.Struct = wide.header(poll_time=10_000)
        if code == RequestCode.NOTIFICATION:
            header = pop.Notification(GROUP, TOPIC, -1, 10_000, 0)
        waiting = asyncio.create_task(wide.ask_and_wait(code, header))
        await turns()
        assert not waiting.done()
        wide.send("a", queue_id=0)
        await turns(500)
        assert waiting.done(), "it looked again, and did not wait"
        answer = await waiting
        assert answer.fields.get("hasMsg") == "true" or decode_record(answer.body).body == b"a"

    asyncio.run(main())


def test_the_revive_queues_share_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = PopBroker(tmp_path)
    queues = broker.config.revive_queue_num
    for number in range(4 * queues):
        broker.send(str(number))
        assert broker.pop(), "each has a check point of its own"
    read: list[int] = []
    really = revive.Revive._take_in

    def counted(self: revive.Revive, queue: Any, offset: int) -> None:
        read.append(offset)
        really(self, queue, offset)

    monkeypatch.setattr(revive.Revive, "_take_in", counted)
    monkeypatch.setattr(revive, "_MOST_A_TURN", queues)
    broker.now_ms += 59_500
    for _, message in broker.put.parked:
        broker.store.append(message, broker.now_ms)
    counts = []
    while broker.popping.revive(broker.now_ms) == 0:
        counts.append(len(read))
    assert counts == [queues, 2 * queues, 3 * queues]
    assert len(read) == 4 * queues
    broker.store.close()
