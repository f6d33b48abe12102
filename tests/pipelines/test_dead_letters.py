"""Dead letters of a group, seen and sent back once, on both servers."""

from __future__ import annotations

import io
import threading
import time
from collections import Counter

import pytest
from rich.console import Console

from patience import DEADLINE_S
from skylark.client.message import Message
from skylark.client.query import TOOLS_GROUP
from skylark.client.sync import Producer, PullConsumer, PushConsumer
from skylark.pipelines import dead_letters
from skylark.pipelines.dead_letters import Report, Wanted
from skylark.pipelines.errors import PipelineError
from skylark.pipelines.reading import messages
from skylark.pipelines.redriven import Redriven
from skylark.pipelines.resending import Resent

ANY = Wanted()


def bury(namesrv: str, group: str, topic: str, *bodies: str) -> None:
    """Has a consumer fail with each message until it is a dead letter; `a:1` has the tag a and the key 1."""
    with Producer(namesrv, group="dead-letter-tests", timeout_s=DEADLINE_S) as producer:
        for body in bodies:
            tag, _, key = body.partition(":")
            producer.send(topic, body.encode(), tag=tag, key=["all", key], properties={"color": "red"})

    def fail(message: Message) -> None:
        raise RuntimeError("this message is not to be consumed")

    consumer = PushConsumer(namesrv, group, max_reconsume_times=0, from_where="first")
    consumer.subscribe(topic)
    consumer.listen(fail)
    with consumer:
        stored(namesrv, f"%DLQ%{group}", len(bodies))


def stored(namesrv: str, topic: str, count: int) -> list[Message]:
    """What a topic holds, as soon as it is so many messages: Apache's queues follow its log."""
    deadline_s = time.monotonic() + DEADLINE_S
    with PullConsumer(namesrv, TOOLS_GROUP) as consumer:
        while len(found := list(messages(consumer, topic))) < count:
            assert time.monotonic() < deadline_s, f"{topic} has {found}"
            time.sleep(0.05)
    return [message for message, _ in found]


def inspect(namesrv: str, group: str, wanted: Wanted = ANY, last: int = 10) -> Report:
    return dead_letters.inspect(namesrv, group, wanted, last)


def redrive(namesrv: str, group: str, wanted: Wanted = ANY, to_topic: str | None = None) -> Resent:
    console = Console(file=io.StringIO())
    return dead_letters.redrive(namesrv, group, wanted, to_topic=to_topic, stop=threading.Event(), console=console)


def consume(namesrv: str, group: str, topic: str, count: int) -> set[tuple[str, bytes, int]]:
    """The next messages of a group: topic, body and how often they were tried before."""
    found: set[tuple[str, bytes, int]] = set()
    enough = threading.Event()
    consumer = PushConsumer(namesrv, group)
    consumer.subscribe(topic)

    def take(message: Message) -> None:
        found.add((message.topic, message.body, message.reconsume_times))
        if len(found) >= count:
            enough.set()

    consumer.listen(take)
    with consumer:
        assert enough.wait(DEADLINE_S), f"the group got {found}"
    return found


def test_each_dead_letter_is_sent_back_once(namesrv: str, group: str, topic: str) -> None:
    bury(namesrv, group, topic, "a:1", "a:2", "b:3")
    report = inspect(namesrv, group, last=1)
    assert (report.count, report.waiting) == (3, 3)
    assert [(kind.topic, kind.tag, kind.count) for kind in report.kinds] == [(topic, "a", 2), (topic, "b", 1)]
    assert len(report.last) == 1
    assert inspect(namesrv, group, Wanted(key="3")).last[0].body == "b:3"

    assert redrive(namesrv, group, Wanted(tag="b")).messages == 1
    before, after = (message for message in stored(namesrv, topic, 4) if message.body == b"b:3")
    assert (after.tag, after.keys, after.properties["color"]) == ("b", ["all", "3"], "red")
    assert after.msg_id != before.msg_id
    assert inspect(namesrv, group).waiting == 2

    # The others reach this group only, which sees them under their topic and as if for the first time.
    assert redrive(namesrv, group, to_topic=f"%RETRY%{group}").messages == 2
    assert redrive(namesrv, group).messages == 0
    assert consume(namesrv, group, topic, 3) == {(topic, b"b:3", 0), (topic, b"a:1", 0), (topic, b"a:2", 0)}
    assert len(stored(namesrv, topic, 4)) == 4


def test_a_step_that_was_not_noted_is_sent_again_with_the_same_ids(
    namesrv: str, group: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bury(namesrv, group, topic, "a:1")

    def die(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Redriven, "add", die)
        with pytest.raises(KeyboardInterrupt):
            redrive(namesrv, group)
    assert redrive(namesrv, group).messages == 1
    ids = Counter(message.msg_id for message in stored(namesrv, topic, 3))
    assert sorted(ids.values()) == [1, 2], "the original, and the one that was sent twice"


def test_a_group_without_dead_letters(namesrv: str, group: str) -> None:
    assert inspect(namesrv, group).count == 0
    assert redrive(namesrv, group).messages == 0


def test_a_topic_that_is_gone(namesrv: str, group: str, topic: str) -> None:
    bury(namesrv, group, topic, "a:1")
    with pytest.raises(PipelineError, match=r"topic 'nowhere' does not exist .*; --to-topic names another"):
        redrive(namesrv, group, to_topic="nowhere")
    assert inspect(namesrv, group).waiting == 1


@pytest.mark.parametrize(
    ("properties", "topic"),
    [
        ({"RETRY_TOPIC": "orders"}, "orders"),
        ({"DLQ_ORIGIN_TOPIC": "orders"}, "orders"),
        ({"RETRY_TOPIC": "%RETRY%g_orders"}, "orders"),
        ({"RETRY_TOPIC": "%RETRY%g+orders"}, "orders"),
        ({"RETRY_TOPIC": "%RETRY%g", "DLQ_ORIGIN_TOPIC": "orders"}, "orders"),
        ({}, None),
    ],
)
def test_the_original_topic(properties: dict[str, str], topic: str | None) -> None:
    assert dead_letters.origin(Message(topic="%DLQ%g", body=b"", properties=properties), "g") == topic
