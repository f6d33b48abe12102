"""Pops in order, and what a killed broker knows of pops."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.pop_broker import GROUP, START_MS, TOPIC, PopBroker, Popped, bodies, popped, turns
from skylark.broker import orders as orders_module
from skylark.broker.orders import OrderInfo, Orders
from skylark.wire import pop
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.tables import SubscriptionGroupConfig, TopicConfig

LATER_MS = 65_000


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[PopBroker]:
    made = PopBroker(tmp_path / "store")
    yield made
    made.store.close()


def test_a_queue_is_blocked_until_all_is_acknowledged(broker: PopBroker) -> None:
    broker.send("a", "b", "c")
    a, b = broker.pop(order=True, max_msg_nums=2)
    assert broker.pop(order=True) == []
    assert broker.ack(b).code == 0
    assert broker.pop(order=True) == []
    assert broker.ack(a).code == 0
    assert bodies(broker.pop(order=True)) == ["c"]


def test_what_was_not_acknowledged_comes_again_in_its_place(broker: PopBroker) -> None:
    broker.send("a", "b", "c")
    a, _, c = broker.pop(order=True)
    assert broker.ack(a).code == 0
    assert broker.ack(c).code == 0
    broker.passes(LATER_MS)
    again = broker.pop(order=True)
    assert bodies(again) == ["b", "c"]
    assert [each.order_count for each in again] == [1, 1]
    broker.passes(LATER_MS)
    assert [each.order_count for each in broker.pop(order=True)] == [2, 2]


def test_the_same_attempt_gets_the_same_again(broker: PopBroker) -> None:
    broker.send("a", "b")
    assert bodies(broker.pop(order=True, attempt_id="once", max_msg_nums=1)) == ["a"]
    again = broker.pop(order=True, attempt_id="once", max_msg_nums=1)
    assert (bodies(again), again[0].order_count) == (["a"], 0)
    assert broker.pop(order=True, attempt_id="other") == []


def test_more_and_less_time_in_order(broker: PopBroker) -> None:
    broker.send("a", "b")
    (a,) = broker.pop(order=True, max_msg_nums=1)
    longer = broker.extend(a, 100_000)
    broker.passes(90_000)
    assert broker.pop(order=True) == []
    broker.extend(longer, 1_000)
    broker.passes(1_000)
    assert bodies(broker.pop(order=True)) == ["a", "b"]


def test_an_acknowledgement_of_an_earlier_pop_counts_no_more(broker: PopBroker) -> None:
    broker.send("a")
    (first,) = broker.pop(order=True)
    broker.passes(LATER_MS)
    (second,) = broker.pop(order=True)
    assert broker.ack(first).code == 0
    assert broker.pop(order=True) == []
    assert broker.ack(second).code == 0


def test_a_forged_handle_moves_no_offset(broker: PopBroker) -> None:
    broker.send("a", "b", "c")
    forged = Popped(None, pop.ReceiptHandle(0, 1, 1, pop.ORDER_REVIVE_QUEUE, "0", "broker-a", 0, 2))  # type: ignore[arg-type]
    assert broker.ack(forged).code == ResponseCode.MESSAGE_ILLEGAL
    (a,) = broker.pop(order=True, max_msg_nums=1)
    beyond = Popped(a.message, pop.ReceiptHandle(0, START_MS, 1, pop.ORDER_REVIVE_QUEUE, "0", "broker-a", 0, 2))
    assert broker.ack(beyond).code == ResponseCode.MESSAGE_ILLEGAL
    assert broker.ack(a).code == 0
    assert bodies(broker.pop(order=True)) == ["b", "c"]


def test_a_batch_in_order(broker: PopBroker) -> None:
    broker.send("a", "b", "c")
    assert broker.batch_ack(*broker.pop(order=True, max_msg_nums=2)).code == 0
    assert bodies(broker.pop(order=True)) == ["c"]


def test_an_acknowledgement_wakes_who_waits(broker: PopBroker) -> None:
    async def main() -> None:
        broker.send("a", "b")
        (a,) = broker.pop(order=True, max_msg_nums=1)
        header = broker.header(order=True, poll_time=10_000)
        waiting = asyncio.create_task(broker.ask_and_wait(RequestCode.POP_MESSAGE, header))
        await turns()
        assert not waiting.done()
        broker.ack(a)
        assert bodies(popped(await waiting)) == ["b"]

    asyncio.run(main())


def test_an_operators_reset_unblocks(broker: PopBroker) -> None:
    broker.send("a", "b")
    broker.pop(order=True)
    broker.offsets.reset(GROUP, TOPIC, 0, 0)
    assert bodies(broker.pop(order=True)) == ["a", "b"]


def test_the_table_is_apaches(tmp_path: Path) -> None:
    text = (
        '{"orderInfoCount":1,"orderedConsumptionLevel":"QUEUE","table":{"T@G":{3:{"a":"att","cm":2,"i":60000,'
        '"l":1794800601089,"o":[5,1,4],"ot":{9:777},"popTime":100}}}}'
    )
    (tmp_path / "consumerOrderInfo.json").write_text(text)
    orders = Orders(tmp_path)
    info = orders.get("T", "G", 3)
    assert info is not None
    assert (info.queue_offsets, info.next_offset(), info.free_at_ms()) == ([5, 6, 9], 5, 60_100)
    orders.put("T", "G", 3, info)
    orders.save()
    written = (tmp_path / "consumerOrderInfo.json").read_text()
    assert "".join(written.split()) == text
    info, counts = orders.popped("T", "G", 3, None, 100, 60_000, [5, 9])
    assert counts == "0 qo3%5 1;0 qo3%9 1;0 3 1"
    assert info.consumed_counts == {5: 1, 9: 1}


def test_what_is_gone_is_forgotten(broker: PopBroker, tmp_path: Path) -> None:
    orders = Orders(tmp_path)
    info = OrderInfo(offsets=[1], last_consume_ms=START_MS)
    for topic, group, queue_id in ((TOPIC, GROUP, 0), ("gone", GROUP, 0), (TOPIC, "gone", 0), (TOPIC, GROUP, 9)):
        orders.put(topic, group, queue_id, info)
    orders.clean(broker.topics, broker.groups, START_MS)
    assert orders.get(TOPIC, GROUP, 0) is info
    assert [orders.get("gone", GROUP, 0), orders.get(TOPIC, "gone", 0), orders.get(TOPIC, GROUP, 9)] == [None] * 3
    orders.clean(broker.topics, broker.groups, START_MS + 25 * 3_600_000)
    assert orders.get(TOPIC, GROUP, 0) is None


def test_a_cleaning_looks_at_a_part(broker: PopBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders_module, "_MOST_A_CLEANING", 2)
    orders = Orders(tmp_path)
    for number in range(5):
        orders.put(f"gone{number}", GROUP, 0, OrderInfo(offsets=[1], last_consume_ms=START_MS))
    for left in (3, 1, 0):
        orders.clean(broker.topics, broker.groups, START_MS)
        assert len(orders.topics()) == left


def test_pops_in_order_have_room_together(broker: PopBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders_module, "MAX_INFOS", 2)  # one for a host
    broker.topics.put(TopicConfig(TOPIC, 2, 2))
    for queue_id in (0, 1):
        broker.send(f"{queue_id}a", f"{queue_id}b", queue_id=queue_id)
    (first,) = broker.pop(order=True, queue_id=0, max_msg_nums=1)
    answer = broker.ask(RequestCode.POP_MESSAGE, broker.header(order=True, queue_id=1))
    assert answer.code == ResponseCode.SYSTEM_BUSY
    assert answer.remark == f"queue 1 of {TOPIC} can't be popped in order: those of 10.0.0.9 hold 1 of 2 queues, all 1"
    assert bodies(broker.pop(order=True)) == []
    assert broker.ack(first).code == 0
    assert bodies(broker.pop(order=True)) == ["0b"], "who is in the table stays there"
    broker.passes(LATER_MS)
    assert bodies(broker.pop(queue_id=1)) == ["1a", "1b"], "who pops without order needs no room"


def test_rooms_of_what_is_gone_or_settled_are_free(
    broker: PopBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders_module, "MAX_INFOS", 4)
    orders = Orders(tmp_path)
    held = OrderInfo(offsets=[1], last_consume_ms=START_MS, pop_time_ms=START_MS, invisible_ms=LATER_MS)
    orders.put(TOPIC, GROUP, 0, held, "a")
    orders.put(TOPIC, GROUP, 1, msgspec.structs.replace(held, committed=1), "a")
    assert [orders.has_room(TOPIC, GROUP, queue_id, host) for queue_id, host in ((0, "a"), (2, "a"))] == [True, False]
    assert orders.has_room("other", GROUP, 0, "b")
    orders.clean(broker.topics, broker.groups, START_MS)
    assert (orders.get(TOPIC, GROUP, 0), orders.get(TOPIC, GROUP, 1)) == (held, None)
    assert orders.has_room(TOPIC, GROUP, 2, "a")
    orders.remove_topics([TOPIC])
    orders.put("other", GROUP, 0, held, "a")
    orders.save()
    again = Orders(tmp_path)
    assert again.fullness("a") == "those of a hold 0 of 4 queues, all 1"
    assert again.has_room("other", GROUP, 0, "b")


def test_a_captured_table_is_what_it_was(tmp_path: Path) -> None:
    orders = Orders(tmp_path)
    ahead_ms = START_MS + 60_000
    info = OrderInfo(offsets=[5, 1], pop_time_ms=ahead_ms, invisible_ms=1_000)
    orders.put("T", "G", 0, info)
    before = msgspec.json.encode(info)
    row = orders._infos.rows["T", "G"]
    table = orders.capture()
    assert table is not None
    assert table.infos["T", "G"] is row, "a copy of each takes long, and there may be very many"
    assert orders.acknowledged("T", "G", 0, 5, ahead_ms) == 6
    assert orders.extended("T", "G", 0, 6, ahead_ms, ahead_ms + 5)
    assert orders.blocked_until_ms("T", "G", 0, None, START_MS) == START_MS + 1_000
    orders.put("T", "G", 1, info)
    orders.put("T", "G", 0, None)
    assert {name: list(infos) for name, infos in table.written().table.items()} == {"T@G": [0]}
    assert msgspec.json.encode(info) == before


# After a kill: everything since the last write of the tables is in the log only.


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_kill_brings_nothing_acknowledged_back(broker: PopBroker, tmp_path: Path, is_saved: bool) -> None:
    broker.save()
    broker.send("a", "b", "c")
    a, _ = broker.pop(max_msg_nums=2)
    broker.ack(a)
    if is_saved:
        broker.save()
    second = broker.killed(tmp_path / "second")
    assert bodies(second.pop()) == ["c"]
    second.passes(LATER_MS)
    assert sorted(bodies(second.pop())) == ["b", "c"]
    second.store.close()


def test_a_kill_after_a_revival_does_not_revive_again(broker: PopBroker, tmp_path: Path) -> None:
    broker.save()
    broker.send("a", "b")
    broker.pop()
    broker.passes(LATER_MS)
    taken = broker.pop()
    for each in taken:
        broker.ack(each)
    second = broker.killed(tmp_path / "second")
    assert second.pop() == []
    second.passes(2 * LATER_MS)
    assert second.pop() == []
    second.store.close()


def test_a_kill_keeps_the_order(broker: PopBroker, tmp_path: Path) -> None:
    broker.save()
    broker.send("a", "b", "c", "d")
    a, b = broker.pop(order=True, max_msg_nums=2)
    broker.ack(a)
    broker.ack(b)
    (c,) = broker.pop(order=True, max_msg_nums=1)
    second = broker.killed(tmp_path / "second")
    assert second.pop(order=True) == []
    assert second.ack(c).code == 0
    third = second.killed(tmp_path / "third")
    assert bodies(third.pop(order=True)) == ["d"]
    for each in (second, third):
        each.store.close()


def test_a_reset_survives_a_kill(broker: PopBroker, tmp_path: Path) -> None:
    broker.save()
    broker.send("a", "b")
    broker.pop()
    broker.offsets.reset(GROUP, TOPIC, 0, 1)
    assert bodies(broker.pop(max_msg_nums=1)) == ["b"]
    broker.passes(LATER_MS)
    second = broker.killed(tmp_path / "second")
    assert second.offsets.query(GROUP, TOPIC, 0) == 2
    second.store.close()


def test_what_was_taken_in_after_a_kill_is_not_taken_in_after_the_next(broker: PopBroker, tmp_path: Path) -> None:
    broker.save()
    broker.send("a", "b")
    broker.pop()
    broker.passes(LATER_MS)
    second = broker.killed(tmp_path / "second")
    second.offsets.commit(GROUP, TOPIC, 0, 0, "somebody who wants it all again")
    second.save()
    third = second.killed(tmp_path / "third")
    third.passes(0)
    assert third.offsets.query(GROUP, TOPIC, 0) == 0
    assert third.store.max_offset(f"%RETRY%{GROUP}_{TOPIC}", 0) == 2, "revived once more"
    for each in (second, third):
        each.store.close()


def test_more_time_for_one_message_does_not_undo_a_reset(broker: PopBroker, tmp_path: Path) -> None:
    broker.save()
    broker.send("a", "b", "c", "d")
    *_, d = broker.pop()
    broker.offsets.reset(GROUP, TOPIC, 0, 0)
    assert bodies(broker.pop(max_msg_nums=1)) == ["a"]
    broker.extend(d, 30_000)
    second = broker.killed(tmp_path / "second")
    assert bodies(second.pop()) == ["b", "c", "d"]
    second.store.close()


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), is_order=st.booleans())
def test_nothing_is_lost_and_nothing_acknowledged_comes_back(
    tmp_path_factory: pytest.TempPathFactory, seed: int, is_order: bool
) -> None:
    """Pops, acknowledgements, changes of time, passing time, writes of the tables and kills, in any order."""
    root = tmp_path_factory.mktemp("model")
    chance = random.Random(seed)
    broker = PopBroker(root / "0")
    broker.topics.put(TopicConfig(TOPIC, read_queue_nums=2, write_queue_nums=2))
    broker.groups.put(SubscriptionGroupConfig(group_name=GROUP, retry_max_times=100))
    brokers = [broker]
    sent: set[str] = set()
    acked: set[str] = set()
    held: dict[str, tuple[Popped, int]] = {}
    given_back: dict[str, pop.ReceiptHandle] = {}
    for step in range(40):
        action = chance.randrange(7)
        if action == 0:
            body = f"{step}"
            broker.send(body, queue_id=chance.randrange(2))
            sent.add(body)
        elif action <= 2:
            for each in broker.pop(order=is_order, max_msg_nums=chance.randint(1, 4)):
                assert each.body not in acked
                if each.body in held:
                    assert held[each.body][1] <= broker.now_ms, "it came before its time"
                held[each.body] = (each, broker.now_ms + 60_000)
        elif action == 3 and held:
            body = chance.choice(sorted(held))
            taken, until_ms = held[body]
            if broker.now_ms < until_ms:
                assert broker.ack(taken).code == 0
                del held[body]
                given_back[body] = taken.handle
                # In order, one behind another that was not acknowledged may come again with that one.
                acked |= {
                    each
                    for each, handle in given_back.items()
                    if not is_order or handle.offset < broker.offsets.query(GROUP, TOPIC, handle.queue_id)
                }
        elif action == 4 and held:
            body = chance.choice(sorted(held))
            taken, until_ms = held[body]
            if broker.now_ms < until_ms:
                more_ms = chance.choice((10_000, 90_000))
                held[body] = (broker.extend(taken, more_ms), broker.now_ms + more_ms)
        elif action == 5:
            broker.passes(chance.choice((1_000, 30_000, 70_000)))
        elif chance.random() < 0.5:
            broker.save()
        else:
            broker = broker.killed(root / str(step + 1))
            brokers.append(broker)
    found: set[str] = set()
    for _ in range(8):
        broker.passes(100_000)
        while taken_now := broker.pop(order=is_order):
            assert not acked & set(bodies(taken_now))
            found |= set(bodies(taken_now))
            acked |= set(bodies(taken_now))
            assert broker.batch_ack(*taken_now).code == 0
    assert sent - acked - found == set()
    for each in brokers:
        each.store.close()


def test_the_revive_group_stands_as_with_apache(broker: PopBroker) -> None:
    """The offset of the last check point that is settled, not the one behind it."""
    broker.send("a")
    (a,) = broker.pop()
    queue_id = a.handle.revive_queue
    assert broker.offsets.query(pop.REVIVE_GROUP, "rmq_sys_REVIVE_LOG_DefaultCluster", queue_id) == -1
    broker.passes(LATER_MS)
    assert broker.offsets.query(pop.REVIVE_GROUP, "rmq_sys_REVIVE_LOG_DefaultCluster", queue_id) == 0


def test_a_clock_that_was_ahead_blocks_no_queue(broker: PopBroker) -> None:
    broker.send("one", "two")
    broker.now_ms += 3_600_000
    first, second = broker.pop(order=True, invisible_time=10_000)
    broker.now_ms -= 3_600_000
    assert broker.pop(order=True) == []
    assert broker.ack(first).code == 0, "its handle is as good as before"
    broker.now_ms += 9_999
    assert broker.pop(order=True) == []
    broker.now_ms += 1
    assert bodies(broker.pop(order=True)) == [second.body]


def test_a_clock_that_was_ahead_is_noticed_without_a_pop(broker: PopBroker) -> None:
    broker.send("one")
    broker.now_ms += 3_600_000
    assert broker.pop(order=True, invisible_time=10_000)
    broker.now_ms -= 3_600_000
    broker.save()
    broker.now_ms += 10_000
    assert bodies(broker.pop(order=True)) == ["one"]


@pytest.mark.parametrize("damaged", [b"", b"\xff\xfe12", b"12x"])
def test_damaged_progress_counts_as_missing(broker: PopBroker, tmp_path: Path, damaged: bytes) -> None:
    broker.send("one")
    broker.save()
    (broker.root / "config" / "popProgress").write_bytes(damaged)
    after = broker.killed(tmp_path / "after")
    assert bodies(after.pop()) == ["one"]
    assert (after.root / "config" / "popProgress").read_text().isdecimal()
    after.store.close()


def test_a_broker_starts_although_its_progress_can_not_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "store" / "config" / "popProgress.tmp"
    blocked.mkdir(parents=True)
    broker = PopBroker(tmp_path / "store")
    blocked.rmdir()
    broker.save()
    assert (broker.root / "config" / "popProgress").read_text().isdecimal()
    broker.store.close()
