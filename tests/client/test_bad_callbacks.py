"""Functions of users that do everything wrong: the rest goes on, and the log says what happened."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest

from broker.live import live_broker
from client.inbox import DEADLINE_S, Inbox, eventually
from client.misbehaving import (
    FALSE_ANSWERS,
    IN_THREADS_ONLY,
    RAISED,
    TRUE_ANSWERS,
    WRONG_ANSWERS,
    AtFirst,
    Undecided,
    cancel_this_task,
)
from client.plain import send
from client.scripted import scripted_cluster
from client.test_push_consumer import QUICK_RETRIES
from client.test_transactions import QUICKLY, until_delivered
from skylark import sync
from skylark.client import allocate, consuming, membership, queue_sharing
from skylark.client.errors import CallbackFailed
from skylark.client.listening import ConsumeContext, ConsumeHook
from skylark.client.lite_pull_consumer import LitePullConsumer
from skylark.client.message import Message, MessageQueue
from skylark.client.producer import Producer, SendHook
from skylark.client.push_consumer import PushConsumer
from skylark.client.sending import SendContext
from skylark.client.session import Session
from skylark.client.transactions import TransactionProducer
from skylark.testing import LocalCluster
from skylark.wire.records import decode_properties

NEVER = b"never returns"
GOOD = [b"good %d" % number for number in range(12)]


def failures(*, in_threads: bool) -> dict[bytes, Callable[[], Any]]:
    table = RAISED | WRONG_ANSWERS | FALSE_ANSWERS | (IN_THREADS_ONLY if in_threads else {})
    return {name.encode(): act for name, act in table.items()}


class Naughty:
    """A listener that does to each message what its body says, at the first time, and notes what it has taken."""

    def __init__(self, *, in_threads: bool) -> None:
        self.failures = failures(in_threads=in_threads)
        self.harmless = {name.encode(): act for name, act in TRUE_ANSWERS.items()}
        self.entered: list[bytes] = []
        self.taken: list[bytes] = []
        self.hangs = asyncio.Event()
        self.hangs_in_thread = threading.Event()

    def act(self, messages: Sequence[Message]) -> Any:
        answer = None
        for message in messages:
            self.entered.append(message.body)
            if message.reconsume_times == 0 and message.body in self.failures:
                answer = self.failures[message.body]()
                break
            if message.body in self.harmless:
                answer = self.harmless[message.body]()
        else:
            self.taken += [message.body for message in messages]
        return answer

    def plain(self, given: Message | list[Message]) -> Any:
        messages = given if isinstance(given, list) else [given]
        if any(message.body == NEVER for message in messages):
            self.entered.append(NEVER)
            self.hangs_in_thread.wait(DEADLINE_S)
        return self.act(messages)

    async def asynchronous(self, given: Message | list[Message]) -> Any:
        messages = given if isinstance(given, list) else [given]
        if any(message.body == NEVER for message in messages):
            self.entered.append(NEVER)
            await self.hangs.wait()
        return self.act(messages)

    @property
    def bodies(self) -> list[bytes]:
        """The good ones stand behind the bad."""
        return [*self.failures, *self.harmless, *GOOD]


@pytest.mark.parametrize("in_threads", [False, True], ids=["coroutine", "plain"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 4},
        {"orderly": True, "suspend_s": 0.01},
        {"orderly": True, "suspend_s": 0.01, "batch_size": 4},
        {"orderly": True, "suspend_s": 0.01, "auto_commit": False},
        {"model": "broadcasting", "max_reconsume_times": 1},
        {"model": "broadcasting", "orderly": True, "suspend_s": 0.01},
        {"mode": "pop", "orderly": True, "suspend_s": 0.01, "pull_batch_size": 1},
    ],
    ids=lambda options: " ".join(str(each) for each in options.values() if each not in (True, 0.01)) or "plain",
)
def test_listeners(
    options: dict[str, Any],
    in_threads: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    monkeypatch.setattr(consuming, "RETRY_HERE_S", 0.01)

    async def main() -> None:
        naughty = Naughty(in_threads=in_threads)
        listener = naughty.plain if in_threads else naughty.asynchronous
        async with (
            LocalCluster(topics={"orders": 2}, settings=QUICK_RETRIES) as cluster,
            Session(cluster.name_servers) as session,
        ):
            bad, other = (await session.routes.get("orders")).read_queues
            await send(session, other, NEVER)
            await send(session, bad, *naughty.bodies)
            consumer = PushConsumer(
                cluster.name_servers, "g", listener=listener, from_where="first", concurrency=3,
                shutdown_timeout_s=0.01, offsets_directory=tmp_path, **options,
            )  # fmt: skip
            consumer.subscribe("orders")
            try:
                async with consumer:
                    await eventually(lambda: set(naughty.bodies) <= set(naughty.taken) and NEVER in naughty.entered)
                    assert naughty.entered.count(NEVER) == 1
            finally:
                naughty.hangs_in_thread.set()
        if "batch_size" not in options:
            for body in naughty.failures:
                assert naughty.entered.count(body) == 2, body
            logged = [record for record in caplog.records if "failed on message" in record.getMessage()]
            assert len(logged) == len(naughty.failures) - len(FALSE_ANSWERS)
        assert "what is true counts as done" in caplog.text

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())


@pytest.mark.parametrize("in_threads", [False, True], ids=["coroutine", "plain"])
def test_listeners_that_pop(in_threads: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        naughty = Naughty(in_threads=in_threads)
        async with (
            LocalCluster(topics={"orders": 1}) as cluster,
            Session(cluster.name_servers) as session,
        ):
            [queue] = (await session.routes.get("orders")).read_queues
            await send(session, queue, NEVER, *naughty.bodies)
            consumer = PushConsumer(
                cluster.name_servers, "g", listener=naughty.plain if in_threads else naughty.asynchronous,
                from_where="first", mode="pop", concurrency=3, max_reconsume_times=0, shutdown_timeout_s=0.01,
            )  # fmt: skip
            consumer.subscribe("orders")
            try:
                async with consumer:
                    await eventually(lambda: {*naughty.harmless, *GOOD} <= set(naughty.taken))
            finally:
                naughty.hangs_in_thread.set()
        assert set(naughty.failures) <= set(naughty.entered)
        logged = [record for record in caplog.records if "failed on message" in record.getMessage()]
        assert len(logged) == len(naughty.failures) - len(FALSE_ANSWERS)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())


def test_a_listener_of_a_blocking_consumer_leaves_the_other_clients_alone(skylark_cluster: LocalCluster) -> None:
    naughty = Naughty(in_threads=True)
    with sync.Producer(skylark_cluster.name_servers, group="p") as producer:
        for body in [*RAISED, *IN_THREADS_ONLY]:
            producer.send("orders", body.encode())
        consumer = sync.PushConsumer(
            skylark_cluster.name_servers, group="g", listener=naughty.plain, from_where="first", concurrency=1,
            max_reconsume_times=0,
        )  # fmt: skip
        consumer.subscribe("orders")
        with consumer:
            producer.send("orders", b"good", timeout_s=DEADLINE_S)
            asyncio.run(eventually(lambda: b"good" in naughty.taken))


# What is called in the event loop.


def test_filters_strategies_hooks_and_who_is_told_of_queues(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_UNBALANCED_WAIT_S", 0.01)
    strategy = AtFirst(allocate.average, None, "some", [1], 7)
    wanted = AtFirst(lambda _: True, Undecided())
    told = AtFirst(lambda *_: None)
    before, after = AtFirst(lambda _: None), AtFirst(lambda _: None)

    class Hook(ConsumeHook):
        def before(self, context: ConsumeContext) -> None:
            return before(context)  # type: ignore[no-any-return]

        def after(self, context: ConsumeContext) -> None:
            return after(context)  # type: ignore[no-any-return]

    async def main() -> None:
        consumed: list[bytes] = []

        async def listen(message: Message) -> None:
            consumed.append(message.body)

        topics = {f"topic{number}": 1 for number in range(told.count)}
        async with (
            LocalCluster(topics={"orders": 1} | topics) as cluster,
            Session(cluster.name_servers) as session,
        ):
            [queue] = (await session.routes.get("orders")).read_queues
            await send(session, queue, *(b"%d" % number for number in range(wanted.count + 3)))
            consumer = PushConsumer(
                cluster.name_servers, "g", listener=listen, from_where="first", strategy=strategy, hooks=[Hook()],
                queues_changed=told,
            )  # fmt: skip
            consumer.subscribe("orders", filter=wanted)
            async with consumer:
                await eventually(lambda: len(consumed) == wanted.count + 3)
                for topic in topics:
                    consumer.subscribe(topic)
                await eventually(lambda: told.is_over)
            assert sorted(consumed, key=int) == [b"%d" % number for number in range(wanted.count + 3)]
        assert strategy.is_over
        assert before.is_over
        assert after.is_over

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    messages = [record.getMessage() for record in caplog.records]
    assert sum("the filter of topic orders failed" in each for each in messages) == wanted.count
    assert sum("a hook of group g failed" in each for each in messages) == before.count + after.count
    assert sum("when its queues change failed" in each for each in messages) == told.count
    assert any("can't share out topic" in each and "strategy" in each for each in messages)


def test_a_filter_or_strategy_that_cancels_the_task_it_runs_in(caplog: pytest.LogCaptureFixture) -> None:
    def wanted(_: Message) -> bool:
        cancel_this_task()
        return True

    def strategy(member: str, queues: Sequence[MessageQueue], members: Sequence[str]) -> list[MessageQueue]:
        cancel_this_task()
        return allocate.average(member, queues, members)

    async def main() -> None:
        inbox = Inbox()
        async with (
            LocalCluster(topics={"orders": 1}) as cluster,
            Session(cluster.name_servers) as session,
        ):
            [queue] = (await session.routes.get("orders")).read_queues
            consumer = PushConsumer(cluster.name_servers, "g", listener=inbox, from_where="first", strategy=strategy)
            consumer.subscribe("orders", filter=wanted)
            async with consumer:
                for count in range(1, 4):
                    await send(session, queue, b"m")
                    await inbox.wait(count)

    asyncio.run(main())
    assert "pull orders-0 at broker-a: it was to be cancelled by what it called" in caplog.text
    assert "start of g: it was to be cancelled by what it called" in caplog.text


def test_strategies_of_those_who_ask(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_sharing, "UNBALANCED_PAUSE_S", 0.01)
    strategy = AtFirst(allocate.average, None, "some", [1], 7)

    async def main() -> None:
        async with LocalCluster(topics={"orders": 1}) as cluster, Producer(cluster.name_servers) as producer:
            consumer = LitePullConsumer(cluster.name_servers, "g", from_where="first", strategy=strategy)
            consumer.subscribe("orders")
            async with consumer:
                await producer.send("orders", b"m")
                assert [message.body for message in await consumer.poll(DEADLINE_S)] == [b"m"]
                assert consumer.failures() == []

    asyncio.run(main())
    assert strategy.is_over
    assert "sharing the queues of orders failed, and is tried again: the strategy" in caplog.text


def test_hooks_and_selectors_of_senders(caplog: pytest.LogCaptureFixture) -> None:
    before, after = AtFirst(lambda _: None), AtFirst(lambda _: None)

    class Hook(SendHook):
        def before_send(self, context: SendContext) -> None:
            return before(context)  # type: ignore[no-any-return]

        def after_send(self, context: SendContext) -> None:
            return after(context)  # type: ignore[no-any-return]

    def first(queues: Sequence[MessageQueue], _: Any) -> MessageQueue:
        return queues[0]

    select = AtFirst(first, None, "queue", 3)

    with (
        caplog.at_level(logging.WARNING),
        LocalCluster(topics={"orders": 1}) as cluster,
        sync.Producer(cluster.name_servers, group="p", hooks=[Hook()], timeout_s=DEADLINE_S) as producer,
    ):
        for number in range(before.count + 1):
            assert producer.send("orders", b"%d" % number).queue_offset == number
        for _ in range(select.count):
            with pytest.raises(Exception) as told:  # noqa: PT011  the caller's own error, or what it is called
                producer.send("orders", b"nowhere", select=select)
            assert not isinstance(told.value, TimeoutError)
        with pytest.raises(CallbackFailed, match="SystemExit"):
            producer.send("orders", b"nowhere", select=lambda *_: RAISED["SystemExit"]())
        assert producer.send("orders", b"here", select=select).queue_offset == before.count + 1
    assert before.is_over
    assert after.is_over
    messages = [record.getMessage() for record in caplog.records]
    assert sum("failed before a send" in each for each in messages) == before.count
    assert sum("failed after a send" in each for each in messages) == after.count


class Rewriting(SendHook):
    """Does to the properties of each message what its body says."""

    ways: ClassVar[dict[bytes, Callable[[SendContext], None]]] = {
        b"no text": lambda context: context.properties.update(number=5),  # type: ignore[arg-type]
        b"no name": lambda context: context.properties.update({7: "x"}),  # type: ignore[dict-item]
        b"splits": lambda context: context.properties.update(text="a\x02KEYS\x01b"),
        b"others": lambda context: setattr(context, "properties", {"text": "other"}),
        b"none": lambda context: setattr(context, "properties", None),
        b"cleared": lambda context: (context.properties.clear(), RAISED["Exception"]())[0],
    }

    def before_send(self, context: SendContext) -> None:
        if context.body in self.ways:
            self.ways[context.body](context)


class Adding(SendHook):
    def before_send(self, context: SendContext) -> None:
        context.properties["added"] = "yes"


def test_hooks_that_make_nonsense_of_the_properties(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with (
            scripted_cluster("a", orders=1) as cluster,
            Producer(cluster.namesrv, hooks=[Rewriting(), Adding()], retries=0, timeout_s=DEADLINE_S) as producer,
        ):
            for body in [*Rewriting.ways, b"good"]:
                receipt = await producer.send("orders", body, properties={"own": "kept"})
                sent = decode_properties(cluster.brokers[0].sends[-1].fields["i"])
                assert sent == {"own": "kept", "UNIQ_KEY": receipt.msg_id, "added": "yes"}, body

    asyncio.run(main())
    assert caplog.text.count("failed before a send") == len(Rewriting.ways)


def test_a_selector_may_do_what_it_likes_with_the_list_it_is_given() -> None:
    def take_apart(queues: list[MessageQueue], _: Any) -> MessageQueue:
        last = queues.pop()
        queues.clear()
        return last

    async def main() -> None:
        async with (
            scripted_cluster("a", orders=4) as cluster,
            Producer(cluster.namesrv, timeout_s=DEADLINE_S) as producer,
        ):
            queues = await producer.queues("orders")
            assert (await producer.send("orders", b"m", select=take_apart)).queue == queues[-1]  # type: ignore[arg-type]
            assert await producer.queues("orders") == queues

    asyncio.run(main())


@pytest.mark.parametrize("in_threads", [False, True], ids=["coroutine", "plain"])
def test_checkers(in_threads: bool, tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    table = [*RAISED.values(), *(IN_THREADS_ONLY.values() if in_threads else ()), lambda: "yes", lambda: None]

    async def main() -> None:
        acts = iter(table)
        stuck, stuck_in_thread = asyncio.Event(), threading.Event()
        asked: list[bytes] = []

        def plain(message: Message) -> Any:
            asked.append(message.body)
            if message.body == NEVER:
                stuck_in_thread.wait(DEADLINE_S)
            act = next(acts, None)
            return True if act is None else act()

        async def asynchronous(message: Message) -> Any:
            if message.body == NEVER:
                asked.append(message.body)
                await stuck.wait()
            return plain(message)

        async with live_broker(tmp_path, **QUICKLY, transactionCheckMax=1000) as broker:
            producer = TransactionProducer(
                broker.namesrv, "shop", checker=plain if in_threads else asynchronous, timeout_s=DEADLINE_S,
                max_checks=2,
            )  # fmt: skip
            try:
                async with producer:
                    await producer.prepare("orders", NEVER)
                    await eventually(lambda: NEVER in asked)
                    await producer.prepare("orders", b"asked for again and again")
                    await until_delivered(broker, b"asked for again and again")
            finally:
                stuck_in_thread.set()
            assert asked.count(NEVER) == 1

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    messages = [record.getMessage() for record in caplog.records]
    assert sum("the checker failed for" in each for each in messages) == len(table) - 2
    assert sum("the checker said 'yes'" in each for each in messages) == 1
