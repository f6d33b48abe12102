"""Where a simple consumer asks, and in which order: no broker holds up another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from skylark.client import sources
from skylark.client.errors import BrokerError, NotReachable, RocketMQError
from skylark.client.message import Message, MessageQueue
from skylark.client.popping import Popped
from skylark.client.sources import Source, Sources


@pytest.fixture(autouse=True)
def failures_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has failed rests for the whole test."""
    monkeypatch.setattr(sources, "FIRST_PAUSE_S", 600.0)
    monkeypatch.setattr(sources, "LONGEST_PAUSE_S", 600.0)


def broker(name: str) -> MessageQueue:
    return MessageQueue(name, -1, "t")


def message(body: bytes) -> Message:
    return Message(topic="t", body=body, receipt_handle="0 0 30000 0 0 b 0 0")


class Brokers:
    """Brokers whose answers a test decides: a list of messages, an error, or a future of one of them."""

    def __init__(self, *names: str) -> None:
        self.answers: dict[str, list[object]] = {name: [] for name in names}
        self.bells: dict[str, asyncio.Future[bool]] = {}
        self.pops: list[tuple[str, int]] = []
        self.sources = Sources(self.pop, self.bell, lambda popped: popped.messages)
        self.sources.set_queues(broker(name) for name in names)

    async def pop(self, queue: MessageQueue, max_messages: int, invisible_ms: int, wait_ms: int, _: str) -> Popped:
        self.pops.append((queue.broker_name, wait_ms))
        answers = self.answers[queue.broker_name]
        answer = answers.pop(0) if answers else []
        if isinstance(answer, asyncio.Future):
            answer = await answer
        if isinstance(answer, RocketMQError):
            raise answer
        assert isinstance(answer, list)
        return Popped([message(body) for body in answer], rest=len(answers))

    async def bell(self, queue: MessageQueue, wait_ms: int, _: str) -> bool:
        self.bells[queue.broker_name] = asyncio.get_running_loop().create_future()
        return await self.bells[queue.broker_name]

    async def ask(self, wait_ms: int = 1000) -> None:
        self.sources.changed.clear()
        self.sources.ask(16, 30_000, wait_ms)
        for _ in range(5):
            await asyncio.sleep(0)

    def taken(self) -> list[bytes]:
        taken = [each.message.body for each in self.sources.pile]
        self.sources.pile.clear()
        return taken


def scenario(*names: str) -> Callable[[Callable[[Brokers], Awaitable[None]]], Callable[[], None]]:
    def decorate(test: Callable[[Brokers], Awaitable[None]]) -> Callable[[], None]:
        async def main() -> None:
            brokers = Brokers(*names)
            try:
                await test(brokers)
            finally:
                await brokers.sources.close(0)

        def run() -> None:
            asyncio.run(main())

        run.__name__ = run.__qualname__ = test.__name__
        return run

    return decorate


@scenario("a")
async def test_a_single_broker_is_waited_at_by_the_pop_itself(brokers: Brokers) -> None:
    await brokers.ask(wait_ms=700)
    assert brokers.pops == [("a", 700)]
    assert brokers.bells == {}


@scenario("a")
async def test_a_single_broker_is_asked_once_by_who_does_not_wait(brokers: Brokers) -> None:
    await brokers.ask(wait_ms=0)
    assert not brokers.sources.is_undecided
    await brokers.ask(wait_ms=0)
    assert brokers.pops == [("a", 0)]
    brokers.sources.look_again()
    await brokers.ask(wait_ms=0)
    assert brokers.pops == [("a", 0), ("a", 0)]


@scenario("a", "b", "c")
async def test_empty_brokers_are_waited_at_without_taking_anything(brokers: Brokers) -> None:
    for _ in range(4):
        await brokers.ask()
    assert brokers.pops == [("a", 0), ("b", 0), ("c", 0)]
    assert set(brokers.bells) == {"a", "b", "c"}
    brokers.answers["b"] = [[b"new"]]
    brokers.bells["b"].set_result(True)
    await brokers.sources.changed.wait()
    await brokers.ask()
    assert brokers.pops[3:] == [("b", 0)]
    assert brokers.taken() == [b"new"]


@scenario("slow", "quick")
async def test_a_slow_broker_is_left_to_itself(brokers: Brokers) -> None:
    late: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    brokers.answers = {"slow": [late], "quick": [[b"quick"]]}
    await brokers.ask()
    assert brokers.taken() == []
    assert brokers.sources.next_turn_s() - asyncio.get_running_loop().time() <= 0.05
    await brokers.ask()
    assert brokers.taken() == [b"quick"]
    late.set_result([b"late"])
    await brokers.sources.changed.wait()
    await asyncio.sleep(0)
    assert brokers.taken() == [b"late"]


@scenario("a", "b")
async def test_brokers_with_messages_take_turns(brokers: Brokers) -> None:
    brokers.answers = {"a": [[b"a1"], [b"a2"], [b"a3"]], "b": [[b"b1"], [b"b2"], [b"b3"]]}
    for _ in range(4):
        await brokers.ask()
    assert brokers.taken() == [b"a1", b"b1", b"a2", b"b2"]


@scenario("down", "up")
async def test_a_broker_that_fails_rests_and_the_others_go_on(brokers: Brokers) -> None:
    brokers.answers = {"down": [NotReachable("down")], "up": [[b"1"], [b"2"]]}
    await brokers.ask()
    await brokers.ask()
    await brokers.ask()
    assert brokers.pops == [("down", 0), ("up", 0), ("up", 0)]
    assert brokers.taken() == [b"1", b"2"]
    assert brokers.sources.failure() is None


@scenario("down", "forbidden")
async def test_when_all_fail_it_is_said_why(brokers: Brokers) -> None:
    refusal = BrokerError(16, "no permission", "forbidden")
    brokers.answers = {"down": [NotReachable("down")], "forbidden": [refusal]}
    began_s = asyncio.get_running_loop().time()
    await brokers.ask()
    assert brokers.sources.failure() is None
    await brokers.ask()
    assert brokers.sources.failure(began_s) is refusal
    assert brokers.sources.failure(asyncio.get_running_loop().time() + 1) is None


def test_false_alarms_are_answered_more_and_more_slowly() -> None:
    source = Source(broker("a"))
    pauses = []
    for _ in range(4):
        source.rang()
        source.found(Popped(), now_s=100.0)
        pauses.append(source.rests_until_s - 100.0)
    assert pauses == pytest.approx([0.01, 0.02, 0.04, 0.08])
    source.rang()
    source.found(Popped([message(b"at last")]), now_s=200.0)
    assert source.rests_until_s < 200.0
    source.found(Popped(), now_s=200.0)  # nobody had said that there was something
    assert source.rests_until_s < 200.0


@scenario("a", "b")
async def test_a_broker_that_is_gone_is_not_asked_any_more(brokers: Brokers) -> None:
    brokers.sources.set_queues([broker("b")])
    await brokers.ask(wait_ms=5)
    assert brokers.pops == [("b", 5)]
