"""Offsets of a broadcasting member, in Apache's file, and of a group, at its brokers."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from client.inbox import DEADLINE_S
from client.plain import send
from skylark.client import offsets as offsets_module
from skylark.client.errors import NotReachable, RocketMQError
from skylark.client.offsets import UNKNOWN, LocalOffsets, RemoteOffsets, commit, default_directory
from skylark.client.pulling import pull
from skylark.client.session import Session
from skylark.client.subscriptions import build_subscription
from skylark.testing import LocalCluster
from skylark.wire.bodies import MessageQueue

FIRST = MessageQueue("broker-a", 0, "t")
SECOND = MessageQueue("broker-a", 1, "t")

# Written by Apache's client 5.5.0.
APACHE_FILE = """{
	"offsetTable":{
		{
			"brokerName":"broker-a",
			"queueId":1,
			"topic":"t"
		}:77,
		{
			"brokerName":"broker-a",
			"queueId":0,
			"topic":"t"
		}:5
	}
}"""


def local(directory: Path) -> LocalOffsets:
    return LocalOffsets("10.0.0.1@7#8", "group", directory)


def test_the_file_lies_where_apaches_client_looks() -> None:
    offsets = LocalOffsets("10.0.0.1@7#8", "group")
    assert offsets.path == default_directory() / "10.0.0.1@7#8" / "group" / "offsets.json"
    assert default_directory() == Path.home() / ".rocketmq_offsets"


def test_it_is_written_byte_by_byte_as_apache_does(tmp_path: Path) -> None:
    async def scenario() -> None:
        offsets = local(tmp_path)
        offsets.update(SECOND, 77)
        offsets.update(FIRST, 5)
        await offsets.persist([SECOND, FIRST])
        assert offsets.path.read_text() == APACHE_FILE
        assert await local(tmp_path).fetch(FIRST) == 5

    asyncio.run(scenario())


def test_apaches_file_is_read(tmp_path: Path) -> None:
    offsets = local(tmp_path)
    offsets.path.parent.mkdir(parents=True)
    offsets.path.write_text(APACHE_FILE)
    offsets.load()
    assert offsets.table() == {FIRST: 5, SECOND: 77}
    assert offsets.table("other") == {}


def test_what_is_not_persisted_keeps_its_place_in_the_file(tmp_path: Path) -> None:
    async def scenario() -> None:
        offsets = local(tmp_path)
        offsets.update(FIRST, 1)
        offsets.update(SECOND, 2)
        await offsets.persist([FIRST, SECOND])
        again = local(tmp_path)
        again.update(FIRST, 9)
        await again.persist([FIRST])
        assert again.known(SECOND) == UNKNOWN
        assert await again.fetch(SECOND) == again.known(SECOND) == 2
        assert await again.fetch(FIRST) == 9
        assert await again.fetch(MessageQueue("broker-b", 0, "t")) == UNKNOWN

    asyncio.run(scenario())


@pytest.mark.parametrize("damage", ["", "{", '{"offsetTable":[]}', "\x00\x01"])
def test_a_damaged_file_gives_way_to_the_copy_before_it(tmp_path: Path, damage: str) -> None:
    async def scenario() -> None:
        offsets = local(tmp_path)
        for offset in (1, 2):
            offsets.update(FIRST, offset)
            await offsets.persist([FIRST])
        offsets.path.write_text(damage)
        fresh = local(tmp_path)
        fresh.load()
        assert fresh.known(FIRST) == 1
        fresh.update(FIRST, 3)
        await fresh.persist([FIRST])
        assert await fresh.fetch(FIRST) == 3

    asyncio.run(scenario())


def test_offsets_that_can_not_be_read_are_not_taken_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that begins anew at the last offset would pass over what was sent, and the file would lose its places."""

    def fails(_: Path) -> bytes:
        raise OSError(5, "Input/output error")

    async def scenario() -> None:
        offsets = local(tmp_path)
        offsets.update(FIRST, 1)
        offsets.update(SECOND, 2)
        await offsets.persist([FIRST, SECOND])
        offsets.update(FIRST, 3)
        with monkeypatch.context() as broken:
            broken.setattr(Path, "read_bytes", fails)
            with pytest.raises(RocketMQError, match="can't be read from"):
                await offsets.fetch(FIRST)
            with pytest.raises(RocketMQError, match="can't be read from"):
                local(tmp_path).load()
            await offsets.persist([FIRST])
        assert await offsets.fetch(SECOND) == 2
        await offsets.persist([FIRST])
        assert await offsets.fetch(FIRST) == 3
        for path in (offsets.path, offsets.path.with_name(offsets.path.name + ".bak")):
            path.write_text("{")
        with pytest.raises(RocketMQError, match="damaged"):
            local(tmp_path).load()

    asyncio.run(scenario())


def test_a_commit_that_is_cancelled_is_not_overtaken_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        has_begun, may_end = threading.Event(), threading.Event()
        replace = offsets_module._replace

        def slow(path: Path, content: bytes) -> None:
            if not has_begun.is_set():
                has_begun.set()
                may_end.wait(DEADLINE_S)
            replace(path, content)

        monkeypatch.setattr(offsets_module, "_replace", slow)
        offsets = local(tmp_path)
        offsets.update(FIRST, 1)
        first = asyncio.create_task(offsets.persist([FIRST]))
        await asyncio.to_thread(has_begun.wait, DEADLINE_S)
        first.cancel()
        await asyncio.sleep(0)
        offsets.update(FIRST, 2)
        second = asyncio.create_task(offsets.persist([FIRST]))
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.wait([first, second])
        assert first.cancelled()
        assert await offsets.fetch(FIRST) == 2

    asyncio.run(scenario())


def test_without_any_file_nothing_is_known(tmp_path: Path) -> None:
    offsets = local(tmp_path)
    offsets.load()
    assert offsets.known(FIRST) == UNKNOWN
    assert asyncio.run(offsets.fetch(FIRST)) == UNKNOWN


def test_offsets_move_forward_only_unless_told_otherwise(tmp_path: Path) -> None:
    offsets = local(tmp_path)
    offsets.update(FIRST, 5)
    offsets.update(FIRST, 3)
    assert offsets.known(FIRST) == 5
    offsets.update(FIRST, 3, increase_only=False)
    assert offsets.known(FIRST) == 3
    offsets.forget(FIRST)
    assert offsets.known(FIRST) == UNKNOWN


def test_a_directory_that_cannot_be_written_loses_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        offsets = local(tmp_path)
        offsets.path.parent.parent.mkdir(parents=True)
        offsets.path.parent.write_text("in the way")
        offsets.update(FIRST, 5)
        await offsets.persist([FIRST])
        offsets.path.parent.unlink()
        await offsets.persist([FIRST])
        assert await offsets.fetch(FIRST) == 5

    asyncio.run(scenario())


def test_what_is_stored_does_not_replace_what_is_known(tmp_path: Path) -> None:
    async def scenario() -> None:
        offsets = local(tmp_path)
        offsets.update(FIRST, 5)
        await offsets.persist([FIRST])
        offsets.update(FIRST, 8)
        assert await offsets.fetch(FIRST) == 5
        assert offsets.known(FIRST) == 8

    asyncio.run(scenario())


def test_a_groups_offsets_lie_at_its_broker() -> None:
    async def scenario() -> None:
        async with LocalCluster(topics={"t": 2}) as cluster, Session(cluster.name_servers) as session:
            first, second = (await session.routes.get("t")).read_queues
            offsets = RemoteOffsets(session, "g")
            assert await offsets.fetch(first, is_strict=True) == UNKNOWN
            await send(session, first, b"young")
            assert await offsets.fetch(first, is_strict=True) == UNKNOWN
            assert await offsets.fetch(first) == 0
            everything = build_subscription("t", version=1)
            for group in ("g", "other"):  # a broker makes a group when it first pulls
                await pull(session, group, first, everything, 0, brings_subscription=True)
            offsets.update(first, 5)
            await offsets.persist([first, second])
            assert await RemoteOffsets(session, "g").fetch(first) == 5
            assert await RemoteOffsets(session, "other").fetch(first, is_strict=True) == UNKNOWN

            await cluster.broker.stop()
            offsets.update(first, 6)
            await offsets.persist([first])
            with pytest.raises(NotReachable):
                await offsets.fetch(second)
            await cluster.broker.start()
            await offsets.persist([first])
            assert await RemoteOffsets(session, "g").fetch(first) == 6

    asyncio.run(scenario())


def test_a_commit_that_is_cancelled_is_made_up_for() -> None:
    async def scenario() -> None:
        async with LocalCluster(topics={"t": 1}) as cluster, Session(cluster.name_servers) as session:
            [queue] = (await session.routes.get("t")).read_queues
            await pull(session, "g", queue, build_subscription("t", version=1), 0, brings_subscription=True)
            offsets = RemoteOffsets(session, "g")
            offsets.update(queue, 5)
            await cluster.broker.stop()
            committing = asyncio.create_task(offsets.persist([queue]))
            for _ in range(2):
                await asyncio.sleep(0)  # it has begun, and so has what it began
            committing.cancel()
            await asyncio.gather(committing, return_exceptions=True)
            await cluster.broker.start()
            await offsets.persist([queue])
            assert await RemoteOffsets(session, "g").fetch(queue, is_strict=True) == 5

    asyncio.run(scenario())


@pytest.mark.parametrize("other", [None, 5], ids=["nobody else", "another member"])
def test_a_queue_that_was_given_up_without_a_commit_goes_on_where_it_was(other: int | None) -> None:
    async def scenario() -> None:
        async with LocalCluster(topics={"t": 1}) as cluster, Session(cluster.name_servers) as session:
            [queue] = (await session.routes.get("t")).read_queues
            await pull(session, "g", queue, build_subscription("t", version=1), 0, brings_subscription=True)
            offsets = RemoteOffsets(session, "g")
            offsets.update(queue, 3)
            await offsets.persist([queue])
            offsets.update(queue, 7)
            await cluster.broker.stop()
            await offsets.persist([queue])  # in vain
            offsets.forget(queue)
            await cluster.broker.start()
            if other is not None:
                await commit(session, "g", queue, other, timeout_s=60.0)
            assert await offsets.fetch(queue) == (7 if other is None else other)
            await offsets.persist([queue])
            assert await RemoteOffsets(session, "g").fetch(queue) == (7 if other is None else other)
            offsets.forget(queue)
            assert await offsets.fetch(queue) == (7 if other is None else other)

    asyncio.run(scenario())


def test_a_groups_first_commit_comes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first that come at once, Apache's broker forgets all but one."""
    begun: list[MessageQueue] = []
    first_may_end = asyncio.Event()

    async def wait_at_first(*args: Any) -> None:
        begun.append(args[2])
        if len(begun) == 1:
            await first_may_end.wait()
        await commit(*args)

    monkeypatch.setattr(offsets_module, "commit", wait_at_first)

    async def scenario() -> None:
        async with LocalCluster(topics={"t": 3}) as cluster, Session(cluster.name_servers) as session:
            queues = (await session.routes.get("t")).read_queues
            for queue in queues:
                await pull(session, "g", queue, build_subscription("t", version=1), 0, brings_subscription=True)
            offsets = RemoteOffsets(session, "g")
            for number, queue in enumerate(queues, 5):
                offsets.update(queue, number)
            committing = asyncio.create_task(offsets.persist(queues))
            again = asyncio.create_task(offsets.persist(queues[1:]))
            for _ in range(5):
                await asyncio.sleep(0)  # as far as they get
            assert begun == queues[:1]
            assert [offsets.carried(queue) for queue in queues] == [UNKNOWN] * 3
            first_may_end.set()
            await asyncio.gather(committing, again)
            assert [await RemoteOffsets(session, "g").fetch(queue, is_strict=True) for queue in queues] == [5, 6, 7]
            assert [offsets.carried(queue) for queue in queues] == [5, 6, 7]

    asyncio.run(scenario())
