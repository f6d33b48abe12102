"""Shares of a topic's queues, held to what Apache's classes answered (`allocations.json`) and to what must hold always.

Each case of the file lists a topic, its brokers with their number of queues, the members, and for every strategy the
share of each member and of one who is not in the group, as positions in the list of queues.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.client import allocate
from skylark.client.allocate import Strategy
from skylark.wire.bodies import MessageQueue

CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("allocations.json").read_text())


def queues_of(case: dict[str, Any]) -> list[MessageQueue]:
    return [
        MessageQueue(topic=case["topic"], broker_name=name, queue_id=number)
        for name, count in case["brokers"].items()
        for number in range(count)
    ]


def room_of_queue(queue: MessageQueue) -> str:
    room, at, _ = queue.broker_name.partition("@")
    return room if at and room else "none"


def room_of_member(member: str) -> str:
    return member.partition("-")[0]


def strategies(case: dict[str, Any]) -> dict[str, Strategy]:
    queues = queues_of(case)
    return {
        "average": allocate.average,
        "circle": allocate.average_by_circle,
        "hash": allocate.consistent_hash(),
        "hash3": allocate.consistent_hash(3),
        "hash0": allocate.consistent_hash(0),
        "config": allocate.by_config(queues[at] for at in case["shares"]["config"][0]),
        "room": allocate.machine_room(case["rooms"]),
        "nearby": allocate.machine_room_nearby(allocate.average, room_of_queue, room_of_member),
        "nearby_circle": allocate.machine_room_nearby(allocate.average_by_circle, room_of_queue, room_of_member),
    }


@pytest.mark.parametrize("name", list(CASES[0]["shares"]))
def test_shares_are_those_of_apache(name: str) -> None:
    for case in CASES:
        queues, strategy = queues_of(case), strategies(case)[name]
        for member, share in zip([*case["members"], "stranger-1"], case["shares"][name], strict=True):
            got = [queues.index(queue) for queue in strategy(member, queues, case["members"])]
            assert got == share, (case, member)


def test_queues_and_members_of_the_cases_are_sorted_as_java_does() -> None:
    for case in CASES:
        assert list(case["brokers"]) == sorted(case["brokers"], key=allocate.java_order)
        assert case["members"] == sorted(case["members"], key=allocate.java_order)


@given(
    st.integers(1, 40),
    st.sets(st.text("abcé😀@#-0123", min_size=1), min_size=1, max_size=20),
    st.sampled_from([allocate.average, allocate.average_by_circle, allocate.consistent_hash()]),
)
def test_shares_neither_overlap_nor_leave_a_hole(count: int, names: set[str], strategy: Strategy) -> None:
    queues = [MessageQueue(topic="t", broker_name="b", queue_id=number) for number in range(count)]
    members = sorted(names, key=allocate.java_order)
    shares = [queue for member in members for queue in strategy(member, queues, members)]
    assert sorted(queue.queue_id for queue in shares) == list(range(count))


def test_a_room_without_a_name_is_refused() -> None:
    queues = [MessageQueue(topic="t", broker_name="b", queue_id=0)]
    strategy = allocate.machine_room_nearby(allocate.average, lambda _: "", lambda _: "here")
    with pytest.raises(ValueError, match="no machine room"):
        strategy("a", queues, ["a"])


def test_a_negative_number_of_virtual_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        allocate.consistent_hash(-1)
