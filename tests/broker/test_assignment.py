"""The broker shares out queues, for pulls and for pops."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.live import Live, live_broker
from skylark.broker import assignment
from skylark.broker.assignment import allocate_for_pop, averagely, by_circle
from skylark.wire import pop
from skylark.wire.bodies import MessageQueue, decode_body, encode_body
from skylark.wire.codes import RequestCode, ResponseCode

TOPIC, GROUP = "orders", "workers"
MEMBERS = ["a", "b", "c"]


def queues(count: int) -> list[MessageQueue]:
    return [MessageQueue("broker-a", number, TOPIC) for number in range(count)]


def numbers(assigned: list[MessageQueue]) -> list[int]:
    return [queue.queue_id for queue in assigned]


@given(st.integers(0, 20), st.integers(1, 7), st.sampled_from([averagely, by_circle]))
def test_every_queue_has_one_owner(count: int, members: int, allocate) -> None:  # type: ignore[no-untyped-def]
    names = [f"{number:02}" for number in range(members)]
    shares = [allocate(queues(count), names, name) for name in names]
    assert sorted(number for share in shares for number in numbers(share)) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert allocate(queues(count), names, "stranger") == []


def test_shares() -> None:
    assert [numbers(averagely(queues(8), MEMBERS, name)) for name in MEMBERS] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [numbers(by_circle(queues(8), MEMBERS, name)) for name in MEMBERS] == [[0, 3, 6], [1, 4, 7], [2, 5]]


@pytest.mark.parametrize(
    ("member", "share", "count", "expected"),
    [("a", 0, 4, [-1]), ("a", 2, 4, [-1]), ("a", -1, 4, [-1]), ("c", 1, 6, [4, 5, 0, 1]), ("c", 1, 2, [0]),
     ("stranger", 1, 6, [])],
)  # fmt: skip
def test_what_a_member_pops(member: str, share: int, count: int, expected: list[int]) -> None:
    assert numbers(allocate_for_pop(averagely, queues(count), MEMBERS, member, share)) == expected


async def asked(live: Live, **more: object) -> list[tuple[int, str]]:
    wanted = {
        "topic": TOPIC,
        "consumerGroup": GROUP,
        "clientId": f"client@{GROUP}",
        "strategyName": "AVG",
        "messageModel": "CLUSTERING",
    } | more
    answer = await live.ask(RequestCode.QUERY_ASSIGNMENT, json.dumps(wanted).encode())
    assert answer.code == 0
    found = decode_body(pop.QueryAssignmentResponse, answer.body).message_queue_assignments
    return sorted((each.message_queue.queue_id, each.mode) for each in found or [])


async def set_mode(live: Live, topic: str, mode: str, group: str = GROUP) -> int:
    body = encode_body(pop.SetMessageRequestMode(group, mode, 0, topic))
    return (await live.ask(RequestCode.SET_MESSAGE_REQUEST_MODE, body)).code


def test_the_mode_of_a_group_is_set_and_kept(tmp_path: Path) -> None:
    async def main() -> None:
        async with live_broker(tmp_path) as live:
            await live.send(TOPIC)
            assert await asked(live) == []  # the group has no members
            await live.heartbeat(GROUP, TOPIC)
            assert await asked(live) == [(number, "PULL") for number in range(4)]
            assert await asked(live, strategyName="MACHINE_ROOM") == []
            assert await asked(live, topic="nowhere") == []
            assert await set_mode(live, TOPIC, "POP") == 0
            assert await asked(live) == [(-1, "POP")]
            assert len(await asked(live, messageModel="BROADCASTING")) == 4
            assert await set_mode(live, "nowhere", "POP") == ResponseCode.TOPIC_NOT_EXIST
            assert await set_mode(live, "%RETRY%" + GROUP, "POP") == ResponseCode.NO_PERMISSION
            assert await set_mode(live, TOPIC, "PUSH") == ResponseCode.INVALID_PARAMETER
        kept = json.loads((tmp_path / "config" / "messageRequestMode.json").read_text())
        assert kept["messageRequestModeMap"][TOPIC][GROUP]["mode"] == "POP"
        async with live_broker(tmp_path) as live:
            await live.heartbeat(GROUP, TOPIC)
            assert await asked(live) == [(-1, "POP")]
            assert await set_mode(live, TOPIC, "PULL") == 0
            assert len(await asked(live)) == 4

    asyncio.run(main())


def test_clients_of_one_host_do_not_set_all_modes_that_there_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assignment, "MAX_MODES", 6)

    async def main() -> None:
        async with live_broker(tmp_path) as live:
            await live.send(TOPIC)
            codes = [await set_mode(live, TOPIC, "POP", f"g{number}") for number in range(5)]
            assert codes == [0] * 3 + [ResponseCode.INVALID_PARAMETER] * 2
            assert await set_mode(live, TOPIC, "PULL", "g0") == 0, "what is set can be changed"

    asyncio.run(main())


def test_the_settings_say_how_a_group_begins(tmp_path: Path) -> None:
    async def main() -> None:
        async with live_broker(tmp_path, defaultMessageRequestMode="POP") as live:
            await live.send(TOPIC)
            await live.heartbeat(GROUP, TOPIC)
            assert await asked(live) == [(-1, "POP")]
            assert {mode for _, mode in await asked(live, topic="%RETRY%" + GROUP)} == {"PULL"}

    asyncio.run(main())
