"""Pulls from a running broker: the outcomes of a lookup, filters and long polling."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.live import MAY_SUSPEND, Live, live_broker, messages_of
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame


async def waiting_pull(broker: Live, topic: str, offset: int, **more: object) -> asyncio.Task[Frame]:
    """A pull that has been written: the broker sees it before whatever is sent after it."""
    pull = asyncio.create_task(broker.pull(topic, offset, wait_ms=60_000, **more))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    return pull


@pytest.mark.parametrize(
    ("offset", "code", "remark", "following"),
    [
        (0, ResponseCode.SUCCESS, "FOUND", 3),
        (2, ResponseCode.SUCCESS, "FOUND", 3),
        (3, ResponseCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE", 3),
        (9, ResponseCode.PULL_OFFSET_MOVED, "OFFSET_OVERFLOW_BADLY", 3),
        (-1, ResponseCode.PULL_OFFSET_MOVED, "OFFSET_TOO_SMALL", 0),
    ],
)
def test_where_an_offset_leads(tmp_path: Path, offset: int, code: ResponseCode, remark: str, following: int) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            for _ in range(3):
                await broker.send("t")
            answer = await broker.pull("t", offset)
            assert (answer.code, answer.remark) == (code, remark)
            assert answer.fields["nextBeginOffset"] == str(following)
            assert (answer.fields["minOffset"], answer.fields["maxOffset"]) == ("0", "3")
            assert answer.fields["suggestWhichBrokerId"] == "0"

    asyncio.run(run())


def test_an_empty_queue(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.send("t", queueId=1)
            assert (await broker.pull("t", 0)).code == ResponseCode.PULL_NOT_FOUND
            moved = await broker.pull("t", 7)
            assert (moved.code, moved.fields["nextBeginOffset"]) == (ResponseCode.PULL_OFFSET_MOVED, "0")

    asyncio.run(run())


def test_tags_are_filtered_at_the_broker(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            for tag in "abcab":
                await broker.send("t", tag.encode(), {"TAGS": tag})
            answer = await broker.pull("t", 0, tags="a || c")
            assert [m.body for m in messages_of(answer)] == [b"a", b"c", b"a"]
            nothing = await broker.pull("t", 0, tags="z")
            assert nothing.code == ResponseCode.PULL_RETRY_IMMEDIATELY
            assert nothing.fields["nextBeginOffset"] == "5", "what is passed over is not looked at again"

    asyncio.run(run())


def test_a_waiting_pull_is_answered_by_the_next_message(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.send("t", b"first")
            pulls = [await waiting_pull(broker, "t", 1) for _ in range(3)]
            other = await waiting_pull(broker, "t", 0, queueId=1)
            await broker.send("t", b"second")
            for answer in await asyncio.gather(*pulls):
                assert [m.body for m in messages_of(answer)] == [b"second"]
            assert not other.done()
            await broker.send("t", b"third", queueId=1)
            assert [m.body for m in messages_of(await other)] == [b"third"]

    asyncio.run(run())


def test_a_waiting_pull_sleeps_through_tags_it_does_not_want(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.send("t", b"-", {"TAGS": "b"})
            pull = await waiting_pull(broker, "t", 1, tags="a")
            for _ in range(3):
                await broker.send("t", b"-", {"TAGS": "b"})
            assert not pull.done()
            await broker.send("t", b"+", {"TAGS": "a"})
            answer = await pull
            assert [m.body for m in messages_of(answer)] == [b"+"]
            assert answer.fields["nextBeginOffset"] == "5"

    asyncio.run(run())


def test_a_waiting_pull_is_answered_when_its_time_is_up(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.send("t")
            answer = await broker.pull("t", 1, wait_ms=50)
            assert answer.code == ResponseCode.PULL_NOT_FOUND

    asyncio.run(run())


def test_stopping_answers_waiting_pulls_so_that_they_do_not_come_again_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.send("t")
            pull = await waiting_pull(broker, "t", 1)
            await broker.send("other")  # answered after the pull was seen
            await broker.stop()
            assert (await pull).code == ResponseCode.SERVICE_NOT_AVAILABLE

    asyncio.run(run())


def test_a_subscription_comes_from_heartbeats_or_from_the_request(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.send("t", b"a", {"TAGS": "a"})
            unknown = await broker.pull("t", 0, group="g", sysFlag=0)
            assert unknown.code == ResponseCode.SUBSCRIPTION_NOT_EXIST
            await broker.heartbeat("g", "t", version=5)
            assert (await broker.pull("t", 0, group="g", sysFlag=0, subVersion=5)).code == ResponseCode.SUCCESS
            newer = await broker.pull("t", 0, group="g", sysFlag=0, subVersion=6)
            assert newer.code == ResponseCode.SUBSCRIPTION_NOT_LATEST
            sql = await broker.pull("t", 0, tags="a > 1", expressionType="SQL92")
            assert (sql.code, sql.remark) == (
                ResponseCode.SYSTEM_ERROR,
                "The broker does not support consumer to filter message by SQL92",
            )

    asyncio.run(run())


def test_refused_pulls(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, autoCreateSubscriptionGroup=False) as broker:
            assert (await broker.pull("t", 0)).code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
            known = "TOOLS_CONSUMER"
            assert (await broker.pull("t", 0, group=known)).code == ResponseCode.TOPIC_NOT_EXIST
            await broker.send("t")
            assert (await broker.pull("t", 0, group=known, queueId=4)).code == ResponseCode.INVALID_PARAMETER

    asyncio.run(run())


def test_a_pull_commits_the_offset_that_it_brings(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            for _ in range(3):
                await broker.send("t")
            await broker.pull("t", 2, group="g", sysFlag=1 | MAY_SUSPEND | 4, commitOffset=2)
            answer = await broker.ask(RequestCode.QUERY_CONSUMER_OFFSET, consumerGroup="g", topic="t", queueId=0)
            assert answer.fields["offset"] == "2"

    asyncio.run(run())
