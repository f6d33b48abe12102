"""`skylark up --brokers N`: brokers in processes of their own that start, serve and end together.

One that dies comes back."""

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from cli.commands import ANY_PORTS, assert_one_clear_line, serving, skylark
from skylark.broker.config import BrokerConfig
from skylark.cli.fleet import BrokerProcess, Order, configs, next_pause_s
from skylark.cli.serving import Failure
from skylark.client.sync import Producer, PullConsumer
from skylark.net.pool import Pool
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame

TWO = ["up", "--brokers", "2", *ANY_PORTS]
NAMES = ["broker-a", "broker-b"]
HOST = "127.0.0.1"
END_DEADLINE_S = 240.0  # only for a process that hangs
POLL_S = 0.02


def children(parent: int) -> dict[str, int]:
    """Name of the broker -> its process, told by the store that it holds open."""
    by_name = {}
    for child in map(int, children_of(parent)):
        files = open_files(child)
        by_name |= {name: child for name in NAMES if any(f"/{name}/" in file for file in files)}
    return by_name


def children_of(parent: int) -> list[str]:
    found = []
    for thread in Path(f"/proc/{parent}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            found += (thread / "children").read_text().split()
    return found


def open_files(pid: int) -> set[str]:
    files = set()
    with contextlib.suppress(FileNotFoundError):  # the process, or the one file, is gone by now
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                files.add(str(path.readlink()))
    return files


def wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + END_DEADLINE_S
    while alive := [pid for pid in pids if is_there(pid)]:
        assert time.monotonic() < deadline, f"processes {alive} are still there"
        time.sleep(POLL_S)


def is_there(pid: int) -> bool:
    """Not ended; an orphan that has stays in the table until the first process of the machine looks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_producer_reaches_both_and_a_signal_stops_both(tmp_path: Path) -> None:
    with serving(*TWO, cwd=tmp_path) as up:
        ready = re.match(r"^ready namesrv=(\S+) broker=127\.0\.0\.1:(\d+);127\.0\.0\.1:(\d+)$", up.ready)
        assert ready is not None, up.ready
        with Producer(ready[1], group="senders") as producer:
            reached = {producer.send("Orders", b"x").queue.broker_name for _ in range(32)}
        assert reached == set(NAMES)
        for port in ready.groups()[1:]:
            socket.create_connection((HOST, int(port) - 2)).close()  # the VIP port
        brokers = children(up.process.pid)
        assert set(brokers) == set(NAMES)
        assert up.stop(signal.SIGTERM) == (0, "", "")
        assert len(up.complaints) <= 1  # the children leave it to their parent
        wait_gone(list(brokers.values()))
    for name in NAMES:
        assert (tmp_path / "data" / name / "commitlog").is_dir()
        assert not (tmp_path / "data" / name / "abort").exists()  # it had the time to stop cleanly


def test_one_that_dies_comes_back_while_the_other_serves(tmp_path: Path) -> None:
    with serving(*TWO, cwd=tmp_path) as up:
        namesrv, port_of_b = re.findall(r"127\.0\.0\.1:\d+", up.ready)[0::2]
        with Producer(namesrv, group="senders") as producer, PullConsumer(namesrv, group="readers") as consumer:
            of = {receipt.queue.broker_name: receipt for receipt in (producer.send("Orders", b"x") for _ in range(32))}
            first = children(up.process.pid)
            os.kill(first["broker-b"], signal.SIGKILL)
            told = up.until_told(r"cli\.fleet: broker-b \(process (\d+)\) ended with status -9: (.*)")
            assert told.groups() == (str(first["broker-b"]), "it is started again in 1 s")
            producer.send("Orders", b"meanwhile", queue=of["broker-a"].queue)
            up.until_told(rf"cli\.fleet: broker-b is back on port {port_of_b.partition(':')[2]} \(process \d+\)")
            up.until_told(r"broker-b/store\.store: data/broker-b: opened in \d+\.\d s after an unclean stop: ")
        with Producer(namesrv, group="senders") as producer, PullConsumer(namesrv, group="readers") as consumer:
            last = producer.send("Orders", b"again", queue=of["broker-b"].queue)
            pulled = consumer.pull(last.queue, last.queue_offset - 1)
            assert [message.body for message in pulled.messages] == [b"x", b"again"]
        second = children(up.process.pid)
        assert second["broker-a"] == first["broker-a"]
        # Whether the signal comes during the pause or the start that follows, the end is a clean one.
        os.kill(second["broker-b"], signal.SIGKILL)
        up.until_told(rf"broker-b \(process {second['broker-b']}\) ended with status -9: it is started again in \d+ s")
        assert up.stop(signal.SIGTERM)[:2] == (0, "")
        assert not is_there(second["broker-a"])
    assert not (tmp_path / "data" / "broker-a" / "abort").exists()


class Pauses:
    """In place of sleeping: each pause is told, and lasts until it is ended."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[float] = asyncio.Queue()
        self._end = asyncio.Event()

    async def __call__(self, pause_s: float) -> None:
        self._end.clear()
        self.begun.put_nowait(pause_s)
        await self._end.wait()

    def end(self) -> None:
        self._end.set()


def an_order(root: Path) -> Order:
    return Order(BrokerConfig(broker_name="broker-a", store_path_root_dir=str(root / "broker-a")), None, verbose=False)


async def ask(port: int, code: RequestCode, body: bytes = b"") -> Frame:
    pool = Pool()
    try:
        return await pool.request(f"{HOST}:{port}", Frame(code, {}, body), END_DEADLINE_S)
    finally:
        pool.close()


def told_of(text: str) -> asyncio.Future[None]:
    """Done when the parent logs it."""
    told: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def look(record: logging.LogRecord) -> bool:
        if text in record.getMessage() and not told.done():
            told.set_result(None)
        return True

    log = logging.getLogger("skylark.cli.fleet")
    log.addFilter(look)
    told.add_done_callback(lambda _: log.removeFilter(look))
    return told


def test_it_is_tried_until_it_starts_and_has_the_settings_as_they_were(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        pauses = Pauses()
        process = BrokerProcess(an_order(tmp_path), pauses)
        port = await process.start(HOST, 0)
        try:
            changed = await ask(port, RequestCode.UPDATE_BROKER_CONFIG, b"maxMessageSize=4711\n")
            assert changed.code == ResponseCode.SUCCESS
            os.kill(children(os.getpid())["broker-a"], signal.SIGKILL)
            assert await pauses.begun.get() == 1
            with socket.create_server((HOST, port)):
                pauses.end()
                assert await pauses.begun.get() == 2
            assert re.search(r"broker-a does not start: .* in use.*; it is tried again in 2 s$", caplog.messages[-1])
            back = told_of(f"broker-a is back on port {port} ")
            pauses.end()
            await back
            assert b"maxMessageSize=4711\n" in (await ask(port, RequestCode.GET_BROKER_CONFIG)).body
        finally:
            await process.stop()
        assert not children(os.getpid())

    asyncio.run(run())


@pytest.mark.parametrize("asked_early", [False, True])
def test_an_end_that_was_asked_for_is_final(asked_early: bool, tmp_path: Path) -> None:
    async def run() -> None:
        pauses = Pauses()
        process = BrokerProcess(an_order(tmp_path), pauses)
        await process.start(HOST, 0)
        child = children(os.getpid())["broker-a"]
        if asked_early:
            process.let_go()
        os.kill(child, signal.SIGTERM)
        if not asked_early:
            assert await pauses.begun.get() == 1
        await process.stop()
        assert not is_there(child)
        assert pauses.begun.empty()
        assert not children(os.getpid())

    asyncio.run(run())


def test_pauses_grow_until_it_stays_up() -> None:
    pauses_s = [0.0]
    for _ in range(8):
        pauses_s.append(next_pause_s(pauses_s[-1], lived_s=3.0))
    assert pauses_s[1:] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert next_pause_s(60, lived_s=60) == 1


def test_no_broker_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    with serving(*TWO, cwd=tmp_path) as up:
        brokers = children(up.process.pid)
        assert len(brokers) == 2
        up.process.kill()
        up.process.wait()
        wait_gone(list(brokers.values()))
    assert not (tmp_path / "data" / "broker-b" / "abort").exists()


def test_what_keeps_one_from_starting_is_said_and_stops_the_rest(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "broker-b").touch()
    done = skylark(*TWO, cwd=tmp_path)
    assert_one_clear_line(done, "cannot write to data/broker-b")
    assert not (tmp_path / "data" / "broker-a" / "abort").exists()


def test_a_port_in_use_is_named_with_its_broker(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = skylark("up", "--brokers", "2", "--namesrv-port", "0", "--broker-port", str(port), cwd=tmp_path)
    assert_one_clear_line(done, f"the broker broker-a cannot listen on 127.0.0.1:{port}: the port is in use")


def test_each_has_a_name_ports_and_directories_of_its_own(tmp_path: Path) -> None:
    common = BrokerConfig(store_path_root_dir=str(tmp_path), store_path_commit_log="logs")
    one, two, three = configs(common, 3)
    assert [each.broker_name for each in (one, two, three)] == ["broker-a", "broker-b", "broker-c"]
    assert [each.listen_port for each in (one, two, three)] == [10911, 10921, 10931]
    assert two.store_path_commit_log == "logs/broker-b"
    assert two.store_path_root_dir == str(tmp_path / "broker-b")
    assert [each.listen_port for each in configs(BrokerConfig(listen_port=0), 2)] == [0, 0]


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="would listen on 65540: choose a lower --broker-port"):
        configs(BrokerConfig(listen_port=65530), 2)
    (tmp_path / "commitlog").mkdir()
    with pytest.raises(Failure, match="has the messages of a single broker"):
        configs(BrokerConfig(store_path_root_dir=str(tmp_path)), 2)


def test_a_setting_that_cannot_be_read_does_not_keep_a_broker_from_coming_back() -> None:
    program = "print('changed', '{' + 'x' * (3 << 20)); raise SystemExit(7)"

    async def main() -> int:
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
        return await BrokerProcess(Order(BrokerConfig(), None, verbose=False))._until_it_ends(child)

    assert asyncio.run(main()) == 7
