"""Where broadcasting members keep their offsets from one start to the next."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from client.inbox import DEADLINE_S, Inbox, numbered
from client.plain import send
from skylark.client import offsets as offsets_module
from skylark.client.offsets import FILE_NAME, LocalOffsets
from skylark.client.places import Place, take
from skylark.client.push_consumer import PushConsumer
from skylark.client.session import Session
from skylark.testing import LocalCluster
from skylark.wire.bodies import MessageQueue

QUEUE = MessageQueue("broker-a", 0, "t")


def left_file(directory: Path, name: str, offset: int, age_s: int, group: str = "g") -> Path:
    path = directory / name / group / FILE_NAME
    path.parent.mkdir(parents=True)
    path.write_text('{"offsetTable":{{"brokerName":"broker-a","queueId":0,"topic":"t"}:' + str(offset) + "}}")
    at_s = path.stat().st_mtime - age_s
    os.utime(path, (at_s, at_s))
    return path


@pytest.fixture
def ended_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def member_of(cluster: LocalCluster, listener: Inbox, directory: Path, session: Session | None = None) -> PushConsumer:
    consumer = PushConsumer(
        cluster.name_servers, "g", listener=listener, model="broadcasting", offsets_directory=directory, session=session
    )
    consumer.subscribe("orders")
    return consumer


@pytest.mark.parametrize("instance", [None, "copier"])
def test_a_restarted_member_gets_what_was_sent_while_it_was_away(tmp_path: Path, instance: str | None) -> None:
    async def main() -> None:
        async with (
            LocalCluster(topics={"orders": 1}) as cluster,
            Session(cluster.name_servers) as session,
        ):
            [queue] = (await session.routes.get("orders")).read_queues
            await send(session, queue, b"before")
            for round in range(3):
                inbox = Inbox()
                own = None if instance is None else Session(cluster.name_servers, instance=instance)
                async with member_of(cluster, inbox, tmp_path, own) as consumer:
                    if round:  # the first start begins at the end, and nothing came while it ran
                        await inbox.wait(4)
                    assert inbox.bodies == (numbered(4, f"away{round - 1}-") if round else [])
                    name = f"{consumer.client_id.partition('@')[0]}@{instance or 'DEFAULT'}"
                    assert {path.name for path in await asyncio.to_thread(tmp_path.glob, "*")} == {name}
                await send(session, queue, *numbered(4, f"away{round}-"))

    asyncio.run(main())


def test_members_side_by_side_have_places_of_their_own(tmp_path: Path) -> None:
    one, two = take(tmp_path, "10.0.0.1@DEFAULT", "g"), take(tmp_path, "10.0.0.1@DEFAULT", "g")
    assert [place.directory.parent.name for place in (one, two)] == ["10.0.0.1@DEFAULT", "10.0.0.1@DEFAULT#2"]
    other = take(tmp_path, "10.0.0.1@DEFAULT", "h")
    assert other.directory == tmp_path / "10.0.0.1@DEFAULT" / "h", "another group"
    one.leave()
    one.leave()
    again = take(tmp_path, "10.0.0.1@DEFAULT", "g")
    assert again.directory == one.directory
    del two  # nobody closed it
    assert take(tmp_path, "10.0.0.1@DEFAULT", "g").directory.parent.name == "10.0.0.1@DEFAULT#2"
    again.leave()


def test_another_process_has_a_place_of_its_own_until_it_ends(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\nfrom skylark.client.places import Place, take\n"
        "place = take(pathlib.Path(sys.argv[1]), 'i@DEFAULT', 'g')\n"
        "print(place.directory.parent.name, flush=True)\nsys.stdin.read()"
    )

    def start() -> subprocess.Popen[str]:
        arguments = [sys.executable, "-c", program, str(tmp_path)]
        return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def name(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    with start() as one:
        assert name(one) == "i@DEFAULT"
        own = take(tmp_path, "i@DEFAULT", "g")
        assert own.directory.parent.name == "i@DEFAULT#2"
        one.kill()
        one.wait(DEADLINE_S)
    with start() as two:
        assert name(two) == "i@DEFAULT", "whoever was killed keeps nothing"
        two.communicate()
    own.leave()


def test_the_newest_file_of_an_earlier_version_is_taken_over(tmp_path: Path, ended_pid: int) -> None:
    left_file(tmp_path, f"i@{ended_pid}#1", 3, age_s=500)
    newest = left_file(tmp_path, f"i@{ended_pid}#2", 7, age_s=400)
    left_file(tmp_path, f"i@{os.getpid()}#3", 9, age_s=300)  # its process still runs
    left_file(tmp_path, f"i@{ended_pid}#4@unit", 11, age_s=200)
    left_file(tmp_path, f"j@{ended_pid}#5", 13, age_s=100)
    left_file(tmp_path, f"i@{ended_pid}#6", 15, age_s=0, group="other")
    offsets = LocalOffsets("i@DEFAULT", "g", tmp_path)
    offsets.load()
    assert offsets.table() == {QUEUE: 7}
    assert not newest.exists()
    second = LocalOffsets("i@DEFAULT", "g", tmp_path)
    second.load()
    assert second.table() == {}, "who runs beside the first has no place from before"
    named = LocalOffsets("i@named", "g", tmp_path)
    named.load()
    assert named.table() == {}
    offsets.close()
    again = LocalOffsets("i@DEFAULT", "g", tmp_path)
    again.load()
    assert again.table() == {QUEUE: 7}


def test_a_directory_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    offsets = LocalOffsets("i@DEFAULT", "g", tmp_path / "file")
    offsets.load()
    assert "can't be kept for one member of g" in caplog.text
    assert offsets.table() == {}
    offsets.close()


def test_a_start_that_was_cancelled_keeps_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is being taken in a thread, which goes on."""

    async def main() -> None:
        has_begun, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

        def slow(directory: Path, lasting_id: str, group: str) -> Place:
            has_begun.set()
            may_end.wait(DEADLINE_S)
            return take(directory, lasting_id, group)

        def load() -> None:
            cancelled.load()
            has_ended.set()

        monkeypatch.setattr(offsets_module, "take", slow)
        cancelled = LocalOffsets("ip@DEFAULT", "g", tmp_path)
        loading = asyncio.create_task(asyncio.to_thread(load))
        await asyncio.to_thread(has_begun.wait, DEADLINE_S)
        loading.cancel()
        await asyncio.wait([loading])
        cancelled.close()
        may_end.set()
        await asyncio.to_thread(has_ended.wait, DEADLINE_S)
        following = LocalOffsets("ip@DEFAULT", "g", tmp_path)
        following.load()
        assert following.path == tmp_path / "ip@DEFAULT" / "g" / FILE_NAME
        following.close()

    asyncio.run(main())
