"""A topic that holds decisions is there once, whichever brokers are there when somebody looks for it."""

from __future__ import annotations

from contextlib import suppress

import pytest

from skylark.client.errors import NotReachable
from skylark.spark.cluster import Cluster
from skylark.spark.queues import Queue
from skylark.spark.sole import ensure_sole, find_sole, require_sole
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from spark.scripted import NAME_SERVER, Broker, World, play


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return play(monkeypatch, World(Broker("a"), Broker("b")))


def holders(world: World) -> list[str]:
    return [name for name, broker in world.brokers.items() if "t" in broker.topics and broker.topics["t"].perm == 6]


def ensured() -> list[Queue]:
    with Cluster(NAME_SERVER, 30) as cluster:
        return ensure_sole(cluster, "t")


def found() -> list[Queue]:
    with Cluster(NAME_SERVER, 30) as cluster:
        return find_sole(cluster, "t")


def test_what_never_was_is_made_once(world: World) -> None:
    assert found() == []
    assert ensured() == found() == ensured() == [Queue("t", "a", 0)]
    assert holders(world) == ["a"]


def test_what_is_away_is_waited_for_and_not_made_again(world: World) -> None:
    """10 rows became 20: a missing route was taken for a ledger that never was."""
    ensured()
    world.away("a", for_s=20)
    assert ensured() == [Queue("t", "a", 0)]
    world.away("a", for_s=100)
    for look in (ensured, found):
        with pytest.raises(NotReachable, match="the broker that has topic 't' is away: start it again"):
            look()
    assert holders(world) == ["a"]


def test_brokers_that_come_later_are_told(world: World) -> None:
    ensured()
    world.brokers["c"] = Broker("c")
    ensured()
    world.away("a", "b")
    with pytest.raises(NotReachable):
        ensured()
    assert holders(world) == ["a"]


@pytest.mark.parametrize("last", range(1, 8))
def test_a_driver_that_dies_while_it_makes_it(world: World, last: int) -> None:
    """Whichever request is its last: the next one marks the brokers, and none makes a second topic."""

    class Died(BaseException):
        pass

    left = last

    def dies(address: str, request: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Died

    world.after = dies
    with suppress(Died):
        ensured()
    world.after = lambda address, request: None
    ensured()
    for gone in "ab":
        world.away(gone)
        with suppress(NotReachable):
            ensured()
        world.back(gone)
    assert len(holders(world)) == 1


def test_nobody_there_is_waited_for(world: World) -> None:
    world.away("a", "b", for_s=10)
    assert ensured() == [Queue("t", "a", 0)]


def test_one_of_several_queues_stays_as_it_is(world: World) -> None:
    world.brokers["b"].put_topic("t", 2)
    assert ensured() == [Queue("t", "b", 0), Queue("t", "b", 1)]
    assert holders(world) == ["b"]


def test_the_broker_knows_before_the_name_server(world: World) -> None:
    ensured()
    world.brokers["a"].is_named = False
    with pytest.raises(NotReachable):
        found()
    with Cluster(NAME_SERVER, 30) as cluster, pytest.raises(NotReachable):
        require_sole(cluster, "t")
    world.plan(5, lambda: world.back("a"))
    with Cluster(NAME_SERVER, 30) as cluster:
        assert require_sole(cluster, "t") == [Queue("t", "a", 0)]


@pytest.mark.parametrize("used", [None, "a", "b"])
def test_of_two_the_one_without_messages_goes(world: World, used: str | None) -> None:
    """As two processes leave them of which each made one, or one that died before it marked the others."""
    for broker in world.brokers.values():
        broker.put_topic("t", 1)
    if used is not None:
        world.brokers[used].queues["t", 0].append(b"an entry")
    assert ensured() == found() == [Queue("t", used or "a", 0)]
    assert holders(world) == [used or "a"]


def test_of_two_with_messages_both_stay(world: World) -> None:
    for broker in world.brokers.values():
        broker.put_topic("t", 1)
        broker.queues["t", 0].append(b"an entry")
    assert ensured() == [Queue("t", "a", 0), Queue("t", "b", 0)]
    assert holders(world) == ["a", "b"]


def test_one_that_is_written_to_while_it_is_closed_stays(world: World) -> None:
    for broker in world.brokers.values():
        broker.put_topic("t", 1)
    world.brokers["a"].queues["t", 0].append(b"an entry")

    def written(address: str, request: Frame) -> None:
        if request.code == RequestCode.UPDATE_AND_CREATE_TOPIC:
            world.watch = lambda address, request: None
            world.brokers["b"].queues["t", 0].append(b"another")

    world.watch = written
    assert ensured() == [Queue("t", "a", 0), Queue("t", "b", 0)]
    assert holders(world) == ["a", "b"]
