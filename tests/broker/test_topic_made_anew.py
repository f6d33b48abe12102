"""A topic that is deleted and created again: nothing that was known of the former one counts for the new one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.pop_broker import GROUP, TOPIC, PopBroker, bodies
from skylark.broker.offsets import UNKNOWN, Offsets
from skylark.net.connection import RequestFailed
from skylark.wire.codes import ResponseCode

LATER_MS = 65_000


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[PopBroker]:
    made = PopBroker(tmp_path / "store")
    yield made
    made.store.close()


@pytest.mark.parametrize("is_held", [False, True])
def test_a_group_that_was_further_begins_anew_after_a_kill(broker: PopBroker, tmp_path: Path, is_held: bool) -> None:
    broker.send("a", "b", "c")
    broker.offsets.commit(GROUP, TOPIC, 0, 3, "test")
    broker.offsets.commit(GROUP, "other", 0, 5, "test")
    if is_held:
        broker.popping.save(broker.now_ms)
    else:
        broker.save()
    broker.make_topic_anew()
    broker.send("d")
    broker.store.flush()
    broker.popping.held.write()
    second = broker.killed(tmp_path / "second")
    assert second.offsets.query(GROUP, TOPIC, 0) == UNKNOWN
    table = Offsets(tmp_path / "second" / "config")
    assert table.query(GROUP, "other", 0) == 5
    assert table.topics_of(GROUP) == {"other"}
    second.store.close()


def test_what_others_committed_since_the_last_write_is_not_written_before_the_log(broker: PopBroker) -> None:
    broker.send("a")
    broker.offsets.commit(GROUP, TOPIC, 0, 1, "test")
    broker.offsets.commit(GROUP, "other", 0, 5, "test")
    broker.save()
    broker.offsets.commit(GROUP, "other", 0, 6, "test")
    broker.make_topic_anew()
    assert Offsets(broker.root / "config").query(GROUP, "other", 0) == 5
    assert broker.offsets.query(GROUP, "other", 0) == 6


def test_a_topic_whose_offsets_can_not_be_removed_is_not_deleted(broker: PopBroker) -> None:
    broker.send("a")
    broker.offsets.commit(GROUP, TOPIC, 0, 1, "test")
    broker.save()
    (broker.root / "config" / "deletedOffsets").mkdir()  # so that nobody can write there
    with pytest.raises(RequestFailed, match="its offsets are kept") as failure:
        broker.make_topic_anew()
    assert failure.value.code == ResponseCode.SYSTEM_ERROR
    assert broker.store.max_offset(TOPIC, 0) == 1
    assert broker.offsets.query(GROUP, TOPIC, 0) == 1


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("is_saved", [False, True])
def test_what_was_popped_before_hides_nothing_after_a_kill(
    broker: PopBroker, tmp_path: Path, order: bool, is_saved: bool
) -> None:
    broker.send("a", "b", "c")
    broker.save()
    assert len(broker.pop(order=order)) == 3
    if is_saved:
        broker.save()
    broker.make_topic_anew()
    broker.send("d", "e")
    second = broker.killed(tmp_path / "second")
    assert bodies(second.pop(order=order)) == ["d", "e"]
    second.store.close()


def test_what_is_popped_afterwards_stays_popped_after_a_kill(broker: PopBroker, tmp_path: Path) -> None:
    broker.send("a", "b", "c")
    broker.save()
    broker.pop()
    broker.make_topic_anew()
    broker.send("d", "e")
    assert bodies(broker.pop(max_msg_nums=1)) == ["d"]
    second = broker.killed(tmp_path / "second")
    assert bodies(second.pop()) == ["e"]
    second.passes(LATER_MS)
    assert sorted(bodies(second.pop())) == ["d", "e"]
    second.store.close()


def test_a_check_point_of_the_former_topic_revives_nothing_of_the_new_one(broker: PopBroker) -> None:
    broker.send("a", "b")
    broker.pop()
    broker.make_topic_anew()
    broker.send("c", "d")
    for taken in broker.pop():
        assert broker.ack(taken).code == 0
    broker.passes(LATER_MS)
    assert broker.pop() == []


def test_a_pop_in_order_of_the_former_topic_blocks_nothing(broker: PopBroker) -> None:
    broker.send("a", "b", "c")
    *_, last = broker.pop(order=True)
    broker.make_topic_anew()
    broker.send("d", "e")
    broker.ack(last)
    assert bodies(broker.pop(order=True)) == ["d", "e"]
