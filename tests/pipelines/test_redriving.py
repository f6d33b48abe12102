"""What redrive does with letters that can't be sent, and while the broker of its notes is away."""

from __future__ import annotations

import io
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from rich.console import Console

from patience import DEADLINE_S
from skylark.client import compression
from skylark.client.errors import RocketMQError
from skylark.client.message import Message
from skylark.client.query import TOOLS_GROUP
from skylark.client.sync import PullConsumer
from skylark.pipelines import dead_letters, redriven, resending
from skylark.pipelines.dead_letters import Wanted
from skylark.pipelines.errors import PipelineError
from skylark.pipelines.reading import messages
from skylark.pipelines.redriven import REDRIVEN_TOPIC, Entry
from skylark.pipelines.resending import Resent
from skylark.spark.cluster import Cluster
from skylark.spark.outbox import Outbox
from skylark.testing import LocalCluster
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from skylark.wire.headers import CreateTopic
from skylark.wire.message import SYS_COMPRESSED, SYS_COMPRESSION_LZ4
from skylark.wire.records import encode_properties
from skylark.wire.tables import PERM_READ
from skylark.wire.typed import encode_header

GROUP = "billing"
LETTERS = f"%DLQ%{GROUP}"
NO_REQUEST = 99_999  # the code of none, which brokers refuse
NO_BROKER_S = 2.0  # so long a test waits for a broker that stays away


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(topics={"orders": 2, LETTERS: 1}, settings={"autoCreateTopicEnable": "false"}) as cluster:
        yield cluster


def bury(cluster: LocalCluster, *bodies: bytes, topic: str = "orders", sys_flag: int = 0) -> None:
    """Dead letters, as a broker makes them."""
    with Cluster(cluster.name_servers, DEADLINE_S) as asked:
        for number, body in enumerate(bodies):
            properties = {"KEYS": f"key-{number}", "UNIQ_KEY": f"{number:032X}"}
            if topic:
                properties["RETRY_TOPIC"] = topic
            fields = {
                "a": "tests", "b": LETTERS, "c": "TBW102", "d": "1", "e": "0", "f": str(sys_flag), "g": "1", "h": "0",
                "i": encode_properties(properties).decode(), "j": "0", "k": "false",
            }  # fmt: skip
            asked.ask(asked.queues(LETTERS)[0].broker, LETTERS, Frame(RequestCode.SEND_MESSAGE_V2, fields, body))


def redrive(cluster: LocalCluster, **options: Any) -> Resent:
    console = Console(file=io.StringIO())
    return dead_letters.redrive(
        cluster.name_servers, GROUP, Wanted(), stop=threading.Event(), console=console, **options
    )


def stored(cluster: LocalCluster, topic: str) -> list[Message]:
    with PullConsumer(cluster.name_servers, TOOLS_GROUP) as consumer:
        return [message for message, _ in messages(consumer, topic)]


def bodies(cluster: LocalCluster, topic: str = "orders") -> Counter[bytes]:
    return Counter(message.body for message in stored(cluster, topic))


def waiting(cluster: LocalCluster) -> int:
    return dead_letters.inspect(cluster.name_servers, GROUP, Wanted(), 0).waiting


def test_the_others_are_sent_once_and_what_is_left_is_told(cluster: LocalCluster) -> None:
    good = [b"%d" % number for number in range(600)]
    bury(cluster, *good[:300])
    bury(cluster, b"of a topic that is gone", topic="gone")
    bury(cluster, b"from nowhere", b"from nowhere too", topic="")
    bury(cluster, *good[300:])
    for _ in range(3):
        with pytest.raises(PipelineError) as told:
            redrive(cluster)
        assert bodies(cluster) == Counter(good), "each once, however often it is run"
        assert (
            "3 dead letters are not sent and stay as they are, the first of each kind: offset 300 of queue 0 at "
            in (str(told.value))
        )
        assert "topic 'gone' does not exist at name server" in str(told.value)
        assert "it does not tell its original topic: name a topic with --to-topic" in str(told.value)
    assert waiting(cluster) == 3
    assert redrive(cluster, to_topic="orders").messages == 3
    assert waiting(cluster) == 0


def test_a_body_that_can_not_be_inflated_is_left_as_it_is(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = compression._module

    def not_installed(codec: compression.Codec) -> Any:
        if codec is compression.Codec.LZ4:
            raise ImportError
        return module(codec)

    monkeypatch.setattr(compression, "_module", not_installed)
    bury(cluster, b"packed", sys_flag=SYS_COMPRESSED | SYS_COMPRESSION_LZ4)
    bury(cluster, b"broken", sys_flag=SYS_COMPRESSED)
    bury(cluster, b"good")
    with pytest.raises(PipelineError, match=r"2 dead letters are not sent.* compressed with lz4.* can't be inflated"):
        redrive(cluster)
    assert bodies(cluster) == Counter([b"good"])
    last = dead_letters.inspect(cluster.name_servers, GROUP, Wanted(), 3).last
    assert [letter.redriven for letter in last] == [False, False, True]
    assert "lz4" in str(last[0].unreadable)


def test_a_letter_that_its_broker_refuses_holds_up_no_other(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that it travels in with others is refused as a whole."""
    request = Outbox._request

    def tampered(outbox: Outbox, pack: Any, queue: Any) -> Frame:
        made = request(outbox, pack, queue)
        is_bad = any(message.body == b"bad" for message in pack.messages)
        return Frame(NO_REQUEST, made.fields, made.body) if is_bad else made

    monkeypatch.setattr(Outbox, "_request", tampered)
    good = [b"%d" % number for number in range(700)]
    bury(cluster, *good[:350], b"bad", *good[350:])
    for _ in range(2):
        with pytest.raises(PipelineError, match="1 dead letter is not sent"):
            redrive(cluster)
        assert bodies(cluster) == Counter(good)
    assert waiting(cluster) == 1


def test_a_letter_that_is_too_large_holds_up_no_other(cluster: LocalCluster) -> None:
    """It was stored compressed; as it is sent, its broker does not take it."""
    bury(cluster, b"1")
    bury(cluster, zlib.compress(bytes(5 << 20)), sys_flag=SYS_COMPRESSED)
    bury(cluster, b"2")
    with pytest.raises(PipelineError, match=r"1 dead letter is not sent.* its body has 5,242,880 bytes; broker "):
        redrive(cluster)
    assert bodies(cluster) == Counter([b"1", b"2"])
    assert waiting(cluster) == 1


def test_what_was_stored_of_a_step_that_failed_is_noted(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker of one topic goes away in the middle; the other's letters are not sent again."""
    cluster.run(lambda: cluster.create_topic("payments", 1))
    bury(cluster, *[b"%d" % number for number in range(300)])
    bury(cluster, b"paid", topic="payments")
    connect: Callable[[Cluster, str, str], Any] = Cluster.connect

    def away(self: Cluster, broker: str, topic: str) -> Any:
        if topic == "payments":
            raise RocketMQError("nobody is there")
        return connect(self, broker, topic)

    with monkeypatch.context() as patched:
        patched.setattr(Cluster, "connect", away)
        for _ in range(2):
            with pytest.raises(PipelineError, match="nobody is there"):
                redrive(cluster)
            assert sum(bodies(cluster).values()) == 300
    assert redrive(cluster).messages == 1
    assert bodies(cluster, "payments") == Counter([b"paid"])


def test_a_second_topic_of_notes_is_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(2, topics={"orders": 1, LETTERS: 1}) as cluster:
        bury(cluster, *[b"%d" % number for number in range(50)])
        assert redrive(cluster).messages == 50
        assert sum(bodies(cluster).values()) == 50
        names = {name for name, _ in notes(cluster)}
        (holder,) = (broker for broker in cluster.brokers if broker.name in names)
        cluster.run(holder.stop)
        bury(cluster, b"new")
        with monkeypatch.context() as patched:
            for module in (dead_letters, redriven, resending):
                patched.setattr(module, "TIMEOUT_S", NO_BROKER_S)
            with pytest.raises(PipelineError, match="what was sent back before can't be read"):
                redrive(cluster)
            with pytest.raises(PipelineError, match="what was sent back before can't be read"):
                waiting(cluster)
        cluster.run(holder.start)
        cluster.run(holder.register)
        assert redrive(cluster).messages == 1
        assert sum(bodies(cluster).values()) == 51
        assert {name for name, _ in notes(cluster)} == names


def notes(cluster: LocalCluster) -> list[tuple[str, int]]:
    with Cluster(cluster.name_servers, DEADLINE_S) as asked:
        return [(queue.broker, queue.queue_id) for queue in asked.queues(REDRIVEN_TOPIC)]


def test_a_letter_at_a_place_of_a_log_that_was_begun_anew_is_another(cluster: LocalCluster) -> None:
    bury(cluster, b"a", b"b")
    first, second = stored(cluster, LETTERS)
    with (
        Cluster(cluster.name_servers, DEADLINE_S) as asked,
        PullConsumer(cluster.name_servers, TOOLS_GROUP) as consumer,
    ):
        known = redriven.Redriven(asked, consumer, GROUP)
        known._learn(entry(Entry(first.broker, [first.log_offset], [first.store_timestamp_ms - 1])))
        known._learn(entry(Entry(second.broker, [second.log_offset])))  # of an earlier version
        assert (first in known, second in known) == (False, True)
        with pytest.raises(PipelineError, match="names no dead letters"):
            known._learn(Message(topic=REDRIVEN_TOPIC, body=b"hello"))


def entry(noted: Entry) -> Message:
    return Message(topic=REDRIVEN_TOPIC, body=msgspec.json.encode(noted))


def test_letters_of_a_topic_that_may_only_be_read_are_left(cluster: LocalCluster) -> None:
    cluster.run(lambda: cluster.create_topic("payments", 1))
    bury(cluster, b"paid", topic="payments")
    bury(cluster, b"1")
    with Cluster(cluster.name_servers, DEADLINE_S) as admin:
        header = CreateTopic("payments", "TBW102", 1, 1, PERM_READ, "SINGLE_TAG")
        admin.ask_address(cluster.broker.address, Frame(RequestCode.UPDATE_AND_CREATE_TOPIC, encode_header(header)))
        while admin.route("payments", refresh=True).write_queues:
            time.sleep(0.01)
    with pytest.raises(PipelineError, match="'payments' takes no messages: it may only be read"):
        redrive(cluster)
    assert bodies(cluster) == Counter([b"1"])
