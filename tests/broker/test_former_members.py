"""A restarted broker counts in who was a member before: members keep their queues, and nobody waits for long."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.live import Live, live_broker
from skylark.broker import former_members
from skylark.broker.client_requests import handlers
from skylark.broker.clients import Clients
from skylark.broker.config import BrokerConfig
from skylark.broker.former_members import EXPECTED_FOR_MS, MAX_DOWN_MS, FormerMembers
from skylark.broker.groups import Groups
from skylark.broker.topics import Topics
from skylark.net.connection import Connection, RequestFailed
from skylark.net.pool import Pool
from skylark.wire.bodies import ConsumerData, ConsumerIds, Heartbeat, Subscription, decode_body, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame

NOW_MS = 1_700_000_000_000
IDS = st.sampled_from(["h1@a", "h1@b", "h2@a", "h2@b", "h3@a"])


def beat(client_id: str, model: str = "CLUSTERING") -> Heartbeat:
    data = ConsumerData(
        group_name="g", consume_type="CONSUME_PASSIVELY", message_model=model,
        consume_from_where="CONSUME_FROM_LAST_OFFSET",
        subscription_data_set=[Subscription(topic="T", sub_string="*")],
    )  # fmt: skip
    return Heartbeat(client_id=client_id, consumer_data_set=[data])


class Peer:
    """A connection that counts how often it is told that the group has changed."""

    peer = ("10.0.0.1", 50_000)

    def __init__(self, client_id: str) -> None:
        self.client_id = client_id
        self.told = 0

    def notify(self, request: Frame, after_s: float = 0.0) -> None:
        assert request.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED
        self.told += 1


class Group:
    """The group g at a broker that was started again."""

    def __init__(self, directory: Path, *former: str) -> None:
        config = BrokerConfig(broker_name="b")
        groups = Groups(directory, config, lambda: NOW_MS)
        members = FormerMembers({"g": former}) if former else None
        self.clients = Clients(Topics(directory, config, lambda: NOW_MS), groups, config, members)
        self._serve = handlers(self.clients, config, lambda: NOW_MS)
        self.clients.expire(NOW_MS)

    def join(self, client_id: str, model: str = "CLUSTERING") -> Peer:
        peer = Peer(client_id)
        self.clients.heartbeat(beat(client_id, model), cast(Connection, peer), "JAVA", 500, NOW_MS)
        return peer

    def beat(self, peer: Peer) -> None:
        self.clients.heartbeat(beat(peer.client_id), cast(Connection, peer), "JAVA", 500, NOW_MS)

    def leave(self, peer: Peer) -> None:
        request = Frame(RequestCode.UNREGISTER_CLIENT, {"clientID": peer.client_id, "consumerGroup": "g"})
        self._serve[RequestCode.UNREGISTER_CLIENT](request, cast(Connection, peer))

    def ids(self) -> list[str]:
        request = Frame(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"})
        answer = self._serve[request.code](request, cast(Connection, Peer("asks")))
        assert isinstance(answer, Frame)
        return sorted(decode_body(ConsumerIds, answer.body).consumer_id_list)


def test_the_first_that_comes_back_is_not_alone(tmp_path: Path) -> None:
    group = Group(tmp_path, "h1@a", "h2@a", "h3@a")
    with pytest.raises(RequestFailed):  # clients keep what they have then
        group.ids()
    for client_id in ("h2@a", "h1@a", "h3@a"):
        group.join(client_id)
        assert group.ids() == ["h1@a", "h2@a", "h3@a"]


def test_who_has_come_back_and_leaves_is_gone(tmp_path: Path) -> None:
    group = Group(tmp_path, "h1@a", "h2@a", "h3@a")
    peer = group.join("h1@a")
    group.clients.closed(cast(Connection, peer))
    group.join("h2@a")
    assert group.ids() == ["h2@a", "h3@a"]


def test_who_says_that_it_leaves_is_not_waited_for(tmp_path: Path) -> None:
    group = Group(tmp_path, "h1@a", "h2@a")
    peer = group.join("h1@a")
    told = peer.told
    group.leave(Peer("h2@a"))
    assert group.ids() == ["h1@a"]
    assert peer.told == told + 1
    group.leave(Peer("h2@a"))
    assert peer.told == told + 1


def test_who_does_not_come_is_given_up_and_the_others_are_told(tmp_path: Path) -> None:
    group = Group(tmp_path, "h1@a", "h2@a")
    peer = group.join("h1@a")
    told = peer.told
    group.clients.expire(NOW_MS + EXPECTED_FOR_MS - 1)
    assert group.ids() == ["h1@a", "h2@a"]
    assert peer.told == told
    group.clients.expire(NOW_MS + EXPECTED_FOR_MS)
    assert group.ids() == ["h1@a"]
    assert peer.told == told + 1
    group.join("h2@a")
    assert group.ids() == ["h1@a", "h2@a"]


def test_who_is_back_is_told_with_its_heartbeats_to_look_again(tmp_path: Path) -> None:
    group = Group(tmp_path, "h1@a", "h2@a")
    first, second = group.join("h1@a"), group.join("h2@a")
    told = second.told
    first.told = 0
    group.beat(first)
    group.beat(first)
    assert (first.told, second.told) == (2, told)
    group.clients.expire(NOW_MS + EXPECTED_FOR_MS)
    group.beat(first)
    assert first.told == 2


def test_a_clock_that_is_set_back_prolongs_nothing() -> None:
    former = FormerMembers({"g": ["h1@a", "h2@a"]})
    former.expire(NOW_MS)
    assert former.expire(NOW_MS - 1) == ["g"]
    assert former.expected("g") == []


def test_a_newcomer_takes_the_place_of_a_missing_one_of_its_host(tmp_path: Path) -> None:
    group = Group(tmp_path, "h1@a", "h2@a", "h3@a")
    group.join("h2@b")  # was restarted together with the broker
    assert group.ids() == ["h1@a", "h2@b", "h3@a"]
    group.join("h2@b")  # over a second connection
    assert group.ids() == ["h1@a", "h2@b", "h3@a"]
    group.join("h9@a")
    assert group.ids() == ["h2@b", "h3@a", "h9@a"]
    group.join("h1@a")  # was there after all, and takes nobody's place
    assert group.ids() == ["h1@a", "h2@b", "h3@a", "h9@a"]


def test_a_new_group_waits_for_nobody(tmp_path: Path) -> None:
    group = Group(tmp_path)
    group.join("h1@a")
    assert group.ids() == ["h1@a"]


@given(st.sets(IDS, min_size=2), st.lists(IDS))
def test_each_newcomer_takes_one_place_of_those_who_are_missing(former: set[str], come: list[str]) -> None:
    members = FormerMembers({"g": former})
    for client_id in come:
        members.came("g", client_id)
    expected, missing, newcomers = set(members.expected("g")), former - set(come), set(come) - former
    assert expected <= missing
    assert len(expected) >= len(missing) - len(newcomers)


def test_the_table_is_true_once_and_not_for_long(tmp_path: Path) -> None:
    def take_after(down_ms: int) -> list[str]:
        former_members.write(tmp_path, [("g", ["b", "a"])], NOW_MS)
        return former_members.take(tmp_path, NOW_MS + down_ms).expected("g")

    assert take_after(1_000) == ["a", "b"]
    assert former_members.take(tmp_path, NOW_MS + 1_000).expected("g") == []
    assert take_after(MAX_DOWN_MS) == ["a", "b"]
    assert take_after(MAX_DOWN_MS + 1) == []
    assert take_after(-1) == []
    assert take_after(0) == ["a", "b"]
    former_members.write(tmp_path, [], NOW_MS)
    assert not list(tmp_path.iterdir())


def test_the_table_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(former_members, "MAX_REMEMBERED", 3)
    groups = [("big", [*"abcd"]), ("long", ["a", "x" * 256]), ("g", ["a", "b"]), ("more", ["a", "b"])]
    former_members.write(tmp_path, groups, NOW_MS)
    former = former_members.take(tmp_path, NOW_MS)
    assert [former.expected(name) for name, _ in groups] == [[], [], ["a", "b"], []]


def test_a_damaged_table_keeps_no_broker_from_starting(tmp_path: Path) -> None:
    (tmp_path / "formerMembers.json").write_text('{"members": {"g": 7')
    assert former_members.take(tmp_path, NOW_MS).expected("g") == []


async def listed(live: Live, pool: Pool) -> list[str] | int:
    request = Frame(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"})
    answer = await pool.request(live.address, request, 60.0)
    return sorted(decode_body(ConsumerIds, answer.body).consumer_id_list) if answer.code == 0 else answer.code


async def join(live: Live, pool: Pool, client_id: str, model: str = "CLUSTERING") -> None:
    request = Frame(RequestCode.HEART_BEAT, {}, encode_body(beat(client_id, model)))
    assert (await pool.request(live.address, request, 60.0)).code == ResponseCode.SUCCESS


@pytest.mark.parametrize(
    ("model", "left", "expected"),
    [("CLUSTERING", False, ["a", "b"]), ("CLUSTERING", True, ["a"]), ("BROADCASTING", False, ["a"])],
    ids=["restart", "left before", "shares nothing"],
)
def test_over_a_restart(tmp_path: Path, model: str, left: bool, expected: list[str]) -> None:
    async def scenario() -> None:
        first, second = Pool(), Pool()
        try:
            async with live_broker(tmp_path) as live:
                await join(live, first, "a", model)
                await join(live, second, "b", model)
                if left:
                    fields = {"clientID": "b", "consumerGroup": "g"}
                    await second.request(live.address, Frame(RequestCode.UNREGISTER_CLIENT, fields), 60.0)
            async with live_broker(tmp_path) as live:
                assert await listed(live, first) == ResponseCode.SYSTEM_ERROR
                await join(live, first, "a", model)
                assert await listed(live, first) == expected
                await join(live, second, "b", model)
                assert await listed(live, first) == ["a", "b"]
        finally:
            first.close()
            second.close()

    asyncio.run(scenario())
