"""What goes away and comes back is waited for, what never was is said at once, and brokers differ in what they take."""

from __future__ import annotations

import pytest

from skylark.client.errors import BrokerError, InvalidMessage, NotReachable, RouteNotFound
from skylark.spark.cluster import Cluster
from skylark.spark.outbox import Outbox
from skylark.spark.rows import Outgoing
from skylark.spark.settings import Compacted
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from spark.scripted import NAME_SERVER, Broker, World, play

TIMEOUT_S = 30


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Broker a has the topic, and neither makes any."""
    world = play(monkeypatch, World(Broker("a", makes_topics=False), Broker("b", makes_topics=False)))
    world.brokers["a"].put_topic("t", 2)
    return world


def message(body: bytes = b"x", topic: str = "t", key: str | None = None) -> Outgoing:
    return Outgoing(topic, body, {"UNIQ_KEY": "k"}, key, False, len(body) + 10)


def send(*messages: Outgoing, existing: tuple[str, ...] = (), is_later: bool = False, most: int | None = None) -> None:
    with Cluster(NAME_SERVER, TIMEOUT_S) as cluster:
        outbox = Outbox(
            cluster,
            "spark",
            TIMEOUT_S,
            max_in_flight=64,
            existing=existing,
            is_later=is_later,
            max_body_bytes=most,
        )
        for each in messages:
            outbox.put(each)
        outbox.flush()


def delivered(world: World) -> int:
    return len(world.delivered_bodies("t"))


# Away, or never there.


def test_all_brokers_come_back_after_the_name_server(world: World) -> None:
    world.away("a", "b", for_s=20)
    send(message())
    assert delivered(world) == 1


def test_brokers_that_come_back_one_after_the_other(world: World) -> None:
    world.away("b", for_s=20)
    world.away("a", for_s=23)
    send(message())
    assert delivered(world) == 1


@pytest.mark.parametrize("known", [{"existing": ("t",)}, {"is_later": True}])
def test_the_broker_of_a_topic_comes_back_after_the_others(world: World, known: dict[str, object]) -> None:
    """A restart of name server and brokers ended streams: the topic did not exist, said the sink."""
    world.away("a", for_s=20)
    send(message(), **known)  # type: ignore[arg-type]
    assert delivered(world) == 1


def test_a_topic_that_was_there_is_not_made_elsewhere(world: World) -> None:
    world.brokers["b"].put_topic("TBW102", 4, perm=7)
    world.away("a", for_s=20)
    send(message(), existing=("t",))
    assert "t" not in world.brokers["b"].topics
    world.away("a", for_s=100)
    with pytest.raises(NotReachable, match="topic t has no broker now: the one that has it is away"):
        send(message(), existing=("t",))


def test_a_topic_that_this_task_has_seen_is_waited_for(world: World) -> None:
    with Cluster(NAME_SERVER, TIMEOUT_S) as cluster:
        outbox = Outbox(cluster, "spark", TIMEOUT_S, max_in_flight=1)
        outbox.put(message())
        outbox.flush()
        world.away("a", for_s=20)
        outbox.put(message())
        outbox.flush()
    assert delivered(world) == 2


def test_a_topic_that_never_was_is_said_soon(world: World) -> None:
    before_s = world.now_s
    for key in (None, "key"):
        with pytest.raises(RouteNotFound, match=r"no broker that is there \(a, b\) has topic 'u' or makes topics"):
            send(message(topic="u", key=key))
    assert world.now_s - before_s < TIMEOUT_S


def test_a_topic_that_never_was_is_made_if_a_broker_does_that(world: World) -> None:
    world.brokers["b"].put_topic("TBW102", 4, perm=7)
    send(message(topic="u"), is_later=True)
    assert world.brokers["b"].bodies["u"] == [b"x"]


def test_rows_that_come_slowly_leave_the_whole_time_for_a_retry(world: World) -> None:
    """The time began with the send: who looked at a lost answer later than that did not try again."""
    with Cluster(NAME_SERVER, TIMEOUT_S) as cluster:
        outbox = Outbox(cluster, "spark", TIMEOUT_S, max_in_flight=2, halves=True)
        world.after = lambda address, request: lose(world, request)
        outbox.put(message())
        world.pass_time(2 * TIMEOUT_S)
        outbox.flush()
    assert len(world.brokers["a"].halves) == 2


def lose(world: World, request: Frame) -> None:
    if request.code in (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE):
        world.after = lambda address, request: None
        raise ConnectionError("the answer is lost")


def test_a_broker_that_is_just_starting_takes_delayed_messages_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Broker.answer
    busy = 3

    def busy_at_first(self: Broker, request: Frame, now_ms: int) -> Frame:
        nonlocal busy
        if request.code == RequestCode.SEND_MESSAGE_V2 and busy:
            busy -= 1
            return request.reply(ResponseCode.SERVICE_NOT_AVAILABLE, "starting")
        return answer(self, request, now_ms)

    monkeypatch.setattr(Broker, "answer", busy_at_first)
    send(Outgoing("t", b"x", {"UNIQ_KEY": "k", "TIMER_DELAY_MS": "5"}, None, True, 10))
    assert delivered(world) == 1


# What brokers take.


def test_an_empty_body(world: World) -> None:
    send(message(b""), message(b"", key="k"))
    assert delivered(world) == 2


def test_a_body_that_the_broker_takes(world: World) -> None:
    world.brokers["a"].max_message_size = 6 << 20
    send(message(bytes(5 << 20)))
    with pytest.raises(InvalidMessage, match=r"its body has 7,340,032 bytes; broker a takes 6,291,456 \(maxMessageS"):
        send(message(bytes(7 << 20)))


def test_a_body_that_the_option_allows(world: World) -> None:
    send(message(bytes(100)), most=100)
    with pytest.raises(InvalidMessage, match="its body has 101 bytes; the option maxBodyBytes allows 100"):
        send(message(bytes(101)), most=100)


@pytest.mark.parametrize("key", [None, "key"])
def test_batches_fit_into_what_the_broker_takes(world: World, key: str | None) -> None:
    world.brokers["a"].max_message_size = 1000
    send(*(message(b"%d" % number * 20, key=key) for number in range(600)))
    assert sorted(world.delivered_bodies("t")) == sorted(b"%d" % number * 20 for number in range(600))
    assert max(world.brokers["a"].sizes) <= 1000
    if key is not None:
        assert world.delivered_bodies("t") == [b"%d" % number * 20 for number in range(600)]


def test_one_that_is_too_large_for_the_broker_is_said(world: World) -> None:
    world.brokers["a"].max_message_size = 1000
    with pytest.raises(BrokerError, match="the message is too large"):
        send(message(bytes(2000)), message(b"x"))


def test_compacted_topics_are_told(world: World) -> None:
    world.brokers["a"].put_topic("c", 1, cleanup_policy="COMPACTION")
    with Cluster(NAME_SERVER, TIMEOUT_S) as cluster:
        compacted = Compacted(cluster)
        assert [compacted.holds(topic) for topic in ("c", "t", "c")] == [True, False, True]


def test_a_compacted_topic_that_comes_back_is_waited_for(world: World) -> None:
    """A null in the middle of a restart ended the stream: its topic was not compacted, said the sink."""
    world.brokers["a"].put_topic("c", 1, cleanup_policy="COMPACTION")
    world.away("a", "b", for_s=20)
    with Cluster(NAME_SERVER, TIMEOUT_S) as cluster:
        assert Compacted(cluster).holds("c")
        with pytest.raises(NotReachable, match="topic 'none' does not exist"):
            Compacted(cluster).holds("none")
