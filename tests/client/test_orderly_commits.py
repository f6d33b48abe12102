"""Orderly listeners that commit and roll back themselves."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from client.inbox import Inbox, eventually
from skylark.client.errors import InvalidMessage
from skylark.client.listening import (
    Commit,
    ConsumeContext,
    ConsumeHook,
    ConsumeResult,
    ConsumeStatus,
    RollBack,
    Suspend,
)
from skylark.client.message import Message
from skylark.client.producer import Producer
from skylark.client.pulling import Limits
from skylark.client.push_consumer import PushConsumer
from skylark.testing import LocalCluster


def consumer_of(cluster: LocalCluster, inbox: Inbox, **options: Any) -> PushConsumer:
    consumer = PushConsumer(
        cluster.name_servers, "g", listener=inbox, orderly=True, auto_commit=False, from_where="first", suspend_s=0.01,
        **options,
    )  # fmt: skip
    consumer.subscribe("orders")
    return consumer


async def fill(cluster: LocalCluster, *bodies: bytes) -> None:
    async with Producer(cluster.name_servers) as producer:
        for body in bodies:
            await producer.send("orders", body)


def test_what_is_not_committed_comes_again_to_the_next_member() -> None:
    async def run() -> None:
        async with LocalCluster(topics={"orders": 1}) as cluster:
            await fill(cluster, b"0", b"1", b"2", b"3")
            first = Inbox(lambda message: Commit() if message.body == b"1" else None)
            async with consumer_of(cluster, first) as consumer:
                await first.wait(4)
                await eventually(lambda: list(consumer.positions("orders").values()) == [2])
            assert first.bodies == [b"0", b"1", b"2", b"3"]
            second = Inbox(lambda message: Commit() if message.body == b"3" else None)
            async with consumer_of(cluster, second) as consumer:
                await second.wait(2)
                await eventually(lambda: list(consumer.positions("orders").values()) == [4])
            assert second.bodies == [b"2", b"3"]

    asyncio.run(run())


@pytest.mark.parametrize("is_raised", [False, True])
def test_a_roll_back_has_all_since_the_last_commit_come_again(is_raised: bool) -> None:
    rolled_back = False

    def answer(message: Message) -> object:
        nonlocal rolled_back
        if message.body == b"0":
            return Commit()
        if message.body == b"2" and not rolled_back:
            rolled_back = True
            if is_raised:
                raise RollBack
            return RollBack(0.01)
        return Commit() if message.body == b"3" else None

    async def run() -> None:
        async with LocalCluster(topics={"orders": 1}) as cluster:
            await fill(cluster, b"0", b"1", b"2", b"3")
            inbox = Inbox(answer)
            async with consumer_of(cluster, inbox) as consumer:
                await inbox.wait(6)
                await eventually(lambda: list(consumer.positions("orders").values()) == [4])
            assert inbox.bodies == [b"0", b"1", b"2", b"1", b"2", b"3"]
            assert {message.reconsume_times for message in inbox.messages} == {0}

    asyncio.run(run())


def test_suspending_and_failing_are_about_one_message() -> None:
    seen: dict[bytes, int] = {}

    def answer(message: Message) -> object:
        seen[message.body] = seen.get(message.body, 0) + 1
        if seen[message.body] > 1:
            return Commit() if message.body == b"2" else None
        return {b"0": None, b"1": Suspend(0.01), b"2": False}[message.body]

    async def run() -> None:
        async with LocalCluster(topics={"orders": 1}) as cluster:
            await fill(cluster, b"0", b"1", b"2")
            inbox = Inbox(answer)
            async with consumer_of(cluster, inbox) as consumer:
                await inbox.wait(5)
                await eventually(lambda: list(consumer.positions("orders").values()) == [3])
            assert inbox.bodies == [b"0", b"1", b"1", b"2", b"2"]

    asyncio.run(run())


def test_a_dead_letter_leaves_what_is_open_alone() -> None:
    async def run() -> None:
        async with LocalCluster(topics={"orders": 1}) as cluster:
            await fill(cluster, b"0", b"bad", b"2")
            inbox = Inbox(lambda message: {b"0": None, b"bad": False, b"2": Commit()}[message.body])
            async with consumer_of(cluster, inbox, max_reconsume_times=1) as consumer:
                await inbox.wait(4)
                await eventually(lambda: list(consumer.positions("orders").values()) == [3])
            assert inbox.bodies == [b"0", b"bad", b"bad", b"2"]

    asyncio.run(run())


def test_too_much_without_a_commit_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with LocalCluster(topics={"orders": 1}) as cluster:
            await fill(cluster, *[b"x"] * 4)
            inbox = Inbox()
            with caplog.at_level(logging.WARNING, "skylark.client"):
                async with consumer_of(cluster, inbox, limits=Limits(messages=3)):
                    await inbox.wait(3)
                    await eventually(lambda: "wait for a commit of the listener" in caplog.text)

    asyncio.run(run())


def test_too_many_bytes_without_a_commit_are_said_too(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with LocalCluster(topics={"orders": 1}) as cluster:
            await fill(cluster, *[b"x" * 600] * 8)
            inbox = Inbox()
            with caplog.at_level(logging.WARNING, "skylark.client"):
                async with consumer_of(cluster, inbox, limits=Limits(size_bytes=2000), pull_batch_size=1):
                    await inbox.wait(4)
                    await eventually(lambda: "4 messages of orders-0 at broker-a wait for a commit" in caplog.text)
            assert len(inbox.bodies) == 4

    asyncio.run(run())


def test_only_orderly_consumers_that_pull_may_leave_it_to_the_listener() -> None:
    for options in ({}, {"orderly": True, "mode": "pop"}):
        with pytest.raises(InvalidMessage, match="auto_commit can be off for orderly consumers that pull"):
            PushConsumer("localhost:1", "g", auto_commit=False, **options)  # type: ignore[arg-type]


def test_hooks_are_told_of_commits_and_roll_backs() -> None:
    seen: list[tuple[ConsumeResult | None, ConsumeStatus | None]] = []

    class Noting(ConsumeHook):
        def after(self, context: ConsumeContext) -> None:
            seen.append((context.result, context.status))

    answers: list[object] = [None, RollBack(0.01), None, Commit()]

    async def run() -> None:
        async with LocalCluster(topics={"orders": 1}) as cluster:
            await fill(cluster, b"0", b"1")
            inbox = Inbox(lambda message: answers.pop(0))
            async with consumer_of(cluster, inbox, hooks=[Noting()]):
                await eventually(lambda: len(seen) == 4)

    asyncio.run(run())
    assert seen == [
        (ConsumeResult.SUCCESS, ConsumeStatus.DONE_IN_ORDER),
        (ConsumeResult.FAILED, ConsumeStatus.ROLLED_BACK),
        (ConsumeResult.SUCCESS, ConsumeStatus.DONE_IN_ORDER),
        (ConsumeResult.SUCCESS, ConsumeStatus.COMMITTED),
    ]
